"""The bytes that a training step's collectives send, by formula: from sizes alone, without a compiler.

Bytes are those that one GPU sends in a step (``hlo.wire_bytes``). ``n`` GPUs along fsdp, R along expert, weights cut
over fsdp (the experts' over expert too), 2 bytes of compute dtype on the wire:

- a weight is gathered once for the forward pass and once more where the backward pass recomputes the layer;
- its gradient is summed over the GPUs that share it, and cut over fsdp;
- every MoE layer sends ``capacity`` rows to their experts and back, and the gradients the same way again; where it is
  recomputed, to the experts once more (the way back is not: nothing reads it).
"""

from collections import defaultdict

import numpy as np

from moe_course.aot.hlo import Collective, wire_bytes
from moe_course.parallel import EXPERT, FSDP
from moe_course.scaling.flops import parameter_counts
from moe_course.train.config import TrainConfig
from moe_course.train.step import dispatch_plan


def beside(found: list[Collective], config: TrainConfig) -> list[dict]:
    """One entry per kind and axis: what the program holds, and the formula's bytes (None: there is none)."""
    count: dict = defaultdict(int)
    sent: dict = defaultdict(float)
    for c in found:
        count[c.kind, c.axis] += c.count
        sent[c.kind, c.axis] += c.wire_bytes
    by_hand = expected(config)
    keys = sorted({*sent, *by_hand}, key=lambda key: -max(sent[key], by_hand.get(key, 0)))
    return [
        {
            "kind": kind,
            "axis": axis,
            "count": count[kind, axis],
            "bytes": round(sent[kind, axis]),
            "predicted": None if (kind, axis) not in by_hand else round(by_hand[kind, axis]),
        }
        for kind, axis in keys
    ]


def expected(config: TrainConfig) -> dict[tuple[str, str], float]:
    """Bytes by (kind, mesh axes)."""
    terms: dict[tuple[str, str], float] = defaultdict(float)
    for kind, axis, size, group in [*_weights(config), *_tokens(config)]:
        if group > 1 and size:
            terms[kind, axis] += wire_bytes(kind, size, group)
    return dict(terms)


def _weights(config: TrainConfig):
    """(kind, axis, operand bytes, group) of gathered weights and summed gradients."""
    m, mesh = config.model, config.mesh
    item = np.dtype("float32" if m.compute_dtype == "float32" else "float16").itemsize
    p = parameter_counts(m)
    layers = p.attention + p.dense_feed_forward + p.shared_experts
    ends = p.embedding + p.head
    experts = p.routed_experts // mesh.expert
    passes = 1 if config.remat == "none" else 2
    yield "all-gather", FSDP, item * (passes * (layers + experts) + ends) / mesh.fsdp, mesh.fsdp
    yield "reduce-scatter", FSDP, item * (layers + experts + ends), mesh.fsdp


def _tokens(config: TrainConfig):
    """(kind, axis, operand bytes, group) of rows to their experts and back."""
    m, ranks = config.model, config.mesh.expert
    item = np.dtype("float32" if m.compute_dtype == "float32" else "float16").itemsize
    rows = dispatch_plan(config, 0).capacity
    recomputed = config.remat != "none"
    trips = 4 + (config.remat not in ("none", "experts"))
    per_layer = trips * rows * m.d_model * item + (2 + recomputed) * rows * 4
    per_layer += (1 + recomputed) * m.num_experts * 4
    yield "all-to-all", EXPERT, (m.num_moe_layers + m.mtp_depth) * per_layer, ranks
