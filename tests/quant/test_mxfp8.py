"""MXFP8 against golden vectors, byte for byte, and against the rules of the specification in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_course import quant
from moe_course.quant import (
    quantize_mx,
    quantize_mxfp8,
    swizzle_scales,
    unswizzle_scales,
)
from moe_course.quant.blocks import codes_of, pack, scale_values, unpack
from moe_course.quant.formats import NAN_SCALE, format_of, magnitude_bits, shared_exponent
from tests.oracle import relative_error
from tests.quant.golden import GOLDEN, ROUNDINGS, expected, floats, is_subnormal, matrix

pytestmark = pytest.mark.thorough

VECTORS = [vector["id"] for vector in GOLDEN["mxfp8"]]
EXPONENTS = {"e4m3": 8, "e5m2": 15, "e2m1": 2}
RAISE = {"e4m3": 1.75, "e5m2": 1.75, "e2m1": 1.5}


@partial(jax.jit, static_argnames=("axis", "rounding", "fmt"))
def quantize(x, axis=-1, rounding="rceil", fmt="e4m3"):
    return quantize_mx(x, axis=axis, rounding=rounding, fmt=fmt)


quantize_both = jax.jit(quant.quantize_both, static_argnames=("rounding", "fmt"))
dequantize = jax.jit(quant.dequantize, static_argnums=1)


def in_numpy(x, rounding="rceil", fmt="e4m3"):
    """(scale bytes, codes, values) of blocks [n, 32] in float64, which holds every step exactly; finite inputs."""
    f, x = format_of(fmt), x.astype(np.float64)
    amax = np.abs(x).max(-1)
    fraction, exponent = np.frexp(amax)  # amax = fraction * 2**exponent, fraction in [0.5, 1)
    significand, exponent = 2 * fraction, exponent - 1
    up = {"rceil": significand > RAISE[fmt], "floor": False, "ceil": significand > 1}[rounding]
    byte = np.where(amax == 0, 0, np.clip(exponent - EXPONENTS[fmt] + up + 127, 0, 254)).astype(np.int32)
    scaled = np.clip(np.ldexp(x, 127 - byte[:, None]), -f.max, f.max)
    codes = scaled.astype(f.dtype)
    with np.errstate(over="ignore"):
        values = np.ldexp(codes.astype(np.float64), byte[:, None] - 127).astype(np.float32)
    return byte, codes.view(np.uint8), values


def bits(x):
    return np.asarray(x).view(np.uint32)


# --- byte for byte


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("rounding", ["rceil", "floor"])
def test_golden_vectors(rounding, jit):
    """All 28 finite vectors. The pair with subnormal inputs too: no float arithmetic touches them."""
    x = jnp.asarray(matrix("mxfp8"))
    assert int(np.any(is_subnormal(matrix("mxfp8")), 1).sum()) == 2
    q = (quantize if jit else quantize_mxfp8)(x, rounding=rounding)
    scales, codes = expected("mxfp8", rounding)
    np.testing.assert_array_equal(q.scale[:, 0], scales)
    np.testing.assert_array_equal(codes_of(q), codes)
    want = np.stack([floats(vector[rounding]["dq"]) for vector in GOLDEN["mxfp8"]])
    back = (dequantize if jit else quant.dequantize)(q)
    np.testing.assert_array_equal(bits(back), bits(want))


@pytest.mark.parametrize("rounding", ["ceil", "even"])
def test_golden_vectors_of_one_peer_alone(rounding):
    """torchao's other two modes. At byte 0 it divides by 2**-126 and decodes with 2**-127: a factor of 2 lost."""
    q = quantize(matrix("mxfp8"), rounding=rounding)
    scales, codes = expected("mxfp8", rounding)
    np.testing.assert_array_equal(q.scale[:, 0], scales)
    differs = np.any(np.asarray(codes_of(q)) != codes, axis=1)
    assert {name for name, wrong in zip(VECTORS, differs, strict=True) if wrong} <= {
        "byte0_top",
        "min_normal",
    }
    assert np.all(scales[differs] == 0)
    halved = np.where(codes[differs] & 127, codes[differs] + 8, 0)
    np.testing.assert_array_equal(np.asarray(codes_of(q))[differs] & 127, halved & 127)


