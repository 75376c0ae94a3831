# %% [markdown]
# # 06 The MoE layer
#
# Take a trained dense feed-forward, copy it into each of eight experts, and put a router of random weights in front:
# two picks, weights that sum to 1. How far is the new layer's output from the old one's, before a single step of
# training? And how large is the gradient that the router gets? Write down two numbers.
#
# You have a router (02), a way to move rows (04) and a way to multiply them (05). This chapter puts them together: the
# expert, the layer, its backward pass, and a Flax module that replaces a dense feed-forward in a model that exists. At
# the end, your layer agrees with Hugging Face's DeepSeek-V3 on the same weights.
#
# You will be able to
#
# - write a SwiGLU expert over grouped rows, forward and backward,
# - say what fusing the expert saves, and measure it,
# - put a MoE layer into a Flax NNX model, and upcycle a dense one,
# - read a checkpoint's experts into two arrays, and prove that you did it right.
#
# Five exercises, about an hour and a quarter. Everything runs on the CPU.

# %%
from moe_course.environment import setup

status = setup()

# %%
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_course.experts import activate, swiglu_experts
from moe_course.grouped_gemm import grouped_gemm
from moe_course.grouping import group_by_expert, permute, unpermute
from moe_course.layers.linear import SwiGLU
from moe_course.lessons import check, plots, predict, quiz, rounded, yours
from moe_course.lessons.properties.ch06_golden import SETTINGS, golden
from moe_course.lessons.widgets import explore
from moe_course.routing import RouterConfig, route

# %% [markdown]
# ## Exercise 06.1: SwiGLU
#
# One half decides, the other passes. · difficulty ● · 5 minutes · used again in 08, 11
#
# An expert is `down(silu(gate) * up)`, where gate and up come out of one product of twice the width (Shazeer, arXiv
# 2002.05202). silu(x) = x sigmoid(x). In bfloat16, silu rounds once and the product again, so go to float32 between the
# products and come back at the end. By hand, gate [0, 1, -1, 10], up [1, 2, 2, 1]:

# %%
print(rounded(activate(jnp.array([[0.0, 1.0, -1.0, 10.0, 1.0, 2.0, 2.0, 1.0]]))[0]))


# %%
def swiglu(hidden):
    """silu(gate) * up.

    Args:
      hidden: [M, 2F], float32 or bfloat16: the gate is the first half, up the second.

    Returns: [M, F], computed in float32, in the dtype of hidden.
    """
    ### BEGIN SOLUTION
    gate, up = jnp.split(hidden.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(hidden.dtype)
    ### END SOLUTION


check("06.1", swiglu)  # stuck? hint("06.1"), up to four times

# %% [markdown]
# ## Exercise 06.2: the experts
#
# Two grouped products with an activation between them. · difficulty ●● · 15 minutes · used again in 07, 08, 11
#
# The grouped product is an argument, `gemm`, because what it leaves past the last group depends on who wrote it: zeros
# on a CPU, whatever was in memory on a GPU. The check hands you one that leaves NaN and inf there. Your result is 0 in
# those rows. By hand, one row of ones, D = F = 1, gate 1, up 2, down 3: silu(1) · 2 · 3 = 4.39.

# %%
print(
    rounded(swiglu_experts(jnp.ones((1, 1)), jnp.array([[[1.0, 2.0]]]), jnp.array([[[3.0]]]), jnp.array([1])))
)


# %%
def expert_mlp(rows, gate_up, down, group_sizes, gemm):
    """Each row through the SwiGLU MLP of its own expert.

    Args:
      rows: [M, D] float32, group after group; past sum(group_sizes) they may hold anything, NaN included.
      gate_up: [E, D, 2F] float32, gate first.
      down: [E, F, D] float32.
      group_sizes: [E] int32, on the device.
      gemm: gemm(rows, kernels, group_sizes), a grouped product. What it leaves past the groups is anything.

    Returns: [M, D] float32, 0 past the last group.
    """
    ### BEGIN SOLUTION
    live = (jnp.arange(rows.shape[0]) < group_sizes.sum())[:, None]
    hidden = gemm(rows, gate_up, group_sizes)
    gate, up = jnp.split(hidden, 2, axis=-1)
    out = gemm(jax.nn.silu(gate) * up, down, group_sizes)
    return jnp.where(live, out, 0)
    ### END SOLUTION


check("06.2", expert_mlp)  # stuck? hint("06.2")

# %% [markdown]
# ## Fused
#
# Between the two products stands an array of [M, F] and before it one of [M, 2F]. Written and read again, they are most
# of the memory traffic of a fine-grained expert. `swiglu_experts` walks over tiles (05.4) and runs both products and
# the activation while a tile is in cache. XLA says how much temporary memory a compiled program asks for. Yours has two
# grouped products; count the arrays of the forward pass that must exist as a whole.

# %%
M, D, F, E = 4096, 64, 128, 8
rng = np.random.default_rng(6)


def normal(*shape):
    return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-2]), jnp.float32)


