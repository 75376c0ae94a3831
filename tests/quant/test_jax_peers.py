"""Beside JAX's own block scaling: ``lax.scaled_dot`` reads our bytes, ``jax.nn`` quantises to the same values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from moe_course.quant import dequantize, quantize_mxfp8
from tests import oracle

quantize = jax.jit(quantize_mxfp8, static_argnames=("axis", "rounding", "fmt"))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_scaled_dot_multiplies_our_bytes():
    a, b = quantize(normal(24, 96), axis=1), quantize(normal(96, 40, seed=1), axis=0)
    scale = [lax.bitcast_convert_type(q.scale, jnp.float8_e8m0fnu) for q in (a, b)]
    wide = [x[None] for x in (a.data, b.data, *scale)]
    got = jax.jit(
        lambda a, b, sa, sb: lax.scaled_dot(
            a, b, lhs_scale=sa, rhs_scale=sb, preferred_element_type=jnp.float32
        )
    )(*wide)[0]
    want = np.asarray(dequantize(a), np.float64) @ np.asarray(dequantize(b), np.float64)
    oracle.assert_close(got, want, np.float32, 96)


@pytest.mark.parametrize("kind", ["normal", "student-t", "bfloat16", "powers of two"])
def test_jax_nn_quantises_to_the_same_values(kind):
    """A million values, multiplied by the identity. Where it runs on a CPU: from JAX 0.11 on."""
    rng, shape = np.random.default_rng(0), (2**15, 32)
    x = {
        "normal": lambda: rng.standard_normal(shape),
        "student-t": lambda: rng.standard_t(3, shape),
        "bfloat16": lambda: rng.standard_normal(shape).astype(jnp.bfloat16),
        "powers of two": lambda: np.ldexp(rng.choice([-1.0, 1.0], shape), rng.integers(-60, 60, shape)),
    }[kind]().astype(np.float32)
    config = jax.nn.get_scaled_dot_general_config("mxfp8")
    numbers = (((2,), (2,)), ((0,), (0,)))

    @jax.jit
    def theirs(x):
        identity = jnp.eye(32, dtype=jnp.float32)[None]
        return jax.nn.scaled_dot_general(x[None], identity, numbers, configs=[config] * 3)[0]

    try:
        got = theirs(x)
    except NotImplementedError as error:
        pytest.skip(f"jax.nn.scaled_dot_general does not run here: {str(error)[:80]}")
    np.testing.assert_array_equal(got, dequantize(quantize(x)))
