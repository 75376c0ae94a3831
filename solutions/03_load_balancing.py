# %% [markdown]
# # 03 Load balancing
#
# Sixteen experts, 512 tokens, two picks each, and a router so fair that every expert is equally likely. Each expert
# has a buffer for exactly its share of the copies, which is 64. What fraction of the copies finds its buffer full and
# is dropped? Zero is a reasonable guess. Write yours down; you will measure it in exercise 03.6.
#
# Chapter 02 looked at the rows of the routing table, one token at a time. This one looks at the columns. Experts that
# are asked more often learn faster and are asked more often still; a device waits for its busiest expert; a buffer of
# fixed size drops what does not fit. Three tools act against it, and each has been built wrong in public.
#
# You will be able to
#
# - put a number on imbalance, and know the number that chance alone gives,
# - write the auxiliary loss so that neither K, padding nor the number of micro-batches changes it,
# - say what a scope is, and what a loss over it cannot see,
# - balance without a loss, with a controller of one line,
# - measure what dropping tokens costs, and say when it costs nothing.
#
# Six exercises, about an hour and a quarter. Everything runs on the CPU.

# %%
from moe_course.environment import setup

status = setup()

# %%
import math

import jax
import jax.numpy as jnp
import numpy as np

from moe_course.balance import (
    expert_load,
    load_balancing_loss,
    load_report,
    router_z_loss,
    update_expert_bias,
)
from moe_course.lessons import check, plots, predict, quiz, rounded, yours
from moe_course.lessons.properties.ch03_training import keep_first, train
from moe_course.lessons.widgets import explore
from moe_course.routing import RouterConfig, route

# %% [markdown]
# ## The columns
#
# Two hundred tokens, eight experts, two picks. Some experts are more attractive than others, as they are in every
# router that nobody looks after. If the experts live on eight devices, seven wait for the one that holds expert 1.

# %%
rng = np.random.default_rng(31)
logits = jnp.asarray(rng.normal(size=(200, 8)) + 0.8 * rng.normal(size=8), jnp.float32)
config = RouterConfig(num_experts=8, top_k=2)
routing = jax.jit(lambda z: route(z, config))(logits)
load = expert_load(routing.expert_ids, 8)
plots.show(
    plots.load_bars(load),
    f"The busiest expert has {float(load_report(load).max_over_mean):.1f} times its fair share: everyone waits for it",
)

# %% [markdown]
# ## Exercise 03.1: load
#
# Count the copies, and say how uneven they are. · difficulty ● · 10 minutes · used again in 04, 07, 12
#
# The spread is the **coefficient of variation**: the standard deviation of the loads over their mean, 0 when all are
# equal. An expert is **dead** when nobody asks for it. Padding tokens have the id E (chapter 02) and count nowhere. By
# hand, four tokens, E = 4, K = 2: the picks {0, 1}, {1, 0}, {1, 2} and a padding token give the load [2, 3, 1, 0], mean
# 1.5, standard deviation 1.12, cv 0.75, one dead expert.

# %%
hand_ids = jnp.array([[0, 1], [1, 0], [1, 2], [4, 4]])
hand_load = expert_load(hand_ids, 4)
print("load", hand_load.tolist(), "  cv", rounded(load_report(hand_load).cv))


# %%
def load_and_spread(ids, num_experts):
    """Copies per expert, and how uneven they are.

    Args:
      ids: [T, K] integer expert ids; num_experts marks a padding token.
      num_experts: E.

    Returns: (load [E] integer, cv scalar float32, dead scalar integer). Without any copy cv is 0.
    """
    ### BEGIN SOLUTION
    load = (ids[..., None] == jnp.arange(num_experts)).sum(axis=(0, 1))
    cv = load.std() / jnp.maximum(load.mean(), 1e-9)
    return load, cv, (load == 0).sum()
    ### END SOLUTION


check("03.1", load_and_spread)  # stuck? hint("03.1"), up to four times

