"""Two published ladders in the model: which cause each step has, what the model makes of it, and what is left over.

1. Megatron-LM's DeepSeek-V3 on 256 GB200: 13 steps, 494 to 970 TFLOPS per GPU, all published.
2. JAX with Transformer Engine, 103 to 1,068 TFLOPS per GPU on 128 GPUs, then 97 % weak scaling to 1,024. Only the ends
   are published; the steps between are the model's, in the order that the story names them.

The sources of the second disagree on the machine: the first version of the page says GB200, a later copy GB300, and
no page gives its layout in full. :data:`DISCREPANCY` says so wherever the ladder is shown. No JAX.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from moe_course.scaling.calibrate import shipped
from moe_course.scaling.costs import Constants, Work, count, seconds
from moe_course.scaling.flops import published_flops
from moe_course.scaling.hardware import machine
from moe_course.scaling.layout import Layout
from moe_course.scaling.plan import COMMUNICATION, weak_scaling
from moe_course.scaling.published import layout_of, shapes, training_runs

DISCREPANCY = (
    "The first version of the page says GB200, a later copy GB300. The model puts the last step at {gb200:,.0f} TFLOPS "
    "per GPU on GB200 and {gb300:,.0f} on GB300; 1,068 was published. The larger of the two misses is {worst:.0%}; nine "
    "of ten of the model's held-out errors are below {p90:.0%}, so the model {verdict} which page is right."
)
FIRST, LAST, SCALED = 103.0, 1068.0, 1036.0
"""Published TFLOPS per GPU: 128 GPUs before and after, and 0.97 x 1,068 at 1,024 GPUs."""


@dataclass(frozen=True)
class Step:
    """One rung."""

    name: str
    cause: str
    """The part of the step time that shrinks most, or why the model has no cause for it."""
    predicted: float
    """TFLOPS per GPU."""
    published: float | None
    """TFLOPS per GPU, None where nobody published it."""
    step_seconds: float = 0.0
    """Predicted step time."""

    @property
    def residual(self) -> float | None:
        """Relative: predicted / published - 1."""
        return None if self.published is None else self.predicted / self.published - 1


# --- Megatron-LM on GB200, every step published -----------------------------------------------------------

MODELLED = {
    0: "the start",
    3: "dispatch by a deduplicating kernel instead of an all-to-all",
    4: "less recompute",
    5: "fewer launches: CUDA graphs",
    10: "dispatch by kernels made for a 72-GPU domain",
}


def megatron_gb200() -> list[Step]:
    """The 13 published steps. Steps whose cause is finer than the model (fused kernels, CPU binding) predict no change.

    Their gain is then missing from every later prediction: the residual's trend is what the model cannot see. The
    constants were fitted on these rows too (among 300), so the residuals are in sample.
    """
    constants, steps = shipped().constants, []
    for run in training_runs():
        if "ladder" not in run.id:
            continue
        work = count(run.shape, layout_of(run), machine("gb200"), year=run.year)
        total = float(sum(seconds(work, constants).values()))
        flops = sum(published_flops(run.shape, run.row["seq_len"]).values())
        number = int(run.id[-2:])
        words = (run.row["notes"] or "").partition(": ")[2].partition(";")[0]
        steps.append(
            Step(
                words,
                MODELLED.get(number, "finer than the model"),
                layout_of(run).tokens_per_gpu / total * flops / 1e12,
                run.tokens_per_second * flops / 1e12,
                total,
            )
        )
    return steps


# --- JAX and Transformer Engine: 103 to 1,068 -------------------------------------------------------------

BASE = Layout(
    gpus=128,
    ep=8,
    fsdp=True,
    seq_len=4096,
    global_batch=768,
    micro_batch=6,
    precision="bf16",
    recompute=("full",),
    dispatcher="all_to_all",
    overlap=False,
    graphs="none",
    real_routing=True,
    capacity_factor=2.0,
)
"""The 128-GPU run: EP 8, 6 sequences per GPU, learned router, receive buffers of twice the balanced need."""


@dataclass(frozen=True)
class Rung:
    """What one step of the story changes."""

    name: str
    layout: dict
    work: Callable[[Work, Constants], Work] = lambda work, constants: work


def _one_stream(work: Work, c: Constants) -> Work:
    """Collectives one after another, none beside compute: all weight and gradient traffic is exposed."""
    return replace(work, dp=work.dp / c.data_parallel)


def _dense_fallback(local: int) -> Callable[[Work, Constants], Work]:
    """A ragged dot lowered to a dense one: every row meets every local expert, at a dense GEMM's rate, balanced."""

    def change(work: Work, c: Constants) -> Work:
        grouped = c.experts * work.expert_rows / (work.expert_rows + c.expert_rows_half) / c.real_routing
        return replace(_one_stream(work, c), experts=work.experts * local * grouped)

    return change


def jax_te_rungs(local: int) -> list[Rung]:
    """The story's steps in order, with the multipliers that the model has for them. ``local``: experts per GPU."""
    return [
        Rung("ragged dot as a dense fallback, one collective stream", {}, _dense_fallback(local)),
        Rung("cuBLAS grouped GEMM", {}, _one_stream),
        Rung("several collective streams", {}),
        Rung("MXFP8 grouped quantisation", {"precision": "mxfp8"}),
        Rung("offload of expert activations, no full recompute", {"recompute": ("moe_act", "layernorm")}),
        Rung("NCCL EP", {"dispatcher": "hierarchical"}),
        Rung("command buffers: partial graphs", {"graphs": "partial"}),
    ]


