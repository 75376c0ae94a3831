from moe_course.bench import main

main()
