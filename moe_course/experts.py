"""The SwiGLU expert MLP over rows that are sorted by expert (Shazeer, arXiv 2002.05202).

With the tiled kernel it is one walk over the tiles: gate-up product, activation and down product of a tile
follow one another while the tile is in cache, and the [rows, d_ff] activation and its gradient never exist
as whole arrays. The backward pass reads the saved hidden rows and computes four products per tile. Against
two grouped GEMMs with the activation between them, forward and backward, this takes half the temporary memory
and 0 to 20 % less time (8,192 rows, 8 to 128 experts, D = 256, F = 128; XLA:CPU, JAX 0.10.2 and 0.12.0).

The combine weight of a row multiplies its activation, not its output: the down product is linear, so the result
is the same, and the weight's gradient is a sum over d_ff that needs no saved output. Megatron Core does so too.

The cost does not follow the active parameters alone: at the same FLOPs, forward and backward, a layer with 128
experts of 64 rows takes 2.9 to 3.3 times the time of one with 8 experts of 1,024 (``bench moe-layer``). Each expert
costs a copy of its weights and a pass over their gradients, and XLA's products are slower on 64 rows: one padded
batched product for all experts takes 2.7 (JAX 0.10.2) and 1.1 to 1.6 (0.12.0) times as long for 128 x 64 rows as
for 8 x 1,024, before any gather, and does E times a capacity of work however the rows are spread. Adding weight
gradients in place in the [E, D, 2F] result was a tie.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Key, PyTree

from moe_course.grouped_gemm import Backend, check_arguments, grouped_gemm, resolve_backend
from moe_course.grouped_gemm.tiled import (
    fill_one_tile,
    for_each_expert,
    read_rows,
    write_rows,
    zeros_like_varying,
)
from moe_course.products import dot, dot_rows
from moe_course.quant.recipes import Recipe
from moe_course.varying import vary_alike

EXPERT_ROWS = "moe_expert_rows"
"""Checkpoint name of the experts' input [rows, d_model]."""
EXPERT_HIDDEN = "moe_expert_hidden"
"""Checkpoint name of the gate-up product [rows, 2*d_ff], before the activation."""
RESIDUAL_NAMES = (EXPERT_ROWS, EXPERT_HIDDEN)
"""All that the experts' backward pass needs besides weights and sizes, by name, for remat policies."""


