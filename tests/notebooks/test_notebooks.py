"""The notebooks on disk: built from their sources, fit to be judged, chapter and solution of one piece."""

import nbformat
import pytest

from moe_course.lessons import build, exercise
from tests.notebooks import guard

SOURCES = build.sources()
each_source = pytest.mark.parametrize("source", SOURCES, ids=[path.stem for path in SOURCES])


def test_there_are_notebooks():
    assert SOURCES
    assert {path.stem for path in SOURCES} == {
        path.stem for path in (build.root() / "chapters").glob("*.ipynb")
    }
    assert {path.stem[:2] for path in SOURCES} >= set(exercise.chapters())


@each_source
def test_built_from_this_source(source):
    assert build.out_of_date(source) == [], "run: make notebooks"


@each_source
def test_can_be_judged(source):
    assert guard.faults(build.targets(source)[0]) == []


@each_source
def test_every_call_of_the_solution_succeeds(source):
    """What the committed solution printed: all properties, right answers, predictions that agree."""
    for cell in nbformat.read(build.targets(source)[0], as_version=4).cells:
        made = guard.calls(cell.source) if cell.cell_type == "code" else []
        text = "".join(output.get("text", "") for output in (cell.outputs if made else ()))
        for function, what in made:
            if function == "check":
                title = exercise.find(what).title
                (line,) = [x for x in text.splitlines() if x.startswith(f"{what}  {title}   ")]
                held, _, total, *_ = line.removeprefix(f"{what}  {title}").split()
                assert held == total, line
            elif function == "quiz":
                assert f"{what}   right. " in text
            else:
                (line,) = [x for x in text.splitlines() if x.startswith(f"{what}: predicted ")]
                assert line.endswith("they agree")


@each_source
def test_registry_and_notebook_have_the_same_ids(source):
    cells = [c for c in nbformat.read(build.targets(source)[0], as_version=4).cells if c.cell_type == "code"]
    made = [call for cell in cells for call in guard.calls(cell.source)]
    number = source.name[:2]
    assert [what for function, what in made if function == "check"] == [
        e.id for e in exercise.exercises(number)
    ]
    assert [what for function, what in made if function == "quiz"] == [q.id for q in exercise.quizzes(number)]


@each_source
def test_chapter_is_the_solution_outside_the_regions(source):
    """Line by line, without the code that made the chapter."""
    solution, chapter = (nbformat.read(path, as_version=4) for path in build.targets(source))
    assert len(solution.cells) == len(chapter.cells)
    for ours, theirs in zip(solution.cells, chapter.cells, strict=True):
        assert (ours.id, ours.cell_type) == (theirs.id, theirs.cell_type)
        assert "".join(theirs.source.split()) == "".join(stubbed(ours.source).split())
        assert not theirs.get("outputs")


def stubbed(source: str) -> str:
    lines, inside = [], False
    for line in source.splitlines():
        mark = line.strip().partition("### ")[2].split()
        if len(mark) == 2 and mark[1] in build.REGIONS:
            inside = mark[0] == "BEGIN"
            lines += [build.REGIONS[mark[1]]] if inside else []
        elif not inside:
            lines.append(line)
    return "\n".join(lines)


@each_source
def test_chapter_holds_no_solution(source):
    """An author's slip: a gap whose answer stands in the chapter all the same."""
    text = build.targets(source)[1].read_text()
    assert "BEGIN SOLUTION" not in text
    assert "BEGIN ANSWER" not in text
    number = source.name[:2]
    assert text.count("exercise: write this") >= len(exercise.exercises(number))
