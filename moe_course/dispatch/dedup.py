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

from moe_course.dispatch.hop import owner_of, send_back, send_once, sum_arrived, sum_sent, wire_counts
from moe_course.dispatch.slots import copies_of, first_rows
from moe_course.grouping import Groups, group_by_expert, permute, unpermute, weights_of_rows
from moe_course.parallel import expert_axes


def dispatch_rank(x, expert_ids, weights, *, plan):
    """One rank's part of ``dispatch``; runs inside ``shard_map`` over a mesh with an expert axis."""
    axes = expert_axes()
    made, demand = made_and_demand(expert_ids, plan)
    arrived = send_once(
        x,
        expert_ids,
        weights,
        experts_per_owner=plan.experts_per_rank,
        axis=axes,
        num_rows=min(plan.capacity, plan.ranks * x.shape[0]),
    )
    groups, arrange = expand(arrived, plan)
    return {
        "rows": permute(arrived.rows, arrange),
        "row_weights": weights_of_rows(arrived.weights, arrange).astype(weights.dtype),
        "group_sizes": arrange.group_sizes[None],
        "demand": demand[None],
        "counts": {
            "made": made[None],
            "sent": sum_sent((arrived.ids_sent >= 0).sum(1, dtype=jnp.int32), arrived)[None],
            "received": sum_arrived(copies_of(groups), arrived)[None],
            "combined_for": sum_arrived(copies_of(arrange), arrived)[None],
            **{name: count[None] for name, count in wire_counts(arrived).items()},
        },
        "handle": {"hop": arrived.hop, "arrange": arrange},
    }


def combine_rank(rows, handle, *, plan):
    """Add up each token's copies here, send one row per token back, add up each token's ranks at home."""
    return send_back(unpermute(rows, handle["arrange"]), handle["hop"], expert_axes())


def made_and_demand(expert_ids, plan):
    """Copies that this rank makes for each rank [R], and copies that all ranks ask of this one, uncut."""
    owner = owner_of(expert_ids, plan.experts_per_rank, plan.ranks)
    peers = jnp.arange(plan.ranks, dtype=jnp.int32)[None, None, :]
    made = (owner[:, :, None] == peers).sum((0, 1), dtype=jnp.int32)
    asked = lax.all_gather(made, expert_axes())  # [sender, receiver]
    return made, jnp.take(asked, lax.axis_index(expert_axes()), axis=1).sum()


def expand(arrived, plan) -> tuple[Groups, Groups]:
    """Groups of the copies that arrived rows stand for, and the same cut to the capacity."""
    groups = group_by_expert(arrived.ids, plan.experts_per_rank)
    return groups, first_rows(groups, plan.capacity)
