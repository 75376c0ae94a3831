"""Machines: peaks, memory, links and measured ceilings, each with its source. Imports no JAX.

The table is ``data/hardware.json``. Peaks are dense. Bandwidths are one way and per GPU, in bytes.
"""

import functools
import json
import re
from dataclasses import dataclass, replace
from importlib import resources

from moe_course.errors import SettingError

ALIASES = {
    "h100": "H100 SXM",
    "h200": "H200 SXM",
    "h800": "H800 SXM",
    "a100": "A100 SXM 80GB",
    "b200": "B200 (HGX/DGX)",
    "gb200": "GB200 NVL72",
    "b300": "B300 (HGX/DGX)",
    "gb300": "GB300 NVL72",
    "v5p": "TPU v5p",
    "v6e": "TPU v6e",
}
FORMATS = ("bf16", "fp8", "fp4")


@dataclass(frozen=True)
class Machine:
    """One accelerator and its links, in plain units: TFLOP/s, bytes, bytes per second one way per GPU."""

    name: str
    peak_tflops: dict[str, float | None]
    """Dense, by format of the operands: bf16, fp8, fp4. None: the machine has no such unit."""
    memory: float
    hbm: float
    nvlink: float
    domain: int
    """GPUs that reach each other by NVLink (or ICI)."""
    nic: float
    """Bytes per second of a GPU's share of the network."""
    host: float
    measured: dict[str, float]
    """Ceilings that somebody measured, by name; units are in the name."""
    sources: dict[str, str]
    """Field -> where its value is from, and how sure that is."""

    def __hash__(self):
        return hash(self.name)

    def peak(self, precision: str) -> float:
        """Dense peak in TFLOP/s of GEMMs in ``bf16``, ``fp8``, ``mxfp8`` or ``nvfp4``."""
        value = self.peak_tflops[format_of(precision)]
        if value is None:
            has = [name for name, peak in self.peak_tflops.items() if peak]
            raise SettingError(f"{self.name} has no {precision} GEMM. Use --precision {' or '.join(has)}.")
        return value


def format_of(precision: str) -> str:
    """The operand format (bf16, fp8, fp4) of a recipe or of a published row's words for it."""
    if "fp4" in precision:
        return "fp4"
    return "fp8" if "fp8" in precision or "float8" in precision else "bf16"


@functools.cache
def table() -> dict:
    """``hardware.json`` as it is."""
    return json.loads((resources.files("moe_course.scaling") / "data" / "hardware.json").read_text("utf-8"))


@functools.cache
def machines() -> dict[str, Machine]:
    """Every machine of the table, by its full name."""
    return {device["name"]: _machine(device) for device in table()["devices"]}


def machine(name: str) -> Machine:
    """A machine by its short name (``gb200``), its full name, or how a published row or a driver calls it."""
    known = machines()
    if name in known:
        return known[name]
    if "500W" in name:
        return _at_500_watts(known["H100 SXM"])
    words = re.findall(r"[a-z]+\d+[a-z]?|v\d\w", name.lower())
    for word in words:
        if word in ALIASES:
            return known[ALIASES[word]]
    raise SettingError(f"there is no machine {name!r}. Use one of {', '.join(ALIASES)}.")


@functools.cache
def _at_500_watts(h100: Machine) -> Machine:
    """torchtitan's H100: 96 GB of HBM2e at 2.4 TB/s, 500 W instead of 700 W.

    Under load its clocks are lower; we take (500 / 700) ** 0.5 of the peaks, an assumption, since no page gives them.
    """
    factor = (500 / 700) ** 0.5
    peaks = {name: peak and peak * factor for name, peak in h100.peak_tflops.items()}
    return replace(h100, name="H100 SXM 500 W", peak_tflops=peaks, memory=96e9, hbm=2.4e12)


def disagreements() -> list[dict]:
    """What the sources of the table contradict each other in, and what we use."""
    return table()["disagreements"]


def _machine(device: dict) -> Machine:
    def value(key: str, scale: float) -> float:
        found = device[key]["value"]
        return 0.0 if found is None else found * scale

    cells = {key: cell for key, cell in device.items() if isinstance(cell, dict) and "source" in cell}
    cells |= {f"{name} peak": cell for name, cell in device["peak_dense_tflops"].items()}
    return Machine(
        name=device["name"],
        peak_tflops={name: device["peak_dense_tflops"][name]["value"] for name in FORMATS},
        memory=value("hbm_gb", 1e9),
        hbm=value("hbm_tb_s", 1e12),
        nvlink=value("nvlink_gb_s_per_direction", 1e9),
        domain=int(value("nvlink_domain", 1)),
        nic=value("nic_gbit_per_gpu", 1e9 / 8) or 25e9 / 4,  # TPU: a host's 25 GB/s over its 4 chips
        host=value("host_link_gb_s_per_direction", 1e9),
        measured={name: cell["value"] for name, cell in device["measured"].items()},
        sources={key: f"{cell['source']} ({cell['confidence']})" for key, cell in cells.items()},
    )
