"""Small floats: every code, every scale, and casts against ml_dtypes where its cast is the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_course.quant.formats import (
    DTYPES,
    NAN_SCALE,
    cast,
    decode,
    decode_e8m0,
    encode,
    encode_e8m0,
    format_of,
    magnitude_bits,
    shared_exponent,
    to_codes,
)
from tests.quant.golden import GOLDEN, floats

NAMES = tuple(DTYPES)
encode_jit = jax.jit(encode, static_argnums=1)
decode_jit = jax.jit(decode, static_argnums=1)
scale_jit = jax.jit(shared_exponent, static_argnums=(1, 2))


def by_ml_dtypes(x, name):
    """Codes by ml_dtypes' cast, which rounds to nearest even, of clipped values."""
    f = format_of(name)
    return np.clip(x, -f.max, f.max).astype(np.float32).astype(f.dtype).view(np.uint8)


def all_bfloat16() -> np.ndarray:
    x = np.arange(2**16, dtype=np.uint16).view(jnp.bfloat16).astype(np.float32)
    return x[np.isfinite(x)]


def random_bits(count=200_000, seed=0) -> np.ndarray:
    x = np.random.default_rng(seed).integers(0, 2**32, count, np.uint32).view(np.float32)
    return x[np.isfinite(x)]


def near_the_codes(name) -> np.ndarray:
    """Every value of the format, every tie between two, and the float32 neighbours of both."""
    f = format_of(name)
    values = np.arange(2**f.bits, dtype=np.uint8).view(f.dtype).astype(np.float32)
    values = np.unique(values[np.isfinite(values)])
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2])
    return np.concatenate(
        [points, np.nextafter(points, np.float32(9e9)), np.nextafter(points, np.float32(-9e9))]
    )


@pytest.mark.parametrize("name", NAMES)
def test_b79_ranges_come_from_the_dtype(name):
    f = format_of(name)
    assert f.max == {"e4m3": 448, "e5m2": 57344, "e2m1": 6, "e4m3fnuz": 240, "e5m2fnuz": 57344}[name]
    assert int(encode_jit(jnp.float32(1e9), f)) == f.max_code
    assert float(decode_jit(jnp.uint8(f.max_code), f)) == f.max


def test_b79_a_hard_coded_448_fails_for_fnuz():
    """Scaled to 448, values of the other E4M3 clip at 240; scaled to its own range they do not."""
    f = format_of("e4m3fnuz")
    x = jnp.float32([300.0])
    amax = magnitude_bits(x)
    right = int(shared_exponent(amax, f, "rceil")[0]) - 127
    wrong = int(shared_exponent(amax, format_of("e4m3"), "rceil")[0]) - 127
    back = [float(decode(encode(x, f, -k), f, k)[0]) for k in (right, wrong)]
    assert abs(back[0] - 300) / 300 <= 2**-4
    assert back[1] == 240


@pytest.mark.parametrize("name", NAMES)
def test_every_code_decodes_as_ml_dtypes_says_and_encodes_to_itself(name):
    f = format_of(name)
    codes = np.arange(2**f.bits, dtype=np.uint8)
    want = codes.view(f.dtype).astype(np.float32)
    got = np.asarray(decode_jit(codes, f))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got[~np.isnan(got)]), np.signbit(want[~np.isnan(want)]))
    finite = np.isfinite(want)
    np.testing.assert_array_equal(encode_jit(want[finite], f), codes[finite])


