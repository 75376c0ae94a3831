"""``moe-course bench dispatch``: what each dispatcher puts on the wire, read from its compiled program.

Dispatch and combine of one layer, forward, on 8 devices along ``expert``, with uniform random picks. Bytes are
those of a device's collectives, its own share included (an all-to-all of [R, pair] blocks counts all R), over its
own tokens. A program's buffers have fixed sizes, so ``bytes_per_token`` is a buffer's; ``useful_bytes_per_token``
counts the rows that carry something, by the token ledger, which is what a ragged exchange moves on a GPU.
"""

import math
import re
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from moe_course.bench.timing import interleaved, median_ratio
from moe_course.dispatch import DISPATCHERS, DispatchPlan, combine, dispatch
from moe_course.dispatch.ledger import pair_books
from moe_course.dispatch.plan import bucket_capacity
from moe_course.parallel import MeshConfig, batch_sharding, make_mesh
from moe_course.routing import Routing

DEVICES = 8
NUMBER = 4
"""Bytes of a float32 or int32, which is all that travels here."""
_COLLECTIVE = re.compile(
    r"= (?P<shapes>\(.*?\)|\S+) "
    r"(?P<kind>all-gather|all-to-all|reduce-scatter|all-reduce|collective-permute|ragged-all-to-all)"
    r"(?P<start>-start)?\("
)
_SHAPE = re.compile(r"(?P<dtype>[a-z]+)(?P<bits>\d+)\w*\[(?P<sizes>[\d,]*)\]")


@dataclass(frozen=True)
class Options:
    """Settings of ``moe-course bench dispatch``."""

    tokens_per_rank: int = 512
    d_model: int = 256
    experts: int = 64
    top_k: int = 8
    capacity_factor: float = 2.0
    rounds: int = 7


def run(options: Options = Options()) -> dict:
    """``{dispatcher: {"bytes_per_token": b, "predicted": p, "collectives": {kind: count}, ...}}``.

    Beside these: ``useful_bytes_per_token`` and ``useful_predicted``; ``receive_buffer_bytes`` per device, all
    receive buffers of the dispatcher together; ``latency_vs_all_to_all``, its median time over that of all_to_all
    (above 1 is slower), here, where ragged and dedup run an emulation that moves everything everywhere.
    """
    mesh = make_mesh(MeshConfig(data=1, fsdp=1, expert=DEVICES))
    names = sorted(set(DISPATCHERS) - {"local"})
    with jax.set_mesh(mesh):
        arrays = [jax.device_put(a, batch_sharding(mesh)) for a in uniform_routing(options)]
        programs, figures = {}, {}
        for name in names:
            plan = plan_of(options, name)
            compiled = jax.jit(partial(_there_and_back, plan=plan)).lower(*arrays).compile()
            sent = jax.jit(partial(_dispatch, plan=plan))(*arrays)
            assert int(sent.demand.max()) <= plan.capacity, (
                f"{name} dropped copies; raise the capacity factor"
            )
            programs[name] = partial(compiled, *arrays)
            figures[name] = _figures(options, plan, compiled.as_text(), sent)
        seconds = interleaved(programs, options.rounds)
    for name in names:
        figures[name]["latency_vs_all_to_all"] = round(median_ratio(seconds, name, "all_to_all"), 3)
    return figures


def uniform_routing(options: Options):
    """Tokens, K distinct uniform picks of each, and weights."""
    rng = np.random.default_rng(0)
    tokens = options.tokens_per_rank * DEVICES
    ids = rng.random((tokens, options.experts)).argsort(1)[:, : options.top_k].astype(np.int32)
    x = rng.standard_normal((tokens, options.d_model)).astype(np.float32)
    return x, ids, rng.random(ids.shape, np.float32)


def plan_of(options: Options, dispatcher: str) -> DispatchPlan:
    """The plan of a training run with these sizes."""
    sizes = options.tokens_per_rank, options.top_k, options.experts, DEVICES
    return DispatchPlan(
        options.experts, DEVICES, bucket_capacity(0, options.capacity_factor, *sizes), dispatcher
    )


