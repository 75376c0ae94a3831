"""``moe-course bench parity-run``: does training in low precision end where training in BF16 ends?

First BF16 from several seeds, all on the same batches in the same order: the spread of their losses is the noise
band, which is written down before any other run starts. Then each recipe from the first seed. Two broken quantisers
follow, which the comparison has to notice. Every run is a whole run of the preset, on one device, by the loop that
``moe-course train`` uses; emulated and exact, so the losses are those of hardware to rounding, the times are not.
A run that is interrupted is started again, finished ones are read from ``--out``.

Three seeds make a rough band: were losses normal, one in four BF16 runs from a fourth seed would fall outside.
"""

import datetime
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import jax.numpy as jnp
import numpy as np
from rich.console import Console

from moe_course.environment import versions
from moe_course.errors import RunError, SettingError
from moe_course.parallel import MeshConfig
from moe_course.quant import RECIPES, recipes
from moe_course.train.config import TrainConfig
from moe_course.train.data import TrainData
from moe_course.train.loop import Trainer
from moe_course.train.presets import get_preset
from moe_course.train.run_dir import RunDir

RESULT, DECLARED = "result.json", "declared.json"
LAST = 10
"""A run's loss is the mean over the last tenth of its steps."""


@dataclass(frozen=True)
class Options:
    """Settings of ``moe-course bench parity-run``."""

    preset: str = "tiny"
    steps: int | None = None
    """Steps per run. Default: the preset's."""
    seeds: int = 3
    """BF16 runs, from seed 0 on: they make the band."""
    recipes: tuple[str, ...] = ("fp8", "mxfp8", "mxfp8-floor", "nvfp4")
    """Names of ``moe-course train --recipe``."""
    twins: bool = True
    """Also train with two broken quantisers."""
    out: Path = Path("runs/parity-run")
    """Where finished runs are kept; a second call reads them."""


def run(options: Options = Options()) -> dict:
    """``{"declared": {...}, name: {"loss", "gap", "paired_gap", "gap_over_band", "inside", "held_out"}, "about"}``.

    ``loss``: nats per target over the last tenth of the steps; None if the run ended in a value that is not finite.
    ``gap`` is to the mean of the BF16 runs, ``paired_gap`` to the one from the same seed. ``inside``: |gap| is at
    most the band, which is the largest BF16 loss less the smallest. ``held_out``: bits per byte, mean over domains.
    """
    config = _config(options)
    data = TrainData(config.data, config.seq_len, config.batch_size, seed=0)
    console = Console(stderr=True, highlight=False)
    options.out.mkdir(parents=True, exist_ok=True)

    def train(name: str, recipe: str, seed: int = 0) -> dict:
        return train_once(replace(config, recipe=recipe, seed=seed), data, options.out / name, console)

    baseline = [train(f"bf16-{seed}", "bf16", seed) for seed in range(options.seeds)]
    declared = declare(baseline, options.out / DECLARED)
    console.print(f"declared  band {declared['band']:.4f} nats around {declared['mean']:.4f}")
    result = {"declared": declared}
    for recipe in options.recipes:
        result[recipe] = judge(train(recipe, recipe), declared)
    for name, broken in TWINS.items() if options.twins else ():
        with mock.patch.object(recipes, "quantize_mxfp8", broken):
            result[name] = judge(train(name, "mxfp8"), declared)
    about = {"preset": options.preset, "steps": config.steps, "low_precision": "emulated on the CPU"}
    about["date"] = declared["at"][:10]
    return result | {"about": about | versions()}


def _config(options: Options) -> TrainConfig:
    for name in options.recipes:
        if RECIPES.get(name) is None:
            raise SettingError(
                f"there is no recipe {name!r}. The recipes are {', '.join(list(RECIPES)[1:])}."
            )
    if options.seeds < 2:
        raise SettingError(f"seeds is {options.seeds}; a spread needs two runs. Set --seeds to 2 or more.")
    config = get_preset(options.preset).config
    steps = options.steps or config.steps
    config = replace(
        config, steps=steps, eval_every=steps, checkpoint_every=steps, devices=1, mesh=MeshConfig(1, 1, 1)
    )
    config.validate()
    return config


def train_once(config: TrainConfig, data: TrainData, path: Path, console: Console) -> dict:
    """One run in ``path``, or what it left there: its loss, held-out bits per byte, or where it stopped."""
    wanted = json.loads(json.dumps(config.identity()))
    if (path / RESULT).exists():
        saved = json.loads((path / RESULT).read_text())
        if saved["config"] != wanted:
            raise SettingError(f"{path} holds a run with other settings. Choose another --out.")
        return saved
    shutil.rmtree(path, ignore_errors=True)
    console.print(f"run       {path.name}: {config.steps} steps")
    run_dir = RunDir(path)
    run_dir.create(config, path.name)
    trainer = Trainer(config, data, run_dir, console)
    found = {"loss": None, "held_out": None, "stopped": None}
    try:
        if not trainer.train(trainer.start(resume=False)):
            raise KeyboardInterrupt
        found["held_out"] = float(np.mean(list(_held_out(trainer, config).values())))
        found["loss"] = last_loss(run_dir)
    except RunError as error:
        found["stopped"] = str(error).split("(")[0].strip()
    finally:
        trainer.close()
    saved = found | {"config": wanted}
    (path / RESULT).write_text(json.dumps(saved))
    return saved


def _held_out(trainer: Trainer, config: TrainConfig) -> dict[str, float]:
    return trainer.evaluate(config.steps, config.eval_bytes)["bits_per_byte_by_domain"]


def last_loss(run_dir: RunDir) -> float:
    """Nats per target, mean over the last tenth of the steps."""
    losses = [record["loss"] for record in run_dir.records() if record["kind"] == "step"]
    return float(np.mean(losses[-max(1, len(losses) // LAST) :]))


def declare(baseline: list[dict], path: Path) -> dict:
    """The noise band, written down once: later calls read it, so that no result can move it."""
    if path.exists():
        return json.loads(path.read_text())
    losses = [found["loss"] for found in baseline]
    if None in losses:
        raise RunError("a BF16 run did not end in a finite loss, so there is no band.")
    declared = {
        "losses": losses,
        "mean": float(np.mean(losses)),
        "band": max(losses) - min(losses),
        "held_out": [found["held_out"] for found in baseline],
        "at": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    path.write_text(json.dumps(declared))
    return declared


def judge(found: dict, declared: dict) -> dict:
    """A run against the band."""
    loss = found["loss"]
    if loss is None:
        return {"loss": None, "inside": False, "stopped": found["stopped"]}
    gap = loss - declared["mean"]
    return {
        "loss": loss,
        "gap": gap,
        "paired_gap": loss - declared["losses"][0],
        "gap_over_band": abs(gap) / declared["band"],
        "inside": abs(gap) <= declared["band"],
        "held_out": found["held_out"],
    }


# Broken on purpose: what a comparison that only looks at "it trains" would let through.

_sound = recipes.quantize_mxfp8


def zero_block_is_nan(x, **how):
    """The scale of a block of zeros is 0 and its elements are divided by it: 0/0."""
    q = _sound(x, **how)
    return replace(q, scale=jnp.where(q.scale == 0, jnp.uint8(255), q.scale))


def scales_transposed(x, **how):
    """The scales are right, and read column by column where they lie row by row."""
    q = _sound(x, **how)
    return replace(q, scale=jnp.swapaxes(q.scale, -1, -2).reshape(q.scale.shape))


TWINS = {"twin-zero-block": zero_block_is_nan, "twin-transposed-scales": scales_transposed}
