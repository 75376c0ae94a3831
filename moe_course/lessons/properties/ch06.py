"""Chapter 06, the MoE layer: what right answers do. Oracles are float64 NumPy, one expert and token at a time."""

import jax
import jax.numpy as jnp
import numpy as np

from moe_course.lessons.compare import close
from moe_course.lessons.exercise import Broken, holds
from moe_course.lessons.learner import compiled

M, D, F, E = 20, 6, 5, 4
SIZES = ((5, 0, 9, 2), (3, 8, 1, 8), (0, 20, 0, 0), (0, 0, 0, 0), (0, 0, 0, 19))


def silu(x):
    return x / (1 + np.exp(-x))


def d_silu(x):
    s = 1 / (1 + np.exp(-x))
    return s * (1 + x * (1 - s))


def swiglu(hidden) -> np.ndarray:
    gate, up = np.split(np.asarray(hidden, np.float64), 2, axis=-1)
    return silu(gate) * up


def expert(x, gate_up, down) -> np.ndarray:
    return swiglu(np.asarray(x, np.float64) @ gate_up) @ down


def mlp_gradients(x, gate_up, down, d_y):
    """(d_x, d_gate_up, d_down) of ``swiglu(x @ gate_up) @ down`` in float64."""
    x, gate_up, down, d_y = (np.asarray(a, np.float64) for a in (x, gate_up, down, d_y))
    gate, up = np.split(x @ gate_up, 2, axis=-1)
    d_act = d_y @ down.T
    d_hidden = np.concatenate([d_act * up * d_silu(gate), d_act * silu(gate)], axis=-1)
    return d_hidden @ gate_up.T, x.T @ d_hidden, (silu(gate) * up).T @ d_y


def weights_of(seed, experts=E, d_model=D, d_ff=F):
    rng = np.random.default_rng([60, seed])
    gate_up = rng.normal(size=(experts, d_model, 2 * d_ff)).astype(np.float32)
    return gate_up, rng.normal(size=(experts, d_ff, d_model)).astype(np.float32)


def normal(seed, *shape) -> np.ndarray:
    return np.random.default_rng([61, seed]).normal(size=shape).astype(np.float32)


def on_device(fn, *args, case):
    """``fn(*args)`` under jit: the sizes are not known when the program is built."""
    why = "Under jit sizes and ids are data: no NumPy, no int(), no shapes that depend on them."
    return compiled(jax.jit(fn), *args, case=case + ", under jit", why=why)


# ---------------------------------------------------------------- 06.1 the activation


def _activation(fn, hidden, case, why="") -> None:
    gate, up = np.split(hidden.astype(np.float64), 2, axis=-1)
    strided = silu(hidden.astype(np.float64)[:, 0::2]) * hidden.astype(np.float64)[:, 1::2]
    suspects = {
        "Gate and up are swapped: the first half goes through silu.": gate * silu(up),
        "Both halves went through silu.": silu(gate) * silu(up),
        "The halves are added. The gate multiplies.": silu(gate) + up,
        "This takes every other column. The gate is the first half, up the second.": strided,
        "This is a sigmoid gate. silu(x) is x times sigmoid(x).": up / (1 + np.exp(-gate)),
    }
    result = fn(hidden)
    close(
        result,
        silu(gate) * up,
        case=case,
        axes=("row", "column"),
        dtype=hidden.dtype,
        why=why,
        suspects=suspects,
        terms=4,
    )


@holds("silu of the first half times the second")
def gate_first(fn) -> int:
    for i, shape in enumerate(((M, 2 * F), (1, 2), (0, 4))):
        _activation(fn, normal(i, *shape) * 2, f"hidden float32 {list(shape)}")
    return 3


@holds("bfloat16 comes back as bfloat16")
def keeps_dtype(fn) -> int:
    _activation(fn, normal(3, M, 2 * F).astype(jnp.bfloat16), f"hidden bfloat16 [{M}, {2 * F}]")
    return 1


