"""Grouping and the gathers: against loops, with poisoned padding, and with broken twins."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from moe_course import grouping
from moe_course.grouping import (
    Groups,
    group_by_expert,
    group_offsets,
    padded_rows,
    permute,
    unpermute,
    weights_of_rows,
)
from tests import oracle

FP32 = jnp.float32
grouped = jax.jit(group_by_expert, static_argnums=1, static_argnames="align")
SHAPES = [
    (0, 2, 4),
    (1, 1, 1),
    (1, 3, 3),
    (5, 2, 4),
    (4, 4, 4),
    (33, 2, 5),
    (70, 1, 8),
    (13, 5, 40),
]  # T, K, E


def loop_groups(ids, num_experts, align=1):
    """Rows by looping over experts and slots: [(first row, [slots])] per expert."""
    groups, first = [], 0
    for e in range(num_experts):
        slots = [s for s, i in enumerate(np.asarray(ids).reshape(-1)) if i == e]
        groups.append((first, slots))
        first += -(-len(slots) // align) * align
    return groups


def check_groups(groups: Groups, ids, num_experts, align):
    (num_tokens, top_k), num_rows = ids.shape, groups.token_of_row.shape[0]
    want_slot = np.full(num_rows, num_tokens * top_k)
    want_row = np.full(num_tokens * top_k, num_rows)
    want = loop_groups(ids, num_experts, align)
    for first, slots in want:
        for i, slot in enumerate(slots):
            want_slot[first + i], want_row[slot] = slot, first + i
    np.testing.assert_array_equal(groups.slot_of_row, want_slot)
    np.testing.assert_array_equal(groups.row_of_slot, want_row.reshape(ids.shape))
    np.testing.assert_array_equal(groups.token_of_row, want_slot // top_k)
    np.testing.assert_array_equal(groups.load, [len(slots) for _, slots in want])
    np.testing.assert_array_equal(groups.group_sizes, [-(-len(slots) // align) * align for _, slots in want])
    assert int(groups.group_sizes.sum()) <= num_rows
    assert all(leaf.dtype == jnp.int32 for leaf in jax.tree.leaves(groups))


def draw_ids(rng, num_tokens, top_k, num_experts, kind):
    if kind == "one takes all":
        return np.full((num_tokens, top_k), rng.integers(num_experts), np.int32)
    if kind == "bad ids":
        return rng.integers(-3, num_experts + 4, (num_tokens, top_k)).astype(np.int32)
    if kind == "nobody":
        return np.full((num_tokens, top_k), num_experts, np.int32)
    if kind == "few experts":
        return (rng.integers(0, 2, (num_tokens, top_k)) * (num_experts - 1)).astype(np.int32)
    return rng.integers(0, num_experts + (kind == "some masked"), (num_tokens, top_k)).astype(np.int32)


KINDS = ["any", "some masked", "one takes all", "few experts", "nobody", "bad ids"]


@pytest.mark.parametrize(("shape", "align"), [*((s, 8) for s in SHAPES), ((5, 2, 4), 1), ((33, 2, 5), 1)])
def test_groups_equal_a_loop(shape, align):
    for seed, kind in enumerate(KINDS):
        ids = draw_ids(np.random.default_rng(seed), *shape, kind)
        check_groups(grouped(jnp.asarray(ids), shape[2], align=align), ids, shape[2], align)


@settings(max_examples=80)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(KINDS),
    st.sampled_from([(33, 2, 5), (70, 1, 8)]),
    st.sampled_from([1, 8]),
)
def test_b50_groups_are_a_stable_partition(seed, kind, shape, align):
    ids = draw_ids(np.random.default_rng(seed), *shape, kind)
    check_groups(grouped(jnp.asarray(ids), shape[2], align=align), ids, shape[2], align)


@settings(max_examples=8)
@given(st.data())
def test_groups_of_any_shape(data):
    shape = [data.draw(st.integers(low, high)) for low, high in [(0, 70), (1, 4), (1, 9)]]
    align = data.draw(st.integers(1, 9))
    ids = draw_ids(
        np.random.default_rng(data.draw(st.integers(0, 99))), *shape, data.draw(st.sampled_from(KINDS))
    )
    check_groups(grouped(jnp.asarray(ids), shape[2], align=align), ids, shape[2], align)


def test_b41_every_pattern_of_empty_groups():
    for pattern in itertools.product([0, 1], repeat=8):
        slots = np.repeat(np.arange(8), np.array(pattern) * 3)
        ids = np.concatenate([slots, np.full(24 - len(slots), 8)]).astype(np.int32)[:, None]
        np.random.default_rng(sum(pattern)).shuffle(ids)
        check_groups(grouped(jnp.asarray(ids), 8, align=8), ids, 8, 8)


def test_the_check_notices_broken_groups():
    ids = draw_ids(np.random.default_rng(0), 33, 2, 5, "any")
    good = grouped(jnp.asarray(ids), 5)
    order = np.argsort(-ids.reshape(-1)[::-1], kind="stable")[::-1]  # unstable: reversed within an expert
    unstable = Groups(
        jnp.asarray(order // 2), jnp.asarray(order), good.row_of_slot, good.group_sizes, good.load
    )
    with pytest.raises(AssertionError):
        check_groups(unstable, ids, 5, 1)


# ---------------------------------------------------------------- sizes


@given(st.integers(0, 300), st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_padded_rows_hold_any_routing(num_slots, num_experts, align, seed):
    rng, rows = np.random.default_rng(seed), padded_rows(num_slots, num_experts, align)
    assert rows % align == 0
    # One slot for as many experts as there are, then the rest anywhere: the worst padding.
    load = np.bincount(np.arange(num_slots) % num_experts, minlength=num_experts)
    spread = np.bincount(rng.integers(0, num_experts, num_slots), minlength=num_experts)
    worst = np.minimum(np.arange(num_experts) < num_slots, 1)
    worst[0] += num_slots - worst.sum() if num_slots else 0
    for sizes in (load, spread, worst):
        assert (-(-sizes // align) * align).sum() <= rows
    assert rows <= num_slots + num_experts * (align - 1)


def test_b46_rows_past_int32_are_refused():
    assert padded_rows(524_288, 256, 128) * 7168 > 2**31  # elements: would not fit; rows do
    with pytest.raises(ValueError, match=r"2147483647"):
        padded_rows(2**31, 8)
    with pytest.raises(ValueError, match="fewer tokens"):
        padded_rows(2**31 - 5, 8, 128)
    with pytest.raises(ValueError, match="align is 0"):
        padded_rows(8, 8, 0)
    with pytest.raises(ValueError, match="int32"):
        jax.eval_shape(lambda ids: group_by_expert(ids, 8), jax.ShapeDtypeStruct((2**30, 4), jnp.int32))


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9))
def test_b46_offsets_never_go_negative(sizes):
    sizes += [0] * (9 - len(sizes))
    starts = np.concatenate([[0], np.cumsum(np.array(sizes, np.int64))[:-1]])
    np.testing.assert_array_equal(
        jax.jit(group_offsets)(jnp.asarray(sizes, jnp.int32)), np.minimum(starts, 2**31 - 1)
    )


def test_b92_one_trace_whatever_the_routing():
    traces = []

    @jax.jit
    def step(ids, x):
        traces.append(1)
        groups = group_by_expert(ids, 5)
        return unpermute(permute(x, groups), groups)

    for seed, kind in enumerate(KINDS):
        step(draw_ids(np.random.default_rng(seed), 33, 2, 5, kind), np.ones((33, 3), np.float32))
    assert len(traces) == 1


# ---------------------------------------------------------------- moving data: ours and a plain twin


def naive_permute(x, groups):
    """Gather with a mask; JAX's own derivative."""
    known = groups.token_of_row < len(x)
    return jnp.where(known[:, None], x[jnp.minimum(groups.token_of_row, len(x) - 1)], 0)


