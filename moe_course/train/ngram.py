"""Interpolated Witten-Bell n-gram models of bytes: the baselines that a language model has to beat.

For a context h of n bytes seen N(h) times in training, followed by T(h) different bytes,

    p_n(w | h) = (count(h, w) + T(h) p_{n-1}(w | h')) / (N(h) + T(h)),

where h' drops the oldest byte of h; an unseen context leaves p_{n-1}, and p_{-1} is uniform over 256 bytes
(Witten and Bell, IEEE Trans. Inf. Theory 37(4), 1991, method C; interpolated as in Chen and Goodman, 1999).
"""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float64, Integer, UInt64

from moe_course.train.data import TrainData

_BITS = np.uint64(9)
_BORDER = 256
"""Start of a document. Any symbol of 256 or more stands for it."""
MAX_ORDER = 64 // 9 - 1
"""A context and its next byte are packed into 64 bits, nine to a symbol."""

Symbols = bytes | Integer[np.ndarray, "stream"]


def witten_bell_bits(train: Symbols, held_out: Symbols, max_order: int = 5) -> list[float]:
    """Bits per byte of ``held_out`` under models of 0, 1, ... ``max_order`` bytes of context.

    Both are plain bytes or integer streams in which a symbol of 256 or more starts a document. Such a
    symbol is context but never predicted, and no context reaches beyond it: what
    :func:`moe_course.train.data.target_mask` asks of a language model. Raises ``ValueError`` for a
    held-out stream without bytes and for ``max_order`` outside 0 to 6.
    """
    if not 0 <= max_order <= MAX_ORDER:
        raise ValueError(f"max_order is {max_order}, not 0 to {MAX_ORDER}")
    train_grams, held_out_grams = _grams(train, max_order), _grams(held_out, max_order)
    probability, bits = np.float64(1 / 256), []
    for seen, asked in zip(train_grams, held_out_grams, strict=True):
        if not asked.size:
            raise ValueError("there are no held-out bytes")
        probability = _interpolate(seen, asked, probability)
        bits.append(float(-np.log2(probability).mean()))
    return bits


def baselines(
    data: TrainData, train_bytes: int = 2_000_000, held_out_bytes: int = 200_000, max_order: int = 5
) -> dict[str, list[float]]:
    """Bits per held-out byte of each domain of ``data``, by order from 0.

    The models see the first ``train_bytes`` of the domain's training stream. They are tested on the bytes
    that ``data.eval_batches(domain, ..., max_bytes=held_out_bytes)`` asks of the language model.
    """
    return {
        domain: witten_bell_bits(
            data.train_bytes(domain, train_bytes), data.held_out_bytes(domain, held_out_bytes), max_order
        )
        for domain in data.domains
    }


def _grams(stream: Symbols, max_order: int) -> Iterator[UInt64[np.ndarray, "bytes"]]:
    """For order 0, 1, ...: every byte with its context, packed, the oldest symbol in the top bits."""
    raw = np.frombuffer(stream, np.uint8) if isinstance(stream, bytes) else np.asarray(stream)
    symbols = np.minimum(raw.astype(np.uint64), np.uint64(_BORDER))
    position = np.arange(len(symbols))
    is_byte = symbols < _BORDER
    document_start = np.maximum.accumulate(np.where(is_byte, 0, position))
    grams = symbols.copy()
    yield grams[is_byte]
    for lag in range(1, max_order + 1):
        earlier = np.full_like(symbols, _BORDER)
        earlier[lag:] = symbols[:-lag]
        earlier[position - lag < document_start] = _BORDER
        grams |= earlier << (_BITS * np.uint64(lag))
        yield grams[is_byte]


def _interpolate(
    seen: UInt64[np.ndarray, "train"],
    asked: UInt64[np.ndarray, "held_out"],
    lower: Float64[np.ndarray, "*held_out"],
) -> Float64[np.ndarray, "held_out"]:
    """One step of the recursion: the probability of each gram ``asked``, given that of the shorter one."""
    grams, counts = np.unique(seen, return_counts=True)
    contexts, first, types = np.unique(grams >> _BITS, return_index=True, return_counts=True)
    totals = np.add.reduceat(counts, first) if len(first) else np.zeros(0, np.int64)
    gram_count = _look_up(grams, counts, asked)
    context_total = _look_up(contexts, totals, asked >> _BITS)
    context_types = _look_up(contexts, types, asked >> _BITS)
    with np.errstate(invalid="ignore"):
        interpolated = (gram_count + context_types * lower) / (context_total + context_types)
    return np.where(context_total > 0, interpolated, lower)


def _look_up(
    keys: UInt64[np.ndarray, "keys"], values: Integer[np.ndarray, "keys"], asked: UInt64[np.ndarray, "asked"]
) -> Integer[np.ndarray, "asked"]:
    """``values`` at the sorted ``keys``, 0 where ``asked`` is none of them."""
    if not len(keys):
        return np.zeros(asked.shape, np.int64)
    index = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
    return np.where(keys[index] == asked, values[index], 0)
