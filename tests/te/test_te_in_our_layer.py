"""TE inside this package: layers.MoE with ``backend="te"`` and the ``te`` dispatcher, on plain JAX's TE (``fake_te``)."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_course import te
from moe_course.dispatch import DispatchPlan, combine, dispatch, ledger, nccl_ep
from moe_course.errors import SettingError
from moe_course.grouped_gemm import resolve_backend
from moe_course.layers import moe as moe_module
from moe_course.layers.moe import MoE
from moe_course.parallel import MeshConfig, make_mesh, per_device
from moe_course.routing import RouterConfig, Routing, route
from moe_course.te import native, without_gpu
from tests import oracle
from tests.te import fake_te

BF16 = jnp.bfloat16
TOKENS, WIDTH, HIDDEN, EXPERTS, TOP_K = 64, 16, 8, 8, 2
CONFIG = RouterConfig(EXPERTS, TOP_K)


@pytest.fixture
def gpu(monkeypatch):
    """Transformer Engine in plain JAX, on a GPU like a B200, which ``te.available()`` believes in."""
    space = fake_te.namespace()
    monkeypatch.setattr(native, "api", lambda: space)
    monkeypatch.setattr(fake_te, "CAPABILITY", 100)
    promotion = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")
    with without_gpu.taken_for_a_gpu(), promotion[0], promotion[1]:
        yield


@pytest.fixture(params=[(1, 2, 4), (2, 1, 4)], ids=str)
def exchange(request, gpu, devices):
    """The mesh, a plan with room for any routing, and TE started with it."""
    mesh = make_mesh(MeshConfig(*request.param))
    ranks = request.param[2]
    capacity = te.receive_capacity(TOKENS // 8, TOP_K, EXPERTS, ranks)
    plan = DispatchPlan(EXPERTS, ranks, capacity, "te")
    setup = nccl_ep.setup_for(mesh, plan, tokens=TOKENS, top_k=TOP_K, d_model=WIDTH)
    fake_te.start(setup)
    with jax.set_mesh(mesh), te.mesh_resources(setup):
        yield plan


def value_and_gradients(plan, backend):
    layer = MoE(WIDTH, HIDDEN, CONFIG, std=0.3, down_std=0.3, dtype="bfloat16", rngs=nnx.Rngs(params=0))
    graph, state = nnx.split(layer)
    x = jax.random.normal(jax.random.key(1), (TOKENS, WIDTH), BF16)
    aim = jax.random.normal(jax.random.key(2), (TOKENS, WIDTH), jnp.float32)
    mask = jnp.arange(TOKENS) % 7 > 0

    def loss(state, x):
        out, stats = nnx.merge(graph, state)(x, plan=plan, mask=mask, backend=backend)
        return (out.astype(jnp.float32) * aim).sum(), (out, stats)

    (_, (out, stats)), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(state, x)
    return stats, [np.asarray(a, np.float64) for a in (out, *jax.tree.leaves(grads))]


@pytest.mark.slow
def test_the_layer_on_te_equals_the_layer_on_our_kernels(exchange):
    """Values and gradients of every weight, with our exchange and with TE's."""
    ours = DispatchPlan(EXPERTS, exchange.ranks, 8 * TOKENS)
    _, want = value_and_gradients(ours, "reference")
    for plan in (ours, exchange):
        stats, have = value_and_gradients(plan, "te")
        for a, b in zip(have, want, strict=True):
            oracle.assert_close(a, b, BF16, 16)
        books = {name: int(value) for name, value in vars(stats.ledger).items()}
        assert books["made"] == (TOKENS - 10) * TOP_K
        assert ledger.check(**books) is None
        assert int(stats.demand) <= plan.capacity


def test_with_the_check_te_s_derivatives_are_refused(exchange, monkeypatch):
    """The broken twin: the layer without ``check=False``."""
    monkeypatch.setattr(moe_module, "per_device", lambda *a, check, **k: per_device(*a, **k))
    with pytest.raises(SettingError, match="check_vma=False"):
        value_and_gradients(DispatchPlan(EXPERTS, exchange.ranks, 8 * TOKENS), "te")


