"""Balance losses, the bias update and load statistics: oracle, public bugs, broken twins."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from moe_course.balance import (
    expert_load,
    load_balancing_loss,
    load_report,
    router_z_loss,
    update_expert_bias,
)
from moe_course.routing import RouterConfig, route
from tests import oracle

FP32 = jnp.float32
CONFIG = RouterConfig(8, 2, "sigmoid")
SOFTMAX = RouterConfig(8, 3)
load_of = jax.jit(expert_load, static_argnums=1)
loss_of = jax.jit(load_balancing_loss, static_argnums=2, static_argnames="scope")
bias_of = jax.jit(update_expert_bias, static_argnames="recentre")
seeds = st.integers(0, 2**32 - 1)
configs = st.sampled_from([CONFIG, SOFTMAX])


def logits_to_loss(
    logits, config, mask=None, *, scope="global", sequences=1, load=None, total_sequences=None
):
    """What a model does with the router's output."""
    routing = route(logits, config, mask=mask)
    if load is None:
        shape = (sequences, -1, config.top_k) if scope == "sequence" else (-1, config.top_k)
        load = expert_load(routing.expert_ids.reshape(shape), config.num_experts)
    return load_balancing_loss(routing.scores, load, config, scope=scope, total_sequences=total_sequences)


# Compiled once per shape, gradient included: eager gradients would compile again for every example.
STATIC = {"static_argnums": 1, "static_argnames": ("scope", "sequences")}
pipeline = jax.jit(logits_to_loss, **STATIC)
pipeline_and_grad = jax.jit(jax.value_and_grad(logits_to_loss), **STATIC)
z_loss_and_grad = jax.jit(jax.value_and_grad(router_z_loss))
z_loss_part = jax.jit(router_z_loss)
report_of = jax.jit(load_report)


def draw(seed, tokens=32, experts=8):
    rng = np.random.default_rng(seed)
    return np.float32(rng.normal(size=(tokens, experts)) + rng.normal(size=experts))


# ---------------------------------------------------------------- the loss


def b15_losses(loss):
    """The loss of a balanced and of a skewed routing, E = 4, k = 2, T = 8."""
    config = RouterConfig(4, 2)
    even_ids = jnp.asarray([[0, 1], [2, 3]] * 4, jnp.int32)
    skew_ids = jnp.asarray([[0, 1]] * 8, jnp.int32)
    even, skew = jnp.full((8, 4), 0.25), jnp.tile(jnp.asarray([[0.4, 0.4, 0.1, 0.1]]), (8, 1))
    cases = ((even, load_of(even_ids, 4)), (skew, load_of(skew_ids, 4)))
    return [float(loss(p, load.astype(FP32), config)) for p, load in cases]


def test_b15_numbers():
    np.testing.assert_allclose(b15_losses(loss_of), [1.0, 1.6], rtol=1e-6)


TWINS = {
    "broadcast sums everything": lambda p, load, c: (load[None] * p).sum() * c.num_experts / load.sum() ** 2,
    "no division by k": lambda p, load, c: c.num_experts * (load / len(p) * p.mean(0)).sum(),
    "load after padding to capacity": lambda p, load, c: c.num_experts * (p.mean(0) / c.num_experts).sum(),
    "no factor E": lambda p, load, c: (load / load.sum() * p.mean(0)).sum(),
}


@pytest.mark.parametrize("name", TWINS)
def test_b88_broken_losses_fail_b15(name):
    assert not np.allclose(b15_losses(TWINS[name]), [1.0, 1.6], rtol=1e-3)


@settings(max_examples=40)
@given(seed=seeds, config=configs, real=st.sampled_from([0.0, 0.5, 1.0]))
def test_b15_b30_loss_equals_oracle(seed, config, real):
    logits, mask = draw(seed), np.random.default_rng(seed).random(32) < real
    want = oracle.route(logits, config, mask=mask)
    loss = oracle.load_balancing_loss(want.scores, want.expert_ids, mask)
    oracle.assert_close(pipeline(logits, config, mask), loss, FP32, 32)


