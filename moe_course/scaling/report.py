"""``moe-course plan``: which layout, how fast, how much memory, what share is communication, and how sure that is."""

import json
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import tyro

from moe_course.errors import SettingError
from moe_course.models.config import DEEPSEEK_V2_LITE, DEEPSEEK_V3
from moe_course.scaling import plan
from moe_course.scaling.hardware import ALIASES, Machine, format_of, machine
from moe_course.scaling.published import shapes
from moe_course.scaling.shape import ModelShape, from_config

CURVE = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""GPU counts of the scaling curve."""
OURS = {"deepseek-v3": DEEPSEEK_V3, "deepseek-v2-lite": DEEPSEEK_V2_LITE}
PRECISIONS = ("bf16", "fp8", "mxfp8", "nvfp4")
PICTURES = (".png", ".svg", ".pdf")
HELP = """Search every legal layout of a model over a number of GPUs and say which is fastest and fits, why, and how far
such predictions were off on published runs that the model had not seen. No GPU and no JAX needed.

  moe-course plan --model deepseek-v3 --hardware gb200 --gpus 1024
  moe-course plan --model qwen3-235b-a22b --hardware h100 --gpus 256 --precision fp8 --seq 32768 --plot plan.png
  moe-course plan --gpus 256 --ep 8 --skew 1.6 --straggler 0.02 --json

models    {models}

hardware  {machines}
"""


@dataclass(frozen=True)
class Options:
    """Settings of ``moe-course plan``."""

    model: str = "deepseek-v3"
    """A model of this course or a published one, by name."""
    hardware: str = "gb200"
    """Kind of GPU."""
    gpus: int = 256
    """How many."""
    seq: int = 4096
    """Tokens per sequence."""
    batch: int | None = None
    """Sequences per optimizer step (default: 16 per GPU)."""
    precision: str | None = None
    """Format of the GEMMs: bf16, fp8, mxfp8 or nvfp4 (default: mxfp8 on Blackwell, fp8 on Hopper, else bf16)."""
    ep: int | None = None
    """Only layouts with this expert-parallel size."""
    tp: int | None = None
    """Only layouts with this tensor-parallel size."""
    pp: int | None = None
    """Only layouts with this many pipeline stages."""
    cp: int | None = None
    """Only layouts with this context-parallel size (default: while a GPU has 4,096 tokens of a sequence)."""
    balanced: bool = False
    """Assume forced balance, as most published tables do, instead of a learned router."""
    skew: float | None = None
    """Rows of the busiest expert-parallel rank over the mean (default: what the published pairs of a learned router
    and forced balance show)."""
    straggler: float = 0.0
    """Relative standard deviation of a GPU's step time that your cluster has beyond those of the published runs."""
    top: int = 5
    """Layouts in the table."""
    json: bool = False
    """Print JSON and nothing else."""
    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Draw breakdown, scaling curve and memory into this picture (PNG, SVG or PDF)."""


def model_shape(name: str) -> ModelShape:
    """A model by name: this course's presets, or any published model whose sizes are known."""
    if name.lower() in OURS:
        return from_config(OURS[name.lower()], name.lower())
    if name.lower() in shapes():
        return shapes()[name.lower()]
    raise SettingError(f"there is no model {name!r}. {_suggest(name.lower(), model_names(), '--model')}")


def model_names() -> list[str]:
    """What ``--model`` takes."""
    return sorted({*OURS, *shapes()})


def gpu(name: str) -> Machine:
    """A machine that the model of a step was calibrated for: GPUs with NVLink domains and NICs."""
    names = [alias for alias in ALIASES if not alias.startswith("v")]
    try:
        found = machine(name)
    except SettingError:
        raise SettingError(
            f"there is no machine {name!r}. {_suggest(name.lower(), names, '--hardware')}"
        ) from None
    if found.name.startswith("TPU"):
        raise SettingError(
            f"{found.name} has no NVLink domains: its torus is another model. Use --hardware {', '.join(names)}."
        )
    return found


