"""Chapter 04, ragged grouping: what right answers do. Oracles are NumPy loops, written from the definitions."""

import itertools
from functools import partial

import jax
import numpy as np

from moe_course.lessons.compare import same
from moe_course.lessons.exercise import Broken, holds
from moe_course.lessons.learner import compiled

SHAPES = ((6, 2, 4), (33, 3, 8), (0, 2, 4), (5, 1, 8), (4, 4, 4))
"""(tokens, picks, experts) of the random cases."""


def ids_of(tokens: int, picks: int, experts: int, seed: int = 0, none: int | None = None) -> np.ndarray:
    """int32 ids, distinct within a token, some experts popular; every third token ``none`` if given."""
    rng = np.random.default_rng([seed, tokens, picks, experts])
    keys = rng.normal(size=(tokens, experts)) + rng.normal(size=experts)
    ids = np.argsort(keys, axis=-1)[:, :picks].astype(np.int32)
    if none is not None:
        ids[1::3] = none
        if picks > 1:
            ids[2::5, -1] = none  # one pick of a token, not the whole token
    return ids


def loads(ids, experts: int) -> np.ndarray:
    counts = np.zeros(experts, np.int64)
    for e in np.asarray(ids).reshape(-1):
        if 0 <= e < experts:
            counts[e] += 1
    return counts


def order_of(ids, experts: int) -> np.ndarray:
    flat = np.asarray(ids).reshape(-1)
    held = [[s for s, e in enumerate(flat) if e == expert] for expert in range(experts)]
    slots = list(itertools.chain(*held))
    return np.array(slots + [flat.size] * (flat.size - len(slots)), np.int64)


