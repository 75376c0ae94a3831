"""Wrong answers to the exercises of chapter 03, and right ones unlike the solution."""

import jax
import jax.numpy as jnp

from moe_course.bench.kill_rate import alternative, mutant


def count(ids, experts):
    return (ids[..., None] == jnp.arange(experts)).sum(axis=(0, 1))


# ---------------------------------------------------------------- 03.1 load


@alternative("03.1", "scatter-add; spread from the mean square")
def _(ids, num_experts):
    load = jnp.zeros(num_experts, jnp.int32).at[ids.reshape(-1)].add(1)
    mean = jnp.float32(load.sum()) / num_experts
    spread = jnp.sqrt(((load - mean) ** 2).mean())
    return load, jnp.where(mean > 0, spread / jnp.where(mean > 0, mean, 1.0), 0.0), (load == 0).sum()


@alternative("03.1", "bincount with a drawer for padding")
def _(ids, num_experts):
    load = jnp.bincount(ids.reshape(-1), length=num_experts + 1)[:num_experts]
    return load, load.std() / jnp.maximum(load.mean(), 1.0 / num_experts), num_experts - (load > 0).sum()


def spread(load):
    return load.std() / jnp.maximum(load.mean(), 1e-9)


@mutant("03.1", "padding is counted as the last expert")
def _(ids, num_experts):
    load = count(jnp.minimum(ids, num_experts - 1), num_experts)
    return load, spread(load), (load == 0).sum()


@mutant("03.1", "padding wraps to expert 0")
def _(ids, num_experts):
    load = count(ids % num_experts, num_experts)
    return load, spread(load), (load == 0).sum()


@mutant("03.1", "one bin too many")
def _(ids, num_experts):
    load = jnp.bincount(ids.reshape(-1), length=num_experts + 1)
    return load, spread(load), (load == 0).sum()


@mutant("03.1", "first picks only")
def _(ids, num_experts):
    load = count(ids[:, :1], num_experts)
    return load, spread(load), (load == 0).sum()


@mutant("03.1", "shares instead of counts")
def _(ids, num_experts):
    load = count(ids, num_experts)
    return load / jnp.maximum(load.sum(), 1), spread(load), (load == 0).sum()


@mutant("03.1", "counts by token")
def _(ids, num_experts):
    load = (ids[..., None] == jnp.arange(num_experts)).sum(axis=1)
    return load, spread(load), (load == 0).sum()


@mutant("03.1", "whether an expert was asked at all")
def _(ids, num_experts):
    load = count(ids, num_experts)
    return (load > 0).astype(jnp.int32), spread(load), (load == 0).sum()


@mutant("03.1", "sample standard deviation")
def _(ids, num_experts):
    load = count(ids, num_experts)
    return load, load.std(ddof=1) / jnp.maximum(load.mean(), 1e-9), (load == 0).sum()


@mutant("03.1", "0 / 0 without a token")
def _(ids, num_experts):
    load = count(ids, num_experts)
    return load, load.std() / load.mean(), (load == 0).sum()


@mutant("03.1", "standard deviation, not divided")
def _(ids, num_experts):
    load = count(ids, num_experts)
    return load, load.std(), (load == 0).sum()


@mutant("03.1", "variance over mean")
def _(ids, num_experts):
    load = count(ids, num_experts)
    return load, load.var() / jnp.maximum(load.mean(), 1e-9), (load == 0).sum()


@mutant("03.1", "largest over mean")
def _(ids, num_experts):
    load = count(ids, num_experts)
    return load, load.max() / jnp.maximum(load.mean(), 1e-9), (load == 0).sum()


@mutant("03.1", "spread over the experts in use")
def _(ids, num_experts):
    load = count(ids, num_experts)
    used = jnp.maximum((load > 0).sum(), 1)
    mean = load.sum() / used
    var = jnp.where(load > 0, (load - mean) ** 2, 0.0).sum() / used
    return load, jnp.sqrt(var) / jnp.maximum(mean, 1e-9), (load == 0).sum()


@mutant("03.1", "counts the living")
def _(ids, num_experts):
    load = count(ids, num_experts)
    return load, spread(load), (load > 0).sum()