@pytest.mark.parametrize("rounding", ["rceil", "floor"])
def test_subnormal_vectors_through_numpy(rounding):
    """The same rules in float64 NumPy, which flushes nothing: the golden bytes do not come from a flush."""
    byte, codes, values = in_numpy(matrix("mxfp8"), rounding)
    scales, want = expected("mxfp8", rounding)
    np.testing.assert_array_equal(byte, scales)
    np.testing.assert_array_equal(codes, want)
    np.testing.assert_array_equal(
        bits(values), bits(np.stack([floats(v[rounding]["dq"]) for v in GOLDEN["mxfp8"]]))
    )


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("jit", [False, True])
def test_golden_mxfp4(rounding, jit):
    q = (quantize if jit else quantize_mx)(jnp.asarray(matrix("mxfp4")), rounding=rounding, fmt="e2m1")
    scales, codes = expected("mxfp4", rounding, per_byte=False)
    np.testing.assert_array_equal(q.scale[:, 0], scales)
    np.testing.assert_array_equal(codes_of(q), codes)


DISTRIBUTIONS = {
    "normal": lambda rng, n: rng.standard_normal((n, 32)),
    "student-t": lambda rng, n: rng.standard_t(3, (n, 32)),
    "bfloat16": lambda rng, n: rng.standard_normal((n, 32)).astype(jnp.bfloat16),
    "powers of two": lambda rng, n: np.ldexp(
        rng.choice([-1.0, 1.0], (n, 32)), rng.integers(-126, 127, (n, 32))
    ),
    "scales of all sizes": lambda rng, n: np.ldexp(
        rng.standard_normal((n, 32)), rng.integers(-120, 120, (n, 1))
    ),
    "subnormal amax": lambda rng, n: np.ldexp(rng.standard_normal((n, 32)), rng.integers(-160, -125, (n, 1))),
}


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "e2m1"])
@pytest.mark.parametrize("rounding", ["rceil", "floor", "ceil"])
@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_equals_the_specification_in_float64(kind, rounding, fmt):
    x = DISTRIBUTIONS[kind](np.random.default_rng(0), 2000).astype(np.float32)
    q = quantize(x, rounding=rounding, fmt=fmt)
    byte, codes, values = in_numpy(x, rounding, fmt)
    np.testing.assert_array_equal(q.scale[:, 0], byte)
    np.testing.assert_array_equal(codes_of(q), codes)
    np.testing.assert_array_equal(bits(dequantize(q)), bits(values))


# --- properties


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_error_is_bounded_by_the_format(fmt):
    """RCEIL: half a step of the largest magnitude and below, or half a subnormal step of the scale."""
    f = format_of(fmt)
    x = DISTRIBUTIONS["student-t"](np.random.default_rng(1), 500).astype(np.float32)
    q = quantize(x, fmt=fmt)
    error = np.abs(np.asarray(dequantize(q), np.float64) - x)
    smallest = 2.0 ** (f.min_exponent - f.mantissa_bits) * np.asarray(scale_values(q), np.float64)
    assert np.all(error <= np.maximum(2.0 ** -(f.mantissa_bits + 1) * np.abs(x), smallest / 2))


def test_b72_a_zero_block_stays_zero():
    for rounding in ROUNDINGS:
        for fmt in ("e4m3", "e5m2", "e2m1"):
            q = quantize(np.zeros((2, 64), np.float32), rounding=rounding, fmt=fmt)
            assert not np.any(q.scale), "byte 0 is 2**-127, not NaN"
            assert not np.any(codes_of(q))
            np.testing.assert_array_equal(dequantize(q), np.zeros((2, 64)))


def test_b72_the_broken_twin():
    """x / scale, as references write it: on the CPU 2**-127 is flushed and 0 / 0 is NaN."""

    @jax.jit
    def twin(x):
        scale = jnp.exp2(jnp.float32(-127)) + jnp.max(jnp.abs(x)) * 0
        return (x / scale).astype(jnp.float8_e4m3fn).astype(jnp.float32)

    assert np.all(np.isnan(twin(np.zeros(32, np.float32))))


def test_b73_nothing_exceeds_the_range_under_rceil():
    x = DISTRIBUTIONS["scales of all sizes"](np.random.default_rng(2), 5000).astype(np.float32)
    for fmt in ("e4m3", "e5m2"):
        amax = jnp.max(magnitude_bits(jnp.asarray(x)), 1)
        byte = np.asarray(shared_exponent(amax, format_of(fmt), "rceil"), np.int64)
        scaled = np.ldexp(np.abs(x.astype(np.float64)).max(1), 127 - byte)
        assert np.all(scaled <= format_of(fmt).max)
        nearest = np.abs(x).max(1) / format_of(fmt).max  # the twin: a cast, which rounds to nearest
        by_cast = nearest.astype(jnp.float8_e8m0fnu).astype(np.float64)
        assert np.any(np.abs(x.astype(np.float64)).max(1) / by_cast > format_of(fmt).max)


