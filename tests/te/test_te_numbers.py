"""The adapters' numbers on the CPU, through TE's own Python and the CPU lowerings of ``reference.py``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_course import te
from moe_course.balance import expert_load, load_balancing_loss
from moe_course.grouped_gemm import grouped_gemm
from moe_course.quant import BF16, MXFP8
from moe_course.routing import RouterConfig, route
from moe_course.te import native
from tests import oracle
from tests.te import reference

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:transformer_engine"),
]


@pytest.fixture(scope="module", autouse=True)
def te_on_cpu(load_te):
    """TE for a Blackwell GPU that is not there, computing on the CPU. TE mixes dtypes as JAX's default allows."""
    load_te(100)
    reference.register()
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


ROUTERS = {
    "mixtral": RouterConfig(8, 2),
    "qwen": RouterConfig(16, 4, normalize=False),
    "top1": RouterConfig(8, 1),
    "deepseek v3": RouterConfig(32, 8, score_fn="sigmoid", scaling_factor=2.5, num_groups=8, top_groups=4),
    "softmax groups": RouterConfig(16, 4, num_groups=4, top_groups=2, scaling_factor=2.0),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_route(name):
    config = ROUTERS[name]
    logits = 2 * jax.random.normal(jax.random.key(0), (40, config.num_experts), jnp.float32)
    bias = (
        jax.random.normal(jax.random.key(1), (config.num_experts,)) if config.score_fn == "sigmoid" else None
    )
    aim = jax.random.normal(jax.random.key(2), (40, config.top_k), jnp.float32)

    def run(router):
        def loss(logits):
            routing = router(logits, config, bias=bias)
            return (routing.weights * aim).sum(), routing

        return jax.jit(jax.grad(loss, has_aux=True))(logits)

    (ours_grad, ours), (te_grad, theirs) = run(route), run(te.route)
    np.testing.assert_array_equal(theirs.expert_ids, ours.expert_ids)
    oracle.assert_close(theirs.weights, ours.weights, jnp.float32, config.top_k)
    oracle.assert_close(te_grad, ours_grad, jnp.float32, config.num_experts)


def test_balance():
    config = ROUTERS["deepseek v3"]
    routing = route(jax.random.normal(jax.random.key(0), (40, 32), jnp.float32), config)
    load = expert_load(routing.expert_ids, 32)
    ours, ours_grad = jax.value_and_grad(lambda s: load_balancing_loss(s, load, config))(routing.scores)
    theirs, te_grad = jax.value_and_grad(lambda s: te.balance(s, load, config))(routing.scores)
    oracle.assert_close(theirs, ours, jnp.float32, 40)
    oracle.assert_close(te_grad, ours_grad, jnp.float32, 40)


@pytest.mark.parametrize("sizes", [(128, 0, 256, 0), (0, 0, 0, 0), (512, 0, 0, 0), (128, 128, 128, 128)])
@pytest.mark.parametrize("recipe", [BF16(), MXFP8()], ids=lambda r: r.name)
def test_grouped_gemm(sizes, recipe):
    """Equal to our own kernels, emulating the same recipe; the tail is NaN and reaches nothing."""
    keys = jax.random.split(jax.random.key(0), 3)
    rows = jax.random.normal(keys[0], (512, 128), jnp.bfloat16)
    kernels = jax.random.normal(keys[1], (4, 128, 256), jnp.bfloat16)
    aim = jax.random.normal(keys[2], (512, 256), jnp.bfloat16)
    used = sum(sizes)
    live = (jnp.arange(512) < used)[:, None]
    poisoned, sizes = jnp.where(live, rows, jnp.nan).astype(jnp.bfloat16), jnp.array(sizes, jnp.int32)

    def run(gemm, rows):
        def loss(rows, kernels):
            out = gemm(rows, kernels, sizes)
            return jnp.where(live, out * aim, 0).astype(jnp.float32).sum(), out

        (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(rows, kernels)
        return [np.asarray(a, np.float64) for a in (out, *grads)]

    theirs = run(lambda *a: te.grouped_gemm(*a, recipe=recipe), poisoned)
    ours = run(lambda *a: grouped_gemm(*a, backend="reference", recipe=recipe), rows)
    for have, want in zip(theirs, ours, strict=True):
        if len(have) == 512:
            assert not have[used:].any()
            want[used:] = 0
        oracle.assert_close(have, want, jnp.bfloat16, 128)


def test_dense_and_layernorm_mlp():
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (2, 32, 64), jnp.bfloat16)
    gate_up = 0.2 * jax.random.normal(keys[1], (64, 192), jnp.bfloat16)
    down = 0.2 * jax.random.normal(keys[2], (96, 64), jnp.bfloat16)
    scale = 1 + 0.1 * jax.random.normal(keys[3], (64,), jnp.float32)
    wide = [np.asarray(a, np.float64) for a in (x, gate_up, down, scale)]
    oracle.assert_close(te.dense(x, gate_up), wide[0] @ wide[1], jnp.bfloat16, 64)
    normed = wide[0] / np.sqrt((wide[0] ** 2).mean(-1, keepdims=True) + 1e-6) * wide[3]
    out = te.layernorm_mlp(x, scale, gate_up, down)
    oracle.assert_close(out, oracle.swiglu(normed, wide[1], wide[2]), jnp.bfloat16, 96)


def test_receive_capacity_is_te_s_own():
    theirs = native.api().get_moe_recv_capacity_per_rank
    for tokens, top_k, experts, ranks in [
        (64, 2, 8, 4),
        (4096, 8, 256, 64),
        (24_576, 8, 256, 8),
        (5, 1, 8, 2),
    ]:
        for factor in (None, 1.0, 1.25, 2.0):
            settings = {"num_experts": experts, "num_experts_per_tok": top_k, "ep_size": ranks}
            want = theirs(**settings, max_tokens_per_rank=tokens, recv_capacity_factor=factor)
            assert te.receive_capacity(tokens, top_k, experts, ranks, factor) == want
