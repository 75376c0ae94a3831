"""Predict a step, search all legal layouts of a GPU count, and say in words why the winner wins. No JAX."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from moe_course.errors import SettingError
from moe_course.scaling.calibrate import Calibration, shipped
from moe_course.scaling.comm import Link
from moe_course.scaling.costs import REFERENCE_YEAR, count, rows_per_expert, seconds, stack
from moe_course.scaling.flops import published_flops
from moe_course.scaling.hardware import Machine
from moe_course.scaling.layout import Layout
from moe_course.scaling.memory import Memory, layout_memory
from moe_course.scaling.shape import ModelShape

COMMUNICATION = ("dispatch, NVLink", "dispatch, network", "tensor parallel", "data parallel")
RECOMPUTE = ((), ("moe_act", "layernorm", "mla_up_proj"), ("full",))


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
    calibration: Calibration | None = None,
) -> list[Prediction]:
    """A :class:`Prediction` for each layout. ``year``: how new the software is, as 2026.5."""
    layouts = [layouts] if isinstance(layouts, Layout) else list(layouts)
    calibration = calibration or shipped()
    if not layouts:
        return []
    work = stack([count(shape, layout, machine, year=year) for layout in layouts])
    parts = {
        name: np.broadcast_to(t, len(layouts)) for name, t in seconds(work, calibration.constants).items()
    }
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


def legal_layouts(
    shape: ModelShape,
    machine: Machine,
    gpus: int,
    *,
    seq_len: int = 4096,
    global_batch: int | None = None,
    precision: str = "mxfp8",
    real_routing: bool = True,
) -> list[Layout]:
    """Every layout of ``gpus`` GPUs that the model allows, with the choices of today's recipes."""
    base = Layout(
        gpus,
        seq_len=seq_len,
        global_batch=global_batch or 16 * gpus,
        precision=precision,
        dispatcher="hierarchical",
        overlap=True,
        graphs="full",
        real_routing=real_routing and shape.moe_layers > 0,
    )
    twos = [2**i for i in range(11)]
    found = []
    for ep, tp, pp, vpp, cp, micro, again in itertools.product(
        [n for n in twos if n <= min(shape.experts, gpus)] if shape.moe_layers else [1],
        [n for n in twos if n <= min(8, machine.domain)],
        [n for n in twos if n <= 16],
        (1, 2, 4, 8),
        [1] if seq_len <= 8192 else [1, 2, 4, 8, 16],
        (1, 2, 4, 8),
        RECOMPUTE,
    ):
        if vpp > 1 and pp == 1:
            continue
        layout = replace(base, ep=ep, tp=tp, pp=pp, vpp=vpp, cp=cp, micro_batch=micro, recompute=again)
        if not layout.problem(shape):
            found.append(layout)
    return found


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


def search(shape: ModelShape, machine: Machine, gpus: int, **options) -> Search:
    """Predict every legal layout (:func:`legal_layouts`'s options). :class:`SettingError` if none fits in memory."""
    year = options.pop("year", REFERENCE_YEAR)
    layouts = legal_layouts(shape, machine, gpus, **options)
    if not layouts:
        raise SettingError(
            f"no layout of {shape.name} over {gpus} GPUs is legal with this batch. Use --batch {16 * gpus}."
        )
    every = sorted(predict(shape, layouts, machine, year=year), key=lambda p: -p.tokens_per_second)
    fitting = [p for p in every if p.memory.fits(machine.memory)]
    if not fitting:
        least = min(p.memory.total for p in every) / 1e9
        raise SettingError(
            f"{shape.name} does not fit {gpus} x {machine.name}: the leanest layout needs {least:.0f} GB per GPU "
            f"and 10 GB of reserve, of {machine.memory / 1e9:.0f}. Use --gpus {2 * gpus} or more."
        )
    return Search(shape, machine, every, fitting)


QUESTIONS = {
    "EP": ("ep",),
    "PP": ("pp", "vpp"),
    "TP": ("tp",),
    "CP": ("cp",),
    "Micro-batch": ("micro_batch",),
    "Recompute": ("recompute",),
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
        label = f"{name} {_words(chosen)}"
        if others[0].step_seconds < best.step_seconds:
            faster = others[0]
            said.append(
                f"{label}, not {_words(getattr(faster.layout, fields[0]))}: that would be "
                f"{faster.tokens_per_second / best.tokens_per_second - 1:.1%} faster but needs "
                f"{faster.memory.total / 1e9:.0f} GB of {found.machine.memory / 1e9:.0f}, with 10 GB kept free."
            )
        if fitting:
            other = fitting[0]
            said.append(
                f"{label}, not {_words(getattr(other.layout, fields[0]))}: {_difference(best, other)}."
            )
        elif others[0].step_seconds >= best.step_seconds:
            said.append(f"{label}: every other choice alone is slower and does not fit.")
    if found.shape.moe_layers:
        said.append(_expert_sentence(found, best))
    return said


def _words(choice) -> str:
    return str(choice) if isinstance(choice, int) else "of " + ", ".join(choice) if choice else "of nothing"


def _difference(best: Prediction, other: Prediction) -> str:
    """How much slower the other is, and the part of the step that grows most."""
    slower = other.step_seconds / best.step_seconds - 1
    growth = {name: (other.parts[name] - best.parts[name]) / best.step_seconds for name in best.parts}
    worst = max(growth, key=growth.get)
    if slower < 0.01:
        return "the two are within 1 %, less than the model can tell apart"
    return f"that is {slower:.0%} slower, mostly {worst} (+{growth[worst]:.0%} of the step)"


def _expert_sentence(found: Search, best: Prediction) -> str:
    p, domain = best.layout, found.machine.domain
    where = (
        "inside one NVLink domain"
        if p.ep * p.etp <= domain
        else f"across {-(-p.ep * p.etp // domain)} domains"
    )
    rows = rows_per_expert(found.shape, p)
    return f"A grouped GEMM sees {rows:.0f} rows per expert, and dispatch stays {where} of {domain} GPUs."


def weak_scaling(
    shape: ModelShape, machine: Machine, layout: Layout, gpus: Iterable[int], *, straggler: float = 0.0
) -> list[tuple[int, float]]:
    """(GPUs, tokens/s per GPU over that of the smallest count) with the batch per GPU fixed: only DP grows.

    ``straggler``: relative standard deviation of one GPU's step time. A synchronous step waits for the slowest, whose
    excess grows as sqrt(2 ln n) for normal times.
    """
    gpus = list(gpus)
    per_gpu = layout.global_batch / layout.gpus
    layouts = [replace(layout, gpus=n, global_batch=int(per_gpu * n)) for n in gpus]
    for scaled in layouts:
        scaled.check(shape)
    speeds = []
    for prediction in predict(shape, layouts, machine):
        n = prediction.layout.gpus
        wait = 1 + straggler * np.sqrt(2 * np.log(n)) if n > 1 else 1.0
        speeds.append(prediction.tokens_per_second / wait)
    return [(n, float(speed / speeds[0])) for n, speed in zip(gpus, speeds, strict=True)]


def break_even(link: Link) -> float:
    """Message bytes at which start-up and transfer take equally long: below it, fewer messages matter."""
    return link.alpha * link.beta
