"""Splits, windows, mixture and order of the training data."""

import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest

from moe_course.errors import SettingError
from moe_course.train import data as data_module
from moe_course.train.corpora import DOMAINS, Document, Source, available_domains, load_domain
from moe_course.train.data import (
    DataConfig,
    MixSchedule,
    TrainData,
    first_bytes,
    is_held_out,
    resolve_mixture,
    split_documents,
    target_mask,
    token_stream,
    train_windows,
)

LENGTHS = {"code": 40, "text": 7, "protein": 90, "dna": 64}


def _synthetic(domain: str, documents: int = 120) -> Source:
    """Documents of random bytes; those of DNA are consecutive."""
    rng = np.random.default_rng(DOMAINS.index(domain))
    named = (
        Document(f"{domain}-{i}", domain, rng.bytes(int(rng.integers(1, 2 * LENGTHS[domain]))))
        for i in range(documents)
    )
    return Source(domain, f"random {domain}", "none", tuple(named), contiguous=domain == "dna")


@pytest.fixture
def synthetic(monkeypatch):
    """Four small domains in place of what is installed."""
    sources = {domain: _synthetic(domain) for domain in DOMAINS}
    monkeypatch.setattr(data_module, "load_domain", sources.__getitem__)
    monkeypatch.setattr(data_module, "available_domains", lambda: DOMAINS)
    return sources


