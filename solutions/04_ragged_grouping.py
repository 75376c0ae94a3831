# %% [markdown]
# # 04 Ragged grouping
#
# A decoding step: 128 tokens, 256 experts, eight picks each, so 1,024 token copies. Your kernel multiplies tiles of
# 128 rows, so each expert's rows are padded to a multiple of 128. How many rows does it multiply for the 1,024 that
# mean anything? Write a number down; in twenty minutes you will measure it.
#
# Chapter 02 decided where tokens go. This chapter moves them: into expert order, so that each expert finds its rows in
# one piece, and back. Nothing is learned here and no number changes its value, which is why faults here stay unseen
# for so long. At the end you have a permutation that compiles once for every routing there is, and a gradient that
# adds in the same order on every machine.
#
# You will be able to
#
# - sort token copies by expert, stably, with padding tokens out of the way,
# - say how many rows any routing needs before there is a routing,
# - align groups, and predict what the alignment wastes,
# - move data by gathers alone, forward and backward.
#
# Six exercises, about an hour and a quarter. Everything runs on the CPU.

# %%
from moe_course.environment import setup

status = setup()

# %%
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from moe_course.balance import expert_load
from moe_course.grouping import group_by_expert, padded_rows, unpermute
from moe_course.lessons import check, plots, predict, quiz, rounded, yours
from moe_course.lessons.widgets import explore
from moe_course.routing import RouterConfig, route

group = jax.jit(
    group_by_expert, static_argnames=("num_experts", "align")
)  # one program, not forty small ones
router = jax.jit(route, static_argnames="config")

# %% [markdown]
# ## Slots and rows
#
# A **slot** is one pick: slot (t, k) is the k-th expert of token t, and its number is t K + k. A **row** is a place in
# the buffer that the experts read. Sixteen tokens with two picks fill 32 slots, and so 32 rows, in another order: all
# of expert 0 first, then all of expert 1. Each line below is one slot on its way.

# %%
rng = np.random.default_rng(4)
logits = jnp.asarray(rng.normal(size=(16, 5)) + rng.normal(size=5), jnp.float32)
ids = router(logits, RouterConfig(num_experts=5, top_k=2)).expert_ids
row_of_slot = np.asarray(group(ids, 5).row_of_slot)

fig, ax = plots.figure(8.0, 2.6)
for slot, (expert, row) in enumerate(zip(np.asarray(ids).reshape(-1), row_of_slot.reshape(-1), strict=True)):
    ax.plot([slot, row], [1, 0], color=plots.expert_color(int(expert)), lw=1.4, marker="s", ms=6)
ax.set(
    yticks=[0, 1],
    yticklabels=["rows", "slots"],
    xlabel="number of the slot, number of the row",
    ylim=(-0.3, 1.3),
)
plots.show(
    fig,
    "A stable sort: lines of one colour never cross, so tokens keep their order",
)

# %% [markdown]
# ## Exercise 04.1: load
#
# Count the token copies of each expert. · difficulty ● · 5 minutes · used again in 05, 07
#
# The counts are the one piece of information that a grouped product needs beside the data, and they never leave the
# device. A padding token has the id E, one past the last expert. By hand, four tokens, four experts:

# %%
hand_ids = jnp.array([[2, 0], [0, 3], [4, 4], [2, 0]])
print("load", expert_load(hand_ids, 4).tolist(), "from ids", hand_ids.tolist())


# %%
def load_of(expert_ids, num_experts):
    """How many slots each expert has.

    Args:
      expert_ids: [T, K] int32. An id outside 0 to E - 1 is no expert: E for padding, others by accident.
      num_experts: E.

    Returns: [E], integer.
    """
    ### BEGIN SOLUTION
    flat = expert_ids.reshape(-1)
    return (flat[:, None] == jnp.arange(num_experts)).sum(axis=0)
    ### END SOLUTION


check("04.1", load_of)  # stuck? hint("04.1"), up to four times

# %% [markdown]
# ## Exercise 04.2: expert order
#
# List the slots, expert by expert. · difficulty ●● · 10 minutes · used again in 05, 06, 07
#
# Of the four tokens above, expert 0 has slots 1, 2 and 7, expert 2 has slots 0 and 6, expert 3 has slot 3; slots 4 and
# 5 belong to nobody and come last, written as 8, which is T K: a place past the end. Within an expert, slots keep their
# order. That is not tidiness: with a sort that breaks ties as it likes, two runs add the same gradients in another
# order, and their last bits differ.

