"""The contract, written to be read: every expert multiplies every row, and a mask keeps its own."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_course.grouped_gemm.bounds import group_bounds


def grouped_gemm(
    rows: Float[Array, "rows d_model"],
    kernels: Float[Array, "experts d_model d_ff"],
    group_sizes: Int[Array, "experts"],
) -> Float[Array, "rows d_ff"]:
    """Grouped GEMM by a loop over experts; the contract is :func:`moe_course.grouped_gemm.grouped_gemm`.

    Costs E times the work. The mask comes before the product: a masked NaN would still reach the weight
    gradient, as 0 * NaN.
    """
    sizes, ends = group_bounds(group_sizes, rows.shape[0])
    row = jnp.arange(rows.shape[0], dtype=jnp.int32)
    out = jnp.zeros((rows.shape[0], kernels.shape[2]), jnp.float32)
    for e in range(kernels.shape[0]):
        mine = ((row >= ends[e] - sizes[e]) & (row < ends[e]))[:, None]
        mine_only = jnp.where(mine, rows, jnp.zeros_like(rows))
        product = jnp.matmul(mine_only, kernels[e], preferred_element_type=jnp.float32)
        out = out + jnp.where(mine, product, jnp.zeros_like(product))
    return out.astype(rows.dtype)