def test_b16_layers_must_not_be_concatenated():
    config = RouterConfig(4, 2)
    a, b = (jnp.tile(jnp.asarray([p]), (8, 1)) for p in ([0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]))
    loads = jnp.asarray([[8, 8, 0, 0], [0, 0, 8, 8]], jnp.int32)
    per_layer = jax.vmap(lambda p, load: load_balancing_loss(p, load, config))(jnp.stack([a, b]), loads)
    np.testing.assert_allclose(per_layer, [2.0, 2.0], rtol=1e-6)
    np.testing.assert_allclose(loss_of(jnp.concatenate([a, b]), loads.sum(0), config), 1.0, rtol=1e-6)


@pytest.mark.parametrize("score_fn", ["softmax", "sigmoid"])
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("scope", ["global", "sequence", "microbatch"])
def test_b17_balance_gives_one_for_every_k(score_fn, k, scope):
    scores = jnp.full((8, 4), 0.25 if score_fn == "softmax" else 0.6)
    load = jnp.full((2, 4) if scope == "sequence" else 4, k if scope == "sequence" else 2 * k, jnp.int32)
    loss = loss_of(scores, load, RouterConfig(4, k, score_fn), scope=scope)
    np.testing.assert_allclose(loss, 1.0, rtol=1e-6)


@settings(max_examples=30)
@given(
    seed=seeds,
    case=st.sampled_from([("global", CONFIG), ("sequence", SOFTMAX), ("microbatch", CONFIG)]),
)
def test_b18_padding_changes_nothing(seed, case):
    """Masked tokens, NaN and a whole sequence of them included, move no loss, gradient or count."""
    (scope, config), logits, rng = case, draw(seed), np.random.default_rng(seed)
    padded = np.concatenate([logits, np.float32(rng.normal(size=(8, 8)) * 9)])
    padded[-3:] = np.nan
    mask = np.arange(40) < 32
    value, dlogits = pipeline_and_grad(logits, config, np.ones(32, bool), scope=scope, sequences=4)
    padded_value, dpadded = pipeline_and_grad(padded, config, mask, scope=scope, sequences=5)
    oracle.assert_close(padded_value, value, FP32)
    oracle.assert_close(dpadded[:32], dlogits, FP32)
    assert not dpadded[32:].any()
    ids = jnp.asarray(oracle.route(logits, config).expert_ids, jnp.int32)
    noise = jnp.asarray(rng.integers(0, 8, (8, config.top_k)), jnp.int32)
    load = load_of(jnp.concatenate([ids, noise]), 8, jnp.asarray(mask))
    np.testing.assert_array_equal(load, load_of(ids, 8))
    np.testing.assert_array_equal(load, oracle.expert_load(ids, 8))
    (a, da), (b, db) = z_loss_and_grad(logits, np.ones(32, bool)), z_loss_and_grad(padded, mask)
    oracle.assert_close(b, a, FP32)
    oracle.assert_close(db[:32], da, FP32)
    assert not db[32:].any()


@settings(max_examples=20)
@given(seed=seeds, config=configs, parts=st.sampled_from([2, 4]))
def test_b20_b28_global_loss_is_exact_for_every_split(seed, config, parts):
    """Counts summed first, parts added: value and gradient of the whole batch, whatever the split."""
    logits, mask = draw(seed), np.random.default_rng(seed).random(32) < 0.7
    whole, dwhole = pipeline_and_grad(logits, config, mask)
    load = np.int32(oracle.expert_load(oracle.route(logits, config, mask=mask).expert_ids, 8))
    pieces = zip(np.split(logits, parts), np.split(mask, parts), strict=True)
    values, grads = zip(*[pipeline_and_grad(z, config, m, load=load) for z, m in pieces], strict=True)
    oracle.assert_close(np.sum(values, dtype=np.float64), whole, FP32)
    oracle.assert_close(np.concatenate(grads), dwhole, FP32, 4)


