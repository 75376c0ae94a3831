"""Chapter 02, routing, the second half: groups, precision, the whole router."""

import jax
import jax.numpy as jnp
import numpy as np

from moe_course.lessons.compare import close, items, same
from moe_course.lessons.exercise import holds
from moe_course.lessons.properties.ch02 import best, describe, logits_of, sigmoid, weigh

# ---------------------------------------------------------------- 02.4 groups


def allowed(keys, num_groups: int, top_groups: int, group_best: int) -> np.ndarray:
    """[T, E] True in the best groups, one token and one group at a time."""
    keys = np.asarray(keys, np.float64)
    size = keys.shape[-1] // num_groups
    out = np.zeros(keys.shape, bool)
    for t, row in enumerate(keys):
        scores = [np.sort(row[g * size : (g + 1) * size])[::-1][:group_best].sum() for g in range(num_groups)]
        for g in best(np.array(scores), top_groups):
            out[t, g * size : (g + 1) * size] = True
    return out


GROUPINGS = ((8, 4, 2, 2), (8, 2, 1, 3), (12, 3, 2, 2))
"""(experts, groups, groups kept, experts that make a group's score)."""


def _groups(fn, keys, num_groups, top_groups, group_best, case, why="") -> None:
    expected = allowed(keys, num_groups, top_groups, group_best)
    suspects = {
        "These are the groups to leave out.": ~expected,
        "A group was scored by its best expert alone.": allowed(keys, num_groups, top_groups, 1),
        "A group was scored by all of its experts.": allowed(
            keys, num_groups, top_groups, keys.shape[-1] // num_groups
        ),
    }
    yours = fn(keys, num_groups, top_groups, group_best)
    same(yours, expected, case=case, axes=("token", "expert"), why=why, suspects=suspects)


def _grouping(experts, groups, kept, count) -> str:
    return f"{experts} experts in {groups} groups, keep {kept}, scored by their best {count}"


@holds("the experts of the best groups, and no others")
def best_groups(fn) -> int:
    why = "Groups are neighbours: experts 0 to E/G - 1 are group 0."
    for i, (experts, *grouping) in enumerate(GROUPINGS):
        _groups(fn, logits_of(21, experts, seed=12 + i), *grouping, _grouping(experts, *grouping), why)
    return len(GROUPINGS)


@holds("keys of any sign")
def negative_groups(fn) -> int:
    hand = np.array([[0.30, 0.20, 0.90, 0.80, 0.10, 0.05, 0.02, 0.01]], np.float32) - np.float32(1.0)
    _groups(
        fn, hand, 4, 2, 2, "keys [-0.70, -0.80, -0.10, -0.20, ...], 4 groups, keep 2", "All keys are below 0."
    )
    keys = logits_of(21, 8, seed=20) - np.float32(9.0)
    _groups(fn, keys, 4, 2, 2, "keys around -9, 4 groups, keep 2", "All keys are below 0.")
    return 2


@holds("exactly as many groups as asked for, ties to the lower group")
def tied_groups(fn) -> int:
    tied = np.random.default_rng(21).integers(0, 2, (30, 8)).astype(np.float32)
    why = "Two groups tie. Comparing with a threshold keeps both; ranking keeps the first."
    _groups(fn, np.zeros((2, 8), np.float32), 4, 2, 2, "all keys 0, 4 groups, keep 2", why)
    _groups(fn, tied, 4, 2, 2, "keys from {0, 1} [30, 8], 4 groups, keep 2", why)
    return 2


@holds("all groups kept, one group, groups of one expert, no tokens")
def extreme_groups(fn) -> int:
    cases = ((5, 8, 4, 4, 2), (5, 8, 1, 1, 2), (5, 8, 8, 3, 1), (0, 8, 4, 2, 2))
    for tokens, experts, *grouping in cases:
        _groups(
            fn,
            logits_of(tokens, experts, seed=22),
            *grouping,
            f"{tokens} tokens, {_grouping(experts, *grouping)}",
        )
    return len(cases)


# ---------------------------------------------------------------- 02.5 precision


