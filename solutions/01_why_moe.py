# %% [markdown]
# # 01 Why Mixture of Experts
#
# Mixtral 8x7B, it says on the tin: eight experts of seven billion parameters. How many parameters does the model have,
# and how many of them does one token use? Write both numbers down. (The obvious two, 56 and 14 billion, are both wrong.)
#
# A dense model uses every parameter for every token. A Mixture of Experts stores many and uses few: **conditional
# compute**. This chapter does the arithmetic of that bargain for two published models, names the three walls you run
# into when you take it, and builds the layer in the most obvious way, a loop. The loop is right, and it is slow in a way
# that the rest of the course is about.
#
# You will be able to
#
# - tell total from active parameters, and say which one memory, compute and communication follow,
# - count the FLOPs of a training step and catch a utilisation that is 3.5 times too good,
# - build a MoE layer from a dense feed-forward,
# - say why the loop wastes E / K of its work under `jit`, and recompiles without end outside it.
#
# Five exercises, about fifty minutes. Everything runs on the CPU.

# %%
from moe_course.environment import setup

status = setup()

# %%
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from moe_course.lessons import check, plots, predict, quiz, yours
from moe_course.lessons.properties.ch01 import every_expert
from moe_course.lessons.widgets import explore
from moe_course.models.config import DEEPSEEK_V2_LITE, DEEPSEEK_V3
from moe_course.routing import RouterConfig, route
from moe_course.scaling.flops import forward_flops, moe_flops, parameter_counts, swiglu_flops, training_flops

# %% [markdown]
# ## Conditional compute
#
# Twelve tokens, eight experts. A square is work: an expert's feed-forward applied to a token. A dense model of the same
# size would fill the table. A router that picks two fills a quarter of it, and the other three quarters are parameters
# that this token did not pay for.

# %%
rng = np.random.default_rng(10)
logits = jnp.asarray(rng.normal(size=(12, 8)), jnp.float32)
routing = route(logits, RouterConfig(num_experts=8, top_k=2))
plots.show(
    plots.routing_map(routing.expert_ids, num_experts=8),
    "24 of 96 squares of work: each token uses 2 of 8 experts",
)

# %% [markdown]
# ## Exercise 01.1: one feed-forward
#
# Count a SwiGLU. · difficulty ● · 5 minutes · used again in 05, 10
#
# `down(silu(gate(x)) * up(x))` (arXiv 2002.05202), three matrices, no biases. A multiply and an add are two FLOPs; only
# matrix products count, an activation is noise beside them. By hand, D = 2 and F = 3: each matrix has 6 entries, 18 in
# all; one token touches each entry once, 36 FLOPs.

# %%
print("FLOPs of D = 2, F = 3:", swiglu_flops(2, 3))


# %%
def ffn_cost(d_model, d_ff):
    """Size and work of a SwiGLU feed-forward.

    Args:
      d_model: D, width of the residual stream.
      d_ff: F, hidden width.

    Returns: (parameters, FLOPs of one forward pass for one token), whole numbers.
    """
    ### BEGIN SOLUTION
    parameters = 3 * d_model * d_ff
    return parameters, 2 * parameters
    ### END SOLUTION


check("01.1", ffn_cost)  # stuck? hint("01.1"), up to four times

# %% [markdown]
# ## Exercise 01.2: total and active
#
# Count a MoE layer. · difficulty ● · 10 minutes · used again in 06, 10, 11
#
# E experts like the one above, a router that is one matrix [D, E], and perhaps shared experts, which every token uses
# besides its K picks (DeepSeekMoE, arXiv 2401.06066). **Total** is what you store, **active** what one token uses. By
# hand, D = 2, F = 3, E = 4, K = 2, none shared: an expert has 18, the router 8; total 4 · 18 + 8 = 80, active 2 · 18 + 8
# = 44. The router scores all experts whatever it picks.


