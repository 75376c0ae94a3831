"""Chapter 05, grouped GEMM: the text of its exercises and questions. What they check: ``properties/ch05*.py``."""

from moe_course.lessons.exercise import Exercise, Quiz
from moe_course.lessons.properties import ch05 as p
from moe_course.lessons.properties import ch05_tiles as t

EXERCISES = (
    Exercise(
        id="05.1",
        title="masked dense",
        goal="Write the contract down: every expert multiplies every row, a mask keeps its own.",
        difficulty=2,
        minutes=15,
        used_again=("06", "08"),
        hints=(
            "The shapes of all experts' products are the same, whatever the sizes. What must happen to the rows that are "
            "not an expert's own, and does it matter whether that happens before or after the product?",
            "rows [M, D], kernels [E, D, F], group_sizes [E] -> [M, F]. A mask for each expert: [M, 1] booleans.",
            "ends = running sum of the sizes; row = 0 to M - 1\nfor each expert e: mine = ends[e] - sizes[e] <= row < "
            "ends[e]\nadd jnp.where(mine, rows, 0) @ kernels[e]",
            """
def masked_gemm(rows, kernels, group_sizes):
    ends = jnp.cumsum(group_sizes)
    row = jnp.arange(rows.shape[0])
    out = jnp.zeros((rows.shape[0], kernels.shape[2]), rows.dtype)
    for e in range(kernels.shape[0]):
        mine = (row >= ends[e] - group_sizes[e]) & (row < ends[e])
        out = out + jnp.where(mine[:, None], rows, 0) @ kernels[e]
    return out
""",
        ),
        properties=(p.each_its_own, p.empty_groups, p.tail_is_zero, p.tail_gradient, p.other_shapes),
    ),
    Exercise(
        id="05.2",
        title="padded batch",
        goal="Give each expert a fixed number of places, and multiply one batch.",
        difficulty=3,
        minutes=15,
        used_again=("07",),
        hints=(
            "Place c of expert e holds the row that is c behind the start of the group. For which c is there one? And on "
            "the way back: at which place does row r sit?",
            "index [E, C] -> batch [E, C, D] -> [E, C, F] -> flat [E C, F] -> gathered back to [M, F].",
            "there = place < group_sizes[:, None]\nbatch = rows gathered at starts[:, None] + place, 0 where not there\n"
            "y = batched product, reshaped to [E C, F]\nexpert of a row = how many ends are <= row; rank = row - its "
            "start\ngather y at expert C + rank where rank < C, else 0",
            """
def padded_gemm(rows, kernels, group_sizes, capacity):
    ends = jnp.cumsum(group_sizes)
    starts = ends - group_sizes
    place = jnp.arange(capacity)
    index = jnp.where(place < group_sizes[:, None], starts[:, None] + place, rows.shape[0])
    batch = rows.at[index].get(mode="fill", fill_value=0)
    out = jnp.einsum("ecd,edf->ecf", batch, kernels).reshape(-1, kernels.shape[2])
    row = jnp.arange(rows.shape[0])
    expert = (row[:, None] >= ends).sum(axis=1)
    rank = row - jnp.append(starts, 0)[expert]
    kept = (expert < len(ends)) & (rank < capacity)
    return out.at[jnp.where(kept, expert * capacity + rank, len(out))].get(mode="fill", fill_value=0)
""",
        ),
        properties=(p.groups_fit, p.dropped_rows, p.padded_tail, p.padded_shapes, p.one_batch),
    ),
    Exercise(
        id="05.3",
        title="tile map",
        goal="Turn sizes that are data into a list of tiles whose length is a shape.",
        difficulty=3,
        minutes=15,
        used_again=("08",),
        hints=(
            "How many tiles does a group of n rows need? If you know that for every group, which group does tile 17 "
            "belong to, and which of its tiles is it?",
            "group_sizes [E] -> tiles per group [E] -> running sum [E]; tile [num_tiles] -> expert, begin, end, each "
            "[num_tiles].",
            "tiles = sizes / block, rounded up; tile_ends = running sum\nexpert = how many tile_ends are <= tile\n"
            "number = tile - first tile of that expert\nbegin = first row of that expert + number * block\n"
            "end = begin + block, but at most the end of the group; begin = end = 0 past the last tile",
            """
def tile_map(group_sizes, block, num_tiles):
    ends = jnp.cumsum(group_sizes)
    tiles = -(-group_sizes // block)
    tile_ends = jnp.cumsum(tiles)
    tile = jnp.arange(num_tiles)
    expert = (tile[:, None] >= tile_ends).sum(axis=1)
    there = expert < len(group_sizes)
    expert = jnp.minimum(expert, len(group_sizes) - 1)
    begin = (ends - group_sizes)[expert] + (tile - (tile_ends - tiles)[expert]) * block
    end = jnp.minimum(begin + block, ends[expert])
    return expert, jnp.where(there, begin, 0), jnp.where(there, end, 0)
""",
        ),
        properties=(t.covers, t.map_patterns, t.map_random),
    ),
    Exercise(
        id="05.4",
        title="the walk",
        goal="Visit the tiles in a loop on the device: one plain product each.",
        difficulty=4,
        minutes=20,
        used_again=("06", "08"),
        hints=(
            "A slice on the device has a fixed length and a start that is data. What does it return if it would reach past "
            "the end of the buffer? What may a tile of four rows write, if only two are its own?",
            "rows with block more rows at the end [M + block, D]; slice [block, D] -> product [block, F] -> the own rows "
            "of it into out [M + block, F]; return the first M.",
            "def step(i, out):\n    x = lax.dynamic_slice_in_dim(rows, begin[i], block)\n    y = x @ kernels[expert[i]]\n"
            "    old = the same slice of out\n    y = jnp.where(own rows, y, old)\n    return lax.dynamic_update_slice_"
            "in_dim(out, y, begin[i], 0)\nlax.fori_loop(0, number of tiles, step, zeros)",
            """
def walk_tiles(rows, kernels, expert, begin, end, block):
    padded = jnp.pad(rows, ((0, block), (0, 0)))

    def step(i, out):
        own = (begin[i] + jnp.arange(block) < end[i])[:, None]
        y = jax.lax.dynamic_slice_in_dim(padded, begin[i], block) @ kernels[expert[i]]
        old = jax.lax.dynamic_slice_in_dim(out, begin[i], block)
        return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(own, y, old), begin[i], 0)

    out = jnp.zeros((len(padded), kernels.shape[2]), rows.dtype)
    return jax.lax.fori_loop(0, len(expert), step, out)[: len(rows)]
""",
        ),
        properties=(t.whole_tiles, t.partial_tiles, t.at_the_end, t.large_block, t.any_order),
    ),
    Exercise(
        id="05.5",
        title="dgrad and wgrad",
        goal="Write both gradients of the grouped product by hand.",
        difficulty=3,
        minutes=20,
        used_again=("06", "08"),
        hints=(
            "For one group it is a plain product y = x w. Which two products give d x and d w from d y? Over which index "
            "does each sum, and where do the sizes come in?",
            "d_rows [M, D] from d_out [M, F] and kernels[e].T; d_kernels [E, D, F] from rows.T [D, M] and d_out [M, F].",
            "for each expert e: mine, as in 05.1\nx, d = rows and d_out, each 0 where not mine, by jnp.where\n"
            "d_rows += d @ kernels[e].T\nd_kernels[e] = x.T @ d",
            """
def gradients(rows, kernels, group_sizes, d_out):
    ends = jnp.cumsum(group_sizes)
    row = jnp.arange(rows.shape[0])
    d_rows, d_kernels = jnp.zeros_like(rows), []
    for e in range(kernels.shape[0]):
        mine = ((row >= ends[e] - group_sizes[e]) & (row < ends[e]))[:, None]
        x, d = jnp.where(mine, rows, 0), jnp.where(mine, d_out, 0)
        d_rows = d_rows + d @ kernels[e].T
        d_kernels.append(x.T @ d)
    return d_rows, jnp.stack(d_kernels)
""",
        ),
        properties=(
            p.both_gradients,
            p.square_gradients,
            p.empty_gradients,
            p.tail_gradients,
            p.gradient_shapes,
        ),
    ),
    Exercise(
        id="05.6",
        title="a Pallas program",
        goal="Write what one program of a GPU kernel does: one tile.",
        difficulty=4,
        minutes=20,
        used_again=("08",),
        hints=(
            "There is no loop over tiles here: the same program runs once for each, and asks who it is. What does it "
            "need to know, and which of its rows may it load, and store?",
            "Three scalars: expert, begin, end of pl.program_id(0). x [block, D], kernels[expert] [D, F], y [block, F], "
            "mask [block, 1].",
            "i = pl.program_id(0)\nplace = pl.ds(begin_ref[i], block)\nmask = (row < end)[:, None]\n"
            "x = triton.load(rows.at[place, :], mask=mask, other=0.0)\ny = x @ the expert's kernel\n"
            "triton.store(out.at[place, :], y, mask=mask)",
            """
def product_program(expert_ref, begin_ref, end_ref, rows, kernels, out, block):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    i = pl.program_id(0)
    begin, end = begin_ref[i], end_ref[i]
    mask = (begin + jnp.arange(block) < end)[:, None]
    x = triton.load(rows.at[pl.ds(begin, block), :], mask=mask, other=0.0)
    y = jnp.dot(x, kernels[expert_ref[i]])
    triton.store(out.at[pl.ds(begin, block), :], y, mask=mask)
""",
        ),
        properties=(t.program_full, t.program_partial, t.program_end, t.program_order),
    ),
)