def naive_unpermute(rows, groups, weights=None):
    top_k = groups.row_of_slot.shape[1]
    known = groups.row_of_slot < len(rows)
    copies = jnp.where(known[..., None], rows[jnp.minimum(groups.row_of_slot, len(rows) - 1)], 0)
    weights = jnp.ones((len(copies), top_k), rows.dtype) if weights is None else weights
    return (copies * weights[..., None]).sum(1)


def with_gradient(forward, backward):
    """``forward`` with a custom derivative, as the broken twins of B50 and B51 had it."""
    fn = jax.custom_vjp(forward)
    fn.defvjp(lambda *args: (forward(*args), args), backward)
    return fn


def one_copy(residuals, dout):
    _, groups = residuals
    return dout[jnp.minimum(groups.row_of_slot[:, 0], len(dout) - 1)], None


def no_weight_gradient(residuals, dout):
    drows, _ = jax.vjp(lambda r: naive_unpermute(r, *residuals[1:]), residuals[0])[1](dout)[0], None
    return drows, None, None


def times_mask(rows, groups, weights=None):
    known = (groups.row_of_slot < len(rows)).astype(rows.dtype)
    copies = rows[jnp.minimum(groups.row_of_slot, len(rows) - 1)] * known[..., None]
    return (copies * (1 if weights is None else weights[..., None])).sum(1)


