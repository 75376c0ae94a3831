"""Wrong answers to the exercises of chapter 01, and right ones unlike the solution."""

import jax
import jax.numpy as jnp

from moe_course.bench.kill_rate import alternative, mutant

# ---------------------------------------------------------------- 01.1 one feed-forward


@alternative("01.1", "matrix by matrix")
def _(d_model, d_ff):
    shapes = [(d_model, d_ff), (d_model, d_ff), (d_ff, d_model)]
    return sum(a * b for a, b in shapes), sum(2 * a * b for a, b in shapes)


@mutant("01.1", "two matrices")
def _(d_model, d_ff):
    return 2 * d_model * d_ff, 4 * d_model * d_ff


@mutant("01.1", "one FLOP per multiply-add")
def _(d_model, d_ff):
    return 3 * d_model * d_ff, 3 * d_model * d_ff


@mutant("01.1", "a training step")
def _(d_model, d_ff):
    return 3 * d_model * d_ff, 18 * d_model * d_ff


@mutant("01.1", "biases")
def _(d_model, d_ff):
    return 3 * d_model * d_ff + 2 * d_ff + d_model, 6 * d_model * d_ff


@mutant("01.1", "the other order")
def _(d_model, d_ff):
    return 6 * d_model * d_ff, 3 * d_model * d_ff


@mutant("01.1", "d_ff is four times d_model")
def _(d_model, d_ff):
    return 12 * d_model**2, 24 * d_model**2


@mutant("01.1", "the two matrices that a token meets first")
def _(d_model, d_ff):
    return 3 * d_model * d_ff, 4 * d_model * d_ff


@mutant("01.1", "parameters alone")
def _(d_model, d_ff):
    return 3 * d_model * d_ff


@mutant("01.1", "counted in 32-bit integers")
def _(d_model, d_ff):
    n = jnp.int32(3) * jnp.int32(d_model) * jnp.int32(d_ff)
    return n, jnp.int32(2**7) * n // jnp.int32(2**6)


@mutant("01.1", "square matrices")
def _(d_model, d_ff):
    return 3 * d_model * d_model, 6 * d_model * d_model


# ---------------------------------------------------------------- 01.2 total and active


@alternative("01.2", "active is total less the idle experts")
def _(d_model, d_ff, num_experts, top_k, num_shared):
    total = d_model * (num_experts + 3 * d_ff * (num_experts + num_shared))
    return total, total - (num_experts - top_k) * 3 * d_model * d_ff


@mutant("01.2", "no router")
def _(d_model, d_ff, num_experts, top_k, num_shared):
    expert = 3 * d_model * d_ff
    return (num_experts + num_shared) * expert, (top_k + num_shared) * expert


@mutant("01.2", "no router among the active")
def _(d_model, d_ff, num_experts, top_k, num_shared):
    expert, router = 3 * d_model * d_ff, d_model * num_experts
    return (num_experts + num_shared) * expert + router, (top_k + num_shared) * expert


@mutant("01.2", "a router of the picks only")
def _(d_model, d_ff, num_experts, top_k, num_shared):
    expert = 3 * d_model * d_ff
    total = (num_experts + num_shared) * expert + d_model * num_experts
    return total, (top_k + num_shared) * expert + d_model * top_k


@mutant("01.2", "shared experts are among the routed")
def _(d_model, d_ff, num_experts, top_k, num_shared):
    expert, router = 3 * d_model * d_ff, d_model * num_experts
    return num_experts * expert + router, (top_k + num_shared) * expert + router


@mutant("01.2", "shared experts are among the picks")
def _(d_model, d_ff, num_experts, top_k, num_shared):
    expert, router = 3 * d_model * d_ff, d_model * num_experts
    return (num_experts + num_shared) * expert + router, top_k * expert + router


@mutant("01.2", "no shared experts")
def _(d_model, d_ff, num_experts, top_k, num_shared):
    expert, router = 3 * d_model * d_ff, d_model * num_experts
    return num_experts * expert + router, top_k * expert + router


