"""The learner's ladder: every rung computes the same layer, its bytes are those of the closed forms, wrong ones fail."""

import json
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_course import bench
from moe_course.bench import ladder
from moe_course.errors import RunError
from moe_course.scaling.comm import copies_per_token
from tests import oracle
from tests.dispatch.dispatch_cases import QUICK

TINY = ladder.Options(tokens_per_rank=32, d_model=32, d_ff=16, experts=16, top_k=4, rounds=2)
TIMED = ("naive loop", "masked dense", "padded", "tiled grouped GEMM")
SENT = ("dedup dispatch", "bfloat16 on the wire", "MXFP8 on the wire")


@pytest.fixture(scope="module")
def figures():
    with mock.patch.object(jax, "jit", partial(jax.jit, compiler_options=QUICK)):
        return bench.run("ladder", TINY)


def test_the_reference_is_the_oracle():
    small = ladder.Options(tokens_per_rank=2, d_model=12, d_ff=6, experts=8, top_k=3)
    problem = ladder.make_problem(small)
    assert oracle.relative_error(problem.reference, oracle.moe(*_in_oracles_order(problem))) < 1e-12
    ids = problem.arguments[1]
    assert all(len(set(row)) == 3 for row in ids)
    assert np.array_equal(problem.rows_of(8).sum(0), np.bincount(ids.ravel(), minlength=8))
    assert problem.rows_of(4)[0, 1] == ((ids[:2] == 2) | (ids[:2] == 3)).sum(), (
        "rank 0's two tokens, experts 2 and 3"
    )


def _in_oracles_order(problem):
    x, ids, weights, gate_up, down = problem.arguments
    return x, gate_up, down, ids, weights


@pytest.mark.slow
def test_every_rung_is_there_in_order_with_its_figures(figures):
    assert list(figures) == [*TIMED, *SENT, "about"]
    assert json.loads(json.dumps(figures)) == figures
    for name in TIMED:
        assert figures[name]["times_faster_than_first"] > 0
    for name in SENT:
        assert figures[name]["times_faster_than_first"] is None, "an emulation's time means nothing"
    assert figures["naive loop"]["times_faster_than_first"] == 1
    assert {"jax", "date", "cores", "devices"} <= set(figures["about"])


@pytest.mark.slow
def test_bytes_are_those_of_the_closed_forms(figures):
    """A row there, what goes beside it, and back; a gather carries all 8 x 32 tokens, their picks and float32 sums."""
    d, k, t = TINY.d_model, TINY.top_k, ladder.DEVICES
    assert figures["naive loop"]["bytes_per_token"] == t * (4 * d + 2 * 4 * k + 4 * d)
    assert figures["masked dense"]["bytes_of_first"] == 1
    assert figures["tiled grouped GEMM"]["bytes_per_token"] == k * (4 * d + 4 + 4 * d)
    rows = figures["dedup dispatch"]["rows_per_token"]
    assert rows == pytest.approx(copies_per_token(TINY.experts, k, ladder.DEVICES), rel=0.10), (
        "skew moves it a little"
    )
    assert rows < k
    for name, there, back in zip(SENT, (4 * d, 2 * d, d + d // 32), (4 * d, 2 * d, 2 * d), strict=True):
        assert figures[name]["bytes_per_token"] == pytest.approx(rows * (there + 8 * k + back), rel=1e-3), (
            name
        )
    assert figures["padded"]["program_bytes_per_token"] > figures["padded"]["bytes_per_token"], (
        "blocks are padded"
    )


@pytest.mark.slow
def test_errors_are_rounding_of_what_travels(figures):
    errors = [figures[name]["error"] for name in (*TIMED, *SENT)]
    assert max(errors[:5]) < 1e-5
    assert 1e-4 < errors[5] < errors[6] < 0.125


def test_a_rung_that_computes_something_else_is_noticed():
    """A twin that forgets the combine weights, and one whose output is not a number."""
    small = ladder.Options(tokens_per_rank=2, d_model=12, d_ff=6, experts=8, top_k=3)
    problem = ladder.make_problem(small)
    x, ids, weights, gate_up, down = map(jnp.asarray, problem.arguments)
    forgetful = ladder._every_expert(x, ids, jnp.ones_like(weights), gate_up, down)
    honest = ladder._every_expert(x, ids, weights, gate_up, down)
    assert ladder.check_output("honest", honest, problem.reference, "float32") < 1e-5
    with pytest.raises(RunError, match="forgetful computes something else"):
        ladder.check_output("forgetful", forgetful, problem.reference, "mxfp8")
    with pytest.raises(RunError):
        ladder.check_output("broken", honest * np.float32("nan"), problem.reference, "float32")


def test_mxfp8_rows_travel_as_bytes():
    x = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    pack, unpack = (
        jax.jit(partial(f, wire="mxfp8")) for f in (ladder.pack, partial(ladder.unpack, d_model=64))
    )
    packed = pack(x)
    assert packed.shape == (5, 66)
    assert packed.dtype == np.uint8
    assert oracle.relative_error(unpack(packed), x) < 2.0**-4
    assert np.array_equal(unpack(np.zeros_like(packed)), np.zeros((5, 64))), "empty rows are zeros"


def test_the_recorded_ladder_names_its_machine_and_has_every_rung():
    recorded = bench.recorded("ladder")
    assert list(recorded) == [*TIMED, *SENT, "about"]
    assert {"jax", "date", "cores", "cpu", "devices"} <= set(recorded["about"])
    assert all(recorded[name]["times_faster_than_first"] for name in TIMED)