# %% [markdown]
# ## A loss that counts
#
# Switch Transformer (arXiv 2101.03961) adds a term to the loss that is small when the load is even:
#
# $$ L = E \sum_e f_e P_e $$
#
# $f_e$ is the share of all picks that went to expert e, and $P_e$ the mean probability that tokens gave it. Counting
# has no gradient; $P$ has. The two agree in what they measure, and only one of them can be pushed.
#
# ### Question 03.q1
#
# Why the product of two things that say nearly the same?
#
# **a** both need a gradient, and the product gives one to each · **b** f says which expert is busy, P carries the
# gradient that pushes the router away from it · **c** P alone would do; f makes the loss smaller

# %%
quiz(
    "03.q1",
    ### BEGIN ANSWER
    "b",
    ### END ANSWER
)

# %% [markdown]
# In balance $f_e = P_e = 1/E$ and the loss is 1, for any E and any K. How large can it get? Predict: 8 experts, 2
# picks, and every token gives all its picks and all its probability, in equal halves, to experts 0 and 1.

# %%
collapsed = jnp.zeros((64, 8)).at[:, :2].set(0.5)
predict(
    "balance loss of a collapsed router",
    ### BEGIN ANSWER
    8 / 2,
    ### END ANSWER
    measured=float(load_balancing_loss(collapsed, jnp.array([64, 64, 0, 0, 0, 0, 0, 0]), config)),
)

# %% [markdown]
# ## Exercise 03.2: balance loss
#
# Write E Σ f P. · difficulty ●● · 15 minutes · used again in 06, 11, 12
#
# Three traps, each sprung in public. A token has K picks, so f is a share of *picks* (OLMoE #45 left out the K). Sigmoid
# scores of a token do not add up to 1, so P needs them divided by their sum. Padding has scores 0 and id E, and 0 / 0 is
# NaN (transformers #28505 counted padding). By hand: eight tokens with scores [.4, .4, .1, .1], all picking {0, 1}: f =
# [.5, .5, 0, 0], P = the scores, L = 4 (.2 + .2) = 1.6.

# %%
hand_scores = jnp.tile(jnp.array([0.4, 0.4, 0.1, 0.1]), (8, 1))
hand_ids = jnp.tile(jnp.array([0, 1]), (8, 1))
hand = load_balancing_loss(hand_scores, expert_load(hand_ids, 4), RouterConfig(4, 2))
print("the skewed batch", rounded(hand))


# %%
def balance_loss(scores, ids):
    """E times the sum over experts of f P; 1 in balance.

    Args:
      scores: [T, E] float32, not negative; rows of padding tokens are 0. They need not add up to 1.
      ids: [T, K] integer, E for padding.

    Returns: a float32 scalar. Its gradient to scores is finite everywhere. Without a real token it is 0.
    """
    ### BEGIN SOLUTION
    experts = scores.shape[-1]
    totals = scores.sum(axis=-1, keepdims=True)
    real = totals > 0
    probs = scores / jnp.where(real, totals, 1.0)
    load = (ids[..., None] == jnp.arange(experts)).sum(axis=(0, 1)).astype(jnp.float32)
    f = load / jnp.maximum(load.sum(), 1.0)
    return experts * (f * probs.sum(axis=0)).sum() / jnp.maximum(real.sum(), 1)
    ### END SOLUTION


check("03.2", balance_loss)  # stuck? hint("03.2")


# %%
push = -jax.jit(jax.grad(lambda scores: load_balancing_loss(scores, load, config)))(routing.scores)
fig, ax = plots.figure()
for e in range(8):
    point = int(load[e]), 1e3 * float(push[:, e].mean())
    ax.scatter(*point, color=plots.expert_color(e), s=60, zorder=2)
    ax.annotate(str(e), point, xytext=(0, 7), textcoords="offset points", ha="center")
ax.axhline(0, color=plots.INK, lw=0.8)
ax.axvline(float(load.mean()), color=plots.INK, lw=0.8, ls="--")
ax.annotate(" fair share", (float(load.mean()), ax.get_ylim()[1]), va="top")
ax.set(xlabel="copies the expert got", ylabel="push on its scores (x 1000)", ylim=(-9, 11))
plots.show(fig, "The busier an expert, the harder the loss pushes its scores down (number: expert)")

