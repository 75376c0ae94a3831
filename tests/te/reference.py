"""CPU lowerings of TE's primitives, for tests: TE's own Python (layouts, custom derivatives, plumbing) then runs here.

Sums are plain XLA's, so numbers prove that our arguments reach the right operand in the right orientation, and not
what TE's kernels compute. What TE leaves unwritten is NaN. MXFP8 scales are kept in rows and columns, not in TE's
tiles: both ends are here.
"""

import importlib

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir

from moe_course.quant import quantize_mxfp8

F32 = jnp.float32


def register() -> None:
    """Give TE's grouped GEMM, grouped quantisation, router and balance loss a lowering for the CPU."""
    base = importlib.import_module("transformer_engine.jax.cpp_extensions.base")
    ours = {
        "GroupedGemmPrimitive": grouped_gemm,
        "GroupedQuantizePrimitive": grouped_quantize,
        "FusedTopkWithScoreFunctionFwdPrimitive": topk_forward,
        "FusedTopkWithScoreFunctionBwdPrimitive": topk_backward,
        "FusedMoEAuxLossFwdPrimitive": balance_forward,
        "FusedMoEAuxLossBwdPrimitive": balance_backward,
    }
    for name, primitive in base._primitive_registry.items():
        if name in ours:
            rule = mlir.lower_fun(ours[name], multiple_results=primitive.multiple_results)
            mlir.register_lowering(primitive.inner_primitive, rule, platform="cpu")
        else:
            primitive.set_enabled(False)  # TE's own plain JAX, where it has it


def _results(name: str, arguments, **static):
    """Zeros of the shapes that TE expects of a primitive."""
    primitive = importlib.import_module("transformer_engine.jax.cpp_extensions.base")._primitive_registry[
        name
    ]
    avals = primitive.abstract(*(jax.core.ShapedArray(a.shape, a.dtype) for a in arguments), **static)
    return [jnp.zeros(a.shape, a.dtype) for a in avals]


# ---------------------------------------------------------------- grouped GEMM