@pytest.mark.parametrize(("amax", "lost"), [(449, 0.002), (500, 0.104), (511, 0.123)])
def test_b74_floor_clips_and_rceil_does_not(amax, lost):
    x = np.zeros((1, 32), np.float32)
    x[0, 0] = amax
    floor, rceil = (float(dequantize(quantize(x, rounding=r))[0, 0]) for r in ("floor", "rceil"))
    assert (amax - floor) / amax == pytest.approx(lost, abs=5e-4)
    assert abs(rceil - amax) / amax <= 2**-4


def test_b75_no_finite_input_becomes_nan():
    x = np.float32([[3.4e38, -3.4e38] + [1e30] * 30, [1e-45] * 32, [448.0] * 31 + [464.01]])
    for rounding in ("rceil", "floor"):
        for fmt in ("e4m3", "e5m2"):
            assert not np.any(np.isnan(dequantize(quantize(x, rounding=rounding, fmt=fmt))))


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "e2m1"])
def test_b77_a_block_with_nan_or_infinity_is_nan_and_its_neighbours_are_not(fmt):
    bad = np.concatenate([matrix("mxfp8_nonfinite"), np.full((1, 32), -np.inf, np.float32)])
    good = np.random.default_rng(0).standard_normal(bad.shape).astype(np.float32)
    q = quantize(np.concatenate([good, bad, good], axis=1), fmt=fmt)
    np.testing.assert_array_equal(q.scale[:, 1], NAN_SCALE)
    back, alone = dequantize(q), quantize(good, fmt=fmt)
    assert np.all(np.isnan(back[:, 32:64]))
    for block in (back[:, :32], back[:, 64:]):
        np.testing.assert_array_equal(block, dequantize(alone))


@pytest.mark.parametrize("length", [0, 1, 32, 33])
@pytest.mark.parametrize("axis", [0, 1])
def test_b80_a_short_last_block_is_a_block_of_its_own(length, axis):
    x = np.random.default_rng(0).standard_normal((length, 40)).astype(np.float32)
    x = x if axis == 0 else x.T.copy()
    q = quantize(x, axis=axis)
    assert q.data.shape == x.shape
    assert q.scale.shape[axis] == -(-length // 32)
    padded = np.pad(x, [(0, -n % 32 if i == axis else 0) for i, n in enumerate(x.shape)])
    crop = tuple(slice(0, n) for n in x.shape)
    np.testing.assert_array_equal(dequantize(q), np.asarray(dequantize(quantize(padded, axis=axis)))[crop])


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_any_axis(axis, fmt):
    x = np.random.default_rng(0).standard_normal((64, 33, 96)).astype(np.float32)
    q = quantize(x, axis=axis, fmt=fmt)
    last = quantize(np.moveaxis(x, axis, -1), fmt=fmt)
    np.testing.assert_array_equal(np.moveaxis(np.asarray(codes_of(q)), axis, -1), codes_of(last))
    np.testing.assert_array_equal(np.moveaxis(np.asarray(dequantize(q)), axis, -1), dequantize(last))


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("length", [0, 1, 6, 7])
def test_packed_bytes(axis, length):
    codes = np.random.default_rng(0).integers(0, 16, (4, 4), np.uint8)
    codes = np.resize(codes, (length, 4)) if axis == 0 else np.resize(codes, (4, length))
    packed = np.asarray(pack(jnp.asarray(codes), axis))
    first = np.moveaxis(codes, axis, 0)
    if length > 1:
        np.testing.assert_array_equal(np.moveaxis(packed, axis, 0)[0], first[0] | first[1] << 4)
    back = np.moveaxis(np.asarray(unpack(jnp.asarray(packed), axis)), axis, 0)
    np.testing.assert_array_equal(back[:length], first)
    assert back.shape[0] == length + length % 2


def test_bfloat16_gives_the_bytes_of_its_float32_values():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 64)), jnp.bfloat16)
    a, b = quantize(x), quantize(x.astype(jnp.float32))
    assert jax.tree.all(jax.tree.map(lambda p, q: np.array_equal(codes(p), codes(q)), a, b))
    assert dequantize(a, jnp.bfloat16).dtype == jnp.bfloat16
    np.testing.assert_array_equal(dequantize(a, jnp.bfloat16).astype(jnp.float32), dequantize(a))


def codes(x):
    return np.asarray(x).view(np.uint8)


# --- two copies


