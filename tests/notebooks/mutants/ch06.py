"""Wrong answers to chapter 06 that a person could give, and right ones unlike the solution."""

import jax
import jax.numpy as jnp
import numpy as np

from moe_course.bench.kill_rate import alternative, mutant
from moe_course.experts import swiglu_experts
from moe_course.grouped_gemm import grouped_gemm
from moe_course.grouping import group_by_expert, permute, unpermute

# ---------------------------------------------------------------- 06.1 SwiGLU


@alternative("06.1", "sigmoid spelled out")
def _(hidden):
    width = hidden.shape[-1] // 2
    gate, up = hidden[:, :width].astype(jnp.float32), hidden[:, width:].astype(jnp.float32)
    return (gate * jax.nn.sigmoid(gate) * up).astype(hidden.dtype)


@alternative("06.1", "a reshape in place of a split")
def _(hidden):
    halves = hidden.astype(jnp.float32).reshape(hidden.shape[0], 2, hidden.shape[1] // 2)
    return (jax.nn.swish(halves[:, 0]) * halves[:, 1]).astype(hidden.dtype)


def make_activation(
    act=jax.nn.silu, combine=lambda g, u: g * u, split=lambda h: jnp.split(h, 2, axis=-1), swap=False
):
    def activation(hidden):
        gate, up = split(hidden.astype(jnp.float32))
        gate, up = (up, gate) if swap else (gate, up)
        return combine(act(gate), up).astype(hidden.dtype)

    return activation


mutant("06.1", "gate and up swapped")(make_activation(swap=True))
mutant("06.1", "gelu")(make_activation(act=jax.nn.gelu))
mutant("06.1", "relu")(make_activation(act=jax.nn.relu))
mutant("06.1", "sigmoid: GLU without the Swi")(make_activation(act=jax.nn.sigmoid))
mutant("06.1", "tanh gate")(make_activation(act=lambda g: g * jnp.tanh(g)))
mutant("06.1", "softplus")(make_activation(act=jax.nn.softplus))
mutant("06.1", "x times sigmoid of 1.702 x")(make_activation(act=lambda g: g * jax.nn.sigmoid(1.702 * g)))
mutant("06.1", "both through silu")(make_activation(combine=lambda g, u: g * jax.nn.silu(u)))
mutant("06.1", "added")(make_activation(combine=lambda g, u: g + u))
mutant("06.1", "no activation")(make_activation(act=lambda g: g))
mutant("06.1", "every other column")(make_activation(split=lambda h: (h[:, 0::2], h[:, 1::2])))
mutant("06.1", "up plus one, as gpt-oss has it")(make_activation(combine=lambda g, u: g * (u + 1)))
mutant("06.1", "clipped at 7, as gpt-oss has it")(
    make_activation(split=lambda h: jnp.split(jnp.clip(h, -7, 7), 2, axis=-1))
)
mutant("06.1", "exp overflows")(make_activation(act=lambda g: g * jnp.exp(g) / (1 + jnp.exp(g))))
mutant("06.1", "exp overflows in the gradient")(make_activation(act=lambda g: g / (1 + jnp.exp(-g))))


@mutant("06.1", "split over the rows")
def _(hidden):
    gate, up = jnp.split(hidden, 2, axis=0)
    return jax.nn.silu(gate) * up


@mutant("06.1", "in the dtype that came")
def _(hidden):
    gate, up = jnp.split(hidden, 2, axis=-1)
    return jax.nn.silu(gate) * up


@mutant("06.1", "float32 stays")
def _(hidden):
    gate, up = jnp.split(hidden.astype(jnp.float32), 2, axis=-1)
    return jax.nn.silu(gate) * up


@mutant("06.1", "bfloat16 always")
def _(hidden):
    gate, up = jnp.split(hidden.astype(jnp.bfloat16), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(hidden.dtype)


# ---------------------------------------------------------------- 06.2 the experts


def live_rows(rows, group_sizes):
    return (jnp.arange(rows.shape[0]) < group_sizes.sum())[:, None]


def halves(h):
    return h[:, : h.shape[1] // 2], h[:, h.shape[1] // 2 :]


def make_experts(
    inner=lambda live, h: jnp.where(live, h, 0),
    outer=lambda live, y: jnp.where(live, y, 0),
    act=lambda h: jax.nn.silu(halves(h)[0]) * halves(h)[1],
    first=lambda gemm, x, w, s: gemm(x, w, s),
    second=lambda gemm, x, w, s: gemm(x, w, s),
    count=lambda s: s.sum(),
):
    def experts(rows, gate_up, down, group_sizes, gemm):
        live = (jnp.arange(rows.shape[0]) < count(group_sizes))[:, None]
        hidden = inner(live, first(gemm, rows, gate_up, group_sizes))
        return outer(live, second(gemm, act(hidden), down, group_sizes))

    return experts


alternative("06.2", "a mutant's frame with every part right")(make_experts())
alternative("06.2", "masked once, at the end")(make_experts(inner=lambda live, h: h))


@alternative("06.2", "the fused experts of the package")
def _(rows, gate_up, down, group_sizes, gemm):
    live = live_rows(rows, group_sizes)
    return jnp.where(live, swiglu_experts(rows, gate_up, down, group_sizes, backend="ragged_dot"), 0)


@alternative("06.2", "rows masked first, kernels gathered")
def _(rows, gate_up, down, group_sizes, gemm):
    expert = (jnp.arange(rows.shape[0])[:, None] >= jnp.cumsum(group_sizes)).sum(1)
    live = live_rows(rows, group_sizes)
    expert = jnp.minimum(expert, gate_up.shape[0] - 1)
    hidden = jnp.einsum("md,mdf->mf", jnp.where(live, rows, 0), gate_up[expert])
    gate, up = jnp.split(hidden, 2, axis=-1)
    return jnp.where(live, jnp.einsum("mf,mfd->md", jax.nn.silu(gate) * up, down[expert]), 0)


mutant("06.2", "gate and up swapped")(make_experts(act=lambda h: halves(h)[0] * jax.nn.silu(halves(h)[1])))
mutant("06.2", "gelu")(make_experts(act=lambda h: jax.nn.gelu(halves(h)[0]) * halves(h)[1]))
mutant("06.2", "no activation")(make_experts(act=lambda h: halves(h)[0]))
mutant("06.2", "no gate")(make_experts(act=lambda h: jax.nn.silu(halves(h)[0])))
mutant("06.2", "products of plain rows, no groups")(make_experts(first=lambda gemm, x, w, s: x @ w[0]))
mutant("06.2", "the last expert takes the tail")(
    make_experts(
        first=lambda gemm, x, w, s: gemm(x, w, s.at[-1].add(x.shape[0] - s.sum())),
        second=lambda gemm, x, w, s: gemm(x, w, s.at[-1].add(x.shape[0] - s.sum())),
        outer=lambda live, y: y,
    )
)
mutant("06.2", "the mask multiplies at the end")(make_experts(outer=lambda live, y: y * live))
mutant("06.2", "masked in the middle only")(make_experts(outer=lambda live, y: y))
mutant("06.2", "no mask at all")(make_experts(inner=lambda live, h: h, outer=lambda live, y: y))
mutant("06.2", "NaN repaired at the end")(make_experts(outer=lambda live, y: jnp.nan_to_num(y)))
mutant("06.2", "one row of the tail more")(make_experts(count=lambda s: s.sum() + 1))
mutant("06.2", "the last row is lost")(make_experts(count=lambda s: s.sum() - 1))
mutant("06.2", "only the largest group is live")(make_experts(count=lambda s: s.max()))
mutant("06.2", "live rows are those of groups that are not empty")(
    make_experts(count=lambda s: (s > 0).sum())
)
mutant("06.2", "the second product by other groups")(
    make_experts(second=lambda gemm, x, w, s: gemm(x, w, s[::-1]))
)
mutant("06.2", "kernels in reverse")(make_experts(first=lambda gemm, x, w, s: gemm(x, w[::-1], s)))
mutant("06.2", "no gradient to the first kernels")(
    make_experts(first=lambda gemm, x, w, s: gemm(x, jax.lax.stop_gradient(w), s))
)
mutant("06.2", "no gradient through the gate")(
    make_experts(act=lambda h: jax.lax.stop_gradient(jax.nn.silu(halves(h)[0])) * halves(h)[1])
)
mutant("06.2", "bfloat16 activation")(
    make_experts(
        act=lambda h: (jax.nn.silu(halves(h)[0]) * halves(h)[1]).astype(jnp.bfloat16).astype(jnp.float32)
    )
)


@mutant("06.2", "a residual connection")
def _(rows, gate_up, down, group_sizes, gemm):
    return rows + make_experts()(rows, gate_up, down, group_sizes, gemm)


@mutant("06.2", "sizes read on the host")
def _(rows, gate_up, down, group_sizes, gemm):
    out, begin = jnp.zeros(rows.shape), 0
    for e, size in enumerate(group_sizes.tolist()):
        hidden = rows[begin : begin + size] @ gate_up[e]
        act = jax.nn.silu(halves(hidden)[0]) * halves(hidden)[1]
        out = out.at[begin : begin + size].set(act @ down[e])
        begin += size
    return out


# ---------------------------------------------------------------- 06.3 the layer


def make_layer(
    ids=lambda ids, experts: ids,
    experts=lambda rows, gate_up, down, sizes: swiglu_experts(rows, gate_up, down, sizes),
    weigh=lambda weights: weights,
    before=lambda rows, groups, weights: rows,
    back=unpermute,
    input=lambda x: x,
):
    def layer(x, expert_ids, weights, gate_up, down):
        groups = group_by_expert(ids(expert_ids, gate_up.shape[0]), gate_up.shape[0])
        rows = before(permute(input(x), groups), groups, weights)
        rows = experts(rows, gate_up, down, groups.group_sizes)
        return back(rows, groups, weigh(weights))

    return layer


alternative("06.3", "a mutant's frame with every part right")(make_layer())


@alternative("06.3", "every expert on every token, weighed by a table")
def _(x, expert_ids, weights, gate_up, down):
    table = (jax.nn.one_hot(expert_ids, gate_up.shape[0]) * weights[..., None]).sum(1)
    gate, up = jnp.split(jnp.einsum("td,edf->etf", x, gate_up), 2, axis=-1)
    return jnp.einsum("etd,te->td", jnp.einsum("etf,efd->etd", jax.nn.silu(gate) * up, down), table)


@alternative("06.3", "one pick at a time, kernels gathered")
def _(x, expert_ids, weights, gate_up, down):
    out, last = jnp.zeros(x.shape), gate_up.shape[0] - 1
    for column, weight in zip(expert_ids.T, weights.T, strict=True):
        e = jnp.minimum(column, last)
        gate, up = jnp.split(jnp.einsum("td,tdf->tf", x, gate_up[e]), 2, axis=-1)
        y = jnp.einsum("tf,tfd->td", jax.nn.silu(gate) * up, down[e])
        out = out + jnp.where((column <= last)[:, None], weight[:, None] * y, 0)
    return out


def weights_before(rows, groups, weights):
    slot = groups.slot_of_row
    return rows * weights.reshape(-1).at[slot].get(mode="fill", fill_value=0)[:, None]


mutant("06.3", "weights on the inputs")(make_layer(before=weights_before, weigh=lambda w: None))
mutant("06.3", "weights on both sides")(make_layer(before=weights_before))
mutant("06.3", "no weights")(make_layer(weigh=lambda w: None))
mutant("06.3", "weights normalised once more")(make_layer(weigh=lambda w: w / w.sum(-1, keepdims=True)))
mutant("06.3", "weights in reverse")(make_layer(weigh=lambda w: w[:, ::-1]))
mutant("06.3", "the mean over the picks")(make_layer(weigh=lambda w: w / w.shape[1]))
mutant("06.3", "padding goes to the last expert")(make_layer(ids=lambda ids, e: jnp.minimum(ids, e - 1)))
mutant("06.3", "padding goes to expert 0")(make_layer(ids=lambda ids, e: ids % e))
mutant("06.3", "experts numbered in reverse")(
    make_layer(ids=lambda ids, e: jnp.where(ids < e, e - 1 - ids, e))
)
mutant("06.3", "only the first pick")(make_layer(weigh=lambda w: w.at[:, 1:].set(0)))
mutant("06.3", "no gradient to the router")(make_layer(weigh=jax.lax.stop_gradient))
mutant("06.3", "no gradient to x")(make_layer(input=jax.lax.stop_gradient))
mutant("06.3", "rows come back without going anywhere")(
    make_layer(back=lambda rows, groups, w: rows.reshape(*w.shape, -1).sum(1))
)
mutant("06.3", "a residual inside the layer")(
    make_layer(experts=lambda r, gu, d, s: r + swiglu_experts(r, gu, d, s))
)
mutant("06.3", "no gate")(
    make_layer(
        experts=lambda r, gu, d, s: grouped_gemm(jax.nn.silu(grouped_gemm(r, gu[..., : d.shape[1]], s)), d, s)
    )
)
mutant("06.3", "capacity: a group keeps its first four rows")(
    make_layer(experts=lambda r, gu, d, s: capped(r, gu, d, s, 4))
)
mutant("06.3", "sizes off by one expert")(
    make_layer(experts=lambda r, gu, d, s: swiglu_experts(r, gu, d, jnp.roll(s, 1)))
)


def capped(rows, gate_up, down, sizes, capacity):
    ends = jnp.cumsum(sizes)
    row = jnp.arange(rows.shape[0])
    expert = (row[:, None] >= ends).sum(1)
    rank = row - jnp.append(ends - sizes, 0)[expert]
    return jnp.where((rank < capacity)[:, None], swiglu_experts(rows, gate_up, down, sizes), 0)


@mutant("06.3", "ids read on the host")
def _(x, expert_ids, weights, gate_up, down):
    out = jnp.zeros(x.shape)
    for (t, k), e in np.ndenumerate(np.asarray(expert_ids)):
        if e < gate_up.shape[0]:
            gate, up = jnp.split(x[t] @ gate_up[e], 2)
            out = out.at[t].add(weights[t, k] * ((jax.nn.silu(gate) * up) @ down[e]))
    return out


# ---------------------------------------------------------------- 06.4 backward of one tile


def make_backward(
    act=lambda g, u: jax.nn.silu(g) * u,
    d_gate=lambda g, u, d: d * u * (jax.nn.sigmoid(g) * (1 + g * (1 - jax.nn.sigmoid(g)))),
    d_up=lambda g, u, d: d * jax.nn.silu(g),
    join=lambda dg, du: jnp.concatenate([dg, du], axis=-1),
    hidden_of=lambda x, h, w: h,
    order=lambda dx, dgu, dd: (dx, dgu, dd),
    d_act=lambda dy, w: dy @ w.T,
    d_x=lambda dh, w: dh @ w.T,
):
    def backward(x, hidden, gate_up, down, d_y):
        gate, up = jnp.split(hidden_of(x, hidden, gate_up), 2, axis=-1)
        d = d_act(d_y, down)
        d_hidden = join(d_gate(gate, up, d), d_up(gate, up, d))
        return order(d_x(d_hidden, gate_up), x.T @ d_hidden, act(gate, up).T @ d_y)

    return backward


alternative("06.4", "a mutant's frame with every part right, and silu' spelled out")(make_backward())


@alternative("06.4", "transposed by einsum")
def _(x, hidden, gate_up, down, d_y):
    gate, up = jnp.split(hidden, 2, axis=-1)
    slope = jax.vmap(jax.vmap(jax.grad(jax.nn.silu)))(gate) if gate.size else gate
    d_act = jnp.einsum("nd,fd->nf", d_y, down)
    d_hidden = jnp.concatenate([d_act * up * slope, d_act * jax.nn.silu(gate)], axis=1)
    d_gate_up = jnp.einsum("nd,nf->df", x, d_hidden)
    return (
        jnp.einsum("nf,df->nd", d_hidden, gate_up),
        d_gate_up,
        jnp.einsum("nf,nd->fd", jax.nn.silu(gate) * up, d_y),
    )


@mutant("06.4", "computes the forward pass again")
def _(x, hidden, gate_up, down, d_y):
    def mlp(x, gate_up, down):
        gate, up = jnp.split(x @ gate_up, 2, axis=-1)
        return (jax.nn.silu(gate) * up) @ down

    return jax.vjp(mlp, x, gate_up, down)[1](d_y)


mutant("06.4", "computes hidden again")(make_backward(hidden_of=lambda x, h, w: x @ w))
mutant("06.4", "gate and up swapped in the gradient")(
    make_backward(join=lambda dg, du: jnp.concatenate([du, dg], -1))
)
mutant("06.4", "gate and up swapped in the activation")(make_backward(act=lambda g, u: g * jax.nn.silu(u)))
mutant("06.4", "the derivative of silu left out")(make_backward(d_gate=lambda g, u, d: d * u))
mutant("06.4", "silu' taken for the sigmoid")(make_backward(d_gate=lambda g, u, d: d * u * jax.nn.sigmoid(g)))
mutant("06.4", "silu' taken for sigmoid'")(
    make_backward(d_gate=lambda g, u, d: d * u * jax.nn.sigmoid(g) * (1 - jax.nn.sigmoid(g)))
)
mutant("06.4", "silu' taken for silu")(make_backward(d_gate=lambda g, u, d: d * u * jax.nn.silu(g)))
mutant("06.4", "sign in silu'")(
    make_backward(d_gate=lambda g, u, d: d * u * (jax.nn.sigmoid(g) * (1 - g * (1 - jax.nn.sigmoid(g)))))
)
mutant("06.4", "up forgotten in the gate's gradient")(
    make_backward(d_gate=lambda g, u, d: d * (jax.nn.sigmoid(g) * (1 + g * (1 - jax.nn.sigmoid(g)))))
)
mutant("06.4", "the gate itself in up's gradient")(make_backward(d_up=lambda g, u, d: d * g))
mutant("06.4", "d_down from hidden's gate, not from the activation")(make_backward(act=lambda g, u: g))
mutant("06.4", "d_down without up")(make_backward(act=lambda g, u: jax.nn.silu(g)))
mutant("06.4", "down not transposed, where it fits")(
    make_backward(d_act=lambda dy, w: dy @ w if w.shape[0] == w.shape[1] else dy @ w.T)
)
mutant("06.4", "gate_up not transposed, where it fits")(
    make_backward(d_x=lambda dh, w: dh @ w if w.shape[0] == w.shape[1] else dh @ w.T)
)
mutant("06.4", "in another order")(make_backward(order=lambda dx, dgu, dd: (dgu, dd, dx)))
mutant("06.4", "gradients of the mean")(
    make_backward(order=lambda dx, dgu, dd: (dx, dgu / max(dx.shape[0], 1), dd / max(dx.shape[0], 1)))
)
mutant("06.4", "d_down transposed")(make_backward(order=lambda dx, dgu, dd: (dx, dgu, dd.T)))
mutant("06.4", "exp overflows")(
    make_backward(
        d_gate=lambda g, u, d: d * u * (jnp.exp(g) * (1 + g + jnp.exp(g)) / (1 + jnp.exp(g)) ** 2),
    )
)
mutant("06.4", "a cast to bfloat16 in the middle")(
    make_backward(join=lambda dg, du: jnp.concatenate([dg, du], -1).astype(jnp.bfloat16).astype(jnp.float32))
)


# ---------------------------------------------------------------- 06.5 from a checkpoint


def bank(state, part, order, turn=lambda w: w.T):
    return jnp.stack([turn(state[f"experts.{e}.{part}_proj.weight"]) for e in order])


def make_stack(
    order=range,
    parts=("gate", "up"),
    turn=lambda w: w.T,
    turn_down=lambda w: w.T,
    join=lambda a, b: jnp.concatenate([a, b], axis=-1),
    result=lambda gate_up, down: (gate_up, down),
):
    def stack(state, num_experts):
        numbers = list(order(num_experts))
        first, second = (bank(state, part, numbers, turn) for part in parts)
        return result(join(first, second), bank(state, "down", numbers, turn_down))

    return stack


alternative("06.5", "a mutant's frame with every part right")(make_stack())


@alternative("06.5", "stacked as in the file, turned at the end")
def _(state, num_experts):
    down = jnp.stack([state[f"experts.{e}.down_proj.weight"] for e in range(num_experts)])
    rows = [
        jnp.concatenate([state[f"experts.{e}.gate_proj.weight"], state[f"experts.{e}.up_proj.weight"]])
        for e in range(num_experts)
    ]
    return jnp.stack(rows).swapaxes(1, 2), down.swapaxes(1, 2)


@alternative("06.5", "names parsed, experts sorted by number")
def _(state, num_experts):
    numbers = sorted({int(name.split(".")[1]) for name in state if name.startswith("experts.")})
    return make_stack(order=lambda n: numbers[:n])(state, num_experts)


mutant("06.5", "up first")(make_stack(parts=("up", "gate")))
mutant("06.5", "gate twice")(make_stack(parts=("gate", "gate")))
mutant("06.5", "experts in the order of text")(make_stack(order=lambda n: sorted(range(n), key=str)))
mutant("06.5", "experts in reverse")(make_stack(order=lambda n: range(n - 1, -1, -1)))
mutant("06.5", "expert 0 for all")(make_stack(order=lambda n: [0] * n))
mutant("06.5", "ten experts at most")(make_stack(order=lambda n: range(min(n, 10))))
mutant("06.5", "nothing transposed")(make_stack(turn=lambda w: w, turn_down=lambda w: w))
mutant("06.5", "down not transposed")(make_stack(turn_down=lambda w: w))
mutant("06.5", "down not transposed, where it fits")(
    make_stack(turn_down=lambda w: w if w.shape[0] == w.shape[1] else w.T)
)
mutant("06.5", "gate and up not transposed, where it fits")(
    make_stack(turn=lambda w: w if w.shape[0] == w.shape[1] else w.T)
)
mutant("06.5", "reshaped in place of transposed")(make_stack(turn=lambda w: w.reshape(w.shape[::-1])))
mutant("06.5", "down reshaped in place of transposed")(
    make_stack(turn_down=lambda w: w.reshape(w.shape[::-1]))
)
mutant("06.5", "interleaved")(
    make_stack(join=lambda a, b: jnp.stack([a, b], axis=-1).reshape(*a.shape[:2], -1))
)
mutant("06.5", "joined along the experts")(make_stack(join=lambda a, b: jnp.concatenate([a, b], axis=0)))
mutant("06.5", "joined along D")(make_stack(join=lambda a, b: jnp.concatenate([a, b], axis=1)))
mutant("06.5", "down, gate_up")(make_stack(result=lambda gate_up, down: (down, gate_up)))
mutant("06.5", "bfloat16")(make_stack(turn=lambda w: w.T.astype(jnp.bfloat16), turn_down=lambda w: w.T))


@mutant("06.5", "the file's order")
def _(state, num_experts):
    numbers = list(dict.fromkeys(int(n.split(".")[1]) for n in sorted(state) if n.startswith("experts.")))
    return make_stack(order=lambda n: numbers)(state, num_experts)


@mutant("06.5", "the shared expert in place of expert 0")
def _(state, num_experts):
    gate_up, down = make_stack()(state, num_experts)
    shared = [state[f"shared_experts.{part}_proj.weight"].T for part in ("gate", "up", "down")]
    return gate_up.at[0].set(jnp.concatenate(shared[:2], axis=-1)), down.at[0].set(shared[2])
