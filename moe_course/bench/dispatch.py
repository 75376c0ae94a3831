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

from moe_course.aot.hlo import COLLECTIVES
from moe_course.bench.timing import interleaved, median_ratio
from moe_course.dispatch import DISPATCHERS, DispatchPlan, combine, dispatch
from moe_course.dispatch.hierarchical import relay_rows
from moe_course.dispatch.ledger import pair_books
from moe_course.dispatch.plan import bucket_capacity
from moe_course.parallel import MeshConfig, batch_sharding, make_mesh
from moe_course.routing import Routing
from moe_course.scaling.comm import copies_per_token

DEVICES = 8
NUMBER = 4
"""Bytes of a float32 or int32, which is all that travels here."""
_COLLECTIVE = re.compile(
    r"= (?P<shapes>\(.*?\)|\S+) "
    rf"(?P<kind>{'|'.join(COLLECTIVES)})"
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
    nodes: int = 2
    """Nodes that the 8 ranks stand for: two axes of the hierarchical dispatcher's mesh, lines in all books."""
    rounds: int = 7


def run(options: Options = Options()) -> dict:
    """``{dispatcher: {"bytes_per_token": b, "predicted": p, "collectives": {kind: count}, ...}}``.

    Beside these: ``useful_bytes_per_token`` and ``useful_predicted``; ``receive_buffer_bytes`` per device, all
    receive buffers of the dispatcher together; ``rows_across_nodes`` per token and way, by the ledger;
    ``latency_vs_all_to_all``, its median time over that of all_to_all (above 1 is slower), here, where ragged, dedup
    and hierarchical run an emulation that moves everything everywhere.
    """
    names = sorted(set(DISPATCHERS) - {"local", "te"})
    programs, figures = {}, {}
    for name in names:
        nodes = options.nodes if name == "hierarchical" else 1
        mesh = make_mesh(MeshConfig(data=1, fsdp=1, expert=DEVICES, nodes=nodes))
        plan = plan_of(options, name)
        with jax.set_mesh(mesh):
            arrays = [jax.device_put(a, batch_sharding(mesh)) for a in uniform_routing(options)]
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


def rows_across_nodes(options: Options, dispatcher: str) -> float:
    """Rows per token and way that leave a node, of uniform picks."""
    elsewhere = (options.nodes - 1) / options.nodes  # the share of experts, and of ranks, in other nodes
    return (
        elsewhere
        * {
            "all_gather": float(DEVICES),
            "all_to_all": float(options.top_k),
            "ragged": float(options.top_k),
            "dedup": copies_per_token(options.experts, options.top_k, DEVICES),
            "hierarchical": copies_per_token(options.experts, options.top_k, options.nodes),
        }[dispatcher]
    )


def predicted_bytes(options: Options, plan: DispatchPlan, platform: str) -> float:
    """Bytes per token of a device's collectives, from the shapes alone."""
    o, r, t, c = options, DEVICES, options.tokens_per_rank, plan.capacity
    row = o.d_model
    if plan.dispatcher == "hierarchical":
        relay = relay_rows(o.nodes, t, plan)
        local = r // o.nodes
        across = _hop(o.nodes, t * min(o.top_k, o.nodes), relay, row, 2 * o.top_k, platform)
        within = _hop(local, relay * min(o.top_k, local), min(c, r * t), row, 2 * o.top_k + 1, platform)
        return NUMBER * (r * r + across + within) / t
    if plan.dispatcher == "all_gather":  # tokens, ids, weights to all; partial sums of all tokens back
        numbers = r * t * (row + 2 * o.top_k) + r * t * row
    elif plan.dispatcher == "all_to_all":  # rows and their weights in blocks, counts; rows back
        numbers = c * (row + 1) + o.experts + c * row
    elif plan.dispatcher == "dedup":
        numbers = r * r + _hop(r, t * min(o.top_k, r), min(c, r * t), row, 2 * o.top_k, platform)
    else:  # ragged: a chunk per expert
        numbers = _hop(r, t * o.top_k, c, row, 1, platform, chunks=o.experts)
    return NUMBER * numbers / t


def _hop(
    owners: int, sends: int, receives: int, row: int, beside: int, platform: str, chunks: int | None = None
) -> int:
    """Numbers in the collectives of one hop: counts of all chunks; rows and what goes beside them; rows back."""
    counts = owners * (chunks or owners)
    if (
        platform == "cpu"
    ):  # the emulation gathers every rank's operand, and three numbers per chunk, three times
        return counts + owners * sends * (row + beside) + owners * receives * row + 3 * 3 * counts
    return counts + receives * (row + beside) + sends * row  # receive buffers


def useful_bytes(options: Options, dispatcher: str, rows: float, relayed: float = 0.0) -> float:
    """Bytes per token when ``rows`` of its rows travel, there with what goes beside them, and back.

    Of these, ``relayed`` rows also carry the number of the node that they come from.
    """
    picks = 2 * options.top_k
    beside = {"all_to_all": 1, "ragged": 1, "all_gather": picks, "dedup": picks, "hierarchical": picks}
    return NUMBER * (rows * (2 * options.d_model + beside[dispatcher]) + relayed)


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
    o, name, tokens = options, plan.dispatcher, options.tokens_per_rank
    kinds, total = collectives(hlo, DEVICES)
    pairs = pair_books(sent).rows["sent"][0] / (tokens * DEVICES)
    node = np.arange(DEVICES) // (DEVICES // o.nodes)
    across = pairs[node[:, None] != node[None, :]].sum()
    rows, expected, relayed = pairs.sum(), float(o.top_k), (0.0, 0.0)
    second = {"all_to_all": plan.capacity, "ragged": 0}.get(name, min(plan.capacity, DEVICES * tokens))
    if name in ("dedup", "hierarchical"):
        expected = copies_per_token(o.experts, o.top_k, DEVICES)
    if name == "hierarchical":  # every row of the second hop was relayed
        first = copies_per_token(o.experts, o.top_k, o.nodes)
        relayed, expected = (rows - first, expected), expected + first
        second += relay_rows(o.nodes, tokens, plan)
    if name == "all_gather":
        rows = expected = float(DEVICES)
        across = rows_across_nodes(o, name)
        second = DEVICES * tokens
    return {
        "bytes_per_token": round(total / tokens, 1),
        "predicted": round(predicted_bytes(o, plan, jax.default_backend()), 1),
        "useful_bytes_per_token": round(useful_bytes(o, name, float(rows), float(relayed[0])), 1),
        "useful_predicted": round(useful_bytes(o, name, expected, relayed[1]), 1),
        "rows_per_token": round(float(rows), 3),
        "rows_across_nodes": round(float(across), 3),
        "rows_across_nodes_predicted": round(rows_across_nodes(o, name), 3),
        "receive_buffer_bytes": NUMBER * o.d_model * (plan.capacity + second),
        "collectives": kinds,
    }


def _dispatch(x, ids, weights, *, plan):
    return dispatch(x, Routing(ids, weights, None), plan=plan)


def _there_and_back(x, ids, weights, *, plan):
    sent = _dispatch(x, ids, weights, plan=plan)
    return combine(sent.rows * sent.row_weights[:, None], sent), jnp.max(sent.demand)