@mutant("01.2", "one shared expert whatever is asked")
def _(d_model, d_ff, num_experts, top_k, num_shared):
    expert, router = 3 * d_model * d_ff, d_model * num_experts
    return (num_experts + 1) * expert + router, (top_k + 1) * expert + router


@mutant("01.2", "two matrices")
def _(d_model, d_ff, num_experts, top_k, num_shared):
    expert, router = 2 * d_model * d_ff, d_model * num_experts
    return (num_experts + num_shared) * expert + router, (top_k + num_shared) * expert + router


@mutant("01.2", "the router scores shared experts too")
def _(d_model, d_ff, num_experts, top_k, num_shared):
    expert, router = 3 * d_model * d_ff, d_model * (num_experts + num_shared)
    return (num_experts + num_shared) * expert + router, (top_k + num_shared) * expert + router


@mutant("01.2", "the other order")
def _(d_model, d_ff, num_experts, top_k, num_shared):
    expert, router = 3 * d_model * d_ff, d_model * num_experts
    return (top_k + num_shared) * expert + router, (num_experts + num_shared) * expert + router


@mutant("01.2", "active is a share of the total")
def _(d_model, d_ff, num_experts, top_k, num_shared):
    total = (num_experts + num_shared) * 3 * d_model * d_ff + d_model * num_experts
    return total, total * top_k // num_experts


# ---------------------------------------------------------------- 01.3 a training step


@alternative("01.3", "six a parameter, six a score")
def _(matmul_parameters, seq_len, num_layers, num_heads, qk_dim, v_dim):
    per_layer = 6 * num_heads * (qk_dim + v_dim) * (seq_len / 2)
    return 6 * matmul_parameters + num_layers * per_layer


@mutant("01.3", "forward only")
def _(n, s, layers, heads, qk, v):
    return 2 * n + layers * heads * s * (qk + v)


@mutant("01.3", "backward as cheap as forward")
def _(n, s, layers, heads, qk, v):
    return 4 * n + 2 * layers * heads * s * (qk + v)


@mutant("01.3", "no attention")
def _(n, s, layers, heads, qk, v):
    return 6 * n


@mutant("01.3", "not causal")
def _(n, s, layers, heads, qk, v):
    return 6 * n + 6 * layers * heads * s * (qk + v)


@mutant("01.3", "a quarter of the square")
def _(n, s, layers, heads, qk, v):
    return 6 * n + 1.5 * layers * heads * s * (qk + v)


@mutant("01.3", "one layer")
def _(n, s, layers, heads, qk, v):
    return 6 * n + 3 * heads * s * (qk + v)


@mutant("01.3", "one head")
def _(n, s, layers, heads, qk, v):
    return 6 * n + 3 * layers * s * (qk + v)


@mutant("01.3", "scores only")
def _(n, s, layers, heads, qk, v):
    return 6 * n + 3 * layers * heads * s * qk


@mutant("01.3", "values as wide as keys")
def _(n, s, layers, heads, qk, v):
    return 6 * n + 6 * layers * heads * s * qk


@mutant("01.3", "keys as wide as values")
def _(n, s, layers, heads, qk, v):
    return 6 * n + 6 * layers * heads * s * v


@mutant("01.3", "attention without its backward")
def _(n, s, layers, heads, qk, v):
    return 6 * n + layers * heads * s * (qk + v)


@mutant("01.3", "one FLOP per multiply-add")
def _(n, s, layers, heads, qk, v):
    return 3 * n + 1.5 * layers * heads * s * (qk + v)


@mutant("01.3", "the whole sequence")
def _(n, s, layers, heads, qk, v):
    return s * (6 * n + 3 * layers * heads * s * (qk + v))


@mutant("01.3", "with the recomputed forward")
def _(n, s, layers, heads, qk, v):
    return 8 * n + 4 * layers * heads * s * (qk + v)


@mutant("01.3", "a square of seq_len per token")
def _(n, s, layers, heads, qk, v):
    return 6 * n + 3 * layers * heads * s * s * (qk + v)


# ---------------------------------------------------------------- 01.4 the compute wall


