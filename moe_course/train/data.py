"""Batches of bytes, as a pure function of the step.

Documents are split into train and held-out, joined into one stream per domain, cut into windows, shuffled,
mixed by weight and batched. After the split all is a chain of Grain map datasets with random access, so
batch ``k`` depends on (configuration, seed, k) only: a run resumes by asking for the next step, and every
process of a distributed run sees the same global batch.

A stream is ``[domain token, bytes of a document, domain token, ...]``; the domain token is
``256 + domain id``, a byte its own value. A window is ``seq_len + 1`` consecutive tokens: inputs
``tokens[:, :-1]`` and targets ``tokens[:, 1:]`` have length ``seq_len``. Consecutive windows share one
token, which makes every token a target once an epoch. Segment ids count the documents in a window.
Attention stays within a segment and so does the loss (:func:`target_mask`): a domain token is never a
target, the first byte of a document is predicted from its domain token, and bits per byte is over bytes
of documents alone.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypedDict

import grain
import numpy as np
from jaxtyping import Bool, Int32, UInt16

from moe_course.errors import SettingError
from moe_course.train.corpora import DOMAINS, Document, Source, available_domains, check_domain, load_domain

FIRST_DOMAIN_TOKEN = 256
VOCABULARY = 264
"""256 bytes, a token per domain, the rest unused: a multiple of 8."""
DEFAULT_WEIGHTS = {"code": 40.0, "text": 25.0, "protein": 20.0, "dna": 15.0}
"""Shares of windows, renormalised over the domains in use."""
_SPLIT_RULE = "first 8 bytes of SHA-256 of the name, little-endian, divisible by 10; a contig: its last tenth"


@dataclass(frozen=True)
class DataConfig:
    """Which domains to train on, in which proportion."""

    domains: tuple[str, ...] | None = None
    """Some of code, text, protein, dna. Default: every domain that has a source here."""
    weights: tuple[float, ...] | None = None
    """Share of each domain in the windows, any scale. Default: 40, 25, 20, 15 in the order above."""


class Batch(TypedDict):
    """One global batch on the host."""

    tokens: Int32[np.ndarray, "batch seq_len+1"]
    segments: Int32[np.ndarray, "batch seq_len+1"]
    """Document within the window, from 0."""
    domain: Int32[np.ndarray, "batch"]


def target_mask(batch: Batch) -> Bool[np.ndarray, "batch seq_len"]:
    """Which targets ``tokens[:, 1:]`` count: those in the same document as their input."""
    return batch["segments"][:, 1:] == batch["segments"][:, :-1]


# Splits and streams


def is_held_out(name: str) -> bool:
    """Whether documents of this name are held out: one name in ten, the same in every domain and version."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") % 10 == 0


def split_documents(source: Source) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    """Train and held-out documents, about 9 : 1 by the hash of the name, each in the order of the source.

    A contiguous source loses its last tenth instead: random pieces of one sequence would sit between training
    pieces. Duplicates are gone before the split (:func:`corpora.unique_documents`).
    """
    documents = source.documents
    if source.contiguous:
        cut = len(documents) - math.ceil(len(documents) / 10)
        train, held_out = documents[:cut], documents[cut:]
    else:
        train = tuple(document for document in documents if not is_held_out(document.name))
        held_out = tuple(document for document in documents if is_held_out(document.name))
    return train, held_out


def token_stream(documents: Sequence[Document], domain_id: int) -> UInt16[np.ndarray, "stream"]:
    """``[domain token, bytes, domain token, bytes, ...]``."""
    border = np.array([FIRST_DOMAIN_TOKEN + domain_id], np.uint16)
    parts = [part for document in documents for part in (border, np.frombuffer(document.data, np.uint8))]
    return np.concatenate(parts, dtype=np.uint16) if parts else np.zeros(0, np.uint16)


def first_bytes(stream: UInt16[np.ndarray, "stream"], limit: int) -> UInt16[np.ndarray, "part"]:
    """The start of a stream that holds at most ``limit`` bytes, domain tokens not counted."""
    num_bytes = np.cumsum(stream < FIRST_DOMAIN_TOKEN)
    return stream[: np.searchsorted(num_bytes, limit, side="right")]


def _as_windows(
    tokens: np.ndarray,
) -> tuple[Int32[np.ndarray, "... seq_len+1"], Int32[np.ndarray, "... seq_len+1"]]:
    """Tokens and segment ids of windows cut from a stream."""
    documents = np.cumsum(tokens >= FIRST_DOMAIN_TOKEN, axis=-1, dtype=np.int32)
    return tokens.astype(np.int32), documents - documents[..., :1]


