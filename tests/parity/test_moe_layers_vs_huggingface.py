"""MoE layers of Mixtral, Qwen3-MoE and DeepSeek-V3 from transformers' files against transformers' layers."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from moe_course.interop.moe_layers import import_moe_layer, moe_layer_tensors
from tests.oracle import assert_close
from tests.parity.peers import MARKS, torch, transformers
from tests.parity.test_deepseek_vs_huggingface import BASE

pytestmark = MARKS
TOKENS, D, F, E, K = 40, 16, 12, 8, 3
COMMON = {"vocab_size": 20, "hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}


def mixtral():
    more = {
        "intermediate_size": F,
        "num_local_experts": E,
        "num_experts_per_tok": K,
        "num_key_value_heads": 2,
    }
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**COMMON, **more))


def qwen3_moe(normalize):
    more = {
        "moe_intermediate_size": F,
        "num_experts": E,
        "num_experts_per_tok": K,
        "norm_topk_prob": normalize,
    }
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**COMMON, **more, intermediate_size=20, num_key_value_heads=2)
    )


def deepseek_v3():
    sizes = {"hidden_size": D, "moe_intermediate_size": F, "n_shared_experts": 2, "num_hidden_layers": 2}
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**BASE | sizes))


@pytest.mark.parametrize(
    "make",
    [mixtral, lambda: qwen3_moe(True), lambda: qwen3_moe(False), deepseek_v3],
    ids=["mixtral", "qwen3", "qwen3 not normalised", "deepseek"],
)
def test_layer(make, tmp_path):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = make().eval()
    with torch.no_grad():
        for tensor in theirs.parameters():
            tensor.normal_(0, 0.3)
    theirs.save_pretrained(tmp_path)
    x = np.random.default_rng(0).standard_normal((1, TOKENS, D)).astype(np.float32)
    with torch.no_grad():
        want = theirs.model.layers[1].mlp(torch.from_numpy(x))
    want = (want[0] if isinstance(want, tuple) else want).numpy()[0]
    layer = import_moe_layer(tmp_path, 1)
    ours, stats = jax.jit(lambda layer, x: layer(x))(layer, x[0])
    assert_close(ours, want, jnp.float32, D + F + K, "layer")
    assert int(stats.load.sum()) == TOKENS * layer.router.config.top_k
    other = import_moe_layer(tmp_path, 1 if theirs.config.model_type == "deepseek_v3" else 0)
    other.router.kernel[...] = -other.router.kernel[...]
    with pytest.raises(AssertionError, match="rounding explains"):
        assert_close(other(jnp.asarray(x[0]))[0], want, jnp.float32, D + F + K)

    stored = load_file(tmp_path / "model.safetensors")
    written = dict(moe_layer_tensors(layer, theirs.config.model_type, 1))
    moe = ("model.layers.1.mlp.", "model.layers.1.block_sparse_moe.")
    assert written.keys() == {name for name in stored if name.startswith(moe)}
    assert all(np.array_equal(stored[name], array) for name, array in written.items())
