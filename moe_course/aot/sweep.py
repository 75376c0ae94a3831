"""The configurations that the planner's memory formula is compared with, compiled one after another."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from moe_course.aot.compiled import STATEMENT, Compiled, compile_plan
from moe_course.aot.request import Request, fit_to
from moe_course.errors import RunError
from moe_course.models.config import DEEPSEEK_V2_LITE, DEEPSEEK_V3
from moe_course.train.config import TrainConfig

_LARGE, _SMALL = replace(DEEPSEEK_V3, mtp_depth=0), replace(DEEPSEEK_V2_LITE, mtp_depth=0)
_FEW = replace(_LARGE, num_layers=4, num_dense_layers=1)


def _request(model, hardware: str, gpus: int, ep: int, **settings) -> Request:
    base = {"remat": "full", "capacity_factor": 1.25, "backend": "auto", "seq_len": 4096, "steps": 10_000}
    config = fit_to(TrainConfig(model=model, **(base | settings)), gpus, ep=ep)
    return Request(config, hardware, gpus)


SWEEP = {
    "v2-lite, 8 H100, ep 8": _request(_SMALL, "h100", 8, 8),
    "v2-lite, 8 H100, ep 8, remat none": _request(_SMALL, "h100", 8, 8, remat="none"),
    "v2-lite, 8 H100, ep 4": _request(_SMALL, "h100", 8, 4),
    "v2-lite, 64 H100, ep 8": _request(_SMALL, "h100", 64, 8),
    "v3 with 4 layers, 64 GB200, ep 64": _request(_FEW, "gb200", 64, 64),
    "v3 with 4 layers, 64 GB200, ep 16": _request(_FEW, "gb200", 64, 16),
    "v3, 64 GB200, ep 64": _request(_LARGE, "gb200", 64, 64),
    "v3, 64 GB200, ep 8": _request(_LARGE, "gb200", 64, 8),
    "v3, 256 GB200, ep 64": _request(_LARGE, "gb200", 256, 64),
    "v3, 256 H100, ep 64": _request(_LARGE, "h100", 256, 64),
    "v3, 256 GB200, ep 64, capacity 2": _request(_LARGE, "gb200", 256, 64, capacity_factor=2.0),
    "v3, 256 GB200, ep 64, remat attention": _request(_LARGE, "gb200", 256, 64, remat="attention"),
    "v3, 256 GB200, ep 64, remat experts": _request(_LARGE, "gb200", 256, 64, remat="experts"),
    "v3, 256 GB200, ep 64, remat none": _request(_LARGE, "gb200", 256, 64, remat="none"),
    "v3, 256 GB200, ep 16": _request(_LARGE, "gb200", 256, 16),
    "v3, 1024 GB200, ep 64": _request(_LARGE, "gb200", 1024, 64),
}
"""By name: small to large, and one change at a time from ``v3, 256 GB200, ep 64``."""


def compile_all(
    say: Callable[[str], None], *, write: Path | None = None, again: bool = False, names=tuple(SWEEP)
) -> list[dict]:
    """One row for each configuration that compiles, put into ``write`` at once; what does not is said."""
    rows = []
    for name in names:
        request = SWEEP[name]
        try:
            compiled = compile_plan(request.config, request.hardware, request.gpus, again=again)
        except RunError as error:
            say(f"{name}: {error}")
            continue
        rows.append(row(name, compiled))
        if write:
            record(rows[-1:], write)
        gb = [rows[-1][key] / 1e9 for key in ("state_bytes_per_gpu", "temp_bytes_per_gpu")]
        say(f"{name}: state {gb[0]:.1f} GB, temporary {gb[1]:.1f} GB, {compiled.compile_s:.0f} s")
    return rows


def row(name: str, c: Compiled) -> dict:
    """What the planner needs of a compilation."""
    return {
        "name": name,
        "hardware": c.hardware,
        "gpus": c.gpus,
        "mesh": c.mesh,
        "tokens_per_gpu": c.tokens_per_gpu,
        "parameters": c.parameters,
        **{key: c.config[key] for key in ("remat", "capacity_factor", "backend", "recipe", "dispatcher")},
        "model": c.config["model"],
        "state_bytes_per_gpu": c.state_bytes_per_gpu,
        "temp_bytes_per_gpu": c.temp_bytes_per_gpu,
        "needed_bytes_per_gpu": c.needed_bytes_per_gpu,
        "fits": c.fits,
        "collectives": [entry for entry in c.collectives if entry["bytes"] >= 1e9],
        "flops": c.flops,
        "compile_s": c.compile_s,
        "cpu_s": c.cpu_s,
        "peak_rss_bytes": c.peak_rss_bytes,
        "versions": c.versions,
        "date": c.compiled_on,
    }


def record(rows: list[dict], path: Path) -> None:
    """Put ``rows`` into a result file, in place of those of the same names and the same JAX."""
    old = json.loads(path.read_text())["rows"] if path.exists() else []

    def identity(row):
        return row["name"], row["versions"]["jax"]

    new = {identity(row): row for row in old} | {identity(row): row for row in rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"statement": STATEMENT, "rows": list(new.values())}, indent=1) + "\n")
