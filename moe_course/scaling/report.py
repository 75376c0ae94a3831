"""``moe-course plan``: which layout, how fast, how much memory, what share is communication, and how sure that is."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from moe_course.errors import SettingError
from moe_course.models.config import DEEPSEEK_V2_LITE, DEEPSEEK_V3
from moe_course.scaling import plan
from moe_course.scaling.hardware import format_of, machine
from moe_course.scaling.published import shapes
from moe_course.scaling.shape import ModelShape, from_config

CURVE = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""GPU counts of the scaling curve."""


@dataclass(frozen=True)
class Options:
    """Settings of ``moe-course plan``."""

    model: str = "deepseek-v3"
    hardware: str = "gb200"
    gpus: int = 256
    seq: int = 4096
    """Tokens per sequence."""
    batch: int | None = None
    """Sequences per optimizer step (default: 16 per GPU)."""
    precision: str = "mxfp8"
    """Format of the GEMMs: bf16, fp8, mxfp8 or nvfp4."""
    ep: int | None = None
    """Only layouts with this size; the same for tp and pp."""
    tp: int | None = None
    pp: int | None = None
    balanced: bool = False
    """Assume forced balance, as most published tables do, instead of a learned router."""
    top: int = 5
    """Layouts in the table."""
    json: bool = False
    """Print JSON and nothing else."""
    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Draw breakdown, scaling curve and memory into this picture (PNG, SVG or PDF)."""


def model_shape(name: str) -> ModelShape:
    """A model by name: this course's presets, or any published model whose sizes are known."""
    ours = {"deepseek-v3": DEEPSEEK_V3, "deepseek-v2-lite": DEEPSEEK_V2_LITE}
    if name in ours:
        return from_config(ours[name], name)
    known = shapes()
    if name.lower() in known:
        return known[name.lower()]
    raise SettingError(f"there is no model {name!r}. Use one of {', '.join(sorted({*ours, *known}))}.")


def find(options: Options) -> plan.Search:
    """Search, with the sizes that the options fix."""
    if options.gpus < 1 or options.seq < 1:
        raise SettingError(f"--gpus {options.gpus} --seq {options.seq}: both must be 1 or more.")
    found = plan.search(
        model_shape(options.model),
        machine(options.hardware),
        options.gpus,
        seq_len=options.seq,
        global_batch=options.batch,
        precision=options.precision,
        real_routing=not options.balanced,
    )
    fixed = {key: value for key in ("ep", "tp", "pp") if (value := getattr(options, key)) is not None}
    if not fixed:
        return found
    keeps = lambda p: all(getattr(p.layout, key) == value for key, value in fixed.items())  # noqa: E731
    every, fitting = [p for p in found.every if keeps(p)], [p for p in found.fitting if keeps(p)]
    if not fitting:
        sizes = " ".join(f"--{key} {value}" for key, value in fixed.items())
        reason = "none fits in memory" if every else "none is legal"
        raise SettingError(f"of the layouts with {sizes}, {reason}. Leave one of them out.")
    return plan.Search(found.shape, found.machine, every, fitting)


def as_dict(prediction: plan.Prediction) -> dict:
    """A prediction as JSON has it."""
    p, low_high = prediction, prediction.interval()
    layout = p.layout
    return {
        "layout": layout.describe(),
        **{key: getattr(layout, key) for key in ("gpus", "ep", "tp", "pp", "vpp", "cp", "dp", "micro_batch")},
        "recompute": list(layout.recompute),
        "step_seconds": p.step_seconds,
        "tokens_per_second_per_gpu": p.tokens_per_second,
        "tokens_per_second_p90_range": list(low_high),
        "tflops_per_gpu": p.tflops,
        "mfu": p.mfu,
        "mfu_peak_tflops": p.peak_tflops,
        "communication_share": p.communication_share,
        "parts_seconds": p.parts,
        "memory_gb": p.memory.total / 1e9,
        "memory_parts_gb": {name: size / 1e9 for name, size in p.memory.parts.items()},
        "error": {
            "tokens_median": p.calibration.median_abs_error,
            "tokens_p90": p.calibration.p90_abs_error,
            "memory_median": p.memory.error,
        },
    }


