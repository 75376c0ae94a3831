"""Predict a step, search all legal layouts of a GPU count, and say in words why the winner wins. No JAX."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from moe_course.errors import SettingError
from moe_course.scaling.calibrate import Calibration, shipped
from moe_course.scaling.comm import Link
from moe_course.scaling.costs import REFERENCE_YEAR, count, rows_per_expert, seconds, stack
from moe_course.scaling.flops import published_flops
from moe_course.scaling.hardware import Machine
from moe_course.scaling.layout import Layout
from moe_course.scaling.memory import RESERVE, Memory, layout_memory
from moe_course.scaling.shape import ModelShape

COMMUNICATION = ("dispatch, NVLink", "dispatch, network", "tensor parallel", "data parallel")
RECOMPUTE = ((), ("moe_act", "layernorm", "mla_up_proj"), ("full",))
SIZES = ("ep", "tp", "pp", "cp")
"""Parallel sizes that a question may fix."""
CONTEXT_TOKENS = 4096
"""Context parallelism is searched while it leaves a GPU this many tokens of a sequence."""


@dataclass(frozen=True)
class Prediction:
    """One layout's step and memory, with how far such predictions were off."""

    layout: Layout
    parts: dict[str, float]
    """Seconds of one step, by part."""
    memory: Memory
    flops_per_token: float
    peak_tflops: float
    calibration: Calibration

    @property
    def step_seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        """Per GPU."""
        return self.layout.tokens_per_gpu / self.step_seconds

    @property
    def tflops(self) -> float:
        """Model TFLOP/s per GPU: causal, MTP counted, no router (Megatron's convention)."""
        return self.tokens_per_second * self.flops_per_token / 1e12

    @property
    def mfu(self) -> float:
        """Of the dense peak of the GEMMs' format."""
        return self.tflops / self.peak_tflops

    @property
    def communication_share(self) -> float:
        """Exposed communication over the step."""
        return sum(self.parts[name] for name in COMMUNICATION) / self.step_seconds

    def interval(self) -> tuple[float, float]:
        """Tokens per second per GPU that nine of ten published runs would lie between."""
        error = self.calibration.p90_abs_error
        return self.tokens_per_second / (1 + error), self.tokens_per_second * (1 + error)


def predict(
    shape: ModelShape,
    layouts: Layout | Iterable[Layout],
    machine: Machine,
    *,
    year: float = REFERENCE_YEAR,
    straggler: float = 0.0,
    calibration: Calibration | None = None,
) -> list[Prediction]:
    """A :class:`Prediction` for each layout. ``year``: how new the software is, as 2026.5.

    ``straggler``: relative standard deviation of one GPU's step time (:func:`straggler_wait`). Published runs have
    their own in every constant: this is what a worse cluster adds.
    """
    layouts = [layouts] if isinstance(layouts, Layout) else list(layouts)
    calibration = calibration or shipped()
    if not layouts:
        return []
    work = stack([count(shape, layout, machine, year=year) for layout in layouts])
    parts = {
        name: np.broadcast_to(t, len(layouts)) for name, t in seconds(work, calibration.constants).items()
    }
    if straggler:
        lost = np.array([straggler_wait(straggler, layout.gpus) - 1 for layout in layouts])
        parts["stragglers"] = sum(parts.values()) * lost
    flops = {p.seq_len: sum(published_flops(shape, p.seq_len).values()) for p in layouts}
    return [
        Prediction(
            layout,
            {name: float(times[i]) for name, times in parts.items()},
            layout_memory(shape, layout),
            flops[layout.seq_len],
            machine.peak(layout.precision),
            calibration,
        )
        for i, layout in enumerate(layouts)
    ]


def straggler_wait(straggler: float, gpus: int) -> float:
    """Step time over the mean GPU's: a synchronous step waits for the slowest of n.

    Of n normal times, the largest lies about sqrt(2 ln n) standard deviations above the mean, a little less in fact.
    """
    return 1 + straggler * math.sqrt(2 * math.log(gpus))