@mutant("03.1", "dead means below half of the mean")
def _(ids, num_experts):
    load = count(ids, num_experts)
    return load, spread(load), (load < load.mean() / 2).sum()


@mutant("03.1", "another order")
def _(ids, num_experts):
    load = count(ids, num_experts)
    return load, (load == 0).sum(), spread(load)


@mutant("03.1", "the load alone")
def _(ids, num_experts):
    return count(ids, num_experts)


# ---------------------------------------------------------------- 03.2 balance loss


def parts(scores, ids):
    """(E, load, probs, real [T, 1])"""
    totals = scores.sum(axis=-1, keepdims=True)
    real = totals > 0
    return (
        scores.shape[-1],
        count(ids, scores.shape[-1]).astype(jnp.float32),
        scores / jnp.where(real, totals, 1.0),
        real,
    )


@alternative("03.2", "one dot product, a small number in the divisor")
def _(scores, ids):
    experts, k = scores.shape[-1], ids.shape[-1]
    probs = scores / jnp.maximum(scores.sum(-1, keepdims=True), 1e-12)
    hot = (ids.reshape(-1, 1) == jnp.arange(experts)).astype(jnp.float32)
    tokens = jnp.maximum(hot.sum() / k, 1.0)
    return experts * jnp.dot(hot.sum(0), probs.sum(0)) / (k * tokens**2)


@alternative("03.2", "expert by expert")
def _(scores, ids):
    experts, load, probs, real = parts(scores, ids)
    tokens = jnp.maximum(real.sum(), 1)
    total = jnp.float32(0)
    for e in range(experts):
        total += load[e] / (tokens * ids.shape[-1]) * probs[:, e].sum() / tokens
    return experts * total


@mutant("03.2", "not divided by K")
def _(scores, ids):
    experts, load, probs, real = parts(scores, ids)
    tokens = jnp.maximum(real.sum(), 1)
    return experts * (load / tokens * probs.sum(0) / tokens).sum()


@mutant("03.2", "no factor E")
def _(scores, ids):
    _, load, probs, real = parts(scores, ids)
    return (load / jnp.maximum(load.sum(), 1) * probs.sum(0)).sum() / jnp.maximum(real.sum(), 1)


@mutant("03.2", "scores not normalised")
def _(scores, ids):
    experts, load, _, real = parts(scores, ids)
    return experts * (load / jnp.maximum(load.sum(), 1) * scores.sum(0)).sum() / jnp.maximum(real.sum(), 1)


@mutant("03.2", "softmax of the scores")
def _(scores, ids):
    experts, load, _, real = parts(scores, ids)
    probs = jnp.where(real, jax.nn.softmax(scores, axis=-1), 0.0)
    return experts * (load / jnp.maximum(load.sum(), 1) * probs.sum(0)).sum() / jnp.maximum(real.sum(), 1)


@mutant("03.2", "first picks only")
def _(scores, ids):
    experts, _, probs, real = parts(scores, ids)
    load = count(ids[:, :1], experts).astype(jnp.float32)
    return experts * (load / jnp.maximum(load.sum(), 1) * probs.sum(0)).sum() / jnp.maximum(real.sum(), 1)


@mutant("03.2", "probability of the picks only")
def _(scores, ids):
    experts, load, probs, real = parts(scores, ids)
    picked = probs * (ids[..., None] == jnp.arange(experts)).any(1)
    return experts * (load / jnp.maximum(load.sum(), 1) * picked.sum(0)).sum() / jnp.maximum(real.sum(), 1)


@mutant("03.2", "mean over experts instead of the sum")
def _(scores, ids):
    _, load, probs, real = parts(scores, ids)
    return (load / jnp.maximum(load.sum(), 1) * probs.sum(0)).mean() / jnp.maximum(real.sum(), 1)


@mutant("03.2", "padding among the tokens")
def _(scores, ids):
    experts, load, probs, _ = parts(scores, ids)
    return experts * (load / jnp.maximum(load.sum(), 1) * probs.mean(0)).sum()


@mutant("03.2", "padding among the picks")
def _(scores, ids):
    experts, load, probs, real = parts(scores, ids)
    return experts * (load / ids.size * probs.sum(0)).sum() / jnp.maximum(real.sum(), 1)


