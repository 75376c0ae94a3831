"""Chapter 02, routing: what right answers do. Oracles are float64 NumPy loops, written from the definitions."""

import jax
import jax.numpy as jnp
import numpy as np

from moe_course.lessons.compare import close, items, same
from moe_course.lessons.exercise import holds

SHAPES = ((5, 4), (33, 8), (0, 8), (1, 32))
"""(tokens, experts) of the random cases; few, since JAX compiles for each shape."""


def logits_of(tokens: int, experts: int, seed: int = 0, scale: float = 2.0) -> np.ndarray:
    """float32 logits, random, distinct, of both signs."""
    rng = np.random.default_rng([seed, tokens, experts])
    return (rng.normal(size=(tokens, experts)) * scale).astype(np.float32)


def softmax(x) -> np.ndarray:
    x = np.asarray(x, np.float64)
    z = np.exp(x - x.max(-1, keepdims=True, initial=-np.inf))
    return z / z.sum(-1, keepdims=True)


def sigmoid(x) -> np.ndarray:
    small = np.exp(-np.abs(np.asarray(x, np.float64)))
    return np.where(np.asarray(x) >= 0, 1 / (1 + small), small / (1 + small))


SCORES = {"softmax": softmax, "sigmoid": sigmoid}


def best(keys, k: int) -> np.ndarray:
    """[T, k] ids of the k largest, largest first, ties to the lower id."""
    return np.argsort(-np.asarray(keys, np.float64), axis=-1, kind="stable")[..., :k]


def weigh(scores, ids, scaling_factor: float) -> np.ndarray:
    picked = np.take_along_axis(np.asarray(scores, np.float64), ids, -1)
    return scaling_factor * (picked / picked.sum(-1, keepdims=True) if ids.shape[-1] > 1 else picked)


def describe(name: str, array) -> str:
    """``logits float32 [4, 8]``"""
    return f"{name} {array.dtype} {list(array.shape)}"


# ---------------------------------------------------------------- 02.1 scores


def _random_scores(fn, name: str) -> int:
    other = "sigmoid" if name == "softmax" else "softmax"
    for tokens, experts in SHAPES:
        logits = logits_of(tokens, experts)
        suspects = {
            "This is softmax over the tokens. A token spreads its own probability over the experts: axis -1.": (
                softmax(logits.T).T
            ),
            f"This is {other}.": SCORES[other](logits),
        }
        case = f"{describe('logits', logits)}, {name}"
        expected = SCORES[name](logits)
        close(
            fn(logits, name), expected, case=case, axes=("token", "expert"), terms=experts, suspects=suspects
        )
    return len(SHAPES)


@holds("softmax: each token's scores are positive and sum to 1")
def softmax_scores(fn) -> int:
    return _random_scores(fn, "softmax")


@holds("sigmoid: each expert is scored by itself")
def sigmoid_scores(fn) -> int:
    return _random_scores(fn, "sigmoid")


@holds("large logits give no NaN")
def large_logits(fn) -> int:
    logits = np.array([[300.0, -300.0, 299.0, 0.0], [-1e4, -1e4, -1e4, -1e4]], np.float32)
    why = "exp(300) overflows in float32. Subtract the row's largest logit first, or use jax.nn."
    for name, oracle in SCORES.items():
        case = f"logits of plus and minus 300, {name}"
        close(fn(logits, name), oracle(logits), case=case, axes=("token", "expert"), terms=4, why=why)
    return len(SCORES)


@holds("scores are float32, computed in float32, whatever comes in")
def float32_inside(fn) -> int:
    why = "These scores were rounded to bfloat16 on the way. Cast the logits before the function, not the scores after."
    for name, oracle in SCORES.items():
        logits = logits_of(16, 8, seed=1).astype(jnp.bfloat16)
        expected = oracle(logits.astype(np.float64))
        case = f"{describe('logits', logits)}, {name}"
        close(fn(logits, name), expected, case=case, axes=("token", "expert"), terms=8, why=why)
    return len(SCORES)


# ---------------------------------------------------------------- 02.2 top-k


def _ids(fn, keys, k: int, case: str, why: str = "") -> None:
    expected = best(keys, k)
    suspects = {
        "These are the right experts, worst first.": expected[:, ::-1],
        "These are the k smallest.": best(-keys, k),
        "These are the right experts in the order of their ids, not of their keys.": np.sort(expected, -1),
    }
    same(
        fn(keys, k),
        expected,
        case=case,
        axes=("token", "pick"),
        why=why,
        suspects=suspects if k > 1 else None,
    )


@holds("the k largest, largest first")
def largest_first(fn) -> int:
    for (tokens, experts), k in zip(SHAPES, (2, 3, 2, 6), strict=True):
        keys = logits_of(tokens, experts, seed=2)
        _ids(fn, keys, k, f"{describe('keys', keys)}, k {k}")
    return len(SHAPES)


@holds("k = 1 and k = E")
def all_or_one(fn) -> int:
    keys = logits_of(5, 8, seed=3)
    for k in (1, 8):
        _ids(fn, keys, k, f"{describe('keys', keys)}, k {k}", "The result always has k columns.")
    return 2


@holds("ties go to the lower id")
def ties(fn) -> int:
    why = "Two devices that hold the same logits must pick the same expert, so a tie needs a rule: the lower id."
    tied = np.random.default_rng(4).integers(-2, 2, (40, 8)).astype(np.float32)
    for keys, case in (
        (np.zeros((2, 8), np.float32), "all keys 0, k 3"),
        (tied, "keys from {-2, -1, 0, 1} [40, 8], k 3"),
    ):
        _ids(fn, keys, 3, case, why)
    return 2


