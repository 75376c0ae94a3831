"""Memory against XLA's own plan of compiled steps, against published runs, and by direction."""

from dataclasses import replace
from statistics import median

import pytest

from moe_course.errors import SettingError
from moe_course.scaling import memory
from moe_course.scaling.layout import Layout
from moe_course.scaling.published import shapes

V3 = shapes()["deepseek-v3"].without_mtp()
LAYOUT = Layout(256, ep=64, pp=4, vpp=4, global_batch=4096)


def test_median_error_against_the_compiler_is_within_ten_per_cent():
    errors = memory.compiled_errors()
    assert len(errors) >= 12
    assert median(map(abs, errors.values())) == memory.compiled_error() <= 0.10
    assert max(map(abs, errors.values())) < 0.15


def test_what_a_compile_prints_can_be_compared():
    """``moe-course compile --json``'s keys, with defaults for what a configuration does not say."""
    held = memory.compiled_memory(V3, gpus=128, ep=64)
    state = held.parts["weights and optimizer"]
    row = {"name": "mine", "gpus": 128, "ep": 64, "state_bytes_per_gpu": state}
    row["temp_bytes_per_gpu"] = 2 * (held.total - state)
    errors = memory.compare_compiled([row])["mine"]
    assert errors["state"] == pytest.approx(0)
    assert errors["temp"] == pytest.approx(-0.5)
    assert -0.5 < errors["total"] < 0
    with pytest.raises(SettingError, match="temp_bytes_per_gpu"):
        memory.compare_compiled([{key: value for key, value in row.items() if "temp" not in key}])


def test_state_is_the_compilers_to_the_byte():
    for row in memory.compiled_rows():
        if row["offload"] != "moments":
            parts = memory.compiled_memory(V3, gpus=row["gpus"], ep=row["ep"]).parts
            assert parts["weights and optimizer"] / 1e9 == pytest.approx(row["arguments_gb"], rel=2e-3)


def test_a_wrong_twin_is_noticed():
    """Forget the FP32 gradients: the check against the compiler must fail."""
    wrong = []
    for row in memory.compiled_rows():
        keys = ("gpus", "ep", "tokens", "capacity", "remat", "accum", "offload")
        parts = memory.compiled_memory(V3, **{key: row[key] for key in keys}).parts
        total = sum(parts.values()) - parts["gradients"]
        wrong.append(abs(total / 1e9 / (row["arguments_gb"] + row["temp_gb"]) - 1))
    assert median(wrong) > 0.10


def test_errors_on_published_runs_are_said():
    errors = memory.layout_errors()
    assert len(errors) >= 15
    megatron = [abs(error) for name, error in errors.items() if name.startswith("mb")]
    assert median(megatron) < 0.15
    assert memory.layout_memory(V3, LAYOUT).error == memory.layout_error() < 0.30


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_zero_stage_shards_one_thing_more(stage):
    sizes = [memory.StateDtypes(zero=z).bytes_per_parameter(8) for z in range(4)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 14
    assert sizes[3] == pytest.approx(14 / 8)
    assert memory.StateDtypes(zero=stage).bytes_per_parameter(1) == 14


@pytest.mark.parametrize(
    "leaner",
    [
        {"recompute": ("full",)},
        {"recompute": ("moe_act", "layernorm")},
        {"gpus": 512, "global_batch": 8192, "pp": 8, "vpp": 2},
        {"tp": 2},
        {"cp": 2},
        {"seq_len": 2048},
    ],
)
def test_what_should_need_less_needs_less(leaner):
    assert memory.layout_memory(V3, replace(LAYOUT, **leaner)).total < memory.layout_memory(V3, LAYOUT).total


def test_capacity_grows_the_buffers_only():
    parts = memory.layout_memory(V3, LAYOUT).parts
    larger = memory.layout_memory(V3, replace(LAYOUT, capacity_factor=2.0)).parts
    assert larger["expert rows"] == 2 * parts["expert rows"]
    assert {n: s for n, s in larger.items() if n != "expert rows"} == {
        n: s for n, s in parts.items() if n != "expert rows"
    }


def test_receive_buffers_by_rule():
    """Balanced need times capacity, at least the busiest rank's; the worst case is every token of the EP group."""
    layout = replace(LAYOUT, micro_batch=1)
    balanced = memory.received_rows(V3, layout)
    assert balanced == 4096 * 8
    assert memory.received_rows(V3, replace(layout, capacity_factor=1.25)) == 1.25 * balanced
    assert memory.received_rows(V3, replace(layout, skew=1.7)) == 1.7 * balanced
    assert memory.received_rows(V3, replace(layout, capacity_factor=None)) == 64 * 4096 * 4
    assert memory.received_rows(V3, replace(layout, ep=256, pp=1, vpp=1, capacity_factor=None)) == 256 * 4096


def test_pipeline_keeps_as_many_micro_batches_as_stages():
    assert memory.micro_batches_in_flight(Layout(8, pp=8, global_batch=64)) == 8
    assert memory.micro_batches_in_flight(Layout(8)) == 1
    assert memory.micro_batches_in_flight(Layout(8, pp=8, vpp=2, global_batch=64)) > 8
    assert memory.micro_batches_in_flight(Layout(8, pp=8, global_batch=4)) == 4


def test_a_reserve_is_left():
    held = memory.layout_memory(V3, LAYOUT)
    assert held.fits(held.total + memory.RESERVE)
    assert not held.fits(held.total + memory.RESERVE - 1)
