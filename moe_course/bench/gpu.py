"""``moe-course bench gpu --json``: one GPU in at most eight minutes, JAX preinstalled. Written for one Hopper.

Each part of :data:`PARTS` runs in a process of its own under a time limit of its own, so a kernel that hangs, crashes
or runs out of memory costs its part and nothing else: what it had measured by then is kept, with the reason in words.
A backend that cannot run says why. ``--dry-run`` runs the same code on a CPU with tiny shapes: it tests this script,
its figures mean nothing, and ``--out`` refuses them. Nobody has run this on a GPU yet.

What the figures mean: ``tflops`` counts 2 M D F per product, forward and backward three products; times are medians of
rounds in which the candidates take turns; ``vs_dense`` is the dense GEMM's time over ours (1: as fast). A host sync is
seen by JAX's transfer guard, and by how long the host takes to enqueue steps against how long they run; copies that
a kernel makes inside one XLA program are seen by the second only.
"""

import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from moe_course.environment import setup, versions, visible_gpus
from moe_course.errors import SettingError

DEVICES = 0
"""None are started by ``bench.main``: the process that waits must not hold the GPU's memory."""
LIMIT_S = 480
DRY_RUN_LIMIT_S = 300
"""Of each part on a CPU, which may be busy."""
DRY_RUN = "cpu dry run: tests the script, measures nothing"
GROUPED_GEMM_BAR = 0.80


@dataclass(frozen=True)
class Part:
    """One measurement: a generator of (case, figures), and how long it may take."""

    module: str
    function: str
    limit_s: int
    env: dict[str, str] = field(default_factory=dict)

    def cases(self, tiny: bool) -> Iterator[tuple[str, dict]]:
        import importlib

        function: Callable = getattr(
            importlib.import_module(f"moe_course.bench.{self.module}"), self.function
        )
        return function(tiny)


NO_COMMAND_BUFFERS = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer="}
PARTS: dict[str, Part] = {
    "machine": Part("gpu_kernels", "machine", 30),
    "correctness": Part("gpu_kernels", "correctness", 75),
    "grouped_gemm": Part("gpu_kernels", "grouped_gemm_speed", 90),
    "moe_layer": Part("gpu_training", "moe_layer", 40),
    "train_step": Part("gpu_training", "train_step", 125),
    "fp8": Part("gpu_kernels", "fp8_speed", 30),
    "command_buffers": Part("gpu_training", "small_step", 45),
    "no_command_buffers": Part("gpu_training", "small_step", 45, NO_COMMAND_BUFFERS),
}
"""In order of worth: what the eight minutes cut off is the last."""


@dataclass(frozen=True)
class Options:
    """Settings of ``moe-course bench gpu``."""

    dry_run: bool = False
    """Tiny shapes on the CPU, to test the script. Never recorded."""
    parts: tuple[str, ...] = ()
    """Which parts to run; all of them if none is named."""
    out: Path | None = None
    """Write the result here too, anew after each part."""
    part: str | None = None
    """Run this one part here and print its lines; the script calls itself with it."""


def run(options: Options = Options()) -> dict:
    """``{"what", "date", "versions", part: {case: figures}, "bars": {name: {"bar", "value", "met"}}, "seconds"}``."""
    for name in (*options.parts, *filter(None, [options.part])):
        if name not in PARTS:
            raise SettingError(f"there is no part {name!r}. The parts are {', '.join(PARTS)}.")
    if options.part:
        return run_here(options.part, tiny=options.dry_run)
    if options.dry_run and options.out:
        raise SettingError("a dry run measures nothing, so nothing is written. Leave out --out.")
    gpus = visible_gpus()
    if not (gpus or options.dry_run):
        raise SettingError("no NVIDIA GPU is visible here. Add --dry-run to test the script on the CPU.")
    result = {
        "what": DRY_RUN if options.dry_run else f"measured on {gpus[0]}",
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
    }
    start = time.monotonic()
    # A step is compiled ahead of time, to be read, and again when it is called: the second time from here.
    with tempfile.TemporaryDirectory() as cache:
        for name in options.parts or PARTS:
            limit = min(PARTS[name].limit_s, LIMIT_S - (time.monotonic() - start))
            limit = DRY_RUN_LIMIT_S if options.dry_run else limit
            result[name] = run_apart(name, limit, dry_run=options.dry_run, cache=cache)
            result |= {"bars": bars(result), "seconds": round(time.monotonic() - start, 1)}
            if options.out:
                options.out.write_text(json.dumps(result, indent=1) + "\n")
    return result