def test_b20_microbatches_are_averaged_not_added():
    logits = jnp.asarray(draw(0, 16))
    whole = float(pipeline(logits, SOFTMAX))
    micro = [float(pipeline(half, SOFTMAX, scope="microbatch")) for half in jnp.split(logits, 2)]
    assert abs(np.mean(micro) / whole - 1) < 0.2
    assert sum(micro) > 1.7 * whole
    # With the counts of the whole batch even the mean of equal parts is exact.
    load = jnp.asarray(oracle.expert_load(oracle.route(logits, SOFTMAX).expert_ids, 8), jnp.int32)
    exact = [pipeline(half, SOFTMAX, scope="microbatch", load=load) for half in jnp.split(logits, 2)]
    oracle.assert_close(np.mean(exact), whole, FP32)


@settings(max_examples=20)
@given(seed=seeds, config=configs)
def test_b22_sequence_loss_does_not_depend_on_microbatches(seed, config):
    """Mean over sequences: equal to the oracle per sequence, for micro-batches of 4, 2 and 1 sequences."""
    logits = draw(seed).reshape(4, 8, 8)
    masks = np.random.default_rng(seed).random((4, 8)) < 0.6
    masks[0] = False  # a sequence without a real token counts for nothing
    losses = []
    for tokens, mask in zip(logits, masks, strict=True):
        want = oracle.route(tokens, config, mask=mask)
        if mask.any():
            losses.append(oracle.load_balancing_loss(want.scores, want.expert_ids, mask))
    for size in (4, 2, 1):
        parts = [
            pipeline(
                logits[i : i + size].reshape(-1, 8),
                config,
                masks[i : i + size].reshape(-1),
                scope="sequence",
                sequences=size,
                total_sequences=jnp.int32(len(losses)),
            )
            for i in range(0, 4, size)
        ]
        oracle.assert_close(np.sum(parts, dtype=np.float64), sum(losses) / max(len(losses), 1), FP32, 8)
    alone = pipeline(logits.reshape(-1, 8), config, masks.reshape(-1), scope="sequence", sequences=4)
    oracle.assert_close(alone, sum(losses) / max(len(losses), 1), FP32, 8)


@pytest.mark.parametrize(("num_devices", "config"), [(2, CONFIG), (4, SOFTMAX), (8, CONFIG)])
def test_b21_same_loss_on_any_number_of_devices(devices, num_devices, config):
    """Sharded by XLA, and by hand inside shard_map: value and gradient to the router equal one device."""
    mesh = jax.make_mesh(
        (num_devices,), ("tokens",), axis_types=(AxisType.Auto,), devices=devices[:num_devices]
    )
    rng = np.random.default_rng(0)
    w, x, mask = (
        np.float32(rng.normal(size=(5, 8))),
        np.float32(rng.normal(size=(32, 5))),
        rng.random(32) < 0.7,
    )

    def whole(w, x, mask):
        routing = route(x @ w, config, mask=mask)
        load = expert_load(routing.expert_ids, 8)
        return load_balancing_loss(routing.scores, load, config) + router_z_loss(x @ w, mask)

    def part(w, x, mask):
        routing = route(x @ w, config, mask=mask)
        load = lax.psum(expert_load(routing.expert_ids, 8), "tokens")
        tokens = lax.psum(mask.sum(dtype=jnp.int32), "tokens")
        loss = load_balancing_loss(routing.scores, load, config)
        return lax.psum(loss + router_z_loss(x @ w, mask, total_tokens=tokens), "tokens")

    specs = (P(), P("tokens"), P("tokens"))
    arrays = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip((w, x, mask), specs, strict=True)]
    want, dwant = jax.jit(jax.value_and_grad(whole))(jnp.asarray(w), jnp.asarray(x), jnp.asarray(mask))
    manual = jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=True)
    for fn in (whole, manual):
        value, dw = jax.jit(jax.value_and_grad(fn))(*arrays)
        oracle.assert_close(value, want, FP32, 4)
        oracle.assert_close(dw, dwant, FP32, 32)


