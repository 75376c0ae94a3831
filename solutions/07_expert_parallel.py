# %% [markdown]
# # 07 Expert parallelism
#
# A layer of DeepSeek-V3 has 256 experts, and a token picks eight. Put 32 experts on each of eight GPUs. To how many of
# the GPUs does a token travel? And how many gigabytes must a GPU keep free for the tokens that others may send it, so
# that none is ever turned away? There are 24,576 tokens on each GPU, of 7,168 numbers in bfloat16. Write down two
# numbers.
#
# Until now every expert was here. From now on a rank (one device of the expert axis) owns some of the experts, tokens
# travel to them, answers travel back. This is where MoE training spends its communication, and where wrong offsets go
# unseen for weeks, since a model trains on misplaced rows too, a little worse.
#
# You will be able to
#
# - write the exchange three ways: padded blocks, ragged chunks, each rank once,
# - predict the bytes, and read them out of the compiled program,
# - say what a buffer costs that never drops, and run without one and without dropping,
# - prove for every step that no token was lost,
# - name TE's argument for each of ours.
#
# Nine exercises, about two hours. The eight ranks are simulated: shares of one CPU. What they compute is what eight GPUs
# would compute; how fast says nothing.

# %%
from moe_course.environment import setup

status = setup(8, platform="cpu")

# %%
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from moe_course.dispatch import DispatchPlan, dispatch, ledger
from moe_course.dispatch.exchange import emulate_ragged_all_to_all, plan_exchange, route_of_rank
from moe_course.dispatch.plan import bucket_capacity, worst_case_capacity
from moe_course.grouping import group_by_expert, permute
from moe_course.lessons import check, plots, predict, quiz, rounded, yours
from moe_course.lessons.widgets import explore
from moe_course.parallel import MeshConfig, make_mesh
from moe_course.routing import RouterConfig, Routing, route

# %% [markdown]
# ## Who owns what
#
# Eight ranks, 32 experts, 32 tokens on each rank, four picks. Rank r owns the four neighbours 4 r to 4 r + 3, in
# general E/R of them. All ranks run the same program on their own arrays: `jax.shard_map` cuts the first dimension of
# every argument over the ranks. Inside, `lax.axis_index("expert")` says which rank this is.

# %%
R, E, K, T, D, F = 8, 32, 4, 32, 16, 16  # ranks, experts, picks, tokens of a rank, width, width of an expert
mesh = make_mesh(MeshConfig(data=1, fsdp=1, expert=R))
on_ranks = partial(jax.shard_map, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))

rng = np.random.default_rng(7)
topics = rng.normal(size=(R, 1, E))  # each rank reads another text, so it favours other experts
logits = jnp.asarray(rng.normal(size=(R, T, E)) + topics + rng.normal(size=E), jnp.float32).reshape(R * T, E)
picked = jax.jit(route, static_argnames="config")(logits, config=RouterConfig(E, K))
ids, weights = picked.expert_ids, picked.weights
x = jnp.asarray(rng.normal(size=(R * T, D)), jnp.float32)

who_am_i = jax.jit(on_ranks(lambda ids: jnp.array([lax.axis_index("expert"), len(ids)])))
for rank, tokens in who_am_i(ids).reshape(R, 2).tolist()[:3]:
    print(f"rank {rank} sees {tokens} tokens")

# %% [markdown]
# ### Question 07.q1
#
# What crosses the network because experts live elsewhere?
#
# **a** weights, to wherever their tokens are · **b** tokens and answers, and their gradients · **c** gradients of the
# expert weights, to be added up over the expert axis

# %%
quiz(
    "07.q1",
    ### BEGIN ANSWER
    "b",
    ### END ANSWER
)

# %% [markdown]
# ## Exercise 07.1: the send matrix
#
# Who has how much for whom. · difficulty ●● · 10 minutes · used again in 10, 12
#
# Everything in this chapter follows from one small table: row s, column r holds the number of token copies that rank s
# has for rank r. By hand, two ranks with two tokens each, four experts, so rank 0 owns experts 0 and 1. Rank 0 picks
# [0, 3] and [1, 0], rank 1 picks [2, 3], and its other token is padding, [4, 4]. The table is [[3, 1], [0, 2]]: the
# diagonal stays at home and is counted all the same, since it takes a place in the buffer like the rest.

# %%
hand_ids = jnp.array([[[0, 3], [1, 0]], [[2, 3], [4, 4]]])
print("picks of rank 0", hand_ids[0].tolist(), " of rank 1", hand_ids[1].tolist())


# %%
def send_matrix(expert_ids, num_experts, ranks):
    """How many token copies each rank has for each rank.

    Args:
      expert_ids: [R, T, K] int32, the picks of each rank's tokens; E for padding.
      num_experts: E, a multiple of R. Rank r owns experts r E/R to (r + 1) E/R - 1.
      ranks: R.

    Returns: [R, R] integer: row = sender, column = receiver.
    """
    ### BEGIN SOLUTION
    owner = expert_ids // (num_experts // ranks)  # E // (E/R) is R: nobody
    return (owner[..., None] == jnp.arange(ranks)).sum(axis=(1, 2))
    ### END SOLUTION


check("07.1", send_matrix)  # stuck? hint("07.1"), up to four times


# %%
def package_matrix(expert_ids, num_experts, ranks):
    count = jax.vmap(lambda ids: group_by_expert(ids, num_experts).load)
    return count(expert_ids).reshape(ranks, ranks, -1).sum(2)


matrix = np.asarray(yours("07.1", package_matrix)(ids.reshape(R, T, K), E, R))
asked = matrix.sum(0)
fig, (left, right) = plots.figure(8.0, 3.3, columns=2)
left.imshow(matrix, cmap="Blues", vmin=0, vmax=matrix.max() * 1.4)
for s, r in np.ndindex(matrix.shape):
    left.text(r, s, str(matrix[s, r]), ha="center", va="center", fontsize=9)
left.set(xlabel="receiver", ylabel="sender", xticks=range(R), yticks=range(R))
right.barh(range(R), asked, color=[plots.expert_color(r) for r in range(R)], height=0.7)
right.axvline(T * K, color=plots.INK, lw=1, ls="--")
right.annotate(
    "fair share", (T * K, -0.75), xytext=(4, 0), textcoords="offset points", fontsize=9, va="center"
)
right.invert_yaxis()
right.set(xlabel="copies for each receiver", ylabel="receiver", yticks=range(R), ylim=(R - 0.4, -1.1))
plots.show(
    fig,
    f"The busiest rank is asked for {asked.max() / (T * K):.1f} times its share, the busiest pair moves "
    f"{matrix.max() / matrix.mean():.1f} times the mean",
)

# %% [markdown]
# ## Padded blocks
#
# `lax.all_to_all` is a transpose whose halves live on different ranks. Each rank holds one block for every rank; after
# it, one block from every rank. Below, block r of rank s holds the number 10 s + r.

# %%
labels = jnp.asarray(10 * np.arange(R)[:, None] + np.arange(R), jnp.int32).reshape(-1)
swapped = jax.jit(on_ranks(lambda blocks: lax.all_to_all(blocks, "expert", 0, 0)))(labels)
print("rank 2 has ", labels.reshape(R, R)[2].tolist())
print("rank 2 gets", swapped.reshape(R, R)[2].tolist())

