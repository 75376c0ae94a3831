"""Which call of Transformer Engine runs where, and the reason in words where it does not. The one place that says so.

The rules are read from TE 2.20.2's sources (``jax/cpp_extensions/gemm.py``, ``jax/quantize/helper.py``, ``jax/ep.py``,
``__init__.py``) and its documentation, not measured. Needs nothing but the standard library; only :func:`examine`
starts JAX.
"""

import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass, field
from typing import NamedTuple

TESTED = "2.20.2"
"""The version that the adapters were written against and are tested with."""
KNOWN = ("2.20", "2.21")
"""Releases whose signatures :mod:`moe_course.te.native` knows."""
INSTALL = (
    "pip install setuptools wheel pybind11 nvidia-cudnn-frontend && "
    f"pip install --no-build-isolation 'transformer_engine[core-cu13,jax]=={TESTED}'"
)
"""After JAX for CUDA 13. Isolated, the build would see no JAX and take CUDA 12's. ``scripts/te-wheel`` needs no toolkit."""

Version = tuple[int, ...]
MIN_CUDNN: Version = (9, 12, 0)
MIN_NCCL_EP: Version = (2, 30, 4)
MIN_JAX_TRITON: Version = (0, 9, 3)
"""Earlier ones could corrupt the results of TE's Triton kernels when autotuning met aliased buffers."""
BAD_CUBLAS: tuple[Version, Version, int] = (13, 7), (13, 8, 1), 103
"""From, up to (not included), on which compute capability and newer: silent corruption in grouped GEMM (TE #3475)."""

ARCHITECTURES: tuple[tuple[str, int, int], ...] = (
    ("Ampere", 80, 89),
    ("Ada", 89, 90),
    ("Hopper", 90, 100),
    ("Blackwell", 100, 120),
    ("RTX Blackwell", 120, 130),
)
"""Name, compute capability times ten: from, below. Blackwell is the datacenter's: B200, GB200, B300."""


@dataclass(frozen=True)
class Op:
    """One thing TE can do, and what it asks of the machine."""

    does: str
    instead: str
    """What of this package, or of JAX, does it without TE."""
    lowest: int
    """Compute capability times ten from which on it runs."""
    below: int = 999
    """The first compute capability on which it no longer does."""
    cublas: tuple[tuple[int, Version], ...] = ()
    """(compute capability, oldest cuBLAS) from that capability on."""
    nccl: bool = False
    triton: bool = False
    ranks: int = 1
    """GPUs it needs at least."""

    def least_cublas(self, capability: int) -> Version:
        """The oldest cuBLAS for this GPU: the floor of the highest capability that applies. () for any."""
        return max((item for item in self.cublas if capability >= item[0]), default=(0, ()))[1]


_GROUPED = ((90, (13, 4)), (100, (13, 3)))


def _sized_on_device(since: int) -> dict:
    return {"lowest": since, "below": 120, "cublas": _GROUPED}


OPS: dict[str, Op] = {
    "route": Op("fused scores and top-k", "routing.route", 80),
    "balance": Op("fused load balancing loss", "balance.load_balancing_loss", 80),
    "permute": Op("token order <-> expert order", "grouping.permute", 80, triton=True),
    "grouped_gemm": Op("grouped GEMM, bf16", "grouped_gemm, Pallas or tiled", **_sized_on_device(90)),
    "grouped_gemm_mxfp8": Op("grouped GEMM, MXFP8", "grouped_gemm, emulated", **_sized_on_device(100)),
    "grouped_gemm_copied_sizes": Op("grouped GEMM, sizes copied to the host", "grouped_gemm", 80),
    "dense": Op("one GEMM, bf16", "jnp.matmul", 80),
    "dense_fp8": Op("one GEMM, FP8 per tensor", "quant, emulated", 89, cublas=((0, (12, 1, 3)),)),
    "dense_mxfp8": Op("one GEMM, MXFP8", "quant, emulated", 100, 120, cublas=((0, (12, 8)),)),
    "dense_nvfp4": Op("one GEMM, NVFP4", "quant, emulated", 100, 120, cublas=((0, (12, 8)),)),
    "dispatch": Op("expert parallelism over NCCL EP", "dispatch", 90, nccl=True, ranks=2),
    "moe": Op("the MoE layer in one call, bf16", "layers.MoE", **_sized_on_device(90), nccl=True, ranks=2),
    "moe_mxfp8": Op(
        "the MoE layer in one call, MXFP8", "layers.MoE", **_sized_on_device(100), nccl=True, ranks=2
    ),
}
"""By name. ``dense_nvfp4`` is TE's own; no adapter here offers it. TE itself tests ``moe`` on Blackwell only."""


