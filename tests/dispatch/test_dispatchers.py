"""One suite for all dispatchers: against plain indexing, against each other, short of room, poisoned."""

import numpy as np
import pytest

from moe_course.dispatch import DISPATCHERS, dedup, ledger
from moe_course.dispatch import exchange as exchange_module
from tests.dispatch.dispatch_cases import (
    CASES,
    EXCHANGES,
    RAGGED_BUFFERS,
    D,
    E,
    K,
    T,
    compiled,
    expected,
    plan_for,
    probe_for,
    routing_case,
)
from tests.oracle import assert_close, relative_error

MESHES = [(1, 1, 2), (1, 1, 4), (1, 1, 8), (1, 2, 4), (2, 2, 2)]
FOUR = (1, 1, 4)


def check_case(shape, dispatcher, case):
    x, ids, weights = routing_case(case, ranks=int(np.prod(shape)))
    plan, probe = plan_for(shape, dispatcher), probe_for(x)
    (out, sent), (dx, dweights) = compiled(shape, plan)(x, ids, weights, probe)

    assert_close(out, expected(x, ids, weights), np.float32, K, "result")
    factor = np.where(ids < E, ids + 1.0, 0.0)
    assert_close(
        dx, probe * (factor * weights).sum(1, keepdims=True), np.float32, K, "gradient of the tokens"
    )
    dots = (probe * np.where(ids[:, :1] < E, x, 0)).sum(1, keepdims=True)
    assert_close(dweights, factor * dots, np.float32, D, "gradient of the weights")

    books = ledger.count(sent)
    made = int((ids < E).sum())
    assert [int(v) for v in vars(books).values()] == [made] * 5
    assert ledger.check_pairs(ledger.pair_books(sent)) is None
    assert sent.demand.max() <= plan.capacity


@pytest.mark.parametrize("dispatcher", EXCHANGES)
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_results_gradients_and_books_equal_indexing(shape, dispatcher):
    """Every routing through one compilation: masked tokens hold NaN, and so do all unused rows."""
    for case in CASES if shape == FOUR else ["random", "masked"]:
        check_case(shape, dispatcher, case)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_an_expert_axis_of_one_exchanges_nothing(dispatcher):
    check_case((1, 1, 1), dispatcher, "masked")


