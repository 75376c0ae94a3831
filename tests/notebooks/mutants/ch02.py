"""Wrong answers to the exercises of chapter 02, and right ones unlike the solution."""

import jax
import jax.numpy as jnp

from moe_course.bench.kill_rate import alternative, mutant

# ---------------------------------------------------------------- 02.1 scores


@alternative("02.1", "written out")
def _(logits, score_fn):
    z = jnp.asarray(logits, jnp.float32)
    if score_fn == "sigmoid":
        return 0.5 * (1 + jnp.tanh(0.5 * z))
    z = jnp.exp(z - z.max(axis=-1, keepdims=True))
    return z / z.sum(axis=-1, keepdims=True)


@mutant("02.1", "softmax over tokens")
def _(logits, score_fn):
    z = logits.astype(jnp.float32)
    return jax.nn.softmax(z, axis=0) if score_fn == "softmax" else jax.nn.sigmoid(z)


@mutant("02.1", "softmax over everything")
def _(logits, score_fn):
    z = logits.astype(jnp.float32)
    return jax.nn.softmax(z, axis=None) if score_fn == "softmax" else jax.nn.sigmoid(z)


@mutant("02.1", "overflows")
def _(logits, score_fn):
    z = jnp.exp(logits.astype(jnp.float32))
    return z / z.sum(axis=-1, keepdims=True) if score_fn == "softmax" else z / (1 + z)


@mutant("02.1", "cast after the function")
def _(logits, score_fn):
    s = jax.nn.softmax(logits, axis=-1) if score_fn == "softmax" else jax.nn.sigmoid(logits)
    return s.astype(jnp.float32)


@mutant("02.1", "keeps the dtype that came in")
def _(logits, score_fn):
    return jax.nn.softmax(logits, axis=-1) if score_fn == "softmax" else jax.nn.sigmoid(logits)


@mutant("02.1", "sigmoid normalised")
def _(logits, score_fn):
    z = logits.astype(jnp.float32)
    s = jax.nn.sigmoid(z)
    return jax.nn.softmax(z, axis=-1) if score_fn == "softmax" else s / s.sum(-1, keepdims=True)


@mutant("02.1", "swapped")
def _(logits, score_fn):
    z = logits.astype(jnp.float32)
    return jax.nn.sigmoid(z) if score_fn == "softmax" else jax.nn.softmax(z, axis=-1)


@mutant("02.1", "log of the softmax")
def _(logits, score_fn):
    z = logits.astype(jnp.float32)
    return jax.nn.log_softmax(z, axis=-1) if score_fn == "softmax" else jax.nn.log_sigmoid(z)


# ---------------------------------------------------------------- 02.2 top-k


@alternative("02.2", "stable sort of the negated keys")
def _(keys, k):
    return jnp.argsort(-keys, axis=-1, stable=True)[:, :k]


@alternative("02.2", "k times the maximum")
def _(keys, k):
    ids = []
    for _ in range(k):
        best = jnp.argmax(keys, axis=-1)
        ids.append(best)
        keys = jnp.where(jax.nn.one_hot(best, keys.shape[-1], dtype=bool), -jnp.inf, keys)
    return jnp.stack(ids, axis=-1)


@mutant("02.2", "returns the values")
def _(keys, k):
    return jax.lax.top_k(keys, k)[0]


@mutant("02.2", "ascending")
def _(keys, k):
    return jnp.argsort(keys, axis=-1)[:, -k:]


@mutant("02.2", "ties to the higher id")
def _(keys, k):
    return jnp.argsort(keys, axis=-1, stable=True)[:, ::-1][:, :k]


@mutant("02.2", "the smallest")
def _(keys, k):
    return jnp.argsort(keys, axis=-1)[:, :k]


@mutant("02.2", "sorted by id")
def _(keys, k):
    return jnp.sort(jax.lax.top_k(keys, k)[1], axis=-1)


@mutant("02.2", "along the tokens")
def _(keys, k):
    return jnp.argsort(-keys, axis=0)[:, :k]


