"""What TE makes of each adapter's call, lowered for CUDA at one compute capability. A process of its own:

    python -m tests.te.lowered 90 facts.json

Needs TE's JAX extension, and no GPU. Each case gives the custom calls of the lowered text (target, operand types,
attributes), the primitives of the trace, or the error that the adapter raised.
"""

import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from moe_course import te
from moe_course.dispatch import DispatchPlan
from moe_course.layers.moe import MoE
from moe_course.parallel import MeshConfig, make_mesh
from moe_course.quant import MXFP8, FP8CurrentScaling
from moe_course.routing import RouterConfig, Routing
from moe_course.te import without_gpu
from tests.te import fake_extension

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
DEEPSEEK = RouterConfig(256, 8, score_fn="sigmoid", num_groups=8, top_groups=4, scaling_factor=2.5)
TOKENS, EXPERTS, TOP_K, WIDTH, HIDDEN = 1024, 16, 4, 256, 128

CASES: dict[str, Callable[[], tuple]] = {}
"""Name -> a function that gives (function to lower, its arguments as shapes)."""


def case(build: Callable) -> Callable:
    CASES[build.__name__] = build
    return build


def shape(*dims, dtype=BF16):
    return jax.ShapeDtypeStruct(dims, dtype)


def with_gradient(f: Callable, *over: int) -> Callable:
    """The value and the gradients of the sum of squares of ``f``."""

    def loss(*arguments):
        out = f(*arguments).astype(F32)
        return (out * out).sum()

    return jax.value_and_grad(loss, over)


@case
def route():
    def weights(logits, bias):
        return te.route(logits, DEEPSEEK, bias=bias).weights

    return with_gradient(weights, 0), shape(TOKENS, 256, dtype=F32), shape(256, dtype=F32)


@case
def route_mixtral():
    config = RouterConfig(8, 2)
    return with_gradient(lambda logits: te.route(logits, config).weights, 0), shape(TOKENS, 8)


@case
def balance():
    f = with_gradient(lambda scores, load: te.balance(scores, load, DEEPSEEK), 0)
    return f, shape(TOKENS, 256, dtype=F32), shape(256, dtype=I32)


def _permute(align):
    def there_and_back(x, ids, weights):
        routing = Routing(ids, weights, None)
        sent = te.permute(x, routing, EXPERTS, align=align)
        return te.unpermute(sent.rows * sent.row_weights[:, None].astype(x.dtype), sent)

    f = with_gradient(there_and_back, 0, 2)
    return f, shape(TOKENS, WIDTH), shape(TOKENS, TOP_K, dtype=I32), shape(TOKENS, TOP_K, dtype=F32)


@case
def permute():
    return _permute(128)


@case
def permute_unpadded():
    return _permute(1)


def _gemm(**settings):
    f = with_gradient(partial(te.grouped_gemm, **settings), 0, 1)
    return f, shape(1024, WIDTH), shape(4, WIDTH, HIDDEN), shape(4, dtype=I32)


@case
def grouped_gemm():
    return _gemm()


@case
def grouped_gemm_mxfp8():
    return _gemm(recipe=MXFP8())


@case
def grouped_gemm_fp8_copied():
    return _gemm(recipe=FP8CurrentScaling(), sizes_on_device=False)


@case
def grouped_gemm_in_shard_map():
    from jax.sharding import PartitionSpec as P

    from moe_course.grouped_gemm import BACKENDS

    def local(rows, kernels, sizes):
        return BACKENDS["te"](rows, kernels, sizes[0])

    def f(rows, kernels, sizes):
        spec = P("expert")
        # TE's derivatives do not know along which axes their results vary.
        mapped = jax.shard_map(local, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)
        return mapped(rows, kernels, sizes)

    return with_gradient(f, 0, 1), shape(8192, WIDTH), shape(32, WIDTH, HIDDEN), shape(8, 4, dtype=I32)


def _dense(recipe=None):
    return with_gradient(partial(te.dense, recipe=recipe), 0, 1), shape(2, 128, WIDTH), shape(WIDTH, HIDDEN)


@case
def dense():
    return _dense()


@case
def dense_fp8():
    return _dense(FP8CurrentScaling())


@case
def dense_mxfp8():
    return _dense(MXFP8())


def _mlp(recipe=None):
    f = with_gradient(partial(te.layernorm_mlp, recipe=recipe), 0, 1, 2, 3)
    return f, shape(2, 128, WIDTH), shape(WIDTH), shape(WIDTH, 2 * HIDDEN), shape(HIDDEN, WIDTH)


@case
def layernorm_mlp():
    return _mlp()


@case
def layernorm_mlp_mxfp8():
    return _mlp(MXFP8())


SETUP = {"num_experts": EXPERTS, "top_k": TOP_K, "tokens": TOKENS, "d_model": WIDTH, "factor": 2.0}