# %% [markdown]
# Blocks have one size, since shapes are known before the routing is. Call it `pair`: the rows of a block. A copy that
# finds its block full must not spill into the next one: a public run did just that, and its first loss was NaN
# (marin-community/marin #4312).
#
# ## Exercise 07.2: padded, there
#
# Fill the blocks and exchange them. · difficulty ●●● · 20 minutes · used again in 12
#
# By hand, two ranks, pair 2, one pick, tokens of one number. Rank 0 has tokens 1, 2, 3, all for rank 1: the third finds
# its block full and is dropped. Rank 1 has 4, 5, 6 for ranks 0, 1, 1.
#
# | | sends to rank 0 | sends to rank 1 | `place` of its tokens |
# |---|---|---|---|
# | rank 0 | 0, 0 | 1, 2 | 2, 3, 4 |
# | rank 1 | 4, 0 | 5, 6 | 0, 2, 3 |
#
# So rank 0 receives blocks [0, 0] and [4, 0], rank 1 receives [1, 2] and [5, 6]. Place 4 is R · pair, past the end:
# nowhere. Your function runs on one rank, inside `shard_map`; the axis is called `"expert"`.


# %%
def there(x, owner, ranks, pair):
    """One rank's part of the padded exchange.

    Args:
      x: [T, D], this rank's tokens. Padding may hold NaN.
      owner: [T, K] int32, the rank that each copy goes to; R for nowhere.
      ranks: R.
      pair: rows of a block, a Python int.

    Returns: (received, place).
      received: [R, pair, D]. Block s: the copies that rank s sent here, in its slot order t K + k, then zeros.
      place: [T, K] integer. Where this rank put each copy in its R * pair rows, block r for rank r: owner * pair + n
        for the nth copy (from 0) for that owner, and R * pair for copies without an owner or without room.
    """
    ### BEGIN SOLUTION
    flat = owner.reshape(-1)
    member = (flat[:, None] == jnp.arange(ranks)).astype(jnp.int32)
    nth = ((jnp.cumsum(member, axis=0) - member) * member).sum(axis=1)
    place = jnp.where((flat < ranks) & (nth < pair), flat * pair + nth, ranks * pair)
    copies = jnp.repeat(x, owner.shape[1], axis=0)
    send = jnp.zeros((ranks * pair, x.shape[1]), x.dtype).at[place].set(copies, mode="drop")
    received = lax.all_to_all(send.reshape(ranks, pair, -1), "expert", 0, 0)
    return received, place.reshape(owner.shape)
    ### END SOLUTION


check("07.2", there)  # stuck? hint("07.2")

# %% [markdown]
# ## Exercise 07.3: padded, back
#
# Answers go home. · difficulty ●● · 10 minutes · used again in 12
#
# A transpose is its own inverse, so the same exchange brings the answers back to the very places that you filled. Say
# every answer above is ten times its token: rank 0's home buffer is [0, 0, 10, 20] and its places 2, 3, 4 give 10, 20
# and, for the dropped token, 0. Answers arrive weighted: with K picks you add K of them, in float32.

# %%
again = jax.jit(on_ranks(lambda blocks: lax.all_to_all(blocks, "expert", 0, 0)))(swapped)
print("twice, rank 2 has", again.reshape(R, R)[2].tolist())


# %%
def back(answers, place):
    """One rank's part of the way back.

    Args:
      answers: [R, pair, D], float32 or bfloat16. Block s: the answers to what rank s sent here; rows that held no
        copy may hold anything, NaN included.
      place: [T, K] int32, from the way there.

    Returns: [T, D] float32, the sum of each token's answers; a copy that was not sent adds 0.
    """
    ### BEGIN SOLUTION
    home = lax.all_to_all(answers, "expert", 0, 0).reshape(-1, answers.shape[-1])
    copies = home.at[place].get(mode="fill", fill_value=0)
    return copies.astype(jnp.float32).sum(axis=1)
    ### END SOLUTION


check("07.3", back)  # stuck? hint("07.3")


# %%
def package_there(x, owner, ranks, pair):
    groups = group_by_expert(owner, ranks)
    starts = jnp.cumsum(groups.load) - groups.load
    nth = groups.row_of_slot - starts[jnp.minimum(owner, ranks - 1)]
    place = jnp.where((owner < ranks) & (nth < pair), owner * pair + nth, ranks * pair)
    copies = jnp.repeat(x, owner.shape[1], axis=0)
    send = jnp.zeros((ranks * pair, x.shape[1]), x.dtype).at[place.reshape(-1)].set(copies, mode="drop")
    return lax.all_to_all(send.reshape(ranks, pair, -1), "expert", 0, 0), place


def package_back(answers, place):
    home = lax.all_to_all(answers, "expert", 0, 0).reshape(-1, answers.shape[-1])
    return home.at[place].get(mode="fill", fill_value=0).astype(jnp.float32).sum(axis=1)


go, come = yours("07.2", package_there), yours("07.3", package_back)

# %% [markdown]
# ## A layer over eight ranks
#
# A row on the wire must say more than its token: which expert it wants and how much the answer weighs. They ride along
# as columns. Unused rows are zeros, so experts are numbered from 1 on the wire: 0 is nobody. The receiver treats what
# arrives as a batch of tokens of its own and runs a MoE layer on it. (Chapter 06's grouped one belongs there. This masked
# one computes the same and compiles in a third of the time, which in a notebook counts.)


# %%
def moe(x, expert_ids, weights, gate_up, down):
    """Chapter 06's layer in few words: every expert multiplies every row, and its share of a row is mostly 0."""
    experts = jnp.arange(gate_up.shape[0])  # those of other ranks are not among them
    picks = expert_ids[:, :, None] == experts
    share = jnp.where(picks, weights[:, :, None], 0).sum(axis=1)
    gate, up = jnp.split(jnp.einsum("td,edf->tef", x, gate_up), 2, axis=-1)
    return jnp.einsum("tef,efd,te->td", jax.nn.silu(gate) * up, down, share)


def wire(x, ids, weights):
    return jnp.concatenate([x, (ids + 1).astype(jnp.float32), weights], axis=1)


def serve(received, k, gate_up, down):
    """Answer what arrived: rows of a token, k expert numbers, k weights."""
    tokens, numbers, weights = jnp.split(received.reshape(-1, D + 2 * k), [D, D + k], axis=1)
    local = numbers.astype(jnp.int32) - 1 - lax.axis_index("expert") * gate_up.shape[0]
    return moe(tokens, local, weights, gate_up, down).reshape(received.shape[0], -1, D)