def grouped_gemm(*arguments, **static):
    lhs, lhs_scale, rhs, rhs_scale, _, lhs_sizes, _, rhs_sizes = arguments[:8]
    lhs_shape = static["lhs_left_size"], static["lhs_right_size"]
    rhs_shape = static["rhs_left_size"], static["rhs_right_size"]
    lhs = _value(lhs.reshape(lhs_shape), lhs_scale, along_columns=not static["lhs_is_trans"])
    rhs = _value(rhs.reshape(rhs_shape), rhs_scale, along_columns=static["rhs_is_trans"])
    out, *workspaces = _results("GroupedGemmPrimitive", arguments, **static)
    if rhs_sizes.size:
        value = _wgrad(lhs, rhs, rhs_sizes)
    else:
        experts = lhs_sizes.size
        kernels = rhs.reshape(experts, rhs_shape[0] // experts, rhs_shape[1])
        kernels = kernels.mT if static["rhs_is_trans"] else kernels
        live = _live(lhs_sizes, len(lhs))
        value = lax.ragged_dot(jnp.where(live, lhs, 0.0), kernels, lhs_sizes)
        value = jnp.where(live, value, jnp.nan)  # TE does not write there
    return [value.reshape(out.shape).astype(out.dtype), *workspaces]


def _wgrad(lhs, rhs, sizes):
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    row = jnp.arange(len(lhs), dtype=jnp.int32)
    inside = (row[None] >= (ends - sizes)[:, None]) & (row[None] < ends[:, None])  # [E, M]
    live = inside.any(0)[:, None]
    lhs, rhs = jnp.where(live, lhs, 0.0), jnp.where(live, rhs, 0.0)
    return jnp.einsum("em,mk,mn->ekn", inside.astype(F32), lhs, rhs)


def _live(sizes, num_rows: int):
    return (jnp.arange(num_rows, dtype=jnp.int32) < sizes.sum(dtype=jnp.int32))[:, None]


def _value(data, scale, *, along_columns: bool):
    """What an operand is worth: MXFP8 blocks run along the axis that the product contracts."""
    if not jnp.issubdtype(data.dtype, jnp.floating) or jnp.dtype(data.dtype).itemsize > 1:
        return data.astype(F32)
    rows, columns = data.shape
    blocks = (rows, columns // 32) if along_columns else (rows // 32, columns)
    exponent = lax.bitcast_convert_type(scale, jnp.uint8).reshape(-1)[: blocks[0] * blocks[1]].reshape(blocks)
    factor = jnp.exp2(exponent.astype(F32) - 127.0)
    return data.astype(F32) * jnp.repeat(factor, 32, axis=1 if along_columns else 0)


def grouped_quantize(x, scale, group_sizes, **static):
    results = _results("GroupedQuantizePrimitive", (x, scale, group_sizes), **static)
    flat = x.reshape(-1, x.shape[-1])
    if x.ndim == 2 and group_sizes.size:  # rows past the groups are not read
        flat = jnp.where(_live(group_sizes, len(flat)), flat, jnp.zeros_like(flat))
    layout = static["q_layout"]
    for axis, wanted in ((1, layout.has_rowwise), (0, layout.has_colwise)):
        if wanted:
            at = 1 - axis
            codes = quantize_mxfp8(flat, axis=axis, fmt=_name(static["out_dtype"]))
            results[at] = codes.data.reshape(results[at].shape).astype(results[at].dtype)
            bits = lax.bitcast_convert_type(codes.scale, jnp.uint8).reshape(-1)
            room = results[2 + at]
            padded = jnp.pad(bits, (0, room.size - bits.size)).reshape(room.shape)
            results[2 + at] = lax.bitcast_convert_type(padded, room.dtype)
    return results


def _name(dtype) -> str:
    return {jnp.dtype(jnp.float8_e4m3fn): "e4m3", jnp.dtype(jnp.float8_e5m2): "e5m2"}[jnp.dtype(dtype)]


# ---------------------------------------------------------------- router and balance loss

SIGMOID, SOFTMAX = 0, 1


def topk_forward(logits, bias, **static):
    from tests.te import fake_te

    sigmoid = static["score_function"] == SIGMOID
    probs, chosen = fake_te.fused_topk_with_score_function(
        logits,
        static["topk"],
        use_pre_softmax=bool(static["use_pre_softmax"]),
        num_groups=static["num_groups"],
        group_topk=static["group_topk"],
        scaling_factor=static["scaling_factor"],
        score_function="sigmoid" if sigmoid else "softmax",
        expert_bias=bias if bias.size else None,
    )
    if sigmoid:
        saved = jax.nn.sigmoid(logits)
    elif static["use_pre_softmax"]:
        saved = jax.nn.softmax(logits, axis=-1)
    else:
        saved = jnp.where(chosen, probs / static["scaling_factor"], -jnp.inf)
    return probs, chosen, saved


def topk_backward(chosen, saved, grad, **static):
    """From what the forward pass saved, as the kernel does: scores, not logits."""
    grad = jnp.where(chosen, grad * static["scaling_factor"], 0.0)
    if static["score_function"] == SIGMOID:
        if static["topk"] > 1:
            total = jnp.where(chosen, saved, 0.0).sum(-1, keepdims=True) + 1e-20
            inner = (grad * saved).sum(-1, keepdims=True) / total
            grad = jnp.where(chosen, (grad - inner) / total, 0.0)
        return grad * saved * (1 - saved)
    shares = saved if static["use_pre_softmax"] else jnp.where(chosen, saved, 0.0)
    return shares * (grad - (grad * shares).sum(-1, keepdims=True))


def balance_forward(probs, load, **static):
    rows, experts = probs.shape
    factor = experts * static["coeff"] / (static["topk"] * rows * rows)
    loss = factor * (probs.sum(0) * load.astype(F32)).sum()
    return loss, jnp.array([factor, 0.0], F32)


def balance_backward(constant, load, grad, **static):
    row = constant[0] * grad.reshape(()) * load.astype(F32)
    return jnp.broadcast_to(row[None], (static["num_tokens"], load.size))