@pytest.mark.parametrize("name", NAMES)
def test_encode_equals_a_clipped_cast(name):
    for x in (all_bfloat16(), random_bits(), near_the_codes(name)):
        np.testing.assert_array_equal(encode_jit(x, format_of(name)), by_ml_dtypes(x, name))


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1"])
@pytest.mark.parametrize("exponent", [-127, -64, -1, 1, 64, 127])
def test_encode_scales_by_any_power_of_two_in_one_rounding(name, exponent):
    """Subnormal inputs too, which XLA:CPU's float arithmetic would flush: the rule never leaves the integers."""
    bits = np.arange(0, 2**23, 1021, dtype=np.uint32)
    x = np.concatenate([all_bfloat16(), random_bits(50_000, 1), bits.view(np.float32)])
    exact = np.ldexp(x.astype(np.float64), exponent)
    f = format_of(name)
    want = np.clip(exact, -f.max, f.max).astype(f.dtype).view(np.uint8)  # from float64: one rounding
    np.testing.assert_array_equal(encode_jit(x, f, exponent), want)


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1"])
def test_decode_scales_exactly_into_the_subnormals_and_past_the_top(name):
    f = format_of(name)
    codes = np.arange(2**f.bits, dtype=np.uint8)
    exponents = np.array([-127, -126, -120, 0, 100, 127], np.int32)
    got = np.asarray(decode_jit(codes[:, None], f, exponents[None]))
    with np.errstate(over="ignore"):
        want = np.ldexp(codes.view(f.dtype).astype(np.float64)[:, None], exponents[None]).astype(np.float32)
    np.testing.assert_array_equal(got.view(np.uint32)[~np.isnan(want)], want.view(np.uint32)[~np.isnan(want)])
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))


def test_b75_casts_saturate():
    """The plain cast does not: that is the bug."""
    x = jnp.float32([448, 464, 464.01, 1e4, -1e4, np.inf])
    assert np.isnan(x.astype(jnp.float8_e4m3fn).astype(jnp.float32)[2])
    np.testing.assert_array_equal(cast(x, "e4m3").astype(jnp.float32), [448, 448, 448, 448, -448, 448])
    assert np.isinf(jnp.float32(61440).astype(jnp.float8_e5m2).astype(jnp.float32))
    assert float(cast(jnp.float32(61440), "e5m2").astype(jnp.float32)) == 57344
    for name in ("e4m3", "e5m2"):
        codes = encode_jit(all_bfloat16(), format_of(name))
        assert np.all(np.isfinite(np.asarray(decode_jit(codes, format_of(name)))))


def test_b77_nan_is_seen_before_a_cast_to_a_format_without_it():
    nan = jnp.float32(np.nan)
    assert np.isnan(decode(encode(nan, format_of("e4m3")), format_of("e4m3")))
    assert np.isnan(decode(encode(nan, format_of("e5m2")), format_of("e5m2")))
    assert format_of("e2m1").nan_code is None
    assert int(encode(nan, format_of("e2m1"))) == 7, "6, as NVIDIA's convert; ml_dtypes gives -0"


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(("table", "name"), [("to_e4m3", "e4m3"), ("to_e2m1", "e2m1")])
def test_golden_casts(table, name, jit):
    x = np.concatenate([floats(bits) for bits, *_ in GOLDEN[table]])
    want = [code for _, code, _ in GOLDEN[table]]
    np.testing.assert_array_equal((encode_jit if jit else encode)(jnp.asarray(x), format_of(name)), want)


def test_golden_scales_round_up():
    x = np.concatenate([floats(bits) for bits, *_ in GOLDEN["to_e8m0"]])
    want = [code for _, code, _ in GOLDEN["to_e8m0"]]
    for f in (encode_e8m0, jax.jit(encode_e8m0)):
        np.testing.assert_array_equal(f(jnp.asarray(x)), want)


def test_b73_a_cast_to_e8m0_rounds_to_nearest_and_has_no_zero():
    """Ours rounds up, so that nothing grows past the range; theirs is why no scale here comes from a cast."""
    x = jnp.float32([3.0, 5.0, 0.0])
    theirs = np.asarray(jax.lax.bitcast_convert_type(x.astype(jnp.float8_e8m0fnu), jnp.uint8))
    np.testing.assert_array_equal(theirs, [129, 129, NAN_SCALE])
    np.testing.assert_array_equal(encode_e8m0(x), [129, 130, 0])


def test_every_e8m0_byte():
    byte = np.arange(256, dtype=np.uint8)
    got = np.asarray(jax.jit(decode_e8m0)(byte))
    np.testing.assert_array_equal(
        got[:255].view(np.uint32), np.ldexp(np.float32(1), np.arange(-127, 128)).view(np.uint32)
    )
    assert np.isnan(got[255])
    np.testing.assert_array_equal(encode_e8m0(jnp.asarray(got)), byte)


# The scale rule, exhaustively.

EXPONENTS = {"e4m3": 8, "e5m2": 15, "e2m1": 2}


