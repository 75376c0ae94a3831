"""Wrong answers to chapter 10 that a person could give, and right ones unlike the solution."""

import math
from fractions import Fraction

import jax.numpy as jnp
import numpy as np

from moe_course.bench.kill_rate import alternative, mutant
from moe_course.scaling.comm import copies_per_token, fit_alpha_beta

# ---------------------------------------------------------------- 10.1 a layer of MLA


def make_layer(
    query=lambda d, q, wide: d * q + q * wide if q else d * wide,
    q_wide=lambda h, nope, rope: h * (nope + rope),
    down=lambda d, kv, h, rope: d * (kv + rope),
    up=lambda kv, h, nope, rope, v: kv * h * (nope + v),
    out=lambda d, h, nope, v: h * v * d,
    score=lambda nope, rope: nope + rope,
    value=lambda nope, rope, v: v,
    seen=lambda s: s / 2,
    times=2,
):
    def mla_layer(d_model, heads, q_rank, kv_rank, nope, rope, v_dim, seq_len):
        weights = query(d_model, q_rank, q_wide(heads, nope, rope)) + down(d_model, kv_rank, heads, rope)
        weights += up(kv_rank, heads, nope, rope, v_dim) + out(d_model, heads, nope, v_dim)
        core = heads * seen(seq_len) * (score(nope, rope) + value(nope, rope, v_dim))
        return times * (weights + core)

    return mla_layer


alternative("10.1", "a mutant's frame with every part right")(make_layer())


@alternative("10.1", "matrices as a list of shapes")
def _(d, h, q, kv, nope, rope, v, seq_len):
    shapes = [(d, kv + rope), (kv, h * nope), (kv, h * v), (h * v, d)]
    shapes += [(d, q), (q, h * nope), (q, h * rope)] if q else [(d, h * nope), (d, h * rope)]
    return sum(2 * a * b for a, b in shapes) + h * seq_len * nope + h * seq_len * rope + h * seq_len * v


@alternative("10.1", "a float32 JAX number")
def _(d, h, q, kv, nope, rope, v, seq_len):
    return jnp.float32(make_layer()(d, h, q, kv, nope, rope, v, seq_len))


mutant("10.1", "multiply-adds")(make_layer(times=1))
mutant("10.1", "a training step")(make_layer(times=6))
mutant("10.1", "the whole square")(make_layer(seen=lambda s: s))
mutant("10.1", "a quarter of the square")(make_layer(seen=lambda s: s / 4))
mutant("10.1", "no looking back")(make_layer(seen=lambda s: 0))
mutant("10.1", "half of the positions, one more")(make_layer(seen=lambda s: (s + 1) / 2))
mutant("10.1", "a rotary key for each head")(make_layer(down=lambda d, kv, h, rope: d * (kv + h * rope)))
mutant("10.1", "no rotary key")(make_layer(down=lambda d, kv, h, rope: d * kv))
mutant("10.1", "rotary keys from the latent too")(
    make_layer(up=lambda kv, h, nope, rope, v: kv * h * (nope + rope + v))
)
mutant("10.1", "values as wide as keys")(make_layer(up=lambda kv, h, nope, rope, v: 2 * kv * h * nope))
mutant("10.1", "keys alone go up")(make_layer(up=lambda kv, h, nope, rope, v: kv * h * nope))
mutant("10.1", "values alone go up")(make_layer(up=lambda kv, h, nope, rope, v: kv * h * v))
mutant("10.1", "queries without a rotary part")(make_layer(q_wide=lambda h, nope, rope: h * nope))
mutant("10.1", "queries never low-rank")(make_layer(query=lambda d, q, wide: d * wide))
mutant("10.1", "queries always low-rank")(make_layer(query=lambda d, q, wide: q * (d + wide)))
mutant("10.1", "queries go down and not up")(make_layer(query=lambda d, q, wide: d * q if q else d * wide))
mutant("10.1", "a square output matrix")(make_layer(out=lambda d, h, nope, v: d * d))
mutant("10.1", "an output as wide as the keys")(make_layer(out=lambda d, h, nope, v: h * nope * d))
mutant("10.1", "no output matrix")(make_layer(out=lambda d, h, nope, v: 0))
mutant("10.1", "scores without the rotary part")(make_layer(score=lambda nope, rope: nope))
mutant("10.1", "scores alone")(make_layer(value=lambda nope, rope, v: 0))
mutant("10.1", "values in the keys' width")(make_layer(value=lambda nope, rope, v: nope + rope))


