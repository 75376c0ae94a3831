"""Chapter 07: the ranks that a token goes to, each once; and the books of the exchange."""

import jax
import jax.numpy as jnp
import numpy as np

from moe_course.lessons.compare import same
from moe_course.lessons.exercise import Broken, holds
from moe_course.lessons.learner import compiled
from moe_course.lessons.properties.ch07 import owners_of, several

# ---------------------------------------------------------------- 07.8 dedup


def distinct_of(owner, ranks) -> np.ndarray:
    width = min(owner.shape[1], ranks)
    out = np.full((len(owner), width), ranks)
    for t, row in enumerate(owner):
        once = sorted({int(r) for r in row if 0 <= r < ranks})
        out[t, : len(once)] = once
    return out


def _distinct(result, owner, ranks, case, why="") -> None:
    right = distinct_of(owner, ranks)
    width = right.shape[1]
    ascending = np.sort(owner, axis=1)[:, :width]
    gaps = np.sort(owner, axis=1)
    gaps[:, 1:] = np.where(gaps[:, 1:] == gaps[:, :-1], ranks, gaps[:, 1:])
    counts = (owner[:, :, None] == np.arange(ranks)).sum(1)
    lines = {
        "A rank that owns two of a token's experts is there twice: send it one row.": ascending,
        "The gaps are in the middle: the R's come last.": gaps[:, :width],
        "Cut before the repeats were out: a rank is missing.": gaps[:, :width],
        "Only ranks with exactly one of the token's experts are left.": np.sort(
            np.where(counts == 1, np.arange(ranks), ranks), axis=1
        )[:, :width],
    }
    lines = {
        line: wrong for line, wrong in lines.items() if wrong.shape == right.shape and (wrong != right).any()
    }
    same(result, right, case=case, axes=("token", "place"), why=why, suspects=lines)


def _case(owner, ranks) -> str:
    return f"owner {list(owner.shape)}, {ranks} {'rank' if ranks == 1 else 'ranks'}"


@holds("every rank once, in ascending order, then R")
def each_once(fn) -> int:
    shapes = ((4, 9, 3), (8, 12, 4), (4, 6, 1), (8, 0, 2))
    for i, (ranks, tokens, picks) in enumerate(shapes):
        owner = owners_of(ranks, tokens, picks, 80 + i)[0]
        _distinct(fn(owner, ranks), owner, ranks, _case(owner, ranks))
    return len(shapes)


@holds("more picks than ranks: R columns are enough")
def more_picks(fn) -> int:
    for i, (ranks, tokens, picks) in enumerate(((2, 8, 5), (1, 4, 3))):
        owner = owners_of(ranks, tokens, picks, 90 + i)[0]
        why = "A token goes to at most min(K, R) ranks: that many columns."
        _distinct(fn(owner, ranks), owner, ranks, _case(owner, ranks), why)
    return 2


@holds("picks of no expert send no row")
def none_for_padding(fn) -> int:
    for i, (ranks, tokens, picks) in enumerate(((4, 9, 3), (2, 7, 4))):
        owner = owners_of(ranks, tokens, picks, 95 + i, none=True)[0]
        case = _case(owner, ranks) + ", some of them R"
        _distinct(fn(owner, ranks), owner, ranks, case, "The owner R is nobody.")
    return 2


@holds("the owners are data: it runs under jit")
def distinct_under_jit(fn) -> int:
    owner = owners_of(4, 9, 3, 99)[0]
    case = _case(owner, 4) + ", under jit"
    why = "Under jit the owners are data: no sets, no jnp.unique, no loop over values."
    _distinct(compiled(jax.jit(lambda owner: fn(owner, 4)), owner, case=case, why=why), owner, 4, case)
    return 1


# ---------------------------------------------------------------- 07.9 the books

STATIONS = ("made", "sent", "received", "computed", "combined")


def books_of(ranks, seed) -> dict:
    """Books that balance: made, sent, combined by [sender, receiver]; received by [receiver, sender]; computed."""
    made = np.random.default_rng([76, seed, ranks]).integers(0, 20, (ranks, ranks)).astype(np.int32)
    return {"made": made, "sent": made, "received": made.T, "computed": made.sum(0), "combined": made}


