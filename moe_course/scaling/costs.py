"""What one step costs one GPU, before any constant: FLOPs, bytes and messages, and seconds once constants are given.

The closed form of a step, all terms per GPU:

    seconds = (GEMMs + experts + attention core + elementwise + exposed dispatch + launches) x (1 + bubble)
              + exposed tensor-parallel traffic + exposed data-parallel traffic + optimizer

:class:`Work` holds the counted part, :class:`Constants` the few numbers that only measurements give (``calibrate``
fits them). Everything in ``Work`` may be a number or an array over runs. No JAX.
"""

import math
from dataclasses import dataclass, fields

import numpy as np

from moe_course.scaling.comm import dispatch_bytes, links, wire_bytes
from moe_course.scaling.hardware import Machine, format_of
from moe_course.scaling.layout import Layout
from moe_course.scaling.memory import stage_parameters
from moe_course.scaling.shape import ModelShape

REFERENCE_YEAR = 2026.5
"""Software speed is relative to this date."""


KERNELS = ("dense GEMMs", "expert GEMMs", "attention core")
"""Parts that run near a hardware limit; the rest is overhead that software removes."""


DEEPEP_ON_NVL72 = 480 / 258
"""DeepEP's first kernels were made for 8-GPU NVLink domains. On GB200 at EP32 they moved 400 (dispatch) and 190 GB/s
(combine), 258 in the mean, where HybridEP moves about 480 (Megatron-LM's GB200 discussion; HybridEP's README)."""
DENSE_LAUNCHES = 0.3
"""Kernels of a dense or attention-only layer over those of an MoE layer (router, permute, grouped GEMMs, combine)."""


@dataclass(frozen=True)
class Constants:
    """What a calibration fits. Defaults are priors: what vendor pages and microbenchmarks suggest."""

    gemm_bf16: float = 0.65
    """Fraction of dense peak that large BF16 GEMMs reach in training."""
    gemm_fp8: float = 0.50
    gemm_fp4: float = 0.40
    experts: float = 0.75
    """A grouped GEMM's rate over a dense one's, with many rows per expert."""
    expert_rows_half: float = 300.0
    """Rows per expert at which a grouped GEMM runs at half of its best rate."""
    core: float = 0.40
    """Fraction of BF16 peak that the attention core reaches, causal count."""
    elementwise: float = 60.0
    """Passes over the residual stream per layer, forward and backward, that no GEMM hides."""
    routed_elementwise: float = 12.0
    """The same over the rows of the experts: permute, activation, combine."""
    quantise: float = 8.0
    """Further passes when GEMMs take low precision."""
    dispatch_nvlink: float = 1.2
    """Exposed time of dispatch and combine inside a domain over line-rate time, without overlap."""
    dispatch_nic: float = 1.2
    dispatch_hidden: float = 0.5
    """Fraction of dispatch that overlap with another micro-batch hides."""
    slow_dispatcher: float = 1.6
    """Dispatch time of a plain all-to-all over a deduplicating one's (beyond its bytes)."""
    tensor_parallel: float = 0.8
    """Exposed fraction of tensor-parallel traffic."""
    data_parallel: float = 0.3
    """Exposed fraction of gradient and weight traffic."""
    launch_us: float = 500.0
    """Host time per MoE layer and micro-batch, both passes, that the GPU waits for: no CUDA graphs."""
    graph_launch: float = 0.4
    """The part of it that is left with partial graphs; half way where a row does not say."""
    full_graph_launch: float = 0.15
    """The part of it that is left with one graph per step."""
    static_launch: float = 0.3
    """The part of it that is left when capacity limits give static shapes: the host never waits for sizes."""
    blackwell: float = 1.0
    """Speed of Blackwell's compute against the fractions above, which are then Hopper's."""
    ultra: float = 1.12
    """Speed of B300 and GB300 against B200 and GB200: more power, at the same peaks."""
    software_per_year: float = 1.15
    """Speed of GEMMs and attention gained in a year of releases."""
    overhead_per_year: float = 1.8
    """The same for everything else: fusion, dispatch, launches."""
    biased_experts: float = 4.0
    """Elementwise passes of GPT-OSS experts over plain ones, without a full graph, whose kernels fuse them."""
    fused: float = 0.5
    """Elementwise passes and quantisation left in steps that are one graph: it needs fused, device-sized kernels."""
    other_core: float = 0.7
    """Speed of the attention core in other stacks, which had older kernels."""
    other_stack: float = 0.9
    """Speed of stacks other than Megatron's, in the same year."""
    real_routing: float = 1.25
    """Time of experts and dispatch under a learned router's balance over forced balance, where nobody gives a skew."""

    def __post_init__(self):
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"{field.name} must be above 0")


