"""The adapters against this package's own operations, on a Transformer Engine written in plain JAX (``fake_te``)."""

import inspect
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_course import te
from moe_course.balance import expert_load, load_balancing_loss
from moe_course.grouped_gemm import reference
from moe_course.grouping import group_by_expert, permute, unpermute, weights_of_rows
from moe_course.parallel import MeshConfig, make_mesh
from moe_course.quant import MXFP8
from moe_course.routing import RouterConfig, Routing, route
from moe_course.te import native
from tests import oracle
from tests.te import fake_te

BF16 = jnp.bfloat16


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    """Transformer Engine in plain JAX, on a GPU like a B200."""
    space = fake_te.namespace()
    monkeypatch.setattr(native, "api", lambda: space)
    monkeypatch.setattr(fake_te, "CAPABILITY", 100)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # for fake_te, not for us
        yield space


def test_fake_has_te_s_parameters(fake):
    for name, (_, parameters) in native.CALLS.items():
        stand_in = getattr(fake, name.rpartition(".")[2], None)
        if callable(stand_in) and stand_in.__name__ not in ("<lambda>", "moe", "te_gemms_saveable"):
            assert list(inspect.signature(stand_in).parameters) == list(parameters), name


# ---------------------------------------------------------------- route and balance

ROUTERS = {
    "mixtral": RouterConfig(8, 2),
    "qwen": RouterConfig(16, 4, normalize=False),
    "top1": RouterConfig(8, 1),
    "top1 sigmoid": RouterConfig(8, 1, score_fn="sigmoid"),
    "deepseek v3": RouterConfig(32, 8, score_fn="sigmoid", scaling_factor=2.5, num_groups=8, top_groups=4),
    "deepseek v2": RouterConfig(24, 3, normalize=False, num_groups=6, top_groups=3, scaling_factor=16.0),
    "softmax groups": RouterConfig(16, 4, num_groups=4, top_groups=2, scaling_factor=2.0),
    "all": RouterConfig(4, 4, score_fn="sigmoid"),
}


def logits_for(config, tokens=40, seed=0):
    return 2 * jax.random.normal(jax.random.key(seed), (tokens, config.num_experts), jnp.float32)


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("extras", ["plain", "bias", "mask"])
def test_route_equals_ours(name, extras):
    config = ROUTERS[name]
    if extras == "bias" and config.score_fn == "softmax":
        pytest.skip("TE has no bias for softmax; test_what_te_cannot_route_is_refused")
    logits = logits_for(config)
    bias = jax.random.normal(jax.random.key(1), (config.num_experts,)) if extras == "bias" else None
    mask = jnp.arange(40) % 3 > 0 if extras == "mask" else None
    if mask is not None:
        logits = jnp.where(mask[:, None], logits, jnp.nan)
    aim = jax.random.normal(jax.random.key(2), (40, config.top_k), jnp.float32)

    def run(router):
        def loss(logits):
            routing = router(logits, config, bias=bias, mask=mask)
            return (routing.weights * aim).sum() + (routing.scores**2).sum(), routing

        return jax.jit(jax.grad(loss, has_aux=True))(logits)

    (ours_grad, ours), (te_grad, theirs) = run(route), run(te.route)
    np.testing.assert_array_equal(theirs.expert_ids, ours.expert_ids)
    oracle.assert_close(theirs.weights, ours.weights, jnp.float32, config.top_k)
    oracle.assert_close(theirs.scores, ours.scores, jnp.float32)
    oracle.assert_close(te_grad, ours_grad, jnp.float32, config.num_experts)
    if mask is not None:
        assert not te_grad[~np.asarray(mask)].any()


def test_route_takes_leading_axes_bf16_and_an_empty_batch():
    config = ROUTERS["mixtral"]
    logits = logits_for(config).astype(BF16)
    flat = te.route(logits, config)
    assert flat.weights.dtype == flat.scores.dtype == jnp.float32
    cube = te.route(logits.reshape(4, 10, 8), config)
    np.testing.assert_array_equal(cube.expert_ids.reshape(40, 2), flat.expert_ids)
    assert te.route(logits[:0], config).expert_ids.shape == (0, 2)


@pytest.mark.parametrize("name", ["mixtral", "deepseek v3", "qwen"])
@pytest.mark.parametrize("masked", [False, True])
def test_balance_equals_ours(name, masked):
    config = ROUTERS[name]
    mask = jnp.arange(40) % 4 > 0 if masked else None
    routing = route(logits_for(config), config, mask=mask)
    load = expert_load(routing.expert_ids, config.num_experts)
    ours, ours_grad = jax.jit(jax.value_and_grad(lambda s: load_balancing_loss(s, load, config)))(
        routing.scores
    )
    theirs, te_grad = jax.jit(jax.value_and_grad(lambda s: te.balance(s, load, config)))(routing.scores)
    oracle.assert_close(theirs, ours, jnp.float32, 40)
    oracle.assert_close(te_grad, ours_grad, jnp.float32, 40)