@holds("computed in float32: rounded once, at the end")
def rounded_once(fn) -> int:
    hidden = (normal(4, 400, 8) * 3).astype(jnp.bfloat16)
    exact = swiglu(hidden.astype(np.float64))
    once = jnp.asarray(exact, jnp.float32).astype(jnp.bfloat16)
    off = float((np.asarray(fn(hidden)).astype(np.float64) != np.asarray(once).astype(np.float64)).mean())
    if off > 0.02:
        why = "silu in bfloat16, then a product in bfloat16: two roundings. Go to float32 first, and back at the end."
        raise Broken(
            "hidden bfloat16 [400, 8]", f"{100 * off:.0f} % of the numbers one step off", "under 2 %", why
        )
    return 1


@holds("large hidden values give no NaN, nor does their gradient")
def large_hidden(fn) -> int:
    hidden = np.array([[200.0, -200.0, 3.0, -2.0], [-1e4, 1e4, 1.0, 2.0]], np.float32)
    case = "hidden of plus and minus 200 and 10,000"
    expected = np.array([[600.0, 0.0], [0.0, 2e4]])
    close(fn(hidden), expected, case=case, axes=("row", "column"), terms=4)
    gradient = jax.grad(lambda h: fn(h).sum())(jnp.asarray(hidden))
    if not bool(jnp.isfinite(gradient).all()):
        raise Broken(
            case,
            "a gradient of NaN or inf",
            "a finite one",
            "exp overflows: use jax.nn.silu or jax.nn.sigmoid.",
        )
    return 2


# ---------------------------------------------------------------- 06.2 the experts


def gpu_like(tail):
    """A grouped product that leaves ``tail`` past the groups, in its result and in the gradient of its rows."""

    def live(rows, sizes):
        return (jnp.arange(rows.shape[0]) < sizes.sum())[:, None]

    @jax.custom_vjp
    def gemm(rows, kernels, sizes):
        out = jax.lax.ragged_dot(jnp.where(live(rows, sizes), rows, 0), kernels, sizes)
        return jnp.where(live(rows, sizes), out, tail)

    def backward(kept, d_out):
        rows, kernels, sizes = kept
        own = live(rows, sizes)
        _, pull = jax.vjp(lambda x, k: jax.lax.ragged_dot(x, k, sizes), jnp.where(own, rows, 0), kernels)
        d_rows, d_kernels = pull(jnp.where(own, d_out, 0))
        return jnp.where(own, d_rows, tail), d_kernels, None

    gemm.defvjp(lambda *args: (gemm(*args), args), backward)
    # A plain function: arguments of the first case are copied, and a custom_vjp cannot be.
    return lambda rows, kernels, group_sizes: gemm(rows, kernels, group_sizes)


def experts_of(rows, gate_up, down, sizes) -> np.ndarray:
    out, begin = np.zeros(rows.shape), 0
    for e, size in enumerate(sizes):
        out[begin : begin + size] = expert(rows[begin : begin + size], gate_up[e], down[e])
        begin += size
    return out


def _rows(sizes, seed, tail):
    rows = normal(seed, M, D)
    rows[sum(sizes) :] = tail
    return rows


def _experts(result, rows, gate_up, down, sizes, case, why="") -> None:
    rows = np.where(np.isfinite(rows), rows, 0)
    expected = experts_of(rows, gate_up, down, sizes)
    swapped = np.concatenate(np.split(gate_up, 2, axis=-1)[::-1], axis=-1)
    suspects = {
        "Gate and up are swapped: gate_up holds the gate first.": experts_of(rows, swapped, down, sizes),
        "The activation is missing: the first half was passed on.": sum_of_groups(
            rows, gate_up[..., :F], down, sizes
        ),
    }
    suspects = suspects if sum(sizes) else None
    close(result, expected, case=case, axes=("row", "feature"), terms=D * F, why=why, suspects=suspects)