@alternative("01.4", "the ridge point of the roofline")
def _(num_experts, top_k, flops_per_second, bytes_per_second, bytes_per_weight):
    ridge = flops_per_second / bytes_per_second  # FLOPs per byte
    return ridge / (2 / bytes_per_weight) / (top_k / num_experts)


@mutant("01.4", "one FLOP per multiply-add")
def _(e, k, flops, bandwidth, size):
    return e / k * flops * size / bandwidth


@mutant("01.4", "ignores the experts")
def _(e, k, flops, bandwidth, size):
    return flops * size / (2 * bandwidth)


@mutant("01.4", "ignores the picks")
def _(e, k, flops, bandwidth, size):
    return e * flops * size / (2 * bandwidth)


@mutant("01.4", "K over E")
def _(e, k, flops, bandwidth, size):
    return k / e * flops * size / (2 * bandwidth)


@mutant("01.4", "ignores the size of a weight")
def _(e, k, flops, bandwidth, size):
    return e / k * flops / (2 * bandwidth)


@mutant("01.4", "divides by the size of a weight")
def _(e, k, flops, bandwidth, size):
    return e / k * flops / (2 * bandwidth * size)


@mutant("01.4", "two-byte weights whatever is asked")
def _(e, k, flops, bandwidth, size):
    return e / k * flops / bandwidth


@mutant("01.4", "bandwidth over peak")
def _(e, k, flops, bandwidth, size):
    return e / k * bandwidth * size / (2 * flops)


@mutant("01.4", "reads and writes each weight")
def _(e, k, flops, bandwidth, size):
    return e / k * flops * 2 * size / (2 * bandwidth)


