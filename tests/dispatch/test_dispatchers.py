"""One suite for all dispatchers: against plain indexing, against each other, short of room, poisoned."""

import jax
import numpy as np
import pytest

from moe_course import dispatch as dispatch_package
from moe_course.dispatch import DISPATCHERS, hierarchical, hop, ledger, local
from moe_course.dispatch import exchange as exchange_module
from moe_course.errors import SettingError
from moe_course.parallel import MeshConfig, make_mesh
from tests.dispatch.dispatch_cases import (
    CASES,
    EXCHANGES,
    SAME_BUFFERS,
    SUMMED_DEMAND,
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

pytestmark = pytest.mark.thorough

MESHES = [(1, 1, 4), (2, 2, 2)]
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


def test_an_expert_axis_of_one_exchanges_nothing():
    for dispatcher in DISPATCHERS:
        assert dispatch_package._dispatcher(plan_for((1, 1, 1), dispatcher)) is local
    check_case((1, 1, 1), "dedup", "masked")
    check_case((2, 1, 1), "hierarchical", "masked")


def test_hierarchical_needs_a_node_axis_and_says_so():
    plan = plan_for(FOUR, "hierarchical")
    wants = pytest.raises(SettingError, match=r"needs a mesh with a node axis. Set --mesh.nodes")
    with jax.set_mesh(make_mesh(MeshConfig(*FOUR))), wants:
        dispatch_package._dispatcher(plan)
    with pytest.raises(SettingError, match="expert axis of 4 does not divide over 3 nodes"):
        MeshConfig(*FOUR, nodes=3).validate(4, 8, 4)


@pytest.mark.parametrize("case", CASES)
def test_receive_buffers_are_the_same_whoever_filled_them(case):
    """Rows, weights and groups, bit for bit: expert order, senders in order, then tokens, then slots."""
    x, ids, weights = routing_case(case)
    sent = [compiled(FOUR, plan_for(FOUR, d))(x, ids, weights, probe_for(x))[0][1] for d in SAME_BUFFERS]
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


@pytest.mark.parametrize("dispatcher", SUMMED_DEMAND)
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


def kept_of(dispatcher, ids, capacity, ranks=4, nodes=2):
    """Which slots fit: by hand, from the order in which each buffer fills."""
    per, local, places = E // ranks, T // ranks, ranks // nodes
    kept = np.zeros_like(ids, bool)
    relayed = {}  # per node: tokens that its relays have room for
    for node in range(nodes):
        bound_for = ((ids < E) & (ids // (per * places) == node)).any(1)
        relays = [[t for t in np.flatnonzero(bound_for) if t // local % places == p] for p in range(places)]
        relayed[node] = {t for relay in relays for t in relay[: min(nodes * local, places * capacity)]}
    for rank in range(ranks):
        here = [(t, k) for (t, k), e in np.ndenumerate(ids) if e < E and e // per == rank]
        place = {t: (t // local, t) for t, _ in here}  # arrival: by sender, then token
        if dispatcher == "hierarchical":  # by relay, which is the sender's place in its node, then by node
            place = {t: (t // local % places, t) for t in place if t in relayed[rank // places]}
        if dispatcher in ("dedup", "hierarchical"):  # wire rows are cut first
            tokens = sorted(place, key=place.get)[: min(capacity, ranks * local)]
            here = [slot for slot in here if slot[0] in tokens]
        here.sort(key=lambda slot: (ids[slot], place[slot[0]], slot))
        for slot in here[:capacity]:
            kept[slot] = True
    return kept


def check_overflow(dispatcher, case, capacity):
    x, ids, weights = routing_case(case)
    (out, sent), grads = compiled(FOUR, plan_for(FOUR, dispatcher, capacity))(x, ids, weights, probe_for(x))
    demand = [int(((ids < E) & (ids // 2 == rank)).sum()) for rank in range(4)]
    assert sent.demand.tolist() == demand
    assert max(demand) > capacity
    kept = kept_of(dispatcher, ids, capacity)
    books = ledger.count(sent)
    assert int(books.made) == (ids < E).sum()
    assert int(books.computed) == int(books.combined) == kept.sum()
    assert int(books.dropped) == (ids < E).sum() - kept.sum() > 0
    assert ledger.check_pairs(ledger.pair_books(sent)) is not None
    assert_close(out, expected(x, np.where(kept, ids, E), weights), np.float32, K)  # dropped copies add 0
    assert all(np.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("dispatcher", SUMMED_DEMAND)
@pytest.mark.parametrize("case", ["one hot expert", "uneven demand"])
def test_b56_overflow_is_counted_exactly_and_drops_the_end_of_the_buffer(dispatcher, case):
    check_overflow(dispatcher, case, TIGHT)


@pytest.mark.slow
def test_b56_a_relay_without_room_is_counted_too():
    """Four rows for each rank, so eight for a relay that was asked for sixteen."""
    check_overflow("hierarchical", "random", 4)
    check_overflow("hierarchical", "uneven demand", 4)


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


@pytest.mark.parametrize("case", ["random", "masked", "one hot expert"])
def test_b70_a_token_crosses_to_a_node_once_and_to_a_rank_once(case):
    """Two nodes of two ranks: across, a sender's rows go to the same place of the other node and nowhere else."""
    x, ids, weights = routing_case(case)
    (_, sent), _ = compiled(FOUR, plan_for(FOUR, "hierarchical"))(x, ids, weights, probe_for(x))
    rows = ledger.pair_books(sent).rows
    owner = np.where(ids < E, ids // 2, -9).reshape(4, T // 4, K)  # [sender, token, pick]
    want = np.zeros((4, 4), int)
    for sender in range(4):
        node, place = divmod(sender, 2)
        for other in range(2):
            want[sender, 2 * other + place] += (owner[sender] // 2 == other).any(-1).sum()
        relayed = np.concatenate([owner[place], owner[2 + place]])  # what this relay has from both nodes
        for receiver in (2 * node, 2 * node + 1):
            want[sender, receiver] += (relayed == receiver).any(-1).sum()
    for what in ("sent", "combined"):
        assert rows[what][0].tolist() == want.tolist()
    assert rows["received"][0].tolist() == want.tolist()


def test_b70_distinct_owners_of_a_token():
    owner = np.array([[2, 0, 2], [1, 1, 1], [4, 4, 4], [3, 4, 0]], np.int32)
    assert hop.distinct(owner, 4).tolist() == [[0, 2, 4], [1, 4, 4], [4, 4, 4], [0, 3, 4]]
    assert hop.distinct(np.array([[1, 0, 1, 0]], np.int32), 2).tolist() == [[0, 1]]


# ---------------------------------------------------------------- broken twins: the suite must fail them


def twin_output(dispatcher, case="random"):
    x, ids, weights = routing_case(case)
    run = compiled.__wrapped__(FOUR, plan_for(FOUR, dispatcher), gradients=False)
    out, sent = run(x, ids, weights, probe_for(x))
    return relative_error(out, expected(x, ids, weights)), sent


def test_broken_twin_receivers_view_of_offsets(monkeypatch):
    """B54's mistake: the receiver's own landing offsets where the sender's are due."""
    honest = exchange_module.route_of_rank

    def mistaken(layout, rank):
        turned = exchange_module.Layout(layout.taken_from, layout.kept, layout.lands_at.transpose(1, 0, 2))
        return honest(turned, rank)

    monkeypatch.setattr("moe_course.dispatch.ragged.route_of_rank", mistaken)
    assert not twin_output("ragged")[0] < 1e-3


def test_broken_twin_cut_sizes_move_the_source(monkeypatch):
    """B56's mistake: input offsets of the cut sizes, so that what follows a cut chunk is taken from the wrong place."""
    honest = exchange_module.plan_exchange

    def mistaken(sizes, capacity):
        layout = honest(sizes, capacity)
        sent = layout.kept.reshape(len(sizes), -1)
        taken_from = (sent.cumsum(1) - sent).reshape(sizes.shape)
        return exchange_module.Layout(taken_from, layout.kept, layout.lands_at)

    monkeypatch.setattr("moe_course.dispatch.ragged.plan_exchange", mistaken)
    x, ids, weights = routing_case("uneven demand")
    run = compiled.__wrapped__(FOUR, plan_for(FOUR, "ragged", TIGHT), gradients=False)
    out, _ = run(x, ids, weights, probe_for(x))
    kept = kept_of("ragged", ids, TIGHT)
    assert not relative_error(out, expected(x, np.where(kept, ids, E), weights)) < 1e-3


@pytest.mark.parametrize("dispatcher", ["dedup", "hierarchical"])
def test_broken_twin_dedup_counts_an_owner_twice(monkeypatch, dispatcher):
    """B70's mistake: one row per expert sent, each with the owner's whole sum coming back."""
    monkeypatch.setattr(hop, "distinct", lambda owner, owners: owner)
    error, sent = twin_output(dispatcher)
    assert not error < 1e-3
    assert ledger.check(**{k: int(v) for k, v in vars(ledger.count(sent)).items()}) is not None


def test_broken_twin_hierarchical_forgets_where_a_relayed_row_comes_from(monkeypatch):
    """The result is right and so are the totals; only the books of the pairs can tell."""
    monkeypatch.setattr(hierarchical, "_sender_of_rows", lambda arrived: arrived.ids[:, 0] * 0)
    error, sent = twin_output("hierarchical")
    assert error < 1e-6
    assert ledger.check(**{k: int(v) for k, v in vars(ledger.count(sent)).items()}) is None
    assert "token copies sent but" in ledger.check_pairs(ledger.pair_books(sent))


def test_broken_twin_all_gather_adds_ranks_twice(monkeypatch):
    from moe_course.dispatch import all_gather

    honest = all_gather.scatter_sums
    monkeypatch.setattr(all_gather, "scatter_sums", lambda sums, dtype: 2 * honest(sums, dtype))
    assert not twin_output("all_gather")[0] < 1e-3
