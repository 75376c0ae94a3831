"""A whole MoE layer on meshes against the same layer on one device: every parameter's gradient, every dispatcher."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from moe_course.dispatch import DispatchPlan, combine, dispatch
from moe_course.dispatch.plan import worst_case_capacity
from moe_course.errors import SettingError
from moe_course.layers.moe import ExpertBias, MoE
from moe_course.parallel import (
    EXPERT,
    MeshConfig,
    batch_sharding,
    expert_axes,
    per_device,
    token_axes,
    tree_shardings,
)
from moe_course.routing import RouterConfig, Routing
from tests import oracle
from tests.dispatch.dispatch_cases import EXCHANGES, QUICK, SUMMED_DEMAND, mesh_for
from tests.oracle import assert_close, relative_error

pytestmark = pytest.mark.thorough

D, F, E, K, T = 6, 4, 8, 2, 32
MESHES = [(1, 1, 4), *(pytest.param(shape, marks=pytest.mark.slow) for shape in [(2, 2, 2), (1, 1, 8)])]
"""An expert axis of 2, 4 and 8; beside that of 2 stand data and fsdp. That of one is what they are compared with."""
LENGTH = 4 * T
"""Terms in the longest sum of a gradient: tokens, times a few products each."""


def layer_parts():
    config = RouterConfig(E, K, score_fn="sigmoid")
    layer = MoE(D, F, config, num_shared_experts=1, std=0.4, down_std=0.4, rngs=nnx.Rngs(params=3))
    return nnx.split(layer, nnx.Param, ExpertBias)


def inputs(case: str):
    """x, mask, probe, and the selection bias that makes the routing of this case."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal((T, D)).astype(np.float32)
    mask, bias = np.ones(T, bool), np.zeros(E, np.float32)
    if case == "first rank takes all":
        bias[:K] = 10
    elif case == "a rank with no tokens":
        mask[: T // 8] = mask[5] = mask[20] = False
    return x, mask, rng.standard_normal((T, D)).astype(np.float32), bias


@cache
def step(shape, dispatcher):
    """Compiled (x, mask, probe, bias) -> (out, gradients by name and for x), on a mesh or on one device (None)."""
    graph, params, bias_state = layer_parts()
    ranks = shape[2] if shape else 1
    worst = worst_case_capacity(T // int(np.prod(shape or 1)), K, E, ranks)
    plan = DispatchPlan(E, ranks, worst, dispatcher)

    def loss(params, x, mask, probe, bias):
        state = jax.tree.map(lambda _: bias, bias_state)
        out, stats = nnx.merge(graph, params, state)(
            x, plan=plan, mask=mask, num_sequences=8, backend="ragged_dot"
        )
        return jnp.vdot(out, probe) + stats.z_loss + stats.balance_loss, out

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), compiler_options=QUICK)
    mesh = mesh_for(shape or (1, 1, 1), dispatcher)
    placed = jax.device_put(params, tree_shardings(params, mesh))

    def call(x, mask, probe, bias):
        arrays = [jax.device_put(a, batch_sharding(mesh)) for a in (x, mask, probe)]
        with jax.set_mesh(mesh):
            (_, out), (grads, dx) = run(placed, *arrays, bias)
        named = {"/".join(map(str, path)): g[...] for path, g in nnx.to_flat_state(grads)} | {"x": dx}
        return np.asarray(out), {name: same_on_all_devices(g) for name, g in named.items()}

    return call


def same_on_all_devices(array) -> np.ndarray:
    """The whole array; B60: a device's copy may not be a partial sum, and one copy does not speak for the others."""
    whole = np.asarray(array)
    for shard in array.addressable_shards:
        assert np.array_equal(shard.data, whole[shard.index]), f"{shard.device} has other values"
    return whole


@pytest.mark.parametrize("dispatcher", EXCHANGES)
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_b58_b60_every_gradient_equals_one_device(shape, dispatcher):
    """Values, not ratios: a gradient off by the axis size, or left partial, is off by a factor."""
    cases = ["random", "a rank with no tokens"] if shape == (1, 1, 4) else ["random"]
    for case in cases:
        arrays = inputs(case)
        out, grads = step(shape, dispatcher)(*arrays)
        want, want_grads = step(None, "local")(*arrays)
        assert_close(out, want, np.float32, D, case)
        assert set(grads) == set(want_grads) >= {"router/kernel", "experts/gate_up", "experts/down", "x"}
        for name, gradient in grads.items():
            assert_close(gradient, want_grads[name], np.float32, LENGTH, f"{case}: {name}")


