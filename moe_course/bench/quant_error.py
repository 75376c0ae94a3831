"""``moe-course bench quant-error``: what each low-precision format costs in accuracy.

Signal to quantisation noise of each format and scale rule on a million bfloat16 values of three distributions, beside
a published table; per recipe, the error of the expert MLP's output and the direction of its gradients against
float32, and how many bytes the forward pass keeps for the backward pass. Deterministic: no timing.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from moe_course.bench.arguments import make_group_sizes
from moe_course.experts import swiglu_experts
from moe_course.grouped_gemm.quantized import QUANTIZED_ROWS
from moe_course.quant import (
    NVFP4,
    RECIPES,
    FP8DelayedScaling,
    Recipe,
    dequantize,
    quantize_mx,
    quantize_nvfp4,
)

FORMATS = {
    "E4M3_FLOOR": ("e4m3", "floor"),
    "E4M3_RCEIL": ("e4m3", "rceil"),
    "E4M3_EVEN": ("e4m3", "even"),
    "E5M2_RCEIL": ("e5m2", "rceil"),
    "MXFP4_FLOOR": ("e2m1", "floor"),
    "MXFP4_RCEIL": ("e2m1", "rceil"),
    "MXFP4_EVEN": ("e2m1", "even"),
    "NVFP4": ("nvfp4", None),
}
THEIRS = {
    "normal": dict(zip(FORMATS, (30.66, 31.48, 31.17, 25.54, 18.80, 18.76, 19.02, 20.43), strict=True)),
    "laplace": dict(
        zip(
            ("E4M3_FLOOR", "E4M3_RCEIL", "MXFP4_FLOOR", "MXFP4_RCEIL", "NVFP4"),
            (30.00, 31.50, 17.94, 17.59, 20.67),
            strict=True,
        )
    ),
    "student_t3": dict(zip(FORMATS, (29.49, 31.72, None, 25.74, 17.11, 16.64, 17.31, 21.07), strict=True)),
}
"""Decibels by torchao 0.18.0 on 4096x256 bfloat16 values, torch.manual_seed(0). None: not given."""

MEASURED: dict[str, Recipe] = {name: recipe for name, recipe in RECIPES.items() if recipe} | {
    "fp8-delayed": FP8DelayedScaling(history=16),
    "nvfp4-plain": NVFP4(hadamard=False, stochastic_rounding=False),
}


@dataclass(frozen=True)
class Options:
    """Settings of ``moe-course bench quant-error``."""

    rows: int = 2048
    d_model: int = 256
    d_ff: int = 128
    experts: int = 16
    values: int = 4096 * 256
    """Values per distribution for the signal-to-noise ratios."""
    seed: int = 0
    draws: int = 4
    """Seeds per distribution. Of Student-t's a few huge values decide the ratio: draws differ by 0.2 dB."""


def run(options: Options = Options()) -> dict:
    """``{"sqnr_db": {distribution: {format: {ours, theirs, difference}}}, "experts": {recipe: {...}}}``."""
    experts = expert_errors(options)
    for name, recipe in MEASURED.items():
        experts[name]["saved_bytes_per_row"] = round(saved_bytes_per_row(recipe, options), 1)
    return {"sqnr_db": signal_to_noise(options), "experts": experts}