def test_a_full_buffer_shows_in_the_books_and_in_the_demand(gpu, devices):
    mesh = make_mesh(MeshConfig(1, 2, 4))
    plan = DispatchPlan(EXPERTS, 4, 128, "te")
    setup = nccl_ep.setup_for(mesh, plan, tokens=TOKENS, top_k=TOP_K, d_model=WIDTH)
    fake_te.start(setup)
    ids = jnp.tile(jnp.array([[0, 1]], jnp.int32), (TOKENS, 1))  # both on rank 0: two blocks of 128 rows
    routing = Routing(ids, jnp.full((TOKENS, TOP_K), 0.5), None)
    with jax.set_mesh(mesh), te.mesh_resources(setup):
        sent = dispatch(jnp.ones((TOKENS, WIDTH), BF16), routing, plan=plan)
        books = ledger.count(sent)
    assert int(sent.demand.max()) == 256 > plan.capacity
    assert (int(books.made), int(books.received)) == (2 * TOKENS, TOKENS)
    assert int(books.dropped) == TOKENS
    assert (
        ledger.check(**{k: int(v) for k, v in vars(books).items()}) == "128 token copies sent but 64 received"
    )
    with pytest.raises(SettingError, match="does not name a row's sender"):
        ledger.pair_books(sent)


def test_there_and_back_is_the_weighted_sum(exchange):
    routing = route(jax.random.normal(jax.random.key(3), (TOKENS, EXPERTS), jnp.float32), CONFIG)
    x = jax.random.normal(jax.random.key(4), (TOKENS, WIDTH), BF16)

    @jax.jit
    def there_and_back(x):
        sent = dispatch(x, routing, plan=exchange)
        return combine((sent.rows * sent.row_weights[:, None]).astype(BF16), sent)

    want = np.asarray(x, np.float64) * np.asarray(routing.weights, np.float64).sum(-1, keepdims=True)
    oracle.assert_close(there_and_back(x), want, BF16, 2)


# ---------------------------------------------------------------- asked for and not there


def test_te_s_exchange_without_te_says_why_and_what_else():
    mesh = make_mesh(MeshConfig(1, 2, 4))
    routing = Routing(jnp.zeros((8, 1), jnp.int32), jnp.ones((8, 1)), None)
    with jax.set_mesh(mesh), pytest.raises(SettingError) as error:
        dispatch(jnp.ones((8, 4), BF16), routing, plan=DispatchPlan(8, 4, 128, "te"))
    assert "no GPU" in str(error.value)
    assert "--dispatcher all_to_all" in str(error.value)


def test_te_s_kernel_in_the_layer_without_te_says_why_and_what_else():
    layer = MoE(WIDTH, HIDDEN, CONFIG, dtype="bfloat16", rngs=nnx.Rngs(params=0))
    with pytest.raises(SettingError) as error:
        layer(jnp.ones((8, WIDTH), BF16), backend="te")
    assert "no GPU" in str(error.value)
    assert "backend='tiled'" in str(error.value)


def test_auto_never_takes_te_unasked(gpu):
    assert te.available("grouped_gemm").ok
    assert resolve_backend("auto") != "te"
    assert resolve_backend("te") == "te"


def test_a_made_up_gpu_is_forgotten_afterwards(gpu, monkeypatch):
    assert "not there" in te.examine().gpu
    monkeypatch.setattr(native, "stand_in", None)
    assert te.examine().gpu is None


@pytest.mark.parametrize(
    ("mesh", "plan", "says"),
    [
        (MeshConfig(1, 1, 8, nodes=2), partial(DispatchPlan, 8, 8, 128, "te"), "no node axis"),
        (MeshConfig(2, 2, 2), partial(DispatchPlan, 8, 2, 128, "te"), "one axis outside the expert axis"),
        (MeshConfig(1, 2, 4), partial(DispatchPlan, 8, 4, 100, "te"), "not a multiple of 128"),
    ],
)
def test_meshes_and_capacities_that_te_does_not_take(gpu, mesh, plan, says):
    with pytest.raises(SettingError, match=says):
        nccl_ep.setup_for(make_mesh(mesh), plan(), tokens=TOKENS, top_k=TOP_K, d_model=WIDTH)
