"""Deduplicated exchange: a token travels once per destination *rank*, not once per expert.

With K picks over R ranks, some ranks own several of a token's experts. One row goes to each distinct rank, with
the list of the token's experts there and their weights; the destination expands it into one row per expert, adds
up the weighted outputs and sends one row back. Rows per token and way, for uniform picks:

    R (1 - C(E - E/R, K) / C(E, K))        256 experts, K = 8: 5.3 of 8 over 8 ranks, 7.7 of 8 over 64

So the saving is large while R is not much larger than K, and gone far beyond it.

Two buffers, two units. *Rows on the wire* are (token, rank) pairs, at most min(C, R T) on a rank, as each brings
at least one copy. *Token copies* are expert picks: capacity, demand and the ledger count these; the ledger has
the wire's rows beside them. Beyond the capacity, wire rows are cut first, then the end of the expanded rows.
"""

import jax.numpy as jnp
from jax import lax

from moe_course.dispatch.exchange import exchange, plan_exchange, route_of_rank
from moe_course.dispatch.slots import first_of_each_group, first_rows, slots_per_peer, sum_chunks
from moe_course.grouping import Groups, group_by_expert, permute, unpermute, weights_of_rows
from moe_course.parallel import EXPERT


def dispatch_rank(x, expert_ids, weights, *, plan):
    """One rank's part of ``dispatch``; runs inside ``shard_map`` over a mesh with an expert axis."""
    ranks, me = plan.ranks, lax.axis_index(EXPERT)
    wire_rows = min(plan.capacity, ranks * x.shape[0])
    owner = _owner(expert_ids, plan)
    wire = group_by_expert(distinct(owner, ranks), ranks)
    peers = jnp.arange(ranks, dtype=jnp.int32)[None, None, :]
    made = (owner[:, :, None] == peers).sum((0, 1), dtype=jnp.int32)
    wanted = lax.all_gather(jnp.stack([wire.load, made]), EXPERT)  # [sender, rows or copies, receiver]
    route = route_of_rank(plan_exchange(wanted[:, 0, :, None], wire_rows), me)
    there, back = route.there, route.back

    picks = _picks_of_rows(expert_ids, weights, wire, plan)
    arrived = exchange(picks, route, wire_rows)
    local_ids, local_weights = jnp.split(arrived, 2, axis=1)
    groups = group_by_expert(local_ids.astype(jnp.int32) - 1, plan.experts_per_rank)
    arrange = first_rows(groups, plan.capacity)
    send = first_of_each_group(wire, there.send_sizes)
    copies_sent = (picks[:, : expert_ids.shape[1]] > 0).sum(1, dtype=jnp.int32)
    copies_here = (groups.row_of_slot < groups.slot_of_row.shape[0]).sum(1, dtype=jnp.int32)
    copies_added = (arrange.row_of_slot < plan.capacity).sum(1, dtype=jnp.int32)
    return {
        "rows": permute(exchange(permute(x, wire), route, wire_rows), arrange),
        "row_weights": weights_of_rows(local_weights, arrange).astype(weights.dtype),
        "group_sizes": arrange.group_sizes[None],
        "demand": jnp.take(wanted[:, 1], me, axis=1).sum()[None],
        "counts": {
            "made": made[None],
            "sent": sum_chunks(copies_sent, there.input_offsets, there.send_sizes)[None],
            "received": sum_chunks(copies_here, back.input_offsets, back.send_sizes)[None],
            "combined_for": sum_chunks(copies_added, back.input_offsets, back.send_sizes)[None],
            "rows_sent": there.send_sizes[None],
            "rows_received": there.recv_sizes[None],
            "rows_combined": slots_per_peer(send.row_of_slot, wire.load)[None],
        },
        "handle": {"send": send, "route": route, "arrange": arrange},
    }


def combine_rank(rows, handle, *, plan):
    """Add up each token's copies here, send one row per token back, add up each token's ranks at home."""
    send = handle["send"]
    by_token = unpermute(rows, handle["arrange"])
    back = exchange(by_token, handle["route"].reversed(), send.slot_of_row.shape[0])
    return unpermute(back, send)


def distinct(owner, ranks: int):
    """[T, min(K, R)]: the ranks that each token goes to, each once, in order; R where there are fewer."""
    first = jnp.sort(owner, axis=1)
    repeated = first[:, 1:] == first[:, :-1]
    once = first.at[:, 1:].set(jnp.where(repeated, ranks, first[:, 1:]))
    return jnp.sort(once, axis=1)[:, : min(owner.shape[1], ranks)]


def _owner(expert_ids, plan):
    """[T, K]: the rank that owns each pick, R for a slot without an expert."""
    has_expert = (expert_ids >= 0) & (expert_ids < plan.num_experts)
    return jnp.where(has_expert, expert_ids // plan.experts_per_rank, plan.ranks)


def _picks_of_rows(expert_ids, weights, wire: Groups, plan):
    """[wire rows, 2 K] float32: of each slot of the row's token, 1 + its expert there (0: none), and its weight.

    One array, so one exchange: an expert's number below 2**24 is exact in float32.
    """
    num_rows = wire.slot_of_row.shape[0]
    rank = jnp.searchsorted(jnp.cumsum(wire.load), jnp.arange(num_rows, dtype=jnp.int32), side="right")
    ids = expert_ids.at[wire.token_of_row].get(mode="fill", fill_value=plan.num_experts)
    here = _owner(ids, plan) == rank[:, None]
    number = jnp.where(here, ids - rank[:, None].astype(jnp.int32) * plan.experts_per_rank + 1, 0)
    row_weights = permute(weights.astype(jnp.float32), wire)
    return jnp.concatenate([number.astype(jnp.float32), jnp.where(here, row_weights, 0.0)], axis=1)