def draw(kind: str, count: int, seed: int) -> np.ndarray:
    """float32 [count / 256, 256] on the bfloat16 grid."""
    rng = np.random.default_rng(seed)
    shape = (count // 256, 256)
    x = {
        "normal": lambda: rng.standard_normal(shape),
        "laplace": lambda: rng.laplace(size=shape),
        "student_t3": lambda: rng.standard_t(3, shape),
    }[kind]()
    return x.astype(jnp.bfloat16).astype(np.float32)


def signal_to_noise(options: Options) -> dict[str, dict[str, dict[str, float]]]:
    """Ratios in decibels of ours (first seed; smallest and largest of all) and of the table."""
    result = {}
    for kind, table in THEIRS.items():
        drawn = [draw(kind, options.values, options.seed + i) for i in range(options.draws)]
        result[kind] = {}
        for name, theirs in table.items():
            ours = [sqnr_db(x, _round_trip(x, *FORMATS[name])) for x in drawn]
            entry = {"ours": round(ours[0], 2), "draws": [round(min(ours), 2), round(max(ours), 2)]}
            if theirs is not None:
                entry |= {"theirs": theirs, "difference": round(ours[0] - theirs, 2)}
            result[kind][name] = entry
    return result


@partial(jax.jit, static_argnums=(1, 2))
def _round_trip(x, fmt, rounding):
    q = quantize_nvfp4(x) if fmt == "nvfp4" else quantize_mx(x, fmt=fmt, rounding=rounding)
    return dequantize(q)


def sqnr_db(x: np.ndarray, quantised: np.ndarray) -> float:
    """``10 log10(sum x^2 / sum error^2)``, in float64."""
    x, quantised = np.asarray(x, np.float64), np.asarray(quantised, np.float64)
    return float(10 * np.log10(np.sum(x**2) / np.sum((x - quantised) ** 2)))


def expert_errors(options: Options) -> dict[str, dict[str, float]]:
    """Relative error of the output (2-norm) and cosine of the gradients of rows, gate_up and down."""
    rng = np.random.default_rng(options.seed)
    d, f, e = options.d_model, options.d_ff, options.experts
    shapes = (options.rows, d), (e, d, 2 * f), (e, f, d), (options.rows, d)
    scales = 1, d**-0.5, f**-0.5, 1
    arrays = [rng.standard_normal(s, np.float32) * np.float32(k) for s, k in zip(shapes, scales, strict=True)]
    sizes = make_group_sizes("zipf", options.rows, e)
    want = _experts(None, *arrays, sizes)
    result = {}
    for name, recipe in MEASURED.items():
        state = None
        if recipe.needs_state:  # one step of warm-up: delayed scales come from it
            state = _experts(recipe, *arrays, sizes, _fresh_state(recipe, e))[-1]
        out, *gradients = _experts(recipe, *arrays, sizes, state)[:4]
        errors = {"output": round(_relative(out, want[0]), 5)}
        for gradient, reference, what in zip(gradients, want[1:4], ("rows", "gate_up", "down"), strict=True):
            errors[f"cosine_d_{what}"] = round(_cosine(gradient, reference), 5)
        result[name] = errors
    return result


def saved_bytes_per_row(recipe: Recipe, options: Options) -> float:
    """What both GEMMs keep per row under a policy that saves :data:`QUANTIZED_ROWS` alone, bfloat16 activations.

    Read from two compiled forward passes: the bytes they return for the backward pass, with that policy less without.
    A delayed recipe's state is kept either way and does not count.
    """
    d, f, e = options.d_model, options.d_ff, options.experts
    shapes = (options.rows, d), (e, d, 2 * f), (e, f, d)
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    state = _fresh_state(recipe, e) if recipe.needs_state else None
    sizes = jax.ShapeDtypeStruct((e,), jnp.int32)

    def kept(policy) -> int:
        def forward(sizes, state, *arguments):
            how = {"recipe": recipe, "key": jax.random.key(0), "backend": "ragged_dot"}

            @partial(jax.checkpoint, policy=policy)
            def experts(state, *arguments):
                return swiglu_experts(*arguments, sizes, state=state, **how)

            return jax.vjp(experts, state, *arguments)

        compiled = jax.jit(forward).lower(sizes, state, *arguments).compile()
        return compiled.memory_analysis().output_size_in_bytes

    policies = jax.checkpoint_policies
    by_name = policies.save_only_these_names(QUANTIZED_ROWS)
    return (kept(by_name) - kept(policies.nothing_saveable)) / options.rows


def _fresh_state(recipe, num_experts: int):
    return recipe.init_state(num_experts), recipe.init_state(num_experts)


@partial(jax.jit, static_argnums=0)
def _experts(recipe, rows, gate_up, down, d_out, sizes, state=None):
    def f(rows, gate_up, down, state):
        how = {"recipe": recipe, "key": jax.random.key(0) if recipe else None, "state": state}
        # The backend that compiles fastest: the operands decide the error, whatever multiplies them.
        return swiglu_experts(rows, gate_up, down, sizes, backend="ragged_dot", **how)

    out, pull_back = jax.vjp(f, rows, gate_up, down, state)
    return out, *pull_back(d_out)


def _relative(a, b) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def _cosine(a, b) -> float:
    a, b = np.ravel(np.asarray(a, np.float64)), np.ravel(np.asarray(b, np.float64))
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
