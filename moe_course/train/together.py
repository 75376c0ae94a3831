"""One training run by several processes: they join, agree on what to do, and process 0 alone writes.

Every process runs the same program on the same batches. What only one may decide (which folder, whether to stop) is
decided by one and told to all; metrics, report and TensorBoard events of the others go nowhere. Checkpoints are
written by all, each its own part.
"""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from moe_course.environment import backends_started, prepare_cpu
from moe_course.errors import SettingError
from moe_course.train.run_dir import RunDir

LONGEST_MESSAGE = 4096
"""Bytes that process 0 may tell the others at a time."""
ASK_EVERY = 4
"""Questions between two that are put to all processes: a step asks about two."""


@contextlib.contextmanager
def join(coordinator: str, processes: int, process: int, devices: int) -> Iterator[None]:
    """Run the body as process ``process`` of ``processes`` on ``devices`` devices in all; alone if there is one.

    Raises :class:`SettingError` for numbers that cannot be.
    """
    if processes == 1 and process == 0:
        yield
        return
    if processes < 1 or not 0 <= process < processes:
        raise SettingError(
            f"process {process} of {processes}: set --processes to how many there are, --process to 0, 1, ... in each."
        )
    if ":" not in coordinator:
        raise SettingError(
            f"--coordinator is {coordinator!r}. Set it to host:port of process 0, the same in all processes."
        )
    if devices % processes:
        raise SettingError(
            f"{devices} devices do not divide over {processes} processes. Set --devices to a multiple of {processes}."
        )
    from moe_course import processes as meeting

    if not backends_started():  # joining starts JAX; setup() comes too late
        prepare_cpu(devices // processes)
    with meeting.join(coordinator, processes, process):
        yield


def is_first() -> bool:
    """Whether this is process 0, or the only one."""
    import jax

    return jax.process_index() == 0


def told_by_first(value):
    """``value`` of process 0 (anything that JSON holds), in every process."""
    import jax
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return value
    data = json.dumps(value if is_first() else None).encode()
    if len(data) > LONGEST_MESSAGE:
        raise SettingError(
            f"process 0 has {len(data)} bytes to tell the others; {LONGEST_MESSAGE} is the most."
        )
    told = multihost_utils.broadcast_one_to_all(np.frombuffer(data.ljust(LONGEST_MESSAGE), np.uint8))
    return json.loads(np.asarray(told).tobytes())


class Vote:
    """Whether a flag is set in any process. All must ask, the same number of times.

    Asking waits for the steps in flight, so of several processes only every ``ASK_EVERY``-th question is put; the
    others are answered no. A process alone answers at once.
    """

    def __init__(self):
        self._asked = 0

    def __call__(self, flag: bool) -> bool:
        import jax
        from jax.experimental import multihost_utils

        if jax.process_count() == 1:
            return flag
        self._asked += 1
        if self._asked % ASK_EVERY:
            return False
        return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))


@contextlib.contextmanager
def run_dir(path: Path) -> Iterator[RunDir]:
    """The run's folder: for process 0 itself, for the others one that is thrown away, but for the checkpoints."""
    if is_first():
        yield RunDir(path)
        return
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder))
        run.checkpoints = path / "checkpoints"
        yield run


def put(batch: dict, sharding) -> dict:
    """Host arrays, the same in every process, on the devices; each process hands over its own parts."""
    import jax

    if jax.process_count() == 1:
        return jax.device_put(batch, sharding)
    return {
        name: jax.make_array_from_callback(value.shape, sharding, lambda index, value=value: value[index])
        for name, value in batch.items()
    }
