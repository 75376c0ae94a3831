# %% [markdown]
# # 09 Compile once
#
# Eight calls of one jitted function, `x * s`: x is eight numbers, and s is 0.1, then 0.2, then `np.float32(0.1)`, then
# `jnp.float32(0.1)`, then 1. Then 0.1 again, with x on another device, with x cut over eight devices, with x in bfloat16.
# How often does JAX trace the function, and how often does XLA compile it? Write two numbers down; you will count them
# after exercise 09.1.
#
# XLA takes minutes to compile a training step of DeepSeek-V3, and a GPU takes seconds to run it. A run that compiles at
# every step is a compiler that sometimes trains. So a training step is compiled once, and all that changes
# from step to step is *data*: the routing, the sizes of the groups, the learning rate. What you get in return is a text:
# every byte that is sent, kept, or computed twice is written in it, before any GPU has seen it.
#
# You will be able to
#
# - say what traces, what compiles and what does neither, and bound the programs of a run,
# - give the state's memory back to the step, and read whether it was taken,
# - name what the backward pass keeps, and prove that it does,
# - read collectives, loops and memory out of a compiled program, and a profile beside it,
# - compile DeepSeek-V3's MoE layer for 64 GB200s without having one, and say whether it fits.
#
# Nine exercises, about two hours. Everything runs on the CPU; what is said of GPUs was compiled for them or is quoted,
# and nothing here was run on one.

# %%
from moe_course.environment import setup

status = setup(8, platform="cpu")

# %%
import contextlib
import io
import json
import math
import re
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name, print_saved_residuals
from jax.sharding import PartitionSpec as P

from moe_course.bench import recorded
from moe_course.dispatch.plan import DispatchPlan, bucket_capacity
from moe_course.layers.moe import MoE
from moe_course.lessons import check, plots, predict, quiz, yours
from moe_course.models import deepseek
from moe_course.models.config import DEEPSEEK_V3, ModelConfig
from moe_course.parallel import MeshConfig, batch_sharding, make_mesh, tree_shardings
from moe_course.routing import RouterConfig

# %% [markdown]
# ## What is traced, what is compiled
#
# A call of a jitted function finds its program by a key. In the key are the shapes and dtypes of the arguments, whether
# they are weakly typed (as Python numbers are), the tree that holds them, their sharding, and the values of static
# arguments. Not in the key: any value that is data. A new key costs one or both of
#
# - a **trace**: Python runs the function on placeholders and writes down what it does, a *jaxpr*,
# - a **compilation**: XLA makes a program of the jaxpr. This is the one that takes minutes.

# %%
print(jax.make_jaxpr(lambda x, s: x * s + 1)(jnp.zeros(8), 0.1).pretty_print(use_color=False))

# %% [markdown]
# `b:f32[]` stands where 0.1 was, and 0.1 is nowhere. The first equation makes an ordinary float32 of it, since a Python
# number comes in weakly typed.
#
# ## Exercise 09.1: who traces
#
# Say for each call whether JAX traces. · difficulty ●● · 10 minutes · used again in 12
#
# Build the counter yourself; the log of a run will not tell you. By hand, `sin` of arrays of four numbers, five, four:
# traced, traced, not traced. With `static=(1,)` and calls (x, 2), (x, 3), (x, 2): traced, traced, not traced, since a
# static value is part of the key.


# %%
def traced(fn, calls, static=()):
    """Which calls of a jitted function trace it.

    Args:
      fn: a function of arrays and numbers, not jitted yet. Do not call it outside of jit.
      calls: a list of tuples of arguments.
      static: positions of static arguments.

    Returns: a list with a bool for each call, in order, made with one jax.jit of a function that is new to it.
    """
    ### BEGIN SOLUTION
    runs, answer = [], []

    def counting(*args):
        runs.append(None)  # Python comes here only while it traces
        return fn(*args)

    step = jax.jit(counting, static_argnums=static)
    for args in calls:
        before = len(runs)
        step(*args)
        answer.append(len(runs) > before)
    return answer
    ### END SOLUTION


check("09.1", traced)  # stuck? hint("09.1"), up to four times

# %% [markdown]
# For compilations JAX tells whoever listens. Here are the eight calls, for your two numbers.


# %%
def package_traced(fn, calls, static=()):
    runs = []

    def noting(*args):
        runs.append(None)
        return fn(*args)

    step, totals = jax.jit(noting, static_argnums=static), [0]
    for args in calls:
        step(*args)
        totals.append(len(runs))
    return np.diff(totals).astype(bool).tolist()


compilations = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: compilations.append(event) if "backend_compile_duration" in event else None
)


def scale(x, s):
    return x * s


x = np.ones(8, np.float32)
mesh = make_mesh(MeshConfig(data=1, fsdp=2, expert=4))
calls = {
    "x, 0.1": (x, 0.1),
    "x, 0.2": (x, 0.2),
    "x, np.float32(0.1)": (x, np.float32(0.1)),
    "x, jnp.float32(0.1)": (x, jnp.float32(0.1)),
    "x, 1": (x, 1),
    "x on device 1, 0.1": (jax.device_put(x, jax.devices()[1]), 0.1),
    "x over eight devices, 0.1": (jax.device_put(x, batch_sharding(mesh)), 0.1),
    "x in bfloat16, 0.1": (x.astype(jnp.bfloat16), 0.1),
}
tracing = yours("09.1", package_traced)(scale, list(calls.values()))
step, compiling = jax.jit(scale), []
for arguments in calls.values():
    before = len(compilations)
    step(*arguments)
    compiling.append(len(compilations) > before)

# %%
predict(
    "traces of the eight calls",
    ### BEGIN ANSWER
    5,
    ### END ANSWER
    measured=sum(tracing),
)
predict(
    "compilations",
    ### BEGIN ANSWER
    6,
    ### END ANSWER
    measured=sum(compiling),
)

# %%
for name, trace, compilation in zip(calls, tracing, compiling, strict=True):
    print(f"{name:<27}{'trace' if trace else '-':<8}{'compile' if compilation else '-'}")
print("entries in the cache of the dispatcher:", step._cache_size())

# %% [markdown]
# Read the table twice. 0.1 and `np.float32(0.1)` are two programs: the first is weakly typed, and times a
# bfloat16 array it gives bfloat16, where the second gives float32. The array on device 1 was not traced and yet compiled:
# whoever counts traces alone does not see it. A mesh in the sharding is new to the trace as well.
#
# The third counter, `step._cache_size()`, counts the kinds of arguments that the dispatcher has seen, and to it a NumPy
# scalar and a JAX scalar are two. It is never less than the compilations, so a run that finds 1 there has compiled once;
# the package's tests ask for that.
#
# When a run compiles and you do not know why, `jax.config.update("jax_explain_cache_misses", True)` names the argument
# that differs. The usual suspects, with what to do:
#
# | what changes | trace | compile | instead |
# |---|---|---|---|
# | a shape: the number of tokens, the last batch | yes | yes | pad to a bucket (09.2) |
# | sizes of groups, a learning rate, a step number, as arrays | no | no | as it should be |
# | a value that is static, or in a closure | yes, or *never* | yes | make it an argument |
# | 0.1 in place of `jnp.float32(0.1)`, once | yes | yes | one dtype, from the first step on |
# | sharding or device | as above | yes | `in_shardings`, `out_shardings`: state goes in as it came out |
# | a new `lambda` or `jax.jit` in each step | yes | yes | jit once, outside the loop |
#
# ### Question 09.q1
#
# ```python
# factor = 2
# double = jax.jit(lambda x: factor * x)
# double(jnp.ones(3))
# factor = 3
# double(jnp.ones(3))
# ```
#
# By what does the last line multiply?

