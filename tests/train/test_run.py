"""The main job as a person runs it: kill and resume, interrupt, overflow, and every kind of bad input."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe_course import cli
from moe_course.train import run as run_module

SMALLEST = (
    "--data.domains code --steps 10 --batch-size 8 --seq-len 32 --optimizer.warmup-steps 2 --eval-every 5 "
    "--eval-bytes 2000 --final-eval-bytes 2000 --checkpoint-every 3 --model.d-model 32 --model.num-layers 2 "
    "--model.num-heads 2 --model.q-lora-rank 0 --model.kv-lora-rank 16 --model.qk-nope-head-dim 8 "
    "--model.qk-rope-head-dim 4 --model.v-head-dim 8 --model.d-ff-dense 32 --model.d-ff 16 "
    "--model.num-experts 8 --model.top-k 2"
).split()


def start(runs: Path, *options: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "moe_course.cli", "train", *SMALLEST, "--runs-dir", str(runs), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen, code: int = 0) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, out + err
    return out + err


def steps(run: Path) -> dict[int, dict]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return {r["step"]: r for r in map(json.loads, lines) if r["kind"] == "step"}


def wait_for_step(run: Path, step: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 240
    while not (
        (run / "metrics.jsonl").exists() and f'"step": {step},' in (run / "metrics.jsonl").read_text()
    ):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Path:
    runs = tmp_path_factory.mktemp("unbroken")
    output = finish(start(runs, "--name", "a"))
    assert "bits/byte held out" in output
    assert "report" in output
    return runs / "a"


@pytest.mark.slow
def test_a_run_leaves_everything_it_promises(unbroken):
    for name in ("config.json", "metrics.jsonl", "summary.json", "report.md", "checkpoints", "tensorboard"):
        assert (unbroken / name).exists(), name
    assert list((unbroken / "tensorboard").glob("events*"))
    assert list(unbroken.glob("**/*.png"))
    records = steps(unbroken)
    assert sorted(records) == list(range(1, 11))
    for record in records.values():
        books = record["ledger"]
        assert books["made"] == books["combined"] == 8 * 32 * 2
        assert books["dropped"] == 0
        assert record["demand"] <= record["capacity"]
    summary = json.loads((unbroken / "summary.json").read_text())
    assert summary["finished"]
    assert summary["devices"]["simulated"]
    assert set(summary["latency_ms"]) >= {"dispatch", "combine", "grouped_gemm"}


@pytest.mark.slow
@pytest.mark.parametrize("step", [4, 8])
def test_killed_and_resumed_equals_unbroken(unbroken, tmp_path, step):
    """SIGKILL after a step; --resume; every loss, load and gradient norm has the same bits."""
    process = start(tmp_path, "--name", "b")
    wait_for_step(tmp_path / "b", step, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    output = finish(start(tmp_path, "--name", "b", "--resume"))
    assert "resuming" in output
    ours, theirs = steps(unbroken), steps(tmp_path / "b")
    assert sorted(theirs) == sorted(ours)
    for i in ours:
        for key in ("loss", "gradient_norm", "load", "bits_per_byte_by_domain", "demand"):
            assert theirs[i][key] == ours[i][key], (i, key)


@pytest.mark.slow
def test_interrupt_saves_and_resumes_on_another_mesh(unbroken, tmp_path):
    """Ctrl-C ends with a checkpoint and the command that goes on; 2 devices carry on what 8 began."""
    process = start(tmp_path, "--name", "c")
    wait_for_step(tmp_path / "c", 4, process)
    process.send_signal(signal.SIGINT)
    output = finish(process, cli.INTERRUPTED)
    assert "--name c" in output
    assert "--resume" in output
    done = max(steps(tmp_path / "c"))
    if done < 10:
        assert (tmp_path / "c" / "checkpoints" / str(done)).is_dir()
    mesh = ["--devices", "2", "--mesh.fsdp", "1", "--mesh.expert", "2"]
    finish(start(tmp_path, "--name", "c", "--resume", *mesh))
    ours, theirs = steps(unbroken), steps(tmp_path / "c")
    for i in ours:
        assert theirs[i]["loss"] == pytest.approx(ours[i]["loss"], rel=1e-4), i


@pytest.mark.slow
def test_overflowing_buffers_change_nothing_but_time(unbroken, tmp_path):
    """A capacity far too small: steps re-run in larger buckets, the losses are those of the roomy run."""
    output = finish(start(tmp_path, "--name", "d", "--capacity-factor", "0.25"))
    assert "re-run" in output
    ours, theirs = steps(unbroken), steps(tmp_path / "d")
    assert [theirs[i]["loss"] for i in ours] == [ours[i]["loss"] for i in ours]
    assert all(record["ledger"]["dropped"] == 0 for record in theirs.values())
    events = [json.loads(line) for line in (tmp_path / "d" / "metrics.jsonl").read_text().splitlines()]
    assert any(e["kind"] == "event" and e["event"] == "bucket" for e in events)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_with_the_way_out(unbroken, tmp_path):
    """Truncate the data of the newest checkpoint: exit 2, one line, which folder to delete."""
    import shutil

    shutil.copytree(unbroken, tmp_path / "e")
    newest = max((tmp_path / "e" / "checkpoints").glob("[0-9]*"), key=lambda p: int(p.name))
    for file in newest.glob("state/**/d/*"):
        os.truncate(file, file.stat().st_size // 2)
    message = finish(start(tmp_path, "--name", "e", "--resume"), 2).strip().splitlines()[-1]
    assert message.startswith("moe-course: the checkpoint of step 10 cannot be read")
    assert f"Delete {newest} to resume from step 9" in message


@pytest.mark.slow
def test_non_finite_loss_stops_with_step_place_and_checkpoint(tmp_path):
    options = [
        "--optimizer.learning-rate",
        "1e30",
        "--optimizer.clip-norm",
        "1e30",
        "--checkpoint-every",
        "1",
    ]
    message = finish(start(tmp_path, "--name", "f", *options), 2).strip().splitlines()[-1]
    assert message.startswith("moe-course: step ")
    assert "is not finite" in message
    assert "layer" in message
    assert "the last good checkpoint is step" in message
    assert "Lower --optimizer.learning-rate" in message


def error_of(capsys, *options: str) -> str:
    assert cli.main(["train", *options]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model.top-k", "40"], "top_k is 40 but there are 16 experts. Set --model.top-k to 16 or less."),
        (
            ["--model.num-experts", "18"],
            "18 experts do not divide over an expert axis of 4. Set --mesh.expert",
        ),
        (["--mesh.expert", "2"], "needs 4 devices but there are 8. Set --devices 4"),
        (
            ["--batch-size", "12"],
            "batch_size 12 does not divide over 8 devices. Set --batch-size to a multiple of 8",
        ),
        (["--preset", "tinny"], "there is no preset 'tinny'. Did you mean --preset tiny?"),
        (["--preset", "deepseek-v3"], "Choose --preset tiny or small"),
        (["--data.domains", "code", "proteins"], "Did you mean protein?"),
        (["--optimizer.warmup-steps", "9999"], "Set --optimizer.warmup-steps below"),
        (["--model.vocab-size", "256"], "Set --model.vocab-size to 260 or more."),
        (["--resume", "--name", "none"], "there is no run in"),
        (["--capacity-factor", "0"], "Set --capacity-factor above 0"),
        (["--seq-len", "100000000"], "Set --seq-len to less than"),
    ],
)
def test_bad_settings_end_in_one_line_and_leave_nothing(capsys, tmp_path, options, message):
    error = error_of(capsys, "--runs-dir", str(tmp_path / "runs"), *options)
    assert error.startswith("moe-course: ")
    assert message in error
    assert not (tmp_path / "runs").exists()


def test_a_folder_of_another_run_is_refused(capsys, tmp_path):
    run_module.RunDir(tmp_path / "x").create(run_module.TrainConfig(), "tiny")
    error = error_of(capsys, "--runs-dir", str(tmp_path), "--name", "x")
    assert "is in use. Add --resume to continue that run, or choose another --name." in error
    before = (tmp_path / "x" / "config.json").read_bytes()
    error = error_of(capsys, "--runs-dir", str(tmp_path), "--name", "x", "--resume", "--seed", "7")
    assert "Set --seed 0 to resume it, or choose another --name." in error or "was made with" in error
    assert (tmp_path / "x" / "config.json").read_bytes() == before
    assert sorted(p.name for p in (tmp_path / "x").iterdir()) == ["config.json"]


def test_a_new_run_never_touches_an_old_one(tmp_path):
    choose = run_module.choose_run_dir
    assert choose(tmp_path, None, "tiny", False).name == "tiny"
    run_module.RunDir(tmp_path / "tiny").create(run_module.TrainConfig(), "tiny")
    assert choose(tmp_path, None, "tiny", False).name == "tiny-2"
    assert choose(tmp_path, None, "tiny", True).name == "tiny"


def test_a_disk_that_fills_up_is_one_line(capsys, monkeypatch):
    def full(argv):
        raise OSError(errno.ENOSPC, "No space left on device", "runs/tiny/metrics.jsonl")

    monkeypatch.setattr(cli, "_train", full)
    assert cli.main(["train"]) == 2
    assert (
        "the disk is full while writing runs/tiny/metrics.jsonl. Free some space" in capsys.readouterr().err
    )


def test_unknown_commands_and_help(capsys):
    assert cli.main(["trian"]) == 2
    assert "there is no command 'trian'" in capsys.readouterr().err
    assert cli.main(["--help"]) == 0
    assert "moe-course train --preset tiny" in capsys.readouterr().out