@mutant("03.2", "padding counted as the last expert")
def _(scores, ids):
    experts, _, probs, real = parts(scores, ids)
    load = count(jnp.minimum(ids, experts - 1), experts).astype(jnp.float32)
    return experts * (load / jnp.maximum(load.sum(), 1) * probs.sum(0)).sum() / jnp.maximum(real.sum(), 1)


@mutant("03.2", "where after the division: NaN gradient")
def _(scores, ids):
    experts, load, _, real = parts(scores, ids)
    probs = jnp.where(real, scores / scores.sum(-1, keepdims=True), 0.0)
    return experts * (load / jnp.maximum(load.sum(), 1) * probs.sum(0)).sum() / jnp.maximum(real.sum(), 1)


@mutant("03.2", "NaN on padding")
def _(scores, ids):
    experts, load, _, real = parts(scores, ids)
    probs = scores / scores.sum(-1, keepdims=True)
    return experts * (load / load.sum() * probs.sum(0)).sum() / real.sum()


@mutant("03.2", "0 / 0 without a token")
def _(scores, ids):
    experts, load, probs, real = parts(scores, ids)
    return experts * (load / load.sum() * probs.sum(0)).sum() / real.sum()


@mutant("03.2", "gradient stopped at P")
def _(scores, ids):
    experts, load, probs, real = parts(scores, ids)
    probs = jax.lax.stop_gradient(probs)
    return experts * (load / jnp.maximum(load.sum(), 1) * probs.sum(0)).sum() / jnp.maximum(real.sum(), 1)


@mutant("03.2", "gradient stopped at the sum of the scores")
def _(scores, ids):
    experts, load, _, real = parts(scores, ids)
    totals = jax.lax.stop_gradient(scores.sum(-1, keepdims=True))
    probs = scores / jnp.where(real, totals, 1.0)
    return experts * (load / jnp.maximum(load.sum(), 1) * probs.sum(0)).sum() / jnp.maximum(real.sum(), 1)


@mutant("03.2", "P times P")
def _(scores, ids):
    experts, _, probs, real = parts(scores, ids)
    mean = probs.sum(0) / jnp.maximum(real.sum(), 1)
    return experts * (mean * mean).sum()


@mutant("03.2", "f times f")
def _(scores, ids):
    experts, load, _, _ = parts(scores, ids)
    f = load / jnp.maximum(load.sum(), 1)
    return experts * (f * f).sum()


@mutant("03.2", "sums multiplied instead of element by element")
def _(scores, ids):
    _, load, probs, real = parts(scores, ids)
    f = load / jnp.maximum(load.sum(), 1)
    p = probs.sum(0) / jnp.maximum(real.sum(), 1)
    return (f[:, None] * p[None, :]).sum() * jnp.float32(1.0)


@mutant("03.2", "normalised over tokens")
def _(scores, ids):
    experts, load, _, _ = parts(scores, ids)
    probs = scores / jnp.maximum(scores.sum(0, keepdims=True), 1e-9)
    return experts * (load / jnp.maximum(load.sum(), 1) * probs.mean(0)).sum()


@mutant("03.2", "one less, so that balance is 0")
def _(scores, ids):
    experts, load, probs, real = parts(scores, ids)
    value = experts * (load / jnp.maximum(load.sum(), 1) * probs.sum(0)).sum() / jnp.maximum(real.sum(), 1)
    return value - 1.0


# ---------------------------------------------------------------- 03.3 any split


def probabilities(scores):
    totals = scores.sum(axis=-1, keepdims=True)
    return scores / jnp.where(totals > 0, totals, 1.0)


@alternative("03.3", "token by token, then the sum")
def _(scores, load, top_k):
    cost = load / jnp.maximum(load.sum(), 1)
    probs = scores / jnp.maximum(scores.sum(-1, keepdims=True), 1e-12)
    tokens = jnp.maximum(load.sum(), 1) / top_k
    return ((probs @ cost) * scores.shape[-1] / tokens).sum()


@mutant("03.3", "divides by the tokens of the part")
def _(scores, load, top_k):
    f = load / jnp.maximum(load.sum(), 1)
    real = (scores.sum(-1) > 0).sum()
    return scores.shape[-1] * (f * probabilities(scores).sum(0)).sum() / jnp.maximum(real, 1)