# %%
quiz(
    "09.q1",
    ### BEGIN ANSWER
    2,
    ### END ANSWER
)

# %% [markdown]
# ## Exercise 09.2: the bucket for a batch
#
# Pad to one of a few sizes. · difficulty ● · 5 minutes · used again in 12, 14
#
# A batch of variable length, the rows of a receive buffer (chapter 07): shapes that depend on data, known to the host
# before the step. Rounded up to one of a few sizes, each compiled once. By hand, unit 64, most 1,000: 64 rows take 64, 65
# take 128, 513 take 1,000 and not 1,024.


# %%
def bucket_for(rows, unit, most):
    """How many rows a batch is padded to.

    Args:
      rows: 0 to most.
      unit: the smallest bucket.
      most: the most rows that a batch can have, at least unit.

    Returns: an int: the first of unit, 2 unit, 4 unit, ... that holds the rows, and never more than most.
    """
    ### BEGIN SOLUTION
    size = unit
    while size < rows:
        size *= 2
    return min(size, most)
    ### END SOLUTION


check("09.2", bucket_for)  # stuck? hint("09.2")


# %%
def package_bucket(rows, unit, most):
    return min(unit << max(0, (-(-rows // unit) - 1).bit_length()), most)


bucket = yours("09.2", package_bucket)
lengths = np.random.default_rng(9).lognormal(6, 1, 1000).clip(1, 4096).astype(int).tolist()
ways = {
    "exact sizes": lengths,
    "multiples of 64": [-(-rows // 64) * 64 for rows in lengths],
    "buckets from 64 up": [bucket(rows, 64, 4096) for rows in lengths],
}
predict(
    "programs for 1,000 batches of 1 to 4,096 rows, in buckets",
    ### BEGIN ANSWER
    math.log2(4096 / 64) + 1,
    ### END ANSWER
    measured=len(set(ways["buckets from 64 up"])),
)

# %%
fig, (left, right) = plots.figure(8.0, 2.7, columns=2)
for color, sizes in enumerate(ways.values()):
    programs = [len(set(sizes[: n + 1])) for n in range(len(sizes))]
    left.plot(range(1, 1001), programs, color=plots.expert_color(color), lw=2.2)
    padding = 100 * (1 - sum(lengths) / sum(sizes))
    right.barh(color, padding, color=plots.expert_color(color), height=0.6)
    right.text(padding + 1, color, f"{padding:.0f} %", va="center", fontsize=9)
left.set(xlabel="batches", ylabel="programs compiled", yscale="log", ylim=(1, 2000))
right.set(xlabel="rows that are padding, %", yticks=range(3), yticklabels=ways, xlim=(0, 50))
right.invert_yaxis()
plots.show(fig, "Doubling buckets stop compiling after seven programs, and pay with padding")

# %% [markdown]
# ## Exercise 09.3: sizes as data
#
# One program for every split of the rows. · difficulty ●●● · 20 minutes · used again in 14
#
# Buckets serve what the host knows. The sizes of a router's groups it does not know: they are numbers on the device, other
# ones in every layer and step, and to learn them the host would have to wait. So nothing may have a shape that depends on
# them. Chapters 04 and 05 grouped and multiplied like that; here is one more ragged operation, the softmax of chapter 14's
# graphs and documents. By hand, scores [0, ln 3, 5] with sizes [2, 1]: [0.25, 0.75] and [1].


# %%
def group_softmax(scores, group_sizes):
    """A softmax within each group of rows.

    Args:
      scores: [M] float32. Rows past sum(group_sizes) may hold anything, NaN included.
      group_sizes: [E] int32, data; groups follow one another from row 0 on, and may be empty.

    Returns: [M] float32: sums to 1 over each group that has rows; 0 past the groups, and no gradient from there.
    """
    ### BEGIN SOLUTION
    count = group_sizes.shape[0] + 1
    group = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(scores.shape[0]), side="right")
    live = group < count - 1
    scores = jnp.where(live, scores, 0.0)
    top = lax.stop_gradient(jax.ops.segment_max(scores, group, count))
    weight = jnp.where(live, jnp.exp(scores - top[group]), 0.0)
    total = jax.ops.segment_sum(weight, group, count)[group]
    return jnp.where(live, weight / jnp.where(live, total, 1.0), 0.0)
    ### END SOLUTION


check("09.3", group_softmax)  # stuck? hint("09.3")


# %%
def package_softmax(scores, group_sizes):
    group = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(scores.shape[0]), side="right")
    member = group == jnp.arange(group_sizes.shape[0])[:, None]
    top = jnp.where(member, scores, -jnp.inf).max(axis=1, initial=-1e30, keepdims=True)
    weight = jnp.where(member, jnp.exp(jnp.where(member, scores - top, 0.0)), 0.0)
    return (weight / jnp.maximum(weight.sum(axis=1, keepdims=True), 1e-30)).sum(axis=0)


rng = np.random.default_rng(93)
softmax, runs = yours("09.3", package_softmax), []
step = jax.jit(lambda scores, sizes: (runs.append(None), softmax(scores, sizes))[1])
for _ in range(1000):
    cuts = np.sort(rng.integers(0, 65, 8))
    weights = step(rng.normal(size=64).astype(np.float32), np.diff(cuts, prepend=0).astype(np.int32))
print(f"1,000 steps, 1,000 routings: traced {len(runs)} time")

# %% [markdown]
# ## Donation: the state has one place
#
# An update reads a state and returns a state. Both exist at once, unless the step may put the new one where the old one
# was: `donate_argnums`. At 8 bytes for each of DeepSeek-V3's 671 billion parameters that decides whether a run fits. The
# compiled program says in its first line what became of the offer. Here parameters and two moments are donated:


# %%
def update(state, gradient):
    momentum = 0.9 * state["momentum"] + 0.1 * gradient
    square = 0.99 * state["square"] + 0.01 * gradient**2
    weights = state["weights"] - 0.01 * momentum / (jnp.sqrt(square) + 1e-6)
    return {"weights": weights, "momentum": momentum, "square": square}


matrix = jnp.zeros((512, 512), jnp.float32)
state = {"weights": matrix, "momentum": matrix, "square": matrix}
donated = jax.jit(update, donate_argnums=0).lower(state, matrix).compile()
print(re.sub(r", (entry_c|allow).*", ", ...", donated.as_text().splitlines()[0]))

# %% [markdown]
# ## Exercise 09.4: reused buffers
#
# Read who took over whose buffer. · difficulty ●● · 10 minutes · used again in 12
#
# `{0}: (1, {}, may-alias)`: output 0 takes the buffer of parameter 1. Outputs and arguments are numbered as
# `jax.tree.leaves` lists them. A function with one output has no number for it, and writes `{}`. By hand,
# `input_output_alias={ {}: (2, {}, may-alias) }` is {0: 2}, and a first line without it is {}.


# %%
def aliases(text):
    """Which outputs of a compiled program are written where an argument was.

    Args:
      text: compiled.as_text(); the first line says it, in input_output_alias.

    Returns: a dict, number of an output -> number of the argument (ints).
    """
    ### BEGIN SOLUTION
    first_line = text.splitlines()[0]
    pairs = re.findall(r"\{(\d*)\}: \((\d+), \{\}, m", first_line)  # may-alias or must-alias
    return {int(output or 0): int(parameter) for output, parameter in pairs}
    ### END SOLUTION


check("09.4", aliases)  # stuck? hint("09.4")

# %% [markdown]
# Only a buffer of the same shape and dtype can be taken over, in the same sharding. Somebody keeps the moments in bfloat16
# between steps, and forgets to cast them back at the end. How many of the three donated buffers are still used, and what
# does JAX say?


# %%
def package_aliases(text):
    inside = re.search(r"input_output_alias=\{ (.*?) \}, [be]", text.splitlines()[0])
    pairs = re.findall(r"\{(\d*)\}: \((\d+)", inside[1] if inside else "")
    return {int(output or 0): int(parameter) for output, parameter in pairs}


def compile_and_listen(fn, *args):
    """(the program, warnings), with the first argument donated."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        program = jax.jit(fn, donate_argnums=0).lower(*args).compile()
    return program, [str(warning.message).splitlines()[0] for warning in said]


read_aliases = yours("09.4", package_aliases)
small = {name: value.astype(jnp.bfloat16) if name != "weights" else value for name, value in state.items()}
forgetful, warned = compile_and_listen(update, small, matrix)
predict(
    "buffers taken over with float32 moments",
    ### BEGIN ANSWER
    3,
    ### END ANSWER
    measured=len(read_aliases(donated.as_text())),
)
predict(
    "buffers taken over with bfloat16 moments that come back as float32",
    ### BEGIN ANSWER
    1,
    ### END ANSWER
    measured=len(read_aliases(forgetful.as_text())),
)
predict(
    "warnings about that",
    ### BEGIN ANSWER
    0,
    ### END ANSWER
    measured=len(warned),
)

# %% [markdown]
# JAX warns where no output has as many numbers as the buffer that was given away. Here some have, of another dtype, and JAX
# leaves it to XLA, which finds no use: the text calls such a buffer a `buffer_donor`. (Read in JAX 0.10.2 and 0.12.0.1.)
# And the next step finds float32 moments, which is another key, and compiles again.

# %%
print("in the text:", re.search(r"buffer_donor=\{.*?\) \}", forgetful.as_text().splitlines()[0])[0])
print("JAX says   :", compile_and_listen(lambda rows: rows.sum(), matrix)[1][0])

# %% [markdown]
# What a program needs at once is its arguments, its results that take nobody's place, and its temporary memory:

# %%
memory = donated.memory_analysis()
needed = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
predict(
    "MB for arguments and results of the update, state donated",
    ### BEGIN ANSWER
    (3 + 1) * 512 * 512 * 4 / 1e6,
    ### END ANSWER
    measured=needed / 1e6,
    unit="MB",
    within=0.001,
)

# %%
kept = jax.jit(lambda x: x + 1, donate_argnums=0)
ones = jnp.ones((4, 4))
kept(ones)
try:
    ones + 1
except RuntimeError as error:
    print("used after it was given away:", error)

# %% [markdown]
# ### Question 09.q2
#
# Arguments 9 GB, of which the donated state is 8; results 8 GB; temporary 3 GB; everything donated was usable. How many GB
# does the program need?

# %%
quiz(
    "09.q2",
    ### BEGIN ANSWER
    12,
    ### END ANSWER
)

# %% [markdown]
# ## CUDA graphs, and what breaks them
#
# **Not run here**: this section quotes public sources. A GPU step is thousands of kernels, and the host launches them one
# by one, a few microseconds each. A **CUDA graph** is a recording of the launches that is replayed as one. XLA calls it a
# *command buffer* and records stretches of a program by itself (`--xla_gpu_enable_command_buffer=FUSION,CUBLAS,...` says
# which kinds of operation). A recording holds kernels, their shapes and their addresses. It holds no host, and so:
#
# | what somebody did | what happened | where |
# |---|---|---|
# | copied token counts to the host, to size buffers | a copy to the host cannot be captured | NVIDIA/Megatron-LM #1598 |
# | `.item()` in the optimizer, for a number in a log | capture aborts: operation not permitted | NVIDIA/Megatron-LM #7407 |
# | forgot the static capacity after one step | replays take dynamic sizes and wait for the host | NVIDIA/Megatron-LM #6999 |
# | marked a library call as fit for recording | the mark had no effect, and the graph ended there | openxla/xla #14889 |
# | gave a step other buffers than the last one | the graph knows addresses: it is recorded again | openxla/xla #41259 |
#
# Static shapes, sizes on the device, a donated state that keeps its place: what makes a step compile once makes it
# recordable. Transformer Engine's grouped GEMM has two versions; V1 copies the sizes to the host, V2 reads them on the
# device and is marked for command buffers.
#
# ### Question 09.q3
#
# Which of these ends a graph?
#
# **a** group sizes that differ in every step, in a buffer on the device · **b** reading the number of received rows to
# allocate the next buffer · **c** a kernel that loops as often as a number in memory says

# %%
quiz(
    "09.q3",
    ### BEGIN ANSWER
    "b",
    ### END ANSWER
)

# %% [markdown]
# ## Exercise 09.5: every equation
#
# Walk through a program. · difficulty ●●● · 15 minutes · used again in 12
#
# In JAX a trip to the host is an equation: `pure_callback`, `io_callback`, `debug_callback`, `debug_print`. You find it by
# looking at all equations, and most of a training step lies deep: in a `scan` over layers, in a `checkpoint`, in a `cond`.
# Programs are among an equation's `params`, alone or in tuples, and each has `.eqns`. By hand, for the program below: `jit`
# at the top, `scan` in jit, `cond` in scan in jit, and so on.


# %%
def chatty(x):
    def body(carry, _):
        carry = lax.cond(carry > 2, lambda c: c, lambda c: c + 1, carry)
        jax.debug.callback(lambda value: None, carry)
        return carry, None

    return lax.scan(body, x, None, length=3)[0]


jaxpr = jax.make_jaxpr(jax.jit(chatty))(0.0)
(outer,) = jaxpr.eqns
(loop,) = outer.params["jaxpr"].eqns
print("top:", outer.primitive.name, "| in it:", loop.primitive.name, "| in that:", end=" ")
print(*(equation.primitive.name for equation in loop.params["jaxpr"].eqns))


# %%
def equations(fn, *args):
    """All equations of a function's program.

    Args:
      fn: a function of args. jax.make_jaxpr(fn)(*args) is its program.

    Returns: a list of pairs (equation, inside), in any order. inside: the equations that it lies within, a tuple,
      outermost first, () at the top level.
    """
    ### BEGIN SOLUTION
    found = []

    def within(jaxpr, inside):
        for equation in jaxpr.eqns:
            found.append((equation, inside))
            for value in jax.tree.leaves(list(equation.params.values())):
                if hasattr(value, "eqns"):
                    within(value, (*inside, equation))

    within(jax.make_jaxpr(fn)(*args), ())
    return found
    ### END SOLUTION


check("09.5", equations)  # stuck? hint("09.5")


# %%
def package_equations(fn, *args):
    found = [(equation, ()) for equation in jax.make_jaxpr(fn)(*args).eqns]
    for equation, inside in found:  # grows while it is walked
        programs = [v for v in jax.tree.leaves(list(equation.params.values())) if hasattr(v, "eqns")]
        found += [(inner, (*inside, equation)) for program in programs for inner in program.eqns]
    return found


walk = yours("09.5", package_equations)


def trips_to_host(fn, *args):
    """Where a program calls the host: the primitive, and what it lies within."""
    found = [(e.primitive.name, [outer.primitive.name for outer in inside]) for e, inside in walk(fn, *args)]
    return [(name, inside) for name, inside in found if "callback" in name or "debug_print" in name]


# %% [markdown]
# The layer that we shall compile: the package's MoE layer, 16 experts, on the mesh of two by four that you made above.
# Shapes and shardings are enough to trace and compile it: no array is ever made.

# %%
E, K, D, F, T = 16, 4, 64, 32, 128  # experts, picks, width, width of an expert, tokens of a device
RANKS, FSDP, FACTOR = 4, 2, 1.25
capacity = bucket_capacity(0, FACTOR, T, K, E, RANKS)
plan = DispatchPlan(E, RANKS, capacity, "all_to_all")
graph, abstract = nnx.split(
    nnx.eval_shape(lambda: MoE(D, F, RouterConfig(E, K, "sigmoid"), rngs=nnx.Rngs(params=0)))
)


def placed(leaf, sharding):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


abstract = jax.tree.map(placed, abstract, tree_shardings(abstract, mesh))
tokens = jax.ShapeDtypeStruct((8 * T, D), jnp.float32, sharding=batch_sharding(mesh))


def moe_layer(state, x):
    return nnx.merge(graph, state)(x, plan=plan, num_sequences=8)[0]


with jax.set_mesh(mesh):
    print("chatty   ", trips_to_host(jax.jit(chatty), 0.0))
    print("MoE layer", trips_to_host(moe_layer, abstract, tokens))

# %% [markdown]
# ## What the backward pass keeps
#
# A layer of 4,096 tokens of DeepSeek-V3 leaves gigabytes for its backward pass. `jax.checkpoint` keeps less and computes
# again what it needs, and a **policy** says what is worth keeping: by name. `checkpoint_name` gives the name, the policy
# lists it, and `jax.ad_checkpoint.print_saved_residuals` says what became of it. Here is a small feed-forward with two
# names, up (the product) and act (what silu makes of it).

# %%
policies = jax.checkpoint_policies
keep = policies.save_only_these_names


def feed_forward(w, x):
    up = checkpoint_name(x @ w["up"], "up")
    act = checkpoint_name(jax.nn.silu(up), "act")
    return x + act @ w["down"]


def residuals(fn, *args):
    """What a backward pass would find kept, arguments left out."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        print_saved_residuals(fn, *args)
    lines = [line for line in said.getvalue().splitlines() if "from the argument" not in line]
    return [re.sub(r" from .*", "", line) for line in lines]  # the rest is a file and a line


w = {"up": jnp.ones((64, 256)), "down": jnp.ones((256, 64))}
x = jnp.ones((128, 64))
to_host = policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["up"],
    offload_src="device",
    offload_dst="pinned_host",
)
for name, policy in {
    "up": keep("up"),
    "up, act": keep("up", "act"),
    "none": keep(),
    "up, to the host": to_host,
}.items():
    print(f"{name:<16}", residuals(jax.checkpoint(feed_forward, policy=policy), w, x))

# %% [markdown]
# The last line has moved up to the host's memory: `f32<host>`. On a GPU it is copied there while the forward pass goes
# on, and back before it is needed; it costs no FLOPs and no device memory, if the link keeps up. (On a CPU it is a policy
# like another. That it works on GPUs we know from the compiler alone.)
#
# ### Kept, and computed again all the same
#
# Keep act and nothing else. The product x · up is the largest of the layer. How many matrix products does the backward
# pass compute *a second time*? (Its own four, two for each weight matrix, are subtracted.)


# %%
def products_again(policy):
    """Matrix products of the backward pass beyond its own four, per layer."""
    layer = jax.checkpoint(feed_forward, policy=policy)
    found = walk(jax.grad(lambda w, x: jnp.sin(layer(w, x)).sum(), argnums=(0, 1)), w, x)
    again = [e for e, inside in found if any(outer.params.get("differentiated") for outer in inside)]
    return sum(e.primitive.name == "dot_general" for e in again) - 4


predict(
    "products computed again with act kept",
    ### BEGIN ANSWER
    1,
    ### END ANSWER
    measured=products_again(keep("act")),
)
predict(
    "products computed again with up kept",
    ### BEGIN ANSWER
    0,
    ### END ANSWER
    measured=products_again(keep("up")),
)
predict(
    "products computed again with nothing kept",
    ### BEGIN ANSWER
    1,
    ### END ANSWER
    measured=products_again(keep()),
)

# %% [markdown]
# ### Question 09.q4
#
# One name for each layer, memory for one of the two. Where does it go?
#
# **a** on the product, before silu · **b** on what silu returns · **c** it makes no difference

# %%
quiz(
    "09.q4",
    ### BEGIN ANSWER
    "a",
    ### END ANSWER
)

# %% [markdown]
# Sixteen such layers in a `scan`, forward and backward. What a policy keeps is what the forward loop hands to the backward
# loop: the stacked outputs of one `scan` equation.


# %%
def stack_loss(policy):
    layer = feed_forward if policy is None else jax.checkpoint(feed_forward, policy=policy)
    return lambda w, x: lax.scan(lambda x, w: (layer(w, x), None), x, w)[0].sum()


LAYERS = 16
stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * LAYERS), w)


def kept_megabytes(policy):
    pairs = walk(jax.value_and_grad(stack_loss(policy)), stacked, x)
    forward = next(e for e, _ in pairs if e.primitive.name == "scan")
    outputs = [v.aval for v in forward.outvars if v.aval.ndim == 3]  # one for each layer
    device = [a for a in outputs if "host" not in str(a)]
    return sum(a.size * a.dtype.itemsize for a in device) / 1e6


choices = {
    "no checkpoint": None,
    "up, act": keep("up", "act"),
    "up": keep("up"),
    "act": keep("act"),
    "up, to the host": to_host,
    "nothing": keep(),
}
fig, ax = plots.figure(7.2, 3.0)
places = {}
for color, (name, policy) in enumerate(choices.items()):
    again = 0 if policy is None else products_again(policy)
    size = kept_megabytes(policy)
    ax.plot(size, 6 + again, "o", ms=11, color=plots.expert_color(color))
    above = places.get((round(size, 1), again), 0)
    places[round(size, 1), again] = above + 1
    ax.annotate(
        name,
        (size, 6 + again),
        xytext=(0, 12 + 13 * above),
        textcoords="offset points",
        ha="center",
        fontsize=9,
    )
ax.set(
    xlabel="kept on the device for the backward pass, MB (16 layers)", ylabel="products per layer and step"
)
ax.set(ylim=(5.6, 7.9), xlim=(-0.3, None), yticks=[6, 7])
ax.margins(x=0.12)
plots.show(fig, "Keeping act costs memory and saves no product; keeping up saves one")

# %% [markdown]
# ## Exercise 09.6: lost names
#
# Prove that a policy kept what it was asked for. · difficulty ●●● · 15 minutes · used again in 12
#
# A policy that matches nothing is no error. So a run should check, once, before it starts. The evidence is in the program
# of the gradient: `checkpoint_name` leaves an equation `name`, with `params["name"]`. What is kept appears in the forward
# pass alone. What is computed again appears once more, within the `checkpoint` equation whose parameter `differentiated`
# is true. By hand, for `feed_forward` with `keep("up")`: asked for up, nothing is lost; asked for up and act, act is;
# asked for upp, upp is, since nothing has that name.


# %%
def lost_names(loss, names, *args):
    """The names that a policy should keep, and does not.

    Args:
      loss: a function of args, to a scalar; policies are inside.
      names: a list of names that were meant to be kept.
      args: what loss is called with; the first is differentiated.

    Returns: a sorted list of those names that no value carries, or that the backward pass computes again.
    """
    ### BEGIN SOLUTION
    carried, again = set(), set()
    for equation, inside in walk(jax.value_and_grad(loss), *args):
        if equation.primitive.name == "name":
            recomputed = any(outer.params.get("differentiated") for outer in inside)
            (again if recomputed else carried).add(equation.params["name"])
    return sorted(name for name in names if name in again or name not in carried)
    ### END SOLUTION


check("09.6", lost_names)  # stuck? hint("09.6")

# %% [markdown]
# The trainer's policies are `--remat none`, `full`, `attention` and `experts`: names in `moe_course.models.deepseek.REMAT`.
# Are they kept in the model as it is trained, two MoE layers in a scan?


# %%
def package_lost(loss, names, *args):
    found = [
        (e.params["name"], any(outer.params.get("differentiated") for outer in inside))
        for e, inside in walk(jax.value_and_grad(loss), *args)
        if e.primitive.name == "name"
    ]
    again = {name for name, recomputed in found if recomputed}
    return sorted(set(names) - {name for name, _ in found} | set(names) & again)


tiny = ModelConfig(d_model=32, num_layers=2, num_dense_layers=0, num_experts=4, top_k=2, d_ff=16)
model_graph, params, bias = deepseek.split(
    nnx.eval_shape(lambda: deepseek.DeepSeekLM(tiny, rngs=nnx.Rngs(params=0)))
)
merge = deepseek.merger(tiny)
text = jnp.zeros((2, 16), jnp.int32)
lost = yours("09.6", package_lost)
for policy in ("full", "attention", "experts"):
    names = deepseek.REMAT[policy]

    def model_loss(params, bias, remat=policy):
        return merge(params, bias)(text, text, remat=remat).logits.sum()

    answer = lost(model_loss, names, params, bias)
    print(f"{policy:<10} asks for {', '.join(names) or 'nothing'}: lost {answer}")

# %% [markdown]
# ## The compiled program is a text
#
# Now compile the MoE layer. What comes out is a list of computations, each a list of lines `name = type
# operation(operands), attributes`, for one device: shapes are those of its share. Nothing that is sent is hidden.

# %%
with jax.set_mesh(mesh):
    layer = jax.jit(moe_layer).lower(abstract, tokens).compile()
lines = layer.as_text().splitlines()
shown = []
for line in lines:
    if kind := re.search(r" (all-gather|all-to-all)\(", line):
        parts = re.findall(r"\w+\[[\d,]+\]", line[: kind.start()])
        stage = re.search(r'op_name="jit\(moe_layer\)/([^"/]*)', line)[1]
        shown.append(f"{kind[1]:<12}{stage:<15}{len(parts)} of {parts[0]}")
print(*sorted(shown), sep="\n")

# %% [markdown]
# ## Exercise 09.7: collectives
#
# Count what is sent. · difficulty ●●● · 20 minutes · used again in 10, 12
#
# The bytes of a collective are those of its result here: for an all-gather what a device has afterwards, for an all-to-all
# what it gets, its own block included. A GPU program splits most of them into a `-start`, whose result repeats the operand,
# and a `-done`, so that something else can run in between; the pair is one collective. By hand,
# `%all-gather.1 = bf16[64,16]{1,0} all-gather(%p), ...` is {"all-gather": (1, 2048)}.


# %%
def collectives_of(lines):
    """Collectives among lines of a compiled program.

    Args:
      lines: a list of str, each one instruction: name = type operation(operands), attributes. A type is dtype[a,b]{layout},
        or several of them in parentheses.

    Returns: a dict, kind -> (count, bytes of the results). Kinds: all-gather, all-reduce, reduce-scatter, all-to-all,
      collective-permute. A pair of -start and -done counts once, with the result of its -done.
    """
    ### BEGIN SOLUTION
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    total = {}
    for line in lines:
        call = re.search(rf" = (\(.*?\)|\S+) ({kinds})(?:-done)?\(", line)
        if not call:
            continue
        count, size = total.get(call[2], (0, 0))
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", call[1]):
            bits = re.search(r"\d+", dtype)  # pred has none
            size += math.prod(int(n) for n in dims.split(",") if n) * (int(bits[0]) // 8 if bits else 1)
        total[call[2]] = count + 1, size
    return total
    ### END SOLUTION


check("09.7", collectives_of)  # stuck? hint("09.7")

# %% [markdown]
# ## Exercise 09.8: how often it runs
#
# A scan over 58 layers is *one* body in the text. · difficulty ●● · 10 minutes · used again in 10
#
# Whoever counts lines finds one layer's bytes. XLA writes behind a loop how often it turns, if it knows:
# `known_trip_count":{"n":"58"}`. Bodies call computations which call others. By hand: main calls layers 58 times, and layers
# calls chunk 8 times and main calls chunk once more, then chunk runs 58 · 8 + 1 = 465 times.


# %%
def times_run(calls, entry):
    """How often each computation of a program runs.

    Args:
      calls: a dict, name of a computation -> list of (name of one that it calls, how often for each run of the caller).
        No computation calls itself, directly or not.
      entry: the name of the computation that runs once.

    Returns: a dict, name -> int, for every name; 0 for what nothing reaches.
    """
    ### BEGIN SOLUTION
    times = dict.fromkeys(calls, 0)

    def visit(name, n):
        times[name] += n
        for callee, trips in calls[name]:
            visit(callee, n * trips)

    visit(entry, 1)
    return times
    ### END SOLUTION


check("09.8", times_run)  # stuck? hint("09.8")

# %% [markdown]
# Both together read a whole program. The given part cuts the text into computations and finds who calls whom:


# %%
def package_collectives(lines):
    total = Counter(), Counter()
    for line in lines:
        call = re.search(r" = (\(.*?\)|\S+) ([a-z-]+?)(?:-done)?\(", line)
        if call and call[2] in (
            "all-gather",
            "all-reduce",
            "reduce-scatter",
            "all-to-all",
            "collective-permute",
        ):
            total[0][call[2]] += 1
            for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", call[1]):
                width = 1 if dtype == "pred" else int(re.search(r"\d+", dtype)[0]) // 8
                total[1][call[2]] += math.prod(int(n) for n in dims.split(",") if n) * width
    return {kind: (count, total[1][kind]) for kind, count in total[0].items()}


def package_times(calls, entry):
    times, waiting = dict.fromkeys(calls, 0), [(entry, 1)]
    while waiting:
        name, n = waiting.pop()
        times[name] += n
        waiting += [(callee, n * trips) for callee, trips in calls[name]]
    return times


def computations_of(text):
    """({name: its lines}, the entry's name)."""
    found, entry, name = {}, None, None
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%?(\S+) \(.*\{$", line):
            name = header[2]
            found[name], entry = [], name if header[1] else entry
        elif line.startswith("  ") and name:
            found[name].append(line)
    return found, entry


def calls_of(lines):
    """[(computation that a line calls, how often)]."""
    made = []
    for line in lines:
        trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
        for names in re.findall(
            r"(?:calls|body|to_apply|\w+_computations?)=\{?(%[^,}]+(?:, %[^,}]+)*)", line
        ):
            made += [(name.strip("% "), int(trips[1]) if trips else 1) for name in names.split(",")]
    return made


count_lines, count_runs = yours("09.7", package_collectives), yours("09.8", package_times)


def collectives_run(compiled):
    """{kind: (how often, bytes)} of one device in one run of a compiled program."""
    found, entry = computations_of(compiled.as_text())
    times = count_runs({name: calls_of(lines) for name, lines in found.items()}, entry)
    total = {}
    for name, lines in found.items():
        for kind, (count, size) in count_lines(lines).items():
            before = total.get(kind, (0, 0))
            total[kind] = before[0] + times[name] * count, before[1] + times[name] * size
    return {kind: total[kind] for kind in sorted(total) if total[kind][0]}


# %% [markdown]
# Five layers in a scan, each of which gathers its weight over `fsdp` and sends its rows over `expert`. How many all-to-alls
# run? And by what factor does XLA's own `cost_analysis` miss the FLOPs of the products?


# %%
def five_layers(x, weights):
    def one(x, weight):
        whole = lax.all_gather(weight, "fsdp", axis=0, tiled=True)
        x = lax.all_to_all(x.reshape(RANKS, -1, D), "expert", 0, 0).reshape(-1, D)
        return jnp.maximum(x @ whole, 0), None

    return lax.scan(one, x, weights)[0]


everywhere = P(("data", "fsdp", "expert"))
on_mesh = jax.shard_map(five_layers, mesh=mesh, in_specs=(everywhere, P(None, "fsdp")), out_specs=everywhere)
five = jax.jit(on_mesh).lower(tokens, jax.ShapeDtypeStruct((5, D, D), jnp.float32)).compile()
for kind, (count, size) in collectives_run(five).items():
    print(f"{kind:<11}{count} of them, {size:,} bytes")

# %%
predict(
    "all-to-alls of five layers",
    ### BEGIN ANSWER
    5,
    ### END ANSWER
    measured=collectives_run(five)["all-to-all"][0],
)
predict(
    "FLOPs of five products, over those that cost_analysis reports",
    ### BEGIN ANSWER
    5,
    ### END ANSWER
    measured=round(5 * 2 * T * D * D / five.cost_analysis()["flops"], 1),
    within=0.1,
)

# %% [markdown]
# `cost_analysis` counts a loop's body once. `memory_analysis` does not have that fault: memory is planned for the whole
# run. Both are of one device. The numbers below differ from one JAX version to the next, and between CPU and GPU: what is
# fused with what is XLA's decision.

# %% tags=["nbval-ignore-output"]
memory = layer.memory_analysis()
operations = Counter(re.findall(r" = (?:\(.*?\)|\S+) ([a-z-]+)\(", layer.as_text()))
print("arguments", memory.argument_size_in_bytes, "results", memory.output_size_in_bytes, end=" ")
print("temporary", memory.temp_size_in_bytes, "bytes of one device")
print(", ".join(f"{count} {name}" for name, count in operations.most_common(9)))
with jax.set_mesh(mesh):
    print(
        len(walk(moe_layer, abstract, tokens)),
        "equations became",
        operations["fusion"],
        "fusions, and the rest",
    )

# %% [markdown]
# ## Exercise 09.9: bytes by hand
#
# Predict the layer's collectives. · difficulty ●●● · 15 minutes · used again in 10, 12
#
# In the forward pass, on the package's padded dispatcher, a device exchanges four arrays over `expert`: the sizes of its
# groups, E int32; capacity rows there, of D numbers; their weights, a float32 each; capacity rows back. The capacity is
# R ⌈factor · T · K / R⌉. Where `fsdp` cuts the weights, it gathers those of its own E/R experts and of the shared expert,
# gate, up and down, D · F numbers each. By hand, T, D, F, E, K = 2, 8, 4, 4, 1, two ranks, no fsdp, factor 1, 4 bytes: two
# rows, 2 · 2 · 8 · 4 + 2 · 4 + 4 · 4 = 152 bytes, and nothing gathered.


# %%
def layer_bytes(tokens, d_model, d_ff, num_experts, top_k, ranks, fsdp, factor, width):
    """What a device receives in the forward pass of a MoE layer with one shared expert, its own part included.

    Args:
      tokens: of one device. d_model, d_ff, num_experts, top_k: D, F, E, K.
      ranks: R, along the expert axis. fsdp: along the axis that cuts each weight, 1 if none does.
      factor: of the capacity. width: bytes of a number of rows and weights; the rows' own weights are float32.

    Returns: {"all-to-all": bytes, "all-gather": bytes}, ints; 0 where nothing is sent.
    """
    ### BEGIN SOLUTION
    rows = ranks * math.ceil(factor * tokens * top_k / ranks)
    exchanged = 2 * rows * d_model * width + 4 * rows + 4 * num_experts
    gathered = 3 * d_model * d_ff * width * (num_experts // ranks + 1)
    return {"all-to-all": exchanged, "all-gather": gathered if fsdp > 1 else 0}
    ### END SOLUTION


check("09.9", layer_bytes)  # stuck? hint("09.9")


# %%
def package_bytes(tokens, d_model, d_ff, num_experts, top_k, ranks, fsdp, factor, width):
    rows = bucket_capacity(0, factor, tokens, top_k, num_experts, ranks)
    expert = 3 * d_model * d_ff * width
    gathered = (num_experts // ranks + 1) * expert * (fsdp > 1)
    return {"all-to-all": rows * (2 * d_model * width + 4) + 4 * num_experts, "all-gather": gathered}


by_hand = yours("09.9", package_bytes)
foretold = by_hand(T, D, F, E, K, RANKS, FSDP, FACTOR, 4)
measured = collectives_run(layer)
predict(
    "bytes of the compiled layer's all-to-alls",
    ### BEGIN ANSWER
    foretold["all-to-all"],
    ### END ANSWER
    measured=measured["all-to-all"][1],
    unit="bytes",
)
predict(
    "bytes of the compiled layer's all-gathers",
    ### BEGIN ANSWER
    foretold["all-gather"],
    ### END ANSWER
    measured=measured["all-gather"][1],
    unit="bytes",
)

# %% [markdown]
# To the byte. What a whole step sends follows: the backward pass sends gradients the same two ways with their weights, and
# what is recomputed is sent once more. (On a CPU a bfloat16 collective is compiled as float32, so read widths in a GPU's
# program. The layer above is float32 throughout.)
#
# ## A profile
#
# The text says what runs, and not for how long. A profile does: its events carry the names of instructions, and the text
# says for each instruction which line of the layer it came from. `jax.named_scope` gave the stages their names.

# %% tags=["nbval-ignore-output"]
stages = ("router", "dispatch", "shared_expert", "experts", "combine")
stage_of = {}
for line in layer.as_text().splitlines():
    origin = re.match(r'\s*(?:ROOT )?%(\S+) = .*op_name="([^"]*)"', line)
    if origin and (stage := re.search("|".join(stages), origin[2])):
        stage_of[origin[1]] = stage[0]


def profile(run, repeats):
    """Events of compiled programs: (run, device, start, milliseconds, instruction)."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the profiler's own types
        with jax.profiler.trace(folder):
            for _ in range(repeats):
                jax.block_until_ready(run())
        data = jax.profiler.ProfileData.from_file(str(next(Path(folder).rglob("*.xplane.pb"))))
        events = [e for plane in data.planes for line in plane.lines for e in line.events]
        told = [(e, dict(e.stats)) for e in events]
    return [
        (s["run_id"], s["device_ordinal"], e.start_ns / 1e6, e.duration_ns / 1e6, s["hlo_op"])
        for e, s in told
        if "hlo_op" in s
    ]


weights = jax.tree.map(
    lambda a: jax.device_put(np.random.default_rng(91).normal(size=a.shape).astype(a.dtype) / 8, a.sharding),
    abstract,
)
batch = jax.device_put(
    np.random.default_rng(92).normal(size=tokens.shape).astype(np.float32), tokens.sharding
)
with jax.set_mesh(mesh):
    layer(weights, batch).block_until_ready()  # not the first one: it loads what the others find
    events = profile(lambda: layer(weights, batch), 3)

last = max(run for run, *_ in events)
shown = [event for event in events if event[0] == last]
begin = min(start for _, _, start, _, _ in shown)
fig, ax = plots.figure(8.0, 3.2)
for number, stage in enumerate(stages):
    for device in range(8):
        bars = [(t - begin, ms) for _, d, t, ms, name in shown if d == device and stage_of.get(name) == stage]
        ax.broken_barh(bars, (device - 0.4, 0.8), color=plots.expert_color(number))
    ax.barh(0, 0, color=plots.expert_color(number), label=stage)
ax.legend(frameon=False, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 0.98), fontsize=9)
ax.set(xlabel="ms (eight simulated devices share one CPU)", ylabel="device", yticks=range(8))
ax.invert_yaxis()
plots.show(fig, "One forward pass of the layer, instruction by instruction, in the colours of its stages")

# %% tags=["nbval-ignore-output"]
time_of = Counter()
for _, _, _, length, instruction in events:
    time_of[stage_of.get(instruction, "unnamed")] += length
whole = sum(time_of.values())
print(", ".join(f"{stage} {100 * time_of[stage] / whole:.0f} %" for stage in (*stages, "unnamed")))

# %% [markdown]
# The shares are those of eight simulated devices that wait for each other on one CPU: of what a collective takes, most is
# waiting. How to take and read a profile is the same on a GPU, and there the shares are worth something.

# %% [markdown]
# ## DeepSeek-V3's MoE layer for 64 GB200s
#
# XLA's GPU compiler runs without a GPU. It needs a description of one (memory, cores, registers), which NVIDIA and XLA
# publish, and JAX has topologies that are only that: 64 devices to shard over, on which nothing can run. `moe-course
# compile` compiles the trainer's own step that way, from shapes and shardings, on any Linux machine with the `aot` extra
# (about 260 MB). One MoE layer of DeepSeek-V3 with its attention, embedding and head, 8 expert ranks times 8 ways of
# cutting the weights, one sequence of 4,096 tokens on each GPU:
#
# ```bash
# moe-course compile --layers 1 --gpus 64 --hardware gb200 --ep 8 --remat none --html layer.html
# ```
#
# Everything it reports was **compiled, never run**. Before you look: how many bytes does a GPU send in the layer's
# all-to-alls, forward and backward? Your formula has the forward pass; the backward pass sends two gradients of rows and
# one of their weights, and no sizes. Of what a rank receives in an all-to-all, 1/R is its own and crosses no wire.

# %%
COMPILE = False  # True compiles all three here, in minutes. Otherwise what was recorded is shown.
COMMANDS = {
    "layer": "--layers 1 --gpus 64 --hardware gb200 --ep 8 --remat none",
    "model": "--gpus 64 --hardware gb200 --ep 8 --remat full",
    "larger": "--gpus 256 --hardware gb200 --ep 64 --remat full",
}


def compile_for(flags):
    command = [sys.executable, "-m", "moe_course.cli", "compile", *flags.split(), "--json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


compiled = (
    {name: compile_for(flags) for name, flags in COMMANDS.items()}
    if COMPILE
    else recorded("compiled-deepseek-v3")
)
on_64 = compiled["layer"]
print(f"{on_64['statement']}: {on_64['gpus']} {on_64['hardware']}, mesh {on_64['mesh']}")
for c in on_64["collectives"]:
    foretold = "" if c["predicted"] is None else f"formula {c['predicted'] / 1e9:.3f} GB"
    if c["bytes"] >= 1e7:
        print(
            f"{c['kind']:<15}{c['axis']:<14}{c['count']:>3} times {c['bytes'] / 1e9:>7.3f} GB sent   {foretold}"
        )

# %%
m, ranks = DEEPSEEK_V3, 8
forward = by_hand(4096, m.d_model, m.d_ff, m.num_experts, m.top_k, ranks, 8, 1.25, 2)["all-to-all"]
predict(
    "GB that a GPU sends in all-to-alls, forward and backward",
    ### BEGIN ANSWER
    (2 * forward - 4 * m.num_experts) * (ranks - 1) / ranks / 1e9,
    ### END ANSWER
    measured=next(c["bytes"] for c in on_64["collectives"] if c["kind"] == "all-to-all") / 1e9,
    unit="GB",
    within=0.01,
)

# %% [markdown]
# To the byte again, from another compiler. The package's formulas for the other lines were found by reading the program:
# where a number had no formula, somebody looked for its instruction. So they learned that the all-reduce over all GPUs is
# the gradient of the embedding, a whole [129280, 7168] matrix that every GPU sums and keeps. A reduce-scatter would send
# half as much.
#
# The whole model, 61 layers and 671 billion parameters, is the same command without `--layers 1`: 58 MoE layers are one body
# in a scan, and cost the compiler no more than four would. Remat is full: each layer is computed twice, and so its tokens
# travel there once more. (Back they need not: nothing reads the sum a second time.) Once more for 256 GPUs, with 64 expert
# ranks and the weights cut in 4.

# %%
model_64 = compiled["model"]
fig, (left, right) = plots.figure(8.6, 3.3, columns=2)
big = [c for c in model_64["collectives"] if c["bytes"] >= 1e9]
for place, c in enumerate(big):
    left.barh(place - 0.2, c["bytes"] / 1e9, height=0.36, color=plots.expert_color(0))
    left.barh(
        place + 0.2, (c["predicted"] or 0) / 1e9, height=0.36, color=plots.FAINT, edgecolor=plots.INK, lw=0.6
    )
left.barh(0, 0, color=plots.expert_color(0), label="compiled")
left.barh(0, 0, color=plots.FAINT, edgecolor=plots.INK, lw=0.6, label="formula")
left.set(
    yticks=range(len(big)),
    yticklabels=[f"{c['kind']}\n{c['axis']}" for c in big],
    xlabel="GB sent by a GPU in a step",
)
left.invert_yaxis()
left.legend(frameon=False, loc="lower right")
for place, run in enumerate((model_64, compiled["larger"])):
    parts = {"state": "state_bytes_per_gpu", "temporary": "temp_bytes_per_gpu", "reserve": "reserved_bytes"}
    at = 0.0
    for color, (name, key) in enumerate(parts.items()):
        size = run[key] / 1e9
        right.bar(place, size, bottom=at, width=0.6, color=plots.expert_color(2 + color))
        right.text(place, at + size / 2, f"{name} {size:.0f}", ha="center", va="center", fontsize=8.5)
        at += size
right.axhline(model_64["device_bytes"] / 1e9, color=plots.INK, lw=1.2, ls="--")
right.annotate("a GB200 has", (0.55, model_64["device_bytes"] / 1e9 + 4), fontsize=9)
right.set(ylabel="GB of a GPU", xticks=[0, 1], xticklabels=["64 GPUs", "256 GPUs"])
plots.show(fig, "DeepSeek-V3 compiled, never run: formulas meet the program, and 64 GPUs are too few")

# %% [markdown]
# ### Does it fit?
#
# State is arithmetic: weights and two moments in float32, 12 bytes for each parameter. The routed experts, 58 layers of 256
# with 3 · 7168 · 2048 numbers each, are cut over all 64 GPUs; the other 17.1 billion parameters over the 8 of `fsdp` alone,
# so every expert rank holds them again. Temporary is XLA's plan, good to some 10 GB. In neither are NCCL's buffers, the CUDA
# context, library workspaces and fragmentation: a reserve of 12 GB stays free.

# %%
predict(
    "GB of state for each of 64 GPUs",
    ### BEGIN ANSWER
    12 * (58 * 256 * 3 * 7168 * 2048 / 64 + 17.1e9 / 8) / 1e9,
    ### END ANSWER
    measured=model_64["state_bytes_per_gpu"] / 1e9,
    unit="GB",
    within=0.01,
)

# %%
for run in (model_64, compiled["larger"]):
    need, have = (run["needed_bytes_per_gpu"] + run["reserved_bytes"]) / 1e9, run["device_bytes"] / 1e9
    print(f"{run['gpus']:>3} GPUs: {need:.0f} GB of {have:.0f}, {'fits' if run['fits'] else 'does not fit'}")

# %% [markdown]
# ### Question 09.q5
#
# A configuration needs 309 GB on a GPU that has 198. What does the compiler do?
#
# **a** it refuses: out of memory · **b** it compiles, and says so in a line of its log at most · **c** it compiles, and
# the program runs slowly

# %%
quiz(
    "09.q5",
    ### BEGIN ANSWER
    "b",
    ### END ANSWER
)

# %% [markdown]
# ## The Transformer Engine way
#
# TE's GEMMs are custom calls: XLA and JAX see a name, operands and results, and nothing inside. That changes three things
# of this chapter. **Not run here**; names are those of TE 2.20.2.
#
# | here | with TE |
# |---|---|
# | sizes are data | `grouped_gemm` V2 reads them on the device; V1 copies them to the host, and is taken silently |
# | no trip to the host | `NVTE_JAX_ENFORCE_V2_GROUPED_GEMM=1`: V2, or an error that says why not |
# | one graph | V2 is marked for command buffers; the calls of expert parallelism are not |
# | `dots_saveable` and its kin | do not see TE's GEMMs: everything would be computed again |
# | keep a GEMM's result | `te_gemms_saveable` or `checkpoint_dots_and_te_gemms`, of `te.jax.checkpoint_policies` |
# | keep by name | `checkpoint_name=` of a quantiser names the *quantised* tensor: 8 bits kept, and no quantiser run twice |
# | FLOPs of the text | a custom call has none in it: add them by formula |
#
# ```python
# from transformer_engine.jax import checkpoint_policies as te_policies
#
# names = jax.checkpoint_policies.save_only_these_names("attention_out", "moe_expert_hidden")
# policy = jax.checkpoint_policies.save_from_both_policies(names, te_policies.te_gemms_saveable)
# layer = jax.checkpoint(layer, policy=policy)
# ```
#
# The published run (NVIDIA's blog, 14 September 2026) offloads its two largest named tensors to the host and records
# fusions, cuBLAS and cuDNN calls in command buffers.
#
# ## Bug museum
#
# ### Exhibit 1: a name that nothing has
#
# Modelled on AI-Hypercomputer/maxtext #4005: a policy listed names that the model's tensors did not carry. Mending names
# and shardings took a run from 120 to 360 TFLOP/s, as its authors report. Nothing had warned. Here is a layer whose tensor
# is called `moe_mlpwi_0`, and three policies.


# %%
def museum_layer(w, x):
    wide = checkpoint_name(x @ w["up"], "moe_mlpwi_0")
    return x + jnp.sin(wide) @ w["down"]


def museum_loss(policy):
    return lambda w, x: jnp.sin(jax.checkpoint(museum_layer, policy=policy)(w, x)).sum()


check_names = yours("09.6", package_lost)
for names in (["moe_mlpwi_0"], ["mlpwi_0"], ["moe_mlpwi_0", "moe_mlpwo"]):
    policy = keep(*names)
    kept_now = residuals(jax.checkpoint(museum_layer, policy=policy), w, x)
    print(
        f"asked for {', '.join(names):<24} kept {len(kept_now)}, lost {check_names(museum_loss(policy), names, w, x)}"
    )

# %% [markdown]
# ### Question 09.q6
#
# How would you notice the second one, without the check?
#
# **a** a warning when it is traced · **b** a loss that differs · **c** memory below the plan, FLOPs above it

# %%
quiz(
    "09.q6",
    ### BEGIN ANSWER
    "c",
    ### END ANSWER
)

# %% [markdown]
# ### Exhibit 2: compiled twice
#
# Modelled on google-deepmind/optax #1440, whose author lost eight seconds at the second step of every run. An optimizer
# keeps a running average of the loss.


# %%
@jax.jit
def museum_step(state, loss, rate):
    exhibit_traces.append(state["average"])
    average = 0.9 * state["average"] + 0.1 * loss
    return {"average": average, "count": state["count"] + 1}, rate * average


exhibit_traces, counts = [], []
museum_state = {"average": jnp.asarray(0.0), "count": jnp.int32(0)}
for number in range(5):
    museum_state, _ = museum_step(museum_state, jnp.float32(3.0 - number), jnp.float32(0.1))
    counts.append(len(exhibit_traces))
print("traces after each of five steps:", counts)

# %% [markdown]
# ### Question 09.q7
#
# What is it that differs between the first step and the second?
#
# **a** the average's weak type · **b** the learning rate · **c** the count

# %%
quiz(
    "09.q7",
    ### BEGIN ANSWER
    "a",
    ### END ANSWER
)

# %% [markdown]
# ## What changed in the package
#
# - `train/step.py` is one compiled function with a donated state, its shardings the same going in and coming out; what a
#   step decides (overflow, NaN) it decides on the device. A test asks for one cache entry after many steps.
# - `train/loop.py` reads a step's flags one step late, goes up a bucket when it must, and reports how many programs a run
#   compiled.
# - `layers/stack.py` scans over deep stacks of layers, so that depth costs no compile time; its `recompute` takes names.
# - `layers/block.py` and `experts.py` name what is worth keeping, before the activation; `models/deepseek.py` lists the
#   policies, and tests assert what they keep.
# - `aot/` is `moe-course compile`: your two readers with all the cases that XLA has, formulas beside the program, memory
#   with a margin.
#
# ## Further reading
#
# - Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174: recomputation.
# - Reducing Activation Recomputation in Large Transformer Models, arXiv 2205.05198: what is worth keeping.
# - GSPMD, arXiv 2105.04663: one program, a sharding for each tensor, collectives from both.
# - Operator Fusion in XLA: Analysis and Evaluation, arXiv 2301.13062.
# - Scalable Training of Mixture-of-Experts Models with Megatron Core, arXiv 2603.07685: CUDA graphs around ragged experts.
# - JAX's documentation: ahead-of-time lowering, buffer donation, gradient checkpointing, host offloading.
#
# Next: 10, where bytes and FLOPs become a plan for 1,024 GPUs.
