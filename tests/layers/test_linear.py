"""The dense product and its gradients against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_course.layers.linear import matmul
from tests.oracle import relative_error


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("tokens", "d_in", "d_out"), [(0, 3, 2), (1, 3, 2), (7, 3, 5), (33, 16, 8)])
def test_product_and_gradients(dtype, tokens, d_in, d_out):
    rng = np.random.default_rng(0)
    x, w, d_y = (
        jnp.asarray(rng.standard_normal(shape), dtype)
        for shape in ((tokens, d_in), (d_in, d_out), (tokens, d_out))
    )
    y, pull_back = jax.vjp(matmul, x, w)
    d_x, d_w = pull_back(d_y)
    x64, w64, d_y64 = (np.asarray(a, np.float64) for a in (x, w, d_y))
    expected = {"y": (y, x64 @ w64), "d_x": (d_x, d_y64 @ w64.T), "d_w": (d_w, x64.T @ d_y64)}
    eps = float(jnp.finfo(dtype).eps)
    for name, (ours, theirs) in expected.items():
        assert ours.dtype == jnp.dtype(dtype), name
        assert ours.shape == theirs.shape, name
        if theirs.size and tokens:
            assert relative_error(np.asarray(ours, np.float64), theirs) < 4 * eps, name
    if not tokens:
        assert not np.asarray(d_w).any()
