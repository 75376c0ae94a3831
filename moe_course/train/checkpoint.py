"""Checkpoints by Orbax: written beside, then renamed; loadable on any mesh; checked before they are read.

Once a checkpoint is complete, the SHA-256 of its files goes to ``checkpoint_sums/STEP.json``. A file that was cut
or changed since is found before any of it is used. A run killed between the two leaves a complete checkpoint
without sums, which is read unchecked.
"""

import hashlib
import json
import re
import shutil
from pathlib import Path

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from moe_course.errors import RunError
from moe_course.parallel import tree_shardings
from moe_course.train.step import TrainState


class Checkpoints:
    """The checkpoints of one run, newest ``keep`` kept. Saving is asynchronous; ``close`` waits."""

    def __init__(self, directory: Path, keep: int):
        self.directory = directory.resolve()
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(self.directory, options=options)
        self._sums = self.directory.with_name("checkpoint_sums")

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, meta: dict) -> None:
        """Start writing. A failure of the previous write is raised here, as :class:`RunError`."""
        need = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        free = shutil.disk_usage(self.directory).free
        if free < 1.1 * need:
            raise self._disk_error(f"a checkpoint needs {need / 1e6:.0f} MB and {free / 1e6:.0f} MB are free")
        args = ocp.args.Composite(state=ocp.args.StandardSave(vars(state)), meta=ocp.args.JsonSave(meta))
        try:
            self._manager.wait_until_finished()
            self._write_sums()
            self._manager.save(step, args=args, force=True)
        except Exception as error:
            raise self._disk_error(_first_line(error)) from error

    def wait(self) -> None:
        """Return when every checkpoint started so far is complete on disk."""
        try:
            self._manager.wait_until_finished()
            self._write_sums()
        except Exception as error:
            raise self._disk_error(_first_line(error)) from error

    def restore(self, abstract: TrainState, mesh: Mesh) -> tuple[TrainState, dict]:
        """The newest checkpoint, laid out for ``mesh`` whatever mesh wrote it.

        Raises :class:`RunError` if there is none or it cannot be read; nothing is deleted.
        """
        step = self.latest()
        if step is None:
            raise RunError(
                f"no checkpoint in {self.directory}. Leave out --resume to start from the beginning."
            )
        if changed := self._changed_file(step):
            raise self._unreadable(step, f"{changed} is damaged")
        if self._keeps_layers_apart(step):
            raise RunError(
                f"the checkpoint of step {step} in {self.directory} is of a version that kept each layer's weights "
                f"apart; now they are stacked. Resume it with that version, or start a new run with another --name."
            )
        like = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            vars(abstract),
            vars(tree_shardings(abstract, mesh)),
        )
        args = ocp.args.Composite(state=ocp.args.StandardRestore(like), meta=ocp.args.JsonRestore())
        try:
            restored = self._manager.restore(step, args=args)
        except Exception as error:
            raise self._unreadable(step, _first_line(error)) from error
        return TrainState(**restored.state), restored.meta

    def close(self) -> None:
        """Wait for writes in flight and release the threads."""
        self.wait()
        self._manager.close()

    def _write_sums(self) -> None:
        """Sums of complete checkpoints that have none yet; those of deleted checkpoints go. Process 0 writes them."""
        if jax.process_index():
            return
        self._sums.mkdir(exist_ok=True)
        steps = set(self._manager.all_steps())
        for file in self._sums.glob("*.json"):
            if int(file.stem) not in steps:
                file.unlink()
        for step in steps:
            file = self._sums / f"{step}.json"
            if not file.exists():
                beside = file.with_suffix(".new")
                beside.write_text(json.dumps(_sums_of(self.directory / str(step)), indent=1))
                beside.replace(file)

    def _changed_file(self, step: int) -> str | None:
        """A file of this checkpoint that is not as it was written, if there is one."""
        file = self._sums / f"{step}.json"
        if not file.exists():
            return None
        written, found = json.loads(file.read_text()), _sums_of(self.directory / str(step))
        return next((name for name in written if found.get(name) != written[name]), None)

    def _keeps_layers_apart(self, step: int) -> bool:
        """Whether it was written before layers were stacked, when each had its number as a key."""
        file = self.directory / str(step) / "state" / "_METADATA"
        return file.exists() and bool(re.search(r"'params', 'layers', '\d", file.read_text()))

    def _unreadable(self, step: int, what: str) -> RunError:
        older = [s for s in self._manager.all_steps() if s < step]
        way_out = f"to resume from step {max(older)}" if older else "and start again without --resume"
        return RunError(
            f"the checkpoint of step {step} cannot be read ({what}). Delete {self.directory / str(step)} {way_out}."
        )

    def _disk_error(self, what: str) -> RunError:
        last = self.latest()
        kept = f"the last good checkpoint is step {last}" if last is not None else "no checkpoint was written"
        return RunError(
            f"cannot write a checkpoint to {self.directory}: {what}; {kept}. "
            f"Free some space, or set --runs-dir to another disk, then --resume."
        )


def _sums_of(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
