"""The CPU kernel: tiles of one group at a time, walked in a loop.

XLA:CPU multiplies matrices well but has no grouped GEMM. So each group is cut into row tiles of a few fixed
sizes, and each tile is one plain dot. Which tiles there are is decided by the group sizes, on the device:
the loops have dynamic trip counts, shapes are fixed, nothing is padded to a capacity, nothing recompiles.

The loops run expert by expert and, within one, from the largest tile to the smallest; ``PLAN`` says which
tiles cover what is left after the full ones. A group's last tile rarely fits: it is moved back to end where
the group ends. What it then covers twice, or of another group, is masked. A tile therefore never depends on
how many rows lie behind the groups, and a longer buffer gives the same bits.

What worked on XLA:CPU (JAX 0.10.2 and 0.12.0, two cores, 32 experts, D = 512, F = 1024):

- Nested ``while_loop``: an idle one costs well under a microsecond, and one slice of the expert's weights
  serves all its tiles. A loop that runs 0 or 1 times is the conditional that copies nothing.
- Large tiles. A dot is cut over the cores, the writing of its result is not; small tiles also pay once more
  for each [D, F] sum of wgrad. Powers of two do as well as with 768, 384 and 192 between them, and compile
  faster. A small last size pays in small groups: at 64 rows per expert on average, 32 instead of 64 computes
  1.24 instead of 1.48 times the rows, for 3 to 8 % less time.
- Masks fused into the slices (wgrad) and the write (forward): too cheap to see.
- Transposing wgrad's operand in memory first (``products.dot_rows``): 0.68 to 0.79 of the time.

What did not: ``lax.switch`` over tile sizes (copies the output in JAX 0.10), gathered weights with a batched
dot, padding to a capacity, summing wgrad in place in the [E, D, F] result instead of in a [D, F] tile (a tie,
and wrong in bfloat16), one walk for dgrad and wgrad together (a tie), two walks at once over half the experts each
(8 to 14 % slower in the fused experts), a transposition of wgrad's operand in two steps (a tie).

What is left, against one dense product, is copies that XLA:CPU makes on one core: the expert's kernel out of
[E, D, F], the tile's rows, the tile's result into the output, and the zeros that the output starts from.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from moe_course.grouped_gemm.bounds import group_bounds
from moe_course.products import dot, dot_rows
from moe_course.varying import vary_over, varying_axes

TILES = (1024, 512, 256, 128, 64, 32)
"""Rows per tile: powers of two, largest first."""
TILE_OVERHEAD = 32
"""What one more tile costs, in rows."""


def _cheapest_cover(tiles: tuple[int, ...], overhead: int) -> np.ndarray:
    """How many tiles of each size cover u units of ``tiles[-1]`` rows at least cost, u below the largest."""
    unit = tiles[-1]
    best: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    for u in range(1, tiles[0] // unit):
        rests = ((best[max(u - size // unit, 0)], size) for size in tiles)
        best.append(min((cost + size + overhead, (*chosen, size)) for (cost, chosen), size in rests))
    return np.array([[chosen.count(size) for size in tiles] for _, chosen in best], np.int32)


PLAN = _cheapest_cover(TILES, TILE_OVERHEAD)


@jax.custom_vjp
def grouped_gemm(
    rows: Float[Array, "rows d_model"],
    kernels: Float[Array, "experts d_model d_ff"],
    group_sizes: Int[Array, "experts"],
) -> Float[Array, "rows d_ff"]:
    """Grouped GEMM by tiles; the contract is :func:`moe_course.grouped_gemm.grouped_gemm`."""
    return _products(rows, kernels, group_sizes, contract=0)


def _forward(rows, kernels, group_sizes):
    return grouped_gemm(rows, kernels, group_sizes), (rows, kernels, group_sizes)


def _backward(residuals, d_out):
    rows, kernels, group_sizes = residuals
    d_rows = _products(d_out, kernels, group_sizes, contract=1)
    return d_rows, _weight_gradients(rows, d_out, group_sizes), None


grouped_gemm.defvjp(_forward, _backward)


def _products(rows: Array, kernels: Array, group_sizes: Array, *, contract: int) -> Array:
    """``rows @ kernels[e]`` (contract=0) or ``rows @ kernels[e].T`` (contract=1); 0 past the last group."""
    num_rows = rows.shape[0]
    rows = fill_one_tile(rows)

    def expert(e, walk, out):
        kernel = lax.dynamic_index_in_dim(kernels, e, keepdims=False)

        def tile(out, start, size, fresh):
            return write_rows(out, dot(read_rows(rows, start, size), kernel, 1, contract), start, fresh)

        return walk(tile, out)

    out = zeros_like_varying((rows.shape[0], kernels.shape[2 - contract]), rows)
    return for_each_expert(expert, out, group_sizes, rows.shape[0])[:num_rows]


def _weight_gradients(rows: Array, d_out: Array, group_sizes: Array) -> Array:
    """``rows[g].T @ d_out[g]`` for each group g: exactly 0 for an empty one."""
    rows, d_out = fill_one_tile(rows), fill_one_tile(d_out)

    def expert(e, walk, d_kernels):
        def tile(total, start, size, fresh):
            # Both are masked: 0 * NaN is NaN.
            return total + dot_rows(read_rows(rows, start, size, fresh), read_rows(d_out, start, size, fresh))

        total = walk(tile, zeros_like_varying(d_kernels.shape[1:], rows, jnp.float32))
        return lax.dynamic_update_index_in_dim(d_kernels, total.astype(d_kernels.dtype), e, 0)

    d_kernels = zeros_like_varying((group_sizes.shape[0], rows.shape[1], d_out.shape[1]), rows)
    return for_each_expert(expert, d_kernels, group_sizes, rows.shape[0])


# The walk. Shared with the fused experts.


def for_each_expert(expert: Callable, carry, group_sizes: Array, num_rows: int):
    """``carry = expert(e, walk, carry)`` for every expert, where ``walk(tile, carry)`` visits its tiles.

    ``tile(carry, start, size, fresh)`` handles rows [start, start + size), where ``fresh`` [size, 1] marks
    those of this expert that no earlier tile had; it is None where that is all of them.
    """
    sizes, ends = group_bounds(group_sizes, num_rows)
    full, rest = sizes // TILES[0], sizes % TILES[0]
    counts = jnp.asarray(PLAN)[-(-rest // TILES[-1])]

    def one(e, carry):
        def walk(tile, carry):
            return _walk(ends[e] - sizes[e], ends[e], full[e], counts[e], num_rows, tile, carry)

        return expert(e, walk, carry)

    return lax.fori_loop(0, group_sizes.shape[0], one, carry)


def _walk(begin, end, full, counts, num_rows: int, tile: Callable, carry):
    def run(size: int, count: Array, is_full: bool, done: Array, carry):
        def step(state):
            i, done, carry = state
            if is_full:
                return i + 1, done + size, tile(carry, done, size, None)
            start = jnp.maximum(jnp.minimum(done, end - size), 0)
            row = start + lax.iota(jnp.int32, size)[:, None]
            return i + 1, done + size, tile(carry, start, size, (row >= done) & (row < end))

        first = jnp.zeros_like(count)
        return lax.while_loop(lambda state: state[0] < count, step, (first, done, carry))[1:]

    done = begin
    if TILES[0] <= num_rows:  # where it is not, no group fills that tile
        done, carry = run(TILES[0], full, True, done, carry)
    for k, size in enumerate(TILES):
        if size <= num_rows and PLAN[:, k].any():
            done, carry = run(size, counts[k], False, done, carry)
    return carry


def fill_one_tile(x: Array) -> Array:
    """``x``, padded to the next tile size if it has fewer rows than the largest tile."""
    return jnp.pad(x, ((0, room(x.shape[0]) - x.shape[0]), (0, 0)))


def room(num_rows: int) -> int:
    """Rows to make of ``num_rows``. The plan never covers n rows by a tile larger than this."""
    return min((size for size in TILES if size >= num_rows), default=num_rows)


def read_rows(x: Array, start: Array, size: int, fresh: Array | None = None) -> Array:
    """Rows [start, start + size), zero where not ``fresh``."""
    tile = lax.dynamic_slice_in_dim(x, start, size)
    return tile if fresh is None else jnp.where(fresh, tile, jnp.zeros_like(tile))


def write_rows(out: Array, tile: Array, start: Array, fresh: Array | None) -> Array:
    """``out`` with the ``fresh`` rows of ``tile`` at ``start``."""
    tile = tile.astype(out.dtype)
    if fresh is not None:
        tile = jnp.where(fresh, tile, read_rows(out, start, tile.shape[0]))
    return lax.dynamic_update_slice_in_dim(out, tile, start, 0)


def zeros_like_varying(shape: tuple[int, ...], like: Array, dtype=None) -> Array:
    """Zeros that vary over the same mesh axes as ``like``: what a loop inside ``shard_map`` must carry."""
    return vary_over(jnp.zeros(shape, dtype or like.dtype), varying_axes(like))