# %% [markdown]
# ## Scope: balanced over what?
#
# The same formula means different things over different tokens. Over the **global** batch it asks that all experts are
# used, in the long run. Over each **sequence** it asks that every single text uses all experts, which a text about one
# thing may not want. Over a **micro-batch** it is something between, and depends on how the batch was cut.
#
# ### Question 03.q2
#
# E = 4, K = 2. The first sequence sends all tokens to experts {0, 1} with probability [.5, .5, 0, 0]; the second to
# {2, 3} with the mirror of it. The global loss is 1. What is the mean of the per-sequence losses?

# %%
quiz(
    "03.q2",
    ### BEGIN ANSWER
    2,
    ### END ANSWER
)

# %% [markdown]
# ## Exercise 03.3: any split
#
# Make the parts add up. · difficulty ●●● · 15 minutes · used again in 07, 12
#
# Accumulate gradients over four micro-batches and *add* their losses: the balance term is four times too strong
# (Automodel #3359, trl #6083). *Average* them: nearly right, but f P is a product of two means, so the answer depends on
# the cut. One way is exact. The counts have no gradient, so they may be summed over all parts beforehand; then each part
# gives its share, and the sum is the loss of the whole. By hand, from the package: 200 tokens, cut two ways.

# %%
loss_over = jax.jit(lambda scores, load: load_balancing_loss(scores, load, config, scope="global"))
for cut in ([100], [50, 100, 150]):
    shares = [loss_over(part, load) for part in jnp.split(routing.scores, cut)]
    print(f"cut at {cut}: sum of the parts {rounded(sum(shares), 4)}")
halves = zip(jnp.split(routing.scores, 2), jnp.split(routing.expert_ids, 2), strict=True)
own = [loss_over(scores, expert_load(ids, 8)) for scores, ids in halves]
print(f"halves, each with its own counts: sum {rounded(sum(own), 4)}, mean {rounded(sum(own) / 2, 4)}")


# %%
def part_of_loss(scores, load, top_k):
    """One part's share of the balance loss of the whole batch.

    Args:
      scores: [t, E] float32, the tokens of this part; rows of padding are 0.
      load: [E] int32, copies per expert over *all* parts.
      top_k: picks of each real token.

    Returns: a float32 scalar. Over all parts they add up to balance_loss of the whole batch. Gradient as in 03.2.
    """
    ### BEGIN SOLUTION
    experts = scores.shape[-1]
    totals = scores.sum(axis=-1, keepdims=True)
    probs = scores / jnp.where(totals > 0, totals, 1.0)
    picks = jnp.maximum(load.sum(), 1).astype(jnp.float32)
    f = load / picks
    return experts * (f * probs.sum(axis=0)).sum() / (picks / top_k)
    ### END SOLUTION


check("03.3", part_of_loss)  # stuck? hint("03.3")

# %% [markdown]
# ## Exercise 03.4: z-loss
#
# Keep the logits small. · difficulty ●● · 10 minutes · used again in 06, 12
#
# Softmax does not care if all logits of a token grow by 100. float32 does: near 100 its steps are 2⁻¹⁷, near 1 they are
# 2⁻²³, and a router decides by differences. ST-MoE (arXiv 2202.08906) adds the mean of (logsumexp of the logits)². It
# pulls on each logit by 2 · logsumexp · softmax. By hand, E = 4, all logits 0: (ln 4)² = 1.92 for every token, whatever
# T is.

# %%
print("flat logits", rounded(router_z_loss(jnp.zeros((4, 4)))), "  all raised by 10", end=" ")
print(rounded(router_z_loss(jnp.full((4, 4), 10.0))))


