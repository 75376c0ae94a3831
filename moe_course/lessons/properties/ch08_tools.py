"""Chapter 08, FP4's tools and delayed scaling: two levels of scale, stochastic rounding, the amax history."""

import jax
import jax.numpy as jnp
import numpy as np

from moe_course.lessons.compare import array_of, close, items
from moe_course.lessons.exercise import Broken, holds
from moe_course.lessons.learner import compiled
from moe_course.lessons.properties.ch08 import E4M3, exact, nearest

E2M1 = jnp.float4_e2m1fn
GRID = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

# ---------------------------------------------------------------- 08.7 two levels of scale


def two_levels_of(x):
    """(tensor scale, block scales, elements), float64: one block of 16 in each row."""
    x = np.asarray(x, np.float64)
    amax = np.abs(x).max(axis=-1, initial=0.0)
    tensor = amax.max() / 2688 if amax.max() > 0 else 1.0
    scale = nearest(amax / 6 / tensor, 3, -6, 448.0)
    step = (scale * tensor)[:, None]
    return tensor, scale, nearest(np.where(step > 0, x / np.where(step > 0, step, 1), 0.0), 1, 0, 6.0)


def _levels(fn, x, case, why="", jit=True) -> None:
    if jit:
        how = "Under jit x is data: no NumPy, no float(), no if."
        result = compiled(jax.jit(fn), x, case=case + ", under jit", why=how)
    else:
        result = fn(x)
    found = items(result, 3, case=case, names="tensor_scale, scale, codes")
    tensor, scale, codes = two_levels_of(x)
    amax = np.abs(x.astype(np.float64)).max(axis=-1, initial=0.0)
    exactly = np.where(amax > 0, amax / 6, 1)[:, None]
    lines = {
        "This is 1 / scale. Codes times scale times tensor_scale are the values.": 1 / tensor,
        "The 6 is missing: the tensor's largest should become 448 times 6 times tensor_scale.": amax.max()
        / 448,
        "The 448 is missing: the tensor's largest should become 448 times 6 times tensor_scale.": amax.max()
        / 6,
    }
    close(found[0], np.float64(tensor), case=f"{case}: tensor_scale", suspects=lines, what="tensor_scale")
    single = nearest(amax / 6, 3, -6, 448.0)
    lines = {"The block's scale is relative to the tensor's: divide by tensor_scale.": single}
    if not (single != scale).any():
        lines = None
    exact(
        found[1],
        scale,
        case=f"{case}: scale",
        axes=("block",),
        dtype=E4M3,
        suspects=lines,
        what="scale",
        why=why,
    )
    lines = {
        "The elements were divided by the exact scale. Divide by the rounded one: it is the one that is stored.": nearest(
            x / exactly, 1, 0, 6.0
        )
    }
    if not (next(iter(lines.values())) != codes).any():
        lines = None
    exact(
        found[2],
        codes,
        case=f"{case}: codes",
        axes=("block", "element"),
        dtype=E2M1,
        suspects=lines,
        what="codes array",
        why=why,
        zero_sign=False,
    )


def blocks_of_16(seed, rows, spread=4) -> np.ndarray:
    rng = np.random.default_rng([87, seed])
    return (rng.normal(size=(rows, 16)) * np.exp2(rng.integers(-spread, spread + 1, (rows, 1)))).astype(
        np.float32
    )


@holds("by hand: 5 under a tensor scale of 1 comes back as 4.875")
def five(fn) -> int:
    x = np.zeros((2, 16), np.float32)
    x[0, :3], x[1, 0] = (5, -1, 2.5), 2688
    why = "5 / 6 rounds to 0.8125; 5 / 0.8125 is 6.15, and 6 is the largest code."
    _levels(fn, x, "[[5, -1, 2.5, 0, ...], [2688, 0, ...]]", why, jit=False)
    return 1


@holds("scales and codes of random blocks")
def random_blocks(fn) -> int:
    for seed in range(3):
        _levels(fn, blocks_of_16(seed, 12), "x [12, 16], blocks of different sizes")
    _levels(fn, blocks_of_16(4, 12) * np.float32(1e-6), "x [12, 16] of size 1e-6")
    _levels(fn, blocks_of_16(5, 1), "x [1, 16]")
    return 5


@holds("zeros stay zeros: a block, a tensor, and a block far below the others")
def nothing_is_nan(fn) -> int:
    why = "A block scale of 0 divides nothing: its elements are 0. A tensor of zeros has tensor_scale 1."
    x = blocks_of_16(6, 12)
    x[3] = 0
    x[7] *= np.float32(1e-9)
    _levels(fn, x, "x [12, 16], block 3 zeros, block 7 a billionth", why)
    _levels(fn, np.zeros((12, 16), np.float32), "x [12, 16], zeros", why)
    return 3


