"""Do the exercises' checks reject wrong answers, and accept right ones that look different?

``tests/notebooks/mutants/chNN.py`` holds both, as functions marked with :func:`mutant` and
:func:`alternative`. Every mutant must be rejected, every alternative accepted.
"""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax

from moe_course.errors import RunError
from moe_course.lessons.build import root
from moe_course.lessons.exercise import chapters, exercises, find
from moe_course.lessons.learner import examine

DEVICES = 8
"""As in a notebook: chapter 07's checks exchange rows between them."""


@dataclass(frozen=True)
class Options:
    chapters: tuple[str, ...] = ()
    """Numbers, such as 02; all if none is given."""


@dataclass(frozen=True)
class Attempt:
    """An answer to an exercise, and whether it is right."""

    id: str
    says: str
    """What is wrong with it, or different about it."""
    fn: Callable
    right: bool


_collected: list[Attempt] = []


def mutant(id: str, says: str) -> Callable[[Callable], Callable]:
    """Decorator: a wrong answer that a person could give. Kept in a list; the function is returned."""
    return _marker(id, says, right=False)


def alternative(id: str, says: str) -> Callable[[Callable], Callable]:
    """Decorator: a right answer unlike the solution."""
    return _marker(id, says, right=True)


def _marker(id: str, says: str, right: bool):
    def mark(fn: Callable) -> Callable:
        _collected.append(Attempt(id, says, fn, right))
        return fn

    return mark


def attempts(chapter: str) -> list[Attempt]:
    """The marked functions of ``tests/notebooks/mutants/chNN.py``. RunError outside a checkout."""
    file = root() / "tests" / "notebooks" / "mutants" / f"ch{chapter}.py"
    if not file.is_file():
        raise RunError(f"there is no {Path(*file.parts[-4:])}: the wrong answers of chapter {chapter}.")
    _collected.clear()
    spec = importlib.util.spec_from_file_location(f"moe_course_mutants_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return list(_collected)


def rejected(attempt: Attempt) -> bool:
    """Whether the exercise's check fails it. A function that says it is not written yet is not rejected."""
    outcome = examine(find(attempt.id), attempt.fn, first_failure=True)
    return outcome.attempted and not outcome.passed


def run(options: Options) -> dict:
    """``{"exercises", "mutants", "killed", "alternatives", "accepted"}``, and by name what went wrong."""
    asked = options.chapters or tuple(chapters())
    found = [attempt for chapter in asked for attempt in attempts(chapter)]
    verdicts = []
    for id in sorted({attempt.id for attempt in found}):
        verdicts += [(a, rejected(a)) for a in found if a.id == id]
        jax.clear_caches()  # hundreds of small programs, and no other exercise calls them
    survivors = [f"{a.id} {a.says}" for a, fails in verdicts if not a.right and not fails]
    refused = [f"{a.id} {a.says}" for a, fails in verdicts if a.right and fails]
    wrong = sum(not a.right for a in found)
    return {
        "exercises": sum(len(exercises(chapter)) for chapter in asked),
        "mutants": wrong,
        "killed": wrong - len(survivors),
        "alternatives": len(found) - wrong,
        "accepted": len(found) - wrong - len(refused),
        "survivors": survivors,
        "refused": refused,
    }