@pytest.mark.parametrize("scope", ["global", "sequence", "microbatch"])
@pytest.mark.parametrize("config", [CONFIG, SOFTMAX], ids=["sigmoid", "softmax"])
def test_b24_gradient_equals_finite_differences(scope, config):
    """Not zero, and the derivative of the oracle with the picks held."""
    logits = draw(3, 8)
    want = oracle.route(logits, config)

    def loss(z):
        scores = oracle.route(z, config, replay_ids=want.expert_ids).scores
        cut = [slice(0, 4), slice(4, 8)] if scope == "sequence" else [slice(0, 8)]
        return np.mean([oracle.load_balancing_loss(scores[c], want.expert_ids[c]) for c in cut])

    numeric, step = np.zeros(logits.shape), 1e-5
    for i in np.ndindex(numeric.shape):
        high, low = (logits.astype(np.float64) for _ in range(2))
        high[i] += step
        low[i] -= step
        numeric[i] = (loss(high) - loss(low)) / (2 * step)
    _, grad = pipeline_and_grad(logits, config, scope=scope, sequences=2)
    oracle.assert_close(grad, numeric, FP32, 64)
    assert np.abs(grad).max() > 1e-4


def test_counts_carry_no_gradient_and_no_scale():
    """A load given as float counts is not differentiated; ten times the load is the same loss."""
    scores, load = jax.nn.softmax(jnp.asarray(draw(0))), jnp.arange(1.0, 9.0)
    assert not jax.grad(lambda n: load_balancing_loss(scores, n, SOFTMAX, scope="microbatch"))(load).any()
    a, b = (loss_of(scores, n, SOFTMAX, scope="microbatch") for n in (load, 10 * load))
    oracle.assert_close(a, b, FP32)


def test_no_tokens_give_zero():
    for config in (CONFIG, SOFTMAX):
        for mask in (np.zeros(4, bool), np.zeros(0, bool)):
            logits = jnp.ones((len(mask), 8))
            value, grad = pipeline_and_grad(logits, config, mask)
            assert value == 0
            assert not grad.any()
            assert router_z_loss(logits, mask) == 0


def test_bad_calls_say_what_to_do():
    scores = jnp.ones((6, 8))
    with pytest.raises(ValueError, match="'batch'"):
        load_balancing_loss(scores, jnp.ones(8, jnp.int32), CONFIG, scope="batch")
    with pytest.raises(ValueError, match=r"sequences, experts"):
        load_balancing_loss(scores, jnp.ones(8, jnp.int32), CONFIG, scope="sequence")
    with pytest.raises(ValueError, match="8 experts"):
        load_balancing_loss(scores, jnp.ones(4, jnp.int32), CONFIG)
    with pytest.raises(ValueError, match=r"6 tokens .* 4 sequences"):
        load_balancing_loss(scores, jnp.ones((4, 8), jnp.int32), CONFIG, scope="sequence")


@settings(max_examples=20)
@given(seed=seeds, coefficient=st.sampled_from([1.0, 1e-4]))
def test_loss_equals_transformer_engine_formula(seed, coefficient):
    """``fused_moe_aux_loss`` as documented: E c / (k T^2) sum_i sum_t probs[t, i] tokens_per_expert[i]."""
    logits = draw(seed)
    for config in (CONFIG, SOFTMAX):
        want = oracle.route(logits, config)
        probs = want.scores / want.scores.sum(-1, keepdims=True)
        load = oracle.expert_load(want.expert_ids, 8)
        te = 8 * coefficient / (config.top_k * 32**2) * (probs * load).sum()
        oracle.assert_close(coefficient * pipeline(logits, config), te, FP32, 32)


# ---------------------------------------------------------------- the z-loss


@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_b29_numbers(tokens):
    value, grad = jax.value_and_grad(router_z_loss)(jnp.zeros((tokens, 4)))
    np.testing.assert_allclose(value, 1.921812, rtol=1e-6)
    oracle.assert_close(grad, np.full((tokens, 4), 2 * np.log(4) * 0.25 / tokens), FP32)


@settings(max_examples=20)
@given(seed=seeds, real=st.sampled_from([0.3, 1.0]))
def test_b29_z_loss_equals_oracle_and_adds_up(seed, real):
    logits, mask = draw(seed), np.random.default_rng(seed).random(32) < real
    oracle.assert_close(
        router_z_loss(jnp.asarray(logits), mask), oracle.router_z_loss(logits, mask), FP32, 32
    )
    total = jnp.int32(mask.sum())
    parts = [
        z_loss_part(z, m, total_tokens=total)
        for z, m in zip(np.split(logits, 4), np.split(mask, 4), strict=True)
    ]
    oracle.assert_close(np.sum(parts), oracle.router_z_loss(logits, mask), FP32, 32)


