"""``moe-course bench gpu``, as a dry run on the CPU: every part's code, its limits, its failures as data."""

import json
import sys

import pytest

from moe_course.bench import gpu, gpu_measure, gpu_training
from moe_course.bench.gpu import Options, bars, last_figures, run, run_apart, run_here
from moe_course.errors import SettingError
from moe_course.scaling.flops import parameter_counts


@pytest.fixture
def here(monkeypatch):
    """Parts run in this process, whose JAX has started."""
    monkeypatch.setattr(gpu, "setup", lambda **_: None)
    monkeypatch.setattr(gpu_measure, "SECONDS_PER_CANDIDATE", 0.001)
    monkeypatch.setattr(gpu_measure, "ROUNDS", 1)
    monkeypatch.setattr(gpu_training, "STEPS", 2)
    return lambda name: run_here(name, tiny=True)


def test_machine(here):
    figures = here("machine")
    assert figures["device"]["platform"] == "cpu"
    assert "no GPU" in figures["transformer_engine"]["reason"]
    assert figures["dense_bfloat16_gemm"]["tflops"] > 0


def test_correctness(here):
    figures = here("correctness")
    assert set(figures) == {"pallas_interpret", "ragged_dot", "tokamax", "te"}
    for backend in ("tokamax", "te"):
        assert figures[backend]["refused"], "why it cannot run here, in words"
    for backend in ("pallas_interpret", "ragged_dot"):
        assert all(case["ok"] for case in figures[backend].values()), figures[backend]
        assert not bars({"correctness": figures})["wrong_results"]["value"]


def test_a_wrong_kernel_is_noticed(here, monkeypatch):
    from moe_course.bench import gpu_kernels

    right = gpu_kernels.grouped_gemm
    monkeypatch.setattr(gpu_kernels, "grouped_gemm", lambda *a, **k: right(*a, **k) * (1 + 2**-5))
    figures = here("correctness")
    assert not any(case["ok"] for case in figures["ragged_dot"].values())
    wrong = bars({"correctness": figures})["wrong_results"]
    assert "ragged_dot uniform" in wrong["value"]
    assert wrong["met"] is False


def test_grouped_gemm_speed(here):
    figures = here("grouped_gemm")
    assert set(figures) == {"tiny uniform", "tiny zipf"}
    assert figures["tiny zipf"]["ragged_dot"]["fwdbwd_vs_dense"] > 0
    assert figures["tiny zipf"]["te"]["refused"]
    bar = bars({"grouped_gemm": figures})["grouped_gemm_fwd_vs_dense"]
    best = [max(b["fwd_vs_dense"] for b in case.values() if "fwd_vs_dense" in b) for case in figures.values()]
    assert bar["value"] == min(best)
    assert bar["met"] == (min(best) >= 0.8)


def test_fp8(here):
    figures = here("fp8")
    # e4m3 keeps 3 bits: rounding errors up to 2**-4 of a value, half of that on average, from both operands.
    for name in ("dense by XLA", "grouped, emulated"):
        assert 2**-7 < figures[name]["relative_error"] < 2**-4, name
    assert "refused" in figures["dense by TE"]


@pytest.mark.slow
def test_moe_layer(here):
    figures = here("moe_layer")
    assert figures["ragged_dot"]["fwdbwd_ms"] > 0
    assert figures["te"]["refused"]


@pytest.mark.slow
def test_train_step_and_launches(here):
    figures = here("train_step")
    step = figures["step"]
    assert figures["model"]["active"] < figures["model"]["parameters"]
    assert (step["host_syncs"], step["recompilations"]) == (0, 0), step
    assert step["mfu"] is None, "a CPU has no published peak"
    assert len(step["losses"]) == 3
    met = bars({"train_step": figures})
    assert met["host_syncs_between_steps"]["met"]
    assert met["recompilations"]["met"]


