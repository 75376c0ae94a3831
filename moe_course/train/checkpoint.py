"""Checkpoints by Orbax: written beside, then renamed; loadable on any mesh."""

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
            self._manager.save(step, args=args, force=True)
        except Exception as error:
            raise self._disk_error(_first_line(error)) from error

    def wait(self) -> None:
        """Return when every checkpoint started so far is complete on disk."""
        try:
            self._manager.wait_until_finished()
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
        like = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            vars(abstract),
            vars(tree_shardings(abstract, mesh)),
        )
        args = ocp.args.Composite(state=ocp.args.StandardRestore(like), meta=ocp.args.JsonRestore())
        try:
            restored = self._manager.restore(step, args=args)
        except Exception as error:
            older = [s for s in self._manager.all_steps() if s < step]
            way_out = f"to resume from step {max(older)}" if older else "and start again without --resume"
            raise RunError(
                f"the checkpoint of step {step} cannot be read ({_first_line(error)}). "
                f"Delete {self.directory / str(step)} {way_out}."
            ) from error
        return TrainState(**restored.state), restored.meta

    def close(self) -> None:
        """Wait for writes in flight and release the threads."""
        self.wait()
        self._manager.close()

    def _disk_error(self, what: str) -> RunError:
        last = self.latest()
        kept = f"the last good checkpoint is step {last}" if last is not None else "no checkpoint was written"
        return RunError(
            f"cannot write a checkpoint to {self.directory}: {what}; {kept}. "
            f"Free some space, or set --runs-dir to another disk, then --resume."
        )


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
