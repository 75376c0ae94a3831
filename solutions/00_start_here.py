# %% [markdown]
# # 00 Start here
#
# A little further down, a Mixture of Experts trains on eight devices while you watch. In eighty steps its router makes
# 163,840 copies of tokens, sends each to an expert on some device, and adds the answers up again where the token came
# from. How many of the copies get lost on the way? Training systems in daily use lose some, on purpose, and most print
# nothing about it. Write a number down.
#
# This course goes from "what is a router?" to a DeepSeek-style training run on many GPUs, on a laptop, in JAX. You build
# every part yourself, check it against an oracle, measure it, and then replace it by the production kernel. This chapter
# shows how the notebooks work, starts eight devices on one machine, trains, and opens the books.
#
# You will be able to
#
# - use a check, a hint, a question and a prediction,
# - say what simulated devices are good for, and what they cannot tell you,
# - read a token ledger, and find the stage that lost a copy.
#
# Two exercises, about half an hour. Everything runs on the CPU.

# %% [markdown]
# ## The first cell
#
# Every chapter opens with `setup()`. It starts JAX on every GPU there is, or else splits the CPU into eight **simulated
# devices**, and says what you got. It has to run before anything else touches JAX; if you forget, it tells you to restart.

# %%
from moe_course.environment import setup

status = setup()

# %%
import jax
import jax.numpy as jnp
import numpy as np
from IPython.display import display
from jax.sharding import PartitionSpec as P

from moe_course.dispatch import ledger as books
from moe_course.lessons import check, hint, plots, predict, quiz, yours
from moe_course.lessons.properties.ch03_training import text
from moe_course.models.config import ModelConfig
from moe_course.parallel import EXPERT, MeshConfig, batch_sharding, make_mesh
from moe_course.train.config import OptimizerConfig, TrainConfig
from moe_course.train.step import init_state, make_train_step

# %% [markdown]
# ## How a chapter works
#
# Exercises are gaps of about ten lines. `check` tries your function on many inputs and says which properties hold, which
# does not, on which input, and what the likely mistake is. Nothing is hidden: the checks are Python files that you can
# read. Leave a gap empty and the chapter still runs, with the package's version in its place. Here is a check that fails,
# so that you have seen one:


# %%
def wrong_shares(load):
    return load / load.max()


for attempt in [wrong_shares]:
    check("00.1", attempt)

# %% [markdown]
# `hint` has four steps: a question, the shapes, nearly the code, the code. Each call gives one more.

# %%
hint("00.1")

# %% [markdown]
# ## Exercise 00.1: shares
#
# Turn copies per expert into shares. · difficulty ● · 5 minutes · used again in 03
#
# By hand, four experts: the load [1, 2, 3, 2] is 8 copies, the shares are [0.125, 0.25, 0.375, 0.25].


# %%
def shares(load):
    """Each expert's share of all copies.

    Args:
      load: [E] int32, copies per expert.

    Returns: [E] float32 that adds up to 1; zeros if there are no copies.
    """
    ### BEGIN SOLUTION
    return load / jnp.maximum(load.sum(), 1)
    ### END SOLUTION


check("00.1", shares)

# %% [markdown]
# ## The map
#
# One MoE layer, in the order in which a token meets its parts. The numbers are the chapters that build them.

# %%
fig, ax = plots.figure(8.6, 1.9)
stages = (
    ("router\n02", 0), ("balance\n03", 5), ("group\n04", 2), ("dispatch\n07", 1),
    ("GEMM\n05, 08", 2), ("experts\n06", 2), ("combine\n07", 1),
)  # fmt: skip
for i, (name, color) in enumerate(stages):
    box = {"boxstyle": "round,pad=0.5", "fc": plots.PAPER, "ec": plots.expert_color(color), "lw": 1.8}
    ax.text(i, 1.2, name, ha="center", va="center", fontsize=10, bbox=box)
    if i:
        ax.annotate("", (i - 0.42, 1.2), (i - 0.58, 1.2), arrowprops={"arrowstyle": "->", "color": plots.INK})
