"""Grouped GEMM: many matrix products, one per expert, over rows that are sorted by expert.

``grouped_gemm(rows, kernels, group_sizes)`` multiplies the first ``group_sizes[0]`` rows by
``kernels[0]``, the next ``group_sizes[1]`` rows by ``kernels[1]``, and so on. The sizes are data on the
device: changing them compiles nothing. One contract, one file per kernel:

==============  ====================================================  ===================================
backend         what it is                                            runs on
==============  ====================================================  ===================================
``reference``   a loop over all experts, every row, masked            anything; slow, to be read
``tiled``       tiles of one group, walked in a loop, no padding      anything; the CPU kernel
``ragged_dot``  ``jax.lax.ragged_dot`` held to this contract          anything; a dense fallback on CPU
``pallas``      a kernel for the GPU, written from scratch            GPU (``pallas_interpret``: anywhere)
``tokamax``     openxla/tokamax's kernels, if installed               GPU
``te``          NVIDIA Transformer Engine's, bf16 and MXFP8            Hopper, Blackwell; elsewhere says why
==============  ====================================================  ===================================
"""

import importlib.util
from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree

from moe_course import te
from moe_course.errors import SettingError
from moe_course.grouped_gemm import pallas, ragged_dot, reference, tiled, tokamax
from moe_course.grouped_gemm.quantized import check_recipe, quantized_grouped_gemm
from moe_course.quant.recipes import Recipe
from moe_course.varying import vary_alike

Backend = Literal["auto", "reference", "tiled", "ragged_dot", "pallas", "pallas_interpret", "tokamax", "te"]
BACKENDS: dict[str, Callable] = {
    "reference": reference.grouped_gemm,
    "tiled": tiled.grouped_gemm,
    "ragged_dot": ragged_dot.grouped_gemm,
    "pallas": pallas.grouped_gemm,
    "pallas_interpret": pallas.grouped_gemm_interpreted,
    "tokamax": tokamax.grouped_gemm,
    "te": lambda *arguments, recipe=None: te.grouped_gemm(*arguments, recipe=recipe),
}


def grouped_gemm(
    rows: Float[Array, "rows d_model"],
    kernels: Float[Array, "experts d_model d_ff"],
    group_sizes: Int[Array, "experts"],
    *,
    backend: Backend = "auto",
    recipe: Recipe | None = None,
    key: Key[Array, ""] | None = None,
    state: PyTree | None = None,
) -> Float[Array, "rows d_ff"]:
    """Multiply each group of rows by its own kernel.

    Rows past ``sum(group_sizes)`` are unspecified in the result and reach no other result and no gradient,
    whatever they hold (NaN too); their own gradient is 0. Sums run in float32; the result has the dtype of
    ``rows``. Differentiable in ``rows`` and ``kernels``. Works under ``jit`` and ``jax.shard_map``; where an
    argument is replicated over a mesh axis that another varies over, its gradient is summed over that axis.

    With a ``recipe`` (:mod:`moe_course.quant.recipes`) the operands of product, dgrad and wgrad are quantised, each
    for itself. ``key`` seeds stochastic rounding (NVFP4). ``state`` is that of FP8DelayedScaling; its "gradient"
    *is* the next state: take it over, keep it from the optimizer.

    Raises:
        TypeError: ``group_sizes`` is not an integer array, or ``rows`` and ``kernels`` differ in dtype.
        ValueError: shapes disagree.
        SettingError: the backend is unknown or cannot run here, or the recipe lacks its key or state; the message
            says what would fix it.
    """
    check_arguments(rows, kernels, group_sizes)
    backend = resolve_backend(backend)
    multiply = BACKENDS[backend]
    arguments = vary_alike(rows, kernels, group_sizes)
    if recipe is None:
        return multiply(*arguments)
    if backend == "te":  # its kernels take the codes themselves
        return multiply(*arguments, recipe=recipe)
    check_recipe(recipe, key, state)
    return quantized_grouped_gemm(multiply, recipe, *arguments, key, state)


def resolve_backend(backend: Backend) -> str:
    """The backend that ``backend`` means on JAX's default platform: itself, or the best one for "auto"."""
    if backend == "auto":
        return "pallas" if jax.default_backend() == "gpu" else "tiled"
    if backend not in get_args(Backend):
        raise SettingError(
            f"unknown grouped GEMM backend {backend!r}. Choose one of {', '.join(get_args(Backend))}."
        )
    if reason := why_not(backend):
        raise SettingError(f"the grouped GEMM backend {backend!r} cannot run here: {reason}")
    return backend


def why_not(backend: Backend) -> str:
    """Why ``backend`` cannot run on JAX's default platform, and what would fix it; "" if it can."""
    if backend == "te":
        reason = te.available("grouped_gemm").reason
        return reason and f"{reason} Use backend='pallas' on a GPU or backend='tiled' on a CPU."
    if backend == "tokamax" and importlib.util.find_spec("tokamax") is None:
        return "tokamax is not installed. Run `pip install tokamax` on a machine with a GPU."
    if backend in ("pallas", "tokamax") and jax.default_backend() != "gpu":
        return (
            f"it needs a GPU and JAX's default platform is {jax.default_backend()!r}. Use backend='tiled', "
            "or backend='pallas_interpret' to run the Pallas kernel slowly anywhere."
        )
    return ""


def check_arguments(rows: Array, kernels: Array, group_sizes: Array) -> None:
    """Raise unless the arguments of :func:`grouped_gemm` fit together (its docstring lists the errors)."""
    shapes = f"rows {rows.shape}, kernels {kernels.shape}, group_sizes {group_sizes.shape}"
    if rows.ndim != 2 or kernels.ndim != 3 or group_sizes.ndim != 1:
        raise ValueError(f"needed: rows [M, D], kernels [E, D, F], group_sizes [E]; got {shapes}")
    if rows.shape[1] != kernels.shape[1]:
        raise ValueError(f"rows and kernels disagree on D ({rows.shape[1]}, {kernels.shape[1]}): {shapes}")
    if kernels.shape[0] != group_sizes.shape[0]:
        raise ValueError(
            f"kernels and group_sizes disagree on E ({kernels.shape[0]}, {group_sizes.shape[0]}): {shapes}"
        )
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise TypeError(f"group_sizes must be integers (rows per expert), got {group_sizes.dtype}")
    if rows.dtype != kernels.dtype or not jnp.issubdtype(rows.dtype, jnp.floating):
        raise TypeError(f"rows and kernels must share one float dtype, got {rows.dtype} and {kernels.dtype}")
