# %% [markdown]
# # 02 Routing
#
# Ten thousand tokens, 64 experts, six picks each. You round the router's logits to bfloat16 before the choice and
# change nothing else. How many of the ten thousand now visit a different set of experts? Write a number down; you
# will measure it in exercise 02.5.
#
# A router is one small matrix and four decisions: how to score, whom to pick, how to weigh the picks, and whom a token
# may not visit. Each of the four has broken a public code base. At the end of this chapter you have a router that
# agrees with DeepSeek-V3's, and you know what each line is there to prevent.
#
# You will be able to
#
# - say what softmax and sigmoid scores do to the experts that were not asked,
# - pick with a rule for ties, and weigh without the bias that picked,
# - limit a token to a few groups of experts, and predict how far it travels,
# - keep the choice stable in low precision, and padding out of everything.
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

from moe_course.lessons import check, plots, predict, quiz, rounded, yours
from moe_course.lessons.widgets import explore
from moe_course.routing import RouterConfig, dense_routing, largest, route

# %% [markdown]
# ## A token chooses
#
# `logits = x @ w` has one number for each token and expert. Below are twelve tokens and eight experts; a square sits
# where a token goes, as large as the weight that the expert's answer will get. Read a row: two squares, weights that
# sum to 1. Read a column: some experts are popular. Chapter 03 deals with the columns, this one with the rows.

# %%
rng = np.random.default_rng(2)
logits = jnp.asarray(rng.normal(size=(12, 8)) + rng.normal(size=8), jnp.float32)
routing = route(logits, RouterConfig(num_experts=8, top_k=2))
plots.show(
    plots.routing_map(routing.expert_ids, routing.weights, num_experts=8),
    "Each token visits 2 of 8 experts; each expert gets what it gets",
)

# %% [markdown]
# ## Scores
#
# **Softmax** makes the experts of a token share a probability of 1 (Mixtral, arXiv 2401.04088). **Sigmoid** asks each
# expert alone (DeepSeek-V3, arXiv 2412.19437). Take one token and raise one logit by 1:

# %%
one_token = jnp.array([1.0, 0.5, -0.5, 2.0])
raised = one_token.at[2].add(1.0)
for name, score in (("softmax", jax.nn.softmax), ("sigmoid", jax.nn.sigmoid)):
    print(f"{name}   before {rounded(score(one_token))}   expert 2 raised {rounded(score(raised))}")

# %% [markdown]
# ### Question 02.q1
#
# Expert 5's logit rises by 1 and nothing else changes. Which *other* scores change?
#
# **a** all of them under softmax, none under sigmoid · **b** all of them, under both · **c** none, under both

# %%
quiz(
    "02.q1",
    ### BEGIN ANSWER
    "a",
    ### END ANSWER
)

# %% [markdown]
# ## Exercise 02.1: scores
#
# Turn router logits into scores. · difficulty ● · 5 minutes · used again in 03, 06, 11
#
# The activations are bfloat16, and so is what a matrix product of them gives unless you ask for more. A router
# compares numbers that lie close together, so the first thing it does is to go to float32. By hand, four tokens and
# two experts: equal logits give 0.50 and 0.50 under softmax whatever they are; a logit of 0 gives 0.50 under sigmoid
# whatever the other one is.

# %%
by_hand = jnp.array([[0.0, 0.0], [5.0, 5.0], [0.0, 5.0], [0.0, -5.0]])
for name in ("softmax", "sigmoid"):
    print(name, rounded(route(by_hand, RouterConfig(2, 1, name)).scores))


# %%
def scores_of(logits, score_fn):
    """Scores of all experts for each token.

    Args:
      logits: [T, E], any floating dtype.
      score_fn: "softmax" or "sigmoid".

    Returns: [T, E] float32, computed in float32.
    """
    ### BEGIN SOLUTION
    logits = logits.astype(jnp.float32)
    return jax.nn.softmax(logits, axis=-1) if score_fn == "softmax" else jax.nn.sigmoid(logits)
    ### END SOLUTION


check("02.1", scores_of)  # stuck? hint("02.1"), up to four times

# %% [markdown]
# ## Exercise 02.2: top-k
#
# Pick the k experts with the largest keys. · difficulty ● · 5 minutes · used again in 04, 07
#
# Two logits can tie: padding, a fresh router, low precision. The choice needs a rule that every device and every
# version follows, or two ranks that hold the same token send it to different places. The rule here: the lower id wins
# (vLLM made it theirs after reports #52679 and #54403). By hand:

# %%
keys = jnp.array([[0.1, 0.9, 0.9, 0.3], [0.0, 0.0, 0.0, 0.0], [-3.0, -1.0, -2.0, -4.0], [0.4, 0.3, 0.2, 0.1]])
for token, ids in enumerate(largest(keys, 2)[1].tolist()):
    print(f"token {token}: keys {rounded(keys[token])} -> experts {ids}")


# %%
def top_k(keys, k):
    """The k experts with the largest keys.

    Args:
      keys: [T, E] float32, of any sign.
      k: 1 to E.

    Returns: ids [T, k], integer, largest key first, ties to the lower id.
    """
    ### BEGIN SOLUTION
    return jax.lax.top_k(keys, k)[1]
    ### END SOLUTION


check("02.2", top_k)  # stuck? hint("02.2")

# %% [markdown]
# ## The bias picks, it never weighs
#
# Popular experts get more tokens, hence more gradient, hence more tokens. DeepSeek-V3 counters with a **bias** for each
# expert (arXiv 2408.15664): added to the scores to choose, left out of the weights. The bias moves a token from one
# expert to another; it does not change how much an expert's answer counts once it is asked.

# %% [markdown]
# ### Question 02.q2
#
# One token, scores [0.5, 0.6, 0.7, 0.4], biases [0, 0, -1, 1], two picks, weights normalised. What is the combine
# weight of expert 3?

# %%
quiz(
    "02.q2",
    ### BEGIN ANSWER
    0.4,
    ### END ANSWER
)

# %% [markdown]
# ## Exercise 02.3: combine weights
#
# Choose with the bias, weigh without it. · difficulty ●● · 15 minutes · used again in 03, 06, 07, 12
#
# The weights of a token are the scores of its picks divided by their sum, times a scaling factor (2.5 in DeepSeek-V3,
# to keep the routed experts' share of the residual stream as it was before the division). For k = 1 the division is
# skipped; you will see why below. By hand, from the package:

# %%
hand_scores = jnp.array(
    [[0.5, 0.6, 0.7, 0.4], [0.9, 0.1, 0.2, 0.3], [0.5, 0.5, 0.5, 0.5], [0.2, 0.8, 0.6, 0.4]]
)
hand_bias = jnp.array([0.0, 0.0, -1.0, 1.0])


def package_weights(scores, bias, k, scaling_factor):
    config = RouterConfig(scores.shape[-1], k, "sigmoid", scaling_factor=scaling_factor)
    chosen = route(jnp.log(scores) - jnp.log1p(-scores), config, bias=bias)
    return chosen.expert_ids, chosen.weights


hand_ids, hand_weights = package_weights(hand_scores, hand_bias, 2, 1.0)
for token in range(4):
    print(f"token {token}: experts {hand_ids[token].tolist()}, weights {rounded(hand_weights[token])}")


# %%
def combine_weights(scores, bias, k, scaling_factor):
    """The picks of each token and what their answers count.

    Args:
      scores: [T, E] float32, positive, unbiased.
      bias: [E] float32, added to the scores to choose.
      k: picks per token.
      scaling_factor: multiplies the weights, after they were divided by their sum (not divided for k = 1).

    Returns: (ids [T, k] integer, weights [T, k] float32), picks in descending score + bias.
    """
    ### BEGIN SOLUTION
    ids = jax.lax.top_k(scores + bias, k)[1]
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if k > 1:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return ids, scaling_factor * weights
    ### END SOLUTION


check("02.3", combine_weights)  # stuck? hint("02.3")

# %% [markdown]
# From here on, cells use your function if it passed, and the package's if not. Turn one knob, the bias of expert 3,
# and count who comes:

# %%
choose = yours("02.3", package_weights)
crowd = jax.nn.sigmoid(jnp.asarray(np.random.default_rng(3).normal(size=(2000, 8)), jnp.float32))
knob = np.linspace(-0.6, 0.6, 25)
share = [float((choose(crowd, jnp.zeros(8).at[3].set(b), 2, 1.0)[0] == 3).any(-1).mean()) for b in knob]
fig, ax = plots.figure()
ax.plot(knob, 100 * np.array(share), color=plots.expert_color(3), lw=2.5)
ax.axhline(25, color=plots.INK, lw=0.8, ls="--")
ax.annotate("fair share: 2 of 8", (-0.6, 27))
ax.set(xlabel="bias of expert 3 (score units)", ylabel="tokens that pick it, %", ylim=(0, 100))
plots.show(fig, "A bias of half a score unit makes an expert nobody's or nearly everybody's pick")