@dataclass(frozen=True)
class Work:
    """One step of one GPU, counted. FLOPs are divided by peak already: seconds at 100 %."""

    gemm: float
    gemm_head: float
    """The head stays in BF16."""
    experts: float
    expert_rows: float
    """Rows per expert in one call of the grouped GEMM."""
    core: float
    stream: float
    """Seconds for one pass of all layers' residual streams at HBM speed."""
    routed: float
    nvlink: float
    """Seconds of dispatch and combine, both passes, at line rate."""
    nic: float
    tp: float
    dp: float
    optimizer: float
    launches: float
    """Layers times micro-batches."""
    bubble: float
    low: float
    fp4: float
    full_graph: float
    some_graph: float
    static: float
    overlap: float
    plain_dispatch: float
    real: float
    skew: float
    """Rows of the busiest rank over the mean; 0: not given."""
    blackwell: float
    ultra: float
    years: float
    other_stack: float
    biased: float


def count(
    shape: ModelShape,
    layout: Layout,
    machine: Machine,
    *,
    year: float = REFERENCE_YEAR,
    other_stack: bool = False,
) -> Work:
    """The work of one step. ``year``: date of the software."""
    s, p = shape, layout
    tokens, fmt = p.tokens_per_gpu, format_of(p.precision)
    peak, bf16 = machine.peak(p.precision) * 1e12, machine.peak("bf16") * 1e12
    moe, attention = s.moe_layers + s.mtp, s.attention_layers + s.mtp
    dense_weights = attention * s.attention_weights + s.dense_layers * 3 * s.d_model * s.d_ff_dense
    dense_weights += moe * s.shared_weights + s.other_weights + s.mtp * 2 * s.d_model**2
    again = _recomputed(s, p)
    row_bytes = s.d_model * (
        2 if fmt == "bf16" or p.dispatcher == "all_to_all" else 1.5
    )  # FP8 out, BF16 back
    nvlink, nic = dispatch_bytes(s, p, machine.domain, row_bytes) if s.moe_layers and p.ep > 1 else (0.0, 0.0)
    ways = 4 + 2 * again["dispatch"]
    inner, outer = links(machine)
    return Work(
        gemm=6 * tokens * dense_weights * (1 + again["dense"]) / peak,
        gemm_head=6 * tokens * (1 + s.mtp) * s.d_model * s.vocab / bf16,
        experts=6 * tokens * moe * s.top_k * s.expert_weights * (1 + again["experts"]) / peak,
        expert_rows=max(1.0, p.micro_tokens * p.ep * p.etp * s.top_k / s.experts) if s.moe_layers else 1e9,
        core=6 * tokens * attention * s.core_per_token(p.seq_len) * (1 + again["core"]) / bf16,
        stream=2 * tokens * (s.layers + s.mtp) * s.d_model / machine.hbm,
        routed=2 * tokens * moe * s.top_k * (s.d_model + s.d_ff) / machine.hbm,
        nvlink=ways
        * tokens
        * moe
        * nvlink
        / inner.beta
        * (DEEPEP_ON_NVL72 if _deepep_on_nvl72(p, machine) else 1),
        nic=ways * tokens * moe * nic / outer.beta,
        tp=_tensor_parallel_seconds(s, p, inner.beta) + _context_parallel_seconds(s, p, machine),
        dp=_data_parallel_seconds(s, p, machine),
        optimizer=24 * s.parameters / p.gpus / machine.hbm,
        launches=p.micro_batches * (moe + DENSE_LAUNCHES * (s.layers - s.moe_layers)) / p.pp,
        bubble=(p.pp - 1) / (p.vpp * p.micro_batches),
        low=float(fmt != "bf16"),
        fp4=float(fmt == "fp4"),
        full_graph=float(p.graphs == "full"),
        some_graph={"partial": 1.0, None: 0.5}.get(p.graphs, 0.0),
        static=float(p.static_shapes),
        overlap=float(bool(p.overlap)) if p.overlap is not None else 0.5,
        plain_dispatch=float(p.dispatcher == "all_to_all"),
        real=float(p.real_routing and s.moe_layers > 0),
        skew=float(p.skew or 0) if s.moe_layers else 0.0,
        blackwell=float("B200" in machine.name or "B300" in machine.name),
        ultra=float("B300" in machine.name),
        years=year - REFERENCE_YEAR,
        other_stack=float(other_stack),
        biased=float(s.biased_experts),
    )


def _deepep_on_nvl72(p: Layout, machine: Machine) -> bool:
    return p.dispatcher == "deepep" and machine.domain > 8


def _recomputed(s: ModelShape, p: Layout) -> dict[str, float]:
    """Extra forward work as a fraction of forward and backward, by part."""
    parts = " ".join(p.recompute)
    third, moe = 1 / 3, "moe" in p.recompute
    if "full" in parts:
        return {"dense": third, "experts": third, "core": third, "dispatch": 1.0}
    dense = third * 0.5 if "selective" in parts else 0.0
    if "mla_up_proj" in parts or "MLA" in parts:
        dense += 0.05
    if "mlp" in parts and s.dense_layers == s.layers:
        dense += 0.25
    core = third if "core_attn" in parts or "selective" in parts else 0.0
    return {"dense": dense, "experts": third * moe, "core": core, "dispatch": float(moe)}


