"""Chapter 01, why MoE: counts in whole numbers, and a MoE layer that computes everything."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from moe_course.lessons.compare import close, items, same, show
from moe_course.lessons.exercise import Broken, holds


def every_expert(x, ids, weights, gate_up, down):
    """A MoE layer without any gather: all experts for all tokens, and a table of weights [T, E]."""
    experts = len(gate_up)
    table = (jax.nn.one_hot(ids, experts, dtype=jnp.float32) * weights[..., None]).sum(axis=1)
    gate, up = jnp.split(jnp.einsum("td,edf->etf", x, gate_up), 2, axis=-1)
    answers = jnp.einsum("etf,efd->etd", jax.nn.silu(gate) * up, down)
    return jnp.einsum("etd,te->td", answers, table)


def _number(value, expected: float, case: str, what: str, suspects: dict, why: str = "") -> None:
    """A count, exact to 1e-9. Any kind of number will do."""
    try:
        yours = float(value)
    except (TypeError, ValueError):
        raise Broken(case, show(value), f"a number, {expected:,.6g}", f"{what} is a number.") from None
    if math.isclose(yours, expected, rel_tol=1e-9, abs_tol=1e-9):
        return
    line = next((line for line, wrong in suspects.items() if math.isclose(yours, wrong, rel_tol=1e-6)), why)
    raise Broken(f"{case}: {what}", f"{yours:,.6g}", f"{expected:,.6g}", line)


# ---------------------------------------------------------------- 01.1 one feed-forward

WIDTHS = ((4, 8), (64, 256), (4096, 14_336), (7168, 2048), (5, 3))
"""(d_model, d_ff)."""


def _ffn(fn, which: int, d: int, f: int) -> None:
    case = f"d_model {d}, d_ff {f}"
    pair = items(fn(d, f), 2, case=case, names="parameters, flops")
    if which == 0:
        suspects = {
            "SwiGLU has three matrices: gate, up and down.": 2 * d * f,
            "There are no biases.": 3 * d * f + 2 * f + d,
        }
        _number(pair[0], 3 * d * f, case, "parameters", suspects)
    else:
        suspects = {
            "A multiply and an add are two FLOPs.": 3 * d * f,
            "SwiGLU has three matrices: gate, up and down.": 4 * d * f,
            "That is a training step, forward and backward. Here only forward.": 18 * d * f,
        }
        _number(pair[1], 6 * d * f, case, "FLOPs per token", suspects)


@holds("parameters: gate, up and down, no biases")
def ffn_parameters(fn) -> int:
    for d, f in WIDTHS:
        _ffn(fn, 0, d, f)
    return len(WIDTHS)


@holds("forward FLOPs per token: two for each parameter")
def ffn_flops(fn) -> int:
    for d, f in WIDTHS:
        _ffn(fn, 1, d, f)
    return len(WIDTHS)


# ---------------------------------------------------------------- 01.2 one MoE layer

LAYERS = (
    (4096, 14_336, 8, 2, 0, "Mixtral 8x7B"),
    (7168, 2048, 256, 8, 1, "DeepSeek-V3"),
    (2048, 1408, 64, 6, 2, "DeepSeek-V2-Lite"),
    (10, 7, 5, 5, 3, "a toy with K = E"),
    (16, 4, 12, 1, 0, "a toy with K = 1"),
)


def _layer(fn, which: int, d, f, e, k, shared, name) -> None:
    case = f"{name}: d_model {d}, d_ff {f}, {e} experts, {k} picks, {shared} shared"
    pair = items(fn(d, f, e, k, shared), 2, case=case, names="total, active")
    expert, router = 3 * d * f, d * e
    total, active = (e + shared) * expert + router, (k + shared) * expert + router
    if which == 0:
        suspects = {
            "The router is missing: one d_model vector for each expert.": total - router,
            "Shared experts exist besides the routed ones; they are missing here.": total - shared * expert,
            "The shared experts are not among the routed ones: add them.": e * expert + router,
            "An expert has three matrices.": (e + shared) * 2 * d * f + router,
            "The router scores the routed experts only.": total + d * shared,
        }
        _number(pair[0], total, case, "total", suspects)
    else:
        suspects = {
            "The router is missing: it scores every token.": active - router,
            "Every token scores all experts, not only those it picks: the router is d_model x E.": (
                active - router + d * k
            ),
            "Every token uses the shared experts besides its picks.": active - shared * expert,
            "The shared expert is not one of the picks.": k * expert + router,
        }
        _number(pair[1], active, case, "active", suspects)


@holds("total: what must be stored")
def layer_total(fn) -> int:
    for layer in LAYERS:
        _layer(fn, 0, *layer)
    return len(LAYERS)


@holds("active: what one token uses")
def layer_active(fn) -> int:
    for layer in LAYERS:
        _layer(fn, 1, *layer)
    return len(LAYERS)


# ---------------------------------------------------------------- 01.3 a training step

MODELS = (
    (36_624_597_000, 4096, 61, 128, 192, 128, "DeepSeek-V3's shape"),
    (12_748_000_000, 8192, 32, 32, 128, 128, "Mixtral's shape"),
    (1_000, 16, 3, 2, 5, 7, "a toy"),
    (1_000, 16, 3, 2, 7, 5, "a toy, widths swapped"),
    (0, 10, 2, 3, 4, 4, "attention alone"),
    (12_345, 0, 2, 3, 4, 4, "no attention"),
)


@holds("six per matmul parameter, and causal attention")
def step_flops(fn) -> int:
    for n, s, layers, heads, qk, v, name in MODELS:
        core = layers * s * heads * (qk + v)
        right = 6 * n + 3 * core
        suspects = {
            "Forward alone is a third of a step: backward costs twice as much.": right / 3,
            "Backward costs two forwards, so a step is three.": right * 2 / 3,
            "Attention is missing: its work grows with seq_len.": 6 * n,
            "Causal attention needs half of the seq x seq scores.": 6 * n + 6 * core,
            "Attention happens in every layer.": 6 * n + 3 * core / layers,
            "Attention happens in every head.": 6 * n + 3 * core / heads,
            "Attention has two products: scores, of qk_dim, and values, of v_dim.": (
                6 * n + 3 * layers * s * heads * qk
            ),
            "Attention's backward is missing.": 6 * n + core,
            "A multiply and an add are two FLOPs.": 3 * n + 1.5 * core,
            "This counts the whole sequence. Per token, please.": right * s,
        }
        case = f"{name}: {n} parameters, seq_len {s}, {layers} layers, {heads} heads of {qk} and {v}"
        _number(fn(n, s, layers, heads, qk, v), right, case, "FLOPs per token", suspects)
    return len(MODELS)


# ---------------------------------------------------------------- 01.5 the naive layer


def swiglu(x, gate_up, down) -> np.ndarray:
    gate, up = np.split(np.asarray(x, np.float64) @ gate_up.astype(np.float64), 2, axis=-1)
    return (gate / (1 + np.exp(-gate)) * up) @ down.astype(np.float64)


def naive(x, ids, weights, gate_up, down) -> np.ndarray:
    """One token and one pick at a time."""
    out = np.zeros(x.shape)
    for t, k in np.ndindex(ids.shape):
        if 0 <= ids[t, k] < len(gate_up):
            out[t] += float(weights[t, k]) * swiglu(x[t], gate_up[ids[t, k]], down[ids[t, k]])
    return out


def layer_arrays(tokens, experts, k, seed=0, d=6, f=5):
    """(x, ids, weights, gate_up, down), random; the weights are positive and differ."""
    rng = np.random.default_rng([seed, tokens, experts, k])
    ids = np.argsort(rng.normal(size=(tokens, experts)), axis=-1)[:, :k].astype(np.int32)
    shapes = ((tokens, d), (experts, d, 2 * f), (experts, f, d))
    x, gate_up, down = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    return x, ids, rng.uniform(0.2, 2.0, (tokens, k)).astype(np.float32), gate_up, down


def _moe(fn, args, case, why="") -> None:
    x, ids, weights, gate_up, down = args
    experts, right = len(gate_up), naive(*args)
    swapped = np.concatenate(np.split(gate_up, 2, axis=-1)[::-1], axis=-1)
    on_input = np.zeros(x.shape)
    for k in range(ids.shape[1]):
        on_input += naive(x * weights[:, k : k + 1], ids[:, k : k + 1], 1 + 0 * weights[:, :1], gate_up, down)
    suspects = {
        "The weight multiplies the expert's answer, not its input: the expert is not linear.": on_input,
        "The combine weights are missing.": naive(x, ids, 1 + 0 * weights, gate_up, down),
        "gate_up holds the gate first, then up; silu is for the gate.": naive(x, ids, weights, swapped, down),
        "Only the first pick of each token counts here.": naive(x, ids[:, :1], weights[:, :1], gate_up, down),
        "The weights are used as they come, not divided by their sum.": naive(
            x, ids, weights / weights.sum(-1, keepdims=True), gate_up, down
        ),
        "A pick with id E was computed by the last expert. It adds nothing.": naive(
            x, np.minimum(ids, experts - 1), weights, gate_up, down
        ),
        "There is no residual connection here.": right + x,
    }
    close(fn(*args), right, case=case, axes=("token",), why=why, terms=256, suspects=suspects)


@holds("the weighted sum of the picked experts' answers")
def random_layers(fn) -> int:
    cases = ((9, 4, 2), (5, 3, 3), (8, 5, 1))
    for tokens, experts, k in cases:
        _moe(fn, layer_arrays(tokens, experts, k), f"{tokens} tokens, {experts} experts, {k} picks")
    return len(cases)


@holds("all tokens on one expert, the others idle")
def one_expert(fn) -> int:
    args = list(layer_arrays(9, 4, 1, seed=1))
    args[1] = np.full((9, 1), 2, np.int32)
    _moe(fn, args, "9 tokens, all on expert 2 of 4")
    return 1


@holds("padding (id E) adds nothing")
def padded_layer(fn) -> int:
    args = list(layer_arrays(9, 4, 2, seed=2))
    args[1][::3] = 4
    _moe(fn, args, "tokens 0, 3 and 6 of 9 are padding, 4 experts", "Their rows of the result are 0.")
    _moe(fn, layer_arrays(0, 4, 2, seed=3), "no tokens")
    return 2


@holds("it works under jax.jit")
def layer_under_jit(fn) -> int:
    compiled = jax.jit(lambda *args: fn(*args))
    why = "Under jit no shape may depend on which tokens picked an expert: compute all, then weigh."
    _moe(compiled, layer_arrays(9, 4, 2, seed=4), "compiled, 9 tokens, 4 experts, 2 picks", why)
    return 1


@holds("the gradient reaches the combine weights, and no idle expert")
def layer_gradients(fn) -> int:
    x, ids, weights, gate_up, down = layer_arrays(9, 4, 2, seed=5)
    ids[ids == 1] = 3
    ids[(ids[:, 0] == 3) & (ids[:, 1] == 3), 1] = 0  # expert 1 is idle
    wanted = np.random.default_rng(6).normal(size=x.shape)

    def loss(weights, down):
        y = fn(x, jnp.asarray(ids), weights, jnp.asarray(gate_up), down)
        return (y * jnp.asarray(wanted, jnp.float32)).sum()

    to_weights, to_down = jax.grad(loss, argnums=(0, 1))(jnp.asarray(weights), jnp.asarray(down))
    right = np.zeros(weights.shape)
    for t, k in np.ndindex(ids.shape):
        right[t, k] = swiglu(x[t], gate_up[ids[t, k]], down[ids[t, k]]) @ wanted[t]
    case = "gradient of a weighted sum of the result, expert 1 of 4 idle"
    why = "The router learns through the combine weights: do not stop their gradient."
    close(to_weights, right, case=case, axes=("token", "pick"), why=why, terms=1024)
    idle = np.abs(np.asarray(to_down)).max(axis=(1, 2)) > 0
    same(idle, np.array([True, False, True, True]), case=case + ": which experts get any?", axes=("expert",))
    return 2


# ---------------------------------------------------------------- 01.4 the compute wall

MACHINES = (
    (8, 2, 1000e12, 3.3e12, 2),
    (256, 8, 1000e12, 3.3e12, 2),
    (256, 8, 2000e12, 3.3e12, 1),
    (1, 1, 1000e12, 3.3e12, 2),
    (6, 5, 7e9, 3e9, 4),
)
"""(experts, picks, FLOP/s, bytes/s, bytes per weight)."""


@holds("tokens at which the arithmetic takes as long as reading the weights")
def fill(fn) -> int:
    for e, k, peak, bandwidth, size in MACHINES:
        right = e / k * peak * size / (2 * bandwidth)
        suspects = {
            "A multiply and an add are two FLOPs: each weight is used for two per row.": right * 2,
            "A token is a row of K experts of E, so an expert sees T K / E rows.": right * k / e,
            "The picks count: an expert sees T K / E rows, not T / E.": right * k,
            "E and K are the wrong way round.": right * (k / e) ** 2,
            "A weight has bytes_per_weight bytes to be read.": right / size,
            "Peak and bandwidth are the wrong way round.": e / k * bandwidth * size / (2 * peak),
            "A wider weight takes longer to read, so it needs more rows, not fewer.": right / size**2,
        }
        case = f"{e} experts, {k} picks, {peak:.3g} FLOP/s, {bandwidth:.3g} bytes/s, {size} bytes per weight"
        _number(fn(e, k, peak, bandwidth, size), right, case, "tokens", suspects)
    return len(MACHINES)
