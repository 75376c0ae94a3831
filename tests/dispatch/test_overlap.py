"""What may run at the same time: waves give the same layer, and the compiled program leaves the schedule free."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_course.aot.hlo import COLLECTIVES
from moe_course.bench.schedule import Program
from moe_course.dispatch import DispatchPlan, ledger
from moe_course.dispatch.plan import worst_case_capacity
from moe_course.dispatch.waves import join_waves, one_wave, split_waves
from moe_course.errors import SettingError
from moe_course.layers import moe
from moe_course.layers.moe import ExpertBias, MoE
from moe_course.parallel import batch_sharding, tree_shardings
from moe_course.routing import RouterConfig, Routing
from moe_course.train.config import TrainConfig
from tests.dispatch.dispatch_cases import EXCHANGES, QUICK, mesh_for
from tests.oracle import assert_close

pytestmark = pytest.mark.thorough

D, F, E, K, T = 6, 4, 8, 2, 32
SHAPE = (1, 1, 4)
DOTS = ("dot", "ragged-dot")


@cache
def compiled(dispatcher: str, waves: int, gradients: bool = False):
    """(compiled program, its arguments) of one MoE layer with a shared expert on four devices."""
    layer = MoE(
        D, F, RouterConfig(E, K), num_shared_experts=1, std=0.4, down_std=0.4, rngs=nnx.Rngs(params=3)
    )
    graph, params, bias = nnx.split(layer, nnx.Param, ExpertBias)
    mesh = mesh_for(SHAPE, dispatcher)
    plan = DispatchPlan(E, 4, worst_case_capacity(T // 4, K, E, 4), dispatcher, waves)

    def forward(params, x, probe):
        out, stats = nnx.merge(graph, params, bias)(x, plan=plan, num_sequences=4, backend="ragged_dot")
        return jnp.vdot(out, probe), (out, stats)

    fn = jax.value_and_grad(forward, has_aux=True) if gradients else forward
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((T, D)).astype(np.float32) for _ in range(2)]
    arguments = (
        jax.device_put(params, tree_shardings(params, mesh)),
        *(jax.device_put(a, batch_sharding(mesh)) for a in arrays),
    )
    with jax.set_mesh(mesh):
        return jax.jit(fn, compiler_options=QUICK).lower(*arguments).compile(), arguments


@cache
def program(dispatcher: str, waves: int = 1) -> Program:
    return Program(compiled(dispatcher, waves)[0].as_text())


def shared_expert_and_dispatch(program):
    """Instructions of both; every one of them is there."""
    shared = program.find("shared_expert", operations=DOTS)
    exchanges = program.find("dispatch_0", operations=COLLECTIVES)
    assert len(shared) == 2, "gate-up and down"
    assert exchanges
    return shared, exchanges


@pytest.mark.parametrize("dispatcher", EXCHANGES)
def test_the_shared_expert_may_run_while_tokens_travel(dispatcher):
    """Nor does it wait for the way back, though the layer adds its result to what comes back."""
    one = program(dispatcher)
    shared, exchanges = shared_expert_and_dispatch(one)
    assert one.may_overlap(shared, exchanges)
    assert one.may_overlap(shared, one.find("combine_0", operations=COLLECTIVES))
    experts = one.find("experts_0", operations=DOTS)
    assert all(any(one.needs(dot, exchange) for exchange in exchanges) for dot in experts)


@pytest.mark.parametrize("dispatcher", ["all_to_all", "dedup"])
def test_the_second_wave_travels_while_the_first_is_computed(dispatcher):
    two = program(dispatcher, waves=2)
    exchange = [two.find(f"dispatch_{wave}", operations=COLLECTIVES) for wave in range(2)]
    experts = [two.find(f"experts_{wave}", operations=DOTS) for wave in range(2)]
    back = [two.find(f"combine_{wave}", operations=COLLECTIVES) for wave in range(2)]
    assert all(map(len, exchange + experts + back))
    assert two.may_overlap(exchange[1], experts[0])
    assert two.may_overlap(back[0], experts[1])
    for wave in range(2):
        assert not two.may_overlap(exchange[wave], experts[wave])
        assert not two.may_overlap(experts[wave], back[wave])


def test_broken_twin_dispatch_waits_for_the_shared_expert(monkeypatch):
    def dispatch(x, routing, *, plan):
        with jax.named_scope("shared_expert"):
            x = x + jnp.float32(0) * (x @ jnp.ones((D, D), jnp.float32))
        return honest(x, routing, plan=plan)

    honest = moe.dispatch
    monkeypatch.setattr(moe, "dispatch", dispatch)
    one = Program(compiled.__wrapped__("all_to_all", 1)[0].as_text())
    dots = one.find("shared_expert", operations=DOTS)
    assert len(dots) == 3
    assert not one.may_overlap(dots, one.find("dispatch_0", operations=COLLECTIVES))


def test_broken_twin_one_wave_after_the_other(monkeypatch):
    """The natural way to write it, wave by wave, with the second's tokens held back until the first is home."""

    def split(x, routing, plan):
        first, (tokens, picks, one) = split_waves(x, routing, plan)
        sent = moe.dispatch(*first[:2], plan=one)
        with jax.named_scope("experts_0"):
            rows = sent.rows @ jnp.ones((D, D), jnp.float32)
        with jax.named_scope("combine_0"):
            home = moe.combine(rows, sent)
        return first, (tokens + jnp.float32(0) * home, picks, one)

    monkeypatch.setattr(moe, "split_waves", split)
    two = Program(compiled.__wrapped__("all_to_all", 2)[0].as_text())
    experts = two.find("experts_0", operations=DOTS)
    assert not two.may_overlap(two.find("dispatch_1", operations=COLLECTIVES), experts)