around = (
    "01 why · 03 collapse · 09 memory and compilation · 10 scaling\n"
    "11 DeepSeek-V3 · 12 the training run · 13 proteins and DNA · 14 graphs"
)
ax.text(3, 0.3, around, ha="center", va="center", fontsize=9)
ax.set(xlim=(-0.6, 6.6), ylim=(0, 1.7))
ax.axis("off")
plots.show(
    fig,
    "A token's way through the layer: every box is a chapter, and a part of the package",
)

# %% [markdown]
# ## Eight devices on one machine
#
# JAX does not care whether a device is a GPU or a share of your CPU. An array can be cut over devices; a function over
# it becomes one program for all of them, with the communication that it needs. Predict: 1,024 tokens cut over 8 devices.
# How many does each hold?

# %%
mesh = make_mesh(MeshConfig(data=1, fsdp=2, expert=4))
tokens = jax.device_put(jnp.ones((1024, 16)), batch_sharding(mesh))
predict(
    "tokens on the device that holds the fewest",
    ### BEGIN ANSWER
    1024 / 8,
    ### END ANSWER
    measured=min(shard.data.shape[0] for shard in tokens.addressable_shards),
    unit="tokens",
)


# %%
@jax.jit
def neighbours_sum(x):
    """Every rank of the expert axis tells the others how many tokens it has: one number from each device."""
    with_sums = jax.shard_map(
        lambda mine: jnp.full((1,), jax.lax.psum(len(mine), EXPERT)),
        mesh=mesh,
        in_specs=P(("data", "fsdp", "expert")),
        out_specs=P(("data", "fsdp", "expert")),
    )
    return with_sums(x)


print("devices", mesh.size, "  axes", dict(mesh.shape))
print(
    "tokens within reach of each device, on the 4 ranks of its expert axis:", neighbours_sum(tokens).tolist()
)

# %% [markdown]
# ### Question 00.q1
#
# What can eight simulated devices tell you?
#
# **a** how much faster training gets with eight · **b** whether the right rows reach the right device, and the numbers
# are those of one device · **c** how much memory a real device needs

# %%
quiz(
    "00.q1",
    ### BEGIN ANSWER
    "b",
    ### END ANSWER
)

# %% [markdown]
# ## A Mixture of Experts, trained before your eyes
#
# A byte-level language model with DeepSeek-V3's parts and none of its size: one layer of latent attention, then 8
# experts of which a token uses 2 besides a shared one. The experts live on four ranks, two on each; the batch is cut over
# all eight devices. It reads the source code of optax, the optimizer library. Two predictions first.
#
# An untrained model has hardly an opinion, so its loss is nearly that of guessing among its 264 symbols: log₂ 264 bits
# per byte. Each step has 16 windows of 64 tokens. Put your numbers in; the cell after next measures.

# %%
before_training = (
    ### BEGIN ANSWER
    np.log2(264),
    ### END ANSWER
)[0]
copies_made = (
    ### BEGIN ANSWER
    80 * 16 * 64 * 2,
    ### END ANSWER
)[0]

# %%
config = TrainConfig(
    model=ModelConfig(
        d_model=64,
        num_layers=1,
        num_dense_layers=0,
        num_heads=2,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=32,
        d_ff=64,
        num_experts=8,
        num_shared_experts=1,
        top_k=2,
        init_std=0.05,
    ),
    mesh=MeshConfig(data=1, fsdp=2, expert=4),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=10, expert_bias_rate=0.01),
    steps=80,
    batch_size=16,
    seq_len=64,
    capacity_factor=4.0,  # receive buffers of the worst case: chapter 07 makes them small
)
config.validate()

# %% [markdown]
# The first call compiles the step for eight devices; that takes most of the minute. Then watch the loss fall and the
# shares of the experts come together, as the bias rule of chapter 03 does its work.


