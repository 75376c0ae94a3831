"""NVFP4: E2M1 elements, an E4M3 scale per 16 of them, a float32 scale per tensor (arXiv 2509.25149, section 2).

With its three extra tools for training: 16x16 scales for weights (row-wise and column-wise copies then agree), a
random Hadamard transform for the operands of wgrad, stochastic rounding for gradients. The arithmetic is that of
Transformer Engine 2.20's reference, operation by operation: a scale beside a rounding tie depends on the order.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Key

from moe_course.quant.blocks import BlockScaled, block_along, block_max, spread, square_block, store
from moe_course.quant.formats import INF_BITS, decode, encode, format_of, from_bits, magnitude_bits

BLOCK = 16
LARGEST = np.finfo(np.float32).max
SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], np.float32)
"""The fixed sign vector of the random Hadamard transform (Transformer Engine, mask 0xd7e8)."""


def quantize_nvfp4(
    x: Float[Array, "..."],
    *,
    axis: int = -1,
    square: bool = False,
    tensor_amax: Float[Array, "..."] | None = None,
    key: Key[Array, ""] | None = None,
) -> BlockScaled:
    """NVFP4 of ``x`` in blocks of 16 along ``axis``, or of 16x16 in the last two axes (``square``).

    The block scale is rounded to nearest, and the *rounded* scale divides the elements: a block's largest may land
    above 6, and is clamped. ``tensor_amax``: a float32 scalar, or an array that broadcasts to the grid of blocks
    (one amax per expert, say); by default the largest finite magnitude of ``x``. ``key`` rounds stochastically.

    A block that holds NaN or infinity is NaN as a whole and counts for no other block. Blocks far below the
    tensor's amax have scale 0 and are 0; a tensor of zeros is zeros.
    """
    axis, e2m1, e4m3 = axis % x.ndim, format_of("e2m1"), format_of("e4m3")
    block = square_block(x.ndim, BLOCK) if square else block_along(x.ndim, axis, BLOCK)
    amax_bits = block_max(magnitude_bits(x), block)
    finite = amax_bits < INF_BITS
    amax = from_bits(jnp.where(finite, amax_bits, jnp.uint32(0)))
    if tensor_amax is None:
        tensor_amax = finite_amax(x)
    if tensor_amax.ndim == 0:
        tensor_amax = tensor_amax.reshape((1,) * x.ndim)
    top = np.float32(e4m3.max * e2m1.max)
    barrier = lax.optimization_barrier  # XLA would rewrite a / (b / c)
    encode_scale = jnp.where(tensor_amax > 0, jnp.minimum(top / tensor_amax, LARGEST), jnp.float32(1))
    scale = encode(amax * barrier(encode_scale * np.float32(1 / 6)), e4m3)
    scale_value = decode(scale, e4m3) * barrier(1 / encode_scale)
    multiplier = jnp.minimum(1 / barrier(scale_value), LARGEST)
    codes = encode(x.astype(jnp.float32) * spread(multiplier, block, x.shape), e2m1, key=key)
    scale = jnp.where(finite, scale, jnp.uint8(e4m3.nan_code))
    return BlockScaled(
        data=store(codes, "e2m1", axis),
        scale=scale,
        tensor_scale=tensor_amax / top,
        fmt="e2m1",
        block=block,
        axis=axis,
        length=x.shape[axis],
    )


def finite_amax(x: Float[Array, "..."], axis: int | tuple[int, ...] | None = None) -> Float[Array, "..."]:
    """The largest finite magnitude, of all or along ``axis``; 0 if there is none."""
    bits = magnitude_bits(x)
    return from_bits(jnp.max(jnp.where(bits < INF_BITS, bits, jnp.uint32(0)), axis, initial=jnp.uint32(0)))


def hadamard_matrix() -> np.ndarray:
    """``diag(signs) @ H / 4``, float32 [16, 16]: orthogonal, and exact in bfloat16."""
    h = np.ones((1, 1), np.float32)
    for _ in range(4):
        h = np.kron(np.array([[1, 1], [1, -1]], np.float32), h)
    return SIGNS[:, None] * h / 4


def hadamard(x: Float[Array, "..."], axis: int = -1) -> Float[Array, "..."]:
    """The random Hadamard transform of groups of 16 along ``axis``, in float32.

    It spreads an outlier over its group. Applied to both operands along the axis that they contract, it cancels in
    the product. ValueError if the axis is not a multiple of 16.
    """
    axis = axis % x.ndim
    if x.shape[axis] % BLOCK:
        raise ValueError(f"axis {axis} has {x.shape[axis]} elements, needed a multiple of {BLOCK}")
    groups = x.astype(jnp.float32).reshape(*x.shape[:axis], -1, BLOCK, *x.shape[axis + 1 :])
    moved = jnp.moveaxis(groups, axis + 1, -1)
    mixed = jnp.matmul(moved, jnp.asarray(hadamard_matrix()), precision=jax.lax.Precision.HIGHEST)
    return jnp.moveaxis(mixed, -1, axis + 1).reshape(x.shape)
