"""The MoE layer on one device against the float64 oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_course.layers.moe import ExpertBias, MoE
from moe_course.routing import RouterConfig
from tests import oracle
from tests.oracle import relative_error

D, F, E, T = 12, 6, 5, 11


def make(dtype="float32", shared=1, **router):
    config = RouterConfig(E, 2, **({"score_fn": "sigmoid"} | router))
    return MoE(
        D, F, config, num_shared_experts=shared, std=0.4, down_std=0.4, dtype=dtype, rngs=nnx.Rngs(params=3)
    )


def tokens(seed=0, count=T):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((count, D)), jnp.float32)


def oracle_layer(layer, x, mask=None):
    f64 = lambda a: np.asarray(a, np.float64)  # noqa: E731
    logits = f64(x) @ f64(layer.router.kernel[...])
    picks = oracle.route(logits, layer.router.config, f64(layer.router.bias[...]), mask)
    out = oracle.moe(f64(x), f64(layer.experts.gate_up[...]), f64(layer.experts.down[...]), *picks[:2])
    if layer.shared is not None:
        s = layer.shared
        out = out + oracle.swiglu(f64(x), f64(s.gate_up.kernel[...]), f64(s.down.kernel[...]))
    return out


@pytest.mark.parametrize("shared", [0, 1, 2])
@pytest.mark.parametrize("score_fn", ["sigmoid", "softmax"])
def test_layer_equals_oracle(shared, score_fn):
    layer, x = make(shared=shared, score_fn=score_fn), tokens()
    layer.router.bias[...] = jnp.asarray([0.3, -0.3, 0.0, 0.2, -0.1], jnp.float32)
    out, stats = layer(x)
    assert relative_error(out, oracle_layer(layer, x)) < 1e-5
    assert int(stats.load.sum()) == T * 2
    assert int(stats.ledger.dropped) == 0


@pytest.mark.parametrize("count", [0, 1, E - 1, E, E + 1])
def test_token_counts_around_the_edges(count):
    layer, x = make(), tokens(count=count)
    out, stats = layer(x, num_sequences=max(count, 1) if count else 1)
    assert out.shape == (count, D)
    assert relative_error(out, oracle_layer(layer, x)) < 1e-5
    assert int(stats.load.sum()) == 2 * count


def test_masked_tokens_go_nowhere():
    layer, x = make(shared=0), tokens()
    mask = jnp.arange(T) % 3 > 0
    out, stats = layer(x.at[0].set(jnp.nan), mask=mask)
    assert int(stats.load.sum()) == 2 * int(mask.sum())
    assert not np.asarray(out)[~np.asarray(mask)].any()
    assert relative_error(out, oracle_layer(layer, x, np.asarray(mask))) < 1e-5


def test_b08_router_is_float32_under_bfloat16_activations():
    """Logits that bfloat16 would merge decide the pick."""
    layer = make(dtype="bfloat16", shared=0, score_fn="softmax")
    layer.router.kernel[...] = (
        jnp.zeros((D, E), jnp.float32).at[0].set(jnp.asarray([3.001, 3.004, 1.0, 0.0, 0.0]))
    )
    _, routing = layer.router(jnp.ones((1, D), jnp.bfloat16).at[:, 1:].set(0), None)
    assert routing.expert_ids.tolist() == [[1, 0]]


def test_b24_auxiliary_losses_reach_the_router_and_only_it():
    layer, x = make(), tokens()
    graph, params, bias = nnx.split(layer, nnx.Param, ExpertBias)

    def aux(params):
        _, stats = nnx.merge(graph, params, bias)(x)
        return stats.balance_loss + stats.z_loss

    grads = nnx.to_pure_dict(jax.grad(aux)(params))
    assert np.abs(grads["router"]["kernel"]).max() > 0
    assert not np.any(grads["experts"]["gate_up"])


def test_gradients_equal_oracle():
    layer, x = make(shared=0), tokens()
    graph, params, bias = nnx.split(layer, nnx.Param, ExpertBias)
    probe = np.random.default_rng(5).standard_normal(x.shape)

    def loss(params, x):
        return (nnx.merge(graph, params, bias)(x)[0] * jnp.asarray(probe, jnp.float32)).sum()

    grads, _ = jax.grad(loss, argnums=(0, 1))(params, x)
    f64 = lambda a: np.asarray(a, np.float64)  # noqa: E731
    picks = oracle.route(f64(x) @ f64(layer.router.kernel[...]), layer.router.config)
    weights = f64(layer.experts.gate_up[...]), f64(layer.experts.down[...])
    _, d_gate_up, d_down, _ = oracle.moe_vjp(f64(x), *weights, *picks[:2], probe)
    got = nnx.to_pure_dict(grads)["experts"]
    assert relative_error(got["gate_up"], d_gate_up) < 1e-5
    assert relative_error(got["down"], d_down) < 1e-5
