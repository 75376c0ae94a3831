"""Seconds that each solution notebook takes to run, kernel start included."""

import time
from dataclasses import dataclass

from moe_course.lessons.build import read, sources
from moe_course.lessons.execute import execute


@dataclass(frozen=True)
class Options:
    chapters: tuple[str, ...] = ()
    """Numbers, such as 02; all if none is given."""


def run(options: Options) -> dict:
    """``{"02_routing": seconds, ...}``; the notebooks on disk stay as they are."""
    return {source.stem: _seconds(source) for source in sources(options.chapters)}


def _seconds(source) -> float:
    notebook = read(source)
    started = time.perf_counter()
    execute(notebook, source.parent)
    return round(time.perf_counter() - started, 1)