@mutant("02.2", "counts from 1")
def _(keys, k):
    return jax.lax.top_k(keys, k)[1] + 1


@mutant("02.2", "taken places are filled with 0")
def _(keys, k):
    ids = []
    for _ in range(k):
        best = jnp.argmax(keys, axis=-1)
        ids.append(best)
        keys = jnp.where(jax.nn.one_hot(best, keys.shape[-1], dtype=bool), 0.0, keys)
    return jnp.stack(ids, axis=-1)


@mutant("02.2", "by magnitude")
def _(keys, k):
    return jax.lax.top_k(jnp.abs(keys), k)[1]


@mutant("02.2", "breaks ties with a number that grows with the id")
def _(keys, k):
    return jax.lax.top_k(keys - 3e-7 * jnp.arange(keys.shape[-1], dtype=jnp.float32), k)[1]


@mutant("02.2", "one column too many")
def _(keys, k):
    return jnp.argsort(-keys, axis=-1, stable=True)[:, : k + 1]


@mutant("02.2", "ids as floats")
def _(keys, k):
    return jax.lax.top_k(keys, k)[1].astype(jnp.float32)


@mutant("02.2", "chosen in bfloat16")
def _(keys, k):
    return jax.lax.top_k(keys.astype(jnp.bfloat16), k)[1]


# ---------------------------------------------------------------- 02.3 combine weights


def weigh(scores, ids, k, scaling_factor):
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    return scaling_factor * (weights / weights.sum(axis=-1, keepdims=True) if k > 1 else weights)


@alternative("02.3", "a mask over all experts in place of a gather")
def _(scores, bias, k, scaling_factor):
    ids = jnp.argsort(-(scores + bias), axis=-1, stable=True)[:, :k]
    hit = ids[..., None] == jnp.arange(scores.shape[-1])
    weights = jnp.where(hit, scores[:, None, :], 0.0).sum(axis=-1)
    total = weights.sum(axis=-1, keepdims=True) + 1e-20 if k > 1 else 1.0
    return ids, weights * (scaling_factor / total)


@mutant("02.3", "weighs with the bias")
def _(scores, bias, k, scaling_factor):
    ids = jax.lax.top_k(scores + bias, k)[1]
    return ids, weigh(scores + bias, ids, k, scaling_factor)


@mutant("02.3", "ignores the bias")
def _(scores, bias, k, scaling_factor):
    ids = jax.lax.top_k(scores, k)[1]
    return ids, weigh(scores, ids, k, scaling_factor)


@mutant("02.3", "subtracts the bias")
def _(scores, bias, k, scaling_factor):
    ids = jax.lax.top_k(scores - bias, k)[1]
    return ids, weigh(scores, ids, k, scaling_factor)


@mutant("02.3", "multiplies by the bias")
def _(scores, bias, k, scaling_factor):
    ids = jax.lax.top_k(scores * (1 + bias), k)[1]
    return ids, weigh(scores, ids, k, scaling_factor)


@mutant("02.3", "not normalised")
def _(scores, bias, k, scaling_factor):
    ids = jax.lax.top_k(scores + bias, k)[1]
    return ids, scaling_factor * jnp.take_along_axis(scores, ids, axis=-1)


@mutant("02.3", "normalised over all experts")
def _(scores, bias, k, scaling_factor):
    ids = jax.lax.top_k(scores + bias, k)[1]
    return ids, weigh(scores / scores.sum(-1, keepdims=True), ids, 1, scaling_factor)


@mutant("02.3", "scaled before the division")
def _(scores, bias, k, scaling_factor):
    ids = jax.lax.top_k(scores + bias, k)[1]
    return ids, weigh(scores * scaling_factor, ids, k, 1.0)


@mutant("02.3", "normalised at k = 1 too")
def _(scores, bias, k, scaling_factor):
    ids = jax.lax.top_k(scores + bias, k)[1]
    return ids, weigh(scores, ids, 2, scaling_factor)