@holds("negative keys are keys like others")
def negative(fn) -> int:
    keys = logits_of(33, 8, seed=5) - np.float32(20.0)
    _ids(
        fn,
        keys,
        4,
        "keys around -20 [33, 8], k 4",
        "Do not fill taken or missing places with 0: it beats -20.",
    )
    return 1


@holds("keys that differ in the last digit are not a tie")
def close_keys(fn) -> int:
    keys = np.full((1, 256), 0.25, np.float32)
    keys[0, [0, 255]] = 0.5, 0.5 + 2e-5
    _ids(
        fn,
        keys,
        1,
        "0.5 at id 0 and 0.50002 at id 255, k 1",
        "A tie-break that grows with the id decides here.",
    )
    return 1


# ---------------------------------------------------------------- 02.3 combine weights


def _picked(fn, scores, bias, k, scale, case, why="", suspects=None):
    """(ids, weights) of the learner, after comparing both with the oracle."""
    ids, weights = items(fn(scores, bias, k, scale), 2, case=case, names="ids, weights")
    expected = best(scores.astype(np.float64) + bias, k)
    wrong_ids = {"These experts were chosen without the bias.": best(scores, k)}
    same(ids, expected, case=case, axes=("token", "pick"), suspects=wrong_ids, what="ids")
    right = weigh(scores, expected, scale)
    close(
        weights,
        right,
        case=case,
        axes=("token", "pick"),
        experts=expected,
        terms=k,
        why=why,
        suspects=suspects,
        what="weights",
    )


def _scores_and_bias(tokens, experts, seed=6):
    scores = sigmoid(logits_of(tokens, experts, seed=seed)).astype(np.float32)
    bias = np.random.default_rng([seed, experts]).normal(size=experts).astype(np.float32)
    return scores, bias


@holds("the bias picks, it does not weigh")
def bias_picks(fn) -> int:
    hand = np.array([[0.5, 0.6, 0.7, 0.4]], np.float32), np.array([0.0, 0.0, -1.0, 1.0], np.float32)
    cases = [(*hand, 2, 1.0, "scores [0.5, 0.6, 0.7, 0.4], bias [0, 0, -1, 1], k 2")]
    for (tokens, experts), k in zip(SHAPES, (2, 3, 2, 6), strict=True):
        scores, bias = _scores_and_bias(tokens, experts)
        cases.append((scores, bias, k, 2.5, f"{describe('scores', scores)}, random bias, k {k}, scaling 2.5"))
    for scores, bias, k, scale, case in cases:
        ids = best(scores + bias, k)
        biased = np.take_along_axis(scores.astype(np.float64) + bias, ids, -1)
        suspects = {
            "You weighed with score + bias. Choose with it, then gather from the score alone.": (
                scale * biased / biased.sum(-1, keepdims=True)
            ),
            "The weights are not divided by their sum.": scale * np.take_along_axis(scores, ids, -1),
            "The scaling factor is missing: it multiplies after the division.": weigh(scores, ids, 1.0),
            "You divided by the sum over all experts. Divide by the sum over the k picks.": (
                scale * np.take_along_axis(scores, ids, -1) / scores.sum(-1, keepdims=True)
            ),
        }
        _picked(fn, scores, bias, k, scale, case, suspects=suspects)
    return len(cases)


@holds("a single pick keeps its score")
def single_pick(fn) -> int:
    scores, bias = _scores_and_bias(9, 8, seed=7)
    suspects = {
        "A weight divided by itself is 1, whatever the router does: it would never learn. Skip the division for k = 1.": (
            np.full((9, 1), 1.5)
        )
    }
    _picked(fn, scores, bias, 1, 1.5, "scores [9, 8], k 1, scaling 1.5", suspects=suspects)
    return 1


@holds("all experts picked")
def every_expert(fn) -> int:
    scores, bias = _scores_and_bias(5, 4, seed=8)
    _picked(fn, scores, bias, 4, 1.0, "scores [5, 4], k 4")
    return 1


@holds("one constant added to every bias changes nothing")
def shifted_bias(fn) -> int:
    scores, bias = _scores_and_bias(17, 8, seed=9)
    for shift in (-4.0, 8.0):
        why = "The keys are now all negative: something compares with 0." if shift < 0 else ""
        _picked(
            fn, scores, bias + np.float32(shift), 3, 1.0, f"scores [17, 8], biases near {shift:g}, k 3", why
        )
    return 2


@holds("the gradient reaches the scores of the picks, and never the bias")
def gradients(fn) -> int:
    scores, bias = _scores_and_bias(6, 8, seed=10)
    wanted = np.random.default_rng(11).normal(size=(6, 3))

    def loss(scores, bias):
        result = items(fn(scores, bias, 3, 2.0), 2, case="under jax.grad, k 3", names="ids, weights")
        return (result[1] * jnp.asarray(wanted, jnp.float32)).sum()

    to_scores, to_bias = jax.grad(loss, argnums=(0, 1))(jnp.asarray(scores), jnp.asarray(bias))
    ids = best(scores + bias, 3)
    picked = np.take_along_axis(scores.astype(np.float64), ids, -1)
    total = picked.sum(-1, keepdims=True)
    expected = np.zeros(scores.shape)
    mean = (wanted * picked).sum(-1, keepdims=True) / total
    np.put_along_axis(expected, ids, 2.0 * (wanted - mean) / total, -1)
    case = "gradient of a weighted sum of the weights, scores [6, 8], k 3"
    why = "The router learns through the weights alone: do not stop their gradient, nor that of their sum."
    close(
        to_bias, np.zeros(8), case=case + ", to the bias", axes=("expert",), why="The bias is no parameter."
    )
    close(to_scores, expected, case=case, axes=("token", "expert"), terms=16, why=why)
    return 1
