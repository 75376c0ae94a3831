"""Dispatch and combine: token copies to the ranks that own their experts, and back. One contract.

Shapes are global, as those of Transformer Engine's expert-parallel calls are, so that either can stand
behind the same layer: tokens are cut over every mesh axis, N devices in all, R of them along ``expert``
(``node`` and ``expert``, where nodes are told apart). Each device exchanges rows with the R devices that share its
``data`` and ``fsdp`` coordinates.
"""

from dataclasses import dataclass
from functools import partial

import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from moe_course import te
from moe_course.dispatch import all_gather, all_to_all, dedup, hierarchical, local, nccl_ep, ragged
from moe_course.dispatch.plan import DispatchPlan
from moe_course.errors import SettingError
from moe_course.parallel import NODE, ambient_mesh, expert_ranks, per_device, token_axes
from moe_course.routing import Routing

DISPATCHERS = {
    "local": local,
    "all_gather": all_gather,
    "all_to_all": all_to_all,
    "ragged": ragged,
    "dedup": dedup,
    "hierarchical": hierarchical,
    "te": nccl_ep,
}
"""``DispatchPlan.dispatcher`` by name; an expert axis of one always takes ``local``. ``te`` needs GPUs."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["rows", "row_weights", "group_sizes", "demand", "counts", "handle"],
    meta_fields=["plan"],
)
@dataclass(frozen=True)
class Dispatched:
    """Token copies where their experts are. N devices, C receive rows on each, E/R experts on each."""

    rows: Float[Array, "N_C d_model"]
    """Copies in expert order on each device; rows past the device's groups are zero."""
    row_weights: Float[Array, "N_C"]
    """Combine weight of each row, zero past the groups. ``swiglu_experts`` applies it; ``combine`` does not."""
    group_sizes: Int[Array, "N experts_per_rank"]
    """Rows of each expert; of ``te``, with each block's padding."""
    demand: Int[Array, "N"]
    """Rows of buffer this device was asked for, counted before any limit: demand <= capacity proves that
    nothing was dropped."""
    counts: dict[str, Int[Array, "N R"]]
    """What ``dispatch.ledger`` balances, per device and peer."""
    handle: dict[str, Array]
    """The way back; only ``combine`` reads it."""
    plan: DispatchPlan


def dispatch(x: Float[Array, "tokens d_model"], routing: Routing, *, plan: DispatchPlan) -> Dispatched:
    """Send each token copy to the rank that owns its expert, grouped by expert there.

    Differentiable in ``x`` and in the routing weights. Runs on the ambient mesh (``jax.set_mesh``), or on
    one device without one. Copies beyond the capacity are dropped (all_to_all: from the end of each sender's
    block; the others: from the end of the receive buffer) and counted in ``demand``; the training step never
    uses such a result.
    """
    dispatcher = _dispatcher(plan)
    if dispatcher is nccl_ep:
        return Dispatched(**nccl_ep.dispatch_all(x, routing, plan), plan=plan)
    fn = partial(dispatcher.dispatch_rank, plan=plan)
    mesh = ambient_mesh()
    if mesh is None:
        out = fn(x, routing.expert_ids, routing.weights)
    else:
        spec = P(token_axes(mesh))
        out = per_device(fn, in_specs=(spec,) * 3, out_specs=spec)(x, routing.expert_ids, routing.weights)
    return Dispatched(**out, plan=plan)


def combine(rows: Float[Array, "N_C d_model"], dispatched: Dispatched) -> Float[Array, "tokens d_model"]:
    """Bring expert outputs back to their tokens and add the K copies, in float32 (``te``: as NCCL EP does). Unweighted.

    Rows past the groups are read by nothing, whatever they hold.
    """
    dispatcher = _dispatcher(dispatched.plan)
    if dispatcher is nccl_ep:
        return nccl_ep.combine_all(rows, dispatched.handle)
    fn = partial(dispatcher.combine_rank, plan=dispatched.plan)
    mesh = ambient_mesh()
    if mesh is None:
        return fn(rows, dispatched.handle)
    spec = P(token_axes(mesh))
    return per_device(fn, in_specs=(spec, spec), out_specs=spec)(rows, dispatched.handle)


def _dispatcher(plan: DispatchPlan):
    mesh = ambient_mesh()
    ranks = 1 if mesh is None else expert_ranks(mesh)
    if plan.ranks != ranks:
        raise SettingError(
            f"the dispatch plan is for {plan.ranks} expert ranks but the mesh has {ranks}. Build it with ranks={ranks}."
        )
    if ranks == 1:
        return local
    if plan.dispatcher not in DISPATCHERS or plan.dispatcher == "local":
        usable = sorted(set(DISPATCHERS) - {"local"})
        raise SettingError(
            f"dispatcher {plan.dispatcher!r} cannot exchange tokens between {ranks} ranks. "
            f"Set --dispatcher to one of: {', '.join(usable)}."
        )
    if plan.dispatcher == "hierarchical" and NODE not in mesh.axis_names:
        raise SettingError(
            "the hierarchical dispatcher needs a mesh with a node axis. "
            "Set --mesh.nodes to how many nodes the expert axis spans, or choose --dispatcher dedup."
        )
    if plan.dispatcher == "te" and (reason := te.available("dispatch").reason):
        raise SettingError(f"the te dispatcher cannot run here: {reason} Use --dispatcher all_to_all.")
    return DISPATCHERS[plan.dispatcher]


__all__ = ["DISPATCHERS", "DispatchPlan", "Dispatched", "combine", "dispatch"]
