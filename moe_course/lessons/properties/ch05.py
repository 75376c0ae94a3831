"""Chapter 05, grouped GEMM: what right answers do. The oracle is a loop over groups in float64."""

import jax
import numpy as np

from moe_course.lessons.compare import close, items
from moe_course.lessons.exercise import Broken, holds
from moe_course.lessons.learner import compiled

M, D, F, E = 24, 5, 7, 4
SIZES = (
    (5, 0, 9, 6),
    (3, 8, 1, 12),
    (0, 24, 0, 0),
    (0, 0, 0, 0),
    (24, 0, 0, 0),
    (0, 0, 0, 23),
    (1, 1, 1, 1),
    (6, 6, 6, 6),
    (0, 7, 0, 8),
)
"""Rows per group, of 24; what is left is the tail."""


def operands(sizes, seed=0, shape=(M, D, F), tail=np.nan):
    """rows [M, D] with ``tail`` past the groups, kernels [E, D, F], group_sizes int32."""
    rng = np.random.default_rng([seed, *sizes])
    num_rows, width, out = shape
    rows = rng.normal(size=(num_rows, width)).astype(np.float32)
    rows[sum(sizes) :] = tail
    kernels = rng.normal(size=(len(sizes), width, out)).astype(np.float32)
    return rows, kernels, np.array(sizes, np.int32)


def bounds(sizes):
    ends = np.cumsum(sizes)
    return list(zip((ends - sizes).tolist(), ends.tolist(), strict=True))


def product(rows, kernels, sizes, keep=None) -> np.ndarray:
    """Each group times its kernel; 0 past the last group, and past ``keep`` rows of a group."""
    out = np.zeros((len(rows), kernels.shape[2]))
    for e, (a, b) in enumerate(bounds(sizes)):
        b = b if keep is None else min(b, a + keep)
        out[a:b] = rows[a:b].astype(np.float64) @ kernels[e]
    return out


def gradients_of(rows, kernels, sizes, d_out):
    d_rows, d_kernels = np.zeros(rows.shape), np.zeros(kernels.shape)
    for e, (a, b) in enumerate(bounds(sizes)):
        d_rows[a:b] = d_out[a:b].astype(np.float64) @ kernels[e].T
        d_kernels[e] = rows[a:b].astype(np.float64).T @ d_out[a:b]
    return d_rows, d_kernels


def case_of(sizes, num_rows=M, extra="") -> str:
    return f"sizes {list(sizes)} of {num_rows} rows{extra}"


def on_device(fn, *args, case):
    """``fn(*args)`` under jit: the sizes are not known when the program is built."""
    why = "Under jit the sizes are data: no NumPy, no int(), no slice whose length depends on them."
    return compiled(jax.jit(fn), *args, case=case + ", under jit", why=why)


def _suspects(rows, kernels, sizes):
    clean = np.nan_to_num(rows)
    shifted = tuple(np.roll(sizes, 1))
    lines = {"Group e was multiplied by kernel e + 1.": product(clean, np.roll(kernels, -1, 0), sizes)}
    if sum(sizes):
        lines["The groups are those of other sizes: where does each begin?"] = product(
            clean, kernels, shifted
        )
        lines["Every row was multiplied by the first kernel."] = clean.astype(np.float64) @ kernels[0]
        lines["The products of all experts are added up: each row belongs to one."] = sum(
            clean.astype(np.float64) @ k for k in kernels
        )
    return lines


def _product(result, rows, kernels, sizes, case, why="", keep=None, suspects=True) -> None:
    expected = product(rows, kernels, sizes, keep)
    lines = _suspects(rows, kernels, sizes) if suspects else None
    close(result, expected, case=case, axes=("row", "column"), terms=rows.shape[1], why=why, suspects=lines)


# ---------------------------------------------------------------- 05.1 masked dense


@holds("each row is multiplied by the kernel of its group")
def each_its_own(fn) -> int:
    args = operands(SIZES[0], tail=0.0)
    _product(fn(*args), *args[:2], SIZES[0], case_of(SIZES[0]))
    return 1


@holds("every pattern of empty groups, sizes on the device")
def empty_groups(fn) -> int:
    rng = np.random.default_rng(1)
    patterns = [tuple(rng.integers(1, 7, E) * np.array([p >> e & 1 for e in range(E)])) for p in range(2**E)]
    for sizes in (*SIZES, *patterns):
        args = operands(sizes, seed=1, tail=0.0)
        _product(on_device(fn, *args, case=case_of(sizes)), *args[:2], sizes, case_of(sizes))
    return len(SIZES) + len(patterns)


@holds("rows past the last group give 0, whatever they hold")
def tail_is_zero(fn) -> int:
    for tail in (np.nan, np.inf, 3.0):
        for sizes in SIZES[:7]:
            args = operands(sizes, seed=2, tail=tail)
            case = case_of(sizes, extra=f", the others {tail:g}")
            why = "0 * NaN is NaN: select with jnp.where, do not multiply by a mask."
            _product(on_device(fn, *args, case=case), *args[:2], sizes, case, why)
    return 21


