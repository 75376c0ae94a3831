"""Memory of one GPU: state by dtype and ZeRO stage, activations by recompute policy, buffers by capacity. No JAX.

Two models share the parts. :func:`compiled_memory` is a step of this course's kind (FSDP and EP, one program), checked
against XLA's own plan; :func:`layout_memory` adds pipeline, tensor and context parallelism for the planner.
"""

import functools
import json
from dataclasses import dataclass, field
from importlib import resources
from statistics import median

from moe_course.errors import SettingError
from moe_course.scaling.hardware import format_of
from moe_course.scaling.layout import Layout
from moe_course.scaling.shape import ModelShape

BF16, FP32 = 2, 4
ROW_WIDTHS = (5, 6)
"""Live copies of a received row in one MoE layer's forward and backward, in units of (D, F). Fitted to the compiled
figures: 5 D + 6 F is the rows, gate and up, hidden and their gradients, less what XLA reuses."""
RESERVE = 10e9
"""Bytes outside of any model: CUDA context, NCCL buffers, workspaces, fragmentation (a rule of thumb, 10 to 15 GB)."""


@dataclass(frozen=True)
class StateDtypes:
    """Bytes per parameter of everything that lives from step to step, and which of it data parallelism shards."""

    weights: int = BF16
    gradients: int = FP32
    master: int = FP32
    moments: int = 2 * BF16
    zero: int = 1
    """ZeRO stage (arXiv 1910.02054): 0 nothing sharded, 1 optimizer, 2 gradients too, 3 weights too."""

    def bytes_per_parameter(self, shards: int) -> float:
        """On one GPU of ``shards`` data-parallel ones."""
        stages = {
            "optimizer": self.master + self.moments,
            "gradients": self.gradients,
            "weights": self.weights,
        }
        order = {"optimizer": 1, "gradients": 2, "weights": 3}
        return sum(size / (shards if self.zero >= order[name] else 1) for name, size in stages.items())


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU by part, the largest pipeline stage."""

    parts: dict[str, float]
    error: float
    """Median relative error of the peak where this could be checked."""
    notes: tuple[str, ...] = field(default=())

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def fits(self, capacity: float) -> bool:
        """With :data:`RESERVE` left free."""
        return self.total + RESERVE <= capacity


# --- a step compiled by XLA -------------------------------------------------------------------------------


def compiled_memory(
    shape: ModelShape,
    *,
    gpus: int,
    ep: int,
    tokens: int = 4096,
    capacity: float | None = 1.25,
    remat: str = "full",
    accum: int = 1,
    offload: str = "",
) -> Memory:
    """Peak of one GPU: state sharded over all GPUs, weights gathered layer by layer, gradients in FP32.

    ``capacity``: receive rows over the balanced need, None for the worst case. ``remat``: ``full``, ``none``, or
    names to keep joined by ``+``. ``offload``: ``activations`` or ``moments``.
    """
    return Memory(_compiled_parts(shape, gpus, ep, tokens, capacity, remat, accum, offload), compiled_error())


def _compiled_parts(s: ModelShape, gpus, ep, tokens, capacity, remat, accum, offload) -> dict[str, float]:
    d, fsdp = s.d_model, gpus // ep
    local = s.experts // ep
    balanced = tokens * s.top_k
    rows = ep * tokens * min(s.top_k, local) if capacity is None else capacity * balanced
    moments = 2 * BF16 * s.parameters / gpus
    state = FP32 * s.parameters / gpus + (0 if offload == "moments" else moments)
    per_layer_dense = (s.dense_parameters - 2 * d * s.vocab) / s.layers
    experts = local * s.expert_weights
    kept = _kept_numbers(s, tokens, rows, remat)
    parts = {
        "weights and optimizer": state,
        "gradients": FP32 * s.parameters / gpus * (1 if accum == 1 else 2),
        "layer inputs": BF16 * s.layers * tokens * d,
        "kept activations": 0.0 if offload == "activations" else BF16 * kept,
        "gathered weights": BF16 * 2 * d * s.vocab + FP32 * d * s.vocab,
        "expert rows": BF16 * rows * (ROW_WIDTHS[0] * d + ROW_WIDTHS[1] * s.d_ff),
        "attention scores": FP32 * s.heads * tokens * 512,
        "layout copy of experts": FP32 * s.moe_layers * experts * 2 / 3 / fsdp if fsdp > 1 else 0.0,
        "moments on their way": (BF16 * 2 * s.parameters / gpus * 0.52) if offload == "moments" else 0.0,
    }
    if remat == "none":
        parts["gathered weights"] += BF16 * s.layers * per_layer_dense + BF16 * s.moe_layers * experts
    return {name: size for name, size in parts.items() if size}


def _kept_numbers(s: ModelShape, tokens: float, rows: float, remat: str) -> float:
    """Numbers (not bytes) that survive from forward to backward beyond layer inputs, all layers."""
    if remat == "full":
        return 0.0
    if remat == "none":
        heads = 2 * s.heads * (2 * s.qk_dim + 2 * s.v_dim) + 6 * s.d_model
        return s.layers * tokens * heads + s.moe_layers * rows * (2 * s.d_model + 5 * s.d_ff)
    names = set(remat.split("+"))
    per_token = ("attn_out" in names) * s.heads * s.v_dim + ("resid_mid" in names) * s.d_model
    per_row = ("dispatched" in names) * s.d_model + ("expert_h" in names) * 2 * s.d_ff
    per_row += ("combined" in names) * s.d_model
    return s.layers * tokens * per_token + s.moe_layers * rows * per_row


@functools.cache
def compiled_rows() -> list[dict]:
    """What XLA planned for 17 configurations of DeepSeek-V3, from ``data/compiled.json``."""
    path = resources.files("moe_course.scaling") / "data" / "compiled.json"
    rows = json.loads(path.read_text("utf-8"))["rows"]
    state, temp = FIGURES
    return [{**row, state: 1e9 * row["arguments_gb"], temp: 1e9 * row["temp_gb"]} for row in rows]


@functools.cache
def compiled_errors() -> dict[str, float]:
    """Relative error of :func:`compiled_memory`'s total, by configuration.

    :data:`ROW_WIDTHS` and the activations of ``none`` were fitted on these rows: no figure of it is out of sample.
    """
    return {name: errors["total"] for name, errors in compare_compiled(compiled_rows()).items()}


STEP = {"tokens": 4096, "capacity": 1.25, "remat": "full", "accum": 1, "offload": ""}
"""What a configuration is when it does not say so."""


def compare_compiled(rows: list[dict]) -> dict[str, dict[str, float]]:
    """Relative errors of ``state``, ``temp`` and ``total``, by configuration, against what a compiler planned.

    A row: ``gpus``, ``ep``, what differs from :data:`STEP`, ``model`` (a published name, default DeepSeek-V3 without
    MTP), and the figures, ``state_bytes_per_gpu`` and ``temp_bytes_per_gpu`` as ``moe-course compile --json`` has them.
    """
    from moe_course.scaling.published import shapes

    errors = {}
    for i, row in enumerate(rows):
        if missing := [key for key in ("gpus", "ep", *FIGURES) if key not in row]:
            raise SettingError(f"row {i} of the compiled configurations lacks {', '.join(missing)}.")
        shape = shapes()[row.get("model", "deepseek-v3").lower()]
        shape = shape if row.get("mtp") else shape.without_mtp()
        how = {key: row.get(key, default) for key, default in STEP.items()}
        parts = _compiled_parts(shape, row["gpus"], row["ep"], **how)
        state, planned = parts["weights and optimizer"], [row[key] for key in FIGURES]
        found = (state, sum(parts.values()) - state, sum(parts.values()))
        against = (*planned, sum(planned))
        name = row.get("name", f"row {i}")
        errors[name] = {
            what: mine / theirs - 1
            for what, mine, theirs in zip(("state", "temp", "total"), found, against, strict=True)
        }
    return errors


FIGURES = ("state_bytes_per_gpu", "temp_bytes_per_gpu")


@functools.cache
def compiled_error() -> float:
    """Median absolute relative error over :func:`compiled_rows`."""
    return median(map(abs, compiled_errors().values()))


# --- a step laid out with pipeline, tensor and context parallelism ------------------------------------------


def layout_memory(shape: ModelShape, layout: Layout, dtypes: StateDtypes | None = None) -> Memory:
    """Peak of the fullest GPU of a layout: the first pipeline stage, which holds most micro-batches."""
    return Memory(_layout_parts(shape, layout, dtypes), layout_error())


def _layout_parts(s: ModelShape, p: Layout, dtypes: StateDtypes | None = None) -> dict[str, float]:
    dtypes = dtypes or StateDtypes(zero=3 if p.fsdp else 1)
    dense, routed = stage_parameters(s, p)
    shards = p.dp * p.cp  # context-parallel GPUs hold the same weights
    state = dense * dtypes.bytes_per_parameter(shards) + routed * dtypes.bytes_per_parameter(p.expert_dp)
    kept = _kept_bytes_per_token(s, p) * p.micro_tokens * s.layers / p.pp * micro_batches_in_flight(p)
    rows = received_rows(s, p)
    parts = {
        "weights, gradients, optimizer": state,
        "activations": kept,
        "expert rows": BF16 * rows * (ROW_WIDTHS[0] * s.d_model + ROW_WIDTHS[1] * s.d_ff),
        "logits": (2 * FP32 + BF16) * p.micro_tokens * s.vocab if p.pp == 1 else 0.0,
        "gathered weights": BF16 * 2 * (s.dense_parameters / s.layers + routed / max(s.layers / p.pp, 1))
        if p.fsdp
        else 0.0,
    }
    return {name: size for name, size in parts.items() if size}


def received_rows(shape: ModelShape, layout: Layout) -> float:
    """Rows of one GPU's receive buffer: capacity times the balanced need, at least the busiest rank's; or all that may
    come: every token of the EP group, once for each local expert that it can pick."""
    s, p = shape, layout
    if not s.moe_layers:
        return 0.0
    if p.capacity_factor is None:
        return p.ep * p.micro_tokens * min(s.top_k, s.experts // p.ep)
    return p.micro_tokens * s.top_k * max(p.capacity_factor, p.skew or 1.0, 1.0)


def stage_parameters(shape: ModelShape, layout: Layout) -> tuple[float, float]:
    """(parameters outside of routed experts, routed ones) on one GPU before data parallelism shards anything."""
    s, p = shape, layout
    ends = s.d_model * s.vocab * (2 if p.pp == 1 else 1)
    dense = (s.dense_parameters - 2 * s.d_model * s.vocab) / p.pp + ends
    return dense / p.tp, s.routed_parameters / (p.pp * p.ep * p.etp)


def micro_batches_in_flight(layout: Layout) -> float:
    """Micro-batches whose activations the first stage keeps, in units of a whole stage (arXiv 2104.04473, section 2)."""
    p = layout
    if p.pp == 1:
        return 1.0
    return min(p.micro_batches, p.pp + (p.pp - 1) / p.vpp if p.vpp > 1 else p.pp)


def _kept_bytes_per_token(s: ModelShape, p: Layout) -> float:
    """Activation bytes per token and layer from forward to backward; MoE and dense layers averaged."""
    if "full" in p.recompute:
        return BF16 * s.d_model
    linear = (
        0.5 if format_of(p.precision) != "bf16" else 1.0
    )  # inputs of low-precision GEMMs are kept quantised
    share = s.attention_layers / s.layers
    keeps = lambda name: not any(name in part for part in p.recompute)  # noqa: E731
    attention = s.q_rank + s.kv_rank + s.heads * s.v_dim
    attention += s.heads * (2 * s.qk_dim + s.v_dim) if keeps("mla_up_proj") or not s.kv_rank else 0
    norms = 2 * s.d_model if keeps("norm") else 0
    experts = s.top_k * (linear * s.d_model + 2 * s.d_ff + (linear * s.d_ff if keeps("act") else 0))
    experts += 3 * s.d_ff_shared
    dense = 3 * s.d_ff_dense if keeps("mlp") else 0
    moe_layers = s.moe_layers * experts if keeps_experts(p) else 0
    feed_forward = (moe_layers + s.dense_layers * dense) / s.layers
    half = 0.5 if "selective" in p.recompute else 1.0  # every second operation is kept
    return half * BF16 * (2 * s.d_model + linear * s.d_model + norms + share * attention + feed_forward)


def keeps_experts(layout: Layout) -> bool:
    """Whether the experts' activations live until backward (``moe`` recomputes the whole layer)."""
    return "moe" not in layout.recompute


@functools.cache
def layout_errors() -> dict[str, float]:
    """Relative error of :func:`layout_memory` on the published runs that print memory, by row. None was fitted on."""
    from moe_course.scaling.published import layout_of, training_runs

    errors = {}
    for run in training_runs():
        measured, kind = run.row["measured"]["memory_gb"], run.row["measured"]["memory_kind"] or ""
        if measured:
            unit = 2**30 if "GiB" in kind else 1e9
            parts = _layout_parts(run.shape, layout_of(run))
            errors[run.id] = sum(parts.values()) / (measured * unit) - 1
    return errors


@functools.cache
def layout_error() -> float:
    """Median absolute relative error of :func:`layout_errors`."""
    return median(map(abs, layout_errors().values()))
