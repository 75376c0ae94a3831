"""Prepare JAX with one call: devices, threads, memory, and a status that says what you got.

Import this module and call :func:`setup` before anything makes JAX look for devices (the first
``jax.devices()``, ``jnp`` array or jit call). Importing JAX first is fine; starting it is not::

    from moe_course.environment import setup

    print(setup())  # every GPU there is, up to 8; else 8 simulated CPU devices

Nothing here imports JAX until :func:`setup` runs.
"""

import contextlib
import ctypes
import glob
import importlib.metadata
import os
import platform as host
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from moe_course.errors import RunError, SettingError

if TYPE_CHECKING:
    import jax

MIN_POOL_THREADS = 16
"""Threads that XLA's CPU client needs so that 8 simulated devices cannot starve each other.

On JAX 0.10.2 with fewer cores than devices, an un-blocked loop of steps with collectives deadlocks: every
thread waits in a collective for a device whose step has no thread to run on. Sixteen cure it for 8 devices
(8 and 9 do not); JAX 0.12 does not need the cure. The client reads ``NPROC`` when it starts, not at import.
"""

MAX_SIMULATED_DEVICES = 1024


@dataclass(frozen=True)
class Status:
    """What JAX has to work with. ``str()`` gives four lines, then one line per note."""

    platform: Literal["cpu", "gpu"]
    num_devices: int
    """Devices to use: the first ``num_devices`` of ``jax.devices()``."""
    device_kind: str
    """The CPU or GPU model."""
    threads: int | None
    """Size of the pool that all simulated devices share; None: XLA's own choice (JAX started before)."""
    cores: int
    memory_bytes: int
    """Host memory, shared by all simulated devices; with GPUs, what JAX may use of one GPU."""
    versions: dict[str, str | int] = field(repr=False)
    notes: tuple[str, ...] = ()
    """What is not as it could be, and the fix."""

    @property
    def simulated(self) -> bool:
        """Whether the devices are shares of one CPU: right for correctness, meaningless for speed."""
        return self.platform == "cpu"

    @property
    def devices(self) -> list["jax.Device"]:
        """The devices to use."""
        import jax

        return jax.devices()[: self.num_devices]

    def __str__(self) -> str:
        count = f"{self.num_devices} simulated" if self.simulated else f"{self.num_devices}"
        owner = "shared by all devices" if self.simulated else "per GPU"
        pool = "XLA's default pool" if self.threads is None else f"{self.threads} in XLA's pool"
        names = ("python", "jax", "flax", "numpy")
        lines = [
            f"devices   {count} {self.platform.upper()} {_devices(self.num_devices)} ({self.device_kind})",
            f"threads   {pool} on {self.cores} {'core' if self.cores == 1 else 'cores'}",
            f"memory    {self.memory_bytes / 2**30:.1f} GiB {owner}",
            "versions  " + ", ".join(f"{name} {self.versions[name]}" for name in names),
        ]
        return "\n".join([*lines, *(f"note      {note}" for note in self.notes)])


def setup(devices: int = 8, *, platform: Literal["cpu", "gpu"] | None = None, quiet: bool = False) -> Status:
    """Start JAX on ``devices`` devices and report what it runs on.

    GPUs are used when JAX can use them: ``devices`` then says how many at most. Without one, the CPU is split
    into exactly ``devices`` simulated devices. Calling again with the same arguments changes nothing. In a
    multi-process run call ``jax.distributed.initialize`` first.

    Args:
      devices: simulated devices, or the most GPUs to use; per process.
      platform: ``"cpu"`` simulates even where there are GPUs; ``"gpu"`` fails where there are none; ``None``
        takes GPUs if it can (and obeys ``JAX_PLATFORMS``).
      quiet: do not print the status.

    Raises:
      SettingError: ``devices`` or ``platform`` cannot be had on any machine.
      RunError: JAX has started already with another number of devices or another platform, or ``platform`` is
        ``"gpu"`` and JAX sees none. The message says what to do.
    """
    _check_arguments(devices, platform)
    started = backends_started()
    if not started:
        prepare_cpu(devices)
    import jax

    with _only_on(jax, None if started else platform):
        status = _status(jax, devices, platform, started)
    if not quiet:
        print(status)
    return status


