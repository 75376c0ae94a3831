# %% [markdown]
# # 05 Grouped GEMM
#
# Sixteen experts, 2,048 rows, sorted. `jax.lax.ragged_dot` multiplies each row by the kernel of its expert, in one
# call. A dense product of the same rows with one kernel takes a certain number of multiplications. How many times as
# many does `ragged_dot` do on your CPU? Once would be perfect. Write a number down; in ten minutes you will count.
#
# Chapter 04 left each expert's rows in one piece. Now they are multiplied: many products of different heights, whose
# heights nobody knows until the program runs. At the end you have written the same operation six ways, know what each
# wastes, and have a kernel whose shape never changes.
#
# You will be able to
#
# - say what a loop, a padded batch, a masked product and tiles cost, in rows,
# - turn sizes that are data into a grid that is a shape,
# - write dgrad and wgrad by hand, and keep the tail of the buffer out of both,
# - write a GPU program in Pallas and run it, interpreted, on a CPU,
# - say how many rows an expert needs before a GPU is busy.
#
# Six exercises, about two hours. Everything runs on the CPU.

# %%
from moe_course.environment import setup

status = setup()

# %%
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from moe_course.grouped_gemm import grouped_gemm
from moe_course.grouped_gemm.pallas import tile_map as package_tiles
from moe_course.lessons import check, plots, predict, quiz, rounded, yours
from moe_course.lessons.widgets import explore

# %% [markdown]
# ## One operation
#
# `grouped_gemm(rows, kernels, group_sizes)` multiplies the first `group_sizes[0]` rows by `kernels[0]`, the next
# `group_sizes[1]` by `kernels[1]`, and so on. By hand, with kernels that are single numbers 1, 10 and 100 and sizes
# [2, 0, 3]; the sixth row belongs to nobody:

# %%
hand_rows = jnp.array([[1.0], [2.0], [3.0], [4.0], [5.0], [6.0]])
hand_kernels = jnp.array([1.0, 10.0, 100.0]).reshape(3, 1, 1)
hand_sizes = jnp.array([2, 0, 3], jnp.int32)
print(rounded(grouped_gemm(hand_rows, hand_kernels, hand_sizes)[:5, 0]))

# %% [markdown]
# The obvious program is a loop: cut a slice for each expert, multiply it, join the results. It multiplies each row
# once. And it works on your laptop, outside `jit`.


# %%
def loop_gemm(rows, kernels, group_sizes):
    pieces, begin = [], 0
    for e, size in enumerate(group_sizes.tolist()):  # the host waits here
        pieces.append(rows[begin : begin + size] @ kernels[e])
        begin += size
    return jnp.concatenate(pieces)


print(rounded(loop_gemm(hand_rows, hand_kernels, hand_sizes)[:, 0]))
try:
    jax.jit(loop_gemm)(hand_rows, hand_kernels, hand_sizes)
except TypeError:
    print("under jit: refused, the sizes have no values yet")

# %% [markdown]
# ### Question 05.q1
#
# What does the loop cost on a GPU?
#
# **a** multiplications · **b** a wait of the host for the device in each layer · **c** nothing, cuBLAS likes products
# of their own shape

# %%
quiz(
    "05.q1",
    ### BEGIN ANSWER
    "b",
    ### END ANSWER
)

# %% [markdown]
# ## Exercise 05.1: masked dense
#
# The contract, to be read. · difficulty ●● · 15 minutes · used again in 06, 08
#
# Sizes that are data cannot decide a shape, but they can decide a mask. Let every expert multiply every row, and keep
# its own. Rows past the last group give 0 and must reach nothing: on a GPU they hold whatever was in memory, so the
# check fills them with NaN and also asks for gradients. By hand, the six rows above: expert 0 keeps rows 0 and 1,
# expert 1 keeps none, expert 2 keeps rows 2 to 4, and row 5 gives 0.


