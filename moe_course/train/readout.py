"""What the host reads from a finished step: the metrics line, and where a non-finite value first shows."""

import math

import numpy as np

from moe_course.train.config import TrainConfig
from moe_course.train.corpora import DOMAINS


def step_record(step: int, metrics: dict, seconds: float, config: TrainConfig, capacity: int) -> dict:
    """The metrics line of one step (the schema is in ``train.report``)."""
    nats, targets = metrics["nats_by_domain"], metrics["targets_by_domain"]
    books = metrics.get("ledger")
    return {
        "kind": "step",
        "step": step,
        "loss": float(metrics["loss"]),
        "bits_per_byte": float(metrics["loss"]) / math.log(2),
        "bits_per_byte_by_domain": {
            name: float(nats[i]) / int(targets[i]) / math.log(2)
            for i, name in enumerate(DOMAINS)
            if targets[i]
        },
        "gradient_norm": float(metrics["gradient_norm"]),
        "learning_rate": float(metrics["learning_rate"]),
        "targets": int(targets.sum()),
        "tokens": config.tokens_per_step,
        "seconds": seconds,
        "load": np.asarray(metrics.get("load", [])).tolist(),
        "max_over_mean": np.asarray(metrics.get("max_over_mean", [])).tolist(),
        "demand": int(metrics["demand"]),
        "capacity": capacity,
        "ledger": {k: int(v) for k, v in vars(books).items()} | {"dropped": int(books.dropped)}
        if books
        else {},
        "balance_loss": np.asarray(metrics.get("balance_loss", [])).tolist(),
        "bias_range": np.asarray(metrics.get("bias_range", [])).tolist(),
    }


def non_finite_part(metrics: dict, num_layers: int) -> str:
    """Where NaN or infinity shows first: the output of a layer, the loss, or the gradient of a part."""
    bad = [i for i, finite in enumerate(metrics["layer_finite"]) if not finite]
    if bad:
        name = f"layer {bad[0]}" if bad[0] < num_layers else f"MTP module {bad[0] - num_layers}"
        return f"the output of {name}"
    if not np.isfinite(metrics["total_loss"]):
        return "the loss (every layer's output is finite: see the head)"
    parts = []
    for name, finite in metrics["gradient_finite"].items():
        if np.ndim(finite):
            parts += [f"{name} {index}" for index in np.flatnonzero(~np.asarray(finite))]
        elif not finite:
            parts.append(name)
    return f"the gradient of {', '.join(parts) or 'the parameters, as a norm,'}"
