"""The command line, ``moe-course COMMAND``; ``moe-course COMMAND --help`` lists every setting of a command."""

import errno
import sys
from dataclasses import dataclass, field
from typing import Annotated

import tyro
from rich.console import Console

from moe_course.errors import RunError, SettingError

USAGE = """\
usage: moe-course COMMAND [options]

  train      train a model, or continue a run      moe-course train --preset tiny
  export-hf  a run as a Hugging Face folder        moe-course export-hf runs/tiny DIR
  progress   exercises passed, yours or a room's   moe-course progress [--all DIR]
  doctor     what is installed, what is missing    moe-course doctor [--gpu] [--json]
  bench      reproduce a measured claim            moe-course bench grouped-gemm --json
  plan       which parallelism, how fast, why      moe-course plan --model deepseek-v3 --hardware gb200 --gpus 1024
  compile    a step for GPUs that are not here     moe-course compile --preset deepseek-v3 --gpus 64
  notebooks  make the notebooks from solutions/    moe-course notebooks [02 ...] [--check]

moe-course COMMAND --help lists the options of a command."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


def main(argv: list[str] | None = None) -> int:
    """Entry point. 0: done. 2: a setting or a run that cannot go on, explained in one line. 130: interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    commands = {
        "train": _train,
        "export-hf": _export_hf,
        "progress": _progress,
        "doctor": _doctor,
        "bench": _bench,
        "plan": _plan,
        "compile": _compile,
        "notebooks": _notebooks,
    }
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else 2
    try:
        if argv[0] not in commands:
            raise SettingError(f"there is no command {argv[0]!r}. The commands are {', '.join(commands)}.")
        return commands[argv[0]](argv[1:])
    except (SettingError, RunError) as error:
        print(f"moe-course: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f" while writing {error.filename}" if error.filename else ""
        print(
            f"moe-course: the disk is full{where}. Free some space, or set --runs-dir to another disk, then --resume.",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("moe-course: interrupted", file=sys.stderr)
        return INTERRUPTED


def _train(argv: list[str]) -> int:
    from moe_course.train.config import TrainConfig
    from moe_course.train.presets import PRESETS, get_preset
    from moe_course.train.run import RunOptions, train

    name, argv = _take_preset(argv)
    preset = get_preset(name)

    @dataclass(frozen=True)
    class Train:
        config: Annotated[TrainConfig, tyro.conf.arg(name="")] = preset.config
        run: Annotated[RunOptions, tyro.conf.arg(name="")] = field(default_factory=RunOptions)

    listing = "\n".join(f"  {key:<18}{value.purpose}" for key, value in PRESETS.items())
    chosen = tyro.cli(
        Train,
        args=argv,
        prog="moe-course train",
        description=f"Train a DeepSeek-style MoE on bytes. Start from --preset NAME (now: {name}) and change any "
        f"setting below.\n\npresets:\n{listing}",
    )
    finished = train(chosen.config, name, chosen.run, Console(highlight=False))
    return 0 if finished else INTERRUPTED


def _export_hf(argv: list[str]) -> int:
    from moe_course.interop.run import ExportOptions, export_run

    chosen = tyro.cli(
        ExportOptions,
        args=argv,
        prog="moe-course export-hf",
        description="Write the newest checkpoint of a run.",
    )
    export_run(chosen, Console(highlight=False))
    return 0


def _take_preset(argv: list[str]) -> tuple[str, list[str]]:
    """The value of ``--preset`` (default tiny), and the other arguments, which start from it."""
    rest, name = [], "tiny"
    words = iter(argv)
    for word in words:
        if word == "--preset":
            name = next(words, "")
        elif word.startswith("--preset="):
            name = word.partition("=")[2]
        else:
            rest.append(word)
    return name, rest


def _progress(argv: list[str]) -> int:
    from pathlib import Path

    from moe_course.lessons import progress

    @dataclass(frozen=True)
    class Progress:
        all: Path | None = None
        """A folder of learners' progress files: one row each, and where the room is stuck."""

    chosen = tyro.cli(Progress, args=argv, prog="moe-course progress")
    console = Console(highlight=False)
    progress.print_room(console, chosen.all) if chosen.all else progress.print_own(console)
    return 0


def _doctor(argv: list[str]) -> int:
    from moe_course.doctor import main as doctor

    return doctor(argv)


def _notebooks(argv: list[str]) -> int:
    from moe_course.lessons.build import Options, build

    return build(tyro.cli(Options, args=argv, prog="moe-course notebooks"))


def _bench(argv: list[str]) -> int:
    from moe_course.bench import main as bench

    bench(argv)
    return 0


def _plan(argv: list[str]) -> int:
    from moe_course.scaling.report import main as plan

    return plan(argv)


def _compile(argv: list[str]) -> int:
    from moe_course.aot.command import main as compile_step

    return compile_step(argv)


if __name__ == "__main__":
    sys.exit(main())
