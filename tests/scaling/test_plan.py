"""The step-time model by direction, its calibration out of source, the search, and the words."""

import itertools
import json
from dataclasses import fields, replace

import numpy as np
import pytest

from moe_course.cli import main
from moe_course.errors import SettingError
from moe_course.scaling import calibrate, costs, ladder, plan
from moe_course.scaling.hardware import machine
from moe_course.scaling.layout import Layout
from moe_course.scaling.published import layout_of, shapes, training_runs
from moe_course.scaling.report import model_shape

V3, GB200, H100 = shapes()["deepseek-v3"], machine("gb200"), machine("h100")
BASE = Layout(
    256, ep=64, pp=4, vpp=4, global_batch=4096, dispatcher="hierarchical", overlap=True, graphs="full"
)


def parts(layout=BASE, found=GB200, **options):
    work = costs.count(V3, layout, found, **options)
    return {name: float(value) for name, value in costs.seconds(work, costs.Constants()).items()}


def step(layout=BASE, found=GB200, **options):
    return sum(parts(layout, found, **options).values())


def test_every_published_layout_is_legal_as_read():
    problems = {run.id: layout_of(run).problem(run.shape) for run in training_runs()}
    wrong = {name: problem for name, problem in problems.items() if problem}
    assert len(wrong) <= 0.1 * len(problems), wrong


@pytest.mark.parametrize(
    "slower",
    [
        {"precision": "bf16"},
        {"recompute": ("full",)},
        {"vpp": 1},
        {"overlap": False},
        {"dispatcher": "all_to_all"},
        {"graphs": "none"},
        {"real_routing": True},
        {"tp": 2, "pp": 4},
    ],
)
def test_what_should_be_slower_is_slower(slower):
    assert step(replace(BASE, **slower)) > step()


def test_ep_across_nvlink_domains_costs_network_time():
    inside, across = parts(replace(BASE, ep=8), H100), parts(replace(BASE, ep=64), H100)
    assert inside["dispatch, network"] == 0
    assert across["dispatch, network"] > 0.01 * sum(across.values())
    assert parts(replace(BASE, ep=64), GB200)["dispatch, network"] == 0


def test_few_rows_per_expert_slow_the_grouped_gemm():
    few = replace(BASE, seq_len=256, global_batch=65_536)
    assert few.tokens_per_gpu == BASE.tokens_per_gpu
    assert parts(few)["expert GEMMs"] > 1.1 * parts()["expert GEMMs"]


def test_the_bubble_is_the_formula():
    found = parts()
    inner = sum(t for name, t in found.items() if name not in ("pipeline bubble", *ladder_outer()))
    assert found["pipeline bubble"] == pytest.approx(inner * 3 / (4 * 64))


def ladder_outer():
    return ("tensor parallel", "data parallel", "optimizer")


def test_newer_software_is_faster_and_constants_are_positive():
    assert step(year=2027.5) < step() < step(year=2025.5)
    with pytest.raises(ValueError, match="above 0"):
        costs.Constants(core=0.0)


# --- calibration ------------------------------------------------------------------------------------------


def test_the_shipped_errors_are_within_what_we_promise():
    shipped = calibrate.shipped()
    assert shipped.rows == len(training_runs()) - sum(not calibrate.usable(run) for run in training_runs())
    assert shipped.median_abs_error <= 0.15
    assert shipped.p90_abs_error <= 0.35
    assert f"{shipped.median_abs_error:.0%}" in shipped.describe()


def test_a_held_out_source_leaves_no_lineage_behind():
    """One fold by hand: neither the source nor a near-copy of one of its rows may train."""
    runs = calibrate.works()[0]
    sources = np.array([run.source for run in runs])
    lineage = np.array([run.lineage for run in runs])
    out = sources == "megatron-bridge 26.08"
    train = ~out & ~np.isin(lineage, lineage[out])
    assert 0 < out.sum() < len(runs)
    assert not set(lineage[train]) & set(lineage[out])
    assert (~out).sum() > train.sum(), "near-copies exist, or this test shows nothing"


@pytest.mark.slow
def test_the_shipped_constants_are_the_fit_of_the_shipped_data():
    fitted, shipped = calibrate.calibrated(), calibrate.shipped().constants
    for field in fields(costs.Constants):
        assert getattr(fitted, field.name) == pytest.approx(getattr(shipped, field.name), rel=2e-2), (
            field.name
        )


@pytest.mark.slow
def test_the_bench_prints_what_it_promises():
    from moe_course.bench import planner

    figures = planner.run(planner.Options(publishers=False))
    assert figures["rows"] == calibrate.shipped().rows
    assert figures["median_abs_error"] == pytest.approx(calibrate.shipped().median_abs_error, abs=0.005)
    assert figures["p90_abs_error"] == pytest.approx(calibrate.shipped().p90_abs_error, abs=0.01)
    assert sum(source["rows"] for source in figures["by_source"].values()) == figures["rows"]
    assert figures["in_sample"]["median_abs_error"] < figures["median_abs_error"], "held out is harder"
    assert json.loads(json.dumps(figures)) == figures


def test_a_constant_model_is_worse_than_the_calibrated_one():
    """The errors mean something: priors alone, never fitted, must miss by more."""
    every = np.ones(len(calibrate.works()[0]), bool)
    fitted = calibrate.summary(calibrate.predict_rows(calibrate.shipped().constants, every))
    prior = calibrate.summary(calibrate.predict_rows(costs.Constants(), every))
    assert fitted["median_abs_error"] < 0.7 * prior["median_abs_error"]


