"""Fit the constants of the step-time model to published runs, and say how far off it is on runs it has not seen.

Leave one source out: a row of source S is predicted by constants fitted without S *and* without any row that has the
lineage (model, machine, size and format) of a row of S, because releases of one table repeat each other. The fit is
regularised least squares on the logarithm of the step time: rows of one lineage share one vote, far-off rows count
less (Huber), and a prior keeps constants near what microbenchmarks suggest. No JAX.
"""

import functools
import itertools
import json
from dataclasses import dataclass, fields
from importlib import resources

import numpy as np

from moe_course.scaling.costs import Constants, Work, count, seconds, stack
from moe_course.scaling.hardware import machine
from moe_course.scaling.layout import Layout
from moe_course.scaling.published import Run, layout_of, training_runs

NAMES = tuple(field.name for field in fields(Constants))
PRIOR_WIDTH = 0.4
"""Standard deviation of a constant's logarithm before any run is seen: a factor of 1.5.

Chosen among :data:`WIDTHS` by the held-out errors, and the model's terms were chosen with these errors in view: they
flatter the model. :func:`nested` lets each fold choose without its own source (``bench planner --nested``: its 90th
percentile is above the 35 % that the chosen width stays below); leaving out whole publishers is harder still.
"""
WIDTHS = (0.3, 0.4, 0.5, 0.8)
NOISE = 0.12
"""Standard deviation of a run's log step time that the model is not expected to explain."""
HUBER = 1.5
FIRST_PARTY = ("megatron", "deepseek")


@dataclass(frozen=True)
class Row:
    """A run and what the model says of it."""

    id: str
    source: str
    measured: float
    """Tokens per second per GPU."""
    predicted: float

    @property
    def error(self) -> float:
        """Relative: predicted / measured - 1."""
        return self.predicted / self.measured - 1


@functools.cache
def works() -> tuple[tuple[Run, ...], Work, np.ndarray, np.ndarray]:
    """(runs, their work, tokens per GPU and step, measured seconds per step)."""
    runs = tuple(run for run in training_runs() if usable(run))
    counted = [_count(run) for run in runs]
    tokens = np.array([layout_of(run).tokens_per_gpu for run in runs])
    measured = tokens / np.array([run.tokens_per_second for run in runs])
    return runs, stack(counted), tokens, measured


def usable(run: Run) -> bool:
    """On a machine with an NVLink domain and NICs; a TPU's torus is another model."""
    return not machine(run.row["hardware"]["gpu"]).name.startswith("TPU")


def _count(run: Run) -> Work:
    other = not run.publisher.startswith(FIRST_PARTY)
    return count(
        run.shape, layout_of(run), machine(run.row["hardware"]["gpu"]), year=run.year, other_stack=other
    )


def fit(chosen: np.ndarray, width: float = PRIOR_WIDTH, iterations: int = 15) -> Constants:
    """Constants from the rows where ``chosen`` is true: Gauss-Newton with damping, from the priors."""
    runs, work, _, measured = works()
    rows = np.flatnonzero(chosen)
    part = Work(*(getattr(work, f.name)[rows] for f in fields(Work)))
    target = np.log(measured[rows])
    votes = _votes([runs[i].lineage for i in rows])
    prior = np.log([getattr(Constants(), name) for name in NAMES])
    theta, damping = prior.copy(), 1e-2

    def residual(theta):
        return (np.log(_total(part, theta)) - target) / NOISE

    def loss(theta, r):
        small = np.abs(r) <= HUBER
        rho = np.where(small, r**2, 2 * HUBER * np.abs(r) - HUBER**2)
        return float(np.sum(votes * rho) + np.sum(((theta - prior) / width) ** 2))

    r = residual(theta)
    best = loss(theta, r)
    for _ in range(iterations):
        step = 1e-4
        jacobian = np.stack(
            [(residual(theta + step * unit) - r) / step for unit in np.eye(len(theta))], axis=1
        )
        weight = votes * np.minimum(1.0, HUBER / np.maximum(np.abs(r), 1e-9))
        normal = jacobian.T @ (weight[:, None] * jacobian) + np.eye(len(theta)) / width**2
        gradient = jacobian.T @ (weight * r) + (theta - prior) / width**2
        move = -np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
        trial = theta + np.clip(move, -0.5, 0.5)
        trial_r = residual(trial)
        trial_loss = loss(trial, trial_r)
        if trial_loss < best:
            done = best - trial_loss < 1e-4 * best
            theta, r, best, damping = trial, trial_r, trial_loss, damping / 3
            if done:
                break
        else:
            damping *= 5
    return _constants(theta)


def _constants(theta: np.ndarray) -> Constants:
    return Constants(**dict(zip(NAMES, map(float, np.exp(theta)), strict=True)))


def _total(work: Work, theta: np.ndarray) -> np.ndarray:
    return sum(seconds(work, _constants(theta)).values())


def _votes(lineages: list[str]) -> np.ndarray:
    """One vote per lineage, shared by its rows as 1 / sqrt(n): repeats are evidence, but not independent."""
    count_of = {name: lineages.count(name) for name in set(lineages)}
    return np.array([count_of[name] ** -0.5 for name in lineages])


@functools.cache
def calibrated() -> Constants:
    """The constants fitted on every usable run: what predictions use."""
    return fit(np.ones(len(works()[0]), bool))


def predict_rows(constants: Constants, chosen: np.ndarray) -> list[Row]:
    """Model against measurement for the rows where ``chosen`` is true."""
    runs, work, tokens, measured = works()
    total = sum(seconds(work, constants).values())
    return [
        Row(runs[i].id, runs[i].source, float(tokens[i] / measured[i]), float(tokens[i] / total[i]))
        for i in np.flatnonzero(chosen)
    ]