bank = normal(M, D), normal(E, D, 2 * F), normal(E, F, D), jnp.full(E, M // E, jnp.int32)


def apart(rows, gate_up, down, sizes):
    return grouped_gemm(activate(grouped_gemm(rows, gate_up, sizes)), down, sizes)


def temporary_mib(fn):
    return jax.jit(fn).lower(*bank).compile().memory_analysis().temp_size_in_bytes / 2**20


mib = {"two grouped products": temporary_mib(apart), "fused": temporary_mib(swiglu_experts)}
hidden_mib = M * 2 * F * 4 / 2**20
fig, ax = plots.figure(7.0, 1.9)
ax.barh(list(mib), list(mib.values()), color=[plots.expert_color(1), plots.expert_color(0)], height=0.55)
ax.axvline(hidden_mib, color=plots.INK, lw=0.8, ls="--")
ax.annotate(
    "one array [M, 2F]", (hidden_mib, 1), xytext=(5, 0), textcoords="offset points", fontsize=9, va="center"
)
ax.invert_yaxis()
ax.set(xlabel="temporary memory of the forward pass, MiB (XLA on a CPU)")
plots.show(fig, "Fused experts never hold the hidden layer as a whole")
print("fused needs less than one hidden array:", mib["fused"] < hidden_mib)

# %% [markdown]
# ### Question 06.q1
#
# What does fusing save?
#
# **a** rounding · **b** multiplications · **c** writing and reading the hidden layer

# %%
quiz(
    "06.q1",
    ### BEGIN ANSWER
    "c",
    ### END ANSWER
)

# %% [markdown]
# ## Exercise 06.3: the layer
#
# Tokens in, weighted answers out. · difficulty ●●● · 15 minutes · used again in 07, 11, 12
#
# Use what you have: `group_by_expert`, `permute` and `unpermute` from chapter 04's package, and the experts from 06.2 or
# `swiglu_experts`. By hand, D = 1, experts that multiply by about 1, 10, 100, picks [0, 2] with weights [0.25, 0.75]:
# a token of value 1 gets a quarter of expert 0's answer and three quarters of expert 2's. A token with the id E, which
# is padding, gets 0.


# %%
def moe(x, expert_ids, weights, gate_up, down):
    """The routed part of a MoE layer, dropless.

    Args:
      x: [T, D] float32.
      expert_ids: [T, K] int32, E for no expert.
      weights: [T, K] float32, combine weights: they multiply the experts' outputs.
      gate_up: [E, D, 2F], down: [E, F, D], float32.

    Returns: [T, D] float32.
    """
    ### BEGIN SOLUTION
    groups = group_by_expert(expert_ids, gate_up.shape[0])
    rows = swiglu_experts(permute(x, groups), gate_up, down, groups.group_sizes)
    return unpermute(rows, groups, weights)
    ### END SOLUTION


check("06.3", moe)  # stuck? hint("06.3")


# %%
def package_moe(x, expert_ids, weights, gate_up, down):
    groups = group_by_expert(expert_ids, gate_up.shape[0])
    rows = swiglu_experts(permute(x, groups), gate_up, down, groups.group_sizes)
    return unpermute(rows, groups, weights)


layer = jax.jit(yours("06.3", package_moe))

# %% [markdown]
# Ten tokens through eight experts with three picks. Each piece of a bar is the length of what one pick adds to its
# token, in the colour of the expert; the first pick is at the bottom.

# %%
x = normal(10, D) * 8
logits = normal(10, E) * 4
picked = jax.jit(route, static_argnames="config")(logits, config=RouterConfig(E, 3))
alone = [
    layer(x, picked.expert_ids[:, k : k + 1], picked.weights[:, k : k + 1], *bank[1:3]) for k in range(3)
]
fig, ax = plots.figure(7.0, 2.6)
left = np.zeros(10)
for k, part in enumerate(alone):
    size = np.linalg.norm(part, axis=-1)
    colors = [plots.expert_color(int(e)) for e in picked.expert_ids[:, k]]
    ax.bar(range(10), size, bottom=left, color=colors, edgecolor=plots.PAPER, width=0.75)
    for t in range(10):
        if size[t] > 3.0:
            middle = left[t] + size[t] / 2
            ax.text(
                t,
                middle,
                str(int(picked.expert_ids[t, k])),
                ha="center",
                va="center",
                color="white",
                fontsize=9,
            )
    left += size
ax.set(xlabel="token (the number is the expert)", ylabel="length of what a pick adds", xticks=range(10))
plots.show(fig, "A token hears its experts in order: the first pick usually speaks loudest")

# %% [markdown]
# ## Exercise 06.4: backward of one tile
#
# An expert, differentiated by hand. · difficulty ●●●● · 25 minutes · used again in 08, 09
#
# The forward pass saved `hidden`, so the backward pass of a tile is four matrix products: two for each of the two
# products. Computing `hidden` again would be a fifth; whether to save or to compute again is chapter 09's question. By
# hand, all dimensions 1: x = 1, gate = up = down = 1, d_y = 1. silu(1) = 0.731 and its slope is 0.928, so
# d_down = 0.731, d_gate = 0.928, d_up = 0.731 and d_x = 0.928 + 0.731 = 1.659.


# %%
def tile_backward(x, hidden, gate_up, down, d_y):
    """The gradients of y = (silu(gate) * up) @ down, where gate, up = halves of hidden = x @ gate_up.

    Args:
      x: [n, D] float32, the rows of one expert.
      hidden: [n, 2F] float32, x @ gate_up, saved by the forward pass.
      gate_up: [D, 2F], down: [F, D], float32: one expert's.
      d_y: [n, D] float32.

    Returns: (d_x [n, D], d_gate_up [D, 2F], d_down [F, D]), by four matrix products.
    """
    ### BEGIN SOLUTION
    gate, up = jnp.split(hidden, 2, axis=-1)
    s = jax.nn.sigmoid(gate)
    act = gate * s * up
    d_act = d_y @ down.T
    d_hidden = jnp.concatenate([d_act * up * (s + gate * s * (1 - s)), d_act * gate * s], axis=-1)
    return d_hidden @ gate_up.T, x.T @ d_hidden, act.T @ d_y
    ### END SOLUTION


check("06.4", tile_backward)  # stuck? hint("06.4")

# %% [markdown]
# ## Into a Flax model
#
# Here is a small residual model as you might find it: blocks with a dense feed-forward, in Flax NNX. The MoE below has
# the same interface, so putting it in is one assignment. It starts as eight copies of what it replaces, which is called
# **upcycling** (Komatsuzaki et al., arXiv 2212.05055).


# %%
class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.ffn = SwiGLU(16, 32, std=0.3, down_std=0.3, dtype="float32", rngs=rngs)

    def __call__(self, x):
        return x + self.ffn(self.norm(x))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(3)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Upcycled(nnx.Module):
    """E copies of a dense feed-forward behind a router of random weights."""

    def __init__(self, dense, num_experts, top_k, rngs):
        copies = (num_experts, 1, 1)
        self.config = RouterConfig(num_experts, top_k)
        self.router = nnx.Param(0.3 * jax.random.normal(rngs.params(), (16, num_experts), jnp.float32))
        self.gate_up = nnx.Param(jnp.tile(dense.gate_up.kernel[...], copies))
        self.down = nnx.Param(jnp.tile(dense.down.kernel[...], copies))

    def __call__(self, x):
        chosen = route(x @ self.router[...], self.config)
        return layer(x, chosen.expert_ids, chosen.weights, self.gate_up[...], self.down[...])


tokens, target = normal(32, 16) * 4, normal(32, 16)


@nnx.jit
def measure(model):
    """(output, gradient) of a model on the tokens."""

    def loss(model):
        y = model(tokens)
        return ((y - target) ** 2).mean(), y

    (_, y), gradient = nnx.value_and_grad(loss, has_aux=True)(model)
    return y, gradient


model = Model(nnx.Rngs(0))
before, _ = measure(model)
model.blocks[1].ffn = Upcycled(model.blocks[1].ffn, 8, 2, nnx.Rngs(1))
after, gradient = measure(model)
predict(
    "largest difference of the output, over its largest value",
    ### BEGIN ANSWER
    0,
    ### END ANSWER
    measured=round(float(jnp.abs(after - before).max() / jnp.abs(before).max()), 4),
)
experts_gradient = float(jnp.abs(gradient.blocks[1].ffn.down[...]).max())
predict(
    "largest gradient of the router, over the experts' largest",
    ### BEGIN ANSWER
    0,
    ### END ANSWER
    measured=round(float(jnp.abs(gradient.blocks[1].ffn.router[...]).max()) / experts_gradient, 4),
)

# %% [markdown]
# ### Question 06.q2
#
# Why does the router get no gradient?
#
# **a** the output does not depend on it while all experts are alike · **b** a softmax over two picks has none · **c**
# top-k stops it

# %%
quiz(
    "06.q2",
    ### BEGIN ANSWER
    "a",
    ### END ANSWER
)

# %% [markdown]
# Break the symmetry: add noise to the copies, in percent of a weight's mean size, and measure how the router's gradient
# grows with it, and how far the output moves from the dense model's.

# %%
noises = np.array([0.0, 0.01, 0.03, 0.1, 0.3])
clean = model.blocks[1].ffn.down[...]
noise = normal(8, 32, 16) * np.sqrt(32) * jnp.abs(clean).mean()
learns, moves = [], []
for amount in noises:
    model.blocks[1].ffn.down[...] = clean + float(amount) * noise
    noisy, gradient = measure(model)
    grown = gradient.blocks[1].ffn
    learns.append(float(jnp.linalg.norm(grown.router[...]) / jnp.linalg.norm(grown.down[...])))
    moves.append(float(jnp.linalg.norm(noisy - before) / jnp.linalg.norm(before)))
model.blocks[1].ffn.down[...] = clean
fig, ax = plots.figure(7.0, 2.6)
ax.plot(100 * np.array(moves), learns, color=plots.expert_color(0), marker="o", lw=2.2)
for amount, x_at, y_at in zip(noises[2:], moves[2:], learns[2:], strict=True):
    ax.annotate(
        f"noise {100 * amount:.0f} %",
        (100 * x_at, y_at),
        xytext=(-8, 4),
        textcoords="offset points",
        ha="right",
    )
ax.set(
    xlabel="change of the model's output, %", ylabel="router's gradient\nover the experts'", ylim=(0, None)
)
plots.show(fig, "A router learns from differences between experts, and those cost output")

# %% [markdown]
# ## Playground
#
# A model's layer by parameters: all of them must be stored, but a token multiplies only some. Move the number of
# experts, the picks, and the width of an expert (the dense layer that it replaces has width 1). Ask the picture: how do
# you quadruple the parameters and keep the work? What does DeepSeek do that Mixtral does not: many narrow experts
# (fine-grained) and one that everybody visits (shared)?


# %%
def playground(experts, picks, shared, width):
    fraction = {"1, as Mixtral": 1.0, "1/2": 0.5, "1/4": 0.25, "1/8, as DeepSeek": 0.125}[width]
    picks = min(picks, experts)
    stored, active = (experts + shared) * fraction, (picks + shared) * fraction
    fig, ax = plots.figure(7.0, 1.9)
    for e in range(experts):
        used = {"alpha": 1.0} if e < picks else {"alpha": 0.25}
        ax.barh(1, fraction, left=e * fraction, color=plots.expert_color(e), edgecolor=plots.PAPER, **used)
    ax.barh(1, shared * fraction, left=experts * fraction, color=plots.INK)
    ax.barh(0, 1.0, color=plots.FAINT, edgecolor=plots.INK)
    ax.set(
        yticks=[0, 1],
        yticklabels=["dense", "MoE"],
        xlabel="parameters, in dense layers (faded: not used by this token)",
    )
    return (
        fig,
        f"{stored:g} dense layers stored, {active:g} multiplied by each token: {stored / active:.3g} to 1",
    )


explore(
    playground,
    experts=(1, 32, 16),
    picks=(1, 8, 3),
    shared=(0, 2, 1),
    width=["1/4", "1, as Mixtral", "1/2", "1/8, as DeepSeek"],
)

# %% [markdown]
# ## Exercise 06.5: from a checkpoint
#
# Read experts that others trained. · difficulty ●● · 10 minutes · used again in 11, 12, 13
#
# A DeepSeek checkpoint has three tensors for each expert, `experts.{e}.gate_proj.weight` [F, D], `.up_proj.weight`
# [F, D] and `.down_proj.weight` [D, F]: torch's Linear keeps [out, in] and computes `x @ w.T`. Ours are two arrays,
# [E, D, 2F] and [E, F, D]. By hand, one expert with D = F = 1: gate 1, up 2, down 3 become [[[1, 2]]] and [[[3]]].


# %%
def stack_experts(state, num_experts):
    """Two banks of expert weights from a checkpoint's tensors.

    Args:
      state: dict of float32 arrays by name, in any order; names of other tensors are there too.
      num_experts: E.

    Returns: (gate_up [E, D, 2F], gate first; down [E, F, D]), experts in the order of their numbers.
    """

    ### BEGIN SOLUTION
    def bank(part):
        return jnp.stack([state[f"experts.{e}.{part}_proj.weight"].T for e in range(num_experts)])

    return jnp.concatenate([bank("gate"), bank("up")], axis=-1), bank("down")
    ### END SOLUTION


check("06.5", stack_experts)  # stuck? hint("06.5")

# %% [markdown]
# ## Parity with Hugging Face
#
# The proof of a reimplementation is the other implementation's numbers. `ch06_golden.npz` holds one MoE layer of
# DeepSeek-V3 as transformers 5.24.0 computed it with torch 2.13.0 on a CPU: random weights under a checkpoint's names,
# an input of seven tokens, the output. Twelve experts in four groups, four picks from the best two groups, a bias that
# is not 0, a shared expert. Nothing here needs torch; with it,
# `python -m moe_course.lessons.properties.ch06_golden` computes the file anew and prints the difference.
#
# Put everything together: chapter 02's router, your experts, and the shared expert that every token visits.


# %%
def package_stack(state, num_experts):
    parts = {
        part: jnp.stack([state[f"experts.{e}.{part}_proj.weight"].T for e in range(num_experts)])
        for part in ("gate", "up", "down")
    }
    return jnp.concatenate([parts["gate"], parts["up"]], axis=-1), parts["down"]


def deepseek_layer(state, x):
    config = RouterConfig(
        SETTINGS["num_experts"],
        SETTINGS["top_k"],
        "sigmoid",
        True,
        SETTINGS["scaling_factor"],
        SETTINGS["num_groups"],
        SETTINGS["top_groups"],
    )
    chosen = route(x @ state["gate.weight"].T, config, bias=state["gate.e_score_correction_bias"])
    gate_up, down = yours("06.5", package_stack)(state, config.num_experts)
    routed = layer(x, chosen.expert_ids, chosen.weights, gate_up, down)
    gate, up, out = (state[f"shared_experts.{part}_proj.weight"].T for part in ("gate", "up", "down"))
    return routed + (jax.nn.silu(x @ gate) * (x @ up)) @ out, chosen.expert_ids


stored = {name: jnp.asarray(value) for name, value in golden().items()}
y, expert_ids = jax.jit(deepseek_layer)(stored, stored["x"])
same_visits = (jnp.sort(expert_ids) == jnp.sort(stored["expert_ids"])).all()
error = jnp.abs(y - stored["y"]).max() / jnp.abs(stored["y"]).max()
print("the same experts for all tokens:", bool(same_visits))
print("largest error below 16 eps of the largest output:", bool(error < 16 * jnp.finfo(jnp.float32).eps))

# %% [markdown]
# ### Question 06.q3
#
# For which weights would a missing transposition pass unseen, if all you compare is shapes?
#
# **a** for those with D ≠ F · **b** for square ones · **c** for none, names carry the orientation

# %%
quiz(
    "06.q3",
    ### BEGIN ANSWER
    "b",
    ### END ANSWER
)

# %% [markdown]
# ## The Transformer Engine way
#
# The expert of 06.2 on one GPU, from TE's parts. **Not run here**: the calls, as text.
#
# ```python
# from transformer_engine.jax.dense import grouped_dense
# from transformer_engine.jax.permutation import token_combine, token_dispatch
#
# rows, row_weights, row_id_map, pad_offsets, sizes = token_dispatch(x, routing_map, T * K, probs=probs, align_size=128)
# gate, up = jnp.split(grouped_dense(rows, gate_up, sizes), 2, axis=-1)
# out = grouped_dense(jax.nn.silu(gate) * up, down, sizes)
# live = (jnp.arange(out.shape[0]) < sizes.sum())[:, None]
# out = jnp.where(live, out * row_weights[:, None].astype(out.dtype), 0)  # the tail may be unwritten
# y = token_combine(out, row_id_map, pad_offsets=pad_offsets)
# ```
#
# TE also has the whole layer with expert parallelism, `transformer_engine.jax.moe.moe`, and a Flax module around it,
# `transformer_engine.jax.flax._MoEBlock`. The underscore means experimental; its tests skip below Blackwell. Its
# module is Linen, not NNX: from NNX, call the function.
#
# ## Bug museum: the early gate
#
# A Switch layer from a well-known annotated implementation (labmlai/annotated_deep_learning_paper_implementations #95)
# multiplied the router's probability into the expert's *input*. It trained, somewhat worse. The exhibit, next to the
# right answer, for a token whose pick has weight w:


# %%
def museum_moe(x, expert_ids, weights, gate_up, down):
    groups = group_by_expert(expert_ids, gate_up.shape[0])  # a
    row_weights = weights.reshape(-1).at[groups.slot_of_row].get(mode="fill", fill_value=0)
    rows = permute(x, groups) * row_weights[:, None]  # b
    return unpermute(swiglu_experts(rows, gate_up, down, groups.group_sizes), groups)  # c


one = jnp.zeros((1, 1), jnp.int32)
museum = jax.jit(museum_moe)
shrunk = np.array([1.0, 0.8, 0.6, 0.4, 0.2])
full = jnp.linalg.norm(layer(x[:1], one, jnp.ones((1, 1)), *bank[1:3]))
for name, fn in (("right  ", layer), ("exhibit", museum)):
    lengths = [float(jnp.linalg.norm(fn(x[:1], one, jnp.full((1, 1), w), *bank[1:3])) / full) for w in shrunk]
    print(f"{name} length of the answer for weights {shrunk.tolist()}: {rounded(lengths, 1)}")

# %% [markdown]
# ### Question 06.q4
#
# Which unit test passes with the exhibit?
#
# **a** softmax weights on random tokens · **b** random weights and a SwiGLU expert · **c** all weights 1

# %%
quiz(
    "06.q4",
    ### BEGIN ANSWER
    "c",
    ### END ANSWER
)

# %% [markdown]
# ## What changed in the package
#
# `moe_course/experts.py` and `moe_course/layers/moe.py` are now yours to read.
#
# - `swiglu_experts` is 05.4's walk with 06.4 as its derivative: four products for each tile, sums in float32, and the
#   hidden rows saved under a name, so that chapter 09 can decide to compute them again.
# - The combine weights go into the experts and multiply the activation: on many devices the answers travel weighed,
#   and the weights' gradient needs no saved answer.
# - Dispatch and combine stand where permute and unpermute stood: chapter 07's, one interface for one device or many.
# - The layer returns its statistics, load and balance losses, as outputs. A side effect would count twice where a layer
#   is computed again.
#
# ## Further reading
#
# - GLU Variants Improve Transformer, arXiv 2002.05202: SwiGLU.
# - Sparse Upcycling, arXiv 2212.05055, and Upcycling Large Language Models into Mixture of Experts, arXiv 2410.07524.
# - DeepSeekMoE, arXiv 2401.06066: fine-grained and shared experts. DeepSeek-V3, arXiv 2412.19437.
# - MegaBlocks, arXiv 2211.15841, and ScatterMoE, arXiv 2403.08245: layers whose experts are fused differently.
#
# Next: 07, where the experts live on other devices.