# ---------------------------------------------------------------- 10.2 rows to compute


def make_ridge(
    arithmetic=lambda i, o, peak: 2 * i * o / peak,
    traffic=lambda i, o, bi, bw, bo: i * bi + o * bo,
    weights=lambda i, o, bi, bw, bo: i * o * bw,
    finish=lambda rows, gain: rows if gain > 0 else math.inf,
):
    def rows_to_compute(d_in, d_out, peak, bandwidth, bytes_in, bytes_weight, bytes_out):
        widths = bytes_in, bytes_weight, bytes_out
        gain = arithmetic(d_in, d_out, peak) - traffic(d_in, d_out, *widths) / bandwidth
        return finish(weights(d_in, d_out, *widths) / bandwidth / (gain or math.nan), gain)

    return rows_to_compute


alternative("10.2", "a mutant's frame with every part right")(make_ridge())


@alternative("10.2", "intensity: FLOPs over bytes at the ridge")
def _(d_in, d_out, peak, bandwidth, bytes_in, bytes_weight, bytes_out):
    ridge = Fraction(peak) / Fraction(bandwidth)
    left = 2 * d_in * d_out - ridge * (d_in * Fraction(bytes_in) + d_out * Fraction(bytes_out))
    return float(ridge * d_in * d_out * Fraction(bytes_weight) / left) if left > 0 else np.inf


@alternative("10.2", "a search")
def _(d_in, d_out, peak, bandwidth, bytes_in, bytes_weight, bytes_out):
    low, high = 0.0, 2.0**60
    for _ in range(150):
        rows = (low + high) / 2
        moved = rows * (d_in * bytes_in + d_out * bytes_out) + d_in * d_out * bytes_weight
        enough = 2 * rows * d_in * d_out / peak > moved / bandwidth
        low, high = (low, rows) if enough else (rows, high)
    return math.inf if low > 2.0**59 else high


mutant("10.2", "weights alone, as in 01.4")(make_ridge(traffic=lambda *_: 0))
mutant("10.2", "multiply-adds")(make_ridge(arithmetic=lambda i, o, peak: i * o / peak))
mutant("10.2", "the result is not written")(make_ridge(traffic=lambda i, o, bi, bw, bo: i * bi))
mutant("10.2", "the rows are not read")(make_ridge(traffic=lambda i, o, bi, bw, bo: o * bo))
mutant("10.2", "input and output swapped")(make_ridge(traffic=lambda i, o, bi, bw, bo: i * bo + o * bi))
mutant("10.2", "dimensions swapped")(make_ridge(traffic=lambda i, o, bi, bw, bo: o * bi + i * bo))
mutant("10.2", "one width for all")(make_ridge(traffic=lambda i, o, bi, bw, bo: (i + o) * bw))
mutant("10.2", "weights in the rows' width")(make_ridge(weights=lambda i, o, bi, bw, bo: i * o * bi))
mutant("10.2", "the larger of in and out")(make_ridge(traffic=lambda i, o, bi, bw, bo: max(i * bi, o * bo)))
mutant("10.2", "a negative number of rows")(make_ridge(finish=lambda rows, gain: rows))
mutant("10.2", "0 where it never gets there")(make_ridge(finish=lambda rows, gain: rows if gain > 0 else 0))
mutant("10.2", "None where it never gets there")(
    make_ridge(finish=lambda rows, gain: rows if gain > 0 else None)
)
mutant("10.2", "the absolute value")(make_ridge(finish=lambda rows, gain: abs(rows)))
mutant("10.2", "rounded up")(make_ridge(finish=lambda rows, gain: math.ceil(rows) if gain > 0 else math.inf))
mutant("10.2", "rounded down")(
    make_ridge(finish=lambda rows, gain: math.floor(rows) if gain > 0 else math.inf)
)


