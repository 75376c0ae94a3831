"""``moe-course train`` by two processes with four devices each: the run of one process with eight, and one report."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from moe_course.cli import main
from moe_course.errors import SettingError
from moe_course.parallel import make_mesh
from moe_course.train import run, together
from moe_course.train.checkpoint import Checkpoints
from moe_course.train.step import abstract_state
from tests import oracle

ROOT = Path(__file__).parents[2]
SETTINGS = (
    "--preset tiny --batch-size 8 --seq-len 32 --eval-every 2 --eval-bytes 512 --final-eval-bytes 512 "
    "--checkpoint-every 2 --optimizer.warmup-steps 1 --model.num-layers 2 --model.num-experts 8 --model.top-k 2 "
    "--data.domains code"
).split()


def train(folder: Path, *arguments: str) -> subprocess.Popen:
    env = {k: v for k, v in os.environ.items() if k not in ("NPROC", "JAX_COMPILATION_CACHE_DIR")}
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [
        sys.executable,
        "-m",
        "moe_course.cli",
        "train",
        *SETTINGS,
        "--runs-dir",
        str(folder),
        *arguments,
    ]
    return subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def train_together(folder: Path, *arguments: str) -> list[subprocess.Popen]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    place = "--coordinator", coordinator, "--processes", "2"
    return [train(folder, *place, "--process", str(i), *arguments) for i in range(2)]


def ended(processes: list[subprocess.Popen], timeout: int = 400) -> list[tuple[int, str, str]]:
    try:
        said = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(p.returncode, out, err) for p, (out, err) in zip(processes, said, strict=True)]


def losses(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["kind"] == "step"]


@pytest.mark.slow
def test_two_processes_train_as_one_does(tmp_path, monkeypatch):
    (first, second) = ended(train_together(tmp_path, "--name", "two", "--steps", "4"))
    assert first[0] == second[0] == 0, first[2][-3000:] + second[2][-3000:]
    assert "report " in first[1]
    assert "report " not in second[1], "process 0 alone speaks"
    ((code, _, err),) = ended([train(tmp_path, "--name", "one", "--steps", "4")])
    assert code == 0, err[-3000:]
    assert {p.name for p in tmp_path.iterdir()} == {"one", "two"}, "one folder per run"
    alone, both = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(both) == len(alone) == 4, "each step is written once"
    np.testing.assert_allclose(both, alone, rtol=4 * np.finfo(np.float32).eps * 32)
    summary = json.loads((tmp_path / "two" / "summary.json").read_text())
    assert summary["finished"]
    assert summary["devices"]["count"] == 8
    assert sorted(p.name for p in (tmp_path / "two" / "checkpoints").iterdir()) == ["2", "4"]
    # One process reads what two wrote.
    have, want = (restored(tmp_path / name, monkeypatch) for name in ("two", "one"))
    for a, b in zip(jax.tree.leaves(have.params), jax.tree.leaves(want.params), strict=True):
        oracle.assert_close(a, b, np.float32, 4096)
    assert int(have.step) == 4


def restored(folder: Path, monkeypatch):
    """The state of a run's newest checkpoint, on this process's eight devices."""
    seen = []
    monkeypatch.setattr(run, "train", lambda config, *_: seen.append(config))
    main(["train", *SETTINGS, "--steps", "4"])
    checkpoints = Checkpoints(folder / "checkpoints", 2)
    state, _ = checkpoints.restore(abstract_state(seen[0]), make_mesh(seen[0].mesh))
    checkpoints.close()
    return state


@pytest.mark.slow
def test_a_signal_to_one_stops_both_with_a_checkpoint(tmp_path):
    """SLURM and Kubernetes send TERM to all, but never between the same two steps of all."""
    processes = train_together(tmp_path, "--name", "cut", "--steps", "3000")
    metrics = tmp_path / "cut" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 3):
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in processes), ended(processes)
        time.sleep(0.5)
    processes[1].send_signal(signal.SIGTERM)
    (first, second) = ended(processes, timeout=120)
    assert first[0] == second[0] == 130, first[2][-3000:] + second[2][-3000:]
    assert "stopped, checkpoint written" in first[1]
    done = len(losses(tmp_path / "cut"))
    assert str(done) in {p.name for p in (tmp_path / "cut" / "checkpoints").iterdir()}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("h:1", 2, 2, 8), "process 2 of 2"),
        (("h:1", 0, 0, 8), "process 0 of 0"),
        (("h:1", 1, 1, 8), "process 1 of 1"),
        (("", 2, 0, 8), "--coordinator is ''"),
        (("h:1", 3, 0, 8), "8 devices do not divide over 3 processes"),
    ],
)
def test_numbers_that_cannot_be(arguments, says):
    with pytest.raises(SettingError, match=says), together.join(*arguments):
        pass


def test_alone_nothing_is_asked_of_anybody(tmp_path):
    with together.join("", 1, 0, 8):
        assert together.is_first()
        assert together.told_by_first({"a": 1}) == {"a": 1}
        any_process = together.Vote()
        assert any_process(True)
        assert not any_process(False)
    with together.run_dir(tmp_path) as own:
        assert own.path == tmp_path


def test_the_first_tells_and_any_may_stop(monkeypatch):
    """What several processes exchange, with the exchange itself replaced."""
    from jax.experimental import multihost_utils

    sent = {}
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    monkeypatch.setattr(
        multihost_utils,
        "broadcast_one_to_all",
        lambda x: sent.setdefault("first", x) if len(sent) < 1 else sent["first"],
    )
    assert together.told_by_first(["runs/tiny", True]) == ["runs/tiny", True]
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert together.told_by_first(None) == ["runs/tiny", True]
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    with pytest.raises(SettingError, match="4096 is the most"):
        together.told_by_first("x" * 5000)
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda x: np.array([False, True]))
    any_process = together.Vote()
    answers = [any_process(False) for _ in range(2 * together.ASK_EVERY)]
    assert answers == 2 * ([False] * (together.ASK_EVERY - 1) + [True]), "put to all now and then only"