# %%
def moe_parameters(d_model, d_ff, num_experts, top_k, num_shared):
    """Parameters of a MoE layer.

    Args:
      d_model, d_ff: of one expert, routed or shared.
      num_experts: E, routed experts.
      top_k: K, picks per token.
      num_shared: shared experts, on top of E and K.

    Returns: (total, active), whole numbers, router included in both.
    """
    ### BEGIN SOLUTION
    expert, router = 3 * d_model * d_ff, d_model * num_experts
    return (num_experts + num_shared) * expert + router, (top_k + num_shared) * expert + router
    ### END SOLUTION


check("01.2", moe_parameters)  # stuck? hint("01.2")

# %% [markdown]
# ## Mixtral, worked
#
# 32 layers; D = 4,096; F = 14,336; 8 experts, 2 picks; attention with 32 query heads and 8 key-value heads of 128;
# 32,000 words in the embedding and again in the head (arXiv 2401.04088).


# %%
def package_parameters(d_model, d_ff, num_experts, top_k, num_shared):
    expert, router = swiglu_flops(d_model, d_ff) // 2, d_model * num_experts
    return (num_experts + num_shared) * expert + router, (top_k + num_shared) * expert + router


count = yours("01.2", package_parameters)
attention = 4096 * 32 * 128 * 2 + 4096 * 8 * 128 * 2  # queries and output; keys and values
around = 2 * 32_000 * 4096
mixtral = [32 * (attention + layer) + around for layer in count(4096, 14_336, 8, 2, 0)]
print(f"Mixtral 8x7B: {mixtral[0] / 1e9:.1f} billion in all, {mixtral[1] / 1e9:.1f} used by a token")

# %% [markdown]
# ### Question 01.q1
#
# How large is a model with eight experts "of 7B"?
#
# **a** 56 billion parameters · **b** 47 billion, of which a token uses 13 · **c** 13 billion

# %%
quiz(
    "01.q1",
    ### BEGIN ANSWER
    "b",
    ### END ANSWER
)

# %% [markdown]
# ## DeepSeek-V3, worked
#
# 61 layers, of which the first 3 are dense; D = 7,168; 256 experts of F = 2,048, 8 picks, one shared (arXiv 2412.19437).
# Many small experts instead of few large ones: 256 choose 8 is 4 · 10¹⁴ teams, 8 choose 2 is 28. The parts that every
# token multiplies by (attention, dense layers, head) come to 13.53 billion. Predict what a token uses of the model. (The
# embedding is looked up, and DeepSeek leaves its 0.93 billion out of the 37; Mixtral's 12.9 has the 0.13 in it.)

# %%
v3 = parameter_counts(replace(DEEPSEEK_V3, mtp_depth=0))
predict(
    "active parameters of DeepSeek-V3",
    ### BEGIN ANSWER
    13.53 + 58 * 9 * 3 * 7168 * 2048 / 1e9 + 58 * 7168 * 256 / 1e9,
    ### END ANSWER
    measured=round(v3.active / 1e9, 2),
    unit="billion",
    within=0.005,
)

# %%
lite = parameter_counts(DEEPSEEK_V2_LITE)
models = {
    "Mixtral 8x7B": mixtral,
    "DeepSeek-V2-Lite": (lite.total, lite.active),
    "DeepSeek-V3": (v3.total, v3.active),
}
fig, ax = plots.figure(height=2.4)
for row, (total, active) in enumerate(models.values()):
    ax.barh(row, 100, color=plots.FAINT)
    ax.barh(row, 100 * active / total, color=plots.expert_color(0))
    ax.annotate(f"{active / 1e9:.3g} of {total / 1e9:.3g} billion", (99, row), va="center", ha="right")
ax.set(yticks=range(3), yticklabels=list(models), xlim=(0, 100), ylim=(2.6, -0.6))
ax.set_xlabel("share of the parameters that one token uses, %")
plots.show(fig, "The newer the model, the smaller the share of it that a token uses")

# %% [markdown]
# ## Exercise 01.3: a training step
#
# Count its FLOPs per token. · difficulty ●● · 10 minutes · used again in 10, 12
#
# Each matrix costs 2 FLOPs a parameter forward, and backward twice that (gradient of the input, gradient of the matrix).
# Attention multiplies activations with each other, which belongs to no parameter: for every layer and head, a token
# compares its query with the keys (qk_dim multiply-adds each) and sums the values (v_dim each). It sees only earlier
# positions, half of seq_len on average. By hand, with 10 parameters, seq_len 4, 1 layer, 1 head, widths 3 and 2: forward
# 2 · 10 + 2 · (4 / 2) · (3 + 2) = 40, a step 120.