def answer(found: plan.Search, top: int = 5) -> dict:
    """Everything that ``--json`` prints."""
    return {
        "model": found.shape.name,
        "hardware": found.machine.name,
        "parameters": found.shape.parameters,
        "active_parameters": found.shape.active_parameters,
        "best": as_dict(found.best),
        "others": [as_dict(p) for p in found.fitting[1:top]],
        "why": plan.why(found),
        "pareto": [
            {"layout": p.layout.describe(), "tokens_per_second_per_gpu": p.tokens_per_second,
             "memory_gb": p.memory.total / 1e9} for p in found.pareto()
        ],
        "layouts_searched": len(found.every),
        "layouts_that_fit": len(found.fitting),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """The command."""
    options = tyro.cli(Options, args=argv, prog="moe-course plan", description=__doc__)
    found = find(options)
    if options.json:
        print(json.dumps(answer(found, options.top)))
    else:
        show(found, options)
    if options.plot:
        draw(found, options.plot)
    return 0


def show(found: plan.Search, options: Options) -> None:
    """The table and the reasons, on the terminal."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    calibration, best = found.best.calibration, found.best
    table = Table(title=f"{found.shape.name} on {options.gpus} {found.machine.name}, {options.precision}")
    for name in ("layout", "tokens/s/GPU", "TFLOPS/GPU", "MFU", "communication", "memory GB"):
        table.add_column(name, justify="left" if name == "layout" else "right")
    for p in found.fitting[: options.top]:
        again = f", recompute {' '.join(p.layout.recompute)}" if p.layout.recompute else ""
        table.add_row(
            p.layout.describe() + again,
            f"{p.tokens_per_second:,.0f} ± {calibration.median_abs_error:.0%}",
            f"{p.tflops:,.0f}",
            f"{p.mfu:.1%}",
            f"{p.communication_share:.0%}",
            f"{p.memory.total / 1e9:.0f} ± {p.memory.error:.0%}",
        )
    console.print(table)
    low, high = best.interval()
    console.print(
        f"Error: {calibration.describe()}. For the first row: {low:,.0f} to {high:,.0f} tokens/s/GPU."
    )
    console.print(
        f"MFU is of {best.peak_tflops:,.0f} dense TFLOPS ({format_of(options.precision)}); "
        "TFLOPS by active parameters, causal, MTP counted."
    )
    shares = sorted(best.parts.items(), key=lambda item: -item[1])
    console.print(
        "A step: " + ", ".join(f"{name} {t / best.step_seconds:.0%}" for name, t in shares[:7]) + "."
    )
    for sentence in plan.why(found):
        console.print(f"- {sentence}")


def draw(found: plan.Search, path: Path) -> None:
    """Breakdown of the best layout's step, weak scaling, and memory."""
    from matplotlib.figure import Figure

    best = found.best
    figure = Figure(figsize=(13, 4), layout="constrained")
    step, curve, memory = figure.subplots(1, 3)
    names = [name for name, value in best.parts.items() if value > 0][::-1]
    step.barh(names, [1e3 * best.parts[name] for name in names])
    step.set(xlabel="milliseconds", title=f"step ± {best.calibration.median_abs_error:.0%}")
    counts = [n for n in CURVE if n >= best.layout.gpus // 4 and _divides(found, n)]
    points = plan.weak_scaling(found.shape, found.machine, best.layout, counts)
    curve.semilogx(*zip(*points, strict=True), marker="o", base=2)
    curve.set(xlabel="GPUs, batch per GPU fixed", ylabel="speed per GPU, relative", ylim=(0, 1.05))
    curve.set_title("weak scaling")
    parts = best.memory.parts
    memory.barh(list(parts)[::-1], [size / 1e9 for size in list(parts.values())[::-1]])
    memory.set(xlabel="GB", title=f"{best.memory.total / 1e9:.0f} GB ± {best.memory.error:.0%}")
    figure.suptitle(f"{found.shape.name}, {found.machine.name}: {best.layout.describe()}")
    figure.savefig(path)


def _divides(found: plan.Search, gpus: int) -> bool:
    from dataclasses import replace

    layout = found.best.layout
    scaled = replace(layout, gpus=gpus, global_batch=layout.global_batch * gpus // layout.gpus)
    return gpus >= layout.tp * layout.pp * max(layout.cp, 1) and not scaled.problem(found.shape)