def test_host_copies_and_recompilations_are_seen():
    """The twin that does what a step must not."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    @jax.jit
    def program(x):
        return x + 1

    def careless(state, batch):
        return program(jnp.concatenate([state, state])), {}  # another shape each time

    _, facts, _ = gpu_training._without_host(careless, jnp.zeros(4), [{}], 2)
    assert facts["recompilations"] >= 2

    def chatty(state, batch):
        return program(np.ones(4, np.float32)), {}  # a host array at each step

    _, facts, _ = gpu_training._without_host(chatty, jnp.zeros(4), [{}], 2)
    assert facts["host_syncs"] == 1
    assert "host-to-device" in facts["host_sync"]


def test_out_of_memory_tries_a_smaller_batch(monkeypatch):
    tried = []

    def steps(model, batch, seq, count):
        tried.append(batch)
        if batch > 2:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 99 bytes.")
        return {"step_ms": 1.0}

    monkeypatch.setattr(gpu_training, "_steps", steps)
    figures = dict(gpu_training.train_step(False))
    assert tried == [4, 2]
    assert "RESOURCE_EXHAUSTED" in figures["batch 4"]["error"]
    assert figures["step"] == {"step_ms": 1.0}


def test_the_model_has_about_a_billion_active_parameters_and_fits_80_gb():
    counts = parameter_counts(gpu_training.ONE_BILLION)
    assert 0.9e9 < counts.active < 1.1e9
    state = 12 * counts.total  # float32 weights and two moments
    assert 2 * state + 4 * counts.total < 72e9, "the state, its successor and the gradients"


# ---------------------------------------------------------------- limits and failures


def test_eight_minutes_hold_all_parts():
    assert sum(part.limit_s for part in gpu.PARTS.values()) <= gpu.LIMIT_S == 480


@pytest.mark.parametrize(
    ("code", "says", "kept"),
    [
        (
            "print('PART {\"a\": 1}', flush=True); import time; time.sleep(60)",
            "stopped after its 2 s",
            {"a": 1},
        ),
        ("import os; os.abort()", "exit code -6", {}),
        (
            "print('PART {\"a\": 1}'); print('PART {\"a\": 1, \"b'); raise ValueError('broken')",
            "exit code 1: ValueError: broken",
            {"a": 1},
        ),
        ("print('PART {\"a\": 2}')", None, {"a": 2}),
    ],
    ids=["hangs", "crashes", "raises", "ends"],
)
def test_a_part_that_fails_is_data(code, says, kept):
    figures = run_apart("machine", 2, dry_run=False, command=[sys.executable, "-c", code])
    assert figures.pop("seconds") < 10
    error = figures.pop("error", None)
    assert figures == kept
    assert error is None if says is None else says in error


def test_a_part_after_the_end_is_not_started():
    assert "not started" in run_apart("fp8", 0, dry_run=True)["error"]


def test_last_figures_of_nothing():
    assert last_figures("some log\n") == {}


def test_nothing_measured_is_no_bar_met():
    stopped = {"error": "stopped", "seconds": 2.0}
    nothing = {"grouped_gemm": stopped, "correctness": stopped, "train_step": {"step": {"error": "broken"}}}
    for bar in bars(nothing).values():
        assert (bar["value"], bar["met"]) == (None, None)


def test_a_backend_that_fails_on_a_case_is_not_right():
    cases = {"te": {"small": {"ok": True}, "odd": {"error": "RuntimeError: x"}}, "tokamax": {"refused": "no"}}
    assert bars({"correctness": cases})["wrong_results"] == {"bar": [], "value": ["te odd"], "met": False}


def test_settings_that_cannot_be_are_refused_in_words(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "visible_gpus", lambda: [])
    with pytest.raises(SettingError, match="no NVIDIA GPU is visible here"):
        run(Options())
    with pytest.raises(SettingError, match="nothing is written"):
        run(Options(dry_run=True, out=tmp_path / "figures.json"))
    with pytest.raises(SettingError, match="no part 'speed'"):
        run(Options(parts=("speed",)))


def test_a_real_run_is_written_after_each_part(tmp_path, monkeypatch):
    out = tmp_path / "h100.json"
    seen = []

    def part(name, limit, **_):
        seen.append(json.loads(out.read_text()) if out.exists() else None)
        return {"name": name}

    monkeypatch.setattr(gpu, "visible_gpus", lambda: ["NVIDIA H100 80GB HBM3"])
    monkeypatch.setattr(gpu, "run_apart", part)
    result = run(Options(out=out))
    assert result["what"] == "measured on NVIDIA H100 80GB HBM3"
    assert set(gpu.PARTS) | {"date", "versions", "bars", "seconds", "what"} == set(result)
    assert json.loads(out.read_text()) == result
    assert seen[0] is None
    assert "machine" in seen[1]


@pytest.mark.slow
def test_dry_run_from_the_command_line(capsys):
    from moe_course.cli import main

    assert main(["bench", "gpu", "--json", "--dry-run", "--parts", "machine", "no_command_buffers"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["what"].startswith("cpu dry run")
    assert result["machine"]["device"]["platform"] == "cpu"
    assert result["no_command_buffers"]["step"]["step_ms"] > 0, result["no_command_buffers"]
    assert result["bars"]["grouped_gemm_fwd_vs_dense"]["met"] is None