@mutant("03.3", "mean over the rows of the part")
def _(scores, load, top_k):
    f = load / jnp.maximum(load.sum(), 1)
    return scores.shape[-1] * (f * probabilities(scores).mean(0)).sum()


@mutant("03.3", "divides by the picks")
def _(scores, load, top_k):
    picks = jnp.maximum(load.sum(), 1)
    return scores.shape[-1] * (load / picks * probabilities(scores).sum(0)).sum() / picks


@mutant("03.3", "K on the wrong side")
def _(scores, load, top_k):
    picks = jnp.maximum(load.sum(), 1)
    return scores.shape[-1] * (load / picks * probabilities(scores).sum(0)).sum() / (picks * top_k)


@mutant("03.3", "whole tokens only")
def _(scores, load, top_k):
    picks = jnp.maximum(load.sum(), 1)
    tokens = jnp.maximum(picks // top_k // 8 * 8, 1)
    return scores.shape[-1] * (load / picks * probabilities(scores).sum(0)).sum() / tokens


@mutant("03.3", "a sum, not divided at all")
def _(scores, load, top_k):
    picks = jnp.maximum(load.sum(), 1)
    return scores.shape[-1] * (load / picks * probabilities(scores).sum(0)).sum()


@mutant("03.3", "scores not normalised")
def _(scores, load, top_k):
    picks = jnp.maximum(load.sum(), 1)
    return scores.shape[-1] * (load / picks * scores.sum(0)).sum() / (picks / top_k)


@mutant("03.3", "the load of this part, guessed from its scores")
def _(scores, load, top_k):
    ids = jax.lax.top_k(scores, int(top_k))[1]
    here = count(ids, scores.shape[-1])
    picks = jnp.maximum(here.sum(), 1)
    return scores.shape[-1] * (here / picks * probabilities(scores).sum(0)).sum() / (load.sum() / top_k)


@mutant("03.3", "NaN on padding")
def _(scores, load, top_k):
    probs = scores / scores.sum(-1, keepdims=True)
    picks = jnp.maximum(load.sum(), 1)
    return scores.shape[-1] * (load / picks * probs.sum(0)).sum() / (picks / top_k)


@mutant("03.3", "where after the division: NaN gradient")
def _(scores, load, top_k):
    totals = scores.sum(-1, keepdims=True)
    probs = jnp.where(totals > 0, scores / totals, 0.0)
    picks = jnp.maximum(load.sum(), 1)
    return scores.shape[-1] * (load / picks * probs.sum(0)).sum() / (picks / top_k)


@mutant("03.3", "0 / 0 without a token")
def _(scores, load, top_k):
    f = load / load.sum()
    return scores.shape[-1] * (f * probabilities(scores).sum(0)).sum() / (load.sum() / top_k)


@mutant("03.3", "gradient stopped at P")
def _(scores, load, top_k):
    probs = jax.lax.stop_gradient(probabilities(scores))
    picks = jnp.maximum(load.sum(), 1)
    return scores.shape[-1] * (load / picks * probs.sum(0)).sum() / (picks / top_k)


@mutant("03.3", "no factor E")
def _(scores, load, top_k):
    picks = jnp.maximum(load.sum(), 1)
    return (load / picks * probabilities(scores).sum(0)).sum() / (picks / top_k)


@mutant("03.3", "K taken to be 2")
def _(scores, load, top_k):
    picks = jnp.maximum(load.sum(), 1)
    return scores.shape[-1] * (load / picks * probabilities(scores).sum(0)).sum() / (picks / 2)


# ---------------------------------------------------------------- 03.4 z-loss


@alternative("03.4", "written out")
def _(logits, mask):
    z = jnp.where(mask[:, None], logits, 0).astype(jnp.float32)
    top = z.max(axis=-1)
    lse = top + jnp.log(jnp.exp(z - top[:, None]).sum(axis=-1))
    return jnp.dot(mask.astype(jnp.float32), lse * lse) / jnp.maximum(mask.sum(), 1)


def replaced(logits, mask):
    return jnp.where(mask[:, None], logits.astype(jnp.float32), 0.0)


@mutant("03.4", "no square")
def _(logits, mask):
    lse = jax.nn.logsumexp(replaced(logits, mask), axis=-1)
    return jnp.where(mask, lse, 0.0).sum() / jnp.maximum(mask.sum(), 1)


@mutant("03.4", "square of the mean")
def _(logits, mask):
    lse = jax.nn.logsumexp(replaced(logits, mask), axis=-1)
    return (jnp.where(mask, lse, 0.0).sum() / jnp.maximum(mask.sum(), 1)) ** 2


@mutant("03.4", "sum over tokens")
def _(logits, mask):
    lse = jax.nn.logsumexp(replaced(logits, mask), axis=-1)
    return jnp.where(mask, lse**2, 0.0).sum()


@mutant("03.4", "padding among the tokens")
def _(logits, mask):
    lse = jax.nn.logsumexp(replaced(logits, mask), axis=-1)
    return jnp.where(mask, lse**2, 0.0).mean()


@mutant("03.4", "padding adds (ln E) squared")
def _(logits, mask):
    lse = jax.nn.logsumexp(replaced(logits, mask), axis=-1)
    return (lse**2).sum() / jnp.maximum(mask.sum(), 1)


@mutant("03.4", "ignores the mask")
def _(logits, mask):
    return (jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1) ** 2).mean()