def _audit(fn, books, balanced, case, why="") -> None:
    args = [np.ascontiguousarray(books[name], np.int32) for name in STATIONS]
    found = several(fn(*args), 2, case=case, names="dropped, balanced")
    dropped = books["made"] - books["combined"]
    lines = {
        "Copies that were made and not combined: the other way round.": -dropped,
        "Copies are lost at any station. What counts is whether the token got its answer: combined.": books[
            "made"
        ]
        - books["sent"],
        "This is the transpose: rows are senders.": dropped.T,
    }
    lines = {line: wrong for line, wrong in lines.items() if (wrong != dropped).any()}
    axes = ("sender", "receiver")
    same(found[0], dropped, case=case + ", dropped", axes=axes, suspects=lines, what="dropped")
    verdict = jnp.asarray(found[1])
    if verdict.shape != () or verdict.dtype != bool:
        raise Broken(
            case + ", balanced",
            f"{verdict.dtype} of shape {verdict.shape}",
            "one boolean",
            "One verdict for all.",
        )
    if bool(verdict) != balanced:
        raise Broken(case + ", balanced", str(bool(verdict)), str(balanced), why)


@holds("books that agree balance")
def agree(fn) -> int:
    for ranks, seed in ((4, 0), (3, 1), (1, 2)):
        why = "received is written by the receivers: its rows are receivers, its columns senders."
        _audit(fn, books_of(ranks, seed), True, f"{ranks} ranks, books that agree", why)
    return 3


@holds("copies lost between any two stations show")
def losses_show(fn) -> int:
    cases = 0
    for name in STATIONS[1:]:
        for seed in (10, 11):
            books = {key: value.copy() for key, value in books_of(4, seed).items()}
            index = np.unravel_index(int(np.argmax(books[name])), books[name].shape)
            books[name][index] -= 1
            case = f"4 ranks, one copy fewer {name}"
            _audit(fn, books, False, case, f"One copy is missing where copies are {name}.")
            cases += 1
    return cases


@holds("copies at the wrong rank show, though all totals agree")
def misplaced_show(fn) -> int:
    for name, seed in (("sent", 20), ("received", 21), ("combined", 22), ("computed", 23), ("sent", 24)):
        books = {key: value.copy() for key, value in books_of(4, seed).items()}
        flat = books[name].reshape(-1)
        most, other = int(np.argmax(flat)), 2 if int(np.argmax(flat)) != 2 else 3
        flat[most] -= 2
        flat[other] += 2
        case = f"4 ranks, two copies {name} at another rank"
        _audit(
            fn,
            books,
            False,
            case,
            "The totals agree. Compare pair by pair, and the experts' rows by receiver.",
        )
    books = {key: value.copy() for key, value in books_of(4, 29).items()}
    books["received"][2, 0] -= 1
    books["received"][2, 3] += 1
    case = "4 ranks, rank 2 takes a copy of rank 0 for one of rank 3"
    _audit(fn, books, False, case, "Every receiver's total agrees. Compare pair by pair.")
    return 6


@holds("copies counted twice show")
def doubles_show(fn) -> int:
    for name, seed in zip(STATIONS[1:], (25, 26, 27, 28), strict=True):
        books = {key: value.copy() for key, value in books_of(4, seed).items()}
        books[name][np.unravel_index(int(np.argmin(books[name])), books[name].shape)] += 1
        case = f"4 ranks, one copy more {name} than made"
        _audit(fn, books, False, case, "A copy too many is as wrong as one too few: compare for equality.")
    return 4


@holds("a loss and a gain elsewhere do not cancel")
def no_cancelling(fn) -> int:
    books = {key: value.copy() for key, value in books_of(4, 30).items()}
    for name in ("sent", "combined"):
        books[name][0, 1] += 3
        books[name][1, 0] -= 3
    books["received"][0, 1] -= 3
    books["received"][1, 0] += 3
    books["computed"][0] -= 3
    books["computed"][1] += 3
    case = "4 ranks, three copies of one pair went to another pair"
    _audit(fn, books, False, case, "made says otherwise: start the comparison there.")
    return 1
