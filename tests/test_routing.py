"""The router against the oracle, against public bugs (``b01`` ...), and its checks against broken twins.

A check is a function of a router and a case. Ours and a plain second router (``naive_route``) must pass every
check; ``naive_route`` with one fault at a time must fail the check named beside that fault in ``FAULTS``.
"""

import functools
import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from moe_course.routing import RouterConfig, Routing, dense_routing, largest, route
from tests import oracle

FP32 = jnp.float32
routed = jax.jit(route, static_argnums=1)
CONFIGS = {
    "mixtral": RouterConfig(8, 2),
    "softmax-biased": RouterConfig(8, 3, normalize=False, scaling_factor=16.0),
    "switch": RouterConfig(4, 1),
    "deepseek-v2": RouterConfig(12, 4, normalize=False, num_groups=4, top_groups=2, group_score_top=2),
    "deepseek-v3": RouterConfig(16, 4, "sigmoid", scaling_factor=2.5, num_groups=4, top_groups=2),
    "sigmoid-plain": RouterConfig(8, 2, "sigmoid", normalize=False, scaling_factor=2.5),
    "all-of-two-groups": RouterConfig(6, 4, "sigmoid", num_groups=3, top_groups=2),
    "one-expert": RouterConfig(1, 1, "sigmoid"),
    "every-expert": RouterConfig(5, 5),
    "many-picks": RouterConfig(40, 20, "sigmoid", num_groups=2, top_groups=2),
}
UNBIASED = ("mixtral", "switch", "deepseek-v2", "every-expert")
names = st.sampled_from(sorted(CONFIGS))


@dataclass
class Case:
    config: RouterConfig
    logits: np.ndarray
    bias: np.ndarray | None
    mask: np.ndarray


def make_case(name, seed, tokens=None, *, ties=False, bias=1.0, real=0.7) -> Case:
    """Random logits, from three values if ``ties``. ``bias``: its scale. ``real``: share of real tokens."""
    config, rng = CONFIGS[name], np.random.default_rng(seed)
    tokens = config.num_experts + 1 if tokens is None else tokens
    shape = (tokens, config.num_experts)
    logits = rng.integers(0, 3, shape) if ties else rng.normal(0, 2, shape)
    shift = bias * (rng.integers(0, 2, shape[1]) if ties else rng.normal(size=shape[1]))
    biased = name not in UNBIASED
    return Case(config, np.float32(logits), np.float32(shift) if biased else None, rng.random(tokens) < real)


@st.composite
def cases(draw):
    """Few shapes, so that compiled routers are used again; any values."""
    return make_case(
        draw(names),
        draw(st.integers(0, 2**32 - 1)),
        ties=draw(st.booleans()),
        bias=draw(st.sampled_from([0.0, 0.1, 1.0, 5.0])),
        real=draw(st.sampled_from([0.0, 0.5, 1.0])),
    )


@functools.cache
def compiled(router):
    """Outputs and, for cotangents of weights and scores, gradients to logits and bias: compiled once."""

    @functools.partial(jax.jit, static_argnames="config")
    def fn(logits, bias, mask, replay_ids, dweights, dscores, config):
        def outputs(logits, bias):
            out = router(logits, config, bias=bias, mask=mask, replay_ids=replay_ids)
            return (out.weights, out.scores), out

        _, pull, out = jax.vjp(outputs, logits, bias, has_aux=True)
        return out, *pull((dweights, dscores))

    return fn


def run_with_gradients(router, case: Case, dweights=0.0, dscores=0.0, replay_ids=None, **changes):
    arrays = {"bias": case.bias, "mask": case.mask, "logits": case.logits} | changes
    shape = (len(case.logits), case.config.top_k)
    return compiled(router)(
        arrays["logits"],
        arrays["bias"],
        arrays["mask"],
        replay_ids,
        np.broadcast_to(np.float32(dweights), shape),
        np.broadcast_to(np.float32(dscores), case.logits.shape),
        case.config,
    )


def run(router, case: Case, **changes) -> Routing:
    return run_with_gradients(router, case, **changes)[0]


# ---------------------------------------------------------------- a second router, right or with one fault


