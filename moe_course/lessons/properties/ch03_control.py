"""Chapter 03, load balancing, the second half: z-loss, the bias rule, capacity."""

import jax
import jax.numpy as jnp
import numpy as np

from moe_course.lessons.compare import close, same
from moe_course.lessons.exercise import holds
from moe_course.lessons.properties.ch02 import best, describe, logits_of

# ---------------------------------------------------------------- 03.4 z-loss


def z_and_gradient(logits, mask):
    """(mean over real tokens of logsumexp squared, its gradient)."""
    logits = np.where(mask[:, None], np.asarray(logits, np.float64), 0.0)
    top = logits.max(-1, keepdims=True, initial=-np.inf)
    lse = top + np.log(np.exp(logits - top).sum(-1, keepdims=True))
    count = max(mask.sum(), 1)
    value = (lse[mask] ** 2).sum() / count
    return value, np.where(mask[:, None], 2 * lse * np.exp(logits - lse) / count, 0.0)


def _z(fn, logits, mask, case, why="") -> None:
    value = z_and_gradient(logits, mask)[0]
    real = np.asarray(logits, np.float64)[mask]
    lse = np.logaddexp.reduce(real, axis=-1)
    count = max(len(lse), 1)
    suspects = {
        "The square is missing.": lse.sum() / count,
        "This is the square of the mean. Square first, then average.": (lse.sum() / count) ** 2,
        "Padding is among the tokens you divide by.": (lse**2).sum() / max(len(mask), 1),
        "This is a sum over tokens. The loss is their mean.": (lse**2).sum(),
    }
    close(fn(logits, mask), value, case=case, why=why, terms=logits.size, suspects=suspects)


def _masked(tokens, experts, seed, scale=2.0):
    mask = np.random.default_rng([seed, tokens]).random(tokens) < 0.7
    mask[1::4] = False
    return logits_of(tokens, experts, seed=seed, scale=scale), mask


@holds("all logits 0: (ln E) squared, whatever the number of tokens")
def flat_logits(fn) -> int:
    for tokens, experts in ((33, 4), (17, 8)):
        case = f"{tokens} tokens, {experts} logits of 0"
        _z(fn, np.zeros((tokens, experts), np.float32), np.ones(tokens, bool), case)
    return 2


@holds("random logits and masks")
def random_z(fn) -> int:
    for tokens, experts in ((17, 8), (33, 4)):
        logits, mask = _masked(tokens, experts, 50)
        _z(fn, logits, mask, f"{describe('logits', logits)}, {int(mask.sum())} real tokens")
    mask = np.arange(17) == 5
    _z(fn, logits_of(17, 8, seed=55), mask, "one real token of 17")
    return 3


@holds("large logits do not overflow, whichever sign they have")
def large_z(fn) -> int:
    for shift in (200.0, -200.0):
        logits, mask = _masked(17, 8, 51)
        why = "exp(200) is infinite in float32 and exp(-200) is 0. jax.nn.logsumexp takes the largest logit out."
        _z(fn, logits + np.float32(shift), mask, f"logits near {shift:g}", why)
    return 2


@holds("NaN in padding stays there")
def masked_z(fn) -> int:
    logits, mask = _masked(17, 8, 52)
    logits[~mask] = np.nan
    why = "0 * NaN is NaN. Replace the logits of padding before any arithmetic."
    _z(fn, logits, mask, "padding holds NaN", why)
    _z(fn, logits, np.zeros(17, bool), "no real token", "Without a real token the loss is 0, not 0 / 0.")
    return 2


@holds("computed in float32")
def half_z(fn) -> int:
    logits, mask = _masked(17, 8, 53)
    why = "Cast to float32 before the logsumexp."
    _z(fn, logits.astype(jnp.bfloat16), mask, "bfloat16 logits [17, 8]", why)
    return 1


@holds("its gradient is 2 lse softmax over the real tokens, 0 on padding")
def gradient_z(fn) -> int:
    logits, mask = _masked(17, 8, 54)
    logits[~mask] = np.nan
    got = jax.grad(lambda z: fn(z, jnp.asarray(mask)))(jnp.asarray(logits))
    case, why = "gradient to logits [17, 8], padding holds NaN", "Replace the logits of padding first of all."
    close(got, z_and_gradient(logits, mask)[1], case=case, axes=("token", "expert"), why=why, terms=64)
    return 1


