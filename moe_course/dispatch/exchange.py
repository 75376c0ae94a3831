"""The ragged exchange: every pair of ranks moves as many rows as it has, into one dense receive buffer.

:class:`Chunks` holds one rank's arguments of ``jax.lax.ragged_all_to_all``. Its K = R L chunks are ordered by the
rank they go to, L for each. The one thing to get right: ``output_offsets`` are held by the *sender* and say where
each chunk lands in its *receiver's* buffer. The way back, and the backward pass, is the same exchange of the
transposed matrix: a rank sends what it received, from where it landed to where it was taken from.

The receive buffer is dense, so its capacity bounds the sum over senders, not R times the largest pair. XLA:CPU has
no ragged all-to-all; :func:`emulate_ragged_all_to_all` stands in there. Same contract, many more bytes.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moe_course.parallel import EXPERT
from moe_course.varying import vary_alike


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chunks:
    """What one rank tells the exchange, in rows. Chunks r L to (r+1) L - 1 go to rank r, or come from it."""

    input_offsets: Int[Array, " chunks"]
    """Where each chunk begins in this rank's operand."""
    send_sizes: Int[Array, " chunks"]
    output_offsets: Int[Array, " chunks"]
    """Where each chunk begins in the buffer of the rank it goes to."""
    recv_sizes: Int[Array, " chunks"]
    """Rows of the chunks that come to this rank, by sender."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Route:
    """A way there and the way back."""

    there: Chunks
    back: Chunks

    def reversed(self) -> "Route":
        return Route(self.back, self.there)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Layout:
    """The exchange as all ranks see it: of each (sender, receiver, chunk), three numbers."""

    taken_from: Int[Array, "senders receivers chunks"]
    """First row in the sender's operand, as if nothing were ever cut."""
    kept: Int[Array, "senders receivers chunks"]
    """Rows that fit."""
    lands_at: Int[Array, "senders receivers chunks"]
    """First row in the receiver's buffer."""


def plan_exchange(sizes: Int[Array, "senders receivers chunks"], capacity: int) -> Layout:
    """Lay out receive buffers of ``capacity`` rows: by chunk, then by sender; what comes last is cut.

    A sender's operand is ordered by receiver, then by chunk. Cut sizes go into the sends and the landing
    offsets; a chunk is still taken from where it is, cut or not.
    """
    num_ranks, _, num_chunks = sizes.shape
    sent = sizes.reshape(num_ranks, -1)
    taken_from = (jnp.cumsum(sent, axis=1) - sent).reshape(sizes.shape)
    ends = jnp.minimum(jnp.cumsum(sizes.transpose(1, 2, 0).reshape(num_ranks, -1), axis=1), capacity)
    kept = jnp.diff(ends, axis=1, prepend=0)

    def by_sender(a):
        return a.reshape(num_ranks, num_chunks, num_ranks).transpose(2, 0, 1)

    return Layout(taken_from, by_sender(kept), by_sender(ends - kept))


def route_of_rank(layout: Layout, rank: Int[Array, ""] | int) -> Route:
    """One rank's arguments, there and back."""
    out = jax.tree.map(lambda a: a[rank].reshape(-1), layout)
    into = jax.tree.map(lambda a: a[:, rank].reshape(-1), layout)
    return Route(
        there=Chunks(out.taken_from, out.kept, out.lands_at, into.kept),
        back=Chunks(into.lands_at, into.kept, into.taken_from, out.kept),
    )


def exchange(
    rows: Float[Array, "rows d_model"], route: Route, num_rows: int, axis: str | tuple[str, ...] = EXPERT
) -> Float[Array, "out d_model"]:
    """Move the chunks along ``axis`` into a buffer of ``num_rows`` rows, zero where nothing lands.

    Rows outside the chunks are read by nothing, here and in the gradient.
    """
    leaves, structure = jax.tree.flatten(route)
    rows, *leaves = vary_alike(rows, *leaves)
    return _exchange(rows, jax.tree.unflatten(structure, leaves), num_rows, axis)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _exchange(rows, route, num_rows, axis):
    return _move(rows, route.there, num_rows, axis)


def _exchange_fwd(rows, route, num_rows, axis):
    return _exchange(rows, route, num_rows, axis), (route, jnp.zeros_like(rows, shape=(rows.shape[0], 0)))


def _exchange_bwd(num_rows, axis, residuals, d_out):
    route, like = residuals
    return _move(d_out, route.back, like.shape[0], axis), None


_exchange.defvjp(_exchange_fwd, _exchange_bwd)


def _move(rows, chunks: Chunks, num_rows: int, axis):
    output, rows = vary_alike(jnp.zeros((num_rows, rows.shape[1]), rows.dtype), rows)
    arguments = (
        rows,
        output,
        chunks.input_offsets,
        chunks.send_sizes,
        chunks.output_offsets,
        chunks.recv_sizes,
    )
    return lax.platform_dependent(
        *arguments,
        cpu=partial(emulate_ragged_all_to_all, axis_name=axis),
        default=partial(lax.ragged_all_to_all, axis_name=axis),
    )


def emulate_ragged_all_to_all(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """``jax.lax.ragged_all_to_all`` where XLA has none: gather everything, keep what was sent here.

    The real operation leaves a chunk undefined whose sender and receiver disagree on its size. Here it does
    not arrive at all, so that a wrong ``recv_sizes`` cannot pass a test on a CPU.
    """
    ranks, me = lax.axis_size(axis_name), lax.axis_index(axis_name)
    told = lax.all_gather(jnp.stack([input_offsets, send_sizes, output_offsets]), axis_name)
    to_me = lax.dynamic_index_in_dim(told.reshape(ranks, 3, ranks, -1), me, axis=2, keepdims=False)
    start, size, landing = (to_me[:, i, :, None] for i in range(3))  # [sender, chunk, 1]
    size = jnp.where(size == recv_sizes.reshape(size.shape), size, 0)

    row = jnp.arange(output.shape[0], dtype=jnp.int32)[None, None, :]
    sender = jnp.arange(ranks, dtype=jnp.int32)[:, None, None]
    lands = (row >= landing) & (row < landing + size)
    source = jnp.where(lands, sender * operand.shape[0] + start + row - landing, -1).max((0, 1))
    gathered = lax.all_gather(operand, axis_name, tiled=True)
    arrived = source >= 0
    moved = gathered.at[jnp.where(arrived, source, gathered.shape[0])].get(mode="fill", fill_value=0)
    return jnp.where(arrived[:, None], moved, output)