def legal_layouts(
    shape: ModelShape,
    machine: Machine,
    gpus: int,
    *,
    seq_len: int = 4096,
    global_batch: int | None = None,
    precision: str = "mxfp8",
    real_routing: bool = True,
    skew: float | None = None,
    sizes: Mapping[str, int] | None = None,
) -> list[Layout]:
    """Every layout of ``gpus`` GPUs that the model allows, with the choices of today's recipes.

    EP up to the experts; TP to 8, inside the NVLink domain; PP to 16 with 1, 2, 4 or 8 chunks; CP by
    :data:`CONTEXT_TOKENS`; 1 to 8 sequences per micro-batch; three ways to recompute; ZeRO-1, or FSDP where there is no
    pipeline. ``sizes`` fixes some of :data:`SIZES`; ``global_batch`` defaults to 16 sequences per GPU.
    """
    base = Layout(
        gpus,
        seq_len=seq_len,
        global_batch=global_batch or 16 * gpus,
        precision=precision,
        dispatcher="hierarchical",
        overlap=True,
        graphs="full",
        real_routing=real_routing and shape.moe_layers > 0,
        skew=skew,
    )
    return [
        replace(layout, recompute=again)
        for layout in _candidates(base, shape, machine, sizes or {})
        if not layout.problem(shape)
        for again in RECOMPUTE
    ]


