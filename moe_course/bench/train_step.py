"""``moe-course bench train-step``: a whole optimizer step of an 18M-parameter model, against Hugging Face's.

One device, float32, AdamW: forward, backward, clipping, update, as ``moe-course train`` runs it, on random
tokens. With the parity extra, transformers' ``DeepseekV3ForCausalLM`` of the same sizes takes a step in the same
round: PyTorch with its fused AdamW, attention by ``sdpa``, and the fastest of transformers' implementations of
the experts on this machine. Both may use every core.
"""

import importlib.util
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np

from moe_course.bench.timing import interleaved, median_ratio
from moe_course.environment import cpu_cores
from moe_course.models.config import ModelConfig
from moe_course.parallel import MeshConfig, make_mesh
from moe_course.scaling.flops import parameter_counts
from moe_course.train.config import TrainConfig

MODEL = ModelConfig(
    d_model=256,
    num_layers=6,
    num_dense_layers=1,
    num_heads=8,
    q_lora_rank=96,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    d_ff_dense=1024,
    d_ff=128,
    num_experts=32,
    top_k=4,
)
HF_EXPERTS = ("grouped_mm", "eager")
"""transformers' ways to run the experts; which is fastest depends on the machine. Not its ``batched_mm``, which
copies an expert's weights for every token copy: tens of gigabytes here."""


@dataclass(frozen=True)
class Options:
    """Settings of ``moe-course bench train-step``."""

    batch: int = 8
    seq: int = 256
    rounds: int = 15
    huggingface: bool = True
    """Compare with transformers where torch and transformers are installed."""


def run(options: Options = Options()) -> dict:
    """``{"tokens_per_s": r, "parameters": n, "vs_hf": r, "hf_tokens_per_s": r, "hf_experts": name}``.

    ``vs_hf`` is their time over ours, the median over interleaved rounds, for the fastest of their
    :data:`HF_EXPERTS`: higher is better. The last three are there only where the parity extra is installed.
    """
    tokens = options.batch * options.seq
    steps = {"ours": our_step(options)}
    can_compare = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
    if options.huggingface and can_compare:
        steps |= {name: huggingface_step(options, huggingface_model(options, name)) for name in HF_EXPERTS}
    seconds = interleaved(steps, options.rounds)
    result = {
        "tokens_per_s": round(tokens / statistics.median(seconds["ours"])),
        "parameters": parameter_counts(MODEL).total,
    }
    if len(steps) > 1:
        fastest = min(HF_EXPERTS, key=lambda name: median_ratio(seconds, name, "ours"))
        result |= {
            "vs_hf": round(median_ratio(seconds, fastest, "ours"), 3),
            "hf_tokens_per_s": round(tokens / statistics.median(seconds[fastest])),
            "hf_experts": fastest,
        }
    return result


def our_step(options: Options) -> Callable:
    """A call takes one step of the training program and returns its metrics."""
    from moe_course.train.step import init_state, make_train_step

    config = TrainConfig(
        model=MODEL, mesh=MeshConfig(1, 1, 1), devices=1, batch_size=options.batch, seq_len=options.seq
    )
    mesh = make_mesh(config.mesh)
    step, state, batch = make_train_step(config, mesh, 0), init_state(config, mesh), random_batch(options)

    def call():
        nonlocal state
        state, metrics = step(state, batch)
        return metrics

    return call


def random_batch(options: Options) -> dict:
    """One document per sequence, uniform bytes."""
    shape = (options.batch, options.seq + 1)
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab_size, shape).astype(np.int32)
    zeros = np.zeros(shape, np.int32)
    return jax.device_put({"tokens": tokens, "segments": zeros, "domain": zeros[:, 0]})


def huggingface_model(options: Options, experts: str):
    """``DeepseekV3ForCausalLM`` of the sizes of :data:`MODEL`."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    m = MODEL
    config = DeepseekV3Config(
        vocab_size=m.vocab_size,
        hidden_size=m.d_model,
        num_hidden_layers=m.num_layers,
        first_k_dense_replace=m.num_dense_layers,
        num_attention_heads=m.num_heads,
        num_key_value_heads=m.num_heads,
        q_lora_rank=m.q_lora_rank,
        kv_lora_rank=m.kv_lora_rank,
        qk_nope_head_dim=m.qk_nope_head_dim,
        qk_rope_head_dim=m.qk_rope_head_dim,
        v_head_dim=m.v_head_dim,
        intermediate_size=m.d_ff_dense,
        moe_intermediate_size=m.d_ff,
        n_routed_experts=m.num_experts,
        n_shared_experts=m.num_shared_experts,
        num_experts_per_tok=m.top_k,
        n_group=1,
        topk_group=1,
        max_position_embeddings=options.seq,
        experts_implementation=experts,
        attn_implementation="sdpa",
    )
    return DeepseekV3ForCausalLM(config).train()


def huggingface_step(options: Options, model) -> Callable:
    """A call takes one AdamW step of ``model`` and returns nothing."""
    import torch

    torch.set_num_threads(cpu_cores())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, fused=True)
    tokens = torch.from_numpy(np.asarray(random_batch(options)["tokens"], np.int64))

    def call() -> None:
        optimizer.zero_grad()
        model(input_ids=tokens[:, :-1], labels=tokens[:, :-1], use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return call
