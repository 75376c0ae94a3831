"""moe-course doctor on made-up machines: half of it missing, GPUs of every kind, a JAX that dies."""

import json
import os
import subprocess
import sys

import pytest

from moe_course import doctor, te

JAX_CPU = {"platform": "cpu", "kind": "cpu", "count": 1}
JAX_GPU = {"platform": "gpu", "kind": "NVIDIA H100", "count": 2}


def run(tmp_path, *arguments, hidden=(), binaries=None, probe_code=None):
    """The doctor as a process whose Python lacks the packages ``hidden`` and whose PATH has only ``binaries``."""
    site = tmp_path / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(
        "import importlib.metadata as m, sys\n"
        f"hidden = {set(hidden)!r}\n"
        "for name in hidden - {'moe-course'}: sys.modules[name] = None\n"
        "found = m.version\n"
        "def version(name):\n"
        "    if name in hidden: raise m.PackageNotFoundError(name)\n"
        "    return found(name)\n"
        "m.version = version\n"
        "if 'moe-course' in hidden: m.requires = version\n" + (probe_code or "")
    )
    path = tmp_path / "bin"
    path.mkdir(exist_ok=True)
    for name, script in (binaries or {}).items():
        (path / name).write_text(f"#!/bin/sh\n{script}\n")
        (path / name).chmod(0o755)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    return subprocess.run(
        [sys.executable, "-m", "moe_course.doctor", *arguments],
        env=clean | {"PYTHONPATH": str(site), "PATH": str(path), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )


def test_this_machine(tmp_path):
    done = run(tmp_path, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    assert report["fixes"] == []
    assert report["jax"]["platform"] == "cpu"
    assert report["versions"]["jax"] == report["versions"]["jaxlib"]
    assert report["memory_gib"] > 0
    assert "simulated CPU" in report["verdict"]
    assert report["transformer_engine"]["reason"].startswith("JAX uses no GPU here")
    assert set(report["transformer_engine"]["operations"]) == set(te.OPS)


@pytest.mark.parametrize(
    ("hidden", "says"),
    [
        (["jax", "jaxlib", "flax"], "missing or too old: flax>=0.12.8, jax>=0.10.2"),
        (["numpy", "rich", "tyro", "matplotlib"], "tyro>=1.0"),
        (["moe-course"], "missing or too old: moe-course itself"),
    ],
)
def test_half_of_it_missing(tmp_path, hidden, says):
    done = run(tmp_path, hidden=hidden)
    assert done.stderr == ""
    assert done.returncode == 1
    assert says in done.stdout
    assert "pip install -e ." in done.stdout
    assert "without TE" in done.stdout, "the whole report, whatever is missing"


def test_gpu_required_and_absent(tmp_path):
    done = run(tmp_path, "--gpu")
    assert done.returncode == 1
    assert "fix: no NVIDIA GPU is visible" in done.stdout


def smi(*rows: str, cuda="13.0") -> str:
    """A stand-in for nvidia-smi that lists these GPUs."""
    listed = "\n".join(rows)
    return f"""case "$1" in
        --query*) cat <<END\n{listed}\nEND\n;;
        -L) echo "GPU 0: x (UUID: y)" ;;
        *) echo "CUDA Version: {cuda}" ;;
    esac"""


def test_a_gpu_that_jax_does_not_use(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "cat").symlink_to("/bin/cat")
    binaries = {"nvidia-smi": smi("NVIDIA H100 80GB HBM3, 570.12, 81559, 9.0", cuda="12.8")}
    report = json.loads(run(tmp_path, "--json", binaries=binaries).stdout)
    assert report["ok"], "the course runs on the CPU"
    assert report["driver"] == "570.12"
    assert report["cuda_of_driver"] == "12.8"
    assert report["gpus"] == [
        {"name": "NVIDIA H100 80GB HBM3", "memory_mib": 81559.0, "compute_capability": 9.0}
    ]
    assert any("driver 570.12 is too old" in fix for fix in report["fixes"])
    assert any("pip install -e '.[gpu]'" in fix for fix in report["fixes"])
    assert report["verdict"].endswith("The GPU is not used.")
    assert run(tmp_path, "--gpu", binaries=binaries).returncode == 1


@pytest.mark.parametrize(
    "script", ["exit 9", "echo nonsense", "echo a, b", "echo x, 580, [N/A], [N/A]", "exit 127"]
)
def test_a_broken_nvidia_smi_is_no_error(tmp_path, script):
    done = run(tmp_path, "--json", binaries={"nvidia-smi": script})
    assert done.returncode == 0, done.stderr


def test_a_jax_that_dies_takes_nothing_with_it(tmp_path):
    kill = "import os\nif '-c' in sys.orig_argv: print('about to die', file=sys.stderr, flush=True); os._exit(134)\n"
    done = run(tmp_path, probe_code=kill)
    assert done.returncode == 1
    assert "fix: JAX does not start: about to die" in done.stdout


# ---------------------------------------------------------------- judgements, without processes


@pytest.fixture
def machine(monkeypatch):
    """``machine(capability, jax, te, **versions)``: a report on a machine with one GPU."""

    def make(capability=9.0, jax=JAX_GPU, te=None, driver="580.65", need_gpu=False, **versions):
        def ask_driver(report):
            report.driver = driver
            report.gpus = [{"name": "GPU", "memory_mib": 1.0, "compute_capability": capability}]

        def ask_jax(report):
            report.jax, report.transformer_engine = jax, te or {}
            report.versions |= {"CUDA plugin": "0.10.2", "Transformer Engine": "2.20.2"} | versions

        monkeypatch.setattr(doctor, "_ask_driver", ask_driver)
        monkeypatch.setattr(doctor, "_ask_jax", ask_jax)
        return doctor.examine(need_gpu=need_gpu)

    return make


@pytest.mark.parametrize(
    ("capability", "row"),
    [
        (7.5, "unknown GPU"),
        (8.0, "Ampere"),
        (8.9, "Ada"),
        (9.0, "Hopper"),
        (10.0, "Blackwell"),
        (10.3, "Blackwell"),
        (12.0, "RTX Blackwell"),
        (14.0, "unknown GPU"),
        (None, "unknown GPU"),
    ],
)
def test_capability(machine, capability, row):
    report = machine(capability)
    assert report.capability == row
    assert (f"> {row}  " in doctor.text(report)) == (row != "unknown GPU")
    on_cpu = machine(capability, jax=JAX_CPU)
    assert on_cpu.capability == "CPU"
    assert "> without TE" in doctor.text(on_cpu)


def test_each_operation_that_te_cannot_do_is_named_with_its_reason(machine):
    said = {"ok": True, "reason": "", "operations": {"route": "", "permute": "Triton is not installed."}}
    shown = doctor.text(machine(te=said))
    assert "not permute: Triton is not installed." in shown
    assert "not route" not in shown
    for name in te.OPS:
        assert f"{name}: {te.OPS[name].does}" in shown, "the whole table"


@pytest.mark.parametrize(
    ("settings", "ok", "says"),
    [
        ({}, True, "runs here, on 2 NVIDIA H100."),
        ({"need_gpu": True, "te": {"ok": True, "reason": ""}}, True, "runs here, on 2 NVIDIA H100."),
        ({"te": {"ok": False, "reason": "cuDNN 9.1 is too old"}}, True, "cuDNN 9.1 is too old"),
        ({"te": {"ok": False, "reason": "cuDNN"}, "need_gpu": True}, False, "not on a GPU as asked"),
        ({"Transformer Engine": None}, True, "Transformer Engine is not installed"),
        ({"Transformer Engine": None, "need_gpu": True}, False, "Transformer Engine is not installed"),
        ({"jax": JAX_CPU, "CUDA plugin": None}, True, "this JAX is CPU-only"),
        ({"jax": JAX_CPU}, True, "check CUDA_VISIBLE_DEVICES"),
        ({"driver": "550.1", "jax": JAX_CPU}, True, "driver 550.1 is too old"),
        ({"jax": {"error": "no"}}, False, "JAX does not start: no"),
        ({"jax": {"error": "no"}, "jaxlib": "0.9.0"}, False, "and jaxlib 0.9.0 differ"),
    ],
)
def test_verdicts(machine, settings, ok, says):
    report = machine(**settings)
    assert report.ok == ok
    assert says in doctor.text(report)
    assert ok or report.fixes


@pytest.mark.parametrize(
    ("memory", "disk", "says"), [(2 * 2**30, 50.0, "of memory"), (2**34, 0.5, "free on this disk")]
)
def test_too_small(machine, monkeypatch, memory, disk, says):
    monkeypatch.setattr(doctor.environment, "memory_bytes", lambda: memory)
    monkeypatch.setattr(doctor, "_disk_free_gib", lambda: disk)
    report = machine(jax=JAX_CPU)
    assert not report.ok
    assert any(says in fix for fix in report.fixes)


def test_an_old_requirement_is_named(machine, monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda packages: "0.4.1" if packages == ("optax",) else "99.1")
    monkeypatch.setattr(
        doctor.importlib.metadata, "requires", lambda _: ["optax>=0.5", "jax>=0.10", 'x; extra == "dev"']
    )
    assert doctor._missing_requirements() == ["optax>=0.5 (found 0.4.1)"]