def setup() -> te.ExpertParallel:
    return te.ExpertParallel.for_mesh(make_mesh(MeshConfig(1, 2, 4)), **SETUP)


@case
def dispatch_and_combine():
    exchange = setup()

    def there_and_back(x, ids, weights):
        sent = te.dispatch(x, Routing(ids, weights, None), setup=exchange)
        return te.combine(sent.rows * sent.row_weights[:, None].astype(x.dtype), sent)

    f = with_gradient(there_and_back, 0, 2)
    return f, shape(TOKENS, WIDTH), shape(TOKENS, TOP_K, dtype=I32), shape(TOKENS, TOP_K, dtype=F32)


def _moe(**settings):
    exchange, config = setup(), RouterConfig(EXPERTS, TOP_K, score_fn="sigmoid", scaling_factor=2.5)

    def layer(x, router, gate_up, down):
        result = te.moe(x, router, gate_up, down, config, setup=exchange, **settings)
        return result.out.astype(F32) + result.balance_loss

    weights = shape(WIDTH, EXPERTS), shape(EXPERTS, WIDTH, 2 * HIDDEN), shape(EXPERTS, HIDDEN, WIDTH)
    return with_gradient(layer, 0, 1, 2, 3), shape(16, TOKENS // 16, WIDTH), *weights


@case
def moe():
    return _moe()


@case
def moe_mxfp8_with_balance_loss():
    return _moe(recipe=MXFP8(), balance_coeff=0.01)


def _our_layer(dispatcher):
    """This package's MoE layer on TE's grouped GEMM, under expert parallelism; gradients of all its weights."""
    exchange = setup()
    layer = MoE(
        WIDTH, HIDDEN, RouterConfig(EXPERTS, TOP_K), num_shared_experts=0, dtype="bfloat16", rngs=nnx.Rngs(0)
    )
    graph, state = nnx.split(layer)
    plan = DispatchPlan(EXPERTS, exchange.ranks, exchange.capacity, dispatcher)

    def f(x, state):
        return nnx.merge(graph, state)(x, plan=plan, backend="te")[0]

    shapes = jax.tree.map(lambda a: shape(*a.shape, dtype=a.dtype), state)
    return with_gradient(f, 0, 1), shape(TOKENS, WIDTH), shapes


@case
def our_layer():
    return _our_layer("all_to_all")


@case
def our_layer_and_te_dispatch():
    return _our_layer("te")


def _remat(policy):
    def block(x, kernel):
        return jnp.tanh(te.dense(jnp.tanh(te.dense(x, kernel)), kernel))

    f = with_gradient(jax.checkpoint(block, policy=policy), 0, 1)
    return f, shape(128, WIDTH), shape(WIDTH, WIDTH)


@case
def remat_that_sees_te():
    return _remat(te.remat_policy("gemms"))


@case
def remat_that_does_not():
    return _remat(jax.checkpoint_policies.dots_saveable)


NEED_A_MESH = (
    "dispatch_and_combine moe moe_mxfp8_with_balance_loss our_layer our_layer_and_te_dispatch"
).split()
CALL = re.compile(r'custom_call @"?([\w.$]+)"?\(.*?\) (\{.*\}) : \((.*)\) -> (.*)$', re.MULTILINE)


def facts_of(name: str) -> dict:
    """The facts of one case; ``error`` if tracing or lowering it failed."""
    mesh = make_mesh(MeshConfig(1, 2, 4)) if name in NEED_A_MESH else None
    if name == "grouped_gemm_in_shard_map":
        mesh = jax.make_mesh((8,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    try:
        if mesh is None:
            return _lower(*CASES[name]())
        with jax.set_mesh(mesh):
            if name not in NEED_A_MESH:
                return _lower(*CASES[name]())
            without_gpu.start_expert_parallel(setup())
            with te.mesh_resources(setup()), without_gpu.taken_for_a_gpu():
                return _lower(*CASES[name]())
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


def _lower(f: Callable, *shapes) -> dict:
    traced = jax.jit(f).trace(*shapes)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = [
        {"target": target, "attributes": attributes, "operands": operands, "results": results}
        for target, attributes, operands, results in CALL.findall(text)
    ]
    return {"error": "", "calls": calls, "primitives": primitives_of(traced.jaxpr)}


def primitives_of(jaxpr) -> list[str]:
    """Names of all primitives in a trace, inner traces too, in order."""
    found = []
    for equation in jaxpr.eqns if hasattr(jaxpr, "eqns") else jaxpr.jaxpr.eqns:
        found.append(equation.primitive.name)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found += primitives_of(inner)
    return found


def main(capability: str, out: str, *names: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    load = fake_extension.install if os.environ.get("MOE_COURSE_TE") == "python" else without_gpu.load
    load(int(capability))
    facts = {name: facts_of(name) for name in names or CASES}
    with open(out, "w") as file:
        json.dump(facts, file, indent=1)


if __name__ == "__main__":
    main(*sys.argv[1:])
