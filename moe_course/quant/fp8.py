"""FP8 with float32 scales: one per tensor (current or delayed), or one per 1x128 tile and 128x128 block.

Per-tensor scaling is what Hopper's tensor cores take. The tiles are DeepSeek-V3's (arXiv 2412.19437, section 3.3):
software multiplies by them, after sums of 128 products.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from moe_course.quant.blocks import BlockScaled, block_along, block_max, spread, square_block, store
from moe_course.quant.formats import (
    INF_BITS,
    Format,
    FormatName,
    decode_e8m0,
    encode,
    format_of,
    from_bits,
    magnitude_bits,
    shared_exponent,
)
from moe_course.quant.nvfp4 import finite_amax

TILE = 128
LARGEST = np.finfo(np.float32).max
SMALLEST_NORMAL = np.finfo(np.float32).tiny
AmaxAlgorithm = Literal["max", "most_recent"]


def scale_of_amax(
    amax: Float[Array, "..."], fmt: FormatName, otherwise: Float[Array, "..."] | None = None, margin: int = 0
) -> Float[Array, "..."]:
    """What to multiply by: ``max / amax / 2**margin``. An amax of 0 gives ``otherwise`` (1 by default)."""
    otherwise = jnp.ones_like(amax) if otherwise is None else otherwise
    scale = jnp.minimum(np.float32(format_of(fmt).max) / amax, LARGEST) * np.float32(2.0**-margin)
    return jnp.where(amax > 0, scale, otherwise)


def quantize_fp8(
    x: Float[Array, "..."],
    *,
    axis: int = -1,
    fmt: FormatName = "e4m3",
    scale: Float[Array, "..."] | None = None,
) -> BlockScaled:
    """FP8 of ``x * scale``, saturating. ``scale`` is a scalar or broadcasts to ``x``; default: current scaling.

    Current scaling uses the amax of this very tensor, so nothing finite clips. NaN and infinity become NaN, each
    for itself; they do not count for the amax.
    """
    f = _eight_bits(fmt)
    if scale is None:
        scale = scale_of_amax(finite_amax(x), fmt)
    if scale.ndim == 0:
        scale = scale.reshape((1,) * x.ndim)
    codes = _encode_or_nan(x.astype(jnp.float32) * scale, f)
    block = tuple(n if one == 1 else 1 for n, one in zip(x.shape, scale.shape, strict=True))
    return BlockScaled(
        data=store(codes, fmt, axis),
        scale=1 / scale,
        tensor_scale=None,
        fmt=fmt,
        block=block,
        axis=axis % x.ndim,
        length=x.shape[axis],
    )


def _eight_bits(fmt: FormatName):
    f = format_of(fmt)
    if f.bits != 8:
        raise ValueError(f"FP8 has 8-bit elements, {fmt!r} has {f.bits}; for four bits call quantize_nvfp4")
    return f


def _encode_or_nan(x: Array, f: Format) -> Array:
    return jnp.where(magnitude_bits(x) < INF_BITS, encode(x, f), jnp.uint8(f.nan_code))


# Delayed scaling: the scale comes from earlier steps, so that one pass over the data suffices.


@partial(jax.tree_util.register_dataclass, data_fields=["scale", "amax_history"], meta_fields=[])
@dataclass(frozen=True)
class DelayedState:
    """What delayed scaling carries from step to step, for one tensor or for one per expert."""

    scale: Float[Array, "..."]
    """What the next step multiplies by."""
    amax_history: Float[Array, "length ..."]
    """The newest amax first."""


def init_delayed_state(length: int = 1024, shape: tuple[int, ...] = ()) -> DelayedState:
    """Scale 1 and no history; ``shape`` is () for one tensor, (experts,) for one per expert."""
    return DelayedState(jnp.ones(shape, jnp.float32), jnp.zeros((length, *shape), jnp.float32))


def update_delayed_state(
    state: DelayedState,
    amax: Float[Array, "..."],
    fmt: FormatName = "e4m3",
    *,
    algorithm: AmaxAlgorithm = "max",
    margin: int = 0,
) -> DelayedState:
    """The state after a step whose tensor had ``amax``: the oldest amax leaves, the scale follows the history.

    Where the history is all zeros (an expert without rows so far) the scale stays.
    """
    history = jnp.concatenate([amax[None], state.amax_history[:-1]])
    chosen = history.max(axis=0) if algorithm == "max" else history[0]
    return DelayedState(scale_of_amax(chosen, fmt, state.scale, margin), history)


def quantize_fp8_delayed(
    x: Float[Array, "..."],
    state: DelayedState,
    *,
    axis: int = -1,
    fmt: FormatName = "e4m3",
    algorithm: AmaxAlgorithm = "max",
    margin: int = 0,
) -> tuple[BlockScaled, DelayedState]:
    """FP8 of ``x`` with the scale of ``state``, and the next state. A value beyond the history's amax clips."""
    q = quantize_fp8(x, axis=axis, fmt=fmt, scale=state.scale)
    return q, update_delayed_state(state, finite_amax(x), fmt, algorithm=algorithm, margin=margin)


# DeepSeek-V3's tiles.


def quantize_fp8_blocks(
    x: Float[Array, "..."],
    *,
    axis: int = -1,
    square: bool = False,
    fmt: FormatName = "e4m3",
    power_of_two: bool = False,
) -> BlockScaled:
    """FP8 in tiles of 128 along ``axis`` (activations, gradients), or blocks of 128x128 (``square``: weights).

    ``power_of_two`` rounds the scale up to a power of two, as DeepSeek-V3 does for some activations. A tile that
    holds NaN or infinity is NaN as a whole; one of zeros has scale 1, as has one too small for a float32 scale.
    """
    f = _eight_bits(fmt)
    block = square_block(x.ndim, TILE) if square else block_along(x.ndim, axis, TILE)
    amax = block_max(magnitude_bits(x), block)
    if power_of_two:
        scale = decode_e8m0(jnp.maximum(shared_exponent(amax, f, "rceil"), jnp.uint8(1)))
    else:
        # A divisor not known before it runs: by a constant XLA multiplies with the reciprocal, one rounding more.
        divisor = jnp.where(amax < INF_BITS, jnp.float32(f.max), jnp.float32(jnp.nan))
        scale = from_bits(amax) / divisor
        scale = jnp.where(scale < SMALLEST_NORMAL, jnp.float32(1), scale)
    scale = jnp.where(amax < INF_BITS, scale, jnp.float32(jnp.nan))
    codes = _encode_or_nan(x.astype(jnp.float32) / spread(scale, block, x.shape), f)
    return BlockScaled(
        data=store(codes, fmt, axis),
        scale=scale,
        tensor_scale=None,
        fmt=fmt,
        block=block,
        axis=axis % x.ndim,
        length=x.shape[axis],
    )