def flipped(logits, k: int) -> np.ndarray:
    """[T] True where the set of picks changes when the logits are rounded to bfloat16."""
    rounded = np.asarray(logits).astype(jnp.bfloat16).astype(np.float32)
    return np.array([set(a) != set(b) for a, b in zip(best(logits, k), best(rounded, k), strict=True)], bool)


def _flips(fn, logits, k, case, why="") -> None:
    exact, coarse = best(logits, k), best(logits.astype(jnp.bfloat16).astype(np.float32), k)
    half = best(logits.astype(np.float16).astype(np.float32), k)
    suspects = {
        "These are the tokens that keep their experts.": ~flipped(logits, k),
        "A token that only changes the order of its picks still visits the same experts.": (
            exact != coarse
        ).any(-1),
        "You compared the first pick only.": exact[:, 0] != coarse[:, 0],
        "This is float16, which keeps three more bits than bfloat16.": (np.sort(exact) != np.sort(half)).any(
            -1
        ),
    }
    same(fn(logits, k), flipped(logits, k), case=case, axes=("token",), why=why, suspects=suspects)


@holds("3.001 and 3.004 are the same number in bfloat16")
def rounding_ties(fn) -> int:
    logits = np.array([[3.001, 3.004, 1.0], [3.004, 3.001, 1.0], [1.0, 3.0, 2.0]], np.float32)
    _flips(
        fn,
        logits,
        1,
        "logits [3.001, 3.004, 1] and two more tokens, k 1",
        "Round the logits, then choose anew.",
    )
    return 1


@holds("the set counts, not its order")
def sets_not_orders(fn) -> int:
    logits = np.array(
        [[3.001, 3.004, 1.0, 0.5], [1.0, 3.001, 0.5, 3.004], [0.1, 2.0, 3.001, 3.004]], np.float32
    )
    for k in (1, 2, 3):
        _flips(fn, logits, k, f"three tokens with 3.001 and 3.004 among their logits, k {k}")
    return 3


@holds("random tokens")
def random_flips(fn) -> int:
    for tokens, experts, k in ((500, 64, 6), (500, 8, 2), (300, 32, 8)):
        logits = logits_of(tokens, experts, seed=30, scale=1.0)
        _flips(fn, logits, k, f"{describe('logits', logits)}, k {k}")
    return 3


@holds("all experts picked, or no token: no flip")
def no_flips(fn) -> int:
    _flips(fn, logits_of(9, 8, seed=31), 8, "k = E", "With every expert picked there is nothing to change.")
    _flips(fn, logits_of(0, 8, seed=31), 2, "no tokens")
    return 2


# ---------------------------------------------------------------- 02.6 the whole router

ROUTERS = ((8, 2, 1, 1), (16, 4, 4, 2), (32, 8, 8, 4), (8, 1, 1, 1))
"""(experts, k, groups, groups kept). Few, and always 19 tokens: a router is 30 operations to compile a shape."""


