"""Parts of ``moe-course bench gpu``: one MoE layer, a training step of a model with 1B active parameters, launches."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_course.bench.gpu_kernels import backends
from moe_course.bench.gpu_measure import Compilations, attempt, take_turns, tflops
from moe_course.grouped_gemm import why_not
from moe_course.layers.moe import MoE
from moe_course.models.config import ModelConfig
from moe_course.parallel import MeshConfig, make_mesh
from moe_course.routing import RouterConfig
from moe_course.scaling.flops import matmul_flops, parameter_counts, swiglu_flops, training_flops
from moe_course.train.config import TrainConfig
from moe_course.train.latency import published_peak
from moe_course.train.presets import TINY

ONE_BILLION = ModelConfig(
    vocab_size=32_768,
    d_model=2048,
    num_layers=8,
    num_heads=16,
    q_lora_rank=0,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    d_ff_dense=8192,
    d_ff=1792,
    num_experts=24,
    top_k=8,
    compute_dtype="bfloat16",
)
"""About 1B active of 2.2B parameters: with AdamW's moments and a spare copy it fits a GPU of 80 GB. Few and wide layers,
because each is compiled."""
SEQ_LEN = 2048
BATCHES = (4, 2, 1)
"""Sequences per step, the first that fits."""
STEPS = 10


def moe_layer(tiny: bool) -> Iterator[tuple[str, dict]]:
    """Forward and backward of one layer with the sizes of one DeepSeek-V3 rank: 32 experts, top 8, 4,096 tokens."""
    tokens, d_model, d_ff, experts, top_k = (64, 32, 16, 4, 2) if tiny else (4096, 7168, 2048, 32, 8)
    router = RouterConfig(experts, top_k, score_fn="sigmoid")
    layer = MoE(d_model, d_ff, router, num_shared_experts=1, dtype="bfloat16", rngs=nnx.Rngs(params=0))
    graph, params, rest = nnx.split(layer, nnx.Param, ...)
    x = jax.random.normal(jax.random.key(1), (tokens, d_model), jnp.bfloat16)
    flops = 3 * tokens * ((top_k + 1) * swiglu_flops(d_model, d_ff) + matmul_flops(d_model, experts))

    def measure(backend: str) -> dict:
        if reason := why_not(backend):
            return {"refused": reason}

        def loss(params, x):
            return nnx.merge(graph, params, rest)(x, backend=backend)[0].astype(jnp.float32).mean()

        step = jax.jit(jax.grad(loss, (0, 1)))
        seconds = take_turns({"ours": lambda: step(params, x)})["ours"]
        return {"fwdbwd_ms": round(1e3 * seconds, 3), "tflops": tflops(flops, seconds)}

    for backend in backends(tiny):
        yield backend, attempt(partial(measure, backend))


# ---------------------------------------------------------------- a training step


def train_step(tiny: bool) -> Iterator[tuple[str, dict]]:
    """The optimizer step of ``moe-course train``, whole: MFU, host syncs between steps, recompilations."""
    model = replace(TINY.model, compute_dtype="bfloat16") if tiny else ONE_BILLION
    seq = 64 if tiny else SEQ_LEN
    counts = parameter_counts(model)
    yield "model", {"parameters": counts.total, "active": counts.active, "seq_len": seq}
    for batch in (2,) if tiny else BATCHES:
        figures = attempt(partial(_steps, model, batch, seq, STEPS))
        if "error" not in figures or "RESOURCE_EXHAUSTED" not in figures["error"]:
            yield "step", figures
            return
        yield f"batch {batch}", figures
    yield "step", {"error": f"out of memory with {BATCHES[-1]} sequence per step"}


def small_step(tiny: bool) -> Iterator[tuple[str, dict]]:
    """The step of the ``tiny`` preset, hundreds of small kernels: what command buffers (CUDA graphs) are for."""
    model = replace(TINY.model, compute_dtype="bfloat16")
    yield "step", attempt(partial(_steps, model, 2 if tiny else 16, 64 if tiny else 128, 2 * STEPS))


def _steps(model: ModelConfig, batch: int, seq: int, steps: int) -> dict:
    from moe_course.train.step import init_state, make_train_step

    config = TrainConfig(
        model=model, mesh=MeshConfig(1, 1, 1), devices=1, batch_size=batch, seq_len=seq, steps=10_000
    )
    mesh = make_mesh(config.mesh)
    step, state = make_train_step(config, mesh, 0), init_state(config, mesh)
    batches = [_random_batch(model, batch, seq, seed) for seed in range(4)]
    start = time.perf_counter()
    with jax.set_mesh(mesh):
        compiled = step.jitted.lower(state, batches[0]).compile()
    compile_s = time.perf_counter() - start
    losses = []
    for warm in batches[:2]:
        state, metrics = step(state, warm)
        losses.append(float(metrics["loss"]))
    seconds, facts, metrics = _without_host(step, state, batches, steps)
    losses.append(float(metrics["loss"]))
    tokens = batch * seq
    flops = sum(training_flops(model, seq).values())
    peak = published_peak(jax.devices()[0].device_kind, "bfloat16")
    rate = tflops(flops * tokens, seconds)
    return {
        "batch": batch,
        "seq_len": seq,
        "step_ms": round(1e3 * seconds, 3),
        "tokens_per_s": round(tokens / seconds),
        "model_tflops": rate,
        "mfu": None if peak is None else round(rate / peak, 4),
        "peak_tflops": peak,
        **facts,
        "compile_s": round(compile_s, 1),
        "temp_bytes": getattr(compiled.memory_analysis(), "temp_size_in_bytes", None),
        "losses": [round(loss, 4) for loss in losses],
    }


def _without_host(step: Callable, state, batches: list[dict], steps: int) -> tuple[float, dict, dict]:
    """Seconds per step, whether the host had a part in it, and the metrics of the last step.

    First under JAX's transfer guard, which refuses any copy between host and device: ``host_syncs`` is 1 if there was
    one. Then timed: a host that waits for the device takes as long to call the steps as they take to run.
    """
    facts = {"host_syncs": 0}
    with Compilations() as compilations:
        try:
            with jax.transfer_guard("disallow"):
                for i in range(steps):
                    state, metrics = step(state, batches[i % len(batches)])
        except Exception as error:
            if "isallowed" not in str(error):
                raise
            facts = {"host_syncs": 1, "host_sync": str(error).splitlines()[0][:200]}
        jax.block_until_ready(state)
        start = time.perf_counter()
        for i in range(steps):
            state, metrics = step(state, batches[i % len(batches)])
        called = time.perf_counter() - start
        jax.block_until_ready(state)
        seconds = (time.perf_counter() - start) / steps
    facts |= {"recompilations": compilations.count, "host_ms_per_step": round(1e3 * called / steps, 3)}
    return seconds, facts, metrics


def _random_batch(model: ModelConfig, batch: int, seq: int, seed: int) -> dict:
    """One document per sequence, uniform tokens, on the device."""
    shape = (batch, seq + 1)
    tokens = np.random.default_rng(seed).integers(0, model.vocab_size, shape).astype(np.int32)
    zeros = np.zeros(shape, np.int32)
    return jax.device_put({"tokens": tokens, "segments": zeros, "domain": zeros[:, 0]})
