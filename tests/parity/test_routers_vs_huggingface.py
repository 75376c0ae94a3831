"""Our router against the routers of Hugging Face transformers, on the same logits.

Their routers multiply hidden states by a weight. With the identity as weight, hidden states are the logits.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_course.routing import RouterConfig, route
from tests import oracle
from tests.parity.peers import MARKS, torch, transformers

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers.models.deepseek_v2 import modeling_deepseek_v2
    from transformers.models.deepseek_v3 import modeling_deepseek_v3
    from transformers.models.mixtral import modeling_mixtral
    from transformers.models.qwen3_moe import modeling_qwen3_moe

pytestmark = MARKS
TOKENS = 512
routed = jax.jit(route, static_argnums=1)


def by_id(ids, weights):
    """Both sorted by expert id: DeepSeek's picks come in no order."""
    order = np.argsort(np.asarray(ids), -1)
    return np.take_along_axis(np.asarray(ids), order, -1), np.take_along_axis(np.asarray(weights), order, -1)


def compare(router, config, seed, *, bias=None, ordered=True):
    rng = np.random.default_rng(seed)
    logits = np.float32(rng.normal(0, 2, (TOKENS, config.num_experts)))
    with torch.no_grad():
        router.weight.copy_(torch.eye(config.num_experts))
        if bias is not None:
            router.e_score_correction_bias.copy_(torch.from_numpy(bias))
        _, weights, ids = router(torch.from_numpy(logits))
    ours = routed(jnp.asarray(logits), config, bias=None if bias is None else jnp.asarray(bias))
    if ordered:
        np.testing.assert_array_equal(ours.expert_ids, ids.numpy())
    our_ids, our_weights = by_id(ours.expert_ids, ours.weights)
    their_ids, their_weights = by_id(ids.numpy(), weights.float().numpy())
    np.testing.assert_array_equal(our_ids, their_ids)
    oracle.assert_close(our_weights, their_weights, jnp.float32, config.top_k, "weights")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("experts", "k"), [(8, 2), (16, 4)])
def test_mixtral(experts, k, seed):
    theirs = transformers.MixtralConfig(hidden_size=experts, num_local_experts=experts, num_experts_per_tok=k)
    compare(modeling_mixtral.MixtralTopKRouter(theirs), RouterConfig(experts, k), seed)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("experts", "k"), [(128, 8), (16, 2)])
def test_qwen3_moe(experts, k, normalize, seed):
    theirs = transformers.Qwen3MoeConfig(
        hidden_size=experts, num_experts=experts, num_experts_per_tok=k, norm_topk_prob=normalize
    )
    compare(
        modeling_qwen3_moe.Qwen3MoeTopKRouter(theirs), RouterConfig(experts, k, normalize=normalize), seed
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("bias_scale", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(("experts", "k", "groups", "kept"), [(256, 8, 8, 4), (16, 4, 4, 2), (32, 4, 1, 1)])
def test_deepseek_v3(experts, k, groups, kept, bias_scale, normalize, seed):
    theirs = transformers.DeepseekV3Config(
        hidden_size=experts,
        n_routed_experts=experts,
        num_experts_per_tok=k,
        n_group=groups,
        topk_group=kept,
        norm_topk_prob=normalize,
        routed_scaling_factor=2.5,
    )
    bias = np.float32(bias_scale * np.random.default_rng(100 + seed).normal(size=experts))
    config = RouterConfig(
        experts,
        k,
        "sigmoid",
        normalize=normalize,
        scaling_factor=2.5,
        num_groups=groups,
        top_groups=kept,
        group_score_top=2,
    )
    compare(modeling_deepseek_v3.DeepseekV3TopkRouter(theirs), config, seed, bias=bias, ordered=False)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("method", "experts", "k", "groups", "kept"),
    [("greedy", 64, 6, 1, 1), ("group_limited_greedy", 160, 6, 8, 3)],
)
def test_deepseek_v2(method, experts, k, groups, kept, seed):
    theirs = transformers.DeepseekV2Config(
        hidden_size=experts,
        n_routed_experts=experts,
        num_experts_per_tok=k,
        n_group=groups,
        topk_group=kept,
        topk_method=method,
        routed_scaling_factor=16.0,
    )
    config = RouterConfig(
        experts,
        k,
        normalize=False,
        scaling_factor=16.0,
        num_groups=groups,
        top_groups=kept,
        group_score_top=1,
    )
    compare(modeling_deepseek_v2.DeepseekV2TopkRouter(theirs), config, seed, ordered=False)


def test_the_comparison_notices_another_rule():
    theirs = transformers.MixtralConfig(hidden_size=8, num_local_experts=8, num_experts_per_tok=2)
    with pytest.raises(AssertionError):
        compare(modeling_mixtral.MixtralTopKRouter(theirs), RouterConfig(8, 2, "sigmoid"), 0)