def test_balance_of_parts_adds_up_to_that_of_the_whole():
    config = ROUTERS["deepseek v3"]
    routing = route(logits_for(config), config)
    load = expert_load(routing.expert_ids, config.num_experts)
    parts = [te.balance(routing.scores[part], load, config) for part in (slice(0, 12), slice(12, 40))]
    oracle.assert_close(sum(parts), load_balancing_loss(routing.scores, load, config), jnp.float32, 40)


# ---------------------------------------------------------------- permute


@pytest.mark.parametrize("align", [1, 8, 128])
@pytest.mark.parametrize("masked", [False, True])
def test_permute_and_back_equal_ours(align, masked):
    config = ROUTERS["mixtral"]
    mask = jnp.arange(40) % 3 > 0 if masked else None
    routing = route(logits_for(config), config, mask=mask)
    x = jax.random.normal(jax.random.key(3), (40, 16), jnp.float32)
    groups = jax.jit(group_by_expert, static_argnums=1, static_argnames="align")(
        routing.expert_ids, 8, align=align
    )

    def theirs(x, weights):
        moved = Routing(routing.expert_ids, weights, routing.scores)
        sent = te.permute(x, moved, 8, align=align)
        return sent, te.unpermute(jnp.tanh(sent.rows), sent, moved)

    def ours(x, weights):
        rows = permute(x, groups)
        return rows, unpermute(jnp.tanh(rows), groups, weights)

    (sent, out), (rows, want) = (jax.jit(f)(x, routing.weights) for f in (theirs, ours))
    np.testing.assert_array_equal(sent.group_sizes, groups.group_sizes)
    used = int(groups.group_sizes.sum())
    # Within an expert TE keeps tokens in order, and so do we.
    np.testing.assert_array_equal(sent.rows[:used], rows[:used])
    np.testing.assert_array_equal(sent.row_weights[:used], weights_of_rows(routing.weights, groups)[:used])
    assert not sent.rows[used:].any()
    assert not sent.row_weights[used:].any()
    oracle.assert_close(out, want, jnp.float32, 2)
    grads = [
        jax.jit(jax.grad(lambda x, w, f=f: (f(x, w)[1] ** 2).sum(), (0, 1)))(x, routing.weights)
        for f in (theirs, ours)
    ]
    for have, want in zip(*grads, strict=True):
        oracle.assert_close(have, want, jnp.float32, 16)


# ---------------------------------------------------------------- GEMMs