class Availability(NamedTuple):
    """Whether it can be used here; if not, why, and what would change that."""

    ok: bool
    reason: str = ""


@dataclass(frozen=True)
class Machine:
    """What the answer depends on. Tests make their own."""

    gpu: str | None = None
    """Name of the GPUs that JAX uses; None without one."""
    capability: int = 0
    """The lowest compute capability among them, times ten."""
    devices: int = 0
    """GPUs of the whole run."""
    packages: dict[str, str | None] = field(default_factory=dict)
    """Versions of ``transformer-engine``, its ``core`` and its ``extension``; None: not installed."""
    cublas: Version = ()
    cudnn: Version = ()
    nccl: Version = ()
    jax: Version = ()
    triton: bool = False
    load_error: str = ""
    """What importing TE said, if it failed."""


def available(op: str | None = None, machine: Machine | None = None) -> Availability:
    """Whether Transformer Engine, or one operation of :data:`OPS`, can be used on this machine (or on ``machine``).

    Looks at the GPUs that JAX uses, so it starts JAX. Raises ``KeyError`` for an operation that is not in OPS.
    """
    reason = why_not(op, examine() if machine is None else machine)
    return Availability(not reason, reason)


def why_not(op: str | None, machine: Machine) -> str:
    """Why TE (``op`` None), or this operation, does not run on ``machine``; "" if nothing known stands against it."""
    reason = _general(machine)
    if reason or op is None:
        return reason
    return too_old_or_new(op, machine.capability) or _libraries(op, machine)


def too_old_or_new(op: str, capability: int) -> str:
    """Why a GPU of this compute capability (times ten) does not run ``op``; "" if it does."""
    rule = OPS[op]
    has = f"this one has {_dotted(capability)}"
    if capability < rule.lowest:
        return (
            f"the GPU is too old for TE's {op} ({rule.does}): it needs compute capability "
            f"{_dotted(rule.lowest)} ({_architecture(rule.lowest)}) and {has}. Without it: {rule.instead}."
        )
    if capability >= rule.below:
        return (
            f"TE's {op} ({rule.does}) runs below compute capability {_dotted(rule.below)} only and {has} "
            f"({_architecture(capability)}). Without it: {rule.instead}."
        )
    return ""


def _general(machine: Machine) -> str:
    if machine.gpu is None:
        return "JAX uses no GPU here, and TE's kernels run on NVIDIA GPUs only. Everything has a stand-in."
    meta, core, extension = (machine.packages.get(p) for p in ("transformer-engine", "core", "extension"))
    if not (meta and core):
        return f"Transformer Engine is not installed. Run: {INSTALL}"
    if not extension:
        return f"TE {meta} is here without its JAX extension, which is built on the machine that uses it. Run: {INSTALL}"
    if len({meta, core, extension}) > 1:
        return (
            f"version mismatch: transformer-engine {meta}, its core {core} and its JAX extension {extension} "
            f"must be equal. Run: {INSTALL}"
        )
    if ".".join(meta.split(".")[:2]) not in KNOWN:
        return f"version mismatch: TE {meta} is here and this package knows {' and '.join(KNOWN)}. Run: {INSTALL}"
    if machine.cudnn and machine.cudnn < MIN_CUDNN:
        return f"cuDNN {_text(machine.cudnn)} is too old: TE needs {_text(MIN_CUDNN)}. Run: pip install -U nvidia-cudnn-cu13"
    if machine.load_error:
        return f"Transformer Engine does not load: {machine.load_error}"
    return ""