@pytest.mark.parametrize("case", CASES)
def test_receive_buffers_are_the_same_whoever_filled_them(case):
    """Rows, weights and groups, bit for bit: expert order, senders in order, then tokens, then slots."""
    x, ids, weights = routing_case(case)
    sent = [compiled(FOUR, plan_for(FOUR, d))(x, ids, weights, probe_for(x))[0][1] for d in RAGGED_BUFFERS]
    per = E // 4
    for rank in range(4):
        slots = sorted((e, t, k) for (t, k), e in np.ndenumerate(ids) if e // per == rank and e < E)
        want = np.array([x[t] for _, t, _ in slots], np.float32).reshape(-1, D)
        want_weights = np.array([weights[t, k] for _, t, k in slots], np.float32)
        for one in sent:
            rows = one.rows.reshape(4, -1, D)[rank]
            assert np.array_equal(rows[: len(slots)], want)
            assert not rows[len(slots) :].any()
            assert np.array_equal(one.row_weights.reshape(4, -1)[rank][: len(slots)], want_weights)
            assert one.demand[rank] == len(slots)
            assert one.group_sizes[rank].tolist() == [
                sum(s[0] == rank * per + e for s in slots) for e in range(per)
            ]


TIGHT = 4 * 7
"""Receive rows: enough for the balanced cases (24 copies a rank), not for a hot expert."""


@pytest.mark.parametrize("dispatcher", RAGGED_BUFFERS)
def test_b56_bits_do_not_depend_on_the_buffer(dispatcher):
    """The trainer re-runs a step in a larger bucket and promises the same bits."""
    x, ids, weights = routing_case("masked")
    results = [
        compiled(FOUR, plan_for(FOUR, dispatcher, capacity))(x, ids, weights, probe_for(x))
        for capacity in (None, TIGHT)
    ]
    assert results[1][0][1].demand.max() <= TIGHT
    assert np.array_equal(results[0][0][0], results[1][0][0])
    for a, b in zip(results[0][1], results[1][1], strict=True):
        assert np.array_equal(a, b)


def kept_of(dispatcher, ids, capacity, ranks=4):
    """Which slots fit: by hand, from the order in which each buffer fills."""
    per, local = E // ranks, T // ranks
    kept = np.zeros_like(ids, bool)
    for rank in range(ranks):
        here = [(t, k) for (t, k), e in np.ndenumerate(ids) if e < E and e // per == rank]
        if dispatcher == "dedup":  # wire rows are cut first: by sender, then token
            tokens = sorted({t for t, _ in here})[: min(capacity, ranks * local)]
            here = [slot for slot in here if slot[0] in tokens]
        here.sort(key=lambda slot: (ids[slot], slot))
        for slot in here[:capacity]:
            kept[slot] = True
    return kept


@pytest.mark.parametrize("dispatcher", RAGGED_BUFFERS)
@pytest.mark.parametrize("case", ["one hot expert", "uneven demand"])
def test_b56_overflow_is_counted_exactly_and_drops_the_end_of_the_buffer(dispatcher, case):
    x, ids, weights = routing_case(case)
    (out, sent), grads = compiled(FOUR, plan_for(FOUR, dispatcher, TIGHT))(x, ids, weights, probe_for(x))
    demand = [int(((ids < E) & (ids // 2 == rank)).sum()) for rank in range(4)]
    assert sent.demand.tolist() == demand
    assert max(demand) > TIGHT
    kept = kept_of(dispatcher, ids, TIGHT)
    books = ledger.count(sent)
    assert int(books.made) == ids.size
    assert int(books.computed) == int(books.combined) == kept.sum()
    assert int(books.dropped) == ids.size - kept.sum() > 0
    assert ledger.check_pairs(ledger.pair_books(sent)) is not None
    assert_close(out, expected(x, np.where(kept, ids, E), weights), np.float32, K)  # dropped copies add 0
    assert all(np.isfinite(g).all() for g in grads)


def test_b70_a_token_travels_once_per_rank():
    """Rows on the wire are the distinct (token, rank) pairs; copies are still all counted."""
    x, ids, weights = routing_case("masked")
    (_, sent), _ = compiled(FOUR, plan_for(FOUR, "dedup"))(x, ids, weights, probe_for(x))
    books = ledger.pair_books(sent)
    for sender in range(4):
        mine = ids[sender * T // 4 : (sender + 1) * T // 4]
        for receiver in range(4):
            there = (mine < E) & (mine // 2 == receiver)
            assert books.made[0, sender, receiver] == there.sum()
            for what in ("sent", "received", "combined"):
                assert books.rows[what][0, sender, receiver] == there.any(1).sum()
    assert books.rows["sent"].sum() < books.sent.sum()


def test_b70_distinct_ranks_of_a_token():
    owner = np.array([[2, 0, 2], [1, 1, 1], [4, 4, 4], [3, 4, 0]], np.int32)
    assert dedup.distinct(owner, 4).tolist() == [[0, 2, 4], [1, 4, 4], [4, 4, 4], [0, 3, 4]]
    assert dedup.distinct(np.array([[1, 0, 1, 0]], np.int32), 2).tolist() == [[0, 1]]


# ---------------------------------------------------------------- broken twins: the suite must fail them


def twin_output(dispatcher, case="random"):
    x, ids, weights = routing_case(case)
    (out, sent), _ = compiled.__wrapped__(FOUR, plan_for(FOUR, dispatcher))(x, ids, weights, probe_for(x))
    return relative_error(out, expected(x, ids, weights)), sent


def test_broken_twin_receivers_view_of_offsets(monkeypatch):
    """B54's mistake: the receiver's own landing offsets where the sender's are due."""
    honest = exchange_module.route_of_rank

    def mistaken(layout, rank):
        turned = exchange_module.Layout(layout.taken_from, layout.kept, layout.lands_at.transpose(1, 0, 2))
        return honest(turned, rank)

    monkeypatch.setattr("moe_course.dispatch.ragged.route_of_rank", mistaken)
    assert not twin_output("ragged")[0] < 1e-3


def test_broken_twin_dedup_counts_a_rank_twice(monkeypatch):
    """B70's mistake: one row per expert sent, each with the rank's whole sum coming back."""
    monkeypatch.setattr(dedup, "distinct", lambda owner, ranks: owner)
    error, sent = twin_output("dedup")
    assert not error < 1e-3
    assert ledger.check(**{k: int(v) for k, v in vars(ledger.count(sent)).items()}) is not None


def test_broken_twin_all_gather_adds_ranks_twice(monkeypatch):
    from moe_course.dispatch import all_gather

    honest = all_gather.scatter_sums
    monkeypatch.setattr(all_gather, "scatter_sums", lambda sums, dtype: 2 * honest(sums, dtype))
    assert not twin_output("all_gather")[0] < 1e-3
