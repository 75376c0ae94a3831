"""Chapter 05, tiles: the tile map, the walk over it, and the Pallas program of one tile."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from moe_course.lessons.compare import array_of, close, items, same
from moe_course.lessons.exercise import Broken, holds
from moe_course.lessons.learner import compiled
from moe_course.lessons.properties.ch05 import SIZES, M, case_of, operands, product


def tiles_of(sizes, block: int) -> list[tuple[int, int, int]]:
    """(expert, first row, end row) of every tile, expert by expert."""
    tiles, begin = [], 0
    for expert, size in enumerate(sizes):
        for at in range(begin, begin + size, block):
            tiles.append((expert, at, min(at + block, begin + size)))
        begin += size
    return tiles


def map_arrays(sizes, block: int, num_tiles: int):
    tiles = tiles_of(sizes, block)
    tiles += [(0, 0, 0)] * (num_tiles - len(tiles))
    return tuple(np.array(column, np.int32) for column in zip(*tiles, strict=True))


def most_tiles(num_rows: int, experts: int, block: int) -> int:
    return -(-num_rows // block) + experts


# ---------------------------------------------------------------- 05.3 tile map


def _map(result, sizes, block, num_tiles, case) -> None:
    found = items(result, 3, case=case, names="expert, begin, end")
    expert, begin, end = (
        array_of(a, case=case, shape=(num_tiles,), kind="i", what=name)
        for a, name in zip(found, ("expert", "begin", "end"), strict=True)
    )
    tiles = tiles_of(sizes, block)
    right = np.array(tiles, np.int64).reshape(-1, 3)
    live = len(tiles)
    same(expert[:live], right[:, 0], case=case + ", expert", axes=("tile",), what="expert")
    lines = {
        "A tile begins where its group begins, not at a multiple of the block.": right[:, 1] // block * block
    }
    same(begin[:live], right[:, 1], case=case + ", begin", axes=("tile",), what="begin", suspects=lines)
    lines = {"The last tile of a group ends where the group ends.": right[:, 1] + block}
    same(end[:live], right[:, 2], case=case + ", end", axes=("tile",), what="end", suspects=lines)
    bad = np.flatnonzero(end[live:] > begin[live:])
    if len(bad):
        at = int(bad[0])
        yours = f"rows {begin[live + at]} to {end[live + at]} in tile {live + at}"
        raise Broken(
            case, yours, f"begin = end from tile {live} on", "A tile that is not there covers no row."
        )
    if expert.min(initial=0) < 0 or expert.max(initial=0) >= len(sizes):
        why = (
            "A program reads kernels[expert] before it knows that it has nothing to do: keep the id in range."
        )
        raise Broken(case, f"expert {int(expert.max(initial=0))}", f"0 to {len(sizes) - 1}", why)


@holds("tiles cover each group, expert by expert")
def covers(fn) -> int:
    sizes = SIZES[0]
    _map(fn(np.array(sizes, np.int32), 4, 10), sizes, 4, 10, case_of(sizes, extra=", block 4, 10 tiles"))
    return 1


def _maps(fn, cases, block, num_tiles) -> None:
    run = jax.jit(lambda s: fn(s, block, num_tiles))
    why = "Under jit the sizes are data: the map has num_tiles entries whatever they are."
    for sizes in cases:
        case = case_of(sizes, sum(sizes), f", block {block}, {num_tiles} tiles")
        result = compiled(run, np.array(sizes, np.int32), case=case + ", under jit", why=why)
        _map(result, sizes, block, num_tiles, case)


@holds("full tiles, empty groups, one group, no rows; sizes on the device")
def map_patterns(fn) -> int:
    for block in (1, 4, 7, 32):
        _maps(fn, SIZES, block, most_tiles(M, 4, block))
    return 4 * len(SIZES)


@holds("random sizes and many experts")
def map_random(fn) -> int:
    rng = np.random.default_rng(20)
    cases = [tuple(rng.integers(0, 60, 33).tolist()) for _ in range(4)]
    _maps(fn, cases, 16, most_tiles(33 * 60, 33, 16))
    _maps(fn, [(5,), (0,), (16,), (17,)], 8, 5)
    return 8


# ---------------------------------------------------------------- 05.4 the walk


def _walk_args(sizes, block, seed, shape=(M, 5, 7), spare=2, tail=np.nan):
    rows, kernels, _ = operands(sizes, seed, shape, tail)
    return rows, kernels, *map_arrays(sizes, block, most_tiles(shape[0], len(sizes), block) + spare)


def _walk(result, rows, kernels, sizes, case, why="") -> None:
    expected = product(rows, kernels, sizes)
    close(result, expected, case=case, axes=("row", "column"), terms=rows.shape[1], why=why)


def _walks(fn, block, all_sizes, seed, why="", shape=(M, 5, 7)) -> None:
    run = jax.jit(lambda *a: fn(*a, block))
    data = "Under jit the tiles are data: slice with lax.dynamic_slice_in_dim, whose length is the block."
    for sizes in all_sizes:
        args = _walk_args(sizes, block, seed, shape)
        case = case_of(sizes, shape[0], f", the others NaN, block {block}")
        result = compiled(run, *args, case=case + ", under jit", why=data)
        _walk(result, args[0], args[1], sizes, case, why)


@holds("groups of whole tiles")
def whole_tiles(fn) -> int:
    sizes = (8, 0, 12, 4)
    args = _walk_args(sizes, 4, 21)
    _walk(fn(*args, 4), args[0], args[1], sizes, case_of(sizes, extra=", block 4"))
    return 1


@holds("a tile that is not full leaves its neighbours alone")
def partial_tiles(fn) -> int:
    why = (
        "A tile has block rows, but only begin to end are its own: what else it computes must not be written."
    )
    for block in (4, 7):
        _walks(fn, block, SIZES, 22, why)
    return 2 * len(SIZES)


@holds("the last tile at the end of the buffer")
def at_the_end(fn) -> int:
    why = "dynamic_slice moves a slice that would reach past the end back inside, and the rows shift with it."
    _walks(fn, 16, [(10, 0, 0, 14), (1, 1, 1, 21), (0, 0, 0, 24), (23, 0, 0, 1)], 23, why)
    return 4


@holds("a block larger than the buffer")
def large_block(fn) -> int:
    _walks(fn, 32, SIZES[:4], 24)
    return 4


@holds("tiles that are not there compute nothing, in whatever order tiles come")
def any_order(fn) -> int:
    run = jax.jit(lambda *a: fn(*a, 4))
    why = "Tiles write different rows, so their order cannot matter: on a GPU there is none."
    for sizes in SIZES[:3]:
        rows, kernels, *tiles = _walk_args(sizes, 4, 25)
        turn = np.random.default_rng(26).permutation(len(tiles[0]))
        args = rows, kernels, *(t[turn] for t in tiles)
        case = case_of(sizes, extra=", block 4, tiles shuffled")
        _walk(run(*(jnp.asarray(a) for a in args)), rows, kernels, sizes, case, why)
    return 3


# ---------------------------------------------------------------- 05.6 a Pallas program


def launch(program, tiles, rows, kernels, block: int, out):
    """Run ``program`` once for each tile, interpreted, on an output that holds ``out`` before."""

    def with_start(expert, begin, end, rows, kernels, start, result):
        program(expert, begin, end, rows, kernels, result, block)

    return pl.pallas_call(
        with_start,
        grid=(len(tiles[0]),),
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        input_output_aliases={5: 0},
        interpret=True,
    )(*tiles, rows, kernels, out)


def _programs(fn, all_sizes, seeds, why="", shuffle=False) -> int:
    run = jax.jit(lambda tiles, rows, kernels, out: launch(fn, tiles, rows, kernels, 16, out))
    for sizes, seed in zip(all_sizes, seeds, strict=True):
        _program(run, sizes, 16, seed, why, shuffle)
    return len(all_sizes)


def _program(run, sizes, block, seed, why, shuffle, shape=(48, 16, 32)) -> None:
    rows, kernels, _ = operands(sizes, seed, shape)
    tiles = map_arrays(sizes, block, most_tiles(shape[0], len(sizes), block))
    if shuffle:
        turn = np.random.default_rng(seed).permutation(len(tiles[0]))
        tiles = tuple(t[turn] for t in tiles)
    case = case_of(sizes, shape[0], f", the others NaN, block {block}, interpreted")
    poison = np.full((shape[0], shape[2]), -7.0, np.float32)
    given = (jnp.asarray(a) for a in (rows, kernels))
    result = run(tuple(jnp.asarray(t) for t in tiles), *given, jnp.asarray(poison))
    expected = product(rows, kernels, sizes)
    expected[sum(sizes) :] = -7.0
    live = sum(sizes)
    lines = {"Rows past the last group were written: store under the mask.": np.zeros_like(expected[live:])}
    tail = np.asarray(result)[live:]
    result = np.asarray(result)[:live]
    close(result, expected[:live], case=case, axes=("row", "column"), terms=shape[1], why=why)
    close(
        tail, expected[live:], case=case + ", past them", why="Nobody asked for these rows.", suspects=lines
    )


@holds("one full tile for each expert")
def program_full(fn) -> int:
    return _programs(fn, [(16, 16, 16)], [30])


@holds("tiles that are not full load 0 and store nothing outside")
def program_partial(fn) -> int:
    why = (
        "Rows from end on belong to the next group, or to nobody: load with a mask, store with the same mask."
    )
    return _programs(fn, [(20, 5, 20), (0, 33, 2), (1, 0, 40)], [31, 31, 31], why)


@holds("the last tile at the end of the buffer, and empty launches")
def program_end(fn) -> int:
    why = "A load past the end of the buffer is allowed only under a mask."
    return _programs(fn, [(40, 0, 8), (0, 0, 0), (3, 0, 45)], [32, 32, 32], why)


@holds("the order of the programs does not matter")
def program_order(fn) -> int:
    why = "Two programs that write the same row race on a GPU: a store outside begin to end is a fault."
    return _programs(fn, [(20, 5, 20)] * 2, [33, 34], why, shuffle=True)
