"""Ragged all-to-all: every pair of ranks exchanges as many rows as it has.

A rank sorts its copies by expert and sends one chunk per expert. Counts come first: each rank gathers the whole
send matrix [R, E], so that everyone can work out where every chunk lands. Chunks land in expert order, senders in
order within an expert: the receive buffer is what the experts walk, and nothing is sorted a second time.

Demand is the sum over senders. Beyond the capacity, the end of the receive buffer is cut.
"""

import jax.numpy as jnp
from jax import lax

from moe_course.dispatch.exchange import exchange, plan_exchange, route_of_rank
from moe_course.dispatch.slots import first_of_each_group, slots_per_peer
from moe_course.grouping import group_by_expert, permute, unpermute, weights_of_rows
from moe_course.parallel import expert_axes


def dispatch_rank(x, expert_ids, weights, *, plan):
    """One rank's part of ``dispatch``; runs inside ``shard_map`` over a mesh with an expert axis."""
    ranks, axes = plan.ranks, expert_axes()
    me = lax.axis_index(axes)
    groups = group_by_expert(expert_ids, plan.num_experts)
    wanted = lax.all_gather(groups.load, axes).reshape(ranks, ranks, -1)  # [sender, receiver, expert there]
    route = route_of_rank(plan_exchange(wanted, plan.capacity), me)
    made = groups.load.reshape(ranks, -1).sum(1)
    kept = route.there.send_sizes
    arrived = route.there.recv_sizes.reshape(ranks, -1)
    send = first_of_each_group(groups, kept)
    return {
        "rows": exchange(permute(x, groups), route, plan.capacity, axes),
        "row_weights": exchange(weights_of_rows(weights, groups)[:, None], route, plan.capacity, axes)[:, 0],
        "group_sizes": arrived.sum(0)[None],
        "demand": jnp.take(wanted, me, axis=1).sum()[None],
        "counts": {
            "made": made[None],
            "sent": kept.reshape(ranks, -1).sum(1)[None],
            "received": arrived.sum(1)[None],
            "combined": slots_per_peer(send.row_of_slot, made)[None],
        },
        "handle": {"send": send, "route": route},
    }


def combine_rank(rows, handle, *, plan):
    """The way back: every chunk to where it was taken from, then add up each token's rows."""
    send = handle["send"]
    back = exchange(rows, handle["route"].reversed(), send.slot_of_row.shape[0], expert_axes())
    return unpermute(back, send)
