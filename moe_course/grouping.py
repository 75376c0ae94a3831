"""Token order to expert order and back, by gathers alone.

``group_by_expert`` works out, from the ids of the picks, where every token copy goes; ``permute`` and
``unpermute`` move the data. Shapes are static (M rows, whatever the routing); the sizes of the groups stay on
the device. A *slot* is one pick: slot (t, k) is the k-th expert of token t, flat index t K + k.

    slots     (0,0) (0,1) (1,0) (1,1)     with experts 2 0 | 0 3, four experts
    rows       0: token 0   1: token 1   |   2: token 0   |   3: token 1
               \\------ expert 0 ------/      expert 2         expert 3      group_sizes [2, 0, 1, 1]

Every gather has a gather as its derivative (each row belongs to one slot and the other way round), so no
scatter-add, slow on a CPU and in varying order on a GPU, ever runs. Rows that belong to no slot (alignment
padding, and the tail past the last group) are written as zeros and read by nothing, NaN or not.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from moe_course.errors import SettingError
from moe_course.varying import vary_alike

_MAX_ROWS = np.iinfo(np.int32).max
_BLOCK = 32
"""Slots compared with each other at once in :func:`_rank_within_expert`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Groups:
    """Which row holds which slot. All int32, all on the device; rows are counted, never bytes or elements."""

    token_of_row: Int[Array, " rows"]
    """The token that a row copies; T for a row that holds none."""
    slot_of_row: Int[Array, " rows"]
    """The flat slot of a row; T K for a row that holds none."""
    row_of_slot: Int[Array, "tokens top_k"]
    """Where a slot went; M for a slot without an expert."""
    group_sizes: Int[Array, " experts"]
    """Rows per expert *including* its padding: what a grouped GEMM takes. Multiples of ``align``."""
    load: Int[Array, " experts"]
    """Token copies per expert, without padding."""


def padded_rows(num_slots: int, num_experts: int, align: int = 1) -> int:
    """Rows M that hold any routing of ``num_slots`` picks, each group padded to a multiple of ``align``.

    At most min(E, slots) groups are not empty and each wastes at most ``align - 1`` rows. Raises
    :class:`SettingError` when the count does not fit in int32; offsets are in rows for the same reason (in
    elements, 524,288 rows of 7,168 are already past 2**31).
    """
    if align < 1:
        raise SettingError(f"align is {align}. Set it to 1 or more.")
    rows = (num_slots + min(num_experts, num_slots) * (align - 1)) // align * align
    if rows > _MAX_ROWS:
        raise SettingError(
            f"{num_slots} token copies in {num_experts} groups aligned to {align} need {rows} rows, more "
            f"than int32 counts ({_MAX_ROWS}). Use fewer tokens per device or a smaller align."
        )
    return rows


def group_offsets(group_sizes: Int[Array, " experts"]) -> Int[Array, " experts"]:
    """First row of each group, in rows. Saturates at 2**31 - 1 instead of going negative."""

    def add(a, b):
        return jnp.where(a > _MAX_ROWS - b, _MAX_ROWS, a + b)

    ends = lax.associative_scan(add, group_sizes.astype(jnp.int32))
    return jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])


def group_by_expert(expert_ids: Int[Array, "tokens top_k"], num_experts: int, *, align: int = 1) -> Groups:
    """Rows in expert order; within an expert, slots keep their order (a stable sort).

    Ids outside [0, E), the sentinel E among them, get no row. Each group starts at a multiple of ``align``
    and is padded to one (MXFP8 blocks and some kernels want 32 or 128).

    A counting sort in blocks of 32 slots: the rank of a slot within its expert is the count in the blocks
    before plus the equal ids before it in its own block. For 16,384 slots on a CPU with 2 cores, a stable
    argsort takes 10 and 7 times as long (E = 32 and 128, JAX 0.10.2; 4 and 5 on 0.12.0.1), a sort of packed
    (id, slot) keys 4 and 4 (3 and 5), cumulative sums of one-hot columns 10 and 26 (9 and 24).
    """
    num_tokens, top_k = expert_ids.shape
    num_slots = num_tokens * top_k
    num_rows = padded_rows(num_slots, num_experts, align)
    ids = expert_ids.reshape(-1).astype(jnp.int32)
    has_expert = (ids >= 0) & (ids < num_experts)
    ids = jnp.where(has_expert, ids, num_experts)

    rank, load = _rank_within_expert(ids, num_experts)
    group_sizes = (load + (align - 1)) // align * align
    # One more offset, that of "no expert", for the gather to land on.
    first_row = jnp.append(group_offsets(group_sizes), 0)
    rows = jnp.where(has_expert, first_row[ids] + rank, num_rows)
    # A scatter of indices (each row at most once); only data must never be scattered.
    slots = jnp.arange(num_slots, dtype=jnp.int32)
    slot_of_row = jnp.full(num_rows, num_slots, jnp.int32).at[rows].set(slots, mode="drop")
    return Groups(
        token_of_row=slot_of_row // max(top_k, 1),
        slot_of_row=slot_of_row,
        row_of_slot=rows.reshape(num_tokens, top_k),
        group_sizes=group_sizes,
        load=load,
    )