# %%
print("order", group(hand_ids, 4).slot_of_row.tolist())


# %%
def slots_in_expert_order(expert_ids, num_experts):
    """The flat slots t K + k, sorted by expert.

    Args:
      expert_ids: [T, K] int32; ids outside 0 to E - 1 are no expert.
      num_experts: E.

    Returns: [T K], integer. Slots of one expert keep their order; slots without an expert are last, each as T K.
    """
    ### BEGIN SOLUTION
    flat = expert_ids.reshape(-1)
    flat = jnp.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    order = jnp.argsort(flat, stable=True)
    return jnp.where(flat[order] < num_experts, order, flat.size)
    ### END SOLUTION


check("04.2", slots_in_expert_order)  # stuck? hint("04.2")

# %% [markdown]
# ### Question 04.q1
#
# Loads [2, 0, 3, 4] and no alignment. In which row does the first slot of expert 3 sit?

# %%
quiz(
    "04.q1",
    ### BEGIN ANSWER
    5,
    ### END ANSWER
)

# %% [markdown]
# ## A shape for every routing
#
# XLA compiles a program for one set of shapes. If the shape of a buffer followed the routing, each step would compile
# anew. So the shape must hold any routing, and what the routing decides, the sizes of the groups, must be data. For
# T tokens with K picks that is easy: T K rows, always. Alignment makes it harder. Tensor cores multiply tiles of 128
# rows, MXFP8 shares a scale among 32, and a tile that reaches into the next group mixes two experts.
#
# ### Question 04.q2
#
# What do you allocate?
#
# **a** as many rows as this batch needs · **b** a fixed number for each expert, 1.25 times the average · **c** as many
# rows as the worst routing needs, in one piece

# %%
quiz(
    "04.q2",
    ### BEGIN ANSWER
    "c",
    ### END ANSWER
)

# %% [markdown]
# ## Exercise 04.3: rows of the buffer
#
# How many rows does the worst routing need? · difficulty ●●● · 10 minutes · used again in 05, 07, 10
#
# Each group is padded to a multiple of `align`; an empty group needs nothing. By hand, 3 experts, align 4: one slot
# costs 4 rows; two slots cost 8 if they disagree; three cost 12; six cost 12 as well, as 4 + 1 + 1 or 2 + 2 + 2 or
# 3 + 3 + 0, and seven cost 16, as 5 + 1 + 1. The check tries every split of a few slots, so it knows.

# %%
print("rows for 0 to 9 slots, 3 experts, align 4:", [padded_rows(slots, 3, 4) for slots in range(10)])


# %%
def buffer_rows(num_slots, num_experts, align):
    """The least number of rows that holds every routing of so many slots.

    Args:
      num_slots: slots, T K.
      num_experts: E.
      align: each group takes a multiple of so many rows.

    Returns: a Python int.
    """
    ### BEGIN SOLUTION
    groups = min(num_experts, num_slots)
    tiles = groups + (num_slots - groups) // align
    return tiles * align
    ### END SOLUTION


check("04.3", buffer_rows)  # stuck? hint("04.3")

# %% [markdown]
# Now the number you wrote down at the top. The buffer must hold the worst case; how much of it a random routing fills
# is a matter of luck. With a pencil: an expert is missed by all 1,024 slots with probability near e⁻⁴, and hardly any
# expert gets more than 128.

# %%
step_logits = jnp.asarray(np.random.default_rng(7).normal(size=(128, 256)), jnp.float32)
step_ids = router(step_logits, RouterConfig(256, 8)).expert_ids
step_rows = int(group(step_ids, 256, align=128).group_sizes.sum())
predict(
    "rows multiplied for 1,024 token copies",
    ### BEGIN ANSWER
    256 * (1 - np.exp(-4)) * 128,
    ### END ANSWER
    measured=step_rows,
    unit="rows",
    within=0.02,
)
predict(
    "rows of the buffer",
    ### BEGIN ANSWER
    256 * 128 + (1024 - 256) // 128 * 128,
    ### END ANSWER
    measured=yours("04.3", padded_rows)(1024, 256, 128),
    unit="rows",
)

