"""Parts of ``moe-course bench gpu``: the machine, grouped GEMMs (right? how fast?), FP8."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from moe_course import te
from moe_course.bench.arguments import SMALL, GroupedGemmArguments, make_group_sizes
from moe_course.bench.gpu_measure import attempt, take_turns, tflops
from moe_course.grouped_gemm import grouped_gemm, why_not
from moe_course.quant import FP8CurrentScaling
from moe_course.train.latency import published_peak

BF16 = jnp.bfloat16
MIDDLE = GroupedGemmArguments("middle", 4096, 512, 1024, 16, "zipf", tail=128)
ON_GPU = ("zipf", "one-takes-all", "empties", "off-tile")
"""Of the small cases: each is compiled for each backend."""
ALIGNED = GroupedGemmArguments("aligned", 2048, 256, 512, 8, "uniform")
SPEED = (
    GroupedGemmArguments("deepseek-v3-like", 32_768, 7168, 4096, 32, "uniform"),
    GroupedGemmArguments("mixtral-like", 16_384, 4096, 28_672, 8, "uniform"),
)
"""Gate-up products: one of 8 expert-parallel ranks of DeepSeek-V3 with 4,096 tokens each; all of Mixtral 8x7B's."""
TINY = (GroupedGemmArguments("tiny", 64, 32, 48, 4, "uniform"),)


def backends(tiny: bool) -> tuple[str, ...]:
    """What is compared; on a CPU the Pallas kernel is interpreted."""
    return ("pallas_interpret" if tiny else "pallas", "ragged_dot", "tokamax", "te")


def machine(tiny: bool) -> Iterator[tuple[str, dict]]:
    """The device, what TE can do on it, and the rate of one dense GEMM."""
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    kind = device.device_kind
    yield (
        "device",
        {
            "kind": kind,
            "platform": device.platform,
            "platform_version": device.client.platform_version,
            "compute_capability": str(getattr(device, "compute_capability", "")),
            "memory_bytes": stats.get("bytes_limit"),
            "published_bfloat16_tflops": published_peak(kind, "bfloat16"),
        },
    )
    found = te.examine()
    general = te.why_not(None, found)
    reasons = {op: "runs" if not (reason := te.why_not(op, found)) else reason for op in te.OPS}
    yield "transformer_engine", {"reason": general} if general else reasons

    def dense() -> dict:
        n = 128 if tiny else 8192
        x = jnp.ones((n, n), BF16)
        product = jax.jit(jnp.matmul)
        seconds = take_turns({"gemm": lambda: product(x, x)})["gemm"]
        return {"size": n, "tflops": tflops(2 * n**3, seconds)}

    yield "dense_bfloat16_gemm", attempt(dense)


# ---------------------------------------------------------------- right?


def correctness(tiny: bool) -> Iterator[tuple[str, dict]]:
    """Every backend against a float64 loop over experts: result and both gradients, bf16 operands."""
    cases = SMALL[:2] if tiny else (*(case for case in SMALL if case.name in ON_GPU), ALIGNED, MIDDLE)
    oracles = {case.name: _oracle(case) for case in cases}
    for backend in backends(tiny):
        if reason := why_not(backend):
            yield backend, {"refused": reason}
            continue
        yield backend, {c.name: attempt(partial(_errors, c, backend, oracles[c.name])) for c in cases}


def _problem(case: GroupedGemmArguments) -> tuple:
    """bf16 rows, kernels and d_out, and the sizes."""
    rows, kernels, sizes = case.make()
    d_out = np.random.default_rng(1).standard_normal((len(rows), case.d_ff), np.float32)
    return *(jnp.asarray(a, BF16) for a in (rows, kernels, d_out)), jnp.asarray(sizes)


def _oracle(case: GroupedGemmArguments) -> list[np.ndarray]:
    """Result, gradient of the rows, gradient of the kernels; rows past the groups are 0."""
    rows, kernels, d_out, sizes = (np.asarray(a, np.float64) for a in _problem(case))
    out, d_rows, d_kernels = np.zeros_like(d_out), np.zeros_like(rows), np.zeros_like(kernels)
    end = 0
    for expert, size in enumerate(sizes.astype(int)):
        mine = slice(end, end + size)
        out[mine] = rows[mine] @ kernels[expert]
        d_rows[mine] = d_out[mine] @ kernels[expert].T
        d_kernels[expert] = rows[mine].T @ d_out[mine]
        end += size
    return [out, d_rows, d_kernels]


def _errors(case: GroupedGemmArguments, backend: str, oracle: list[np.ndarray]) -> dict:
    """The worst max|error| / max|oracle|, and what explains it: operands are exact, sums run in float32 (4 eps
    sqrt(longest sum)), the result is rounded once to bf16 (half an eps, times 4)."""
    rows, kernels, d_out, sizes = _problem(case)
    live = (jnp.arange(len(rows)) < sizes.sum())[:, None]

    @jax.jit
    def program(rows, kernels, d_out, sizes):
        product, pull = jax.vjp(lambda r, k: grouped_gemm(r, k, sizes, backend=backend), rows, kernels)
        return jnp.where(live, product, 0), *pull(jnp.where(live, d_out, 0).astype(BF16))

    have = [np.asarray(a, np.float64) for a in program(rows, kernels, d_out, sizes)]
    errors = {
        what: float(np.max(np.abs(a - b), initial=0) / max(np.max(np.abs(b), initial=0), 1e-300))
        for what, a, b in zip(("fwd", "d_rows", "d_kernels"), have, oracle, strict=True)
    }
    longest = max(case.d_model, case.d_ff, int(sizes.max()))
    limit = 2 * float(jnp.finfo(BF16).eps) + 4 * float(jnp.finfo(jnp.float32).eps) * longest**0.5
    finite = all(np.isfinite(a).all() for a in have)
    return {**errors, "limit": limit, "ok": finite and max(errors.values()) <= limit}


