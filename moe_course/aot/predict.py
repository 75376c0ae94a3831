"""The bytes that a training step's collectives send, by formula: from sizes alone, without a compiler.

Bytes are those that one GPU sends in a step (``hlo.wire_bytes``). Weights are cut over fsdp, the experts' over expert
too; numbers on the wire have the compute dtype where nothing else is said:

- a weight is gathered once for the forward pass and once more where the backward pass recomputes the layer;
- a matrix's gradient is summed in float32: scattered over fsdp, then what is left is summed over the other axes. An
  expert's is scattered in the compute dtype, and so is the embedding's by the compiler of JAX 0.12; that of 0.10 does
  not scatter it, as it is no matrix product. Gradients of what is not cut (router, norms), too, are summed over all
  GPUs as they are;
- every MoE layer sends ``capacity`` rows to their experts and back, and the gradients the same way again; where it is
  recomputed, to the experts once more (not back: nothing reads that). A row's weight travels beside it, float32.

Only the trunk, and the padded all-to-all: there is no formula for MTP modules and for other dispatchers.
"""

import math
from collections import defaultdict
from dataclasses import replace

from moe_course.aot.hlo import Collective, wire_bytes
from moe_course.environment import release_of
from moe_course.parallel import DATA, EXPERT, FSDP
from moe_course.scaling.flops import parameter_counts
from moe_course.train.config import TrainConfig
from moe_course.train.step import dispatch_plan

_SUM = 4
"""Bytes of a float32, in which gradients of matrices are summed."""


def beside(found: list[Collective], config: TrainConfig, jax_version: str) -> list[dict]:
    """One entry per kind and axis: what the program holds, and the formula's bytes (None: there is none)."""
    count: dict = defaultdict(int)
    sent: dict = defaultdict(float)
    for c in found:
        count[c.kind, c.axis] += c.count
        sent[c.kind, c.axis] += c.wire_bytes
    by_hand = expected(config, jax_version)
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


def expected(config: TrainConfig, jax_version: str) -> dict[tuple[str, str], float]:
    """Bytes by (kind, mesh axes)."""
    scatters_embedding = release_of(jax_version) >= (0, 12)
    terms: dict[tuple[str, str], float] = defaultdict(float)
    for kind, axes, size in [*_weights(config, scatters_embedding), *_tokens(config)]:
        group = {axis: getattr(config.mesh, axis) for axis in axes if getattr(config.mesh, axis) > 1}
        if group and size:
            terms[kind, "+".join(group)] += wire_bytes(kind, size, math.prod(group.values()))
    return dict(terms)


def _weights(config: TrainConfig, scatters_embedding: bool):
    """(kind, mesh axes, operand bytes) of gathered weights and summed gradients."""
    mesh, item = config.mesh, _item(config)
    p = parameter_counts(replace(config.model, mtp_depth=0))
    matrices = p.attention + p.dense_feed_forward + p.shared_experts
    experts = p.routed_experts // mesh.expert
    passes = 1 if config.remat == "none" else 2
    gathered = passes * (matrices + experts) + p.embedding + p.head
    yield "all-gather", (FSDP,), item * gathered / mesh.fsdp
    scattered, whole = _SUM * (matrices + p.head), _SUM * (p.router + p.norms)
    if scatters_embedding:
        scattered += item * p.embedding
    else:
        whole += item * p.embedding
    yield "reduce-scatter", (FSDP,), scattered + item * experts
    yield "all-reduce", (DATA, EXPERT), scattered / mesh.fsdp
    yield "all-reduce", (DATA,), item * experts / mesh.fsdp
    yield "all-reduce", (DATA, FSDP, EXPERT), whole


def _tokens(config: TrainConfig):
    """(kind, mesh axes, operand bytes) of rows to their experts and back."""
    m = config.model
    rows = dispatch_plan(config, 0).capacity
    recomputed = config.remat != "none"
    trips = 4 + (config.remat not in ("none", "experts"))
    per_layer = trips * rows * m.d_model * _item(config) + (2 + recomputed) * rows * 4
    per_layer += (1 + recomputed) * m.num_experts * 4  # how many rows are for which expert
    yield "all-to-all", (EXPERT,), m.num_moe_layers * per_layer


def _item(config: TrainConfig) -> int:
    """Bytes of the compute dtype."""
    return {"float32": 4, "bfloat16": 2}[config.model.compute_dtype]