def _precision(said: str | None, found: Machine) -> str:
    """What was said if the machine has it, or its usual low precision. MX formats came with Blackwell."""
    usual = "mxfp8" if found.peak_tflops["fp4"] else "fp8" if found.peak_tflops["fp8"] else "bf16"
    if said == "mxfp8" and usual != "mxfp8":
        raise SettingError(f"{found.name} has no mxfp8 GEMM. Use --precision {usual}.")
    return said or usual


def _suggest(said: str, names: list[str], flag: str) -> str:
    close = get_close_matches(said, names, n=3, cutoff=0.5)
    if close:
        return f"Did you mean {flag} {' or '.join(close)}? moe-course plan --help lists all."
    return f"Use {flag} with one of {', '.join(names)}."


def check(options: Options) -> None:
    """Raise :class:`SettingError` for what no search could answer."""
    o = options
    for name in ("gpus", "seq", "batch", "ep", "tp", "pp", "cp", "top"):
        if (value := getattr(o, name)) is not None and value < 1:
            raise SettingError(f"--{name} is {value}. Set it to 1 or more.")
    if o.precision is not None and o.precision not in PRECISIONS:
        raise SettingError(
            f"there is no precision {o.precision!r}. {_suggest(o.precision, PRECISIONS, '--precision')}"
        )
    if o.skew is not None and o.skew < 1:
        raise SettingError(
            f"--skew is {o.skew:g}: the busiest rank has at least the mean. Set it to 1 or more."
        )
    if o.straggler < 0:
        raise SettingError(f"--straggler is {o.straggler:g}. Set it to 0 or more, as 0.02.")
    if o.plot and o.plot.suffix.lower() not in PICTURES:
        raise SettingError(f"--plot {o.plot} is no picture. Let it end in {', '.join(PICTURES)}.")
    if o.plot and not o.plot.parent.is_dir():
        raise SettingError(f"--plot {o.plot}: there is no folder {o.plot.parent}. Make it first.")


def find(options: Options) -> plan.Search:
    """Search, with the sizes that the options fix."""
    check(options)
    shape, found = model_shape(options.model), gpu(options.hardware)
    return plan.search(
        shape,
        found,
        options.gpus,
        straggler=options.straggler,
        seq_len=options.seq,
        global_batch=options.batch,
        precision=_precision(options.precision, found),
        real_routing=not options.balanced,
        skew=options.skew,
        sizes={key: size for key in plan.SIZES if (size := getattr(options, key)) is not None},
    )


