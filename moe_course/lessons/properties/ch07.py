"""Chapter 07, expert parallelism: the send matrix and the padded exchange. Oracles are NumPy loops over ranks."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from moe_course.lessons.compare import close, items, same
from moe_course.lessons.exercise import Broken, holds
from moe_course.lessons.learner import Crashed, NotAttempted, compiled
from moe_course.parallel import EXPERT

D = 3


def mesh_of(ranks: int):
    return jax.make_mesh((ranks,), (EXPERT,), axis_types=(AxisType.Auto,), devices=jax.devices()[:ranks])


def on_ranks(fn, *args, case: str):
    """``fn`` on R simulated devices at once: rank r gets ``a[r]`` of each argument; results are stacked."""
    out = _run(_stacked(fn, len(args[0])), args, case)
    return jax.tree.map(np.asarray, out)


def gradient_on_ranks(loss, *args, case: str):
    """The gradient of the sum of every rank's ``loss(*args)`` with respect to the first argument."""
    shares = _stacked(lambda *a: loss(*a)[None], len(args[0]))
    return np.asarray(_run(jax.grad(lambda *a: shares(*a).sum()), args, case))


def several(value, count: int, *, case: str, names: str):
    """The ``count`` results; a single array is called that, though inside a program it is a tracer."""
    if hasattr(value, "shape"):
        why = f"Return {names}, in this order."
        raise Broken(case, f"one array of shape {value.shape}", f"a tuple ({names})", why)
    return items(value, count, case=case, names=names)


def _stacked(fn, ranks):
    def one_rank(*args):
        return jax.tree.map(lambda a: jnp.asarray(a)[None], fn(*(a[0] for a in args)))

    spec = P(EXPERT)
    return jax.shard_map(one_rank, mesh=mesh_of(ranks), in_specs=spec, out_specs=spec)


def _run(program, args, case):
    try:
        return jax.jit(program)(*(jnp.asarray(a) for a in args))
    except (NotAttempted, Broken, Crashed):
        raise
    except Exception as error:
        why = "Each rank runs the same program on its own arrays: sizes and ids are data, and shapes are those stated."
        raise Broken(case, type(error).__name__, "a program that runs on every rank", why) from error


# ---------------------------------------------------------------- 07.1 the send matrix


def picks_of(ranks, tokens, picks, experts, seed, none=False) -> np.ndarray:
    """[R, T, K]: distinct picks of each token, some experts popular, other ones on each rank."""
    rng = np.random.default_rng([70, seed, ranks, tokens])
    keys = rng.normal(size=(ranks, tokens, experts)) + 1.5 * rng.normal(size=(ranks, 1, experts))
    ids = np.argsort(keys, axis=-1)[..., :picks].astype(np.int32)
    if none:
        ids[:, 1::3] = experts
    return ids


def matrix_of(owner, ranks, once=False) -> np.ndarray:
    counts = np.zeros((ranks, ranks), np.int64)
    for sender, token in np.ndindex(owner.shape[:2]):
        receivers = owner[sender, token]
        for receiver in np.unique(receivers) if once else receivers:
            if 0 <= receiver < ranks:
                counts[sender, receiver] += 1
    return counts


MATRICES = ((4, 5, 2, 8), (3, 4, 3, 12), (2, 6, 4, 4), (8, 3, 1, 8), (2, 0, 2, 8), (1, 3, 2, 4))


def _matrix(result, ids, experts, case, why="") -> None:
    ranks = len(ids)
    owner = ids // (experts // ranks)
    right = matrix_of(owner, ranks)
    lines = {
        "This is the transpose: rows are senders, columns are receivers.": right.T,
        "Experts are dealt out one by one here (e mod R). Rank r owns a run of E/R neighbours.": matrix_of(
            np.where((ids >= 0) & (ids < experts), ids % ranks, ranks), ranks
        ),
        "A token with two experts on one rank is two copies: count copies, not tokens.": matrix_of(
            owner, ranks, once=True
        ),
        "The diagonal counts too: what stays on its rank takes a place in the buffer like the rest.": right
        * (1 - np.eye(ranks, dtype=int)),
        "The id E is no expert. Clipped to E - 1, the last rank gets the padding.": matrix_of(
            ids.clip(0, experts - 1) // (experts // ranks), ranks
        ),
        "Only the first pick of each token is counted.": matrix_of(owner[..., :1], ranks),
    }
    same(result, right, case=case, axes=("sender", "receiver"), why=why, suspects=lines if ids.size else None)


def _matrix_case(ids, experts) -> str:
    return f"ids {list(ids.shape)}, {experts} experts, {len(ids)} {'rank' if len(ids) == 1 else 'ranks'}"


@holds("row s, column r: copies that rank s has for rank r")
def counts_copies(fn) -> int:
    for i, (ranks, tokens, picks, experts) in enumerate(MATRICES):
        ids = picks_of(ranks, tokens, picks, experts, i)
        _matrix(fn(ids, experts, ranks), ids, experts, _matrix_case(ids, experts))
    return len(MATRICES)


