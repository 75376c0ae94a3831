"""``compile_plan``: a training step compiled for GPUs that are not here, and what the compiled program says."""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from moe_course.aot import flops, hlo, predict
from moe_course.aot.request import LOG, MEASURED, PROGRAM, REQUEST, XLA_FLAGS, Request
from moe_course.aot.targets import RESERVED_BYTES, missing
from moe_course.errors import RunError
from moe_course.train.config import TrainConfig

STATEMENT = "compiled, never run"
"""Of every figure here: a compiler planned it, no GPU was asked."""


@dataclass(frozen=True)
class Compiled:
    """What the program of one GPU says. Bytes are of one GPU, and of one step where that matters."""

    statement: str
    hardware: str
    gpus: int
    mesh: dict[str, int]
    parameters: int
    tokens_per_gpu: int
    state_bytes_per_gpu: int
    """Weights, moments and the rest of the train state: exact."""
    temp_bytes_per_gpu: int
    """What XLA plans besides arguments and results: a plan, good to some 10 GB, see ``notes``."""
    host_bytes_per_gpu: int
    """Of the temporary, in the host's memory (offload)."""
    needed_bytes_per_gpu: int
    """Arguments, temporary, and results that do not take an argument's place."""
    device_bytes: int
    reserved_bytes: int
    """Left free for what the compiler does not count: NCCL's buffers, the CUDA context, fragmentation."""
    fits: bool
    """``needed_bytes_per_gpu + reserved_bytes <= device_bytes``. XLA compiles what does not fit, too."""
    margin_bytes: int
    """What is left (below 0: missing) after both."""
    collectives: list[dict]
    """``kind, axis, count, bytes, predicted`` each; bytes are those that one GPU sends: ``hlo.wire_bytes``."""
    flops: dict
    """Of one GPU and step, in parts: ``flops.split``."""
    kernels: dict[str, int]
    """Calls out of XLA, and how often they run in a step."""
    compile_s: float
    trace_s: float
    cpu_s: float
    peak_rss_bytes: int
    """Of the compiling process and its largest child together."""
    notes: list[str]
    versions: dict[str, str]
    compiled_on: str
    config: dict
    program: str
    """The optimised program of one GPU, gzipped text."""

    def as_json(self) -> dict:
        """Everything, for ``--json``."""
        return asdict(self)

    def text(self) -> str:
        """The optimised program of one GPU (HLO)."""
        return read_program(Path(self.program))


def compile_plan(
    config: TrainConfig,
    hardware: str = "gb200",
    gpus: int = 64,
    *,
    cache: Path | None = None,
    again: bool = False,
    timeout: float = 3600,
) -> Compiled:
    """Compile one training step of ``config`` for ``gpus`` GPUs of a kind, in a process of its own.

    ``config`` must be for that many devices: ``compile_plan(fit_to(config, 64), "gb200", 64)``. The result is kept
    in ``cache`` (default :func:`cache_folder`) under a hash of settings, versions and code; ``again`` ignores it.

    Raises:
        SettingError: the configuration cannot work, or there is no such hardware.
        RunError: there is no GPU compiler here (the message says what to install), or compiling failed.
    """
    request = Request(config, hardware, gpus)
    request.validate()
    folder = (cache or cache_folder()) / request.key()
    if again or not (folder / MEASURED).exists():
        _compile(request, folder, timeout)
    return read(request, folder)


def cache_folder() -> Path:
    """``$MOE_COURSE_COMPILED``, or ``moe-course/compiled`` in the user's cache folder."""
    if named := os.environ.get("MOE_COURSE_COMPILED"):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "moe-course", "compiled").expanduser()


