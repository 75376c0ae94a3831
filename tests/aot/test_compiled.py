"""Requests, the cache, the verdict, the reports: all that needs no GPU compiler."""

import gzip
import importlib.metadata
import json
from dataclasses import replace

import pytest
from rich.console import Console

from moe_course.aot import STATEMENT, command, compile_plan, fit_to, report, request, targets
from moe_course.aot import compiled as compiled_module
from moe_course.aot.request import LOG, MEASURED, PROGRAM, REQUEST, Request, train_config
from moe_course.aot.targets import PACKAGES, RESERVED_BYTES, TARGETS, description, memory_bytes
from moe_course.cli import main
from moe_course.errors import RunError, SettingError
from moe_course.models.config import ModelConfig
from moe_course.te import without_gpu
from moe_course.train.config import TrainConfig
from moe_course.train.presets import get_preset

CONFIG = fit_to(TrainConfig(model=ModelConfig(compute_dtype="bfloat16"), remat="full", seq_len=64), 8, ep=4)
HLO = """\
HloModule jit_step

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main (x: f32[1048576,1024]) -> f32[1048576,1024] {
  %x = f32[1048576,1024]{1,0} parameter(0)
  ROOT %r = f32[1048576,1024]{1,0} all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%sum
}
"""
GB = 10**9


def store(folder, *, temp=20 * GB, log="", device=80 * GB):
    """A finished compilation as the worker leaves it, made up."""
    folder.mkdir(parents=True)
    with gzip.open(folder / PROGRAM, "wt") as file:
        file.write(HLO)
    (folder / LOG).write_text(log)
    (folder / REQUEST).write_text(json.dumps({"versions": {"jax": "0.0"}}))
    memory = {"argument_size": 30 * GB, "temp_size": temp, "output_size": 31 * GB, "alias_size": 30 * GB}
    measured = {
        "state_bytes": 30 * GB - 100,
        "batch_bytes": 100,
        "parameters": 123_456,
        "device_bytes": device,
        "memory": memory,
        "seconds": {"trace": 1.0, "lower": 2.0, "compile": 30.0},
        "cpu_s": 40.0,
        "peak_rss_bytes": 2 * GB,
        "mesh": {"data": 1, "fsdp": 2, "expert": 4},
    }
    (folder / MEASURED).write_text(json.dumps(measured))
    return folder


@pytest.fixture
def finished(tmp_path):
    return compiled_module.read(Request(CONFIG, "h100", 8), store(tmp_path / "made"))


def test_what_fits_leaves_room_for_what_the_compiler_does_not_count(finished):
    assert finished.needed_bytes_per_gpu == 30 * GB + 20 * GB + 1 * GB
    assert finished.margin_bytes == 80 * GB - 51 * GB - RESERVED_BYTES
    assert finished.fits


def test_what_only_the_compiler_thinks_fits_does_not(tmp_path):
    """79 of 80 GB: XLA would be content."""
    folder = store(tmp_path / "made", temp=48 * GB)
    found = compiled_module.read(Request(CONFIG, "h100", 8), folder)
    assert found.needed_bytes_per_gpu < found.device_bytes
    assert not found.fits
    assert found.margin_bytes < 0


def test_keys_of_the_json(finished):
    figures = json.loads(json.dumps(finished.as_json()))
    assert {
        "state_bytes_per_gpu",
        "temp_bytes_per_gpu",
        "fits",
        "collectives",
        "flops",
        "compile_s",
    } <= set(figures)
    assert figures["statement"] == STATEMENT == "compiled, never run"
    entry = next(c for c in figures["collectives"] if c["kind"] == "all-reduce")
    assert set(entry) == {"kind", "axis", "count", "bytes", "predicted"}
    assert (entry["axis"], entry["count"]) == ("expert", 1)
    assert entry["bytes"] == 2 * 4 * 1048576 * 1024 * 3 // 4
    assert {"model", "padding", "recompute", "masked"} <= set(figures["flops"])


