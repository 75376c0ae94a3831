"""Figures of the course: one style, one colour per expert, a caption that states the conclusion.

Every helper takes plain arrays (the reader's own), accepts any shape down to zero tokens and returns a
Figure; :func:`show` displays it. The background is solid and light, so that a dark theme does not swallow
the text.
"""

import io
import textwrap
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

# Paul Tol's "bright" scheme and a dark grey, told apart with any colour vision; then his "muted" one.
_BASE = (
    "#4477AA #EE6677 #228833 #CCBB44 #66CCEE #AA3377 #332288 #555555 "
    "#44AA99 #CC6677 #117733 #DDCC77 #88CCEE #882255 #AA4499 #999933"
).split()
_TONES = (0.0, 0.35, -0.35, 0.6)
INK, PAPER, FAINT = "#222222", "#FCFCFA", "#E4E4DE"

STYLE = {
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "font.size": 10.0,
    "font.family": "DejaVu Sans",
}


def expert_color(expert: int) -> tuple[float, float, float]:
    """The colour an expert keeps through the course; past 16 a lighter, then a darker tone of the same cycle."""
    tone = _TONES[expert // len(_BASE) % len(_TONES)]
    towards = 1.0 if tone > 0 else 0.0
    return tuple(c + (towards - c) * abs(tone) for c in to_rgb(_BASE[expert % len(_BASE)]))


def figure(width: float = 7.0, height: float = 2.6, rows: int = 1, columns: int = 1):
    """``(figure, axes)`` in the course's style, without pyplot: nothing global, nothing shown twice."""
    with matplotlib.rc_context(STYLE):
        made = Figure(figsize=(width, height), layout="constrained", facecolor=PAPER)
        axes = made.subplots(rows, columns)
    return made, axes


def png(fig: Figure) -> bytes:
    """The figure as PNG, without the version of matplotlib in it."""
    out = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        fig.savefig(out, format="png", dpi=110, metadata={"Software": None})
    return out.getvalue()


def show(fig: Figure, caption: str) -> None:
    """Display a figure under its caption. The caption is also what a text reader and nbval see of it."""
    from IPython.display import display

    display(bundle(fig, caption), raw=True)


def bundle(fig: Figure, caption: str) -> dict:
    """The figure under its caption as MIME data."""
    title = textwrap.fill(caption, int(11.8 * fig.get_figwidth()))
    fig.set_figheight(fig.get_figheight() + 0.18 * title.count("\n"))
    fig.suptitle(title, x=0.01, ha="left", fontsize=10.5, fontweight="bold")
    return {"image/png": png(fig), "text/plain": f"figure: {caption}"}


# ---------------------------------------------------------------- pictures of routing


def routing_map(
    expert_ids, weights=None, *, num_experts: int, num_groups: int = 1, tokens: Sequence[str] = ()
):
    """Tokens down, experts across; a square where a token goes, as large as its weight. [T, K] each."""
    ids = np.asarray(expert_ids)
    weights = (
        np.full(ids.shape, 1.0 / max(ids.shape[-1], 1)) if weights is None else np.asarray(weights, float)
    )
    count = len(ids)
    cell = min(0.42, 7.0 / num_experts, 8.0 / max(count, 1))  # inches
    fig, ax = figure(max(3.5, 1.6 + cell * num_experts), 1.1 + cell * max(count, 1))
    ax.set_aspect("equal")
    _expert_axis(ax, num_experts)
    largest = np.nanmax(weights, initial=0.0)
    for t, k in np.argwhere((ids >= 0) & (ids < num_experts)):
        side = 0.9 * np.sqrt(max(weights[t, k], 0.0) / largest) if largest > 0 else 0.0
        corner = (ids[t, k] - side / 2, t - side / 2)
        ax.add_patch(matplotlib.patches.Rectangle(corner, side, side, color=expert_color(int(ids[t, k]))))
    for g in range(1, num_groups):
        ax.axvline(g * num_experts / num_groups - 0.5, color=INK, lw=0.8)
    ax.set_ylim(max(count, 1) - 0.5, -0.5)
    ax.set_yticks(range(count) if count <= 16 else range(0, count, 8))
    if len(tokens) == count and count:
        ax.set_yticks(range(count), tokens)
    ax.grid(axis="both", color=FAINT, lw=0.6)
    ax.set_axisbelow(True)
    ax.set_ylabel("token")
    return fig


def load_bars(load, *, fair: float | None = None):
    """Token copies per expert, with the fair share as a line. ``load`` [E]."""
    load = np.asarray(load)
    fig, ax = figure(min(9.0, 2.2 + 0.42 * len(load)))
    _expert_axis(ax, len(load))
    ax.bar(range(len(load)), load, color=[expert_color(e) for e in range(len(load))])
    fair = float(load.mean()) if fair is None and len(load) else fair
    ax.axhline(fair or 0.0, color=INK, lw=1.0, ls="--", label=f"fair share, {fair or 0:.4g}")
    ax.legend(frameon=False, loc="upper right")
    ax.set_ylabel("token copies")
    return fig


def group_bar(group_sizes, *, rows: int | None = None, align: int = 1):
    """Rows in expert order as one bar: each expert's group, its padding hatched, the unused tail grey.

    ``group_sizes`` [E] are the sizes without padding; each group is padded up to a multiple of ``align``.
    """
    sizes = np.asarray(group_sizes, np.int64)
    padded = -(-sizes // align) * align
    starts = np.concatenate([[0], np.cumsum(padded)])
    total = int(max(starts[-1], rows or 0))
    fig, ax = figure(8.0, 1.7)
    for e, size in enumerate(sizes):
        ax.barh(0, size, left=starts[e], color=expert_color(e), height=0.8)
        ax.barh(
            0, padded[e] - size, left=starts[e] + size, color=PAPER, edgecolor=expert_color(e), hatch="////"
        )
        if size > 0.03 * max(total, 1):
            ax.text(
                starts[e] + size / 2, 0, str(e), ha="center", va="center", color="white", fontweight="bold"
            )
    ax.barh(0, total - starts[-1], left=starts[-1], color=FAINT, height=0.8)
    ax.set_xlim(0, max(total, 1))
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
    ax.set_xlabel("row in expert order (the number is the expert; hatched: padding; grey: tail)")
    return fig


def _expert_axis(ax, num_experts: int) -> None:
    ax.set_xlim(-0.5, max(num_experts, 1) - 0.5)
    ax.set_xticks(range(0, num_experts, 1 if num_experts <= 32 else 8))
    ax.set_xlabel("expert")