def test_the_one_device_they_are_compared_with_equals_the_oracle():
    x, mask, probe, bias = inputs("a rank with no tokens")
    _, params, _ = layer_parts()
    pure = nnx.to_pure_dict(params)
    f64 = lambda a: np.asarray(a, np.float64)  # noqa: E731
    config = RouterConfig(E, K, score_fn="sigmoid")
    picks = oracle.route(f64(x) @ f64(pure["router"]["kernel"]), config, f64(bias), mask)
    weights = f64(pure["experts"]["gate_up"]), f64(pure["experts"]["down"])
    _, d_gate_up, d_down, _ = oracle.moe_vjp(f64(x), *weights, *picks[:2], f64(probe))
    _, grads = step(None, "local")(x, mask, probe, bias)
    assert_close(grads["experts/gate_up"], d_gate_up, np.float32, LENGTH)
    assert_close(grads["experts/down"], d_down, np.float32, LENGTH)


@pytest.mark.parametrize("dispatcher", EXCHANGES)
def test_b62_ranks_without_tokens_take_part_and_idle_experts_learn_nothing(dispatcher):
    arrays = inputs("first rank takes all")
    out, grads = step((1, 1, 4), dispatcher)(*arrays)
    want, want_grads = step(None, "local")(*arrays)
    assert_close(out, want, np.float32, D)
    for name, gradient in grads.items():
        assert np.isfinite(gradient).all(), name
        assert_close(gradient, want_grads[name], np.float32, LENGTH, name)
    assert not grads["experts/gate_up"][K:].any()
    assert not grads["experts/down"][K:].any()
    assert grads["experts/down"][:K].any()


@pytest.mark.parametrize("dispatcher", EXCHANGES)
def test_b58_one_linear_expert_by_hand(dispatcher):
    """y = w x, loss the mean over tokens 1, 2, 3, 4: dw is 2.5, and not the 5.0 of means summed per rank."""
    ranks = 2
    plan = DispatchPlan(ranks, ranks, 4, dispatcher)
    mesh = mesh_for((1, 1, ranks), dispatcher)
    experts, rows = P(expert_axes(mesh)), P(token_axes(mesh))
    x = jnp.arange(1, 5, dtype=jnp.float32)[:, None]
    routing = Routing(jnp.zeros((4, 1), jnp.int32), jnp.ones((4, 1), jnp.float32), None)

    def loss(w):
        sent = dispatch(x, routing, plan=plan)
        mine = per_device(lambda rows, w: rows * w[0], in_specs=(rows, experts), out_specs=rows)
        return combine(mine(sent.rows, w), sent).mean()

    with jax.set_mesh(mesh):
        dw = jax.jit(jax.grad(loss), compiler_options=QUICK)(jnp.full(ranks, 3.0, jnp.float32))
    assert np.asarray(dw).tolist() == [2.5, 0.0]


def test_b58_broken_twin_means_summed_per_rank():
    """The mean of each rank's own two tokens, added up: what the test above would see as 5.0."""
    mesh = mesh_for((1, 1, 2), "ragged")
    x = jnp.arange(1, 5, dtype=jnp.float32)

    def loss(w):
        means = per_device(
            lambda x, w: jax.lax.psum((x * w).mean(), EXPERT), in_specs=(P(EXPERT), P()), out_specs=P()
        )
        return means(x, w)

    with jax.set_mesh(mesh):
        assert float(jax.jit(jax.grad(loss))(jnp.float32(3))) == 5.0


