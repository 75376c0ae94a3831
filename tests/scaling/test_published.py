"""The shipped data: complete, sourced, and counted by one formula that reproduces each source's own figures."""

import dataclasses
import re
import subprocess
import sys

import pytest

from moe_course.errors import SettingError
from moe_course.models.config import DEEPSEEK_V2_LITE, DEEPSEEK_V3
from moe_course.scaling import flops, hardware, published
from moe_course.scaling.shape import from_config


def total(terms: dict) -> float:
    return sum(terms.values())


def test_every_row_names_its_source_and_its_confidence():
    rows = published.rows()
    assert len({row["id"] for row in rows}) == len(rows) == 641
    for row in rows:
        assert row["source"]["title"]
        assert row["source"]["url"]
        assert row["confidence"] in ("exact_from_table", "from_prose", "second_hand")


def test_every_machine_names_its_sources():
    for machine in hardware.machines().values():
        assert {"hbm_gb", "hbm_tb_s", "nvlink_gb_s_per_direction", "bf16 peak"} <= set(machine.sources)
        assert all(re.search(r"\((exact|from|second)", source) for source in machine.sources.values())


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("gb200", "GB200 NVL72"),
        ("NVIDIA H200", "H200 SXM"),
        ("H100 96GB HBM2e 500W", "H100 SXM 500 W"),
        ("TPU v6e", "TPU v6e"),
    ],
)
def test_a_machine_is_found_by_what_people_call_it(said, name):
    assert hardware.machine(said).name == name


def test_unknown_names_say_what_exists():
    with pytest.raises(SettingError, match="gb200"):
        hardware.machine("abacus")
    with pytest.raises(SettingError, match="bf16 or fp8"):
        hardware.machine("h100").peak("nvfp4")


def test_peaks_agree_with_those_of_the_report():
    """Two tables of one fact: the report's, by what a driver calls the device, and the planner's."""
    from moe_course.train.latency import published_peak

    for name in ("A100", "H100", "H200", "B200", "GB200", "B300", "GB300"):
        found = hardware.machine(name)
        assert found.peak("bf16") == published_peak(f"NVIDIA {name}", "bfloat16")
        assert found.peak_tflops["fp8"] == published_peak(f"NVIDIA {name}", "float8")


def test_one_formula_gives_the_reference_count_of_every_row():
    for run in published.training_runs():
        counted = total(flops.published_flops(run.shape, run.row["seq_len"])) / 1e9
        assert counted == pytest.approx(run.row["ref_gflop_per_token"], rel=1e-3), run.id


@pytest.mark.parametrize(
    ("model", "seq", "convention", "tokens", "tflops"),
    [
        ("deepseek-v3", 4096, "megatron", 6143.6, 1597.31),
        ("qwen3-30b-a3b", 4096, "megatron", 13_011.4, 299.352),
        ("llama-3-70b", 8192, "megatron-llama", 1621, 780),
        ("mixtral-8x7b", 4096, "maxtext-2024", 3899, 323.4),
        ("deepseek-v3", 4096, "deepseek", 1543.2, 385),
        ("deepseek-v3", 4096, "deepseek-noncausal", 1543.2, 432),
        ("gpt-oss-120b", 4096, "bridge-gpt-oss-2025", 19_275, 524),
        ("gpt-oss-120b", 4096, "megatron", 33_017, 1077.35),
        ("deepseek-v2-lite-16b", 2048, "maxtext", 8672.8, 134.92),
    ],
)
def test_each_convention_reproduces_what_its_source_printed(model, seq, convention, tokens, tflops):
    shape = published.shapes()[model]
    assert tokens * total(flops.published_flops(shape, seq, convention)) / 1e12 == pytest.approx(
        tflops, rel=3e-3
    )
    others = {name: total(flops.published_flops(shape, seq, name)) for name in flops.CONVENTIONS}
    assert max(others.values()) / min(others.values()) > 1.04, "a convention must matter"


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("deepseek-v3", 671.0, 37.0),
        ("mixtral-8x7b", 46.7, 12.8),
        ("mixtral-8x22b", 141, 39),
        ("qwen3-235b-a22b", 235, 22),
        ("qwen3-30b-a3b", 30.5, 3.1),
        ("gpt-oss-120b", 116.8, 5.1),
        ("llama-3.1-405b", 405.9, 405.9 - 2.1),
    ],
)
def test_parameters_are_those_published(name, billions, active):
    shape = published.shapes()[name].without_mtp()
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=5e-3)
    assert shape.active_parameters / 1e9 == pytest.approx(active, rel=0.03)


@pytest.mark.parametrize("config", [DEEPSEEK_V2_LITE, DEEPSEEK_V3])
def test_the_two_descriptions_of_a_model_agree(config):
    shape = from_config(config)
    counts = flops.parameter_counts(config)
    assert shape.parameters == counts.total
    assert shape.active_parameters == counts.active
    ours, exact = flops.training_flops(config, 4096), flops.published_flops(shape, 4096, "exact")
    assert total(exact) == total(ours)
    assert total(flops.published_flops(shape, 4096)) < total(ours), "the router is not counted by Megatron"


def test_a_shape_with_a_wrong_size_is_noticed():
    shape = published.shapes()["mixtral-8x7b"]
    wrong = dataclasses.replace(shape, d_ff=shape.d_ff + 256)
    assert wrong.parameters / 1e9 != pytest.approx(46.7, rel=5e-3)


def test_the_data_need_no_jax():
    code = "import sys, moe_course.scaling.published as p; p.training_runs(); print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
