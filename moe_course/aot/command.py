"""``moe-course compile``: the command line of this folder."""

import json
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from moe_course.aot import report
from moe_course.aot.compiled import STATEMENT, compile_plan
from moe_course.aot.request import fit_to
from moe_course.aot.sweep import SWEEP, compile_all
from moe_course.errors import SettingError
from moe_course.train.config import TrainConfig
from moe_course.train.presets import get_preset

DESCRIPTION = (
    "Compile the training step for GPUs that are not here, by XLA's GPU compiler (extra: aot), and read what the "
    "program needs: state and temporary memory of a GPU, every collective with its bytes beside the formula, FLOPs. "
    "Compiled, never run."
)


@dataclass(frozen=True)
class Options:
    """Settings of ``moe-course compile``. What is left out is taken from the preset."""

    preset: str = "deepseek-v3"
    hardware: Literal["gb200", "b200", "h200", "h100"] = "gb200"
    gpus: int = 64
    ep: int | None = None
    """Expert ranks: GPUs that hold different experts. Weights are cut over the rest (fsdp). Default: at most 64, and
    at most a quarter of the GPUs or eight."""
    layers: int | None = None
    """Layers in all, for a quick look; the dense ones come first."""
    remat: Literal["none", "full", "attention", "experts"] = "full"
    capacity_factor: float = 1.25
    """Receive buffer as a multiple of the balanced need."""
    offload: bool = False
    """Keep attention's outputs for the backward pass in the host's memory."""
    recipe: str = "none"
    """How the operands of the experts' GEMMs are quantised, for example mxfp8. Emulated: the program rounds, then
    multiplies in bfloat16."""
    backend: str = "auto"
    """Grouped GEMM: auto (our Pallas kernel), pallas, ragged_dot (a dense product for a GPU), reference, te."""
    te: bool = False
    """The same as --backend te: Transformer Engine's grouped GEMM, where its pieces are installed."""
    mtp: bool = False
    """Compile the preset's multi-token-prediction modules, too. The published 671B parameters leave them out."""
    seq_len: int | None = None
    json: bool = False
    """Print JSON and nothing else."""
    html: Path | None = None
    """Write the report here, and the program beside it as .hlo.txt."""
    markdown: Path | None = None
    again: bool = False
    """Compile even if the same settings, versions and code were compiled before."""
    sweep: bool = False
    """Compile the list of configurations that the planner is compared with, one after another."""
    only: tuple[str, ...] = ()
    """With --sweep: these of the list, by name."""
    write: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """With --sweep: put the figures into this file, beside those that are in it."""


def configuration(o: Options) -> TrainConfig:
    """The training configuration that the options ask for."""
    config = get_preset(o.preset).config
    model = config.model if o.mtp else replace(config.model, mtp_depth=0)
    if o.layers is not None:
        model = replace(
            model, num_layers=o.layers, num_dense_layers=min(model.num_dense_layers, max(o.layers - 1, 0))
        )
    if o.offload and o.remat != "full":
        raise SettingError("--offload says what is kept: it needs --remat full.")
    config = replace(
        config,
        model=replace(model, compute_dtype="bfloat16"),
        remat="offload" if o.offload else o.remat,
        capacity_factor=o.capacity_factor,
        recipe=o.recipe,
        backend="te" if o.te else o.backend,
        seq_len=o.seq_len or config.seq_len,
    )
    return fit_to(config, o.gpus, ep=o.ep)


def main(argv: list[str]) -> int:
    """``moe-course compile [options]``."""
    o = tyro.cli(Options, args=argv, prog="moe-course compile", description=DESCRIPTION)
    console = Console(highlight=False)
    if o.sweep:
        say = partial(print, file=sys.stderr, flush=True)
        rows = compile_all(say, write=o.write, again=o.again, names=o.only or tuple(SWEEP))
        print(json.dumps({"statement": STATEMENT, "rows": rows}, indent=1))
        return 0
    compiled = compile_plan(configuration(o), o.hardware, o.gpus, again=o.again)
    if o.json:
        print(json.dumps(compiled.as_json(), indent=1))
    else:
        report.print_report(compiled, console)
    for path in filter(None, (o.html, o.markdown)):
        program = report.write(compiled, path)
        print(f"report in {path}, program in {program}", file=sys.stderr)
    return 0
