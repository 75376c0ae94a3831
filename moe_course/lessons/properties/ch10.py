"""Chapter 10, scaling: FLOPs, the roofline of an expert, and a fit. Oracles count, bisect, and solve in float64."""

import math

import numpy as np

from moe_course.lessons.compare import items, show
from moe_course.lessons.exercise import Broken, holds


def number(value, right, *, case, what="number", why="", suspects=None, within=1e-5) -> float:
    """One number, int or float, up to ``within`` of the right one. ``suspects``: explanation -> wrong number."""
    try:
        found = float(value) if np.shape(value) == () and not isinstance(value, bool | str) else None
    except (TypeError, ValueError):
        found = None
    if found is None:
        raise Broken(case, show(value), show(right), f"Return one number, the {what}.")
    if _near(found, right, within):
        return found
    lines = {line: wrong for line, wrong in (suspects or {}).items() if not _near(right, wrong, within)}
    why = next((line for line, wrong in lines.items() if _near(found, wrong, within)), why)
    raise Broken(case, show(found), show(float(right)), why, what if what != "number" else "")


def _near(found, right, within) -> bool:
    if not math.isfinite(right):
        return found == right
    return abs(found - right) <= within * abs(right)


# ---------------------------------------------------------------- 10.1 a layer of MLA


V3 = (7168, 128, 1536, 512, 128, 64, 128)
"""DeepSeek-V3: d_model, heads, q_rank, kv_rank, nope, rope, v_dim."""
V2_LITE = (2048, 16, 0, 512, 128, 64, 128)


def matrices_of(d, heads, q_rank, kv_rank, nope, rope, v) -> list[tuple[int, int]]:
    """[(rows, columns)] of one layer's weights."""
    query = [(d, q_rank), (q_rank, heads * (nope + rope))] if q_rank else [(d, heads * (nope + rope))]
    return [*query, (d, kv_rank + rope), (kv_rank, heads * (nope + v)), (heads * v, d)]


def layer_of(sizes, seq_len) -> int:
    heads, nope, rope, v = sizes[1], *sizes[4:]
    weights = sum(a * b for a, b in matrices_of(*sizes))
    return 2 * weights + seq_len * heads * (nope + rope + v)


def _random_sizes(seed, q_rank=True) -> tuple[int, ...]:
    rng = np.random.default_rng([100, seed])
    d, heads, q, kv, nope, rope, v = (int(n) for n in rng.choice(np.arange(2, 40), 7, replace=False))
    return d, heads, q if q_rank else 0, kv, nope, rope, v


def _layer(fn, sizes, seq_len, why="") -> None:
    d, heads, q_rank, kv_rank, nope, rope, v = sizes
    right, core = layer_of(sizes, seq_len), seq_len * heads * (nope + rope + v)
    lines = {
        "Multiply-adds: each is two FLOPs.": right / 2,
        "That is a training step, three forwards. One forward is asked for.": 3 * right,
        "A causal token sees half of seq_len on average.": right + core,
        "The rotary key is one for all heads: kv_rank + rope numbers come down, once.": right
        + 2 * d * rope * (heads - 1),
        "The key's rotary part is not made from the latent: up go nope + v_dim for each head.": right
        + 2 * kv_rank * heads * rope,
        "Queries have a rotary part too: nope + rope numbers for each head.": right
        - 2 * (q_rank or d) * heads * rope,
        "Scores compare nope + rope numbers, values sum v_dim.": right - seq_len * heads * rope,
        "Scores are compared in nope + rope numbers, values summed in v_dim: two products.": right
        + seq_len * heads * (nope + rope - v),
        "The output matrix has heads v_dim rows, not d_model.": right - 2 * heads * v * d + 2 * d * d,
        "The output matrix is missing.": right - 2 * heads * v * d,
        "With q_rank 0 queries come from one matrix.": right - 2 * d * heads * (nope + rope) * (q_rank == 0),
    }
    case = f"d_model {d}, {heads} heads, ranks {q_rank} and {kv_rank}, widths {nope}, {rope}, {v}, seq_len {seq_len}"
    number(fn(*sizes, seq_len), right, case=case, what="FLOPs", why=why, suspects=lines)


