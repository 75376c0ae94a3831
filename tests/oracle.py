"""The oracle: MoE arithmetic as loops over tokens and experts, in float64 NumPy.

Nothing here sorts rows, pads, tiles or batches, so nothing here shares a fault with the code it judges.
Experts are SwiGLU: ``gate_up`` [E, D, 2F] holds the gate in its first F columns and the up projection in
the last F; ``down`` is [E, F, D]. ``config`` is anything with the fields of ``RouterConfig``.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

# ---------------------------------------------------------------- how close is close


def relative_error(actual, reference) -> float:
    """max|actual - reference| / max|reference|; inf for any NaN, and for any error on a reference of 0."""
    actual, reference = np.asarray(actual, np.float64), np.asarray(reference, np.float64)
    assert actual.shape == reference.shape, f"shapes differ: {actual.shape} and {reference.shape}"
    if actual.size == 0:
        return 0.0
    error = np.max(np.abs(actual - reference))
    if error == 0.0:
        return 0.0
    scale = np.max(np.abs(reference))
    return float(error / scale) if np.isfinite(error) and scale > 0 else math.inf


def tolerance(dtype, reduction_length: int = 1) -> float:
    """Largest ``relative_error`` that rounding alone explains: 4 eps sqrt(n) for sums of n terms.

    Rounding errors of a sum add like a random walk, hence the root; the 4 covers the tail over many outputs.
    """
    return 4.0 * float(jnp.finfo(dtype).eps) * math.sqrt(max(reduction_length, 1))


def assert_close(actual, reference, dtype, reduction_length: int = 1, what: str = "result") -> None:
    """Fail unless ``relative_error`` is within ``tolerance``, and say by how much."""
    error, limit = relative_error(actual, reference), tolerance(dtype, reduction_length)
    assert error <= limit, f"{what}: max|error|/max|reference| = {error:.3g}, rounding explains {limit:.3g}"


def path_terms(config, seq: int, modules: int = 0) -> int:
    """Terms of all the sums on a language model's longest way from an embedding to a logit, one after the other.

    ``config`` is a ``ModelConfig``, ``modules`` the multi-token-prediction modules on the way.
    """
    c = config
    feed_forward = 2 * c.d_model + max(c.d_ff_dense, c.num_shared_experts * c.d_ff)  # norm, gate and up, down
    keys = (
        2 * c.d_model + 2 * c.kv_lora_rank + c.qk_nope_head_dim + c.qk_rope_head_dim
    )  # norms, products, scores
    layer = keys + seq + c.num_heads * c.v_head_dim + feed_forward
    return (c.num_layers + modules) * layer + modules * 3 * c.d_model + 2 * c.d_model


# ---------------------------------------------------------------- routing


class Route(NamedTuple):
    expert_ids: np.ndarray  # [T, K], E for no expert
    weights: np.ndarray  # [T, K]
    scores: np.ndarray  # [T, E], 0 for masked tokens


def softmax(x):
    z = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return z / np.sum(z, axis=-1, keepdims=True)


def sigmoid(x):
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))


def best(values, count, allowed) -> list[int]:
    """The ``count`` largest allowed entries, largest first, ties to the lower index."""
    return sorted(allowed, key=lambda i: (-values[i], i))[:count]


def route(logits, config, bias=None, mask=None, replay_ids=None) -> Route:
    """One token at a time. ``logits`` [T, E]."""
    logits = np.asarray(logits, np.float64)
    num_tokens, num_experts = logits.shape
    bias = np.zeros(num_experts) if bias is None else np.asarray(bias, np.float64)
    ids = np.full((num_tokens, config.top_k), num_experts, np.int64)
    weights = np.zeros((num_tokens, config.top_k))
    scores = np.zeros((num_tokens, num_experts))
    for t in range(num_tokens):
        if mask is not None and not mask[t]:
            continue
        scores[t] = softmax(logits[t]) if config.score_fn == "softmax" else sigmoid(logits[t])
        chosen = choose(scores[t] + bias, config) if replay_ids is None else list(replay_ids[t])
        picked = np.array([scores[t, e] for e in chosen])
        if config.normalize and config.top_k > 1:
            picked = picked / picked.sum()
        ids[t], weights[t] = chosen, picked * config.scaling_factor
    return Route(ids, weights, scores)


def choose(keys, config) -> list[int]:
    """The experts of one token from its (biased) scores ``keys`` [E], group by group."""
    size = len(keys) // config.num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(config.num_groups)]
    group_top = getattr(config, "group_score_top", None) or max(1, config.top_k // config.top_groups)
    group_scores = [sum(keys[e] for e in best(keys, group_top, group)) for group in groups]
    kept = best(group_scores, config.top_groups, range(config.num_groups))
    return best(keys, config.top_k, [e for g in kept for e in groups[g]])


# ---------------------------------------------------------------- balance


def expert_load(expert_ids, num_experts, mask=None) -> np.ndarray:
    load = np.zeros(num_experts, np.int64)
    for t, row in enumerate(np.asarray(expert_ids)):
        for e in row:
            if (mask is None or mask[t]) and 0 <= e < num_experts:
                load[e] += 1
    return load


def load_balancing_loss(scores, expert_ids, mask=None) -> float:
    """E sum_e f_e P_e over the tokens that ``mask`` keeps: f from assignments, P the mean probability."""
    scores = np.asarray(scores, np.float64)
    keep = [t for t in range(len(scores)) if mask is None or mask[t]]
    if not keep:
        return 0.0
    num_experts = scores.shape[-1]
    load = expert_load(np.asarray(expert_ids)[keep], num_experts)
    mean = sum(scores[t] / scores[t].sum() for t in keep) / len(keep)
    return float(num_experts * np.sum(load / load.sum() * mean))


def router_z_loss(logits, mask=None) -> float:
    logits = np.asarray(logits, np.float64)
    keep = [t for t in range(len(logits)) if mask is None or mask[t]]
    return float(np.mean([np.log(np.sum(np.exp(logits[t]))) ** 2 for t in keep])) if keep else 0.0


def update_expert_bias(bias, load, rate, recentre=False) -> np.ndarray:
    load = [int(n) for n in load]
    total, count = sum(load), len(load)  # Python integers: never overflow, never round
    delta = np.array([np.sign(total - count * n) for n in load], np.float64)
    return np.asarray(bias, np.float64) + rate * (delta - delta.mean() if recentre else delta)


# ---------------------------------------------------------------- experts


def silu(x):
    return x * sigmoid(x)


def silu_grad(x):
    s = sigmoid(x)
    return s * (1 + x * (1 - s))


def swiglu(x, gate_up, down):
    """One expert on one row or many: ``x`` [..., D], ``gate_up`` [D, 2F], ``down`` [F, D]."""
    gate, up = np.split(x @ gate_up, 2, axis=-1)
    return (silu(gate) * up) @ down


def swiglu_vjp(x, gate_up, down, dout):
    """Gradients (dx, dgate_up, ddown) of :func:`swiglu` for rows ``x`` [N, D] and ``dout`` [N, D]."""
    gate, up = np.split(x @ gate_up, 2, axis=-1)
    hidden, dhidden = silu(gate) * up, dout @ down.T
    dgate_up_out = np.concatenate([dhidden * up * silu_grad(gate), dhidden * silu(gate)], axis=-1)
    return dgate_up_out @ gate_up.T, x.T @ dgate_up_out, hidden.T @ dout


def moe(x, gate_up, down, expert_ids, weights) -> np.ndarray:
    """The whole layer: token by token, pick by pick. Ids outside [0, E) add nothing. Returns [T, D]."""
    x, gate_up, down = (np.asarray(a, np.float64) for a in (x, gate_up, down))
    out = np.zeros((len(x), down.shape[-1]))
    for t in range(len(x)):
        for e, w in zip(np.asarray(expert_ids)[t], np.asarray(weights, np.float64)[t], strict=True):
            if 0 <= e < len(gate_up):
                out[t] += w * swiglu(x[t], gate_up[e], down[e])
    return out


def moe_vjp(x, gate_up, down, expert_ids, weights, dout):
    """Gradients (dx, dgate_up, ddown, dweights) of :func:`moe`."""
    x, gate_up, down, weights, dout = (np.asarray(a, np.float64) for a in (x, gate_up, down, weights, dout))
    dx, dgate_up, ddown, dweights = (np.zeros_like(a) for a in (x, gate_up, down, weights))
    for t in range(len(x)):
        for k, e in enumerate(np.asarray(expert_ids)[t]):
            if 0 <= e < len(gate_up):
                dweights[t, k] = swiglu(x[t], gate_up[e], down[e]) @ dout[t]
                one = swiglu_vjp(x[t : t + 1], gate_up[e], down[e], weights[t, k] * dout[t : t + 1])
                dx[t] += one[0][0]
                dgate_up[e] += one[1]
                ddown[e] += one[2]
    return dx, dgate_up, ddown, dweights


# ---------------------------------------------------------------- grouped GEMM


def group_slices(group_sizes) -> list[slice]:
    ends = np.cumsum([int(n) for n in group_sizes])
    return [slice(int(end - n), int(end)) for end, n in zip(ends, group_sizes, strict=True)]


def grouped_gemm(rows, kernels, group_sizes) -> np.ndarray:
    """``rows`` [M, D] times ``kernels`` [E, D, F], expert by expert. Rows past the last group are 0 here."""
    rows, kernels = np.asarray(rows, np.float64), np.asarray(kernels, np.float64)
    out = np.zeros((len(rows), kernels.shape[-1]))
    for e, group in enumerate(group_slices(group_sizes)):
        out[group] = rows[group] @ kernels[e]
    return out


def grouped_gemm_vjp(rows, kernels, group_sizes, dout):
    """(drows, dkernels): dgrad and wgrad. Tail rows and empty groups get exact zeros."""
    rows, kernels, dout = (np.asarray(a, np.float64) for a in (rows, kernels, dout))
    drows, dkernels = np.zeros_like(rows), np.zeros_like(kernels)
    for e, group in enumerate(group_slices(group_sizes)):
        drows[group] = dout[group] @ kernels[e].T
        dkernels[e] = rows[group].T @ dout[group]
    return drows, dkernels


def swiglu_experts(rows, gate_up, down, group_sizes, row_weights=None) -> np.ndarray:
    """SwiGLU over grouped rows, times each row's weight. Rows past the last group are 0 here."""
    rows, gate_up, down = (np.asarray(a, np.float64) for a in (rows, gate_up, down))
    weights = np.ones(len(rows)) if row_weights is None else np.asarray(row_weights, np.float64)
    out = np.zeros((len(rows), down.shape[-1]))
    for e, group in enumerate(group_slices(group_sizes)):
        out[group] = weights[group, None] * swiglu(rows[group], gate_up[e], down[e])
    return out


def swiglu_experts_vjp(rows, gate_up, down, group_sizes, dout, row_weights=None):
    """(drows, dgate_up, ddown[, drow_weights]) of :func:`swiglu_experts`."""
    rows, gate_up, down, dout = (np.asarray(a, np.float64) for a in (rows, gate_up, down, dout))
    weights = np.ones(len(rows)) if row_weights is None else np.asarray(row_weights, np.float64)
    drows, dgate_up, ddown, dweights = (np.zeros_like(a) for a in (rows, gate_up, down, weights))
    for e, group in enumerate(group_slices(group_sizes)):
        expert = rows[group], gate_up[e], down[e]
        drows[group], dgate_up[e], ddown[e] = swiglu_vjp(*expert, weights[group, None] * dout[group])
        dweights[group] = (dout[group] * swiglu(*expert)).sum(-1)
    return (drows, dgate_up, ddown) if row_weights is None else (drows, dgate_up, ddown, dweights)