# ---------------------------------------------------------------- counting


@settings(max_examples=30)
@given(seed=seeds)
def test_b35_counts_are_of_real_picks_only(seed):
    rng = np.random.default_rng(seed)
    ids, mask = rng.integers(-2, 11, (2, 6, 3)).astype(np.int32), rng.random((2, 6)) < 0.5
    load = load_of(jnp.asarray(ids), 8, jnp.asarray(mask))
    assert load.dtype == jnp.int32
    np.testing.assert_array_equal(load, [oracle.expert_load(i, 8, m) for i, m in zip(ids, mask, strict=True)])
    assert not load_of(jnp.zeros((0, 3), jnp.int32), 8).any()


def test_b35_recompute_counts_once():
    def forward(z):
        routing = route(z, CONFIG)
        return routing.weights.sum(), expert_load(routing.expert_ids, 8)

    logits = jnp.asarray(draw(0))
    plain, remat = (
        jax.jit(jax.value_and_grad(f, has_aux=True))(logits)[0][1] for f in (forward, jax.checkpoint(forward))
    )
    np.testing.assert_array_equal(plain, remat)
    assert plain.sum() == 32 * CONFIG.top_k


# ---------------------------------------------------------------- the bias


def test_b33_numbers():
    load, zero = jnp.asarray([6, 2, 0, 0], jnp.int32), jnp.zeros(4)
    oracle.assert_close(bias_of(zero, load, 1e-3), [-1e-3, 0, 1e-3, 1e-3], FP32)
    want = [-1.25e-3, -0.25e-3, 0.75e-3, 0.75e-3]
    oracle.assert_close(bias_of(zero, load, 1e-3, recentre=True), want, FP32)


def test_b34_update_once_from_the_sum():
    micro, zero = jnp.asarray([[4, 0, 2, 2], [3, 3, 0, 2]], jnp.int32), jnp.zeros(4)
    np.testing.assert_array_equal(bias_of(zero, micro.sum(0), 1.0), [-1, 1, 1, 0])
    twice = bias_of(bias_of(zero, micro[0], 1.0), micro[1], 1.0)
    np.testing.assert_array_equal(twice, [-2, 0, 1, 0])  # what an update per micro-batch would do


@settings(max_examples=60)
@given(seed=seeds, top=st.sampled_from([3, 1000, 2**24 + 3, 2**31 - 1]), recentre=st.booleans())
def test_b33_update_equals_oracle_for_any_counts(seed, top, recentre):
    """Exact where float32 means or int32 sums are not: experts at the mean stay, counts up to 2**31 - 1."""
    rng = np.random.default_rng(seed)
    load = rng.integers(0, top, 7, endpoint=True)
    if seed % 2:  # an expert exactly at the mean
        shift = min(int(load[0]), top - int(load[1]))
        load = np.full(7, load[2])
        load[0], load[1] = max(load[2] - shift, 0), min(load[2] + min(shift, load[2]), top)
    bias = np.float32(rng.normal(size=7))
    ours = bias_of(jnp.asarray(bias), jnp.asarray(load, jnp.int32), 0.5, recentre=recentre)
    oracle.assert_close(ours, oracle.update_expert_bias(bias, load, 0.5, recentre), FP32)


def test_b33_float_mean_would_move_an_expert_at_the_mean():
    load = np.full(3, 2**24 + 1)
    ours = bias_of(jnp.zeros(3), jnp.asarray(load, jnp.int32), 1.0)
    twin = np.sign(np.float32(load).sum(dtype=np.float32) / np.float32(3) - load)
    assert not ours.any()
    assert twin.any()


