"""``moe-course bench grouped-gemm``: the tiled kernel against a dense GEMM of the same FLOPs and ragged_dot.

Every figure is the median over rounds of their time divided by ours in the same round: higher is better,
1 is a tie. Their dense GEMM multiplies all rows by one [D, F] matrix, so its weight gradient is E times
smaller than ours; the FLOPs are the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from moe_course.bench.arguments import LARGE, GroupedGemmArguments
from moe_course.bench.timing import interleaved, median_ratio
from moe_course.grouped_gemm import Backend, grouped_gemm


@dataclass(frozen=True)
class Options:
    """Settings of ``moe-course bench grouped-gemm``."""

    backend: Backend = "auto"
    rounds: int = 15
    """Interleaved rounds against the dense GEMM."""
    slow_rounds: int = 2
    """Rounds against ``jax.lax.ragged_dot``, which does E times the work on a CPU; 0 skips it."""


def run(options: Options = Options()) -> dict[str, dict[str, float]]:
    """``{"case": {"fwd_vs_dense": r, "fwdbwd_vs_dense": r, "fwd_vs_ragged_dot": r}}``."""
    return {case.name: measure(case, options) for case in LARGE}


def measure(case: GroupedGemmArguments, options: Options) -> dict[str, float]:
    """The ratios of one case."""
    rows, kernels, sizes = (jnp.asarray(a) for a in case.make())
    d_out = jax.random.normal(jax.random.key(1), (rows.shape[0], case.d_ff))

    def ours(rows, kernels):
        return grouped_gemm(rows, kernels, sizes, backend=options.backend)

    def dense(rows, kernel):
        return rows @ kernel

    def ragged(rows, kernels):
        return jax.lax.ragged_dot(rows, kernels, sizes)

    forward = {"ours": _bind(jax.jit(ours), rows, kernels), "dense": _bind(jax.jit(dense), rows, kernels[0])}
    both = {
        "ours": _bind(_value_and_grad(ours, d_out), rows, kernels),
        "dense": _bind(_value_and_grad(dense, d_out), rows, kernels[0]),
    }
    slow = {"ours": forward["ours"], "ragged": _bind(jax.jit(ragged), rows, kernels)}
    result = {
        "fwd_vs_dense": median_ratio(interleaved(forward, options.rounds), "dense", "ours"),
        "fwdbwd_vs_dense": median_ratio(interleaved(both, options.rounds), "dense", "ours"),
    }
    if options.slow_rounds:
        result["fwd_vs_ragged_dot"] = median_ratio(interleaved(slow, options.slow_rounds), "ragged", "ours")
    return {key: round(value, 3) for key, value in result.items()}


def _value_and_grad(product: Callable, d_out: jax.Array) -> Callable:
    def loss(rows, kernels):
        return jnp.vdot(product(rows, kernels), d_out)

    return jax.jit(jax.value_and_grad(loss, (0, 1)))


def _bind(f: Callable, *args) -> Callable:
    return partial(f, *args)
