"""No exchange: every expert is here. The dispatcher of an expert axis of one."""

from moe_course.dispatch.slots import combined_slots
from moe_course.grouping import group_by_expert, permute, unpermute, weights_of_rows


def dispatch_rank(x, expert_ids, weights, *, plan):
    """Group this device's copies by expert. M = tokens * top_k rows hold any routing, so nothing can drop."""
    groups = group_by_expert(expert_ids, plan.num_experts)
    made = groups.load.sum()[None, None]
    return {
        "rows": permute(x, groups),
        "row_weights": weights_of_rows(weights, groups),
        "group_sizes": groups.group_sizes[None],
        "demand": groups.load.sum()[None],
        "counts": {
            "made": made,
            "sent": made,
            "received": made,
            "combined": combined_slots(groups)[None, None],
        },
        "handle": {"groups": groups},
    }


def combine_rank(rows, handle, *, plan):
    """Add up each token's rows."""
    return unpermute(rows, handle["groups"])
