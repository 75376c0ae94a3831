"""Chapter 00, start here: shares of a load, and the audit of a ledger."""

import jax
import numpy as np

from moe_course.lessons.compare import close, items, same
from moe_course.lessons.exercise import holds

# ---------------------------------------------------------------- 00.1 shares


def shared(load) -> np.ndarray:
    load = np.asarray(load, np.float64)
    return load / max(load.sum(), 1.0)


def _share(fn, load, case, why="") -> None:
    load = np.asarray(load, np.int32)
    right = shared(load)
    suspects = {
        "This divides by the number of experts. Divide by the number of copies.": load / max(len(load), 1),
        "This divides by the busiest expert. Divide by the number of copies.": load / max(load.max(), 1),
        "This is in percent. Shares add up to 1.": 100 * right,
        "Whole numbers divided with // lose their fraction.": np.floor(right),
    }
    close(fn(load), right, case=case, axes=("expert",), why=why, terms=len(load), suspects=suspects)


@holds("each expert's share of the copies")
def some_loads(fn) -> int:
    cases = ((1, 2, 3, 2), (5, 0, 11), (7,), tuple(np.random.default_rng(0).integers(0, 5000, 16)))
    for load in cases:
        _share(fn, load, f"load {list(map(int, load))[:8]}{', ...' if len(load) > 8 else ''}")
    return len(cases)


@holds("no copies at all: every share is 0")
def no_copies(fn) -> int:
    _share(fn, (0, 0, 0), "load [0, 0, 0]", "0 / 0 is NaN. Divide by at least 1.")
    return 1


# ---------------------------------------------------------------- 00.2 audit


def audited(ledger) -> tuple[np.ndarray, np.ndarray]:
    """(dropped [S], where [S]), one step and one column at a time."""
    ledger = np.asarray(ledger)
    dropped = ledger[:, 0] - ledger[:, -1]
    where = np.zeros(len(ledger), np.int64)
    for s, row in enumerate(ledger):
        for stage in range(1, len(row)):
            if row[stage] != row[stage - 1]:
                where[s] = stage
                break
    return dropped, where


def _audit(fn, ledger, case, why="") -> None:
    ledger = np.asarray(ledger, np.int32).reshape(-1, 5)
    dropped, where = items(fn(ledger), 2, case=case, names="dropped, where")
    lost, first = audited(ledger)
    changed = np.diff(ledger, axis=1) != 0
    any_change = changed.any(axis=1)
    last = np.where(any_change, 4 - np.argmax(changed[:, ::-1], axis=1), 0)
    signs = {"The sign is turned: dropped is made less combined.": -lost}
    places = {
        "Balanced books read 0. argmax of nothing but False is 0 too, so tell the two apart.": np.where(
            any_change, first, 1
        ),
        "This counts from the stage before. 1 means: made, but not sent.": np.where(any_change, first - 1, 0),
        "This is the last place where the books differ, not the first.": last,
        "Books that regain what they lost do not balance either.": np.where(lost != 0, first, 0),
        "A stage with more copies than the one before is a fault too: something was counted twice.": (
            np.where(
                (np.diff(ledger, axis=1) < 0).any(1), 1 + np.argmax(np.diff(ledger, axis=1) < 0, axis=1), 0
            )
        ),
    }
    same(dropped, lost, case=case, axes=("step",), why=why, suspects=signs, what="dropped")
    same(where, first, case=case, axes=("step",), why=why, suspects=places, what="where")


@holds("books that balance")
def balanced_books(fn) -> int:
    _audit(fn, [[64] * 5, [7] * 5, [0] * 5], "three steps with equal counts")
    return 1


@holds("copies lost at any one stage")
def one_loss(fn) -> int:
    rng = np.random.default_rng(1)
    for stage in (1, 2, 3, 4):
        ledger = np.repeat(rng.integers(50, 90, (6, 1)), 5, axis=1)
        ledger[::2, stage:] -= rng.integers(1, 9, (3, 1))
        _audit(fn, ledger, f"steps 0, 2 and 4 lose copies before stage {stage}")
    return 4


@holds("the first of several faults")
def several_losses(fn) -> int:
    rng = np.random.default_rng(2)
    falling = np.sort(rng.integers(0, 60, (12, 5)), axis=1)[:, ::-1]
    _audit(fn, falling, "twelve steps with falling counts")
    _audit(fn, rng.integers(10, 13, (40, 5)), "forty steps with any counts")
    return 2


@holds("lost and found again: nothing dropped, and yet a fault")
def lost_and_found(fn) -> int:
    _audit(fn, [[10, 9, 10, 10, 10], [10, 10, 10, 11, 10]], "[10, 9, 10, 10, 10] and [10, 10, 10, 11, 10]")
    return 1


@holds("no steps, one step")
def few_steps(fn) -> int:
    _audit(fn, np.zeros((0, 5)), "no steps")
    _audit(fn, [[5, 5, 4, 4, 4]], "one step, [5, 5, 4, 4, 4]")
    return 2


@holds("it works under jax.jit")
def audit_under_jit(fn) -> int:
    ledger = np.random.default_rng(3).integers(10, 12, (9, 5))
    _audit(jax.jit(lambda books: fn(books)), ledger, "compiled, nine steps")
    return 1
