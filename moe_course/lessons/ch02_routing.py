"""Chapter 02, routing: exercises and questions. The oracles are float64 NumPy, written from the definitions."""

import numpy as np

from moe_course.lessons.compare import close
from moe_course.lessons.exercise import Exercise, holds

SHAPES = ((4, 4), (1, 8), (33, 8), (0, 8), (17, 32))
"""(tokens, experts) of the random cases; few, since JAX compiles for each shape."""


def logits_of(tokens: int, experts: int, seed: int = 0, scale: float = 2.0) -> np.ndarray:
    """float32 logits, random, distinct, of both signs."""
    return (np.random.default_rng([seed, tokens, experts]).normal(size=(tokens, experts)) * scale).astype(
        np.float32
    )


def softmax(x) -> np.ndarray:
    x = np.asarray(x, np.float64)
    if x.size == 0:
        return x
    z = np.exp(x - x.max(-1, keepdims=True))
    return z / z.sum(-1, keepdims=True)


def sigmoid(x) -> np.ndarray:
    x = np.asarray(x, np.float64)
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small))


SCORES = {"softmax": softmax, "sigmoid": sigmoid}


def _logits_case(logits) -> str:
    return f"logits {logits.dtype} [{logits.shape[0]}, {logits.shape[1]}]"


# ---------------------------------------------------------------- 02.1 scores


def _random_scores(fn, name: str) -> int:
    for tokens, experts in SHAPES:
        logits = logits_of(tokens, experts)
        close(
            fn(logits, name),
            SCORES[name](logits),
            case=f"{_logits_case(logits)}, {name}",
            axes=("token", "expert"),
            terms=experts,
            suspects={
                "This is the softmax over tokens. Each token spreads its own probability over the experts: axis -1.": (
                    SCORES["softmax"](logits.T).T
                ),
                "This is the other score function.": SCORES["sigmoid" if name == "softmax" else "softmax"](
                    logits
                ),
            },
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
    for name, oracle in SCORES.items():
        close(
            fn(logits, name),
            oracle(logits),
            case=f"logits of plus and minus 300, {name}",
            axes=("token", "expert"),
            terms=4,
            why="exp(300) overflows in float32. Subtract the row's largest logit first, or use jax.nn.",
        )
    return len(SCORES)


@holds("scores are float32, computed in float32, whatever comes in")
def float32_inside(fn) -> int:
    import jax.numpy as jnp

    for name, oracle in SCORES.items():
        logits = logits_of(16, 8, seed=1).astype(jnp.bfloat16)
        exact = oracle(logits.astype(np.float64))
        close(
            fn(logits, name),
            exact,
            case=f"logits bfloat16 [16, 8], {name}",
            axes=("token", "expert"),
            terms=8,
            why="These scores were rounded to bfloat16 on the way. Cast the logits to float32 before the function, "
            "not the scores after it.",
        )
    return len(SCORES)


EXERCISES = (
    Exercise(
        id="02.1",
        title="scores",
        goal="Turn router logits into scores, by softmax or by sigmoid, in float32.",
        difficulty=1,
        minutes=5,
        used_again=("03", "06", "11"),
        hints=(
            "Which experts compete with which? Softmax makes the experts of one token share a probability of 1; "
            "sigmoid asks each expert alone. And in which precision do you want to compare two scores that are close?",
            "logits [T, E] in any floating dtype -> scores [T, E] float32. The sum of softmax runs over E, the last axis.",
            'logits = logits.astype(...)\nreturn jax.nn.softmax(logits, axis=...) if score_fn == "softmax" else ...',
            """
def scores_of(logits, score_fn):
    logits = logits.astype(jnp.float32)
    return jax.nn.softmax(logits, axis=-1) if score_fn == "softmax" else jax.nn.sigmoid(logits)
""",
        ),
        properties=(softmax_scores, sigmoid_scores, large_logits, float32_inside),
    ),
)
QUIZZES = ()