def test_every_report_says_that_nothing_ran(finished, tmp_path, capsys):
    report.print_report(finished, Console(width=200))
    shown = capsys.readouterr().out
    program = report.write(finished, tmp_path / "out" / "page.html")
    report.write(finished, tmp_path / "out" / "page.md")
    assert program.read_text() == HLO
    for text in (
        shown,
        (tmp_path / "out" / "page.html").read_text(),
        (tmp_path / "out" / "page.md").read_text(),
    ):
        assert text.count(STATEMENT) >= 5  # title, and every table
        for words in ("all-reduce", "expert", "It fits", "Compiling is not fitting"):
            assert words in text
    for name in ("page.html", "page.md"):
        assert "page.hlo.txt" in (tmp_path / "out" / name).read_text()


def test_warnings_of_the_compiler_become_notes(tmp_path):
    log = "W hlo_remat.cc] Can't reduce memory use below 141.05GiB (151451234567 bytes) by rematerialization; only"
    found = compiled_module.read(Request(CONFIG, "h100", 8), store(tmp_path / "made", log=log))
    assert any("141.05GiB" in note for note in found.notes)


def test_a_result_is_kept_and_again_is_again(tmp_path, monkeypatch):
    calls = []

    def compile_(asked, folder, timeout):
        calls.append(asked)
        store(folder) if not folder.exists() else None

    monkeypatch.setattr(compiled_module, "_compile", compile_)
    for again in (False, False, True):
        compile_plan(CONFIG, "h100", 8, cache=tmp_path, again=again)
    assert len(calls) == 2
    compile_plan(replace(CONFIG, remat="none"), "h100", 8, cache=tmp_path)
    compile_plan(CONFIG, "h200", 8, cache=tmp_path)
    assert len(calls) == 4


def test_the_key_names_settings_versions_and_code(monkeypatch):
    keys = {Request(CONFIG, "h100", 8).key(), Request(CONFIG, "b200", 8).key()}
    keys.add(Request(replace(CONFIG, capacity_factor=3.0), "h100", 8).key())
    monkeypatch.setattr(request, "code_hash", lambda: "other")
    keys.add(Request(CONFIG, "h100", 8).key())
    monkeypatch.setattr(request, "compiler_versions", lambda: {"jax": "9"})
    keys.add(Request(CONFIG, "h100", 8).key())
    assert len(keys) == 5


def test_a_configuration_survives_the_file():
    config = replace(CONFIG, data=replace(CONFIG.data, domains=("code", "text")))
    saved = json.loads(json.dumps(Request(config, "h100", 8).as_json()))["config"]
    assert train_config(saved) == config


def test_fit_to_takes_the_largest_expert_axis_that_divides():
    config = replace(CONFIG, mesh=replace(CONFIG.mesh, expert=8))
    assert fit_to(config, 4).mesh.expert == 4
    assert fit_to(config, 12).mesh.expert == 4  # 8 does not divide 12; 6 does not divide 16 experts
    assert fit_to(config, 64).mesh == replace(config.mesh, data=1, fsdp=8, expert=8)
    assert fit_to(config, 64).batch_size == fit_to(config, 64).devices == 64
    large = get_preset("deepseek-v3").config
    assert [fit_to(large, gpus).mesh.expert for gpus in (8, 64, 256, 1024)] == [8, 16, 64, 64]
    with pytest.raises(SettingError, match="Set --ep to a divisor of 12"):
        fit_to(config, 12, ep=8)


@pytest.mark.parametrize(
    ("hardware", "gpus", "message"),
    [
        ("gb20", 8, "Did you mean gb200"),
        ("h100", 12, "Set --gpus to a multiple of 8"),
        ("h100", 16, r"Use moe_course.aot.fit_to\(config, gpus\)"),
    ],
)
def test_impossible_requests(hardware, gpus, message):
    with pytest.raises(SettingError, match=message):
        Request(CONFIG, hardware, gpus).validate()