# --- search -----------------------------------------------------------------------------------------------


def test_the_search_finds_what_nvidia_runs():
    """256 GB200, balanced: Megatron-Bridge 26.08 runs EP64 PP4 at 4,912 tokens/s/GPU."""
    found = plan.search(V3, GB200, 256, real_routing=False)
    best = found.best
    assert best.layout.tp == 1
    assert best.layout.ep <= 72
    assert best.memory.fits(GB200.memory)
    assert best.tokens_per_second == pytest.approx(4912, rel=calibrate.shipped().p90_abs_error)
    low, high = best.interval()
    assert low < best.tokens_per_second < high
    assert all(a.tokens_per_second >= b.tokens_per_second for a, b in itertools.pairwise(found.every))
    front = found.pareto()
    assert all(a.memory.total > b.memory.total for a, b in itertools.pairwise(front))
    sentences = plan.why(found)
    assert any(sentence.startswith("EP ") for sentence in sentences)
    assert any("rows per expert" in sentence for sentence in sentences)
    assert 0 < best.communication_share < 1


def test_illegal_layouts_say_why():
    for layout, word in (
        (replace(BASE, ep=48), "divide"),
        (replace(BASE, tp=3), "divide"),
        (replace(BASE, global_batch=100), "multiple"),
        (replace(BASE, pp=1), "interleaving"),
        (replace(BASE, global_batch=64), "fill"),
    ):
        with pytest.raises(SettingError, match=word):
            layout.check(V3)
    BASE.check(V3)


def test_what_does_not_fit_says_how_much_is_missing():
    with pytest.raises(SettingError, match="GB per GPU"):
        plan.search(V3, H100, 8)


def test_weak_scaling_starts_at_one_and_stragglers_cost():
    counts = [256, 1024, 4096]
    curve = plan.weak_scaling(V3, GB200, BASE, counts)
    slow = plan.weak_scaling(V3, GB200, BASE, counts, straggler=0.05)
    assert curve[0] == (256, 1.0)
    with pytest.raises(SettingError, match="divide"):
        plan.weak_scaling(V3, GB200, BASE, [64])
    assert slow[-1][1] < curve[-1][1]


def test_command_prints_json_with_an_error_beside_every_prediction(capsys, tmp_path):
    picture = tmp_path / "plan.png"
    arguments = ["--model", "deepseek-v3", "--hardware", "gb200", "--gpus", "1024", "--ep", "64"]
    assert main(["plan", *arguments, "--json", "--plot", str(picture)]) == 0
    said = json.loads(capsys.readouterr().out)
    for prediction in (said["best"], *said["others"]):
        assert prediction["ep"] == 64
        assert set(prediction["error"]) == {"tokens_median", "tokens_p90", "memory_median"}
        assert sum(prediction["parts_seconds"].values()) == pytest.approx(prediction["step_seconds"])
    assert said["why"]
    assert picture.stat().st_size > 1000


def test_command_prints_a_table(capsys):
    assert main(["plan", "--model", "qwen3-30b-a3b", "--hardware", "b200", "--gpus", "8"]) == 0
    said = capsys.readouterr().out
    assert "±" in said
    assert "nine of ten" in " ".join(said.split())


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--model", "gpt-9"], "no model"),
        (["--hardware", "abacus"], "no machine"),
        (["--gpus", "0"], "1 or more"),
        (["--gpus", "8"], "does not fit"),
        (["--ep", "7"], "Leave one of them out"),
        (["--hardware", "h100", "--gpus", "256", "--precision", "nvfp4"], "bf16 or fp8"),
    ],
)
def test_settings_that_cannot_work_say_so_on_one_line(arguments, word, capsys):
    assert main(["plan", *arguments]) == 2
    said = capsys.readouterr().err
    assert word in said
    assert said.count("\n") == 1


def test_models_of_the_course_and_published_ones_have_a_shape():
    assert model_shape("deepseek-v3").parameters == pytest.approx(684e9, rel=0.01), "with its MTP module"
    assert model_shape("Qwen3-235B-A22B").experts == 128


# --- ladders ----------------------------------------------------------------------------------------------


def test_the_published_gb200_ladder_has_the_models_shape():
    steps = ladder.megatron_gb200()
    assert [round(step.published) for step in (steps[0], steps[-1])] == [494, 970]
    predicted = [step.predicted for step in steps]
    assert predicted == sorted(predicted), "no step may make it slower"
    assert max(abs(step.residual) for step in steps) < 0.5
    unseen = [s for s in steps if s.cause == "finer than the model"]
    assert len(unseen) == 8


def test_the_jax_ladder_rises_step_by_step_to_what_was_published():
    steps = ladder.jax_te()
    predicted = [step.predicted for step in steps]
    assert predicted == sorted(predicted)
    assert predicted[-1] / predicted[0] > 5
    assert abs(steps[-1].residual) < calibrate.shipped().p90_abs_error
    assert all(step.published is None for step in steps[1:-1]), "nobody published these"
    assert "GB200" in ladder.discrepancy()


def test_weak_scaling_of_the_story_and_its_end():
    curve = {n: carried for n, _, carried in ladder.beyond()}
    assert curve[1024] == pytest.approx(0.97, abs=1e-3)
    assert curve[8192] < curve[1024]
    assert ladder.end_of_weak_scaling() == 2560
    strong = [speed for _, speed in ladder.strong_scaling()]
    assert strong == sorted(strong, reverse=True)
    assert strong[-1] < 0.95
