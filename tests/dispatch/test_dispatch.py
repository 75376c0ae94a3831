"""What only the padded all-to-all does, one and all experts per token, and plans."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_course.dispatch import DispatchPlan, combine, dispatch, ledger
from moe_course.dispatch.plan import bucket_capacity, largest_bucket, worst_case_capacity
from moe_course.errors import SettingError
from moe_course.parallel import MeshConfig, batch_sharding, make_mesh
from moe_course.routing import Routing
from tests.dispatch.dispatch_cases import QUICK
from tests.oracle import relative_error

D, E = 5, 8


def random_case(seed: int, tokens: int, top_k: int, hot: int | None = None, masked: float = 0.0):
    """x [T, D], expert ids [T, K] (distinct per token, or E where masked), weights."""
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(E)[:top_k] for _ in range(tokens)]).astype(np.int32)
    if hot is not None:
        ids = (hot + np.arange(top_k, dtype=np.int32) + np.zeros((tokens, 1), np.int32)) % E
    weights = rng.uniform(0.1, 1.0, ids.shape).astype(np.float32)
    gone = rng.uniform(size=tokens) < masked
    ids[gone], weights[gone] = E, 0.0
    return rng.standard_normal((tokens, D)).astype(np.float32), ids, weights


def on_mesh(shape, fn, *arrays):
    mesh = make_mesh(MeshConfig(*shape))
    arrays = [jax.device_put(a, batch_sharding(mesh)) for a in arrays]
    with jax.set_mesh(mesh):
        return jax.tree.map(np.asarray, jax.jit(fn, compiler_options=QUICK)(*arrays))


def plan_for(shape, tokens, top_k, capacity=None):
    ranks = shape[2]
    worst = worst_case_capacity(tokens // int(np.prod(shape)), top_k, E, ranks)
    return DispatchPlan(E, ranks, worst if capacity is None else capacity)


def layer(x, ids, weights, plan):
    """Each expert e multiplies its rows by (e + 1): the result says which expert saw which token."""
    sent = dispatch(x, Routing(ids, weights, None), plan=plan)
    ranks, per = plan.ranks, plan.experts_per_rank
    rows = sent.rows.reshape(sent.group_sizes.shape[0], -1, D)
    ends = jnp.cumsum(sent.group_sizes, axis=1)
    local = (jnp.arange(rows.shape[1])[None, :, None] >= ends[:, None, :]).sum(-1)
    rank = jnp.arange(rows.shape[0]) % ranks
    factor = (rank[:, None] * per + local + 1).astype(jnp.float32)
    out = jnp.where((local < per)[..., None], rows * factor[..., None], 0.0)
    return combine(out.reshape(-1, D) * sent.row_weights[:, None], sent), sent


def expected(x, ids, weights):
    factor = np.where(ids < E, ids + 1.0, 0.0) * weights
    return x.astype(np.float64) * factor.sum(1, keepdims=True)


@pytest.mark.parametrize(
    ("shape", "top_k", "hot", "masked"),
    [
        ((1, 1, 1), 8, None, 0.5),
        ((2, 1, 2), 1, None, 0.3),
        ((1, 2, 4), 2, 6, 0.0),
        ((1, 1, 8), 8, None, 0.5),
    ],
)
def test_dispatch_combine_equals_indexing(shape, top_k, hot, masked):
    x, ids, weights = random_case(7, 64, top_k, hot, masked)
    plan = plan_for(shape, 64, top_k)
    out, sent = on_mesh(shape, lambda *a: layer(*a, plan), x, ids, weights)
    assert relative_error(out, expected(x, ids, weights)) < 1e-6
    books = ledger.count(sent)
    made = int((ids < E).sum())
    assert [int(v) for v in vars(books).values()] == [made] * 5
    assert ledger.check(**{k: int(v) for k, v in vars(books).items()}) is None
    if plan.ranks > 1:
        assert sent.demand.max() <= plan.capacity


def test_rows_are_bit_identical_in_any_sufficient_buffer():
    """The bucket rule re-runs a step in a larger buffer and promises the same bits."""
    x, ids, weights = random_case(3, 64, 3)
    shape, results = (1, 2, 4), []
    for capacity in (4 * 24, 4 * 10):
        plan = plan_for(shape, 64, 3, capacity)
        out, sent = on_mesh(shape, lambda *a, plan=plan: layer(*a, plan), x, ids, weights)
        assert sent.demand.max() <= capacity
        results.append(out)
    assert np.array_equal(results[0], results[1])


@pytest.mark.parametrize("hot", [0, 5])
def test_overflow_is_counted_not_hidden(hot):
    """demand says what was asked before any limit; dropped copies are exactly the latest, and add zero."""
    shape, tokens, top_k, ranks, pair = (1, 1, 4), 32, 2, 4, 3
    x, ids, weights = random_case(5, tokens, top_k, hot=hot)
    plan = plan_for(shape, tokens, top_k, ranks * pair)
    out, sent = on_mesh(shape, lambda *a: layer(*a, plan), x, ids, weights)
    per_rank = tokens // ranks
    # Without a limit, by hand: copies of every (sender, receiver) pair in (expert, token, slot) order.
    kept = np.zeros_like(ids, bool)
    largest_pair = 0
    for sender, receiver in itertools.product(range(ranks), range(ranks)):
        local = ids[sender * per_rank : (sender + 1) * per_rank]
        slots = [(e, t, k) for (t, k), e in np.ndenumerate(local) if e // plan.experts_per_rank == receiver]
        largest_pair = max(largest_pair, len(slots))
        for _, t, k in sorted(slots)[:pair]:
            kept[sender * per_rank + t, k] = True
    assert sent.demand.max() == ranks * largest_pair > plan.capacity
    books = ledger.count(sent)
    assert int(books.made) == tokens * top_k
    assert int(books.sent) == int(books.received) == int(books.computed) == int(books.combined) == kept.sum()
    assert int(books.dropped) == tokens * top_k - kept.sum() > 0
    assert relative_error(out, expected(x, np.where(kept, ids, E), weights)) < 1e-6


def test_ledger_check_names_the_first_loss():
    assert ledger.check(8, 8, 8, 8, 8) is None
    assert ledger.check(8, 8, 8, 7, 7) == "8 token copies received but 7 computed"


def test_buckets_double_up_to_the_worst_case():
    args = {"factor": 1.5, "tokens_per_rank": 64, "top_k": 3, "num_experts": 16, "ranks": 4}
    sizes = [bucket_capacity(b, **args) for b in range(largest_bucket(**args) + 1)]
    assert sizes == [288, 576, 768]
    assert sizes[-1] == worst_case_capacity(64, 3, 16, 4)
    assert bucket_capacity(9, **args) == sizes[-1]


def test_plans_that_cannot_work_say_why():
    with pytest.raises(SettingError, match="6 experts do not divide over 4 ranks"):
        DispatchPlan(6, 4, 8)
    with pytest.raises(SettingError, match="capacity 10 is not a multiple of 4"):
        DispatchPlan(8, 4, 10)
    x, ids, weights = random_case(0, 8, 1)
    with pytest.raises(SettingError, match="for 2 expert ranks but the mesh has 4"):
        on_mesh((1, 1, 4), lambda *a: layer(*a, DispatchPlan(E, 2, 8))[0], x, ids, weights)


def test_broken_twin_wrong_offsets_is_caught(monkeypatch):
    """Sending every block one row late must fail the comparison that the tests above rest on."""
    from moe_course.dispatch import all_to_all

    honest = all_to_all._first_rows
    monkeypatch.setattr(all_to_all, "_first_rows", lambda sizes, pair: honest(sizes, pair)[:, ::-1])
    x, ids, weights = random_case(7, 64, 3)
    plan = plan_for((1, 1, 4), 64, 3)
    out, _ = on_mesh((1, 1, 4), lambda *a: layer(*a, plan), x, ids, weights)
    assert not relative_error(out, expected(x, ids, weights)) < 1e-3