# ---------------------------------------------------------------- 08.8 stochastic rounding

DRAWS = 5_000
VALUES = np.array(
    [
        0.1,
        0.25,
        0.7,
        1.2,
        1.25,
        1.9,
        2.3,
        2.9,
        3.1,
        3.7,
        4.4,
        5.5,
        -0.3,
        -0.75,
        -1.6,
        -2.3,
        -3.9,
        -5.1,
        0.02,
    ],
    np.float32,
)


def neighbours(x):
    """(the value of E2M1 below |x|, the one above)."""
    size = np.minimum(np.abs(np.asarray(x, np.float64)), 6.0)
    above = np.searchsorted(GRID, size)
    return GRID[np.maximum(above - 1, 0)], GRID[above]


def _draws(fn, x, seed, case) -> np.ndarray:
    """``fn(x, key)`` under jit; ``x`` [VALUES, DRAWS], one shape for all, so that it compiles once."""
    why = "Under jit the numbers are data: no NumPy, no if."
    result = compiled(jax.jit(fn), x, jax.random.key(seed), case=case, why=why)
    return array_of(result, case=case, shape=x.shape, kind="f", dtype=jnp.float32).astype(np.float64)


@holds("a number goes to one of its two neighbours")
def to_a_neighbour(fn) -> int:
    x = np.repeat(VALUES[:, None], DRAWS, axis=1)
    found = _draws(fn, x, 0, f"{len(VALUES)} numbers, {DRAWS:,} times each")
    for i, value in enumerate(VALUES):
        low, high = (float(np.copysign(n, value)) for n in neighbours(value))
        off = ~np.isin(found[i], (low, high))
        if off.any():
            why = "E2M1 has 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. The steps differ."
            raise Broken(f"{value:g}, {DRAWS:,} times", f"{found[i][off][0]:g}", f"{low:g} or {high:g}", why)
    return len(VALUES)


@holds("right on average: up as often as it is near the upper one")
def unbiased(fn) -> int:
    x = np.repeat(VALUES[:, None], DRAWS, axis=1)
    found = _draws(fn, x, 0, f"{len(VALUES)} numbers, {DRAWS:,} times each")
    for i, value in enumerate(VALUES):
        low, high = neighbours(value)
        chance = (abs(float(value)) - low) / (high - low)
        deviation = (high - low) * np.sqrt(chance * (1 - chance) / DRAWS)
        mean = found[i].mean()
        if abs(mean - float(value)) > 5 * deviation + 1e-6:
            why = (
                "Up with a probability equal to the distance from the lower neighbour, in units of the step between "
                "the two, which is 0.5, 1 or 2."
            )
            raise Broken(f"{value:g}, {DRAWS:,} times", f"{mean:.3f} on average", f"{float(value):.3f}", why)
    return len(VALUES)


@holds("what E2M1 has stays, and beyond 6 it saturates")
def grid_stays(fn) -> int:
    x = np.concatenate([GRID, -GRID, [6.5, -7.0, 1e6]]).astype(np.float32)
    x = np.repeat(x[:, None], DRAWS, axis=1)
    found = _draws(fn, x, 1, "the values of E2M1, and beyond")
    exact(
        found.astype(np.float32),
        np.clip(x, -6, 6),
        case="the values of E2M1, and 6.5, -7, 1e6",
        axes=("value", "draw"),
        zero_sign=False,
        why="A number that the format has is not moved, whatever is drawn; the largest is 6.",
    )
    return len(x)


@holds("every number has its own draw, every key its own draws")
def own_draws(fn) -> int:
    x = np.full((len(VALUES), DRAWS), 2.3, np.float32)
    case = f"2.3 everywhere, x {list(x.shape)}"
    one, other = _draws(fn, x, 2, case), _draws(fn, x, 3, case)
    why = "Draw with the key that is given, and a number for each element: jax.random.uniform(key, x.shape)."
    if (one == other).all():
        raise Broken(case + ", two keys", "the same answer", "two answers", why)
    if any((one[0] == row).all() for row in one[1:]) or any((one[:, :1] == one).all(axis=1)):
        raise Broken(case, "rows or columns that are alike", "a draw for each element", why)
    return 2


# ---------------------------------------------------------------- 08.9 the amax history

LARGEST = float(np.finfo(np.float32).max)


def next_of(history, scale, amax, limit):
    """(history, scale) after a step, float64; newest first."""
    history = np.concatenate([amax[None], history[:-1]]).astype(np.float64)
    top = history.max(axis=0)
    safe = np.where(top > 0, top, 1.0)
    return history, np.where(top > 0, np.minimum(limit / safe, LARGEST), scale)