# %%
def z_loss(logits, mask):
    """Mean over real tokens of the squared logsumexp.

    Args:
      logits: [T, E], any floating dtype; rows that mask leaves out may hold anything, NaN included.
      mask: [T] bool, True for real tokens.

    Returns: a float32 scalar, computed in float32; 0 without a real token. No gradient reaches padding.
    """
    ### BEGIN SOLUTION
    logits = jnp.where(mask[:, None], logits.astype(jnp.float32), 0.0)
    squares = jnp.where(mask, jax.nn.logsumexp(logits, axis=-1) ** 2, 0.0)
    return squares.sum() / jnp.maximum(mask.sum(), 1)
    ### END SOLUTION


check("03.4", z_loss)  # stuck? hint("03.4")

# %% [markdown]
# ## Balance without a loss
#
# An auxiliary loss pulls at the same weights as the loss you care about. DeepSeek-V3 (arXiv 2408.15664, 2412.19437)
# takes it out of the gradient: each expert has a bias that helps to pick (chapter 02), and after every step the bias
# moves by a fixed rate, up if the expert had less than the mean load, down if it had more. A thermostat.
#
# ## Exercise 03.5: bias rule
#
# Write the thermostat. · difficulty ● · 10 minutes · used again in 06, 12
#
# By hand: counts [6, 2, 0, 0] have mean 2, so a rate of 0.001 moves the biases by [-0.001, 0, 0.001, 0.001]. An expert at
# the mean stays. Every layer has its own counts and its own biases; here they come stacked.

# %%
print(rounded(update_expert_bias(jnp.zeros((1, 4)), jnp.array([[6, 2, 0, 0]]), 0.001), 3))


# %%
def update_bias(bias, load, rate):
    """One step of the bias rule, for L layers at once.

    Args:
      bias: [L, E] float32.
      load: [L, E] int32, copies per expert in the whole batch of this optimizer step.
      rate: size of the step.

    Returns: [L, E] float32, the new biases.
    """
    ### BEGIN SOLUTION
    mean = load.mean(axis=-1, keepdims=True)
    return bias + rate * jnp.sign(mean - load)
    ### END SOLUTION


check("03.5", update_bias)  # stuck? hint("03.5")

# %% [markdown]
# ### Question 03.q3
#
# Two micro-batches count [4, 0, 2, 2] and [3, 3, 0, 2]. The rate is 1. What is the step of the biases?
#
# **a** the sign of the sum's distance from its mean: [-1, 1, 1, 0] · **b** one step after each micro-batch, together
# [-2, 0, 1, 0] · **c** from the last micro-batch alone: [-1, -1, 1, 0]

# %%
quiz(
    "03.q3",
    ### BEGIN ANSWER
    "a",
    ### END ANSWER
)

# %% [markdown]
# Now let it work. Sixteen experts with unequal attraction, sigmoid scores, 512 fresh tokens a step, two picks. The
# spread cannot reach 0: even with equal chances an expert's count is a binomial draw. Predict the floor. Each of T
# tokens picks a given expert with probability K/E, so its count has mean T K/E and variance T (K/E)(1 - K/E).

# %%
thermostat = yours("03.5", update_expert_bias)
attraction = jnp.asarray(np.random.default_rng(33).normal(size=16), jnp.float32)
fresh = jnp.asarray(np.random.default_rng(34).normal(size=(600, 512, 16)), jnp.float32)


@jax.jit
def controlled(rate):
    """cv [600] of the load while the rule works."""

    def step(bias, noise):
        ids = jax.lax.top_k(jax.nn.sigmoid(attraction + noise) + bias, 2)[1]
        load = expert_load(ids, 16)
        return thermostat(bias[None], load[None], rate)[0], load_report(load).cv

    return jax.lax.scan(step, jnp.zeros(16), fresh)[1]


rates = (0.001, 0.01, 0.1)
cv = {rate: np.asarray(controlled(jnp.float32(rate))) for rate in rates}
floor = math.sqrt((1 - 2 / 16) * 16 / (512 * 2))
predict(
    "cv that chance alone leaves, against rate 0.001 after 500 steps",
    ### BEGIN ANSWER
    math.sqrt((1 - 2 / 16) * 16 / (512 * 2)),
    ### END ANSWER
    measured=round(float(cv[0.001][500:].mean()), 2),
    within=0.2,
)

