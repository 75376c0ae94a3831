"""The token ledger: every token copy is accounted for, at every step.

made -> sent -> received -> computed -> combined, counted where each thing happens, by different parts of the code.
They agree, or copies were dropped; ``made - combined`` says how many. :func:`count` gives the totals, which the
train step carries; :func:`pair_books` has them for each pair of ranks, which also shows copies that went to the
wrong rank while the totals agree.

The unit is the token copy: one pick of one token, whatever carries it. The deduplicated exchange sends fewer rows
than copies; its books count both, copies under the same names as everyone and wire rows under ``rows_*``.
"""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import jax
import numpy as np
from jaxtyping import Array, Int

from moe_course.errors import SettingError


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["made", "sent", "received", "computed", "combined"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Ledger:
    """Token copies over all ranks."""

    made: Int[Array, ""]
    """Picks of the router: unmasked tokens times top_k."""
    sent: Int[Array, ""]
    """Copies put into send buffers."""
    received: Int[Array, ""]
    """Copies that the receivers know of."""
    computed: Int[Array, ""]
    """Rows inside the groups that the experts walk."""
    combined: Int[Array, ""]
    """Copies that a token adds up on the way back."""

    @property
    def dropped(self) -> Int[Array, ""]:
        return self.made - self.combined


def count(dispatched) -> Ledger:
    """Add up what the dispatcher counted (``Dispatched.counts``, [N, R] each) and the groups."""
    counts = dispatched.counts
    computed = counts.get("computed", dispatched.group_sizes)
    return Ledger(
        made=counts["made"].sum(),
        sent=counts["sent"].sum(),
        received=counts["received"].sum(),
        computed=computed.sum(),
        combined=counts["combined" if "combined" in counts else "combined_for"].sum(),
    )


def check(made: int, sent: int, received: int, computed: int, combined: int) -> str | None:
    """None if the books balance, else the first place where copies went missing, in words (on the host)."""
    steps = [
        ("made", made),
        ("sent", sent),
        ("received", received),
        ("computed", computed),
        ("combined", combined),
    ]
    for (before, n), (after, m) in pairwise(steps):
        if n != m:
            return f"{n} token copies {before} but {m} {after}"
    return None


@dataclass(frozen=True)
class PairBooks:
    """Token copies by exchange group (devices that share data and fsdp coordinates), sender and receiver."""

    made: Int[np.ndarray, "groups senders receivers"]
    sent: Int[np.ndarray, "groups senders receivers"]
    received: Int[np.ndarray, "groups senders receivers"]
    combined: Int[np.ndarray, "groups senders receivers"]
    """Counted where copies are added up: at home, or, if the dispatcher adds them up before they travel, there."""
    computed: Int[np.ndarray, "groups receivers"]
    """Rows that each receiver's experts walk, whoever sent them."""
    rows: dict[str, Int[np.ndarray, "groups senders receivers"]]
    """Rows on the wire: sent, received, combined. Of a dispatcher that sends one row per copy, the copies."""

    @property
    def dropped(self) -> Int[np.ndarray, "groups senders receivers"]:
        return self.made - self.combined


def pair_books(dispatched) -> PairBooks:
    """The ledger by pair of ranks, as NumPy arrays: waits for the device. ``local`` has one rank, 0.

    Raises :class:`SettingError` for ``te``, which does not say where a row comes from.
    """
    if dispatched.plan.dispatcher == "te" and dispatched.plan.ranks > 1:
        raise SettingError(
            "the te dispatcher has totals only (ledger.count): NCCL EP does not name a row's sender."
        )
    counts = {name: np.asarray(value) for name, value in dispatched.counts.items()}
    ranks = counts["made"].shape[1]

    def by_sender(name):
        return counts[name].reshape(-1, ranks, ranks)

    def by_receiver(name):
        return by_sender(name).transpose(0, 2, 1)

    combined = by_sender("combined") if "combined" in counts else by_receiver("combined_for")
    books = {"sent": by_sender("sent"), "received": by_receiver("received"), "combined": combined}
    rows = books
    if "rows_sent" in counts:
        rows = {
            "sent": by_sender("rows_sent"),
            "received": by_receiver("rows_received"),
            "combined": by_sender("rows_combined"),
        }
    computed = np.asarray(dispatched.group_sizes).sum(1).reshape(-1, ranks)
    return PairBooks(made=by_sender("made"), computed=computed, rows=rows, **books)


def check_pairs(books: PairBooks) -> str | None:
    """None if the books of every pair balance, else the first pair and place where they do not, in words."""
    copies = {name: getattr(books, name) for name in ("made", "sent", "received", "combined")}
    faults = [
        _first_difference(what, before, entries[before], after, entries[after])
        for what, entries in (("token copies", copies), ("wire rows", books.rows))
        for before, after in pairwise(entries)
    ]
    received = books.received.sum(1)
    for group, rank in np.argwhere(received != books.computed)[:1]:
        faults.append(
            f"rank {rank} of group {group}: {received[group, rank]} token copies received but "
            f"{books.computed[group, rank]} computed"
        )
    return next(filter(None, faults), None)


def _first_difference(what: str, before: str, n, after: str, m) -> str | None:
    for group, sender, receiver in np.argwhere(n != m)[:1]:
        place = f"rank {sender} to rank {receiver} of group {group}"
        return (
            f"{place}: {n[group, sender, receiver]} {what} {before} but {m[group, sender, receiver]} {after}"
        )
    return None
