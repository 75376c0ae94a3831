"""What dispatchers share: groups cut to a buffer, and counts of slots for the ledger."""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Int

from moe_course.grouping import Groups


def first_rows(groups: Groups, capacity: int) -> Groups:
    """The same groups in a buffer of exactly ``capacity`` rows; rows past its end are dropped."""
    num_slots, num_rows = groups.row_of_slot.size, groups.slot_of_row.shape[0]
    top_k = max(groups.row_of_slot.shape[1], 1)
    slot_of_row = groups.slot_of_row[:capacity]
    if capacity > num_rows:
        slot_of_row = jnp.pad(slot_of_row, (0, capacity - num_rows), constant_values=num_slots)
    ends = jnp.minimum(jnp.cumsum(groups.group_sizes), capacity)
    here = groups.row_of_slot < min(num_rows, capacity)
    return Groups(
        token_of_row=slot_of_row // top_k,
        slot_of_row=slot_of_row,
        row_of_slot=jnp.where(here, groups.row_of_slot, capacity),
        group_sizes=jnp.diff(ends, prepend=0),
        load=groups.load,
    )


def first_of_each_group(groups: Groups, kept: Int[Array, " groups"]) -> Groups:
    """The same rows, but slots past the first ``kept`` of their group read none."""
    num_rows = groups.slot_of_row.shape[0]
    ends = jnp.cumsum(groups.group_sizes)
    row = groups.row_of_slot
    group = jnp.searchsorted(ends, row, side="right")
    last = (ends - groups.group_sizes + kept).at[group].get(mode="fill", fill_value=0)
    return replace(groups, row_of_slot=jnp.where(row < last, row, num_rows))


def combined_slots(groups: Groups) -> Int[Array, ""]:
    """Slots that ``unpermute`` reads a row for."""
    return (groups.row_of_slot < groups.slot_of_row.shape[0]).sum(dtype=jnp.int32)


def slots_per_peer(
    row_of_slot: Int[Array, "tokens top_k"], rows_per_peer: Int[Array, " ranks"]
) -> Int[Array, " ranks"]:
    """Slots whose row is among each peer's rows, which follow one another."""
    below = row_of_slot[:, :, None] < jnp.cumsum(rows_per_peer)[None, None, :]
    return jnp.diff(below.sum((0, 1), dtype=jnp.int32), prepend=0)


def copies_of(groups: Groups) -> Int[Array, " tokens"]:
    """Slots of each token that ``unpermute`` reads a row for."""
    return (groups.row_of_slot < groups.slot_of_row.shape[0]).sum(1, dtype=jnp.int32)


def sum_chunks(
    values: Int[Array, "rows ..."], starts: Int[Array, " chunks"], sizes: Int[Array, " chunks"]
) -> Int[Array, "chunks ..."]:
    """The sum of ``values`` over each run of rows."""
    # Comparing every row with every chunk is cheaper than a cumulative sum.
    row = jnp.arange(values.shape[0], dtype=jnp.int32)[None, :]
    inside = (row >= starts[:, None]) & (row < (starts + sizes)[:, None])
    inside = inside.reshape(*inside.shape, *(1,) * (values.ndim - 1))
    return jnp.where(inside, values[None], 0).sum(1, dtype=jnp.int32)