# %% [markdown]
# ### One pick, no gradient
#
# Predict, then measure. Route with one pick and *do* divide the weight by the sum of the picks. How large is the
# largest gradient that reaches the logits? (The loss below is any function of the weights.)


# %%
def loss_with_division(z):
    score = jax.nn.sigmoid(z).max(axis=-1, keepdims=True)
    return (3.0 * score / score.sum(axis=-1, keepdims=True)).sum()


gradient = jax.grad(loss_with_division)(logits)
predict(
    "largest gradient at the logits",
    ### BEGIN ANSWER
    0,
    ### END ANSWER
    measured=round(float(jnp.abs(gradient).max()), 5),
)

# %% [markdown]
# ### Question 02.q3
#
# Why?
#
# **a** the gradient is there but rounds to 0 · **b** a softmax over the picks would have helped · **c** the divided
# weight is a constant

# %%
quiz(
    "02.q3",
    ### BEGIN ANSWER
    "c",
    ### END ANSWER
)

# %% [markdown]
# ## Playground
#
# Four tokens, eight experts in groups. Draw other logits, raise token 0's logit for expert 3, move the number of picks,
# the bias of expert 3 and the limit on groups. Ask the picture: at which bias does expert 3 enter? What does its logit
# change that its bias does not? Does any other square change size when only the bias moves and the picks stay? What does
# the limit do to a token whose two best experts live in different groups?


# %%
def random_logits(draw):
    return jnp.asarray(np.random.default_rng(30 + draw).normal(size=(4, 8)), jnp.float32)


stage = random_logits(0)


