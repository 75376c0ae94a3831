"""The GPUs that can be compiled for, and what XLA's compiler must be told of them. Imports no JAX."""

import importlib.metadata
import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from moe_course.environment import release_of
from moe_course.errors import SettingError

PACKAGES = ("jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-nvvm")
"""XLA's GPU compiler as a plugin, and NVIDIA's assembler and math library, which it calls: the ``aot`` extra."""
RESERVED_BYTES = 12 * 10**9
"""Left free by the answer to "does it fit": NCCL's buffers, the CUDA context, workspaces of libraries and
fragmentation, none of which the compiler counts."""
_NEWER = (
    "mem_clock_ghz",
    "reserved_shared_memory_per_block",
    "max_blocks_per_multiprocessor",
    "collective_memory_granularity",
)
"""Fields that the compiler of JAX 0.10 does not know."""


@dataclass(frozen=True)
class Target:
    """One kind of GPU, as machines are built of it."""

    name: str
    gpus_per_host: int
    capability: int
    """Compute capability, times ten."""

    def topology(self, gpus: int) -> str:
        """``partitions x hosts x GPUs per host``, as JAX's topology descriptions want it."""
        per_host = min(self.gpus_per_host, gpus)
        if gpus < 1 or gpus % per_host:
            raise SettingError(
                f"{gpus} GPUs are no whole number of {self.name} machines of {self.gpus_per_host}. "
                f"Set --gpus to a multiple of {self.gpus_per_host}."
            )
        return f"1x{gpus // per_host}x{per_host}"


TARGETS = {
    target.name: target
    for target in (
        Target("gb200", 4, 100),
        Target("b200", 8, 100),
        Target("h200", 8, 90),
        Target("h100", 8, 90),
    )
}


def get_target(name: str) -> Target:
    """The target of that name, or :class:`SettingError` with the nearest one."""
    if name in TARGETS:
        return TARGETS[name]
    close = get_close_matches(name, TARGETS, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise SettingError(f"there is no hardware {name!r}.{hint} There are {', '.join(TARGETS)}.")


def missing() -> str:
    """Why nothing can be compiled for a GPU here, with the fix; "" if it can."""
    absent = [name for name in PACKAGES if _version(name) is None]
    jax = importlib.metadata.version("jax")
    fix = f"Run: pip install jax-cuda13-pjrt=={jax} {' '.join(PACKAGES[1:])} (the aot extra, about 260 MB)."
    if absent:
        return f"{' and '.join(absent)} not installed: there is no GPU compiler here. {fix}"
    if _version(PACKAGES[0]) != jax:
        return f"{PACKAGES[0]} {_version(PACKAGES[0])} does not fit jax {jax}. {fix}"
    return ""


def compiler_versions() -> dict[str, str]:
    """Versions of what compiles."""
    return {name: _version(name) or "not installed" for name in ("jax", "jaxlib", *PACKAGES)}


def description(target: Target, jax_version: str) -> str:
    """What XLA must be told of the GPU, a text protobuf of the fields that this JAX's compiler knows."""
    text = (Path(__file__).parent / "devices" / f"{target.name}.txtpb").read_text()
    if release_of(jax_version) >= (0, 11):
        return text
    return re.sub(rf"(?m)^  (?:{'|'.join(_NEWER)}): .*\n", "", text)


def memory_bytes(text: str) -> int:
    """Memory of the GPU that a description speaks of."""
    return int(re.search(r"device_memory_size:\s*(\d+)", text).group(1))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
