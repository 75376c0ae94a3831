"""``moe-course bench planner``: the step-time model against published runs that it was not fitted on.

Each run is predicted by constants fitted without its source and without its lineage (model, machine, size, format).
``by_publisher`` is stricter: all pages of one publisher are left out at once. Errors are relative, of tokens/s. The one
setting of the fit was chosen by these very errors; ``--nested`` takes that advantage away.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moe_course.scaling import calibrate, comm, ladder, memory


@dataclass(frozen=True)
class Options:
    """Settings of ``moe-course bench planner``."""

    publishers: bool = True
    """Also leave out all pages of a publisher at once."""
    nested: bool = False
    """Also let each fold choose the prior's width without its own source (a minute or two)."""
    write: bool = False
    """Write the constants and errors to the package's ``scaling/data/calibration.json``."""


def run(options: Options = Options()) -> dict:
    """``{"rows", "median_abs_error", "p90_abs_error", "bias", "by_source": {...}, ...}``."""
    if options.write:  # first: the ladders below take the shipped constants
        path = Path(calibrate.__file__).parent / "data" / "calibration.json"
        path.write_text(json.dumps(calibrate.as_json(), indent=1) + "\n", encoding="utf-8")
        calibrate.shipped.cache_clear()
    rows = calibrate.held_out()
    figures = calibrate.summary(rows)
    figures["in_sample"] = calibrate.summary(calibrate.predict_rows(calibrate.calibrated(), _all()))
    figures["by_source"] = _grouped(rows)
    if options.publishers:
        strict = calibrate.held_out("publisher")
        figures["by_publisher"] = {**calibrate.summary(strict), "publishers": _by_publisher(strict)}
    if options.nested:
        figures["nested"] = calibrate.summary(calibrate.nested())
    figures["worst"] = {row.id: round(row.error, 3) for row in sorted(rows, key=lambda r: -abs(r.error))[:10]}
    figures["ratios_of_two_layouts"] = calibrate.ratio_summary()
    figures["ladders"] = _ladders()
    figures["memory"] = {
        "compiled_rows": len(memory.compiled_errors()),
        "compiled_median_abs_error": round(memory.compiled_error(), 4),
        "published_rows": len(memory.layout_errors()),
        "published_median_abs_error": round(memory.layout_error(), 4),
    }
    fits = comm.link_fits()
    figures["links"] = {
        fit.name: {
            "alpha_us": round(fit.link.alpha * 1e6, 1),
            "beta_gb_s": round(fit.link.beta / 1e9, 1),
            "rows": len(fit.ids),
            "median_abs_error": round(fit.median_error, 3),
            "max_abs_error": round(fit.worst_error, 3),
            "residuals": [round(error, 3) for error in fit.errors],
        }
        for fit in [*fits, comm.low_latency_fit("dispatch"), comm.low_latency_fit("combine")]
    }
    return figures


def _ladders() -> dict:
    """The published ladders: TFLOPS per GPU by the model and as published, the cause, what is left over."""
    figures = {
        name: [
            {
                "step": step.name,
                "cause": step.cause,
                "predicted": round(step.predicted, 1),
                "published": step.published and round(step.published, 1),
                "residual": step.residual and round(step.residual, 3),
            }
            for step in steps
        ]
        for name, steps in (
            ("megatron, GB200", ladder.megatron_gb200()),
            ("JAX and TE, as GB200", ladder.jax_te("gb200")),
            ("JAX and TE, as GB300", ladder.jax_te("gb300")),
        )
    }
    readings = {
        f"{name}, {hardware}": {"tflops": round(tflops, 1), "communication_share": round(share, 3)}
        for hardware in ("gb200", "gb300")
        for name, tflops, share in ladder.start_readings(hardware)
    }
    figures["readings_of_the_start"] = {
        "published": {"tflops": ladder.FIRST, "communication_share": ladder.PROFILE},
        **readings,
    }
    figures["discrepancy"] = ladder.discrepancy()
    figures["weak_scaling"] = {
        f"{gpus}": {"model": round(model, 4), "published_loss_carried_on": round(carried, 4)}
        for gpus, model, carried in ladder.beyond()
    }
    figures["weak_scaling_ends_at_gpus"] = ladder.end_of_weak_scaling()
    return figures


def _all():
    return np.ones(len(calibrate.works()[0]), bool)


def _grouped(rows) -> dict:
    sources = sorted({row.source for row in rows})
    return {source: calibrate.summary([row for row in rows if row.source == source]) for source in sources}


def _by_publisher(rows) -> dict:
    owner = {run.source: run.publisher for run in calibrate.works()[0]}
    names = sorted(set(owner.values()))
    return {name: calibrate.summary([row for row in rows if owner[row.source] == name]) for name in names}