def rows_per_token(experts: int, top_k: int, ranks: int) -> float:
    """Distinct ranks that uniform picks go to: R (1 - C(E - E/R, K) / C(E, K))."""
    return ranks * (1 - math.comb(experts - experts // ranks, top_k) / math.comb(experts, top_k))


def predicted_bytes(options: Options, plan: DispatchPlan, platform: str) -> float:
    """Bytes per token of a device's collectives, from the shapes alone."""
    o, r, t, c = options, DEVICES, options.tokens_per_rank, plan.capacity
    row = o.d_model
    if plan.dispatcher == "all_gather":  # tokens, ids, weights to all; partial sums of all tokens back
        numbers = r * t * (row + 2 * o.top_k) + r * t * row
    elif plan.dispatcher == "all_to_all":  # rows and their weights in blocks, counts; rows back
        numbers = c * (row + 1) + o.experts + c * row
    else:
        sends = t * (o.top_k if plan.dispatcher == "ragged" else min(o.top_k, r))
        wire = c if plan.dispatcher == "ragged" else min(c, r * t)
        beside = 1 if plan.dispatcher == "ragged" else 2 * o.top_k
        chunks = o.experts if plan.dispatcher == "ragged" else r
        counts = r * (o.experts if plan.dispatcher == "ragged" else 2 * r)
        if (
            platform == "cpu"
        ):  # the emulation gathers every rank's operand, and its offsets and sizes, each time
            numbers = counts + r * sends * (row + beside) + r * wire * row + 3 * (3 * r * chunks)
        else:  # receive buffers, of the rows and of what goes beside them, there; the operand's size back
            numbers = counts + wire * (row + beside) + sends * row
    return NUMBER * numbers / t


def useful_bytes(options: Options, dispatcher: str, rows: float) -> float:
    """Bytes per token when ``rows`` of its rows travel, there with what goes beside them, and back."""
    beside = {"all_to_all": 1, "ragged": 1, "all_gather": 2 * options.top_k, "dedup": 2 * options.top_k}
    return NUMBER * rows * (2 * options.d_model + beside[dispatcher])


def collectives(hlo: str, group: int) -> tuple[dict[str, int], int]:
    """(how many of each kind, bytes of all) in a compiled program: results, of a reduce-scatter its operand."""
    kinds: dict[str, int] = {}
    total = 0
    for found in _COLLECTIVE.finditer(hlo):
        kind = found["kind"]
        kinds[kind] = kinds.get(kind, 0) + 1
        shapes = [
            int(s["bits"]) // 8 * math.prod(int(n) for n in s["sizes"].split(",") if n)
            for s in _SHAPE.finditer(found["shapes"])
        ]
        if found["start"]:  # (operands, results)
            shapes = shapes[len(shapes) // 2 :]
        total += sum(shapes) * (group if kind == "reduce-scatter" else 1)
    return kinds, total


def _figures(options: Options, plan: DispatchPlan, hlo: str, sent) -> dict:
    tokens = options.tokens_per_rank
    kinds, total = collectives(hlo, DEVICES)
    books = pair_books(sent)
    rows, expected_rows = books.rows["sent"].sum() / (tokens * DEVICES), float(options.top_k)
    if plan.dispatcher == "dedup":
        expected_rows = rows_per_token(options.experts, options.top_k, DEVICES)
    elif plan.dispatcher == "all_gather":
        rows = expected_rows = float(DEVICES)
    buffers = {"all_gather": DEVICES * tokens, "all_to_all": plan.capacity, "ragged": 0}
    second = buffers.get(plan.dispatcher, min(plan.capacity, DEVICES * tokens))
    return {
        "bytes_per_token": round(total / tokens, 1),
        "predicted": round(predicted_bytes(options, plan, jax.default_backend()), 1),
        "useful_bytes_per_token": round(useful_bytes(options, plan.dispatcher, float(rows)), 1),
        "useful_predicted": round(useful_bytes(options, plan.dispatcher, expected_rows), 1),
        "rows_per_token": round(float(rows), 3),
        "receive_buffer_bytes": NUMBER * options.d_model * (plan.capacity + second),
        "collectives": kinds,
    }


def _dispatch(x, ids, weights, *, plan):
    return dispatch(x, Routing(ids, weights, None), plan=plan)


def _there_and_back(x, ids, weights, *, plan):
    sent = _dispatch(x, ids, weights, plan=plan)
    return combine(sent.rows * sent.row_weights[:, None], sent), jnp.max(sent.demand)