# ---------------------------------------------------------------- 03.5 bias rule


def moved(bias, load, rate):
    """Raise below the layer's mean, lower above it, leave it at the mean."""
    load = np.asarray(load, np.float64)
    return np.asarray(bias, np.float64) + rate * np.sign(load.mean(-1, keepdims=True) - load)


def _bias(fn, bias, load, rate, case, why="") -> None:
    bias64, counts = bias.astype(np.float64), load.astype(np.float64)
    off = counts.mean(-1, keepdims=True) - counts
    scale = np.abs(off).max(-1, keepdims=True, initial=1e-9)
    suspects = {
        "The sign is turned: a busy expert must become less attractive.": moved(bias, -counts, rate),
        "You compared with the mean over all layers. Each layer is balanced by itself.": (
            bias64 + rate * np.sign(counts.mean() - counts)
        ),
        "The step is the same for all experts, rate, not proportional to the distance from the mean.": (
            bias64 + rate * off
        ),
        "The step is rate whatever the distance; you scaled it.": bias64 + rate * off / scale,
        "An expert exactly at the mean was moved. Its step is 0.": (
            bias64 + rate * np.where(off > 0, 1.0, -1.0)
        ),
        "An expert exactly at the mean was raised. Its step is 0.": (
            bias64 + rate * np.where(off >= 0, 1.0, -1.0)
        ),
        "This is the step alone. Add it to the bias.": rate * np.sign(off),
    }
    yours = fn(bias, load, np.float32(rate))
    close(yours, moved(bias, load, rate), case=case, axes=("layer", "expert"), why=why, suspects=suspects)


def _layers(layers, experts, seed):
    rng = np.random.default_rng([seed, layers, experts])
    bias = rng.normal(size=(layers, experts)).astype(np.float32)
    return bias, rng.integers(0, 200, (layers, experts)).astype(np.int32)


@holds("one layer by hand: counts [6, 2, 0, 0] move by [-1, 0, 1, 1]")
def by_hand(fn) -> int:
    load = np.array([[6, 2, 0, 0]], np.int32)
    why = "The mean is 2: above it down, below it up, at it nothing."
    _bias(fn, np.zeros((1, 4), np.float32), load, 1.0, "bias 0, load [6, 2, 0, 0], rate 1", why)
    close_to_mean = np.array([[3, 2, 2, 2]], np.int32)
    _bias(
        fn, np.zeros((1, 4), np.float32), close_to_mean, 1.0, "bias 0, load [3, 2, 2, 2]", "The mean is 2.25."
    )
    _bias(fn, np.array([[0.5, -0.25, 3.0, -1.0]], np.float32), load, 0.25, "bias not 0, rate 0.25", why)
    return 3


@holds("random loads and biases")
def random_bias(fn) -> int:
    for layers, experts in ((1, 8), (1, 16), (1, 5)):
        bias, load = _layers(layers, experts, 60)
        _bias(fn, bias, load, 0.01, f"load {[layers, experts]}, rate 0.01")
    return 3


@holds("each layer from its own counts")
def stacked_layers(fn) -> int:
    bias, load = _layers(4, 8, 61)
    load[1:] += np.array([[300], [600], [0]], np.int32)
    _bias(fn, bias, load, 0.01, "4 layers whose mean loads differ", "The mean is over the last axis.")
    bias, load = _layers(8, 8, 62)
    _bias(fn, bias, load, 0.01, "8 layers of 8 experts", "The mean is over the last axis.")
    return 2


@holds("balanced, or rate 0: nothing moves")
def at_rest(fn) -> int:
    bias, load = _layers(2, 8, 63)
    _bias(fn, bias, np.full((2, 8), 25, np.int32), 0.01, "every load 25")
    _bias(fn, bias, np.zeros((2, 8), np.int32), 0.01, "every load 0", "0 / 0 would be NaN.")
    _bias(fn, bias, load, 0.0, "rate 0")
    return 3


@holds("it works under jax.jit")
def bias_under_jit(fn) -> int:
    bias, load = _layers(2, 8, 64)
    _bias(jax.jit(lambda *args: fn(*args)), bias, load, 0.01, "compiled, 2 layers")
    return 1


