"""The step-time model by direction, its calibration out of source, the search, and the words."""

import itertools
import json
import time
from dataclasses import fields, replace

import numpy as np
import pytest

from moe_course.cli import main
from moe_course.errors import SettingError
from moe_course.scaling import calibrate, comm, costs, ladder, memory, plan
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
        {"skew": 1.5},
        {"tp": 2, "pp": 4},
        {"cp": 2},
        {"fsdp": True},
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


@pytest.mark.parametrize(
    ("layout", "found", "dense", "routed"),
    [
        (
            Layout(64, ep=8),
            H100,
            (64, 8),
            (8, 1),
        ),  # EP fills a node: copies of an expert meet on the NICs only
        (Layout(64), GB200, (64, 64), (64, 64)),  # one domain: NVLink alone
        (Layout(288, ep=8), GB200, (288, 72), (36, 9)),
        (Layout(64, tp=8), H100, (8, 1), (64, 8)),
    ],
)
def test_weights_and_gradients_take_the_link_that_they_must(layout, found, dense, routed):
    """6 bytes per parameter over (copies, those of them in one domain): inside first, the rest on the NICs meanwhile."""
    inner, outer = comm.links(found)
    expected = 0.0
    for parameters, (copies, local) in zip(memory.stage_parameters(V3, layout), (dense, routed), strict=True):
        groups = copies / local
        nvlink = 6 * parameters * (1 - 1 / local) / inner.beta
        expected += max(nvlink, 6 * parameters / local * (1 - 1 / groups) / outer.beta)
    assert costs.count(V3, layout, found).dp == pytest.approx(expected)


def test_a_given_skew_is_the_time_of_the_busiest_rank():
    even, skewed = parts(replace(BASE, skew=1.0)), parts(replace(BASE, skew=1.5))
    for name in even:
        slower = name in ("expert GEMMs", "dispatch, NVLink") or name == "pipeline bubble"
        assert (skewed[name] > even[name]) == slower, name
    assert skewed["expert GEMMs"] == pytest.approx(1.5 * even["expert GEMMs"])
    assert even == parts(), "a skew of 1 is forced balance"
    assert parts(replace(BASE, skew=1.5, real_routing=True)) == skewed, "a given skew replaces the fitted one"


def test_stragglers_are_a_part_of_the_step():
    calm, windy = (plan.predict(V3, BASE, GB200, straggler=s)[0] for s in (0.0, 0.02))
    assert "stragglers" not in calm.parts
    assert windy.step_seconds == pytest.approx(calm.step_seconds * plan.straggler_wait(0.02, 256))
    slowest = np.random.default_rng(0).normal(1, 0.02, (20_000, 256)).max(1).mean()
    assert plan.straggler_wait(0.02, 256) == pytest.approx(slowest, rel=0.01)
    assert plan.straggler_wait(0.02, 1) == 1


def test_newer_software_is_faster_and_constants_are_positive():
    assert step(year=2027.5) < step() < step(year=2025.5)
    with pytest.raises(ValueError, match="above 0"):
        costs.Constants(core=0.0)


# --- calibration ------------------------------------------------------------------------------------------


def test_the_shipped_errors_are_within_what_we_promise():
    shipped = calibrate.shipped()
    assert 0 < shipped.ratio_median_abs_error < 0.15
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


def test_the_shipped_constants_are_the_fit_of_the_shipped_data():
    fitted, shipped = calibrate.calibrated(), calibrate.shipped().constants
    for field in fields(costs.Constants):
        assert getattr(fitted, field.name) == pytest.approx(getattr(shipped, field.name), rel=2e-2), (
            field.name
        )


def test_the_bench_prints_what_it_promises():
    from moe_course.bench import planner

    figures = planner.run(planner.Options(publishers=False))
    assert figures["rows"] == calibrate.shipped().rows
    assert figures["median_abs_error"] == pytest.approx(calibrate.shipped().median_abs_error, abs=0.005)
    assert figures["p90_abs_error"] == pytest.approx(calibrate.shipped().p90_abs_error, abs=0.01)
    assert sum(source["rows"] for source in figures["by_source"].values()) == figures["rows"]
    assert figures["in_sample"]["median_abs_error"] < figures["median_abs_error"], "held out is harder"
    ratios = figures["ratios_of_two_layouts"]
    assert ratios["median_abs_error"] == pytest.approx(calibrate.shipped().ratio_median_abs_error, abs=0.005)
    assert ratios["pairs"] > 100
    assert all(len(fit["residuals"]) == fit["rows"] for fit in figures["links"].values())
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


