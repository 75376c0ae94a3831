"""``make notebooks``: from ``solutions/NN_name.py`` to the executed solution and the chapter with gaps.

The source is a jupytext percent script. A region between ``### BEGIN SOLUTION`` and ``### END SOLUTION`` is
the body of an exercise, one between ``### BEGIN ANSWER`` and ``### END ANSWER`` an argument that the reader
gives; the chapter has a stub in place of each and differs in nothing else. Ids come from content and outputs
are kept when they say the same, so building twice gives the same bytes.
"""

import copy
import hashlib
import io
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

import moe_course
from moe_course.errors import RunError, SettingError
from moe_course.lessons.execute import execute

REGIONS = {"SOLUTION": 'raise NotImplementedError("exercise: write this")', "ANSWER": "...,"}
"""What marks a region, and what stands there in the chapter."""

METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
IGNORED = "nbval-ignore-output"
"""Tag of a cell whose output is not compared (a timing)."""


@dataclass(frozen=True)
class Options:
    chapters: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Numbers, such as 02 05; all if none is given."""
    check: bool = False
    """Change and run nothing; exit with 1 if a notebook is not what its source makes."""


def root() -> Path:
    """The checkout. RunError outside one."""
    for folder in (Path(moe_course.__file__).parents[1], Path.cwd()):
        if (folder / "solutions").is_dir():
            return folder
    raise RunError("there is no solutions/ here. Run this in a checkout of the course.")


def sources(chapters: tuple[str, ...] = (), top: Path | None = None) -> list[Path]:
    """``solutions/NN_*.py`` in order, all or these chapters."""
    found = sorted((top or root()).glob("solutions/[0-9][0-9]_*.py"))
    numbers = [path.name[:2] for path in found]
    if missing := sorted(set(chapters) - set(numbers)):
        raise SettingError(f"there is no chapter {missing[0]}. The chapters are {', '.join(numbers)}.")
    return [path for path in found if not chapters or path.name[:2] in chapters]


def build(options: Options) -> int:
    """Make the notebooks, or check them; prints a line for each. Exit code 0 or 1."""
    stale = 0
    for source in sources(options.chapters):
        solution, chapter = targets(source)
        started = time.perf_counter()
        if options.check:
            faults = out_of_date(source)
            stale += bool(faults)
            print(f"{source.stem}   {'; '.join(faults) or 'up to date'}")
            continue
        made = make(source)
        written = [write(path, text) for path, text in zip((solution, chapter), made, strict=True)]
        verdict = "written" if any(written) else "unchanged"
        print(f"{source.stem}   {time.perf_counter() - started:.0f} s, {verdict}", flush=True)
    if stale:
        print("Run: make notebooks")
    return 1 if stale else 0


def targets(source: Path) -> tuple[Path, Path]:
    """The solution notebook beside ``source``, and the chapter."""
    return source.with_suffix(".ipynb"), source.parents[1] / "chapters" / f"{source.stem}.ipynb"


def make(source: Path) -> tuple[str, str]:
    """Run ``source``; the solution and the chapter as text. What says the same keeps the outputs it had."""
    notebook = execute(read(source), source.parent)
    solution, _ = targets(source)
    if solution.exists():
        keep_outputs(notebook, _load(solution), sanitizer(source.parents[1]))
    number_cells(notebook)
    return dump(notebook), dump(chapter_of(notebook))


def out_of_date(source: Path) -> list[str]:
    """What, apart from outputs, is not as ``source`` would make it."""
    solution, chapter = targets(source)
    faults = [
        f"{path.parent.name}/{path.name} is missing" for path in (solution, chapter) if not path.exists()
    ]
    if faults:
        return faults
    made = _load(solution)
    if dump(without_outputs(made)) != dump(read(source)):
        faults.append("the solution's cells differ from its source")
    if dump(made) != solution.read_text(encoding="utf-8"):
        faults.append("the solution is not in canonical form")
    if dump(chapter_of(made)) != chapter.read_text(encoding="utf-8"):
        faults.append("the chapter is not the solution without its regions")
    return faults


# ---------------------------------------------------------------- notebooks


def read(source: Path):
    """The source as a notebook without outputs: content ids, our metadata."""
    import jupytext
    import nbformat

    raw = jupytext.reads(source.read_text(encoding="utf-8"), fmt="py:percent")
    notebook = nbformat.v4.new_notebook(metadata=copy.deepcopy(METADATA), cells=raw.cells)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    seen: dict[str, int] = {}
    for cell in notebook.cells:
        digest = hashlib.sha256(f"{cell.cell_type}\0{cell.source}".encode()).hexdigest()[:8]
        seen[digest] = seen.get(digest, 0) + 1
        cell.id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
        tags = cell.metadata.get("tags")
        cell.metadata = {"tags": tags} if tags else {}
    return nbformat.from_dict(notebook)


def without_outputs(notebook):
    notebook = copy.deepcopy(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook


def chapter_of(notebook):
    """The notebook with a stub for each region and no outputs."""
    from nbgrader.preprocessors import ClearSolutions

    chapter = without_outputs(notebook)
    for mark, stub in REGIONS.items():
        clear = ClearSolutions(
            code_stub={"python": stub},
            begin_solution_delimeter=f"### BEGIN {mark}",
            end_solution_delimeter=f"### END {mark}",
            enforce_metadata=False,
        )
        chapter, _ = clear.preprocess(chapter, {})
    return chapter


def number_cells(notebook) -> None:
    """Execution counts 1, 2, 3, ..., and only the metadata that is ours."""
    notebook.metadata = copy.deepcopy(METADATA)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for count, cell in enumerate(code, 1):
        cell.execution_count = count
        cell.metadata = {"tags": cell.metadata["tags"]} if cell.metadata.get("tags") else {}
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = count


def dump(notebook) -> str:
    """Canonical text: nbformat's own, keys sorted, with a newline at the end."""
    from nbformat import v4

    return v4.writes(notebook) + "\n"


