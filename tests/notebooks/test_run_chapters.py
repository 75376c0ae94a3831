"""Every chapter runs with nothing solved, and says so. Own file, so own test worker."""

import nbformat
import pytest

from moe_course.lessons import build
from tests.notebooks import guard

SOURCES = build.sources()


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=[path.stem for path in SOURCES])
def test_chapter_runs_and_is_not_attempted(source, tmp_path):
    chapter = nbformat.read(build.targets(source)[1], as_version=4)
    copied = tmp_path / f"{source.stem}.ipynb"
    nbformat.write(guard.with_expectations(chapter), copied)
    verdict = guard.validate(copied)
    assert verdict.first == "", (
        f"{verdict.failed} of {verdict.cells} cells fail; the first is {verdict.first}"
    )
    assert verdict.cells
