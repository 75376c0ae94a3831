"""FP8 by tensor, now and delayed, and by DeepSeek-V3's tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_course import quant
from moe_course.quant import init_delayed_state, quantize_fp8, quantize_fp8_blocks, quantize_fp8_delayed
from moe_course.quant.blocks import codes_of

current = jax.jit(quantize_fp8, static_argnames=("axis", "fmt"))
tiles = jax.jit(quantize_fp8_blocks, static_argnames=("axis", "square", "fmt", "power_of_two"))
delayed = jax.jit(quantize_fp8_delayed, static_argnames=("axis", "fmt", "algorithm", "margin"))
dequantize = jax.jit(quant.dequantize, static_argnums=1)
MAX = {"e4m3": 448.0, "e5m2": 57344.0}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("fmt", MAX)
def test_current_scaling_is_the_definition(fmt):
    x = normal(8, 48)
    q = current(x, fmt=fmt)
    scale = np.float32(MAX[fmt]) / np.abs(x).max()
    want = (x * scale).clip(-MAX[fmt], MAX[fmt]).astype(q.data.dtype)
    np.testing.assert_array_equal(codes_of(q), want.view(np.uint8))
    np.testing.assert_array_equal(dequantize(q), want.astype(np.float32) * (1 / scale))
    assert q.scale.size == 1


def test_b72_a_tensor_of_zeros():
    for q in (current(np.zeros((2, 130), np.float32)), tiles(np.zeros((2, 130), np.float32))):
        assert not np.any(dequantize(q))
        assert np.all(q.scale == 1)


@pytest.mark.parametrize("tiny", [1e-38, 1e-44])
def test_amax_too_small_for_a_scale(tiny):
    x = np.full((1, 128), tiny, np.float32)
    for q in (current(x), tiles(x), tiles(x, power_of_two=True)):
        assert np.all(np.isfinite(dequantize(q)))
        assert np.all(np.abs(dequantize(q)) <= 2e-38)


def test_b77_non_finite_values():
    x = normal(2, 256)
    x[0, 3], x[0, 5] = np.nan, np.inf
    back, clean = (np.asarray(dequantize(current(a))) for a in (x, np.where(np.isfinite(x), x, 0)))
    assert np.all(np.isnan(back[0, [3, 5]]))
    mask = np.isfinite(x)
    np.testing.assert_array_equal(back[mask], clean[mask])
    back = np.asarray(dequantize(tiles(x)))
    assert np.all(np.isnan(back[0, :128]))
    np.testing.assert_array_equal(back[:, 128:], dequantize(tiles(x[:, 128:])))
    np.testing.assert_array_equal(back[1], dequantize(tiles(x))[1])


def test_delayed_scaling_looks_back():
    state = init_delayed_state(3)
    amaxes, scales = [1.0, 8.0, 2.0, 2.0, 2.0, 2.0], []
    for amax in amaxes:
        scales.append(float(state.scale))
        q, state = delayed(jnp.float32([[amax, -0.5]]), state)
        assert float(q.scale[0, 0]) == np.float32(1) / np.float32(scales[-1])
    assert scales == [1, 448, 56, 56, 56, 224]
    np.testing.assert_array_equal(state.amax_history, [2, 2, 2])


def test_delayed_scaling_clips_what_grows_and_recovers():
    _, state = delayed(jnp.float32([[1.0]]), init_delayed_state(4))
    q, state = delayed(jnp.float32([[8.0]]), state)
    assert float(dequantize(q)[0, 0]) == 1, "clipped to the amax of the step before"
    q, state = delayed(jnp.float32([[8.0]]), state)
    assert float(dequantize(q)[0, 0]) == 8


def test_delayed_options():
    state = init_delayed_state(4)
    for amax in (8.0, 1.0):
        _, state = delayed(jnp.float32([[amax]]), state, algorithm="most_recent", margin=1)
    assert float(state.scale) == 224
    _, kept = delayed(jnp.float32([[0.0]]), init_delayed_state(2))
    assert float(kept.scale) == 1, "no amax yet: the scale stays"


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_tiles_of_128(axis, power_of_two):
    x = normal(200, 130) * np.exp(normal(200, 130, seed=1))
    q = tiles(x, axis=axis, power_of_two=power_of_two)
    assert q.scale.shape == ((2, 130) if axis == 0 else (200, 2))
    first = x[:128] if axis == 0 else x[:, :128]
    amax = np.abs(first).max(axis)
    scale = amax / np.float32(448)
    if power_of_two:
        scale = np.exp2(np.ceil(np.log2(scale)))
    np.testing.assert_array_equal(np.take(np.asarray(q.scale), 0, axis), scale)
    np.testing.assert_array_equal(
        np.asarray(codes_of(q))[:128, :128],
        (x[:128, :128] / np.expand_dims(scale, axis)[:128, :128])
        .clip(-448, 448)
        .astype(jnp.float8_e4m3fn)
        .view(np.uint8),
    )
    assert np.all(np.abs(np.asarray(dequantize(q)) - x) <= np.maximum(2**-4 * np.abs(x), 1e-2))


def test_square_tiles():
    x = normal(2, 130, 140)
    q = tiles(x, square=True)
    assert q.scale.shape == (2, 2, 2)
    want = np.abs(x[:, :128, :128]).max((1, 2)) / np.float32(448)
    np.testing.assert_array_equal(q.scale[:, 0, 0], want)
    np.testing.assert_array_equal(dequantize(q), dequantize(tiles(x, axis=1, square=True)))


@pytest.mark.parametrize("quantise", [quantize_fp8, quantize_fp8_blocks])
def test_four_bits_are_refused(quantise):
    with pytest.raises(ValueError, match="quantize_nvfp4"):
        quantise(np.ones((2, 4), np.float32), fmt="e2m1")