def sum_of_groups(rows, first, second, sizes):
    out, begin = np.zeros(rows.shape), 0
    for e, size in enumerate(sizes):
        out[begin : begin + size] = rows[begin : begin + size].astype(np.float64) @ first[e] @ second[e]
        begin += size
    return out


@holds("each row goes through the MLP of its own expert")
def own_expert(fn) -> int:
    (gate_up, down), sizes = weights_of(1), SIZES[0]
    rows, case = _rows(sizes, 10, 0.0), f"sizes {list(sizes)} of {M} rows"
    result = fn(rows, gate_up, down, np.array(sizes, np.int32), gpu_like(0.0))
    _experts(result, rows, gate_up, down, sizes, case)
    return 1


@holds("empty groups, full buffers, sizes on the device; past the groups 0, whatever gemm leaves there")
def expert_sizes(fn) -> int:
    for tail in (0.0, np.nan, np.inf):
        run = jax.jit(lambda *args, tail=tail: fn(*args, gpu_like(tail)))
        for i, sizes in enumerate(SIZES):
            gate_up, down = weights_of(20 + i)
            rows, case = _rows(sizes, 30 + i, tail), f"sizes {list(sizes)} of {M} rows, the others {tail:g}"
            result = on_device(run, rows, gate_up, down, np.array(sizes, np.int32), case=case)
            why = "What a grouped product leaves in the tail is anything: select with jnp.where, 0 * inf is NaN."
            _experts(result, rows, gate_up, down, sizes, case, why)
    return 3 * len(SIZES)


@holds("gradients reach rows and both weights, and nothing past the groups does")
def expert_gradients(fn) -> int:
    def loss(rows, gate_up, down, sizes, out, tail):
        return (fn(rows, gate_up, down, sizes, gpu_like(tail)) * out).sum()

    for tail in (np.nan, np.inf):
        run = jax.jit(jax.grad(lambda *args, tail=tail: loss(*args, tail), argnums=(0, 1, 2)))
        for i, sizes in enumerate(SIZES):
            gate_up, down = weights_of(40 + i)
            rows, out = _rows(sizes, 50 + i, tail), normal(60 + i, M, D)
            case = f"sizes {list(sizes)} of {M} rows, the others {tail:g}, gradient"
            found = on_device(run, rows, gate_up, down, np.array(sizes, np.int32), out, case=case)
            right = [np.zeros(a.shape) for a in (rows, gate_up, down)]
            begin = 0
            for e, size in enumerate(sizes):
                own = slice(begin, begin + size)
                begin += size
                right[0][own], right[1][e], right[2][e] = mlp_gradients(
                    rows[own], gate_up[e], down[e], out[own]
                )
            why = "The two products and the activation each have a derivative: stop none of them."
            terms = M * D * F
            close(
                found[0][:begin],
                right[0][:begin],
                case=f"{case} of rows",
                axes=("row", "feature"),
                terms=terms,
                why=why,
            )
            for name, yours, expected in zip(("gate_up", "down"), found[1:], right[1:], strict=True):
                close(
                    yours,
                    expected,
                    case=f"{case} of {name}",
                    axes=("expert", "in", "out"),
                    terms=terms,
                    why=why,
                )
    return 2 * len(SIZES)


# ---------------------------------------------------------------- 06.3 the layer


def moe_of(x, ids, weights, gate_up, down) -> np.ndarray:
    out = np.zeros(x.shape)
    for t, k in np.argwhere((ids >= 0) & (ids < len(gate_up))):
        e = ids[t, k]
        out[t] += float(weights[t, k]) * expert(x[t : t + 1], gate_up[e], down[e])[0]
    return out


def routing_of(tokens, picks, experts, seed, none=False):
    rng = np.random.default_rng([62, seed, tokens])
    keys = rng.normal(size=(tokens, experts)) + rng.normal(size=experts)
    ids = np.argsort(keys, axis=-1)[:, :picks].astype(np.int32)
    if none:
        ids[1::3] = experts
    return ids, rng.normal(size=(tokens, picks)).astype(np.float32)


LAYERS = ((9, 2, 4), (5, 4, 4), (4, 1, 8))


