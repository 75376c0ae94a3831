"""Chapter 03, load balancing: counts and balance losses. Oracles are float64 NumPy, from the definitions."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from moe_course.lessons.compare import array_of, close, items, same
from moe_course.lessons.exercise import holds
from moe_course.lessons.properties.ch02 import best, describe

SHAPES = ((40, 8, 2), (33, 5, 3), (24, 4, 1), (24, 4, 4))
"""(tokens, experts, picks) of the random cases. Few, and used again below: JAX compiles for each shape."""


def routed(tokens: int, experts: int, k: int, seed: int = 0, padding: float = 0.0):
    """(scores [T, E], ids [T, K]): uneven, distinct, sigmoid-like; padding rows have zero scores and id E."""
    rng = np.random.default_rng([seed, tokens, experts, k])
    logits = rng.normal(size=(tokens, experts)) + 1.2 * rng.normal(size=experts)
    scores = (1 / (1 + np.exp(-logits))).astype(np.float32)
    ids = best(scores, k).astype(np.int32)
    empty = rng.random(tokens) < padding
    return np.where(empty[:, None], np.float32(0), scores), np.where(empty[:, None], np.int32(experts), ids)


def counted(ids, experts: int) -> np.ndarray:
    """[E] copies per expert, one pick at a time."""
    load = np.zeros(experts, np.int64)
    for e in np.asarray(ids).ravel():
        if 0 <= e < experts:
            load[e] += 1
    return load


# ---------------------------------------------------------------- 03.1 load


def _load(fn, ids, experts, case, why="") -> None:
    load, cv, dead = items(fn(ids, experts), 3, case=case, names="load, cv, dead")
    right = counted(ids, experts)
    suspects = {
        "This is the share of each expert. Return counts.": right / max(right.sum(), 1),
        "These counts hold the first pick of each token only.": counted(ids[:, :1], experts),
    }
    array_of(load, case=case, shape=(experts,), kind="i", what="load")
    same(load, right, case=case, axes=("expert",), why=why, suspects=suspects, what="load")
    mean = right.mean()
    spread = right.std() / mean if mean else 0.0
    spreads = {
        "This divides by E - 1 before the root. The experts are all there are: divide by E.": (
            right.std(ddof=1) / mean if mean and experts > 1 else np.nan
        ),
        "This is the standard deviation. Divide it by the mean load.": right.std(),
        "This is the square. Take the root.": spread**2,
    }
    why_cv = (
        why or "cv is the standard deviation of the load over its mean; 0 when there is nothing to count."
    )
    close(cv, spread, case=case, why=why_cv, terms=experts, suspects=spreads, what="cv")
    same(dead, np.sum(right == 0), case=case, why=why or "dead counts the experts with load 0.", what="dead")


@holds("copies per expert, their spread, and the experts without any")
def random_load(fn) -> int:
    for tokens, experts, k in SHAPES:
        ids = routed(tokens, experts, k)[1]
        _load(fn, ids, experts, describe("ids", ids) + f", {experts} experts")
    return len(SHAPES)


@holds("most experts idle")
def idle_experts(fn) -> int:
    ids = np.random.default_rng(1).choice([1, 6], (40, 1)).astype(np.int32)
    _load(fn, np.concatenate([ids, np.full_like(ids, 3)], 1), 8, "40 tokens on experts 1, 3 and 6 of 8")
    _load(fn, np.full((24, 1), 3, np.int32), 4, "all 24 tokens on expert 3 of 4")
    return 2


@holds("the id E is no expert")
def padding_counts_nowhere(fn) -> int:
    ids = routed(40, 8, 2, seed=2, padding=0.4)[1]
    _load(fn, ids, 8, "16 or so of 40 tokens are padding, 8 experts", "Padding has id E. It counts nowhere.")
    return 1


@holds("nothing to count")
def nothing(fn) -> int:
    why = "No copies at all: every load is 0, cv is 0 (not 0 / 0), all experts are dead."
    _load(fn, np.full((24, 1), 4, np.int32), 4, "24 tokens, all padding, 4 experts", why)
    _load(fn, np.zeros((0, 2), np.int32), 4, "no tokens, 4 experts", why)
    return 2


# ---------------------------------------------------------------- 03.2 balance loss


def loss_and_gradient(scores, load, k: int, tokens: float):
    """E sum_e f_e P_e with P summed over the given rows and divided by ``tokens``; and d/d scores."""
    scores, experts = np.asarray(scores, np.float64), scores.shape[-1]
    totals = scores.sum(-1, keepdims=True)
    real = totals > 0
    safe = np.where(real, totals, 1.0)
    probs = np.where(real, scores / safe, 0.0)
    share = load / max(load.sum(), 1)
    value = experts * (share * probs.sum(0)).sum() / max(tokens, 1)
    inner = (share * probs).sum(-1, keepdims=True)
    gradient = np.where(real, experts * (share - inner) / safe / max(tokens, 1), 0.0)
    return value, gradient


def _whole(scores, ids):
    experts, k = scores.shape[-1], ids.shape[-1]
    load = counted(ids, experts)
    return loss_and_gradient(scores, load, k, load.sum() / k)


def _balance(fn, scores, ids, case, why="") -> None:
    experts, k = scores.shape[-1], ids.shape[-1]
    value = _whole(scores, ids)[0]
    real = ids[:, 0] < experts
    share = counted(ids, experts) / max(real.sum() * k, 1)
    raw = experts * (share * scores[real].astype(np.float64).sum(0)).sum() / max(real.sum(), 1)
    suspects = {
        "This is K times too large: f is the share of all picks, and a token has K of them.": value * k,
        "The factor E is missing: 1 / E is not what balance should read.": value / experts,
        "Scores of a token need not add up to 1. Divide them by their sum over the experts first.": raw,
        "Padding is among the tokens you divide by.": value * real.mean() if len(real) else np.nan,
        "f counts the first pick only.": (
            experts * (counted(ids[:, :1], experts) / max(real.sum(), 1) * _mean_probs(scores)).sum()
        ),
    }
    close(fn(scores, ids), value, case=case, why=why, terms=scores.size, suspects=suspects)


def _mean_probs(scores):
    scores = np.asarray(scores, np.float64)
    totals = scores.sum(-1, keepdims=True)
    return (scores / np.where(totals > 0, totals, 1)).sum(0) / max((totals > 0).sum(), 1)


@holds("1 in perfect balance, for any K")
def balanced_is_one(fn) -> int:
    cases = ((24, 4, 1), (24, 4, 2), (24, 4, 4), (40, 8, 2))
    for tokens, experts, k in cases:
        ids = (np.arange(tokens)[:, None] + np.arange(k)[None]) % experts
        scores = np.full((tokens, experts), 0.3, np.float32)
        _balance(fn, scores, ids.astype(np.int32), f"picks in turn, equal scores, {experts} experts, K {k}")
    return len(cases)


@holds("the skewed batch by hand: 1.6")
def skewed(fn) -> int:
    scores = np.tile(np.array([0.4, 0.4, 0.1, 0.1], np.float32), (24, 1))
    ids = np.tile(np.array([[0, 1], [1, 0]], np.int32), (12, 1))
    _balance(fn, scores, ids, "scores [0.4, 0.4, 0.1, 0.1] and picks {0, 1} for all 24 tokens")
    _balance(
        fn, 2 * scores, ids, "the same scores doubled", "Doubling all scores of a token changes nothing."
    )
    return 2


@holds("random batches")
def random_losses(fn) -> int:
    for tokens, experts, k in SHAPES:
        scores, ids = routed(tokens, experts, k, seed=3)
        _balance(fn, scores, ids, f"{describe('scores', scores)}, K {k}")
    return len(SHAPES)


@holds("padding changes nothing")
def padded_losses(fn) -> int:
    scores, ids = routed(40, 8, 2, seed=4, padding=0.4)
    _balance(fn, scores, ids, "padding among 40 tokens: scores 0, id E", "Divide by real tokens alone.")
    why = "Without a real token the loss is 0, not 0 / 0."
    _balance(fn, np.zeros((24, 4), np.float32), np.full((24, 2), 4, np.int32), "24 tokens, all padding", why)
    return 2


@holds("the gradient flows through the scores, and stays finite on padding")
def loss_gradients(fn) -> int:
    for padding in (0.0, 0.4):
        scores, ids = routed(24, 4, 2, seed=5, padding=padding)
        got = jax.grad(lambda s, ids=ids: fn(s, jnp.asarray(ids)))(jnp.asarray(scores))
        right = _whole(scores, ids)[1]
        case = f"gradient to scores [24, 4], {'with' if padding else 'no'} padding"
        got = _finite_on_padding(got, scores, case)
        suspects = {
            "No gradient reaches the scores: P must be differentiated, only f is a constant.": 0 * right
        }
        close(got, right, case=case, axes=("token", "expert"), terms=400, suspects=suspects)
    return 2


def _finite_on_padding(gradient, scores, case) -> np.ndarray:
    """The gradient with 0 on padding, where it may be any number (whoever made the zeros stops it), but not NaN."""
    empty = scores.sum(-1, keepdims=True) == 0
    why = "0 / 0 has a gradient of NaN even inside a where: make the divisor safe before you divide."
    same(np.isfinite(gradient) | ~empty, np.ones(scores.shape, bool), case=case + ": is it finite?", why=why)
    return np.where(empty, np.float32(0), gradient)


@holds("it works under jax.jit")
def loss_under_jit(fn) -> int:
    scores, ids = routed(24, 4, 2, seed=6)
    _balance(jax.jit(lambda s, i: fn(s, i)), scores, ids, "compiled, scores [24, 4], K 2")
    return 1


# ---------------------------------------------------------------- 03.3 any split


def _parts(scores, ids, borders):
    edges = [0, *borders, len(scores)]
    load = counted(ids, scores.shape[-1]).astype(np.int32)
    return [scores[a:b] for a, b in pairwise(edges)], load


def _part(fn, part, load, k, case, why="") -> float:
    tokens = load.sum() / k
    value = loss_and_gradient(part, load, k, tokens)[0]
    here = max((part.sum(-1) > 0).sum(), 1)
    suspects = {
        "You divided by the tokens of this part. Divide by the tokens of all parts: the picks in load, over K.": (
            value * tokens / here
        ),
        "You divided by the picks, not by the tokens: load adds up to K times the tokens.": value / k,
    }
    return float(close(fn(part, load, k), value, case=case, why=why, terms=part.size, suspects=suspects))


SPLITS = (((20,), 8, 2), ((1, 20), 8, 2), ((20,), 5, 3))
"""(where a batch of 40 tokens is cut, experts, picks)."""


@holds("parts add up to the loss of the whole batch, however it is cut")
def parts_add_up(fn) -> int:
    for cut, experts, k in SPLITS:
        scores, ids = routed(40, experts, k, seed=7)
        parts, load = _parts(scores, ids, cut)
        for i, part in enumerate(parts):
            _part(fn, part, load, k, f"40 tokens cut at {list(cut)}, part {i}, {experts} experts, K {k}")
    return len(SPLITS)


@holds("padding, and parts of nothing else")
def padded_parts(fn) -> int:
    scores, ids = routed(60, 8, 2, seed=8, padding=0.3)
    scores[:20], ids[:20] = 0, 8
    parts, load = _parts(scores, ids, (20, 40))
    for i, part in enumerate(parts):
        _part(fn, part, load, 2, f"padding among 60 tokens, cut at [20, 40], part {i}")
    why = "The loss is 0, not 0 / 0."
    _part(fn, np.zeros((20, 8), np.float32), np.zeros(8, np.int32), 2, "no real token in any part", why)
    return 4


@holds("the gradient of a part is its share of the whole batch's")
def gradient_of_parts(fn) -> int:
    scores, ids = routed(60, 8, 2, seed=9, padding=0.2)
    parts, load = _parts(scores, ids, (20, 40))
    for i, part in enumerate(parts):
        right = loss_and_gradient(part, load, 2, load.sum() / 2)[1]
        got = jax.grad(lambda s, load=load: fn(s, jnp.asarray(load), 2))(jnp.asarray(part))
        case = f"gradient to the scores of part {i} of 3"
        got = _finite_on_padding(got, part, case)
        close(got, right, case=case, axes=("token", "expert"), terms=400)
    return 3