def _rank_within_expert(ids: Int[Array, " slots"], num_experts: int):
    """For each slot, how many slots before it have the same id; and how many slots each expert has."""
    num_blocks = -(-len(ids) // _BLOCK)
    blocks = jnp.pad(ids, (0, num_blocks * _BLOCK - len(ids)), constant_values=num_experts)
    blocks = blocks.reshape(num_blocks, _BLOCK)
    before = jnp.tril(jnp.ones((1, _BLOCK, _BLOCK), bool), -1)
    in_block = ((blocks[:, :, None] == blocks[:, None, :]) & before).sum(-1, dtype=jnp.int32)
    experts = jnp.arange(num_experts, dtype=jnp.int32)[None, None, :]
    counts = (blocks[:, :, None] == experts).sum(1, dtype=jnp.int32)
    earlier = jnp.cumsum(counts, axis=0) - counts
    ranks = in_block + jnp.take_along_axis(earlier, blocks, axis=1, mode="clip")
    return ranks.reshape(-1)[: len(ids)], counts.sum(0)


def permute(x: Float[Array, "tokens d_model"], groups: Groups) -> Float[Array, "rows d_model"]:
    """Copy tokens into expert order; rows that hold no token are zeros.

    The gradient of a token is the float32 sum of the gradients of its K copies.
    """
    x, groups = _vary_alike(x, groups)
    return _permute(x, groups)


def unpermute(
    rows: Float[Array, "rows d_model"],
    groups: Groups,
    weights: Float[Array, "tokens top_k"] | None = None,
) -> Float[Array, "tokens d_model"]:
    """Add up each token's K rows, times ``weights`` if given, in float32. Returns the dtype of ``rows``.

    Slots without an expert add nothing, whatever their weight.
    """
    if weights is None:
        rows, groups = _vary_alike(rows, groups)
        return _unpermute(rows, groups)
    rows, groups, weights = _vary_alike(rows, groups, weights)
    return _unpermute_weighted(rows, groups, weights)


def weights_of_rows(weights: Float[Array, "tokens top_k"], groups: Groups) -> Float[Array, " rows"]:
    """The weight of each row's slot; 0 for rows that hold none. For weighing rows before a combine."""
    weights, groups = _vary_alike(weights, groups)
    return _weights_of_rows(weights, groups)


def _take(x: Array, index: Array) -> Array:
    """``x[index]``, zeros where ``index`` is past the end (the sentinel)."""
    return x.at[index].get(mode="fill", fill_value=0)


def _sum_copies(rows, groups: Groups, weights=None):
    """[T, D] float32: each token's rows, weighed, summed in slot order."""
    num_tokens, top_k = groups.row_of_slot.shape
    total = jnp.zeros((num_tokens, rows.shape[-1]), jnp.float32)
    for k in range(top_k):
        copy = _take(rows, groups.row_of_slot[:, k]).astype(jnp.float32)
        total = total + (copy if weights is None else copy * weights[:, k, None].astype(jnp.float32))
    return total


@jax.custom_vjp
def _permute(x, groups):
    return _take(x, groups.token_of_row)


def _permute_fwd(x, groups):
    return _permute(x, groups), groups


def _permute_bwd(groups, drows):
    return _sum_copies(drows, groups).astype(drows.dtype), None


_permute.defvjp(_permute_fwd, _permute_bwd)


@jax.custom_vjp
def _unpermute(rows, groups):
    return _sum_copies(rows, groups).astype(rows.dtype)


def _unpermute_fwd(rows, groups):
    return _unpermute(rows, groups), groups


def _unpermute_bwd(groups, dout):
    return _take(dout, groups.token_of_row), None


_unpermute.defvjp(_unpermute_fwd, _unpermute_bwd)


@jax.custom_vjp
def _unpermute_weighted(rows, groups, weights):
    return _sum_copies(rows, groups, weights).astype(rows.dtype)


def _unpermute_weighted_fwd(rows, groups, weights):
    return _unpermute_weighted(rows, groups, weights), (rows, groups, weights)


def _unpermute_weighted_bwd(residuals, dout):
    rows, groups, weights = residuals
    row_weights = _weights_of_rows(weights, groups).astype(jnp.float32)
    dout_rows = _take(dout, groups.token_of_row).astype(jnp.float32)
    drows = (dout_rows * row_weights[:, None]).astype(rows.dtype)
    # Over slots, not rows: a product over rows would read padding, which may hold NaN.
    dweights = [
        (_take(rows, row).astype(jnp.float32) * dout.astype(jnp.float32)).sum(-1)
        for row in groups.row_of_slot.T
    ]
    return drows, None, jnp.stack(dweights, axis=-1).astype(weights.dtype)


_unpermute_weighted.defvjp(_unpermute_weighted_fwd, _unpermute_weighted_bwd)


@jax.custom_vjp
def _weights_of_rows(weights, groups):
    return _take(weights.reshape(-1), groups.slot_of_row)


def _weights_of_rows_fwd(weights, groups):
    return _weights_of_rows(weights, groups), groups


def _weights_of_rows_bwd(groups, drow_weights):
    return _take(drow_weights, groups.row_of_slot), None


_weights_of_rows.defvjp(_weights_of_rows_fwd, _weights_of_rows_bwd)


def _vary_alike(*trees):
    """The trees, with every array typed as varying over the same axes of a ``shard_map``.

    A custom derivative must return a cotangent that varies exactly like its input. Outside these functions,
    JAX differentiates the marking itself (a sum over the axis), so a replicated input gets its full gradient.
    """
    leaves, structure = jax.tree.flatten(trees)
    return jax.tree.unflatten(structure, vary_alike(*leaves))