# %%
def masked_gemm(rows, kernels, group_sizes):
    """Each group of rows times its own kernel, every expert multiplying every row.

    Args:
      rows: [M, D] float32, group after group; rows past sum(group_sizes) may hold anything, NaN included.
      kernels: [E, D, F] float32.
      group_sizes: [E] int32, on the device; their sum is at most M.

    Returns: [M, F] float32; 0 past the last group. Nothing of those rows reaches a gradient.
    """
    ### BEGIN SOLUTION
    ends = jnp.cumsum(group_sizes)
    row = jnp.arange(rows.shape[0])
    out = jnp.zeros((rows.shape[0], kernels.shape[2]), rows.dtype)
    for e in range(kernels.shape[0]):
        mine = (row >= ends[e] - group_sizes[e]) & (row < ends[e])
        out = out + jnp.where(mine[:, None], rows, 0) @ kernels[e]
    return out
    ### END SOLUTION


check("05.1", masked_gemm)  # stuck? hint("05.1"), up to four times

# %% [markdown]
# ### Question 05.q2
#
# Three ways to mask. Which survives NaN in the tail, in the result *and* in the gradient of the kernels?
#
# **a** `(rows @ kernel) * mask` · **b** `where(mask, rows @ kernel, 0)` · **c** `where(mask, rows, 0) @ kernel`

# %%
quiz(
    "05.q2",
    ### BEGIN ANSWER
    "c",
    ### END ANSWER
)

# %% [markdown]
# ### What `ragged_dot` does here
#
# Now the number you wrote down. XLA can be asked what a compiled program computes. You know what the masked product
# costs; guess what XLA made of `ragged_dot`, which on a CPU has no kernel of its own.


# %%
def flops(fn, *args):
    cost = jax.jit(fn).lower(*args).compile().cost_analysis()
    return (cost[0] if isinstance(cost, list) else cost)["flops"]


experts, num_rows, width = 16, 2048, 64
rng = np.random.default_rng(5)
rows = jnp.asarray(rng.normal(size=(num_rows, width)), jnp.float32)
kernels = jnp.asarray(rng.normal(size=(experts, width, 2 * width)), jnp.float32)
sizes = jnp.asarray(rng.multinomial(num_rows, np.full(experts, 1 / experts)), jnp.int32)
once = flops(jnp.matmul, rows, kernels[0])
predict(
    "multiplications of ragged_dot on a CPU, over those of one dense product",
    ### BEGIN ANSWER
    experts,
    ### END ANSWER
    measured=flops(jax.lax.ragged_dot, rows, kernels, sizes) / once,
    within=0.1,
)

# %% [markdown]
# It is your masked product, as one call. With 256 experts it does 256 times the work. On GPUs and TPUs XLA has kernels
# for some shapes and types and falls back to this for others, without a word. Ask `cost_analysis` before you believe.
#
# ## Exercise 05.2: padded batch
#
# Fixed places for each expert. · difficulty ●●● · 15 minutes · used again in 07
#
# The way of GShard and Switch Transformer: each expert gets `capacity` places, and the product is one batch
# [E, C, D] × [E, D, F]. What does not fit is **dropped**: its result is 0. By hand, the six rows with capacity 2:
# places [[1, 2], [-, -], [3, 4]], results 1, 2, 300, 400; row 4 is dropped and row 5 was nobody's.


# %%
def padded_gemm(rows, kernels, group_sizes, capacity):
    """Each group times its own kernel, in one batch of ``capacity`` places for each expert.

    Args:
      rows: [M, D] float32; rows past sum(group_sizes) may hold anything, NaN included.
      kernels: [E, D, F] float32.
      group_sizes: [E] int32, on the device.
      capacity: C, a Python int. The first C rows of a group have a place.

    Returns: [M, F] float32; 0 for rows without a place and past the last group. Multiplies E C rows.
    """
    ### BEGIN SOLUTION
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
    ### END SOLUTION


check("05.2", padded_gemm)  # stuck? hint("05.2")

# %% [markdown]
# Four ways so far: the loop, the masked product, the batch, and next come tiles. Count the rows that each multiplies,
# for 2,048 rows over 16 experts whose popularity falls like 1, 1/2, 1/3, ... To drop nothing, the batch needs as many
# places as the largest group has rows.

