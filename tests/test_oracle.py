"""The oracle is tested too: by hand-worked numbers and central differences."""

import math

import numpy as np
import pytest

from tests import oracle


def numeric(fn, args, index, dout, step=1e-6):
    """Central differences of sum(fn * dout) in argument ``index``."""
    grad = np.zeros_like(args[index])
    for i in np.ndindex(grad.shape):
        high, low = ([a.copy() for a in args] for _ in range(2))
        high[index][i] += step
        low[index][i] -= step
        grad[i] = np.sum((fn(*high) - fn(*low)) * dout) / (2 * step)
    return grad


def test_gradients_are_the_derivatives():
    rng = np.random.default_rng(0)
    sizes, ids = [2, 0, 1], np.array([[0, 2], [1, 3], [2, 0], [3, 3]])
    rows, gate_up, down, dout = (rng.normal(size=s) for s in [(4, 3), (3, 3, 4), (3, 2, 3), (4, 3)])
    weights, kernels = rng.normal(size=(4, 2)), rng.normal(size=(3, 3, 3))
    cases = [
        (lambda *a: oracle.grouped_gemm(*a, sizes), (rows, kernels), oracle.grouped_gemm_vjp, (sizes,)),
        (
            lambda *a: oracle.swiglu_experts(*a, sizes),
            (rows, gate_up, down),
            oracle.swiglu_experts_vjp,
            (sizes,),
        ),
        (
            lambda r, g, d, w: oracle.swiglu_experts(r, g, d, sizes, w),
            (rows, gate_up, down, rng.normal(size=4)),
            lambda r, g, d, w, dout: oracle.swiglu_experts_vjp(r, g, d, sizes, dout, w),
            (),
        ),
    ]
    for fn, args, vjp, extra in cases:
        for i, grad in enumerate(vjp(*args, *extra, dout)):
            assert oracle.relative_error(grad, numeric(fn, args, i, dout)) < 1e-7
    args = (rows, gate_up, down, weights)
    grads = oracle.moe_vjp(rows, gate_up, down, ids, weights, dout)
    for i, grad in enumerate(grads):
        fn = lambda x, g, d, w: oracle.moe(x, g, d, ids, w)  # noqa: E731
        assert oracle.relative_error(grad, numeric(fn, args, i, dout)) < 1e-7


def test_relative_error_is_not_fooled():
    assert oracle.relative_error([1.0, np.nan], [1.0, 2.0]) == math.inf
    assert oracle.relative_error([1e-30], [0.0]) == math.inf
    assert oracle.relative_error([0.0], [0.0]) == 0.0
    assert oracle.relative_error([0.5], [1.0]) == 0.5
    with pytest.raises(AssertionError, match="shapes differ"):
        oracle.relative_error([1.0, 1.0], [1.0])
    with pytest.raises(AssertionError, match="rounding explains"):
        oracle.assert_close([1.0, 2.001], [1.0, 2.0], np.float32)
