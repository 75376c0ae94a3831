"""The simulator against closed forms, and against answers that one can see."""

import itertools

import pytest

from moe_course.errors import SettingError
from moe_course.scaling import simulate
from moe_course.scaling.hardware import machine
from moe_course.scaling.layout import Layout
from moe_course.scaling.plan import predict
from moe_course.scaling.published import shapes
from moe_course.scaling.simulate import Task


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize(("stages", "micro"), [(1, 4), (2, 4), (4, 8), (4, 16), (8, 16)])
def test_a_pipeline_takes_what_the_closed_form_says(stages, micro, chunks):
    if stages == 1 and chunks > 1:
        pytest.skip("one stage has nothing to interleave")
    timeline = simulate.pipeline(stages, micro, 1.0, 2.0, chunks)
    assert timeline.makespan == pytest.approx(simulate.closed_form(stages, micro, 1.0, 2.0, chunks), rel=1e-9)
    assert timeline.busy("stage 0") == pytest.approx(3.0 * micro)
    bubble = (stages - 1) / chunks / (micro + (stages - 1) / chunks)
    assert timeline.idle_share("stage 0") == pytest.approx(bubble)


@pytest.mark.parametrize("pp", [1, 4, 8])
def test_a_predicted_step_simulates_to_what_the_model_charged(pp):
    """Two ways to a step's time: the sum of the closed form's parts, and events on a pipeline."""
    layout = Layout(256, ep=8, pp=pp, global_batch=32 * 256 // pp, dispatcher="hierarchical")
    (prediction,) = predict(shapes()["deepseek-v3"], layout, machine("gb200"))
    assert layout.micro_batches == 32
    outside = ("tensor parallel", "data parallel", "optimizer")
    charged = prediction.step_seconds - sum(prediction.parts[name] for name in outside)
    timeline = simulate.simulate(prediction)
    assert timeline.makespan == pytest.approx(charged, rel=1e-9)
    assert timeline.idle_share("stage 0") == pytest.approx(
        prediction.parts["pipeline bubble"] / charged, abs=1e-9
    )


def test_a_wrong_order_is_slower():
    """All forwards, then all backwards in reverse takes as long, but one stage at a time does not."""
    serial = [Task(f"F{s}.{m}", "one", 3.0) for s in range(4) for m in range(8)]
    assert simulate.run(serial).makespan > simulate.pipeline(4, 8, 1.0, 2.0).makespan


def test_every_pass_runs_once_and_after_what_it_needs():
    timeline = simulate.pipeline(4, 8, 1.0, 2.0, chunks=2, send=0.1)
    events = {event.name: event for event in timeline.events}
    assert sum(name[0] in "FB" for name in events) == 2 * 8 * 8
    for micro in range(8):
        for place in range(1, 8):
            assert events[f"F{place}.{micro}"].start >= events[f"F{place - 1}.{micro}"].end + 0.1 - 1e-9
        assert events[f"B7.{micro}"].start >= events[f"F7.{micro}"].end
    for resource in timeline.resources():
        mine = sorted((e for e in timeline.events if e.resource == resource), key=lambda e: e.start)
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(mine))


def test_the_slowest_rank_sets_the_layer():
    balanced = simulate.moe_layer([1.0] * 4, 0.5, 0.2, 0.2)
    skewed = simulate.moe_layer([0.5, 0.5, 0.5, 2.5], 0.5, 0.2, 0.2)
    assert balanced.makespan == pytest.approx(1.9)
    assert skewed.makespan == pytest.approx(3.4), "the same work in all, one rank with most of it"
    assert skewed.idle_share("rank 0 compute") > 0.6


def test_two_halves_hide_communication_and_never_more_than_there_is():
    whole = simulate.moe_layer([1.0] * 2, 1.0, 0.5, 0.5)
    halves = simulate.moe_layer([1.0] * 2, 1.0, 0.5, 0.5, halves=2)
    assert whole.makespan == pytest.approx(3.0)
    assert 2.0 < halves.makespan < whole.makespan
    assert simulate.moe_layer([1.0] * 2, 1.0, 0.0, 0.0, halves=2).makespan == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("tasks", "complaint"),
    [
        ([Task("a", "x", 1.0, ("b",)), Task("b", "y", 1.0, ("a",))], "cycle"),
        ([Task("a", "x", 1.0, ("b",)), Task("b", "x", 1.0)], "cycle"),
        ([Task("a", "x", 1.0, ("nobody",))], "does not exist"),
        ([Task("a", "x", 1.0), Task("a", "x", 1.0)], "same name"),
    ],
)
def test_impossible_orders_say_so(tasks, complaint):
    with pytest.raises(SettingError, match=complaint):
        simulate.run(tasks)


def test_interleaving_needs_full_groups():
    with pytest.raises(SettingError, match="multiple"):
        simulate.pipeline(4, 6, 1.0, 2.0, chunks=2)