def jax_te(hardware: str = "gb300") -> list[Step]:
    """The model's path from the dense fallback to NCCL EP; published ends beside it."""
    shape, found = shapes()["deepseek-v3"].without_mtp(), machine(hardware)
    constants, layout = shipped().constants, BASE
    flops = sum(published_flops(shape, BASE.seq_len).values())
    steps: list[Step] = []
    before: dict[str, float] = {}
    rungs = jax_te_rungs(shape.experts // BASE.ep)
    for i, rung in enumerate(rungs):
        layout = replace(layout, **rung.layout)
        work = rung.work(count(shape, layout, found), constants)
        parts = {name: float(value) for name, value in seconds(work, constants).items()}
        total = sum(parts.values())
        published = FIRST if i == 0 else LAST if i == len(rungs) - 1 else None
        steps.append(
            Step(
                rung.name,
                _largest_gain(before, parts),
                layout.tokens_per_gpu / total * flops / 1e12,
                published,
                total,
            )
        )
        before = parts
    return steps


def _largest_gain(before: dict[str, float], after: dict[str, float]) -> str:
    if not before:
        return "the start"
    gain = {name: before[name] - after[name] for name in after}
    part = max(gain, key=gain.get)
    return f"{part}: {before[part]:.2f} s to {after[part]:.2f} s of {sum(before.values()):.2f} s"


PROFILE = 0.84
"""Communication's share of kernel time at the start, as the page says."""


def start_readings(hardware: str = "gb300") -> list[tuple[str, float, float]]:
    """(what the start may have been, TFLOPS per GPU, communication's share): 103 and 84 % were published.

    No reading has both. The dense fallback comes near the speed (and is what XLA makes of ``lax.ragged_dot`` when it
    compiles for Blackwell) but hardly communicates; with grouped GEMMs, and nothing hidden, the links would have to be
    many times slower than microbenchmarks say. The ladder starts with the first and leaves the contradiction open.
    """
    shape, found, c = shapes()["deepseek-v3"].without_mtp(), machine(hardware), shipped().constants
    flops = sum(published_flops(shape, BASE.seq_len).values())
    readings = []
    for name, layout, change in (
        ("dense fallback, EP 8", BASE, _dense_fallback(shape.experts // BASE.ep)),
        ("grouped GEMM, EP 8, nothing hidden", BASE, _one_stream),
        ("grouped GEMM, no EP: FSDP of all experts, nothing hidden", replace(BASE, ep=1), _one_stream),
    ):
        parts = seconds(change(count(shape, layout, found), c), c)
        total = float(sum(parts.values()))
        share = sum(float(parts[part]) for part in COMMUNICATION) / total
        readings.append((name, layout.tokens_per_gpu / total * flops / 1e12, share))
    return readings


def offload_seconds(hardware: str = "gb300") -> float:
    """Seconds to move the experts' hidden rows (gate and up, BF16) of one step to the host, and as many to fetch them.

    Against a step of seconds: small enough to hide, which is what lets the recompute go.
    """
    shape = shapes()["deepseek-v3"].without_mtp()
    rows = BASE.tokens_per_gpu * shape.top_k * shape.moe_layers
    return rows * 2 * shape.d_ff * 2 / machine(hardware).host


def discrepancy() -> str:
    """The machine's doubt, with the model's figures for both."""
    ends = {name: jax_te(name)[-1].predicted for name in ("gb200", "gb300")}
    worst = max(abs(value / LAST - 1) for value in ends.values())
    p90 = shipped().p90_abs_error
    return DISCREPANCY.format(
        **ends, p90=p90, worst=worst, verdict="cannot say" if worst <= p90 else "suggests"
    )


# --- 97 % to 1,024 GPUs, and where it ends ----------------------------------------------------------------

LAST_LAYOUT = replace(
    BASE, precision="mxfp8", recompute=("moe_act", "layernorm"), dispatcher="hierarchical", graphs="partial"
)


def beyond(
    hardware: str = "gb300", gpus=(128, 256, 512, 1024, 2048, 4096, 8192)
) -> list[tuple[int, float, float]]:
    """(GPUs, the model alone, the published loss carried on): speed per GPU over that at 128, 6 sequences per GPU.

    The model's own curve is flat: traffic per GPU hardly grows, and more GPUs divide the optimizer's work further. What
    was lost (3 % in three doublings) is then stragglers, jitter and latency, which a model of bytes does not have;
    carrying it on at 1 % per doubling is an extrapolation of one published number.
    """
    shape = shapes()["deepseek-v3"].without_mtp()
    alone = weak_scaling(shape, machine(hardware), LAST_LAYOUT, list(gpus))
    per_doubling = (SCALED / LAST) ** (1 / math.log2(1024 / 128))
    return [(n, speed, per_doubling ** math.log2(n / gpus[0])) for n, speed in alone]


def end_of_weak_scaling(global_batch: int = 15_360) -> int:
    """GPUs at which DeepSeek-V3's published batch (arXiv 2412.19437, section 4.2) leaves each its 6 sequences.

    Beyond, the batch cannot grow with the GPUs: fewer tokens per GPU, the same weight traffic. That is strong scaling.
    """
    return global_batch // (BASE.global_batch // BASE.gpus)


def strong_scaling(
    hardware: str = "gb300", global_batch: int = 15_360, gpus=(2560, 5120, 7680, 15_360)
) -> list[tuple[int, float]]:
    """(GPUs, speed per GPU over the first) with the batch fixed."""
    shape, found = shapes()["deepseek-v3"].without_mtp(), machine(hardware)
    constants, speeds = shipped().constants, []
    for n in gpus:
        layout = replace(
            LAST_LAYOUT, gpus=n, global_batch=global_batch, micro_batch=max(1, global_batch // n)
        )
        total = float(np.sum(list(seconds(count(shape, layout, found), constants).values())))
        speeds.append(layout.tokens_per_gpu / total)
    return [(n, speed / speeds[0]) for n, speed in zip(gpus, speeds, strict=True)]
