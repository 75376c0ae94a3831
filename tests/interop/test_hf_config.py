"""config.json and ModelConfig, either from the other."""

from dataclasses import replace

import pytest

from moe_course.errors import RunError
from moe_course.interop.hf_config import config_from_hf, config_to_hf
from moe_course.models.config import DEEPSEEK_V2_LITE, DEEPSEEK_V3, ModelConfig

PUBLISHED = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
"""https://huggingface.co/deepseek-ai/DeepSeek-V3, config.json."""


def test_the_published_config_is_our_preset():
    """But for the standard deviation at the start: 0.006 in the paper's section 4.2."""
    assert replace(config_from_hf(PUBLISHED), init_std=0.006) == DEEPSEEK_V3
    back = config_to_hf(DEEPSEEK_V3)
    not_ours = "auto_map aux_loss_alpha bos_token_id eos_token_id ep_size quantization_config seq_aux use_cache".split()
    for key, value in PUBLISHED.items():
        if key not in [*not_ours, "initializer_range"]:
            assert back[key] == value, key


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig(scaled_init=False),
        ModelConfig(scaled_init=False, q_lora_rank=24, mtp_depth=2, normalize=False, num_dense_layers=0),
        ModelConfig(scaled_init=False, num_groups=4, top_groups=2, rope_theta=500.0, norm_eps=1e-5),
        ModelConfig(
            scaled_init=False, num_groups=4, top_groups=1, group_score_top=2, compute_dtype="bfloat16"
        ),
        ModelConfig(scaled_init=False, rope_factor=2.5, rope_original_length=100, rope_beta_fast=8.0),
        ModelConfig(scaled_init=False, rope_factor=4.0, rope_mscale=0.7, rope_mscale_all_dim=1.2),
    ],
)
def test_there_and_back(config):
    assert config_from_hf(config_to_hf(config)) == config


def test_newer_rope_parameters_are_read_too():
    older = dict(PUBLISHED)
    rope = {"rope_type": "yarn", **older.pop("rope_scaling"), "rope_theta": older.pop("rope_theta")}
    assert config_from_hf(older | {"rope_parameters": rope}) == config_from_hf(PUBLISHED)
    # Without the two scales, rotated dimensions grow and the softmax does not.
    plain = {name: value for name, value in rope.items() if "mscale" not in name}
    got = config_from_hf(older | {"rope_parameters": plain})
    assert (got.rope_mscale, got.rope_mscale_all_dim) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama' instead of 'deepseek_v3'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' instead of 'silu'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings True instead of False"),
        ({"num_key_value_heads": 8}, "num_key_value_heads 8 instead of 128"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope type 'linear'"),
        (
            {"rope_scaling": PUBLISHED["rope_scaling"] | {"mscale_all_dim": 0}},
            "mscale without mscale_all_dim",
        ),
        ({"rope_scaling": PUBLISHED["rope_scaling"] | {"attention_factor": 2}}, "rope attention_factor"),
        ({"num_experts_per_tok": 1}, "a router without gradient"),
        ({"n_group": 7}, "--model.num-groups"),
    ],
)
def test_what_we_cannot_be_is_told(change, message):
    with pytest.raises(RunError) as error:
        config_from_hf(PUBLISHED | change)
    assert message in str(error.value)


def test_all_complaints_come_at_once():
    broken = {k: v for k, v in PUBLISHED.items() if k not in ("hidden_size", "v_head_dim")} | {
        "hidden_act": "gelu"
    }
    with pytest.raises(RunError) as error:
        config_from_hf(broken)
    assert all(part in str(error.value) for part in ("no hidden_size", "no v_head_dim", "hidden_act 'gelu'"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DEEPSEEK_V2_LITE, "score_fn is softmax, not sigmoid"),
        (ModelConfig(num_groups=4, top_groups=4), "a group's score is not the sum of its best two"),
        (ModelConfig(num_shared_experts=0), "there is no shared expert"),
    ],
)
def test_what_they_cannot_be_is_told(config, message):
    with pytest.raises(RunError) as error:
        config_to_hf(config)
    assert message in str(error.value)


def test_one_expert_per_token_is_never_normalised():
    """By their rule its weight would be the constant 1; ours is its score, which is theirs without the rule."""
    back = config_from_hf(config_to_hf(ModelConfig(top_k=1, scaled_init=False)))
    assert back == ModelConfig(top_k=1, normalize=False, scaled_init=False)