def playground(logits, raise_logit, picks, bias_of_3, groups):
    kept = {"any group": 1, "best 2 of 4 groups": 4, "best 1 of 2 groups": 2}[groups]
    config = RouterConfig(8, picks, "sigmoid", num_groups=kept, top_groups=max(1, kept // 2))
    raised = random_logits(logits).at[0, 3].add(raise_logit)
    drawn = route(raised, config, bias=jnp.zeros(8).at[3].set(bias_of_3))
    fig = plots.routing_map(drawn.expert_ids, drawn.weights, num_experts=8, num_groups=config.num_groups)
    chosen_3 = int((drawn.expert_ids == 3).any(-1).sum())
    return fig, f"{picks} picks, bias {bias_of_3:g}, {groups}: expert 3 gets {chosen_3} of 4 tokens"


explore(
    playground,
    logits=(0, 9, 0),
    raise_logit=(-3.0, 3.0, 0.0),
    picks=(1, 4, 2),
    bias_of_3=(-1.0, 1.0, 0.0),
    groups=["any group", "best 2 of 4 groups", "best 1 of 2 groups"],
)

# %% [markdown]
# ## Groups: how far a token travels
#
# Put the experts on machines, and every pick is a trip. DeepSeek-V3 has 256 experts in 8 groups and lets a token visit
# at most 4 of them: **group-limited** (node-limited) routing. Before you build it, predict what it saves: 32 experts
# in 8 groups of 4, 8 picks, no limit, logits random and independent. How many groups does a token reach on average?
#
# A group of 4 is missed if all 8 picks fall on the other 28 experts, which happens in C(28, 8) of C(32, 8) ways.

# %%
wanderers = jnp.asarray(np.random.default_rng(4).normal(size=(20_000, 32)), jnp.float32)


def groups_reached(config):
    reached = route(wanderers, config).expert_ids // 4
    return (reached[..., None] == jnp.arange(8)).any(axis=1).sum(axis=-1)


free = groups_reached(RouterConfig(32, 8, "sigmoid"))
limited = groups_reached(RouterConfig(32, 8, "sigmoid", num_groups=8, top_groups=4))
predict(
    "groups reached by a token, without a limit",
    ### BEGIN ANSWER
    8 * (1 - math.comb(28, 8) / math.comb(32, 8)),
    ### END ANSWER
    measured=round(float(free.mean()), 3),
    within=0.01,
)
predict(
    "most groups reached by any token, with the best 4 allowed",
    ### BEGIN ANSWER
    4,
    ### END ANSWER
    measured=int(limited.max()),
)

# %% [markdown]
# ## Exercise 02.4: group limit
#
# Say which experts a token may use. · difficulty ●●● · 15 minutes · used again in 07, 10
#
# Groups are neighbours: with 8 experts in 4 groups, experts 0 and 1 are group 0. A group is worth the sum of its best
# `group_best` keys (2 in DeepSeek-V3, 1 in DeepSeek-V2); the best `top_groups` groups stay, ties to the lower group.
# Keys are scores plus bias, so they can be negative. By hand, 8 experts in 4 groups, keep 2, two count:
#
# | keys | group worths | kept | allowed experts |
# |---|---|---|---|
# | 0.3 0.2 · 0.9 0.8 · 0.1 0.05 · 0.02 0.01 | 0.5, 1.7, 0.15, 0.03 | 1, 0 | 0 1 2 3 |
# | the same, each less 1 | -1.5, -0.3, -1.85, -1.97 | 1, 0 | 0 1 2 3 |
# | 0.9 0 · 0.5 0.5 · 0.4 0.4 · 0 0 | 0.9, 1.0, 0.8, 0 | 1, 0 | 0 1 2 3 |
# | 0 everywhere | 0, 0, 0, 0 | 0, 1 | 0 1 2 3 |


# %%
def allowed_experts(keys, num_groups, top_groups, group_best):
    """Which experts each token may use.

    Args:
      keys: [T, E] float32, of any sign.
      num_groups: E divides into so many groups of neighbours.
      top_groups: groups that a token may visit.
      group_best: a group is worth the sum of its best so many keys.

    Returns: [T, E] bool, True for top_groups * E / num_groups experts of each token.
    """
    ### BEGIN SOLUTION
    tokens, experts = keys.shape
    size = experts // num_groups
    grouped = keys.reshape(tokens, num_groups, size)
    group_scores = jax.lax.top_k(grouped, group_best)[0].sum(axis=-1)
    groups = jax.lax.top_k(group_scores, top_groups)[1]
    kept = jax.nn.one_hot(groups, num_groups, dtype=jnp.int32).sum(axis=1) > 0
    return jnp.repeat(kept, size, axis=1)
    ### END SOLUTION


check("02.4", allowed_experts)  # stuck? hint("02.4")

# %% [markdown]
# ## Precision: the same number, another expert
#
# bfloat16 keeps 8 significant bits, so near 3 its steps are 2⁻⁶ = 0.0156. 3.001 and 3.004 become one number, and the
# tie goes to the lower id: an error of 0.003 in a logit has sent the token to another expert. No output changes a
# little. Some outputs change entirely.

# %%
print(jnp.array([3.001, 3.004, 1.0]).astype(jnp.bfloat16))

# %% [markdown]
# ## Exercise 02.5: precision flips
#
# Find the tokens that go elsewhere. · difficulty ●● · 10 minutes · used again in 08
#
# A token flips if its *set* of experts changes; the same experts in another order are the same visit. By hand, k = 2:
# [3.001, 3.004, 1] rounds to [3, 3, 1] and keeps its set; [1, 3.001, 3.004, 3.002] goes from {2, 3} to {1, 2} and flips.


# %%
def flipped_tokens(logits, k):
    """Which tokens visit other experts when the logits are rounded to bfloat16 before the choice.

    Args:
      logits: [T, E] float32.
      k: picks per token, the largest logits, ties to the lower id.

    Returns: [T] bool.
    """
    ### BEGIN SOLUTION
    rounded = logits.astype(jnp.bfloat16).astype(jnp.float32)
    before, after = (jnp.sort(jax.lax.top_k(x, k)[1], axis=-1) for x in (logits, rounded))
    return (before != after).any(axis=-1)
    ### END SOLUTION


check("02.5", flipped_tokens)  # stuck? hint("02.5")

# %% [markdown]
# Now the number you wrote down at the top. Or a better one, with a pencil: the sixth largest of 64 normal numbers lies
# near 1.3, where the density is 0.174, so logits there lie 1 / (64 · 0.174) = 0.09 apart on average, and the step of
# bfloat16 is 2⁻⁷. A gap g smaller than a step s is rounded away with probability 1 - g/s, which makes s / (2 · 0.09) of
# the tokens tie at the fence. The tie goes to the lower id, so half of them change.


# %%
def package_flips(logits, k):
    config = RouterConfig(logits.shape[-1], k)
    maps = [
        dense_routing(route(z, config), logits.shape[-1]).routing_map
        for z in (logits, logits.astype(jnp.bfloat16))
    ]
    return (maps[0] != maps[1]).any(axis=-1)


ten_thousand = jnp.asarray(np.random.default_rng(5).normal(size=(10_000, 64)), jnp.float32)
flips = yours("02.5", package_flips)(ten_thousand, 6)
predict(
    "tokens of 10,000 that change an expert",
    ### BEGIN ANSWER
    10_000 * 2**-7 * 64 * 0.174 / 2 / 2,
    ### END ANSWER
    measured=int(flips.sum()),
    within=0.1,
)

# %%
ordered = -np.sort(-np.asarray(ten_thousand), axis=-1)
gap = ordered[:, 5] - ordered[:, 6]  # between the last pick and the first that was left out
bins = np.linspace(0, 0.03, 31)
fig, ax = plots.figure()
ax.hist(gap, bins=bins, color=plots.FAINT, edgecolor=plots.INK, lw=0.5, label="all tokens")
ax.hist(gap[np.asarray(flips)], bins=bins, color=plots.expert_color(1), label="tokens that flip")
ax.set(xlabel="gap between the 6th and the 7th logit", ylabel="tokens", ylim=(0, 160))
ax.legend(frameon=False, ncols=2)
plots.show(fig, "Only tokens on the fence flip: the gap is below one step of bfloat16")

# %% [markdown]
# ### Question 02.q4
#
# Where does precision matter most?
#
# **a** the inputs of the router's matrix product · **b** its output, the logits · **c** the combine weights

# %%
quiz(
    "02.q4",
    ### BEGIN ANSWER
    "b",
    ### END ANSWER
)

# %% [markdown]
# ## Exercise 02.6: the whole router
#
# DeepSeek-V3's router, with padding. · difficulty ●●●● · 20 minutes · used again in 03, 06, 07, 11, 12
#
# A batch has padding tokens, and nobody promises what they hold. They get the id E, which is no expert, and weight 0.
# (Not -1: a negative index counts from the end, and `.at[-1]` writes the last row.) NaN in a padding token may reach
# neither the output nor the gradient, and 0 * NaN is NaN. By hand: E = 4, k = 2, one group, bias 0, a mask that leaves
# out token 1.

# %%
hand_logits = jnp.array(
    [[0.0, 1.0, 2.0, 3.0], [jnp.nan, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [1.0, -1.0, 1.0, -1.0]]
)
hand_mask = jnp.array([True, False, True, True])
hand = route(hand_logits, RouterConfig(4, 2, "sigmoid"), mask=hand_mask)
for token in range(4):
    print(f"token {token}: experts {hand.expert_ids[token].tolist()}, weights {rounded(hand.weights[token])}")


# %%
def router(logits, bias, mask, k, num_groups, top_groups, scaling_factor):
    """DeepSeek-V3's router: sigmoid scores, expert bias, group limit, normalised and scaled weights.

    Args:
      logits: [T, E], any floating dtype; rows that mask leaves out may hold anything, NaN included.
      bias: [E] float32.
      mask: [T] bool, True for real tokens.
      k: picks per token.
      num_groups, top_groups: as in 02.4, with group_best = max(1, k // top_groups).
      scaling_factor: as in 02.3.

    Returns: (ids [T, k] integer, weights [T, k] float32). Masked tokens: id E, weight 0, no gradient.
    """
    ### BEGIN SOLUTION
    real = mask[:, None]
    scores = jax.nn.sigmoid(jnp.where(real, logits.astype(jnp.float32), 0.0))
    keys = scores + bias
    allowed = allowed_experts(keys, num_groups, top_groups, max(1, k // top_groups))
    ids = jax.lax.top_k(jnp.where(allowed, keys, -jnp.inf), k)[1]
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if k > 1:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return jnp.where(real, ids, logits.shape[-1]), jnp.where(real, scaling_factor * weights, 0.0)
    ### END SOLUTION


check("02.6", router)  # stuck? hint("02.6")

# %% [markdown]
# The layout of DeepSeek-V3 at a quarter of its experts: 64 in 8 groups, 8 picks from the best 4 groups, 24 tokens of
# which the last 4 are padding.


# %%
def package_router(logits, bias, mask, k, num_groups, top_groups, scaling_factor):
    settings = (logits.shape[-1], k, "sigmoid", True, scaling_factor, num_groups, top_groups)
    chosen = route(logits, RouterConfig(*settings), bias=bias, mask=mask)
    return chosen.expert_ids, chosen.weights


batch = jnp.asarray(np.random.default_rng(6).normal(size=(24, 64)), jnp.float32)
ids, weights = yours("02.6", package_router)(batch, jnp.zeros(64), jnp.arange(24) < 20, 8, 8, 4, 2.5)
plots.show(
    plots.routing_map(ids, weights, num_experts=64, num_groups=8),
    "No token leaves its 4 best groups, and padding (the last 4 rows) goes nowhere",
)

# %% [markdown]
# ## The Transformer Engine way
#
# On a GPU the whole router is one fused kernel. **Not run here**: this is the call, as text.
#
# ```python
# from transformer_engine.jax.router import fused_topk_with_score_function
#
# probs, routing_map = fused_topk_with_score_function(
#     logits.astype(jnp.float32),  # [T, E]; tokens may be sharded, experts not
#     topk=8,
#     num_groups=8,
#     group_topk=4,
#     scaling_factor=2.5,  # a Python number: a JAX scalar raises TypeError
#     score_function="sigmoid",
#     expert_bias=bias,  # [E]; only with sigmoid; gets no gradient
# )
# ```
#
# It returns no ids. `probs` and `routing_map` are [T, E] tables, zero and False where a token does not go; TE's own
# layer recovers ids from the map in ascending order, not by score. The package has the same form, so both back ends
# can be compared:

# %%
as_te = dense_routing(route(stage, RouterConfig(8, 2, "sigmoid")), 8)
recovered = jnp.argsort(as_te.routing_map, axis=-1)[:, -2:]
by_score = route(stage, RouterConfig(8, 2, "sigmoid")).expert_ids
print("ids from the map", recovered.tolist())
print("ids by score    ", by_score.tolist())
print("the same experts", bool((jnp.sort(by_score, axis=-1) == recovered).all()))

# %% [markdown]
# ## Bug museum: the forbidden experts
#
# This router passed its tests for months. Then the biases drifted below zero. Its authors met it in four code bases
# (deepseek-ai/DeepSeek-V3 #741, sgl-project/sglang #3705, vllm-project/vllm #13474, huggingface/transformers #45440).


# %%
def museum_router(scores, bias, k, num_groups, top_groups):
    keys = scores + bias
    grouped = keys.reshape(len(keys), num_groups, -1)
    worth = jnp.sort(grouped, axis=-1)[..., -2:].sum(axis=-1)  # a
    kept = (largest(worth, top_groups)[1][..., None] == jnp.arange(num_groups)).any(axis=1)
    keys = jnp.where(jnp.repeat(kept, grouped.shape[-1], axis=1), keys, 0.0)  # b
    return jax.lax.top_k(keys, k)[1]  # c


exhibit = jnp.array([[0.30, 0.20, 0.90, 0.80, 0.10, 0.05, 0.02, 0.01]])
for shift in (0.0, -1.0):
    picks = museum_router(exhibit, jnp.full(8, shift), 2, 4, 2)
    print(f"every bias {shift:g}: groups kept 0 and 1, experts picked {picks[0].tolist()}")

# %% [markdown]
# One constant added to every bias changes no comparison between experts, so it may change no pick. It does. A property
# like this one finds the fault without knowing the right answer; your checks used it.
#
# ### Question 02.q5
#
# Which line is to blame?
#
# **a** the worth of a group · **b** the filling of what is forbidden · **c** the top-k

# %%
quiz(
    "02.q5",
    ### BEGIN ANSWER
    "b",
    ### END ANSWER
)

# %% [markdown]
# ## What changed in the package
#
# `moe_course/routing.py` is now yours to read. It differs from what you wrote in four places, each for a reason:
#
# - Normalised weights are a softmax over the picks' log-scores: the same number, and nothing to divide by when all
#   scores underflow.
# - `largest` repeats a maximum k times. `jax.lax.top_k` gathers sharded tokens onto every device; this does not.
# - Softmax routers choose by logit, which tells apart experts whose probabilities both round to 0.
# - `replay_ids` fixes the picks and takes the weights afresh, for recomputation and reinforcement learning.
#
# ## Further reading
#
# - Outrageously Large Neural Networks, arXiv 1701.06538: top-k gating, with noise.
# - Switch Transformers, arXiv 2101.03961: one pick, float32 routers.
# - Mixtral of Experts, arXiv 2401.04088: softmax over the picks.
# - DeepSeekMoE, arXiv 2401.06066, and DeepSeek-V2, arXiv 2405.04434: fine-grained experts, device-limited routing.
# - Auxiliary-Loss-Free Load Balancing, arXiv 2408.15664, and DeepSeek-V3, arXiv 2412.19437: the bias.
#
# Next: 03, where the columns of the first picture get their due.