@mutant("10.2", "the machine's intensity")
def _(d_in, d_out, peak, bandwidth, bytes_in, bytes_weight, bytes_out):
    return peak / bandwidth


@mutant("10.2", "traffic added to arithmetic")
def _(d_in, d_out, peak, bandwidth, bytes_in, bytes_weight, bytes_out):
    row = 2 * d_in * d_out / peak + (d_in * bytes_in + d_out * bytes_out) / bandwidth
    return d_in * d_out * bytes_weight / bandwidth / row


# ---------------------------------------------------------------- 10.3 alpha and beta


def solve(k, t, weight):
    k, t = np.asarray(k, np.float64), np.asarray(t, np.float64)
    w = weight(k, t)
    a = np.array([[w.sum(), (w * k).sum()], [(w * k).sum(), (w * k * k).sum()]])
    return np.linalg.solve(a, [(w * t).sum(), (w * k * t).sum()])


def make_fit(
    weight=lambda k, t: 1 / t**2,
    alone=lambda k, t: (k / t).sum() / ((k / t) ** 2).sum(),
    finish=lambda alpha, slope: (alpha, 1 / slope),
    clip=True,
):
    def alpha_beta(kilobytes, microseconds):
        alpha, slope = solve(kilobytes, microseconds, weight)
        if alpha < 0 and clip:
            k, t = np.asarray(kilobytes, np.float64), np.asarray(microseconds, np.float64)
            alpha, slope = 0.0, alone(k, t)
        return finish(float(alpha), float(slope))

    return alpha_beta


alternative("10.3", "a mutant's frame with every part right")(make_fit())


@alternative("10.3", "polyfit with weights 1 / t")
def _(kilobytes, microseconds):
    k, t = np.asarray(kilobytes, np.float64), np.asarray(microseconds, np.float64)
    slope, alpha = np.polyfit(k, t, 1, w=1 / t)
    if alpha < 0:
        alpha, slope = 0.0, np.polynomial.polynomial.polyfit(k, t, [1], w=1 / t)[1]
    return alpha, 1 / slope


@alternative("10.3", "the package's fit")
def _(kilobytes, microseconds):
    return fit_alpha_beta(kilobytes, microseconds)


@alternative("10.3", "a list of two JAX numbers")
def _(kilobytes, microseconds):
    return [jnp.float32(x) for x in make_fit()(kilobytes, microseconds)]


mutant("10.3", "least squares on microseconds")(make_fit(weight=lambda k, t: np.ones_like(t)))
mutant("10.3", "weights 1 / t")(make_fit(weight=lambda k, t: 1 / t))
mutant("10.3", "weights 1 / t to the fourth")(make_fit(weight=lambda k, t: t**-4.0))
mutant("10.3", "weights by size")(make_fit(weight=lambda k, t: 1 / k**2))
mutant("10.3", "the slope, not the bandwidth")(make_fit(finish=lambda a, s: (a, s)))
mutant("10.3", "beta first")(make_fit(finish=lambda a, s: (1 / s, a)))
mutant("10.3", "in GB per ms")(make_fit(finish=lambda a, s: (a, 1e-3 / s)))
mutant("10.3", "alpha in seconds")(make_fit(finish=lambda a, s: (a * 1e-6, 1 / s)))
mutant("10.3", "one array of two")(make_fit(finish=lambda a, s: np.array([a, 1 / s])))
mutant("10.3", "a start-up time below 0")(make_fit(clip=False))
mutant("10.3", "alpha cut at 0, beta as it was")(
    make_fit(clip=False, finish=lambda a, s: (max(a, 0.0), 1 / s))
)
mutant("10.3", "alpha cut at 0, beta the mean bandwidth")(make_fit(alone=lambda k, t: 1 / (k / t).mean()))
mutant("10.3", "alpha cut at 0, beta from all bytes")(make_fit(alone=lambda k, t: t.sum() / k.sum()))
mutant("10.3", "no start-up time at all")(make_fit(finish=lambda a, s: (0.0, 1 / s)))


@mutant("10.3", "bandwidth of the largest, time of the smallest")
def _(kilobytes, microseconds):
    return float(microseconds.min()), float(kilobytes[kilobytes.argmax()] / microseconds[kilobytes.argmax()])