def write(path: Path, text: str) -> bool:
    """Write, if that changes the file."""
    path.parent.mkdir(exist_ok=True)
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    path.write_text(text, encoding="utf-8")
    return True


def _load(path: Path):
    import nbformat

    return nbformat.read(path, as_version=4)


# ---------------------------------------------------------------- outputs that say the same


def sanitizer(top: Path):
    """Text -> text, with what may differ between machines replaced, as nbval does in our tests."""
    from nbval.plugin import get_sanitize_patterns

    patterns = get_sanitize_patterns(
        (top / "tests" / "notebooks" / "sanitize.cfg").read_text(encoding="utf-8")
    )

    def sanitize(text: str) -> str:
        for regex, replacement in patterns:
            text = re.sub(regex, replacement, text)
        return text

    return sanitize


def keep_outputs(new, old, sanitize) -> None:
    """Give each cell of ``new`` the outputs it had in ``old`` if they say the same.

    Text must be equal after ``sanitize``, pictures pixel by pixel up to anti-aliasing. An ignored cell keeps
    its output while no code before it changed.
    """
    before = {cell.id: cell for cell in old.cells}
    sources = [[c.source for c in nb.cells if c.cell_type == "code"] for nb in (new, old)]
    code = [cell for cell in new.cells if cell.cell_type == "code"]
    for i, cell in enumerate(code):
        known = before.get(cell.id)
        if known is None or known.cell_type != "code" or known.source != cell.source:
            continue
        ignored = IGNORED in cell.metadata.get("tags", ()) and sources[0][: i + 1] == sources[1][: i + 1]
        if ignored or say_the_same(cell.outputs, known.outputs, sanitize):
            cell.outputs = known.outputs


def say_the_same(a: list, b: list, sanitize) -> bool:
    return len(a) == len(b) and all(_same_output(x, y, sanitize) for x, y in zip(a, b, strict=True))


def _same_output(a, b, sanitize) -> bool:
    if a.output_type != b.output_type or a.get("name") != b.get("name"):
        return False
    if a.output_type == "stream":
        return sanitize(a.text) == sanitize(b.text)
    one, other = a.get("data", {}), b.get("data", {})
    return one.keys() == other.keys() and all(
        same_picture(one[mime], other[mime])
        if mime == "image/png"
        else sanitize(one[mime]) == sanitize(other[mime])
        for mime in one
    )


def same_picture(a: str, b: str, most: float = 0.25) -> bool:
    """Whether two PNGs (base64) differ at most by rounding: a changed digit changes some pixel by more."""
    import base64

    import matplotlib.image
    import numpy as np

    if a == b:
        return True
    one, other = (matplotlib.image.imread(io.BytesIO(base64.b64decode(x))) for x in (a, b))
    return one.shape == other.shape and bool(np.abs(one - other).max() < most)