# %%
fig, ax = plots.figure(height=2.9)
for rate, ink in zip(
    rates, (plots.expert_color(0), plots.expert_color(2), plots.expert_color(1)), strict=True
):
    ax.plot(cv[rate], color=ink, lw=1.3, label=f"rate {rate:g}")
ax.axhline(floor, color=plots.INK, lw=1.2, ls="--", label="chance alone")
ax.set(xlabel="step", ylabel="cv of the load", xlim=(0, 600), ylim=(0, 1.5))
ax.legend(frameon=False, ncols=4, loc="upper right")
plots.show(fig, "A small rate is slow and then quiet; a large one is quick and never settles")

# %% [markdown]
# A controller that only knows "too much" and "too little" swings by a step around its goal for ever. DeepSeek-V3 used a
# rate of 0.001, and 0 for the last 500 billion tokens.
#
# ## Capacity
#
# Before there were ragged kernels, every expert got a buffer of the same size: **capacity** = factor · T · K / E, rounded
# up. What does not fit is dropped; the token keeps its residual stream, and that expert's answer is missing.
#
# ### Question 03.q4
#
# T = 1,000, K = 2, E = 8, factor 1.25. How many copies fit into one expert's buffer?

# %%
quiz(
    "03.q4",
    ### BEGIN ANSWER
    313,
    ### END ANSWER
)

# %% [markdown]
# ## Exercise 03.6: capacity
#
# Say which copies are kept. · difficulty ●●● · 15 minutes · used again in 04, 07
#
# First come, first served, in the order of the tokens, and within a token in the order of its picks. The latest copies
# lose, whatever they are worth; that is why dropping hurts the ends of batches. By hand, E = 4, K = 2, capacity 2:
#
# | token | picks | kept | why |
# |---|---|---|---|
# | 0 | 1, 0 | yes, yes | both have room |
# | 1 | 1, 2 | yes, yes | expert 1 is now full |
# | 2 | 1, 0 | **no**, yes | expert 1 had two, expert 0 is now full |
# | 3 | 0, 1 | **no**, **no** | both are full |

# %%
hand_ids = jnp.array([[1, 0], [1, 2], [1, 0], [0, 1]])
print(keep_first(hand_ids, 4, 2).tolist())


# %%
def kept_copies(ids, num_experts, capacity):
    """Which copies find room.

    Args:
      ids: [T, K] integer, num_experts for padding.
      num_experts: E.
      capacity: copies that each expert takes; a number, under jax.jit a traced one.

    Returns: [T, K] bool. Copies are served in the order (token, pick); padding takes no room and is not kept.
    """
    ### BEGIN SOLUTION
    flat = ids.reshape(-1)
    hot = (flat[:, None] == jnp.arange(num_experts)).astype(jnp.int32)
    place = ((jnp.cumsum(hot, axis=0) - hot) * hot).sum(axis=-1)
    return ((place < capacity) & (flat < num_experts)).reshape(ids.shape)
    ### END SOLUTION


check("03.6", kept_copies)  # stuck? hint("03.6")

# %% [markdown]
# The question from the top: 16 experts, 512 tokens, 2 picks, every expert equally likely, capacity factor 1.0. A count
# that is roughly normal exceeds its mean by 0.4 standard deviations on average (the mean of the positive part of a
# standard normal is 1/√2π), and you know the standard deviation from exercise 03.5.

# %%
fair = jax.lax.top_k(jnp.asarray(np.random.default_rng(35).normal(size=(50, 512, 16)), jnp.float32), 2)[1]
capacity = 512 * 2 // 16
kept = jax.vmap(lambda ids: yours("03.6", keep_first)(ids, 16, capacity))(fair)
predict(
    "copies dropped by a perfectly fair router at factor 1.0, %",
    ### BEGIN ANSWER
    100 * math.sqrt((1 - 2 / 16) * 16 / (512 * 2)) / math.sqrt(2 * math.pi),
    ### END ANSWER
    measured=round(100 * float(1 - kept.mean()), 2),
    within=0.1,
)

