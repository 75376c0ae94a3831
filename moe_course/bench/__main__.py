"""``python -m moe_course.bench NAME``."""

from moe_course.bench import main

if __name__ == "__main__":
    main()
