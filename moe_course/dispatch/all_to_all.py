"""Padded all-to-all: every pair of ranks exchanges a buffer of one fixed size.

A rank sorts its copies by expert, which sorts them by owner too, and writes those for rank r into slot block
r of a [R, pair] send buffer, pair = capacity / R. One all-to-all moves the blocks; a second one, of R x E/R
integers, says how many rows of each block are for which expert. The receiver groups what it got by expert.

    sender:   copies by expert   | rank 0: 3 rows . | rank 1: 1 row . . | ...      each block ``pair`` rows
    receiver: block of rank 0, block of rank 1, ...  ->  rows by expert, senders in order within an expert

Simple and static, at a price: a block is as large for the idlest pair as for the busiest, so the buffer that
drops nothing is R times the *largest* pair. That is the demand reported here.
"""

import jax.numpy as jnp
from jax import lax

from moe_course.dispatch.slots import slots_per_peer
from moe_course.grouping import Groups, group_by_expert, group_offsets, permute, unpermute, weights_of_rows
from moe_course.parallel import expert_axes


def dispatch_rank(x, expert_ids, weights, *, plan):
    """One rank's part of ``dispatch``; runs inside ``shard_map`` over a mesh with an expert axis."""
    ranks, pair = plan.ranks, plan.capacity // plan.ranks
    groups = group_by_expert(expert_ids, plan.num_experts)
    wanted = groups.load.reshape(ranks, plan.experts_per_rank)
    send = _send_groups(groups, wanted.sum(1), pair, plan)

    received = _exchange(permute(x, send), ranks)
    received_weights = _exchange(weights_of_rows(weights, send)[:, None], ranks)
    announced = lax.all_to_all(
        wanted, expert_axes(), split_axis=0, concat_axis=0, tiled=True
    )  # [sender, expert here]
    arrived = _first_rows(announced, pair)

    arrange = group_by_expert(_expert_of_row(arrived, pair, plan)[:, None], plan.experts_per_rank)
    return {
        "rows": permute(received, arrange),
        "row_weights": permute(received_weights, arrange)[:, 0],
        "group_sizes": arrange.group_sizes[None],
        "demand": (ranks * announced.sum(1).max())[None],
        "counts": {
            "made": wanted.sum(1)[None],
            "sent": _first_rows(wanted, pair).sum(1)[None],
            "received": arrived.sum(1)[None],
            "combined": slots_per_peer(send.row_of_slot, jnp.full(ranks, pair, jnp.int32))[None],
        },
        "handle": {"send": send, "arrange": arrange},
    }


def combine_rank(rows, handle, *, plan):
    """The way back: undo the receiver's order, exchange the blocks again, add up each token's rows."""
    by_sender = unpermute(rows, handle["arrange"])
    return unpermute(_exchange(by_sender, plan.ranks), handle["send"])


def _exchange(rows, ranks: int):
    """[R * pair, D] in blocks by destination -> [R * pair, D] in blocks by sender. Its own inverse."""
    blocks = rows.reshape(ranks, -1, rows.shape[-1])
    return lax.all_to_all(blocks, expert_axes(), split_axis=0, concat_axis=0, tiled=True).reshape(rows.shape)


def _first_rows(sizes, pair: int):
    """Group sizes [R, experts] of what fits when only the first ``pair`` rows of each block are kept."""
    ends = jnp.minimum(jnp.cumsum(sizes, axis=1), pair)
    return jnp.diff(ends, axis=1, prepend=0)


def _send_groups(groups: Groups, made, pair: int, plan) -> Groups:
    """The expert order of ``groups`` moved into blocks of ``pair`` rows per destination."""
    num_slots = groups.row_of_slot.size
    start = group_offsets(made)  # where each destination's copies begin in expert order
    block = jnp.arange(plan.ranks * pair, dtype=jnp.int32) // pair
    within = jnp.arange(plan.ranks * pair, dtype=jnp.int32) % pair
    filled = within < made[block]
    source = jnp.where(filled, start[block] + within, num_slots)
    top_k = groups.row_of_slot.shape[1]
    slot_of_row = groups.slot_of_row.at[source].get(mode="fill", fill_value=num_slots)

    row = groups.row_of_slot
    has_expert = row < num_slots
    destination = jnp.searchsorted(jnp.cumsum(made), row, side="right").astype(jnp.int32)
    destination = jnp.minimum(destination, plan.ranks - 1)
    place = row - start[destination]
    fits = has_expert & (place < pair)
    return Groups(
        token_of_row=slot_of_row // max(top_k, 1),
        slot_of_row=slot_of_row,
        row_of_slot=jnp.where(fits, destination * pair + place, plan.ranks * pair),
        group_sizes=groups.group_sizes,
        load=groups.load,
    )


def _expert_of_row(arrived, pair: int, plan):
    """Local expert of each received row, E/R for the unused end of a block."""
    ends = jnp.cumsum(arrived, axis=1)  # [sender, expert]
    within = jnp.arange(pair, dtype=jnp.int32)
    expert = (within[None, :, None] >= ends[:, None, :]).sum(-1, dtype=jnp.int32)
    return expert.reshape(-1)