def _candidates(
    base: Layout, shape: ModelShape, machine: Machine, sizes: Mapping[str, int]
) -> Iterator[Layout]:
    """Layouts to look at, legal or not."""
    most = {
        "ep": shape.experts if shape.moe_layers else 1,
        "tp": min(8, machine.domain),
        "pp": 16,
        "cp": min(16, max(1, base.seq_len // CONTEXT_TOKENS)),
    }
    choices = [
        [sizes[name]] if name in sizes else [n for n in range(1, most[name] + 1) if base.gpus % n == 0]
        for name in SIZES
    ]
    for ep, tp, pp, cp in itertools.product(*choices):
        for vpp, fsdp in (
            [(1, False), (1, True)] if pp == 1 else [(1, False), (2, False), (4, False), (8, False)]
        ):
            for micro in (1, 2, 4, 8):
                yield replace(base, ep=ep, tp=tp, pp=pp, cp=cp, vpp=vpp, fsdp=fsdp, micro_batch=micro)


@dataclass(frozen=True)
class Search:
    """All predictions of one question, fastest first, and those that fit."""

    shape: ModelShape
    machine: Machine
    every: list[Prediction]
    fitting: list[Prediction]

    @property
    def best(self) -> Prediction:
        return self.fitting[0]

    def pareto(self) -> list[Prediction]:
        """Those that nothing beats in both speed and memory, fastest first."""
        front: list[Prediction] = []
        for prediction in self.every:
            if not front or prediction.memory.total < front[-1].memory.total:
                front.append(prediction)
        return front


def search(
    shape: ModelShape,
    machine: Machine,
    gpus: int,
    *,
    year: float = REFERENCE_YEAR,
    straggler: float = 0.0,
    **options,
) -> Search:
    """Predict every legal layout (:func:`legal_layouts`'s options). :class:`SettingError` if none fits in memory."""
    layouts = legal_layouts(shape, machine, gpus, **options)
    sizes = options.get("sizes") or {}
    flags = " ".join(f"--{name} {size}" for name, size in sizes.items())
    if not layouts:
        remedy = f"Leave {flags} out, or" if flags else "Perhaps"
        raise SettingError(
            f"no layout of {shape.name} over {gpus} GPUs is legal: {_first_problem(shape, machine, gpus, **options)}. "
            f"{remedy} use --batch {16 * gpus}."
        )
    found = predict(shape, layouts, machine, year=year, straggler=straggler)
    every = sorted(found, key=lambda p: -p.tokens_per_second)
    fitting = [p for p in every if p.memory.fits(machine.memory)]
    if not fitting:
        least = min(p.memory.total for p in every) / 1e9
        raise SettingError(
            f"{shape.name} does not fit {gpus} x {machine.name}{flags and f' with {flags}'}: the leanest layout needs "
            f"{least:.0f} GB per GPU and {RESERVE / 1e9:.0f} GB of reserve, of {machine.memory / 1e9:.0f}. "
            f"{_more_gpus(shape, machine, gpus, **options)}{flags and ', or leave a size out'}."
        )
    return Search(shape, machine, every, fitting)


def _first_problem(shape: ModelShape, machine: Machine, gpus: int, sizes=None, **options) -> str:
    """Why the simplest candidate is illegal, where all are."""
    batch = options.get("global_batch") or 16 * gpus
    base = Layout(gpus, seq_len=options.get("seq_len", 4096), global_batch=batch)
    return next(_candidates(base, shape, machine, sizes or {})).problem(shape)


def _more_gpus(shape: ModelShape, machine: Machine, gpus: int, global_batch=None, **options) -> str:
    """The first doubling at which some layout fits, each GPU with its batch."""
    for times in (2, 4, 8, 16, 32, 64, 128, 256):
        batch = global_batch and times * global_batch
        layouts = legal_layouts(shape, machine, times * gpus, global_batch=batch, **options)
        if any(layout_memory(shape, layout).fits(machine.memory) for layout in layouts):
            return f"Use --gpus {times * gpus} or more"
    return "Use a machine with more memory, or a smaller model"


QUESTIONS = {
    "EP": ("ep",),
    "PP": ("pp", "vpp"),
    "TP": ("tp",),
    "CP": ("cp",),
    "Micro-batch": ("micro_batch",),
    "Recompute": ("recompute",),
    "FSDP": ("fsdp",),
}
"""Choices and the fields that change with them."""


def why(found: Search) -> list[str]:
    """One sentence per choice: the best layout that differs in this choice alone, and what it would have cost."""
    best, said = found.best, []
    for name, fields in QUESTIONS.items():
        chosen = getattr(best.layout, fields[0])
        rest = replace(best.layout, **dict.fromkeys(fields))
        others = [
            p
            for p in found.every
            if getattr(p.layout, fields[0]) != chosen and replace(p.layout, **dict.fromkeys(fields)) == rest
        ]
        if not others:
            continue
        fitting = [p for p in others if p.memory.fits(found.machine.memory)]
        label = f"{name} {_words(chosen)}, not"
        if others[0].step_seconds < best.step_seconds:
            faster = others[0]
            said.append(
                f"{label} {_words(getattr(faster.layout, fields[0]))}: "
                f"{faster.tokens_per_second / best.tokens_per_second - 1:.1%} faster, but it needs "
                f"{faster.memory.total / 1e9:.0f} GB of {found.machine.memory / 1e9:.0f}, with "
                f"{RESERVE / 1e9:.0f} GB kept free."
            )
        if fitting:
            other = fitting[0]
            said.append(f"{label} {_words(getattr(other.layout, fields[0]))}: {_difference(best, other)}.")
        elif others[0].step_seconds >= best.step_seconds:
            said.append(f"{label} another: every other choice alone is slower and does not fit.")
    if found.shape.moe_layers:
        said.append(_expert_sentence(found, best))
    doubt = best.calibration.ratio_median_abs_error
    return [
        *said,
        f"A tie is a difference below {doubt:.0%}, the median error of such ratios on published runs.",
    ]


def _words(choice) -> str:
    if isinstance(choice, bool):
        return "on" if choice else "off"
    return str(choice) if isinstance(choice, int) else "of " + ", ".join(choice) if choice else "of nothing"


def _difference(best: Prediction, other: Prediction) -> str:
    """How much slower the other is, and the part of the step that grows most."""
    slower = other.step_seconds / best.step_seconds - 1
    growth = {name: (other.parts[name] - best.parts[name]) / best.step_seconds for name in best.parts}
    worst = max(growth, key=growth.get)
    tie = ", a tie" if slower <= best.calibration.ratio_median_abs_error else ""
    return f"{slower:.1%} slower{tie}, mostly {worst} (+{growth[worst]:.1%} of the step)"


def _expert_sentence(found: Search, best: Prediction) -> str:
    p, domain = best.layout, found.machine.domain
    where = (
        "stays inside one NVLink domain"
        if p.ep * p.etp <= domain
        else f"crosses {-(-p.ep * p.etp // domain)} domains"
    )
    rows = rows_per_expert(found.shape, p)
    return f"A grouped GEMM sees {rows:.0f} rows per expert, and dispatch {where} of {domain} GPUs."


def weak_scaling(
    shape: ModelShape, machine: Machine, layout: Layout, gpus: Iterable[int], *, straggler: float = 0.0
) -> list[tuple[int, float]]:
    """(GPUs, tokens/s per GPU over that of the smallest count) with the batch per GPU fixed: only DP grows."""
    gpus = list(gpus)
    per_gpu = layout.global_batch / layout.gpus
    layouts = [replace(layout, gpus=n, global_batch=int(per_gpu * n)) for n in gpus]
    for scaled in layouts:
        scaled.check(shape)
    speeds = [p.tokens_per_second for p in predict(shape, layouts, machine, straggler=straggler)]
    return [(n, speed / speeds[0]) for n, speed in zip(gpus, speeds, strict=True)]


def break_even(link: Link) -> float:
    """Message bytes at which start-up and transfer take equally long: below it, fewer messages matter."""
    return link.alpha * link.beta