@pytest.mark.parametrize("name", TARGETS)
def test_descriptions_of_gpus(name):
    new, old = (description(TARGETS[name], version) for version in ("0.12.0.1", "0.10.2"))
    assert 80 * GB < memory_bytes(new) < 200 * GB
    assert new.count("{") == new.count("}")
    gone = {line.split(":")[0].strip() for line in new.splitlines()} - {
        line.split(":")[0].strip() for line in old.splitlines()
    }
    assert "collective_memory_granularity" in gone
    assert "major" not in gone


def test_what_is_missing_is_said_with_the_fix(monkeypatch):
    installed = dict.fromkeys(PACKAGES, "1") | {"jax": "0.10.2", "jax-cuda13-pjrt": "0.10.2"}

    def version(name):
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(targets.importlib.metadata, "version", version)
    assert targets.missing() == ""
    installed["jax-cuda13-pjrt"] = "0.12.0.1"
    assert "0.12.0.1 does not fit jax 0.10.2" in targets.missing()
    assert "pip install jax-cuda13-pjrt==0.10.2" in targets.missing()
    del installed["nvidia-nvvm"]
    assert targets.missing().startswith("nvidia-nvvm not installed")


def test_without_a_compiler_the_command_says_what_to_install(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(compiled_module, "missing", lambda: "no compiler here. Run: pip install x")
    monkeypatch.setenv("MOE_COURSE_COMPILED", str(tmp_path))
    assert main(["compile", "--preset", "tiny", "--gpus", "8", "--hardware", "h100", "--ep", "4"]) == 2
    assert capsys.readouterr().err == "moe-course: no compiler here. Run: pip install x\n"
    assert list(tmp_path.iterdir()) == []


def test_te_says_what_is_missing(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(compiled_module, "missing", lambda: "")
    monkeypatch.setattr(without_gpu, "missing", lambda: "no TE here.")
    monkeypatch.setenv("MOE_COURSE_COMPILED", str(tmp_path))
    assert (
        main(["compile", "--preset", "tiny", "--gpus", "8", "--hardware", "h100", "--ep", "4", "--te"]) == 2
    )
    assert capsys.readouterr().err == "moe-course: no TE here.\n"


def test_options_reach_the_configuration():
    options = command.Options(gpus=256, capacity_factor=2.0, recipe="mxfp8", backend="ragged_dot", layers=5)
    config = command.configuration(options)
    assert (config.mesh.fsdp, config.mesh.expert, config.batch_size) == (4, 64, 256)
    assert (config.capacity_factor, config.recipe, config.backend) == (2.0, "mxfp8", "ragged_dot")
    assert (config.model.num_layers, config.model.num_dense_layers, config.model.mtp_depth) == (5, 3, 0)
    assert command.configuration(command.Options(offload=True)).remat == "offload"
    assert command.configuration(command.Options(mtp=True)).model.mtp_depth == 1
    with pytest.raises(SettingError, match="needs --remat full"):
        command.configuration(command.Options(offload=True, remat="none"))


@pytest.mark.parametrize(
    ("log", "code", "says"),
    [
        ("Traceback\nmoe_course.errors.SettingError: no. Set --x.\n***\n", 1, "no. Set --x."),
        (
            "jaxlib.JaxRuntimeError: NOT_FOUND: ptxas\n\n*****\n",
            1,
            "jaxlib.JaxRuntimeError: NOT_FOUND: ptxas",
        ),
        ("E1 slow_operation_alarm.cc:73]\n*****\n", -9, "the compiling process was ended by signal 9"),
        ("*****\n", 3, "the compiling process ended with code 3."),
    ],
)
def test_why_a_worker_failed(log, code, says):
    assert compiled_module._reason(log, code).startswith(says)


def test_a_failed_worker_is_quoted(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled_module, "missing", lambda: "")
    monkeypatch.setattr(compiled_module.sys, "executable", "/bin/false")
    with pytest.raises(RunError, match="compiling failed"):
        compile_plan(CONFIG, "h100", 8, cache=tmp_path)
    assert list(tmp_path.iterdir()) == []