@pytest.mark.parametrize("sizes", [(100, 0, 28, 128), (0, 0, 0, 0), (512, 0, 0, 0), (128, 128, 128, 128)])
@pytest.mark.parametrize("on_device", [True, False])
def test_grouped_gemm_equals_the_reference_and_the_tail_reaches_nothing(sizes, on_device):
    keys = jax.random.split(jax.random.key(0), 3)
    rows = jax.random.normal(keys[0], (512, 128), BF16)
    kernels = jax.random.normal(keys[1], (4, 128, 256), BF16)
    aim = jax.random.normal(keys[2], (512, 256), BF16)
    used = sum(sizes)
    poisoned = jnp.where((jnp.arange(512) < used)[:, None], rows, jnp.nan)
    sizes = jnp.array(sizes, jnp.int32)

    def run(gemm, rows):
        def loss(rows, kernels):
            out = gemm(rows, kernels, sizes)
            live = (jnp.arange(512) < used)[:, None]
            return jnp.where(live, out * aim, 0).astype(jnp.float32).sum(), out

        (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(rows, kernels)
        return out, *grads

    theirs = run(lambda *a: te.grouped_gemm(*a, sizes_on_device=on_device), poisoned)
    ours = run(reference.grouped_gemm, rows)
    assert theirs[0].dtype == BF16
    for what, array in (("the result", theirs[0]), ("the gradient", theirs[1])):
        assert not array[used:].any(), f"the tail of {what} is not zero"
    for have, want in zip(theirs, ours, strict=True):
        oracle.assert_close(
            have.at[used:].set(0) if have.shape[0] == 512 else have,
            want.at[used:].set(0) if want.shape[0] == 512 else want,
            BF16,
            512,
        )


def test_grouped_gemm_hands_the_slack_to_the_last_expert_only_where_sizes_are_copied(fake, monkeypatch):
    seen = []
    whole = fake.grouped_dense
    monkeypatch.setattr(
        fake, "grouped_dense", lambda x, k, sizes, **kw: seen.append((sizes, kw)) or whole(x, k, sizes, **kw)
    )
    rows, kernels = jnp.ones((256, 128), BF16), jnp.ones((2, 128, 128), BF16)
    sizes = jnp.array([10, 20], jnp.int64 if jax.config.jax_enable_x64 else jnp.int32)
    te.grouped_gemm(rows, kernels, sizes)
    te.grouped_gemm(rows, kernels, sizes, sizes_on_device=False)
    assert [s.tolist() for s, _ in seen] == [[10, 20], [10, 246]]
    assert "quantizer_set" not in seen[0][1]


def test_mxfp8_quantizers_have_one_group_per_expert(fake, monkeypatch):
    seen = {}
    monkeypatch.setattr(fake, "grouped_dense", lambda x, k, s, **kw: seen.update(kw) or x @ k[0])
    rows, kernels = jnp.ones((256, 128), BF16), jnp.ones((2, 128, 128), BF16)
    te.grouped_gemm(rows, kernels, jnp.array([128, 128]), recipe=MXFP8(gradient="e5m2"))
    quantizers = seen["quantizer_set"]
    assert quantizers.x == quantizers.kernel == ("MXFP8_1D_SCALING", jnp.float8_e4m3fn, 2)
    assert quantizers.dgrad == ("MXFP8_1D_SCALING", jnp.float8_e5m2, 2)


def test_dense_and_layernorm_mlp():
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (2, 8, 32), BF16)
    gate_up, down = (
        0.2 * jax.random.normal(k, s, BF16) for k, s in zip(keys[1:], [(32, 96), (48, 32)], strict=False)
    )
    scale = 1 + 0.1 * jax.random.normal(keys[3], (32,), jnp.float32)
    oracle.assert_close(
        te.dense(x, gate_up), np.asarray(x, np.float64) @ np.asarray(gate_up, np.float64), BF16, 32
    )
    out = te.layernorm_mlp(x, scale, gate_up, down)
    wide = np.asarray(x, np.float64)
    wide = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(scale, np.float64)
    want = oracle.swiglu(wide, np.asarray(gate_up, np.float64), np.asarray(down, np.float64))
    oracle.assert_close(out, want, BF16, 48)


# ---------------------------------------------------------------- expert parallelism


@pytest.fixture
def exchange(devices):
    """A mesh of 2 x 4 and the facts of an exchange on it."""
    mesh = make_mesh(MeshConfig(1, 2, 4))
    setup = te.ExpertParallel.for_mesh(mesh, num_experts=8, top_k=2, tokens=64, d_model=16, factor=None)
    fake_te.start(setup)
    with jax.set_mesh(mesh), te.mesh_resources(setup):
        yield setup


@pytest.mark.parametrize("masked", [False, True])
def test_dispatch_and_combine_carry_every_copy_there_and_back(exchange, masked):
    config = RouterConfig(8, 2)
    mask = jnp.arange(64) % 5 > 0 if masked else None
    routing = route(logits_for(config, tokens=64), config, mask=mask)
    x = jax.random.normal(jax.random.key(3), (64, 16), BF16)
    aim = jax.random.normal(jax.random.key(4), (64, 16), jnp.float32)

    @jax.jit
    def layer(x, weights):
        sent = te.dispatch(x, Routing(routing.expert_ids, weights, routing.scores), setup=exchange)
        rows = (sent.rows * sent.row_weights[:, None]).astype(BF16)
        past = jnp.arange(exchange.capacity)[None] >= sent.group_sizes.sum(-1, keepdims=True)
        rows = jnp.where(past.reshape(-1)[:, None], jnp.nan, rows).astype(BF16)  # combine must not read these
        return te.combine(rows, sent), sent

    out, sent = layer(x, routing.weights)
    weights = np.asarray(routing.weights, np.float64)
    oracle.assert_close(out, np.asarray(x, np.float64) * weights.sum(-1, keepdims=True), BF16, 2)
    assert np.isfinite(np.asarray(sent.rows, np.float32)).all(), "unwritten rows are zeroed"
    assert not np.asarray(sent.group_sizes % 128).any()
    np.testing.assert_array_equal(sent.demand, sent.group_sizes.sum(-1))
    assert (np.asarray(sent.demand) <= exchange.capacity).all(), "the worst case holds anything"
    assert sent.rows.sharding.spec == exchange.spec

    loss = lambda x, w: (layer(x, w)[0].astype(jnp.float32) * aim).sum()  # noqa: E731
    d_x, d_weights = jax.jit(jax.grad(loss, (0, 1)))(x, routing.weights)
    oracle.assert_close(d_x, np.asarray(aim, np.float64) * weights.sum(-1, keepdims=True), BF16, 4)
    real = np.ones(64, bool) if mask is None else np.asarray(mask)
    want = (np.asarray(x, np.float64) * np.asarray(aim, np.float64)).sum(-1, keepdims=True).repeat(2, 1)
    oracle.assert_close(np.asarray(d_weights)[real], want[real], BF16, 16)