# Grain pieces


def train_windows(
    stream: UInt16[np.ndarray, "stream"], domain_id: int, seq_len: int, seed: int
) -> grain.MapDataset:
    """Endless windows of one domain, shuffled anew in every epoch.

    The stream is read as a ring. Epoch e starts ``e * 0.618 * seq_len`` further on, so the borders between
    windows fall elsewhere each time.
    """
    count, shift = len(stream) // seq_len, round(0.618 * seq_len)

    def window(index: int, _: int) -> dict:
        epoch, position = divmod(index, count)
        start = (epoch * shift + position * seq_len) % len(stream)
        cut = stream.take(np.arange(start, start + seq_len + 1), mode="wrap")
        tokens, segments = _as_windows(cut)
        return {"tokens": tokens, "segments": segments, "domain": np.int32(domain_id)}

    domain_seed = int(np.random.SeedSequence([seed, domain_id]).generate_state(1)[0])
    return grain.MapDataset.range(count).map_with_index(window).shuffle(seed=domain_seed).repeat()


class MixSchedule(grain.transforms.DatasetSelectionMap):
    """Which domain each window of the mixture comes from: a fixed, evenly spread, repeating order.

    ``grain.MapDataset.mix`` cuts its proportions to hundredths of the smallest; these are exact to 1/1000 of
    the total, and exactly met at the end of every period.
    """

    def __init__(self, weights: Sequence[float]):
        shares = np.maximum(1, np.round(np.array(weights) / sum(weights) * 1000)).astype(int)
        shares //= np.gcd.reduce(shares)
        owner = np.repeat(np.arange(len(shares)), shares)
        turn = np.concatenate([np.arange(share) for share in shares])
        order = np.argsort((turn + 0.5) / shares[owner], kind="stable")
        self.shares, self._owner, self._turn = shares.tolist(), owner[order].tolist(), turn[order].tolist()

    def __len__(self) -> int:
        return 2**62

    def __getitem__(self, index: int) -> tuple[int, int]:
        period, place = divmod(index, len(self._owner))
        owner = self._owner[place]
        return owner, period * self.shares[owner] + self._turn[place]


# What the training loop uses


