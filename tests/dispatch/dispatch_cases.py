"""What the tests of all dispatchers share: routings worth testing, and one compiled program per plan."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from moe_course.dispatch import DISPATCHERS, DispatchPlan, combine, dispatch
from moe_course.dispatch.plan import worst_case_capacity
from moe_course.parallel import MeshConfig, batch_sharding, make_mesh
from moe_course.routing import Routing

D, E, K, T = 5, 8, 3, 32
EXCHANGES = sorted(set(DISPATCHERS) - {"local", "te"})
SAME_BUFFERS = sorted({"all_gather", "ragged", "dedup"})
"""Dispatchers whose receive buffers must be equal row by row."""
SUMMED_DEMAND = sorted({*SAME_BUFFERS, "hierarchical"})
"""Dispatchers whose demand is the sum over senders."""
QUICK = {"xla_backend_optimization_level": 0}
"""Compiler options of programs that run once or twice: a third less time to compile, the same program."""


def routing_case(name: str, seed: int = 7, tokens: int = T, top_k: int = K, ranks: int = 4):
    """x [T, D], expert ids [T, K] (distinct per token, E where masked), weights [T, K]."""
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(E)[:top_k] for _ in range(tokens)]).astype(np.int32)
    gone = np.zeros(tokens, bool)
    if name == "one hot expert":  # everyone picks 6; the other picks are its neighbours
        ids = (6 + np.arange(top_k, dtype=np.int32) + np.zeros((tokens, 1), np.int32)) % E
    elif name == "uneven demand":  # experts 0 to 3 only: half of the ranks get nothing
        ids = np.stack([rng.permutation(4)[:top_k] for _ in range(tokens)]).astype(np.int32)
    elif name == "masked":
        gone = rng.uniform(size=tokens) < 0.4
    elif name == "a rank with no tokens":
        gone[: tokens // ranks] = True
    elif name == "no tokens at all":
        gone[:] = True
    else:
        assert name == "random", name
    x = rng.standard_normal((tokens, D)).astype(np.float32)
    weights = rng.uniform(0.1, 1.0, ids.shape).astype(np.float32)
    x[gone], ids[gone], weights[gone] = np.nan, E, 0.0
    return x, ids, weights


CASES = [
    "random",
    "masked",
    "one hot expert",
    "uneven demand",
    "a rank with no tokens",
    "no tokens at all",
]


def mesh_for(shape, dispatcher: str):
    """data x fsdp x expert; two nodes where the dispatcher tells nodes apart."""
    nodes = 2 if dispatcher == "hierarchical" and shape[2] > 1 else 1
    return make_mesh(MeshConfig(*shape, nodes=nodes))


def plan_for(shape, dispatcher: str, capacity: int | None = None, tokens: int = T, top_k: int = K):
    ranks = shape[2]
    worst = worst_case_capacity(tokens // int(np.prod(shape)), top_k, E, ranks)
    return DispatchPlan(E, ranks, worst if capacity is None else capacity, dispatcher)


def scaling_layer(x, ids, weights, plan):
    """Expert e multiplies by e + 1, so the result says which expert saw which token.

    Rows past the groups are NaN on the way in, between dispatch and combine, and in every gradient.
    """
    sent = dispatch(x, Routing(ids, weights, None), plan=plan)
    per, devices = plan.experts_per_rank, sent.group_sizes.shape[0]
    rows = sent.rows.reshape(devices, -1, D)
    ends = jnp.cumsum(sent.group_sizes, axis=1)
    local = (jnp.arange(rows.shape[1])[None, :, None] >= ends[:, None, :]).sum(-1)
    rank = jnp.arange(devices) % plan.ranks
    factor = (rank[:, None] * per + local + 1).astype(jnp.float32).reshape(-1, 1)
    live = (local < per).reshape(-1, 1)
    nan = jnp.float32(jnp.nan)
    out = poison_gradient(jnp.where(live, sent.rows, nan), live) * factor * sent.row_weights[:, None]
    out = jnp.where(live, out, nan)
    return combine(out, sent), sent


@jax.custom_vjp
def poison_gradient(rows, live):
    """The rows; their gradient is NaN where they are not live."""
    return rows


poison_gradient.defvjp(
    lambda rows, live: (rows, live),
    lambda live, d: (jnp.where(live, d, jnp.float32(jnp.nan)), None),
)


@cache
def compiled(shape, plan: DispatchPlan, gradients: bool = True):
    """(x, ids, weights, probe) -> ((out, sent), (dx, dweights)) on a mesh, as NumPy; compiled once."""
    mesh = mesh_for(shape, plan.dispatcher)

    def loss(x, weights, ids, probe):
        out, sent = scaling_layer(x, ids, weights, plan)
        return jnp.vdot(out, probe), (out, sent)

    step = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True) if gradients else loss
    step = jax.jit(step, compiler_options=QUICK)

    def call(x, ids, weights, probe):
        sharding = batch_sharding(mesh)
        # From a callback, because some of the devices may be another process's.
        arrays = [
            jax.make_array_from_callback(a.shape, sharding, a.__getitem__) for a in (x, weights, ids, probe)
        ]
        with jax.set_mesh(mesh):
            result = step(*arrays)
        result = fetch(result)
        return (result[0][1], result[1]) if gradients else result[1]

    return call


def fetch(tree):
    """Whole NumPy arrays, in every process."""
    if jax.process_count() == 1:
        return jax.tree.map(np.asarray, tree)
    return multihost_utils.process_allgather(tree, tiled=True)


def probe_for(x):
    return np.random.default_rng(0).standard_normal(x.shape).astype(np.float32)


def expected(x, ids, weights):
    """Plain indexing in float64; a token without experts gives zeros, whatever it holds."""
    factor = np.where(ids < E, ids + 1.0, 0.0) * weights
    return np.where((ids < E).any(1, keepdims=True), x, 0.0).astype(np.float64) * factor.sum(1, keepdims=True)