# %%
def progress_picture(bits, loads):
    fig, (left, right) = plots.figure(8.0, 2.7, columns=2)
    left.plot(range(1, len(bits) + 1), bits, color=plots.expert_color(0), lw=2)
    left.set(xlabel="step", ylabel="bits per byte", xlim=(0, 80), ylim=(0, 9))
    share = np.array([yours("00.1", lambda load: load / load.sum())(jnp.asarray(load)) for load in loads])
    right.stackplot(range(1, len(bits) + 1), 100 * share.T, colors=[plots.expert_color(e) for e in range(8)])
    right.set(xlabel="step", ylabel="share of the copies, %", xlim=(1, 80), ylim=(0, 100))
    return plots.bundle(fig, f"Step {len(bits)} of 80: the loss falls, and the eight experts share the work")


# %% tags=["nbval-ignore-output"]
data, rng = text().astype(np.int32), np.random.default_rng(0)
state = init_state(config, mesh)
train_step = make_train_step(config, mesh, bucket=0)
bits, loads, ledger, picture = [], [], [], None
for step in range(config.steps):
    windows = data[rng.integers(0, len(data) - 65, (16, 1)) + np.arange(65)]
    batch = {"tokens": windows, "segments": np.zeros_like(windows), "domain": np.zeros(16, np.int32)}
    state, measured = train_step(state, jax.device_put(batch, batch_sharding(mesh)))
    measured = jax.device_get(measured)
    bits.append(float(measured["loss"]) / np.log(2))
    loads.append(measured["load"][0])
    counts = measured["ledger"]
    ledger.append([counts.made, counts.sent, counts.received, counts.computed, counts.combined])
    if step % 10 == 9:
        drawn = progress_picture(bits, loads)
        if picture is None:
            picture = display(drawn, raw=True, display_id=True)
        else:
            picture.update(drawn, raw=True)

# %%
predict("bits per byte before training, rounded", before_training, round(bits[0]), within=0.03)
predict("token copies made in 80 steps", copies_made, int(np.sum(ledger, axis=0)[0]), unit="copies")

# %%
print("the loss fell by more than 2 bits per byte:", bits[0] - np.mean(bits[-10:]) > 2)

# %% [markdown]
# ## The ledger
#
# Every step of that run kept books. A **token copy** is one pick of one token. It is counted five times, each time where
# the thing happens, by a different part of the code:
#
# | column | counted where |
# |---|---|
# | made | the router picks: tokens times K |
# | sent | copies that went into a send buffer |
# | received | copies that the receivers were told to expect |
# | computed | rows inside the groups that the experts walk |
# | combined | answers that a token adds up |

# %%
print("step   made   sent   received   computed   combined")
for step in (0, 39, 79):
    print(
        f"{step + 1:>4} "
        + "".join(f"{int(n):>{width}}" for n, width in zip(ledger[step], (7, 7, 11, 11, 11), strict=True))
    )
print("copies dropped in 80 steps:", int(np.sum(ledger, axis=0)[0] - np.sum(ledger, axis=0)[4]))
print("the first step, as the package reads it:", books.check(*map(int, ledger[0])) or "the books balance")

# %% [markdown]
# ### Question 00.q2
#
# What in this run lets you call it dropless?
#
# **a** no expert was overloaded · **b** the loss fell · **c** five independent counts agreed at every step

# %%
quiz(
    "00.q2",
    ### BEGIN ANSWER
    "c",
    ### END ANSWER
)

# %% [markdown]
# ## Exercise 00.2: audit
#
# Read the books of many steps at once. · difficulty ●● · 10 minutes · used again in 07, 12
#
# By hand, four steps:
#
# | made | sent | received | computed | combined | dropped | where |
# |---|---|---|---|---|---|---|
# | 8 | 8 | 8 | 8 | 8 | 0 | 0, the books balance |
# | 8 | 8 | 8 | 6 | 6 | 2 | 3: received, but not computed |
# | 8 | 7 | 7 | 7 | 6 | 2 | 1: the first fault counts |
# | 8 | 7 | 8 | 8 | 8 | 0 | 1: nothing is missing in the end, and somebody counts wrong |