@mutant("10.3", "a line on log scales")
def _(kilobytes, microseconds):
    slope, start = np.polyfit(np.log(kilobytes), np.log(microseconds), 1)
    return float(np.exp(start)), float(1 / slope)


# ---------------------------------------------------------------- 10.4 rows across


def visit(e, k, places):
    return copies_per_token(e, k, places)


def make_across(
    visited=visit,
    domains_of=lambda r, d: max(1, r // d),
    away=lambda r, n: (n - 1) / n,
    rows=lambda way, e, k, r, n, seen: {"pick": k, "rank": seen(e, k, r), "domain": seen(e, k, n)}[way],
):
    def rows_across(experts, top_k, ranks, domain, way):
        domains = domains_of(ranks, domain)
        return rows(way, experts, top_k, ranks, domains, visited) * away(ranks, domains)

    return rows_across


alternative("10.4", "a mutant's frame with every part right")(make_across())


@alternative("10.4", "a chance for each place that is not home")
def _(experts, top_k, ranks, domain, way):
    def hit(places):
        missed = 1.0
        for i in range(top_k):
            missed *= (experts - experts // places - i) / (experts - i)
        return 1 - missed

    if ranks <= domain:
        return 0
    domains = ranks // domain
    if way == "pick":
        return top_k * (1 - domain / ranks)
    return (ranks - domain) * hit(ranks) if way == "rank" else (domains - 1) * hit(domains)


mutant("10.4", "home is counted")(make_across(away=lambda r, n: 1))
mutant("10.4", "what leaves the rank")(make_across(away=lambda r, n: (r - 1) / r))
mutant("10.4", "the share that stays")(make_across(away=lambda r, n: 1 / n))
mutant("10.4", "there and back")(make_across(away=lambda r, n: 2 * (n - 1) / n))
mutant("10.4", "picks as if drawn again and again")(
    make_across(visited=lambda e, k, p: p * (1 - (1 - 1 / p) ** k))
)
mutant("10.4", "the chance of one place")(make_across(visited=lambda e, k, p: visit(e, k, p) / p))
mutant("10.4", "at most K places")(make_across(visited=lambda e, k, p: min(k, p)))
mutant("10.4", "places missed")(make_across(visited=lambda e, k, p: p - visit(e, k, p)))
mutant("10.4", "one expert on each place")(
    make_across(visited=lambda e, k, p: p * (1 - math.comb(e - 1, k) / math.comb(e, k)))
)
mutant("10.4", "domains as if they were ranks")(
    make_across(rows=lambda way, e, k, r, n, seen: k if way == "pick" else seen(e, k, r))
)
mutant("10.4", "ranks as if they were domains")(
    make_across(rows=lambda way, e, k, r, n, seen: k if way == "pick" else seen(e, k, n))
)
mutant("10.4", "ways exchanged")(
    make_across(
        rows=lambda way, e, k, r, n, seen: {"pick": k, "domain": seen(e, k, r), "rank": seen(e, k, n)}[way]
    )
)
mutant("10.4", "always a row for each pick")(make_across(rows=lambda way, e, k, r, n, seen: k))
mutant("10.4", "a domain of GPUs as the number of domains")(make_across(domains_of=lambda r, d: d))
mutant("10.4", "a small group leaves too")(make_across(domains_of=lambda r, d: max(2, r // d)))


# ---------------------------------------------------------------- 10.5 whose rack


def make_share(
    members=lambda g, ep, s: np.arange(g).reshape(-1, ep, s).swapaxes(1, 2).reshape(-1, ep),
    rack=lambda m, d: m // d,
    reduce=lambda leaves: leaves.mean(),
):
    def share_leaving(gpus, ep, domain, stride):
        at = rack(members(gpus, ep, stride), domain)
        return float(reduce(at[:, :, None] != at[:, None, :]))

    return share_leaving


alternative("10.5", "a mutant's frame with every part right")(make_share())


@alternative("10.5", "how many of a group are in each rack")
def _(gpus, ep, domain, stride):
    stays = 0
    for start in (g for g in range(gpus) if g // stride % ep == 0):
        counts = {}
        for i in range(ep):
            rack = (start + i * stride) // domain
            counts[rack] = counts.get(rack, 0) + 1
        stays += sum(n * n for n in counts.values())
    return 1 - stays / (gpus * ep)


def distinct_pairs(leaves):
    count = leaves.shape[0] * leaves.shape[1] * (leaves.shape[1] - 1)
    return leaves.sum() / count if count else 0.0


mutant("10.5", "the share that stays")(make_share(reduce=lambda x: 1 - x.mean()))
mutant("10.5", "without a GPU's own rows")(make_share(reduce=distinct_pairs))
mutant("10.5", "the worst group")(make_share(reduce=lambda x: x.mean(axis=(1, 2)).max()))
mutant("10.5", "the first group")(make_share(reduce=lambda x: x[0].mean()))
mutant("10.5", "groups that straddle")(make_share(reduce=lambda x: x.any(axis=(1, 2)).mean()))
mutant("10.5", "what the first member sends")(make_share(reduce=lambda x: x[:, 0].mean()))
mutant("10.5", "pairs of neighbours")(
    make_share(reduce=lambda x: np.diagonal(x, 1, 1, 2).mean() if x.shape[1] > 1 else 0)
)
mutant("10.5", "each pair once, of both ways")(make_share(reduce=lambda x: np.triu(x).mean()))
mutant("10.5", "neighbours whatever the stride")(
    make_share(members=lambda g, ep, s: np.arange(g).reshape(-1, ep))
)
mutant("10.5", "stride between groups")(
    make_share(
        members=lambda g, ep, s: np.arange(g).reshape(-1, s, ep).swapaxes(1, 2).reshape(-1, ep)[:, :ep]
    )
)
mutant("10.5", "strides across everything")(
    make_share(members=lambda g, ep, s: np.arange(g).reshape(ep, -1).T)
)
mutant("10.5", "place in the rack, not the rack")(make_share(rack=lambda m, d: m % d))
mutant("10.5", "racks by position in the group")(
    make_share(rack=lambda m, d: np.broadcast_to(np.arange(m.shape[1]) // d, m.shape))
)


@mutant("10.5", "a small group never leaves")
def _(gpus, ep, domain, stride):
    return max(0.0, 1 - domain / (ep * stride))


@mutant("10.5", "a small group of neighbours never leaves")
def _(gpus, ep, domain, stride):
    return 0.0 if ep * stride <= domain else make_share()(gpus, ep, domain, stride)


# ---------------------------------------------------------------- 10.6 the memory wall


def make_state(
    sizes=lambda d, r, tp, pp, ep: (d / (pp * tp), r / (pp * ep)),
    copies=lambda g, tp, pp, ep: (g // (pp * tp), g // (pp * ep)),
    widths=(8, 4, 2),
    zero_of=lambda z: z,
):
    def state_bytes(dense, routed, gpus, tp, pp, ep, zero):
        total = 0
        for size, n in zip(sizes(dense, routed, tp, pp, ep), copies(gpus, tp, pp, ep), strict=True):
            for stage, width in enumerate(widths, 1):
                total += size * width / (n if zero_of(zero) >= stage else 1)
        return total

    return state_bytes


alternative("10.6", "a mutant's frame with every part right")(make_state())


@alternative("10.6", "bytes per parameter by stage, as a table")
def _(dense, routed, gpus, tp, pp, ep, zero):
    whole, shared = ((14, 0), (6, 8), (2, 12), (0, 14))[zero]
    return sum(
        n / cut * whole + n / gpus * shared for n, cut in ((dense, pp * tp), (routed, pp * ep))
    )  # n / cut, over gpus / cut copies, is n / gpus


mutant("10.6", "experts have DP copies")(make_state(copies=lambda g, tp, pp, ep: (g // (pp * tp),) * 2))
mutant("10.6", "dense weights have as few copies as experts")(
    make_state(copies=lambda g, tp, pp, ep: (g // (pp * ep),) * 2)
)
mutant("10.6", "sharded over all GPUs")(make_state(copies=lambda g, tp, pp, ep: (g, g)))
mutant("10.6", "copies across stages")(make_state(copies=lambda g, tp, pp, ep: (g // tp, g // ep)))
mutant("10.6", "TP cuts experts too")(
    make_state(sizes=lambda d, r, tp, pp, ep: (d / (pp * tp), r / (pp * ep * tp)))
)
mutant("10.6", "EP cuts nothing")(make_state(sizes=lambda d, r, tp, pp, ep: (d / (pp * tp), r / pp)))
mutant("10.6", "EP cuts everything")(
    make_state(sizes=lambda d, r, tp, pp, ep: (d / (pp * tp * ep), r / (pp * ep)))
)
mutant("10.6", "PP cuts dense layers alone")(
    make_state(sizes=lambda d, r, tp, pp, ep: (d / (pp * tp), r / ep))
)
mutant("10.6", "PP cuts experts alone")(make_state(sizes=lambda d, r, tp, pp, ep: (d / tp, r / (pp * ep))))
mutant("10.6", "experts forgotten")(make_state(sizes=lambda d, r, tp, pp, ep: (d / (pp * tp), 0)))
mutant("10.6", "weights first")(make_state(widths=(2, 4, 8)))
mutant("10.6", "gradients first")(make_state(widths=(4, 8, 2)))
mutant("10.6", "float32 moments")(make_state(widths=(12, 4, 2)))
mutant("10.6", "bfloat16 gradients")(make_state(widths=(8, 2, 2)))
mutant("10.6", "a stage too far")(make_state(zero_of=lambda z: z + 1))
mutant("10.6", "a stage too short")(make_state(zero_of=lambda z: z - 1))
mutant("10.6", "all or nothing")(make_state(zero_of=lambda z: 3 * bool(z)))


# ---------------------------------------------------------------- 10.7 one forward, one backward


def make_order(
    warm_of=lambda s, p, m: min(p - s - 1, m),
    pair=lambda f, b: [f, b],
    micro=lambda i, m: i,
    tail=lambda names: names,
):
    def stage_order(stage, stages, micro_batches):
        m = micro_batches
        warm = max(0, min(warm_of(stage, stages, m), m))
        order = [f"F{i}" for i in range(warm)]
        for i in range(m - warm):
            order += pair(f"F{warm + i}", f"B{micro(i, m)}")
        return order + tail([f"B{micro(i, m)}" for i in range(m - warm, m)])

    return stage_order


alternative("10.7", "a mutant's frame with every part right")(make_order())


@alternative("10.7", "one step at a time: back when the stage is full")
def _(stage, stages, micro_batches):
    order, forward, back = [], 0, 0
    while back < micro_batches:
        if forward < micro_batches and forward - back < stages - stage:
            order.append("F%d" % forward)  # noqa: UP031
            forward += 1
        else:
            order.append("B%d" % back)  # noqa: UP031
            back += 1
    return tuple(order)


mutant("10.7", "all forwards first")(make_order(warm_of=lambda s, p, m: m))
mutant("10.7", "the same warm-up everywhere")(make_order(warm_of=lambda s, p, m: p - 1))
mutant("10.7", "no warm-up")(make_order(warm_of=lambda s, p, m: 0))
mutant("10.7", "one more under way")(make_order(warm_of=lambda s, p, m: p - s))
mutant("10.7", "one less under way")(make_order(warm_of=lambda s, p, m: p - s - 2))
mutant("10.7", "warm-up by the stage")(make_order(warm_of=lambda s, p, m: s))
mutant("10.7", "twice the warm-up")(make_order(warm_of=lambda s, p, m: 2 * (p - s - 1)))
mutant("10.7", "back before forward")(make_order(pair=lambda f, b: [b, f]))
mutant("10.7", "the newest goes back first")(make_order(micro=lambda i, m: m - 1 - i))
mutant("10.7", "the last go back in reverse")(make_order(tail=lambda names: names[::-1]))
mutant("10.7", "the last never go back")(make_order(tail=lambda names: []))
mutant("10.7", "one text")(lambda s, p, m: " ".join(make_order()(s, p, m)))
mutant("10.7", "pairs, not names")(lambda s, p, m: [(n[0], int(n[1:])) for n in make_order()(s, p, m)])
mutant("10.7", "stages counted from the end")(lambda s, p, m: make_order()(p - 1 - s, p, m))
mutant("10.7", "counted from 1")(lambda s, p, m: [n[0] + str(int(n[1:]) + 1) for n in make_order()(s, p, m)])


@mutant("10.7", "a micro-batch at a time")
def _(stage, stages, micro_batches):
    return [name for i in range(micro_batches) for name in (f"F{i}", f"B{i}")]


@mutant("10.7", "drained after every p")
def _(stage, stages, micro_batches):
    order = []
    for start in range(0, micro_batches, stages):
        some = range(start, min(start + stages, micro_batches))
        order += [f"F{i}" for i in some] + [f"B{i}" for i in some]
    return order


# ---------------------------------------------------------------- 10.8 two meshes


def make_fold(
    legal=lambda g, pp, tp, cp, ep, etp: g % (pp * tp * cp) == 0 and g % (pp * ep * etp) == 0,
    attention=lambda n, pp, tp, cp: n.reshape(pp, -1, cp, tp),
    experts=lambda n, pp, ep, etp: n.reshape(pp, -1, ep, etp),
    finish=lambda a, e: (a, e),
):
    def fold(gpus, pp, tp, cp, ep, etp):
        if not legal(gpus, pp, tp, cp, ep, etp):
            return None
        numbers = jnp.arange(gpus)
        return finish(attention(numbers, pp, tp, cp), experts(numbers, pp, ep, etp))

    return fold


alternative("10.8", "a mutant's frame with every part right")(make_fold())


@alternative("10.8", "NumPy, as two Mesh axes lists")
def _(gpus, pp, tp, cp, ep, etp):
    dp, edp = gpus / (pp * tp * cp), gpus / (pp * ep * etp)
    if dp != int(dp) or edp != int(edp):
        return None
    shapes = (pp, int(dp), cp, tp), (pp, int(edp), ep, etp)
    return [np.arange(gpus, dtype=np.int32).reshape(shape) for shape in shapes]


def within_dp(g, pp, tp, cp, ep, etp):
    both = g % (pp * tp * cp) == 0 and g % (pp * ep * etp) == 0
    return both and g // (pp * tp * cp) % (ep * etp) == 0


mutant("10.8", "EP must divide DP")(make_fold(legal=within_dp))
mutant("10.8", "all sizes multiplied")(
    make_fold(legal=lambda g, pp, tp, cp, ep, etp: g % (pp * tp * cp * ep * etp) == 0)
)
mutant("10.8", "experts not asked")(make_fold(legal=lambda g, pp, tp, cp, ep, etp: g % (pp * tp * cp) == 0))
mutant("10.8", "always legal")(make_fold(legal=lambda *sizes: True))
mutant("10.8", "stages not asked")(
    make_fold(legal=lambda g, pp, tp, cp, ep, etp: g % (tp * cp) == 0 and g % (ep * etp) == 0)
)
mutant("10.8", "stages inside")(
    make_fold(
        attention=lambda n, pp, tp, cp: jnp.moveaxis(n.reshape(-1, cp, tp, pp), 3, 0),
        experts=lambda n, pp, ep, etp: jnp.moveaxis(n.reshape(-1, ep, etp, pp), 3, 0),
    )
)
mutant("10.8", "stages inside, of experts alone")(
    make_fold(experts=lambda n, pp, ep, etp: jnp.moveaxis(n.reshape(-1, ep, etp, pp), 3, 0))
)
mutant("10.8", "CP inside TP")(
    make_fold(attention=lambda n, pp, tp, cp: n.reshape(pp, -1, tp, cp).swapaxes(2, 3))
)
mutant("10.8", "axes exchanged")(make_fold(attention=lambda n, pp, tp, cp: n.reshape(pp, -1, tp, cp)))
mutant("10.8", "EP across the copies")(
    make_fold(experts=lambda n, pp, ep, etp: n.reshape(pp, ep, -1, etp).swapaxes(1, 2))
)
mutant("10.8", "DP inside")(
    make_fold(attention=lambda n, pp, tp, cp: jnp.moveaxis(n.reshape(pp, cp, tp, -1), 3, 1))
)
mutant("10.8", "ETP outside EP")(
    make_fold(experts=lambda n, pp, ep, etp: n.reshape(pp, -1, etp, ep).swapaxes(2, 3))
)
mutant("10.8", "one mesh twice")(make_fold(finish=lambda a, e: (a, a)))
mutant("10.8", "experts first")(make_fold(finish=lambda a, e: (e, a)))
mutant("10.8", "GPUs from 1")(make_fold(finish=lambda a, e: (a + 1, e + 1)))
mutant("10.8", "shapes, not meshes")(make_fold(finish=lambda a, e: (a.shape, e.shape)))
mutant("10.8", "experts alone")(make_fold(finish=lambda a, e: e))


# ---------------------------------------------------------------- 10.9 the choice


def make_choice(
    fits_of=lambda m, c: m <= c,
    pace=lambda s, fits: jnp.where(fits, s, 0).max(),
    near=lambda s, best, error: s * (1 + error) >= best,
    pick=lambda s, m, tied: jnp.where(tied, m, jnp.inf).argmin(),
    none=-1,
):
    def choose(speed, memory, capacity, error):
        fits = fits_of(memory, capacity)
        tied = fits & near(speed, pace(speed, fits), error)
        return (int(pick(speed, memory, tied)) if bool(tied.any()) else none), tied

    return choose


alternative("10.9", "a mutant's frame with every part right")(make_choice())


@alternative("10.9", "a loop")
def _(speed, memory, capacity, error):
    fitting = [i for i in range(len(speed)) if memory[i] <= capacity]
    best = max((float(speed[i]) for i in fitting), default=0.0)
    tied = [i in fitting and float(speed[i]) >= best / (1 + error) for i in range(len(speed))]
    order = sorted((float(memory[i]), i) for i in range(len(speed)) if tied[i])
    return (order[0][1] if order else -1), np.array(tied)


@alternative("10.9", "a JAX index")
def _(speed, memory, capacity, error):
    index, tied = make_choice()(speed, memory, capacity, error)
    return jnp.int32(index), tied


mutant("10.9", "the fastest that fits")(make_choice(pick=lambda s, m, tied: jnp.where(tied, s, 0).argmax()))
mutant("10.9", "the slowest of the tied")(
    make_choice(pick=lambda s, m, tied: jnp.where(tied, s, jnp.inf).argmin())
)
mutant("10.9", "the largest of the tied")(make_choice(pick=lambda s, m, tied: jnp.where(tied, m, 0).argmax()))
mutant("10.9", "the first of the tied")(make_choice(pick=lambda s, m, tied: tied.argmax()))
mutant("10.9", "the leanest of all")(make_choice(pick=lambda s, m, tied: m.argmin()))
mutant("10.9", "the index among the tied")(
    make_choice(pick=lambda s, m, tied: jnp.where(tied, m, jnp.inf)[tied].argmin())
)
mutant("10.9", "memory is no matter")(make_choice(fits_of=lambda m, c: m > 0))
mutant("10.9", "what does not fit")(make_choice(fits_of=lambda m, c: m > c))
mutant("10.9", "the pace of all")(make_choice(pace=lambda s, fits: s.max()))
mutant("10.9", "the mean pace")(
    make_choice(pace=lambda s, fits: jnp.where(fits, s, 0).sum() / jnp.maximum(fits.sum(), 1))
)
mutant("10.9", "the error twice")(make_choice(near=lambda s, best, error: s * (1 + 2 * error) >= best))
mutant("10.9", "the error not at all")(make_choice(near=lambda s, best, error: s >= best))
mutant("10.9", "everything that fits is tied")(make_choice(near=lambda s, best, error: s > 0))
mutant("10.9", "the error as tokens per second")(make_choice(near=lambda s, best, error: s + error >= best))
mutant("10.9", "0 when nothing fits")(make_choice(none=0))
mutant("10.9", "None when nothing fits")(make_choice(none=None))


@mutant("10.9", "the index alone")
def _(speed, memory, capacity, error):
    return make_choice()(speed, memory, capacity, error)[0]
