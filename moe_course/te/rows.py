"""TE's Triton permutation: token order to expert order and back, held to :mod:`moe_course.grouping`."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from moe_course.errors import SettingError
from moe_course.routing import Routing, dense_routing
from moe_course.te import native
from moe_course.te.checks import require, require_shape


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["rows", "row_weights", "group_sizes", "row_id_map", "pad_offsets"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Permuted:
    """Token copies in expert order, and the way back."""

    rows: Float[Array, "rows d_model"]
    """Zero where a row holds no token."""
    row_weights: Float[Array, " rows"]
    """Combine weight of each row; 0 where it holds no token."""
    group_sizes: Int[Array, " experts"]
    """Rows per expert with its padding, int32."""
    row_id_map: Int[Array, "tokens _"]
    """TE's own; only :func:`unpermute` reads it."""
    pad_offsets: Int[Array, " experts"] | None


def permute(
    x: Float[Array, "tokens d_model"], routing: Routing, num_experts: int, *, align: int = 128
) -> Permuted:
    """Copy tokens into expert order by TE's ``token_dispatch``; each group padded to a multiple of ``align``.

    What ``group_by_expert`` and ``permute`` of :mod:`moe_course.grouping` do in two steps. The buffer is as long as
    the worst case, (T K + E (align - 1)) // align * align rows; those past the groups are zero. ids outside [0, E)
    get no row. Differentiable in ``x`` and the weights.

    Raises ``ValueError`` for shapes, :class:`SettingError` for an empty batch or where it cannot run.
    """
    require("permute")
    require_shape("x", x, None, None)
    require_shape("expert_ids", routing.expert_ids, x.shape[0], None)
    require_shape("weights", routing.weights, *routing.expert_ids.shape)
    slots = routing.expert_ids.size
    if slots == 0 or align < 1:
        raise SettingError(
            f"TE permutes at least one row in groups of at least one: {slots} rows, align {align}."
        )
    dense = dense_routing(routing, num_experts)
    # Flat and int32: TE would sum a 3-D map over the batch alone, and takes 1 and 0, not True and False.
    rows, weights, row_id_map, pad_offsets, sizes = native.api().token_dispatch(
        x,
        dense.routing_map.astype(jnp.int32),
        slots,
        probs=dense.probs.astype(jnp.float32),
        align_size=align if align > 1 else None,
    )
    sizes = sizes.astype(jnp.int32)
    # Without padding TE leaves the rows past the last group unwritten.
    used = jnp.arange(rows.shape[0], dtype=jnp.int32) < sizes.sum(dtype=jnp.int32)
    return Permuted(
        rows=jnp.where(used[:, None], rows, jnp.zeros_like(rows)),
        row_weights=jnp.where(used, weights.reshape(-1).astype(jnp.float32), 0.0),
        group_sizes=sizes,
        row_id_map=row_id_map,
        pad_offsets=pad_offsets,
    )


def unpermute(
    rows: Float[Array, "rows d_model"],
    permuted: Permuted,
    routing: Routing | None = None,
) -> Float[Array, "tokens d_model"]:
    """Add up each token's rows by TE's ``token_combine``, times the weights of ``routing`` if given.

    TE's backward pass writes 0 for NaN where groups are padded: a NaN gradient is hidden there, so look for NaN in the
    loss. Raises ``ValueError`` for shapes, :class:`SettingError` where it cannot run.
    """
    require("permute")
    require_shape("rows", rows, permuted.rows.shape[0], None)
    num_tokens, columns = permuted.row_id_map.shape
    merging = None
    if routing is not None:
        require_shape("expert_ids", routing.expert_ids, num_tokens, None)
        merging = dense_routing(routing, (columns - 1) // 2).probs
    return native.api().token_combine(
        rows, permuted.row_id_map, merging_probs=merging, pad_offsets=permuted.pad_offsets
    )
