"""Witten-Bell baselines against a dictionary implementation, and against published figures on real data."""

import math
from collections import defaultdict
from itertools import chain

import numpy as np
import pytest

from moe_course.train.corpora import available_domains
from moe_course.train.data import DataConfig, TrainData, target_mask, token_stream
from moe_course.train.ngram import MAX_ORDER, baselines, witten_bell_bits

BORDER = 256


def _documents(stream):
    """Lists of the bytes of each document, whether or not the stream starts with a border."""
    documents = [[]]
    for symbol in stream:
        if symbol >= BORDER:
            documents.append([])
        else:
            documents[-1].append(int(symbol))
    return documents


def _grams(stream, order, reach_back=False):
    """(context of ``order`` symbols, byte) of every byte; before a document there are borders."""
    documents = [list(chain(*_documents(stream)))] if reach_back else _documents(stream)
    for document in documents:
        padded = [BORDER] * order + document
        for i, byte in enumerate(document):
            yield tuple(padded[i : i + order]), byte


def _oracle(train, held_out, max_order, *, add_types=True, reach_back=False):
    """The recursion of the module's docstring, over dictionaries in float64."""
    counts = [defaultdict(lambda: defaultdict(int)) for _ in range(max_order + 1)]
    for order in range(max_order + 1):
        for context, byte in _grams(train, order, reach_back):
            counts[order][context][byte] += 1

    def probability(context, byte):
        lower = probability(context[1:], byte) if context else 1 / 256
        seen = counts[len(context)].get(context)
        if not seen:
            return lower
        total, types = sum(seen.values()), len(seen) if add_types else 1
        return (seen.get(byte, 0) + types * lower) / (total + types)

    bits = []
    for order in range(max_order + 1):
        asked = [-math.log2(probability(c, b)) for c, b in _grams(held_out, order, reach_back)]
        bits.append(math.fsum(asked) / len(asked))
    return bits


def _streams(case):
    rng = np.random.default_rng(7)

    def documents(number, letters, length):
        parts = [[BORDER + 2, *rng.integers(0, letters, rng.integers(1, length))] for _ in range(number)]
        return np.concatenate(parts).astype(np.uint16)

    return {
        "text": (b"the cat sat on the mat. the rat sat on the cat." * 3, b"the hat sat on the rat!"),
        "documents": (documents(40, 4, 12), documents(9, 5, 12)),
        "one-byte documents": (documents(30, 3, 2), documents(5, 3, 2)),
        "all bytes": (bytes(range(256)) * 2, bytes(range(255, -1, -1))),
        "unseen": (b"aaaa", b"bcd"),
        "shorter than the order": (b"ab", b"ba"),
        "a single byte": (b"a", b"a"),
        "no training data": (b"", b"abc"),
        "borders alone": (np.array([256, 257], np.uint16), b"abc"),
        "without a border at the start": (documents(20, 3, 9)[1:], documents(4, 3, 9)[1:]),
    }[case]


CASES = (
    *("text", "documents", "one-byte documents", "all bytes", "unseen", "shorter than the order"),
    *("a single byte", "no training data", "borders alone", "without a border at the start"),
)
TOLERANCE = 64 * np.finfo(np.float64).eps


@pytest.mark.parametrize("case", CASES)
def test_equals_the_dictionaries(case):
    train, held_out = _streams(case)
    ours, oracle = witten_bell_bits(train, held_out, MAX_ORDER), _oracle(train, held_out, MAX_ORDER)
    assert ours == pytest.approx(oracle, rel=TOLERANCE)


@pytest.mark.parametrize("mutation", [{"add_types": False}, {"reach_back": True}])
def test_the_comparison_catches_another_rule(mutation):
    train, held_out = _streams("documents")
    wrong = _oracle(train, held_out, 3, **mutation)
    assert witten_bell_bits(train, held_out, 3) != pytest.approx(wrong, rel=1e-3)


def test_probabilities_sum_to_one():
    train, context = _streams("text")[0], b"the c"
    prefix = np.array(witten_bell_bits(train, context)) * len(context)
    total = np.zeros(6)
    for byte in range(256):
        extended = context + bytes([byte])
        total += 2.0 ** -(np.array(witten_bell_bits(train, extended)) * len(extended) - prefix)
    np.testing.assert_allclose(total, 1, rtol=1e-12)


def test_uniform_without_training_and_the_entropy_with_much():
    assert witten_bell_bits(b"", b"xyz", 2) == [8.0, 8.0, 8.0]
    rng = np.random.default_rng(0)
    letters = rng.integers(0, 4, 200_000).astype(np.uint8)
    bits = witten_bell_bits(letters[:180_000], letters[180_000:], 2)
    assert bits == pytest.approx([2.0, 2.0, 2.0], rel=2e-3)


@pytest.mark.parametrize("order", [-1, MAX_ORDER + 1])
def test_refuses_orders_that_do_not_fit(order):
    with pytest.raises(ValueError, match=f"max_order is {order}, not 0 to 6"):
        witten_bell_bits(b"abc", b"abc", order)


@pytest.mark.parametrize("held_out", [b"", np.array([256, 256], np.uint16)])
def test_refuses_nothing_held_out(held_out):
    with pytest.raises(ValueError, match="no held-out bytes"):
        witten_bell_bits(b"abc", held_out)


# Real data. Expected: the same estimator on the first 2 MB of the training split and 200 kB held out.

PUBLISHED = {"code": {1: 3.35, 2: 2.49}, "text": {1: 3.65, 2: 3.08}, "protein": {1: 4.16}, "dna": {1: 1.986}}


@pytest.fixture(scope="module")
def installed():
    return TrainData(DataConfig(), seq_len=256, batch_size=8, seed=0)


@pytest.fixture(scope="module")
def bits(installed):
    return baselines(installed)


@pytest.mark.parametrize("domain", PUBLISHED)
def test_baselines_of_installed_data(bits, domain, installed):
    if domain not in available_domains():
        pytest.skip(f"no source for {domain}")
    if domain == "text" and installed.sources["text"].notes:
        pytest.skip("the figure is Wikipedia's")
    assert len(bits[domain]) == 6
    for order, expected in PUBLISHED[domain].items():
        print(domain, order, bits[domain][order])
        assert abs(bits[domain][order] - expected) <= 0.10


def test_baselines_ask_what_evaluation_asks(installed):
    batches = installed.eval_batches("code", 8, 200_000)
    asked = b"".join(bytes(b["tokens"][:, 1:][target_mask(b)].astype(np.uint8)) for b in batches)
    stream = installed.held_out_bytes("code", 200_000)
    assert len(asked) == 200_000
    assert asked == bytes(stream[stream < BORDER].astype(np.uint8))
    assert len(installed.train_bytes("code", 2_000_000)) == pytest.approx(2_000_000, rel=1e-3)


def test_stream_and_plain_bytes_agree_on_one_document():
    from moe_course.train.corpora import Document

    text, held_out = _streams("text")
    stream = token_stream([Document("a", "text", text)], 1)
    assert witten_bell_bits(stream, held_out) == witten_bell_bits(text, held_out)