@mutant("02.3", "softmax over the picks")
def _(scores, bias, k, scaling_factor):
    ids = jax.lax.top_k(scores + bias, k)[1]
    picked = jnp.take_along_axis(scores, ids, axis=-1)
    return ids, scaling_factor * (jax.nn.softmax(picked, axis=-1) if k > 1 else picked)


@mutant("02.3", "weights in the order of the scores")
def _(scores, bias, k, scaling_factor):
    ids = jax.lax.top_k(scores + bias, k)[1]
    weights = weigh(scores, ids, k, scaling_factor)
    return ids, -jnp.sort(-weights, axis=-1)


@mutant("02.3", "no gradient through the sum")
def _(scores, bias, k, scaling_factor):
    ids = jax.lax.top_k(scores + bias, k)[1]
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    total = jax.lax.stop_gradient(weights.sum(axis=-1, keepdims=True)) if k > 1 else 1.0
    return ids, scaling_factor * weights / total


@mutant("02.3", "no gradient at all")
def _(scores, bias, k, scaling_factor):
    ids = jax.lax.top_k(scores + bias, k)[1]
    return ids, weigh(jax.lax.stop_gradient(scores), ids, k, scaling_factor)


@mutant("02.3", "the bias subtracted after the choice, with its gradient")
def _(scores, bias, k, scaling_factor):
    values, ids = jax.lax.top_k(scores + bias, k)
    weights = values - bias[ids] + (bias[ids] - jax.lax.stop_gradient(bias[ids]))
    return ids, scaling_factor * (weights / weights.sum(axis=-1, keepdims=True) if k > 1 else weights)


@mutant("02.3", "a floor under the keys")
def _(scores, bias, k, scaling_factor):
    ids = jax.lax.top_k(jnp.maximum(scores + bias, 0.0), k)[1]
    return ids, weigh(scores, ids, k, scaling_factor)


@mutant("02.3", "weights, ids")
def _(scores, bias, k, scaling_factor):
    ids = jax.lax.top_k(scores + bias, k)[1]
    return weigh(scores, ids, k, scaling_factor), ids


@mutant("02.3", "one weight for all tokens' sums")
def _(scores, bias, k, scaling_factor):
    ids = jax.lax.top_k(scores + bias, k)[1]
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    return ids, scaling_factor * (weights / weights.sum() if k > 1 else weights)


# ---------------------------------------------------------------- 02.4 group limit