# %% [markdown]
# Thirty-one of thirty-two rows are padding. Training is kinder, because it has more tokens: when an expert has n rows
# with n well above `align`, its last tile is half empty on average, which wastes `align / 2` rows of n.

# %%
fig, ax = plots.figure(7.0, 3.0)
tokens = 2 ** np.arange(5, 15)
draw = np.random.default_rng(8)
for tone, align in zip((0, 1, 2), (8, 32, 128), strict=True):
    loads = np.stack([draw.multinomial(8 * t, np.full(256, 1 / 256)) for t in tokens])
    padded = (-(-loads // align) * align).sum(1)
    ax.plot(tokens, 100 * (1 - 8 * tokens / padded), color=plots.expert_color(tone), lw=2.2, marker="o", ms=4)
    half = int(np.argmin(np.abs(0.5 - (1 - 8 * tokens / padded))))
    spot = tokens[half] * 1.12, 100 * (1 - 8 * tokens[half] / padded[half]) + 2
    ax.annotate(f"align {align}", spot, color=plots.expert_color(tone))
ax.set(
    xscale="log",
    xlabel="tokens per device (256 experts, 8 picks each)",
    ylabel="padding, % of rows",
    ylim=(0, 105),
)
ax.set_xticks(tokens, [f"{t:,}" for t in tokens], fontsize=8)
ax.minorticks_off()
plots.show(fig, "Padding is the price of few tokens per expert")

# %% [markdown]
# ## Playground
#
# Forty slots, six experts. Move the alignment and the popularity of expert 0. Ask the picture: which alignment wastes
# more than half? Does a popular expert waste more, or less? When does the grey tail, allocated for the worst case and
# not used, vanish?

# %%
draws = np.random.default_rng(9).uniform(size=40)


def playground(align, popularity):
    share = np.append(popularity, np.full(5, (1 - popularity) / 5))
    chosen = np.searchsorted(np.cumsum(share), draws).clip(0, 5).astype(np.int32)
    load = np.asarray(expert_load(jnp.asarray(chosen)[:, None], 6))
    used = int((-(-load // align) * align).sum())
    rows = padded_rows(40, 6, align)
    fig = plots.group_bar(load, rows=rows, align=align)
    return fig, f"align {align}: {used} rows for 40 slots, {100 - 4000 // used} % padding; {rows} allocated"


explore(playground, align=[4, 1, 2, 8, 16, 32], popularity=(0.0, 1.0, 0.3))

# %% [markdown]
# ## Exercise 04.4: a row for each slot
#
# Where does each slot go? · difficulty ●●● · 20 minutes · used again in 05, 06, 07, 08
#
# A row number is the first row of the group plus the rank within it. The four tokens from above with align 4: loads
# [3, 0, 2, 1] become sizes [4, 0, 4, 4], the groups begin at 0, 4, 4 and 8. Slots of nobody go to row M, which is not
# there: gathers and scatters that fill or drop pass over it.

# %%
print("rows", group(hand_ids, 4, align=4).row_of_slot.tolist(), "of", padded_rows(8, 4, 4))


# %%
def row_of_slots(expert_ids, num_experts, align, num_rows):
    """The row of each slot, groups in the order of the experts.

    Args:
      expert_ids: [T, K] int32; ids outside 0 to E - 1 are no expert.
      num_experts: E.
      align: each group starts at a multiple of align and takes as few rows as it can.
      num_rows: M, the rows of the buffer: enough.

    Returns: [T, K], integer. Slots of one expert keep their order; M for a slot without an expert.
    """
    ### BEGIN SOLUTION
    flat = expert_ids.reshape(-1)
    member = (flat[:, None] == jnp.arange(num_experts)).astype(jnp.int32)
    rank = ((jnp.cumsum(member, axis=0) - member) * member).sum(axis=1)
    padded = -(-member.sum(axis=0) // align) * align
    start = jnp.cumsum(padded) - padded
    row = (member * start).sum(axis=1) + rank
    return jnp.where(member.any(axis=1), row, num_rows).reshape(expert_ids.shape)
    ### END SOLUTION


check("04.4", row_of_slots)  # stuck? hint("04.4")

# %% [markdown]
# ### Question 04.q3
#
# Why M and E for "nowhere", and not -1?
#
# **a** -1 raises an error in a gather · **b** -1 is the last row · **c** JAX refuses negative indices under jit

# %%
quiz(
    "04.q3",
    ### BEGIN ANSWER
    "b",
    ### END ANSWER
)

# %% [markdown]
# ### One compilation
#
# Predict, then measure. Python code in a jitted function runs once for each compilation, so a counter inside counts
# them. Ten batches, ten routings, once with the sizes as data, and once the tempting way: the sizes read on the
# host and given as static arguments, a loop over slices of known length.


# %%
def package_rows(expert_ids, num_experts, align, num_rows):
    return group(expert_ids, num_experts, align=align).row_of_slot


compiled = {"data": 0, "static": 0}
place = yours("04.4", package_rows)


@jax.jit
def sizes_as_data(x, expert_ids):
    compiled["data"] += 1
    row = place(expert_ids, 4, 1, expert_ids.size)
    return (
        jnp.zeros((expert_ids.size, x.shape[1]))
        .at[row.reshape(-1)]
        .set(jnp.repeat(x, 2, axis=0), mode="drop")
    )


def static_slices(rows, sizes):
    compiled["static"] += 1
    starts = np.cumsum((0, *sizes))
    return [rows[a:b].sum() for a, b in itertools.pairwise(starts)]


static_slices = jax.jit(static_slices, static_argnums=1)
seen = set()
for step in range(10):
    batch = np.random.default_rng([10, step])
    x = jnp.asarray(batch.normal(size=(64, 8)), jnp.float32)
    batch_ids = jnp.asarray(np.argsort(batch.normal(size=(64, 4)), axis=-1)[:, :2], jnp.int32)
    rows = sizes_as_data(x, batch_ids)
    sizes = tuple(expert_load(batch_ids, 4).tolist())  # waits for the device, at every step
    seen.add(sizes)
    sums = static_slices(rows, sizes)
predict(
    "compilations, sizes as data",
    ### BEGIN ANSWER
    1,
    ### END ANSWER
    measured=compiled["data"],
)
predict(
    "compilations, sizes as static arguments",
    ### BEGIN ANSWER
    len(seen),
    ### END ANSWER
    measured=compiled["static"],
)

# %% [markdown]
# At scale a compilation takes minutes, and the read on the host empties the queue of work that keeps a GPU busy. A
# router never repeats itself, so the second way compiles at every step for as long as the run lasts.
#
# ## The gradient of a copy
#
# `permute` copies token t into K rows: `rows[r] = x[token of r]`. Nudge the token and K rows move, so its gradient is
# the sum of theirs. Left alone, JAX turns a gather's gradient into a scatter-add: rows push what they have to their
# tokens, in whatever order they arrive. But every token *knows* its rows, from 04.4. Turn the push into a pull, and the
# gradient is a gather again, of a fixed number of rows in a fixed order.

# %%
x = jnp.arange(8.0).reshape(4, 2)
program = str(jax.make_jaxpr(jax.grad(lambda x: x[jnp.array([0, 2, 2, 3, 1, 0])].sum()))(x))
print("scatter-add in JAX's own gradient of a gather:", "scatter-add" in program)

# %% [markdown]
# ## Exercise 04.5: the gradient of permute
#
# Pull the gradients home. · difficulty ●● · 10 minutes · used again in 06, 07
#
# By hand, two picks, five rows, the last of them padding: token 0 sits in rows 0 and 3, token 1 in row 1 alone (its
# other slot went to row 5, nowhere), token 2 in rows 2 and 0. Gradients of the rows 1, 10, 100, 1000, NaN give the
# tokens 1001, 10 and 101. Row 4 is read by nobody, and must not be: 0 * NaN is NaN.


# %%
def permute_gradient(d_rows, row_of_slot):
    """The gradient of permute: from rows to tokens.

    Args:
      d_rows: [M, D], float32 or bfloat16. Rows that hold no slot may hold anything, NaN included.
      row_of_slot: [T, K] int32, M for a slot that went nowhere.

    Returns: [T, D] float32, summed in float32. By gathers alone: no scatter.
    """
    ### BEGIN SOLUTION
    copies = d_rows.at[row_of_slot].get(mode="fill", fill_value=0)
    return copies.astype(jnp.float32).sum(axis=1)
    ### END SOLUTION


check("04.5", permute_gradient)  # stuck? hint("04.5")


# %%
def package_gradient(d_rows, row_of_slot):
    copies = [d_rows.at[column].get(mode="fill", fill_value=0) for column in row_of_slot.T]
    return sum(copy.astype(jnp.float32) for copy in copies)


hand_rows = jnp.array([[1.0], [10.0], [100.0], [1000.0], [jnp.nan]])
pull = yours("04.5", package_gradient)
print(rounded(pull(hand_rows, jnp.array([[0, 3], [1, 5], [2, 0]]))))

# %% [markdown]
# A `custom_vjp` ties the two together. From here on, `my_permute` moves tokens forward with one gather and gradients
# back with another:


# %%
@jax.custom_vjp
def my_permute(x, token_of_row, row_of_slot):
    return x.at[token_of_row].get(mode="fill", fill_value=0)


def my_permute_forward(x, token_of_row, row_of_slot):
    return my_permute(x, token_of_row, row_of_slot), row_of_slot


def my_permute_backward(row_of_slot, d_rows):
    return pull(d_rows, row_of_slot).astype(d_rows.dtype), None, None


my_permute.defvjp(my_permute_forward, my_permute_backward)

groups = group(ids, 5, align=4)
x = jnp.asarray(rng.normal(size=(16, 3)), jnp.float32)
mine = jax.grad(lambda x: (my_permute(x, groups.token_of_row, groups.row_of_slot) ** 2).sum())
jaxs = jax.grad(lambda x: (x.at[groups.token_of_row].get(mode="fill", fill_value=0) ** 2).sum())
print("same gradient as JAX's own:", bool(jnp.allclose(mine(x), jaxs(x))))
print("scatter in the program:", "scatter" in str(jax.make_jaxpr(mine)(x)))

# %% [markdown]
# ## Exercise 04.6: combine
#
# Bring the answers back. · difficulty ●● · 10 minutes · used again in 06, 07, 12
#
# The experts answered, row by row. Each token collects its K rows and adds them up, each times its combine weight. By
# hand, with the rows 1, 10, 100, 1000, NaN from above and weights [[0.5, 0.5], [0.8, 0.2], [1, 3]]: token 0 gets
# 0.5 + 500, token 1 gets 8 and nothing for its slot that went nowhere, token 2 gets 100 + 3.


# %%
def combine(rows, row_of_slot, weights):
    """Each token's rows, weighed and added up.

    Args:
      rows: [M, D], float32 or bfloat16. Rows that hold no slot may hold anything, NaN included.
      row_of_slot: [T, K] int32, M for a slot that went nowhere: it adds nothing, whatever its weight.
      weights: [T, K] float32.

    Returns: [T, D] float32, weighed and summed in float32. The forward pass is gathers alone: no scatter.
    """
    ### BEGIN SOLUTION
    copies = rows.at[row_of_slot].get(mode="fill", fill_value=0).astype(jnp.float32)
    return (copies * weights[:, :, None]).sum(axis=1)
    ### END SOLUTION


check("04.6", combine)  # stuck? hint("04.6")

# %% [markdown]
# There and back. With weights that sum to 1 and experts that do nothing, every token comes home as it left. Below, the
# experts do something you can see: expert e multiplies by e + 1. So token t must come home multiplied by its weighted
# mean of those factors.


# %%
def package_combine(rows, row_of_slot, weights):
    return unpermute(rows, groups, weights)


routing = router(logits, RouterConfig(num_experts=5, top_k=2))
sent = my_permute(x, groups.token_of_row, groups.row_of_slot)
expert_of_row = jnp.repeat(jnp.arange(5), groups.group_sizes, total_repeat_length=len(sent))
home = yours("04.6", package_combine)(
    sent * (1.0 + expert_of_row)[:, None], groups.row_of_slot, routing.weights
)
factor = ((1.0 + routing.expert_ids) * routing.weights).sum(axis=1)

fig, ax = plots.figure(7.0, 2.6)
ax.plot(range(16), factor, "s", color=plots.FAINT, ms=15, label="from the routing")
ax.plot(
    range(16),
    home[:, 0] / x[:, 0],
    "o",
    color=plots.expert_color(0),
    ms=6,
    label="out over in, after the trip",
)
ax.set(xlabel="token", ylabel="factor", ylim=(3.1, 4.5), xticks=range(16))
ax.legend(frameon=False, ncols=2, loc="upper left")
plots.show(fig, "There and back: each token returns with the factors of its own experts")

# %% [markdown]
# ## The Transformer Engine way
#
# TE has two families, both in `transformer_engine.jax.permutation`. **Not run here**: the calls, as text.
#
# ```python
# from transformer_engine.jax.permutation import token_combine, token_dispatch
#
# rows, row_weights, row_id_map, pad_offsets, group_sizes = token_dispatch(
#     x,  # [T, D]
#     routing_map.astype(jnp.int32),  # [T, E]: the table of chapter 02, not ids
#     T * K,  # a Python int: the shape is static here too
#     probs=probs,
#     align_size=128,  # rows of the buffer: those of 04.3, but for E > T K
# )
# y = token_combine(expert_outputs, row_id_map, pad_offsets=pad_offsets)
# ```
#
# - The first family is written in Triton and fuses the sort, the padding and the move. `group_sizes` counts the padding,
#   as the package counts it too; their sum may be less than the buffer's rows, and rows past it mean nothing.
# - The second (`pure_jax_token_dispatch`, `pure_jax_token_combine`) is what you wrote: a stable argsort, a gather, and
#   a gather in the other direction for the gradient.
# - With padding on, the combine's backward turns NaN into 0. That hides padding, and also a NaN that your model made.
#   This is why you read nothing instead of repairing something.
#
# ## Bug museum: a permutation that was none
#
# A permutation's gradient is the inverse permutation, and `argsort` gives the inverse. A JAX code base had a sort with
# this rule, and one day called it with `order // K` to save a copy of x (modelled on AI-Hypercomputer/maxtext, commit
# fd2ff2b03). The forward pass was right. The exhibit:


# %%
def museum_permute(x, expert_ids):
    top_k = expert_ids.shape[1]
    order = jnp.argsort(expert_ids.reshape(-1), stable=True)

    @jax.custom_vjp
    def sort(x, index):
        return x[index]

    def backward(index, d_rows):
        return d_rows[jnp.argsort(index)][::top_k], None

    sort.defvjp(lambda x, index: (sort(x, index), index), backward)
    return sort(x, order // top_k)


for picks in (1, 2):
    museum_ids = jnp.asarray(np.argsort(np.random.default_rng(11).normal(size=(4, 3)), axis=-1)[:, :picks])
    rows, pull_back = jax.vjp(
        lambda x, museum_ids=museum_ids: museum_permute(x, museum_ids), jnp.ones((4, 1))
    )
    print(
        f"{picks} picks: {len(rows)} rows, gradient of their sum {rounded(pull_back(jnp.ones_like(rows))[0])[:2]} ..."
    )

# %% [markdown]
# Nudge a token by 1 and with two picks two rows move by 1, so their sum moves by 2. A finite difference finds this in
# one line; a look at the loss curve does not, since training goes on with gradients that point roughly the right way.
#
# ### Question 04.q4
#
# When is the exhibit's gradient right?
#
# **a** when all experts get the same number of rows · **b** when each token has one pick · **c** never

# %%
quiz(
    "04.q4",
    ### BEGIN ANSWER
    "b",
    ### END ANSWER
)

# %% [markdown]
# ## What changed in the package
#
# `moe_course/grouping.py` is now yours to read. It differs from what you wrote in four places:
#
# - No sort. The rank of a slot is counted in blocks of 32: slots of the same expert in earlier blocks, from a table,
#   plus equal ids before it in its own block. Your running sum of one-hot columns writes T K E numbers; this writes a
#   thirty-second of that.
# - `combine` has a derivative of its own, so that its gradient to the rows is a gather, as 04.5's is.
# - Offsets count rows, never elements, and stop at 2³¹ - 1. 524,288 rows of width 7,168 are 3.8 billion elements; three
#   public kernels went negative there (NVIDIA/TransformerEngine #2907, pytorch/torchtitan #3969, pytorch/ao #4201).
# - `weights_of_rows` moves the weights to the rows, for experts on other devices (chapter 07).
#
# ## Further reading
#
# - MegaBlocks, arXiv 2211.15841: dropless MoE as block-sparse products; the permutation with padding.
# - Tutel, arXiv 2206.03382: dispatch and combine as sparse kernels in place of einsum.
# - ScatterMoE, arXiv 2403.08245: the gather fused into the product, so that no padded copy exists.
# - GShard, arXiv 2006.16668: the einsum form, with a capacity; what "ragged" is the opposite of.
#
# Next: 05, where the rows you sorted are multiplied.