def test_demand_counts_what_did_not_fit(exchange):
    small = te.ExpertParallel(**{**exchange.__dict__, "capacity": 128})
    ids = jnp.zeros((64, 2), jnp.int32).at[:, 1].set(1)  # both on rank 0
    routing = Routing(ids, jnp.ones((64, 2)) / 2, None)
    sent = te.dispatch(jnp.ones((64, 16), BF16), routing, setup=small)
    assert sent.demand.tolist() == [256, 0, 0, 0, 256, 0, 0, 0]
    assert int(sent.demand.max()) > small.capacity


def test_te_is_told_which_axes_the_mesh_has(exchange):
    (guard,) = fake_te.GUARDS
    assert guard == fake_te.MeshResource(fsdp_resource="fsdp", ep_resource="expert")
    on_data = te.ExpertParallel(**{**exchange.__dict__, "outer_axis": "data"})
    with te.mesh_resources(on_data):
        assert fake_te.GUARDS[-1] == fake_te.MeshResource(dp_resource="data", ep_resource="expert")


def test_receive_capacity_is_te_s():
    # The figures of TE's documentation: 24,576 tokens per rank, 256 experts, 8 picks, 8 ranks.
    sizes = [te.receive_capacity(24_576, 8, 256, 8, factor) for factor in (1.0, 2.0, None)]
    assert sizes == [196_608, 393_216, 1_576_960]
    assert te.receive_capacity(64, 2, 8, 4, None) == te.receive_capacity(64, 2, 8, 4, 100.0)


def test_bootstrap_starts_and_records_the_same_sizes(exchange):
    te.bootstrap(exchange, make_mesh(MeshConfig(1, 2, 4)))
    assert fake_te.STARTED["recorded"] == (8, 8, exchange.capacity, 16, 4)
    assert fake_te.STARTED["capacity"] == exchange.capacity


def test_moe_hands_te_our_layouts_and_settings(exchange):
    config = RouterConfig(8, 2, score_fn="sigmoid", scaling_factor=2.5, num_groups=4, top_groups=2)
    x = jnp.ones((8, 8, 16), BF16)
    weights = jnp.ones((16, 8)), jnp.ones((8, 16, 64)), jnp.ones((8, 32, 16))
    fake_te.MOE_CALLS.clear()
    result = te.moe(x, *weights, config, setup=exchange, bias=jnp.zeros(8), balance_coeff=0.01)
    (call,) = fake_te.MOE_CALLS
    assert set(call) <= set(native.CALLS["moe"][1])
    assert (call["ep_axis"], call["data_parallelism_axes"]) == ("expert", ("fsdp",))
    assert (call["num_groups"], call["group_topk"], call["score_function"]) == (4, 2, "sigmoid")
    assert call["recv_capacity_per_rank"] == exchange.capacity
    assert call["dtype"] == BF16
    assert call["aux_loss_coeff"] == 0.01
    assert result.demand.tolist() == [7] * 8
    assert float(result.balance_loss) == 0.0


def test_moe_of_a_newer_te_takes_the_mesh_resource(exchange, fake, monkeypatch):
    def newer(x, gate_kernel, wi, wo, *, mesh_resource, **settings):
        assert mesh_resource.ep_resource == "expert"
        assert "ep_axis" not in settings
        return x, jnp.ones(()), jnp.zeros((8, 1), jnp.int32)

    monkeypatch.setattr(fake, "moe", newer)
    weights = jnp.ones((16, 8)), jnp.ones((8, 16, 64)), jnp.ones((8, 32, 16))
    out = te.moe(jnp.ones((8, 8, 16), BF16), *weights, RouterConfig(8, 2), setup=exchange)
    assert float(out.balance_loss) == 1.0


# ---------------------------------------------------------------- remat


def test_remat_policies_see_te_s_gemms():
    te_gemm, dot = SimpleNamespace(name="te_gemm"), jax.lax.dot_general_p
    numbers = (((1,), (0,)), ((), ()))
    assert te.remat_policy("gemms")(te_gemm)
    assert not te.remat_policy("gemms")(dot, dimension_numbers=numbers)
    assert te.remat_policy("gemms_and_dots")(dot, dimension_numbers=numbers)
    assert te.remat_policy("gemms_and_dots_with_no_batch_dims")(te_gemm, dimension_numbers=numbers)