@mutant("03.4", "over the tokens")
def _(logits, mask):
    return (jax.nn.logsumexp(replaced(logits, mask), axis=0) ** 2).mean()


@mutant("03.4", "overflows")
def _(logits, mask):
    lse = jnp.log(jnp.exp(replaced(logits, mask)).sum(-1))
    return jnp.where(mask, lse**2, 0.0).sum() / jnp.maximum(mask.sum(), 1)


@mutant("03.4", "masked at the end: NaN gradient")
def _(logits, mask):
    lse = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)
    return jnp.where(mask, lse**2, 0.0).sum() / jnp.maximum(mask.sum(), 1)


@mutant("03.4", "multiplied by the mask: NaN")
def _(logits, mask):
    lse = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)
    return (lse**2 * mask).sum() / jnp.maximum(mask.sum(), 1)


@mutant("03.4", "0 / 0 without a token")
def _(logits, mask):
    lse = jax.nn.logsumexp(replaced(logits, mask), axis=-1)
    return jnp.where(mask, lse**2, 0.0).sum() / mask.sum()


@mutant("03.4", "in the dtype that came in")
def _(logits, mask):
    z = jnp.where(mask[:, None], logits, 0)
    lse = jax.nn.logsumexp(z, axis=-1)
    return (jnp.where(mask, lse**2, 0).sum() / jnp.maximum(mask.sum(), 1)).astype(jnp.float32)


@mutant("03.4", "mean square of the logits")
def _(logits, mask):
    return (replaced(logits, mask) ** 2).mean(-1).sum() / jnp.maximum(mask.sum(), 1)


@mutant("03.4", "largest logit instead of the log-sum-exp")
def _(logits, mask):
    top = replaced(logits, mask).max(-1)
    return jnp.where(mask, top**2, 0.0).sum() / jnp.maximum(mask.sum(), 1)


@mutant("03.4", "divided by E as well")
def _(logits, mask):
    lse = jax.nn.logsumexp(replaced(logits, mask), axis=-1)
    return jnp.where(mask, lse**2, 0.0).sum() / jnp.maximum(mask.sum(), 1) / logits.shape[-1]


@mutant("03.4", "gradient stopped at the log-sum-exp")
def _(logits, mask):
    lse = jax.nn.logsumexp(replaced(logits, mask), axis=-1)
    return jnp.where(mask, lse * jax.lax.stop_gradient(lse), 0.0).sum() / jnp.maximum(mask.sum(), 1)


@mutant("03.4", "mean log-sum-exp of the exponentials, not their sum")
def _(logits, mask):
    lse = jax.nn.logsumexp(replaced(logits, mask), axis=-1) - jnp.log(jnp.float32(logits.shape[-1]))
    return jnp.where(mask, lse**2, 0.0).sum() / jnp.maximum(mask.sum(), 1)


# ---------------------------------------------------------------- 03.5 bias rule


