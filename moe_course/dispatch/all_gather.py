"""All-gather: every rank sees every token of its expert axis and keeps the copies for its experts.

Nothing is addressed, so nothing can be addressed wrongly; the price is that every token travels to every rank,
R rows per token each way, however few experts it picked. A fair choice where K is not much less than R.
Results come back by a reduce-scatter of float32 partial sums: each rank adds up what its experts made of each
token, and the scatter adds up the ranks.

Demand is the sum over senders. Beyond the capacity, the end of the receive buffer is cut.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from moe_course.dispatch.slots import first_rows
from moe_course.grouping import group_by_expert, permute, unpermute, weights_of_rows
from moe_course.parallel import expert_axes


def dispatch_rank(x, expert_ids, weights, *, plan):
    """One rank's part of ``dispatch``; runs inside ``shard_map`` over a mesh with an expert axis."""
    ranks, per = plan.ranks, plan.experts_per_rank
    experts = jnp.arange(plan.num_experts, dtype=jnp.int32)[None, None, :]
    made = (expert_ids[:, :, None] == experts).sum((0, 1), dtype=jnp.int32).reshape(ranks, per).sum(1)
    ids = lax.all_gather(expert_ids, expert_axes(), tiled=True) - lax.axis_index(expert_axes()) * per
    groups = group_by_expert(ids, per)  # an id of another rank is outside [0, E/R): no row
    arrange = first_rows(groups, plan.capacity)
    return {
        "rows": permute(gather_tokens(x), arrange),
        "row_weights": weights_of_rows(gather_tokens(weights), arrange),
        "group_sizes": arrange.group_sizes[None],
        "demand": groups.load.sum()[None],
        "counts": {
            "made": made[None],
            "sent": made[None],
            "received": _by_sender(groups.row_of_slot < groups.slot_of_row.shape[0], ranks)[None],
            "combined_for": _by_sender(arrange.row_of_slot < plan.capacity, ranks)[None],
        },
        "handle": {"arrange": arrange},
    }


def combine_rank(rows, handle, *, plan):
    """Add up each token's rows here, then each token's partial sums over the ranks, both in float32."""
    partial_sums = unpermute(rows.astype(jnp.float32), handle["arrange"])
    return scatter_sums(partial_sums, rows.dtype)


@jax.custom_vjp
def gather_tokens(x):
    """[T, D] on each of R ranks -> [R T, D] on all of them; the gradient is summed in float32."""
    return lax.all_gather(x, expert_axes(), tiled=True)


def _gather_bwd(_, d_gathered):
    return (_reduce_scatter(d_gathered, d_gathered.dtype),)


gather_tokens.defvjp(lambda x: (gather_tokens(x), None), _gather_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def scatter_sums(partial_sums, dtype):
    """[R T, D] float32 -> [T, D] ``dtype``, summed over ranks; the gradient travels in ``dtype``."""
    return _reduce_scatter(partial_sums, dtype)


def _scatter_bwd(dtype, _, d_sums):
    return (lax.all_gather(d_sums, expert_axes(), tiled=True).astype(jnp.float32),)


scatter_sums.defvjp(lambda sums, dtype: (scatter_sums(sums, dtype), None), _scatter_bwd)


def _reduce_scatter(x, dtype):
    return lax.psum_scatter(x.astype(jnp.float32), expert_axes(), scatter_dimension=0, tiled=True).astype(
        dtype
    )


def _by_sender(is_here, ranks: int):
    """How many of the gathered slots [R T, K] are here, by the rank that they come from."""
    return is_here.reshape(ranks, -1).sum(1, dtype=jnp.int32)
