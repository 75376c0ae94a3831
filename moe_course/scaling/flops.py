"""Matmul FLOPs and parameters of a model, by term, from its configuration alone. Imports no JAX.

Conventions, those of Megatron-LM and of the DeepSeek-V3 report (arXiv 2412.19437), so that figures compare:

- a multiply-add is 2 FLOPs; a training step costs 3 forwards (backward is two); recompute is not model work;
- only matmuls: no norms, softmax, rotary embedding, activation, optimizer. An embedding lookup is no matmul;
- causal attention counts half of the seq x seq scores (``causal=True``), although a kernel that masks
  computes them all (``causal=False``);
- a token pays for the ``top_k`` experts it uses, not for those that exist (``experts="active"``). FLOPs by
  total parameters overstate the work of Mixtral 8x7B 3.5 times.

Unlike the two sources, the router is counted (0.3 % of DeepSeek-V3): it is a matmul.
"""

from dataclasses import dataclass, fields
from typing import Literal

from moe_course.errors import SettingError
from moe_course.models.config import ModelConfig
from moe_course.scaling.shape import ModelShape

MFU_FORMULA = "MFU = training FLOPs per token by active parameters × tokens / (seconds × devices × peak)"
"""What :func:`mfu` computes; printed wherever its value is."""


def matmul_flops(d_in: int, d_out: int) -> int:
    """FLOPs of one token's vector times a [d_in, d_out] matrix."""
    return 2 * d_in * d_out


def swiglu_flops(d_model: int, d_ff: int) -> int:
    """FLOPs per token of gate, up and down (arXiv 2002.05202)."""
    return 3 * matmul_flops(d_model, d_ff)


def attention_core_flops(seq_len: int, num_heads: int, head_dim: int, *, causal: bool = True) -> int:
    """FLOPs per token of one of the two core matmuls: scores (``head_dim`` of queries) or values."""
    return num_heads * seq_len * head_dim * (1 if causal else 2)


def mla_flops(config: ModelConfig, seq_len: int, *, causal: bool = True) -> dict[str, int]:
    """Forward FLOPs per token of one layer of multi-head latent attention (arXiv 2405.04434, section 2.1)."""
    c = config
    query_dim = c.qk_nope_head_dim + c.qk_rope_head_dim
    query_width = c.num_heads * query_dim
    if c.q_lora_rank:
        query = matmul_flops(c.d_model, c.q_lora_rank) + matmul_flops(c.q_lora_rank, query_width)
    else:
        query = matmul_flops(c.d_model, query_width)
    kv_down = matmul_flops(c.d_model, c.kv_lora_rank + c.qk_rope_head_dim)
    kv_up = matmul_flops(c.kv_lora_rank, c.num_heads * (c.qk_nope_head_dim + c.v_head_dim))
    return {
        "query projections": query,
        "key-value projections": kv_down + kv_up,
        "attention scores": attention_core_flops(seq_len, c.num_heads, query_dim, causal=causal),
        "attention values": attention_core_flops(seq_len, c.num_heads, c.v_head_dim, causal=causal),
        "attention output": matmul_flops(c.num_heads * c.v_head_dim, c.d_model),
    }


def moe_flops(config: ModelConfig, *, experts: Literal["active", "all"] = "active") -> dict[str, int]:
    """Forward FLOPs per token of one MoE feed-forward. ``"all"``: every expert for every token."""
    c = config
    used = c.top_k if experts == "active" else c.num_experts
    return {
        "router": matmul_flops(c.d_model, c.num_experts),
        "routed experts": used * swiglu_flops(c.d_model, c.d_ff),
        "shared experts": c.num_shared_experts * swiglu_flops(c.d_model, c.d_ff),
    }


def forward_flops(
    config: ModelConfig,
    seq_len: int,
    *,
    causal: bool = True,
    experts: Literal["active", "all"] = "active",
) -> dict[str, int]:
    """Matmul FLOPs per token of one forward pass, by term; the sum of the values is the model's."""
    c = config
    attention, moe = mla_flops(c, seq_len, causal=causal), moe_flops(c, experts=experts)
    head = matmul_flops(c.d_model, c.vocab_size)
    terms = {name: c.num_layers * flops for name, flops in attention.items()}
    terms["dense feed-forward"] = c.num_dense_layers * swiglu_flops(c.d_model, c.d_ff_dense)
    terms |= {name: c.num_moe_layers * flops for name, flops in moe.items()}
    terms["head"] = head
    if c.mtp_depth:
        terms["MTP projection"] = c.mtp_depth * matmul_flops(2 * c.d_model, c.d_model)
        terms["MTP layer"] = c.mtp_depth * (sum(attention.values()) + sum(moe.values()))
        terms["MTP head"] = c.mtp_depth * head
    return {name: flops for name, flops in terms.items() if flops}


def training_flops(
    config: ModelConfig,
    seq_len: int,
    *,
    causal: bool = True,
    experts: Literal["active", "all"] = "active",
) -> dict[str, int]:
    """Model FLOPs per token of one training step, by term: 3 x :func:`forward_flops`."""
    forward = forward_flops(config, seq_len, causal=causal, experts=experts)
    return {name: 3 * flops for name, flops in forward.items()}


def tflops_per_device(flops_per_token: float, tokens: float, seconds: float, devices: int) -> float:
    """Model TFLOP/s that each device achieved."""
    return flops_per_token * tokens / seconds / devices / 1e12


def mfu(flops_per_token: float, tokens: float, seconds: float, devices: int, peak_tflops: float) -> float:
    """Model FLOPs utilisation, a fraction (PaLM, arXiv 2204.02311, appendix B): :data:`MFU_FORMULA`.

    ``peak_tflops`` is one device's dense peak in the dtype of the matmuls. Name both wherever you print this.
    """
    return tflops_per_device(flops_per_token, tokens, seconds, devices) / peak_tflops


