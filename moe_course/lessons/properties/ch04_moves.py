"""Chapter 04, moving the data: the gradient of permute, and combine. Oracles add up in float64, slot by slot."""

import jax
import jax.numpy as jnp
import numpy as np

from moe_course.lessons.compare import close
from moe_course.lessons.exercise import Broken, holds
from moe_course.lessons.properties.ch04 import ids_of, most_rows, places

WIDTH = 5
CASES = ((6, 2, 4, 1), (33, 3, 8, 4), (0, 2, 4, 1), (7, 1, 4, 2), (4, 4, 4, 8))
"""(tokens, picks, experts, align)."""


def moved(tokens, picks, experts, align, seed, none=True):
    """rows [M, D] float32 with NaN where no slot sits, and row_of_slot [T, K] int32."""
    ids = ids_of(tokens, picks, experts, seed=seed, none=experts if none else None)
    count = most_rows(ids.size, experts, align)
    row_of_slot = places(ids, experts, align, count)
    rows = np.random.default_rng([seed, tokens, align]).normal(size=(count, WIDTH)).astype(np.float32)
    rows[np.setdiff1d(np.arange(count), row_of_slot)] = np.nan
    return rows, row_of_slot.astype(np.int32)


def gather_sum(rows, row_of_slot, weights=None):
    tokens, picks = row_of_slot.shape
    total = np.zeros((tokens, rows.shape[1]))
    for t in range(tokens):
        for k in range(picks):
            if row_of_slot[t, k] < len(rows):
                weight = 1.0 if weights is None else float(weights[t, k])
                total[t] += weight * rows[row_of_slot[t, k]].astype(np.float64)
    return total


def case_of(rows, row_of_slot) -> str:
    return f"rows {list(rows.shape)}, NaN where no slot sits, row_of_slot {list(row_of_slot.shape)}"


def _no_scatter(fn, args, case) -> None:
    try:
        program = str(jax.make_jaxpr(fn)(*(jnp.asarray(a) for a in args)))
    except Exception as error:
        name = type(error.__cause__ or error).__name__
        why = "Under jit the rows are not known when the program is built: no NumPy."
        raise Broken(case, name, "a program that compiles", why) from error
    if "scatter" in program:
        why = (
            "A scatter-add adds in an order of its own on a GPU, and is slow on a CPU. Every token knows its K rows: "
            "gather them and add."
        )
        raise Broken(case, "a scatter in the program", "gathers alone", why)


# ---------------------------------------------------------------- 04.5 the gradient of permute


def _gradient(fn, rows, row_of_slot, case, why="") -> None:
    expected = gather_sum(rows, row_of_slot)
    first = gather_sum(rows, row_of_slot[:, :1])
    picks = row_of_slot.shape[1]
    suspects = {
        "This is the gradient of one copy. A token was copied K times: add the K gradients.": first,
        "This is the mean over the copies. x was copied, not averaged: its gradient is the sum.": expected
        / picks,
    }
    suspects = suspects if picks > 1 else None
    close(
        fn(rows, row_of_slot),
        expected,
        case=case,
        axes=("token", "feature"),
        terms=picks,
        why=why,
        suspects=suspects,
    )


@holds("a token's gradient is the sum over its copies")
def sums_copies(fn) -> int:
    for i, shape in enumerate(CASES):
        rows, row_of_slot = moved(*shape, seed=20 + i, none=False)
        _gradient(fn, rows, row_of_slot, case_of(rows, row_of_slot))
    return len(CASES)


@holds("slots that went nowhere add nothing")
def nothing_from_nowhere(fn) -> int:
    why = "Row M does not exist. Indexing past the end gives the last row, jnp.take gives NaN: ask for fill with 0."
    for i, shape in enumerate(CASES[:2]):
        rows, row_of_slot = moved(*shape, seed=30 + i)
        rows = np.nan_to_num(rows, nan=3.0)
        _gradient(fn, rows, row_of_slot, case_of(rows, row_of_slot).replace("NaN", "3.0"), why)
    return 2


@holds("padding rows are not read, NaN or not")
def padding_unread(fn) -> int:
    for i, shape in enumerate(CASES[:2] + CASES[3:]):
        rows, row_of_slot = moved(*shape, seed=40 + i)
        why = "0 * NaN is NaN: what must not count must not be multiplied, it must not be read."
        _gradient(fn, rows, row_of_slot, case_of(rows, row_of_slot), why)
    return 4


def _halves(picks: int):
    rows = np.ones((picks * 2, WIDTH), np.float32)
    rows[0::picks] = 256.0
    rows[picks] = -256.0
    row_of_slot = np.arange(picks * 2, dtype=np.int32).reshape(2, picks)
    return rows.astype(jnp.bfloat16), row_of_slot


@holds("the sum is float32, whatever comes in")
def float32_sum(fn) -> int:
    rows, row_of_slot = _halves(16)
    why = "256 + 1 is 256 in bfloat16: go to float32 before you add."
    _gradient(fn, rows, row_of_slot, "rows bfloat16: 256 and fifteen times 1, 16 picks", why)
    return 1


