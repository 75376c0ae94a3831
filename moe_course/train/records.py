"""A finished or broken-off run, read back from its folder, and the statistics a report takes of it.

Every part may be missing: what is not there reads as empty, NaN or None.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from moe_course.models.config import ModelConfig
from moe_course.train.run_dir import CONFIG, SUMMARY, RunDir

COPIES = ("made", "sent", "received", "computed", "combined")
"""Where the token ledger counts, in the order a copy passes."""
WINDOW = 100
"""At most so many steps at the end of a run stand for its final state (see :attr:`Run.window`)."""


@dataclass(frozen=True)
class Run:
    """What a run wrote: settings, one record a step, one an evaluation, events, and the closing summary."""

    name: str
    config: Mapping
    summary: Mapping
    steps: Sequence[Mapping]
    evals: Sequence[Mapping]
    events: Sequence[Mapping]

    @classmethod
    def read(cls, path: Path) -> "Run":
        """Read ``path``; only the files that are there."""
        folder = RunDir(path)
        kinds: dict[str, list[dict]] = {"step": [], "eval": [], "event": []}
        for record in folder.records():
            kinds.setdefault(record.get("kind", ""), []).append(record)
        summary = folder.read_json(SUMMARY)
        name = summary.get("name") or path.resolve().name
        return cls(name, folder.read_json(CONFIG), summary, kinds["step"], kinds["eval"], kinds["event"])

    @property
    def window(self) -> int:
        """Steps that stand for the start or the end of the run: a tenth of it, at most :data:`WINDOW`."""
        return max(1, min(WINDOW, len(self.steps) // 10))

    # Settings

    @cached_property
    def model(self) -> ModelConfig | None:
        """The model, if the config holds one."""
        known = {field.name for field in fields(ModelConfig)}
        saved = self.config.get("model") or {}
        return (
            ModelConfig(**{name: value for name, value in saved.items() if name in known}) if saved else None
        )

    @cached_property
    def domains(self) -> tuple[str, ...]:
        """Every domain that a record has a figure for, in the order of the records."""
        found = {}
        for record in (*self.evals[-1:], *self.steps):
            by_domain = record.get("bits_per_byte_by_domain") or {}
            found |= {name: None for name, bits in by_domain.items() if bits is not None}
        return tuple(found)

    @property
    def num_devices(self) -> int | None:
        """Devices of the run."""
        return (self.summary.get("devices") or {}).get("count") or self.config.get("devices")

    def baselines(self, domain: str) -> list[float]:
        """Held-out bits per byte of the n-gram models of order 0, 1, 2, ..."""
        return list((self.summary.get("baselines") or {}).get(domain) or [])

    # Columns

    def column(self, key: str) -> Float[np.ndarray, "steps"]:
        """One number a step, NaN where it is missing."""
        return as_floats(record.get(key) for record in self.steps)

    @cached_property
    def step(self) -> Float[np.ndarray, "steps"]:
        """Step numbers, from 1."""
        return self.column("step")

    @cached_property
    def bytes_seen(self) -> Float[np.ndarray, "steps"]:
        """Bytes predicted up to and including each step."""
        return np.nancumsum(self.column("targets"))

    def training_bits(self, domain: str) -> Float[np.ndarray, "steps"]:
        """Training bits per byte of one domain; NaN where a batch held none of it."""
        return as_floats((record.get("bits_per_byte_by_domain") or {}).get(domain) for record in self.steps)

    def held_out(self, domain: str) -> tuple[Float[np.ndarray, "evals"], Float[np.ndarray, "evals"]]:
        """(step, bits per byte) of every evaluation of one domain."""
        steps = as_floats(record.get("step") for record in self.evals)
        bits = as_floats((record.get("bits_per_byte_by_domain") or {}).get(domain) for record in self.evals)
        return steps[np.isfinite(bits)], bits[np.isfinite(bits)]

    def bytes_at(self, steps: Float[np.ndarray, "n"]) -> Float[np.ndarray, "n"]:
        """Bytes predicted by the end of each of ``steps``; 0 before the first."""
        if not self.steps:
            return np.zeros_like(steps)
        return np.interp(steps, np.concatenate([[0], self.step]), np.concatenate([[0], self.bytes_seen]))

    # Experts

    @cached_property
    def load_steps(self) -> tuple[Float[np.ndarray, "n"], Int[np.ndarray, "n layers experts"]]:
        """(step, token copies per MoE layer and expert) of every step that has them; empty without any."""
        loads = [(record["step"], np.asarray(record["load"])) for record in self.steps if record.get("load")]
        loads = [(step, load) for step, load in loads if load.shape == loads[-1][1].shape]
        if not loads:
            return np.zeros(0), np.zeros((0, 0, 0), np.int64)
        return np.array([step for step, _ in loads], float), np.stack([load for _, load in loads])

    @cached_property
    def domain_load(self) -> tuple[tuple[str, ...], Int[np.ndarray, "domains layers experts"]]:
        """(domains, token copies) of the last evaluation; empty without any."""
        by_domain = next((e["load_by_domain"] for e in reversed(self.evals) if e.get("load_by_domain")), {})
        by_domain = {name: load for name, load in by_domain.items() if load}
        if not by_domain:
            return (), np.zeros((0, 0, 0), np.int64)
        return tuple(by_domain), np.stack([np.asarray(load) for load in by_domain.values()])

    def layer_names(self, count: int) -> list[str]:
        """Names of ``count`` MoE layers by their place in the model, multi-token-prediction modules last."""
        in_trunk, first = (
            (self.model.num_moe_layers, self.model.num_dense_layers) if self.model else (count, 0)
        )
        return [f"layer {first + i}" if i < in_trunk else f"MTP {i - in_trunk + 1}" for i in range(count)]

    @cached_property
    def ledger(self) -> dict[str, int]:
        """Totals over all steps of where token copies were counted, and ``dropped``. Empty without any."""
        entries = [record["ledger"] for record in self.steps if record.get("ledger")]
        if not entries:
            return {}
        return {name: sum(entry.get(name, 0) for entry in entries) for name in (*COPIES, "dropped")}

    def first_unbalanced(self) -> int | None:
        """The first step whose own books do not balance. Totals can agree while steps do not."""
        for record in self.steps:
            entry = record.get("ledger")
            if entry and (entry.get("dropped") or len({entry.get(name) for name in COPIES}) > 1):
                return record["step"]
        return None

    # Time

    @cached_property
    def compiling(self) -> np.ndarray:
        """Which steps paid for a compilation or a restart: the first and those by a new bucket or a resume,
        where they took more than 1.5 times the median."""
        seconds = self.column("seconds")
        if not np.isfinite(seconds).any():
            return np.zeros(len(seconds), bool)
        steps = {event.get("step") for event in self.events if event.get("event") in ("bucket", "resume")} - {
            None
        }
        steps |= {step + 1 for step in steps} | {self.step[0]}
        return np.isin(self.step, sorted(steps)) & (seconds > 1.5 * np.nanmedian(seconds))

    @cached_property
    def steady_seconds(self) -> Float[np.ndarray, "n"]:
        """Wall seconds of the steps without compilation."""
        seconds = self.column("seconds")
        return seconds[~self.compiling & np.isfinite(seconds)]

    @property
    def tokens_per_step(self) -> float:
        """Positions processed by a step (median; they are all alike)."""
        tokens = self.column("tokens")
        return float(np.nanmedian(tokens)) if np.isfinite(tokens).any() else float("nan")


def as_floats(values: Iterable[float | None]) -> Float[np.ndarray, "n"]:
    """An array with NaN for None."""
    return np.array([np.nan if value is None else value for value in values], float)


def mutual_information(counts: Float[np.ndarray, "domains experts"]) -> float:
    """Bits that a copy's expert tells about its domain, from the counts themselves (plug-in estimate).

    0 when every domain uses the experts alike; at most the entropy of either. Biased upwards by about
    (domains - 1)(experts - 1) / (2 ln 2 x copies), Miller 1955.
    """
    total = counts.sum()
    if total == 0:
        return float("nan")
    joint = counts / total
    independent = joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)
    seen = joint > 0
    return float((joint[seen] * np.log2(joint[seen] / independent[seen])).sum())


def entropy(counts: Float[np.ndarray, "n"]) -> float:
    """Bits, from the counts themselves."""
    share = counts[counts > 0] / max(counts.sum(), 1)
    return float(-(share * np.log2(share)).sum())


def against_baselines(bits: float, baselines: Sequence[float]) -> str:
    """Which n-gram orders ``bits`` is below, in words."""
    if not baselines:
        return "no n-gram baseline"
    beaten = [order for order, baseline in enumerate(baselines) if bits < baseline]
    unbeaten = [order for order in range(len(baselines)) if order not in beaten]
    best = int(np.argmin(baselines))
    if not unbeaten:
        return f"beats every n-gram, the best is order {best} ({baselines[best]:.3f})"
    if not beaten:
        return f"beats no n-gram, order 0 is {baselines[0]:.3f}"
    if max(beaten) < min(unbeaten):
        last, following = max(beaten), min(unbeaten)
        return (
            f"beats order {last} ({baselines[last]:.3f}), not order {following} ({baselines[following]:.3f})"
        )
    beaten_names, unbeaten_names = (
        f"order{'s' if len(orders) > 1 else ''} {', '.join(map(str, orders))}"
        for orders in (beaten, unbeaten)
    )
    return f"beats {beaten_names}, not {unbeaten_names}"
