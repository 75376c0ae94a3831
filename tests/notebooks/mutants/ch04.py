"""Wrong answers to chapter 04 that a person could give, and right ones unlike the solution."""

import jax
import jax.numpy as jnp
import numpy as np

from moe_course.bench.kill_rate import alternative, mutant

# ---------------------------------------------------------------- 04.1 load


def one_hot(flat, num_experts):
    return (flat[:, None] == jnp.arange(num_experts)).astype(jnp.int32)


@alternative("04.1", "segment sum, which drops what is outside")
def _(expert_ids, num_experts):
    flat = expert_ids.reshape(-1)
    return jax.ops.segment_sum(jnp.ones_like(flat), flat, num_experts)


@alternative("04.1", "differences of a sorted list")
def _(expert_ids, num_experts):
    ordered = jnp.sort(expert_ids.reshape(-1))
    ends = jnp.searchsorted(ordered, jnp.arange(num_experts + 1))
    return ends[1:] - ends[:-1]


@alternative("04.1", "a loop over experts")
def _(expert_ids, num_experts):
    return jnp.stack([(expert_ids == e).sum() for e in range(num_experts)])


@alternative("04.1", "bincount with strays moved to the end")
def _(expert_ids, num_experts):
    flat = expert_ids.reshape(-1)
    flat = jnp.where((flat < 0) | (flat > num_experts), num_experts, flat)
    return jnp.bincount(flat, length=num_experts + 1)[:-1]


@mutant("04.1", "bincount: -1 is counted as 0")
def _(expert_ids, num_experts):
    return jnp.bincount(expert_ids.reshape(-1), length=num_experts)


@mutant("04.1", "scatter-add: -1 is the last expert")
def _(expert_ids, num_experts):
    return jnp.zeros(num_experts, jnp.int32).at[expert_ids.reshape(-1)].add(1, mode="drop")


@mutant("04.1", "the sentinel counts as the last expert")
def _(expert_ids, num_experts):
    return one_hot(jnp.clip(expert_ids.reshape(-1), 0, num_experts - 1), num_experts).sum(0)


@mutant("04.1", "the sentinel wraps around to expert 0")
def _(expert_ids, num_experts):
    return one_hot(expert_ids.reshape(-1) % num_experts, num_experts).sum(0)


@mutant("04.1", "first picks alone")
def _(expert_ids, num_experts):
    return one_hot(expert_ids[:, 0], num_experts).sum(0)


@mutant("04.1", "last picks alone")
def _(expert_ids, num_experts):
    return one_hot(expert_ids[:, -1], num_experts).sum(0)


@mutant("04.1", "summed over the experts")
def _(expert_ids, num_experts):
    return one_hot(expert_ids.reshape(-1), num_experts).sum(1)


@mutant("04.1", "per token")
def _(expert_ids, num_experts):
    return (expert_ids[..., None] == jnp.arange(num_experts)).sum(1)


@mutant("04.1", "a fraction")
def _(expert_ids, num_experts):
    return one_hot(expert_ids.reshape(-1), num_experts).astype(jnp.float32).mean(0)


@mutant("04.1", "float32")
def _(expert_ids, num_experts):
    return one_hot(expert_ids.reshape(-1), num_experts).astype(jnp.float32).sum(0)


@mutant("04.1", "running sum")
def _(expert_ids, num_experts):
    return jnp.cumsum(one_hot(expert_ids.reshape(-1), num_experts).sum(0))


@mutant("04.1", "experts counted from 1")
def _(expert_ids, num_experts):
    return (expert_ids.reshape(-1)[:, None] == 1 + jnp.arange(num_experts)).sum(0)


@mutant("04.1", "one more entry, for nobody")
def _(expert_ids, num_experts):
    return one_hot(expert_ids.reshape(-1), num_experts + 1).sum(0)


@mutant("04.1", "as long as the largest id")
def _(expert_ids, num_experts):
    return jnp.asarray(np.bincount(np.clip(np.asarray(expert_ids).reshape(-1), 0, None)))


@mutant("04.1", "the counts of the experts that are there")
def _(expert_ids, num_experts):
    return jnp.unique(expert_ids, return_counts=True)[1]