# %%
def audit(ledger):
    """How many copies were dropped in each step, and where the books first differ.

    Args:
      ledger: [S, 5] int32, the columns made, sent, received, computed, combined of S steps.

    Returns: (dropped [S], where [S]), integers: made less combined, and the first column that differs from the one
      before it (1 to 4), or 0 where the books balance.
    """
    ### BEGIN SOLUTION
    changed = ledger[:, 1:] != ledger[:, :-1]
    where = jnp.where(changed.any(axis=1), jnp.argmax(changed, axis=1) + 1, 0)
    return ledger[:, 0] - ledger[:, -1], where
    ### END SOLUTION


check("00.2", audit)


# %%
def package_audit(ledger):
    ledger = np.asarray(ledger)
    faulty = [books.check(*map(int, row)) is not None for row in ledger]
    return ledger[:, 0] - ledger[:, -1], np.array(faulty, np.int32)


lost, where = yours("00.2", package_audit)(jnp.asarray(np.array(ledger, np.int32)))
print("steps with a fault in the books:", int((np.asarray(where) > 0).sum()), "of", len(ledger))

# %% [markdown]
# ## The Transformer Engine way
#
# Each chapter ends its own construction with the call that replaces it on NVIDIA GPUs, from Transformer Engine for JAX.
# Without a GPU these calls are shown as text and labelled **not run here**; what a chapter says about speed on a GPU
# names who measured it. To see what your machine can do:
#
#     moe-course doctor
#
# ## Bug museum: the tidy tutorial
#
# Every chapter has a broken layer in it, modelled on a public one. This is the first, after a popular tutorial
# (AviSoori1x/makeMoE): each expert takes the tokens that picked it, up to a limit, and multiplies. It runs, it trains, it
# never complains. The books, kept around it:


# %%
def museum_layer(ids, num_experts, limit):
    """Rows at each stage for ids [T, K]: (made, sent, received, computed, combined)."""
    made = ids.size
    queues = [np.flatnonzero((ids == e).any(axis=1)) for e in range(num_experts)]
    sent = sum(len(queue) for queue in queues)
    inboxes = [queue.copy() for queue in queues]
    received = sum(len(inbox) for inbox in inboxes)
    batches = [inbox[:limit] for inbox in inboxes]
    computed = sum(len(batch) for batch in batches)
    return made, sent, received, computed, computed


attraction = np.array([0.25, 0.2, 0.2, 0.1, 0.1, 0.05, 0.05, 0.05])
picks = np.random.default_rng(7)
ids = np.stack([picks.choice(8, 2, replace=False, p=attraction) for _ in range(512)])
entry = museum_layer(ids, 8, limit=160)
print("made, sent, received, computed, combined:", entry)
print(books.check(*entry))

# %% [markdown]
# ### Question 00.q3
#
# Copies are missing. At which stage (0 to 4) do the books differ first? Which line of the code is it?

# %%
quiz(
    "00.q3",
    ### BEGIN ANSWER
    3,
    ### END ANSWER
)

# %% [markdown]
# The copies that go are the latest of the most popular expert. No error, no warning, a loss that still falls: only
# counting finds it. Chapter 03 measures what it costs, chapter 07 builds buffers that are small and yet never drop.
#
# ## What changed in the package
#
# Nothing yet; you have only used it. The cells above are `moe-course train` in thirty lines: the same `make_train_step`,
# the same ledger. The command adds four corpora, checkpoints that survive a kill, evaluation and a report:
#
#     moe-course train --preset tiny     # about five minutes on two cores
#     moe-course progress                # which exercises you have passed
#
# ## Further reading
#
# - Outrageously Large Neural Networks, arXiv 1701.06538: the layer that this course is about.
# - DeepSeek-V3, arXiv 2412.19437: the architecture that it works towards.
# - The JAX documentation on distributed arrays and automatic parallelisation, for meshes and shardings.
#
# Next: 01, why anybody does this.
