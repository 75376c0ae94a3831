"""The measured claims: ``moe-course bench NAME --json``, or ``python -m moe_course.bench NAME --json``.

:data:`BENCHES` maps a name to the module that measures it. Such a module has ``Options``, a frozen dataclass
whose fields are the command line's flags, and ``run(options) -> dict``, what ``--json`` prints. It may have
``DEVICES``, how many to simulate (default: 1; 0: it starts JAX elsewhere).
"""

import importlib
import json
import sys
from pathlib import Path

from moe_course.environment import setup, versions

BENCHES = {
    "dispatch": "moe_course.bench.dispatch",
    "gpu": "moe_course.bench.gpu",
    "grouped-gemm": "moe_course.bench.grouped_gemm",
    "kill-rate": "moe_course.bench.kill_rate",
    "ladder": "moe_course.bench.ladder",
    "ledger": "moe_course.bench.ledger",
    "moe-layer": "moe_course.bench.moe_layer",
    "notebooks": "moe_course.bench.notebooks",
    "parity-run": "moe_course.bench.parity_run",
    "planner": "moe_course.bench.planner",
    "quant-error": "moe_course.bench.quant_error",
    "train-step": "moe_course.bench.train_step",
}


def run(name: str, options=None) -> dict:
    """Run one bench; ``options`` is its module's ``Options`` (default: its defaults)."""
    module = load(name)
    return module.run(options if options is not None else module.Options())


def load(name: str):
    """The module of a bench."""
    return importlib.import_module(BENCHES[name])


def recorded(name: str) -> dict:
    """A result under ``bench/results/``: measured once, with the machine's versions in it."""
    return json.loads((Path(__file__).parent / "results" / f"{name}.json").read_text())


def main(args: list[str] | None = None) -> None:
    """``NAME [--json] [flags of the bench]``."""
    import argparse

    import tyro

    parser = argparse.ArgumentParser(prog="moe_course.bench")
    parser.add_argument("name", choices=sorted(BENCHES))
    parser.add_argument("--json", action="store_true", help="print only the figures, as JSON")
    known, flags = parser.parse_known_args(args)
    options = tyro.cli(load(known.name).Options, args=flags, prog=known.name)
    if devices := getattr(load(known.name), "DEVICES", 1):
        setup(devices=devices, quiet=True)
    figures = run(known.name, options)
    # Beside the figures, not among them: what reads the JSON finds cases only.
    measured_on = ", ".join(f"{key} {value}" for key, value in versions().items())
    print(measured_on, file=sys.stderr if known.json else sys.stdout)
    if known.json:
        print(json.dumps(figures))
        return
    for case, values in figures.items():
        shown = values.items() if isinstance(values, dict) else [("", values)]
        print(
            f"{case:20}",
            *(f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}" for key, value in shown),
        )
