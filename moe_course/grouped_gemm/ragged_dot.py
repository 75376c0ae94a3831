"""XLA's own grouped GEMM, ``jax.lax.ragged_dot``, held to this package's contract.

On the CPU, and for Blackwell where we compiled it, XLA lowers it to a dense product of every row with every
expert: right, but E times the work.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moe_course.grouped_gemm.bounds import group_bounds


def grouped_gemm(
    rows: Float[Array, "rows d_model"],
    kernels: Float[Array, "experts d_model d_ff"],
    group_sizes: Int[Array, "experts"],
) -> Float[Array, "rows d_ff"]:
    """Grouped GEMM by ``jax.lax.ragged_dot``; contract: :func:`moe_course.grouped_gemm.grouped_gemm`.

    Masks what the primitive leaves to each platform: rows past the last group (XLA may multiply them by 0)
    and their gradient.
    """
    sizes, ends = group_bounds(group_sizes, rows.shape[0])
    in_a_group = (jnp.arange(rows.shape[0], dtype=jnp.int32) < jnp.max(ends, initial=0))[:, None]
    rows = jnp.where(in_a_group, rows, jnp.zeros_like(rows))
    out = lax.ragged_dot(rows, kernels, sizes, preferred_element_type=jnp.float32)
    return jnp.where(in_a_group, out, jnp.zeros_like(out)).astype(rows.dtype)
