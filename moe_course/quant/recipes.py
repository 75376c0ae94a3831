"""Recipes: which operand of which GEMM is quantised how.

A layer's forward product and its gradient are three GEMMs, ``fprop: rows @ kernels``, ``dgrad: d_out @ kernels.T``
and ``wgrad: rows.T @ d_out``. A recipe is a table of their six operands. Sums and results stay in float32 and in
the dtype of the activations. Sources: Transformer Engine's recipes (``transformer_engine.common.recipe``), NVFP4
arXiv 2509.25149 (section 4), DeepSeek-V3 arXiv 2412.19437 (section 3.3).
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Key

from moe_course.quant.blocks import BlockScaled, dequantize
from moe_course.quant.formats import FormatName, Rounding
from moe_course.quant.fp8 import (
    TILE,
    AmaxAlgorithm,
    DelayedState,
    init_delayed_state,
    quantize_fp8,
    quantize_fp8_blocks,
    scale_of_amax,
    update_delayed_state,
)
from moe_course.quant.groups import Groups, group_amax, of_row
from moe_course.quant.mxfp8 import quantize_mxfp8
from moe_course.quant.nvfp4 import finite_amax, hadamard, quantize_nvfp4

Gemm = Literal["fprop", "dgrad", "wgrad"]
Scaling = Literal["bf16", "current", "delayed", "mxfp8", "nvfp4", "tiles"]

STAYS_HIGH = {
    "router": "a rounded logit picks another expert; float32",
    "embedding": "a lookup, not a GEMM",
    "head": "its errors reach the loss directly, and its gradient spans the vocabulary",
    "norms": "not a GEMM; float32 sums of squares",
    "attention": "softmax and both batched products; quantised in few recipes, and then by choice",
    "master weights": "an update is often smaller than the rounding step of a low format",
}
"""What no recipe here touches, and why. Only the experts' grouped GEMMs take a recipe."""


@dataclass(frozen=True)
class Operand:
    """How one operand of one GEMM is quantised."""

    scaling: Scaling
    fmt: FormatName | None = None
    rounding: Rounding = "rceil"
    square: bool = False
    """Scale blocks in both directions (16x16 of NVFP4, 128x128 tiles)."""
    hadamard: bool = False
    stochastic: bool = False


@dataclass(frozen=True)
class Recipe:
    """A table of operands. Frozen and hashable: a static argument."""

    @property
    def name(self) -> str:
        """The name of its class."""
        return type(self).__name__

    def operands(self, gemm: Gemm) -> tuple[Operand, Operand]:
        """(rows, kernels) of fprop, (d_out, kernels) of dgrad, (rows, d_out) of wgrad."""
        raise NotImplementedError

    @property
    def row_block(self) -> int:
        """Rows per block where blocks run along the rows, in wgrad: experts are aligned to it there."""
        return 1

    @property
    def needs_key(self) -> bool:
        """Whether some operand is rounded stochastically."""
        return any(op.stochastic for gemm in ("fprop", "dgrad", "wgrad") for op in self.operands(gemm))

    @property
    def needs_state(self) -> bool:
        """Whether scales come from earlier steps."""
        return any(op.scaling == "delayed" for op in self.operands("fprop"))


@dataclass(frozen=True)
class BF16(Recipe):
    """Operands rounded to bfloat16: the baseline."""

    def operands(self, gemm: Gemm) -> tuple[Operand, Operand]:
        return Operand("bf16"), Operand("bf16")


def _by_role(gemm: Gemm, forward: Operand, gradient: Operand) -> tuple[Operand, Operand]:
    return {
        "fprop": (forward, forward),
        "dgrad": (gradient, forward),
        "wgrad": (forward, gradient),
    }[gemm]


@dataclass(frozen=True)
class FP8CurrentScaling(Recipe):
    """One scale per expert and tensor, from the tensor itself. E4M3 forward, E5M2 gradients (HYBRID)."""

    forward: FormatName = "e4m3"
    gradient: FormatName = "e5m2"

    def operands(self, gemm: Gemm) -> tuple[Operand, Operand]:
        return _by_role(gemm, Operand("current", self.forward), Operand("current", self.gradient))


@dataclass(frozen=True)
class FP8DelayedScaling(Recipe):
    """One scale per expert and tensor, from the amax of earlier steps. E4M3 forward, E5M2 gradients.

    The state is an argument and its successor is its "gradient", as in Transformer Engine: see
    :func:`moe_course.grouped_gemm.grouped_gemm`.
    """

    forward: FormatName = "e4m3"
    gradient: FormatName = "e5m2"
    history: int = 1024
    algorithm: AmaxAlgorithm = "max"
    margin: int = 0

    def operands(self, gemm: Gemm) -> tuple[Operand, Operand]:
        return _by_role(gemm, Operand("delayed", self.forward), Operand("delayed", self.gradient))

    def init_state(self, num_experts: int) -> dict[str, DelayedState]:
        """The state of one grouped GEMM before the first step."""
        tensors = ("rows", "kernels", "d_out")
        return {tensor: init_delayed_state(self.history, (num_experts,)) for tensor in tensors}

    def next_state(self, state: dict[str, DelayedState], amax: dict[str, Array]) -> dict[str, DelayedState]:
        """The state after a step in which the tensors had these amaxes, [experts] each."""
        formats = {"rows": self.forward, "kernels": self.forward, "d_out": self.gradient}
        how = {"algorithm": self.algorithm, "margin": self.margin}
        return {t: update_delayed_state(state[t], amax[t], fmt, **how) for t, fmt in formats.items()}


