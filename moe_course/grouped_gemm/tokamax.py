"""openxla/tokamax's ``ragged_dot`` behind this package's contract. Never run: its kernels need a GPU."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_course.grouped_gemm.bounds import group_bounds


def grouped_gemm(
    rows: Float[Array, "rows d_model"],
    kernels: Float[Array, "experts d_model d_ff"],
    group_sizes: Int[Array, "experts"],
) -> Float[Array, "rows d_ff"]:
    """Grouped GEMM by ``tokamax.ragged_dot``; contract: :func:`moe_course.grouped_gemm.grouped_gemm`."""
    import tokamax  # optional: its wheel is for GPUs

    sizes, ends = group_bounds(group_sizes, rows.shape[0])
    # The kernel promises nothing for rows past the last group: neither may they enter nor leave.
    in_a_group = (jnp.arange(rows.shape[0], dtype=jnp.int32) < jnp.max(ends, initial=0))[:, None]
    rows = jnp.where(in_a_group, rows, jnp.zeros_like(rows))
    out = tokamax.ragged_dot(rows, kernels, sizes, preferred_element_type=jnp.float32)
    return jnp.where(in_a_group, out, jnp.zeros_like(out)).astype(rows.dtype)
