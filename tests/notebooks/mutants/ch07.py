"""Wrong answers to chapter 07 that a person could give, and right ones unlike the solution."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moe_course.bench.kill_rate import alternative, mutant
from moe_course.dispatch.exchange import plan_exchange, route_of_rank
from moe_course.dispatch.plan import bucket_capacity
from moe_course.grouping import group_by_expert, permute, unpermute

AXIS = "expert"

# ---------------------------------------------------------------- 07.1 the send matrix


def make_matrix(
    owner=lambda ids, experts, ranks: ids // (experts // ranks),
    count=lambda member: member.sum((1, 2)),
    finish=lambda matrix: matrix,
):
    def send_matrix(expert_ids, num_experts, ranks):
        who = owner(expert_ids, num_experts, ranks)
        return finish(count(who[..., None] == jnp.arange(ranks)))

    return send_matrix


alternative("07.1", "a mutant's frame with every part right")(make_matrix())


@alternative("07.1", "a scatter-add")
def _(expert_ids, num_experts, ranks):
    owner = (expert_ids * ranks // num_experts).reshape(ranks, -1)
    sender = jnp.broadcast_to(jnp.arange(ranks)[:, None], owner.shape)
    return jnp.zeros((ranks, ranks), jnp.int32).at[sender, owner].add(1, mode="drop")


@alternative("07.1", "bincount of pairs")
def _(expert_ids, num_experts, ranks):
    owner = jnp.minimum(expert_ids // (num_experts // ranks), ranks)
    pair = owner + (ranks + 1) * jnp.arange(ranks)[:, None, None]
    return jnp.bincount(pair.reshape(-1), length=ranks * (ranks + 1)).reshape(ranks, -1)[:, :ranks]


mutant("07.1", "transposed")(make_matrix(finish=lambda m: m.T))
mutant("07.1", "experts dealt one by one")(
    make_matrix(owner=lambda ids, e, r: jnp.where(ids < e, ids % r, r))
)
mutant("07.1", "divided by the ranks")(make_matrix(owner=lambda ids, e, r: ids // r))
mutant("07.1", "dealt one by one, padding too")(make_matrix(owner=lambda ids, e, r: ids % r))
mutant("07.1", "padding to the last rank")(
    make_matrix(owner=lambda ids, e, r: ids.clip(0, e - 1) // (e // r))
)
mutant("07.1", "padding to rank 0")(
    make_matrix(owner=lambda ids, e, r: jnp.where(ids < e, ids // (e // r), 0))
)
mutant("07.1", "one expert off")(make_matrix(owner=lambda ids, e, r: (ids - 1) // (e // r)))
mutant("07.1", "rounded instead of cut")(
    make_matrix(owner=lambda ids, e, r: jnp.round(ids / (e // r)).astype(jnp.int32))
)
mutant("07.1", "ranks in reverse")(make_matrix(owner=lambda ids, e, r: r - 1 - ids // (e // r)))
mutant("07.1", "tokens, not copies")(make_matrix(count=lambda m: m.any(2).sum(1)))
mutant("07.1", "whether, not how many")(make_matrix(count=lambda m: m.any((1, 2)).astype(jnp.int32)))
mutant("07.1", "the first pick alone")(make_matrix(count=lambda m: m[:, :, 0].sum(1)))
mutant("07.1", "the mean over picks")(make_matrix(count=lambda m: m.mean(2).sum(1)))
mutant("07.1", "without the diagonal")(make_matrix(finish=lambda m: m * (1 - jnp.eye(len(m), dtype=m.dtype))))
mutant("07.1", "everybody's total in each row")(
    make_matrix(finish=lambda m: jnp.broadcast_to(m.sum(0), m.shape))
)
mutant("07.1", "counted up")(make_matrix(finish=lambda m: jnp.cumsum(m, axis=1)))


@mutant("07.1", "by expert, not by rank")
def _(expert_ids, num_experts, ranks):
    return (expert_ids[..., None] == jnp.arange(num_experts)).sum((1, 2))


@mutant("07.1", "NumPy")
def _(expert_ids, num_experts, ranks):
    owner = np.asarray(expert_ids) // (num_experts // ranks)
    return jnp.asarray((owner[..., None] == np.arange(ranks)).sum((1, 2)))


# ---------------------------------------------------------------- 07.2 padded, there


def count_earlier(flat, ranks):
    member = (flat[:, None] == jnp.arange(ranks)).astype(jnp.int32)
    return ((jnp.cumsum(member, 0) - member) * member).sum(1)


def exchange(blocks):
    return lax.all_to_all(blocks, AXIS, 0, 0)


def make_there(
    nth=count_earlier,
    where=lambda flat, nth, ranks, pair: jnp.where(
        (flat < ranks) & (nth < pair), flat * pair + nth, ranks * pair
    ),
    copies=lambda x, picks: jnp.repeat(x, picks, axis=0),
    swap=exchange,
    mode="drop",
    told=lambda place: place,
    start=lambda rows, width, dtype: jnp.zeros((rows, width), dtype),
):
    def there(x, owner, ranks, pair):
        flat = owner.reshape(-1)
        place = where(flat, nth(flat, ranks), ranks, pair)
        send = start(ranks * pair, x.shape[1], x.dtype)
        send = send.at[place].set(copies(x, owner.shape[1]), mode=mode)
        return swap(send.reshape(ranks, pair, -1)), told(place).reshape(owner.shape)

    return there


alternative("07.2", "a mutant's frame with every part right")(make_there())
alternative("07.2", "tiled all-to-all")(make_there(swap=lambda b: lax.all_to_all(b, AXIS, 0, 0, tiled=True)))
alternative("07.2", "gather all and keep what is mine")(
    make_there(swap=lambda b: lax.all_gather(b, AXIS)[:, lax.axis_index(AXIS)])
)


@alternative("07.2", "grouped by the package, blocks gathered")
def _(x, owner, ranks, pair):
    groups = group_by_expert(owner, ranks)
    rows, starts = permute(x, groups), jnp.cumsum(groups.load) - groups.load
    here = jnp.arange(pair)[None, :] < groups.load[:, None]
    source = jnp.where(here, starts[:, None] + jnp.arange(pair)[None, :], len(rows))
    sent = rows.at[source].get(mode="fill", fill_value=0)
    of = jnp.minimum(owner, ranks - 1)
    nth = groups.row_of_slot - starts[of]
    place = jnp.where((owner < ranks) & (nth < pair), owner * pair + nth, ranks * pair)
    return exchange(sent), place


@alternative("07.2", "a sum over slots, with padding selected away")
def _(x, owner, ranks, pair):
    flat = owner.reshape(-1)
    nth = count_earlier(flat, ranks)
    place = jnp.where((flat < ranks) & (nth < pair), flat * pair + nth, ranks * pair)
    rows = jnp.repeat(x, owner.shape[1], axis=0)
    mine = place[None, :] == jnp.arange(ranks * pair)[:, None]
    send = jnp.where(mine[:, :, None], rows[None], 0).sum(1)
    return exchange(send.reshape(ranks, pair, -1)), place.reshape(owner.shape)


no_limit = lambda flat, nth, ranks, pair: jnp.where(flat < ranks, flat * pair + nth, ranks * pair)  # noqa: E731
mutant("07.2", "no exchange")(make_there(swap=lambda b: b))
mutant("07.2", "blocks in reverse")(make_there(swap=lambda b: exchange(b)[::-1]))
mutant("07.2", "blocks sent in reverse")(make_there(swap=lambda b: exchange(b[::-1])))
mutant("07.2", "to the next rank alone")(
    make_there(swap=lambda b: lax.ppermute(b, AXIS, [(i, (i + 1) % len(b)) for i in range(len(b))]))
)
mutant("07.2", "my own blocks from everybody's first")(
    make_there(swap=lambda b: lax.all_gather(b, AXIS)[:, 0])
)
mutant("07.2", "rows are exchanged, not blocks")(
    make_there(swap=lambda b: lax.all_to_all(b, AXIS, 1, 1, tiled=True) if b.shape[1] % len(b) == 0 else b)
)
mutant("07.2", "exchanged twice")(make_there(swap=lambda b: exchange(exchange(b))))
mutant("07.2", "summed over the ranks")(make_there(swap=lambda b: lax.psum(b, AXIS)))
mutant("07.2", "spills into the next block")(make_there(where=no_limit))
mutant("07.2", "the last row of a block is overwritten")(
    make_there(
        where=lambda flat, nth, ranks, pair: jnp.where(
            flat < ranks, flat * pair + jnp.minimum(nth, pair - 1), ranks * pair
        )
    )
)
mutant("07.2", "around the block")(
    make_there(
        where=lambda flat, nth, ranks, pair: jnp.where(flat < ranks, flat * pair + nth % pair, ranks * pair)
    )
)
mutant("07.2", "one row fewer than there is room for")(
    make_there(
        where=lambda flat, nth, ranks, pair: jnp.where(
            (flat < ranks) & (nth < pair - 1), flat * pair + nth, ranks * pair
        )
    )
)
mutant("07.2", "one row more than there is room for")(
    make_there(
        where=lambda flat, nth, ranks, pair: jnp.where(
            (flat < ranks) & (nth <= pair), flat * pair + nth, ranks * pair
        )
    )
)
mutant("07.2", "padding to rank 0")(
    make_there(
        where=lambda flat, nth, ranks, pair: jnp.where(nth < pair, flat % ranks * pair + nth, ranks * pair)
    )
)
mutant("07.2", "interleaved: row by row over the ranks")(
    make_there(
        where=lambda flat, nth, ranks, pair: jnp.where(
            (flat < ranks) & (nth < pair), nth * ranks + flat, ranks * pair
        )
    )
)
mutant("07.2", "counted from 1")(make_there(nth=lambda flat, ranks: count_earlier(flat, ranks) + 1))
mutant("07.2", "the last copies stay, not the first")(
    make_there(nth=lambda flat, ranks: count_earlier(flat[::-1], ranks)[::-1])
)
mutant("07.2", "the number of the slot")(make_there(nth=lambda flat, ranks: jnp.arange(flat.size)))
mutant("07.2", "counted over all ranks together")(
    make_there(nth=lambda flat, ranks: jnp.cumsum(flat < ranks) - 1)
)
mutant("07.2", "tokens one after the other, K times")(
    make_there(copies=lambda x, picks: jnp.tile(x, (picks, 1)))
)
mutant("07.2", "gradients stopped")(
    make_there(copies=lambda x, picks: lax.stop_gradient(jnp.repeat(x, picks, axis=0)))
)
mutant("07.2", "without room: -1")(make_there(told=lambda place: jnp.where(place == place.max(), -1, place)))
mutant("07.2", "place within the block")(make_there(told=lambda place: place % 9))
mutant("07.2", "clamped instead of dropped")(make_there(mode="clip"))
mutant("07.2", "ones where nothing is")(
    make_there(start=lambda rows, width, dtype: jnp.ones((rows, width), dtype))
)


@mutant("07.2", "nowhere is -1")
def _(x, owner, ranks, pair):
    flat = owner.reshape(-1)
    nth = count_earlier(flat, ranks)
    place = jnp.where((flat < ranks) & (nth < pair), flat * pair + nth, -1)
    send = (
        jnp.zeros((ranks * pair, x.shape[1]), x.dtype)
        .at[place]
        .set(jnp.repeat(x, owner.shape[1], 0), mode="drop")
    )
    place = jnp.where(place < 0, ranks * pair, place).reshape(owner.shape)
    return exchange(send.reshape(ranks, pair, -1)), place


@mutant("07.2", "a mask that multiplies")
def _(x, owner, ranks, pair):
    flat = owner.reshape(-1)
    nth = count_earlier(flat, ranks)
    place = jnp.where((flat < ranks) & (nth < pair), flat * pair + nth, ranks * pair)
    send = jax.nn.one_hot(place, ranks * pair).T @ jnp.repeat(x, owner.shape[1], axis=0)
    return exchange(send.reshape(ranks, pair, -1)), place.reshape(owner.shape)


@mutant("07.2", "added, so that a full block holds sums")
def _(x, owner, ranks, pair):
    flat = owner.reshape(-1)
    nth = jnp.minimum(count_earlier(flat, ranks), pair - 1)
    place = jnp.where(flat < ranks, flat * pair + nth, ranks * pair)
    rows = jnp.zeros((ranks * pair, x.shape[1]), x.dtype)
    rows = rows.at[place].add(jnp.repeat(x, owner.shape[1], 0), mode="drop")
    return exchange(rows.reshape(ranks, pair, -1)), place.reshape(owner.shape)


@mutant("07.2", "each token once, for its first pick")
def _(x, owner, ranks, pair):
    flat = owner[:, 0]
    nth = count_earlier(flat, ranks)
    place = jnp.where((flat < ranks) & (nth < pair), flat * pair + nth, ranks * pair)
    send = jnp.zeros((ranks * pair, x.shape[1]), x.dtype).at[place].set(x, mode="drop")
    return exchange(send.reshape(ranks, pair, -1)), jnp.repeat(place[:, None], owner.shape[1], axis=1)


mutant("07.2", "the received blocks alone")(
    lambda x, owner, ranks, pair: make_there()(x, owner, ranks, pair)[0]
)

# ---------------------------------------------------------------- 07.3 padded, back


def make_back(
    swap=exchange,
    read=lambda home, place: home.at[place].get(mode="fill", fill_value=0),
    add=lambda copies: copies.astype(jnp.float32).sum(1),
    after=lambda out: out,
):
    def back(answers, place):
        home = swap(answers).reshape(-1, answers.shape[-1])
        return after(add(read(home, place)))

    return back


alternative("07.3", "a mutant's frame with every part right")(make_back())
alternative("07.3", "one row of zeros more")(
    make_back(
        read=lambda home, place: jnp.concatenate([home, jnp.zeros_like(home[:1])])[place],
    )
)


@alternative("07.3", "float32 before the exchange, a loop over picks")
def _(answers, place):
    home = exchange(answers.astype(jnp.float32)).reshape(-1, answers.shape[-1])
    total = jnp.zeros((len(place), answers.shape[-1]))
    for column in place.T:
        safe = jnp.minimum(column, len(home) - 1)
        total = total + jnp.where((column < len(home))[:, None], home[safe], 0)
    return total


@alternative("07.3", "select, then a product")
def _(answers, place):
    home = exchange(answers).reshape(-1, answers.shape[-1])
    mine = place[:, :, None] == jnp.arange(len(home))
    read = mine.any((0, 1))[:, None]
    return mine.sum(1).astype(jnp.float32) @ jnp.where(read, home, 0).astype(jnp.float32)


mutant("07.3", "not exchanged")(make_back(swap=lambda a: a))
mutant("07.3", "exchanged twice")(make_back(swap=lambda a: exchange(exchange(a))))
mutant("07.3", "blocks in reverse")(make_back(swap=lambda a: exchange(a)[::-1]))
mutant("07.3", "blocks transposed")(make_back(swap=lambda a: jnp.swapaxes(exchange(a), 0, 1)))
mutant("07.3", "summed over the ranks at the end")(make_back(after=lambda out: lax.psum(out, AXIS)))
mutant("07.3", "averaged over the ranks")(make_back(after=lambda out: lax.pmean(out, AXIS)))
mutant("07.3", "times the ranks")(make_back(after=lambda out: out * lax.axis_size(AXIS)))
mutant("07.3", "over the ranks")(make_back(after=lambda out: out / lax.axis_size(AXIS)))
mutant("07.3", "summed over the ranks before")(make_back(swap=lambda a: lax.psum(a, AXIS)))
mutant("07.3", "own blocks counted twice")(
    make_back(swap=lambda a: exchange(a).at[lax.axis_index(AXIS)].multiply(2))
)
mutant("07.3", "the mean over picks")(make_back(add=lambda c: c.astype(jnp.float32).mean(1)))
mutant("07.3", "the first pick alone")(make_back(add=lambda c: c.astype(jnp.float32)[:, 0]))
mutant("07.3", "the largest answer")(make_back(add=lambda c: c.astype(jnp.float32).max(1)))
mutant("07.3", "clamped to the last row")(make_back(read=lambda home, place: home[place]))
alternative("07.3", "filled with NaN, repaired")(
    make_back(read=lambda home, place: jnp.nan_to_num(jnp.take(home, place, axis=0)))
)
mutant("07.3", "take, as it is")(make_back(read=lambda home, place: jnp.take(home, place, axis=0)))
mutant("07.3", "one row too far")(
    make_back(read=lambda home, place: home.at[place + 1].get(mode="fill", fill_value=0))
)
mutant("07.3", "nowhere is the row before the first")(
    make_back(read=lambda home, place: home[jnp.where(place < len(home), place, -1)])
)
mutant("07.3", "a mask that multiplies")(
    make_back(read=lambda home, place: home[place] * (place < len(home))[..., None])
)
mutant("07.3", "a one-hot product")(
    make_back(
        read=lambda home, place: (
            jax.nn.one_hot(place, len(home), dtype=jnp.float32) @ home.astype(jnp.float32)
        )
    )
)
mutant("07.3", "in the dtype that came")(make_back(add=lambda c: c.sum(1)))
mutant("07.3", "added in bfloat16, then float32")(
    make_back(add=lambda c: sum(c[:, k] for k in range(c.shape[1])).astype(jnp.float32))
)
mutant("07.3", "gradients stopped")(make_back(after=lax.stop_gradient))
mutant("07.3", "dropped answers are scaled up")(
    make_back(add=lambda c: c.astype(jnp.float32).sum(1) * c.shape[1] / (c != 0).any(-1).sum(1)[:, None])
)

# ---------------------------------------------------------------- 07.4 the bucket


def make_rows(
    need=lambda tokens, top_k, ranks: tokens * top_k,
    grow=lambda factor, bucket: factor * 2**bucket,
    up=lambda rows, ranks: ranks * math.ceil(rows / ranks),
    worst=lambda tokens, top_k, experts, ranks: ranks * tokens * min(top_k, experts // ranks),
    limit=min,
):
    def receive_rows(bucket, factor, tokens, top_k, num_experts, ranks):
        rows = up(grow(factor, bucket) * need(tokens, top_k, ranks), ranks)
        return limit(rows, worst(tokens, top_k, num_experts, ranks))

    return receive_rows


alternative("07.4", "a mutant's frame with every part right")(make_rows())
alternative("07.4", "the package's")(bucket_capacity)
alternative("07.4", "floor of the negative")(make_rows(up=lambda rows, ranks: int(-(-rows // ranks)) * ranks))

mutant("07.4", "no worst case")(make_rows(limit=lambda rows, worst: rows))
mutant("07.4", "at least the worst case")(make_rows(limit=max))
mutant("07.4", "always the worst case")(make_rows(limit=lambda rows, worst: worst))
mutant("07.4", "worst case of K copies")(make_rows(worst=lambda t, k, e, r: r * t * k))
mutant("07.4", "worst case of one copy")(make_rows(worst=lambda t, k, e, r: r * t))
mutant("07.4", "worst case of all a rank's experts")(make_rows(worst=lambda t, k, e, r: r * t * (e // r)))
mutant("07.4", "worst case of one sender")(make_rows(worst=lambda t, k, e, r: t * min(k, e // r)))
mutant("07.4", "worst case of min(K, E)")(make_rows(worst=lambda t, k, e, r: r * t * min(k, e)))
mutant("07.4", "rounded down")(make_rows(up=lambda rows, ranks: ranks * math.floor(rows / ranks)))
mutant("07.4", "rounded to the nearest")(make_rows(up=lambda rows, ranks: ranks * round(rows / ranks)))
mutant("07.4", "not a multiple of the ranks")(make_rows(up=lambda rows, ranks: math.ceil(rows)))
mutant("07.4", "one share too many")(make_rows(up=lambda rows, ranks: ranks * (int(rows / ranks) + 1)))
mutant("07.4", "a float")(make_rows(up=lambda rows, ranks: float(ranks * math.ceil(rows / ranks))))
mutant("07.4", "a power of two")(make_rows(up=lambda rows, ranks: 2 ** math.ceil(math.log2(rows))))
mutant("07.4", "linear growth")(make_rows(grow=lambda factor, bucket: factor * (bucket + 1)))
mutant("07.4", "the factor's powers")(make_rows(grow=lambda factor, bucket: factor ** (bucket + 1)))
mutant("07.4", "bucket 0 is doubled")(make_rows(grow=lambda factor, bucket: factor * 2 ** (bucket + 1)))
mutant("07.4", "added, not multiplied")(make_rows(grow=lambda factor, bucket: factor + 2**bucket - 1))
mutant("07.4", "the factor is rounded")(make_rows(grow=lambda factor, bucket: round(factor) * 2**bucket))
mutant("07.4", "balanced need of one pick")(make_rows(need=lambda t, k, r: t))
mutant("07.4", "balanced need of one pair")(make_rows(need=lambda t, k, r: t * k / r))
mutant("07.4", "balanced need of all ranks")(make_rows(need=lambda t, k, r: t * k * r))
mutant("07.4", "JAX's arrays")(
    lambda bucket, factor, tokens, top_k, num_experts, ranks: jnp.minimum(
        ranks * jnp.ceil(factor * 2**bucket * tokens * top_k / ranks).astype(jnp.int32),
        ranks * tokens * min(top_k, num_experts // ranks),
    )
)

# ---------------------------------------------------------------- 07.5 all or none


def make_guard(
    ask=lambda demand, capacity: lax.pmax(demand, AXIS) > capacity,
    choose=lambda overflow, state, new: jnp.where(overflow, state, new),
    told=lambda overflow: overflow,
):
    def all_or_none(state, new_state, demand, capacity):
        overflow = ask(demand, capacity)
        return choose(overflow, state, new_state), told(overflow)

    return all_or_none


alternative("07.5", "a mutant's frame with every part right")(make_guard())
alternative("07.5", "count the ranks that overflow")(
    make_guard(ask=lambda demand, capacity: lax.psum((demand > capacity).astype(jnp.int32), AXIS) > 0)
)
alternative("07.5", "a conditional")(
    make_guard(choose=lambda overflow, state, new: lax.cond(overflow, lambda: state, lambda: new))
)

mutant("07.5", "each rank for itself")(make_guard(ask=lambda demand, capacity: demand > capacity))
mutant("07.5", "the sum of the demands")(
    make_guard(ask=lambda demand, capacity: lax.psum(demand, AXIS) > capacity)
)
mutant("07.5", "the mean of the demands")(
    make_guard(ask=lambda demand, capacity: lax.psum(demand, AXIS) > capacity * lax.axis_size(AXIS))
)
mutant("07.5", "the least demand")(make_guard(ask=lambda demand, capacity: lax.pmin(demand, AXIS) > capacity))
mutant("07.5", "a full buffer is an overflow")(
    make_guard(ask=lambda demand, capacity: lax.pmax(demand, AXIS) >= capacity)
)
mutant("07.5", "rank 0 decides")(
    make_guard(ask=lambda demand, capacity: lax.all_gather(demand, AXIS)[0] > capacity)
)
mutant("07.5", "if more than half overflow")(
    make_guard(
        ask=lambda demand, capacity: (
            lax.psum((demand > capacity).astype(jnp.int32), AXIS) * 2 > lax.axis_size(AXIS)
        )
    )
)
mutant("07.5", "never")(make_guard(ask=lambda demand, capacity: lax.pmax(demand, AXIS) < 0))
mutant("07.5", "always")(make_guard(ask=lambda demand, capacity: lax.pmax(demand, AXIS) >= 0))
mutant("07.5", "swapped")(make_guard(choose=lambda overflow, state, new: jnp.where(overflow, new, state)))
mutant("07.5", "a mask that multiplies")(make_guard(choose=lambda o, state, new: o * state + (1 - o) * new))
mutant("07.5", "NaN repaired")(
    make_guard(choose=lambda o, state, new: jnp.where(o, 0, jnp.nan_to_num(new)) + o * state * (1 + 1e-3))
)
mutant("07.5", "zeros, not the old state")(make_guard(choose=lambda o, state, new: jnp.where(o, 0, new)))
mutant("07.5", "the old state where the new is NaN")(
    make_guard(choose=lambda o, state, new: jnp.where(jnp.isnan(new), state, new))
)
mutant("07.5", "half of the step")(
    make_guard(choose=lambda o, state, new: jnp.where(o, (state + new) / 2, new))
)
mutant("07.5", "tells the opposite")(make_guard(told=lambda overflow: ~overflow))
mutant("07.5", "the state alone")(
    lambda state, new, demand, capacity: make_guard()(state, new, demand, capacity)[0]
)


@mutant("07.5", "tells all, decides alone")
def _(state, new_state, demand, capacity):
    return jnp.where(demand > capacity, state, new_state), lax.pmax(demand, AXIS) > capacity


@mutant("07.5", "decides for all, tells its own")
def _(state, new_state, demand, capacity):
    return jnp.where(lax.pmax(demand, AXIS) > capacity, state, new_state), demand > capacity


@mutant("07.5", "an if in Python")
def _(state, new_state, demand, capacity):
    overflow = lax.pmax(demand, AXIS) > capacity
    return (state, overflow) if overflow else (new_state, overflow)


# ---------------------------------------------------------------- 07.6 ragged, there


def make_there_ragged(
    starts=lambda sizes, kept: jnp.cumsum(sizes, axis=1) - sizes,
    sent=lambda sizes, kept, rank: kept[rank],
    lands=lambda sizes, kept, capacity: jnp.cumsum(kept, axis=0) - kept,
    received=lambda sizes, kept, rank: kept[:, rank],
    cut=lambda sizes, capacity: jnp.diff(jnp.minimum(jnp.cumsum(sizes, 0), capacity), axis=0, prepend=0),
    pick=lambda matrix, rank: matrix[rank],
):
    def ragged_there(sizes, rank, capacity):
        kept = cut(sizes, capacity)
        return (
            starts(sizes, kept)[rank],
            sent(sizes, kept, rank),
            pick(lands(sizes, kept, capacity), rank),
            received(sizes, kept, rank),
        )

    return ragged_there


alternative("07.6", "a mutant's frame with every part right")(make_there_ragged())


@alternative("07.6", "the package's")
def _(sizes, rank, capacity):
    there = route_of_rank(plan_exchange(sizes[:, :, None], capacity), rank).there
    return there.input_offsets, there.send_sizes, there.output_offsets, there.recv_sizes


@alternative("07.6", "offsets past the end for what is cut")
def _(sizes, rank, capacity):
    before = jnp.cumsum(sizes, axis=0) - sizes
    kept = jnp.clip(capacity - before, 0, sizes)
    return (jnp.cumsum(sizes, 1) - sizes)[rank], kept[rank], before[rank], kept[:, rank]


own_view = lambda matrix, rank: matrix[:, rank]  # noqa: E731
no_cut = lambda sizes, capacity: sizes  # noqa: E731
mutant("07.6", "landing offsets of its own buffer")(make_there_ragged(pick=own_view))
mutant("07.6", "landing offsets by rows")(
    make_there_ragged(lands=lambda s, kept, c: jnp.cumsum(kept, axis=1) - kept)
)
mutant("07.6", "starts by columns")(make_there_ragged(starts=lambda s, kept: jnp.cumsum(s, axis=0) - s))
mutant("07.6", "starts of the cut sizes")(
    make_there_ragged(starts=lambda s, kept: jnp.cumsum(kept, 1) - kept)
)
mutant("07.6", "inclusive starts")(make_there_ragged(starts=lambda s, kept: jnp.cumsum(s, axis=1)))
mutant("07.6", "inclusive landing")(make_there_ragged(lands=lambda s, kept, c: jnp.cumsum(kept, axis=0)))
mutant("07.6", "landing offsets of the whole sizes")(
    make_there_ragged(lands=lambda s, kept, c: jnp.where(kept > 0, jnp.cumsum(s[::-1], 0)[::-1] - s, 0))
)
mutant("07.6", "blocks of equal size")(
    make_there_ragged(lands=lambda s, kept, c: jnp.arange(len(s))[:, None] * s.max() + 0 * s)
)
mutant("07.6", "all land at 0")(make_there_ragged(lands=lambda s, kept, c: 0 * kept))
mutant("07.6", "sends its column")(make_there_ragged(sent=lambda s, kept, rank: kept[:, rank]))
mutant("07.6", "receives its row")(make_there_ragged(received=lambda s, kept, rank: kept[rank]))
mutant("07.6", "sends all, receives what fits")(make_there_ragged(sent=lambda s, kept, rank: s[rank]))
mutant("07.6", "sends what fits, waits for all")(make_there_ragged(received=lambda s, kept, rank: s[:, rank]))
mutant("07.6", "nothing is cut")(make_there_ragged(cut=no_cut))
mutant("07.6", "each chunk cut on its own")(make_there_ragged(cut=lambda s, c: jnp.minimum(s, c)))
mutant("07.6", "an equal share for each sender")(
    make_there_ragged(cut=lambda s, c: jnp.minimum(s, c // len(s)))
)
mutant("07.6", "cut by what the sender has")(
    make_there_ragged(cut=lambda s, c: jnp.diff(jnp.minimum(jnp.cumsum(s, 1), c), axis=1, prepend=0))
)
mutant("07.6", "low senders are cut")(
    make_there_ragged(
        cut=lambda s, c: jnp.diff(jnp.minimum(jnp.cumsum(s[::-1], 0), c), axis=0, prepend=0)[::-1]
    )
)
mutant("07.6", "a chunk goes whole or not at all")(
    make_there_ragged(cut=lambda s, c: jnp.where(jnp.cumsum(s, 0) <= c, s, 0))
)
mutant("07.6", "one row more than there is room for")(
    make_there_ragged(cut=lambda s, c: jnp.diff(jnp.minimum(jnp.cumsum(s, 0), c + 1), axis=0, prepend=0))
)
mutant("07.6", "the matrix transposed")(
    lambda sizes, rank, capacity: make_there_ragged()(sizes.T, rank, capacity)
)
mutant("07.6", "rank 0's")(lambda sizes, rank, capacity: make_there_ragged()(sizes, 0, capacity))
mutant("07.6", "whole matrices")(
    lambda sizes, rank, capacity: (jnp.cumsum(sizes, 1) - sizes, sizes, jnp.cumsum(sizes, 0) - sizes, sizes.T)
)
mutant("07.6", "input and output offsets swapped")(
    lambda sizes, rank, capacity: tuple(make_there_ragged()(sizes, rank, capacity)[i] for i in (2, 1, 0, 3))
)
mutant("07.6", "a slice that depends on the rank")(
    lambda sizes, rank, capacity: (
        (jnp.cumsum(sizes, 1) - sizes)[rank],
        sizes[rank],
        sizes[:rank].sum(0),
        sizes[:, rank],
    )
)

# ---------------------------------------------------------------- 07.7 ragged, back


def make_way_back(order, row=(False, False, False, True)):
    """order: which matrix each argument is read from; row: whether along the row, not the column."""

    def ragged_back(input_offsets, send_sizes, output_offsets, rank):
        matrices = {"in": input_offsets, "size": send_sizes, "out": output_offsets}
        return tuple(
            matrices[name][rank] if by_row else matrices[name][:, rank]
            for name, by_row in zip(order, row, strict=True)
        )

    return ragged_back


RIGHT = ("out", "size", "in", "size")
alternative("07.7", "a mutant's frame with every part right")(make_way_back(RIGHT))


@alternative("07.7", "the layout anew from the sizes that arrived")
def _(input_offsets, send_sizes, output_offsets, rank):
    own = send_sizes[:, rank]
    return (
        jnp.cumsum(own) - own,
        own,
        jnp.take(input_offsets, rank, axis=1),
        jnp.take(send_sizes, rank, axis=0),
    )


mutant("07.7", "the way there again")(make_way_back(("in", "size", "out", "size"), (True, True, True, False)))
mutant("07.7", "swapped, not transposed")(make_way_back(RIGHT, (True, True, True, False)))
mutant("07.7", "transposed, not swapped")(make_way_back(("in", "size", "out", "size")))
mutant("07.7", "sizes not transposed")(make_way_back(RIGHT, (False, True, False, False)))
mutant("07.7", "sends what it receives back")(make_way_back(RIGHT, (False, False, False, False)))
mutant("07.7", "sends its row")(make_way_back(RIGHT, (False, True, False, True)))
mutant("07.7", "input offsets along the row")(make_way_back(RIGHT, (True, False, False, True)))
mutant("07.7", "output offsets along the row")(make_way_back(RIGHT, (False, False, True, True)))
mutant("07.7", "taken and landed at the same offset")(make_way_back(("out", "size", "out", "size")))
mutant("07.7", "offsets of the sender for both")(make_way_back(("in", "size", "in", "size")))
mutant("07.7", "rank 0's")(lambda i, s, o, rank: make_way_back(RIGHT)(i, s, o, 0))
mutant("07.7", "whole matrices")(lambda i, s, o, rank: (o.T, s.T, i.T, s))
mutant("07.7", "the home layout anew, from what was kept")(
    lambda i, s, o, rank: (o[:, rank], s[:, rank], (jnp.cumsum(s, 1) - s)[:, rank], s[rank])
)
mutant("07.7", "lands where the receiver would put it")(
    lambda i, s, o, rank: (o[:, rank], s[:, rank], (jnp.cumsum(s.T, 0) - s.T)[rank], s[rank])
)

# ---------------------------------------------------------------- 07.8 each rank once


@alternative("07.8", "a mark for each rank")
def _(owner, ranks):
    here = (owner[:, :, None] == jnp.arange(ranks)).any(1)
    return jnp.sort(jnp.where(here, jnp.arange(ranks), ranks), axis=1)[:, : min(owner.shape[1], ranks)]


@alternative("07.8", "unique of a fixed size, token by token")
def _(owner, ranks):
    size = min(owner.shape[1], ranks)
    some = jnp.concatenate([owner, jnp.full_like(owner[:, :1], ranks)], axis=1)
    return jax.vmap(lambda row: jnp.unique(row, size=size + 1, fill_value=ranks))(some)[:, :size]


@alternative("07.8", "against all earlier picks")
def _(owner, ranks):
    earlier = jnp.tril(jnp.ones((owner.shape[1],) * 2, bool), -1)
    again = ((owner[:, :, None] == owner[:, None, :]) & earlier).any(2)
    return jnp.sort(jnp.where(again, ranks, owner), axis=1)[:, : min(owner.shape[1], ranks)]


def make_distinct(
    before=lambda owner: jnp.sort(owner, axis=1),
    again=lambda a: jnp.pad(a[:, 1:] == a[:, :-1], ((0, 0), (1, 0))),
    gone=lambda ranks: ranks,
    after=lambda a: jnp.sort(a, axis=1),
    width=lambda picks, ranks: min(picks, ranks),
):
    def distinct_ranks(owner, ranks):
        ordered = before(owner)
        once = jnp.where(again(ordered), gone(ranks), ordered)
        return after(once)[:, : width(owner.shape[1], ranks)]

    return distinct_ranks


mutant("07.8", "every pick, sorted")(make_distinct(again=lambda a: a < 0))
mutant("07.8", "neighbours compared before sorting")(make_distinct(before=lambda a: a))
mutant("07.8", "gaps in the middle")(make_distinct(after=lambda a: a))
mutant("07.8", "descending")(make_distinct(after=lambda a: -jnp.sort(-a, axis=1)))
mutant("07.8", "in the order of the picks")(lambda owner, ranks: in_pick_order(owner, ranks))
mutant("07.8", "repeats become -1")(make_distinct(gone=lambda ranks: -1))
mutant("07.8", "repeats become 0")(make_distinct(gone=lambda ranks: 0))
mutant("07.8", "repeats become K")(
    lambda owner, ranks: make_distinct(gone=lambda _: owner.shape[1])(owner, ranks)
)
mutant("07.8", "K columns")(make_distinct(width=lambda picks, ranks: picks))
mutant("07.8", "R columns")(
    lambda owner, ranks: jnp.sort(
        jnp.where((owner[:, :, None] == jnp.arange(ranks)).any(1), jnp.arange(ranks), ranks), axis=1
    )
)
mutant("07.8", "one column less")(make_distinct(width=lambda picks, ranks: max(min(picks, ranks) - 1, 1)))
mutant("07.8", "both of two equal owners go")(
    make_distinct(
        again=lambda a: (
            jnp.pad(a[:, 1:] == a[:, :-1], ((0, 0), (1, 0)))
            | jnp.pad(a[:, 1:] == a[:, :-1], ((0, 0), (0, 1)))
        )
    )
)
mutant("07.8", "the first is the repeat")(
    make_distinct(again=lambda a: jnp.pad(a[:, 1:] == a[:, :-1], ((0, 0), (1, 0)), constant_values=True))
)
mutant("07.8", "compared with the pick before the last")(
    make_distinct(again=lambda a: jnp.pad(a[:, 2:] == a[:, :-2], ((0, 0), (2, 0)))[:, : a.shape[1]])
)
mutant("07.8", "the first pick's rank alone")(make_distinct(again=lambda a: a != a[:, :1]))
mutant("07.8", "padding to the last rank")(
    lambda owner, ranks: make_distinct()(jnp.minimum(owner, ranks - 1), ranks)
)
mutant("07.8", "a mask, not a list")(lambda owner, ranks: (owner[:, :, None] == jnp.arange(ranks)).any(1))
mutant("07.8", "how many, not which")(
    lambda owner, ranks: (owner[:, :, None] == jnp.arange(ranks)).sum(1)[:, : min(owner.shape[1], ranks)]
)
mutant("07.8", "sorted over the tokens")(make_distinct(before=lambda a: jnp.sort(a, axis=0)))
mutant("07.8", "the ranks of all tokens together")(
    lambda owner, ranks: jnp.broadcast_to(
        jnp.unique(owner, size=min(owner.shape[1], ranks), fill_value=ranks),
        (len(owner), min(owner.shape[1], ranks)),
    )
)


def in_pick_order(owner, ranks):
    earlier = jnp.tril(jnp.ones((owner.shape[1],) * 2, bool), -1)
    again = ((owner[:, :, None] == owner[:, None, :]) & earlier).any(2)
    kept = jnp.where(again, ranks, owner)
    order = jnp.argsort(kept == ranks, axis=1, stable=True)
    return jnp.take_along_axis(kept, order, axis=1)[:, : min(owner.shape[1], ranks)]


@mutant("07.8", "Python sets")
def _(owner, ranks):
    width = min(owner.shape[1], ranks)
    rows = [sorted({int(r) for r in row if r < ranks}) for row in owner]
    return jnp.array([row + [ranks] * (width - len(row)) for row in rows], jnp.int32).reshape(
        len(owner), width
    )


# ---------------------------------------------------------------- 07.9 the books


def make_audit(
    dropped=lambda made, sent, received, combined: made - combined,
    transposed=lambda received: received.T,
    pairs=("sent", "received", "combined"),
    compare=lambda a, b: (a == b).all(),
    walked=lambda made, received, computed: (received.sum(1) == computed).all(),
):
    def audit(made, sent, received, computed, combined):
        books = {"sent": sent, "received": transposed(received), "combined": combined}
        balanced = walked(made, received, computed)
        for name in pairs:
            balanced = balanced & compare(made, books[name])
        return dropped(made, sent, received, combined), balanced

    return audit


alternative("07.9", "a mutant's frame with every part right")(make_audit())
alternative("07.9", "largest differences")(make_audit(compare=lambda a, b: jnp.abs(a - b).max() == 0))
alternative("07.9", "the experts' rows against what was made")(
    make_audit(walked=lambda made, received, computed: jnp.array_equal(made.sum(0), computed))
)

mutant("07.9", "totals")(make_audit(compare=lambda a, b: a.sum() == b.sum()))
mutant("07.9", "totals by sender")(make_audit(compare=lambda a, b: (a.sum(1) == b.sum(1)).all()))
mutant("07.9", "totals by receiver")(make_audit(compare=lambda a, b: (a.sum(0) == b.sum(0)).all()))
mutant("07.9", "any pair that agrees")(make_audit(compare=lambda a, b: (a == b).any()))
mutant("07.9", "not less than made")(make_audit(compare=lambda a, b: (a >= b).all()))
mutant("07.9", "not more than made")(make_audit(compare=lambda a, b: (a <= b).all()))
mutant("07.9", "allclose, with its tolerance of one copy")(
    make_audit(compare=lambda a, b: (abs(a - b) <= 1).all())
)
mutant("07.9", "received as it was written")(make_audit(transposed=lambda received: received))
mutant("07.9", "sent is believed")(make_audit(pairs=("received", "combined")))
mutant("07.9", "received is believed")(make_audit(pairs=("sent", "combined")))
mutant("07.9", "combined is believed")(make_audit(pairs=("sent", "received")))
mutant("07.9", "computed is believed")(make_audit(walked=lambda made, received, computed: jnp.array(True)))
mutant("07.9", "computed in total")(
    make_audit(walked=lambda made, received, computed: received.sum() == computed.sum())
)
mutant("07.9", "computed by sender")(
    make_audit(walked=lambda made, received, computed: (received.sum(0) == computed).all())
)
mutant("07.9", "combined minus made")(make_audit(dropped=lambda m, s, r, c: c - m))
mutant("07.9", "what was not sent")(make_audit(dropped=lambda m, s, r, c: m - s))
mutant("07.9", "what was not received")(make_audit(dropped=lambda m, s, r, c: m - r.T))
mutant("07.9", "sent and not combined")(make_audit(dropped=lambda m, s, r, c: s - c))
mutant("07.9", "in total")(make_audit(dropped=lambda m, s, r, c: (m - c).sum()))
mutant("07.9", "only losses")(make_audit(dropped=lambda m, s, r, c: jnp.maximum(m - c, 0)))
mutant("07.9", "whether, not how many")(make_audit(dropped=lambda m, s, r, c: m != c))
mutant("07.9", "balanced means nothing dropped")(
    lambda made, sent, received, computed, combined: (made - combined, (made == combined).all())
)
mutant("07.9", "made is never looked at")(
    lambda made, sent, received, computed, combined: (
        made - combined,
        (sent == received.T).all() & (sent == combined).all() & (received.sum(1) == computed).all(),
    )
)
mutant("07.9", "unbalanced, not balanced")(
    lambda made, sent, received, computed, combined: (
        made - combined,
        ~make_audit()(made, sent, received, computed, combined)[1],
    )
)
mutant("07.9", "a verdict for each pair")(
    lambda made, sent, received, computed, combined: (made - combined, (made == sent) & (sent == received.T))
)


# unpermute is what 07.3 would be on one device; nothing is exchanged by it.
mutant("07.3", "unpermute alone")(
    lambda answers, place: unpermute(
        answers.reshape(-1, answers.shape[-1]).astype(jnp.float32),
        group_by_expert(place, 1),
    )
)
