"""A transformer's sizes as the planner needs them: any attention, any mix of dense and MoE layers.

:class:`moe_course.models.config.ModelConfig` describes the models that this course trains; the published runs also
have grouped-query attention, windows, ungated experts and Mamba layers. ``ModelShape`` covers both. No JAX.
"""

from dataclasses import dataclass, replace

from moe_course.errors import SettingError
from moe_course.models.config import ModelConfig


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one model. A "weight" is one entry of a matrix that a token multiplies by."""

    name: str
    d_model: int
    layers: int
    vocab: int
    heads: int
    qk_dim: int
    """Width of one head's query, RoPE part included."""
    v_dim: int
    attention_weights: int
    """Matrix entries of one attention layer."""
    attention_layers: int
    moe_layers: int = 0
    dense_layers: int = 0
    d_ff_dense: int = 0
    experts: int = 1
    top_k: int = 1
    d_ff: int = 0
    d_ff_shared: int = 0
    """Width of all shared experts of a layer together."""
    expert_matmuls: int = 3
    """3: gate, up, down. 2: no gate."""
    mtp: int = 0
    window: int = 0
    """Tokens that a windowed layer attends to; half of the layers are windowed if this is not 0."""
    other_weights: int = 0
    """Matrix entries outside of attention, feed-forward and head, all layers together (Mamba)."""
    biased_experts: bool = False
    """GPT-OSS: biases and a clamp inside the experts, which grouped kernels did not fuse for long."""
    q_rank: int = 0
    kv_rank: int = 0

    @property
    def expert_weights(self) -> int:
        """One expert's matrix entries."""
        return self.expert_matmuls * self.d_model * self.d_ff

    @property
    def shared_weights(self) -> int:
        return self.expert_matmuls * self.d_model * self.d_ff_shared

    def core_per_token(self, seq_len: int, *, causal: bool = True, window: bool = True) -> float:
        """Multiply-adds per token of scores and values, the mean over attention layers."""
        full = seq_len / 2 if causal else seq_len
        spans = full
        if self.window and window and seq_len > self.window:
            spans = (full + _mean_window(seq_len, self.window)) / 2
        return self.heads * (self.qk_dim + self.v_dim) * spans

    @property
    def kv_width(self) -> int:
        """Numbers per token that a ring of context-parallel GPUs passes on: keys and values of all heads."""
        if self.kv_rank:
            return self.heads * (self.qk_dim + self.v_dim)
        return self.attention_weights // self.d_model - 2 * self.heads * self.qk_dim

    @property
    def routed_parameters(self) -> int:
        """All experts of all MoE layers, MTP's included."""
        return (self.moe_layers + self.mtp) * self.experts * self.expert_weights

    @property
    def dense_parameters(self) -> int:
        """Everything but routed experts: what every GPU of a pipeline stage needs."""
        d = self.d_model
        attention = (self.attention_layers + self.mtp) * (self.attention_weights + self.q_rank + self.kv_rank)
        moe = (self.moe_layers + self.mtp) * (self.shared_weights + d * self.experts)
        dense = self.dense_layers * 3 * d * self.d_ff_dense
        norms = (2 * self.layers + 1 + 5 * self.mtp) * d
        return (
            attention + moe + dense + norms + 2 * d * self.vocab + self.mtp * 2 * d * d + self.other_weights
        )

    @property
    def parameters(self) -> int:
        """Every trained parameter. Published totals leave MTP out: ``without_mtp()``."""
        return self.routed_parameters + self.dense_parameters

    @property
    def active_parameters(self) -> int:
        """What one token multiplies by: ``top_k`` experts, and no embedding table, which is a lookup."""
        idle = (self.moe_layers + self.mtp) * (self.experts - self.top_k) * self.expert_weights
        return self.parameters - idle - self.d_model * self.vocab

    def without_mtp(self) -> "ModelShape":
        return replace(self, mtp=0)


