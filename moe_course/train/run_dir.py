"""One run's folder: its config, its metrics line by line, and the rule of who may write there."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path

from moe_course.errors import SettingError
from moe_course.train.config import TrainConfig

CONFIG, METRICS, SUMMARY = "config.json", "metrics.jsonl", "summary.json"


def choose_run_dir(runs_dir: Path, name: str | None, preset: str, resume: bool) -> Path:
    """Where this run lives. Creates nothing.

    A new run without a name takes the first free of ``preset``, ``preset-2``, ...; resuming without a name
    takes the newest of them. Raises :class:`SettingError` if a named run exists (new) or does not (resume).
    """
    if name is not None:
        path = runs_dir / name
        if resume and not (path / CONFIG).exists():
            close = get_close_matches(name, [p.parent.name for p in runs_dir.glob(f"*/{CONFIG}")], n=1)
            hint = f" Did you mean --name {close[0]}?" if close else " Leave out --resume to start it."
            raise SettingError(f"there is no run in {path}.{hint}")
        if not resume and path.exists() and any(path.iterdir()):
            raise SettingError(
                f"{path} is in use. Add --resume to continue that run, or choose another --name."
            )
        return path
    taken = [preset] + [f"{preset}-{i}" for i in range(2, 10_000)]
    if not resume:
        return next(runs_dir / n for n in taken if not (runs_dir / n).exists())
    existing = [p.parent for p in runs_dir.glob(f"*/{CONFIG}") if p.parent.name in taken]
    if not existing:
        raise SettingError(
            f"there is no {preset} run in {runs_dir} to resume. Leave out --resume to start one."
        )
    return max(existing, key=lambda p: (p / CONFIG).stat().st_mtime)


class RunDir:
    """Reads and writes the files of one run."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"

    def create(self, config: TrainConfig, preset: str) -> None:
        """Make the folder and write the config. The only call that makes it."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.write_json(CONFIG, {"preset": preset} | asdict(config))

    def check_same_run(self, config: TrainConfig) -> None:
        """Raise :class:`SettingError` unless the folder was made with the same decisive settings."""
        saved = json.loads((self.path / CONFIG).read_text())
        wanted = json.loads(json.dumps(config.identity()))
        for name, theirs, ours in _differences({k: saved.get(k) for k in wanted}, wanted):
            flag = name.replace("_", "-")
            raise SettingError(
                f"{self.path} was made with {name} {theirs}, not {ours}. "
                f"Set --{flag} {theirs} to resume it, or choose another --name."
            )

    def append(self, record: dict) -> None:
        """Add one line to the metrics."""
        with (self.path / METRICS).open("a") as file:
            file.write(json.dumps(record) + "\n")

    def records(self) -> list[dict]:
        """All metrics lines; a last line torn by a kill is left out."""
        path = self.path / METRICS
        lines = path.read_text().splitlines() if path.exists() else []
        return list(_parsed(lines))

    def rewind(self, step: int) -> None:
        """Drop what was written after ``step``: the run continues from there."""
        kept = [record for record in self.records() if record["step"] <= step]
        text = "".join(json.dumps(record) + "\n" for record in kept)
        _replace(self.path / METRICS, text)

    def write_json(self, name: str, value: dict) -> None:
        _replace(self.path / name, json.dumps(value, indent=1) + "\n")

    def read_json(self, name: str) -> dict:
        path = self.path / name
        return json.loads(path.read_text()) if path.exists() else {}


def _parsed(lines: list[str]) -> Iterator[dict]:
    for line in lines:
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(path.name + ".new")
    beside.write_text(text)
    beside.replace(path)


def _differences(saved: dict, wanted: dict, prefix: str = "") -> Iterator[tuple[str, object, object]]:
    for key, ours in wanted.items():
        theirs = saved.get(key) if isinstance(saved, dict) else None
        if isinstance(ours, dict):
            yield from _differences(theirs or {}, ours, f"{prefix}{key}.")
        elif theirs != ours:
            yield prefix + key, theirs, ours
