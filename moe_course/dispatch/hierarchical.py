"""Hierarchical exchange: deduplicated across nodes first, then within each node.

Links between nodes are slower than links inside one, so a token crosses to each node at most once, however many
of its experts that node has. Rank (n, l) sends it to the same place l of the other node, which relays it over the
fast links to the ranks of its node that own its experts. On the way back sums are taken twice: at the relay, over
the ranks of its node, and at home, over the nodes. Rows per token and way for uniform picks, N nodes, R ranks:

    across   N (1 - C(E - E/N, K) / C(E, K))        256 experts, K = 8: 3.6 over 4 nodes, where dedup
    within   R (1 - C(E - E/R, K) / C(E, K))        over 32 ranks sends 7.3

The mesh has two axes, ``node`` outside ``expert``; rank r is (n, l) = divmod(r, R/N). A relay holds at most N T
rows, and never more than its node was asked for, so the relay buffer cuts nothing while demand <= capacity. The
idea is that of DeepSeek-V3's all-to-all kernels (arXiv 2412.19437, section 3.2.2).
"""

import jax.numpy as jnp
from jax import lax

from moe_course.dispatch.dedup import expand, made_and_demand
from moe_course.dispatch.hop import send_back, send_once, sum_arrived, sum_sent, wire_counts
from moe_course.dispatch.slots import copies_of
from moe_course.grouping import permute, unpermute, weights_of_rows
from moe_course.parallel import EXPERT, NODE


def dispatch_rank(x, expert_ids, weights, *, plan):
    """One rank's part of ``dispatch``; runs inside ``shard_map`` over a mesh with node and expert axes."""
    nodes, tokens = lax.axis_size(NODE), x.shape[0]
    ranks_per_node = plan.ranks // nodes
    made, demand = made_and_demand(expert_ids, plan)
    across = send_once(
        x,
        expert_ids,
        weights,
        experts_per_owner=ranks_per_node * plan.experts_per_rank,
        axis=NODE,
        num_rows=relay_rows(nodes, tokens, plan),
    )
    within = send_once(
        across.rows,
        across.ids,
        across.weights,
        experts_per_owner=plan.experts_per_rank,
        axis=EXPERT,
        num_rows=min(plan.capacity, plan.ranks * tokens),
        tags=_sender_of_rows(across),
    )
    groups, arrange = expand(within, plan)
    return {
        "rows": permute(within.rows, arrange),
        "row_weights": weights_of_rows(within.weights, arrange).astype(weights.dtype),
        "group_sizes": arrange.group_sizes[None],
        "demand": demand[None],
        "counts": {
            "made": made[None],
            "sent": sum_sent(_copies_by_rank(across.ids_sent, ranks_per_node, plan), across).reshape(1, -1),
            "received": _by_origin(copies_of(groups), within, nodes)[None],
            "combined_for": _by_origin(copies_of(arrange), within, nodes)[None],
            **_wire_of_both(across, within),
        },
        "handle": {"across": across.hop, "within": within.hop, "arrange": arrange},
    }


def combine_rank(rows, handle, *, plan):
    """Add up a token's copies here, its ranks at the relay, its nodes at home."""
    at_relay = send_back(unpermute(rows, handle["arrange"]), handle["within"], EXPERT)
    return send_back(at_relay, handle["across"], NODE)


def relay_rows(nodes: int, tokens_per_rank: int, plan) -> int:
    """Rows of a relay's buffer: every token of its peers, or all that its node has room for."""
    return min(nodes * tokens_per_rank, plan.ranks // nodes * plan.capacity)


def _sender_of_rows(arrived):
    """The node that each arrived row comes from; anything past the last."""
    ends = jnp.cumsum(arrived.hop.route.there.recv_sizes)
    rows = jnp.arange(arrived.rows.shape[0], dtype=jnp.int32)
    return jnp.searchsorted(ends, rows, side="right").astype(jnp.int32)


def _copies_by_rank(ids, ranks_per_node: int, plan):
    """[sent, ranks per node]: how many of a row's experts each rank of the destination node has."""
    local = jnp.where(ids >= 0, ids // plan.experts_per_rank, ranks_per_node)
    ranks = jnp.arange(ranks_per_node, dtype=jnp.int32)[None, None, :]
    return (local[:, :, None] == ranks).sum(1, dtype=jnp.int32)


def _by_origin(copies, within, nodes: int):
    """Copies by the rank that made them: its node is the row's tag, its place that of the relay."""
    of_node = within.tags[:, None] == jnp.arange(nodes, dtype=jnp.int32)[None, :]
    by_place = sum_arrived(jnp.where(of_node, copies[:, None], 0), within)  # [place, node]
    return by_place.T.reshape(-1)


def _wire_of_both(across, within):
    """Rows on the wire by peer, both hops: across to the same place of every node, within to every place."""
    node, place = lax.axis_index(NODE), lax.axis_index(EXPERT)
    places = jnp.arange(lax.axis_size(EXPERT), dtype=jnp.int32)[None, :] == place
    own_node = jnp.arange(lax.axis_size(NODE), dtype=jnp.int32)[:, None] == node
    counts, second = wire_counts(across), wire_counts(within)
    return {
        name: (
            jnp.where(places, counts[name][:, None], 0) + jnp.where(own_node, second[name][None, :], 0)
        ).reshape(1, -1)
        for name in counts
    }