def limit(keys, num_groups, top_groups, group_scores, repeat=None):
    groups = jax.lax.top_k(group_scores, top_groups)[1]
    kept = jax.nn.one_hot(groups, num_groups, dtype=jnp.int32).sum(axis=1) > 0
    return (repeat or (lambda x, n: jnp.repeat(x, n, axis=1)))(kept, keys.shape[-1] // num_groups)


def grouped(keys, num_groups):
    return keys.reshape(keys.shape[0], num_groups, keys.shape[-1] // num_groups)


@alternative("02.4", "ranks by sorting twice, groups compared by number")
def _(keys, num_groups, top_groups, group_best):
    best = jnp.sort(grouped(keys, num_groups), axis=-1)[..., ::-1][..., :group_best].sum(axis=-1)
    rank = jnp.argsort(jnp.argsort(-best, axis=-1, stable=True), axis=-1, stable=True)
    group_of = jnp.arange(keys.shape[-1]) // (keys.shape[-1] // num_groups)
    return (rank < top_groups)[:, group_of]


@mutant("02.4", "a group is its best expert")
def _(keys, num_groups, top_groups, group_best):
    return limit(keys, num_groups, top_groups, grouped(keys, num_groups).max(-1))


@mutant("02.4", "a group is the sum of its experts")
def _(keys, num_groups, top_groups, group_best):
    return limit(keys, num_groups, top_groups, grouped(keys, num_groups).sum(-1))


@mutant("02.4", "a group is its worst experts")
def _(keys, num_groups, top_groups, group_best):
    worst = jnp.sort(grouped(keys, num_groups), axis=-1)[..., :group_best].sum(-1)
    return limit(keys, num_groups, top_groups, worst)


@mutant("02.4", "always the best two")
def _(keys, num_groups, top_groups, group_best):
    best = jnp.sort(grouped(keys, num_groups), axis=-1)[..., -2:].sum(-1)
    return limit(keys, num_groups, top_groups, best)


@mutant("02.4", "groups are strided")
def _(keys, num_groups, top_groups, group_best):
    cards = keys.reshape(keys.shape[0], keys.shape[-1] // num_groups, num_groups).swapaxes(1, 2)
    best = jax.lax.top_k(cards, group_best)[0].sum(-1)
    return limit(keys, num_groups, top_groups, best, lambda x, n: jnp.tile(x, (1, n)))


@mutant("02.4", "tiled back in place of repeated")
def _(keys, num_groups, top_groups, group_best):
    best = jax.lax.top_k(grouped(keys, num_groups), group_best)[0].sum(-1)
    return limit(keys, num_groups, top_groups, best, lambda x, n: jnp.tile(x, (1, n)))


@mutant("02.4", "a threshold keeps ties")
def _(keys, num_groups, top_groups, group_best):
    best = jax.lax.top_k(grouped(keys, num_groups), group_best)[0].sum(-1)
    kept = best >= jax.lax.top_k(best, top_groups)[0][:, -1:]
    return jnp.repeat(kept, keys.shape[-1] // num_groups, axis=1)


@mutant("02.4", "negative keys count as 0")
def _(keys, num_groups, top_groups, group_best):
    best = jax.lax.top_k(grouped(jnp.maximum(keys, 0), num_groups), group_best)[0].sum(-1)
    return limit(keys, num_groups, top_groups, best)


@mutant("02.4", "the groups to leave out")
def _(keys, num_groups, top_groups, group_best):
    best = jax.lax.top_k(grouped(keys, num_groups), group_best)[0].sum(-1)
    return ~limit(keys, num_groups, top_groups, best)


@mutant("02.4", "one group too few")
def _(keys, num_groups, top_groups, group_best):
    best = jax.lax.top_k(grouped(keys, num_groups), group_best)[0].sum(-1)
    return limit(keys, num_groups, max(top_groups - 1, 1), best)


@mutant("02.4", "one choice of groups for all tokens")
def _(keys, num_groups, top_groups, group_best):
    best = jax.lax.top_k(grouped(keys, num_groups), group_best)[0].sum(-1)
    return limit(keys, num_groups, top_groups, jnp.broadcast_to(best.sum(0), best.shape))


@mutant("02.4", "by magnitude")
def _(keys, num_groups, top_groups, group_best):
    best = jax.lax.top_k(grouped(jnp.abs(keys), num_groups), group_best)[0].sum(-1)
    return limit(keys, num_groups, top_groups, best)


@mutant("02.4", "masked keys in place of a mask")
def _(keys, num_groups, top_groups, group_best):
    best = jax.lax.top_k(grouped(keys, num_groups), group_best)[0].sum(-1)
    return jnp.where(limit(keys, num_groups, top_groups, best), keys, 0.0)


# ---------------------------------------------------------------- 02.5 precision flips


def top(logits, k):
    return jax.lax.top_k(logits, k)[1]


def coarse(logits):
    return logits.astype(jnp.bfloat16).astype(jnp.float32)


@alternative("02.5", "maps of picks in place of sorted ids")
def _(logits, k):
    before, after = (
        jax.nn.one_hot(top(x, k), logits.shape[-1]).sum(axis=1) for x in (logits, coarse(logits))
    )
    return jnp.abs(before - after).sum(axis=-1) > 0


@mutant("02.5", "order counts")
def _(logits, k):
    return (top(logits, k) != top(coarse(logits), k)).any(axis=-1)


@mutant("02.5", "the first pick alone")
def _(logits, k):
    return top(logits, 1)[:, 0] != top(coarse(logits), 1)[:, 0]


@mutant("02.5", "float16")
def _(logits, k):
    rounded = logits.astype(jnp.float16).astype(jnp.float32)
    return (jnp.sort(top(logits, k), -1) != jnp.sort(top(rounded, k), -1)).any(-1)


@mutant("02.5", "every pick must differ")
def _(logits, k):
    return (jnp.sort(top(logits, k), -1) != jnp.sort(top(coarse(logits), k), -1)).all(-1)


@mutant("02.5", "tokens that stay")
def _(logits, k):
    return (jnp.sort(top(logits, k), -1) == jnp.sort(top(coarse(logits), k), -1)).all(-1)


@mutant("02.5", "per pick, not per token")
def _(logits, k):
    return jnp.sort(top(logits, k), -1) != jnp.sort(top(coarse(logits), k), -1)


@mutant("02.5", "rounds the scores")
def _(logits, k):
    scores = coarse(jax.nn.softmax(logits, axis=-1))
    return (jnp.sort(top(logits, k), -1) != jnp.sort(top(scores, k), -1)).any(-1)


# Rounding keeps the order but makes ties, and a tie moves a pick to a lower id: the sum can only fall.
@alternative("02.5", "sums of ids")
def _(logits, k):
    return top(logits, k).sum(-1) != top(coarse(logits), k).sum(-1)


@mutant("02.5", "values in place of ids")
def _(logits, k):
    return (jax.lax.top_k(logits, k)[0] != jax.lax.top_k(coarse(logits), k)[0]).any(-1)


@mutant("02.5", "ties broken anew")
def _(logits, k):
    after = jnp.argsort(coarse(logits), axis=-1, stable=True)[:, ::-1][:, :k]
    return (jnp.sort(top(logits, k), -1) != jnp.sort(after, -1)).any(-1)


@mutant("02.5", "how many")
def _(logits, k):
    return (jnp.sort(top(logits, k), -1) != jnp.sort(top(coarse(logits), k), -1)).any(-1).sum()


@mutant("02.5", "cuts off in place of rounding")
def _(logits, k):
    bits = jax.lax.bitcast_convert_type(logits, jnp.uint32) & jnp.uint32(0xFFFF0000)
    cut = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return (jnp.sort(top(logits, k), -1) != jnp.sort(top(cut, k), -1)).any(-1)


# ---------------------------------------------------------------- 02.6 the whole router


def make_router(
    before=lambda logits, real: jnp.where(real, logits.astype(jnp.float32), 0.0),
    score=jax.nn.sigmoid,
    key=lambda scores, bias: scores + bias,
    group_best=lambda k, top_groups: max(1, k // top_groups),
    fill=-jnp.inf,
    weigh_by=lambda scores, keys, bias: scores,
    finish=lambda ids, weights, real, experts: (jnp.where(real, ids, experts), jnp.where(real, weights, 0.0)),
    normalize=lambda k: k > 1,
):
    """A right router, any part of which can be replaced."""

    def router(logits, bias, mask, k, num_groups, top_groups, scaling_factor):
        real = mask[:, None]
        scores = score(before(logits, real))
        keys = key(scores, bias)
        best = jax.lax.top_k(grouped(keys, num_groups), group_best(k, top_groups))[0].sum(-1)
        keys = jnp.where(limit(keys, num_groups, top_groups, best), keys, fill)
        ids = jax.lax.top_k(keys, k)[1]
        weights = jnp.take_along_axis(weigh_by(scores, keys, bias), ids, axis=-1)
        weights = weights / weights.sum(-1, keepdims=True) if normalize(k) else weights
        return finish(ids, scaling_factor * weights, real, logits.shape[-1])

    return router


alternative("02.6", "a mutant's frame with every part right")(make_router())


@alternative("02.6", "the package's router")
def _(logits, bias, mask, k, num_groups, top_groups, scaling_factor):
    from moe_course.routing import RouterConfig, route

    settings = (logits.shape[-1], k, "sigmoid", True, scaling_factor, num_groups, top_groups)
    routing = route(logits, RouterConfig(*settings), bias=bias, mask=mask)
    return routing.expert_ids, routing.weights


mutant("02.6", "softmax scores")(make_router(score=jax.nn.softmax))
mutant("02.6", "no bias")(make_router(key=lambda scores, bias: scores))
mutant("02.6", "bias on the logits")(
    make_router(key=lambda scores, bias: jax.nn.sigmoid(jnp.log(scores) - jnp.log1p(-scores) + bias))
)
mutant("02.6", "weighs with the bias")(make_router(weigh_by=lambda scores, keys, bias: scores + bias))
mutant("02.6", "forbidden experts get 0")(make_router(fill=0.0))
mutant("02.6", "forbidden experts get -1")(make_router(fill=-1.0))
mutant("02.6", "group scored by its best")(make_router(group_best=lambda k, top_groups: 1))
mutant("02.6", "not normalised")(make_router(normalize=lambda k: False))
mutant("02.6", "normalised at k = 1")(make_router(normalize=lambda k: True))
mutant("02.6", "mask ignored")(make_router(finish=lambda ids, weights, real, experts: (ids, weights)))
mutant("02.6", "masked ids are -1")(
    make_router(finish=lambda ids, w, real, experts: (jnp.where(real, ids, -1), jnp.where(real, w, 0.0)))
)
mutant("02.6", "masked ids are 0")(
    make_router(finish=lambda ids, w, real, experts: (jnp.where(real, ids, 0), jnp.where(real, w, 0.0)))
)
mutant("02.6", "masked tokens keep their weights")(
    make_router(finish=lambda ids, w, real, experts: (jnp.where(real, ids, experts), w))
)
mutant("02.6", "weights multiplied by the mask, NaN and all")(
    make_router(
        before=lambda logits, real: logits.astype(jnp.float32),
        finish=lambda ids, w, real, experts: (jnp.where(real, ids, experts), w * real),
    )
)
mutant("02.6", "masked at the end only: the gradient is NaN")(
    make_router(before=lambda logits, real: logits.astype(jnp.float32))
)
mutant("02.6", "scores in bfloat16")(
    make_router(score=lambda x: jax.nn.sigmoid(x.astype(jnp.bfloat16)).astype(jnp.float32))
)
mutant("02.6", "keeps the dtype that came in")(
    make_router(before=lambda logits, real: jnp.where(real, logits, 0.0).astype(logits.dtype))
)
mutant("02.6", "mask inverted")(
    make_router(
        before=lambda logits, real: jnp.where(real, 0.0, logits.astype(jnp.float32)),
        finish=lambda ids, w, real, experts: (jnp.where(real, experts, ids), jnp.where(real, 0.0, w)),
    )
)


@mutant("02.6", "no group limit")
def _(logits, bias, mask, k, num_groups, top_groups, scaling_factor):
    return make_router()(logits, bias, mask, k, 1, 1, scaling_factor)


@mutant("02.6", "scaling factor forgotten")
def _(logits, bias, mask, k, num_groups, top_groups, scaling_factor):
    return make_router()(logits, bias, mask, k, num_groups, top_groups, 1.0)


@mutant("02.6", "looks at values: no jit")
def _(logits, bias, mask, k, num_groups, top_groups, scaling_factor):
    ids, weights = make_router()(logits, bias, mask, k, num_groups, top_groups, scaling_factor)
    if bool(jnp.isnan(weights).any()):
        raise ValueError("NaN in the weights")
    return ids, weights


@mutant("02.6", "no gradient to the logits")
def _(logits, bias, mask, k, num_groups, top_groups, scaling_factor):
    stopped = jax.lax.stop_gradient(logits)
    return make_router()(stopped, bias, mask, k, num_groups, top_groups, scaling_factor)