@holds("nothing of the tail reaches a gradient")
def tail_gradient(fn) -> int:
    def loss(rows, kernels, sizes, out):
        return (fn(rows, kernels, sizes) * out).sum()

    run = jax.jit(jax.grad(loss, argnums=(0, 1)))
    for sizes in SIZES[:7]:
        rows, kernels, group_sizes = operands(sizes, seed=3)
        out = np.random.default_rng(4).normal(size=(M, F)).astype(np.float32)
        case = case_of(sizes, extra=", the others NaN, gradient")
        to_rows, to_kernels = on_device(run, rows, kernels, group_sizes, out, case=case)
        d_rows, d_kernels = gradients_of(rows, kernels, sizes, out)
        why = (
            "The weight gradient is rows.T @ d_out, and NaN times 0 is NaN: mask the rows before the product."
        )
        close(
            to_kernels, d_kernels, case=case + " of kernels", axes=("expert", "in", "out"), terms=M, why=why
        )
        close(to_rows, d_rows, case=case + " of rows", axes=("row", "feature"), terms=F, why=why)
    return 7


@holds("other shapes: one expert, one row, no row")
def other_shapes(fn) -> int:
    cases = ((1,), (3, 2, 4)), ((1, 0), (1, 3, 2)), ((0, 0, 0), (0, 3, 2)), ((2, 0, 5, 1, 0, 3), (12, 8, 3))
    for sizes, shape in cases:
        args = operands(sizes, seed=5, shape=shape)
        case = case_of(sizes, shape[0])
        _product(on_device(fn, *args, case=case), *args[:2], sizes, case)
    return len(cases)


# ---------------------------------------------------------------- 05.2 padded batch


@holds("groups that fit: the grouped product")
def groups_fit(fn) -> int:
    args = operands(SIZES[0], seed=6, tail=0.0)
    _product(fn(*args, 9), *args[:2], SIZES[0], case_of(SIZES[0], extra=", capacity 9"))
    run = jax.jit(lambda *a: fn(*a, 24))
    for sizes in SIZES:
        args = operands(sizes, seed=7, tail=0.0)
        case = case_of(sizes, extra=", capacity 24")
        _product(on_device(run, *args, case=case), *args[:2], sizes, case)
    return 1 + len(SIZES)


@holds("rows past the capacity of their group give 0: they are dropped")
def dropped_rows(fn) -> int:
    for capacity in (1, 6):
        run = jax.jit(lambda *a, c=capacity: fn(*a, c))
        for sizes in SIZES:
            args = operands(sizes, seed=8, tail=0.0)
            case = case_of(sizes, extra=f", capacity {capacity}")
            why = "The first rows of a group stay; a row past the capacity must not land in the next group's place."
            result = on_device(run, *args, case=case)
            _product(result, *args[:2], sizes, case, why, keep=capacity, suspects=False)
    return 2 * len(SIZES)


@holds("padding and tail are not read, NaN or not")
def padded_tail(fn) -> int:
    run = jax.jit(lambda *a: fn(*a, 9))
    for sizes in SIZES:
        args = operands(sizes, seed=9)
        case = case_of(sizes, extra=", the others NaN, capacity 9")
        why = "A row that no place of the batch holds gives 0, and a NaN of the tail stays where it is."
        _product(on_device(run, *args, case=case), *args[:2], sizes, case, why, keep=9, suspects=False)
    return len(SIZES)


@holds("other shapes")
def padded_shapes(fn) -> int:
    cases = ((3,), (3, 2, 4), 2), ((2, 0, 5, 1, 0, 3), (12, 8, 3), 4), ((1, 1), (2, 3, 2), 8)
    for sizes, shape, capacity in cases:
        args = operands(sizes, seed=10, shape=shape)
        case = case_of(sizes, shape[0], f", capacity {capacity}")
        result = on_device(lambda *a, c=capacity: fn(*a, c), *args, case=case)
        _product(result, *args[:2], sizes, case, keep=capacity, suspects=False)
    return len(cases)


@holds("the multiplications are one batch: E times capacity rows")
def one_batch(fn) -> int:
    sizes, capacity, shape = (40, 3, 60, 25), 32, (128, 16, 16)
    args = operands(sizes, seed=11, shape=shape, tail=0.0)
    case = case_of(sizes, 128, f", capacity {capacity}, what XLA counts")
    try:
        cost = jax.jit(lambda *a: fn(*a, capacity)).lower(*args).compile().cost_analysis()
    except Exception as error:
        name = type(error.__cause__ or error).__name__
        raise Broken(case, name, "a program that compiles") from error
    counted = (cost[0] if isinstance(cost, list) else cost)["flops"] / (2 * 16 * 16)
    if counted > 1.5 * 4 * capacity:
        why = "Every row meets every expert here. Gather rows into [E, capacity, D] first, then one batched product."
        raise Broken(case, f"about {counted:.0f} rows multiplied", f"{4 * capacity}", why)
    return 1


