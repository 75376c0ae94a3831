"""Language models put together from ``moe_course.layers``."""