@dataclass(frozen=True)
class ParameterCounts:
    """Trained parameters by part. The expert bias is state, not a parameter, and is not counted."""

    embedding: int
    attention: int
    dense_feed_forward: int
    router: int
    routed_experts: int
    shared_experts: int
    norms: int
    head: int
    mtp: int
    """All of the MTP modules; they share embedding and head with the model."""
    idle: int
    """Those of the routed experts (MTP's too) that one token does not use."""

    def parts(self) -> dict[str, int]:
        """Disjoint parts that add up to ``total``, by name."""
        names = [field.name for field in fields(self) if field.name != "idle"]
        return {name.replace("_", " "): getattr(self, name) for name in names}

    @property
    def total(self) -> int:
        """Every parameter; ``idle`` ones are counted in their parts already."""
        return sum(self.parts().values())

    @property
    def active(self) -> int:
        """Parameters that one token multiplies by: no idle experts, and no embedding table (a lookup reads
        one row of it). So counted, DeepSeek-V3 has the 37B and V2-Lite the 2.4B that are published."""
        return self.total - self.idle - self.embedding


def parameter_counts(config: ModelConfig) -> ParameterCounts:
    """Exact counts for :class:`moe_course.models.deepseek.DeepSeekLM`.

    Published totals leave MTP out: set ``mtp_depth=0`` to compare with them.
    """
    c = config
    # Every matmul weight is read once per token and costs 2 FLOPs per entry, so the FLOP terms count it.
    per_layer = mla_flops(c, seq_len=0)
    attention = sum(per_layer.values()) // 2
    expert = swiglu_flops(c.d_model, c.d_ff) // 2
    router = c.d_model * c.num_experts
    layer_norms = 2 * c.d_model + c.q_lora_rank + c.kv_lora_rank
    routed, shared = c.num_experts * expert, c.num_shared_experts * expert
    mtp_layer = attention + router + routed + shared + layer_norms
    return ParameterCounts(
        embedding=c.vocab_size * c.d_model,
        attention=c.num_layers * attention,
        dense_feed_forward=c.num_dense_layers * swiglu_flops(c.d_model, c.d_ff_dense) // 2,
        router=c.num_moe_layers * router,
        routed_experts=c.num_moe_layers * routed,
        shared_experts=c.num_moe_layers * shared,
        norms=c.num_layers * layer_norms + c.d_model,
        head=c.d_model * c.vocab_size,
        mtp=c.mtp_depth * (2 * c.d_model**2 + 3 * c.d_model + mtp_layer),
        idle=(c.num_moe_layers + c.mtp_depth) * (c.num_experts - c.top_k) * expert,
    )


@dataclass(frozen=True)
class Convention:
    """What one source counts as model FLOPs. A multiply-add is 2 FLOPs and a step 3 forwards for all of them."""

    who: str
    causal: bool = True
    """Count half of the seq x seq scores."""
    mtp: bool = True
    router: bool = False
    window: bool = True
    """Count a windowed layer's window, not the whole sequence."""
    expert_matmuls: int = 0
    """Matmuls counted per expert; 0: as many as it has."""


CONVENTIONS = {
    "exact": Convention("every matmul that the model asks for", router=True),
    "megatron": Convention("Megatron-Bridge and Megatron-LM, from 26.06"),
    "bridge-gpt-oss-2025": Convention(
        "Megatron-Bridge's GPT-OSS rows up to 26.04.01: 2 of 3 expert matmuls, no window",
        window=False,
        expert_matmuls=2,
    ),
    "megatron-llama": Convention("Megatron-LM examples/llama", causal=False),
    "deepseek": Convention("DeepSeek (arXiv 2412.19437, 2505.09343), causal; NeMo Automodel", mtp=False),
    "deepseek-noncausal": Convention("DeepSeek (arXiv 2505.09343), non-causal", causal=False, mtp=False),
    "torchtitan": Convention("torchtitan: 6 x active + 6 L H (d_qk + d_v) s", causal=False, router=True),
    "maxtext-2024": Convention("MaxText before July 2025", causal=False, router=True),
    "maxtext": Convention("MaxText today", router=True),
}
"""By name, read off each source's formula and checked against its printed TFLOPS and tokens/s."""


def published_flops(shape: ModelShape, seq_len: int, convention: str = "megatron") -> dict[str, float]:
    """Training FLOPs per token of any :class:`ModelShape`, by term, as one source counts them."""
    if convention not in CONVENTIONS:
        raise SettingError(f"there is no convention {convention!r}. Use one of {', '.join(CONVENTIONS)}.")
    how, s = CONVENTIONS[convention], shape if CONVENTIONS[convention].mtp else shape.without_mtp()
    moe_layers, attention_layers = s.moe_layers + s.mtp, s.attention_layers + s.mtp
    matmuls = how.expert_matmuls or s.expert_matmuls
    core = s.core_per_token(seq_len, causal=how.causal, window=how.window)
    terms = {
        "attention projections": attention_layers * s.attention_weights,
        "attention core": attention_layers * core,
        "dense feed-forward": s.dense_layers * 3 * s.d_model * s.d_ff_dense,
        "routed experts": moe_layers * s.top_k * matmuls * s.d_model * s.d_ff,
        "shared experts": moe_layers * matmuls * s.d_model * s.d_ff_shared,
        "router": moe_layers * s.d_model * s.experts * how.router,
        "head": (1 + s.mtp) * s.d_model * s.vocab,
        "MTP projection": s.mtp * 2 * s.d_model**2,
        "Mamba": s.other_weights,
    }
    return {name: 6.0 * macs for name, macs in terms.items() if macs}
