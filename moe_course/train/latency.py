"""What a report needs and the training loop does not: times of one MoE layer's parts, the machine's peak."""

import os
import re
import statistics
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from moe_course.bench.timing import interleaved
from moe_course.dispatch import DispatchPlan, combine, dispatch
from moe_course.experts import swiglu_experts
from moe_course.grouped_gemm import resolve_backend
from moe_course.layers.moe import MoE
from moe_course.models.config import ModelConfig
from moe_course.models.deepseek import router_config
from moe_course.parallel import (
    batch_sharding,
    expert_axes,
    expert_ranks,
    per_device,
    token_axes,
    tree_shardings,
)

PEAK_TFLOPS = {
    r"\bA100\b": {"bfloat16": 312},
    r"\bH100\b(?!.*PCIe)": {"bfloat16": 989, "float8": 1979},
    r"\bH200\b": {"bfloat16": 989, "float8": 1979},
    r"\bB200\b": {"bfloat16": 2250, "float8": 4500},
    r"\bGB200\b": {"bfloat16": 2450, "float8": 4900},
    r"\bB300\b": {"bfloat16": 2250, "float8": 4500},
    r"\bGB300\b": {"bfloat16": 2450, "float8": 4900},
}
"""Dense peak TFLOP/s by ``device_kind`` and dtype. A100 and H200 bfloat16: pytorch/torchtitan,
torchtitan/tools/utils.py; H200 float8: that of H100, the same compute die; the rest:
NVIDIA/dgxc-benchmarking, README.md (dense column)."""
GEMM_SIZE = 2048
"""Rows, columns and depth of the GEMM whose rate stands for a peak that nobody published."""


def measure_latency(
    config: ModelConfig,
    mesh: Mesh,
    tokens_per_step: int,
    capacity: int,
    hidden: Float[Array, "tokens d_model"] | None = None,
    dispatcher: str = "all_to_all",
    rounds: int = 7,
    *,
    layer: MoE | None = None,
    backend: str = "auto",
) -> dict[str, float | str]:
    """Median milliseconds, forward: ``dispatch``, ``combine``, ``grouped_gemm``, ``moe_layer``; and ``how``.

    Global shapes are the run's: ``tokens_per_step`` tokens over all of ``mesh``, ``capacity`` receive rows
    per rank. The routing is what ``layer`` makes of ``hidden``: pass a trained layer and the state that
    enters it. Left out, they are random, and the routing with them. Without MoE layers: ``how`` alone.
    """
    if config.num_moe_layers + config.mtp_depth == 0:
        return {"how": "the model has no MoE layer"}
    routing = "random routing" if hidden is None or layer is None else "the routing of a real batch"
    with jax.set_mesh(mesh):
        plan = DispatchPlan(config.num_experts, expert_ranks(mesh), capacity, dispatcher)
        pieces, demand = moe_pieces(config, mesh, tokens_per_step, plan, hidden, layer, backend)
        seconds = interleaved(pieces, rounds)
    if plan.ranks > 1:
        routing += f" that asks for {int(demand)} of {capacity} receive rows"
    milliseconds = {name: 1e3 * statistics.median(times) for name, times in seconds.items()}
    how = (
        f"forward, {tokens_per_step} tokens over {mesh.size} devices, {routing}; median of {rounds} "
        "interleaved, blocked calls; the grouped GEMM is one layer's SwiGLU experts with weights already "
        "gathered, the MoE layer gathers them"
    )
    return milliseconds | {"how": how}