def test_b61_gradient_of_a_psum():
    """24 with replication checked, inside and outside of shard_map; unchecked, the inside is off by the axis size."""
    mesh = jax.make_mesh((4,), (EXPERT,), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    data, w = jnp.arange(4, dtype=jnp.float32), jnp.float32(2)

    def total(w, d):
        return jax.lax.psum((w**2 * d).sum(), EXPERT)

    def inside(check):
        fn = jax.shard_map(
            lambda w, d: jax.grad(total)(w, d)[None],
            in_specs=(P(), P(EXPERT)),
            out_specs=P(EXPERT),
            check_vma=check,
        )
        return np.asarray(jax.jit(fn)(w, data)).tolist()

    with jax.set_mesh(mesh):
        outside = jax.jit(jax.grad(per_device(total, in_specs=(P(), P(EXPERT)), out_specs=P())))(w, data)
        assert float(outside) == 24
        assert inside(check=True) == [24.0] * 4
        assert inside(check=False) == [0.0, 16.0, 32.0, 48.0]


def test_b64_experts_that_do_not_divide_over_the_ranks_are_refused():
    with pytest.raises(SettingError, match="6 experts do not divide over 4 ranks"):
        DispatchPlan(6, 4, 8)
    with pytest.raises(SettingError, match="6 experts do not divide over an expert axis of 4"):
        MeshConfig(1, 1, 4).validate(4, 6, 4)
    unrefused = np.arange(6) // (6 // 4)
    assert (
        unrefused.max() >= 4
    )  # what goes wrong otherwise: experts 4 and 5 belong to ranks that do not exist


def forced_picks(experts: int, top_k: int, ranks: int, tokens: int):
    """[T, K] of two ways to force balance: experts spaced E/K apart, and picks dealt to ranks like cards."""
    token, slot = np.arange(tokens)[:, None], np.arange(top_k)[None, :]
    spaced = (token + slot * (experts // top_k)) % experts
    # Pick n of all goes to rank n mod R; a token's K picks are K neighbours, so its experts differ.
    pick = token * top_k + slot
    return spaced, pick % ranks * (experts // ranks) + pick // ranks % (experts // ranks)


def test_b65_needs_more_ranks_than_picks_to_be_seen():
    """256 experts, K = 8, 8 tokens. A test on 4 or 8 ranks passes the broken way."""

    def loads(which, ranks):
        picks = forced_picks(256, 8, ranks, 8)[which]
        return np.bincount((picks // (256 // ranks)).ravel(), minlength=ranks).tolist()

    assert loads(0, 16) == [8, 0] * 8
    assert loads(1, 16) == [4] * 16
    assert loads(0, 8) == loads(1, 8) == [8] * 8
    assert loads(0, 4) == loads(1, 4) == [16] * 4


@pytest.mark.parametrize("dispatcher", SUMMED_DEMAND)
def test_b65_demand_shows_forced_balance_that_idles_ranks(dispatcher):
    """Experts spaced E/K apart load every other rank where there are more ranks than K: here 8 ranks and K = 4."""
    ranks, experts, top_k, tokens = 8, 64, 4, 8
    spaced, dealt = forced_picks(experts, top_k, ranks, tokens)
    plan = DispatchPlan(experts, ranks, ranks * top_k, dispatcher)
    x, weights = np.ones((tokens, 2), np.float32), np.ones((tokens, top_k), np.float32)
    with jax.set_mesh(mesh_for((1, 1, ranks), dispatcher)):
        ask = jax.jit(lambda ids: dispatch(x, Routing(ids, weights, None), plan=plan).demand)
        demand = {
            n: np.asarray(ask(ids.astype(np.int32))).tolist()
            for n, ids in (("spaced", spaced), ("dealt", dealt))
        }
    assert demand["spaced"] == [8, 0] * 4
    assert demand["dealt"] == [4] * 8
    assert all(len(set(row)) == top_k for row in dealt.tolist())


def test_b68_identical_experts_are_one_dense_layer_and_the_shared_expert_counts_once():
    """With weights that sum to 1. B70: the shared expert added once per rank, or per pick, is off by itself."""
    graph, params, bias = layer_parts()
    pure = nnx.to_pure_dict(params)
    for name in ("gate_up", "down"):
        pure["experts"][name] = jnp.broadcast_to(pure["experts"][name][:1], pure["experts"][name].shape)
    nnx.replace_by_pure_dict(params, pure)
    x, *_ = inputs("random")
    out = jax.jit(lambda params, x: nnx.merge(graph, params, bias)(x, backend="ragged_dot")[0])(params, x)
    f64 = lambda a: np.asarray(a, np.float64)  # noqa: E731
    dense = oracle.swiglu(f64(x), f64(pure["experts"]["gate_up"][0]), f64(pure["experts"]["down"][0]))
    shared = pure["shared"]
    once = oracle.swiglu(f64(x), f64(shared["gate_up"]["kernel"]), f64(shared["down"]["kernel"]))
    assert_close(out, dense + once, np.float32, 4 * D)
    assert relative_error(out, dense + 2 * once) > 100 * oracle.tolerance(np.float32, 4 * D)


def test_broken_twin_gradient_times_the_axis_size_is_caught():
    _, want = step(None, "local")(*inputs("random"))
    for name, gradient in want.items():
        with pytest.raises(AssertionError):
            assert_close(4 * gradient, gradient, np.float32, LENGTH, name)
        partial_sum = gradient * np.float32(0.25)
        assert relative_error(partial_sum, gradient) > oracle.tolerance(np.float32, LENGTH)
