"""``config.json`` of ``DeepseekV3ForCausalLM`` and our :class:`ModelConfig`, either from the other."""

import json
from pathlib import Path
from typing import Any

from moe_course.errors import RunError, SettingError
from moe_course.models.config import ModelConfig

CONFIG = "config.json"
FIELDS = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_dense_layers": "first_k_dense_replace",
    "num_heads": "num_attention_heads",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "d_ff_dense": "intermediate_size",
    "d_ff": "moe_intermediate_size",
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "top_k": "num_experts_per_tok",
    "normalize": "norm_topk_prob",
    "scaling_factor": "routed_scaling_factor",
    "num_groups": "n_group",
    "top_groups": "topk_group",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
}
"""Ours -> theirs, where the value is the same."""
FIXED = {
    "model_type": "deepseek_v3",
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
"""Theirs, and the only value that our model can have. A key that is not there has it."""
YARN = "beta_fast beta_slow mscale mscale_all_dim"


def read_config(folder: Path) -> dict[str, Any]:
    """The ``config.json`` of a folder."""
    file = folder / CONFIG
    if not file.exists():
        raise RunError(f"there is no {CONFIG} in {folder}. Give a folder with a Hugging Face model.")
    return json.loads(file.read_text())


def fp8_block(theirs: dict[str, Any]) -> tuple[int, int]:
    """Rows and columns of an FP8 weight that share a scale."""
    rows, columns = (theirs.get("quantization_config") or {}).get("weight_block_size") or (128, 128)
    return rows, columns


def config_from_hf(theirs: dict[str, Any]) -> ModelConfig:
    """Raises :class:`RunError` with everything in ``theirs`` that :class:`DeepSeekLM` cannot be."""
    expected = FIXED | {"num_key_value_heads": theirs.get("num_attention_heads")}
    wrong = [
        f"{key} {theirs[key]!r} instead of {value!r}"
        for key, value in expected.items()
        if key in theirs and theirs[key] != value
    ]
    wrong += [f"no {key}" for key in FIELDS.values() if key not in theirs]
    if theirs.get("num_experts_per_tok") == 1 and theirs.get("norm_topk_prob"):
        wrong.append("num_experts_per_tok 1 with norm_topk_prob, a router without gradient")
    rope, complaints = _rope_from_hf(theirs)
    if wrong + complaints:
        raise RunError(f"config.json is not of a model that we have: {'; '.join(wrong + complaints)}.")
    dtype = str(theirs.get("dtype") or theirs.get("torch_dtype") or "float32")
    same = {ours: theirs[name] for ours, name in FIELDS.items()}
    same["num_dense_layers"] = min(same["num_dense_layers"], same["num_layers"])
    config = ModelConfig(
        **same,
        **rope,
        q_lora_rank=theirs.get("q_lora_rank") or 0,
        mtp_depth=theirs.get("num_nextn_predict_layers", theirs.get("num_mtp_layers", 0)) or 0,
        score_fn="sigmoid",
        group_score_top=None if _best_two_by_default(theirs) else 2,
        compute_dtype="float32" if dtype.endswith("float32") else "bfloat16",
        scaled_init=False,
    )
    try:
        config.validate()
    except SettingError as error:
        raise RunError(f"config.json is not of a model that we have: {error}") from error
    return config


def config_to_hf(config: ModelConfig, context: int = 4096) -> dict[str, Any]:
    """``context`` is the longest sequence, where YaRN does not say it.

    Raises :class:`RunError` for a model that ``DeepseekV3ForCausalLM`` cannot be.
    """
    c = config
    wrong = []
    if c.score_fn != "sigmoid":
        wrong.append(f"score_fn is {c.score_fn}, not sigmoid")
    if c.num_groups > 1 and (c.group_score_top or max(1, c.top_k // c.top_groups)) != 2:
        wrong.append("a group's score is not the sum of its best two")
    if not c.num_shared_experts:
        wrong.append("there is no shared expert")
    if wrong:
        raise RunError(f"DeepseekV3ForCausalLM cannot be this model: {'; '.join(wrong)}.")
    theirs = {"architectures": ["DeepseekV3ForCausalLM"]} | FIXED
    theirs |= {name: getattr(c, ours) for ours, name in FIELDS.items()}
    theirs |= {
        "norm_topk_prob": c.normalize and c.top_k > 1,  # ours divides by no sum of one
        "num_key_value_heads": c.num_heads,
        "q_lora_rank": c.q_lora_rank or None,
        "num_nextn_predict_layers": c.mtp_depth,
        "rope_theta": c.rope_theta,
        "rope_scaling": None,
        "rope_interleave": True,
        "max_position_embeddings": context,
        "torch_dtype": c.compute_dtype,
    }
    if c.rope_factor != 1:
        theirs["max_position_embeddings"] = round(c.rope_factor * c.rope_original_length)
        theirs["rope_scaling"] = {"type": "yarn", "factor": c.rope_factor} | {
            "original_max_position_embeddings": c.rope_original_length,
            **{name: getattr(c, f"rope_{name}") for name in YARN.split()},
        }
    return theirs


def _best_two_by_default(theirs: dict[str, Any]) -> bool:
    """Whether our default for the picks that score a group is their rule, the best two."""
    groups = theirs.get("n_group", 1)
    return groups == 1 or theirs.get("num_experts_per_tok", 0) // theirs.get("topk_group", 1) == 2


def _rope_from_hf(theirs: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(our fields, complaints): from ``rope_theta`` and ``rope_scaling``, or from newer ``rope_parameters``."""
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    found = {"rope_theta": float(rope.get("rope_theta") or theirs.get("rope_theta") or 10_000.0)}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return found, []
    if kind != "yarn":
        return found, [f"rope type {kind!r}"]
    complaints = [f"rope {key}" for key in ("attention_factor", "partial_rotary_factor") if rope.get(key)]
    complaints += [] if rope.get("truncate", True) else ["rope truncate false"]
    # Without these two, rotated dimensions grow and the softmax scale does not.
    given = [name in rope and bool(rope[name]) for name in ("mscale", "mscale_all_dim")]
    if any(given) and not all(given):
        complaints.append("rope mscale without mscale_all_dim, or the other way round")
    original = rope.get("original_max_position_embeddings") or theirs.get("max_position_embeddings")
    factor = rope.get("factor") or theirs["max_position_embeddings"] / original
    found |= {"rope_factor": float(factor), "rope_original_length": int(original)}
    found |= {"rope_beta_fast": float(rope.get("beta_fast") or 32)}
    found |= {"rope_beta_slow": float(rope.get("beta_slow") or 1)}
    found |= {"rope_mscale": float(rope["mscale"]) if all(given) else 1.0}
    found |= {"rope_mscale_all_dim": float(rope["mscale_all_dim"]) if all(given) else 0.0}
    return found, complaints