def most_rows(slots: int, experts: int, align: int) -> int:
    """Rows that the worst routing needs: every group that can exist holds one slot, the rest fill tiles."""
    groups = min(slots, experts)
    return (groups + (slots - groups) // align) * align


def places(ids, experts: int, align: int, rows: int) -> np.ndarray:
    free, row_of_slot = 0, np.full(np.asarray(ids).size, rows, np.int64)
    for expert in range(experts):
        slots = np.flatnonzero(np.asarray(ids).reshape(-1) == expert)
        row_of_slot[slots] = free + np.arange(len(slots))
        free += -(-len(slots) // align) * align
    return row_of_slot.reshape(np.asarray(ids).shape)


def case_of(ids, experts: int, extra: str = "") -> str:
    return f"ids {list(ids.shape)}, {experts} experts{extra}"


# ---------------------------------------------------------------- 04.1 load


def _load(fn, ids, experts, case, why="") -> None:
    expected = loads(ids, experts)
    first = loads(ids[:, :1], experts)
    suspects = {
        "You counted the first pick of each token. Every pick is a copy that travels.": first,
        "These are the ends of the groups, not their sizes.": np.cumsum(expected),
        "These are the starts of the groups, not their sizes.": np.cumsum(expected) - expected,
    }
    same(fn(ids, experts), expected, case=case, axes=("expert",), why=why, suspects=suspects)


@holds("every pick is counted once")
def counts(fn) -> int:
    for shape in SHAPES:
        ids = ids_of(*shape)
        _load(fn, ids, shape[-1], case_of(ids, shape[-1]))
    return len(SHAPES)


@holds("experts that nobody picked have a 0, the last ones too")
def idle_experts(fn) -> int:
    cases = (np.array([[1, 0], [1, 3]], np.int32), 8), (np.full((3, 2), 8, np.int32), 8)
    for ids, experts in cases:
        why = "The result has one entry for each expert, whatever the largest id is."
        _load(fn, ids, experts, f"ids {ids.tolist()}, {experts} experts", why)
    return len(cases)


@holds("the id E is no expert")
def sentinel(fn) -> int:
    for shape in SHAPES[:3]:
        ids = ids_of(*shape, seed=1, none=shape[-1])
        why = "Padding tokens carry the id E: they are nobody's, so neither the first nor the last expert counts them."
        _load(fn, ids, shape[-1], case_of(ids, shape[-1], ", some of them E"), why)
    return 3


@holds("other ids outside 0 to E - 1 are no expert either")
def strays(fn) -> int:
    for none in (-1, -3, 9):
        ids = ids_of(6, 2, 4, seed=2, none=none)
        why = "A negative index counts from the end, and bincount clips it to 0. Compare ids with experts instead."
        _load(fn, ids, 4, case_of(ids, 4, f", some of them {none}"), why)
    return 3


def _under_jit(fn, args, static, expected, case, axes) -> None:
    why = (
        "Under jit the ids are not known when the program is built: no NumPy, no shapes that depend on them."
    )
    result = compiled(jax.jit(fn, static_argnums=static), *args, case=case, why=why)
    same(result, expected, case=case, axes=axes)


@holds("it runs under jit, the ids being data")
def load_jit(fn) -> int:
    ids = ids_of(33, 3, 8, seed=3, none=8)
    _under_jit(fn, (ids, 8), (1,), loads(ids, 8), case_of(ids, 8, ", under jit"), ("expert",))
    return 1


# ---------------------------------------------------------------- 04.2 expert order


def _order(fn, ids, experts, case, why="") -> None:
    expected = order_of(ids, experts)
    flat, picks = ids.reshape(-1), ids.shape[1]
    by_column = order_of(ids.T, experts)
    inverse = np.argsort(np.argsort(np.where((flat >= 0) & (flat < experts), flat, experts), kind="stable"))
    suspects = {
        "These are tokens. A slot is one pick: number t K + k.": expected // picks,
        "You numbered the slots column by column. Slot (t, k) has the number t K + k.": by_column,
        "This says where each slot goes. Asked: which slot sits in each place.": inverse,
        "Slots of one expert come in reverse: the sort is not stable.": np.concatenate(
            [np.flatnonzero(flat == e)[::-1] for e in range(experts)]
            + [np.full(int((expected == flat.size).sum()), flat.size)]
        ),
    }
    same(
        fn(ids, experts), expected, case=case, axes=("row",), why=why, suspects=suspects if ids.size else None
    )


@holds("slots come expert by expert")
def ordered(fn) -> int:
    for shape in SHAPES:
        ids = ids_of(*shape, seed=4)
        _order(fn, ids, shape[-1], case_of(ids, shape[-1]))
    return len(SHAPES)


@holds("slots of one expert keep their order")
def stable(fn) -> int:
    why = "Two runs, or two devices, must agree on who sits where: ties keep the order they had."
    for ids, says in (
        (np.full((300, 2), 2, np.int32), "600 slots, all to expert 2"),
        (
            np.random.default_rng(5).integers(0, 2, (300, 2)).astype(np.int32) * 3,
            "600 slots to experts 0 and 3",
        ),
    ):
        _order(fn, ids, 4, says, why)
    return 2


@holds("slots without an expert come last, as T K")
def strays_last(fn) -> int:
    why = "T K is one past the last slot: a gather with mode='fill' reads nothing there."
    cases = [(6, 2, 4, 4), (33, 3, 8, 8), (6, 2, 4, -1), (33, 3, 8, 11)]
    for *shape, none in cases:
        ids = ids_of(*shape, seed=6, none=none)
        _order(fn, ids, shape[-1], case_of(ids, shape[-1], f", some of them {none}"), why)
    return len(cases)


@holds("many slots and many experts: nothing overflows")
def large(fn) -> int:
    ids = np.random.default_rng(7).integers(0, 257, (70_000, 4)).astype(np.int32)
    order = np.argsort(ids.reshape(-1), kind="stable")
    expected = np.where(ids.reshape(-1)[order] < 256, order, ids.size)
    why = "float32 counts to 2**24 without gaps; a key made of id and slot is past that here."
    same(fn(ids, 256), expected, case=case_of(ids, 256, ", some of them 256"), axes=("row",), why=why)
    return 1


@holds("it runs under jit, the ids being data")
def order_jit(fn) -> int:
    ids = ids_of(33, 3, 8, seed=9, none=8)
    _under_jit(fn, (ids, 8), (1,), order_of(ids, 8), case_of(ids, 8, ", under jit"), ("row",))
    return 1


# ---------------------------------------------------------------- 04.3 rows of the buffer


def _rows(fn, slots, experts, align, expected, why="") -> None:
    case = f"{slots} slots, {experts} experts, align {align}"
    yours = fn(slots, experts, align)
    if isinstance(yours, bool) or not isinstance(yours, int | np.integer):
        raise Broken(
            case, type(yours).__name__, "an int", "A shape is a Python int: known before anything runs."
        )
    if yours == expected:
        return
    every = slots + experts * (align - 1)
    lines = {
        every: "Two refinements are missing: only min(E, slots) groups can be non-empty, and M is a multiple of align.",
        every
        // align
        * align: "With fewer slots than experts, not every group can be non-empty, and empty ones waste nothing.",
        -(-slots // align) * align: "This pads the whole buffer. Each group is padded on its own.",
        slots: "This leaves no room for padding.",
    }
    if not why:
        small = yours < expected
        why = "Some routing does not fit." if small else "It holds every routing, but so do fewer rows."
    raise Broken(case, str(yours), str(expected), lines.get(int(yours), why))


@holds("no padding without alignment")
def unaligned(fn) -> int:
    cases = [(0, 4), (7, 4), (3, 8), (4096, 32)]
    for slots, experts in cases:
        _rows(fn, slots, experts, 1, slots)
    return len(cases)


@holds("room for the worst of all routings, tried one by one, and for no more")
def worst_of_all(fn) -> int:
    cases = [(s, e, a) for s in (0, 1, 2, 5, 9) for e in (1, 2, 3) for a in (2, 3, 4)]
    for slots, experts, align in cases:
        splits = itertools.product(range(slots + 1), repeat=experts)
        needs = (sum(-(-n // align) * align for n in split) for split in splits if sum(split) == slots)
        _rows(fn, slots, experts, align, max(needs))
    return len(cases)


@holds("large numbers")
def large_rows(fn) -> int:
    cases = [
        (65_536, 256, 128),
        (1024, 256, 128),
        (100, 256, 128),
        (1000, 8, 32),
        (524_288, 384, 128),
        (127, 1, 128),
    ]
    for slots, experts, align in cases:
        _rows(fn, slots, experts, align, most_rows(slots, experts, align))
    return len(cases)


# ---------------------------------------------------------------- 04.4 rows of slots


def _places(fn, ids, experts, align, case, why="", rows=None) -> None:
    rows = most_rows(ids.size, experts, align) if rows is None else rows
    expected = places(ids, experts, align, rows)
    load = loads(ids, experts)
    held = (ids >= 0) & (ids < experts)
    safe = np.where(held, ids, 0)
    padded = -(-load // align) * align
    shift = lambda starts: np.where(held, expected - (np.cumsum(padded) - padded)[safe] + starts[safe], rows)  # noqa: E731
    unpadded = np.cumsum(load) - load
    suspects = {
        "Groups follow without padding: round each size up before you add them up.": shift(unpadded),
        "Rounding the starts is not enough: round each size up, then add up.": shift(
            -(-unpadded // align) * align
        ),
        "These are the ends of the groups plus the rank: the running sum must not contain the group itself.": (
            shift(np.cumsum(padded))
        ),
        "The ranks are one too high: the first slot of a group has rank 0.": np.where(
            held, expected + 1, rows
        ),
        "A size that is a multiple already needs no more padding.": shift(
            np.cumsum((load // align + 1) * align) - (load // align + 1) * align
        ),
    }
    same(
        fn(ids, experts, align, rows), expected, case=case, axes=("token", "pick"), why=why, suspects=suspects
    )


@holds("groups follow one another, in the order of the experts")
def packed(fn) -> int:
    for shape in SHAPES:
        ids = ids_of(*shape, seed=10)
        _places(fn, ids, shape[-1], 1, case_of(ids, shape[-1], ", align 1"))
    return len(SHAPES)


@holds("each group starts at a multiple of align")
def aligned(fn) -> int:
    cases = [((33, 3, 8), 4), ((33, 3, 8), 32), ((6, 2, 4), 3), ((4, 4, 4), 128)]
    for shape, align in cases:
        ids = ids_of(*shape, seed=11)
        _places(fn, ids, shape[-1], align, case_of(ids, shape[-1], f", align {align}"))
    return len(cases)


@holds("full groups and empty groups get no padding")
def full_or_empty(fn) -> int:
    exact = np.repeat(np.array([0, 2, 2, 5], np.int32), 4)
    one, last = (np.where(np.arange(16) < n, e, 6).astype(np.int32) for n, e in ((9, 3), (4, 5)))
    cases = (
        (exact, "sizes [4, 0, 8, 0, 0, 4]"),
        (one, "9 slots of expert 3"),
        (last, "4 slots of the last expert"),
    )
    for ids, says in cases:
        _places(fn, ids[:, None], 6, 4, f"{says}, align 4")
    return 3


@holds("slots without an expert go to row M, and take no place")
def nowhere(fn) -> int:
    cases = [(1, 4), (4, 4), (4, -1), (4, 7)]
    for align, none in cases:
        ids = ids_of(6, 2, 4, seed=12, none=none)
        why = "Row M does not exist, so a scatter or gather that drops or fills there touches nothing."
        _places(fn, ids, 4, align, case_of(ids, 4, f", some of them {none}, align {align}"), why)
    ids = ids_of(6, 2, 4, seed=13, none=4)
    _places(
        fn, ids, 4, 1, case_of(ids, 4, ", some of them 4, 40 rows"), "M is the argument num_rows.", rows=40
    )
    return len(cases) + 1


@holds("slots of one expert keep their order")
def places_stable(fn) -> int:
    ids = np.random.default_rng(14).integers(0, 2, (300, 2)).astype(np.int32) * 3
    _places(fn, ids, 4, 8, "300 tokens to experts 0 and 3, align 8")
    return 1


@holds("it runs under jit, the ids being data")
def places_jit(fn) -> int:
    ids = ids_of(33, 3, 8, seed=15, none=8)
    rows = most_rows(99, 8, 4)
    case = case_of(ids, 8, ", align 4, under jit")
    _under_jit(
        partial(_positional, fn, 8, 4, rows), (ids,), (), places(ids, 8, 4, rows), case, ("token", "pick")
    )
    return 1


def _positional(fn, experts, align, rows, ids):
    return fn(ids, experts, align, rows)
