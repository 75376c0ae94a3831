"""The report's plots. One message each; the words that go with them are the report's.

Drawn without pyplot, so no global state is touched; the same run gives the same bytes. A light card with
dark text reads on a light page and on a dark one.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path

import matplotlib as mpl
import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from moe_course.train.records import Run

TRAINING, HELD_OUT, MARK, QUIET = "#0072B2", "#D55E00", "#009E73", "#6b6b6b"
"""Okabe and Ito's colours, told apart by colour-blind readers."""
LOAD_COLOURS = "RdBu_r"
"""Expert load over the even share: blue under 1, white at 1, red over 1. The same in every figure."""
STYLE = {
    "figure.facecolor": "#fcfcfa",
    "axes.facecolor": "#fcfcfa",
    "savefig.facecolor": "#fcfcfa",
    "figure.dpi": 150,
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": QUIET,
    "legend.frameon": False,
    "font.family": "DejaVu Sans",
}
WIDTH = 9.0
"""Inches."""
MAX_PANELS, MAX_COLUMNS = 8, 240
"""Layers shown and columns of a heat map at most; the caption says what was left out."""


def _styled(draw: Callable[..., Figure]) -> Callable[..., None]:
    """``draw(run)`` in the report's style, whatever the user's settings are, saved to ``path``."""

    @wraps(draw)
    def save(run: Run, path: Path) -> None:
        with mpl.style.context(["default", STYLE]):
            draw(run).savefig(path, metadata={"Software": None})

    return save


