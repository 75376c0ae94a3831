"""``moe-course doctor``: what is here, whether the course runs on it, and the fix where it does not.

Needs nothing but the standard library, so that it works where half an installation is missing; if the command
itself does not start, ``python -m moe_course.doctor`` does. JAX is asked in a process of its own: it must not
start here, and a broken one may take its process with it.
"""

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass, field

from moe_course import environment, te

MIN_MEMORY_GIB, MIN_DISK_GIB = 4, 2
MIN_DRIVER = 580
"""NVIDIA driver that CUDA 13 needs."""
PROBE_TIMEOUT = 120

PACKAGES = {
    "jax": ("jax",),
    "jaxlib": ("jaxlib",),
    "flax": ("flax",),
    "numpy": ("numpy",),
    "CUDA plugin": ("jax-cuda13-plugin", "jax-cuda12-plugin"),
    "Transformer Engine": ("transformer-engine-jax", "transformer-engine"),
    "CUDA": ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"),
    "cuDNN": ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    "NCCL": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
    "cuBLAS": ("nvidia-cublas", "nvidia-cublas-cu12"),
}
"""What a report names, and the packages that carry it, the likeliest first."""

PROBE = """
import ctypes, json
found = {}
def version_of(library, symbol, by_pointer):
    # What the loader finds, for machines whose CUDA did not come from Python packages.
    try:
        function = getattr(ctypes.CDLL(library), symbol)
    except (OSError, AttributeError):
        return None
    if not by_pointer:
        function.restype = ctypes.c_size_t
        return function()
    value = ctypes.c_int()
    return value.value if function(ctypes.byref(value)) == 0 else None
for name, call in {"cuDNN": ("libcudnn.so.9", "cudnnGetVersion", False), "NCCL": ("libnccl.so.2", "ncclGetVersion", True),
                   "cuBLAS": ("libcublasLt.so.13", "cublasLtGetVersion", False)}.items():
    found[name] = version_of(*call)
print("LIBRARIES " + json.dumps(found), flush=True)
import jax
devices = jax.devices()
stats = devices[0].memory_stats() or {}
print("JAX " + json.dumps({"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices),
                           "memory_bytes": stats.get("bytes_limit")}), flush=True)
from moe_course import te
machine = te.examine()
reason = te.why_not(None, machine)
operations = {op: te.why_not(op, machine) for op in te.OPS}
print("TE " + json.dumps({"ok": not reason, "reason": reason, "operations": operations}), flush=True)
"""


@dataclass
class Report:
    """Everything found. ``ok``: the course runs here (with ``--gpu``: on the GPU)."""

    ok: bool = True
    verdict: str = ""
    fixes: list[str] = field(default_factory=list)
    """What to do, in words, the most pressing first."""
    python: str = environment.host.python_version()
    system: str = ""
    cpu: str = ""
    cores: int = 0
    memory_gib: float = 0.0
    disk_free_gib: float = 0.0
    versions: dict[str, str | None] = field(default_factory=dict)
    driver: str | None = None
    cuda_of_driver: str | None = None
    gpus: list[dict] = field(default_factory=list)
    jax: dict = field(default_factory=dict)
    """Platform, kind and count of JAX's devices, or ``error``."""
    transformer_engine: dict = field(default_factory=dict)
    """``ok``, ``reason``, and the reason for each operation of :data:`moe_course.te.OPS`; "" where it runs."""
    capability: str = "CPU"
    """The column of :func:`moe_course.te.table` that holds for the devices JAX uses."""


def examine(*, need_gpu: bool = False) -> Report:
    """Look at this machine. Never raises for what is missing or broken."""
    report = Report(
        system=str(environment.versions()["platform"]),
        cpu=environment.cpu_model(),
        cores=environment.cpu_cores(),
        memory_gib=round(environment.memory_bytes() / 2**30, 1),
        disk_free_gib=_disk_free_gib(),
        versions={name: _version(packages) for name, packages in PACKAGES.items()},
    )
    _ask_driver(report)
    _ask_jax(report)
    report.capability = _capability(report)
    _judge(report, need_gpu)
    return report


def main(arguments: list[str] | None = None) -> int:
    """``[--json] [--gpu]``. Exit code 0: the course runs here. 1: it does not, or not on the GPU it should."""
    parser = argparse.ArgumentParser(
        prog="moe-course doctor", description="What is here, whether the course runs, the fix."
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--gpu", action="store_true", help="a GPU that JAX and Transformer Engine use is required"
    )
    chosen = parser.parse_args(arguments)
    report = examine(need_gpu=chosen.gpu)
    print(json.dumps(asdict(report), indent=1) if chosen.json else text(report))
    return 0 if report.ok else 1


