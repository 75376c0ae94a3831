"""Wrong answers to chapter 05 that a person could give, and right ones unlike the solution."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from moe_course.bench.kill_rate import alternative, mutant


def groups(group_sizes, num_rows):
    """[E, M] bool: which rows are whose."""
    ends = jnp.cumsum(group_sizes)
    row = jnp.arange(num_rows)
    return (row >= (ends - group_sizes)[:, None]) & (row < ends[:, None])


def expert_of(group_sizes, num_rows):
    """[M], E for the tail."""
    return (jnp.arange(num_rows)[:, None] >= jnp.cumsum(group_sizes)).sum(1)


# ---------------------------------------------------------------- 05.1 masked dense


def make_masked(
    masks=groups,
    before=lambda mine, rows: jnp.where(mine[:, None], rows, 0),
    kernel=lambda kernels, e: kernels[e],
    after=lambda mine, y: y,
    experts=lambda kernels: range(kernels.shape[0]),
):
    def masked(rows, kernels, group_sizes):
        mine = masks(group_sizes, rows.shape[0])
        out = jnp.zeros((rows.shape[0], kernels.shape[2]), rows.dtype)
        for e in experts(kernels):
            out = out + after(mine[e], before(mine[e], rows) @ kernel(kernels, e))
        return out

    return masked


alternative("05.1", "a mutant's frame with every part right")(make_masked())
alternative("05.1", "masked on both sides")(make_masked(after=lambda mine, y: jnp.where(mine[:, None], y, 0)))


@alternative("05.1", "one kernel gathered for each row")
def _(rows, kernels, group_sizes):
    expert = expert_of(group_sizes, rows.shape[0])
    live = expert < kernels.shape[0]
    picked = kernels[jnp.minimum(expert, kernels.shape[0] - 1)]
    return jnp.where(live[:, None], jnp.einsum("md,mdf->mf", jnp.where(live[:, None], rows, 0), picked), 0)


@alternative("05.1", "ragged_dot between masks")
def _(rows, kernels, group_sizes):
    live = (jnp.arange(rows.shape[0]) < group_sizes.sum())[:, None]
    out = lax.ragged_dot(jnp.where(live, rows, 0), kernels, group_sizes)
    return jnp.where(live, out, 0)


mutant("05.1", "no mask: the sum over experts")(make_masked(before=lambda mine, rows: rows))
mutant("05.1", "a mask that multiplies")(make_masked(before=lambda mine, rows: rows * mine[:, None]))
mutant("05.1", "masked after the product only: the gradient is NaN")(
    make_masked(before=lambda mine, rows: rows, after=lambda mine, y: jnp.where(mine[:, None], y, 0))
)
mutant("05.1", "the mask multiplied after")(
    make_masked(before=lambda mine, rows: rows, after=lambda mine, y: y * mine[:, None])
)
mutant("05.1", "starts one row late")(
    make_masked(masks=lambda s, m: groups(s, m) & (jnp.arange(m) != (jnp.cumsum(s) - s)[:, None]))
)
mutant("05.1", "ends one row late")(
    make_masked(
        masks=lambda s, m: (
            (jnp.arange(m) >= (jnp.cumsum(s) - s)[:, None]) & (jnp.arange(m) <= jnp.cumsum(s)[:, None])
        )
    )
)
mutant("05.1", "starts at the running sum")(make_masked(masks=lambda s, m: jnp.roll(groups(s, m), 1, axis=0)))
mutant("05.1", "sizes read as ends")(
    make_masked(
        masks=lambda s, m: (jnp.arange(m) >= jnp.append(0, s[:-1])[:, None]) & (jnp.arange(m) < s[:, None])
    )
)
mutant("05.1", "equal groups, whatever the sizes")(
    make_masked(masks=lambda s, m: groups(jnp.full_like(s, m // s.shape[0]), m))
)
mutant("05.1", "the last expert takes the tail")(
    make_masked(masks=lambda s, m: groups(s.at[-1].add(m - s.sum()), m))
)
mutant("05.1", "kernels in reverse")(make_masked(kernel=lambda k, e: k[k.shape[0] - 1 - e]))
mutant("05.1", "the next kernel")(make_masked(kernel=lambda k, e: k[(e + 1) % k.shape[0]]))
mutant("05.1", "the first kernel for all")(make_masked(kernel=lambda k, e: k[0]))
mutant("05.1", "the last expert is left out")(make_masked(experts=lambda k: range(k.shape[0] - 1)))
mutant("05.1", "the first expert is left out")(make_masked(experts=lambda k: range(1, k.shape[0])))
mutant("05.1", "ranges of rows by expert, not groups")(
    make_masked(masks=lambda s, m: (jnp.arange(m) % s.shape[0]) == jnp.arange(s.shape[0])[:, None])
)


@mutant("05.1", "NaN repaired in the result")
def _(rows, kernels, group_sizes):
    out = make_masked(before=lambda mine, rows: rows * mine[:, None])(rows, kernels, group_sizes)
    return jnp.nan_to_num(out)


@mutant("05.1", "the tail takes the last kernel")
def _(rows, kernels, group_sizes):
    expert = jnp.minimum(expert_of(group_sizes, rows.shape[0]), kernels.shape[0] - 1)
    return jnp.einsum("md,mdf->mf", rows, kernels[expert])


@mutant("05.1", "slices by sizes read on the host")
def _(rows, kernels, group_sizes):
    out, begin = jnp.zeros((rows.shape[0], kernels.shape[2])), 0
    for e, size in enumerate(group_sizes.tolist()):
        out = out.at[begin : begin + size].set(rows[begin : begin + size] @ kernels[e])
        begin += size
    return out


@mutant("05.1", "no gradient to the kernels")
def _(rows, kernels, group_sizes):
    return make_masked()(rows, lax.stop_gradient(kernels), group_sizes)


@mutant("05.1", "an empty group ends the loop")
def _(rows, kernels, group_sizes):
    alive = jnp.cumprod(group_sizes > 0)
    return make_masked(masks=lambda s, m: groups(s, m) & (alive > 0)[:, None])(rows, kernels, group_sizes)


@mutant("05.1", "bfloat16")
def _(rows, kernels, group_sizes):
    out = make_masked()(rows.astype(jnp.bfloat16), kernels.astype(jnp.bfloat16), group_sizes)
    return out.astype(jnp.float32)


# ---------------------------------------------------------------- 05.2 padded batch


def make_padded(
    fits=lambda place, size: place < size,
    begin=lambda s: jnp.cumsum(s) - s,
    product=lambda x, k: jnp.einsum("ecd,edf->ecf", x, k),
    within=lambda rank, capacity: rank < capacity,
    mask_back=True,
):
    def padded(rows, kernels, group_sizes, capacity):
        m, experts = rows.shape[0], kernels.shape[0]
        first = begin(group_sizes)
        place = jnp.arange(capacity)
        there = fits(place, group_sizes[:, None])
        index = jnp.where(there, first[:, None] + place, m)
        batch = rows.at[index].get(mode="fill", fill_value=0)
        out = product(batch, kernels).reshape(experts * capacity, -1)
        expert = expert_of(group_sizes, m)
        safe = jnp.minimum(expert, experts - 1)
        rank = jnp.arange(m) - first[safe]
        live = (expert < experts) & within(rank, capacity)
        back = out[jnp.clip(safe * capacity + rank, 0, experts * capacity - 1)]
        return jnp.where(live[:, None], back, 0) if mask_back else back

    return padded


alternative("05.2", "a mutant's frame with every part right")(make_padded())


@alternative("05.2", "scatter into the batch, gather out of it")
def _(rows, kernels, group_sizes, capacity):
    m, experts = rows.shape[0], kernels.shape[0]
    expert = expert_of(group_sizes, m)
    begin = jnp.append(jnp.cumsum(group_sizes) - group_sizes, 0)
    rank = jnp.arange(m) - begin[expert]
    place = jnp.where((expert < experts) & (rank < capacity), expert * capacity + rank, experts * capacity)
    batch = jnp.zeros((experts * capacity, rows.shape[1])).at[place].set(rows, mode="drop")
    out = jnp.matmul(batch.reshape(experts, capacity, -1), kernels).reshape(experts * capacity, -1)
    return out.at[place].get(mode="fill", fill_value=0)


mutant("05.2", "one row too few in each group")(make_padded(fits=lambda place, size: place < size - 1))
mutant("05.2", "ends in place of starts")(make_padded(begin=jnp.cumsum))
mutant("05.2", "all groups start at row 0")(make_padded(begin=lambda s: s * 0))
mutant("05.2", "dropped rows land in the next expert's places")(
    make_padded(within=lambda rank, capacity: rank >= 0)
)
mutant("05.2", "one row fewer fits")(make_padded(within=lambda rank, capacity: rank < capacity - 1))
mutant("05.2", "the tail is not masked")(make_padded(mask_back=False))
mutant("05.2", "kernels in reverse")(make_padded(product=lambda x, k: jnp.einsum("ecd,edf->ecf", x, k[::-1])))
mutant("05.2", "summed over experts")(
    make_padded(
        product=lambda x, k: jnp.broadcast_to(jnp.einsum("ecd,edf->cf", x, k), (*x.shape[:2], k.shape[2]))
    )
)


@mutant("05.2", "nothing dropped: masked dense in disguise")
def _(rows, kernels, group_sizes, capacity):
    return make_masked()(rows, kernels, group_sizes)


@mutant("05.2", "every row by every expert, then capacity")
def _(rows, kernels, group_sizes, capacity):
    m, experts = rows.shape[0], kernels.shape[0]
    expert = expert_of(group_sizes, m)
    begin = jnp.append(jnp.cumsum(group_sizes) - group_sizes, m)
    live = (expert < experts) & (jnp.arange(m) - begin[expert] < capacity)
    return jnp.where(live[:, None], make_masked()(rows, kernels, group_sizes), 0)


@mutant("05.2", "the last rows of a group stay")
def _(rows, kernels, group_sizes, capacity):
    m, experts = rows.shape[0], kernels.shape[0]
    expert = expert_of(group_sizes, m)
    left = jnp.append(jnp.cumsum(group_sizes), 0)[expert] - jnp.arange(m)
    live = (expert < experts) & (left <= capacity)
    return jnp.where(live[:, None], make_masked()(rows, kernels, group_sizes), 0)


@mutant("05.2", "dropped rows pass through")
def _(rows, kernels, group_sizes, capacity):
    out = make_padded()(rows, kernels, group_sizes, capacity)
    live = (jnp.arange(rows.shape[0]) < group_sizes.sum())[:, None]
    wide = jnp.resize(jnp.nan_to_num(rows), out.shape)
    return jnp.where(live & (out == 0).all(1, keepdims=True), wide, out)


@mutant("05.2", "equal groups: a reshape")
def _(rows, kernels, group_sizes, capacity):
    m, experts = rows.shape[0], kernels.shape[0]
    batch = jnp.resize(rows, (experts, -(-m // experts), rows.shape[1]))
    return jnp.einsum("ecd,edf->ecf", batch, kernels).reshape(-1, kernels.shape[2])[:m]


@mutant("05.2", "capacity counted over all experts")
def _(rows, kernels, group_sizes, capacity):
    out = make_padded()(rows, kernels, group_sizes, rows.shape[0])
    return jnp.where((jnp.arange(rows.shape[0]) < capacity * kernels.shape[0])[:, None], out, 0)


@mutant("05.2", "sizes read on the host")
def _(rows, kernels, group_sizes, capacity):
    out, begin = jnp.zeros((rows.shape[0], kernels.shape[2])), 0
    for e, size in enumerate(group_sizes.tolist()):
        kept = min(size, capacity)
        out = out.at[begin : begin + kept].set(rows[begin : begin + kept] @ kernels[e])
        begin += size
    return out


# ---------------------------------------------------------------- 05.3 tile map


def make_map(
    count=lambda sizes, block: -(-sizes // block),
    owner=lambda tile, ends: (tile[:, None] >= ends).sum(1),
    begin=lambda start, number, block: start + number * block,
    end=lambda begin, block, group_end: jnp.minimum(begin + block, group_end),
    missing=lambda begin, end, there: (jnp.where(there, begin, 0), jnp.where(there, end, 0)),
    clip=True,
    first=lambda tile_ends, tiles: tile_ends - tiles,
    order=("expert", "begin", "end"),
):
    def tile_map(group_sizes, block, num_tiles):
        ends = jnp.cumsum(group_sizes)
        tiles = count(group_sizes, block)
        tile_ends = jnp.cumsum(tiles)
        tile = jnp.arange(num_tiles)
        expert = owner(tile, tile_ends)
        there = expert < group_sizes.shape[0]
        safe = jnp.minimum(expert, group_sizes.shape[0] - 1)
        number = tile - first(tile_ends, tiles)[safe]
        b = begin((ends - group_sizes)[safe], number, block)
        e = end(b, block, ends[safe])
        b, e = missing(b, e, there)
        parts = {"expert": safe if clip else expert, "begin": b, "end": e}
        return tuple(parts[name] for name in order)

    return tile_map


alternative("05.3", "a mutant's frame with every part right")(make_map())


@alternative("05.3", "repeat and searchsorted")
def _(group_sizes, block, num_tiles):
    ends = jnp.cumsum(group_sizes)
    tile_ends = jnp.cumsum((group_sizes + block - 1) // block)
    tile = jnp.arange(num_tiles)
    expert = jnp.searchsorted(tile_ends, tile, side="right").clip(0, len(group_sizes) - 1)
    number = tile - jnp.append(0, tile_ends)[expert]
    begin = jnp.minimum((ends - group_sizes)[expert] + number * block, ends[expert])
    return expert, begin, jnp.minimum(begin + block, ends[expert])


mutant("05.3", "tiles rounded down")(make_map(count=lambda s, b: s // b))
mutant("05.3", "a full group gets one more tile")(make_map(count=lambda s, b: s // b + 1))
mutant("05.3", "an empty group gets a tile")(make_map(count=lambda s, b: jnp.maximum(-(-s // b), 1)))
mutant("05.3", "owner one too early")(make_map(owner=lambda tile, ends: (tile[:, None] > ends).sum(1)))
mutant("05.3", "aligned to the block, not to the group")(
    make_map(begin=lambda start, number, block: start // block * block + number * block)
)
mutant("05.3", "tiles reach into the next group")(make_map(end=lambda begin, block, group_end: begin + block))
mutant("05.3", "ends are the group's")(make_map(end=lambda begin, block, group_end: group_end))
mutant("05.3", "numbered through all groups")(make_map(first=lambda tile_ends, tiles: tile_ends * 0))
mutant("05.3", "numbered from the end")(make_map(first=lambda tile_ends, tiles: tile_ends))
mutant("05.3", "a missing tile has id E")(make_map(clip=False))
mutant("05.3", "a missing tile covers a block from row 0")(
    make_map(missing=lambda b, e, there: (jnp.where(there, b, 0), jnp.where(there, e, 1)))
)
mutant("05.3", "a missing tile covers the last row")(
    make_map(missing=lambda b, e, there: (jnp.where(there, b, e - 1), e))
)
mutant("05.3", "sizes in place of ends")(
    make_map(missing=lambda b, e, there: (jnp.where(there, b, 0), jnp.where(there, e - b, 0)))
)
mutant("05.3", "inclusive ends")(
    make_map(missing=lambda b, e, there: (jnp.where(there, b, 0), jnp.where(there, e - 1, 0)))
)
mutant("05.3", "begin, end, expert")(make_map(order=("begin", "end", "expert")))
mutant("05.3", "begin is the group's")(make_map(begin=lambda start, number, block: start))
mutant("05.3", "counted in elements of a tile of 2")(
    make_map(begin=lambda start, number, block: start + number * 2)
)


@mutant("05.3", "as many tiles as there are")
def _(group_sizes, block, num_tiles):
    tiles = int((-(-group_sizes // block)).sum())
    return make_map()(group_sizes, block, tiles)


@mutant("05.3", "one tile for each expert")
def _(group_sizes, block, num_tiles):
    ends = jnp.cumsum(group_sizes)
    pad = (0, max(num_tiles - len(group_sizes), 0))
    columns = jnp.arange(len(group_sizes)), ends - group_sizes, ends
    return tuple(jnp.pad(c, pad)[:num_tiles] for c in columns)


# ---------------------------------------------------------------- 05.4 the walk


def make_walk(
    pad=lambda rows, block: jnp.pad(rows, ((0, block), (0, 0))),
    shift=False,
    own=lambda row, begin, end: (row >= begin) & (row < end),
    mix=jnp.where,
    before=lambda mine, x: x,
    kernel=lambda kernels, e: kernels[e],
    loops=lambda n: (0, n),
    start_with=0.0,
    room=lambda m, block: m + block,
):
    def walk(rows, kernels, expert, begin, end, block):
        m = rows.shape[0]
        rows = pad(rows, block)

        def step(i, out):
            row = begin[i] + jnp.arange(block)
            mine = own(row, begin[i], end[i])[:, None]
            x = before(mine, lax.dynamic_slice_in_dim(rows, begin[i], block))
            y = x @ kernel(kernels, expert[i])
            old = lax.dynamic_slice_in_dim(out, begin[i], block)
            return lax.dynamic_update_slice_in_dim(out, mix(mine, y, old), begin[i], 0)

        out = jnp.full((room(m, block), kernels.shape[2]), start_with, rows.dtype)
        return lax.fori_loop(*loops(len(expert)), step, out)[:m]

    return walk


alternative("05.4", "a mutant's frame with every part right")(make_walk())


@alternative("05.4", "scan, and a scatter of the rows that are the tile's own")
def _(rows, kernels, expert, begin, end, block):
    m = rows.shape[0]

    def step(out, tile):
        e, b, n = tile
        row = b + jnp.arange(block)
        x = rows.at[row].get(mode="fill", fill_value=0)
        return out.at[jnp.where(row < n, row, m)].set(x @ kernels[e], mode="drop"), None

    return lax.scan(step, jnp.zeros((m, kernels.shape[2])), (expert, begin, end))[0]


@alternative("05.4", "all tiles at once, as a batch")
def _(rows, kernels, expert, begin, end, block):
    m = rows.shape[0]
    row = begin[:, None] + jnp.arange(block)
    row = jnp.where(row < end[:, None], row, m)
    x = rows.at[row].get(mode="fill", fill_value=0)
    y = jnp.einsum("tbd,tdf->tbf", x, kernels[expert])
    out = jnp.zeros((m, kernels.shape[2]))
    return out.at[row.reshape(-1)].set(y.reshape(-1, kernels.shape[2]), mode="drop")


mutant("05.4", "no room at the end: slices shift")(
    make_walk(pad=lambda rows, block: rows, room=lambda m, block: m)
)
mutant("05.4", "whole tiles written")(make_walk(mix=lambda mine, y, old: y))
mutant("05.4", "zeros written where it is not mine")(
    make_walk(mix=lambda mine, y, old: jnp.where(mine, y, 0))
)
mutant("05.4", "added")(make_walk(mix=lambda mine, y, old: y + old))
mutant("05.4", "old and new the wrong way round")(make_walk(mix=lambda mine, y, old: jnp.where(mine, old, y)))
mutant("05.4", "a mask that multiplies")(make_walk(mix=lambda mine, y, old: y * mine + old * ~mine))
mutant("05.4", "one row more")(make_walk(own=lambda row, begin, end: row <= end))
mutant("05.4", "one row fewer")(make_walk(own=lambda row, begin, end: row < end - 1))
mutant("05.4", "begin left out")(make_walk(own=lambda row, begin, end: (row > begin) & (row < end)))
mutant("05.4", "always kernel 0")(make_walk(kernel=lambda k, e: k[0]))
mutant("05.4", "the next kernel")(make_walk(kernel=lambda k, e: k[(e + 1) % k.shape[0]]))
mutant("05.4", "the last tile is left out")(make_walk(loops=lambda n: (0, n - 5)))
mutant("05.4", "the first tile is left out")(make_walk(loops=lambda n: (1, n)))
mutant("05.4", "starts with NaN")(make_walk(start_with=jnp.nan))
mutant("05.4", "starts with ones")(make_walk(start_with=1.0))


@mutant("05.4", "a tile is rows i block to (i + 1) block")
def _(rows, kernels, expert, begin, end, block):
    at = jnp.arange(len(begin)) * block
    at = jnp.minimum(at, rows.shape[0])
    return make_walk()(rows, kernels, expert, at, jnp.minimum(at + end - begin, rows.shape[0]), block)


@mutant("05.4", "rows past the end shifted back, written unshifted")
def _(rows, kernels, expert, begin, end, block):
    return make_walk(pad=lambda rows, block: rows)(
        rows, kernels, expert, begin, end, min(block, rows.shape[0])
    )


@mutant("05.4", "slices of the tile's length: shapes that are data")
def _(rows, kernels, expert, begin, end, block):
    out = jnp.zeros((rows.shape[0], kernels.shape[2]))
    for e, b, n in zip(expert.tolist(), begin.tolist(), end.tolist(), strict=True):
        out = out.at[b:n].set(rows[b:n] @ kernels[e])
    return out


@mutant("05.4", "kernels by tile number")
def _(rows, kernels, expert, begin, end, block):
    return make_walk()(rows, kernels, jnp.arange(len(expert)) % kernels.shape[0], begin, end, block)


# ---------------------------------------------------------------- 05.5 gradients


def make_gradients(
    clean=lambda live, a: jnp.where(live, a, 0),
    clean_out=lambda live, a: jnp.where(live, a, 0),
    dgrad=lambda d, k: d @ k.T,
    wgrad=lambda x, d, size: x.T @ d,
    order=lambda d_rows, d_kernels: (d_rows, d_kernels),
    masks=groups,
):
    def gradients(rows, kernels, group_sizes, d_out):
        mine = masks(group_sizes, rows.shape[0])[..., None]
        d_rows, d_kernels = jnp.zeros(rows.shape), []
        for e in range(kernels.shape[0]):
            d = clean_out(mine[e], d_out)
            d_rows = d_rows + dgrad(d, kernels[e])
            d_kernels.append(wgrad(clean(mine[e], rows), d, group_sizes[e]))
        return order(d_rows, jnp.stack(d_kernels))

    return gradients


alternative("05.5", "a mutant's frame with every part right")(make_gradients())


@alternative("05.5", "JAX's own derivative of the masked product")
def _(rows, kernels, group_sizes, d_out):
    live = (jnp.arange(rows.shape[0]) < group_sizes.sum())[:, None]
    _, pull_back = jax.vjp(lambda x, k: make_masked()(x, k, group_sizes), rows, kernels)
    return pull_back(jnp.where(live, d_out, 0))


@alternative("05.5", "one-hot products")
def _(rows, kernels, group_sizes, d_out):
    mine = groups(group_sizes, rows.shape[0]).astype(jnp.float32)
    live = (mine.sum(0) > 0)[:, None]
    rows, d_out = jnp.where(live, rows, 0), jnp.where(live, d_out, 0)
    d_rows = jnp.einsum("em,mf,edf->md", mine, d_out, kernels, precision="highest")
    return d_rows, jnp.einsum("em,md,mf->edf", mine, rows, d_out, precision="highest")


mutant("05.5", "rows multiplied by a mask")(make_gradients(clean=lambda live, a: a * live))
mutant("05.5", "d_out multiplied by a mask")(make_gradients(clean_out=lambda live, a: a * live))
mutant("05.5", "rows not masked")(make_gradients(clean=lambda live, a: a))
mutant("05.5", "rows masked, NaN repaired")(
    make_gradients(clean=lambda live, a: jnp.nan_to_num(a), clean_out=lambda live, a: jnp.nan_to_num(a))
)
mutant("05.5", "the mean")(make_gradients(wgrad=lambda x, d, size: x.T @ d / jnp.maximum(size, 1)))
mutant("05.5", "no care for empty groups: 0 / 0")(
    make_gradients(wgrad=lambda x, d, size: x.T @ d / size * size)
)
mutant("05.5", "wgrad transposed, where it fits")(
    make_gradients(wgrad=lambda x, d, size: d.T @ x if x.shape[1] == d.shape[1] else x.T @ d)
)
mutant("05.5", "the kernel not transposed, where it fits")(
    make_gradients(dgrad=lambda d, k: d @ k if k.shape[0] == k.shape[1] else d @ k.T)
)
mutant("05.5", "wgrad transposed")(make_gradients(wgrad=lambda x, d, size: d.T @ x))
mutant("05.5", "d_kernels, d_rows")(make_gradients(order=lambda d_rows, d_kernels: (d_kernels, d_rows)))
mutant("05.5", "d_rows halved by an average")(make_gradients(order=lambda r, k: (r / 2, k)))
mutant("05.5", "wgrad of all rows for every expert")(
    make_gradients(
        clean=lambda live, a: jnp.where(jnp.isnan(a), 0, a),
        clean_out=lambda live, a: jnp.where(jnp.isnan(a), 0, a),
    )
)
mutant("05.5", "signs")(make_gradients(order=lambda r, k: (-r, -k)))
mutant("05.5", "groups one row late")(make_gradients(masks=lambda s, m: jnp.roll(groups(s, m), 1, axis=1)))
mutant("05.5", "the last expert takes the tail")(
    make_gradients(masks=lambda s, m: groups(s.at[-1].add(m - s.sum()), m))
)
mutant("05.5", "blocks of 8 that begin at multiples of 8")(
    make_gradients(
        masks=lambda s, m: (
            (jnp.arange(m) >= ((jnp.cumsum(s) - s) // 8 * 8)[:, None])
            & (jnp.arange(m) < jnp.cumsum(s)[:, None])
        )
    )
)
mutant("05.5", "in bfloat16")(
    make_gradients(
        wgrad=lambda x, d, s: (x.astype(jnp.bfloat16).T @ d.astype(jnp.bfloat16)).astype(jnp.float32)
    )
)


@mutant("05.5", "wgrad summed over the experts")
def _(rows, kernels, group_sizes, d_out):
    d_rows, d_kernels = make_gradients()(rows, kernels, group_sizes, d_out)
    return d_rows, jnp.broadcast_to(d_kernels.sum(0), d_kernels.shape)


@mutant("05.5", "an empty group keeps what the buffer held")
def _(rows, kernels, group_sizes, d_out):
    d_rows, d_kernels = make_gradients()(rows, kernels, group_sizes, d_out)
    return d_rows, jnp.where((group_sizes > 0)[:, None, None], d_kernels, kernels)


@mutant("05.5", "dgrad by one kernel")
def _(rows, kernels, group_sizes, d_out):
    live = (jnp.arange(rows.shape[0]) < group_sizes.sum())[:, None]
    return jnp.where(live, d_out, 0) @ kernels[0].T, make_gradients()(rows, kernels, group_sizes, d_out)[1]


@mutant("05.5", "d_rows of the tail is NaN")
def _(rows, kernels, group_sizes, d_out):
    d_rows, d_kernels = make_gradients()(rows, kernels, group_sizes, d_out)
    live = (jnp.arange(rows.shape[0]) < group_sizes.sum())[:, None]
    return jnp.where(live, d_rows, d_out @ kernels[-1].T), d_kernels


# ---------------------------------------------------------------- 05.6 a Pallas program


def make_program(
    load_mask=lambda row, begin, end: (row < end)[:, None],
    store_mask=lambda row, begin, end: (row < end)[:, None],
    kernel=lambda kernels, e: kernels[e],
    at=lambda begin, end, block: begin,
    tile=lambda: pl.program_id(0),
    store_at=None,
):
    def program(expert_ref, begin_ref, end_ref, rows, kernels, out, block):
        i = tile()
        begin, end = begin_ref[i], end_ref[i]
        row = begin + jnp.arange(block)
        place = pl.ds(at(begin, end, block), block)
        x = triton.load(rows.at[place, :], mask=load_mask(row, begin, end), other=0.0)
        y = jnp.dot(x, kernel(kernels, expert_ref[i]))
        target = pl.ds((store_at or at)(begin, end, block), block)
        triton.store(out.at[target, :], y, mask=store_mask(row, begin, end))

    return program


alternative("05.6", "a mutant's frame with every part right")(make_program())


@alternative("05.6", "stops early, and loads the kernel as a block")
def _(expert_ref, begin_ref, end_ref, rows, kernels, out, block):
    tile = pl.program_id(0)
    begin, end = begin_ref[tile], end_ref[tile]

    @pl.when(begin < end)
    def _():
        keep = ((begin + lax.iota(jnp.int32, block)) < end)[:, None]
        x = triton.load(rows.at[pl.ds(begin, block), :], mask=keep, other=0.0)
        w = triton.load(kernels.at[expert_ref[tile], :, :])
        triton.store(out.at[pl.ds(begin, block), :], triton.dot(x, w, allow_tf32=False), mask=keep)


mutant("05.6", "stores the whole tile")(make_program(store_mask=lambda row, b, e: (row < e + 10**6)[:, None]))
mutant("05.6", "one row more")(make_program(store_mask=lambda row, b, e: (row <= e)[:, None]))
mutant("05.6", "one row fewer")(make_program(store_mask=lambda row, b, e: (row < e - 1)[:, None]))
mutant("05.6", "the first row is left out")(
    make_program(store_mask=lambda row, b, e: ((row > b) & (row < e))[:, None])
)
mutant("05.6", "the mask inverted")(make_program(store_mask=lambda row, b, e: (row >= e)[:, None]))
mutant("05.6", "loads one row fewer")(make_program(load_mask=lambda row, b, e: (row < e - 1)[:, None]))
mutant("05.6", "loads nothing")(make_program(load_mask=lambda row, b, e: (row < b)[:, None]))
mutant("05.6", "kernel 0")(make_program(kernel=lambda k, e: k[0]))
mutant("05.6", "the kernel of the tile's number")(
    make_program(kernel=lambda k, e: k[pl.program_id(0) % k.shape[0]])
)
mutant("05.6", "the next kernel")(make_program(kernel=lambda k, e: k[(e + 1) % k.shape[0]]))
mutant("05.6", "begins at a multiple of the block")(make_program(at=lambda b, e, block: b // block * block))
mutant("05.6", "begins at program times block")(make_program(at=lambda b, e, block: pl.program_id(0) * block))
mutant("05.6", "the tile moved back to its end")(
    make_program(at=lambda b, e, block: jnp.maximum(e - block, 0))
)
mutant("05.6", "always the first tile")(make_program(tile=lambda: 0))
mutant("05.6", "tiles in pairs")(make_program(tile=lambda: pl.program_id(0) // 2 * 2))
mutant("05.6", "stored from row 0 of the buffer")(make_program(store_at=lambda b, e, block: 0))


@mutant("05.6", "added to what is there")
def _(expert_ref, begin_ref, end_ref, rows, kernels, out, block):
    tile = pl.program_id(0)
    begin, end = begin_ref[tile], end_ref[tile]
    keep = (begin + jnp.arange(block) < end)[:, None]
    place = pl.ds(begin, block)
    x = triton.load(rows.at[place, :], mask=keep, other=0.0)
    old = triton.load(out.at[place, :], mask=keep, other=0.0)
    triton.store(out.at[place, :], old + jnp.dot(x, kernels[expert_ref[tile]]), mask=keep)


@mutant("05.6", "transposed kernels, cut to fit")
def _(expert_ref, begin_ref, end_ref, rows, kernels, out, block):
    turned = kernels[...].swapaxes(1, 2).reshape(kernels.shape)
    make_program(kernel=lambda k, e: turned[e])(expert_ref, begin_ref, end_ref, rows, kernels, out, block)


@mutant("05.6", "computes and stores nothing")
def _(expert_ref, begin_ref, end_ref, rows, kernels, out, block):
    jnp.dot(rows[pl.ds(0, block), :], kernels[0])


@mutant("05.6", "returns the tile")
def _(expert_ref, begin_ref, end_ref, rows, kernels, out, block):
    begin = begin_ref[pl.program_id(0)]
    return triton.load(rows.at[pl.ds(begin, block), :], mask=None) @ kernels[expert_ref[pl.program_id(0)]]


@mutant("05.6", "zeros first, everywhere")
def _(expert_ref, begin_ref, end_ref, rows, kernels, out, block):
    out[...] = jnp.zeros(out.shape)
    make_program()(expert_ref, begin_ref, end_ref, rows, kernels, out, block)