@alternative("03.5", "two comparisons")
def _(bias, load, rate):
    mean = load.mean(axis=-1, keepdims=True)
    return jnp.where(load < mean, bias + rate, jnp.where(load > mean, bias - rate, bias))


@alternative("03.5", "whole numbers, no division")
def _(bias, load, rate):
    distance = load.sum(axis=-1, keepdims=True) - load * load.shape[-1]
    return bias + rate * jnp.sign(distance).astype(jnp.float32)


@mutant("03.5", "the wrong way")
def _(bias, load, rate):
    return bias + rate * jnp.sign(load - load.mean(-1, keepdims=True))


@mutant("03.5", "mean over layers and experts")
def _(bias, load, rate):
    return bias + rate * jnp.sign(load.mean() - load)


@mutant("03.5", "mean over layers")
def _(bias, load, rate):
    return bias + rate * jnp.sign(load.mean(axis=0, keepdims=True) - load)


@mutant("03.5", "proportional")
def _(bias, load, rate):
    return bias + rate * (load.mean(-1, keepdims=True) - load)


@mutant("03.5", "proportional to the relative distance")
def _(bias, load, rate):
    mean = load.mean(-1, keepdims=True)
    return bias + rate * (mean - load) / jnp.maximum(mean, 1)


@mutant("03.5", "at the mean goes down")
def _(bias, load, rate):
    return bias + rate * jnp.where(load < load.mean(-1, keepdims=True), 1.0, -1.0)


@mutant("03.5", "at the mean goes up")
def _(bias, load, rate):
    return bias + rate * jnp.where(load <= load.mean(-1, keepdims=True), 1.0, -1.0)


@mutant("03.5", "whole-number mean")
def _(bias, load, rate):
    mean = load.sum(-1, keepdims=True) // load.shape[-1]
    return bias + rate * jnp.sign(mean - load).astype(jnp.float32)


@mutant("03.5", "median instead of the mean")
def _(bias, load, rate):
    return bias + rate * jnp.sign(jnp.median(load, axis=-1, keepdims=True) - load)


@mutant("03.5", "the step alone")
def _(bias, load, rate):
    return rate * jnp.sign(load.mean(-1, keepdims=True) - load)


@mutant("03.5", "forgets the rate")
def _(bias, load, rate):
    return bias + jnp.sign(load.mean(-1, keepdims=True) - load)


@mutant("03.5", "recentred")
def _(bias, load, rate):
    step = jnp.sign(load.mean(-1, keepdims=True) - load)
    return bias + rate * (step - step.mean(-1, keepdims=True))


@mutant("03.5", "shares, divided by a total of 0")
def _(bias, load, rate):
    share = load / load.sum(-1, keepdims=True)
    return bias + rate * jnp.sign(1 / load.shape[-1] - share)


@mutant("03.5", "only lowers the busy")
def _(bias, load, rate):
    return bias - rate * (load > load.mean(-1, keepdims=True))


@mutant("03.5", "only raises the idle")
def _(bias, load, rate):
    return bias + rate * (load < load.mean(-1, keepdims=True))


@mutant("03.5", "the busiest down, the idlest up")
def _(bias, load, rate):
    top = (load == load.max(-1, keepdims=True)).astype(jnp.float32)
    low = (load == load.min(-1, keepdims=True)).astype(jnp.float32)
    return bias + rate * (low - top)


# ---------------------------------------------------------------- 03.6 capacity


@alternative("03.6", "a stable sort, and the place within each group")
def _(ids, num_experts, capacity):
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    counts = jnp.zeros(num_experts + 1, jnp.int32).at[flat].add(1)
    start = jnp.cumsum(counts) - counts
    place = jnp.zeros_like(flat).at[order].set(jnp.arange(flat.size, dtype=flat.dtype))
    place = place - start[flat]
    return ((place < capacity) & (flat < num_experts)).reshape(ids.shape)


@alternative("03.6", "compares all pairs of copies")
def _(ids, num_experts, capacity):
    flat = ids.reshape(-1)
    before = jnp.tril(flat[:, None] == flat[None, :], k=-1).sum(axis=1)
    return ((before < capacity) & (flat != num_experts)).reshape(ids.shape)


def places(flat, experts):
    hot = (flat[:, None] == jnp.arange(experts)).astype(jnp.int32)
    return ((jnp.cumsum(hot, axis=0) - hot) * hot).sum(-1)