def _step(result, history, scale, amax, limit, case, why="") -> None:
    found = items(result, 2, case=case, names="history, scale")
    right = next_of(history, scale, amax, limit)
    lines = {
        "The newest amax goes in front and the oldest leaves.": np.concatenate([history[1:], amax[None]]),
        "The history slides over the steps, the experts stay in their columns.": np.concatenate(
            [amax[:, None], history[:, :-1]], axis=1
        )
        if history.shape[0] == history.shape[1]
        else None,
        "The history did not move.": history,
    }
    lines = {
        line: twin for line, twin in lines.items() if twin is not None and not np.array_equal(twin, right[0])
    }
    exact(
        found[0],
        right[0],
        case=f"{case}: history",
        axes=("step", "expert"),
        suspects=lines,
        what="history",
        zero_sign=False,
    )
    amax, history = amax.astype(np.float64), history.astype(np.float64)
    old = history.max(axis=0)
    newest = np.where(amax > 0, limit / np.where(amax > 0, amax, 1), scale)
    lines = {
        "The scale follows the largest of the whole history, not the newest amax alone.": newest,
        "The scale must know this step's amax: the next step uses it.": np.where(
            old > 0, limit / np.where(old > 0, old, 1), scale
        ),
        "The scale multiplies: limit / amax, not amax / limit.": np.where(
            right[0].max(axis=0) > 0, right[0].max(axis=0) / limit, scale
        ),
        "The largest over all experts: each expert has its own scale.": np.full_like(
            right[1], limit / max(right[0].max(), 1e-30)
        ),
    }
    lines = {line: twin for line, twin in lines.items() if not np.allclose(twin, right[1])}
    # Scales of experts differ by powers of ten: compare each for itself.
    close(
        np.asarray(found[1])[..., None] if hasattr(found[1], "shape") else found[1],
        right[1][..., None],
        case=f"{case}: scale",
        axes=("expert",),
        suspects={line: twin[..., None] for line, twin in lines.items()},
        what="scale",
        why=why,
    )


def _compiled_step(fn, history, scale, amax, limit, case, why="") -> None:
    run = jax.jit(lambda *args: fn(*args, limit))
    result = compiled(
        run, history, scale, amax, case=case + ", under jit", why="Under jit the amaxes are data."
    )
    _step(result, history, scale, amax, limit, case, why)


def state_of(seed, steps, experts):
    rng = np.random.default_rng([89, seed])
    size = np.exp2(rng.integers(-12, 12, experts))
    history = rng.uniform(0.5, 4, (steps, experts)) * size
    amax, scale = rng.uniform(0.5, 4, experts) * size, rng.uniform(1, 100, experts)
    return history.astype(np.float32), scale.astype(np.float32), amax.astype(np.float32)


@holds("by hand: 1, 8, 2, 2, 2 with a history of three")
def steps_by_hand(fn) -> int:
    history, scale = np.zeros((3, 1), np.float32), np.ones(1, np.float32)
    for amax in (1.0, 8.0, 2.0, 2.0, 2.0, 2.0):
        newest = np.array([amax], np.float32)
        case = f"history {[round(float(h), 2) for h in history[:, 0]]}, amax {amax:g}"
        _step(fn(history, scale, newest, 448.0), history, scale, newest, 448.0, case)
        history, scale = (a.astype(np.float32) for a in next_of(history, scale, newest, 448.0))
    return 6


@holds("each expert for itself, in both formats")
def each_expert(fn) -> int:
    for seed, (steps, experts) in enumerate(((4, 3), (3, 3), (1, 5))):
        for limit in (448.0, 57344.0):
            state = state_of(seed, steps, experts)
            _compiled_step(fn, *state, limit, f"history [{steps}, {experts}], limit {limit:g}")
    return 6


@holds("an expert that had no rows yet keeps its scale")
def no_rows_yet(fn) -> int:
    why = "448 / 0 is inf, and inf * 0 is NaN: where the whole history is 0 the scale stays as it was."
    history, scale, amax = state_of(10, 4, 3)
    history[:, 1], amax[1], amax[2] = 0, 0, 0
    _compiled_step(
        fn, history, scale, amax, 448.0, "expert 1 without rows in any step, expert 2 in this", why
    )
    history, scale, amax = state_of(11, 4, 3)
    history[:3, 0], amax[0] = 0, 0  # the last rows of expert 0 leave the history
    _compiled_step(fn, history, scale, amax, 448.0, "the only amax of expert 0 leaves the history", why)
    return 2


@holds("an amax too small for a scale gives the largest scale there is")
def tiny_amax(fn) -> int:
    history, scale, amax = state_of(12, 4, 3)
    history[:, 0], amax[0] = 0, 2e-38
    why = "448 / 2e-38 is more than float32 holds: cap it, inf times 0 is NaN."
    _compiled_step(fn, history, scale, amax, 448.0, "an expert with amax 2e-38", why)
    return 1