# %%
def training_step_flops(matmul_parameters, seq_len, num_layers, num_heads, qk_dim, v_dim):
    """FLOPs per token of one training step, causal attention, nothing recomputed.

    Args:
      matmul_parameters: parameters in matrix products that a token uses. (An embedding is looked up: no product.)
      seq_len, num_layers, num_heads: of the attention.
      qk_dim, v_dim: widths of a head's queries and keys, and of its values.

    Returns: FLOPs per token, a number.
    """
    ### BEGIN SOLUTION
    attention = num_layers * num_heads * seq_len * (qk_dim + v_dim)
    return 3 * (2 * matmul_parameters + attention)
    ### END SOLUTION


check("01.3", training_step_flops)  # stuck? hint("01.3")


# %%
def package_step(matmul_parameters, seq_len, num_layers, num_heads, qk_dim, v_dim):
    return 6 * matmul_parameters + 3 * num_layers * num_heads * seq_len * (qk_dim + v_dim)


step = yours("01.3", package_step)
in_products = v3.active - v3.norms
by_hand = step(in_products, 4096, 61, 128, 192, 128)
from_config = sum(training_flops(replace(DEEPSEEK_V3, mtp_depth=0), 4096).values())
print(
    f"DeepSeek-V3, 4,096 tokens: {by_hand / 1e9:.1f} GFLOP per token; the package says {from_config / 1e9:.1f}"
)

terms = forward_flops(replace(DEEPSEEK_V3, mtp_depth=0), 4096)
largest = sorted(terms, key=terms.get, reverse=True)[:6]
fig, ax = plots.figure(height=2.4)
ax.barh(range(6), [100 * terms[name] / sum(terms.values()) for name in largest], color=plots.expert_color(0))
ax.set(
    yticks=range(6), yticklabels=largest, ylim=(5.6, -0.6), xlabel="share of DeepSeek-V3's forward FLOPs, %"
)
plots.show(fig, "The routed experts do half of the work: everything around them has to be fast too")

# %% [markdown]
# ### Question 01.q2
#
# A token uses 37 of 671 billion parameters. What does a training step have to keep in memory?
#
# **a** weights and optimizer moments of the active parameters · **b** of the experts that got a token in this step ·
# **c** of all parameters

# %%
quiz(
    "01.q2",
    ### BEGIN ANSWER
    "c",
    ### END ANSWER
)

# %% [markdown]
# ## Three walls
#
# **Memory.** Compute follows the active parameters; memory follows the total. At 16 bytes a parameter in training (fp32
# master weight, two moments, a gradient), DeepSeek-V3 needs 10.7 TB before the first activation, 134 devices of 80 GB.
#
# **Communication.** So the experts live on different devices, and every token travels to its picks and back, in every
# layer. Predict: 8 devices, experts dealt out evenly, 8 picks of 256 experts at random. What share of the token copies
# has to leave its device?

# %%
owner = (
    np.asarray(route(jnp.asarray(rng.normal(size=(4096, 256)), jnp.float32), RouterConfig(256, 8)).expert_ids)
    // 32
)
home = np.arange(4096)[:, None] // 512
predict(
    "copies that leave their device, %",
    ### BEGIN ANSWER
    100 * 7 / 8,
    ### END ANSWER
    measured=round(100 * float((owner != home).mean()), 1),
    within=0.01,
)

# %% [markdown]
# **Compute.** What is left on a device is many small matrix products instead of one large one, and a small product waits
# for its weights to arrive from memory.
#
# ## Exercise 01.4: the compute wall
#
# Find the batch that keeps the arithmetic busy. · difficulty ●●● · 10 minutes · used again in 05, 10
#
# A device reads each weight once per batch and then uses it for each row that its expert got, with two FLOPs a row. Below
# some number of rows, reading takes longer than computing. Every expert gets T K / E rows when the load is even. By hand:
# 100 FLOP/s, 10 bytes/s, 2-byte weights: reading a weight takes 0.2 s, a row 0.02 s, so 10 rows; with E = 8 and K = 2
# that is 40 tokens.