# ---------------------------------------------------------------- how fast?


def grouped_gemm_speed(tiny: bool) -> Iterator[tuple[str, dict]]:
    """TFLOP/s of every backend beside a dense GEMM of the same FLOPs; equal and Zipf sizes, one compilation."""
    for shape in TINY if tiny else SPEED:
        rows, kernels = _random(shape)
        dense = _programs(lambda rows, kernel: rows @ kernel, rows, kernels[0])
        programs = {
            backend: _programs(partial(_by_backend, backend=backend), rows, kernels)
            for backend in backends(tiny)
        }
        for sizes in ("uniform", "zipf"):
            case = replace(shape, sizes=sizes)
            group_sizes = jnp.asarray(make_group_sizes(sizes, shape.rows, shape.experts))
            figures = {}
            for backend in backends(tiny):
                figures[backend] = attempt(
                    partial(_speed, case, backend, programs[backend], dense, group_sizes)
                )
                yield f"{shape.name} {sizes}", figures


def _random(shape: GroupedGemmArguments) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    rows = jax.random.normal(keys[0], (shape.rows, shape.d_model), BF16)
    kernels = jax.random.normal(keys[1], (shape.experts, shape.d_model, shape.d_ff), BF16)
    return rows, kernels * jnp.asarray(shape.d_model**-0.5, BF16)


def _by_backend(rows, kernels, sizes, *, backend: str):
    return grouped_gemm(rows, kernels, sizes, backend=backend)


def _programs(product: Callable, rows, kernels) -> dict[str, Callable]:
    """Forward; forward and backward. They take the sizes, so that equal and Zipf ones share a compilation."""

    def loss(rows, kernels, *sizes):
        return product(rows, kernels, *sizes).astype(jnp.float32).mean()

    forward, both = jax.jit(product), jax.jit(jax.grad(loss, (0, 1)))
    return {"fwd": partial(forward, rows, kernels), "fwdbwd": partial(both, rows, kernels)}


def _speed(case: GroupedGemmArguments, backend: str, programs: dict, dense: dict, sizes) -> dict:
    if reason := why_not(backend):
        return {"refused": reason}
    flops = 2 * case.rows * case.d_model * case.d_ff
    figures = {}
    for what, products in (("fwd", 1), ("fwdbwd", 3)):
        pair = {"ours": partial(programs[what], sizes), "dense": dense[what]}
        seconds = take_turns(pair)
        figures |= {
            f"{what}_tflops": tflops(products * flops, seconds["ours"]),
            f"dense_{what}_tflops": tflops(products * flops, seconds["dense"]),
            f"{what}_vs_dense": round(seconds["dense"] / seconds["ours"], 3),
        }
    return figures


# ---------------------------------------------------------------- FP8


def fp8_speed(tiny: bool) -> Iterator[tuple[str, dict]]:
    """Per-tensor FP8: XLA's own dense GEMM on scaled codes, TE's, and grouped GEMMs; against bf16, time and error."""
    shape = replace((TINY if tiny else SPEED)[0], rows=64 if tiny else 8192, experts=4)
    rows, kernels = _random(shape)
    sizes = jnp.asarray(shape.group_sizes())
    flops = 2 * shape.rows * shape.d_model * shape.d_ff
    recipe = FP8CurrentScaling()
    exact = jax.jit(jnp.matmul)
    pair = {"bf16": lambda: exact(rows, kernels[0])}
    yield "dense by XLA", attempt(lambda: _against(pair, jax.jit(_scaled_gemm), (rows, kernels[0]), flops))
    te_dense = jax.jit(partial(te.dense, recipe=recipe))
    yield "dense by TE", attempt(lambda: _against(pair, te_dense, (rows, kernels[0]), flops))
    for name, product in {
        "grouped, emulated": partial(grouped_gemm, backend="tiled" if tiny else "pallas", recipe=recipe),
        "grouped by TE, sizes copied to the host": partial(
            te.grouped_gemm, recipe=recipe, sizes_on_device=False
        ),
    }.items():
        plain = jax.jit(partial(grouped_gemm, backend="tiled" if tiny else "pallas"))
        pair = {"bf16": partial(plain, rows, kernels, sizes)}
        yield name, attempt(partial(_against, pair, jax.jit(product), (rows, kernels, sizes), flops))


def _scaled_gemm(rows, kernel):
    """Both operands in e4m3 with one scale each; the scales multiply the product, which XLA gives to cuBLASLt."""
    largest = float(jnp.finfo(jnp.float8_e4m3fn).max)

    def quantised(x):
        scale = jnp.maximum(jnp.abs(x).max().astype(jnp.float32), 1e-30) / largest
        return (x.astype(jnp.float32) / scale).astype(jnp.float8_e4m3fn), scale

    (a, a_scale), (b, b_scale) = quantised(rows), quantised(kernel)
    product = jax.lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return (product * (a_scale * b_scale)).astype(BF16)


def _against(bf16: dict[str, Callable], product: Callable, arguments: tuple, flops: float) -> dict:
    """TFLOP/s, bf16's time over this one, and the relative error in norm that FP8 costs."""
    seconds = take_turns({**bf16, "fp8": lambda: product(*arguments)})
    have, want = (np.asarray(f(), np.float64) for f in (lambda: product(*arguments), bf16["bf16"]))
    return {
        "tflops": tflops(flops, seconds["fp8"]),
        "bf16_time_over_this": round(seconds["bf16"] / seconds["fp8"], 3),
        "relative_error": float(np.linalg.norm(have - want) / np.linalg.norm(want)),
    }