@holds("padding goes nowhere")
def padding_nowhere(fn) -> int:
    for i, (ranks, tokens, picks, experts) in enumerate(MATRICES[:2]):
        ids = picks_of(ranks, tokens, picks, experts, 10 + i, none=True)
        why = f"Every third token has the id {experts}, which no rank owns."
        _matrix(fn(ids, experts, ranks), ids, experts, _matrix_case(ids, experts) + ", some of them E", why)
    return 2


@holds("the picks are data: it runs under jit")
def matrix_under_jit(fn) -> int:
    program = jax.jit(lambda ids: fn(ids, 8, 4))
    for seed in (20, 21):
        ids = picks_of(4, 5, 2, 8, seed)
        case = _matrix_case(ids, 8) + ", under jit"
        why = "Under jit the ids are data: no NumPy, no int(), no loop over values."
        _matrix(compiled(program, ids, case=case, why=why), ids, 8, case)
    return 2


# ---------------------------------------------------------------- 07.2 the padded exchange, there


def tokens_of(ranks, tokens, seed, width=D) -> np.ndarray:
    return np.random.default_rng([71, seed]).normal(size=(ranks, tokens, width)).astype(np.float32)


def owners_of(ranks, tokens, picks, seed, none=False) -> np.ndarray:
    """[R, T, K]: the owner of each pick, low ranks popular with some senders, high ranks with others."""
    rng = np.random.default_rng([72, seed, ranks, picks])
    popular = rng.normal(size=(ranks, 1, 1, ranks))
    owner = np.argmax(rng.gumbel(size=(ranks, tokens, picks, ranks)) + popular, axis=-1).astype(np.int32)
    if none:
        owner[:, 1::3] = ranks
        owner[:, 0, -1] = ranks
    return owner


def blocks_of(x, owner, pair):
    """(sent [R, R, pair, D], by sender and receiver; place [R, T, K])."""
    ranks = len(x)
    sent = np.zeros((ranks, ranks, pair, x.shape[-1]), x.dtype)
    place = np.full(owner.shape, ranks * pair)
    for rank in range(ranks):
        filled = [0] * ranks
        for t, k in np.ndindex(owner.shape[1:]):
            to = owner[rank, t, k]
            if to < ranks and filled[to] < pair:
                sent[rank, to, filled[to]] = x[rank, t]
                place[rank, t, k] = to * pair + filled[to]
                filled[to] += 1
    return sent, place


def _there(fn, x, owner, pair, case, why="") -> None:
    ranks = len(x)

    def run(x, owner):
        return several(fn(x, owner, ranks, pair), 2, case=case, names="received, place")

    received, place = on_ranks(run, x, owner, case=case)
    sent, places = blocks_of(x, owner, pair)
    sent, right = np.nan_to_num(sent), np.nan_to_num(sent).swapaxes(0, 1)
    lines = {
        "This is what each rank sends. It was never exchanged.": sent,
        "The block of a rank is where its rows came from, not where they go: row s holds what rank s sent.": right[
            :, ::-1
        ],
    }
    axes = ("rank", "token", "pick")
    same(place, places, case=case + ", place", axes=axes, why=why, what="place")
    axes = ("rank", "block", "row", "feature")
    close(received, right, case=case + ", received", axes=axes, why=why, suspects=lines, what="received")


def _there_case(x, owner, pair) -> str:
    return f"{len(x)} ranks, x {list(x.shape[1:])}, owner {list(owner.shape[1:])}, pair {pair}"


@holds("block s holds what rank s sent here, in slot order")
def blocks_by_sender(fn) -> int:
    for i, (ranks, tokens, picks, pair, width) in enumerate(((4, 5, 2, 9, 3), (3, 4, 1, 4, 2))):
        x, owner = tokens_of(ranks, tokens, i, width), owners_of(ranks, tokens, picks, i)
        _there(fn, x, owner, pair, _there_case(x, owner, pair))
    return 2


@holds("a full block drops what comes last and spills into no other")
def full_blocks(fn) -> int:
    x, owner = tokens_of(4, 7, 10), owners_of(4, 7, 2, 10)
    why = "A copy without room has the place R pair: it is not in the buffer. Everything before it stays where it was."
    _there(fn, x, owner, 2, _there_case(x, owner, 2), why)
    return 1


@holds("padding is not sent, and its NaN neither")
def padding_stays(fn) -> int:
    x, owner = tokens_of(4, 7, 20), owners_of(4, 7, 2, 20, none=True)
    x[:, 1::3] = np.nan
    case = _there_case(x, owner, 9) + ", every third token NaN with the owner R"
    why = "The owner R is nobody. 0 times NaN is NaN: do not multiply by a mask, do not read."
    _there(fn, x, owner, 9, case, why)
    return 1