def naive_route(logits, config, *, bias=None, mask=None, replay_ids=None, fault=""):
    """Plain softmax or sigmoid, ``lax.top_k``, divide. Right if ``fault`` is empty and nothing underflows."""
    num_experts = config.num_experts
    real = jnp.ones(logits.shape[:1], bool) if mask is None else mask
    shift = jnp.zeros(num_experts) if bias is None else lax.stop_gradient(bias)
    if fault == "router in bfloat16":
        logits = logits.astype(jnp.bfloat16)
    logits = logits.astype(FP32)
    clean = jnp.where(real[:, None], logits, 0.0)
    if fault == "mask by multiplying":
        clean = logits * real[:, None].astype(FP32)
    if fault == "bias on the logits":
        clean = clean + shift[None]
    score = jax.nn.softmax if config.score_fn == "softmax" else jax.nn.sigmoid
    scores = score(clean)
    keys = clean if config.score_fn == "softmax" and bias is None and config.num_groups == 1 else scores
    keys = keys + shift[None]
    if fault == "bias weighs":
        scores = keys
    if fault == "bias gets a gradient" and bias is not None:
        scores = scores + (bias - lax.stop_gradient(bias))[None]
    if config.num_groups > 1:
        grouped = keys.reshape(len(keys), config.num_groups, -1)
        top = config.group_score_top or max(1, config.top_k // config.top_groups)
        if fault == "group scored by its best":
            top = 1
        group_scores = lax.top_k(grouped, top)[0].sum(-1)
        kept = jax.nn.one_hot(lax.top_k(group_scores, config.top_groups)[1], config.num_groups).sum(1) > 0
        kept = jnp.repeat(kept, num_experts // config.num_groups, axis=1)
        keys = jnp.where(kept, keys, 0.0 if fault == "masked groups are 0" else -jnp.inf)
        if fault == "groups masked before softmax":
            scores = score(jnp.where(kept, clean, -jnp.inf))
    if fault == "ties by index epsilon":
        keys = keys - 3e-7 * jnp.arange(num_experts, dtype=FP32)[None]
    if fault == "ties to the higher id":
        ids = num_experts - 1 - lax.top_k(keys[:, ::-1], config.top_k)[1]
    elif fault == "repeated maximum without removal":
        ids = jnp.stack([jnp.argmax(keys, -1).astype(jnp.int32)] * config.top_k, -1)
    else:
        ids = lax.top_k(keys, config.top_k)[1]
    if fault == "ids in ascending order":
        ids = jnp.sort(ids, -1)
    if replay_ids is not None and fault != "replay ignored":
        ids = jnp.minimum(replay_ids, num_experts - 1)
    weights = jnp.take_along_axis(scores, ids, -1)
    if fault == "replay freezes weights" and replay_ids is not None:
        weights = lax.stop_gradient(weights)
    if fault == "scaled before normalising":
        weights = weights * config.scaling_factor
    if config.normalize and (config.top_k > 1 or fault == "normalised at k = 1"):
        weights = weights / weights.sum(-1, keepdims=True)
    if fault != "scaled before normalising":
        weights = weights * config.scaling_factor
    none = -1 if fault == "no expert is -1" else num_experts
    return Routing(
        jnp.where(real[:, None], ids, none),
        weights if fault == "padding keeps weights" else jnp.where(real[:, None], weights, 0.0),
        jnp.where(real[:, None], scores, 0.0),
    )


# ---------------------------------------------------------------- checks


def check_oracle(router, case):
    ours, want = run(router, case), oracle.route(case.logits, case.config, case.bias, case.mask)
    np.testing.assert_array_equal(ours.expert_ids, want.expert_ids)
    oracle.assert_close(ours.weights, want.weights, FP32, 4 * case.config.top_k, "weights")
    oracle.assert_close(ours.scores, want.scores, FP32, case.config.num_experts, "scores")


def check_bias_never_weighs(router, case):
    if case.bias is None:
        return
    some = np.random.default_rng(0).normal(size=(len(case.logits), case.config.top_k))
    ours, _, dbias = run_with_gradients(router, case, dweights=some)
    again = oracle.route(case.logits, case.config, None, case.mask, replay_ids=np.asarray(ours.expert_ids))
    oracle.assert_close(ours.weights, again.weights, FP32, 4 * case.config.top_k, "weights")
    assert not np.any(dbias), "the bias must get exactly no gradient"


def check_picks(router, case):
    """Distinct, in kept groups, unchanged when all biases move together."""
    config, ids = case.config, np.asarray(run(router, case).expert_ids)
    bias = np.zeros(config.num_experts, np.float32) if case.bias is None else case.bias
    scores = oracle.route(case.logits, config).scores + bias
    for t in np.flatnonzero(case.mask):
        assert len(set(ids[t])) == config.top_k
        assert 0 <= ids[t].min() <= ids[t].max() < config.num_experts
        assert len(set(ids[t] // config.experts_per_group)) <= config.top_groups
        assert list(ids[t]) == oracle.choose(scores[t], config)
    if case.bias is not None:
        for shift in (-1.0, -4.0):
            np.testing.assert_array_equal(run(router, case, bias=bias + np.float32(shift)).expert_ids, ids)


def check_sum(router, case):
    config, ours = case.config, run(router, case)
    sums = np.asarray(ours.weights, np.float64).sum(-1)[case.mask]
    if config.normalize and config.top_k > 1:
        oracle.assert_close(
            sums, np.full_like(sums, config.scaling_factor), FP32, config.top_k, "sum of weights"
        )
    else:
        picked = np.take_along_axis(
            np.asarray(ours.scores), np.minimum(ours.expert_ids, config.num_experts - 1), -1
        )
        want = (picked * config.scaling_factor).sum(-1)[case.mask]
        oracle.assert_close(sums, want, FP32, config.top_k, "sum of weights")


def check_mask(router, case):
    """Masked tokens, NaN in them included, get id E, weight 0, no gradient; the others never notice."""
    real, config = case.mask, case.config
    poisoned = np.where(real[:, None], case.logits, np.float32(np.nan))
    ours, dlogits, _ = run_with_gradients(router, case, 1.5, 0.5, logits=poisoned)
    alone = run(router, case, mask=np.ones_like(real))
    for name in ("expert_ids", "weights", "scores"):
        np.testing.assert_array_equal(
            np.asarray(getattr(ours, name))[real], np.asarray(getattr(alone, name))[real]
        )
        fill = config.num_experts if name == "expert_ids" else 0
        assert np.all(np.asarray(getattr(ours, name))[~real] == fill), name
    assert np.all(np.isfinite(dlogits))
    assert not np.asarray(dlogits)[~real].any()


def check_gradient(router, case):
    """Gradients to the logits equal central differences of the oracle; the top-1 router is alive."""
    config, rng = case.config, np.random.default_rng(0)
    of_weights, of_scores = (
        rng.normal(size=(len(case.logits), config.top_k)),
        rng.normal(size=case.logits.shape),
    )
    ours, dlogits, _ = run_with_gradients(router, case, of_weights, of_scores)
    ids = np.asarray(ours.expert_ids)

    def loss(logits):
        out = oracle.route(logits, config, None, case.mask, replay_ids=ids)
        return (of_weights * out.weights).sum() + (of_scores * out.scores).sum()

    tokens, step = np.flatnonzero(case.mask)[:3], 1e-5
    want = np.zeros((len(tokens), config.num_experts))
    for i, e in np.ndindex(want.shape):
        high, low = (case.logits.astype(np.float64) for _ in range(2))
        high[tokens[i], e] += step
        low[tokens[i], e] -= step
        want[i, e] = (loss(high) - loss(low)) / (2 * step)
    oracle.assert_close(np.asarray(dlogits)[tokens], want, FP32, 16 * config.num_experts, "gradient")


def check_top1_alive(router, case):
    """Loss 3 w with k = 1: the picked logit must feel it (B07)."""
    if case.config.top_k > 1 or case.config.num_experts == 1:
        return
    ours, dlogits, _ = run_with_gradients(router, case, dweights=3.0)
    for t in np.flatnonzero(case.mask):
        assert abs(dlogits[t, ours.expert_ids[t, 0]]) > 1e-6


def check_replay(router, case):
    """Replayed ids with later logits: the ids stay, the weights and the gradient are those of today (B13)."""
    first = run(router, case)
    np.testing.assert_array_equal(run(router, case, replay_ids=first.expert_ids).weights, first.weights)
    later = case.logits + np.float32(np.random.default_rng(1).normal(size=case.logits.shape))
    some = np.random.default_rng(2).normal(size=first.weights.shape)
    ours, dlogits, _ = run_with_gradients(router, case, some, logits=later, replay_ids=first.expert_ids)
    want = oracle.route(later, case.config, None, case.mask, replay_ids=np.asarray(first.expert_ids))
    np.testing.assert_array_equal(ours.expert_ids, first.expert_ids)
    oracle.assert_close(ours.weights, want.weights, FP32, 4 * case.config.top_k, "replayed weights")
    assert np.any(dlogits) or not case.mask.any() or case.config.num_experts == 1


def check_precision(router, case):
    """Equal after rounding to bfloat16, different in float32: float32 decides (B08)."""
    logits = np.ones_like(case.logits)
    logits[:, -1] += np.float32(1e-3)
    bias = None if case.bias is None else np.zeros_like(case.bias)
    ids = np.asarray(run(router, case, logits=logits, bias=bias).expert_ids)
    assert np.all(ids[case.mask, 0] == case.config.num_experts - 1)


def check_small_differences(router, case):
    """1e-6 between the first and the last of the scores is no tie (B09)."""
    if case.bias is None:
        return
    bias = np.zeros_like(case.bias)
    bias[-1] = 1e-6
    ids = np.asarray(run(router, case, logits=np.zeros_like(case.logits), bias=bias).expert_ids)
    assert np.all(ids[case.mask, 0] == case.config.num_experts - 1)


CHECKS = {name[6:]: check for name, check in list(globals().items()) if name.startswith("check_")}

# fault: (the check that must notice, on which config)
FAULTS = {
    "bias weighs": ("bias_never_weighs", "deepseek-v3"),
    "bias on the logits": ("bias_never_weighs", "softmax-biased"),
    "bias gets a gradient": ("bias_never_weighs", "sigmoid-plain"),
    "router in bfloat16": ("precision", "mixtral"),
    "mask by multiplying": ("mask", "deepseek-v3"),
    "no expert is -1": ("mask", "mixtral"),
    "padding keeps weights": ("mask", "mixtral"),
    "masked groups are 0": ("picks", "deepseek-v3"),
    "group scored by its best": ("picks", "deepseek-v3"),
    "repeated maximum without removal": ("picks", "mixtral"),
    "ties to the higher id": ("picks", "mixtral"),
    "ids in ascending order": ("picks", "mixtral"),
    "ties by index epsilon": ("small_differences", "deepseek-v3"),
    "groups masked before softmax": ("oracle", "deepseek-v2"),
    "scaled before normalising": ("sum", "deepseek-v3"),
    "normalised at k = 1": ("top1_alive", "switch"),
    "replay ignored": ("replay", "mixtral"),
    "replay freezes weights": ("replay", "deepseek-v3"),
}


def fixed_cases(name):
    return [make_case(name, seed, ties=seed == 2) for seed in range(3)]


@pytest.mark.parametrize(
    ("router", "name"),
    [
        *((route, name) for name in CONFIGS),
        *((naive_route, name) for name in ("softmax-biased", "switch", "deepseek-v2", "deepseek-v3")),
    ],
)
def test_right_routers_pass_every_check(router, name):
    for case in fixed_cases(name):
        for check in CHECKS.values():
            check(router, case)


@pytest.mark.parametrize("fault", FAULTS)
def test_b88_broken_twins_fail(fault):
    check, name = FAULTS[fault]
    broken = functools.partial(naive_route, fault=fault)

    def on_all_cases():
        for case in fixed_cases(name):
            CHECKS[check](broken, case)

    with pytest.raises(AssertionError):
        on_all_cases()


# ---------------------------------------------------------------- properties over many values


@settings(max_examples=60)
@given(case=cases())
def test_route_equals_oracle(case):
    check_oracle(route, case)


@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3"])
def test_route_equals_oracle_at_edge_sizes(name):
    num_experts = CONFIGS[name].num_experts
    for tokens in (0, 1, num_experts - 1, num_experts):
        check_oracle(route, make_case(name, 7, tokens))


@settings(max_examples=8)
@given(data=st.data())
def test_route_equals_oracle_for_any_config(data):
    """Configs drawn freely: groups, sizes, picks, scales."""
    groups, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    kept = data.draw(st.integers(1, groups))
    config = RouterConfig(
        groups * size,
        data.draw(st.integers(1, kept * size)),
        data.draw(st.sampled_from(["softmax", "sigmoid"])),
        normalize=data.draw(st.booleans()),
        scaling_factor=data.draw(st.sampled_from([0.5, 1.0, 2.5])),
        num_groups=groups,
        top_groups=kept,
        group_score_top=data.draw(st.none() | st.integers(1, size)),
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    tokens = data.draw(st.integers(0, 9))
    logits = rng.normal(size=(tokens, config.num_experts)).astype(np.float32)
    bias = rng.normal(size=config.num_experts).astype(np.float32) if data.draw(st.booleans()) else None
    check_oracle(route, Case(config, logits, bias, rng.random(tokens) < 0.8))


@settings(max_examples=40)
@given(case=cases())
def test_b01_bias_never_weighs(case):
    check_bias_never_weighs(route, case)


@settings(max_examples=40)
@given(case=cases())
def test_b03_b04_picks_are_distinct_and_allowed(case):
    check_picks(route, case)


@settings(max_examples=40)
@given(case=cases())
def test_b06_sum_of_weights(case):
    check_sum(route, case)


@settings(max_examples=40)
@given(case=cases())
def test_b18_masked_tokens_do_not_exist(case):
    check_mask(route, case)


@settings(max_examples=30)
@given(case=cases())
def test_b13_replayed_routes(case):
    check_replay(route, case)


@settings(max_examples=15)
@given(case=cases())
def test_gradient_equals_finite_differences(case):
    check_gradient(route, case)


# ---------------------------------------------------------------- the numbers of the public reports


def one(logits, config, **arrays):
    """The routing of one token."""
    arrays = {k: jnp.asarray(v, FP32) for k, v in arrays.items()}
    return routed(jnp.asarray([logits], FP32), config, **arrays)


def logit(p):
    return np.log(np.asarray(p) / (1 - np.asarray(p)))


def test_b01_numbers():
    out = one(logit([0.5, 0.6, 0.7, 0.4]), RouterConfig(4, 2, "sigmoid"), bias=[0, 0, -1, 1])
    assert out.expert_ids.tolist() == [[3, 1]]
    oracle.assert_close(out.weights, [[0.4, 0.6]], FP32)


def test_b03_numbers():
    scores = [0.30, 0.20, 0.90, 0.80, 0.10, 0.05, 0.02, 0.01]
    config = RouterConfig(8, 2, "sigmoid", num_groups=4, top_groups=2)
    assert one(logit(scores), config, bias=[-1.0] * 8).expert_ids.tolist() == [[2, 3]]


def test_b04_masked_candidates():
    inf = float("inf")
    assert one([-inf, -inf, 0.5, -inf], RouterConfig(4, 3)).expert_ids.tolist() == [[2, 0, 1]]
    # Even a bias of -inf on every expert of the kept groups does not reach into other groups.
    config = RouterConfig(8, 4, "sigmoid", num_groups=4, top_groups=2)
    out = one(np.arange(8.0), config, bias=[-inf] * 8)
    assert len(set(out.expert_ids[0].tolist())) == 4
    assert len({e // 2 for e in out.expert_ids[0].tolist()}) == 2


@pytest.mark.parametrize("bias", [None, [3.0, -3.0, 0.5, -7.0]])
def test_b06_numbers(bias):
    arrays = {} if bias is None else {"bias": bias}
    logits = [-1.0, 0.3, 2.0, -4.0]
    out = one(logits, RouterConfig(4, 3, "sigmoid", scaling_factor=2.5), **arrays)
    assert abs(float(out.weights.sum()) - 2.5) < 1e-6
    plain = one(logits, RouterConfig(4, 3, "sigmoid", normalize=False, scaling_factor=2.5), **arrays)
    oracle.assert_close(plain.weights[0], 2.5 * oracle.sigmoid(np.array(logits))[plain.expert_ids[0]], FP32)


@pytest.mark.parametrize("score_fn", ["softmax", "sigmoid"])
@pytest.mark.parametrize("scale", [50.0, 90.0])
def test_weights_survive_underflow(score_fn, scale):
    """A bias may pick experts whose scores round to 0 in float32: still a distribution, still a gradient."""
    config = RouterConfig(4, 2, score_fn)
    logits, bias = jnp.asarray([[0.0, 0.0, -scale, -scale - 1]]), jnp.asarray([0.0, 0.0, 9.0, 9.0])
    out = routed(logits, config, bias=bias)
    assert out.expert_ids.tolist() == [[2, 3]]
    want = oracle.route(logits, config, bias)
    oracle.assert_close(out.weights, want.weights, FP32, 400)
    grad = jax.jit(jax.grad(lambda z: route(z, config, bias=bias).weights[0, 0]))(logits)
    assert np.all(np.isfinite(grad))
    assert grad[0, 2] > 0.05


@pytest.mark.parametrize("score_fn", ["softmax", "sigmoid"])
def test_b07_top1_router_learns(score_fn):
    grad = jax.jit(jax.grad(lambda z: 3 * route(z, RouterConfig(3, 1, score_fn)).weights.sum()))(
        jnp.asarray([[0.1, 0.5, 0.2]])
    )
    assert abs(float(grad[0, 1])) > 0.1


def test_b08_numbers():
    logits = [3.001, 3.004, 1.0]
    assert one(logits, RouterConfig(3, 1)).expert_ids.tolist() == [[1]]
    assert routed(jnp.asarray([logits], jnp.bfloat16), RouterConfig(3, 1)).expert_ids.tolist() == [[0]]


@pytest.mark.parametrize(("dtype", "name"), [(jnp.bfloat16, "deepseek-v3"), (jnp.float16, "softmax-biased")])
def test_b08_everything_after_the_logits_is_float32(dtype, name):
    case = make_case(name, 3)
    logits, bias = jnp.asarray(case.logits).astype(dtype), jnp.asarray(case.bias)
    out, want = routed(logits, case.config, bias=bias), routed(logits.astype(FP32), case.config, bias=bias)
    assert out.weights.dtype == out.scores.dtype == FP32
    assert out.expert_ids.dtype == jnp.int32
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), out, want))


def test_b09_ties():
    for config in (
        RouterConfig(6, 3),
        RouterConfig(6, 3, "sigmoid"),
        RouterConfig(6, 3, num_groups=3, top_groups=2),
    ):
        assert one([0.0] * 6, config).expert_ids.tolist() == [[0, 1, 2]]
    assert one([0.0] * 40, RouterConfig(40, 20)).expert_ids.tolist() == [list(range(20))]


def test_b09_devices_agree(devices):
    case = make_case("deepseek-v3", 0, ties=True)
    a, b = (run(route, case, logits=jax.device_put(case.logits, d)) for d in (devices[0], devices[5]))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_b10_softmax_before_selection():
    logits = [2.0, 1.0, 0.0, 1.5]
    plain = RouterConfig(4, 2, normalize=False, num_groups=2, top_groups=1)
    out = one(logits, plain)
    assert out.expert_ids.tolist() == [[0, 1]]
    oracle.assert_close(out.weights, oracle.softmax(np.array([logits]))[:, :2], FP32)
    np.testing.assert_allclose(out.weights, [[0.474, 0.174]], atol=5e-4)
    normalised = one(logits, RouterConfig(4, 2, num_groups=2, top_groups=1))
    oracle.assert_close(normalised.weights, oracle.softmax(np.array([[2.0, 1.0]])), FP32)


def test_nan_logit_of_a_real_token_is_not_hidden():
    out = one([0.0, float("nan"), 1.0, 2.0], RouterConfig(4, 2))
    assert sorted(set(out.expert_ids[0].tolist()) | {0, 1, 2, 3}) == [0, 1, 2, 3]
    assert len(set(out.expert_ids[0].tolist())) == 2
    assert np.isnan(out.weights).all()


def test_softmax_picks_tell_underflowed_experts_apart():
    assert one([0.0, -200.0, -150.0], RouterConfig(3, 2)).expert_ids.tolist() == [[0, 2]]


# ---------------------------------------------------------------- invariances


@settings(max_examples=20)
@given(name=names, seed=st.integers(0, 2**32 - 1))
def test_permuting_tokens_permutes_the_routing(name, seed):
    case = make_case(name, seed)
    order = np.random.default_rng(seed).permutation(len(case.logits))
    a, b = run(route, case), run(route, case, logits=case.logits[order], mask=case.mask[order])
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x)[order], y)


@settings(max_examples=20)
@given(
    name=st.sampled_from(["softmax-biased", "sigmoid-plain"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_relabelling_experts_relabels_the_routing(name, seed):
    case = make_case(name, seed)
    new = np.random.default_rng(seed).permutation(case.config.num_experts)  # old expert e is now new[e]
    old = np.argsort(new)
    a, b = run(route, case), run(route, case, logits=case.logits[:, old], bias=case.bias[old])
    real = case.mask
    np.testing.assert_array_equal(new[np.asarray(a.expert_ids)[real]], np.asarray(b.expert_ids)[real])
    oracle.assert_close(b.weights, a.weights, FP32, case.config.num_experts)


def test_leading_axes_and_vmap():
    case = make_case("deepseek-v3", 0, 12)
    shaped = case.logits.reshape(3, 4, 16)
    flat = run(route, case, mask=np.ones(12, bool))
    for out in (
        routed(jnp.asarray(shaped), case.config, bias=jnp.asarray(case.bias)),
        jax.vmap(lambda z: routed(z, case.config, bias=jnp.asarray(case.bias)))(jnp.asarray(shaped)),
    ):
        np.testing.assert_array_equal(out.expert_ids.reshape(12, 4), flat.expert_ids)
        oracle.assert_close(out.weights.reshape(12, 4), flat.weights, FP32)


# ---------------------------------------------------------------- Transformer Engine's documented rule


def te_rule(logits, topk, score_function, pre_softmax=False, groups=0, group_topk=0, scale=1.0, bias=None):
    """``fused_topk_with_score_function`` as documented, written from the rule alone: dense probs and map."""
    logits = np.asarray(logits, np.float64)
    if score_function == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    else:
        scores = oracle.softmax(logits) if pre_softmax else logits
    keys = scores + (0 if bias is None else np.asarray(bias, np.float64))
    if groups:
        per = keys.reshape(len(keys), groups, -1)
        best = np.sort(per, -1)[..., ::-1][..., : topk // group_topk].sum(-1)
        kept = np.argsort(-best, -1, kind="stable")[:, :group_topk]
        allowed = np.zeros((len(keys), groups), bool)
        np.put_along_axis(allowed, kept, True, -1)
        keys = np.where(np.repeat(allowed, per.shape[-1], -1), keys, -np.inf)
    ids = np.argsort(-keys, -1, kind="stable")[:, :topk]
    routing_map = np.zeros(logits.shape, bool)
    np.put_along_axis(routing_map, ids, True, -1)
    if score_function == "softmax" and not pre_softmax:
        probs = oracle.softmax(np.where(routing_map, logits, -np.inf))
    else:
        probs = np.where(routing_map, scores, 0.0)
        if score_function == "sigmoid" and topk > 1:
            probs = probs / (probs.sum(-1, keepdims=True) + 1e-20)
    return probs * scale, routing_map


@pytest.mark.parametrize(
    ("config", "te", "with_bias"),
    [
        (RouterConfig(8, 2), {"score_function": "softmax"}, False),
        (RouterConfig(8, 3, normalize=False), {"score_function": "softmax", "pre_softmax": True}, False),
        (
            RouterConfig(8, 4, normalize=False, num_groups=4, top_groups=2),
            {"score_function": "softmax", "pre_softmax": True, "groups": 4, "group_topk": 2},
            False,
        ),
        (RouterConfig(8, 1, "sigmoid"), {"score_function": "sigmoid"}, True),
        (RouterConfig(8, 3, "sigmoid"), {"score_function": "sigmoid"}, True),
        (
            RouterConfig(32, 8, "sigmoid", scaling_factor=2.5, num_groups=8, top_groups=4),
            {"score_function": "sigmoid", "groups": 8, "group_topk": 4, "scale": 2.5},
            True,
        ),
    ],
)
def test_dense_routing_equals_transformer_engine_rule(config, te, with_bias):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(50, config.num_experts)).astype(np.float32)
    bias = rng.normal(size=config.num_experts).astype(np.float32) if with_bias else None
    probs, routing_map = jax.jit(dense_routing, static_argnums=1)(
        routed(jnp.asarray(logits), config, bias=None if bias is None else jnp.asarray(bias)),
        config.num_experts,
    )
    want, want_map = te_rule(logits, config.top_k, bias=bias, **te)
    np.testing.assert_array_equal(routing_map, want_map)
    oracle.assert_close(probs, want, FP32, 4 * config.top_k)
    # And back, as TE's layer does it: ascending expert order.
    ids = np.argsort(routing_map, -1, kind="stable")[:, -config.top_k :]
    assert np.all(np.take_along_axis(np.asarray(probs), ids, -1) > 0)


def test_dense_routing_of_masked_tokens_is_empty():
    case = make_case("deepseek-v3", 0, real=0.0)
    probs, routing_map = jax.jit(dense_routing, static_argnums=1)(run(route, case), case.config.num_experts)
    assert not probs.any()
    assert not routing_map.any()


# ---------------------------------------------------------------- many devices, one trace


def token_mesh(devices):
    return jax.make_mesh((8,), ("tokens",), axis_types=(AxisType.Auto,), devices=devices)


def collectives(router, mesh, case):
    sharded = NamedSharding(mesh, P("tokens"))
    fn = jax.jit(lambda z: router(z, case.config).weights, in_shardings=sharded, out_shardings=sharded)
    text = fn.lower(jnp.asarray(case.logits)).compile().as_text()
    return set(re.findall(r"all-gather|all-reduce|all-to-all|collective-permute", text))


@pytest.mark.parametrize("name", ["deepseek-v3", "many-picks"])
def test_sharded_tokens_need_no_communication(devices, name):
    mesh, case = token_mesh(devices), make_case(name, 0, 64)
    assert collectives(route, mesh, case) == set()
    # The check would notice: lax.top_k is not partitioned.
    assert "all-gather" in collectives(naive_route, mesh, case)


@pytest.mark.parametrize("name", ["deepseek-v3"])
def test_sharded_equals_one_device(devices, name):
    mesh, case = token_mesh(devices), make_case(name, 0, 64)
    x, w = (
        np.random.default_rng(i).normal(size=s).astype(np.float32)
        for i, s in enumerate([(64, 5), (5, case.config.num_experts)])
    )

    def loss(w, x, bias, mask):
        out = route(x @ w, case.config, bias=bias, mask=mask)
        return (out.weights**2).sum() + (out.scores**2).sum(), out.expert_ids

    arrays = (jnp.asarray(w), jnp.asarray(x), jnp.asarray(case.bias), jnp.asarray(case.mask))
    (_, ids), grad = jax.jit(jax.value_and_grad(loss, has_aux=True))(*arrays)

    specs = (P(), P("tokens"), P(), P("tokens"))
    auto = tuple(jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True))
    (_, auto_ids), auto_grad = jax.jit(jax.value_and_grad(loss, has_aux=True))(*auto)

    def summed(w, x, bias, mask):
        value, ids = loss(w, x, bias, mask)
        return lax.psum(value, "tokens"), ids

    manual = jax.shard_map(summed, mesh=mesh, in_specs=specs, out_specs=(P(), P("tokens")), check_vma=True)
    (_, manual_ids), manual_grad = jax.jit(jax.value_and_grad(manual, has_aux=True))(*auto)
    for other_ids, other in ((auto_ids, auto_grad), (manual_ids, manual_grad)):
        np.testing.assert_array_equal(ids, other_ids)
        oracle.assert_close(other, grad, FP32, 64)


def test_b92_one_trace_whatever_the_routing():
    traces = []

    @jax.jit
    def step(logits, bias, mask):
        traces.append(1)
        return routed(logits, CONFIGS["deepseek-v3"], bias=bias, mask=mask)

    for seed in range(4):
        case = make_case("deepseek-v3", seed)
        step(case.logits, case.bias, case.mask)
    assert len(traces) == 1


# ---------------------------------------------------------------- settings and the picker


@pytest.mark.parametrize(
    ("kwargs", "numbers"),
    [
        ({"num_experts": 32, "top_k": 40}, ["40", "32"]),
        ({"num_experts": 4, "top_k": 0}, ["0"]),
        ({"num_experts": 0, "top_k": 1}, ["0"]),
        ({"num_experts": 4, "top_k": 1.5}, ["1.5"]),
        ({"num_experts": 4, "top_k": True}, ["True"]),
        ({"num_experts": 8, "top_k": 1, "num_groups": 3}, ["8", "3"]),
        ({"num_experts": 8, "top_k": 1, "num_groups": 2, "top_groups": 3}, ["3", "2"]),
        ({"num_experts": 8, "top_k": 5, "num_groups": 4, "top_groups": 2}, ["5", "4"]),
        ({"num_experts": 8, "top_k": 2, "num_groups": 4, "top_groups": 2, "group_score_top": 3}, ["3", "2"]),
        ({"num_experts": 4, "top_k": 2, "score_fn": "tanh"}, ["tanh"]),
        ({"num_experts": 4, "top_k": 2, "scaling_factor": 0.0}, ["0.0"]),
        ({"num_experts": 4, "top_k": 2, "scaling_factor": float("nan")}, ["nan"]),
    ],
)
def test_impossible_settings_name_the_numbers_and_the_fix(kwargs, numbers):
    with pytest.raises(ValueError, match=r"Set ") as caught:
        RouterConfig(**kwargs)
    assert all(number in str(caught.value) for number in numbers)


def test_wrong_number_of_logits():
    with pytest.raises(ValueError, match="8 experts"):
        routed(jnp.zeros((3, 4)), RouterConfig(8, 2))


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), k=st.sampled_from([1, 3, 16, 17, 24]))
def test_largest_equals_top_k(seed, k):
    values = jnp.asarray(np.random.default_rng(seed).integers(-3, 3, (5, 24)).astype(np.float32))
    for ours, theirs in zip(largest(values, k), lax.top_k(values, k), strict=True):
        np.testing.assert_array_equal(ours, theirs)