# %%
def tokens_to_fill(num_experts, top_k, flops_per_second, bytes_per_second, bytes_per_weight):
    """Tokens per batch at which an expert's arithmetic takes as long as reading its weights.

    Args:
      num_experts, top_k: E and K; the load is even.
      flops_per_second, bytes_per_second: what the device can do at most.
      bytes_per_weight: 2 for bfloat16.

    Returns: tokens, a number (not rounded).
    """
    ### BEGIN SOLUTION
    rows = flops_per_second * bytes_per_weight / (2 * bytes_per_second)
    return rows * num_experts / top_k
    ### END SOLUTION


check("01.4", tokens_to_fill)  # stuck? hint("01.4")


# %%
def package_fill(num_experts, top_k, flops_per_second, bytes_per_second, bytes_per_weight):
    return flops_per_second * bytes_per_weight / (2 * bytes_per_second) * num_experts / top_k


fill = yours("01.4", package_fill)
for name, experts, picks in (("dense", 1, 1), ("Mixtral", 8, 2), ("DeepSeek-V3", 256, 8)):
    print(f"{name:<12} {fill(experts, picks, 1000e12, 3.3e12, 2):>7,.0f} tokens")

# %% [markdown]
# Those are round numbers for a device with 1,000 TFLOP/s and 3.3 TB/s. A dense layer is busy with 303 tokens,
# DeepSeek-V3 needs 32 times as many, and that is with an even load. Design a layer yourself: which of total, active and
# rows per expert moves with which control?


# %%
def design(experts, picks, shared):
    total, active = package_parameters(2048, 1408, experts, min(picks, experts), shared)
    rows = 4096 * min(picks, experts) / experts
    fig, axes = plots.figure(8.0, 2.3, columns=2)
    axes[0].barh(
        [0, 1],
        [total / 1e6, active / 1e6],
        color=[plots.FAINT, plots.expert_color(0)],
        edgecolor=plots.INK,
        lw=0.6,
    )
    axes[0].set(yticks=[0, 1], yticklabels=["total", "active"], ylim=(1.6, -0.6), xlim=(0, 2500))
    axes[0].set_xlabel("million parameters in the layer")
    axes[1].barh([0], [rows], height=0.6, color=plots.expert_color(2))
    axes[1].axvline(303, ymax=0.77, color=plots.INK, ls="--", lw=1.0)
    axes[1].annotate("303: arithmetic keeps up", (303, -0.5), ha="center", va="bottom")
    axes[1].set(
        yticks=[], ylim=(0.5, -0.8), xscale="log", xlim=(10, 1e4), xlabel="rows per expert, of 4,096 tokens"
    )
    verdict = "computes" if rows >= 303 else "waits for its weights"
    return (
        fig,
        f"{experts} experts, {picks} picks, {shared} shared: {100 * active / total:.0f} % active, the device {verdict}",
    )


explore(design, experts=(1, 256, 64), picks=(1, 16, 6), shared=(0, 4, 2))

# %% [markdown]
# ## Exercise 01.5: a loop over experts
#
# Turn a dense feed-forward into a MoE. · difficulty ●● · 15 minutes · used again in 04, 05, 06
#
# One SwiGLU becomes E of them, stacked: `gate_up` [E, D, 2F], gate first, and `down` [E, F, D]. A token's result is the
# sum of its picks' answers, each times its combine weight. The weight goes on the *answer*: an expert is not linear, and
# half the input does not give half the answer (a public Switch Transformer tutorial had it there, labml #95). By hand,
# with experts that answer 1, 10, 100 and 1000 whatever they are asked:
#
# | token | picks | weights | result |
# |---|---|---|---|
# | 0 | 0, 1 | 0.5, 0.5 | 5.5 |
# | 1 | 3, 0 | 0.9, 0.1 | 900.1 |
# | 2 | 2, 1 | 0.7, 0.3 | 73 |
# | 3 | 4, 4 (padding) | 0, 0 | 0 |