# ---------------------------------------------------------------- finding out


def _version(packages: tuple[str, ...]) -> str | None:
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _disk_free_gib() -> float:
    try:
        return round(shutil.disk_usage(os.getcwd()).free / 2**30, 1)
    except OSError:
        return 0.0


def _run(command: list[str], seconds: float, **env: str) -> tuple[int, str, str]:
    """Exit code, output and errors; code -1 if it is missing or hangs (what it printed before is kept)."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=seconds,
            env=os.environ | env,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as late:
        said = late.stdout or b""
        return -1, said.decode() if isinstance(said, bytes) else said, f"no answer in {seconds} s"
    except OSError as error:
        return -1, "", str(error)
    return done.returncode, done.stdout, done.stderr


def _ask_driver(report: Report) -> None:
    fields = "name,driver_version,memory.total,compute_cap"
    code, out, _ = _run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"], 20)
    for line in out.splitlines() if code == 0 else ():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 4:
            name, report.driver, memory, capability = parts
            report.gpus.append(
                {"name": name, "memory_mib": _number(memory), "compute_capability": _number(capability)}
            )
    if report.gpus:
        found = re.search(r"CUDA Version:\s*([\d.]+)", _run(["nvidia-smi"], 20)[1])
        report.cuda_of_driver = found[1] if found else None
    else:  # the device files may be there without the tool
        report.gpus = [{"name": name, "compute_capability": None} for name in environment.visible_gpus()]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _ask_jax(report: Report) -> None:
    quiet = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "3"}
    code, out, errors = _run([sys.executable, "-c", PROBE], PROBE_TIMEOUT, **quiet)
    said = dict(
        line.split(" ", 1) for line in out.splitlines() if line.startswith(("LIBRARIES ", "JAX ", "TE "))
    )
    for name, version in json.loads(said.get("LIBRARIES", "{}")).items():
        if version and not report.versions.get(name):
            report.versions[name] = f"{version} (system)"
    report.jax = (
        json.loads(said["JAX"]) if "JAX" in said else {"error": _last_line(errors) or f"exit code {code}"}
    )
    report.transformer_engine = json.loads(said.get("TE", "{}"))


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def _capability(report: Report) -> str:
    if report.jax.get("platform") in (None, "cpu"):
        return "CPU"
    found = report.gpus[0]["compute_capability"] if report.gpus else None
    return te.architecture(None if found is None else round(10 * found)) or "unknown GPU"


# ---------------------------------------------------------------- judging


def _judge(report: Report, need_gpu: bool) -> None:
    wrong = _what_stops(report)
    gpu = _what_stops_the_gpu(report) if report.gpus or need_gpu else []
    report.ok = not wrong and not (need_gpu and gpu)
    report.fixes = wrong + gpu
    device = f"{report.jax.get('count', 0)} {report.jax.get('kind', '?')}"
    if wrong:
        report.verdict = "The course does not run here yet."
    elif need_gpu and gpu:
        report.verdict = "The course runs on the CPU, and not on a GPU as asked."
    elif report.jax.get("platform") == "cpu":
        report.verdict = "The course runs here, on simulated CPU devices; low precision is emulated."
        report.verdict += " The GPU is not used." if report.gpus else ""
    else:
        report.verdict = f"The course runs here, on {device}" + (
            "; Transformer Engine does not yet." if gpu else "."
        )


def _what_stops(report: Report) -> list[str]:
    wrong = []
    if sys.version_info < (3, 11):  # noqa: UP036  (run from a checkout by whatever Python there is)
        wrong.append(f"Python {report.python} is too old: use 3.11 or newer.")
    missing = _missing_requirements()
    if missing:
        wrong.append(f"missing or too old: {', '.join(missing)}. Run: pip install -e . (or make venv)")
    if "error" in report.jax and report.versions["jax"]:
        wrong.append(f"JAX does not start: {report.jax['error']}")
        if report.versions["jax"] != report.versions["jaxlib"]:
            wrong.append(
                f"jax {report.versions['jax']} and jaxlib {report.versions['jaxlib']} differ: install them together."
            )
    if 0 < report.memory_gib < MIN_MEMORY_GIB:
        wrong.append(f"{report.memory_gib} GiB of memory; the training chapters need {MIN_MEMORY_GIB}.")
    if report.disk_free_gib < MIN_DISK_GIB:
        wrong.append(
            f"{report.disk_free_gib} GiB free on this disk; runs and checkpoints need {MIN_DISK_GIB}."
        )
    return wrong


def _missing_requirements() -> list[str]:
    """Requirements of the package itself that are not met, as written in pyproject.toml."""
    try:
        required = importlib.metadata.requires("moe-course") or []
    except importlib.metadata.PackageNotFoundError:
        return ["moe-course itself"]
    missing = []
    for line in required:
        if "extra ==" in line:
            continue
        match = re.match(r"([A-Za-z0-9._-]+)(?:.*>=([\d.]+))?", line)
        found = _version((match[1],))
        if found is None or (match[2] and _release(found) < _release(match[2])):
            missing.append(line.partition(";")[0].strip() + ("" if found is None else f" (found {found})"))
    return missing


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.match(r"[\d.]*\d", version)[0].split("."))


def _what_stops_the_gpu(report: Report) -> list[str]:
    if not report.gpus:
        return ["no NVIDIA GPU is visible here: check nvidia-smi, and the container's --gpus."]
    wrong = []
    name, driver = report.gpus[0]["name"], report.driver
    if driver and _number(driver.partition(".")[0]) and float(driver.partition(".")[0]) < MIN_DRIVER:
        wrong.append(f"driver {driver} is too old for CUDA 13: install {MIN_DRIVER} or newer.")
    if not report.versions["CUDA plugin"]:
        wrong.append(f"{name} is here but this JAX is CPU-only. Run: pip install -e '.[gpu]'")
    elif report.jax.get("platform") == "cpu":
        wrong.append(
            "JAX has a CUDA plugin and got no GPU: check CUDA_VISIBLE_DEVICES, JAX_PLATFORMS, the driver."
        )
    elif not report.versions["Transformer Engine"]:
        wrong.append(
            f"Transformer Engine is not installed. Run: {te.INSTALL} (or scripts/te-wheel .venv-gpu gpu)"
        )
    elif report.transformer_engine and not report.transformer_engine["ok"]:
        wrong.append(f"Transformer Engine does not load: {report.transformer_engine['reason']}")
    return wrong


# ---------------------------------------------------------------- showing


def text(report: Report) -> str:
    """The report for people, about thirty lines."""
    devices = (
        f"{report.jax['count']} x {report.jax['kind']} ({report.jax['platform']})"
        + (", setup() simulates 8" if report.jax["platform"] == "cpu" else "")
        if "platform" in report.jax
        else f"none: {report.jax['error']}"
    )
    lines = [
        f"system      {report.system}, {report.cpu}, {report.cores} cores",
        f"memory      {report.memory_gib} GiB, {report.disk_free_gib} GiB free on this disk",
        f"python      {report.python}",
        *(
            f"{name:<11} {version or 'not installed'}"
            for name, version in report.versions.items()
            if name in CORE
        ),
        f"devices     {devices}",
        f"driver      {report.driver or 'none found'}"
        + (f", for CUDA {report.cuda_of_driver} or older" if report.cuda_of_driver else ""),
        *(
            f"GPU         {gpu['name']}, compute capability {gpu['compute_capability']}"
            for gpu in report.gpus
        ),
    ]
    rest = {name: version for name, version in report.versions.items() if name not in CORE}
    lines.append("GPU side    " + ", ".join(f"{name} {version or '-'}" for name, version in rest.items()))
    lines.append(f"TE          {_te_here(report.transformer_engine)}")
    lines += ["", *_table(report.capability), "", report.verdict, *(f"fix: {fix}" for fix in report.fixes)]
    return "\n".join(lines)


CORE = ("jax", "jaxlib", "flax", "numpy")


def _te_here(said: dict) -> str:
    if not said:
        return "unknown: JAX did not start"
    if not said["ok"]:
        return f"not used: {said['reason']}"
    missing = [
        f"\n            not {op}: {reason}" for op, reason in said.get("operations", {}).items() if reason
    ]
    return "used" + "".join(missing)


def _table(here: str) -> list[str]:
    header, *rows = te.table()
    marked = {"CPU": "without TE"}.get(here, here)
    rows = [tuple(f"> {name}" if name == marked else name for name in header), *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [
        *lines,
        f"(> is what JAX uses here. Read from the sources of Transformer Engine {te.TESTED}, not measured.)",
    ]


if __name__ == "__main__":
    sys.exit(main())