# ---------------------------------------------------------------- 03.6 capacity


def kept(ids, experts: int, capacity: int) -> np.ndarray:
    """[T, K] True where the expert still had room, copies served in the order (token, pick)."""
    room, out = np.full(experts, capacity), np.zeros(ids.shape, bool)
    for t, k in np.ndindex(ids.shape):
        if ids[t, k] < experts and room[ids[t, k]] > 0:
            room[ids[t, k]] -= 1
            out[t, k] = True
    return out


def _kept(fn, ids, experts, capacity, case, why="") -> None:
    expected = kept(ids, experts, capacity)
    by_pick = kept(ids.T, experts, capacity).T
    suspects = {
        "These are the copies that were dropped.": ~expected,
        "One copy too few: an expert holds capacity copies.": kept(ids, experts, capacity - 1),
        "One copy too many: an expert holds capacity copies.": kept(ids, experts, capacity + 1),
        "You served all first picks before the second ones. Here the order is token by token.": by_pick,
        "You kept the last copies. The first ones come first.": kept(ids[::-1, ::-1], experts, capacity)[
            ::-1, ::-1
        ],
        "A copy with id E was kept. It goes nowhere.": expected | (ids >= experts),
    }
    result = fn(ids, experts, np.int32(capacity))
    same(result, expected, case=case, axes=("token", "pick"), why=why, suspects=suspects)


def _ids(tokens, experts, k, seed):
    rng = np.random.default_rng([seed, tokens, experts])
    keys = rng.normal(size=(tokens, experts)) + rng.normal(size=experts)
    return best(keys, k).astype(np.int32)


@holds("first come, first served, capacity copies for each expert")
def first_come(fn) -> int:
    cases = ((40, 8, 2, 7), (33, 5, 3, 11), (24, 4, 1, 3))
    for tokens, experts, k, capacity in cases:
        ids = _ids(tokens, experts, k, 70)
        _kept(fn, ids, experts, capacity, f"{describe('ids', ids)}, {experts} experts, capacity {capacity}")
    return len(cases)


@holds("one expert wanted by all")
def one_takes_all(fn) -> int:
    ids = np.stack([np.full(24, 2), np.arange(24) % 2], 1).astype(np.int32)
    _kept(fn, ids, 4, 6, "24 tokens pick expert 2 first, capacity 6")
    swapped = ids[:, ::-1].copy()
    _kept(fn, swapped, 4, 6, "24 tokens pick expert 2 second, capacity 6")
    return 2


@holds("room for nobody, room for all")
def extreme_capacity(fn) -> int:
    ids = _ids(24, 4, 2, 71)
    for capacity in (0, 1, 24, 10_000):
        _kept(fn, ids, 4, capacity, f"ids [24, 2], 4 experts, capacity {capacity}")
    _kept(fn, np.zeros((0, 2), np.int32), 4, 3, "no tokens")
    return 5


@holds("padding takes no room and is never kept")
def padded_capacity(fn) -> int:
    ids = _ids(40, 8, 2, 72)
    ids[::3, 0], ids[::3, 1] = 7, 2  # the last expert is popular
    ids[np.random.default_rng(73).random(40) < 0.5] = 8
    _kept(fn, ids, 8, 4, "half of 40 tokens are padding (id 8), 8 experts, capacity 4")
    return 1


@holds("dropped is what exceeds the capacity, expert by expert")
def the_ledger(fn) -> int:
    ids = _ids(40, 8, 2, 74)
    mask = np.asarray(fn(ids, 8, np.int32(9)))
    case = "ids [40, 2], 8 experts, capacity 9: copies kept for each expert"
    held = np.array([(mask & (ids == e)).sum() for e in range(8)])
    wanted = np.bincount(ids.ravel(), minlength=8)
    same(held.astype(np.int32), np.minimum(wanted, 9), case=case, axes=("expert",))
    return 1


@holds("it works under jax.jit, capacity a traced number")
def capacity_under_jit(fn) -> int:
    compiled = jax.jit(lambda ids, capacity: fn(ids, 8, capacity))
    for capacity in (4, 9):
        _kept(
            lambda ids, _, c: compiled(ids, c),
            _ids(40, 8, 2, 75),
            8,
            capacity,
            f"compiled, capacity {capacity}",
        )
    return 2