@holds("the gradient of a token is the sum over the copies that were sent")
def there_gradient(fn) -> int:
    x, owner, pair = tokens_of(4, 5, 30), owners_of(4, 5, 2, 30), 2
    probe = np.random.default_rng(31).normal(size=(4, 4, pair, D)).astype(np.float32)

    def loss(x, owner, probe):
        return (fn(x, owner, 4, pair)[0] * probe).sum()

    case = _there_case(x, owner, pair) + ", gradient of x"
    found = gradient_on_ranks(loss, x, owner, probe, case=case)
    _, place = blocks_of(x, owner, pair)
    right = np.zeros(x.shape)
    for rank, t, k in np.argwhere(place < 4 * pair):
        to, row = divmod(place[rank, t, k], pair)
        right[rank, t] += probe[to, rank, row]
    close(found, right, case=case, axes=("rank", "token", "feature"), terms=4)
    return 1


# ---------------------------------------------------------------- 07.3 the padded exchange, back


def answers_of(ranks, tokens, picks, pair, seed, unread=0.0):
    """answers [R, R, pair, D] as (rank that computed, sender, row), place [R, T, K], both of one exchange."""
    owner = owners_of(ranks, tokens, picks, seed, none=True)
    marker, place = blocks_of(np.ones((ranks, tokens, 1), np.float32), owner, pair)
    answers = np.random.default_rng([73, seed]).normal(size=(ranks, ranks, pair, D)).astype(np.float32)
    return np.where(marker.swapaxes(0, 1) > 0, answers, np.float32(unread)), place.astype(np.int32)


def sums_of(answers, place) -> np.ndarray:
    home = np.asarray(answers, np.float64).swapaxes(0, 1).reshape(len(answers), -1, D)
    out = np.zeros((*place.shape[:2], D))
    for rank, t, k in np.argwhere(place < home.shape[1]):
        out[rank, t] += home[rank, place[rank, t, k]]
    return out


def _back(fn, answers, place, case, why="") -> None:
    found = on_ranks(fn, answers, place, case=case)
    right = sums_of(answers, place)
    own = np.nan_to_num(np.asarray(answers, np.float64)).swapaxes(0, 1)
    lines = {
        "These are answers that this rank computed, for others. They were never sent home.": sums_of(
            own, place
        ),
        "This is the mean over the picks. The rows are weighted already: add.": right / place.shape[2],
        "Added up over the ranks: but token 0 of one rank is not token 0 of another.": np.broadcast_to(
            right.sum(0), right.shape
        ),
        "Every token is there R times: each rank has its own tokens, so nothing is left to sum over ranks.": len(
            place
        )
        * right,
    }
    lines = lines if place.shape[2] > 1 and len(place) > 1 else None
    axes = ("rank", "token", "feature")
    close(found, right, case=case, axes=axes, terms=place.shape[2], why=why, suspects=lines)


def _back_case(answers, place) -> str:
    return f"{len(answers)} ranks, answers {list(answers.shape[1:])}, place {list(place.shape[1:])}"


@holds("each token gets the sum of its copies' answers")
def sums_copies(fn) -> int:
    for i, (ranks, tokens, picks, pair) in enumerate(((4, 5, 2, 9), (3, 4, 1, 4))):
        answers, place = answers_of(ranks, tokens, picks, pair, 40 + i)
        _back(fn, answers, place, _back_case(answers, place))
    return 2


@holds("copies that were not sent add nothing, rows that hold no copy are not read")
def unsent_add_nothing(fn) -> int:
    answers, place = answers_of(4, 6, 3, 3, 50, unread=np.nan)
    why = "Place R pair is past the end. An index past the end clamps to the last row: ask for fill with 0."
    _back(fn, answers, place, _back_case(answers, place) + ", NaN in rows that hold no copy", why)
    return 1


@holds("the sum is float32, whatever comes back")
def back_in_float32(fn) -> int:
    answers, place = answers_of(2, 4, 8, 33, 60)
    answers = (answers * 64).astype(jnp.bfloat16)
    why = "Answers travel in bfloat16, and are added up in float32: eight terms would be rounded eight times."
    _back(fn, answers, place, _back_case(answers, place) + ", bfloat16", why)
    return 1


@holds("gradients go back to the answers, and to no other row")
def back_gradient(fn) -> int:
    answers, place = answers_of(4, 6, 2, 3, 70, unread=np.nan)
    probe = tokens_of(4, 6, 71)

    def loss(answers, place, probe):
        return (fn(answers, place) * probe).sum()

    case = _back_case(answers, place) + ", gradient of the answers"
    found = gradient_on_ranks(loss, answers, place, probe, case=case)
    right = np.zeros(answers.shape).reshape(4, 4, 3, D).swapaxes(0, 1).reshape(4, 12, D)
    for rank, t, k in np.argwhere(place < 12):
        right[rank, place[rank, t, k]] += probe[rank, t]
    right = right.reshape(4, 4, 3, D).swapaxes(0, 1)
    close(found, right, case=case, axes=("rank", "block", "row", "feature"), terms=4)
    return 1