QUIZZES = (
    Quiz(
        "05.q1",
        "b",
        {
            "a": "It multiplies exactly the rows there are. Its cost is elsewhere.",
            "b": "To cut a slice, Python must know its length: the device finishes all its work, sends E numbers, and waits "
            "for new work. And under jit the lengths do not exist.",
            "c": "E products of their own shape are what cuBLAS does best, if somebody tells it the shapes in time.",
        },
    ),
    Quiz(
        "05.q2",
        "c",
        {
            "a": "0 * NaN is NaN, and inf * 0 as well: the mask adds the very thing it should remove.",
            "b": "The result is right, but wgrad is rows.T @ d_out, a sum over all rows: a NaN row times d_out = 0 is NaN.",
            "c": "Selecting before the product keeps the NaN out of the product and of its derivative.",
        },
    ),
    Quiz(
        "05.q3",
        "a",
        {
            "a": "No two programs write the same element, so their order cannot matter. Float atomics would give the same "
            "sum with other last bits at every run.",
            "b": "The grid is fixed when the kernel is compiled, as every shape is; that is why there are empty programs.",
            "c": "Each program reads its own rows; whether others read them too makes no difference.",
        },
    ),
    Quiz(
        "05.q4",
        "c",
        {
            "a": "The numbers are the same to the last bits.",
            "b": "The shapes are fixed in both: V1 takes the same arrays.",
            "c": "V1 copies group_sizes to the host and waits, to start one cuBLAS product per expert. A CUDA graph cannot "
            "hold a wait for the host.",
        },
    ),
    Quiz(
        "05.q5",
        "b",
        {
            "a": "At aligned sizes the exhibit is exact: it would pass with any tolerance.",
            "b": "Sizes on both sides of the block's edges, and an error measured in units of the largest right value: the "
            "exhibit is off by a large part of it.",
            "c": "More draws of small gradients are all below 0.01. An absolute tolerance asks how small the numbers are, "
            "not how wrong.",
        },
    ),
)
