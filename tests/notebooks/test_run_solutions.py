"""Every cell of every solution prints what it printed when it was built. Own file, so own test worker."""

import nbformat
import pytest

from moe_course.lessons import build
from tests.notebooks import guard

SOURCES = build.sources()


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=[path.stem for path in SOURCES])
def test_solution(source):
    solution = build.targets(source)[0]
    verdict = guard.validate(solution)
    assert verdict.first == "", (
        f"{verdict.failed} of {verdict.cells} cells fail; the first is {verdict.first}"
    )
    assert verdict.cells == sum(c.cell_type == "code" for c in nbformat.read(solution, as_version=4).cells)