def prepare_cpu(devices: int) -> None:
    """What must be set before JAX starts, should it start on a CPU: devices, threads, memory."""
    if devices > 1:
        # An env variable, because the client offers no other way; it also reaches child processes, which is
        # wanted: the workers of a data loader or a test run need the same cure. One device cannot starve another,
        # and is up to 1.5 times slower with more threads than cores: each product is cut into more pieces.
        os.environ.setdefault("NPROC", str(max(MIN_POOL_THREADS, 2 * devices, cpu_cores())))
    import jax

    jax.config.update("jax_num_cpu_devices", devices)
    keep_freed_memory()


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed blocks instead of returning them to the system. False where it is not glibc.

    XLA:CPU allocates its temporaries anew for every execution. Blocks of megabytes come straight from the
    kernel, which zeroes each page again at every step, and each thread keeps a heap of its own. With one heap
    that never shrinks, a step of ``tiny`` on 8 devices takes 1.08 CPU seconds, not 1.55 (JAX 0.12).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    trim_threshold, mmap_threshold, arena_max = -1, -3, -8  # M_..., as malloc.h numbers them
    largest_int = 2**31 - 1
    settings = {trim_threshold: largest_int, mmap_threshold: largest_int, arena_max: 1}
    return all(mallopt(name, value) for name, value in settings.items())


def backends_started() -> bool:
    """Whether JAX has looked for devices in this process, after which :func:`setup` can change nothing.

    JAX has no public question for this. Both spellings below are private, so each is optional; if a future
    release drops them the answer is a guess of False, and :func:`setup` still compares the devices it gets.
    """
    bridge = sys.modules.get("jax._src.xla_bridge")
    if bridge is None:
        return False
    initialized = getattr(bridge, "backends_are_initialized", None)
    return bool(initialized() if initialized else getattr(bridge, "_backends", False))


def release_of(version: str) -> tuple[int, ...]:
    """Major and minor number of a version, to compare by: (0, 10) of 0.10.2."""
    return tuple(int(part) for part in version.split(".")[:2])


def cpu_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int:
    """Memory of this machine, or of its container if that is less. 0 where the system does not say."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0
    limit = _read("/sys/fs/cgroup/memory.max").strip()  # cgroup v2; "max" or absent: no limit
    return min(total, int(limit)) if limit.isdigit() else total


def cpu_model() -> str:
    """The CPU's name, as its maker writes it."""
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return " ".join(line.partition(":")[2].split())
    if host.system() == "Darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string") or host.machine()
    return host.processor() or host.machine() or "unknown CPU"