def _tensor_parallel_seconds(s: ModelShape, p: Layout, bandwidth: float) -> float:
    """Gathers and scatters of sequence-parallel tensor parallelism: 4 per block and pass (arXiv 2205.05198)."""
    if p.tp == 1:
        return 0.0
    blocks = (
        (s.attention_layers + s.mtp) + s.dense_layers + (s.moe_layers if p.etp > 1 or s.d_ff_shared else 0)
    )
    size = p.tokens_per_gpu * p.tp * s.d_model * 2
    return 5 * blocks * wire_bytes("all-gather", size, p.tp) / bandwidth


def _context_parallel_seconds(s: ModelShape, p: Layout, machine: Machine) -> float:
    """Keys and values around the ring, forward, and with their gradients backward."""
    if p.cp == 1:
        return 0.0
    inner, outer = links(machine)
    size = 3 * 2 * p.tokens_per_gpu * (p.cp - 1) * s.kv_width * s.attention_layers
    return size / (inner if p.cp * p.tp <= machine.domain else outer).beta


def _data_parallel_seconds(s: ModelShape, p: Layout, machine: Machine) -> float:
    """Gradients scattered in FP32 and weights gathered in BF16 once per step; FSDP gathers twice per micro-batch."""
    inner, outer = links(machine)
    dense, routed = stage_parameters(s, p)
    seconds = 0.0
    for parameters, copies, apart in ((dense, p.dp * p.cp, p.tp), (routed, p.expert_dp, p.ep * p.etp)):
        size = parameters * (2 * 2 * p.micro_batches + 4 * p.micro_batches if p.fsdp else 2 + 4)
        # Copies that share an NVLink domain scatter there first; a NIC then carries its GPU's share, meanwhile.
        local = min(copies, max(1, machine.domain // apart))
        within = wire_bytes("all-gather", size, local) / inner.beta
        between = wire_bytes("all-gather", size / local, math.ceil(copies / local)) / outer.beta
        seconds += max(within, between)
    return seconds


def seconds(work: Work, c: Constants) -> dict[str, float | np.ndarray]:
    """Seconds of a step by part; their sum is the step. Exposed time only: what is hidden costs nothing here."""
    w = work
    rate = np.where(w.fp4 > 0, c.gemm_fp4, np.where(w.low > 0, c.gemm_fp8, c.gemm_bf16))
    chip = np.where(w.blackwell > 0, c.blackwell, 1.0) * np.where(w.ultra > 0, c.ultra, 1.0)
    real = np.where(w.skew > 0, w.skew, 1 + (c.real_routing - 1) * w.real)
    expert_rate = rate * c.experts * w.expert_rows / (w.expert_rows + c.expert_rows_half)
    launch = np.where(w.full_graph > 0, c.full_graph_launch, 1 + (c.graph_launch - 1) * w.some_graph)
    launch = launch * np.where(w.static > 0, c.static_launch, 1.0)
    exposed = (1 - min(c.dispatch_hidden, 0.95) * w.overlap) * (
        1 + (c.slow_dispatcher - 1) * w.plain_dispatch
    )
    biased = 1 + (c.biased_experts - 1) * w.biased * (1 - w.full_graph)
    fused = 1 + (c.fused - 1) * w.full_graph
    newer, other = c.software_per_year ** (-w.years), np.where(w.other_stack > 0, c.other_stack, 1.0)
    rest = c.overhead_per_year ** (-w.years)
    inner = {
        "dense GEMMs": (w.gemm / rate + w.gemm_head / c.gemm_bf16) / chip,
        "expert GEMMs": w.experts / (expert_rate * chip) * real,
        "attention core": w.core / (c.core * chip * np.where(w.other_stack > 0, c.other_core, 1.0)),
        "elementwise": (c.elementwise * w.stream + c.routed_elementwise * w.routed * biased) * fused,
        "quantisation": c.quantise * (w.stream + w.routed) * w.low * fused,
        "dispatch, NVLink": c.dispatch_nvlink * w.nvlink * exposed * real,
        "dispatch, network": c.dispatch_nic * w.nic * exposed * real,
        "launch gaps": c.launch_us * 1e-6 * launch * w.launches,
    }
    outer = {
        "tensor parallel": c.tensor_parallel * w.tp,
        "data parallel": c.data_parallel * w.dp,
        "optimizer": w.optimizer,
    }
    inner = {name: value * (newer if name in KERNELS else rest) for name, value in inner.items()}
    busy = sum(inner.values())
    parts = {**inner, "pipeline bubble": busy * w.bubble, **outer}
    return {name: value / other for name, value in parts.items()}


def stack(works: list[Work]) -> Work:
    """Many runs as one ``Work`` of arrays."""
    return Work(*(np.array([getattr(w, f.name) for w in works], float) for f in fields(Work)))


def rows_per_expert(shape: ModelShape, layout: Layout) -> float:
    """Rows of one expert in one grouped GEMM, balanced."""
    return layout.micro_tokens * layout.ep * layout.etp * shape.top_k / shape.experts
