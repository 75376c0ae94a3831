"""What notebooks call: ``check``, ``hint``, ``yours``, ``quiz``, ``predict``. All print; none raises."""

import os
import textwrap
from collections.abc import Callable

from IPython import get_ipython

from moe_course.lessons import progress
from moe_course.lessons.compare import show
from moe_course.lessons.exercise import Exercise, UnknownExercise, find, find_quiz
from moe_course.lessons.learner import Outcome, examine

STEPS = ("idea", "shapes", "nearly code", "solution")
_passed: dict[str, Callable] = {}
_hints_given: dict[str, int] = {}


class Result:
    """Whether a check passed: true or false. Shows as nothing at the end of a notebook cell."""

    def __init__(self, passed: bool, held: int = 0, properties: int = 0, cases: int = 0):
        self.passed, self.held, self.properties, self.cases = passed, held, properties, cases

    def __bool__(self) -> bool:
        return self.passed

    def _ipython_display_(self) -> None:
        """The text above it said everything."""


def check(id: str, fn: Callable) -> Result:
    """Check a function against every property of exercise ``id``, print what holds, keep the result.

    A stub is "not attempted". Whatever else the function does, raise, loop over NumPy, return nonsense,
    becomes a line that says so; only Ctrl-C gets through.
    """
    try:
        exercise = find(id)
    except UnknownExercise as error:
        print(error)
        return Result(False)
    outcome = examine(exercise, fn)
    print(report(exercise, outcome))
    _passed.pop(id, None)
    if outcome.passed:
        _passed[id] = fn
    if outcome.attempted:
        progress.record(id, passed=outcome.passed, held=outcome.held, properties=outcome.properties)
    return Result(outcome.passed, outcome.held, outcome.properties, outcome.cases)


def report(exercise: Exercise, outcome: Outcome) -> str:
    """The lines that :func:`check` prints. The first failure in full, the others by name."""
    name = f"{exercise.id}  {exercise.title}"
    if not outcome.attempted:
        return f"{name}   not attempted"
    if outcome.passed:
        again = f"   used again in {', '.join(exercise.used_again)}" if exercise.used_again else ""
        held = tinted(f"{outcome.held} of {outcome.properties} properties", good=True)
        return f"{name}   {held}, {outcome.cases} cases{again}"
    lines = [f"{name:<42}  {outcome.held} of {outcome.properties} properties hold"]
    for i, failure in enumerate(outcome.failures):
        lines.append(tinted(f"  x {failure.name}", good=False))
        if i == 0:
            lines += [part for line in failure.lines for part in _wrapped(line)]
    given = _hints_given.get(exercise.id, 0)
    if given < len(STEPS):
        lines.append(f'  Stuck? hint("{exercise.id}") gives {"a" if given == 0 else "the next"} hint.')
    return "\n".join(lines)


def tinted(text: str, *, good: bool) -> str:
    """``text`` in green or red where a person runs a notebook; plain in built notebooks and elsewhere."""
    if get_ipython() is None or os.environ.get("MOE_COURSE_STATIC"):
        return text
    return f"\x1b[{32 if good else 31}m{text}\x1b[0m"


def _wrapped(line: str) -> list[str]:
    """Prose at the width of a notebook's output; numbers and code as they are."""
    if line.startswith(("yours", "expected", "case", "line ")):
        return ["      " + line]
    return textwrap.wrap(line, 100, initial_indent="      ", subsequent_indent="      ") or [""]


def hint(id: str) -> None:
    """Print the next of an exercise's four hints: idea, shapes, nearly code, solution."""
    try:
        exercise = find(id)
    except UnknownExercise as error:
        print(error)
        return
    step = min(_hints_given.get(id, 0), len(STEPS) - 1)
    _hints_given[id] = step + 1
    text = exercise.hints[step].strip()
    text = "\n".join(textwrap.fill(line, 100) for line in text.splitlines()) if step < 2 else text
    print(f"{id}  hint {step + 1} of {len(STEPS)}: {STEPS[step]}\n\n{text}")


def yours(id: str, default: Callable) -> Callable:
    """The learner's function if it passed ``check(id, ...)`` in this kernel, else ``default``."""
    return _passed.get(id, default)


def quiz(id: str, answer) -> Result:
    """Say whether an answer is right, and what it teaches. ``...`` stands for no answer."""
    try:
        question = find_quiz(id)
    except UnknownExercise as error:
        print(error)
        return Result(False)
    if answer is ...:
        print(f"{id}   not answered: put your answer in place of the dots")
        return Result(False)
    key = answer.strip().lower() if isinstance(answer, str) else answer
    try:
        right = bool(question.is_right(key))
        line = question.lines.get(question.right if right else key, question.otherwise)
    except (TypeError, ValueError):  # not a thing that can be compared or looked up
        right, line = False, question.otherwise
    verdict = "right" if right else "not yet"
    text = textwrap.fill(f"{id}   {verdict}. {line}", 100, subsequent_indent="  ")
    print(text.replace(verdict, tinted(verdict, good=right), 1))
    progress.record(id, passed=right, held=int(right), properties=1)
    return Result(right, int(right), 1, 1)


def predict(what: str, prediction, measured: float, *, unit: str = "", within: float = 0.0) -> Result:
    """Compare a prediction with the measurement. Without a prediction (``...``) nothing is given away.

    Args:
      prediction: a number, or ``...``.
      within: relative difference that still counts as agreement; 0 asks for the exact number.
    """
    unit = f" {unit}" if unit else ""
    if prediction is ...:
        print(f"{what}: no prediction yet. Put a number in place of the dots, then run the cell.")
        return Result(False)
    try:
        guess, found = float(prediction), float(measured)
    except (TypeError, ValueError):
        print(f"{what}: a prediction is a number, not {type(prediction).__name__}.")
        return Result(False)
    agree = abs(guess - found) <= within * abs(found)
    guess, found = (int(x) if x.is_integer() else x for x in (guess, found))
    verdict = (
        "they agree" if agree else f"off by a factor of {show(guess / found)}" if found else "they differ"
    )
    print(f"{what}: predicted {show(guess)}{unit}, measured {show(found)}{unit}: {verdict}")
    return Result(agree, int(agree), 1, 1)
