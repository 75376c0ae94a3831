"""What te.available says on made-up machines: each reason once, and the table that doctor shows."""

import dataclasses
import importlib
import tomllib
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from moe_course import te
from moe_course.te import capability, native

EQUAL = {"transformer-engine": "2.20.2", "core": "2.20.2", "extension": "2.20.2"}
GB200 = te.Machine(
    gpu="NVIDIA GB200",
    capability=100,
    devices=4,
    packages=EQUAL,
    cublas=(13, 10, 0),
    cudnn=(9, 28, 1),
    nccl=(2, 32, 3),
    jax=(0, 12, 0),
    triton=True,
)
H100 = dataclasses.replace(GB200, gpu="NVIDIA H100", capability=90)
A100 = dataclasses.replace(GB200, gpu="NVIDIA A100", capability=80)
RTX = dataclasses.replace(GB200, gpu="NVIDIA RTX PRO 6000", capability=120)


def with_packages(machine, **versions):
    return dataclasses.replace(machine, packages={**machine.packages, **versions})


def test_on_a_machine_with_everything_every_operation_runs():
    assert te.available(machine=GB200) == (True, "")
    assert {op: te.available(op, GB200).reason for op in te.OPS} == dict.fromkeys(te.OPS, "")


REASONS = [
    # op, machine, what the reason must say
    (None, te.Machine(packages=EQUAL), ["no GPU"]),
    ("route", te.Machine(packages=EQUAL), ["no GPU"]),
    (None, with_packages(H100, **dict.fromkeys(EQUAL)), ["not installed", "pip install"]),
    (None, with_packages(H100, core=None), ["not installed"]),
    (None, with_packages(H100, extension=None), ["without its JAX extension", "built on the machine"]),
    (None, with_packages(H100, extension="2.19.0"), ["version mismatch", "2.20.2", "2.19.0"]),
    (None, with_packages(H100, core="2.21.0"), ["version mismatch", "core 2.21.0"]),
    (None, with_packages(H100, **dict.fromkeys(EQUAL, "3.1.0")), ["version mismatch", "TE 3.1.0", "2.20"]),
    (None, dataclasses.replace(H100, cudnn=(9, 10, 1)), ["cuDNN 9.10.1 is too old", "9.12.0"]),
    (
        None,
        dataclasses.replace(H100, load_error="libnccl.so.2: no such file"),
        ["does not load", "libnccl.so.2"],
    ),
    ("grouped_gemm", A100, ["too old", "compute capability 9.0 (Hopper)", "has 8.0", "Pallas"]),
    ("grouped_gemm_mxfp8", H100, ["too old", "10.0 (Blackwell)", "has 9.0"]),
    ("dense_fp8", A100, ["too old", "8.9 (Ada)"]),
    ("dense_mxfp8", H100, ["too old", "10.0"]),
    ("dispatch", A100, ["too old", "9.0"]),
    ("moe_mxfp8", H100, ["too old", "10.0"]),
    ("grouped_gemm", RTX, ["below compute capability 12.0 only", "RTX Blackwell"]),
    ("dense_mxfp8", RTX, ["below compute capability 12.0 only"]),
    ("route", dataclasses.replace(A100, capability=75), ["too old", "8.0 (Ampere)", "has 7.5"]),
    ("grouped_gemm", dataclasses.replace(H100, cublas=(13, 3, 1)), ["cuBLAS 13.3.1 is too old", "13.4"]),
    ("grouped_gemm", dataclasses.replace(GB200, cublas=(13, 2, 0)), ["cuBLAS 13.2.0 is too old", "13.3"]),
    ("dense_mxfp8", dataclasses.replace(GB200, cublas=(12, 6)), ["cuBLAS 12.6 is too old", "12.8"]),
    (
        "grouped_gemm_mxfp8",
        dataclasses.replace(GB200, capability=103, cublas=(13, 7, 0)),
        ["corrupt", "13.8.1"],
    ),
    ("dispatch", dataclasses.replace(H100, nccl=(2, 29, 7)), ["NCCL 2.29.7 is too old", "2.30.4"]),
    ("dispatch", dataclasses.replace(H100, devices=1), ["2 GPUs at least", "there is 1"]),
    ("permute", dataclasses.replace(H100, triton=False), ["Triton", "pip install triton"]),
    ("permute", dataclasses.replace(H100, jax=(0, 9, 2)), ["JAX 0.9.2 can corrupt", "0.9.3"]),
]


@pytest.mark.parametrize(("op", "machine", "says"), REASONS)
def test_each_reason_is_in_words(op, machine, says):
    answer = te.available(op, machine)
    assert not answer.ok
    for words in says:
        assert words in answer.reason


@pytest.mark.parametrize(
    ("op", "machine"),
    [
        ("grouped_gemm", dataclasses.replace(GB200, cublas=(13, 3))),  # Blackwell's floor is below Hopper's
        ("grouped_gemm", dataclasses.replace(H100, cublas=(13, 4))),
        ("grouped_gemm", dataclasses.replace(GB200, cublas=(13, 7, 0))),  # the fault is B300's
        ("grouped_gemm", dataclasses.replace(GB200, capability=103, cublas=(13, 8, 1))),
        ("grouped_gemm", dataclasses.replace(H100, cublas=())),  # unknown is no reason
        ("grouped_gemm_copied_sizes", A100),
        ("route", RTX),
        (None, with_packages(H100, **dict.fromkeys(EQUAL, "2.21.0"))),
    ],
)
def test_no_reason_is_invented(op, machine):
    assert te.available(op, machine) == (True, "")