# ---------------------------------------------------------------- one part


def run_here(name: str, *, tiny: bool) -> dict:
    """The figures of one part, measured in this process. Prints them after each case, for who may kill it."""
    setup(devices=1, quiet=True, platform="cpu" if tiny else "gpu")
    figures = {}
    for case, values in PARTS[name].cases(tiny):
        figures[case] = values
        print(f"PART {json.dumps(figures)}", flush=True)
    return figures


def run_apart(
    name: str, limit_s: float, *, dry_run: bool, cache: str = "", command: list[str] | None = None
) -> dict:
    """The figures of one part, measured in a process of its own that is ended after ``limit_s``.

    Never raises for what goes wrong there: ``error`` says it in words, beside the figures measured by then.
    """
    if limit_s <= 0:
        return {"error": f"not started: the {LIMIT_S} s of the script were over"}
    command = command or [sys.executable, "-m", "moe_course.bench", "gpu", "--json", "--part", name]
    env = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"} | os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"}
    flags = [os.environ.get("XLA_FLAGS", ""), PARTS[name].env.get("XLA_FLAGS", "")]
    env["XLA_FLAGS"] = " ".join(filter(None, flags))
    if cache:
        env["JAX_COMPILATION_CACHE_DIR"] = cache
    if dry_run:
        command, env = [*command, "--dry-run"], env | {"JAX_PLATFORMS": "cpu"}
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            command, stdout=out, stderr=errors, stdin=subprocess.DEVNULL, env=env, start_new_session=True
        )
        try:
            code = child.wait(limit_s)
            error = "" if code == 0 else f"ended with exit code {code}"
        except subprocess.TimeoutExpired:
            error = f"stopped after its {limit_s:.0f} s"
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        out.seek(0), errors.seek(0)
        figures = last_figures(out.read())
        if error:
            said = [line.strip() for line in errors.read().splitlines() if line.strip()]
            figures["error"] = f"{error}: {said[-1][:300]}" if said else error
    return figures | {"seconds": round(time.monotonic() - start, 1)}


def last_figures(output: str) -> dict:
    """What the last whole line of :func:`run_here` holds."""
    for line in reversed(output.splitlines()):
        if line.startswith("PART "):
            try:
                return json.loads(line.removeprefix("PART "))
            except ValueError:
                continue  # killed while it wrote
    return {}


# ---------------------------------------------------------------- the bars


def bars(result: dict) -> dict[str, dict]:
    """What we set out to reach. ``value`` None, ``met`` None: not measured."""
    fastest = [
        max(ratios)
        for case in result.get("grouped_gemm", {}).values()
        if isinstance(case, dict)
        and (
            ratios := [
                b["fwd_vs_dense"] for b in case.values() if isinstance(b, dict) and "fwd_vs_dense" in b
            ]
        )
    ]
    step = result.get("train_step", {}).get("step", {})
    graphs, launches = (
        result.get(f"{no}command_buffers", {}).get("step", {}).get("step_ms") for no in ("", "no_")
    )
    checked = {
        f"{backend} {case}": figures.get("ok", False)
        for backend, cases in result.get("correctness", {}).items()
        if isinstance(cases, dict)
        for case, figures in cases.items()
        if isinstance(figures, dict) and "refused" not in figures
    }
    wrong = [name for name, ok in checked.items() if not ok] if checked else None
    return {
        "grouped_gemm_fwd_vs_dense": _bar(min(fastest, default=None), GROUPED_GEMM_BAR, lambda v, b: v >= b),
        "host_syncs_between_steps": _bar(step.get("host_syncs"), 0, lambda v, b: v <= b),
        "recompilations": _bar(step.get("recompilations"), 0, lambda v, b: v <= b),
        "wrong_results": _bar(wrong, [], lambda v, b: v == b),
        "command_buffers_speedup": _bar(
            graphs and launches and round(launches / graphs, 3), 1, lambda v, b: v >= b
        ),
    }


def _bar(value, bar, holds: Callable) -> dict:
    return {"bar": bar, "value": value, "met": None if value is None else holds(value, bar)}
