"""The SwiGLU expert MLP over rows that are sorted by expert (Shazeer, arXiv 2002.05202)."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moe_course.grouped_gemm import Backend, grouped_gemm


def swiglu_experts(
    rows: Float[Array, "rows d_model"],
    gate_up: Float[Array, "experts d_model 2*d_ff"],
    down: Float[Array, "experts d_ff d_model"],
    group_sizes: Int[Array, "experts"],
    *,
    backend: Backend = "auto",
    recipe: None = None,
) -> Float[Array, "rows d_model"]:
    """``down(silu(gate) * up)`` of each row by its own expert; ``gate_up`` holds gate first, then up."""
    hidden = grouped_gemm(rows, gate_up, group_sizes, backend=backend, recipe=recipe)
    row = lax.iota(jnp.int32, rows.shape[0])[:, None]
    # Before the activation: a mask after it would turn a NaN or inf in the tail into a NaN gradient.
    hidden = jnp.where(row < jnp.sum(group_sizes, dtype=jnp.int32), hidden, jnp.zeros_like(hidden))
    gate, up = jnp.split(hidden, 2, axis=1)
    return grouped_gemm(jax.nn.silu(gate) * up, down, group_sizes, backend=backend, recipe=recipe)
