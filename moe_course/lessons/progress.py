"""What a learner has passed, in one small JSON file, and the tables made of it.

The file is ``$MOE_COURSE_PROGRESS``, or ``moe-course/progress.json`` in the user's state folder. It is written
whole or not at all. No place to write is worth one warning, never an error: a check must not fail over it.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from moe_course.errors import RunError
from moe_course.lessons.exercise import chapters, exercises, quizzes

VERSION = 1
_warned = False


def path() -> Path:
    """Where this user's progress is kept."""
    if named := os.environ.get("MOE_COURSE_PROGRESS"):
        return Path(named).expanduser()
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state, "moe-course", "progress.json").expanduser()


@dataclass(frozen=True)
class Entry:
    """How one exercise or question stands."""

    passed: bool
    """It passed once; later tries do not take that back."""
    held: int
    """Properties that held at the last try."""
    properties: int
    tries: int


def load(file: Path) -> dict[str, Entry]:
    """Exercise id -> entry. Raises OSError or ValueError when the file cannot be read or is not ours."""
    data = json.loads(file.read_text(encoding="utf-8"))
    try:
        return {id: Entry(**entry) for id, entry in data["exercises"].items()}
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError("not a progress file") from error


def record(id: str, *, passed: bool, held: int, properties: int) -> None:
    """Add one try. Prints one line, once per kernel, if it cannot be kept."""
    global _warned
    file = path()
    try:
        known = _known(file)
        before = known.get(id, Entry(False, 0, 0, 0))
        known[id] = Entry(passed or before.passed, held, properties, before.tries + 1)
        _write(file, known)
    except (OSError, ValueError) as error:
        if not _warned:
            reason = getattr(error, "strerror", None) or str(error)
            print(
                f"(progress is not kept: {file}: {reason}. Set MOE_COURSE_PROGRESS to a file you can write.)"
            )
        _warned = True


def _known(file: Path) -> dict[str, Entry]:
    try:
        return load(file)
    except FileNotFoundError:
        return {}
    except ValueError:  # a damaged file must not stop the record for good: keep it aside, start anew
        file.replace(file.with_suffix(".damaged"))
        return {}


def _write(file: Path, entries: dict[str, Entry]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(
        {"version": VERSION, "exercises": {id: vars(e) for id, e in sorted(entries.items())}}, indent=1
    )
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=file.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text + "\n")
        os.replace(name, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


# ---------------------------------------------------------------- tables


def state(entry: Entry | None) -> str:
    if entry is None:
        return "not attempted"
    return "passed" if entry.passed else f"tried ({entry.held} of {entry.properties} properties)"


def print_own(console: Console, file: Path | None = None) -> None:
    """One learner: each exercise, then what to do next."""
    file = file or path()
    try:
        known = load(file)
    except FileNotFoundError:
        known = {}
    except (OSError, ValueError) as error:
        raise RunError(f"{file} cannot be read ({error}). Move it away to start anew.") from error
    table = Table("exercise", "title", "difficulty", "minutes", "state", title="Your progress")
    for chapter in chapters():
        for exercise in exercises(chapter):
            entry = known.get(exercise.id)
            style = "green" if entry and entry.passed else "yellow" if entry else ""
            row = (
                exercise.id,
                exercise.title,
                "." * exercise.difficulty,
                str(exercise.minutes),
                state(entry),
            )
            table.add_row(*row, style=style)
        asked = [quiz.id for quiz in quizzes(chapter)]
        right = sum(known[id].passed for id in asked if id in known)
        if asked:
            table.add_row(f"{chapter}.q", "quiz", "", "", f"{right} of {len(asked)} right", end_section=True)
    console.print(table)
    todo = [e.id for c in chapters() for e in exercises(c) if not (e.id in known and known[e.id].passed)]
    console.print(
        f"Kept in {file}. " + (f"Next: {todo[0]}." if todo else "All exercises pass."), soft_wrap=True
    )


def print_room(console: Console, folder: Path) -> None:
    """Many learners: one row each from the ``*.json`` below ``folder``, then where the room is stuck."""
    files = sorted(folder.rglob("*.json"))
    if not files:
        raise RunError(f"no *.json below {folder}. Collect the learners' progress.json files there.")
    room, unread = {}, []
    for file in files:
        try:
            room[_learner(file, folder)] = load(file)
        except (OSError, ValueError):
            unread.append(file.name)
    ids = [e.id for c in chapters() for e in exercises(c)]
    seen = [id for id in ids if any(id in known for known in room.values())]
    table = Table("learner", "passed", *seen, title=f"{len(room)} learners", caption="v passed, x tried")
    for learner, known in room.items():
        marks = ["" if id not in known else "v" if known[id].passed else "x" for id in seen]
        table.add_row(learner, f"{sum(e.passed for i, e in known.items() if i in ids)} of {len(ids)}", *marks)
    passed = {id: _count(room.values(), id, True) for id in seen}
    table.add_row("passed", "", *(str(n) for n in passed.values()), style="bold")
    console.print(table)
    stuck = {id: _count(room.values(), id, False) for id in seen}
    if stuck and max(stuck.values()):
        worst = max(stuck, key=lambda id: stuck[id])
        console.print(f"Most are stuck at {worst}: {stuck[worst]} tried it and have not passed.")
    elif seen:
        console.print("Nobody is stuck: every exercise that was tried was passed.")
    if unread:
        console.print(f"Not progress files, left out: {', '.join(unread)}", soft_wrap=True)


def _learner(file: Path, folder: Path) -> str:
    """The file's name, or its folder's when every learner's file has the same name."""
    name = file.relative_to(folder).with_suffix("")
    return str(name.parent if name.name == "progress" and name.parent != Path(".") else name)


def _count(room: Iterable[dict[str, Entry]], id: str, passed: bool) -> int:
    return sum(id in known and known[id].passed == passed for known in room)