@mutant("04.1", "NumPy: right, but not under jit")
def _(expert_ids, num_experts):
    flat = np.asarray(expert_ids).reshape(-1)
    return jnp.asarray(np.bincount(flat[(flat >= 0) & (flat < num_experts)], minlength=num_experts))


@mutant("04.1", "bytes: counts wrap at 256")
def _(expert_ids, num_experts):
    return one_hot(expert_ids.reshape(-1), num_experts).astype(jnp.uint8).sum(0, dtype=jnp.uint8)[::-1]


# ---------------------------------------------------------------- 04.2 expert order


def clean(flat, num_experts):
    return jnp.where((flat >= 0) & (flat < num_experts), flat, num_experts)


def finish(order, flat, num_experts):
    return jnp.where(flat[order] < num_experts, order, flat.size)


@alternative("04.2", "two keys in one sort")
def _(expert_ids, num_experts):
    flat = clean(expert_ids.reshape(-1), num_experts)
    slots = jnp.arange(flat.size, dtype=jnp.int32)
    ids, order = jax.lax.sort((flat, slots), num_keys=2)
    return jnp.where(ids < num_experts, order, flat.size)


@alternative("04.2", "id and slot packed in one integer")
def _(expert_ids, num_experts):
    flat = clean(expert_ids.reshape(-1), num_experts)
    size = max(flat.size, 1)
    keys = jnp.sort(flat * size + jnp.arange(flat.size))
    return jnp.where(keys // size < num_experts, keys % size, flat.size)


@alternative("04.2", "lexsort")
def _(expert_ids, num_experts):
    flat = clean(expert_ids.reshape(-1), num_experts)
    return finish(jnp.lexsort((jnp.arange(flat.size), flat)), flat, num_experts)


@mutant("04.2", "reversed within an expert")
def _(expert_ids, num_experts):
    flat = clean(expert_ids.reshape(-1), num_experts)
    return finish(flat.size - 1 - jnp.argsort(flat[::-1], stable=True), flat, num_experts)


@mutant("04.2", "largest expert first")
def _(expert_ids, num_experts):
    flat = clean(expert_ids.reshape(-1), num_experts)
    return finish(jnp.argsort(-flat, stable=True), flat, num_experts)


@mutant("04.2", "tokens in place of slots")
def _(expert_ids, num_experts):
    flat = clean(expert_ids.reshape(-1), num_experts)
    return finish(jnp.argsort(flat, stable=True), flat, num_experts) // expert_ids.shape[1]


@mutant("04.2", "slots numbered column by column")
def _(expert_ids, num_experts):
    flat = clean(expert_ids.T.reshape(-1), num_experts)
    return finish(jnp.argsort(flat, stable=True), flat, num_experts)


@mutant("04.2", "where each slot goes")
def _(expert_ids, num_experts):
    flat = clean(expert_ids.reshape(-1), num_experts)
    return jnp.argsort(jnp.argsort(flat, stable=True))


@mutant("04.2", "sorted within each token")
def _(expert_ids, num_experts):
    return jnp.argsort(expert_ids, axis=-1, stable=True).reshape(-1)


@mutant("04.2", "the ids, sorted")
def _(expert_ids, num_experts):
    return jnp.sort(clean(expert_ids.reshape(-1), num_experts))


@mutant("04.2", "strays keep their slots")
def _(expert_ids, num_experts):
    return jnp.argsort(clean(expert_ids.reshape(-1), num_experts), stable=True)


@mutant("04.2", "-1 sorts first")
def _(expert_ids, num_experts):
    flat = expert_ids.reshape(-1)
    return finish(jnp.argsort(flat, stable=True), clean(flat, num_experts), num_experts)


@mutant("04.2", "strays marked with -1")
def _(expert_ids, num_experts):
    flat = clean(expert_ids.reshape(-1), num_experts)
    order = jnp.argsort(flat, stable=True)
    return jnp.where(flat[order] < num_experts, order, -1)


@mutant("04.2", "strays marked with E")
def _(expert_ids, num_experts):
    flat = clean(expert_ids.reshape(-1), num_experts)
    order = jnp.argsort(flat, stable=True)
    return jnp.where(flat[order] < num_experts, order, num_experts)


@mutant("04.2", "strays marked with T")
def _(expert_ids, num_experts):
    flat = clean(expert_ids.reshape(-1), num_experts)
    order = jnp.argsort(flat, stable=True)
    return jnp.where(flat[order] < num_experts, order, expert_ids.shape[0])


@mutant("04.2", "strays cut off: a shape that is data")
def _(expert_ids, num_experts):
    flat = clean(expert_ids.reshape(-1), num_experts)
    order = jnp.argsort(flat, stable=True)
    return order[flat[order] < num_experts]


@mutant("04.2", "packed in float32")
def _(expert_ids, num_experts):
    flat = clean(expert_ids.reshape(-1), num_experts)
    keys = flat.astype(jnp.float32) * max(flat.size, 1) + jnp.arange(flat.size, dtype=jnp.float32)
    keys = jnp.sort(keys).astype(jnp.int32)
    size = max(flat.size, 1)
    return jnp.where(keys // size < num_experts, keys % size, flat.size)


@mutant("04.2", "slot 0 for strays")
def _(expert_ids, num_experts):
    flat = clean(expert_ids.reshape(-1), num_experts)
    order = jnp.argsort(flat, stable=True)
    return jnp.where(flat[order] < num_experts, order, 0)


@mutant("04.2", "NumPy: right, but not under jit")
def _(expert_ids, num_experts):
    flat = np.asarray(expert_ids).reshape(-1)
    flat = np.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    order = np.argsort(flat, kind="stable")
    return jnp.asarray(np.where(flat[order] < num_experts, order, flat.size))


# ---------------------------------------------------------------- 04.3 rows of the buffer


@alternative("04.3", "one formula")
def _(num_slots, num_experts, align):
    return (num_slots + min(num_slots, num_experts) * (align - 1)) // align * align


@alternative("04.3", "an adversary that deals")
def _(num_slots, num_experts, align):
    tiles, left = 0, num_slots
    for _ in range(min(num_experts, num_slots)):
        tiles, left = tiles + 1, left - 1
    return align * (tiles + left // align)


mutant("04.3", "no padding")(lambda slots, experts, align: slots)
mutant("04.3", "the buffer padded, not the groups")(lambda slots, experts, align: -(-slots // align) * align)
mutant("04.3", "a multiple of align is not asked for")(
    lambda slots, experts, align: slots + experts * (align - 1)
)
mutant("04.3", "empty groups are padded too")(
    lambda slots, experts, align: (slots + experts * (align - 1)) // align * align
)
mutant("04.3", "a whole tile for each expert")(lambda slots, experts, align: slots + experts * align)
mutant("04.3", "rounded up once more")(
    lambda slots, experts, align: -(-(slots + min(slots, experts) * (align - 1)) // align) * align
)
mutant("04.3", "balanced experts")(
    lambda slots, experts, align: experts * (((slots + experts - 1) // experts + align - 1) // align * align)
)
mutant("04.3", "half a tile each, which is the average")(
    lambda slots, experts, align: (slots + min(slots, experts) * (align // 2)) // align * align
)
mutant("04.3", "one group is never padded")(
    lambda slots, experts, align: (slots + max(min(slots, experts) - 1, 0) * (align - 1)) // align * align
)
mutant("04.3", "floor of the worst")(
    lambda slots, experts, align: slots // align * align + min(slots, experts) * (align - 1)
)
mutant("04.3", "all in one expert")(lambda slots, experts, align: -(-slots // align) * align + 0 * experts)
mutant("04.3", "capacity: every expert may get everything")(
    lambda slots, experts, align: experts * (-(-slots // align) * align)
)
mutant("04.3", "a float")(
    lambda slots, experts, align: (slots + min(slots, experts) * (align - 1)) // align * align / 1
)
mutant("04.3", "an array")(
    lambda slots, experts, align: jnp.asarray((slots + min(slots, experts) * (align - 1)) // align * align)
)
mutant("04.3", "experts and slots swapped")(
    lambda slots, experts, align: (experts + min(slots, experts) * (align - 1)) // align * align
)


# ---------------------------------------------------------------- 04.4 a row for each slot


def make_places(
    ids=clean,
    rank=lambda member: jnp.cumsum(member, axis=0) - member,
    pad=lambda load, align: -(-load // align) * align,
    start=lambda padded, load, align: jnp.cumsum(padded) - padded,
    nowhere=lambda row, held, num_rows: jnp.where(held, row, num_rows),
    flatten=lambda expert_ids: expert_ids.reshape(-1),
    back=lambda row, shape: row.reshape(shape),
):
    """A right answer, any part of which can be replaced."""

    def places(expert_ids, num_experts, align, num_rows):
        member = one_hot(ids(flatten(expert_ids), num_experts), num_experts)
        load = member.sum(0)
        first = start(pad(load, align), load, align)
        row = (member * (first + rank(member))).sum(1)
        return back(nowhere(row, member.any(1), num_rows), expert_ids.shape)

    return places


alternative("04.4", "a mutant's frame with every part right")(make_places())


@alternative("04.4", "the inverse of the sorted order")
def _(expert_ids, num_experts, align, num_rows):
    flat = clean(expert_ids.reshape(-1), num_experts)
    order = jnp.argsort(flat, stable=True)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(flat.size))
    load = one_hot(flat, num_experts).sum(0)
    padded = (load + align - 1) // align * align
    shift = jnp.append(jnp.cumsum(padded) - padded - jnp.cumsum(load) + load, 0)
    return jnp.where(flat < num_experts, place + shift[flat], num_rows).reshape(expert_ids.shape)


@alternative("04.4", "the package")
def _(expert_ids, num_experts, align, num_rows):
    from moe_course.grouping import group_by_expert

    groups = group_by_expert(expert_ids, num_experts, align=align)
    held = groups.row_of_slot < groups.token_of_row.shape[0]
    return jnp.where(held, groups.row_of_slot, num_rows)


mutant("04.4", "align ignored")(make_places(pad=lambda load, align: load))
mutant("04.4", "starts rounded in place of sizes")(
    make_places(start=lambda padded, load, align: -(-(jnp.cumsum(load) - load) // align) * align)
)
mutant("04.4", "sizes rounded down")(make_places(pad=lambda load, align: load // align * align))
mutant("04.4", "full groups get another tile")(
    make_places(pad=lambda load, align: (load // align + 1) * align)
)
mutant("04.4", "empty groups get a tile")(
    make_places(pad=lambda load, align: jnp.maximum(-(-load // align), 1) * align)
)
mutant("04.4", "align added in place of rounding")(make_places(pad=lambda load, align: load + align - 1))
mutant("04.4", "ends in place of starts")(make_places(start=lambda padded, load, align: jnp.cumsum(padded)))
mutant("04.4", "the ends, from behind")(
    make_places(start=lambda padded, load, align: jnp.cumsum(padded) - load)
)
mutant("04.4", "starts of the last expert first")(
    make_places(start=lambda padded, load, align: (jnp.cumsum(padded[::-1]) - padded[::-1])[::-1])
)
mutant("04.4", "ranks from 1")(make_places(rank=lambda member: jnp.cumsum(member, axis=0)))
mutant("04.4", "ranks from behind")(
    make_places(rank=lambda member: jnp.cumsum(member[::-1], axis=0)[::-1] - member)
)
mutant("04.4", "ranks over experts")(make_places(rank=lambda member: jnp.cumsum(member, axis=1) - member))
mutant("04.4", "no ranks: all on the first row")(make_places(rank=lambda member: 0 * member))
mutant("04.4", "strays go to row 0")(make_places(nowhere=lambda row, held, num_rows: jnp.where(held, row, 0)))
mutant("04.4", "strays go to -1")(make_places(nowhere=lambda row, held, num_rows: jnp.where(held, row, -1)))
mutant("04.4", "strays go to the last row")(
    make_places(nowhere=lambda row, held, num_rows: jnp.where(held, row, num_rows - 1))
)
mutant("04.4", "strays go to row 0, unmasked")(make_places(nowhere=lambda row, held, num_rows: row))
mutant("04.4", "strays belong to the last expert")(
    make_places(ids=lambda flat, experts: jnp.clip(flat, 0, experts - 1))
)
mutant("04.4", "-1 is the last expert")(
    make_places(ids=lambda flat, experts: jnp.where(flat < 0, flat + experts, flat))
)
mutant("04.4", "column by column")(
    make_places(flatten=lambda ids: ids.T.reshape(-1), back=lambda row, shape: row.reshape(shape[::-1]).T)
)
mutant("04.4", "flattened by columns, unflattened by rows")(
    make_places(flatten=lambda ids: ids.T.reshape(-1))
)
mutant("04.4", "flat")(make_places(back=lambda row, shape: row))


@mutant("04.4", "strays go to row T K")
def _(expert_ids, num_experts, align, num_rows):
    return make_places()(expert_ids, num_experts, align, expert_ids.size)


@mutant("04.4", "the order in place of its inverse")
def _(expert_ids, num_experts, align, num_rows):
    return jnp.argsort(expert_ids.reshape(-1), stable=True).reshape(expert_ids.shape)


@mutant("04.4", "reads the sizes on the host")
def _(expert_ids, num_experts, align, num_rows):
    member = one_hot(expert_ids.reshape(-1), num_experts)
    starts = [0]
    for size in member.sum(0).tolist():
        starts.append(starts[-1] + -(-size // align) * align)
    row = (member * (jnp.array(starts[:-1]) + jnp.cumsum(member, axis=0) - member)).sum(1)
    return jnp.where(member.any(1), row, num_rows).reshape(expert_ids.shape)


# ---------------------------------------------------------------- 04.5 the gradient of permute


def take(rows, index):
    return rows.at[index].get(mode="fill", fill_value=0)


@alternative("04.5", "one pick at a time")
def _(d_rows, row_of_slot):
    total = jnp.zeros((row_of_slot.shape[0], d_rows.shape[1]), jnp.float32)
    for column in row_of_slot.T:
        total = total + take(d_rows, column).astype(jnp.float32)
    return total


@alternative("04.5", "clamped, then masked before the sum")
def _(d_rows, row_of_slot):
    if d_rows.shape[0] == 0:
        return jnp.zeros((row_of_slot.shape[0], d_rows.shape[1]), jnp.float32)
    copies = d_rows[jnp.minimum(row_of_slot, d_rows.shape[0] - 1)].astype(jnp.float32)
    return jnp.where((row_of_slot < d_rows.shape[0])[..., None], copies, 0).sum(1)


@alternative("04.5", "one more row, of zeros")
def _(d_rows, row_of_slot):
    padded = jnp.concatenate([d_rows, jnp.zeros_like(d_rows, shape=(1, d_rows.shape[1]))])
    return padded[row_of_slot].astype(jnp.float32).sum(1)


@mutant("04.5", "clamped: the last row")
def _(d_rows, row_of_slot):
    return d_rows[row_of_slot].astype(jnp.float32).sum(1)


@mutant("04.5", "jnp.take: NaN past the end")
def _(d_rows, row_of_slot):
    return jnp.take(d_rows, row_of_slot, axis=0).astype(jnp.float32).sum(1)


@mutant("04.5", "clamped, then multiplied by a mask")
def _(d_rows, row_of_slot):
    copies = d_rows[row_of_slot].astype(jnp.float32)
    return (copies * (row_of_slot < d_rows.shape[0])[..., None]).sum(1)


@mutant("04.5", "one copy")
def _(d_rows, row_of_slot):
    return take(d_rows, row_of_slot[:, 0]).astype(jnp.float32)


@mutant("04.5", "the last copy")
def _(d_rows, row_of_slot):
    return take(d_rows, row_of_slot[:, -1]).astype(jnp.float32)


@mutant("04.5", "the mean")
def _(d_rows, row_of_slot):
    return take(d_rows, row_of_slot).astype(jnp.float32).mean(1)


@mutant("04.5", "summed over the features")
def _(d_rows, row_of_slot):
    return take(d_rows, row_of_slot).astype(jnp.float32).sum(2)


@mutant("04.5", "no sum")
def _(d_rows, row_of_slot):
    return take(d_rows, row_of_slot).astype(jnp.float32)


@mutant("04.5", "summed in bfloat16")
def _(d_rows, row_of_slot):
    total = jnp.zeros((row_of_slot.shape[0], d_rows.shape[1]), d_rows.dtype)
    for column in row_of_slot.T:
        total = total + take(d_rows, column)
    return total.astype(jnp.float32)


@mutant("04.5", "rounded after the sum")
def _(d_rows, row_of_slot):
    return take(d_rows, row_of_slot).astype(jnp.float32).sum(1).astype(d_rows.dtype)


@mutant("04.5", "scatter-add over the rows")
def _(d_rows, row_of_slot):
    tokens, picks = row_of_slot.shape
    slots = jnp.repeat(jnp.arange(tokens), picks)
    total = jnp.zeros((tokens, d_rows.shape[1]), jnp.float32)
    return total.at[slots].add(take(d_rows, row_of_slot.reshape(-1)).astype(jnp.float32))


@mutant("04.5", "NaN turned into 0 everywhere, and clamped")
def _(d_rows, row_of_slot):
    return jnp.nan_to_num(d_rows[row_of_slot].astype(jnp.float32)).sum(1)


@mutant("04.5", "a product with one-hot rows")
def _(d_rows, row_of_slot):
    return jax.nn.one_hot(row_of_slot, d_rows.shape[0]).sum(1) @ d_rows.astype(jnp.float32)


@mutant("04.5", "slots read as [K, T]")
def _(d_rows, row_of_slot):
    tokens, picks = row_of_slot.shape
    return take(d_rows, row_of_slot.reshape(picks, tokens)).astype(jnp.float32).sum(0)


@mutant("04.5", "weights of a softmax that nobody asked for")
def _(d_rows, row_of_slot):
    copies = take(d_rows, row_of_slot).astype(jnp.float32)
    return (copies * jax.nn.softmax(row_of_slot.astype(jnp.float32), axis=1)[..., None]).sum(1)


@mutant("04.5", "row 0 counts as nowhere")
def _(d_rows, row_of_slot):
    return jnp.where((row_of_slot > 0)[..., None], take(d_rows, row_of_slot).astype(jnp.float32), 0).sum(1)


# ---------------------------------------------------------------- 04.6 combine


@alternative("04.6", "an einsum")
def _(rows, row_of_slot, weights):
    return jnp.einsum("tkd,tk->td", take(rows, row_of_slot).astype(jnp.float32), weights, precision="highest")


@alternative("04.6", "one pick at a time")
def _(rows, row_of_slot, weights):
    total = jnp.zeros((row_of_slot.shape[0], rows.shape[1]), jnp.float32)
    for column, weight in zip(row_of_slot.T, weights.T, strict=True):
        total = total + take(rows, column).astype(jnp.float32) * weight[:, None]
    return total


@alternative("04.6", "clamped, then masked before the product")
def _(rows, row_of_slot, weights):
    if rows.shape[0] == 0:
        return jnp.zeros((row_of_slot.shape[0], rows.shape[1]), jnp.float32)
    there = (row_of_slot < rows.shape[0])[..., None]
    copies = jnp.where(there, rows[jnp.minimum(row_of_slot, rows.shape[0] - 1)], 0).astype(jnp.float32)
    return (copies * weights[..., None]).sum(1)


@mutant("04.6", "no weights")
def _(rows, row_of_slot, weights):
    return take(rows, row_of_slot).astype(jnp.float32).sum(1)


@mutant("04.6", "weights normalised once more")
def _(rows, row_of_slot, weights):
    weights = weights / weights.sum(1, keepdims=True)
    return (take(rows, row_of_slot).astype(jnp.float32) * weights[..., None]).sum(1)


@mutant("04.6", "a softmax of the weights")
def _(rows, row_of_slot, weights):
    return (take(rows, row_of_slot).astype(jnp.float32) * jax.nn.softmax(weights, axis=1)[..., None]).sum(1)


@mutant("04.6", "the mean")
def _(rows, row_of_slot, weights):
    return (take(rows, row_of_slot).astype(jnp.float32) * weights[..., None]).mean(1)


@mutant("04.6", "picks in reverse")
def _(rows, row_of_slot, weights):
    return (take(rows, row_of_slot).astype(jnp.float32) * weights[:, ::-1, None]).sum(1)


@mutant("04.6", "weights sorted")
def _(rows, row_of_slot, weights):
    return (take(rows, row_of_slot).astype(jnp.float32) * -jnp.sort(-weights, axis=1)[..., None]).sum(1)


@mutant("04.6", "the largest weight alone")
def _(rows, row_of_slot, weights):
    best = jnp.argmax(weights, axis=1)[:, None]
    row, weight = (jnp.take_along_axis(a, best, axis=1) for a in (row_of_slot, weights))
    return take(rows, row[:, 0]).astype(jnp.float32) * weight


@mutant("04.6", "clamped: the last row")
def _(rows, row_of_slot, weights):
    return (rows[row_of_slot].astype(jnp.float32) * weights[..., None]).sum(1)


@mutant("04.6", "clamped, then the weights masked")
def _(rows, row_of_slot, weights):
    weights = jnp.where(row_of_slot < rows.shape[0], weights, 0)
    return (rows[row_of_slot].astype(jnp.float32) * weights[..., None]).sum(1)


@mutant("04.6", "clamped, then the products masked: the gradient is NaN")
def _(rows, row_of_slot, weights):
    if rows.shape[0] == 0:
        return jnp.zeros((row_of_slot.shape[0], rows.shape[1]), jnp.float32)
    products = rows[jnp.minimum(row_of_slot, rows.shape[0] - 1)].astype(jnp.float32) * weights[..., None]
    return jnp.where((row_of_slot < rows.shape[0])[..., None], products, 0).sum(1)


@mutant("04.6", "jnp.take: NaN past the end")
def _(rows, row_of_slot, weights):
    return (jnp.take(rows, row_of_slot, axis=0).astype(jnp.float32) * weights[..., None]).sum(1)


@mutant("04.6", "weights rounded to the rows' dtype")
def _(rows, row_of_slot, weights):
    return (take(rows, row_of_slot) * weights.astype(rows.dtype)[..., None]).astype(jnp.float32).sum(1)


@mutant("04.6", "summed in the rows' dtype")
def _(rows, row_of_slot, weights):
    products = take(rows, row_of_slot).astype(jnp.float32) * weights[..., None]
    return products.astype(rows.dtype).astype(jnp.float32).sum(1)


@mutant("04.6", "the rows' dtype")
def _(rows, row_of_slot, weights):
    return (take(rows, row_of_slot).astype(jnp.float32) * weights[..., None]).sum(1).astype(rows.dtype)


@mutant("04.6", "no gradient to the weights")
def _(rows, row_of_slot, weights):
    weights = jax.lax.stop_gradient(weights)
    return (take(rows, row_of_slot).astype(jnp.float32) * weights[..., None]).sum(1)


@mutant("04.6", "no gradient to the rows")
def _(rows, row_of_slot, weights):
    copies = jax.lax.stop_gradient(take(rows, row_of_slot)).astype(jnp.float32)
    return (copies * weights[..., None]).sum(1)


@mutant("04.6", "a custom rule that forgot the weights")
def _(rows, row_of_slot, weights):
    @jax.custom_vjp
    def weigh(copies, weights):
        return copies * weights[..., None]

    weigh.defvjp(lambda c, w: (weigh(c, w), w), lambda w, d: (d * w[..., None], None))
    return weigh(take(rows, row_of_slot).astype(jnp.float32), weights).sum(1)


@mutant("04.6", "a sum over the rows, scattered")
def _(rows, row_of_slot, weights):
    tokens, picks = row_of_slot.shape
    products = take(rows, row_of_slot.reshape(-1)).astype(jnp.float32) * weights.reshape(-1, 1)
    slots = jnp.repeat(jnp.arange(tokens), picks)
    return jnp.zeros((tokens, rows.shape[1]), jnp.float32).at[slots].add(products)


@mutant("04.6", "weights by row, in slot order")
def _(rows, row_of_slot, weights):
    flat = jnp.zeros(rows.shape[0]).at[jnp.arange(weights.size)].set(weights.reshape(-1), mode="drop")
    weighed = rows.astype(jnp.float32) * flat[:, None]
    return take(weighed, row_of_slot).sum(1)