@dataclass(frozen=True)
class FP8BlockScaling(Recipe):
    """DeepSeek-V3 on Hopper: 1x128 tiles of activations and gradients, 128x128 blocks of weights, all E4M3."""

    def operands(self, gemm: Gemm) -> tuple[Operand, Operand]:
        tile = Operand("tiles", "e4m3")
        weight = Operand("tiles", "e4m3", square=True)
        return (tile, tile) if gemm == "wgrad" else (tile, weight)

    @property
    def row_block(self) -> int:
        return TILE


@dataclass(frozen=True)
class MXFP8(Recipe):
    """1x32 blocks with power-of-two scales, E4M3 for everything (arXiv 2506.08027); E5M2 gradients are HYBRID."""

    rounding: Rounding = "rceil"
    forward: FormatName = "e4m3"
    gradient: FormatName = "e4m3"

    def operands(self, gemm: Gemm) -> tuple[Operand, Operand]:
        forward = Operand("mxfp8", self.forward, self.rounding)
        return _by_role(gemm, forward, Operand("mxfp8", self.gradient, self.rounding))

    @property
    def row_block(self) -> int:
        return 32


@dataclass(frozen=True)
class NVFP4(Recipe):
    """1x16 blocks of E2M1; weights 16x16; gradients rounded stochastically; Hadamard for wgrad's operands."""

    hadamard: bool = True
    stochastic_rounding: bool = True
    square_weights: bool = True

    def operands(self, gemm: Gemm) -> tuple[Operand, Operand]:
        rows, weight = Operand("nvfp4", "e2m1"), Operand("nvfp4", "e2m1", square=self.square_weights)
        gradient = Operand("nvfp4", "e2m1", stochastic=self.stochastic_rounding)
        if gemm == "fprop":
            return rows, weight
        if gemm == "dgrad":
            return gradient, weight
        mixed = Operand("nvfp4", "e2m1", hadamard=self.hadamard)
        return mixed, Operand("nvfp4", "e2m1", hadamard=self.hadamard, stochastic=self.stochastic_rounding)

    @property
    def row_block(self) -> int:
        return 16


RECIPES: dict[str, Recipe | None] = {
    "none": None,
    "bf16": BF16(),
    "fp8": FP8CurrentScaling(),
    "fp8-tiles": FP8BlockScaling(),
    "mxfp8": MXFP8(),
    "mxfp8-floor": MXFP8("floor"),
    "mxfp8-hybrid": MXFP8(gradient="e5m2"),
    "nvfp4": NVFP4(),
}
"""The recipes that carry no state, by the name that ``moe-course train --recipe`` takes."""


def quantize_rows(
    x: Float[Array, "rows d"],
    operand: Operand,
    groups: Groups,
    *,
    axis: int,
    key: Key[Array, ""] | None = None,
    state: DelayedState | None = None,
) -> BlockScaled | Array:
    """Rows of experts, in blocks along ``axis``. For ``axis=0`` the groups must be aligned to whole blocks.

    Rows past the last expert count as zeros, whatever they hold: they reach no scale.
    """
    x = jnp.where(groups.valid, x, jnp.zeros_like(x))
    if operand.scaling == "bf16":
        return x.astype(jnp.bfloat16)
    if operand.scaling == "mxfp8":
        return quantize_mxfp8(x, axis=axis, rounding=operand.rounding, fmt=operand.fmt)
    if operand.scaling == "tiles":
        return quantize_fp8_blocks(x, axis=axis, fmt=operand.fmt)
    if operand.scaling == "nvfp4":
        x = hadamard(x, axis) if operand.hadamard else x
        amax = of_row(group_amax(x, groups), groups)
        amax = amax[::16] if axis == 0 else amax
        return quantize_nvfp4(x, axis=axis, tensor_amax=amax, key=key if operand.stochastic else None)
    if operand.scaling == "delayed":
        scale = state.scale
    else:
        scale = scale_of_amax(group_amax(x, groups), operand.fmt)
    return quantize_fp8(x, axis=axis, fmt=operand.fmt, scale=of_row(scale, groups, fill=1.0))


def quantize_kernels(
    kernels: Float[Array, "experts d_in d_out"],
    operand: Operand,
    *,
    axis: int,
    state: DelayedState | None = None,
) -> BlockScaled | Array:
    """Kernels of experts, in blocks along ``axis`` (1 for fprop, 2 for dgrad), each expert for itself."""
    if operand.scaling == "bf16":
        return kernels.astype(jnp.bfloat16)
    if operand.scaling == "mxfp8":
        return quantize_mxfp8(kernels, axis=axis, rounding=operand.rounding, fmt=operand.fmt)
    if operand.scaling == "tiles":
        return quantize_fp8_blocks(kernels, axis=axis, square=operand.square, fmt=operand.fmt)
    if operand.scaling == "nvfp4":
        amax = kernel_amax(kernels)[:, None, None]
        return quantize_nvfp4(kernels, axis=axis, square=operand.square, tensor_amax=amax)
    scale = state.scale if operand.scaling == "delayed" else scale_of_amax(kernel_amax(kernels), operand.fmt)
    return quantize_fp8(kernels, axis=axis, fmt=operand.fmt, scale=scale[:, None, None])


def kernel_amax(kernels: Float[Array, "experts d_in d_out"]) -> Float[Array, "experts"]:
    """Each expert's largest finite magnitude."""
    return finite_amax(kernels, (1, 2))


def values(q: BlockScaled | Array) -> Float[Array, "..."]:
    """What a quantised operand is worth, in float32."""
    return dequantize(q) if isinstance(q, BlockScaled) else jax.lax.convert_element_type(q, jnp.float32)
