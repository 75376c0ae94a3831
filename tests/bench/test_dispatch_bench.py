"""The benches of dispatch: the parser reads programs right, what it reads is what the formulas say; the ledger's cost."""

import json
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from moe_course import bench
from moe_course.bench import ledger
from moe_course.bench.dispatch import Options, collectives
from moe_course.dispatch.ledger import count
from moe_course.layers import moe
from moe_course.scaling.comm import copies_per_token
from tests.dispatch.dispatch_cases import QUICK

HLO = """
  %a = f32[8,16]{1,0} all-gather(%x), dimensions={0}
  %b = (s32[1,4]{1,0}, s32[1,4]{1,0}) all-to-all(%c, %d), replica_groups={{0,1}}
  %e = bf16[2,16]{1,0} reduce-scatter(%f), to_apply=%add
  %g = (f32[2,16]{1,0}, f32[4,16]{1,0}) all-gather-start(%h), dimensions={0}
  %i = f32[4,16]{1,0} all-gather-done(%g)
  %j = f32[4,16]{1,0} add(%all-gather, %i)
"""


def test_the_parser_counts_results_and_the_operand_of_a_reduce_scatter():
    kinds, total = collectives(HLO, group=4)
    assert kinds == {"all-gather": 2, "all-to-all": 1, "reduce-scatter": 1}
    assert total == 4 * 8 * 16 + 2 * 4 * 4 + 4 * (2 * 2 * 16) + 4 * 4 * 16


def test_b70_rows_per_token_closed_form():
    assert round(copies_per_token(256, 8, 8), 3) == 5.295
    assert round(copies_per_token(256, 8, 64), 3) == 7.676
    assert round(copies_per_token(256, 8, 4), 1) == 3.6
    assert round(copies_per_token(256, 8, 32), 1) == 7.3
    rng = np.random.default_rng(0)
    picks = rng.random((20_000, 64)).argsort(1)[:, :8] // 8
    drawn = np.mean([len(set(row)) for row in picks])
    assert abs(drawn / copies_per_token(64, 8, 8) - 1) < 0.01


@pytest.fixture(scope="module")
def figures():
    return bench.run("dispatch", Options(tokens_per_rank=128, d_model=32, experts=32, top_k=4, rounds=1))


@pytest.mark.parametrize("dispatcher", ["all_gather", "all_to_all", "dedup", "hierarchical", "ragged"])
def test_bytes_are_those_of_the_formulas(figures, dispatcher):
    one = figures[dispatcher]
    assert abs(one["bytes_per_token"] / one["predicted"] - 1) < 0.05
    assert abs(one["useful_bytes_per_token"] / one["useful_predicted"] - 1) < 0.05
    assert abs(one["rows_across_nodes"] / one["rows_across_nodes_predicted"] - 1) < 0.05
    assert one["collectives"]
    assert one["latency_vs_all_to_all"] > 0


def test_figures_are_json_and_tell_the_dispatchers_apart(figures):
    assert json.loads(json.dumps(figures)) == figures
    assert "all-to-all" in figures["all_to_all"]["collectives"]
    assert "reduce-scatter" in figures["all_gather"]["collectives"]
    assert figures["dedup"]["rows_per_token"] < figures["ragged"]["rows_per_token"]
    assert figures["hierarchical"]["rows_across_nodes"] < 0.7 * figures["dedup"]["rows_across_nodes"]
    assert figures["ragged"]["receive_buffer_bytes"] < figures["all_to_all"]["receive_buffer_bytes"]


@pytest.mark.slow
def test_the_ledger_bench_takes_it_out_of_one_step_only(monkeypatch):
    model = replace(ledger.TINY.model, d_model=16, num_layers=2, num_heads=2, d_ff_dense=16, d_ff=8)
    monkeypatch.setattr(ledger, "TINY", replace(ledger.TINY, model=model, batch_size=8, seq_len=8))
    monkeypatch.setattr(jax, "jit", partial(jax.jit, compiler_options=QUICK))
    counted = []
    monkeypatch.setattr(moe, "count", lambda sent: counted.append(1) or count(sent))
    figures = bench.run("ledger", ledger.Options(rounds=2))
    assert set(figures) == {"cost", "standard_error", "rounds"}
    assert json.loads(json.dumps(figures)) == figures
    assert len(counted) == 1  # one MoE layer, traced once, in one of the two steps
    assert {int(value) for value in vars(ledger._constant(None)).values()} == {0}
