"""Chapter 07: the arguments of the ragged exchange, there and back. Oracles walk over buffers, chunk by chunk."""

import jax
import numpy as np

from moe_course.lessons.compare import same
from moe_course.lessons.exercise import Broken, holds
from moe_course.lessons.learner import compiled
from moe_course.lessons.properties.ch07 import several

HAND = np.array([[2, 1, 0], [0, 3, 1], [4, 0, 2]], np.int32)
"""Not symmetric, so that no mistake of sides hides."""
NAMES = ("input_offsets", "send_sizes", "output_offsets", "recv_sizes")
WHY = "The sizes and the rank are data: no NumPy, no int(), no slices that depend on them."


def layout(sizes, capacity):
    """(starts, kept, lands), [sender, receiver] each: buffers filled sender by sender, what does not fit is cut."""
    ranks = len(sizes)
    starts, kept, lands = (np.zeros((ranks, ranks), np.int64) for _ in range(3))
    for sender in range(ranks):
        starts[sender] = [sizes[sender, :receiver].sum() for receiver in range(ranks)]
    for receiver in range(ranks):
        filled = 0
        for sender in range(ranks):
            lands[sender, receiver] = filled
            kept[sender, receiver] = min(sizes[sender, receiver], capacity - filled)
            filled += kept[sender, receiver]
    return starts, kept, lands


def sizes_of(ranks, seed, most=6) -> np.ndarray:
    return np.random.default_rng([75, seed, ranks]).integers(0, most, (ranks, ranks)).astype(np.int32)


def _where(mask, found, what, case):
    """``found`` where a chunk has rows; the offset of an empty chunk may be anything."""
    array = np.asarray(found)
    if array.shape != mask.shape or array.dtype.kind not in "iu":
        shape = f"{array.dtype} of shape {array.shape}"
        raise Broken(
            f"{case}, {what}", shape, f"integers of shape {mask.shape}", f"{what} has one entry per rank."
        )
    return np.where(mask, array, 0)


# ---------------------------------------------------------------- 07.6 there


def _arguments(fn, sizes, capacity, case, why="") -> int:
    ranks = len(sizes)
    program = jax.jit(
        lambda sizes, rank: tuple(several(fn(sizes, rank, capacity), 4, case=case, names=", ".join(NAMES)))
    )
    starts, kept, lands = layout(sizes, capacity)
    own_view = np.cumsum(kept, axis=0) - kept
    cut_starts = np.cumsum(kept, axis=1) - kept
    _, _, uncut = layout(sizes, int(sizes.sum()))
    for rank in range(ranks):
        here = f"{case}, rank {rank}"
        found = compiled(program, sizes, np.int32(rank), case=here, why=WHY)
        right = starts[rank], kept[rank], lands[rank], kept[:, rank]
        own = own_view[:, rank], starts[:, rank]
        lines = (
            {
                "Where chunks begin does not change when they are cut: the rows are where they were.": cut_starts[
                    rank
                ],
                "A sender's rows are ordered by receiver: sum its own row of the matrix.": starts[:, rank],
            },
            {
                "This is what the rank receives. It sends its own row of the matrix.": kept[:, rank],
                "Not cut: more than the receiver has room for.": sizes[rank],
            },
            {
                "This is where this rank's own buffer receives. output_offsets is held by the sender and says where "
                "its chunk lands at each receiver.": own[0],
                "These are offsets in the sender's rows.": starts[rank],
                "Cut sizes shift what lands behind them.": uncut[rank],
            },
            {
                "This is what the rank sends. It receives its column of the matrix.": kept[rank],
                "Not cut: the sizes that both sides name must agree.": sizes[:, rank],
            },
        )
        masks = sizes[rank] > 0, np.ones(ranks, bool), kept[rank] > 0, np.ones(ranks, bool)
        for i in (1, 3, 0, 2):
            whole = NAMES[i]
            mine, want = _where(masks[i], found[i], whole, here), np.where(masks[i], right[i], 0)
            known = {line: np.where(masks[i], wrong, 0) for line, wrong in lines[i].items()}
            known = {line: wrong for line, wrong in known.items() if (wrong != want).any()}
            same(mine, want, case=f"{here}, {whole}", axes=("rank",), why=why, suspects=known, what=whole)
    return ranks


@holds("the matrix by hand, with room for all")
def by_hand(fn) -> int:
    return _arguments(fn, HAND, 99, "sizes [[2, 1, 0], [0, 3, 1], [4, 0, 2]]")


@holds("any matrix, with room for all")
def any_matrix(fn) -> int:
    cases = 0
    for ranks, seed in ((4, 0), (4, 1), (2, 2), (1, 3)):
        sizes = sizes_of(ranks, seed)
        cases += _arguments(fn, sizes, 99, f"random sizes {list(sizes.shape)} ({seed})")
    return cases


