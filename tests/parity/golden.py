"""Make ``tests/models/golden/deepseek_v3.npz``: ``python -m tests.parity.golden`` where torch and transformers are.

Random weights under the published names, tokens, and what transformers' ``DeepseekV3ForCausalLM`` and its module for
multi-token prediction answer, for tests/models/test_golden.py, which needs neither.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from moe_course.interop.hf_config import config_from_hf
from moe_course.interop.huggingface import export_model
from tests.parity.test_deepseek_vs_huggingface import (
    YARN,
    random_tokens,
    random_weights,
    their_logits_and_drafts,
    torch,
    transformers,
)

FILE = Path(__file__).parents[1] / "models" / "golden" / "deepseek_v3.npz"
SMALL = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "num_nextn_predict_layers": 1,
    "initializer_range": 0.3,
    "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
}
CASES = {
    "direct": {"q_lora_rank": None, "n_shared_experts": 2},
    "compressed": {"q_lora_rank": 8, "n_shared_experts": 1},
}


def make() -> dict[str, np.ndarray]:
    """Arrays by name: ``CASE/config``, ``CASE/weights/NAME``, ``CASE/logits``, ``CASE/mtp_logits``, ``tokens``."""
    tokens = random_tokens(5)[:1] % 48
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    made_by = f"python -m tests.parity.golden, with {versions}; float32, attention 'eager'"
    arrays = {"tokens": tokens, "provenance": np.array(made_by)}
    for seed, (case, changes) in enumerate(CASES.items()):
        theirs = transformers.DeepseekV3Config(**SMALL | changes).to_dict()
        config = config_from_hf(theirs)
        with tempfile.TemporaryDirectory() as folder:
            (file,) = export_model(Path(folder), config, *random_weights(config, seed))
            weights = load_file(file)
            written = json.loads((Path(folder) / "config.json").read_text())
            logits, (drafts,) = their_logits_and_drafts(folder, tokens)
        repeated = ("embed_tokens.weight", "shared_head.head.weight")
        arrays |= {
            f"{case}/weights/{name}": array
            for name, array in weights.items()
            if not (name.startswith("model.layers.") and name.endswith(repeated))
        }
        arrays |= {f"{case}/config": np.array(json.dumps(written))}
        arrays |= {f"{case}/logits": logits, f"{case}/mtp_logits": drafts}
    return arrays


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    np.savez_compressed(FILE, **make())
    print(f"{FILE.name}: {FILE.stat().st_size} bytes")
