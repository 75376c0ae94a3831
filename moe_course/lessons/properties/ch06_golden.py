"""One MoE layer of Hugging Face's DeepSeek-V3, as it was once computed: ``ch06_golden.npz``.

Made with transformers 5.24.0 and torch 2.13.0 on a CPU, from ``DeepseekV3MoE`` with random weights; the names are
those of a checkpoint. With both libraries installed, this makes it anew and prints the largest difference::

    python -m moe_course.lessons.properties.ch06_golden
"""

from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("ch06_golden.npz")
SETTINGS = {"num_experts": 12, "top_k": 4, "num_groups": 4, "top_groups": 2, "scaling_factor": 2.5}
D_MODEL, D_FF, TOKENS = 8, 6, 7


def golden() -> dict[str, np.ndarray]:
    """Weights by their names in a checkpoint, ``x`` [7, 8] and the layer's ``y`` [7, 8], ``expert_ids`` [7, 4]."""
    with np.load(FILE) as stored:
        return dict(stored)


def compute() -> dict[str, np.ndarray]:
    """The same, from the library. Needs torch and transformers."""
    import torch
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as hf

    config = hf.DeepseekV3Config(
        hidden_size=D_MODEL,
        moe_intermediate_size=D_FF,
        n_shared_experts=1,
        num_local_experts=SETTINGS["num_experts"],
        num_experts_per_tok=SETTINGS["top_k"],
        n_group=SETTINGS["num_groups"],
        topk_group=SETTINGS["top_groups"],
        routed_scaling_factor=SETTINGS["scaling_factor"],
        norm_topk_prob=True,
    )
    layer = hf.DeepseekV3MoE(config).float().eval()
    rng = np.random.default_rng(6)
    with torch.no_grad():
        for name, tensor in sorted(layer.state_dict().items()):
            scale = 0.3 if name.endswith("bias") else 0.6
            tensor.copy_(torch.from_numpy(rng.normal(size=tensor.shape).astype(np.float32) * scale))
        x = torch.from_numpy(rng.normal(size=(1, TOKENS, D_MODEL)).astype(np.float32))
        y, ids = layer(x), layer.gate(x)[2]
    state = {name: tensor.numpy() for name, tensor in layer.state_dict().items()}
    gate_up, down = state.pop("experts.gate_up_proj"), state.pop("experts.down_proj")
    for e in range(SETTINGS["num_experts"]):
        state[f"experts.{e}.gate_proj.weight"] = gate_up[e, :D_FF]
        state[f"experts.{e}.up_proj.weight"] = gate_up[e, D_FF:]
        state[f"experts.{e}.down_proj.weight"] = down[e]
    return {**state, "x": x[0].numpy(), "y": y[0].numpy(), "expert_ids": ids.numpy().astype(np.int32)}


if __name__ == "__main__":
    made = compute()
    if FILE.exists():
        stored = golden()
        assert made.keys() == stored.keys(), "other names than those stored"
        print(
            "largest difference",
            max(float(np.abs(made[k] - stored[k]).max()) for k in made if k != "expert_ids"),
        )
    else:
        np.savez(FILE, **made)
