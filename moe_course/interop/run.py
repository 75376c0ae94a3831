"""``moe-course export-hf``: the newest checkpoint of a run as a Hugging Face folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from moe_course.environment import backends_started, setup
from moe_course.errors import RunError
from moe_course.parallel import MeshConfig
from moe_course.train.config import TrainConfig
from moe_course.train.records import Run
from moe_course.train.run_dir import RunDir


@dataclass(frozen=True)
class ExportOptions:
    """Settings of ``moe-course export-hf``."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of a run, for example runs/tiny."""
    folder: Annotated[Path, tyro.conf.Positional]
    """Where config.json and the safetensors files go; transformers' DeepseekV3ForCausalLM reads them."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights in the files; float32 loses nothing."""
    shard_gb: float = 5.0
    """Largest file, in 1e9 bytes."""


def export_run(options: ExportOptions, console: Console) -> None:
    """Raises :class:`RunError` for a folder without a run or a checkpoint, or a model that is none of theirs."""
    run, saved = RunDir(options.run), Run.read(options.run)
    config = saved.model
    if config is None:
        raise RunError(f"there is no run in {options.run}. Give its folder, for example runs/tiny.")
    if not backends_started():
        setup(1, quiet=True)
    from moe_course.interop.hf_config import config_to_hf
    from moe_course.interop.huggingface import export_model
    from moe_course.parallel import make_mesh
    from moe_course.train.checkpoint import Checkpoints
    from moe_course.train.step import abstract_state

    seq_len = saved.config["seq_len"]
    config_to_hf(config, seq_len)  # refuses before anything is read
    mesh = MeshConfig(1, 1, 1)
    alike = TrainConfig(model=config, mesh=mesh, devices=1)
    checkpoints = Checkpoints(run.checkpoints, keep=alike.keep_checkpoints)
    state, _ = checkpoints.restore(abstract_state(alike), make_mesh(mesh))
    how = {"dtype": options.dtype, "max_shard_bytes": round(options.shard_gb * 1e9), "context": seq_len}
    files = export_model(options.folder, config, state.params, state.bias, **how)
    checkpoints.close()
    size = sum(file.stat().st_size for file in files)
    console.print(
        f"step {int(state.step)} of {options.run} in {options.folder}: {len(files)} files, {size / 1e6:.1f} MB",
        highlight=False,
        soft_wrap=True,
    )
