"""Everything that decides a training run, as frozen dataclasses. ``moe-course train --help`` lists it."""

from dataclasses import asdict, dataclass, field
from typing import Literal

from moe_course.errors import SettingError
from moe_course.models.config import SCAN_FROM, ModelConfig
from moe_course.parallel import MeshConfig
from moe_course.train.data import DataConfig


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (arXiv 1711.05101) with linear warm-up and cosine decay, and the expert-bias rule."""

    learning_rate: float = 3e-3
    warmup_steps: int = 50
    final_learning_rate_ratio: float = 0.05
    """Learning rate at the last step, as a share of the peak."""
    weight_decay: float = 0.1
    """On matrices only."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0
    """Largest gradient norm over all shards."""
    expert_bias_rate: float = 1e-3
    """Step of the selection bias, once per optimizer step (DeepSeek-V3, section 2.1.2)."""
    balance_coefficient: float = 0.0
    """Weight of the per-sequence balance loss; 0 leaves balance to the bias."""
    z_coefficient: float = 0.0
    """Weight of the router z-loss (arXiv 2202.08906)."""
    mtp_coefficient: float = 0.3
    """Weight of the multi-token-prediction loss, where the model has such modules."""


@dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    devices: int = 8
    """Devices to use. Without a GPU they are simulated on the CPU."""
    seed: int = 0
    steps: int = 1000
    batch_size: int = 16
    """Sequences per step, over all devices."""
    seq_len: int = 256

    dispatcher: Literal["all_gather", "all_to_all", "ragged", "dedup", "hierarchical"] = "all_to_all"
    """How token copies reach their experts (``moe_course.dispatch``). On a CPU all but the first two emulate
    the ragged all-to-all: right, not fast. ``hierarchical`` needs ``mesh.nodes``."""
    waves: int = 1
    """Parts in which each MoE layer sends its tokens, so that one travels while another is computed."""
    backend: str = "auto"
    """Grouped GEMM kernel: auto, tiled, reference, ragged_dot, pallas."""
    recipe: Literal["none", "bf16", "fp8", "fp8-tiles", "mxfp8", "mxfp8-floor", "mxfp8-hybrid", "nvfp4"] = (
        "none"
    )
    """How the operands of the experts' GEMMs are quantised (``moe_course.quant``); none: not at all. Emulated, exactly
    and slowly, on any machine."""
    capacity_factor: float = 2.0
    """Receive buffer as a multiple of the balanced need. Too small costs a re-run step, never a token."""

    remat: Literal["none", "full", "attention", "experts"] = "none"
    """What of each layer is kept for the backward pass besides its input: none recomputes nothing, full recomputes
    all, attention keeps attention's output, experts that and what the experts' backward pass needs."""
    scan_from: int = SCAN_FROM
    """So many layers of a kind, or more, are compiled as one loop, so that depth costs no compile time; fewer are
    compiled one by one, which runs faster on a CPU."""

    eval_every: int = 200
    eval_bytes: int = 32_768
    """Held-out bytes per domain and evaluation."""
    final_eval_bytes: int = 200_000
    """Held-out bytes per domain in the last evaluation; the n-gram baselines use the same amount."""
    checkpoint_every: int = 200
    keep_checkpoints: int = 2

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_len

    @property
    def tokens_per_device(self) -> int:
        return self.tokens_per_step // self.mesh.size

    def validate(self) -> None:
        """Raise :class:`SettingError` for the first setting that cannot work."""
        self.model.validate()
        self.mesh.validate(self.devices, self.model.num_experts, self.batch_size)
        at_least_one = (
            "steps batch_size seq_len waves eval_every eval_bytes final_eval_bytes checkpoint_every"
        )
        for name in [*at_least_one.split(), "keep_checkpoints"]:
            if getattr(self, name) < 1:
                raise SettingError(
                    f"{name} is {getattr(self, name)}. Set --{name.replace('_', '-')} to 1 or more."
                )
        if self.tokens_per_device % self.waves:
            raise SettingError(
                f"{self.tokens_per_device} tokens per device do not divide into {self.waves} waves. "
                f"Set --waves to a divisor of {self.tokens_per_device}."
            )
        if self.capacity_factor <= 0:
            raise SettingError(
                f"capacity_factor is {self.capacity_factor}. Set --capacity-factor above 0, for example 2."
            )
        if self.optimizer.warmup_steps >= self.steps:
            raise SettingError(
                f"warmup_steps is {self.optimizer.warmup_steps} of {self.steps} steps in all. "
                f"Set --optimizer.warmup-steps below {self.steps}, or raise --steps."
            )

    def identity(self) -> dict:
        """The settings that decide the numbers. The rest (mesh, kernels, how often to save) may differ on
        resume."""
        free = (
            "mesh devices dispatcher waves backend capacity_factor remat scan_from eval_every eval_bytes "
            "final_eval_bytes checkpoint_every keep_checkpoints"
        ).split()
        return {name: value for name, value in asdict(self).items() if name not in free}
