"""Interleaved timing: how this package compares two programs on a machine that is never quiet."""

import statistics
import time
from collections.abc import Callable, Mapping

import jax


def interleaved(candidates: Mapping[str, Callable], rounds: int = 7) -> dict[str, list[float]]:
    """Seconds per call of each candidate, one call each per round, after one call to compile and warm up.

    Candidates take no arguments and return JAX arrays. Neighbours in time share the machine's mood, so
    compare them round by round (:func:`median_ratio`), not by their totals. The order turns each round.
    """
    names = list(candidates)
    for name in names:
        jax.block_until_ready(candidates[name]())
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.perf_counter()
            jax.block_until_ready(candidates[name]())
            seconds[name].append(time.perf_counter() - start)
    return seconds


def median_ratio(seconds: Mapping[str, list[float]], theirs: str, ours: str) -> float:
    """Median over rounds of ``theirs / ours``: how many times faster ours is."""
    return statistics.median(t / o for t, o in zip(seconds[theirs], seconds[ours], strict=True))
