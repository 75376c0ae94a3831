"""The CPU kernel: tiles of one group at a time, walked in a loop.

XLA:CPU multiplies matrices well but has no grouped GEMM. So each group is cut into row tiles of a few fixed
sizes, largest first, and each tile is one plain dot. Which tiles there are is decided by the group sizes, on
the device: the loops have dynamic trip counts, shapes are fixed, nothing is padded, nothing recompiles.

A group's last tile rarely fits. It is moved back to end where the group ends, overlapping rows that are
done; rows that belong to other groups (only in a group smaller than the smallest tile) are masked. A tile
therefore never depends on how many rows lie behind the groups: a longer buffer gives the same bits.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from moe_course.grouped_gemm.varying import varying_axes, vary_over

TILES = (1024, 256, 64)
"""Rows per tile, largest first."""


@jax.custom_vjp
def tiled(
    rows: Float[Array, "rows d_model"],
    kernels: Float[Array, "experts d_model d_ff"],
    group_sizes: Int[Array, "experts"],
) -> Float[Array, "rows d_ff"]:
    """Grouped GEMM by tiles; the contract is :func:`moe_course.grouped_gemm.grouped_gemm`."""
    return _products(rows, kernels, group_sizes, contract=0)


def _forward(rows, kernels, group_sizes):
    return tiled(rows, kernels, group_sizes), (rows, kernels, group_sizes)


def _backward(residuals, d_out):
    rows, kernels, group_sizes = residuals
    d_rows = _products(d_out, kernels, group_sizes, contract=1)
    d_kernels = _weight_gradients(rows, d_out, group_sizes)
    return d_rows, d_kernels, None


tiled.defvjp(_forward, _backward)


def _products(rows: Array, kernels: Array, group_sizes: Array, *, contract: int) -> Array:
    """``rows @ kernels[e]`` (contract=0) or ``rows @ kernels[e].T`` (contract=1); zeros past the last group."""
    num_rows = rows.shape[0]
    rows = _at_least_one_tile(rows)
    dims = (((1,), (contract,)), ((), ()))

    def group(e, out):
        kernel = lax.dynamic_index_in_dim(kernels, e, keepdims=False)

        def tile(out, start, size, fresh):
            new = lax.dot_general(
                _rows_at(rows, start, size), kernel, dims, preferred_element_type=jnp.float32
            )
            new = new.astype(out.dtype)
            if fresh is not None:
                new = jnp.where(fresh, new, _rows_at(out, start, size))
            return lax.dynamic_update_slice_in_dim(out, new, start, 0)

        return _over_tiles(rows.shape[0], ends[e] - sizes[e], ends[e], tile, out)

    sizes, ends = _bounds(group_sizes, num_rows)
    out = _zeros_like_varying((rows.shape[0], kernels.shape[2 - contract]), rows)
    return lax.fori_loop(0, kernels.shape[0], group, out)[:num_rows]


def _weight_gradients(rows: Array, d_out: Array, group_sizes: Array) -> Array:
    """``rows[g].T @ d_out[g]`` for each group g: exactly 0 for an empty one."""
    sizes, ends = _bounds(group_sizes, rows.shape[0])
    rows, d_out = _at_least_one_tile(rows), _at_least_one_tile(d_out)
    dims = (((0,), (0,)), ((), ()))

    def group(e, out):
        def tile(acc, start, size, fresh):
            x, dy = _rows_at(rows, start, size), _rows_at(d_out, start, size)
            if fresh is not None:  # both: 0 * NaN is NaN
                x, dy = jnp.where(fresh, x, jnp.zeros_like(x)), jnp.where(fresh, dy, jnp.zeros_like(dy))
            return acc + lax.dot_general(x, dy, dims, preferred_element_type=jnp.float32)

        acc = _zeros_like_varying((rows.shape[1], d_out.shape[1]), rows, jnp.float32)
        acc = _over_tiles(rows.shape[0], ends[e] - sizes[e], ends[e], tile, acc)
        return lax.dynamic_update_index_in_dim(out, acc.astype(out.dtype), e, 0)

    out = _zeros_like_varying((group_sizes.shape[0], rows.shape[1], d_out.shape[1]), rows)
    return lax.fori_loop(0, group_sizes.shape[0], group, out)


def _over_tiles(num_rows: int, begin: Array, end: Array, visit: Callable, carry: Array) -> Array:
    """``visit`` the tiles of rows [begin, end). ``fresh`` [size, 1] marks rows not seen before, None for all."""

    def step(size, fits, state):
        done, carry = state
        if fits:
            return done + size, visit(carry, done, size, None)
        start = jnp.maximum(jnp.minimum(done, end - size), 0)
        index = start + lax.iota(jnp.int32, size)[:, None]
        return done + size, visit(carry, start, size, (index >= done) & (index < end))

    state = begin, carry
    for size in TILES[:-1]:
        if size > num_rows:
            continue  # no group can fill it
        state = lax.while_loop(lambda s, size=size: s[0] + size <= end, partial(step, size, True), state)
    return lax.while_loop(lambda s: s[0] < end, partial(step, TILES[-1], False), state)[1]


def _bounds(group_sizes: Array, num_rows: int) -> tuple[Array, Array]:
    """Size and end row of each group, cut off at the end of the buffer."""
    ends = jnp.minimum(jnp.cumsum(group_sizes.astype(jnp.int32)), num_rows)
    return jnp.diff(ends, prepend=jnp.zeros_like(ends, shape=(1,))), ends


def _at_least_one_tile(x: Array) -> Array:
    return jnp.pad(x, ((0, max(TILES[-1] - x.shape[0], 0)), (0, 0)))


def _rows_at(x: Array, start: Array, size: int) -> Array:
    return lax.dynamic_slice_in_dim(x, start, size)


def _zeros_like_varying(shape: tuple[int, ...], like: Array, dtype=None) -> Array:
    """Zeros that vary over the same mesh axes as ``like``: what a loop inside ``shard_map`` must carry."""
    return vary_over(jnp.zeros(shape, dtype or like.dtype), varying_axes(like))