def _layer(result, x, ids, weights, gate_up, down, case, why="") -> None:
    expected = moe_of(x, ids, weights, gate_up, down)
    early = np.zeros(x.shape)
    for t, k in np.argwhere(ids < len(gate_up)):
        early[t] += expert(weights[t, k] * x[t : t + 1], gate_up[ids[t, k]], down[ids[t, k]])[0]
    suspects = {
        "The weights are missing.": moe_of(x, ids, np.ones_like(weights), gate_up, down),
        "The weights multiplied the experts' inputs. They belong on the outputs: an expert is not linear.": early,
        "Only the first pick of each token came back.": moe_of(x, ids[:, :1], weights, gate_up, down),
    }
    suspects = suspects if x.size and ids.shape[1] > 1 else None
    close(result, expected, case=case, axes=("token", "feature"), terms=D * F * 4, why=why, suspects=suspects)


@holds("each token gets the weighted sum of its experts' answers")
def weighted_answers(fn) -> int:
    for i, (tokens, picks, experts) in enumerate(LAYERS):
        (ids, weights), x, banks = (
            routing_of(tokens, picks, experts, i),
            normal(70 + i, tokens, D),
            weights_of(i, experts),
        )
        case = f"x [{tokens}, {D}], {picks} picks, {experts} experts"
        _layer(on_device(fn, x, ids, weights, *banks, case=case), x, ids, weights, *banks, case)
    return len(LAYERS)


@holds("tokens without an expert get 0")
def masked_tokens(fn) -> int:
    for seed in (80, 81):
        (ids, weights), x, banks = routing_of(9, 2, 4, seed, none=True), normal(seed, 9, D), weights_of(seed)
        case = "x [9, 6], 2 picks, 4 experts, every third token with the id E"
        why = "The id E is no expert. Clipped to E - 1, the last expert works for padding."
        _layer(on_device(fn, x, ids, weights, *banks, case=case), x, ids, weights, *banks, case, why)
    return 2


@holds("one expert takes everything: nothing is dropped")
def one_takes_all(fn) -> int:
    ids, weights = np.full((9, 2), 1, np.int32), routing_of(9, 2, 4, 90)[1]
    ids[:, 1] = 3
    x, banks = normal(90, 9, D), weights_of(90)
    case = "x [9, 6], all tokens to experts 1 and 3 of 4"
    _layer(on_device(fn, x, ids, weights, *banks, case=case), x, ids, weights, *banks, case)
    return 1


@holds("gradients reach x, the combine weights and both banks of weights")
def layer_gradients(fn) -> int:
    (ids, weights), x, (gate_up, down) = routing_of(9, 2, 4, 91, none=True), normal(91, 9, D), weights_of(91)
    out = normal(92, 9, D)

    def loss(x, weights, gate_up, down, ids, out):
        return (fn(x, ids, weights, gate_up, down) * out).sum()

    case = "x [9, 6], 2 picks, 4 experts, gradient"
    args = x, weights, gate_up, down, ids, out
    found = on_device(jax.grad(loss, argnums=(0, 1, 2, 3)), *args, case=case)
    right = [np.zeros(a.shape) for a in (x, weights, gate_up, down)]
    for t, k in np.argwhere(ids < 4):
        e = ids[t, k]
        d_y = weights[t, k] * out[t : t + 1]
        d_x, d_in, d_out = mlp_gradients(x[t : t + 1], gate_up[e], down[e], d_y)
        right[0][t] += d_x[0]
        right[1][t, k] = expert(x[t : t + 1], gate_up[e], down[e])[0] @ out[t].astype(np.float64)
        right[2][e] += d_in
        right[3][e] += d_out
    why = "The router learns through the combine weights, the experts through the rows: stop neither."
    for name, yours, expected in zip(("x", "weights", "gate_up", "down"), found, right, strict=True):
        close(yours, expected, case=f"{case} of {name}", axes=("index", "index"), terms=400, why=why)
    return 1