@pytest.mark.parametrize("dispatcher", ["all_to_all", "dedup"])
def test_waves_change_neither_result_nor_books(dispatcher):
    (run, arguments), (whole, _) = compiled(dispatcher, 2), compiled(dispatcher, 1)
    (_, (out, stats)), (_, (want, want_stats)) = run(*arguments), whole(*arguments)
    assert_close(out, want, np.float32, D)
    books = {name: int(value) for name, value in vars(stats.ledger).items()}
    assert ledger.check(**books) is None
    assert books["made"] == T * K == int(want_stats.ledger.made)
    assert np.array_equal(stats.load, want_stats.load)
    assert int(stats.demand) >= int(want_stats.demand)  # equal shares, each as large as the largest


@pytest.mark.slow
def test_waves_do_not_change_gradients():
    (run, arguments), (whole, _) = (compiled("all_gather", waves, gradients=True) for waves in (2, 1))
    for gradient, reference in zip(
        *map(jax.tree.leaves, (run(*arguments)[1], whole(*arguments)[1])), strict=True
    ):
        assert_close(gradient, reference, np.float32, 4 * T)


def test_waves_share_tokens_and_capacity():
    x = jnp.arange(24, dtype=jnp.float32)[:, None]
    routing = Routing(jnp.zeros((24, 1), jnp.int32), jnp.ones((24, 1), jnp.float32), None)
    plan = DispatchPlan(4, 4, 20, waves=3)
    with jax.set_mesh(mesh_for(SHAPE, "ragged")):
        parts = split_waves(x, routing, plan)
        assert parts[1][0][:, 0].tolist() == [2, 3, 8, 9, 14, 15, 20, 21]  # two of each device's six
        assert np.array_equal(join_waves([part for part, _, _ in parts]), x)
        with pytest.raises(SettingError, match="6 tokens per device do not divide into 4 waves"):
            split_waves(x, routing, replace(plan, waves=4))
    with pytest.raises(SettingError, match="512 tokens per device do not divide into 3 waves"):
        TrainConfig(waves=3).validate()
    assert one_wave(plan) == DispatchPlan(4, 4, 8)  # 20 / 3, up to a multiple of the ranks
    assert [part.shape for part, _, _ in split_waves(x, routing, replace(plan, waves=2))] == [(12, 1)] * 2


HLO = """HloModule m, is_scheduled=true

%inside (p: f32[4,4]) -> f32[4,4] {
  %p = f32[4,4]{1,0} parameter(0)
  ROOT %d = f32[4,4]{1,0} dot(%p, %p), lhs_contracting_dims={1}, metadata={op_name="jit(f)/shared/dot_general"}
}

ENTRY %main (x: f32[4,4]) -> (f32[4,4], f32[4,4]) {
  %x = f32[4,4]{1,0} parameter(0)
  %a = (f32[2,4]{1,0}, /*index=1*/f32[2,4]{1,0}) all-to-all(%x, %x), metadata={op_name="jit(f)/send/all_to_all"}
  %g = f32[2,4]{1,0} get-tuple-element(%a), index=0
  %f = f32[4,4]{1,0} fusion(%x), kind=kOutput, calls=%inside
  %e = f32[4,4]{1,0} dot(%g, %x), metadata={op_name="jit(f)/experts/dot_general"}
  %h = f32[4,4]{1,0} add(%x, %x), control-predecessors={%f}
  ROOT %t = (f32[4,4]{1,0}, f32[4,4]{1,0}) tuple(%e, %f)
}
"""


def test_the_reader_of_programs_by_hand():
    one = Program(HLO)
    send = one.find("send", operations=COLLECTIVES)
    assert send == ["a"]
    assert one.find(operations=("dot",)) == ["f", "e"]
    assert one.find("shared", operations=("dot",)) == ["f"]  # inside a fusion
    assert one.may_overlap(["f"], send)
    assert not one.may_overlap(["e"], send)  # through a tuple element
    assert one.needs("h", "f")  # by order alone
    assert not one.needs("f", "h")
    assert not one.may_overlap(["f"], ["f"])
    with pytest.raises(ValueError, match="no ENTRY"):
        Program("module @jit_f {}")