def moe_pieces(
    config: ModelConfig,
    mesh: Mesh,
    num_tokens: int,
    plan: DispatchPlan,
    hidden: Float[Array, "tokens d_model"] | None = None,
    layer: MoE | None = None,
    backend: str = "auto",
) -> tuple[dict[str, Callable[[], Array]], Array]:
    """The compiled parts of one MoE layer, each ready to call without arguments, and the rows asked for.

    Call under ``jax.set_mesh(mesh)``.
    """
    shape = (num_tokens, config.d_model)
    hidden = jax.random.normal(jax.random.key(0), shape, jnp.float32) if hidden is None else hidden
    x = jax.device_put(hidden.reshape(shape).astype(config.compute_dtype), batch_sharding(mesh))
    graph, state = nnx.split(layer or random_layer(config))
    state = jax.device_put(state, tree_shardings(state, mesh))

    layer = nnx.merge(graph, state)
    routing = jax.jit(lambda state, x: nnx.merge(graph, state).router(x, None)[1])(state, x)
    send = jax.jit(partial(dispatch, plan=plan))
    sent = send(x, routing)
    kernels = [
        jax.device_put(weight[...].astype(config.compute_dtype), NamedSharding(mesh, P(expert_axes(mesh))))
        for weight in (layer.experts.gate_up, layer.experts.down)
    ]
    multiply = jax.jit(partial(_multiply, mesh=mesh, backend=backend))
    bring_back = jax.jit(combine)
    options = {"plan": plan, "num_sequences": mesh.size, "backend": backend}
    whole = jax.jit(lambda state, x: nnx.merge(graph, state)(x, **options)[0])
    pieces = {
        "dispatch": lambda: send(x, routing),
        "grouped_gemm": lambda: multiply(sent.rows, *kernels, sent.group_sizes),
        "combine": lambda: bring_back(sent.rows, sent),
        "moe_layer": lambda: whole(state, x),
    }
    return pieces, sent.demand.max()


def random_layer(config: ModelConfig) -> MoE:
    """A fresh MoE layer of this model."""
    return MoE(
        config.d_model,
        config.d_ff,
        router_config(config),
        num_shared_experts=config.num_shared_experts,
        std=config.init_std,
        dtype=config.compute_dtype,
        rngs=nnx.Rngs(params=0),
    )


def _multiply(rows, gate_up, down, group_sizes, *, mesh: Mesh, backend: str):
    """The experts of every rank on its own rows."""

    def one_rank(rows, gate_up, down, group_sizes):
        return swiglu_experts(rows, gate_up, down, group_sizes[0], backend=backend)

    if mesh.size == 1:
        return one_rank(rows, gate_up, down, group_sizes)
    tokens, experts = P(token_axes(mesh)), P(expert_axes(mesh))
    specs = {"in_specs": (tokens, experts, experts, tokens), "out_specs": tokens}
    return per_device(one_rank, **specs, check=resolve_backend(backend) != "te")(
        rows, gate_up, down, group_sizes
    )


def published_peak(device_kind: str, dtype: str) -> float | None:
    """Dense peak TFLOP/s of one device from :data:`PEAK_TFLOPS`, None if it is not there."""
    for pattern, by_dtype in PEAK_TFLOPS.items():
        if re.search(pattern, device_kind):
            return by_dtype.get(dtype)
    return None


def measure_peak(
    dtype: str = "float32", rounds: int = 7, devices: int | None = None
) -> dict[str, float | str]:
    """The peak that MFU is taken of: ``tflops_per_device``, ``dtype`` and ``how`` it is known, in words.

    Published where there is a figure for this device, else the best rate of a dense GEMM here. Simulated
    devices share the machine, so each of the run's ``devices`` (default: all) gets an equal part of that.
    """
    device, count = jax.local_devices()[0], devices or len(jax.devices())
    peak = published_peak(device.device_kind, dtype)
    if peak is not None:
        return {
            "tflops_per_device": peak,
            "dtype": dtype,
            "how": f"published dense peak of {device.device_kind}",
        }
    n = GEMM_SIZE
    x = jax.device_put(jnp.ones((n, n), dtype), device)
    product = jax.jit(jnp.matmul)
    seconds = min(interleaved({"gemm": lambda: product(x, x)}, rounds)["gemm"])
    tflops = 2 * n**3 / seconds / 1e12
    how = f"measured: best of {rounds} {dtype} GEMMs of {n}^3"
    if device.platform == "cpu":
        tflops /= count
        how += f" on {os.cpu_count()} cores, / {count}, because {count} simulated devices share them"
    else:
        how += f" on one {device.device_kind}"
    return {"tflops_per_device": tflops, "dtype": dtype, "how": how}