@holds("short of room: high senders are cut, at both ends")
def short_of_room(fn) -> int:
    cases = _arguments(fn, HAND, 5, "sizes [[2, 1, 0], [0, 3, 1], [4, 0, 2]], capacity 5")
    for ranks, seed, capacity in ((4, 10, 7), (4, 11, 3), (2, 12, 1), (3, 13, 0)):
        sizes = sizes_of(ranks, seed)
        cases += _arguments(
            fn, sizes, capacity, f"random sizes {list(sizes.shape)} ({seed}), capacity {capacity}"
        )
    return cases


# ---------------------------------------------------------------- 07.7 back


def move(operands, chunks, num_rows):
    """Buffers [R, num_rows] after the exchange, -1 where nothing landed; chunks[rank] = the four arguments.

    None where sender and receiver disagree on a size, or a chunk leaves its array.
    """
    out = np.full((len(operands), num_rows), -1)
    for sender, (start, size, landing, _) in enumerate(chunks):
        for receiver in range(len(operands)):
            n, a, b = int(size[receiver]), int(start[receiver]), int(landing[receiver])
            if n != int(chunks[receiver][3][sender]):
                return None
            if n and (a < 0 or b < 0 or a + n > operands.shape[1] or b + n > num_rows):
                return None
            out[receiver, b : b + n] = operands[sender, a : a + n]
    return out


def _backs(fn, sizes, capacity, case):
    """(what the learner's function says for every rank, the layout there)."""
    program = jax.jit(lambda *args: tuple(several(fn(*args), 4, case=case, names=", ".join(NAMES))))
    there = [a.astype(np.int32) for a in layout(sizes, capacity)]
    found = [
        compiled(program, *there, np.int32(r), case=f"{case}, rank {r}", why=WHY) for r in range(len(sizes))
    ]
    return found, there


def _way_back(fn, sizes, capacity, case) -> int:
    found, (starts, kept, lands) = _backs(fn, sizes, capacity, case)
    ranks = len(sizes)
    for rank in range(ranks):
        here = f"{case}, rank {rank}"
        right = lands[:, rank], kept[:, rank], starts[:, rank], kept[rank]
        there = starts[rank], kept[rank], lands[rank], kept[:, rank]
        unswapped = starts[:, rank], kept[:, rank], lands[:, rank], kept[rank]
        masks = kept[:, rank] > 0, np.ones(ranks, bool), kept[:, rank] > 0, np.ones(ranks, bool)
        for i in (1, 3, 0, 2):
            want = np.where(masks[i], right[i], 0)
            known = {
                "These are the arguments of the way there: back, a rank sends what it received.": there[i],
                "Transposed, but not swapped: back, rows are taken from where they landed, and land where they were "
                "taken from.": unswapped[i],
            }
            known = {line: np.where(masks[i], wrong, 0) for line, wrong in known.items()}
            known = {line: wrong for line, wrong in known.items() if (wrong != want).any()}
            mine = _where(masks[i], found[rank][i], NAMES[i], here)
            same(mine, want, case=f"{here}, {NAMES[i]}", axes=("rank",), suspects=known, what=NAMES[i])
    return ranks


@holds("the matrix by hand: a rank sends what it received")
def back_by_hand(fn) -> int:
    return _way_back(fn, HAND, 99, "there with sizes [[2, 1, 0], [0, 3, 1], [4, 0, 2]]")


@holds("any matrix, short of room or not")
def back_of_any(fn) -> int:
    cases = 0
    for ranks, seed, capacity in ((4, 20, 99), (4, 21, 7), (2, 22, 3), (1, 23, 9)):
        sizes = sizes_of(ranks, seed)
        cases += _way_back(
            fn, sizes, capacity, f"there with random sizes {list(sizes.shape)}, capacity {capacity}"
        )
    return cases


@holds("there and back, every row is where it was")
def round_trip(fn) -> int:
    for ranks, seed, capacity in ((4, 30, 99), (3, 31, 6)):
        sizes = sizes_of(ranks, seed)
        case = f"random sizes {list(sizes.shape)}, capacity {capacity}"
        found, (starts, kept, lands) = _backs(fn, sizes, capacity, case)
        rows = int(sizes.sum(1).max())
        operands = np.arange(ranks * rows).reshape(ranks, rows)
        there = [(starts[r], kept[r], lands[r], kept[:, r]) for r in range(ranks)]
        buffers = move(operands, there, capacity)
        home = move(buffers, [[np.asarray(a) for a in f] for f in found], rows)
        right = np.full((ranks, rows), -1)
        for s, r in np.ndindex(kept.shape):
            begin = starts[s, r]
            right[s, begin : begin + kept[s, r]] = operands[s, begin : begin + kept[s, r]]
        if home is None:
            why = "Both sides must name the same size for every chunk, and no chunk may leave its array."
            raise Broken(case, "an exchange that is undefined", "every row back where it was", why)
        same(home, right, case=case + ", rows after the way back (-1: none)", axes=("rank", "row"))
    return 2
