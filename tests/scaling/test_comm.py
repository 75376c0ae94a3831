"""Communication: closed forms against counting and sampling, fits against the published rows."""

import numpy as np
import pytest

from moe_course.scaling import comm
from moe_course.scaling.layout import Layout
from moe_course.scaling.published import shapes

LINK = comm.Link("test", 1e-5, 1e11)


@pytest.mark.parametrize(("ranks", "copies"), [(8, 5.43), (16, 6.60), (24, 7.04), (32, 7.27), (36, 7.35)])
def test_copies_per_token_are_those_that_hybridep_publishes(ranks, copies):
    assert comm.copies_per_token(8 * ranks, 8, ranks) == pytest.approx(copies, abs=0.005)


@pytest.mark.parametrize(
    ("experts", "top_k", "ranks"), [(64, 8, 8), (256, 8, 32), (8, 2, 8), (16, 16, 4), (4, 1, 4)]
)
def test_the_closed_form_agrees_with_sampling(experts, top_k, ranks):
    exact = comm.copies_per_token(experts, top_k, ranks)
    sampled = comm.skewed_copies(np.full(experts, 1 / experts), top_k, ranks, draws=20_000)
    assert sampled == pytest.approx(exact, rel=0.01)
    assert exact <= min(top_k, ranks) + 1e-9


def test_skew_sends_fewer_copies_but_not_to_everyone():
    shares = np.arange(1, 65, dtype=float) ** -1.5
    assert comm.skewed_copies(shares / shares.sum(), 8, 8) < comm.copies_per_token(64, 8, 8)


def test_the_busiest_rank():
    assert comm.busiest_rank(np.full(16, 1 / 16), 4) == pytest.approx(1)
    assert comm.busiest_rank(np.array([4.0, 0, 1, 1, 1, 1, 0, 0]), 4) == pytest.approx(4 / 2)
    half_idle = np.r_[np.full(8, 1 / 8), np.zeros(8)]
    assert comm.busiest_rank(half_idle, 4) == pytest.approx(2), (
        "balance over half of the experts idles half the ranks"
    )


@pytest.mark.parametrize("n", [2, 8, 72])
def test_collectives_move_what_the_books_say(n):
    assert comm.wire_bytes("all-reduce", 1e6, n) == 2 * comm.wire_bytes("all-gather", 1e6, n)
    assert comm.collective_seconds("all-gather", 1e6, 1, LINK) == 0
    big = comm.collective_seconds("all-reduce", 1e12, n, LINK)
    assert big == pytest.approx(2e12 * (n - 1) / n / LINK.beta, rel=1e-3)
    small = {a: comm.collective_seconds("all-reduce", 1, n, LINK, a) for a in ("ring", "tree")}
    assert small["tree"] <= small["ring"], "few steps win when bytes do not matter"


def test_hierarchy_loads_the_network_with_a_share_only():
    nic = comm.Link("NIC", 1e-5, 5e10)
    flat = comm.collective_seconds("all-reduce", 1e10, 64, nic)
    assert comm.hierarchical_seconds("all-reduce", 1e10, 64, 8, LINK, nic) < flat / 1.5
    assert comm.hierarchical_seconds("all-reduce", 1e10, 8, 8, LINK, nic) == comm.collective_seconds(
        "all-reduce", 1e10, 8, LINK
    )


def test_dispatchers_rank_as_they_should():
    shape = shapes()["deepseek-v3"]
    sent = {}
    for name in ("all_gather", "all_to_all", "dedup", "hierarchical"):
        layout = Layout(64, ep=64, dispatcher=name)
        sent[name] = comm.rows_sent(shape, layout, nodes=8)
    assert sent["all_gather"][0] > sent["all_to_all"][0] > sent["dedup"][0]
    assert sent["hierarchical"][1] < sent["dedup"][1] < sent["all_to_all"][1]
    assert comm.rows_sent(shape, Layout(8, ep=1)) == (0.0, 0.0)
    assert comm.dispatch_bytes(shape, Layout(64, ep=64), 72, 1.0)[1] == 0, "one domain: nothing on the NICs"


@pytest.mark.parametrize(("ranks", "nodes"), [(64, 8), (64, 2), (16, 4), (32, 1)])
def test_rows_of_a_hierarchical_dispatch_are_those_counted_one_by_one(ranks, nodes):
    """Follow random picks: over the network to the sender's place in each domain, from there to who wants the row."""
    shape, rng = shapes()["deepseek-v3"], np.random.default_rng(0)
    local, tokens = ranks // nodes, 4000
    inside = across = 0
    for _ in range(tokens):
        wanted = set((rng.permutation(shape.experts)[: shape.top_k] // (shape.experts // ranks)).tolist())
        me = int(rng.integers(ranks))
        for domain in {rank // local for rank in wanted}:
            landing = domain * local + me % local
            across += domain != me // local
            inside += sum(rank != landing for rank in wanted if rank // local == domain)
    total, leaving = comm.rows_sent(shape, Layout(ranks, ep=ranks, dispatcher="hierarchical"), nodes)
    assert leaving == pytest.approx(across / tokens, rel=0.02)
    assert total - leaving == pytest.approx(inside / tokens, rel=0.02)


def test_a_fit_recovers_what_made_the_data():
    sizes = np.logspace(3, 10, 12)
    alpha, beta = comm.fit_alpha_beta(sizes, 2e-5 + sizes / 4e11)
    assert alpha == pytest.approx(2e-5, rel=1e-6)
    assert beta == pytest.approx(4e11, rel=1e-6)
    assert comm.fit_alpha_beta([1e9, 2e9], [0.9, 2.1])[0] == 0, "no negative start-up time"


def test_published_series_are_fitted_with_their_residuals():
    fits = comm.link_fits()
    assert len(fits) >= 40
    assert all(len(fit.errors) == len(fit.ids) for fit in fits)
    assert np.median([fit.median_error for fit in fits]) < 0.10
    sharp = next(f for f in fits if "SHARP" in f.name)
    assert 400e9 < sharp.link.beta < 500e9
    assert 10e-6 < sharp.link.alpha < 30e-6


def test_deepep_low_latency_gives_the_network_card():
    for op in ("dispatch", "combine"):
        fit = comm.low_latency_fit(op)
        assert 40e9 < fit.link.beta < 50e9, "a 400 Gb/s port"
        assert fit.median_error < 0.10
        assert fit.worst_error < 0.20