def test_b81_each_copy_comes_from_the_source():
    x = np.full((32, 32), 1e-4, np.float32)
    x[0, 0] = 448
    row, column = quantize_both(jnp.asarray(x))
    assert row.scale.shape == (32, 1)
    assert column.scale.shape == (1, 32)
    np.testing.assert_array_equal(row.scale[:, 0], [127] + [105] * 31)
    np.testing.assert_array_equal(column.scale[0], [127] + [105] * 31)
    assert np.sum(np.asarray(dequantize(row)) != np.asarray(dequantize(column))) == 62
    assert row.rounding == column.rounding


def test_b81_row_scales_laid_along_columns():
    """The square matrix, where shapes do not give the bug away: scales of rows spread over factors."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((64, 64)) * np.exp(3 * rng.standard_normal((64, 1)))).astype(np.float32)
    row, column = quantize_both(jnp.asarray(x))
    wrong = jax.tree.unflatten(jax.tree.structure(column), [row.data, row.scale.T])
    assert relative_error(dequantize(column), x) < 2**-3
    assert relative_error(dequantize(wrong), x) > 1
    twice = quantize(dequantize(row), axis=0)
    assert not np.array_equal(codes(twice.data), codes(column.data)), "requantising rounds twice"
    assert relative_error(dequantize(quantize_both(jnp.asarray(x), rounding="floor")[1]), x) < 2**-3


@pytest.mark.parametrize("rounding", ["rceil", "floor"])
def test_b81_both_copies_use_the_same_rounding(rounding):
    x = np.full((32, 32), 500, np.float32)
    for q in quantize_both(jnp.asarray(x), rounding=rounding):
        assert np.all(q.scale == (128 if rounding == "rceil" else 127))


def test_b86_scales_move_with_their_tokens():
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32) * np.float32(
        [[1], [2], [4], [8]]
    )
    order = np.array([2, 0, 3, 1])
    q = quantize(x)
    moved = jax.tree.map(lambda leaf: leaf[order], q)
    np.testing.assert_array_equal(dequantize(moved), np.asarray(dequantize(q))[order])
    data_alone = jax.tree.unflatten(jax.tree.structure(q), [q.data[order], q.scale])
    assert not np.array_equal(dequantize(data_alone), np.asarray(dequantize(q))[order])


# --- swizzle


@pytest.mark.parametrize("shape", [(128, 4), (256, 8), (384, 12), (1, 1), (130, 5), (127, 3)])
def test_swizzle_is_a_permutation_with_an_inverse(shape):
    scale = np.random.default_rng(0).integers(1, 255, shape, np.uint8)
    swizzled = np.asarray(swizzle_scales(jnp.asarray(scale)))
    assert swizzled.size % 512 == 0
    np.testing.assert_array_equal(unswizzle_scales(jnp.asarray(swizzled), *shape), scale)
    assert np.sum(swizzled != 0) == scale.size
    tiles = -(-shape[1] // 4)
    for i in range(0, shape[0], 7):
        for j in range(shape[1]):
            at = (i // 128 * tiles + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4
            assert swizzled[at] == scale[i, j]


def test_swizzle_golden_offsets():
    names = jnp.arange(256 * 8, dtype=jnp.int32).reshape(256, 8)
    swizzled = np.asarray(swizzle_scales(names))
    for i, j, offset in GOLDEN["swizzle_8_blocks"]:
        assert swizzled[offset] == 8 * i + j


# --- twins that the vectors must reject


MUTANTS = {
    "floor for rceil": lambda x: quantize(x, rounding="floor"),
    "ceil for rceil": lambda x: quantize(x, rounding="ceil"),
    "e5m2 for e4m3": lambda x: quantize(x, fmt="e5m2"),
    "ties up from zero": lambda x: quantize(jnp.where(x == 17, jnp.nextafter(x, jnp.float32(99)), x)),
    "subnormals flushed": lambda x: quantize(jnp.where(is_subnormal(np.asarray(x)), 0, x)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_b88_broken_twins_fail(mutant):
    q = MUTANTS[mutant](jnp.asarray(matrix("mxfp8")))
    scales, want = expected("mxfp8", "rceil")
    assert not (np.array_equal(q.scale[:, 0], scales) and np.array_equal(codes_of(q), want))


def test_bad_arguments():
    x = jnp.ones((2, 32))
    with pytest.raises(ValueError, match="quantize_mx"):
        quantize_mxfp8(x, fmt="e2m1")
    with pytest.raises(ValueError, match="rceil"):
        quantize_mxfp8(x, rounding="nearest")
    with pytest.raises(TypeError, match="float32"):
        quantize_mxfp8(jnp.ones((2, 32), jnp.int32))