BROKEN = {
    "gradient takes one copy": (with_gradient(naive_permute, one_copy), naive_unpermute),
    "weights get no gradient": (naive_permute, with_gradient(naive_unpermute, no_weight_gradient)),
    "rows cut by multiplying": (naive_permute, times_mask),
    "token index is slot index": (lambda x, g: naive_permute(x, _slots_as_tokens(g)), naive_unpermute),
    "weights forgotten": (naive_permute, lambda r, g, w: naive_unpermute(r, g)),
    "weights rolled": (naive_permute, lambda r, g, w: naive_unpermute(r, g, w[:, ::-1])),
}
RIGHT = {"ours": (permute, unpermute), "naive": (naive_permute, naive_unpermute)}


def _slots_as_tokens(g):
    return Groups(g.slot_of_row, g.slot_of_row, g.row_of_slot, g.group_sizes, g.load)


def poison(rows, groups):
    """NaN in every row that holds no slot, on the way forward."""
    used = groups.slot_of_row < groups.row_of_slot.size
    return jnp.where(used[:, None], rows, jnp.nan)


@jax.custom_vjp
def poison_back(rows, groups):
    """The identity; its gradient is NaN in rows that hold no slot, as a kernel may leave them."""
    return rows


poison_back.defvjp(lambda rows, groups: (rows, groups), lambda groups, d: (poison(d, groups), None))


@functools.cache
def layer(names, num_experts, align):
    """permute, one matrix per expert on poisoned rows, unpermute: value and gradients to everything."""
    move, back = (RIGHT | BROKEN)[names]

    def forward(x, kernels, weights, ids):
        groups = group_by_expert(ids, num_experts, align=align)
        rows = poison_back(move(x, groups), groups)
        used = groups.slot_of_row < groups.row_of_slot.size
        rows = jnp.where(used[:, None], rows, 0.0)
        ends = jnp.cumsum(groups.group_sizes)
        expert = jnp.minimum(jnp.searchsorted(ends, jnp.arange(len(rows)), side="right"), num_experts - 1)
        out = jnp.einsum("md,mdf->mf", rows, kernels[expert])
        return back(poison(out, groups), groups, weights)

    def fn(x, kernels, weights, ids, dout):
        out, pull = jax.vjp(lambda *args: forward(*args, ids), x, kernels, weights)
        return out, *pull(dout)

    return jax.jit(fn)


def check_layer(name, shape, align, seed, kind):
    """Everything equals a loop over tokens and picks, NaN in all rows that count for nobody."""
    (num_tokens, top_k, num_experts), rng = shape, np.random.default_rng(seed)
    ids = draw_ids(rng, *shape, kind)
    x, kernels, weights, dout = (
        np.float32(rng.normal(size=s))
        for s in [(num_tokens, 3), (num_experts, 3, 4), (num_tokens, top_k), (num_tokens, 4)]
    )
    got = layer(name, num_experts, align)(x, kernels, weights, ids, dout)
    want = [np.zeros(a.shape) for a in (dout, x, kernels, weights)]
    for t, k in np.ndindex(ids.shape):
        if 0 <= (e := ids[t, k]) < num_experts:
            want[0][t] += weights[t, k] * (x[t].astype(np.float64) @ kernels[e])
            want[1][t] += weights[t, k] * (kernels[e].astype(np.float64) @ dout[t])
            want[2][e] += weights[t, k] * np.outer(x[t].astype(np.float64), dout[t])
            want[3][t, k] = x[t].astype(np.float64) @ kernels[e] @ dout[t]
    for what, a, b in zip(("output", "dx", "dkernels", "dweights"), got, want, strict=True):
        oracle.assert_close(a, b, FP32, 3 * max(num_tokens, 4) * top_k, what)