@holds("gathers alone: no scatter")
def gathers(fn) -> int:
    rows, row_of_slot = moved(6, 2, 4, 1, seed=50)
    _no_scatter(fn, (rows, row_of_slot), case_of(rows, row_of_slot) + ", the program that JAX makes of it")
    return 1


# ---------------------------------------------------------------- 04.6 combine


def _weights(row_of_slot, seed):
    return np.random.default_rng([seed, *row_of_slot.shape]).normal(size=row_of_slot.shape).astype(np.float32)


def _combine(fn, rows, row_of_slot, weights, case, why="") -> None:
    expected = gather_sum(rows, row_of_slot, weights)
    suspects = {
        "The weights are missing.": gather_sum(rows, row_of_slot),
        "The weights are in reverse order of the picks.": gather_sum(rows, row_of_slot, weights[:, ::-1]),
        "This is the mean over the picks. The weights say how much each counts: add.": expected
        / row_of_slot.shape[1],
    }
    suspects = suspects if row_of_slot.shape[1] > 1 else None
    yours = fn(rows, row_of_slot, weights)
    close(
        yours,
        expected,
        case=case,
        axes=("token", "feature"),
        terms=row_of_slot.shape[1],
        why=why,
        suspects=suspects,
    )


@holds("each token gets the weighted sum of its rows")
def weighted_sum(fn) -> int:
    for i, shape in enumerate(CASES):
        rows, row_of_slot = moved(*shape, seed=60 + i, none=False)
        _combine(fn, rows, row_of_slot, _weights(row_of_slot, i), case_of(rows, row_of_slot))
    return len(CASES)


@holds("slots that went nowhere add nothing, whatever their weight")
def no_weight_for_nowhere(fn) -> int:
    why = (
        "The router gives padding weight 0, but a capacity limit or a dead rank leaves its weight as it was."
    )
    for i, shape in enumerate(CASES[:2]):
        rows, row_of_slot = moved(*shape, seed=70 + i)
        rows = np.nan_to_num(rows, nan=3.0)
        case = case_of(rows, row_of_slot).replace("NaN", "3.0")
        _combine(fn, rows, row_of_slot, _weights(row_of_slot, i), case, why)
    return 2


@holds("padding rows are not read, NaN or not")
def combine_padding(fn) -> int:
    for i, shape in enumerate(CASES[:2] + CASES[3:]):
        rows, row_of_slot = moved(*shape, seed=80 + i)
        _combine(
            fn, rows, row_of_slot, _weights(row_of_slot, i), case_of(rows, row_of_slot), "0 * NaN is NaN."
        )
    return 4


@holds("weights and sum are float32, also for bfloat16 rows")
def combine_float32(fn) -> int:
    rows, row_of_slot = _halves(16)
    why = "Neither the weights nor the sum may be rounded to bfloat16: an error of 2**-8 of every token's output."
    _combine(fn, rows, row_of_slot, _weights(row_of_slot, 9), "rows bfloat16 [32, 5], 16 picks", why)
    return 1


@holds("gradients reach rows and weights, and none comes from padding")
def combine_gradients(fn) -> int:
    for i, shape in enumerate(CASES[:2]):
        rows, row_of_slot = moved(*shape, seed=90 + i)
        weights = _weights(row_of_slot, i)
        out = np.random.default_rng([91, i]).normal(size=(len(row_of_slot), WIDTH)).astype(np.float32)

        def loss(rows, weights, row_of_slot=row_of_slot, out=out):
            return (fn(rows, row_of_slot, weights) * out).sum()

        to_rows, to_weights = jax.grad(loss, argnums=(0, 1))(jnp.asarray(rows), jnp.asarray(weights))
        right_rows, right_weights = np.zeros(rows.shape), np.zeros(weights.shape)
        for t, k in np.argwhere(row_of_slot < len(rows)):
            row = row_of_slot[t, k]
            right_rows[row] += weights[t, k] * out[t].astype(np.float64)
            right_weights[t, k] = rows[row].astype(np.float64) @ out[t]
        case = case_of(rows, row_of_slot)
        why = "A NaN that is multiplied away in the result comes back in the gradient of what it was multiplied by."
        close(to_weights, right_weights, case=case + ", d weights", axes=("token", "pick"), terms=64, why=why)
        close(to_rows, right_rows, case=case + ", d rows", axes=("row", "feature"), terms=4, why=why)
    return 2


@holds("gathers alone: no scatter in the forward pass")
def combine_gathers(fn) -> int:
    rows, row_of_slot = moved(6, 2, 4, 1, seed=95)
    args = rows, row_of_slot, _weights(row_of_slot, 0)
    _no_scatter(fn, args, case_of(rows, row_of_slot) + ", the program that JAX makes of it")
    return 1