def test_an_unknown_operation_is_an_error():
    with pytest.raises(KeyError):
        te.available("grouped_gem", GB200)


# ---------------------------------------------------------------- looking at a machine


def test_this_machine_has_no_gpu():
    assert te.available().reason.startswith("JAX uses no GPU here")
    assert te.available("moe").reason == te.available().reason


@pytest.fixture
def gpus(monkeypatch):
    """``gpus(*capabilities, packages={})``: a machine with these GPUs and packages, and a TE that loads."""

    def make(*capabilities, packages, load_error=""):
        devices = [
            SimpleNamespace(platform="gpu", device_kind="GPU", compute_capability=text)
            for text in capabilities
        ]
        monkeypatch.setattr(jax, "devices", lambda: devices)
        monkeypatch.setattr(capability, "_package", packages.get)
        monkeypatch.setattr(native, "load_error", lambda: load_error)
        monkeypatch.setattr(native, "library_versions", lambda: {"cublas": (13, 6, 0)})
        return te.examine()

    return make


PACKAGES = {
    "transformer-engine": "2.20.2",
    "transformer-engine-cu13": "2.20.2",
    "transformer-engine-jax": "2.20.2",
    "nvidia-cublas": "13.10.0.20",
    "nvidia-cudnn-cu13": "9.28.1.4",
}


def test_the_weakest_gpu_decides(gpus):
    machine = gpus("10.0", "9.0", packages=PACKAGES)
    assert (machine.capability, machine.devices) == (90, 2)
    assert machine.packages == EQUAL


def test_the_loaded_cublas_counts_not_the_installed_one(gpus):
    assert gpus("9.0", packages=PACKAGES).cublas == (13, 6, 0)
    assert gpus("9.0", packages=PACKAGES, load_error="broken").cublas == (13, 10, 0, 20)


def test_te_is_not_loaded_where_a_part_is_missing(gpus):
    machine = gpus("9.0", packages={**PACKAGES, "transformer-engine-jax": None}, load_error="never asked")
    assert machine.load_error == ""
    assert "without its JAX extension" in te.why_not(None, machine)


@pytest.mark.parametrize(("text", "number"), [("9.0", 90), ("10.3", 103), ("120", 120), (None, 0)])
def test_compute_capability_in_either_spelling(text, number):
    assert capability._capability_of(SimpleNamespace(compute_capability=text)) == number


@pytest.mark.parametrize(
    ("number", "version"), [(120103, (12, 1, 3)), (131000, (13, 10, 0)), (92801, (9, 28, 1))]
)
def test_library_versions_are_read_as_te_writes_them(number, version):
    assert native._split(number) == version


@pytest.mark.skipif(
    find_spec("transformer_engine") is not None, reason="Transformer Engine is installed here"
)
def test_where_te_does_not_load_its_own_words_are_kept():
    with pytest.raises(ModuleNotFoundError) as error:
        importlib.import_module("transformer_engine")
    assert native.load_error() == str(error.value)


# ---------------------------------------------------------------- the table


def test_table_has_a_row_for_each_operation_and_says_what_the_rules_say():
    header, *rows = te.table()
    assert len(rows) == len(te.OPS)
    for (name, rule), row in zip(te.OPS.items(), rows, strict=True):
        assert row[0].startswith(name + ":")
        assert row[-1] == rule.instead
        for column, (_, low, _) in enumerate(te.ARCHITECTURES, 1):
            assert (row[column] == "no") == bool(capability.too_old_or_new(name, low)), header[column]


def test_architectures_follow_one_another():
    ends = [high for _, _, high in te.ARCHITECTURES]
    starts = [low for _, low, _ in te.ARCHITECTURES]
    assert starts[1:] == ends[:-1]
    assert [te.architecture(n) for n in (75, 80, 89, 90, 103, 110, 121, 140, None)] == [
        None,
        "Ampere",
        "Ada",
        "Hopper",
        "Blackwell",
        "Blackwell",
        "RTX Blackwell",
        None,
        None,
    ]


def test_every_adapter_has_a_name_here_and_no_other():
    assert set(te._ADAPTERS) <= set(te.__all__)
    for name in te._ADAPTERS:
        assert callable(getattr(te, name)), name
    with pytest.raises(AttributeError, match="no_such"):
        _ = te.no_such


def test_one_version_of_te_everywhere():
    root = Path(__file__).parents[2]
    extra = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]["te"]
    assert extra == [f"transformer-engine[core-cu13,jax]=={te.TESTED}"]
    assert f"--no-build-isolation 'transformer_engine[core-cu13,jax]=={te.TESTED}'" in te.INSTALL
    assert f"\nversion={te.TESTED}\n" in (root / "scripts" / "te-wheel").read_text()
    assert te.TESTED.rpartition(".")[0] in capability.KNOWN
