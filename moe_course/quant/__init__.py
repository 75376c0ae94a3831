"""Low precision as the hardware does it, on any machine: formats, MXFP8, NVFP4, FP8, recipes.

Every module takes arrays and returns arrays; none knows a layer. :mod:`moe_course.grouped_gemm` uses them.
"""

from moe_course.quant.blocks import BlockScaled, dequantize
from moe_course.quant.fp8 import (
    DelayedState,
    init_delayed_state,
    quantize_fp8,
    quantize_fp8_blocks,
    quantize_fp8_delayed,
)
from moe_course.quant.mxfp8 import (
    quantize_both,
    quantize_mx,
    quantize_mxfp8,
    swizzle_scales,
    unswizzle_scales,
)
from moe_course.quant.nvfp4 import hadamard, quantize_nvfp4
from moe_course.quant.recipes import (
    BF16,
    MXFP8,
    NVFP4,
    RECIPES,
    FP8BlockScaling,
    FP8CurrentScaling,
    FP8DelayedScaling,
    Recipe,
)

__all__ = [
    "BF16",
    "MXFP8",
    "NVFP4",
    "RECIPES",
    "BlockScaled",
    "DelayedState",
    "FP8BlockScaling",
    "FP8CurrentScaling",
    "FP8DelayedScaling",
    "Recipe",
    "dequantize",
    "hadamard",
    "init_delayed_state",
    "quantize_both",
    "quantize_fp8",
    "quantize_fp8_blocks",
    "quantize_fp8_delayed",
    "quantize_mx",
    "quantize_mxfp8",
    "quantize_nvfp4",
    "swizzle_scales",
    "unswizzle_scales",
]