# %%
share = 1 / np.arange(1, 17)
skewed = np.random.default_rng(6).multinomial(2048, share / share.sum())
work = {
    "loop": skewed.sum(),
    "tiles of 64": (-(-skewed // 64) * 64).sum(),
    "batch, nothing dropped": 16 * skewed.max(),
    "masked, ragged_dot": 16 * skewed.sum(),
}
predict(
    "rows of the batch that drops nothing, over the rows there are",
    ### BEGIN ANSWER
    16 / sum(1 / e for e in range(1, 17)),
    ### END ANSWER
    measured=work["batch, nothing dropped"] / skewed.sum(),
    within=0.05,
)

# %%
fig, ax = plots.figure(7.0, 2.2)
ax.barh(list(work), list(work.values()), color=[plots.expert_color(e) for e in (2, 0, 3, 1)], height=0.6)
for y, value in enumerate(work.values()):
    ax.annotate(
        f"{value / skewed.sum():.1f}×", (value, y), xytext=(4, 0), textcoords="offset points", va="center"
    )
ax.invert_yaxis()
ax.xaxis.set_major_formatter("{x:,.0f}")
ax.set(xlabel="rows multiplied, for 2,048 rows over 16 experts of falling popularity", xlim=(0, 36_500))
plots.show(fig, "Tiles multiply hardly more than the loop, with shapes that never change")

# %% [markdown]
# ## Tiles
#
# Cut each group into tiles of `block` rows. A tile is a product of fixed shape; only *where* it is and *whose* it is are
# data. A group of n rows has ⌈n / block⌉ tiles, so all groups together have at most ⌈M / block⌉ + E: a number known
# before anything runs. That many programs are launched, and those past the last tile find an empty range.
#
# ## Exercise 05.3: tile map
#
# Say for each tile whose it is. · difficulty ●●● · 15 minutes · used again in 08
#
# By hand, sizes [5, 0, 3], block 4, six tiles: expert 0 has rows 0 to 4 and 4 to 5, expert 1 none, expert 2 rows 5 to 8;
# three tiles are not there, and cover nothing.

# %%
for name, column in zip(("expert", "begin", "end"), package_tiles(jnp.array([5, 0, 3]), 8, 4), strict=True):
    print(f"{name:<7}{column[:3].tolist()}")


# %%
def tile_map(group_sizes, block, num_tiles):
    """Whose each tile is, and which rows it covers.

    Args:
      group_sizes: [E] int32, on the device.
      block: rows of a tile, a Python int. Tiles begin where their group begins, the last may be shorter.
      num_tiles: entries of the map, a Python int, at least as many as there are tiles.

    Returns: (expert, begin, end), each [num_tiles] integer: tiles by expert, then by row; then those that are
      not there, with begin = end and any expert from 0 to E - 1.
    """
    ### BEGIN SOLUTION
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
    ### END SOLUTION


check("05.3", tile_map)  # stuck? hint("05.3")

# %% [markdown]
# ## Playground
#
# The map of 61 rows over five experts in a buffer of 64, from your function if it passed. Each outlined box is a tile,
# its hatched part is computed and thrown away. Move the block and the share of expert 0. Ask the picture: which block
# wastes nothing? When does a larger block waste less? How many programs find nothing to do?


# %%
def default_tile_map(group_sizes, block, num_tiles):
    expert, begin, end = package_tiles(group_sizes, (num_tiles - group_sizes.shape[0]) * block, block)
    return expert, begin, end


draw_map = yours("05.3", default_tile_map)


def playground(block, share_of_0):
    share = np.append(share_of_0, np.full(4, (1 - share_of_0) / 4))
    counts = np.diff(np.round(np.cumsum(np.append(0, share)) * 61).astype(int))
    num_tiles = -(-64 // block) + 5
    tiles = np.stack(
        [np.asarray(a) for a in draw_map(jnp.asarray(counts, jnp.int32), block, num_tiles)], axis=1
    )
    live = tiles[tiles[:, 2] > tiles[:, 1]]
    fig, ax = plots.figure(8.0, 2.3)
    for i, (expert, begin, end) in enumerate(live):
        color, low = plots.expert_color(int(expert)), i % 2
        ax.barh(low, end - begin, left=begin, height=0.7, color=color, edgecolor=plots.INK)
        ax.barh(low, begin + block - end, left=end, height=0.7, color="none", edgecolor=color, hatch="////")
    ax.set(
        yticks=[0, 1], yticklabels=["even tiles", "odd tiles"], xlim=(0, 80), ylim=(-0.6, 1.6), xlabel="row"
    )
    ax.axvline(64, color=plots.INK, lw=0.8, ls="--")
    computed = len(live) * block
    caption = f"block {block}: {computed} rows computed for 61, {len(tiles) - len(live)} of {num_tiles} programs idle"
    return fig, caption


explore(playground, block=[8, 1, 4, 16, 32], share_of_0=(0.0, 1.0, 0.4))

# %% [markdown]
# ## Exercise 05.4: the walk
#
# Multiply tile by tile, in a loop on the device. · difficulty ●●●● · 20 minutes · used again in 06, 08
#
# One `fori_loop` over the map, one plain product of [block, D] × [D, F] in each turn. Two traps. A tile has `block` rows
# but only `begin` to `end` are its own; what else it computes must not be written. And `dynamic_slice` never reads past
# the end of an array: it moves the slice back inside, and your rows with it. By hand: 6 rows, block 4, a tile from 5 to
# 6. The slice you get begins at row 2.

# %%
print(
    "a slice of 4 rows that should begin at row 5 of 6:",
    jax.lax.dynamic_slice_in_dim(jnp.arange(6), 5, 4).tolist(),
)


# %%
def walk_tiles(rows, kernels, expert, begin, end, block):
    """The grouped product, tile by tile.

    Args:
      rows: [M, D] float32; rows that no tile covers may hold anything, NaN included.
      kernels: [E, D, F] float32.
      expert, begin, end: [num_tiles] int32, on the device, in any order; begin = end: nothing to do.
      block: rows of a full tile, a Python int. It may be larger than M.

    Returns: [M, F] float32; 0 for rows that no tile covers.
    """
    ### BEGIN SOLUTION
    padded = jnp.pad(rows, ((0, block), (0, 0)))

    def step(i, out):
        own = (begin[i] + jnp.arange(block) < end[i])[:, None]
        y = jax.lax.dynamic_slice_in_dim(padded, begin[i], block) @ kernels[expert[i]]
        old = jax.lax.dynamic_slice_in_dim(out, begin[i], block)
        return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(own, y, old), begin[i], 0)

    out = jnp.zeros((len(padded), kernels.shape[2]), rows.dtype)
    return jax.lax.fori_loop(0, len(expert), step, out)[: len(rows)]
    ### END SOLUTION


check("05.4", walk_tiles)  # stuck? hint("05.4")

# %% [markdown]
# Is it worth it? Measure on your machine: one dense product of the same rows, the package's tiles (this idea with a few
# refinements), and `ragged_dot`. The times of this cell are yours, so nothing here quotes them; the ratio to the dense
# product is what to look at, and what grows with E.


# %%
def seconds(fn, *args):
    run = jax.jit(fn)
    run(*args).block_until_ready()
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        run(*args).block_until_ready()
        taken.append(time.perf_counter() - start)
    return min(taken)


# %% tags=["nbval-ignore-output"]
big_rows = jnp.asarray(rng.normal(size=(4096, 256)), jnp.float32)
big_kernels = jnp.asarray(rng.normal(size=(16, 256, 256)), jnp.float32)
big_sizes = jnp.asarray(rng.multinomial(4096, np.full(16, 1 / 16)), jnp.int32)
dense = seconds(jnp.matmul, big_rows, big_kernels[0])
for name in ("tiled", "ragged_dot"):
    taken = seconds(lambda *a, name=name: grouped_gemm(*a, backend=name), big_rows, big_kernels, big_sizes)
    print(f"{name:<11} {taken / dense:5.1f} times the dense product, 16 experts")

# %% [markdown]
# ## Exercise 05.5: dgrad and wgrad
#
# Both gradients, by hand. · difficulty ●●● · 20 minutes · used again in 06, 08
#
# A layer's step is three grouped products: forward, **dgrad** (`d_out @ kernelᵀ`, again one product for each group) and
# **wgrad** (`rowsᵀ @ d_out`, where the ragged dimension is the one summed over). Wgrad is the delicate one: a row that
# leaks in is added to a sum, and nothing looks wrong. An empty group's gradient is exactly 0. By hand: kernels 1, 10,
# 100, sizes [2, 0, 3], rows 1 to 6, and d_out all ones give d_rows 1, 1, 100, 100, 100, 0 and d_kernels 3, 0, 12.


# %%
def gradients(rows, kernels, group_sizes, d_out):
    """The gradients of the grouped product.

    Args:
      rows: [M, D] float32, kernels: [E, D, F] float32, group_sizes: [E] int32 on the device.
      d_out: [M, F] float32, the gradient of the result. Past sum(group_sizes), rows and d_out may hold NaN.

    Returns: (d_rows [M, D], d_kernels [E, D, F]), float32: 0 past the last group and for empty groups.
    """
    ### BEGIN SOLUTION
    ends = jnp.cumsum(group_sizes)
    row = jnp.arange(rows.shape[0])
    d_rows, d_kernels = jnp.zeros_like(rows), []
    for e in range(kernels.shape[0]):
        mine = ((row >= ends[e] - group_sizes[e]) & (row < ends[e]))[:, None]
        x, d = jnp.where(mine, rows, 0), jnp.where(mine, d_out, 0)
        d_rows = d_rows + d @ kernels[e].T
        d_kernels.append(x.T @ d)
    return d_rows, jnp.stack(d_kernels)
    ### END SOLUTION


check("05.5", gradients)  # stuck? hint("05.5")

# %% [markdown]
# ## A GPU kernel, step by step
#
# On a GPU the loop over tiles becomes a **grid**: one program for each tile, all running at once, in no order. Pallas
# writes such a program in Python. Step one, without groups: program i multiplies rows 4 i to 4 i + 4. `rows` and `out`
# are references to GPU memory; `rows[...]` loads, `out[...] =` stores. Interpreted, it runs here.


# %%
def dense_program(rows, kernel, out):
    mine = pl.ds(pl.program_id(0) * 4, 4)
    out[mine, :] = jnp.dot(rows[mine, :], kernel[...])


some_rows = jnp.asarray(rng.normal(size=(8, 16)), jnp.float32)
some_kernel = jnp.asarray(rng.normal(size=(16, 16)), jnp.float32)
shape = jax.ShapeDtypeStruct((8, 16), jnp.float32)
result = pl.pallas_call(dense_program, out_shape=shape, grid=(2,), interpret=True)(some_rows, some_kernel)
print("two programs, one product:", bool(jnp.allclose(result, some_rows @ some_kernel, rtol=1e-5, atol=1e-5)))

# %% [markdown]
# Step two: where a program works is data, read from the map of 05.3. Step three: its last rows may not be its own.
# `triton.load` and `triton.store` take a mask: what is masked out is not read, and not written.
#
# ## Exercise 05.6: a Pallas program
#
# What one program does. · difficulty ●●●● · 20 minutes · used again in 08
#
# The check fills the output with -7 before the launch, the tail of the input with NaN, and launches the tiles in any
# order. Rows that belong to nobody must still hold -7 afterwards.


# %%
def product_program(expert_ref, begin_ref, end_ref, rows, kernels, out, block):
    """One program: the tile of number pl.program_id(0).

    Args:
      expert_ref, begin_ref, end_ref: references to the tile map, [num_tiles] int32 each.
      rows: reference to [M, D]; a load past the end needs a mask: triton.load(rows.at[...], mask=, other=).
      kernels: reference to [E, D, F].
      out: reference to [M, F]: the rows begin to end of this tile are written, no others.
      block: rows of a tile.

    Returns: nothing.
    """
    ### BEGIN SOLUTION
    i = pl.program_id(0)
    begin, end = begin_ref[i], end_ref[i]
    mask = (begin + jnp.arange(block) < end)[:, None]
    x = triton.load(rows.at[pl.ds(begin, block), :], mask=mask, other=0.0)
    y = jnp.dot(x, kernels[expert_ref[i]])
    triton.store(out.at[pl.ds(begin, block), :], y, mask=mask)
    ### END SOLUTION


check("05.6", product_program)  # stuck? hint("05.6")

# %% [markdown]
# `moe_course/grouped_gemm/pallas.py` is this program with blocks in all three dimensions, so that a tile of the kernel
# fits in shared memory, and a second program for wgrad. It is tested interpreted, and lowered for CUDA; nobody here ran
# it on a GPU.
#
# ### Question 05.q3
#
# Tiles begin where their group begins, so no two programs write the same row. What does that spare?
#
# **a** atomics, and sums that differ from run to run · **b** a grid that depends on the data · **c** loading rows twice

# %%
quiz(
    "05.q3",
    ### BEGIN ANSWER
    "a",
    ### END ANSWER
)

# %% [markdown]
# ## How many rows keep a GPU busy
#
# An expert with n rows does 2 n D F operations and moves, in bfloat16, 2 (n D + D F + n F) bytes: its rows, its kernel,
# its results. With few rows the kernel dominates: every weight is fetched for n multiplications. NVIDIA's H100 SXM does
# 989 TFLOP/s in dense bfloat16 and moves 3.35 TB/s (data sheet), 295 operations for each byte. Predict, then measure: at
# how many rows does an expert of DeepSeek-V3 (D = 7,168, F = 2,048) need 295 operations for each byte?


# %%
def intensity(n, d_model, d_ff):
    return n * d_model * d_ff / (n * d_model + d_model * d_ff + n * d_ff)


counts = np.arange(1, 5000)
enough = int(counts[intensity(counts, 7168, 2048) >= 989 / 3.35][0])
predict(
    "rows per expert where arithmetic, not memory, is the limit",
    ### BEGIN ANSWER
    295 / (1 - 295 * (1 / 7168 + 1 / 2048)),
    ### END ANSWER
    measured=enough,
    unit="rows",
    within=0.01,
)

# %%
n = 2 ** np.arange(0, 13)
fig, ax = plots.figure(7.0, 2.8)
reached = np.minimum(989, 3.35 * intensity(n, 7168, 2048))
ax.plot(n, reached, color=plots.expert_color(0), lw=2.4, marker="o", ms=5)
ax.axvline(enough, color=plots.INK, lw=0.8, ls=":")
ax.annotate(f"{enough} rows", (enough * 1.08, 3), fontsize=9)
ax.axhline(989, color=plots.INK, lw=0.8, ls="--")
ax.annotate("H100 SXM, dense bfloat16, 989 TFLOP/s", (1, 1150), fontsize=9)
ax.set(
    xscale="log",
    yscale="log",
    xlabel="rows of an expert of DeepSeek-V3",
    ylabel="TFLOP/s at most",
    ylim=(2, 2500),
)
ax.set_xticks(n[::2], [f"{x:,}" for x in n[::2]])
ax.minorticks_off()
plots.show(fig, "Below some 360 rows an expert waits for its weights, however good the kernel")

# %% [markdown]
# These are upper bounds from two data-sheet numbers, not measurements. They say why fine-grained experts want large
# batches or expert parallelism (chapter 07): the rows of one expert, gathered from many devices.
#
# ## The Transformer Engine way
#
# One call, differentiable, three grouped products for each step. **Not run here**: the call, as text.
#
# ```python
# from transformer_engine.jax.dense import grouped_dense
#
# y = grouped_dense(rows, kernels, group_sizes)  # [M, D], [E, D, F], [E] int32 on the device -> [M, F]
# ```
#
# TE has two implementations and picks one without telling:
#
# | | V1, one cuBLAS product for each expert | V2, one cuBLASLt kernel for all |
# |---|---|---|
# | group sizes | copied to the host, which waits | stay on the device |
# | `sum(group_sizes)` | must be M | may be less; rows past it are *not written* |
# | CUDA graphs | no | yes |
# | needs | any GPU | bfloat16 or MXFP8, Hopper or Blackwell, cuBLAS 13.3 or newer (13.4 on Hopper) |
#
# With `NVTE_JAX_ENFORCE_V2_GROUPED_GEMM=1` a fall back to V1 raises and says why. Set it wherever you claim that
# nothing waits. There is no partitioning rule: call it inside `shard_map`.
#
# ### Question 05.q4
#
# Why must sizes stay on the device?
#
# **a** int32 is less exact on the host · **b** V2 needs static shapes and V1 does not · **c** reading them stops the
# queue of work, in each layer, forward and backward

# %%
quiz(
    "05.q4",
    ### BEGIN ANSWER
    "c",
    ### END ANSWER
)

# %% [markdown]
# ## Bug museum: the neighbour's rows
#
# A weight gradient by blocks of 8 rows. It passed its tests; then a model trained with sizes that were no multiples of
# the block, and its weight gradients were off by up to half their peak (modelled on marin-community/marin #8339 and
# #8793). The exhibit, and the test that let it through:


# %%
def museum_wgrad(rows, d_out, group_sizes, block=8):
    ends = jnp.cumsum(group_sizes)
    starts = (ends - group_sizes) // block * block
    row = jnp.arange(rows.shape[0])
    mine = (row >= starts[:, None]) & (row < ends[:, None])
    return jnp.einsum("em,md,mf->edf", mine.astype(rows.dtype), rows, d_out)


exhibit = np.random.default_rng(12)
x, dy = (jnp.asarray(exhibit.normal(size=(64, 4)) * scale, jnp.float32) for scale in (1.0, 1e-3))
masked = jax.jit(jax.grad(lambda k, s: (grouped_gemm(x, k, s, backend="reference") * dy).sum()))
for sizes_tested in ([8, 16, 0, 40], [5, 0, 33, 26]):
    tested = jnp.array(sizes_tested, jnp.int32)
    right = masked(jnp.zeros((4, 4, 4)), tested)
    found = museum_wgrad(x, dy, tested)
    error = float(jnp.abs(found - right).max() / jnp.abs(right).max())
    print(f"sizes {sizes_tested}")
    print(f"  the test, allclose with atol=1e-2: {bool(jnp.allclose(found, right, atol=1e-2))}")
    print(f"  largest error below 1e-5 of the peak: {error < 1e-5}")

# %% [markdown]
# ### Question 05.q5
#
# Which test would have stopped it?
#
# **a** aligned sizes and a tight tolerance · **b** unaligned sizes, error over the largest right value · **c** a hundred
# more random draws with atol 0.01

# %%
quiz(
    "05.q5",
    ### BEGIN ANSWER
    "b",
    ### END ANSWER
)

# %% [markdown]
# ## What changed in the package
#
# `moe_course/grouped_gemm/` is now yours to read; one file for each kernel, one contract and one test suite for all.
#
# - `tiled.py`, the CPU kernel, walks tiles of six sizes from 1,024 to 32 rows, so that a large group is one large
#   product and a small one wastes little. A tile that would reach past its group is moved back to end with it.
# - Its weight gradients are a walk too, with the sum in float32; your loop over experts costs E times the work.
# - `ragged_dot.py` is XLA's primitive between two masks, since what it leaves in the tail differs from platform to
#   platform.
# - `backend="auto"` picks the tiles on a CPU; a backend that cannot run here says what would fix it.
#
# ## Further reading
#
# - MegaBlocks, arXiv 2211.15841: the dropless grouped product, and what padding to a capacity costs.
# - GShard, arXiv 2006.16668, and Switch Transformers, arXiv 2101.03961: the padded batch.
# - Triton, "Triton: an intermediate language and compiler for tiled neural network computations" (MAPL 2019).
# - DeepSeek-V3, arXiv 2412.19437, section 3: grouped products in FP8, and why experts see few rows.
# - Roofline, Williams, Waterman and Patterson (CACM 2009): operations for each byte.
#
# Next: 06, where two grouped products and an activation become an expert, and a layer.