def versions() -> dict[str, str | int]:
    """What a measurement depends on: versions, platform, CPU, cores. Imports none of the packages."""

    def installed(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "not installed"

    packages = {name: name for name in ("jax", "jaxlib", "flax", "numpy", "grain")}
    packages["orbax"] = "orbax-checkpoint"
    return {
        "python": host.python_version(),
        **{key: installed(package) for key, package in packages.items()},
        "platform": f"{host.system()} {host.machine()}",
        "cpu": cpu_model(),
        "cores": cpu_cores(),
    }


def visible_gpus() -> list[str]:
    """NVIDIA GPUs that the system shows, whether or not JAX can use them. Never an error."""
    if shutil.which("nvidia-smi"):
        listed = [line for line in _output("nvidia-smi", "-L").splitlines() if line.startswith("GPU ")]
        if listed:
            return [line.partition(": ")[2].partition(" (UUID")[0] for line in listed]
    return ["NVIDIA GPU"] * len(glob.glob("/dev/nvidia[0-9]*"))


def _check_arguments(devices: int, platform: str | None) -> None:
    if not isinstance(devices, int) or isinstance(devices, bool) or not 1 <= devices <= MAX_SIMULATED_DEVICES:
        raise SettingError(
            f"devices is {devices!r}. Set --devices to a whole number from 1 to {MAX_SIMULATED_DEVICES}."
        )
    if platform not in (None, "cpu", "gpu"):
        raise SettingError(f"platform is {platform!r}. Use 'cpu', 'gpu', or None for the best there is.")


@contextlib.contextmanager
def _only_on(jax, platform: str | None):
    """Let JAX start on this platform only. If it cannot, forget the wish: the next setup() may differ."""
    before = jax.config.jax_platforms
    if platform:
        jax.config.update("jax_platforms", "cuda" if platform == "gpu" else "cpu")
    try:
        yield
    except RunError:
        jax.config.update("jax_platforms", before)
        raise


def _status(jax, devices: int, platform: str | None, started_before: bool) -> Status:
    """Start the backends (if they are not), and compare what came with what was asked."""
    try:
        found = jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # JAX asserts, without a word, that a plugin is there
        reason = (str(error) or f"it has no backend {jax.config.jax_platforms}").splitlines()[0].rstrip(".")
        raise RunError(f"JAX could not start: {reason}. {_gpu_fix() or NO_GPU}") from error
    kind = "cpu" if found[0].platform == "cpu" else "gpu"
    if (platform and kind != platform) or (kind == "cpu" and len(found) != devices):
        asked = f"{devices} {platform.upper()}" if platform else f"{devices}"
        raise RunError(
            f"JAX {'had started before setup()' if started_before else 'started'} with {len(found)} "
            f"{kind.upper()} {_devices(len(found))}; {asked} {_devices(devices)} were asked for. Restart the "
            f"kernel or process and call setup({devices}) before the first array, jit or jax.devices()."
        )
    stats = (found[0].memory_stats() or {}) if kind == "gpu" else {}
    return Status(
        platform=kind,
        num_devices=min(devices, len(found)) * jax.process_count(),
        device_kind=cpu_model() if kind == "cpu" else found[0].device_kind,
        threads=_pool_threads(),
        cores=cpu_cores(),
        memory_bytes=stats.get("bytes_limit", memory_bytes() if kind == "cpu" else 0),
        versions=versions(),
        notes=(*_gpu_notes(jax, kind, len(found), devices), *_thread_notes(jax, kind, devices)),
    )


def _devices(count: int) -> str:
    return "device" if count == 1 else "devices"


def _gpu_notes(jax, kind: str, found: int, devices: int) -> list[str]:
    if kind == "gpu":
        short = f"{devices} devices asked for, {found} GPU found; setup({devices}, platform='cpu') simulates."
        return [short] if found < devices else []
    asked_for_cpu = jax.config.jax_platforms == "cpu"
    return [] if asked_for_cpu or not (fix := _gpu_fix()) else [fix]


NO_GPU = "No NVIDIA GPU is visible here: use platform='cpu', and leave JAX_PLATFORMS unset."


def _gpu_fix() -> str:
    """Why JAX does not use the GPU, and what would change that. Empty without an NVIDIA GPU."""
    gpus = visible_gpus()
    if not gpus:
        return ""
    plugins = [p for p in ("jax-cuda13-plugin", "jax-cuda12-plugin") if _is_installed(p)]
    if not plugins:
        return f"{gpus[0]} is here but this JAX is CPU-only. To use it: pip install -e '.[gpu]'"
    return (
        f"{gpus[0]} is here and {plugins[0]} is installed, but JAX did not get it. "
        "Check CUDA_VISIBLE_DEVICES, JAX_PLATFORMS and the driver (nvidia-smi; CUDA 13 needs 580 or newer)."
    )


def _is_installed(package: str) -> bool:
    return any(True for _ in importlib.metadata.distributions(name=package))


def _pool_threads() -> int | None:
    nproc = os.environ.get("NPROC", "")
    return int(nproc) if nproc.isdigit() else None


def _thread_notes(jax, kind: str, devices: int) -> list[str]:
    """Warn about the deadlock of :data:`MIN_POOL_THREADS` where it can still happen."""
    release = release_of(jax.__version__)
    threads = _pool_threads() or cpu_cores()
    if kind != "cpu" or devices == 1 or release >= (0, 11) or threads >= min(2 * devices, MIN_POOL_THREADS):
        return []
    return [
        f"XLA's pool has {threads} threads for {devices} devices: on JAX {jax.__version__} a loop of "
        f"collectives can deadlock. Restart with NPROC={max(MIN_POOL_THREADS, 2 * devices)}, or block each "
        "step (jax.block_until_ready)."
    ]


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _output(*command: str) -> str:
    """What a command prints, or "" if it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
