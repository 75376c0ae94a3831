"""The course's side of the notebooks: exercises and their checks, hints, progress, pictures, the builder.

In a notebook::

    from moe_course.lessons import check, hint, predict, quiz, rounded, yours
"""

from moe_course.lessons.check import check, hint, predict, quiz, yours
from moe_course.lessons.compare import rounded

__all__ = ["check", "hint", "predict", "quiz", "rounded", "yours"]