@holds("at seq_len 0 it is the matrices alone")
def projections(fn) -> int:
    for seed in range(4):
        _layer(fn, _random_sizes(seed), 0, "Nothing is attended to: five matrices, 2 FLOPs an entry.")
    return 4


@holds("q_rank 0: queries straight from d_model")
def straight_queries(fn) -> int:
    for seed in range(4, 7):
        _layer(fn, _random_sizes(seed, False), 0)
    _layer(fn, V2_LITE, 4096)
    return 4


@holds("what a token adds by looking back")
def core_of_half(fn) -> int:
    for seed in range(7, 10):
        sizes = _random_sizes(seed)
        for seq_len in (8, 64):
            _layer(fn, sizes, seq_len)
    return 6


@holds("DeepSeek-V3's layer")
def v3_layer(fn) -> int:
    for seq_len in (4096, 131_072):
        _layer(fn, V3, seq_len)
    return 2


# ---------------------------------------------------------------- 10.2 out of memory's shadow


def ridge_of(d_in, d_out, peak, bandwidth, b_in, b_weight, b_out) -> float:
    """By bisection on the two times."""

    def waits(rows):
        traffic = rows * d_in * b_in + d_in * d_out * b_weight + rows * d_out * b_out
        return traffic / bandwidth >= 2 * rows * d_in * d_out / peak

    low, high = 0.0, 1e15
    if waits(high):
        return math.inf
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if waits(middle) else (low, middle)
    return high


def _ridge(fn, args, why="") -> None:
    d_in, d_out, peak, bandwidth, b_in, b_weight, b_out = args
    right = ridge_of(*args)
    simple = peak * b_weight / (2 * bandwidth)
    lines = {
        "Rows are read and written too: each costs d_in bytes_in + d_out bytes_out of traffic.": simple,
        "A multiply-add is two FLOPs.": ridge_of(d_in, d_out, 2 * peak, bandwidth, b_in, b_weight, b_out),
        "The output has d_out numbers a row, the input d_in.": ridge_of(
            d_in, d_out, peak, bandwidth, b_out, b_weight, b_in
        ),
        "The result has to be written.": ridge_of(d_in, d_out, peak, bandwidth, b_in, b_weight, 0),
        "The rows have to be read.": ridge_of(d_in, d_out, peak, bandwidth, 0, b_weight, b_out),
        "Each operand has its own width in bytes.": ridge_of(
            d_in, d_out, peak, bandwidth, b_weight, b_weight, b_weight
        ),
        "If a row's own traffic takes longer than its arithmetic, no number of rows is enough: math.inf.": (
            d_in * d_out * b_weight / bandwidth
        )
        / (2 * d_in * d_out / peak - (d_in * b_in + d_out * b_out) / bandwidth or math.nan),
    }
    case = f"[{d_in}, {d_out}], {peak:.4g} FLOP/s, {bandwidth:.4g} B/s, bytes {b_in}, {b_weight}, {b_out}"
    found = fn(*args)
    number(found, right, case=case, what="rows", why=why, suspects=lines)


@holds("at so many rows, traffic and arithmetic take equally long")
def equally_long(fn) -> int:
    rng = np.random.default_rng(101)
    for _ in range(6):
        d_in, d_out = (int(n) for n in rng.choice(np.arange(200, 5000), 2, replace=False))
        b_in, b_weight, b_out = (float(b) for b in rng.choice([0.5, 1.0, 2.0, 4.0], 3, replace=False))
        _ridge(
            fn,
            (
                d_in,
                d_out,
                float(rng.uniform(2e14, 1e15)),
                float(rng.uniform(4e12, 9e12)),
                b_in,
                b_weight,
                b_out,
            ),
        )
    return 6


@holds("all bytes count: rows in, weights, rows out")
def all_bytes(fn) -> int:
    for widths in ((1, 1, 2), (2, 1, 1), (2, 2, 4), (4, 1, 1)):
        _ridge(fn, (900, 300, 100e12, 2e12, *widths))
    return 4


