"""A quantised array: small codes, and one scale per block."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, UInt8

from moe_course.quant.formats import (
    NAN_SCALE,
    FormatName,
    Rounding,
    decode,
    decode_e8m0,
    format_of,
    to_codes,
    to_dtype,
)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["data", "scale", "tensor_scale"],
    meta_fields=["fmt", "block", "axis", "length", "rounding"],
)
@dataclass(frozen=True)
class BlockScaled:
    """``value = element * scale [* tensor_scale]``, the scale of the element's block. A pytree.

    To move rows, move them in every leaf: data and scales belong together.
    """

    data: Array
    """FP8 dtype in the shape of the source; E2M1 is packed along ``axis``, two in a byte, the even one low."""
    scale: Array
    """One per block: E8M0 or E4M3 bytes (uint8), or float32."""
    tensor_scale: Float[Array, "..."] | None
    """Second level of NVFP4: float32, of a shape that broadcasts to that of ``scale``."""
    fmt: FormatName
    block: tuple[int, ...]
    """Elements per block along each axis."""
    axis: int
    """The axis that a GEMM may contract: blocks run along it."""
    length: int
    """Elements along ``axis``."""
    rounding: Rounding | None = None
    """How the E8M0 scale was chosen; None for other scales."""

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))


def dequantize(q: BlockScaled, dtype=jnp.float32) -> Float[Array, "..."]:
    """The values of ``q``. float32 holds them exactly, except the product with a float32 scale, which rounds.

    A block whose scale is NaN is NaN as a whole.
    """
    fmt, codes = format_of(q.fmt), codes_of(q)
    if q.rounding is not None:
        byte = spread(q.scale, q.block, codes.shape).astype(jnp.int32)
        values = decode(codes, fmt, byte - 127)
        return jnp.where(byte == NAN_SCALE, jnp.float32(jnp.nan), values).astype(dtype)
    if q.tensor_scale is None:
        return (decode(codes, fmt) * spread(q.scale, q.block, codes.shape)).astype(dtype)
    # Element times block scale is exact; the tensor scale rounds once.
    values = decode(codes, fmt) * spread(decode(q.scale, format_of("e4m3")), q.block, codes.shape)
    tensor_scale = jnp.broadcast_to(q.tensor_scale, q.scale.shape)
    return (values * spread(tensor_scale, q.block, codes.shape)).astype(dtype)


def scale_values(q: BlockScaled) -> Float[Array, "..."]:
    """The scale of each block as float32, the tensor scale included."""
    if q.rounding is not None:
        return decode_e8m0(q.scale)
    return q.scale if q.tensor_scale is None else decode(q.scale, format_of("e4m3")) * q.tensor_scale


def codes_of(q: BlockScaled) -> UInt8[Array, "..."]:
    """One code per element, in the shape of the source."""
    if format_of(q.fmt).bits == 8:
        return to_codes(q.data)
    return jax.lax.slice_in_dim(unpack(q.data, q.axis), 0, q.length, axis=q.axis)


def store(codes: UInt8[Array, "..."], fmt: FormatName, axis: int) -> Array:
    """Codes as :class:`BlockScaled` holds them."""
    return to_dtype(codes, format_of(fmt)) if format_of(fmt).bits == 8 else pack(codes, axis)


def pack(codes: UInt8[Array, "..."], axis: int) -> UInt8[Array, "..."]:
    """Two 4-bit codes in a byte, the even element in the low half; an odd length is filled up with 0."""
    axis = axis % codes.ndim
    codes = pad_to_blocks(codes, block_along(codes.ndim, axis, 2))
    pairs = codes.reshape(*codes.shape[:axis], codes.shape[axis] // 2, 2, *codes.shape[axis + 1 :])
    even, odd = (jax.lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in (0, 1))
    return even | odd << 4


def unpack(packed: UInt8[Array, "..."], axis: int) -> UInt8[Array, "..."]:
    """The inverse of :func:`pack`, but for the filling."""
    axis = axis % packed.ndim
    pair = jnp.stack([packed & 15, packed >> 4], axis + 1)
    return pair.reshape(*packed.shape[:axis], 2 * packed.shape[axis], *packed.shape[axis + 1 :])


# Blocks: their maximum, and back to the elements.


def block_along(ndim: int, axis: int, size: int) -> tuple[int, ...]:
    """Blocks of ``size`` along one axis."""
    return tuple(size if i == axis % ndim else 1 for i in range(ndim))


def square_block(ndim: int, size: int) -> tuple[int, ...]:
    """Blocks of ``size`` by ``size`` in the last two axes."""
    if ndim < 2:
        raise ValueError(f"square blocks need two axes, got {ndim}")
    return (1,) * (ndim - 2) + (size, size)


def pad_to_blocks(x: Array, block: tuple[int, ...]) -> Array:
    """``x`` with zeros up to whole blocks. A zero never changes an amax, so a short block is its own block."""
    room = [(0, -n % size) for n, size in zip(x.shape, block, strict=True)]
    return jnp.pad(x, room) if any(more for _, more in room) else x


def block_max(x: Array, block: tuple[int, ...]) -> Array:
    """The maximum of each block of a non-negative array."""
    x = pad_to_blocks(x, block)
    split = [part for n, size in zip(x.shape, block, strict=True) for part in (n // size, size)]
    return jnp.max(x.reshape(split), axis=tuple(range(1, 2 * x.ndim, 2)))


def spread(scale: Array, block: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    """Each block's scale at each of its elements: the inverse of :func:`block_max` in shape."""
    for axis, (size, n) in enumerate(zip(block, shape, strict=True)):
        if size > 1:
            scale = jax.lax.slice_in_dim(jnp.repeat(scale, size, axis=axis), 0, n, axis=axis)
    return scale