@mutant("03.6", "one too few")
def _(ids, num_experts, capacity):
    flat = ids.reshape(-1)
    return ((places(flat, num_experts) + 1 < capacity) & (flat < num_experts)).reshape(ids.shape)


@mutant("03.6", "one too many")
def _(ids, num_experts, capacity):
    flat = ids.reshape(-1)
    return ((places(flat, num_experts) <= capacity) & (flat < num_experts)).reshape(ids.shape)


@mutant("03.6", "the copies that were dropped")
def _(ids, num_experts, capacity):
    flat = ids.reshape(-1)
    return ((places(flat, num_experts) >= capacity) & (flat < num_experts)).reshape(ids.shape)


@mutant("03.6", "first picks first")
def _(ids, num_experts, capacity):
    flat = ids.T.reshape(-1)
    return ((places(flat, num_experts) < capacity) & (flat < num_experts)).reshape(ids.T.shape).T


@mutant("03.6", "transposed without going back")
def _(ids, num_experts, capacity):
    flat = ids.T.reshape(-1)
    return ((places(flat, num_experts) < capacity) & (flat < num_experts)).reshape(ids.shape)


@mutant("03.6", "last come, first served")
def _(ids, num_experts, capacity):
    flat = ids.reshape(-1)[::-1]
    return ((places(flat, num_experts) < capacity) & (flat < num_experts))[::-1].reshape(ids.shape)


@mutant("03.6", "padding is kept")
def _(ids, num_experts, capacity):
    return (places(ids.reshape(-1), num_experts) < capacity).reshape(ids.shape)


@mutant("03.6", "padding takes the room of the last expert")
def _(ids, num_experts, capacity):
    flat = jnp.minimum(ids.reshape(-1), num_experts - 1)
    return ((places(flat, num_experts) < capacity) & (ids.reshape(-1) < num_experts)).reshape(ids.shape)


@mutant("03.6", "counts each pick's column by itself")
def _(ids, num_experts, capacity):
    columns = [places(ids[:, k], num_experts) < capacity for k in range(ids.shape[1])]
    return jnp.stack(columns, axis=1) & (ids < num_experts)


@mutant("03.6", "counts tokens before, not copies for the expert")
def _(ids, num_experts, capacity):
    token = jnp.arange(ids.shape[0])[:, None]
    return (token < capacity) & (ids < num_experts)


@mutant("03.6", "one expert too full drops the whole token")
def _(ids, num_experts, capacity):
    flat = ids.reshape(-1)
    kept = ((places(flat, num_experts) < capacity) & (flat < num_experts)).reshape(ids.shape)
    return jnp.broadcast_to(kept.all(axis=-1, keepdims=True), ids.shape)


@mutant("03.6", "running count over experts instead of copies")
def _(ids, num_experts, capacity):
    flat = ids.reshape(-1)
    hot = (flat[:, None] == jnp.arange(num_experts)).astype(jnp.int32)
    place = (jnp.cumsum(hot, axis=1) * hot).sum(-1)
    return ((place < capacity) & (flat < num_experts)).reshape(ids.shape)


@mutant("03.6", "all copies of an expert that is too full are dropped")
def _(ids, num_experts, capacity):
    load = count(ids, num_experts)
    fits = jnp.append(load <= capacity, False)
    return fits[jnp.minimum(ids, num_experts)]


@mutant("03.6", "integers instead of booleans")
def _(ids, num_experts, capacity):
    flat = ids.reshape(-1)
    return (
        ((places(flat, num_experts) < capacity) & (flat < num_experts)).reshape(ids.shape).astype(jnp.int32)
    )


@mutant("03.6", "flat")
def _(ids, num_experts, capacity):
    flat = ids.reshape(-1)
    return (places(flat, num_experts) < capacity) & (flat < num_experts)


@mutant("03.6", "not for compiled code")
def _(ids, num_experts, capacity):
    room, kept = [int(capacity)] * num_experts, []
    for expert in ids.reshape(-1).tolist():
        kept.append(expert < num_experts and room[expert] > 0)
        if kept[-1]:
            room[expert] -= 1
    return jnp.array(kept, bool).reshape(ids.shape)
