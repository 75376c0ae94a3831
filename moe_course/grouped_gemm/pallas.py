"""A grouped GEMM for the GPU, from scratch, in Pallas on its Triton backend.

**Tile map.** The grid is fixed when the program is compiled, the group sizes are not known until it runs. A
group of n rows has ceil(n / block) row tiles, so all groups together have at most ceil(M / block) + E: that
many programs are launched per column block, and three small arrays say for each which expert's rows it
multiplies and which rows they are. Programs beyond the last tile find an empty range and stop.

**Masked tail.** Each group's tiles start where the group starts, so a group's last tile may reach into the
next group: those rows load as 0 and are not stored. Nothing is padded in memory, no two programs write the
same element, and so there are no atomics and the result does not depend on the order of programs. Places are
in rows; Pallas multiplies by the row length, in 64 bits for arrays of more than 4 GiB.

**Double buffering.** The depth loop loads a block of each operand and multiplies them. With
``num_stages=2`` Triton's pipeliner turns these loads into asynchronous copies into two shared-memory
buffers: the next blocks travel while the tensor cores multiply the present ones. What is not here: TMA
copies, warp specialisation, a persistent grid, blocks ordered for the L2 cache. Those are what separates
this kernel from a production one.

**wgrad** contracts over rows, whose number is data: one program per expert and [D, F] block, and a depth
loop as long as the group, once around for nobody if it is empty: then it stores exact zeros.

Correct in interpret mode on a CPU, lowered for CUDA by both JAX versions. Never run on a GPU.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Float, Int

from moe_course.grouped_gemm.bounds import group_bounds
from moe_course.varying import vary_over, varying_axes


@dataclass(frozen=True)
class Blocks:
    """Block edges, powers of two of at least 16, and how Triton runs a program."""

    rows: int = 64
    cols: int = 128
    depth: int = 32
    num_warps: int = 4
    num_stages: int = 2


def grouped_gemm(
    rows: Float[Array, "rows d_model"],
    kernels: Float[Array, "experts d_model d_ff"],
    group_sizes: Int[Array, "experts"],
) -> Float[Array, "rows d_ff"]:
    """Grouped GEMM by Pallas; the contract is :func:`moe_course.grouped_gemm.grouped_gemm`."""
    return _grouped_gemm(rows, kernels, group_sizes, Blocks(), False)


def grouped_gemm_interpreted(rows: Array, kernels: Array, group_sizes: Array) -> Array:
    """The same kernels, interpreted program by program: for tests, on small shapes, on any platform."""
    return _grouped_gemm(rows, kernels, group_sizes, Blocks(rows=16, cols=16, depth=16), True)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _grouped_gemm(rows: Array, kernels: Array, group_sizes: Array, blocks: Blocks, interpret: bool) -> Array:
    return _products(rows, kernels, group_sizes, blocks, interpret, transpose=False)


def _forward(rows, kernels, group_sizes, blocks, interpret):
    return _grouped_gemm(rows, kernels, group_sizes, blocks, interpret), (rows, kernels, group_sizes)


def _backward(blocks, interpret, residuals, d_out):
    rows, kernels, group_sizes = residuals
    d_rows = _products(d_out, kernels, group_sizes, blocks, interpret, transpose=True)
    _, ends = group_bounds(group_sizes, rows.shape[0])
    in_a_group = jnp.arange(rows.shape[0], dtype=jnp.int32) < jnp.max(ends, initial=0)
    d_rows = jnp.where(in_a_group[:, None], d_rows, jnp.zeros_like(d_rows))
    return d_rows, _weight_gradients(rows, d_out, group_sizes, blocks, interpret), None


_grouped_gemm.defvjp(_forward, _backward)


def tile_map(group_sizes: Int[Array, "experts"], num_rows: int, block: int) -> tuple[Array, Array, Array]:
    """Expert, first row and end row of each row tile; end = first row where there is no such tile."""
    sizes, ends = group_bounds(group_sizes, num_rows)
    tiles = pl.cdiv(sizes, block)
    tile_ends = jnp.cumsum(tiles, dtype=jnp.int32)
    tile = jnp.arange(pl.cdiv(num_rows, block) + group_sizes.shape[0], dtype=jnp.int32)
    expert = jnp.sum(tile[:, None] >= tile_ends[None, :], axis=1, dtype=jnp.int32)
    exists, expert = expert < group_sizes.shape[0], jnp.minimum(expert, group_sizes.shape[0] - 1)
    begin = (ends - sizes)[expert] + (tile - (tile_ends - tiles)[expert]) * block
    begin = jnp.where(exists, begin, 0)
    return expert, begin, jnp.where(exists, jnp.minimum(begin + block, ends[expert]), 0)


def _products(rows, kernels, group_sizes, blocks: Blocks, interpret: bool, *, transpose: bool) -> Array:
    """``rows @ kernels[e]``, or ``rows @ kernels[e].T``; rows past the last group are not written."""
    num_cols = kernels.shape[1 if transpose else 2]
    tiles = tile_map(group_sizes, rows.shape[0], blocks.rows)
    return _call(
        partial(_product_program, blocks=blocks, transpose=transpose),
        grid=(tiles[0].shape[0], pl.cdiv(num_cols, blocks.cols)),
        out_shape=(rows.shape[0], num_cols),
        blocks=blocks,
        interpret=interpret,
    )(*tiles, rows, kernels)


def _product_program(expert_ref, begin_ref, end_ref, rows, kernels, out, *, blocks: Blocks, transpose: bool):
    tile = pl.program_id(0)
    expert, begin, end = expert_ref[tile], begin_ref[tile], end_ref[tile]
    col = pl.program_id(1) * blocks.cols
    depth, num_cols = rows.shape[1], out.shape[1]

    @pl.when(begin < end)
    def _():
        def step(k, total):
            at = k * blocks.depth
            x = _load(rows, (begin, blocks.rows, end), (at, blocks.depth, depth))
            if transpose:
                w = _load(kernels, (col, blocks.cols, num_cols), (at, blocks.depth, depth), expert)
            else:
                w = _load(kernels, (at, blocks.depth, depth), (col, blocks.cols, num_cols), expert)
            return total + _dot(x, w, trans_b=transpose)

        zeros = jnp.zeros((blocks.rows, blocks.cols), jnp.float32)
        total = lax.fori_loop(0, pl.cdiv(depth, blocks.depth), step, zeros)
        _store(out, total, (begin, blocks.rows, end), (col, blocks.cols, num_cols))


def _weight_gradients(rows, d_out, group_sizes, blocks: Blocks, interpret: bool) -> Array:
    """``rows[g].T @ d_out[g]`` for each group g: exactly 0 for an empty one."""
    sizes, ends = group_bounds(group_sizes, rows.shape[0])
    d_model, d_ff = rows.shape[1], d_out.shape[1]
    return _call(
        partial(_wgrad_program, blocks=blocks),
        grid=(group_sizes.shape[0], pl.cdiv(d_model, blocks.rows), pl.cdiv(d_ff, blocks.cols)),
        out_shape=(group_sizes.shape[0], d_model, d_ff),
        blocks=blocks,
        interpret=interpret,
    )(ends - sizes, ends, rows, d_out)


def _wgrad_program(begin_ref, end_ref, rows, d_out, d_kernels, *, blocks: Blocks):
    expert = pl.program_id(0)
    begin, end = begin_ref[expert], end_ref[expert]
    down = (pl.program_id(1) * blocks.rows, blocks.rows, rows.shape[1])
    across = (pl.program_id(2) * blocks.cols, blocks.cols, d_out.shape[1])

    def step(k, total):
        group_rows = (begin + k * blocks.depth, blocks.depth, end)
        return total + _dot(_load(rows, group_rows, down), _load(d_out, group_rows, across), trans_a=True)

    zeros = jnp.zeros((blocks.rows, blocks.cols), jnp.float32)
    total = lax.fori_loop(0, pl.cdiv(end - begin, blocks.depth), step, zeros)
    _store(d_kernels, total, down, across, expert)


def _call(program, *, grid, out_shape, blocks: Blocks, interpret: bool):
    """``pallas_call`` on whole arrays: each program picks its own blocks, whose places are data."""

    def call(*operands):
        *_, like = operands
        if any(0 in x.shape for x in operands):  # a block of nothing has no address
            return vary_over(jnp.zeros(out_shape, like.dtype), varying_axes(like))
        kind = jax.typeof(like).mat
        return pl.pallas_call(
            program,
            grid=grid,
            out_shape=jax.ShapeDtypeStruct(out_shape, like.dtype, manual_axis_type=kind),
            compiler_params=triton.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
            interpret=interpret,
        )(*operands)

    return call


def _load(ref, rows: tuple, cols: tuple, *leading) -> Array:
    """The block at (start, size, end) of the last two dimensions, 0 from ``end`` on."""
    return triton.load(ref.at[_index(rows, cols, leading)], mask=_inside(rows, cols), other=0)


def _store(ref, block: Array, rows: tuple, cols: tuple, *leading) -> None:
    block = block.astype(ref.dtype)
    triton.store(ref.at[_index(rows, cols, leading)], block, mask=_inside(rows, cols))


def _index(rows: tuple, cols: tuple, leading: tuple) -> tuple:
    return *leading, *(pl.ds(start, size) for start, size, _ in (rows, cols))


def _inside(rows: tuple, cols: tuple) -> Array:
    row, col = (start + lax.iota(jnp.int32, size) < end for start, size, end in (rows, cols))
    return row[:, None] & col[None, :]


def _dot(a: Array, b: Array, *, trans_a: bool = False, trans_b: bool = False) -> Array:
    """float32 sums; and float32 operands are not rounded to TF32."""
    return triton.dot(a, b, trans_a=trans_a, trans_b=trans_b, allow_tf32=False)