def _equal(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


# Splits


def _leaks(train, held_out, run: int = 8) -> bool:
    """Whether a document, or a run of bytes across a border of pieces, is on both sides."""
    seen = b"\xff".join(document.data for document in train)
    return any(
        document.data[at : at + run] in seen
        for document in held_out
        for at in range(len(document.data) - run + 1)
    )


@pytest.mark.parametrize("domain", DOMAINS)
def test_no_document_and_no_long_run_is_in_both_splits(domain):
    source = _synthetic(domain)
    train, held_out = split_documents(source)
    assert set(train) | set(held_out) == set(source.documents)
    assert set(train).isdisjoint(held_out)
    assert 0.04 < len(held_out) / len(source.documents) < 0.18
    assert not _leaks(train, held_out)
    last = max(held_out, key=lambda document: len(document.data))
    across_the_border = Document("x", domain, train[-1].data + last.data[:8])
    assert _leaks((*train, across_the_border), held_out)


def test_a_contig_loses_its_end():
    source = _synthetic("dna", 101)
    train, held_out = split_documents(source)
    assert train + held_out == source.documents
    assert len(held_out) == 11


@pytest.mark.parametrize("domain", DOMAINS)
def test_installed_sources_split_cleanly(domain):
    if domain not in available_domains():
        pytest.skip(f"no source for {domain}")
    source = load_domain(domain)
    train, held_out = split_documents(source)
    assert {d.name for d in train}.isdisjoint(d.name for d in held_out)
    assert {d.data for d in train}.isdisjoint(d.data for d in held_out)
    fraction = sum(len(d.data) for d in held_out) / source.num_bytes
    assert 0.05 < fraction < 0.15
    if source.contiguous:
        assert train + held_out == source.documents


def test_split_of_a_name_never_changes():
    names = ["asyncio/base_tasks.py", "Autism", "sp|P62258|1433E_HUMAN", "Anarchism", "ast.py"]
    assert [is_held_out(name) for name in names] == [True, True, True, False, False]


# Streams and windows


def test_stream_is_a_domain_token_and_bytes_per_document():
    documents = [Document("a", "text", b"\x00\xff"), Document("b", "text", b"c")]
    stream = token_stream(documents, 1)
    assert stream.tolist() == [257, 0, 255, 257, 99]
    assert first_bytes(stream, 2).tolist() == [257, 0, 255, 257]
    assert first_bytes(stream, 1).tolist() == [257, 0]
    assert first_bytes(stream, 100).tolist() == stream.tolist()
    assert token_stream([], 1).size == 0


@pytest.mark.parametrize("seq_len", [1, 3, 8, 40])
def test_every_epoch_asks_for_every_token_about_once(seq_len):
    stream = token_stream(_synthetic("text", 30).documents, 1)
    windows = train_windows(stream, 1, seq_len, seed=0)
    count = len(stream) // seq_len
    ring = np.concatenate([stream, stream[: seq_len + 1]])
    places = {ring[i : i + seq_len + 1].tobytes(): i for i in range(len(stream))}
    orders = []
    for epoch in range(3):
        cuts = [windows[epoch * count + i]["tokens"] for i in range(count)]
        order = [places[cut.astype(np.uint16).tobytes()] for cut in cuts]
        if seq_len >= 8:  # short windows repeat within the stream
            targets = Counter((start + k) % len(stream) for start in order for k in range(1, seq_len + 1))
            assert max(targets.values()) == 1
            assert len(targets) == count * seq_len > len(stream) - seq_len
            assert order != sorted(order)
        orders.append(order)
    if seq_len >= 8:
        assert set(orders[0]) != set(orders[1]) != set(orders[2])  # borders move
        assert [o - min(orders[0]) for o in orders[0]] != [o - min(orders[1]) for o in orders[1]]


def test_a_window_is_inputs_and_targets_of_one_domain(synthetic):
    data = TrainData(DataConfig(), seq_len=32, batch_size=16, seed=3)
    for step in range(5):
        batch = data.batch(step)
        assert {key: (value.shape, value.dtype) for key, value in batch.items()} == {
            "tokens": ((16, 33), np.int32),
            "segments": ((16, 33), np.int32),
            "domain": ((16,), np.int32),
        }
        borders = batch["tokens"] >= 256
        assert ((batch["tokens"] - 256 == batch["domain"][:, None]) | ~borders).all()


def test_segments_count_documents_and_borders_are_never_targets(synthetic):
    data = TrainData(DataConfig(), seq_len=32, batch_size=16, seed=3)
    lines = {domain: {d.data for d in source.documents} for domain, source in synthetic.items()}
    whole = 0
    for step in range(20):
        batch = data.batch(step)
        mask = target_mask(batch)
        borders = batch["tokens"] >= 256
        assert (batch["segments"][:, 0] == 0).all()
        assert (np.diff(batch["segments"]) == borders[:, 1:]).all()
        assert (mask == ~borders[:, 1:]).all()
        for tokens, segments, domain in zip(batch["tokens"], batch["segments"], batch["domain"], strict=True):
            for segment in range(1, segments[-1]):  # neither the first nor the last can be cut
                part = tokens[segments == segment]
                assert part[0] == 256 + domain
                assert bytes(part[1:].astype(np.uint8)) in lines[DOMAINS[domain]]
                whole += 1
    assert whole > 100


def test_mask_of_all_targets_would_count_borders(synthetic):
    batch = TrainData(DataConfig(), seq_len=32, batch_size=16, seed=3).batch(0)
    everything = np.ones_like(target_mask(batch))
    assert (batch["tokens"][:, 1:][everything] >= 256).any()
    assert not (batch["tokens"][:, 1:][target_mask(batch)] >= 256).any()


# Order


def test_a_batch_depends_on_settings_seed_and_step_only(synthetic):
    def make(**settings):
        return TrainData(DataConfig(), **{"seq_len": 24, "batch_size": 8, "seed": 5, **settings})

    one, other = make(), make()
    for step in (9, 0, 10**7, 9, 3):
        assert _equal(one.batch(step), other.batch(step))
    assert one.fingerprint == other.fingerprint
    assert not _equal(one.batch(0), one.batch(1))
    changed = [make(seed=6), make(seq_len=25), make(batch_size=9)]
    assert len({data.fingerprint for data in (one, *changed)}) == 4
    assert not _equal(one.batch(0), changed[0].batch(0))
    whole = np.concatenate([one.batch(step)["tokens"] for step in range(4)])
    assert np.array_equal(make(batch_size=16).batch(1)["tokens"], whole[16:])


def test_resume_continues_the_order(synthetic):
    data = TrainData(DataConfig(), seq_len=24, batch_size=8, seed=5)
    unbroken = list(islice(data.iterate(), 12))
    assert [step for step, _ in unbroken] == list(range(12))
    for start in (0, 1, 7):
        resumed = list(islice(data.iterate(start), 5))
        assert [step for step, _ in resumed] == list(range(start, start + 5))
        for (_, batch), (step, expected) in zip(resumed, unbroken[start:], strict=False):
            assert _equal(batch, expected)
            assert _equal(batch, data.batch(step))
    restarted = [batch for _, batch in islice(data.iterate(0), 5)]  # what a stateless resume would see
    assert not all(
        _equal(batch, expected) for batch, (_, expected) in zip(restarted, unbroken[7:], strict=False)
    )


def test_fingerprint_sees_content(synthetic):
    settings = {"config": DataConfig(("code", "text")), "seq_len": 24, "batch_size": 8, "seed": 5}
    before = TrainData(**settings).fingerprint
    first, *others = synthetic["text"].documents
    edited = Document(first.name, first.domain, first.data[:-1] + bytes([first.data[-1] ^ 1]))
    synthetic["text"] = Source("text", "random text", "none", (edited, *others))
    assert TrainData(**settings).fingerprint != before
    synthetic["text"] = Source("text", "elsewhere", "none", (first, *others))
    assert TrainData(**settings).fingerprint == before


# Mixture


@pytest.mark.parametrize("weights", [(40, 25, 20, 15), (0.4, 0.25), (1,), (1, 1, 1), (999, 1), (1e6, 1, 1)])
def test_mixture_meets_its_weights_and_takes_every_window_in_turn(weights):
    schedule = MixSchedule(weights)
    period = sum(schedule.shares)
    turns = Counter()
    for index in range(3 * period):
        owner, turn = schedule[index]
        assert turn == turns[owner]
        turns[owner] += 1
        if sum(weights) <= 100:  # never more than a window or so away from the exact share
            for i, weight in enumerate(weights):
                assert abs(turns[i] - (index + 1) * weight / sum(weights)) <= 1.5
    assert [turns[i] for i in range(len(weights))] == [3 * share for share in schedule.shares]
    exact = np.array(weights) / sum(weights)
    assert np.abs(np.array(schedule.shares) / period - exact).max() <= len(weights) / 1000


def test_default_mixture_is_exact(synthetic):
    data = TrainData(DataConfig(), seq_len=16, batch_size=20, seed=0)
    for step in range(3):
        assert np.bincount(data.batch(step)["domain"]).tolist() == [8, 5, 4, 3]
    assert data.weights == pytest.approx((0.4, 0.25, 0.2, 0.15), rel=1e-15)


def test_weights_are_renormalised_over_the_domains_in_use(synthetic):
    assert resolve_mixture(DataConfig(("text", "code"))) == (("text", "code"), (25 / 65, 40 / 65))
    assert resolve_mixture(DataConfig(("dna", "code"), (3.0, 1.0))) == (("dna", "code"), (0.75, 0.25))
    data = TrainData(DataConfig(("dna", "code"), (3.0, 1.0)), seq_len=16, batch_size=8, seed=0)
    assert np.bincount(data.batch(0)["domain"]).tolist() == [2, 0, 0, 6]  # ids do not move


BAD_SETTINGS = {
    "unknown": (DataConfig(("code", "txt")), "unknown domain 'txt'. Did you mean text? Set --data.domains"),
    "twice": (DataConfig(("code", "code")), "Set --data.domains to each name once"),
    "none": (DataConfig(()), "domains are empty. Set --data.domains"),
    "too few weights": (DataConfig(("code", "text"), (1.0,)), "1 weights for 2 domains (code text). Set"),
    "weights alone": (DataConfig(None, (1.0,)), "1 weights for 4 domains"),
    "zero": (DataConfig(("code", "text"), (1.0, 0.0)), "the weight of text is 0.0. Set --data.weights"),
    "not a number": (DataConfig(("code",), (float("nan"),)), "the weight of code is nan"),
    "infinite": (DataConfig(("code",), (float("inf"),)), "the weight of code is inf"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_bad_settings_name_the_flag(case, synthetic):
    config, message = BAD_SETTINGS[case]
    with pytest.raises(SettingError) as error:
        TrainData(config, seq_len=16, batch_size=8, seed=0)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "value"), [("seq_len", 0), ("batch_size", 0), ("seed", -1)])
def test_impossible_sizes_name_the_flag(name, value, synthetic):
    settings = {"seq_len": 16, "batch_size": 8, "seed": 0, name: value}
    with pytest.raises(SettingError, match=f"Set --{name.replace('_', '-')} to"):
        TrainData(DataConfig(), **settings)


def test_a_domain_smaller_than_a_window_says_so(synthetic):
    train, _ = split_documents(synthetic["text"])
    tokens = sum(len(document.data) + 1 for document in train)
    config = DataConfig(("code", "text"))
    with pytest.raises(
        SettingError, match=rf"domain text has {tokens} .*Set --seq-len to less than {tokens}"
    ):
        TrainData(config, seq_len=tokens, batch_size=2, seed=0)
    largest = TrainData(config, seq_len=tokens - 1, batch_size=2, seed=0)
    assert largest.batch(100)["tokens"].shape == (2, tokens)


def test_a_domain_with_nothing_to_hold_out_says_so(synthetic):
    kept = tuple(document for document in synthetic["text"].documents if not is_held_out(document.name))
    synthetic["text"] = Source("text", "", "", kept)
    with pytest.raises(SettingError, match=r"domain text has .* too few to hold some out"):
        TrainData(DataConfig(), seq_len=16, batch_size=8, seed=0)


# Held-out batches


@pytest.mark.parametrize("seq_len", [1, 7, 64, 5000])
@pytest.mark.parametrize("limit", [1, 100, 10**9])
def test_evaluation_asks_for_every_held_out_byte_once(synthetic, seq_len, limit):
    data = TrainData(DataConfig(("code", "protein")), min(seq_len, 100), 4, seed=0)
    data.seq_len = seq_len
    _, held_out = split_documents(synthetic["protein"])
    everything = b"".join(document.data for document in held_out)
    asked = b""
    for batch in data.eval_batches("protein", 4, limit):
        assert batch["tokens"].shape == batch["segments"].shape == (4, seq_len + 1)
        assert batch["domain"].tolist() == [2] * 4
        assert {value.dtype for value in batch.values()} == {np.dtype(np.int32)}
        asked += bytes(batch["tokens"][:, 1:][target_mask(batch)].astype(np.uint8))
    assert asked == everything[:limit]


def test_evaluation_is_fixed_and_not_trained_on(synthetic):
    one = TrainData(DataConfig(), seq_len=24, batch_size=8, seed=0)
    other = TrainData(DataConfig(("text",)), seq_len=24, batch_size=16, seed=9)
    for batch, same in zip(one.eval_batches("text", 8, 500), other.eval_batches("text", 8, 500), strict=True):
        assert _equal(batch, same)
    train, held_out = one.train_bytes("text", 10**9), one.held_out_bytes("text", 10**9)
    assert len(train) + len(held_out) == sum(len(d.data) + 1 for d in synthetic["text"].documents)


# What is installed


def test_installed_data_describes_itself():
    data = TrainData(DataConfig(), seq_len=256, batch_size=8, seed=0)
    facts = json.loads(json.dumps(data.describe()))
    assert tuple(facts) == data.domains == available_domains()
    assert sum(domain["weight"] for domain in facts.values()) == pytest.approx(1, rel=1e-12)
    for domain in facts.values():
        assert domain["train_bytes"] + domain["held_out_bytes"] == domain["bytes"]
        assert domain["held_out_bytes"] > 30_000
        assert len(domain["sha256"]) == 64
    lines = data.summary()
    assert all(any(line.startswith(domain) for line in lines) for domain in data.domains)
    (step, batch), *_ = islice(data.iterate(41), 2)
    assert step == 41
    assert _equal(batch, data.batch(41))