LAYER_SHAPES = [(1, 1, 1), (4, 4, 4), (5, 2, 4)]


@pytest.mark.parametrize(
    ("name", "shape", "align"),
    [*(("ours", shape, 8) for shape in LAYER_SHAPES), ("ours", (5, 2, 4), 1), ("naive", (5, 2, 4), 8)],
)
def test_b42_b48_b50_b51_layer_equals_a_loop(name, shape, align):
    for seed, kind in enumerate(KINDS):
        check_layer(name, shape, align, seed, kind)


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.sampled_from(KINDS), st.sampled_from(LAYER_SHAPES))
def test_b42_b50_b51_layer_equals_a_loop_on_any_values(seed, kind, shape):
    check_layer("ours", shape, 8, seed, kind)


def test_no_tokens():
    check_layer("ours", (0, 2, 4), 8, 0, "any")


@pytest.mark.parametrize("name", BROKEN)
def test_b88_broken_twins_fail(name):
    def on_all_kinds():
        for seed, kind in enumerate(KINDS):
            check_layer(name, (5, 2, 4), 8, seed, kind)

    with pytest.raises(AssertionError):
        on_all_kinds()


# ---------------------------------------------------------------- details


def small():
    ids = jnp.asarray([[2, 0], [0, 3], [4, 4]], jnp.int32)  # the last token is masked
    return grouped(ids, 4), jnp.asarray([[1.0, 2.0], [3.0, 4.0], [float("nan")] * 2])


def test_b50_gradient_of_permute_sums_the_copies():
    groups, x = small()
    grad = jax.jit(jax.grad(lambda x: permute(x, groups).sum()))(x)
    np.testing.assert_array_equal(grad, [[2, 2], [2, 2], [0, 0]])


def test_worked_example_and_padding_rows():
    groups, x = small()
    np.testing.assert_array_equal(permute(x, groups), [[1, 2], [3, 4], [1, 2], [3, 4], [0, 0], [0, 0]])
    np.testing.assert_array_equal(groups.group_sizes, [2, 0, 1, 1])
    np.testing.assert_array_equal(unpermute(permute(x, groups), groups), [[2, 4], [6, 8], [0, 0]])


