"""MoE layers of Mixtral and Qwen3-MoE in and out; tests/parity compares them with transformers' own."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from moe_course.errors import RunError
from moe_course.interop.moe_layers import import_moe_layer, moe_layer_tensors
from moe_course.layers.moe import MoE
from moe_course.routing import RouterConfig

D, F, E, K = 8, 6, 4, 2
CONFIGS = {
    "mixtral": {"hidden_size": D, "intermediate_size": F, "num_local_experts": E, "num_experts_per_tok": K},
    "qwen3_moe": {
        "hidden_size": D,
        "moe_intermediate_size": F,
        "num_experts": E,
        "num_experts_per_tok": K,
        "norm_topk_prob": False,
    },
}


def layer(family, **how):
    router = RouterConfig(E, K, normalize=family == "mixtral")
    return MoE(D, F, router, **({"num_shared_experts": 0} | how), rngs=nnx.Rngs(params=1))


@pytest.mark.parametrize("family", CONFIGS)
def test_out_and_in_again_loses_no_bit(tmp_path, family):
    ours = layer(family)
    tensors = dict(moe_layer_tensors(ours, family, 3))
    prefix = "model.layers.3." + ("block_sparse_moe." if family == "mixtral" else "mlp.")
    gate, up = ("w1", "w3") if family == "mixtral" else ("gate_proj", "up_proj")
    assert tensors[prefix + "gate.weight"].shape == (E, D)
    both = np.asarray(ours.experts.gate_up[...])[2].T
    np.testing.assert_array_equal(tensors[f"{prefix}experts.2.{gate}.weight"], both[:F])
    np.testing.assert_array_equal(tensors[f"{prefix}experts.2.{up}.weight"], both[F:])
    other = {name.replace("layers.3", "layers.1"): array + 1 for name, array in tensors.items()}
    save_file(tensors | other, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[family] | {"model_type": family}))
    again = import_moe_layer(tmp_path, 3)
    assert again.router.config == ours.router.config
    for a, b in (
        (again.router.kernel, ours.router.kernel),
        (again.experts.gate_up, ours.experts.gate_up),
        (again.experts.down, ours.experts.down),
        (again.router.bias, jnp.zeros(E)),
    ):
        np.testing.assert_array_equal(a[...], b[...])
    with pytest.raises(RunError, match=rf"missing: .*{prefix}experts.0.{gate}.weight".replace("3", "2")):
        import_moe_layer(tmp_path, 2)


def test_what_a_family_does_not_have_is_told(tmp_path):
    with pytest.raises(RunError, match=r"a layer of mixtral has no shared.down.kernel"):
        dict(moe_layer_tensors(layer("mixtral", num_shared_experts=1), "mixtral", 0))
    biased = layer("qwen3_moe")
    biased.router.bias[...] = jnp.ones(E)
    with pytest.raises(RunError, match=r"a layer of qwen3_moe has no router.bias"):
        dict(moe_layer_tensors(biased, "qwen3_moe", 0))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(
        RunError, match=r"model_type 'llama'. MoE layers come from deepseek_v3, qwen3_moe, mixtral"
    ):
        import_moe_layer(tmp_path, 0)