@pytest.mark.parametrize("name", EXPONENTS)
@pytest.mark.parametrize("rounding", ["rceil", "floor", "ceil", "even"])
def test_every_power_of_two(name, rounding):
    """A float32 log2 under jit is wrong for 21 of 240 of them."""
    powers = np.ldexp(np.float32(1), np.arange(-112, 128))
    assert len(powers) == 240
    got = np.asarray(scale_jit(magnitude_bits(jnp.asarray(powers)), format_of(name), rounding))
    np.testing.assert_array_equal(got, np.maximum(np.arange(-112, 128) - EXPONENTS[name] + 127, 0))


@pytest.fixture(scope="module")
def binade():
    """Every float32 from 256 up to 512."""
    return (np.arange(2**23, dtype=np.uint32) | np.uint32(135 << 23)).view(np.float32)


def test_every_significand_rceil(binade):
    """ceil(log2(amax / 448)), and what Transformer Engine computes: amax times float32(1/448), rounded up."""
    byte = np.asarray(scale_jit(binade.view(np.uint32), format_of("e4m3"), "rceil"))
    np.testing.assert_array_equal(byte, np.where(binade > 448, 128, 127))
    te = jax.jit(lambda amax: encode_e8m0(amax * np.float32(1 / 448)))(binade)
    np.testing.assert_array_equal(byte, te)


def test_every_significand_floor_and_the_others(binade):
    for rounding, want in (
        ("floor", np.full(2**23, 127)),
        ("ceil", np.where(binade > 256, 128, 127)),
        ("even", np.where(binade >= 496, 128, 127)),
    ):
        np.testing.assert_array_equal(scale_jit(binade.view(np.uint32), format_of("e4m3"), rounding), want)


def test_a_float_log2_is_not_the_rule(binade):
    """The broken twin: the sweep sees the significands beside 512 that log2 rounds over."""
    by_log2 = np.floor(np.log2(binade)).astype(np.int32) - 8 + 127
    assert np.sum(by_log2 != 127) > 0


def test_b74_floor_ceil_and_rceil_are_three_recipes():
    amax = jnp.float32([150, 256, 448, 449, 512])
    want = {
        "floor": [126, 127, 127, 127, 128],
        "ceil": [127, 127, 128, 128, 128],
        "rceil": [126, 127, 127, 128, 128],
    }
    for rounding, bytes_ in want.items():
        np.testing.assert_array_equal(
            shared_exponent(magnitude_bits(amax), format_of("e4m3"), rounding), bytes_
        )
    with pytest.raises(ValueError, match="rceil, floor"):
        shared_exponent(magnitude_bits(amax), format_of("e4m3"), "up")


# Stochastic rounding.


@pytest.mark.parametrize(("value", "nearest"), [(2.3, 2.0), (0.1, 0.0), (-5.5, -6.0), (1e-5, 0.0)])
def test_b83_stochastic_rounding_is_right_on_average(value, nearest):
    f, count = format_of("e2m1"), 200_000
    x = jnp.full(count, value, jnp.float32)
    draws = np.asarray(decode_jit(encode_jit(x, f, 0, jax.random.key(0)), f))
    low, high = np.unique(draws)[[0, -1]]
    deviation = (high - low) / 2 / np.sqrt(count)
    assert abs(draws.mean() - value) <= 5 * max(deviation, np.sqrt(abs(value) * 0.5 / count))
    assert float(decode(encode(x[:1], f), f)[0]) == nearest


def test_b83_grid_points_never_move_and_keys_decide():
    f = format_of("e2m1")
    grid = jnp.tile(jnp.float32([0, -0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -6]), 1000)
    np.testing.assert_array_equal(encode_jit(grid, f, 0, jax.random.key(1)), encode_jit(grid, f))
    x = jnp.full(1000, 2.3, jnp.float32)
    one, again, other = (np.asarray(encode_jit(x, f, 0, jax.random.key(k))) for k in (2, 2, 3))
    np.testing.assert_array_equal(one, again)
    assert np.any(one != other)


def test_wide_inputs_are_refused():
    with pytest.raises(TypeError, match="float32"):
        encode(jnp.int32([1]), format_of("e4m3"))
    with pytest.raises(ValueError, match="e4m3"):
        format_of("e3m4")
    assert to_codes(cast(jnp.float32([1.0]), "e4m3")).dtype == jnp.uint8
