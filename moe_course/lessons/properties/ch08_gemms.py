"""Chapter 08, quantised products: which axis each operand's blocks run along, and blocks that no two experts share."""

import jax
import jax.numpy as jnp
import numpy as np

from moe_course.lessons.compare import close, items
from moe_course.lessons.exercise import Broken, holds
from moe_course.lessons.learner import compiled
from moe_course.lessons.properties.ch08 import exact

# ---------------------------------------------------------------- 08.5 three products, six copies

SMALL = 4
"""Elements of a block of the coarse quantiser below."""


def coarse(a, axis):
    """A quantiser for checks: blocks of four along ``axis`` of a matrix, a power-of-two scale, two bits of mantissa.

    So coarse that blocks along the other axis change many numbers. NumPy in, NumPy out; JAX likewise.
    """
    numpy = isinstance(a, np.ndarray)
    blocks = np.moveaxis(a, axis, -1) if numpy else jnp.moveaxis(a, axis, -1)
    xp = np if numpy else jnp
    shape = blocks.shape
    room = -shape[-1] % SMALL
    split = xp.pad(blocks, ((0, 0), (0, room))).reshape(shape[0], -1, SMALL)
    amax = xp.max(xp.abs(split), axis=-1, keepdims=True)
    bits = amax.view(np.uint32) if numpy else jax.lax.bitcast_convert_type(amax, jnp.uint32)
    power = xp.maximum(bits & 0x7F800000, 1 << 23)  # the power of two below the largest
    scale = power.view(np.float32) if numpy else jax.lax.bitcast_convert_type(power, jnp.float32)
    rounded = xp.round(split / scale * 2) * scale / 2
    return xp.moveaxis(rounded.reshape(shape[0], -1)[:, : shape[-1]], -1, axis)


_coarse = jax.jit(coarse, static_argnums=1)


def quantiser(a, axis):
    """What the check gives as ``q``."""
    if not hasattr(a, "ndim") or a.ndim != 2:
        raise TypeError(f"q takes a matrix and an axis, got {type(a).__name__}")
    if axis not in (0, 1, -1, -2):
        raise TypeError(f"q(a, axis): axis is 0 or 1, got {axis!r}")
    return _coarse(jnp.asarray(a, jnp.float32), int(axis) % 2)


def products(x, w, d_y, axes=(1, 0, 1, 1, 0, 0), q=coarse):
    """(y, d_x, d_w) with the six operands quantised along ``axes``; float64 products of float32 values."""
    operands = [q(a, axis).astype(np.float64) for a, axis in zip((x, w, d_y, w, x, d_y), axes, strict=True)]
    return operands[0] @ operands[1], operands[2] @ operands[3].T, operands[4].T @ operands[5]


SHAPES = ((8, 12, 20), (8, 8, 8), (6, 10, 7))


def matrices(seed, m, k, n):
    """Operands whose rows and columns differ in size, so that the axis of a block matters."""
    rng = np.random.default_rng([85, seed])

    def matrix(*shape):
        size = np.exp2(rng.integers(-3, 4, (shape[0], 1)) + rng.integers(-3, 4, (1, shape[1])))
        return (rng.normal(size=shape) * size).astype(np.float32)

    return matrix(m, k), matrix(k, n), matrix(m, n)


WRONG = {
    "The row-wise copies of x and d_y were used again. wgrad sums over the rows: its blocks run down the columns.": (
        1,
        0,
        1,
        1,
        1,
        1,
    ),
    "The forward copy of w was used again. dgrad sums over the columns of w.": (1, 0, 1, 0, 0, 0),
    "The copies of the forward product were used again. Each product sums over another axis.": (
        1,
        0,
        1,
        0,
        1,
        1,
    ),
    "Every block runs along the axis that stays. It must run along the one that is summed.": (
        0,
        1,
        0,
        0,
        1,
        1,
    ),
    "Everything is quantised along the last axis.": (1, 1, 1, 1, 1, 1),
    "Everything is quantised along the first axis.": (0, 0, 0, 0, 0, 0),
    "d_y was quantised along its rows for wgrad, x was not: both operands of a product need the same axis.": (
        1,
        0,
        1,
        1,
        0,
        1,
    ),
    "x was quantised along its rows for wgrad, d_y was not: both operands of a product need the same axis.": (
        1,
        0,
        1,
        1,
        1,
        0,
    ),
}


def _three(result, x, w, d_y, case) -> None:
    found = items(result, 3, case=case, names="y, d_x, d_w")
    right = products(x, w, d_y)
    kept = coarse(x, 1), coarse(w, 0), coarse(d_y, 1)
    again = [
        q.astype(np.float64) for q in (kept[2], coarse(kept[1], 1), coarse(kept[0], 0), coarse(kept[2], 0))
    ]
    twice = right[0], again[0] @ again[1].T, again[2].T @ again[3]
    exactly = x.astype(np.float64) @ w, d_y.astype(np.float64) @ w.T.astype(np.float64), x.T @ d_y
    for i, name in enumerate(("y", "d_x", "d_w")):
        suspects = {line: products(x, w, d_y, axes)[i] for line, axes in WRONG.items()}
        suspects["A quantised copy was quantised again. Each copy comes from the source."] = twice[i]
        suspects["Nothing is quantised: q(a, axis) gives the values that the product sees."] = exactly[i]
        # A suspect that is right here (dimensions too small to tell) explains nothing.
        close(
            found[i],
            right[i],
            case=f"{case}: {name}",
            axes=("row", "column"),
            terms=20,
            suspects={
                line: twin
                for line, twin in suspects.items()
                if np.shape(twin) == right[i].shape and not np.allclose(twin, right[i])
            },
        )


