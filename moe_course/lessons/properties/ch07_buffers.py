"""Chapter 07: how large a receive buffer is, and the step that changes nothing."""

import itertools
import math

import numpy as np

from moe_course.lessons.compare import close, same
from moe_course.lessons.exercise import Broken, holds
from moe_course.lessons.properties.ch07 import on_ranks, several

# ---------------------------------------------------------------- 07.4 the bucket


def worst_of(tokens, picks, experts, ranks) -> int:
    return ranks * tokens * min(picks, experts // ranks)


def rows_of(bucket, factor, tokens, picks, experts, ranks) -> int:
    rows = ranks * math.ceil(factor * 2**bucket * tokens * picks / ranks)
    return min(rows, worst_of(tokens, picks, experts, ranks))


def _bucket(fn, bucket, factor, tokens, picks, experts, ranks, why="") -> None:
    args = bucket, factor, tokens, picks, experts, ranks
    case = f"bucket {bucket}, factor {factor:g}, {tokens} tokens, {picks} picks, {experts} experts, {ranks} ranks"
    balanced = tokens * picks
    unlimited = ranks * math.ceil(factor * 2**bucket * balanced / ranks)
    lines = {
        "The worst case is missing: no routing can ask for more than that.": unlimited,
        "The worst case is smaller: a rank owns E/R experts, so a token sends it at most min(K, E/R) copies.": min(
            unlimited, ranks * tokens * picks
        ),
        "Buckets double: factor, 2 factor, 4 factor.": min(
            ranks * math.ceil(factor * (bucket + 1) * balanced / ranks),
            worst_of(tokens, picks, experts, ranks),
        ),
        "A multiple of R: every pair of ranks gets an equal share.": math.ceil(factor * 2**bucket * balanced),
        "Rounded down, this holds less than was asked for.": ranks
        * math.floor(factor * 2**bucket * balanced / ranks),
    }
    right = rows_of(*args)
    lines = {line: wrong for line, wrong in lines.items() if wrong != right}
    same(fn(*args), right, case=case, why=why, suspects=lines, what="number of rows")


@holds("bucket 0 holds factor times the balanced need, each next one twice as much")
def doubles(fn) -> int:
    cases = [(b, f, 64, 4, 32, 8) for b in (0, 1, 2) for f in (1.0, 1.25, 1.5)]
    for case in cases:
        _bucket(fn, *case)
    return len(cases)


@holds("a multiple of the ranks, rounded up")
def rounded_up(fn) -> int:
    cases = [(0, 1.0, 5, 3, 64, 4), (0, 1.25, 7, 2, 64, 8), (1, 1.1, 9, 2, 64, 8), (0, 1.3, 100, 8, 64, 16)]
    for case in cases:
        _bucket(fn, *case)
    return len(cases)


@holds("never more than any routing can ask for")
def at_most_worst(fn) -> int:
    cases = [
        (9, 2.0, 64, 8, 64, 8),
        (9, 2.0, 64, 8, 32, 16),
        (3, 1.5, 10, 2, 2, 2),
        (0, 8.0, 5, 4, 8, 8),
        (5, 1.0, 3, 1, 8, 4),
    ]
    for case in cases:
        _bucket(fn, *case)
    return len(cases)


@holds("the last bucket holds every routing there is, and no row more than one of them needs")
def holds_every_routing(fn) -> int:
    for tokens, picks, experts, ranks in ((2, 2, 4, 2), (2, 1, 4, 2), (1, 3, 4, 2), (2, 2, 3, 3)):
        most = 0
        routes = list(itertools.combinations(range(experts), picks))
        for routing in itertools.product(routes, repeat=ranks * tokens):
            load = np.bincount(np.concatenate(routing) // (experts // ranks), minlength=ranks)
            most = max(most, int(load.max()))
        case = (
            f"every routing of {ranks} times {tokens} tokens, {picks} picks, {experts} experts, {ranks} ranks"
        )
        found = fn(20, 1.0, tokens, picks, experts, ranks)
        same(found, most, case=case, why="A rank has E/R experts and may be asked by all R ranks.")
    return 4


@holds("a Python int: it decides a shape")
def python_int(fn) -> int:
    found = fn(0, 1.5, 64, 4, 32, 8)
    if not isinstance(found, int) or isinstance(found, bool):
        why = "Shapes are known when the program is built: use Python's math, and return an int."
        raise Broken("bucket 0, factor 1.5, 64 tokens", type(found).__name__, "int", why)
    return 1


# ---------------------------------------------------------------- 07.5 all or none


def _guard(fn, state, new, demand, capacity, case, why="") -> None:
    def run(state, new, demand):
        return several(fn(state, new, demand, capacity), 2, case=case, names="state, overflow")

    kept, overflow = on_ranks(run, state, new, np.asarray(demand, np.int32), case=case)
    expected = max(demand) > capacity
    local = np.asarray(demand) > capacity
    lines = {"Each rank decides for itself here: ranks now hold parameters of different steps.": local}
    lines = lines if (local != expected).any() else None
    right = np.full(len(demand), expected)
    same(overflow, right, case=case, axes=("rank",), why=why, what="overflow", suspects=lines)
    lines = {
        "Each rank decides for itself here: ranks now hold parameters of different steps.": np.where(
            local[:, None], state, np.nan_to_num(new)
        ),
        "Swapped: after an overflow the state is the old one.": state if not expected else np.nan_to_num(new),
    }
    chosen = state if expected else new
    close(kept, chosen, case=case, axes=("rank", "parameter"), why=why, suspects=lines, what="state")


def _states(seed, ranks=4):
    rng = np.random.default_rng([74, seed])
    return (rng.normal(size=(ranks, 5)).astype(np.float32) for _ in range(2))


@holds("enough room: the new state")
def enough(fn) -> int:
    state, new = _states(0)
    for demand in ([3, 9, 0, 7], [10, 10, 10, 10], [0, 0, 0, 0]):
        _guard(fn, state, new, demand, 10, f"demand {demand}, capacity 10", "Demand up to the capacity fits.")
    return 3


@holds("one rank short of room: all ranks keep the old state")
def one_short(fn) -> int:
    state, new = _states(1)
    for demand in ([3, 11, 0, 7], [25, 1, 1, 1], [0, 0, 0, 11]):
        why = "One rank's overflow spoils the gradients of all. Ask the others before you decide."
        _guard(fn, state, new, demand, 10, f"demand {demand}, capacity 10", why)
    return 3


@holds("what an overflow left behind reaches nothing, NaN or not")
def nan_is_not_kept(fn) -> int:
    state, new = _states(2)
    new[1:3, ::2] = np.nan
    why = "0 times NaN is NaN: select, do not multiply."
    _guard(fn, state, new, [3, 11, 12, 7], 10, "demand [3, 11, 12, 7], capacity 10, new state NaN", why)
    return 1