# ---------------------------------------------------------------- 05.5 gradients


def _gradients(result, rows, kernels, sizes, d_out, case, why="") -> None:
    d_rows, d_kernels = items(result, 2, case=case, names="d_rows, d_kernels")
    right_rows, right_kernels = gradients_of(rows, kernels, sizes, d_out)
    live = slice(0, sum(sizes))
    every = np.nan_to_num(rows).astype(np.float64).T @ np.nan_to_num(d_out)
    lines = {
        "Every group got the gradient of all rows: only its own count.": np.broadcast_to(
            every, right_kernels.shape
        ),
        "This is the mean over the rows of the group. The loss adds them up: so does the gradient.": (
            right_kernels / np.maximum(np.array(sizes), 1)[:, None, None]
        ),
    }
    if right_kernels[0].shape[0] == right_kernels[0].shape[1]:
        lines["This is transposed: rows.T @ d_out is [D, F], d_out.T @ rows is [F, D]."] = (
            right_kernels.swapaxes(1, 2)
        )
        wrong = right_rows.copy()
        wrong[live] = product(np.nan_to_num(d_out), kernels, sizes)[live]
        rows_lines = {"You multiplied by the kernel, not by its transpose.": wrong}
    else:
        rows_lines = None
    axes = ("expert", "in", "out")
    close(
        d_kernels,
        right_kernels,
        case=case + ", d_kernels",
        axes=axes,
        terms=len(rows),
        why=why,
        suspects=lines,
    )
    axes = ("row", "feature")
    close(
        d_rows,
        right_rows,
        case=case + ", d_rows",
        axes=axes,
        terms=kernels.shape[2],
        why=why,
        suspects=rows_lines,
    )


def with_gradient(sizes, seed, shape=(M, D, F), tail=np.nan):
    rows, kernels, group_sizes = operands(sizes, seed, shape, tail)
    d_out = np.random.default_rng([seed, 99]).normal(size=(shape[0], shape[2])).astype(np.float32)
    d_out[sum(sizes) :] = tail
    return rows, kernels, group_sizes, d_out


@holds("dgrad and wgrad of each group")
def both_gradients(fn) -> int:
    args = with_gradient(SIZES[0], 12, tail=0.0)
    _gradients(fn(*args), *args[:2], SIZES[0], args[3], case_of(SIZES[0]))
    return 1


@holds("square kernels: nothing is transposed by mistake")
def square_gradients(fn) -> int:
    for sizes in SIZES[:3]:
        args = with_gradient(sizes, 13, shape=(M, 6, 6), tail=0.0)
        case = case_of(sizes, extra=", D = F = 6")
        _gradients(on_device(fn, *args, case=case), *args[:2], sizes, args[3], case)
    return 3


@holds("every pattern of empty groups: their gradient is exactly 0")
def empty_gradients(fn) -> int:
    rng = np.random.default_rng(14)
    patterns = [tuple(rng.integers(1, 7, E) * np.array([p >> e & 1 for e in range(E)])) for p in range(2**E)]
    why = "No row, no gradient: an empty group's weight gradient is 0, not what the buffer held."
    for sizes in (*SIZES, *patterns):
        args = with_gradient(sizes, 15, tail=0.0)
        result = on_device(fn, *args, case=case_of(sizes))
        _gradients(result, *args[:2], sizes, args[3], case_of(sizes), why)
    return len(SIZES) + len(patterns)


@holds("the tail reaches nothing, NaN or not, and its own gradient is 0")
def tail_gradients(fn) -> int:
    why = "Both operands of wgrad are masked: a NaN in either meets every number of the sum over rows."
    for sizes in SIZES[:7]:
        for where in ("both", "rows", "d_out"):
            rows, kernels, group_sizes, d_out = with_gradient(sizes, 16)
            rows = np.nan_to_num(rows, nan=2.0) if where == "d_out" else rows
            d_out = np.nan_to_num(d_out, nan=2.0) if where == "rows" else d_out
            case = case_of(sizes, extra=f", past them NaN in {where}")
            result = on_device(fn, rows, kernels, group_sizes, d_out, case=case)
            _gradients(result, rows, kernels, sizes, d_out, case, why)
    return 21


@holds("other shapes")
def gradient_shapes(fn) -> int:
    cases = ((3,), (3, 2, 4)), ((2, 0, 5, 1, 0, 3), (12, 8, 3)), ((0, 0), (1, 3, 2))
    for sizes, shape in cases:
        args = with_gradient(sizes, 17, shape=shape)
        case = case_of(sizes, shape[0])
        result = on_device(fn, *args, case=case)
        _gradients(result, *args[:2], sizes, args[3], case)
    return len(cases)
