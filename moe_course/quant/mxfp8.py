"""MXFP8: blocks of 32, one power-of-two scale each (OCP Microscaling Formats v1.0, section 6).

A GEMM contracts along the blocks of both operands, so an array that enters two GEMMs is quantised twice, each
time from the source: :func:`quantize_both`. Transposing the bytes of one copy gives the wrong scales.
"""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, UInt8

from moe_course.quant.blocks import BlockScaled, block_along, block_max, spread, store
from moe_course.quant.formats import (
    NAN_SCALE,
    FormatName,
    Rounding,
    encode,
    format_of,
    magnitude_bits,
    shared_exponent,
)

BLOCK = 32


def quantize_mxfp8(
    x: Float[Array, "..."], *, axis: int = -1, rounding: Rounding = "rceil", fmt: FormatName = "e4m3"
) -> BlockScaled:
    """MXFP8 of ``x`` in blocks of 32 along ``axis``; the last block may be short, as if zeros followed.

    ``rounding``: ``"rceil"``, Transformer Engine's rule, never clips a block's largest value before it is
    rounded; ``"floor"``, the OCP sample algorithm, may clip it by up to 12.5 %. See
    :func:`moe_course.quant.formats.shared_exponent`.

    A block that holds NaN or infinity is NaN as a whole: scale byte 255, every element NaN. (Transformer
    Engine's kernel leaves the neighbours of a NaN finite and turns infinity into a large number.) All zeros
    give scale byte 0, which means 2**-127, and elements 0.
    """
    if format_of(fmt).bits != 8:
        raise ValueError(f"MXFP8 has 8-bit elements; for {fmt!r} call quantize_mx")
    return quantize_mx(x, axis=axis, rounding=rounding, fmt=fmt)


def quantize_mx(
    x: Float[Array, "..."], *, axis: int = -1, rounding: Rounding = "rceil", fmt: FormatName = "e4m3"
) -> BlockScaled:
    """:func:`quantize_mxfp8` for every element format; MXFP4 is ``fmt="e2m1"``."""
    axis, block, f = axis % x.ndim, block_along(x.ndim, axis, BLOCK), format_of(fmt)
    scale = shared_exponent(block_max(magnitude_bits(x), block), f, rounding)
    byte = spread(scale, block, x.shape).astype(jnp.int32)
    codes = encode(x, f, 127 - byte)
    # E2M1 has no NaN; there the scale alone says so.
    codes = jnp.where(byte == NAN_SCALE, jnp.uint8(f.nan_code or 0), codes)
    return BlockScaled(
        data=store(codes, fmt, axis),
        scale=scale,
        tensor_scale=None,
        fmt=fmt,
        block=block,
        axis=axis,
        length=x.shape[axis],
        rounding=rounding,
    )


def quantize_both(
    x: Float[Array, "m k"], *, rounding: Rounding = "rceil", fmt: FormatName = "e4m3"
) -> tuple[BlockScaled, BlockScaled]:
    """The row-wise (1x32) and the column-wise (32x1) copy, each from the source, both with one rounding."""
    row, column = (quantize_mxfp8(x, axis=axis, rounding=rounding, fmt=fmt) for axis in (1, 0))
    return row, column


# The order in which Blackwell's tensor cores read scales.


def swizzle_scales(scale: UInt8[Array, "m k_blocks"]) -> UInt8[Array, "bytes"]:
    """Scale bytes in the order of the GEMM: tiles of 128 rows by 4 blocks, 512 bytes each, tiles row by row.

    Padded with 0 to whole tiles. In a tile, row r and block c sit at ``(r % 32) * 16 + (r // 32) * 4 + c`` (cuBLAS,
    "1D block scaling factors layout"). A permutation and no arithmetic. Scales of a column-wise copy are
    transposed first, so that the contracted axis is the last one.
    """
    rows, blocks = scale.shape
    padded = jnp.pad(scale, ((0, -rows % 128), (0, -blocks % 4)))
    tiles = padded.reshape(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(-1)


def unswizzle_scales(swizzled: UInt8[Array, "bytes"], rows: int, blocks: int) -> UInt8[Array, "m k_blocks"]:
    """The inverse of :func:`swizzle_scales` for scales [rows, blocks]; the padding is dropped."""
    tiles = swizzled.reshape(-(-rows // 128), -(-blocks // 4), 32, 4, 4).transpose(0, 3, 2, 1, 4)
    return tiles.reshape(-(-rows // 128) * 128, -(-blocks // 4) * 4)[:rows, :blocks]
