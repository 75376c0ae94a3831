"""One hop of a deduplicated exchange: a row travels once to each owner of some of its experts.

Owners are the places along one mesh axis (or two taken as one), each with an equal, consecutive share of the
experts. With its row travel the expert numbers that this owner has, and their weights; the other picks stay.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moe_course.dispatch.exchange import Route, exchange, plan_exchange, route_of_rank
from moe_course.dispatch.slots import first_of_each_group, slots_per_peer, sum_chunks
from moe_course.grouping import Groups, group_by_expert, permute, unpermute


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Hop:
    """The way back of one hop."""

    send: Groups
    """The rows that were sent, grouped by owner."""
    route: Route


@dataclass(frozen=True)
class Arrived:
    """What the receivers of one hop hold, rows by sender, and what went there."""

    rows: Float[Array, "rows d_model"]
    ids: Int[Array, "rows top_k"]
    """Experts among the owner's own, counted from 0; -1 for a pick that another owner has, or none."""
    weights: Float[Array, "rows top_k"]
    tags: Int[Array, " rows"] | None
    hop: Hop
    rows_wanted: Int[Array, " owners"]
    """Rows for each owner, before any limit."""
    ids_sent: Int[Array, "sent top_k"]
    """``ids`` of the rows in the send buffer."""


def send_once(
    x: Float[Array, "tokens d_model"],
    ids: Int[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    *,
    experts_per_owner: int,
    axis: str | tuple[str, ...],
    num_rows: int,
    tags: Int[Array, " tokens"] | None = None,
) -> Arrived:
    """Send each token once to every distinct owner of its picks; at most ``num_rows`` arrive, by sender.

    Ids outside of all owners' experts are nobody's. ``tags`` below 2**24 travel along.
    """
    owners, me = lax.axis_size(axis), lax.axis_index(axis)
    owner = owner_of(ids, experts_per_owner, owners)
    wire = group_by_expert(distinct(owner, owners), owners)
    wanted = lax.all_gather(wire.load, axis)  # [sender, receiver]
    route = route_of_rank(plan_exchange(wanted[:, :, None], num_rows), me)

    ids_there, weights_there = _picks_of_rows(ids, weights, wire, experts_per_owner, owners)
    # One array, so one exchange: integers below 2**24 are exact in float32, and 0 is what no row holds.
    columns = [(ids_there + 1).astype(jnp.float32), weights_there]
    if tags is not None:
        columns.append(permute(tags[:, None].astype(jnp.float32), wire))
    beside = exchange(jnp.concatenate(columns, axis=1), route, num_rows, axis)
    top_k = ids.shape[1]
    return Arrived(
        rows=exchange(permute(x, wire), route, num_rows, axis),
        ids=beside[:, :top_k].astype(jnp.int32) - 1,
        weights=beside[:, top_k : 2 * top_k],
        tags=None if tags is None else beside[:, -1].astype(jnp.int32),
        hop=Hop(first_of_each_group(wire, route.there.send_sizes), route),
        rows_wanted=wire.load,
        ids_sent=ids_there,
    )


def send_back(
    rows: Float[Array, "rows d_model"], hop: Hop, axis: str | tuple[str, ...]
) -> Float[Array, "tokens d_model"]:
    """Every row to where it came from, then the sum over the owners that a token went to."""
    back = exchange(rows, hop.route.reversed(), hop.send.slot_of_row.shape[0], axis)
    return unpermute(back, hop.send)


def distinct(owner: Int[Array, "tokens top_k"], owners: int) -> Int[Array, "tokens slots"]:
    """[T, min(K, owners)]: the owners that each token goes to, each once, in order; then ``owners``, for none."""
    first = jnp.sort(owner, axis=1)
    repeated = first[:, 1:] == first[:, :-1]
    once = first.at[:, 1:].set(jnp.where(repeated, owners, first[:, 1:]))
    return jnp.sort(once, axis=1)[:, : min(owner.shape[1], owners)]


def owner_of(ids: Int[Array, "tokens top_k"], experts_per_owner: int, owners: int):
    """The owner of each pick; ``owners`` for a slot without an expert."""
    has_expert = (ids >= 0) & (ids < owners * experts_per_owner)
    return jnp.where(has_expert, ids // experts_per_owner, owners)


def sum_sent(per_row: Int[Array, "sent ..."], arrived: Arrived) -> Int[Array, "owners ..."]:
    """What the rows of the send buffer that fit hold, by the owner that they go to."""
    there = arrived.hop.route.there
    return sum_chunks(per_row, there.input_offsets, there.send_sizes)


def sum_arrived(per_row: Int[Array, "rows ..."], arrived: Arrived) -> Int[Array, "owners ..."]:
    """What the arrived rows hold, by the sender that they come from."""
    back = arrived.hop.route.back
    return sum_chunks(per_row, back.input_offsets, back.send_sizes)


def wire_counts(arrived: Arrived) -> dict[str, Int[Array, " owners"]]:
    """The ledger's rows on the wire, by peer along this hop's axis."""
    hop = arrived.hop
    return {
        "rows_sent": hop.route.there.send_sizes,
        "rows_received": hop.route.there.recv_sizes,
        "rows_combined": slots_per_peer(hop.send.row_of_slot, arrived.rows_wanted),
    }


def _picks_of_rows(ids, weights, wire: Groups, experts_per_owner: int, owners: int):
    """(ids, weights) [wire rows, K] of each slot of the row's token that this row's owner has; (-1, 0): not its."""
    num_rows = wire.slot_of_row.shape[0]
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    row_owner = jnp.searchsorted(jnp.cumsum(wire.load), rows, side="right").astype(jnp.int32)[:, None]
    row_ids = ids.at[wire.token_of_row].get(mode="fill", fill_value=owners * experts_per_owner)
    here = owner_of(row_ids, experts_per_owner, owners) == row_owner
    row_weights = permute(weights.astype(jnp.float32), wire)
    return jnp.where(here, row_ids - row_owner * experts_per_owner, -1), jnp.where(here, row_weights, 0.0)