# %% [markdown]
# Now with a router that is not fair. Move the skew (standard deviation of the experts' attraction) and the factor. How
# large a factor does it take to drop nothing at skew 1? What would that buffer cost?


# %%
def buffers(skew, factor, picks):
    rng = np.random.default_rng(36)
    keys = rng.normal(size=(512, 16)) + skew * rng.normal(size=16)
    ids = jax.lax.top_k(jnp.asarray(keys, jnp.float32), picks)[1]
    room = math.ceil(factor * 512 * picks / 16)
    kept = keep_first(ids, 16, room)
    wanted = np.asarray(expert_load(ids, 16))
    held = np.asarray(expert_load(jnp.where(kept, ids, 16), 16))
    fig, ax = plots.figure(8.0, 2.9)
    ax.bar(range(16), held, color=[plots.expert_color(e) for e in range(16)])
    ax.bar(
        range(16), wanted - held, bottom=held, color=plots.PAPER, edgecolor=plots.INK, hatch="////", lw=0.6
    )
    ax.axhline(room, color=plots.INK, lw=1.0, ls="--")
    ax.annotate(f"capacity {room}", (-0.5, room), va="bottom")
    ax.set(xlabel="expert", ylabel="token copies", xticks=range(16), xlim=(-0.6, 15.6))
    lost = 100 * (1 - held.sum() / wanted.sum())
    idle = 100 * (1 - held.sum() / (16 * room))
    return (
        fig,
        f"{lost:.0f} % of the copies are dropped (hatched), and {idle:.0f} % of the buffer stays empty",
    )


explore(buffers, skew=(0.0, 2.0, 0.5), factor=(0.5, 4.0, 1.25), picks=(1, 4, 2))

# %% [markdown]
# ## All of it, live
#
# The model below reads six bytes of optax's source code and predicts the seventh. Between them sits one MoE layer,
# eight experts and two picks, with your functions in it if they passed. (For clarity it computes all experts for all
# tokens and multiplies by a table of weights that is zero where a token does not go, or was dropped. Chapter 04
# starts to do better.)


# %%
def package_loss(scores, ids):
    config = RouterConfig(scores.shape[-1], ids.shape[-1])
    return load_balancing_loss(scores, expert_load(ids, scores.shape[-1]), config)


loss_of, keep = yours("03.2", package_loss), yours("03.6", keep_first)


def moe_layer(x, weights, bias, capacity):
    scores = jax.nn.softmax(x @ weights["router"], axis=-1)
    ids = jax.lax.top_k(scores + bias, 2)[1]
    picked = jnp.take_along_axis(scores, ids, axis=-1)
    picked = picked / picked.sum(axis=-1, keepdims=True)
    kept = keep(ids, 8, capacity)
    table = (jax.nn.one_hot(ids, 8) * (picked * kept)[..., None]).sum(axis=1)  # [T, E]
    hidden = jax.nn.relu(jnp.einsum("td,edf->etf", x, weights["up"]))
    y = jnp.einsum("etf,efd,te->td", hidden, weights["down"], table)
    return y, ids, kept, loss_of(scores, ids)


# %% [markdown]
# Seven settings, three seeds each, all 21 trained at once. Three settings have no balancing, three have the bias rule;
# of each three, one has capacity factor 1.0, one 1.25, and one is dropless. The seventh is dropless with the auxiliary
# loss. Afterwards every model is measured on text it has not seen, without dropping, so that only the training differs.

