"""The report's sections on speed and size. Every rate is printed with its formula, and MFU with its peak."""

from pathlib import Path

import numpy as np

from moe_course.scaling.flops import (
    MFU_FORMULA,
    forward_flops,
    mfu,
    parameter_counts,
    tflops_per_device,
    training_flops,
)
from moe_course.train import figures
from moe_course.train.markdown import counted, picture, table
from moe_course.train.records import Run


def speed_section(run: Run, plots: Path) -> str:
    """Step time, tokens/s, TFLOP/s per device, MFU, latencies."""
    if not len(run.steady_seconds):
        return "## Speed\n\nNo step time was recorded."
    figures.speed_figure(run, plots / "speed.png")
    parts = [
        "## Speed",
        picture(f"{plots.name}/speed.png", "step time and tokens per second", speed_caption(run)),
    ]
    rows = [*time_rows(run), *rate_rows(run), *latency_rows(run)]
    parts.append(table(["", "value", "how"], rows, words=(0, 2)))
    parts.append(f"{MFU_FORMULA}. {flops_text(run)}")
    if how := (run.summary.get("latency_ms") or {}).get("how"):
        parts.append(f"Latencies: {how}.")
    return "\n\n".join(parts)


def speed_caption(run: Run) -> str:
    """The typical step, and the untypical ones."""
    low, middle, high = (1e3 * np.percentile(run.steady_seconds, [10, 50, 90])).tolist()
    text = f"Median step {middle:,.0f} ms, eight in ten between {low:,.0f} and {high:,.0f} ms."
    slow = run.column("seconds")[run.compiling]
    if len(slow):
        text += (
            f" {counted(len(slow), 'step')} with a compilation or restart took {slow.sum():,.1f} s together "
            f"and {'is' if len(slow) == 1 else 'are'} left out of the figures below."
        )
    return text


def time_rows(run: Run) -> list[list[str]]:
    """Step time and tokens per second."""
    seconds = run.steady_seconds
    low, middle, high = (1e3 * np.percentile(seconds, [10, 50, 90])).tolist()
    rows = [
        [
            "step time, median (p10, p90)",
            f"{middle:,.1f} ms ({low:,.1f}, {high:,.1f})",
            f"{len(seconds):,} steps",
        ]
    ]
    tokens = run.tokens_per_step
    if np.isfinite(tokens):
        how = f"{tokens:,.0f} tokens / median step"
        rows.append(["tokens/s, training step", f"{tokens / np.median(seconds):,.0f}", how])
    wall = run.summary.get("seconds")
    seen = run.summary.get("tokens_seen") or np.nansum(run.column("tokens"))
    if wall and seen:
        how = f"{seen:,.0f} tokens / {wall:,.0f} s, compilation included"
        rows.append(["tokens/s, all steps", f"{seen / wall:,.0f}", how])
    return rows


def rate_rows(run: Run) -> list[list[str]]:
    """TFLOP/s per device and MFU by active parameters, of the median step."""
    flops, devices, tokens = flops_per_token(run), run.num_devices, run.tokens_per_step
    if flops is None or devices is None or not np.isfinite(tokens):
        return [["TFLOP/s per device", "none", "needs the model, the number of devices and tokens per step"]]
    seconds = float(np.median(run.steady_seconds))
    rate = tflops_per_device(flops, tokens, seconds, devices)
    arithmetic = f"{flops / 1e6:,.4g} MFLOP × {tokens:,.0f} tokens / ({seconds:.4g} s × {devices} devices)"
    rows = [["model TFLOP/s per device", f"{rate:.4g}", arithmetic]]
    peak = run.summary.get("peak") or {}
    if not peak.get("tflops_per_device"):
        return [*rows, ["MFU by active parameters", "none", "the peak of a device is not recorded"]]
    ceiling, dtype = peak["tflops_per_device"], peak.get("dtype", "dtype not recorded")
    how = f"{rate:.4g} / {ceiling:.4g} TFLOP/s, the {dtype} peak"
    computed = run.model.compute_dtype
    if dtype != computed:
        how += f" (the matmuls are {computed}: not the same)"
    value = f"{mfu(flops, tokens, seconds, devices, ceiling):.1%}"
    peak_row = ["peak per device", f"{ceiling:.4g} TFLOP/s {dtype}", peak.get("how", "how is not recorded")]
    return [*rows, peak_row, ["MFU by active parameters", value, how]]


def latency_rows(run: Run) -> list[list[str]]:
    """Parts of one MoE layer, measured beside the run."""
    names = {
        "dispatch": "dispatch",
        "combine": "combine",
        "grouped_gemm": "grouped GEMM",
        "moe_layer": "MoE layer",
    }
    latency = run.summary.get("latency_ms") or {}
    measured = {key: value for key, value in latency.items() if not isinstance(value, str)}
    return [
        [f"{names.get(key, key)}, forward", f"{value:,.2f} ms", "one layer"]
        for key, value in measured.items()
    ]


def flops_per_token(run: Run) -> int | None:
    """Training FLOPs per token by active parameters, causal attention counted half."""
    length = run.config.get("seq_len")
    return sum(training_flops(run.model, length).values()) if run.model and length else None


def flops_text(run: Run) -> str:
    """What is in the FLOPs of the formula."""
    if flops_per_token(run) is None:
        return "Without the model's configuration there is no FLOP count."
    return (
        "FLOPs are those of matmuls, 3 × the forward pass of the table below: causal attention counts half "
        "of its scores, the embedding lookup counts nothing, recomputation and padding count nothing."
    )


def costs_section(run: Run) -> str:
    """FLOPs per token by term, and parameters by part."""
    if run.model is None:
        total = (run.summary.get("parameters") or {}).get("total")
        told = f" The run counted {total:,} parameters." if total else ""
        return f"## Size\n\nThe model's configuration is missing, so nothing can be counted.{told}"
    parts = ["## Size", parameter_table(run)]
    if length := run.config.get("seq_len"):
        parts.append(flops_table(run, length))
    return "\n\n".join(parts)


def parameter_table(run: Run) -> str:
    """Parameters by part; total and active."""
    counts = parameter_counts(run.model)
    rows = [
        [name, f"{count:,}", f"{count / counts.total:.1%}"] for name, count in counts.parts().items() if count
    ]
    rows += [
        ["**total**", f"{counts.total:,}", "100.0%"],
        ["**active per token**", f"{counts.active:,}", f"{counts.active / counts.total:.1%}"],
    ]
    note = (
        "Active: without the experts that a token does not use, and without the embedding table, of which it "
        "reads one row."
    )
    counted_by_run = (run.summary.get("parameters") or {}).get("total")
    if counted_by_run not in (None, counts.total):
        note += f" The run itself counted {counted_by_run:,}: the formula and the model differ."
    return f"{table(['parameters', 'count', 'share'], rows)}\n\n{note}"


def flops_table(run: Run, length: int) -> str:
    """Forward FLOPs per token, by term."""
    terms = forward_flops(run.model, length)
    total = sum(terms.values())
    rows = [[name, f"{flops / 1e3:,.1f}", f"{flops / total:.1%}"] for name, flops in terms.items()]
    rows += [
        ["**forward**", f"{total / 1e3:,.1f}", "100.0%"],
        ["**training step**, 3 × forward", f"{3 * total / 1e3:,.1f}", ""],
    ]
    return table([f"matmuls, {length:,} positions", "kFLOP per token", "share"], rows)