def swiglu_experts(
    rows: Float[Array, "rows d_model"],
    gate_up: Float[Array, "experts d_model 2*d_ff"],
    down: Float[Array, "experts d_ff d_model"],
    group_sizes: Int[Array, "experts"],
    row_weights: Float[Array, "rows"] | None = None,
    *,
    backend: Backend = "auto",
    recipe: Recipe | None = None,
    key: Key[Array, ""] | None = None,
    state: PyTree | None = None,
) -> Float[Array, "rows d_model"]:
    """``down(silu(gate) * up)`` of each row by its own expert; ``gate_up`` holds gate first, then up.

    With ``row_weights`` (float32, a routing's combine weights) each row of the result is multiplied by its weight.
    Rows past ``sum(group_sizes)`` are unspecified and reach nothing, as in
    :func:`moe_course.grouped_gemm.grouped_gemm`, whose errors and dtype rules also hold here. Residuals for
    the backward pass carry the names :data:`RESIDUAL_NAMES`.

    With a ``recipe`` both GEMMs are quantised, on any backend and unfused; ``key`` and ``state`` as there, with
    ``state`` a pair (gate-up's, down's). The activation between them is rounded to the dtype of ``rows`` first.
    """
    check_arguments(rows, gate_up, group_sizes)
    if down.shape != (gate_up.shape[0], gate_up.shape[2] // 2, gate_up.shape[1]) or gate_up.shape[2] % 2:
        raise ValueError(f"gate_up [E, D, 2F] and down [E, F, D] disagree: {gate_up.shape} and {down.shape}")
    if down.dtype != rows.dtype:
        raise TypeError(f"rows and down must share one float dtype, got {rows.dtype} and {down.dtype}")
    if row_weights is None:
        rows, gate_up, down, group_sizes = vary_alike(rows, gate_up, down, group_sizes)
    else:
        if row_weights.shape != rows.shape[:1]:
            raise ValueError(f"row_weights must be [rows], got {row_weights.shape} for {rows.shape[0]} rows")
        rows, gate_up, down, group_sizes, row_weights = vary_alike(
            rows, gate_up, down, group_sizes, row_weights.astype(jnp.float32)[:, None]
        )
    rows = checkpoint_name(rows, EXPERT_ROWS)
    if resolve_backend(backend) == "tiled" and recipe is None:
        return _fused(rows, gate_up, down, group_sizes, row_weights)
    keys = (None, None) if key is None else jax.random.split(key)
    quantised = [
        {"backend": backend, "recipe": recipe, "key": k, "state": s}
        for k, s in zip(keys, state or (None, None), strict=True)
    ]
    hidden = grouped_gemm(rows, gate_up, group_sizes, **quantised[0])
    # Masked before the activation: a mask after it would turn a NaN or inf in the tail into a NaN gradient.
    in_a_group = lax.iota(jnp.int32, rows.shape[0])[:, None] < jnp.sum(group_sizes, dtype=jnp.int32)
    hidden = checkpoint_name(_zero_unless(in_a_group, hidden), EXPERT_HIDDEN)
    if row_weights is not None:
        row_weights = _zero_unless(in_a_group, row_weights)
    return grouped_gemm(activate(hidden, row_weights), down, group_sizes, **quantised[1])


def _zero_unless(condition: Array, x: Array) -> Array:
    return jnp.where(condition, x, jnp.zeros_like(x))


def activate(
    hidden: Float[Array, "rows 2*d_ff"], row_weights: Float[Array, "rows 1"] | None = None
) -> Float[Array, "rows d_ff"]:
    """``silu(gate) * up * row_weights`` in float32, returned in the dtype of ``hidden``."""
    gate, up = jnp.split(hidden.astype(jnp.float32), 2, axis=1)
    out = jax.nn.silu(gate) * up
    return (out if row_weights is None else out * row_weights).astype(hidden.dtype)


@jax.custom_vjp
def _fused(rows: Array, gate_up: Array, down: Array, group_sizes: Array, row_weights: Array | None) -> Array:
    return _fused_walk(rows, gate_up, down, group_sizes, row_weights, keep_hidden=False)[0]


def _fused_forward(*arguments):
    out, hidden = _fused_walk(*arguments, keep_hidden=True)
    return out, (*arguments, checkpoint_name(hidden, EXPERT_HIDDEN))


def _fused_walk(rows, gate_up, down, group_sizes, row_weights, *, keep_hidden: bool):
    num_rows = rows.shape[0]
    rows, row_weights = jax.tree.map(fill_one_tile, (rows, row_weights))

    def expert(e, walk, carry):
        w_in, w_out = (lax.dynamic_index_in_dim(w, e, keepdims=False) for w in (gate_up, down))

        def tile(carry, start, size, fresh):
            out, hidden = carry
            x, weights = jax.tree.map(lambda a: read_rows(a, start, size), (rows, row_weights))
            h = dot(x, w_in, 1, 0).astype(rows.dtype)
            if keep_hidden:
                hidden = write_rows(hidden, h, start, fresh)
            y = dot(lax.optimization_barrier(activate(h, weights)), w_out, 1, 0)
            return write_rows(out, y, start, fresh), hidden

        return walk(tile, carry)

    hidden_rows = rows.shape[0] if keep_hidden else 0
    carry = jnp.zeros_like(rows), zeros_like_varying((hidden_rows, gate_up.shape[2]), rows)
    out, hidden = for_each_expert(expert, carry, group_sizes, rows.shape[0])
    return out[:num_rows], hidden[:num_rows]


def _fused_backward(residuals, d_out):
    rows, gate_up, down, group_sizes, row_weights, hidden = residuals
    num_rows = rows.shape[0]
    per_row = jax.tree.map(fill_one_tile, (rows, hidden, d_out, row_weights))

    def expert(e, walk, carry):
        w_in, w_out = (lax.dynamic_index_in_dim(w, e, keepdims=False) for w in (gate_up, down))

        def tile(carry, start, size, fresh):
            d_rows, d_in, d_down = carry
            x, h, dy, weights = jax.tree.map(lambda a: read_rows(a, start, size, fresh), per_row)
            act, pull_back = jax.vjp(activate, h, weights)
            dh, d_weights = pull_back(dot(dy, w_out, 1, 1).astype(h.dtype))
            # Without the barrier XLA computes the activation again for each product that reads it.
            act, dh = lax.optimization_barrier((act, dh))
            d_tile = dot(dh, w_in, 1, 1), d_weights
            d_rows = jax.tree.map(lambda out, d: write_rows(out, d, start, fresh), d_rows, d_tile)
            return d_rows, d_in + dot_rows(x, dh), d_down + dot_rows(act, dy)

        d_rows, d_gate_up, d_down = carry
        zeros = (zeros_like_varying(w.shape[1:], rows, jnp.float32) for w in (gate_up, down))
        d_rows, *sums = walk(tile, (d_rows, *zeros))
        put = lax.dynamic_update_index_in_dim
        d_kernels = (put(d, s.astype(d.dtype), e, 0) for d, s in zip((d_gate_up, d_down), sums, strict=True))
        return d_rows, *d_kernels

    d_rows = jax.tree.map(jnp.zeros_like, (per_row[0], per_row[3]))
    carry = d_rows, jnp.zeros_like(gate_up), jnp.zeros_like(down)
    d_rows, d_gate_up, d_down = for_each_expert(expert, carry, group_sizes, per_row[0].shape[0])
    d_rows, d_row_weights = jax.tree.map(lambda d: d[:num_rows], d_rows)
    return d_rows, d_gate_up, d_down, None, d_row_weights


_fused.defvjp(_fused_forward, _fused_backward)