def as_dict(prediction: plan.Prediction) -> dict:
    """A prediction as JSON has it. No published run prints its exposed communication, so that share has no error."""
    p, low_high = prediction, prediction.interval()
    layout = p.layout
    return {
        "layout": layout.describe(),
        **{
            key: getattr(layout, key)
            for key in ("gpus", "ep", "tp", "pp", "vpp", "cp", "dp", "micro_batch", "fsdp")
        },
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
            "ratio_of_two_layouts_median": p.calibration.ratio_median_abs_error,
            "memory_median": p.memory.error,
            "communication_share": None,
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
    told = HELP.format(models=", ".join(model_names()), machines=", ".join(a for a in ALIASES if a[0] != "v"))
    options = tyro.cli(Options, args=argv, prog="moe-course plan", description=told)
    found = find(options)
    if options.json:
        print(json.dumps(answer(found, options.top)))
    else:
        show(found, options)
    if options.plot:
        draw(found, options.plot, options.straggler)
    return 0


def show(found: plan.Search, options: Options) -> None:
    """The table and the reasons, on the terminal."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    calibration, best = found.best.calibration, found.best
    precision = best.layout.precision
    half, held = f"± {calibration.median_abs_error:.0%}", f"± {best.memory.error:.0%}"
    table = Table(title=f"{found.shape.name} on {options.gpus} {found.machine.name}, {precision}")
    table.add_column("layout")
    table.add_column("recompute")
    for name in (f"tokens/s\nper GPU\n{half}", f"TFLOPS\nper GPU\n{half}", f"MFU\n{half}", "exposed\ncomm."):
        table.add_column(name, justify="right")
    table.add_column(f"memory\nGB\n{held}", justify="right")
    for p in found.fitting[: options.top]:
        table.add_row(
            p.layout.describe(),
            {(): "nothing", ("full",): "all"}.get(p.layout.recompute, "parts"),
            f"{p.tokens_per_second:,.0f}",
            f"{p.tflops:,.0f}",
            f"{p.mfu:.1%}",
            f"{p.communication_share:.0%}",
            f"{p.memory.total / 1e9:.0f}",
        )
    console.print(table)
    low, high = best.interval()
    shares = sorted(best.parts.items(), key=lambda item: -item[1])
    for line in (
        f"Error: {calibration.describe()}. For the first row: {low:,.0f} to {high:,.0f} tokens/s/GPU. The ratio of two "
        f"layouts of one model and machine is within {calibration.ratio_median_abs_error:.0%} for half of the "
        "published pairs, hardly any of which differ in parallel sizes alone: rows that are closer are a tie. "
        "No published run prints its exposed communication, so that "
        "column could not be checked.",
        f"MFU is of {best.peak_tflops:,.0f} dense TFLOPS ({format_of(precision)}); TFLOPS by active parameters, "
        f"causal, MTP counted. Parts: {', '.join(plan.RECOMPUTE[1])}.",
        f"Searched {len(found.every):,} layouts; {len(found.fitting):,} fit. A step of the first: "
        + ", ".join(f"{name} {t / best.step_seconds:.0%}" for name, t in shares[:7])
        + ".",
        *(f"- {sentence}" for sentence in plan.why(found)),
    ):
        console.print(line)


def draw(found: plan.Search, path: Path, straggler: float = 0.0) -> None:
    """Breakdown of the best layout's step, weak scaling, and memory."""
    from matplotlib.figure import Figure

    best = found.best
    figure = Figure(figsize=(14, 4.2), layout="constrained")
    step, curve, memory = figure.subplots(1, 3)
    names = [name for name, value in best.parts.items() if value > 0][::-1]
    step.bar_label(step.barh(names, [best.parts[name] for name in names]), fmt="%.2f", padding=2)
    step.set(xlabel="seconds")
    step.margins(x=0.15)
    step.set_title(f"step {best.step_seconds:.2f} s ± {best.calibration.median_abs_error:.0%}")

    counts = sorted(
        {n for n in CURVE if n >= best.layout.gpus // 4 and _divides(found, n)} | {best.layout.gpus}
    )
    points = plan.weak_scaling(found.shape, found.machine, best.layout, counts, straggler=straggler)
    speed = dict(points)
    relative = [value / speed[best.layout.gpus] for value in speed.values()]
    curve.semilogx(counts, relative, marker="o", base=2)
    curve.set_xticks(counts, [f"{n:,}" for n in counts], rotation=45)
    curve.minorticks_off()
    curve.set(xlabel="GPUs, batch per GPU fixed", ylim=(0, max(1.1, 1.05 * max(relative))))
    curve.set_ylabel(f"speed per GPU over that at {best.layout.gpus:,}")
    waits = f"stragglers of {straggler:.0%}" if straggler else "no stragglers, no jitter"
    curve.set_title(f"weak scaling: traffic only, {waits}")

    parts, room = best.memory.parts, found.machine.memory / 1e9
    bars = memory.barh(list(parts)[::-1], [size / 1e9 for size in list(parts.values())[::-1]])
    memory.bar_label(bars, fmt="%.1f", padding=2)
    memory.margins(x=0.15)
    memory.set(xlabel="GB")
    memory.set_title(f"memory {best.memory.total / 1e9:.0f} of {room:.0f} GB ± {best.memory.error:.0%}")
    figure.suptitle(f"{found.shape.name}, {found.machine.name}: {best.layout.describe()}")
    figure.savefig(path)


def _divides(found: plan.Search, gpus: int) -> bool:
    layout = found.best.layout
    scaled = replace(layout, gpus=gpus, global_batch=layout.global_batch * gpus // layout.gpus)
    return gpus >= layout.tp * layout.pp * layout.cp and not scaled.problem(found.shape)
