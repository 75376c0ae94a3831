"""What an exercise is: its text, its hints, and the properties that a right answer has.

A chapter's exercises live in ``chNN_name.py``, as ``EXERCISES`` and ``QUIZZES``; :func:`find` imports that
module when an id of its chapter is asked for. A property is a function of the learner's function::

    @holds("weights of a token sum to the scaling factor")
    def sums(fn) -> int:
        for case in CASES: ...; raise Broken(case, yours, expected, why)
        return len(CASES)  # how many cases were checked
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


class Broken(Exception):
    """A property that does not hold, on one case. All four are text for the learner."""

    def __init__(self, case: str, yours: str, expected: str, why: str = "", where: str = ""):
        super().__init__(f"{case}: {yours}, not {expected}")
        self.case, self.yours, self.expected, self.why, self.where = case, yours, expected, why, where


@dataclass(frozen=True)
class Property:
    """A named claim about the learner's function. ``check`` returns the number of cases, or raises Broken."""

    name: str
    check: Callable[[Callable], int]


def holds(name: str) -> Callable[[Callable[[Callable], int]], Property]:
    """Decorator: the function becomes the :class:`Property` of that name."""
    return lambda check: Property(name, check)


@dataclass(frozen=True)
class Exercise:
    id: str
    """Chapter and number, ``"02.3"``. What :func:`check` is called with; never changes once published."""
    title: str
    goal: str
    """One sentence."""
    difficulty: int
    """1 (reading) to 5 (an evening)."""
    minutes: int
    used_again: tuple[str, ...]
    """Chapters that build on it."""
    hints: tuple[str, str, str, str]
    """Idea (a question), shapes, nearly code, solution (code that passes the check, where tests run it)."""
    properties: tuple[Property, ...] = field(repr=False)

    def __post_init__(self) -> None:
        names = [p.name for p in self.properties]
        if not 1 <= self.difficulty <= 5 or len(self.hints) != 4 or not names or len(set(names)) < len(names):
            raise ValueError(f"{self.id}: difficulty 1 to 5, four hints, and properties of different names")

    @property
    def chapter(self) -> str:
        return self.id.partition(".")[0]


@dataclass(frozen=True)
class Quiz:
    """A question that the notebook asks in prose, ``id`` like ``"02.q1"``."""

    id: str
    right: str | float | int
    """The right letter, or a number."""
    lines: Mapping[str | float | int, str]
    """Answer -> what it teaches; the right answer's line says why it is right."""
    otherwise: str = "Not one of the answers offered."
    within: float = 0.0
    """Relative error that a number may have."""

    def __post_init__(self) -> None:
        if self.right not in self.lines:
            raise ValueError(f"{self.id}: the right answer needs a line that says why")

    def is_right(self, answer) -> bool:
        if isinstance(self.right, str):
            return answer == self.right
        return abs(answer - self.right) <= self.within * abs(self.right)


class UnknownExercise(KeyError):
    """No exercise or question has this id; the message says which there are."""

    def __str__(self) -> str:
        return self.args[0]


def chapters() -> list[str]:
    """Chapters that have exercises, as ``["02", ...]``."""
    return sorted(_modules())


def exercises(chapter: str) -> tuple[Exercise, ...]:
    """The exercises of a chapter (``"02"``) in order; empty for a chapter without."""
    return getattr(_chapter(chapter), "EXERCISES", ())


def quizzes(chapter: str) -> tuple[Quiz, ...]:
    """The questions of a chapter in order."""
    return getattr(_chapter(chapter), "QUIZZES", ())


def find(id: str) -> Exercise:
    """The exercise with this id. Raises :class:`UnknownExercise`."""
    return _find(id, exercises, "exercise")


def find_quiz(id: str) -> Quiz:
    """The question with this id. Raises :class:`UnknownExercise`."""
    return _find(id, quizzes, "question")


def _find(id, listed, kind):
    chapter = str(id).partition(".")[0]
    there = {item.id: item for item in listed(chapter)}
    if id not in there:
        known = (
            f"Chapter {chapter} has {', '.join(there)}." if there else f"Chapters: {', '.join(chapters())}."
        )
        raise UnknownExercise(f"there is no {kind} {id!r}. {known}")
    return there[id]


def _chapter(chapter: str):
    name = _modules().get(chapter)
    return importlib.import_module(name) if name else None


def _modules() -> dict[str, str]:
    files = Path(__file__).parent.glob("ch[0-9][0-9]_*.py")
    return {file.stem[2:4]: f"moe_course.lessons.{file.stem}" for file in files}