# %% tags=["nbval-ignore-output"]
one, more, all_fit = 256 * 2 / 8, math.ceil(1.25 * 256 * 2 / 8), 1e9
runs = train(
    moe_layer,
    thermostat,
    capacity=[one, more, all_fit, one, more, all_fit, all_fit],
    bias_rate=[0, 0, 0, 0.003, 0.003, 0.003, 0],
    balance_coefficient=[0, 0, 0, 0, 0, 0, 0.02],
)
shares = runs.load / runs.load.sum(axis=-1, keepdims=True)  # [settings, seeds, steps, E]
fig, axes = plots.figure(8.0, 2.9, columns=3)
for ax, run, name in zip(axes, (2, 6, 5), ("no balancing", "auxiliary loss", "bias rule"), strict=True):
    ax.stackplot(
        range(shares.shape[2]), 100 * shares[run, 0].T, colors=[plots.expert_color(e) for e in range(8)]
    )
    ax.set(title=name, xlabel="step", xlim=(0, shares.shape[2] - 1), ylim=(0, 100))
axes[0].set_ylabel("share of the copies, %")
plots.show(
    fig, "Collapse, live: alone, a few experts take the work; the loss and the bias give it back (one seed)"
)

# %%
spread = shares[:, :, 100:].mean(axis=2).std(axis=-1) * 8  # cv of the last steps, [settings, seeds]
print("the bias rule is more even than no balancing, in every seed:", bool((spread[5] < spread[2]).all()))
print("so is the auxiliary loss:", bool((spread[6] < spread[2]).all()))

# %% [markdown]
# ## What dropping costs
#
# The same runs, now by loss on unseen text: how far is the dropped model above the dropless one of the same seed?

# %% tags=["nbval-ignore-output"]
bits = runs.held_out[:6].reshape(2, 3, -1) / math.log(2)  # [balancing, capacity, seed], bits per byte
cost = bits - bits[:, 2:]
dropped = 100 * runs.dropped[:6].mean(axis=(1, 2)).reshape(2, 3)
for b, name in enumerate(("no balancing", "bias rule")):
    for c, size in enumerate(("factor 1.0", "factor 1.25", "dropless")):
        print(
            f"{name:<13} {size:<12} dropped {dropped[b, c]:4.1f} %   above dropless, by seed {rounded(cost[b, c], 3)}"
        )

# %% tags=["nbval-ignore-output"]
fig, ax = plots.figure(height=2.9)
for b, (name, ink) in enumerate((("no balancing", 1), ("bias rule", 0))):
    for c in range(2):
        x, color = c + 0.3 * b - 0.15, plots.expert_color(ink)
        ax.bar(x, cost[b, c].mean(), width=0.26, color=color, alpha=0.6, label=name if c == 0 else None)
        ax.scatter([x] * cost.shape[-1], cost[b, c], color=plots.INK, s=16, zorder=3)
ax.axhline(0, color=plots.INK, lw=1.0)
ax.set(xticks=[0, 1], xticklabels=["factor 1.0", "factor 1.25"], ylabel="bits per byte\nabove dropless")
ax.legend(frameon=False)
plots.show(fig, "Dropping costs most where nothing balances the load (bar: mean, dot: one seed)")

# %%
print("without balancing, factor 1.0 is worse than dropless, mean of the seeds:", bool(cost[0, 0].mean() > 0))
print("the bias rule drops fewer copies at either factor:", bool((dropped[1, :2] < dropped[0, :2]).all()))
print("dropless drops nothing:", bool((dropped[:, 2] == 0).all()))

# %% [markdown]
# Read it with care. Three seeds of a model that trains for seconds show a direction, not a law. Without balancing a quarter
# to a half of the copies are dropped, and it shows in the loss. With the bias rule most of what is dropped is dropped in
# the first steps, before the biases have moved, and the seeds differ by as much as the two factors do. That is the honest
# case for dropping: balance well, add a margin, and little is lost. The honest case against it: you pay for the margin in
# every buffer, you learn what was lost only by counting, and the copies that go are the latest, not the least important.
#
# The rest of the course takes the other road, ragged groups of whatever size the router asks for. **Dropless** is then a
# claim, and from chapter 04 on a ledger proves it at every step.
#
# ## The Transformer Engine way
#
# TE has the auxiliary loss as one fused kernel, beside its router. **Not run here**: this is the call, as text.
#
# ```python
# from transformer_engine.jax.router import fused_moe_aux_loss, fused_topk_with_score_function
#
# scores, _ = fused_topk_with_score_function(
#     logits, topk=8, score_function="sigmoid", compute_aux_scores=True
# )  # dense [T, E], divided by their sum; bias and groups are ignored
# loss = fused_moe_aux_loss(scores, tokens_per_expert=load, topk=8, coeff=1e-4)
# ```
#
# Its value is `E coeff / (K T²) Σ_e Σ_t scores[t, e] load[e]`, T being the rows it is given. So it wants the scores and
# the counts of the whole batch: all-gather them, or sum the parts yourself as in 03.3. TE's JAX side has no z-loss, no
# bias update and no capacity; those stay as you wrote them.