# %%
def naive_moe(x, ids, weights, gate_up, down):
    """A MoE layer, one expert after the other.

    Args:
      x: [T, D] float32.
      ids: [T, K] integer, E for padding.
      weights: [T, K] float32, the combine weights, used as they are.
      gate_up: [E, D, 2F] float32, gate first.
      down: [E, F, D] float32.

    Returns: [T, D] float32. Works under jax.jit: no shape depends on who picked whom.
    """
    ### BEGIN SOLUTION
    y = jnp.zeros_like(x)
    for e in range(len(gate_up)):
        gate, up = jnp.split(x @ gate_up[e], 2, axis=-1)
        weight = jnp.where(ids == e, weights, 0.0).sum(axis=-1, keepdims=True)
        y = y + weight * ((jax.nn.silu(gate) * up) @ down[e])
    return y
    ### END SOLUTION


check("01.5", naive_moe)  # stuck? hint("01.5")

# %% [markdown]
# ## Why it is slow
#
# Under `jit` a shape may not depend on data, so the loop computes every expert for every token and throws most of it
# away by a weight of 0. Predict by what factor it works too much: E = 16, K = 2. The cell asks XLA what it would compute
# for `every_expert`, which is the loop as one product, and for the K experts' worth that is needed.

# %%
T, D, F, E, K = 256, 64, 128, 16, 2
keys = np.random.default_rng(11)
x = jnp.asarray(keys.normal(size=(T, D)), jnp.float32)
gate_up = jnp.asarray(keys.normal(size=(E, D, 2 * F)) / 8, jnp.float32)
down = jnp.asarray(keys.normal(size=(E, F, D)) / 11, jnp.float32)
chosen = route(jnp.asarray(keys.normal(size=(T, E)), jnp.float32), RouterConfig(E, K))


def flops_of(fn, *arrays):
    return jax.jit(fn).lower(*arrays).compile().cost_analysis()["flops"]


computed = flops_of(every_expert, x, chosen.expert_ids, chosen.weights, gate_up, down)
predict(
    "FLOPs of every expert for every token, over those needed",
    ### BEGIN ANSWER
    16 / 2,
    ### END ANSWER
    measured=round(computed / (T * K * swiglu_flops(D, F))),
)

# %% [markdown]
# For DeepSeek-V3 the factor is 32. Outside `jit` you may take the tokens out, `x[picked]`, and compute only those. Now
# each expert has a shape of its own, and a compiled function is compiled again for each new shape. Predict: 16 experts,
# the loads below, one jitted expert that is called with the rows each expert really got. How often is it traced?

# %%
load = np.bincount(np.asarray(chosen.expert_ids).ravel(), minlength=E)
print("rows per expert", load.tolist())

# %%
traces = []


@jax.jit
def expert(rows, gate_up, down):
    traces.append(rows.shape)  # runs only while JAX traces: a new shape
    gate, up = jnp.split(rows @ gate_up, 2, axis=-1)
    return (jax.nn.silu(gate) * up) @ down


for e in range(E):
    picked = np.asarray((chosen.expert_ids == e).any(axis=-1))
    expert(np.asarray(x)[picked], gate_up[e], down[e])
predict(
    "programs compiled for one batch",
    ### BEGIN ANSWER
    len(set(load.tolist())),
    ### END ANSWER
    measured=len(traces),
)

# %% [markdown]
# The next batch brings other loads and most of that again. Two bad ways: static and wasteful, or exact and recompiled
# for ever. On this machine, now:

# %% tags=["nbval-ignore-output"]
import time

moe = jax.jit(yours("01.5", every_expert))
narrow = jax.jit(
    lambda x: (
        (jax.nn.silu(x @ gate_up[0][:, : K * F]) * (x @ gate_up[1][:, : K * F]))
        @ jnp.concatenate([down[0], down[1]])
    )
)


