"""Named training runs: what each is for, and all its settings."""

from dataclasses import dataclass
from difflib import get_close_matches

from moe_course.errors import SettingError
from moe_course.models.config import DEEPSEEK_V2_LITE, DEEPSEEK_V3, ModelConfig
from moe_course.parallel import MeshConfig
from moe_course.train.config import OptimizerConfig, TrainConfig


@dataclass(frozen=True)
class Preset:
    """A starting point that flags on the command line may change."""

    purpose: str
    config: TrainConfig


TINY = TrainConfig(
    model=ModelConfig(
        d_model=128,
        num_layers=3,
        num_dense_layers=1,
        num_heads=4,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        d_ff_dense=512,
        d_ff=96,
        num_experts=16,
        top_k=4,
        init_std=0.08,
    ),
    optimizer=OptimizerConfig(learning_rate=6e-3, warmup_steps=40, expert_bias_rate=0.02),
    steps=400,
    batch_size=16,
    seq_len=128,
    capacity_factor=2.5,
    eval_every=100,
    eval_bytes=16_384,
    checkpoint_every=100,
)

SMALL = TrainConfig(
    model=ModelConfig(
        d_model=192,
        num_layers=4,
        num_dense_layers=1,
        num_heads=6,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        d_ff_dense=768,
        d_ff=128,
        num_experts=32,
        top_k=4,
        init_std=0.07,
    ),
    optimizer=OptimizerConfig(learning_rate=4e-3, warmup_steps=100, expert_bias_rate=0.01),
    steps=2000,
    batch_size=16,
    seq_len=256,
    capacity_factor=2.5,
    eval_every=200,
    checkpoint_every=200,
)

PRESETS = {
    "tiny": Preset("about five minutes on two CPU cores", TINY),
    "small": Preset("about an hour on two CPU cores", SMALL),
    "deepseek-v2-lite": Preset(
        "DeepSeek-V2-Lite's sizes, 15.7B parameters: for planning and compiling",
        TrainConfig(
            model=DEEPSEEK_V2_LITE,
            mesh=MeshConfig(1, 1, 8),
            devices=8,
            batch_size=8,
            seq_len=4096,
            steps=10_000,
        ),
    ),
    "deepseek-v3": Preset(
        "DeepSeek-V3's sizes, 671B parameters: for planning and compiling",
        TrainConfig(
            model=DEEPSEEK_V3,
            optimizer=OptimizerConfig(  # arXiv 2412.19437, section 4.2
                learning_rate=2.2e-4, warmup_steps=2000, expert_bias_rate=1e-3, balance_coefficient=1e-4
            ),
            mesh=MeshConfig(1, 4, 64),
            devices=256,
            batch_size=256,
            seq_len=4096,
            steps=10_000,
        ),
    ),
}


def get_preset(name: str) -> Preset:
    """The preset of that name, or :class:`SettingError` with the nearest one."""
    if name in PRESETS:
        return PRESETS[name]
    close = get_close_matches(name, PRESETS, n=1)
    hint = f"Did you mean --preset {close[0]}? " if close else ""
    raise SettingError(f"there is no preset {name!r}. {hint}The presets are {', '.join(PRESETS)}.")