@mutant("01.4", "whole experts per token")
def _(e, k, flops, bandwidth, size):
    return (e // k) * flops * size / (2 * bandwidth)


@mutant("01.4", "six FLOPs, as in a training step")
def _(e, k, flops, bandwidth, size):
    return e / k * flops * size / (6 * bandwidth)


# ---------------------------------------------------------------- 01.5 the naive layer


@alternative("01.5", "all experts in one einsum, a table of weights")
def _(x, ids, weights, gate_up, down):
    table = (jax.nn.one_hot(ids, len(gate_up)) * weights[..., None]).sum(axis=1)
    gate, up = jnp.split(jnp.einsum("td,edf->etf", x, gate_up), 2, axis=-1)
    return jnp.einsum("etf,efd,te->td", gate * jax.nn.sigmoid(gate) * up, down, table)


@alternative("01.5", "gathers the weights of each pick")
def _(x, ids, weights, gate_up, down):
    real = ids < len(gate_up)
    chosen = jnp.where(real, ids, 0)
    gate, up = jnp.split(jnp.einsum("td,tkdf->tkf", x, gate_up[chosen]), 2, axis=-1)
    answers = jnp.einsum("tkf,tkfd->tkd", jax.nn.silu(gate) * up, down[chosen])
    return (answers * jnp.where(real, weights, 0.0)[..., None]).sum(axis=1)


def each(x, ids, weights, gate_up, down, activate=jax.nn.silu, scale_input=False):
    y = jnp.zeros_like(x)
    for e in range(len(gate_up)):
        weight = jnp.where(ids == e, weights, 0.0).sum(axis=-1, keepdims=True)
        inside = x * weight if scale_input else x
        gate, up = jnp.split(inside @ gate_up[e], 2, axis=-1)
        answer = (activate(gate) * up) @ down[e]
        y = y + (answer if scale_input else weight * answer)
    return y


@mutant("01.5", "weight on the input")
def _(x, ids, weights, gate_up, down):
    return each(x, ids, weights, gate_up, down, scale_input=True)


@mutant("01.5", "no weights")
def _(x, ids, weights, gate_up, down):
    return each(x, ids, jnp.ones_like(weights), gate_up, down)


@mutant("01.5", "weights normalised")
def _(x, ids, weights, gate_up, down):
    return each(x, ids, weights / weights.sum(-1, keepdims=True), gate_up, down)


@mutant("01.5", "softmax of the weights")
def _(x, ids, weights, gate_up, down):
    return each(x, ids, jax.nn.softmax(weights, axis=-1), gate_up, down)


@mutant("01.5", "up first")
def _(x, ids, weights, gate_up, down):
    half = gate_up.shape[-1] // 2
    return each(x, ids, weights, jnp.concatenate([gate_up[..., half:], gate_up[..., :half]], -1), down)


@mutant("01.5", "gate and up interleaved")
def _(x, ids, weights, gate_up, down):
    return each(x, ids, weights, jnp.concatenate([gate_up[..., ::2], gate_up[..., 1::2]], -1), down)


@mutant("01.5", "GELU")
def _(x, ids, weights, gate_up, down):
    return each(x, ids, weights, gate_up, down, activate=jax.nn.gelu)


@mutant("01.5", "sigmoid of the gate")
def _(x, ids, weights, gate_up, down):
    return each(x, ids, weights, gate_up, down, activate=jax.nn.sigmoid)


@mutant("01.5", "ReLU")
def _(x, ids, weights, gate_up, down):
    return each(x, ids, weights, gate_up, down, activate=jax.nn.relu)


@mutant("01.5", "first pick only")
def _(x, ids, weights, gate_up, down):
    return each(x, ids[:, :1], weights[:, :1], gate_up, down)


@mutant("01.5", "mean over the picks")
def _(x, ids, weights, gate_up, down):
    return each(x, ids, weights, gate_up, down) / ids.shape[-1]


@mutant("01.5", "padding goes to the last expert")
def _(x, ids, weights, gate_up, down):
    return each(x, jnp.minimum(ids, len(gate_up) - 1), weights, gate_up, down)


@mutant("01.5", "padding goes to expert 0")
def _(x, ids, weights, gate_up, down):
    return each(x, ids % len(gate_up), weights, gate_up, down)


@mutant("01.5", "every expert for every token")
def _(x, ids, weights, gate_up, down):
    return each(x, ids, weights, gate_up, down) * 0 + sum(
        each(x, jnp.full_like(ids[:, :1], e), weights[:, :1], gate_up, down) for e in range(len(gate_up))
    )


@mutant("01.5", "with a residual connection")
def _(x, ids, weights, gate_up, down):
    return x + each(x, ids, weights, gate_up, down)


@mutant("01.5", "weights in the order of the experts")
def _(x, ids, weights, gate_up, down):
    return each(x, jnp.sort(ids, axis=-1), weights, gate_up, down)


@mutant("01.5", "the last expert is left out")
def _(x, ids, weights, gate_up, down):
    return each(x, ids, weights, gate_up[:-1], down[:-1])


@mutant("01.5", "a later expert overwrites an earlier one")
def _(x, ids, weights, gate_up, down):
    y = jnp.zeros_like(x)
    for e in range(len(gate_up)):
        hit = ids == e
        weight = jnp.where(hit, weights, 0.0).sum(axis=-1, keepdims=True)
        gate, up = jnp.split(x @ gate_up[e], 2, axis=-1)
        answer = weight * ((jax.nn.silu(gate) * up) @ down[e])
        y = jnp.where(hit.any(axis=-1, keepdims=True), answer, y)
    return y


@mutant("01.5", "gradient of the weights stopped")
def _(x, ids, weights, gate_up, down):
    return each(x, ids, jax.lax.stop_gradient(weights), gate_up, down)


@mutant("01.5", "takes the tokens out, which jit cannot")
def _(x, ids, weights, gate_up, down):
    y = jnp.zeros_like(x)
    for e in range(len(gate_up)):
        t, k = jnp.nonzero(ids == e)
        gate, up = jnp.split(x[t] @ gate_up[e], 2, axis=-1)
        y = y.at[t].add(weights[t, k][:, None] * ((jax.nn.silu(gate) * up) @ down[e]))
    return y


@mutant("01.5", "one expert for the whole batch")
def _(x, ids, weights, gate_up, down):
    return each(x, jnp.broadcast_to(ids[:1], ids.shape), weights, gate_up, down)