# %%
rows = len(routing.scores)
probs = routing.scores / routing.scores.sum(-1, keepdims=True)
te_value = 8 / (2 * rows**2) * (probs.sum(0) * load).sum()
ours = load_balancing_loss(routing.scores, load, config)
print("TE's formula gives our number:", bool(jnp.allclose(te_value, ours, rtol=1e-6)))

# %% [markdown]
# ## Bug museum: the layers that balanced each other
#
# This loss was reported in huggingface/transformers (#28255, and again #31464), and the shape of it survived in several
# models. It trained, it printed 1.0, and half of the experts of every layer were dead.


# %%
def museum_loss(scores_by_layer, ids_by_layer):
    scores = jnp.concatenate(scores_by_layer)
    ids = jnp.concatenate(ids_by_layer)
    experts, k = scores.shape[-1], ids.shape[-1]
    f = expert_load(ids, experts) / (len(ids) * k)
    return experts * (f * scores.mean(axis=0)).sum()


scores_by_layer = [jnp.tile(jnp.array(row), (6, 1)) for row in ([0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5])]
ids_by_layer = [jnp.tile(jnp.array(row), (6, 1)) for row in ([0, 1], [2, 3])]
alone = [museum_loss([s], [i]) for s, i in zip(scores_by_layer, ids_by_layer, strict=True)]
print(
    "each layer alone",
    rounded(jnp.stack(alone)),
    "  both",
    rounded(museum_loss(scores_by_layer, ids_by_layer)),
)

# %% [markdown]
# ### Question 03.q5
#
# What is wrong?
#
# **a** the factors E and 1/K · **b** the layers share one f and one P · **c** the probabilities

# %%
quiz(
    "03.q5",
    ### BEGIN ANSWER
    "b",
    ### END ANSWER
)

# %% [markdown]
# ## What changed in the package
#
# `moe_course/balance.py` is now yours to read. It differs from what you wrote in four places, each for a reason:
#
# - `load_balancing_loss` has your 03.3 as `scope="global"`, and names the other two scopes; a sequence that is all padding
#   is left out of the mean.
# - `update_expert_bias` finds the mean in whole numbers: counts past 2²⁴ are no longer exact in float32, and an expert
#   exactly at the mean must not move.
# - `load_report` adds the entropy and the busiest expert over the mean, which is the slowdown of the slowest device.
# - There is no `kept_copies`. `capacity_factor` bounds a buffer, the step measures the demand, and a step whose demand
#   does not fit is run again with a larger one. Nothing is dropped; chapters 07 and 12 show the books.
#
# ## Further reading
#
# - Outrageously Large Neural Networks, arXiv 1701.06538: the first balance losses.
# - GShard, arXiv 2006.16668, and Switch Transformers, arXiv 2101.03961: capacity, dropping, E Σ f P.
# - ST-MoE, arXiv 2202.08906: z-loss, and what instability looks like.
# - MegaBlocks, arXiv 2211.15841: dropless.
# - Auxiliary-Loss-Free Load Balancing, arXiv 2408.15664, and DeepSeek-V3, arXiv 2412.19437: the bias rule.
# - Demons in the Detail, arXiv 2501.11873: global-batch against micro-batch balance.
#
# Next: 04, groups of any size in arrays of one shape.