@holds("blocks run along the axis that is summed")
def summed_axis(fn) -> int:
    m, k, n = SHAPES[0]
    x, w, d_y = matrices(0, m, k, n)
    _three(fn(x, w, d_y, quantiser), x, w, d_y, f"x [{m}, {k}], w [{k}, {n}]")
    return 1


@holds("also where all shapes are alike, or are no whole blocks")
def square_shapes(fn) -> int:
    for seed, (m, k, n) in enumerate(SHAPES[1:], 1):
        for draw in range(2):
            x, w, d_y = matrices(10 * seed + draw, m, k, n)
            _three(fn(x, w, d_y, quantiser), x, w, d_y, f"x [{m}, {k}], w [{k}, {n}]")
    return 4


@holds("what the products see is quantised: six copies, two for each product")
def six_copies(fn) -> int:
    seen = []

    def recording(a, axis):
        seen.append(axis)
        return quantiser(a, axis)

    x, w, d_y = matrices(30, *SHAPES[0])
    case = "x [8, 12], w [12, 20], calls of q counted"
    _three(fn(x, w, d_y, recording), x, w, d_y, case)
    if len(seen) < 6:
        why = "Three products with two operands each: x, w and d_y are quantised twice, each along another axis."
        raise Broken(case, f"{len(seen)} calls", "6", why)
    return 1


# ---------------------------------------------------------------- 08.6 blocks of one expert


def aligned_of(rows, sizes, block, places) -> np.ndarray:
    """Each expert's rows from a multiple of ``block`` on, zeros elsewhere."""
    out, begin, place = np.zeros((places, rows.shape[1])), 0, 0
    for size in sizes:
        out[place : place + size] = rows[begin : begin + size]
        begin += size
        place += -(-size // block) * block
    return out


ROWS = 74
SIZES = ((5, 0, 33, 26), (0, 0, 74, 0), (0, 0, 0, 0), (32, 32, 1, 0), (1, 1, 1, 1), (0, 7, 0, 64))


def _aligned(fn, many_sizes, block, places, tails) -> int:
    run = jax.jit(lambda rows, sizes: fn(rows, sizes, block, places))
    for seed, sizes in enumerate(many_sizes):
        for tail in tails:
            case = f"sizes {list(sizes)} of {ROWS} rows, the others {tail:g}, block {block}, {places} places"
            _aligned_one(run, sizes, block, places, tail, seed, case)
    return len(many_sizes) * len(tails)


def _aligned_one(run, sizes, block, places, tail, seed, case) -> None:
    rows = np.random.default_rng([86, seed]).normal(size=(ROWS, 3)).astype(np.float32)
    rows[sum(sizes) :] = tail
    why = "Under jit the sizes are data: num_places rows, whatever they are."
    result = compiled(run, rows, np.array(sizes, np.int32), case=case + ", under jit", why=why)
    safe = np.where(np.isfinite(rows), rows, 0)
    expected = aligned_of(safe, sizes, block, places)
    _places(result, expected, safe, sizes, case)


def _places(result, expected, rows, sizes, case) -> None:
    """Compare with ``expected``; ``rows`` are those given, with 0 for what is not finite."""
    packed = np.zeros_like(expected)
    packed[: sum(sizes)] = rows[: sum(sizes)][: len(expected)]
    suspects = {"The experts still stand shoulder to shoulder: a block holds rows of two.": packed}
    why = (
        "A place past an expert's own rows holds 0: not the next expert's rows, not what lies past the groups. "
        "at[...].get(mode='fill') with an index past the end gives 0; a negative index does not."
    )
    exact(
        result,
        expected,
        case=case,
        axes=("place", "column"),
        dtype=jnp.float32,
        suspects=suspects if (packed != expected).any() else None,
        why=why,
        zero_sign=False,
    )


@holds("each expert begins a block, zeros fill up")
def begins_a_block(fn) -> int:
    case = "sizes [2, 0, 3], block 4, 12 places"
    rows = np.arange(1, 7, dtype=np.float32)[:, None] * np.array([[1.0, -10.0]], np.float32)
    rows[5] = np.nan
    result = fn(rows, np.array([2, 0, 3], np.int32), 4, 12)
    safe = np.nan_to_num(rows)
    _places(result, aligned_of(safe, (2, 0, 3), 4, 12), safe, (2, 0, 3), case)
    return 1


@holds("empty experts, full blocks, no rows at all; sizes on the device, anything past the groups")
def every_size(fn) -> int:
    return _aligned(fn, SIZES, 32, 224, (np.nan, 1e6))


@holds("blocks of 16, and not a place too many")
def other_blocks(fn) -> int:
    return _aligned(fn, ((5, 0, 33, 26), (32, 32, 0, 10)), 16, 96, (np.nan,))