def test_the_search_looks_at_every_kind_of_parallelism_and_keeps_to_what_is_fixed():
    layouts = plan.legal_layouts(V3, H100, 96, seq_len=16_384, sizes={"tp": 2})
    assert {layout.tp for layout in layouts} == {2}
    assert {layout.cp for layout in layouts} == {1, 2, 3, 4} - {3}, "16,384 tokens do not divide by 3"
    assert {layout.pp for layout in layouts} >= {1, 3, 12}, "any divisor, not only powers of two"
    assert {layout.fsdp for layout in layouts} == {False, True}
    assert all(not layout.problem(V3) and layout.gpus == 96 for layout in layouts)
    assert len(set(layouts)) == len(layouts)
    assert not any(layout.fsdp and layout.pp > 1 for layout in layouts)


def test_a_search_over_1024_gpus_takes_seconds():
    """Processor time, which other work on the machine does not move; about 2 s on one core."""
    start = time.process_time()
    found = plan.search(V3, GB200, 1024)
    plan.why(found)
    assert time.process_time() - start < 20
    assert len(found.every) > 5000


def test_illegal_layouts_say_why():
    for layout, word in (
        (replace(BASE, ep=48), "divide"),
        (replace(BASE, tp=3), "divide"),
        (replace(BASE, global_batch=100), "multiple"),
        (replace(BASE, pp=1), "interleaving"),
        (replace(BASE, global_batch=64), "fill"),
        (replace(BASE, global_batch=64 * 6), "interleave"),
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
        assert {name for name, error in prediction["error"].items() if not error} == {"communication_share"}
        assert len(prediction["error"]) == 5
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
        (["--model", "deepsek-v3"], "--model deepseek-v3"),
        (["--hardware", "gb2000"], "--hardware gb200"),
        (["--hardware", "v5p"], "torus"),
        (["--gpus", "0"], "1 or more"),
        (["--cp", "-1"], "1 or more"),
        (["--gpus", "8"], "does not fit"),
        (["--gpus", "8"], "--gpus 64"),
        (["--ep", "7"], "Leave --ep 7 out"),
        (["--ep", "96"], "does not divide"),
        (["--batch", "3"], "multiple"),
        (["--hardware", "h100", "--gpus", "256", "--precision", "nvfp4"], "bf16 or fp8"),
        (["--hardware", "h100", "--gpus", "256", "--precision", "mxfp8"], "--precision fp8"),
        (["--precision", "fp7"], "--precision fp8"),
        (["--skew", "0.5"], "at least the mean"),
        (["--straggler", "-0.1"], "0 or more"),
        (["--plot", "plan.txt"], "no picture"),
        (["--plot", "no-such-folder/plan.png"], "no folder"),
    ],
)
def test_settings_that_cannot_work_say_so_on_one_line(arguments, word, capsys):
    assert main(["plan", *arguments]) == 2
    said = capsys.readouterr().err
    assert word in said
    assert said.count("\n") == 1


def test_help_names_models_machines_and_every_setting(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "--help"])
    assert stopped.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    for word in ("qwen3-235b-a22b", "gb300", "--skew", "--straggler", "--plot", "moe-course plan --model"):
        assert word in said
    assert "v5p" not in said, "what is refused is not offered"


def test_hopper_gets_the_precision_that_it_has(capsys):
    assert main(["plan", "--model", "qwen3-30b-a3b", "--hardware", "h100", "--gpus", "16", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["best"]["mfu_peak_tflops"] == H100.peak("fp8")


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
    causes = {step.name: step.cause.partition(":")[0] for step in steps}
    assert causes["cuBLAS grouped GEMM"] == "expert GEMMs"
    assert causes["several collective streams"] == "data parallel"
    assert causes["NCCL EP"] == "dispatch, NVLink"
    assert ladder.offload_seconds() < 0.5 * steps[-1].step_seconds


def test_no_reading_of_the_start_has_both_published_numbers():
    """What the docstring says. If a change makes one fit, the ladder should start there."""
    readings = ladder.start_readings("gb200") + ladder.start_readings("gb300")
    assert len(readings) == 6
    p90 = calibrate.shipped().p90_abs_error
    fits = [
        name
        for name, tflops, share in readings
        if abs(tflops / ladder.FIRST - 1) < p90 and abs(share - ladder.PROFILE) < 0.2
    ]
    assert fits == []
    assert ladder.jax_te("gb300")[0].predicted == pytest.approx(readings[3][1])


def test_weak_scaling_of_the_story_and_its_end():
    curve = {n: carried for n, _, carried in ladder.beyond()}
    assert curve[1024] == pytest.approx(0.97, abs=1e-3)
    assert curve[8192] < curve[1024]
    assert ladder.end_of_weak_scaling() == 2560
    strong = [speed for _, speed in ladder.strong_scaling()]
    assert strong == sorted(strong, reverse=True)
    assert strong[-1] < 0.95