@functools.cache
def held_out(by: str = "source") -> tuple[Row, ...]:
    """Every usable run predicted without its ``source`` (or ``publisher``) and without its source's lineages."""
    return tuple(row for out, train in folds(by) for row in predict_rows(fit(train), out))


def folds(by: str = "source", among: np.ndarray | None = None):
    """(rows left out, rows to fit on) for each group of the rows ``among`` (default: all), as masks."""
    runs = works()[0]
    groups = np.array([getattr(run, by) for run in runs])
    lineage = np.array([run.lineage for run in runs])
    among = np.ones(len(runs), bool) if among is None else among
    for group in sorted(set(groups[among])):
        out = among & (groups == group)
        yield out, among & ~out & ~np.isin(lineage, lineage[out])


def nested() -> tuple[Row, ...]:
    """As :func:`held_out` by source, but each fold chooses its :data:`WIDTHS` by the median held-out error inside it.

    No row has a say in the settings that predict it. Takes a minute or two.
    """
    rows: list[Row] = []
    for out, train in folds():
        inner = list(folds(among=train))

        def error(width: float, inner=inner) -> float:
            found = [row.error for left, rest in inner for row in predict_rows(fit(rest, width), left)]
            return float(np.median(np.abs(found)))

        rows += predict_rows(fit(train, min(WIDTHS, key=error)), out)
    return tuple(rows)


def summary(rows) -> dict[str, float]:
    """``rows``, ``median_abs_error``, ``p90_abs_error`` and the median signed error, as ``bias``."""
    errors = np.array([row.error for row in rows])
    return {
        "rows": len(errors),
        "median_abs_error": round(float(np.median(np.abs(errors))), 4),
        "p90_abs_error": round(float(np.quantile(np.abs(errors), 0.9)), 4),
        "bias": round(float(np.median(errors)), 4),
    }


@functools.cache
def ratio_errors() -> dict[tuple[str, str], float]:
    """How far off the *ratio* of two runs is, out of source: what a choice between layouts rests on.

    Every two runs (keys: their ids) of one source, model, machine, size and sequence that differ in layout or format,
    predicted by the constants that saw neither. Relative, of the ratio of their tokens/s.
    """
    rows = {row.id: row for row in held_out()}
    return {
        (a.id, b.id): (1 + rows[a.id].error) / (1 + rows[b.id].error) - 1
        for runs in _alike()
        for a, b in itertools.combinations(runs, 2)
        if layout_of(a) != layout_of(b)
    }


PARALLEL = ("ep", "tp", "pp", "vpp", "cp", "etp", "fsdp", "micro_batch")


def ratio_summary() -> dict[str, float]:
    """``pairs``, ``questions`` (source, model, machine, size), and the median over questions of their median error.

    A question has one vote: a ladder of 13 steps has 78 pairs, most of which differ in what no layout says. Pairs that
    differ in parallel sizes alone, what a planner chooses, are few: ``parallel_pairs``.
    """
    errors, medians, parallel = ratio_errors(), [], []
    for runs in _alike():
        ids = {run.id for run in runs}
        mine = {pair: abs(error) for pair, error in errors.items() if ids.issuperset(pair)}
        if mine:
            medians.append(np.median(list(mine.values())))
        layouts = {run.id: layout_of(run) for run in runs}
        parallel += [error for pair, error in mine.items() if _same_but(*(layouts[name] for name in pair))]
    return {
        "pairs": len(errors),
        "questions": len(medians),
        "median_abs_error": round(float(np.median(medians)), 4),
        "parallel_pairs": len(parallel),
        "parallel_median_abs_error": round(float(np.median(parallel)), 4),
    }


def _alike() -> list[list[Run]]:
    groups: dict[tuple, list[Run]] = {}
    for run in works()[0]:
        key = run.source, run.shape.name, run.row["hardware"]["gpu"], run.row["hardware"]["gpus"]
        groups.setdefault((*key, run.row["seq_len"]), []).append(run)
    return list(groups.values())


def _same_but(a: Layout, b: Layout) -> bool:
    """Whether two layouts differ in their :data:`PARALLEL` sizes and in nothing else that moves bytes or formats."""
    kept = ("precision", "dispatcher", "graphs", "overlap", "real_routing", "static_shapes")
    differ = any(getattr(a, name) != getattr(b, name) for name in PARALLEL)
    return differ and all(getattr(a, name) == getattr(b, name) for name in kept)


# --- the shipped calibration ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calibration:
    """Constants, and the out-of-source errors that are printed beside every prediction."""

    constants: Constants
    median_abs_error: float
    p90_abs_error: float
    rows: int
    ratio_median_abs_error: float
    """Of the ratio of two layouts of one model, machine and size (:func:`ratio_summary`)."""

    def describe(self) -> str:
        """In words."""
        return (
            f"half of {self.rows} published runs, each predicted without its source, are within "
            f"{self.median_abs_error:.0%}; nine of ten within {self.p90_abs_error:.0%}"
        )


@functools.cache
def shipped() -> Calibration:
    """``data/calibration.json``: the fit takes seconds, a prediction should not. A test fits again and compares."""
    stored = json.loads(
        (resources.files("moe_course.scaling") / "data" / "calibration.json").read_text("utf-8")
    )
    names = ("median_abs_error", "p90_abs_error", "rows", "ratio_median_abs_error")
    figures = {key: stored[key] for key in names}
    return Calibration(Constants(**stored["constants"]), **figures)


def as_json() -> dict:
    """What ``data/calibration.json`` holds."""
    constants = {name: float(f"{getattr(calibrated(), name):.4g}") for name in NAMES}
    ratios = {"ratio_median_abs_error": ratio_summary()["median_abs_error"]}
    return {**summary(held_out()), **ratios, "constants": constants}
