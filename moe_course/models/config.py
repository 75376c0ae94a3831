"""What a DeepSeek-style model is made of, as frozen dataclasses. Imports no JAX.

Names and shapes are those of the whole package: ``d_model`` D, ``d_ff`` F (one expert's hidden width),
``num_experts`` E, ``top_k`` K. The published sizes are from DeepSeek-V2 (arXiv 2405.04434) and
DeepSeek-V3 (arXiv 2412.19437, section 4.2).
"""

from dataclasses import dataclass
from typing import Literal

from moe_course.errors import SettingError

SCAN_FROM = 8
"""So many layers of a kind, or more, are compiled as one loop unless told otherwise."""


@dataclass(frozen=True)
class ModelConfig:
    """A DeepSeek-V3-style decoder: MLA attention, a few dense layers, then MoE layers."""

    vocab_size: int = 264
    """Token ids. Byte models use 256 bytes and 8 domain tokens (see ``moe_course.train.corpora``)."""
    d_model: int = 128
    num_layers: int = 4
    num_dense_layers: int = 1
    """The first layers with a dense feed-forward instead of experts."""
    num_heads: int = 4
    q_lora_rank: int = 0
    """Rank of the query compression; 0 projects queries directly (DeepSeek-V2-Lite)."""
    kv_lora_rank: int = 64
    """Width of the compressed key-value vector that MLA would cache."""
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    d_ff_dense: int = 512
    d_ff: int = 64
    num_experts: int = 16
    num_shared_experts: int = 1
    top_k: int = 4
    score_fn: Literal["softmax", "sigmoid"] = "sigmoid"
    normalize: bool = True
    scaling_factor: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score_top: int | None = None
    """A group's score is the sum of its best this many (biased) scores. Default ``top_k // top_groups``, at least 1."""
    rope_theta: float = 10_000.0
    rope_factor: float = 1.0
    """YaRN (arXiv 2309.00071): how many times longer than ``rope_original_length`` the context is; 1 is plain RoPE."""
    rope_original_length: int = 4096
    """Tokens of context before YaRN."""
    rope_beta_fast: float = 32.0
    """Dimensions that turn more often than this over the original length keep their frequency."""
    rope_beta_slow: float = 1.0
    """Dimensions that turn less often than this are slowed by the whole factor."""
    rope_mscale: float = 1.0
    """With YaRN, rotated queries and keys grow by (0.1 mscale ln factor + 1) / (0.1 mscale_all_dim ln factor + 1)."""
    rope_mscale_all_dim: float = 1.0
    """With YaRN, the softmax scale grows by (0.1 mscale_all_dim ln factor + 1)**2."""
    norm_eps: float = 1e-6
    mtp_depth: int = 0
    """Extra tokens predicted by multi-token-prediction modules (DeepSeek-V3 uses 1); 0 is off."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of matmul inputs. Router, norms, softmax, losses and master weights stay float32."""
    init_std: float = 0.02
    """Standard deviation of every matrix at the start."""
    scaled_init: bool = True
    """Start the matrices that write to the residual stream at ``init_std / sqrt(2 num_layers)`` (GPT-2); DeepSeek
    starts all matrices alike."""

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts in the trunk (MTP modules not counted)."""
        return self.num_layers - self.num_dense_layers

    def validate(self) -> None:
        """Raise :class:`SettingError` for a model that cannot exist, naming the flag and the fix."""
        positive = (
            "vocab_size d_model num_layers num_heads kv_lora_rank qk_nope_head_dim qk_rope_head_dim "
            "v_head_dim d_ff_dense d_ff num_experts top_k num_groups top_groups rope_factor rope_original_length"
        ).split()
        for name in positive:
            if getattr(self, name) < 1:
                raise SettingError(
                    f"{name} is {getattr(self, name)}. Set --model.{_flag(name)} to 1 or more."
                )
        for name in ("num_dense_layers", "num_shared_experts", "q_lora_rank", "mtp_depth"):
            if getattr(self, name) < 0:
                raise SettingError(
                    f"{name} is {getattr(self, name)}. Set --model.{_flag(name)} to 0 or more."
                )
        if self.top_k > self.num_experts:
            raise SettingError(
                f"top_k is {self.top_k} but there are {self.num_experts} experts. "
                f"Set --model.top-k to {self.num_experts} or less."
            )
        if self.num_dense_layers > self.num_layers:
            raise SettingError(
                f"num_dense_layers is {self.num_dense_layers} but there are {self.num_layers} layers. "
                f"Set --model.num-dense-layers to {self.num_layers} or less."
            )
        if self.qk_rope_head_dim % 2:
            raise SettingError(
                f"qk_rope_head_dim is {self.qk_rope_head_dim}; RoPE rotates pairs. "
                f"Set --model.qk-rope-head-dim to an even number."
            )
        if not self.rope_beta_fast > self.rope_beta_slow > 0:
            raise SettingError(
                f"rope_beta_fast is {self.rope_beta_fast} and rope_beta_slow {self.rope_beta_slow}. "
                f"Set --model.rope-beta-fast above --model.rope-beta-slow, and both above 0."
            )
        if self.num_experts % self.num_groups:
            raise SettingError(
                f"num_experts {self.num_experts} does not divide into {self.num_groups} groups. "
                f"Set --model.num-groups to a divisor of {self.num_experts}."
            )
        if self.top_groups > self.num_groups:
            raise SettingError(
                f"top_groups is {self.top_groups} but there are {self.num_groups} groups. "
                f"Set --model.top-groups to {self.num_groups} or less."
            )
        reachable = self.top_groups * (self.num_experts // self.num_groups)
        if self.top_k > reachable:
            raise SettingError(
                f"top_k is {self.top_k} but {self.top_groups} groups hold only {reachable} experts. "
                f"Set --model.top-k to {reachable} or less, or raise --model.top-groups."
            )
        in_group = self.num_experts // self.num_groups
        if self.group_score_top is not None and not 1 <= self.group_score_top <= in_group:
            raise SettingError(
                f"group_score_top is {self.group_score_top} but a group holds {in_group} experts. "
                f"Set --model.group-score-top to a number from 1 to {in_group}."
            )


def _flag(name: str) -> str:
    return name.replace("_", "-")


DEEPSEEK_V2_LITE = ModelConfig(
    vocab_size=102_400,
    d_model=2048,
    num_layers=27,
    num_dense_layers=1,
    num_heads=16,
    q_lora_rank=0,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    d_ff_dense=10_944,
    d_ff=1408,
    num_experts=64,
    num_shared_experts=2,
    top_k=6,
    score_fn="softmax",
    normalize=False,
    compute_dtype="bfloat16",
    rope_factor=40.0,
    rope_mscale=0.707,
    rope_mscale_all_dim=0.707,
    init_std=0.006,
    scaled_init=False,
)

DEEPSEEK_V3 = ModelConfig(
    vocab_size=129_280,
    d_model=7168,
    num_layers=61,
    num_dense_layers=3,
    num_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    d_ff_dense=18_432,
    d_ff=2048,
    num_experts=256,
    num_shared_experts=1,
    top_k=8,
    score_fn="sigmoid",
    scaling_factor=2.5,
    num_groups=8,
    top_groups=4,
    mtp_depth=1,
    compute_dtype="bfloat16",
    rope_factor=40.0,
    init_std=0.006,
    scaled_init=False,
)
