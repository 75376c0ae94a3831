"""The token ledger: every token copy is accounted for, at every step.

made -> sent -> received -> computed -> combined, counted where each thing happens, by different parts of
the code. They agree, or copies were dropped; ``made - combined`` says how many.
"""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import jax
from jaxtyping import Array, Int


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
    """Copies announced to the receivers by the exchanged counts."""
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
    return Ledger(
        made=counts["made"].sum(),
        sent=counts["sent"].sum(),
        received=counts["received"].sum(),
        computed=dispatched.group_sizes.sum(),
        combined=counts["combined"].sum(),
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