def from_config(config: ModelConfig, name: str = "model") -> ModelShape:
    """The shape of a model of this course."""
    c = config
    return ModelShape(
        name=name,
        d_model=c.d_model,
        layers=c.num_layers,
        vocab=c.vocab_size,
        heads=c.num_heads,
        qk_dim=c.qk_nope_head_dim + c.qk_rope_head_dim,
        v_dim=c.v_head_dim,
        attention_weights=mla_weights(
            c.d_model, c.num_heads, c.q_lora_rank, c.kv_lora_rank,
            c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim,
        ),
        attention_layers=c.num_layers,
        moe_layers=c.num_moe_layers,
        dense_layers=c.num_dense_layers,
        d_ff_dense=c.d_ff_dense,
        experts=c.num_experts,
        top_k=c.top_k,
        d_ff=c.d_ff,
        d_ff_shared=c.num_shared_experts * c.d_ff,
        mtp=c.mtp_depth,
        q_rank=c.q_lora_rank,
        kv_rank=c.kv_lora_rank,
    )  # fmt: skip


def from_published(model: dict) -> ModelShape:
    """The shape in the ``model`` field of a published row; :class:`SettingError` if it lacks sizes."""
    m = model
    note = m.get("note") or ""
    hybrid = "Mamba" in note
    needed = ("layers", "hidden", "heads", "vocab", *(("moe_ffn",) if m.get("moe_layers") else ()))
    if missing := [key for key in needed if not m.get(key)]:
        raise SettingError(f"{m['name']} was published without its {', '.join(missing)}.")
    if not m.get("mla") and not m.get("head_dim"):
        raise SettingError(f"{m['name']} was published without the sizes of its attention.")
    if ("hybrid" in note and not hybrid) or (m.get("shared") and not m.get("shared_ffn")):
        raise SettingError(f"{m['name']} was published without all sizes of its layers.")
    if mla := m.get("mla"):
        sizes = [mla[key] or 0 for key in ("q_lora", "kv_lora", "qk_nope", "qk_rope", "v")]
        attention = {
            "qk_dim": sizes[2] + sizes[3],
            "v_dim": sizes[4],
            "q_rank": sizes[0],
            "kv_rank": sizes[1],
        }
        weights = mla_weights(m["hidden"], m["heads"], *sizes)
    else:
        attention = {"qk_dim": m["head_dim"], "v_dim": m["head_dim"]}
        weights = m["hidden"] * m["head_dim"] * 2 * (m["heads"] + m["kv_heads"])
    return ModelShape(
        name=m["name"],
        d_model=m["hidden"],
        layers=m["layers"],
        vocab=m["vocab"],
        heads=m["heads"],
        attention_weights=weights,
        attention_layers=NANO_ATTENTION_LAYERS if hybrid else m["layers"],
        moe_layers=m["moe_layers"] or 0,
        dense_layers=m["dense_layers"] or 0,
        d_ff_dense=m.get("dense_ffn") or 0,
        experts=m["experts"] or 1,
        top_k=m["top_k"] or 1,
        d_ff=m["moe_ffn"] or 0,
        d_ff_shared=m["shared_ffn"] or 0,
        expert_matmuls=2 if hybrid else 3,
        mtp=m.get("mtp") or 0,
        window=128 if "sliding window 128" in note else 0,
        other_weights=NANO_MAMBA_WEIGHTS if hybrid else 0,
        biased_experts=m["name"].startswith("GPT-OSS"),
        **attention,
    )


NANO_ATTENTION_LAYERS = 6
NANO_MAMBA_WEIGHTS = 1_182_900_000
"""Nemotron-3-Nano's 23 Mamba layers as Megatron's hybrid formula counts them (22.2781 GFLOP per token at 8,192);
that formula takes an inner width of 2 x hidden, more than the model has."""


def mla_weights(d: int, heads: int, q_rank: int, kv_rank: int, nope: int, rope: int, v: int) -> int:
    """Matrix entries of multi-head latent attention (arXiv 2405.04434, section 2.1)."""
    query = q_rank * (d + heads * (nope + rope)) if q_rank else d * heads * (nope + rope)
    return query + d * (kv_rank + rope) + kv_rank * heads * (nope + v) + heads * v * d


def _mean_window(seq_len: int, window: int) -> float:
    """Tokens that a query of a windowed layer sees, the mean over a sequence."""
    return window - window * (window - 1) / (2 * seq_len)
