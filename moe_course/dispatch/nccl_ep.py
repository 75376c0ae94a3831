"""Transformer Engine's exchange over NCCL EP, behind the contract of this package. Needs GPUs, bf16 tokens.

Unlike the others it is one operation at global shapes, so nothing here runs inside ``shard_map``. Around it: one
``te.bootstrap(setup_for(...), mesh)`` per process, outside ``jit``, and ``te.mesh_resources`` for the whole of
training. Each expert's block is padded to 128 rows; ``group_sizes``, ``demand`` and the plan's capacity include that.

The books are thinner than those of our own dispatchers. ``made`` and ``sent`` are picks of the router with a weight;
``received``, ``computed`` and ``combined`` are the rows that arrived with one, counted in TE's buffers. A drop on the
way there shows; what TE's combine adds up cannot be counted from outside. A pick whose weight is exactly 0 adds
nothing to the result and is in neither count.
"""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_course import te
from moe_course.dispatch.plan import DispatchPlan
from moe_course.parallel import ambient_mesh
from moe_course.routing import Routing


def setup_for(mesh, plan: DispatchPlan, *, tokens: int, top_k: int, d_model: int) -> te.ExpertParallel:
    """What ``te.bootstrap`` and ``te.mesh_resources`` take: the exchange of ``tokens`` in all by this plan.

    With ``plan.waves`` the tokens and the plan of one wave. Raises :class:`SettingError` for a mesh or a capacity
    that TE does not take.
    """
    return te.ExpertParallel.for_mesh(
        mesh,
        num_experts=plan.num_experts,
        top_k=top_k,
        tokens=tokens,
        d_model=d_model,
        capacity=plan.capacity,
    )


def dispatch_all(x: Float[Array, "tokens d_model"], routing: Routing, plan: DispatchPlan) -> dict:
    """The fields of ``Dispatched``, by :func:`moe_course.te.dispatch` on the ambient mesh."""
    tokens, d_model = x.shape
    top_k = routing.expert_ids.shape[1]
    setup = setup_for(ambient_mesh(), plan, tokens=tokens, top_k=top_k, d_model=d_model)
    received = te.dispatch(x, routing, setup=setup)
    ids = routing.expert_ids
    picked = (ids >= 0) & (ids < plan.num_experts) & (routing.weights != 0)
    made = picked.reshape(setup.devices, -1).sum(1, keepdims=True, dtype=jnp.int32)
    arrived = (received.row_weights != 0).reshape(setup.devices, -1).sum(1, keepdims=True, dtype=jnp.int32)
    return {
        "rows": received.rows,
        "row_weights": received.row_weights,
        "group_sizes": received.group_sizes,
        "demand": received.demand,
        "counts": {
            "made": made,
            "sent": made,
            "received": arrived,
            "computed": arrived,
            "combined": arrived,
        },
        "handle": {"received": replace(received, rows=None, row_weights=None)},
    }


def combine_all(rows: Float[Array, "N_C d_model"], handle: dict) -> Float[Array, "tokens d_model"]:
    """The sum of each token's copies, by :func:`moe_course.te.combine`."""
    return te.combine(rows, handle["received"])
