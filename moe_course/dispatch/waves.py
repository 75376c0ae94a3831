"""Waves: a layer's tokens in parts, so that one part's exchange can run while another's experts compute.

Nothing makes it run so but the absence of dependences: wave 2's dispatch reads nothing that wave 1's experts write,
and a scheduler with a free link uses it. What it costs: smaller messages, smaller groups for the grouped GEMM, and
every wave needs room for its own largest rank, so the buffers together are a little larger for the same routing.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from moe_course.dispatch.ledger import Ledger
from moe_course.dispatch.plan import DispatchPlan
from moe_course.errors import SettingError
from moe_course.parallel import ambient_mesh, per_device, token_axes
from moe_course.routing import Routing


def split_waves(
    x: Float[Array, "tokens d_model"], routing: Routing, plan: DispatchPlan
) -> list[tuple[Float[Array, "wave_tokens d_model"], Routing, DispatchPlan]]:
    """``plan.waves`` parts of each device's tokens, with the plan of one part. Nothing leaves its device."""
    waves = plan.waves
    if waves == 1:
        return [(x, routing, plan)]
    mesh = ambient_mesh()
    tokens = x.shape[0] // (1 if mesh is None else mesh.size)
    if tokens % waves:
        raise SettingError(
            f"{tokens} tokens per device do not divide into {waves} waves. Set --waves to a divisor of {tokens}."
        )
    arrays = x, routing.expert_ids, routing.weights

    def split(*arrays):
        return tuple(zip(*(jnp.split(a, waves) for a in arrays), strict=True))

    if mesh is None:
        parts = split(*arrays)
    else:
        spec = P(token_axes(mesh))
        parts = per_device(split, in_specs=(spec,) * 3, out_specs=spec)(*arrays)
    return [(part, Routing(ids, weights, None), one_wave(plan)) for part, ids, weights in parts]


def join_waves(parts: list[Float[Array, "wave_tokens d_model"]]) -> Float[Array, "tokens d_model"]:
    """The parts of :func:`split_waves`, put back in token order."""
    mesh = ambient_mesh()
    if len(parts) == 1 or mesh is None:
        return jnp.concatenate(parts) if len(parts) > 1 else parts[0]
    spec = P(token_axes(mesh))
    return per_device(lambda *parts: jnp.concatenate(parts), in_specs=(spec,) * len(parts), out_specs=spec)(
        *parts
    )


def one_wave(plan: DispatchPlan) -> DispatchPlan:
    """The plan of each wave: its share of the capacity, rounded up to a multiple of the ranks."""
    share = plan.ranks * -(-plan.capacity // (plan.ranks * plan.waves))
    return replace(plan, capacity=share, waves=1)


def demand_of(sent: list) -> Array:
    """Receive rows that the largest rank needs: equal shares, each as large as the largest wave."""
    return len(sent) * jnp.stack([one.demand.max() for one in sent]).max()


def add_ledgers(ledgers: list[Ledger]) -> Ledger:
    """The books of all waves together."""
    return jax.tree.map(lambda *counts: sum(counts[1:], counts[0]), *ledgers)