@_styled
def loss_figure(run: Run) -> Figure:
    """Bits per byte over bytes predicted, a panel per domain, against n-gram baselines."""
    columns = min(2, len(run.domains))
    rows = -(-len(run.domains) // columns)
    figure = Figure(figsize=(WIDTH, 0.5 + 2.7 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True)
    for panel in panels.flat[len(run.domains) :]:
        panel.set_axis_off()
    for panel, domain in zip(panels.flat, run.domains, strict=False):
        _loss_panel(panel, run, domain)
    for row in panels:
        row[0].set_ylabel("bits per byte")
    for panel in panels.flat[max(len(run.domains) - columns, 0) : len(run.domains)]:
        panel.tick_params(labelbottom=True)
    figure.supxlabel("bytes predicted, all domains (MB)", fontsize="medium")
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=len(labels))
    return figure


def _loss_panel(panel: Axes, run: Run, domain: str) -> None:
    training, (steps, held_out) = run.training_bits(domain), run.held_out(domain)
    megabytes, present = run.bytes_seen / 1e6, np.isfinite(training)
    megabytes, training = megabytes[present], training[present]
    smooth = running_mean(training, max(5, len(training) // 50))
    panel.plot(megabytes, training, color=TRAINING, alpha=0.18, linewidth=0.7)
    panel.plot(
        megabytes, smooth, color=TRAINING, linewidth=1.4, label="training batches (thin) and running mean"
    )
    eval_megabytes = run.bytes_at(steps) / 1e6
    panel.plot(
        eval_megabytes, held_out, "o-", color=HELD_OUT, markersize=3.5, linewidth=1.2, label="held out"
    )
    panel.set_title(domain)

    baselines = run.baselines(domain)
    settled = smooth[len(smooth) // 4 :]
    bottom = _lowest(settled, held_out, baselines)
    top = max(baselines[0], _lowest(held_out[-1:], settled[-1:])) if baselines else _highest(smooth, held_out)
    margin = max(0.06 * (top - bottom), 0.01)
    if baselines:  # the fall from 8 bits is the same in every run; what counts happens near the baselines
        top += max(0.35 * (top - bottom), 0.15)
    panel.set_ylim(bottom - margin, top + margin)
    digits = 3 if baselines and max(baselines) - min(baselines) < 0.5 else 2
    shown = [(f"order {n}  {bits:.{digits}f}", bits) for n, bits in enumerate(baselines) if bits <= top]
    for _, bits in shown:
        panel.axhline(bits, color=QUIET, linewidth=0.7, linestyle=(0, (4, 3)))
    _labels_at_right(panel, shown)


def _labels_at_right(panel: Axes, labelled: Sequence[tuple[str, float]], gap: float = 0.085) -> None:
    """Labels beside horizontal lines, pushed apart by ``gap`` axes heights, with a leader to each line."""
    low, high = panel.get_ylim()
    wanted = sorted((((bits - low) / (high - low)), text) for text, bits in labelled)
    places = spread([place for place, _ in wanted], gap)
    for (place, text), moved in zip(wanted, places, strict=True):
        panel.annotate(
            text,
            xy=(1.0, place),
            xytext=(1.035, moved),
            xycoords="axes fraction",
            textcoords="axes fraction",
            fontsize=7.5,
            color=QUIET,
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": QUIET,
                "linewidth": 0.5,
                "relpos": (0, 0.5),
                "shrinkB": 0,
            },
        )


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Ascending ``places`` moved as little as a few sweeps manage so that neighbours are ``gap`` apart."""
    moved = list(places)
    for _ in range(50):
        for i in range(1, len(moved)):
            overlap = gap - (moved[i] - moved[i - 1])
            if overlap > 0:
                moved[i - 1] -= overlap / 2
                moved[i] += overlap / 2
    return moved


@_styled
def load_figure(run: Run) -> Figure:
    """Load of every expert over the even share, over the steps, a panel per MoE layer."""
    steps, load = run.load_steps
    names, chosen = run.layer_names(load.shape[1]), shown_layers(load.shape[1])
    ratio = over_even_share(block_sums(load, MAX_COLUMNS))
    height = 0.7 + len(chosen) * min(max(0.08 * load.shape[2], 1.0), max(9 / len(chosen), 1.0), 2.2)
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    panels = figure.subplots(len(chosen), 1, squeeze=False, sharex=True)[:, 0]
    norm = _load_norm(ratio)
    for panel, layer in zip(panels, chosen, strict=True):
        image = panel.imshow(
            ratio[:, layer].T,
            aspect="auto",
            interpolation="nearest",
            cmap=LOAD_COLOURS,
            norm=norm,
            extent=(steps[0] - 0.5, steps[-1] + 0.5, load.shape[2] - 0.5, -0.5),
        )
        panel.set_title(names[layer])
        panel.set_ylabel("expert")
        panel.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    panels[-1].set_xlabel("step")
    figure.colorbar(image, ax=panels, label="load / even share", pad=0.015, aspect=6 * height)
    return figure


@_styled
def domain_figure(run: Run) -> Figure:
    """Share of each domain's token copies that each expert takes, over the even share; last evaluation."""
    domains, counts = run.domain_load
    names, chosen = run.layer_names(counts.shape[1]), shown_layers(counts.shape[1])
    ratio = over_even_share(counts)
    num_experts = counts.shape[2]
    height = 0.9 + len(chosen) * (0.55 + 0.24 * len(domains))
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    panels = figure.subplots(len(chosen), 1, squeeze=False, sharex=True)[:, 0]
    norm = _load_norm(ratio)
    for panel, layer in zip(panels, chosen, strict=True):
        image = panel.imshow(ratio[:, layer], aspect="auto", cmap=LOAD_COLOURS, norm=norm)
        panel.set_title(names[layer])
        panel.set_yticks(range(len(domains)), domains)
        panel.tick_params(length=0)
        panel.spines[:].set_visible(False)
        panel.xaxis.set_major_locator(MaxNLocator(min(num_experts, 16), integer=True))
        if num_experts <= 24:
            _print_values(panel, ratio[:, layer], norm)
    panels[-1].set_xlabel("expert")
    figure.colorbar(image, ax=panels, label="share / even share", pad=0.015, aspect=6 * height)
    return figure


def _print_values(panel: Axes, values: np.ndarray, norm: TwoSlopeNorm) -> None:
    for (row, column), value in np.ndenumerate(values):
        colour = "white" if abs(norm(value) - 0.5) > 0.33 else "#333333"
        text = panel.text(column, row, f"{value:.1f}", ha="center", va="center", fontsize=7, color=colour)
        text.set_in_layout(False)  # it is inside its cell; measuring hundreds of them takes seconds


@_styled
def speed_figure(run: Run) -> Figure:
    """Milliseconds of every step with the median, and tokens per second."""
    figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
    time, rate = figure.subplots(2, 1, sharex=True, height_ratios=[1.4, 1])
    milliseconds, steady = 1e3 * run.column("seconds"), 1e3 * run.steady_seconds
    median, ceiling = float(np.median(steady)), 1.25 * float(np.percentile(steady, 99))
    time.plot(
        run.step,
        np.where(run.compiling, np.nan, milliseconds),
        ".",
        color=TRAINING,
        markersize=2.5,
        alpha=0.6,
    )
    time.axhline(median, color=HELD_OUT, linewidth=1.2, label=f"median {median:.0f} ms")
    time.plot(
        run.step[run.compiling],
        np.minimum(milliseconds[run.compiling], 0.96 * ceiling),
        "^",
        color=MARK,
        markersize=6,
        label="step with a compilation or restart (cut at the top)",
    )
    time.set_ylim(0, ceiling)
    time.set_ylabel("step time (ms)")
    time.legend(loc="lower right", ncols=2)

    tokens = run.column("tokens") / run.column("seconds")
    tokens = np.where(run.compiling, np.nan, tokens)
    rate.plot(run.step, tokens, color=TRAINING, linewidth=0.7, alpha=0.3)
    window = max(5, len(tokens) // 50)
    rate.plot(run.step, running_mean(tokens, window), color=TRAINING, label=f"mean of {window} steps")
    rate.set_ylim(0, None)
    rate.set_ylabel("tokens/s")
    rate.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    rate.set_xlabel("step")
    rate.xaxis.set_major_locator(MaxNLocator(integer=True))
    rate.legend(loc="lower right")
    return figure


# Numbers behind the pictures


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the last ``window`` finite values at each place (fewer at the start); NaN before the first."""
    finite = np.isfinite(values)
    sums, counts = (np.cumsum(np.concatenate([[0.0], v])) for v in (np.where(finite, values, 0.0), finite))
    start = np.maximum(np.arange(len(values)) + 1 - window, 0)
    sums, counts = sums[1:] - sums[start], counts[1:] - counts[start]
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def block_sums(load: np.ndarray, columns: int) -> np.ndarray:
    """``load`` [steps, ...] added up in at most ``columns`` nearly equal runs of neighbouring steps."""
    starts = np.linspace(0, len(load), min(columns, len(load)), endpoint=False).astype(int)
    return np.add.reduceat(load, starts, axis=0)


def over_even_share(counts: np.ndarray) -> np.ndarray:
    """Counts over the mean of the last axis: 1 is even. NaN where there is nothing."""
    mean = counts.mean(axis=-1, keepdims=True)
    return np.divide(counts, mean, out=np.full(counts.shape, np.nan), where=mean > 0)


def shown_layers(count: int) -> list[int]:
    """At most :data:`MAX_PANELS` layers, first and last among them, evenly spaced."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, MAX_PANELS))})


def _load_norm(ratio: np.ndarray) -> TwoSlopeNorm:
    top = np.nanpercentile(ratio, 99.5) if np.isfinite(ratio).any() else 2.0
    return TwoSlopeNorm(vcenter=1.0, vmin=0.0, vmax=max(2.0, float(top)))


def _lowest(*columns) -> float:
    values = np.concatenate([np.asarray(column, float) for column in columns])
    return float(np.nanmin(values)) if np.isfinite(values).any() else 0.0


def _highest(*columns) -> float:
    values = np.concatenate([np.asarray(column, float) for column in columns])
    return float(np.nanmax(values)) if np.isfinite(values).any() else 8.0