def routed(logits, bias, mask, k, num_groups, top_groups, scale):
    """(ids, weights) of a DeepSeek-V3 router: sigmoid, bias, group limit, masked tokens to id E, weight 0."""
    experts = logits.shape[-1]
    scores = sigmoid(np.where(mask[:, None], logits.astype(np.float64), 0.0))
    keys = scores + bias.astype(np.float64)
    keys = np.where(allowed(keys, num_groups, top_groups, max(1, k // top_groups)), keys, -np.inf)
    ids = best(keys, k)
    weights = weigh(scores, ids, scale)
    return np.where(mask[:, None], ids, experts), np.where(mask[:, None], weights, 0.0)


def _router_case(tokens, experts, seed=40, spread=0.3):
    rng = np.random.default_rng([seed, tokens, experts])
    mask = rng.random(tokens) < 0.7
    bias = (rng.normal(size=experts) * spread).astype(np.float32)
    return logits_of(tokens, experts, seed=seed), bias, mask


def _routes(fn, logits, bias, mask, k, groups, kept, case, why="") -> None:
    result = fn(logits, bias, mask, k, groups, kept, 2.5)
    ids, weights = items(result, 2, case=case, names="ids, weights")
    right_ids, right = routed(logits, bias, mask, k, groups, kept, 2.5)
    free, _ = routed(logits, bias, np.ones_like(mask), k, groups, kept, 2.5)
    suspects = {
        "The masked tokens were routed. They get id E, which is no expert.": free,
        "Masked tokens get id E, not -1: a negative index counts from the end.": np.where(
            mask[:, None], free, -1
        ),
        "The group limit is missing.": routed(logits, bias, mask, k, 1, 1, 2.5)[0],
        "The bias is missing from the choice.": routed(logits, 0 * bias, mask, k, groups, kept, 2.5)[0],
    }
    axes = ("token", "pick")
    same(ids, right_ids, case=case, axes=axes, why=why, suspects=suspects, what="ids")
    close(weights, right, case=case, axes=axes, experts=right_ids, why=why, terms=k, what="weights")


def _router(experts, k, groups, kept) -> str:
    return f"{experts} experts, k {k}, {groups} groups, keep {kept}"


@holds("ids and weights of a DeepSeek-V3 router")
def whole_router(fn) -> int:
    for settings in ROUTERS:
        _routes(fn, *_router_case(19, settings[0]), *settings[1:], _router(*settings))
    return len(ROUTERS)


@holds("NaN in a masked token stays there")
def masked_nan(fn) -> int:
    logits, bias, mask = _router_case(19, 8, seed=41)
    logits[~mask] = np.nan
    why = "0 * NaN is NaN. Replace the logits of masked tokens before any arithmetic."
    _routes(fn, logits, bias, mask, 2, 1, 1, "masked tokens hold NaN, 8 experts, k 2", why)

    def loss(logits):
        return items(fn(logits, bias, mask, 2, 1, 1, 2.5), 2, case="under jax.grad", names="ids, weights")[1][
            :, 0
        ].sum()

    gradient = np.asarray(jax.grad(loss)(jnp.asarray(logits)))
    case, axes = "gradient to the logits of masked tokens that hold NaN", ("masked token", "expert")
    close(gradient[~mask], np.zeros_like(logits[~mask]), case=case, axes=axes, why=why)
    if not np.abs(gradient[mask]).max() > 0:
        same(
            np.array(0),
            np.array(1),
            case="gradient to the real tokens",
            why="No gradient reaches the logits.",
        )
    return 2


@holds("biases far below zero")
def sunken_bias(fn) -> int:
    logits, bias, mask = _router_case(19, 16, seed=42)
    why = "Experts of groups that were left out must lose against any key: fill with minus infinity, not with 0."
    _routes(
        fn,
        logits,
        bias - np.float32(3.0),
        mask,
        4,
        4,
        2,
        "16 experts, k 4, 4 groups, keep 2, biases near -3",
        why,
    )
    return 1


@holds("bfloat16 logits are routed in float32")
def half_precision(fn) -> int:
    logits, bias, mask = _router_case(19, 16, seed=43)
    why = "Cast the logits to float32 first: scores rounded to bfloat16 tie, and a bias of 0.001 disappears in them."
    _routes(
        fn,
        logits.astype(jnp.bfloat16),
        bias * np.float32(0.01),
        mask,
        4,
        4,
        2,
        "bfloat16 logits [19, 16], k 4",
        why,
    )
    return 1


@holds("all tokens masked, none masked, no tokens")
def mask_extremes(fn) -> int:
    logits, bias, _ = _router_case(19, 8, seed=44)
    for rows, mask in ((19, np.zeros(19, bool)), (19, np.ones(19, bool)), (0, np.zeros(0, bool))):
        _routes(fn, logits[:rows], bias, mask, 2, 1, 1, f"{int(mask.sum())} of {rows} tokens are real")
    return 3


@holds("it works under jax.jit")
def under_jit(fn) -> int:
    logits, bias, mask = _router_case(19, 16, seed=45)
    compiled = jax.jit(lambda *arrays: fn(*arrays, 4, 4, 2, 2.5))
    _routes(
        lambda a, b, c, *_: compiled(a, b, c),
        logits,
        bias,
        mask,
        4,
        4,
        2,
        "compiled, 16 experts, k 4, 4 groups",
    )
    return 1