def _libraries(op: str, machine: Machine) -> str:
    rule = OPS[op]
    needed = rule.least_cublas(machine.capability)
    if needed and machine.cublas and machine.cublas < needed:
        return (
            f"cuBLAS {_text(machine.cublas)} is too old for TE's {op} on {machine.gpu}: it needs "
            f"{_text(needed)}. Run: pip install -U nvidia-cublas"
        )
    since, until, on = BAD_CUBLAS
    if rule.cublas is _GROUPED and machine.capability >= on and since <= machine.cublas < until:
        return (
            f"cuBLAS {_text(machine.cublas)} can corrupt grouped GEMMs on {machine.gpu} without a word: use "
            f"{_text(until)} or newer. Run: pip install -U nvidia-cublas"
        )
    if rule.nccl and machine.nccl and machine.nccl < MIN_NCCL_EP:
        return (
            f"NCCL {_text(machine.nccl)} is too old for TE's {op}: NCCL EP needs {_text(MIN_NCCL_EP)}. "
            "Run: pip install -U nvidia-nccl-cu13"
        )
    if machine.devices < rule.ranks:
        return f"TE's {op} needs {rule.ranks} GPUs at least, and there is {machine.devices}. Without it: {rule.instead}."
    if rule.triton and not machine.triton:
        return f"TE's {op} is written in Triton, which is not installed. Run: pip install triton"
    if rule.triton and machine.jax and machine.jax < MIN_JAX_TRITON:
        return f"JAX {_text(machine.jax)} can corrupt the results of TE's {op}: use {_text(MIN_JAX_TRITON)} or newer."
    return ""


_LIBRARY_PACKAGES = (
    ("cublas", "nvidia-cublas", "nvidia-cublas-cu12"),
    ("cudnn", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    ("nccl", "nvidia-nccl-cu13", "nvidia-nccl-cu12"),
)


def examine() -> Machine:
    """This machine. Starts JAX; loads TE only where JAX uses a GPU."""
    import jax

    gpus = [device for device in jax.devices() if device.platform in ("gpu", "cuda")]
    packages = {
        "transformer-engine": _package("transformer-engine"),
        "core": _package("transformer-engine-cu13") or _package("transformer-engine-cu12"),
        "extension": _package("transformer-engine-jax"),
    }
    facts = {"packages": packages, "jax": version_tuple(jax.__version__)}
    from moe_course.te import native

    if native.stand_in is not None:
        return _stand_in(native.stand_in, len(jax.devices()), facts)
    if not gpus:
        return Machine(**facts)
    libraries = {
        name: version_tuple(_package(cu13) or _package(cu12) or "") for name, cu13, cu12 in _LIBRARY_PACKAGES
    }
    error = ""
    if all(packages.values()):
        error = native.load_error()
        libraries |= {} if error else native.library_versions()  # what was loaded, from a package or not
    return Machine(
        gpu=gpus[0].device_kind,
        capability=min(_capability_of(device) for device in gpus),
        devices=len(gpus),
        triton=importlib.util.find_spec("triton") is not None,
        load_error=error,
        **libraries,
        **facts,
    )


def _stand_in(capability: int, devices: int, facts: dict) -> Machine:
    """The GPU of :func:`moe_course.te.without_gpu.taken_for_a_gpu`, whose ``load`` has looked at the packages."""
    packages = {name: version or TESTED for name, version in facts["packages"].items()}
    name = f"a GPU of compute capability {_dotted(capability)} that is not there"
    return Machine(name, capability, devices, packages, jax=facts["jax"], triton=True)


def table() -> list[tuple[str, ...]]:
    """The capability table in words: a header, then one row per operation. Cells: yes, no, or the cuBLAS needed."""
    rows = [("operation of TE", *(name for name, _, _ in ARCHITECTURES), "without TE")]
    for name, rule in OPS.items():
        cells = [_cell(rule, low) for _, low, _ in ARCHITECTURES]
        rows.append((f"{name}: {rule.does}", *cells, rule.instead))
    return rows


def _cell(rule: Op, capability: int) -> str:
    if not rule.lowest <= capability < rule.below:
        return "no"
    needed = rule.least_cublas(capability)
    return f"cuBLAS {_text(needed)}" if needed >= (13,) else "yes"


def architecture(capability: int | None) -> str | None:
    """The name in :data:`ARCHITECTURES` of a compute capability times ten; None for none of them."""
    for name, low, high in ARCHITECTURES:
        if capability is not None and low <= capability < high:
            return name
    return None


def _architecture(capability: int) -> str:
    return architecture(capability) or ("older than Ampere" if capability < 80 else "newer than this table")


def version_tuple(text: str) -> Version:
    """``"13.10.0.20"`` as (13, 10, 0, 20); () for what begins with no number."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _text(version: Version) -> str:
    return ".".join(map(str, version))


def _dotted(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"


def _capability_of(device) -> int:
    """A JAX device's compute capability ("9.0", on some versions "90") times ten; 0 if it does not say."""
    text = str(getattr(device, "compute_capability", "") or "0")
    return round(float(text) * 10) if "." in text else int(text)


def _package(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