def seconds(fn, *arrays, rounds=20):
    fn(*arrays).block_until_ready()
    started = time.perf_counter()
    for _ in range(rounds):
        fn(*arrays).block_until_ready()
    return (time.perf_counter() - started) / rounds


ratio = seconds(moe, x, chosen.expert_ids, chosen.weights, gate_up, down) / seconds(narrow, x)
print(f"the loop takes {ratio:.1f} times as long as a dense feed-forward of K experts' width")

# %% [markdown]
# ### Question 01.q3
#
# What would a program need that computes only what was picked, and is compiled once?
#
# **a** rows of all experts in one array of fixed shape, with the group sizes as data · **b** a jitted function for each
# expert · **c** the loop moved from Python into `lax.fori_loop`

# %%
quiz(
    "01.q3",
    ### BEGIN ANSWER
    "a",
    ### END ANSWER
)

# %% [markdown]
# ## The Transformer Engine way
#
# No loop. Tokens are sorted by expert, and one **grouped GEMM** multiplies each group with its own matrix; the sizes of
# the groups are an array on the device. **Not run here**: this is the call, as text.
#
# ```python
# from transformer_engine.jax.dense import grouped_dense
# from transformer_engine.jax.permutation import token_combine, token_dispatch
#
# rows, row_weights, ids, pad, sizes = token_dispatch(
#     x, routing_map, T * K, probs=probs, align_size=128
# )  # T K rows whatever the routing
# gate, up = jnp.split(grouped_dense(rows, gate_up, sizes), 2, axis=-1)
# y = grouped_dense(jax.nn.silu(gate) * up, down, sizes)
# ```
#
# Chapters 04 and 05 build both halves, so that every line of this is one you have written.
#
# ## Bug museum: the model that ran at 288 TFLOP/s
#
# A report (AI-Hypercomputer/maxtext #678): a log says 287.78 TFLOP/s per device for Mixtral 8x7B, where a count of the
# work that tokens really need gives 79.98. Reproduce both counts (their count differs from ours by two per cent in the
# small terms):


# %%
def museum_flops(seq_len, parameters):
    return 6 * parameters + 3 * 32 * 32 * seq_len * (128 + 128)


before, after = (museum_flops(4096, n - 32_000 * 4096) for n in mixtral)
print(f"per token {before:.3g} and {after:.3g} FLOPs, a factor of {before / after:.2f}")
print(f"the same step time reads as 288 and {287.78 * after / before:.0f} TFLOP/s")

# %% [markdown]
# ### Question 01.q4
#
# What was wrong with the first number?
#
# **a** the device was throttled · **b** it counts experts that the tokens did not use · **c** attention was left out

# %%
quiz(
    "01.q4",
    ### BEGIN ANSWER
    "b",
    ### END ANSWER
)

# %% [markdown]
# ## What changed in the package
#
# `moe_course/models/config.py` and `moe_course/scaling/flops.py` hold what you counted:
#
# - `ModelConfig` describes a DeepSeek-style model in twenty numbers and refuses impossible ones by name.
# - `parameter_counts` adds attention in its low-rank form and multi-token prediction; tests compare it with the arrays of
#   the real model.
# - `training_flops` returns the terms by name. `causal=False` and `experts="all"` give the counts of sources that count
#   otherwise, since published figures differ for that reason alone: by 12 % for DeepSeek-V3, if
#   attention is not counted as causal.
# - There is no loop over experts. `every_expert` lives on in the tests, as the oracle that faster code must equal.

# %%
print(moe_flops(DEEPSEEK_V3))

# %% [markdown]
# ## Further reading
#
# - Outrageously Large Neural Networks, arXiv 1701.06538: conditional compute at scale.
# - Switch Transformers, arXiv 2101.03961: more experts at equal FLOPs lower the loss.
# - Mixtral of Experts, arXiv 2401.04088; DeepSeekMoE, arXiv 2401.06066; DeepSeek-V3, arXiv 2412.19437.
# - GLU Variants Improve Transformer, arXiv 2002.05202: SwiGLU.
# - PaLM, arXiv 2204.02311, appendix B: model FLOPs utilisation.
#
# Next: 02, the router.