@holds("a narrow expert never gets there")
def never(fn) -> int:
    for d_in, d_out in ((64, 4096), (4096, 64), (10, 10)):
        _ridge(fn, (d_in, d_out, 1e15, 3e12, 2, 2, 2))
    return 3


# ---------------------------------------------------------------- 10.3 alpha and beta


def fit_of(kilobytes, microseconds) -> tuple[float, float]:
    """Least squares on relative error; alpha at least 0. In float64, by the normal equations."""
    k, t = np.asarray(kilobytes, np.float64), np.asarray(microseconds, np.float64)
    alpha, slope = _solve(k, t, 1 / t**2)
    if alpha < 0:
        return 0.0, float((k**2 / t**2).sum() / (k / t).sum())
    return alpha, 1 / slope


def _solve(k, t, weight) -> tuple[float, float]:
    matrix = np.array([[weight.sum(), (weight * k).sum()], [(weight * k).sum(), (weight * k**2).sum()]])
    alpha, slope = np.linalg.solve(matrix, [(weight * t).sum(), (weight * k * t).sum()])
    return float(alpha), float(slope)


def measured_of(alpha, beta, count, seed, noise) -> tuple[np.ndarray, np.ndarray]:
    """(kilobytes, microseconds) over three decades, with relative noise."""
    rng = np.random.default_rng([103, seed])
    k = np.exp(rng.uniform(np.log(50), np.log(50_000), count))
    t = (alpha + k / beta) * (1 + noise * rng.normal(size=count))
    return k.astype(np.float32), t.astype(np.float32)


def _fit(fn, k, t, case, why="") -> None:
    alpha, beta = items(fn(k, t), 2, case=case, names="alpha, beta")
    right = fit_of(k, t)
    k, t = k.astype(np.float64), t.astype(np.float64)
    plain, root = _solve(k, t, np.ones_like(t)), _solve(k, t, 1 / t)
    lines = {
        "That is least squares on microseconds: the largest message decides alone. Divide by the measured time.": plain[
            0
        ],
        "Squared relative errors: the weight of a row is 1 / t squared.": root[0],
        "A start-up time is no less than 0.": _solve(k, t, 1 / t**2)[0],
    }
    scale = max(right[0], 1e-3 * float(t.min()))
    if np.shape(alpha) != () or abs(float(alpha) - right[0]) > 2e-3 * scale:
        number(alpha, right[0], case=case, what="alpha", why=why, suspects=lines, within=2e-3)
    slopes = {
        "That is microseconds per kilobyte: beta is the bandwidth, its inverse.": 1 / right[1],
        "That is least squares on microseconds: divide by the measured time.": 1 / plain[1],
        "Squared relative errors: the weight of a row is 1 / t squared.": 1 / root[1],
        "With alpha at 0, fit beta again, alone.": 1 / _solve(k, t, 1 / t**2)[1],
        "The mean of the bandwidths minimises another sum.": float((k / t).mean()),
    }
    number(beta, right[1], case=case, what="beta", why=why, suspects=slopes, within=2e-3)


@holds("exact times give back what made them")
def recovers(fn) -> int:
    for i, (alpha, beta) in enumerate(((20.0, 47.0), (3.0, 400.0), (200.0, 800.0))):
        k, t = measured_of(alpha, beta, 6, i, 0.0)
        _fit(fn, k, t, f"times of alpha {alpha:g} µs and beta {beta:g} GB/s, 6 sizes")
    return 3


@holds("noisy times: the sum of squared relative errors is least")
def least(fn) -> int:
    for i, (alpha, beta, count) in enumerate(((25.0, 50.0, 6), (60.0, 300.0, 11), (10.0, 100.0, 4))):
        k, t = measured_of(alpha, beta, count, 10 + i, 0.08)
        _fit(fn, k, t, f"{count} sizes, 8 % noise")
    return 3


@holds("no start-up time below 0")
def not_negative(fn) -> int:
    for i in range(2):
        k, t = measured_of(0.0, 60.0, 5, 20 + i, 0.02)
        t = t * (1 + 0.3 * (k / k.max())).astype(
            np.float32
        )  # slower as they grow: the line would start below 0
        _fit(fn, k, t, "5 sizes whose bandwidth falls as they grow")
    return 2