def _compile(request: Request, folder: Path, timeout: float) -> None:
    """Run the worker; ``folder`` appears when all is in it."""
    reason = missing()
    if not reason and request.config.backend == "te":
        from moe_course.te import without_gpu  # imports JAX

        reason = without_gpu.missing()
    if reason:
        raise RunError(reason)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        beside = Path(made)
        (beside / REQUEST).write_text(json.dumps(request.as_json(), indent=1))
        environment = os.environ | {
            "XLA_FLAGS": " ".join(XLA_FLAGS),
            "JAX_PLATFORMS": "cpu",
            "JAX_ENABLE_COMPILATION_CACHE": "false",
        }
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        command = [sys.executable, "-W", "ignore", "-m", "moe_course.aot.worker", str(beside)]
        with (beside / LOG).open("w") as log:
            try:
                done = subprocess.run(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    timeout=timeout,
                )
            except subprocess.TimeoutExpired:
                raise RunError(f"compiling took more than {timeout:.0f} s and was stopped.") from None
        if done.returncode:
            raise RunError(f"compiling failed: {_reason((beside / LOG).read_text(), done.returncode)}")
        shutil.rmtree(folder, ignore_errors=True)
        beside.rename(folder)
        beside.mkdir()  # for TemporaryDirectory to remove


def _reason(log: str, code: int) -> str:
    """The last words of a worker that failed."""
    if code < 0:
        return f"the compiling process was ended by signal {-code}. 9 is often the system, out of memory."
    errors = [line for line in log.splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)]
    if not errors:
        return f"the compiling process ended with code {code}."
    return errors[-1].removeprefix("moe_course.errors.SettingError: ")[:2000]


def read(request: Request, folder: Path) -> Compiled:
    """The result that :func:`compile_plan` left in ``folder``."""
    measured = json.loads((folder / MEASURED).read_text())
    versions = json.loads((folder / REQUEST).read_text())["versions"]
    config, memory, mesh = request.config, measured["memory"], measured["mesh"]
    module = hlo.parse(read_program(folder / PROGRAM))
    needed = memory["argument_size"] + memory["temp_size"] + memory["output_size"] - memory["alias_size"]
    margin = measured["device_bytes"] - needed - RESERVED_BYTES
    return Compiled(
        statement=STATEMENT,
        hardware=request.hardware,
        gpus=request.gpus,
        mesh=mesh,
        parameters=measured["parameters"],
        tokens_per_gpu=config.tokens_per_device,
        state_bytes_per_gpu=measured["state_bytes"],
        temp_bytes_per_gpu=memory["temp_size"],
        host_bytes_per_gpu=memory.get("host_temp_size", 0),
        needed_bytes_per_gpu=needed,
        device_bytes=measured["device_bytes"],
        reserved_bytes=RESERVED_BYTES,
        fits=margin >= 0,
        margin_bytes=margin,
        collectives=predict.beside(hlo.collectives(module, mesh), config, versions["jax"]),
        flops=flops.split(hlo.products(module), config),
        kernels=dict(sorted(hlo.kernels(module).items())),
        compile_s=round(sum(measured["seconds"].values()), 1),
        trace_s=round(measured["seconds"]["trace"] + measured["seconds"]["lower"], 1),
        cpu_s=round(measured["cpu_s"], 1),
        peak_rss_bytes=measured["peak_rss_bytes"],
        notes=_notes((folder / LOG).read_text(), module),
        versions=versions,
        compiled_on=time.strftime("%Y-%m-%d", time.gmtime((folder / MEASURED).stat().st_mtime)),
        config=asdict(config),
        program=str(folder / PROGRAM),
    )


def read_program(path: Path) -> str:
    """The text of a stored program."""
    with gzip.open(path, "rt") as file:
        return file.read()


def _notes(log: str, module: hlo.Module) -> list[str]:
    """What a reader must know: XLA's own warnings, and what the text cannot say."""
    notes = []
    for found in re.findall(r"Can't reduce memory use below (\S+) \(\d+ bytes\) by rematerialization", log)[
        :1
    ]:
        notes.append(f"XLA wanted to use less memory and could not go below {found}.")
    if module.unknown_loops:
        notes.append(
            f"{len(module.unknown_loops)} loops run as often as data says; what is in them is counted once."
        )
    return notes
