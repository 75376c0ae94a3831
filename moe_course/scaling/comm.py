"""Communication: bytes by formula, time by alpha + bytes / beta, both fitted to published microbenchmarks.

``alpha`` is a start-up time in seconds, ``beta`` a bandwidth in bytes per second one way per GPU (Hockney 1994). The
collectives are the bandwidth-optimal ones: each GPU of ``n`` sends (n - 1) / n of the data once. No JAX.
"""

import math
from dataclasses import dataclass
from statistics import median

import numpy as np

from moe_course.scaling.hardware import Machine, machine
from moe_course.scaling.layout import Layout
from moe_course.scaling.published import communication_rows
from moe_course.scaling.shape import ModelShape


@dataclass(frozen=True)
class Link:
    """One level of the network: an NVLink domain, or the NICs between domains."""

    name: str
    alpha: float
    beta: float

    def seconds(self, wire_bytes: float, steps: int = 1) -> float:
        """Time to move ``wire_bytes`` of one GPU in ``steps`` messages that wait for each other."""
        return steps * self.alpha + wire_bytes / self.beta


def wire_bytes(collective: str, size: float, n: int) -> float:
    """Bytes that each of ``n`` GPUs sends. ``size``: the whole tensor, gathered or before it is scattered.

    For an all-to-all ``size`` is what one GPU holds, its own share included.
    """
    times = {"all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "all-reduce": 2}[collective]
    return times * size * (n - 1) / n


def collective_seconds(collective: str, size: float, n: int, link: Link, algorithm: str = "ring") -> float:
    """A collective of ``n`` GPUs over one link level, by ring (n - 1 steps) or tree (2 log2 n, no bandwidth lost)."""
    if n == 1:
        return 0.0
    passes = 2 if collective == "all-reduce" else 1
    if collective == "all-to-all":
        steps = 1
    else:
        steps = passes * ((n - 1) if algorithm == "ring" else math.ceil(math.log2(n)))
    return link.seconds(wire_bytes(collective, size, n), steps)


def hierarchical_seconds(
    collective: str, size: float, n: int, domain: int, inner: Link, outer: Link
) -> float:
    """A reduction or gather of ``n`` GPUs in domains: inside first, then each GPU's share between domains."""
    if n <= domain:
        return collective_seconds(collective, size, n, inner)
    groups = math.ceil(n / domain)
    within = collective_seconds(collective, size, domain, inner)
    return within + collective_seconds(collective, size / domain, groups, outer)


# --- dispatch ---------------------------------------------------------------------------------------------


def copies_per_token(experts: int, top_k: int, ranks: int) -> float:
    """Distinct ranks that uniform picks go to: R (1 - C(E - E/R, K) / C(E, K)). With dedup, rows sent per token."""
    return ranks * (1 - math.comb(experts - experts // ranks, top_k) / math.comb(experts, top_k))


def skewed_copies(shares: np.ndarray, top_k: int, ranks: int, draws: int = 4096, seed: int = 0) -> float:
    """The same for picks that follow ``shares`` of the experts (sum 1), by sampling distinct picks."""
    rng = np.random.default_rng(seed)
    keys = np.log(shares) + rng.gumbel(size=(draws, len(shares)))  # the top k of these: draws without return
    picks = np.argpartition(-keys, top_k - 1, axis=1)[:, :top_k]
    owners = picks // (len(shares) // ranks)
    hit = np.zeros((draws, ranks), bool)
    hit[np.arange(draws)[:, None], owners] = True
    return float(hit.sum(axis=1).mean())


def busiest_rank(shares: np.ndarray, ranks: int) -> float:
    """Rows of the busiest rank over the mean, when experts take ``shares`` of the rows and ranks own runs of experts."""
    per_rank = np.asarray(shares, float).reshape(ranks, -1).sum(axis=1)
    return float(per_rank.max() / per_rank.mean())


def rows_sent(shape: ModelShape, layout: Layout, nodes: int = 1) -> tuple[float, float]:
    """(rows per token over any link, those of them that leave an NVLink domain), one way, balanced picks.

    ``hierarchical`` sends a row once to every domain, to the GPU with the sender's place there, which passes it on to
    the others that want it: a rank that is wanted costs a row within its domain unless it has the sender's place.
    """
    e, k, r = shape.experts, shape.top_k, layout.ep
    if r == 1:
        return 0.0, 0.0
    elsewhere = (nodes - 1) / nodes
    if layout.dispatcher == "all_gather":
        return float(r - 1), (r - 1) * elsewhere
    if layout.dispatcher in ("all_to_all", "ragged"):
        return k * (r - 1) / r, k * elsewhere
    rows = copies_per_token(e, k, r)
    if layout.dispatcher == "dedup":
        return rows * (r - 1) / r, rows * elsewhere
    across = copies_per_token(e, k, nodes) * elsewhere
    return rows * (r - nodes) / r + across, across


def dispatch_bytes(shape: ModelShape, layout: Layout, domain: int, row_bytes: float) -> tuple[float, float]:
    """Bytes per token and way over (NVLink, NIC)."""
    nodes = max(1, math.ceil(layout.ep * layout.etp / domain))
    inside, across = rows_sent(shape, layout, nodes)
    return (inside if nodes == 1 else max(inside - across, 0.0)) * row_bytes, across * row_bytes


# --- fitting to microbenchmarks ---------------------------------------------------------------------------


@dataclass(frozen=True)
class LinkFit:
    """An alpha-beta fit and how far it is off, row by row."""

    name: str
    link: Link
    ids: tuple[str, ...]
    errors: tuple[float, ...]
    """Relative: predicted / measured - 1."""

    @property
    def median_error(self) -> float:
        return median(map(abs, self.errors))

    @property
    def worst_error(self) -> float:
        return max(map(abs, self.errors))


def fit_alpha_beta(sizes, seconds) -> tuple[float, float]:
    """(alpha, beta) of least squares on *relative* error: a fit in seconds would see the largest size only."""
    size, time = np.asarray(sizes, float), np.asarray(seconds, float)
    design = np.stack([1 / time, size / time], axis=1)
    scale = np.abs(design).max(0)
    solution, *_ = np.linalg.lstsq(design / scale, np.ones_like(time), rcond=None)
    alpha, slope = solution / scale
    if alpha < 0:  # a negative start-up time is no time: bandwidth alone
        alpha, slope = 0.0, float(np.sum(size / time) / np.sum((size / time) ** 2))
    return float(alpha), float(1 / slope)


def link_fits() -> list[LinkFit]:
    """Fits of every series of three or more published sizes or rank counts with times, residuals included."""
    series: dict[str, list[tuple[str, float, float]]] = {}
    for row in communication_rows():
        if not (row["bytes"] and row["time_us"]):
            continue
        gpu, ranks = machine(row["hardware"]["gpu"]).name, row["hardware"]["ranks"]
        if row["op"] == "all-reduce":
            name = f"{gpu}, all-reduce of {ranks}, {row['library']}"
            size = wire_bytes("all-reduce", row["bytes"], ranks)
        elif "low latency" in row["op"]:
            continue  # one size at many rank counts: see low_latency_fit
        else:
            timing = row["timing"] or "kernel"
            name = f"{gpu}, {row['op']} {row['dtype']}, {row['library']}, {row['sms']} SMs, {timing}"
            size = row["bytes"]
        series.setdefault(name, []).append((row["id"], size, row["time_us"] * 1e-6))
    fits = []
    for name, points in series.items():
        ids, sizes, seconds = zip(*points, strict=True)
        if len(set(sizes)) >= 3:
            alpha, beta = fit_alpha_beta(sizes, seconds)
            errors = tuple((alpha + s / beta) / t - 1 for s, t in zip(sizes, seconds, strict=True))
            fits.append(LinkFit(name, Link(name, alpha, beta), ids, errors))
    return fits


def low_latency_fit(op: str = "dispatch") -> LinkFit:
    """DeepEP's public low-latency table: bytes are constant down it, so what grows is the share that crosses nodes.

    time = alpha + bytes (share inside a node / NVLink + share between nodes / beta), NVLink at its stated 160 GB/s.
    """
    rows = [row for row in communication_rows() if row["op"] == f"{op} (low latency)"]
    ranks = np.array([row["hardware"]["ranks"] for row in rows], float)
    size = np.array([row["bytes"] for row in rows], float)
    seconds = np.array([row["time_us"] * 1e-6 for row in rows])
    inside = size * np.minimum(8 / ranks, 1) / 160e9
    outside = size * np.maximum(1 - 8 / ranks, 0)
    design = np.stack([1 / seconds, outside / seconds], 1)
    scale = np.abs(design).max(0)
    target = 1 - inside / seconds
    (alpha, slope), *_ = np.linalg.lstsq(design / scale, target, rcond=None)
    alpha, slope = alpha / scale[0], slope / scale[1]
    errors = (alpha + inside + outside * slope) / seconds - 1
    link = Link(f"H800 SXM, low-latency {op}", float(alpha), float(1 / slope))
    return LinkFit(link.name, link, tuple(row["id"] for row in rows), tuple(map(float, errors)))


def links(found: Machine) -> tuple[Link, Link]:
    """(NVLink, NIC) of a machine: line rate times what microbenchmarks reach of it, and their start-up times.

    370 of 450 GB/s NVLink (nccl-tests issue 212), 47 of 50 GB/s per NIC (issue 290); 10 and 20 microseconds, the
    size of the fits in :func:`link_fits`.
    """
    return Link("NVLink", 10e-6, 0.82 * found.nvlink), Link("NIC", 20e-6, 0.94 * found.nic)
