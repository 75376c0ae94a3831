"""NVFP4 against golden vectors; its Hadamard transform; its two levels of scale."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_course import quant
from moe_course.quant import hadamard, quantize_nvfp4
from moe_course.quant.blocks import codes_of
from moe_course.quant.formats import decode, format_of
from moe_course.quant.nvfp4 import hadamard_matrix
from tests.oracle import relative_error
from tests.quant.golden import GOLDEN, digits, floats

pytestmark = pytest.mark.thorough

quantize = jax.jit(quantize_nvfp4, static_argnames=("axis", "square"))
dequantize = jax.jit(quant.dequantize, static_argnums=1)
TOP = 448 * 6


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("vector", GOLDEN["nvfp4"], ids=lambda vector: vector["id"])
def test_golden_vectors(vector, jit):
    x = jnp.asarray(floats(vector["x"]).reshape(vector["shape"]))
    q = (quantize if jit else quantize_nvfp4)(x)
    np.testing.assert_array_equal(np.ravel(q.scale), vector["scales"])
    np.testing.assert_array_equal(np.ravel(codes_of(q)), digits(vector["q"]))
    assert float(q.tensor_scale[0, 0]) == np.float32(vector["tensor_scale"])
    even, odd = np.asarray(codes_of(q)).reshape(-1, 2).T
    np.testing.assert_array_equal(np.ravel(q.data), even | odd << 4)


def test_the_rounded_scale_divides_and_the_maximum_may_clip():
    """Block amax 5 under a tensor scale of 1: 5 / 6 rounds to 0.8125, 5 / 0.8125 is 6.15, clamped: 4.875."""
    x = np.zeros((1, 32), np.float32)
    x[0, 0], x[0, 16] = 5, TOP
    q = quantize(x)
    assert float(decode(q.scale, format_of("e4m3"))[0, 0]) == 0.8125
    assert float(dequantize(q)[0, 0]) == 4.875


def test_b72_zero_tensors_and_zero_blocks():
    assert not np.any(dequantize(quantize(np.zeros((2, 32), np.float32))))
    x = np.zeros((1, 32), np.float32)
    x[0, 0] = 1
    np.testing.assert_array_equal(dequantize(quantize(x))[0, 16:], 0)


def test_b84_a_block_far_below_the_tensor_flattens_to_zero():
    x = np.full((1, 32), 1e-7, np.float32)
    x[0, 0] = 1
    q = quantize(x)
    assert q.scale[0, 1] == 0
    np.testing.assert_array_equal(dequantize(q)[0, 16:], 0)


def test_b84_dropping_the_tensor_scale_is_off_by_its_size():
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    q = quantize(x)
    without = jax.tree.unflatten(jax.tree.structure(q), [q.data, q.scale, jnp.ones_like(q.tensor_scale)])
    ratio = np.asarray(dequantize(without)) / np.where(dequantize(q) == 0, np.nan, dequantize(q))
    np.testing.assert_allclose(ratio[~np.isnan(ratio)], TOP / np.abs(x).max(), rtol=1e-6)


def test_b84_gate_and_up_in_one_gemm_share_the_tensor_scale():
    """Fused, they are one tensor with one amax; quantised apart and put together, their codes do not fit it."""
    rng = np.random.default_rng(0)
    gate, up = (rng.standard_normal((16, 32)).astype(np.float32) * np.float32(k) for k in (1, 100))
    fused = quantize(np.concatenate([gate, up], 1))
    shared = quantize(gate, tensor_amax=jnp.float32(np.abs(up).max()))
    np.testing.assert_array_equal(shared.scale, fused.scale[:, :2])
    np.testing.assert_array_equal(shared.data, fused.data[:, :16])
    assert np.any(np.asarray(quantize(gate).scale) != np.asarray(fused.scale[:, :2]))


def test_b77_a_block_with_nan_is_nan_and_its_neighbours_are_not():
    for vector in GOLDEN["nvfp4_nonfinite"]:
        x = floats(vector["x"]).reshape(vector["shape"])
        back = np.asarray(dequantize(quantize(x)))
        assert np.all(np.isnan(back[:, :16]))
        clean = np.where(np.arange(32) < 16, np.float32(0), x)
        np.testing.assert_array_equal(back[:, 16:], dequantize(quantize(clean))[:, 16:])


def test_square_blocks_agree_row_by_row_and_column_by_column():
    x = np.random.default_rng(0).standard_normal((3, 48, 40)).astype(np.float32)
    row, column = (quantize(x, axis=axis, square=True) for axis in (2, 1))
    np.testing.assert_array_equal(dequantize(row), dequantize(column))
    assert row.scale.shape == (3, 3, 3)
    assert row.data.shape == (3, 48, 20)
    assert column.data.shape == (3, 24, 40)
    assert np.any(np.asarray(dequantize(quantize(x, axis=2))) != np.asarray(dequantize(quantize(x, axis=1))))


def test_relative_error_of_normal_data():
    x = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    error = np.asarray(dequantize(quantize(x))) - x
    assert 0.09 < np.linalg.norm(error) / np.linalg.norm(x) < 0.1, "20.4 dB"


def test_golden_hadamard():
    ramp = hadamard(jnp.arange(16, dtype=jnp.float32))
    np.testing.assert_array_equal(ramp, GOLDEN["hadamard_of_0_to_15"])


def test_hadamard_cancels_in_the_product_and_spreads_an_outlier():
    matrix = hadamard_matrix()
    np.testing.assert_array_equal(matrix @ matrix.T, np.eye(16))
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((48, n)).astype(np.float32) for n in (5, 7))
    mixed = [np.asarray(hadamard(jnp.asarray(x), 0), np.float64) for x in (a, b)]
    assert relative_error(mixed[0].T @ mixed[1], a.T.astype(np.float64) @ b) < 1e-6
    twin = np.asarray(hadamard(jnp.asarray(b[::-1].copy()), 0), np.float64)[::-1]
    assert relative_error(mixed[0].T @ twin, a.T.astype(np.float64) @ b) > 0.1, "two different transforms"
    outlier = np.zeros((1, 16), np.float32)
    outlier[0, 3] = 16
    np.testing.assert_array_equal(np.abs(hadamard(jnp.asarray(outlier))), 4)
    with pytest.raises(ValueError, match="multiple of 16"):
        hadamard(jnp.ones((2, 20)))


def test_b83_stochastic_rounding_of_a_tensor():
    x = jnp.full((1000, 16), 2.3, jnp.float32).at[:, 0].set(6)
    draws = np.asarray(dequantize(quantize(x, key=jax.random.key(0))))[:, 1:].round(5)
    assert abs(draws.mean() - 2.3) < 0.02
    assert set(np.unique(draws)) == {2.0, 3.0}
    assert np.all(np.asarray(dequantize(quantize(x)))[:, 1:].round(5) == 2)