def test_b51_weights_of_rows_and_their_gradient():
    groups, _ = small()
    weights = jnp.asarray([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    np.testing.assert_array_equal(weights_of_rows(weights, groups), np.float32([0.2, 0.3, 0.1, 0.4, 0, 0]))
    poisoned = jnp.asarray([1.0, 2.0, 3.0, 4.0, float("nan"), float("nan")])
    _, pull = jax.vjp(lambda w: weights_of_rows(w, groups), weights)
    np.testing.assert_array_equal(pull(poisoned)[0], [[3, 1], [2, 4], [0, 0]])


def test_b11_the_gate_weighs_the_answer_not_the_question():
    """relu(x)^2 with x = 2, p = .5: p y(x) = 2, while y(p x) = 1."""
    groups = grouped(jnp.zeros((1, 1), jnp.int32), 1)
    x, p = jnp.asarray([[2.0]]), jnp.asarray([[0.5]])
    right = unpermute(jax.nn.relu(permute(x, groups)) ** 2, groups, p)
    wrong = unpermute(jax.nn.relu(permute(x * p, groups)) ** 2, groups)
    assert (float(right[0, 0]), float(wrong[0, 0])) == (2.0, 1.0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_combine_adds_in_float32(dtype):
    """256 and eight times 1: in bfloat16 each 1 is lost. The same holds for the gradient of permute."""
    big = 256.0 if dtype == jnp.bfloat16 else 2048.0
    groups = grouped(jnp.arange(9, dtype=jnp.int32)[None], 9)
    rows = jnp.asarray([big] + [1.0] * 8, dtype)[:, None]
    out = jax.jit(unpermute)(rows, groups)
    assert out.dtype == dtype
    assert float(out[0, 0]) == big + 8
    grad = jax.jit(jax.vjp(permute, jnp.ones((1, 1), dtype), groups)[1])(rows)[0]
    assert grad.dtype == dtype
    assert float(grad[0, 0]) == big + 8


def test_no_data_is_scattered():
    """Gathers both ways: the only scatter in value and gradient is the one of int32 slots."""
    ids = jnp.asarray(draw_ids(np.random.default_rng(0), 33, 2, 5, "any"))

    def loss(move, back, x, weights):
        groups = group_by_expert(ids, 5)
        return (back(move(x, groups), groups, weights) ** 2).sum()

    def scatters(name):
        fn = jax.grad(functools.partial(loss, *RIGHT[name]), argnums=(0, 1))
        text = str(jax.make_jaxpr(fn)(jnp.ones((33, 4)), jnp.ones((33, 2))))
        return text.count("scatter-add"), text.count("scatter[")

    assert scatters("ours") == (0, 1)
    assert scatters("naive")[0] > 0


def test_vmap_equals_a_loop():
    ids = jnp.asarray(
        np.stack([draw_ids(np.random.default_rng(i), 13, 2, 4, "some masked") for i in range(3)])
    )
    x, weights = jnp.ones((3, 13, 2)) * jnp.arange(13.0)[None, :, None], jnp.ones((3, 13, 2)) * 0.3

    def loss(x, weights, ids):
        groups = group_by_expert(ids, 4, align=4)
        return (unpermute(permute(x, groups), groups, weights) ** 2).sum()

    grad = jax.grad(loss, argnums=(0, 1))
    together, one = jax.jit(jax.vmap(grad))(x, weights, ids), jax.jit(grad)
    for i in range(3):
        for a, b in zip(together, one(x[i], weights[i], ids[i]), strict=True):
            oracle.assert_close(a[i], b, FP32, 4)


@pytest.mark.parametrize("replicated", ["x", "weights", "ids"])
def test_inside_shard_map_with_replication_checked(devices, replicated):
    """Each device groups its own tokens; a replicated input gets the gradient summed over devices."""
    mesh = jax.make_mesh((8,), ("tokens",), axis_types=(AxisType.Auto,), devices=devices)
    rng = np.random.default_rng(0)
    full = {
        "x": np.float32(rng.normal(size=(48, 3))),
        "weights": np.float32(rng.normal(size=(48, 2))),
        "ids": draw_ids(rng, 48, 2, 4, "some masked"),
    }
    full[replicated] = full[replicated][:6]
    specs = tuple(P() if name == replicated else P("tokens") for name in full)

    def part(x, weights, ids):
        groups = group_by_expert(ids, 4, align=8)
        rows = permute(x, groups) * weights_of_rows(weights, groups)[:, None]
        return (unpermute(jnp.sin(rows), groups, weights) ** 2).sum()

    def sharded(*args):
        fn = jax.shard_map(
            lambda *a: lax.psum(part(*a), "tokens"), mesh=mesh, in_specs=specs, out_specs=P(), check_vma=True
        )
        return fn(*args)

    one = jax.jit(jax.value_and_grad(part, argnums=(0, 1)))
    value, grads = 0.0, [np.zeros(full[name].shape) for name in ("x", "weights")]
    for i in range(8):
        cut = {name: slice(None) if name == replicated else slice(6 * i, 6 * i + 6) for name in full}
        part_value, part_grads = one(*(full[name][cut[name]] for name in full))
        value += float(part_value)
        for grad, name, part_grad in zip(grads, ("x", "weights"), part_grads, strict=True):
            grad[cut[name]] += part_grad

    got, got_grads = jax.jit(jax.value_and_grad(sharded, argnums=(0, 1)))(*full.values())
    oracle.assert_close(got, value, FP32, 48)
    for a, b in zip(got_grads, grads, strict=True):
        oracle.assert_close(a, b, FP32, 48)


def test_sorting_helpers_count_in_blocks():
    """The rank within an expert is right across block borders."""
    ids = np.random.default_rng(0).integers(0, 3, 5 * grouping._BLOCK + 7).astype(np.int32)
    rank, load = jax.jit(grouping._rank_within_expert, static_argnums=1)(ids, 3)
    np.testing.assert_array_equal(rank, [(ids[:i] == e).sum() for i, e in enumerate(ids)])
    np.testing.assert_array_equal(load, np.bincount(ids, minlength=3))