def padded_layer(x, ids, weights, gate_up, down, pair):
    x, ids, weights = (
        jnp.repeat(x, K, axis=0),
        ids.reshape(-1, 1),
        weights.reshape(-1, 1),
    )  # a row for each copy
    received, place = go(wire(x, ids, weights), ids // gate_up.shape[0], R, pair)
    return come(serve(received, 1, gate_up, down), place).reshape(-1, K, D).sum(axis=1)


gate_up = jnp.asarray(rng.normal(size=(E, D, 2 * F)) / 4, jnp.float32)
down = jnp.asarray(rng.normal(size=(E, F, D)) / 4, jnp.float32)
probe = jnp.asarray(rng.normal(size=(R * T, D)), jnp.float32)


def value_and_gradients(layer):
    def loss(x, weights, gate_up, down):
        y = layer(x, ids, weights, gate_up, down)
        return (y * probe).sum(), y

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
    (_, y), gradients = step(x, weights, gate_up, down)
    return {"output": y, **dict(zip(("d x", "d weights", "d gate_up", "d down"), gradients, strict=True))}


def compare(ours, right):
    for name, value in right.items():
        error = jnp.abs(ours[name] - value).max() / jnp.abs(value).max()
        print(f"{name:<10} equal to one device up to rounding: {bool(error < 64 * 2**-23)}")


pair = int(matrix.max())
one_device = value_and_gradients(moe)
compare(value_and_gradients(on_ranks(partial(padded_layer, pair=pair))), one_device)
print("rows of a block:", pair)

# %% [markdown]
# The expert weights were cut over the axis with everything else: each rank held its four experts, and the gradient of
# each came out whole, since all tokens for an expert come to its rank. Keep this comparison in mind: values, router
# gradients and expert gradients against one device is the test that finds the three exhibits at the end.
#
# ## Bytes
#
# A compiled program has its collectives written out, with shapes. Nothing is hidden, so nothing need be believed: read
# it. Predict the bytes first. A forward pass has two all-to-alls, of float32 here: R · pair rows there, each a token, a
# number and a weight; R · pair rows back, each a token. The block for itself, one of R, is counted; it crosses no wire.


# %%
def wire_bytes(compiled):
    """Bytes that one device gets from its collectives, read from the compiled program."""
    calls = re.findall(r"= (\(.*?\)|\S+) (?:all-to-all|all-gather|all-reduce)\(", compiled.as_text())
    shapes = [dims for call in calls for dims in re.findall(r"[fsu]32\[([\d,]*)\]", call)]
    return sum(4 * math.prod(int(n) for n in dims.split(",") if n) for dims in shapes)


arrays = x, ids, weights, gate_up, down
padded = jax.jit(on_ranks(partial(padded_layer, pair=pair))).lower(*arrays).compile()
predict(
    "bytes of a forward pass, for each token",
    ### BEGIN ANSWER
    R * pair * ((D + 2) + D) * 4 / T,
    ### END ANSWER
    measured=wire_bytes(padded) / T,
    unit="bytes",
)
predict(
    "rows of the blocks, over the copies in them",
    ### BEGIN ANSWER
    pair * R / (T * K),
    ### END ANSWER
    measured=R * R * pair / matrix.sum(),
    within=1e-3,
)

# %% [markdown]
# ### Question 07.q2
#
# What decides how many rows the padded blocks need so that nothing is dropped?
#
# **a** the mean over all pairs · **b** the receiver that is asked for most · **c** the pair that moves most

# %%
quiz(
    "07.q2",
    ### BEGIN ANSWER
    "c",
    ### END ANSWER
)

# %% [markdown]
# ## How large a buffer
#
# In the worst case all ranks send all they have to one. A buffer for that drops nothing, ever. Six sequences of 4,096
# tokens on each GPU, as in a run that NVIDIA published, are 24,576. Here is the second number from the top, read from a
# program compiled for DeepSeek-V3's shapes, each block as large as all copies of a rank. It is compiled and never run:
# no such memory is touched.

# %%
shapes = (
    jax.ShapeDtypeStruct((R * 24_576, 7_168), jnp.bfloat16),
    jax.ShapeDtypeStruct((R * 24_576, 8), jnp.int32),
)
huge = jax.jit(on_ranks(partial(package_there, ranks=R, pair=24_576 * 8))).lower(*shapes).compile()
predict(
    "gigabytes that one rank receives into, worst case",
    ### BEGIN ANSWER
    8 * 24_576 * 8 * 7_168 * 2 / 1e9,
    ### END ANSWER
    measured=huge.memory_analysis().output_size_in_bytes / 1e9,
    unit="GB",
    within=0.001,
)

# %% [markdown]
# More than a tenth of a GB200's memory, for one buffer of one layer, and the hidden rows and the answers come on top.
# Over 64 ranks of 4,096 tokens the compiler asks for 64.6 GB of temporaries for *one* layer, forward and backward, with
# TE's worst-case default, and for 4.67 GB at twice the balanced need (TE 2.20.2 compiled for 64 GB200 on a machine with
# none; nothing ran, and chapter 09 shows how).
#
# So everyone bounds the buffer. If all ranks get the same, each receives T K rows; a **capacity factor** multiplies that
# balanced need. Which leaves the question what happens when a rank is asked for more.
#
# ## Exercise 07.4: the bucket
#
# The rule for the size. · difficulty ●● · 10 minutes · used again in 10, 12
#
# Ours: start at `factor` times the balanced need, and whenever a step would overflow, double. Never above the worst
# case, where nothing can overflow; always a multiple of R, so that padded blocks divide it. By hand: 5 tokens, 3 picks,
# 4 ranks, 64 experts. Balanced is 15, so at factor 1 bucket 0 has 16 rows, bucket 1 has 32, bucket 2 has 60, and bucket
# 3 too: the worst case is 4 ranks times 15 copies. With one expert on each rank it would be 4 times 5: no token has two
# copies for one expert.

# %%
for experts in (64, 4):
    print(f"worst case with {experts} experts: {worst_case_capacity(5, 3, experts, 4)} rows")


# %%
def receive_rows(bucket, factor, tokens, top_k, num_experts, ranks):
    """Rows of a receive buffer.

    Args:
      bucket: 0, 1, 2, ...
      factor: at least 1. Bucket 0 holds factor times the balanced need, each further bucket twice as much.
      tokens: T, tokens of a rank.
      top_k, num_experts, ranks: K, E, R.

    Returns: a Python int, a multiple of R, rounded up; never above what the worst routing can ask of a rank.
    """
    ### BEGIN SOLUTION
    rows = ranks * math.ceil(factor * 2**bucket * tokens * top_k / ranks)
    return min(rows, ranks * tokens * min(top_k, num_experts // ranks))
    ### END SOLUTION


check("07.4", receive_rows)  # stuck? hint("07.4")

# %%
rows_in = yours("07.4", bucket_capacity)
sizes = {
    "balanced": rows_in(0, 1.0, 24_576, 8, 256, 8),
    "factor 2": rows_in(0, 2.0, 24_576, 8, 256, 8),
    "worst case": rows_in(9, 2.0, 24_576, 8, 256, 8),
}
fig, ax = plots.figure(7.0, 1.9)
gigabytes = [rows * 7_168 * 2 / 1e9 for rows in sizes.values()]
ax.barh(list(sizes), gigabytes, color=[plots.expert_color(e) for e in (2, 0, 1)], height=0.6)
for y, (rows, size) in enumerate(zip(sizes.values(), gigabytes, strict=True)):
    ax.annotate(
        f"{size:.1f} GB, {rows:,} rows", (size, y), xytext=(4, 0), textcoords="offset points", va="center"
    )
ax.invert_yaxis()
ax.set(xlabel="one receive buffer, GB (8 ranks, 24,576 tokens each, 7,168 × bfloat16)", xlim=(0, 33))
plots.show(fig, "Room for the worst case is eight times room for a balanced one")

# %% [markdown]
# ## Dropless, verified
#
# NVIDIA's dropless DeepSeek-V3 run with JAX and TE (blog of 14 September 2026) takes factor 2. Every 20 steps the host
# reads how many rows were asked for, and stops the run if there were too many (MaxText's setting
# `te_ep_overflow_check_every_n_steps`). Why not at every step? The host would wait for the device, and the queue of work
# would run dry each time. So "dropless" there means: looked at every 20 steps, and not seen to drop. TE counts demand
# before it drops, so the number is honest; between two looks nobody looks.
#
# ### Question 07.q3
#
# A run checks every 20 steps and is set to drop what does not fit. At step 47 one rank is asked for 2.3 times the
# balanced need, at step 48 all is calm again. What does the check at step 60 say?
#
# **a** 2.3, since the counter keeps what was asked for · **b** nothing: that step's demand fits · **c** it cannot run, the
# device has trapped

# %%
quiz(
    "07.q3",
    ### BEGIN ANSWER
    "b",
    ### END ANSWER
)

# %% [markdown]
# ## Exercise 07.5: all or none
#
# The step that changes nothing. · difficulty ●● · 10 minutes · used again in 09, 12
#
# Our way needs no wait. The step itself compares demand with capacity, on the device. If any rank was short, it returns
# the state *it was given* and raises a flag, which turns the steps already queued behind it into steps that do nothing.
# The host reads the flag one step late, and gives the same batch to the program of the next bucket. Two traps. What
# overflowed gives a new state that means nothing and may be NaN. And overflow on one rank spoils the gradients of all, so
# all must decide alike. By hand: demand 3, 11, 0, 7 and capacity 10: all four keep the old state, and all four say so.


# %%
def all_or_none(state, new_state, demand, capacity):
    """One rank's part of the decision, inside shard_map over "expert".

    Args:
      state: [n] float32, this rank's parameters before the step.
      new_state: [n] float32, after it. Meaningless, NaN perhaps, if any rank was asked for more than its capacity.
      demand: [] int32, rows that this rank was asked for.
      capacity: rows that every rank has room for, a Python int.

    Returns: (the state to go on with [n], overflow: [] boolean, the same on every rank).
    """
    ### BEGIN SOLUTION
    overflow = lax.pmax(demand, "expert") > capacity
    return jnp.where(overflow, state, new_state), overflow
    ### END SOLUTION


check("07.5", all_or_none)  # stuck? hint("07.5")

# %% [markdown]
# Two runs over the same 200 steps, whose router drifts and twice goes wild (invented demand, not a model's). One has
# factor 2 and looks every 20 steps. The other starts at factor 1.25, obeys the bucket rule, and goes back a bucket after
# 64 calm steps, as the package's train loop does.

# %%
steps = np.arange(200)
drift = 1.0 + 0.1 * steps / 200 + 0.04 * np.random.default_rng(3).normal(size=200)
burst = 1.3 * np.exp(-(((steps - 47) / 2.5) ** 2)) + 0.6 * np.exp(-(((steps - 151) / 2) ** 2))
balanced = 24_576 * 8
demand = np.ceil(balanced * (drift + burst)).astype(int)


def rows_of_bucket(bucket, factor=1.25):
    return rows_in(bucket, factor, 24_576, 8, 256, 8)


bucket, room, again = 0, [], 0
for step, asked_for in enumerate(demand):
    while rows_of_bucket(bucket) < asked_for:
        bucket, again = bucket + 1, again + 1  # the step changed nothing: the same batch once more
    room.append(rows_of_bucket(bucket))
    if bucket and step >= 64 and demand[step - 63 : step + 1].max() <= rows_of_bucket(bucket - 1):
        bucket -= 1
over = demand > rows_of_bucket(0, 2.0)
blue, red = plots.expert_color(0), plots.expert_color(1)
fig, ax = plots.figure(7.5, 3.0)
ax.step(steps, np.array(room) / balanced, where="mid", color=blue, lw=2.2)
ax.axhline(2.0, color=red, lw=1.6, ls="--")
ax.scatter(steps[~over], demand[~over] / balanced, s=8, color=plots.INK)
ax.scatter(steps[over], demand[over] / balanced, s=34, color=red, marker="x")
ax.vlines(steps[20::20], 0.8, 0.88, color=red, lw=2)
ax.annotate("capacity, bucket rule", (62, 2.54), color=blue)
ax.annotate("capacity, factor 2", (1, 2.04), color=red)
ax.annotate("looks", (22, 0.8), color=red, fontsize=9)
ax.set(xlabel="step", ylabel="rows / balanced need", ylim=(0.78, 2.75), yticks=[1, 1.5, 2, 2.5])
plots.show(
    fig,
    f"Factor 2 drops rows in {over.sum()} steps, unseen; the bucket rule repeats {again} steps and drops none",
)
print("overflows that the looks saw:", int(over[20::20].sum()))
print("programs that the bucket rule compiled:", len(set(room)))

# %% [markdown]
# ## Ragged chunks
#
# Blocks are as large as the busiest pair. `lax.ragged_all_to_all` moves chunks of any size instead: each rank's rows
# lie in one piece, sorted by receiver, and land in one dense buffer. The price is four small arrays of offsets and
# sizes, and an all-gather of the R² counts before anything moves, so that every rank knows the whole table. Three ranks
# and the table [[2, 1, 0], [0, 3, 1], [4, 0, 2]]; a row is named sender>receiver:

# %%
hand = np.array([[2, 1, 0], [0, 3, 1], [4, 0, 2]])
operands = [[f"{s}>{r}" for r in range(3) for _ in range(hand[s, r])] for s in range(3)]
for s in range(3):
    print(f"rank {s} sends", *operands[s])
for r in range(3):
    print(f"rank {r} gets ", *(name for rows in operands for name in rows if name.endswith(str(r))))

# %% [markdown]
# ## Exercise 07.6: ragged, there
#
# Four arguments. · difficulty ●●●● · 25 minutes · used again in 12
#
# What rank 2 tells the exchange: its chunks begin at rows 0, 4, 4 of what it sends (`input_offsets`), have 4, 0, 2 rows
# (`send_sizes`), land at rows 2, -, 1 *of their receivers' buffers* (`output_offsets`), and it expects 0, 1, 2 rows from
# ranks 0, 1, 2 (`recv_sizes`). Buffers fill sender by sender, lowest first.
#
# Then with a limit: what does not fit is cut, last sender first. With capacity 5, rank 2's chunk for rank 0 shrinks from
# 4 rows to 3, in `send_sizes` of rank 2 and in `recv_sizes` of rank 0. Its other chunk still begins at row 4: a chunk is
# taken from where it lies, however much of the one before was cut.


# %%
def ragged_there(sizes, rank, capacity):
    """What one rank tells ragged_all_to_all.

    Args:
      sizes: [R, R] int32, rows that each sender (row) has for each receiver (column), on the device; all ranks know it.
      rank: [] int32, the rank that asks, on the device.
      capacity: rows of every receive buffer, a Python int.

    Returns: (input_offsets, send_sizes, output_offsets, recv_sizes), [R] integer each. The offset of a chunk without
      rows may be anything.
    """
    ### BEGIN SOLUTION
    starts = jnp.cumsum(sizes, axis=1) - sizes
    ends = jnp.minimum(jnp.cumsum(sizes, axis=0), capacity)
    kept = jnp.diff(ends, axis=0, prepend=0)
    return starts[rank], kept[rank], (ends - kept)[rank], kept[:, rank]
    ### END SOLUTION


check("07.6", ragged_there)  # stuck? hint("07.6")

# %% [markdown]
# ## Exercise 07.7: ragged, back
#
# The same chunks, the other way. · difficulty ●● · 10 minutes · used again in 12
#
# Back, a rank sends what it received, from where it landed to where it was taken from. So the way back, like the
# gradient of the way there, is the same operation with other arguments. By hand, rank 0 above: it received 2 rows from
# rank 0 at row 0 and 4 rows from rank 2 at row 2. It sends 2, 0, 4 rows, taken from rows 0, -, 2; they land at rows 0,
# -, 0 of their owners; and it expects 2, 1, 0 rows, its own that come home.


# %%
def ragged_back(input_offsets, send_sizes, output_offsets, rank):
    """What one rank tells ragged_all_to_all on the way back.

    Args:
      input_offsets, send_sizes, output_offsets: [R, R] int32: row s is what rank s told it on the way there, cut sizes
        where they were cut.
      rank: [] int32, the rank that asks, on the device.

    Returns: (input_offsets, send_sizes, output_offsets, recv_sizes) of the way back, [R] integer each.
    """
    ### BEGIN SOLUTION
    return output_offsets[:, rank], send_sizes[:, rank], input_offsets[:, rank], send_sizes[rank]
    ### END SOLUTION


check("07.7", ragged_back)  # stuck? hint("07.7")

# %% [markdown]
# Now with real rows. XLA has no ragged all-to-all for CPUs, so the package has an emulation of the same contract, which
# gathers everything and keeps what was sent here: right results, absurd traffic. On a GPU the real one runs; the last
# lines below lower it for CUDA and look. (No GPU ran it here.)


# %%
def package_ragged(sizes, rank, capacity):
    c = route_of_rank(plan_exchange(sizes[:, :, None], capacity), rank).there
    return c.input_offsets, c.send_sizes, c.output_offsets, c.recv_sizes


def package_ragged_back(starts, sizes, lands, rank):
    return lands[:, rank], sizes[:, rank], starts[:, rank], sizes[rank]


capacity = int(asked.max())
sizes = jnp.asarray(matrix, jnp.int32)


def told(arguments):  # [R ranks, 4, R] -> four arrays for shard_map
    return [jnp.concatenate([a[i] for a in arguments]).astype(jnp.int32) for i in range(4)]


out = [yours("07.6", package_ragged)(sizes, r, capacity) for r in range(R)]
as_matrices = [jnp.stack([a[i] for a in out]) for i in range(3)]
home = [yours("07.7", package_ragged_back)(*as_matrices, r) for r in range(R)]


def move(rows, *arguments, num_rows, exchange=emulate_ragged_all_to_all):
    empty = lax.pcast(jnp.zeros((num_rows, rows.shape[1])), ("expert",), to="varying")
    return exchange(rows, empty, *arguments, axis_name="expert")


copies = jnp.repeat(x, K, axis=0)
in_order = jax.jit(on_ranks(lambda rows, ids: permute(rows, group_by_expert(ids, E))))(
    copies, ids.reshape(-1, 1)
)
send = jax.jit(on_ranks(partial(move, num_rows=capacity)))
arrived = send(in_order, *told(out))
returned = jax.jit(on_ranks(partial(move, num_rows=T * K)))(arrived, *told(home))
print("there and back, bit for bit:", bool((returned == in_order).all()))

real = jax.jit(on_ranks(partial(move, num_rows=capacity, exchange=lax.ragged_all_to_all)))
for_cuda = real.trace(in_order, *told(out)).lower(lowering_platforms=("cuda",)).as_text()
print("lowered for CUDA, the real operation is there:", "ragged_all_to_all" in for_cuda)

# %% [markdown]
# Its receive buffer has room for the busiest rank, and its size stands in the program for CUDA. Predict it.

# %%
call = next(line for line in for_cuda.splitlines() if "ragged_all_to_all" in line)
buffer_rows, width = map(int, re.search(r"-> tensor<(\d+)x(\d+)xf32>", call).groups())
predict(
    "bytes of the ragged receive buffer",
    ### BEGIN ANSWER
    asked.max() * D * 4,
    ### END ANSWER
    measured=buffer_rows * width * 4,
    unit="bytes",
)

# %%
busy = int(asked.argmax())
fig, ax = plots.figure(8.0, 2.4)
begin = 0
for s in range(R):
    color = plots.expert_color(s)
    ax.barh(1, matrix[s, busy], left=s * pair, color=color, height=0.7)
    ax.barh(
        1,
        pair - matrix[s, busy],
        left=s * pair + matrix[s, busy],
        color="none",
        edgecolor=color,
        hatch="////",
        height=0.7,
    )
    ax.barh(0, matrix[s, busy], left=begin, color=color, height=0.7)
    for y, first in enumerate((begin, s * pair)):
        ax.text(first + matrix[s, busy] / 2, y, str(s), ha="center", va="center", color="white", fontsize=9)
    begin += matrix[s, busy]
ax.set(
    yticks=[0, 1],
    yticklabels=["ragged", "padded"],
    xlabel="row of the busiest rank's receive buffer (colour and number: the sender; hatched: nothing)",
)
plots.show(
    fig, f"The busiest rank's {asked[busy]} rows: {R * pair} as blocks of {pair}, {asked[busy]} as chunks"
)

# %% [markdown]
# ## Playground
#
# Left, who sends what; right, what each rank is asked for, by sender, and how much its ragged buffer holds (dashed). Move
# the imbalance, the number of ranks and the factor. Ask the picture: which imbalance needs factor 2? With more ranks and
# the same tokens on each, does the busiest rank get better or worse? When do padded blocks need twice the ragged rows?

# %%
gumbel = np.random.default_rng(11).gumbel(size=(16, 64, 64))
popular = np.random.default_rng(12).normal(size=64) + np.random.default_rng(13).normal(size=(16, 1, 64))


def playground(imbalance, ranks, factor):
    chosen = np.argsort(-(gumbel[:ranks] + 2.5 * imbalance * popular[:ranks]), axis=-1)[..., :4]
    owner = chosen // (64 // ranks)
    table = (owner[..., None] == np.arange(ranks)).sum((1, 2))
    room = rows_in(0, factor, 64, 4, 64, ranks)
    fig, (left, right) = plots.figure(8.5, 3.3, columns=2)
    left.imshow(table, cmap="Blues", vmin=0, vmax=1.2 * table.max())
    left.set(xlabel="receiver", ylabel="sender", xticks=range(0, ranks, 2), yticks=range(0, ranks, 2))
    total = np.zeros(ranks)
    for s in range(ranks):
        right.barh(range(ranks), table[s], left=total, color=plots.expert_color(s), height=0.8)
        total += table[s]
    right.axvline(room, color=plots.INK, lw=1.5, ls="--")
    right.invert_yaxis()
    right.set(xlabel="rows asked for, by sender", ylabel="receiver", yticks=range(0, ranks, 2))
    over = int(np.maximum(total - room, 0).sum())
    verdict = f"{over} rows too many: next bucket" if over else "all fits"
    caption = (
        f"Busiest rank {total.max() / 256:.1f} times its share; padded blocks need "
        f"{ranks * table.max() / total.max():.1f} times the ragged rows; factor {factor:.2g}: {verdict}"
    )
    return fig, caption


explore(playground, imbalance=(0.0, 1.0, 0.4), ranks=[8, 4, 16, 2], factor=(1.0, 4.0, 2.0))

# %% [markdown]
# ## Exercise 07.8: each rank once
#
# Send a token once to a rank, however many of its experts are there. · difficulty ●●● · 15 minutes · used again in 10
#
# A token with picks on ranks 2, 0, 2 and 2 sends four copies, three of them the same numbers to the same place. Send one
# row to each distinct rank, with all the token's picks beside it; the receiver makes the copies, adds up its weighted
# answers and sends one row back. By hand, four picks, four ranks, R = 4 for padding: [2, 0, 2, 2] becomes [0, 2, 4, 4],
# [1, 3, 0, 2] becomes [0, 1, 2, 3], [4, 4, 3, 4] becomes [3, 4, 4, 4]. Two ranks only? Then two columns are enough.

# %%
hand_owner = np.array([[2, 0, 2, 2], [1, 3, 0, 2], [4, 4, 3, 4]])
print("ranks visited:", [np.unique(row[row < 4]).tolist() for row in hand_owner])


# %%
def distinct_ranks(owner, ranks):
    """The ranks that a token goes to, each once.

    Args:
      owner: [T, K] int32, the owner of each pick; R for no expert.
      ranks: R.

    Returns: [T, min(K, R)] integer: ascending, then R where there are fewer.
    """
    ### BEGIN SOLUTION
    here = (owner[:, :, None] == jnp.arange(ranks)).any(axis=1)
    some = jnp.sort(jnp.where(here, jnp.arange(ranks), ranks), axis=1)
    return some[:, : min(owner.shape[1], ranks)]
    ### END SOLUTION


check("07.8", distinct_ranks)  # stuck? hint("07.8")

# %% [markdown]
# How much does it save? With picks at random, a rank is missed by a token if all K picks are among the E - E/R experts of
# the others: C(E - E/R, K) of the C(E, K) ways. So a token visits R (1 - C(E - E/R, K) / C(E, K)) ranks. There is the
# first number from the top.


# %%
def package_distinct(owner, ranks):
    first = jnp.sort(owner, axis=1)
    again = jnp.pad(first[:, 1:] == first[:, :-1], ((0, 0), (1, 0)))
    return jnp.sort(jnp.where(again, ranks, first), axis=1)[:, : min(owner.shape[1], ranks)]


once = yours("07.8", package_distinct)
many = jnp.asarray(np.random.default_rng(8).random((8_192, 256)).argsort(axis=1)[:, :8], jnp.int32)
predict(
    "ranks that a token visits, 256 experts on 8 ranks, 8 picks",
    ### BEGIN ANSWER
    8 * (1 - math.comb(256 - 32, 8) / math.comb(256, 8)),
    ### END ANSWER
    measured=float((once(many // 32, 8) < 8).sum(axis=1).mean()),
    unit="ranks",
    within=0.01,
)

# %%
counts = [2, 4, 8, 16, 32, 64, 128, 256]
formula = [r * (1 - math.comb(256 - 256 // r, 8) / math.comb(256, 8)) for r in counts]
measured = [float((package_distinct(many[:2048] // (256 // r), r) < r).sum(axis=1).mean()) for r in counts]
fig, ax = plots.figure(7.0, 3.0)
ax.axhline(8, color=plots.INK, lw=1, ls="--")
ax.annotate("one row for each pick", (2, 8.15), fontsize=9)
ax.plot(counts, formula, color=plots.expert_color(0), lw=2.2)
ax.plot(counts, measured, color=plots.expert_color(0), lw=0, marker="o", ms=5)
for r, rows in zip(counts[1:6], formula[1:6], strict=True):
    ax.annotate(f"{rows:.2f}", (r, rows), xytext=(5, -12), textcoords="offset points", fontsize=9)
ax.set(
    xscale="log", xlabel="ranks (256 experts, 8 picks)", ylabel="rows for each token, each way", ylim=(0, 9.2)
)
ax.set_xticks(counts, [str(r) for r in counts])
ax.minorticks_off()
plots.show(
    fig,
    "Each rank once: a third saved over 8 ranks, four percent over 64 (line: formula, dots: random picks)",
)

# %% [markdown]
# Put it to work. Your padded exchange needs no change: it sends copies to owners, and the distinct ranks are owners. The
# receiver's layer needs none either: picks of other ranks are outside of 0 to E/R - 1, and get no row. So the
# deduplicated layer is *shorter* than the padded one.


# %%
def dedup_layer(x, ids, weights, gate_up, down, pair):
    received, place = go(wire(x, ids, weights), once(ids // gate_up.shape[0], R), R, pair)
    return come(serve(received, K, gate_up, down), place)


visits = np.asarray(once(ids // (E // R), R)).reshape(R, -1)
visit_matrix = np.stack([np.bincount(row, minlength=R + 1)[:R] for row in visits])
short = int(visit_matrix.max())
dedup = jax.jit(on_ranks(partial(dedup_layer, pair=short))).lower(*arrays).compile()
compare({"output": dedup(*arrays)}, {"output": one_device["output"]})
print(
    f"rows on the wire: {visit_matrix.sum()} for {matrix.sum()} copies; rows of a block: {short}, not {pair}"
)

# %%
predict(
    "bytes of a forward pass, for each token",
    ### BEGIN ANSWER
    R * short * ((D + 2 * K) + D) * 4 / T,
    ### END ANSWER
    measured=wire_bytes(dedup) / T,
    unit="bytes",
)

# %% [markdown]
# ### Once across nodes, then within
#
# Over 64 ranks dedup saves four percent, since eight picks land on nearly eight ranks. But ranks are not alike: eight of
# them share a node and a fast link, and between nodes the network is slow. So send a token once to each *node*, over the
# slow network, and let the rank that gets it pass it on to the ranks of its node: **hierarchical** dispatch. With N nodes
# of G ranks, R = N G, rows for each token and way are
#
# - across nodes: (N - 1)/N · N (1 - C(E - E/N, K) / C(E, K)), the same formula with nodes for ranks, less the own node,
# - within nodes: at most R (1 - C(E - E/R, K) / C(E, K)), as before,
#
# and a row is 2 D bytes in bfloat16. Eight nodes of eight, DeepSeek-V3's experts and width:


# %%
def visited(places):  # ranks, or nodes
    return places * (1 - math.comb(256 - 256 // places, 8) / math.comb(256, 8))


ways = {"a row for each pick": 8, "each rank once": visited(64), "each node once": visited(8)}
for name, rows in ways.items():
    rows = rows * 7 / 8  # one node of eight is its own
    print(f"{name:<20}{rows:.2f} rows across nodes for each token, {rows * 2 * 7.168:.0f} kB")

# %% [markdown]
# DeepSeek-V3 goes further and lets the router help: group-limited picks (chapter 02), with a node as group, bound the
# nodes of a token at four.
#
# ## Exercise 07.9: the books
#
# Was anything lost? · difficulty ●● · 10 minutes · used again in 12
#
# A **token ledger** counts copies at five stations, each where it happens, by other code than the rest: made by the
# router, sent, received, computed (rows that the experts walked), combined (answers added up). By hand, two ranks:
#
# | | by whom | | |
# |---|---|---|---|
# | made, sent, combined | sender | row = sender | [[3, 1], [0, 2]] |
# | received | receiver | row = *receiver* | [[3, 0], [1, 2]] |
# | computed | receiver | | [3, 3] |
#
# These books balance. Had rank 1 room for two rows only, its own second copy, last in line, would be cut: sent and
# combined [[3, 1], [0, 1]], received [[3, 0], [1, 1]], computed [3, 2]. They agree with one another and not with made,
# and one copy is dropped, from rank 1 for rank 1.


# %%
def audit(made, sent, received, computed, combined):
    """Compare the books of one exchange, pair by pair.

    Args:
      made, sent, combined: [R, R] int32, row = sender, column = receiver.
      received: [R, R] int32, row = receiver, column = sender.
      computed: [R] int32, by receiver.

    Returns: (dropped [R, R] integer: copies made and not combined, by sender and receiver;
      balanced: [] boolean, whether all five agree, for every pair).
    """
    ### BEGIN SOLUTION
    same = (made == sent) & (sent == received.T) & (combined == received.T)
    return made - combined, same.all() & (received.sum(axis=1) == computed).all()
    ### END SOLUTION


check("07.9", audit)  # stuck? hint("07.9")

# %% [markdown]
# Now for the package's dispatch, in one compiled program with room for 1.6 times the balanced need: once on a batch whose
# picks are uniform, once on yours. Its books are in `Dispatched.counts`, as each rank wrote them.


# %%
def package_audit(made, sent, received, computed, combined):
    same = (made == sent) & (sent == received.T) & (combined == received.T)
    return made - combined, same.all() & (received.sum(axis=1) == computed).all()


plan = DispatchPlan(E, R, 8 * round(1.6 * T * K / 8), "ragged")
send_away = jax.jit(partial(dispatch, plan=plan))
uniform = jnp.asarray(rng.random((R * T, E)).argsort(axis=1)[:, :K], jnp.int32)
for name, picks in (("uniform", uniform), ("yours", ids)):
    with jax.set_mesh(mesh):
        sent = send_away(x, Routing(picks, weights, None))
    written = [sent.counts[station] for station in ("made", "sent", "received")]
    dropped, balanced = yours("07.9", package_audit)(
        *written, sent.group_sizes.sum(1), sent.counts["combined"]
    )
    asks = f"{name:<8} asks for {int(sent.demand.max())} rows of {plan.capacity}"
    print(f"{asks}: balanced {bool(balanced)}, {int(dropped.sum())} dropped")
    print(f"{'':<8} the package: {ledger.check_pairs(ledger.pair_books(sent)) or 'all accounted for'}")

# %% [markdown]
# This is what "dropless, provably" means: at every step demand was at most the capacity and the five counts agree, or the
# step has changed nothing. A run of the package keeps the totals of every step and ends with an error if they differ.
#
# ### Question 07.q4
#
# Which fault do the books of 07.9 *not* show?
#
# **a** a copy that was dropped · **b** a copy of rank 3 that went to rank 5, not 4 · **c** two rows of a chunk, swapped

# %%
quiz(
    "07.q4",
    ### BEGIN ANSWER
    "c",
    ### END ANSWER
)

# %% [markdown]
# ## The Transformer Engine way
#
# TE's `transformer_engine.jax.ep` wraps NCCL's expert parallelism: one operation that sends each token once over the
# network and groups the rows by expert where they arrive. Our contract has its shapes, so that either can stand behind
# the same layer. N devices, C receive rows on each.
#
# | ours | TE 2.20.2 | differences |
# |---|---|---|
# | `DispatchPlan(num_experts=)` | `ep_bootstrap(num_experts=)` | once for each process, eagerly, inside the mesh |
# | `DispatchPlan(ranks=)` | the mesh's `ep` axis | at least 2 |
# | `DispatchPlan(capacity=)` | `recv_capacity_per_rank`, of `ep_bootstrap` and `ep_dispatch` | static, both |
# | devices, from the mesh | `ep_bootstrap(world_size=, rank=)` | None: the mesh's size, this process |
# | | `ep_bootstrap(max_num_sms=)` | 0 means 32 SMs for the transport |
# | tokens of a device, from `x` | `ep_bootstrap(max_tokens_per_rank=)` | an upper bound |
# | D, from `x` | `ep_bootstrap(hidden_dim=)` | |
# | K, from `expert_ids` | `EpLayerConfig(top_k=)` | one for all layers, unless XLA lends its communicator |
# | `group_by_expert(align=)` | `dispatch_output_per_expert_alignment` | 128 for MXFP8 products |
# | `x` [T, D], any float | `tokens` [..., H] | bfloat16 only |
# | `routing.expert_ids` [T, K] | `topk_idx` [..., K] | global ids, both |
# | `routing.weights` [T, K] | `topk_weights` [..., K] | float32 |
# | `.rows` [N C, D] | `recv_tokens` [N, C, H] | past the groups ours are 0, TE's **uninitialised** |
# | `.row_weights` [N C] | `recv_topk_weights` [N, C] | the same |
# | `.group_sizes` [N, E/R] | `token_counts` [N, E/R] | TE's with the padding of each group |
# | `.demand` [N] | `total_recv_tokens` [N, 1] | before any limit; TE's with padding |
# | demand above capacity | traps, or drops: `drop_on_overflow=True` | ours: the step changes nothing |
# | `.handle` | `handle_mem` [N, bytes] | opaque; combine and both backward passes need it |
# | `.counts` | | the ledger is ours alone |
# | `combine(rows, dispatched)` | `ep_combine(cfg, handle_mem, token_counts, expert_out, ...)` | unweighted, both |
# | T, from the handle | `ep_combine(..., num_local_tokens)` | static; despite its name the *global* number |
#
# **Not run here**: the calls, as text. They take global shapes and bring their own partitioning: no `shard_map` around
# them, `ep` innermost in the mesh, and one process for each GPU (JAX 0.11.2 or newer can lend TE its communicator).
#
# ```python
# from transformer_engine.jax import MeshResource
# from transformer_engine.jax.ep import EpLayerConfig, ep_bootstrap, ep_combine, ep_dispatch
# from transformer_engine.jax.sharding import global_shard_guard
#
# mesh = jax.make_mesh((2, 2), ("dp", "ep"))
# with mesh, global_shard_guard(MeshResource(dp_resource="dp", ep_resource="ep")):
#     ep_bootstrap(None, None, num_experts=E, max_tokens_per_rank=T // 4, recv_capacity_per_rank=C, hidden_dim=D)
#     cfg = EpLayerConfig(top_k=K, dispatch_output_per_expert_alignment=128)
#
#     @jax.jit
#     def layer(x, ids, weights, experts):  # x [T, D], cut as P(("dp", "ep"), None)
#         rows, row_weights, handle, sizes, demand = ep_dispatch(cfg, ids, x, weights, C)
#         y = run_experts(rows, sizes, experts)  # a shard_map of yours around grouped_dense
#         live = jnp.arange(C)[None] < sizes.sum(-1, keepdims=True)
#         y = jnp.where(live[..., None], y * row_weights[..., None].astype(y.dtype), 0)
#         return ep_combine(cfg, handle, sizes, y, x.shape[0]), demand
# ```
#
# It needs Hopper or newer, NCCL 2.30.4 or newer, and at least two GPUs; TE's own tests want four, with NVLink.
#
# ## Bug museum
#
# ### Exhibit 1: whose offset
#
# Modelled on marin-community/marin #4746 and #4867, where the fix came together with a comparison against another
# dispatcher. Two wrong ways to fill `output_offsets`, on three routings: where chunks land in the rank's *own*
# buffer; and where the *receiver's* chunk for this rank begins, which is what you get by passing round `input_offsets`.
# Sizes are right everywhere, so every book of 07.9 balances.

# %%
rows_named = jnp.arange(R * T * K, dtype=jnp.float32)[:, None] * jnp.ones((1, D))
routings = {
    "all at home": np.diag(np.full(R, T * K)),
    "balanced": np.full((R, R), T * K // R),
    "your batch": matrix,
}
print("in their place".ljust(20) + "".join(name.rjust(14) for name in routings))
for exhibit in ("own buffer", "receiver's rows"):
    shares = []
    for table in routings.values():
        table = jnp.asarray(table, jnp.int32)
        right = [package_ragged(table, r, capacity) for r in range(R)]
        before = jnp.cumsum(table, axis=0 if exhibit == "own buffer" else 1) - table
        wrong = [(a, b, before[:, r], d) for r, (a, b, _, d) in enumerate(right)]
        good, bad = send(rows_named, *told(right)), send(rows_named, *told(wrong))
        shares.append(f"{100 * float((good == bad).all(axis=1).mean()):.0f} %")
    print(exhibit.ljust(20) + "".join(share.rjust(14) for share in shares))

# %% [markdown]
# ### Question 07.q5
#
# Which test would have caught both?
#
# **a** a balanced batch, compared with one device · **b** a lopsided batch, compared with one device · **c** the books of
# a lopsided batch

# %%
quiz(
    "07.q5",
    ### BEGIN ANSWER
    "b",
    ### END ANSWER
)

# %% [markdown]
# ### Exhibit 2: times the axis size
#
# Expert gradients too large, or too small, by the number of ranks: databricks/megablocks #20, pytorch/torchtitan #1551,
# deepspeedai/DeepSpeed #5259. In JAX the shortest way there is a gradient taken *inside* `shard_map` with replication
# checking off (jax-ml/jax #3970). The loss is w² times the sum of 0, 1, ..., 7, at w = 2: its gradient is 4 · 28 = 112.


# %%
def museum_gradient(check_vma):
    def loss(w, data):
        return lax.psum((w**2 * data).sum(), "expert")

    inside = jax.shard_map(
        lambda w, data: jax.grad(loss)(w, data)[None],
        mesh=mesh,
        in_specs=(P(), P("expert")),
        out_specs=P("expert"),
        check_vma=check_vma,
    )
    return jax.jit(inside)(jnp.float32(2), jnp.arange(8.0)).tolist()


print("check_vma=False, rank by rank:", museum_gradient(False))
print("check_vma=True,  rank by rank:", museum_gradient(True))

# %% [markdown]
# Each rank has eight times its own part: added up, eight times too much; taken from one rank, anything. With checking on,
# JAX knows that w is the same everywhere and its gradient therefore a sum. Keep it on, and take gradients outside.
#
# ### Question 07.q6
#
# Expert gradients are eight times too large. Which training run looks healthy all the same?
#
# **a** plain gradient descent · **b** Adam without clipping · **c** one that compares its loss with one device before the
# first update

# %%
quiz(
    "07.q6",
    ### BEGIN ANSWER
    "b",
    ### END ANSWER
)

# %% [markdown]
# ### Exhibit 3: combined twice
#
# No public report: this one is ours, of a family that is easy to join. A deduplicated combine, where each rank has added
# up its weighted answers and sent one row. At home, the author adds a row for every *pick*, as the padded combine does.

# %%
answers = np.random.default_rng(13).normal(size=(6, 2))  # an answer for each pick, weighted
ranks_of = np.array([[0, 1], [2, 3], [1, 1], [0, 2], [3, 3], [1, 0]])
sums = np.zeros((6, 4))
np.add.at(sums, (np.arange(6)[:, None], ranks_of), answers)  # what each rank sends back, one number
right = sums.sum(axis=1)
exhibit = np.take_along_axis(sums, ranks_of, axis=1).sum(axis=1)
print("picks on ranks     ", ranks_of.tolist())
print("exhibit over right ", rounded(exhibit / right, 1))

# %% [markdown]
# ### Question 07.q7
#
# Which test finds it?
#
# **a** K = 1 · **b** one expert on each rank · **c** a token with two picks on one rank

# %%
quiz(
    "07.q7",
    ### BEGIN ANSWER
    "c",
    ### END ANSWER
)

# %% [markdown]
# ## What changed in the package
#
# `moe_course/dispatch/` is now yours to read. One contract, `dispatch` and `combine`; one file for each way of meeting
# it; one suite of tests for all.
#
# - `all_to_all.py` is your padded exchange, `ragged.py` your chunks, one for each expert rather than each rank: rows land
#   in expert order and nothing is sorted a second time. `all_gather.py` addresses nothing: every rank sees every token.
# - `hop.py` sends each owner once, over ragged chunks; `dedup.py` is one hop, to ranks, and `hierarchical.py` two, to
#   nodes and then to ranks (`MeshConfig(nodes=...)`).
# - `waves.py` cuts a batch in parts, so that one part may travel while another is computed; a test reads from the
#   compiled program that nothing forbids it, and that the shared expert waits for no exchange.
# - `exchange.py` has your four arguments, their way back, and a gradient which is that way back.
# - `plan.py` is your bucket rule; the loop that obeys it is in `train/loop.py`.
# - `ledger.py` keeps the books, and says in words which pair of ranks lost what.
# - `moe-course bench dispatch` reads the bytes of every dispatcher out of its compiled program, as you did.
#
# ## Further reading
#
# - GShard, arXiv 2006.16668, and Switch Transformers, arXiv 2101.03961: padded blocks, and dropping.
# - MegaBlocks, arXiv 2211.15841: dropless on one device. Tutel, arXiv 2206.03382: capacity that follows demand.
# - DeepSeek-V3, arXiv 2412.19437, sections 2.1.2 and 3.2: at most four nodes for each token, and DeepEP's kernels.
# - MegaScale-MoE, arXiv 2505.11432: hiding the exchange behind computation.
# - "Accelerating Dropless MoE Training in JAX with NVIDIA Transformer Engine", NVIDIA, 14 September 2026.
#
# Next: 08, where rows travel and are multiplied in eight bits.