class TrainData:
    """The mixture of a run: training batches by step, fixed held-out batches, and what they were made of.

    Raises :class:`SettingError` for an unknown, repeated or absent domain, weights that do not fit, and a
    domain whose documents do not fill a window.
    """

    def __init__(self, config: DataConfig, seq_len: int, batch_size: int, seed: int):
        for flag, value, least in (("seq-len", seq_len, 1), ("batch-size", batch_size, 1), ("seed", seed, 0)):
            if value < least:
                raise SettingError(f"{flag} is {value}. Set --{flag} to {least} or more.")
        self.domains, self.weights = resolve_mixture(config)
        self.seq_len, self.batch_size, self.seed = seq_len, batch_size, seed
        self.sources: dict[str, Source] = {domain: load_domain(domain) for domain in self.domains}
        self._train: dict[str, np.ndarray] = {}
        self._held_out: dict[str, np.ndarray] = {}
        for domain, source in self.sources.items():
            streams = [token_stream(part, DOMAINS.index(domain)) for part in split_documents(source)]
            self._train[domain], self._held_out[domain] = streams
            self._check_size(domain)
        windows = [train_windows(self._train[d], DOMAINS.index(d), seq_len, seed) for d in self.domains]
        schedule = MixSchedule(self.weights)
        self._dataset = grain.MapDataset.select_from_datasets(windows, schedule).batch(batch_size)

    def batch(self, step: int) -> Batch:
        """The global batch of ``step`` (0, 1, ...)."""
        return self._dataset[step]

    def iterate(self, start: int = 0) -> Iterator[tuple[int, Batch]]:
        """``(step, batch(step))`` from ``start`` on, made ahead by a background thread. Never ends."""
        read_ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
        batches = iter(self._dataset[start:].to_iter_dataset(read_ahead))
        try:
            yield from enumerate(batches, start)
        finally:
            batches.close()

    def eval_batches(self, domain: str, batch_size: int, max_bytes: int) -> list[Batch]:
        """Fixed batches over the first ``max_bytes`` held-out bytes of ``domain``, each byte a target once.

        The last batch is filled up with domain tokens, each a document of its own, so none of them counts.
        """
        stream = self.held_out_bytes(domain, max_bytes)
        domain_id, step = DOMAINS.index(domain), self.seq_len
        rows = batch_size * math.ceil((len(stream) - 1) / (step * batch_size))
        padded = np.full(rows * step + 1, FIRST_DOMAIN_TOKEN + domain_id, np.uint16)
        padded[: len(stream)] = stream
        windows = np.lib.stride_tricks.sliding_window_view(padded, step + 1)[::step]
        tokens, segments = _as_windows(windows)
        domains = np.full(batch_size, domain_id, np.int32)
        return [
            Batch(
                tokens=tokens[at : at + batch_size], segments=segments[at : at + batch_size], domain=domains
            )
            for at in range(0, rows, batch_size)
        ]

    def train_bytes(self, domain: str, limit: int) -> UInt16[np.ndarray, "part"]:
        """The start of the domain's training stream with at most ``limit`` bytes, domain tokens included."""
        return first_bytes(self._train[domain], limit)

    def held_out_bytes(self, domain: str, limit: int) -> UInt16[np.ndarray, "part"]:
        """The same of the held-out stream: the bytes that :meth:`eval_batches` counts."""
        return first_bytes(self._held_out[domain], limit)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over sources, split rule, settings and two batches: same data, same order.

        The batches are in it because the order also depends on the versions of Grain and NumPy.
        """
        facts = {
            "sources": {domain: source.sha256 for domain, source in self.sources.items()},
            "split": _SPLIT_RULE,
            "weights": self.weights,
            "shape": (self.batch_size, self.seq_len, self.seed),
        }
        digest = hashlib.sha256(json.dumps(facts).encode())
        for step in (0, 1_000_003):
            digest.update(self.batch(step)["tokens"].tobytes())
        return digest.hexdigest()

    def describe(self) -> dict:
        """Domains, weights, sizes and sources, as JSON types."""
        return {
            domain: {
                "weight": weight,
                "train_bytes": int((self._train[domain] < FIRST_DOMAIN_TOKEN).sum()),
                "held_out_bytes": int((self._held_out[domain] < FIRST_DOMAIN_TOKEN).sum()),
                **self.sources[domain].describe(),
            }
            for domain, weight in zip(self.domains, self.weights, strict=True)
        }

    def summary(self) -> list[str]:
        """Lines to print at the start of a run: a line per domain, then what fell back and why."""
        lines = [
            f"{domain:<8}{facts['weight']:6.1%} of windows  {facts['train_bytes'] / 1e6:6.2f} MB train  "
            f"{facts['held_out_bytes'] / 1e6:5.2f} MB held out  {facts['description']}"
            for domain, facts in self.describe().items()
        ]
        return lines + [note for source in self.sources.values() for note in source.notes]

    def _check_size(self, domain: str) -> None:
        num_tokens = len(self._train[domain])
        if num_tokens <= self.seq_len:
            raise SettingError(
                f"domain {domain} has {num_tokens} training tokens, too few for one window of seq_len "
                f"{self.seq_len} + 1. Set --seq-len to less than {num_tokens}, or leave {domain} out of "
                f"--data.domains."
            )
        if not len(self._held_out[domain]):
            raise SettingError(
                f"domain {domain} has {len(self.sources[domain].documents)} documents, too few to hold "
                f"some out. Leave {domain} out of --data.domains."
            )


def resolve_mixture(config: DataConfig) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """The domains that ``config`` means here and their weights, which sum to 1.

    Raises :class:`SettingError`, naming the flag.
    """
    domains = available_domains() if config.domains is None else tuple(config.domains)
    for domain in domains:
        check_domain(domain)
    if not domains or len(set(domains)) < len(domains):
        raise SettingError(
            f"domains are {' '.join(domains) or 'empty'}. Set --data.domains to each name once."
        )
    weights = config.weights or tuple(DEFAULT_WEIGHTS[domain] for domain in domains)
    if len(weights) != len(domains):
        raise SettingError(
            f"there are {len(weights)} weights for {len(domains)} domains ({' '.join(domains)}). "
            f"Set --data.weights to {len(domains)} numbers."
        )
    for domain, weight in zip(domains, weights, strict=True):
        if not (math.isfinite(weight) and weight > 0):
            raise SettingError(
                f"the weight of {domain} is {weight}. Set --data.weights to positive numbers, or leave "
                f"{domain} out of --data.domains."
            )
    return domains, tuple(float(weight) / math.fsum(weights) for weight in weights)