@pytest.mark.slow
def test_b33_updates_balance_a_skewed_router():
    """16 experts, k = 2, 512 tokens, unit-normal offsets: CV 1.1 at first, .1 to .2 after 1,000 updates."""
    config, rng = RouterConfig(16, 2, "sigmoid"), np.random.default_rng(0)
    offsets = jnp.asarray(np.float32(rng.normal(size=16)))

    def step(bias, key):
        logits = jax.random.normal(key, (512, 16)) + offsets[None]
        load = expert_load(route(logits, config, bias=bias).expert_ids, 16)
        return update_expert_bias(bias, load, 1e-3), load_report(load).cv

    _, cv = jax.jit(lambda keys: lax.scan(step, jnp.zeros(16), keys))(
        jax.random.split(jax.random.key(0), 1000)
    )
    floor = np.sqrt(16 / (512 * 2))
    assert 0.7 < cv[0] < 1.6
    assert cv[200] < 0.5 * cv[0]
    assert np.mean(cv[-50:]) < 1.3 * floor


def test_b37_b40_every_layer_moves_from_its_own_counts():
    """Layers without experts are None in a tree; a stack (the MTP module's row last) is one call."""
    loads = jnp.asarray([[6, 2, 0, 0], [0, 0, 2, 6], [2, 2, 2, 2]], jnp.int32)
    bias = jnp.asarray([[1.0, 2, 3, 4], [0, 0, 0, 0], [5, 6, 7, 8]])
    stacked = bias_of(bias, loads, 0.5)
    rows = [oracle.update_expert_bias(b, n, 0.5) for b, n in zip(bias, loads, strict=True)]
    oracle.assert_close(stacked, rows, FP32)
    tree = {"dense0": None, "moe1": bias[0], "dense2": None, "moe3": bias[1]}
    counts = {"dense0": None, "moe1": loads[0], "dense2": None, "moe3": loads[1]}
    moved = jax.tree.map(lambda b, n: update_expert_bias(b, n, 0.5), tree, counts)
    assert moved["dense0"] is None
    np.testing.assert_array_equal(moved["moe1"], stacked[0])
    np.testing.assert_array_equal(moved["moe3"], stacked[1])
    assert jax.tree.map(update_expert_bias, [], []) == []


def test_b40_forced_or_empty_routing_leaves_the_bias():
    bias = jnp.asarray([0.1, -0.2, 0.3])
    np.testing.assert_array_equal(bias_of(bias, jnp.asarray([5, 1, 0], jnp.int32), 0.0), bias)
    np.testing.assert_array_equal(bias_of(bias, jnp.zeros(3, jnp.int32), 1e-3), bias)
    moved = bias_of(bias.astype(jnp.bfloat16), jnp.asarray([5, 1, 0], jnp.int32), 1e-3)
    assert moved.dtype == FP32


def test_bias_update_has_no_gradient():
    grad = jax.grad(lambda b: update_expert_bias(b, jnp.asarray([3, 0], jnp.int32), 1.0).sum())(jnp.ones(2))
    assert not grad.any()


# ---------------------------------------------------------------- statistics


def test_load_report_numbers():
    report = report_of(jnp.asarray([[2, 2, 2, 2], [8, 0, 0, 0], [4, 4, 0, 0], [0, 0, 0, 0]], jnp.int32))
    np.testing.assert_allclose(report.cv, [0, np.sqrt(3), 1, 0], rtol=1e-6)
    np.testing.assert_allclose(report.entropy, [1, 0, 0.5, 0], rtol=1e-6)
    np.testing.assert_array_equal(report.dead, [0, 3, 2, 4])
    np.testing.assert_allclose(report.max_over_mean, [1, 4, 2, 0], rtol=1e-6)
    np.testing.assert_allclose(report.min_over_mean, [1, 0, 0, 0])
    np.testing.assert_array_equal(report.total, [8, 8, 8, 0])
    assert load_report(jnp.asarray([5], jnp.int32)).entropy == 1


@settings(max_examples=30)
@given(seed=seeds)
def test_load_report_equals_numpy(seed):
    load = np.random.default_rng(seed).integers(0, 50, 9)
    load[0] += 1
    report, p = report_of(jnp.asarray(load, jnp.int32)), load / load.sum()
    nats = -sum(q * np.log(q) for q in p if q)
    for ours, want in [
        (report.cv, load.std() / load.mean()),
        (report.entropy, nats / np.log(9)),
        (report.dead, (load == 0).sum()),
        (report.max_over_mean, load.max() / load.mean()),
        (report.total, load.sum()),
    ]:
        oracle.assert_close(ours, want, FP32, 9)
