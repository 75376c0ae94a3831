"""``moe-course bench ladder``: one MoE layer, forward, from the loop that everybody writes first to low-precision dispatch.

Experts are cut over 8 devices, tokens too, picks are skewed. Each rung changes one thing and must give the same output:

1. ``naive loop``: all tokens to all devices; a loop over tokens and picks runs the device's own experts on single rows.
2. ``masked dense``: the same exchange; every local expert on every token, weighed by 0 where it was not picked.
3. ``padded``: a padded all-to-all of the picked rows; a batched product over experts padded to the largest group.
4. ``tiled grouped GEMM``: the same exchange; no padding in the products.
5. ``dedup dispatch``: a row travels once per destination rank, not once per expert.
6. ``bfloat16 on the wire``: rows there and back.
7. ``MXFP8 on the wire``: rows there in one byte and a scale per 32 elements; back in bfloat16.

The first four are timed, in turn, as ratios. The others are not: a CPU has no ragged all-to-all, and its emulation moves
everything everywhere. They are judged by bytes. The 8 devices share the cores of one machine: a ratio of times says what
the work costs there, not what a network or a GPU would make of it.
"""

import datetime
import itertools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from moe_course.bench.dispatch import collectives
from moe_course.bench.timing import interleaved, median_ratio
from moe_course.dispatch import DispatchPlan, combine, dispatch
from moe_course.dispatch.ledger import check_pairs, pair_books
from moe_course.dispatch.plan import bucket_capacity
from moe_course.environment import versions
from moe_course.errors import RunError
from moe_course.experts import activate, swiglu_experts
from moe_course.grouping import group_offsets
from moe_course.parallel import EXPERT, MeshConfig, batch_sharding, make_mesh, per_device, token_axes
from moe_course.quant import dequantize, quantize_mxfp8
from moe_course.routing import Routing
from moe_course.varying import vary_alike

DEVICES = 8
ERROR = {"float32": 64 * 2.0**-23, "bfloat16": 2.0**-7, "mxfp8": 2.0**-3}
"""Most that max |output - reference| / max |reference| may be, by what travels: multiples of the formats' epsilons."""


@dataclass(frozen=True)
class Options:
    """Settings of ``moe-course bench ladder``."""

    tokens_per_rank: int = 256
    d_model: int = 256
    d_ff: int = 128
    experts: int = 64
    top_k: int = 8
    skew: float = 0.5
    """Popularity of the n-th expert is n ** -skew; 0 is uniform."""
    rounds: int = 7
    write: bool = False
    """Write the result to the package's ``bench/results/ladder.json``."""


@dataclass(frozen=True)
class Problem:
    """The layer's arguments, and its output in float64."""

    arguments: tuple[np.ndarray, ...]
    """(x, expert_ids, weights, gate_up, down)"""
    reference: np.ndarray

    def rows_of(self, owners: int) -> np.ndarray:
        """Picks by (sending rank, owner), int [8, owners]; owners have runs of experts, each expert or each rank."""
        ids, experts = self.arguments[1], len(self.arguments[3])
        owner = ids.reshape(DEVICES, -1) // (experts // owners)
        return np.stack([np.bincount(mine, minlength=owners) for mine in owner])


def run(options: Options = Options()) -> dict:
    """``{rung: {"times_faster_than_first", "times_faster_than_before", "bytes_per_token", ...}, "about": {...}}``.

    ``bytes_per_token``: rows that carry something, as the collectives count them (a device's own share included), of the
    first two rungs from the compiled program, of the others by the token ledger. ``program_bytes_per_token``: with the
    padding of the buffers, from the compiled program, where it is not an emulation. ``bytes_of_before`` and
    ``bytes_of_first``: over those of the rung before and of the first. ``error``: max |d| / max |reference|.
    """
    about, problem = _about(options), make_problem(options)
    mesh = make_mesh(MeshConfig(data=1, fsdp=1, expert=DEVICES))
    figures, programs = {}, {}
    with jax.set_mesh(mesh):
        arguments = [
            jax.device_put(a, batch_sharding(mesh)) for a in problem.arguments
        ]  # all are cut over expert
        for name, rung in rungs(options, problem).items():
            compiled = jax.jit(rung.layer).lower(*arguments).compile()
            out, sent = compiled(*arguments)
            figures[name] = {"error": check_output(name, out, problem.reference, rung.wire)}
            figures[name] |= rung.bytes_of(compiled.as_text(), sent)
            if rung.timed:
                programs[name] = partial(compiled, *arguments)
        seconds = interleaved(programs, options.rounds)
    first = next(iter(figures))
    for before, name in itertools.pairwise([first, *figures]):
        figures[name] |= _ratios(figures, seconds, first, before, name)
    figures["about"] = about
    if options.write:
        path = Path(__file__).parent / "results" / "ladder.json"
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return figures


def _ratios(figures, seconds, first: str, before: str, name: str) -> dict:
    per_token = {rung: figures[rung]["bytes_per_token"] for rung in (first, before, name)}
    timed = name in seconds
    return {
        "times_faster_than_first": round(median_ratio(seconds, first, name), 2) if timed else None,
        "times_faster_than_before": round(median_ratio(seconds, before, name), 2) if timed else None,
        "bytes_of_first": round(per_token[name] / per_token[first], 3),
        "bytes_of_before": round(per_token[name] / per_token[before], 3),
    }


def _about(options: Options) -> dict:
    sizes = ("tokens_per_rank", "d_model", "d_ff", "experts", "top_k", "skew", "rounds")
    # What else ran in the minute before: above 1 or so, ratios of times are rougher.
    return {
        "devices": f"{DEVICES} simulated, on the cores of one machine",
        **{key: getattr(options, key) for key in sizes},
        "load_average_before": round(os.getloadavg()[0], 1),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        **versions(),
    }


# --- the problem and its reference ------------------------------------------------------------------------


def make_problem(options: Options, seed: int = 0) -> Problem:
    """Tokens, K distinct skewed picks of each with weights that add up to 1, and weights of unit-variance products."""
    o, rng = options, np.random.default_rng(seed)
    tokens = o.tokens_per_rank * DEVICES
    popularity = rng.permutation(np.arange(1, o.experts + 1) ** -o.skew)
    keys = np.log(popularity) + rng.gumbel(
        size=(tokens, o.experts)
    )  # the top k of these: draws without return
    ids = np.argsort(-keys, axis=1)[:, : o.top_k].astype(np.int32)
    weights = rng.random(ids.shape) + 0.5
    weights = (weights / weights.sum(1, keepdims=True)).astype(np.float32)
    x = rng.standard_normal((tokens, o.d_model)).astype(np.float32)
    gate_up = rng.standard_normal((o.experts, o.d_model, 2 * o.d_ff)) / o.d_model**0.5
    down = rng.standard_normal((o.experts, o.d_ff, o.d_model)) / o.d_ff**0.5
    arguments = (x, ids, weights, gate_up.astype(np.float32), down.astype(np.float32))
    return Problem(arguments, _reference(*arguments))


def _reference(x, ids, weights, gate_up, down) -> np.ndarray:
    """The layer in float64, expert by expert."""
    out = np.zeros(x.shape, np.float64)
    for e in range(len(gate_up)):
        token, pick = np.nonzero(ids == e)
        gate, up = np.split(x[token].astype(np.float64) @ gate_up[e], 2, axis=1)
        rows = (gate / (1 + np.exp(-gate)) * up) @ down[e]
        np.add.at(out, token, weights[token, pick, None] * rows)
    return out


def check_output(name: str, out: np.ndarray, reference: np.ndarray, wire: str) -> float:
    """Relative error of a rung. :class:`RunError` if it is more than rounding."""
    error = float(np.abs(np.asarray(out, np.float64) - reference).max() / np.abs(reference).max())
    if not error <= ERROR[wire]:
        raise RunError(
            f"{name} computes something else: its error is {error:.2g}, {ERROR[wire]:.2g} is allowed."
        )
    return float(f"{error:.2g}")


# --- the rungs --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rung:
    """A way to compute the layer: ``layer(x, expert_ids, weights, gate_up, down) -> ([T, D], what was sent)``."""

    layer: Callable
    bytes_of: Callable
    """(compiled program's text, what was sent) -> the figures of its bytes."""
    wire: str = "float32"
    timed: bool = True


def rungs(options: Options, problem: Problem) -> dict[str, Rung]:
    """By name, in order."""
    largest_group = int(problem.rows_of(options.experts).sum(0).max())
    padded_group = -(-largest_group // 8) * 8
    plans = {name: _plan(options, problem, name) for name in ("all_to_all", "dedup")}
    grouped = swiglu_experts

    def gathered(per_rank):
        return Rung(partial(_gathered, per_rank), partial(_bytes_of_program, options))

    def sent(experts, dispatcher, wire="float32"):
        layer = partial(_dispatched, experts, plans[dispatcher], wire)
        timed = dispatcher == "all_to_all"
        return Rung(layer, partial(_bytes_of_ledger, options, plans[dispatcher], wire, timed), wire, timed)

    return {
        "naive loop": gathered(_pick_by_pick),
        "masked dense": gathered(_every_expert),
        "padded": sent(partial(_padded, padded_group), "all_to_all"),
        "tiled grouped GEMM": sent(partial(grouped, backend="tiled"), "all_to_all"),
        "dedup dispatch": sent(partial(grouped, backend="tiled"), "dedup"),
        "bfloat16 on the wire": sent(partial(grouped, backend="tiled"), "dedup", "bfloat16"),
        "MXFP8 on the wire": sent(partial(grouped, backend="tiled"), "dedup", "mxfp8"),
    }


def _plan(options: Options, problem: Problem, dispatcher: str) -> DispatchPlan:
    """The first bucket that drops nothing, as the training loop finds it."""
    pairs = problem.rows_of(DEVICES)
    demand = DEVICES * pairs.max() if dispatcher == "all_to_all" else pairs.sum(0).max()
    sizes = options.tokens_per_rank, options.top_k, options.experts, DEVICES
    capacities = (bucket_capacity(bucket, 1.25, *sizes) for bucket in itertools.count())
    capacity = next(capacity for capacity in capacities if capacity >= demand)
    return DispatchPlan(options.experts, DEVICES, capacity, dispatcher)


def _gathered(per_rank, x, ids, weights, gate_up, down):
    """All tokens to every device; ``per_rank`` runs its experts on them; the parts are added up at home."""

    def body(x, ids, weights, gate_up, down):
        x, ids, weights = (lax.all_gather(a, EXPERT, tiled=True) for a in (x, ids, weights))
        own = ids - lax.axis_index(EXPERT) * gate_up.shape[0]
        return lax.psum_scatter(per_rank(x, own, weights, gate_up, down), EXPERT, tiled=True)

    tokens = P(token_axes(jax.sharding.get_abstract_mesh()))
    specs = (tokens, tokens, tokens, P(EXPERT), P(EXPERT))
    return per_device(body, in_specs=specs, out_specs=tokens)(x, ids, weights, gate_up, down), None


def _pick_by_pick(x, ids, weights, gate_up, down):
    """For each token, for each pick: if the expert is mine, one row through it."""
    (out, *_) = vary_alike(jnp.zeros_like(x), x)
    top_k = ids.shape[1]

    def pick(i, out):
        t, k = i // top_k, i % top_k
        expert = ids[t, k]
        mine = (expert >= 0) & (expert < gate_up.shape[0])

        def add(_, out):
            row = activate(x[t][None] @ gate_up[expert]) @ down[expert]
            return out.at[t].add(weights[t, k] * row[0])

        return lax.fori_loop(0, mine.astype(jnp.int32), add, out)  # a conditional would copy ``out``

    return lax.fori_loop(0, ids.size, pick, out)


def _every_expert(x, ids, weights, gate_up, down):
    """Every local expert on every token, times the token's weight for it, which is mostly 0."""
    (out, *_) = vary_alike(jnp.zeros_like(x), x)

    def expert(e, out):
        weight = jnp.where(ids == e, weights, jnp.zeros_like(weights)).sum(1, keepdims=True)
        return out + weight * (activate(x @ gate_up[e]) @ down[e])

    return lax.fori_loop(0, gate_up.shape[0], expert, out)


def _dispatched(experts, plan: DispatchPlan, wire: str, x, ids, weights, gate_up, down):
    """Dispatch, each device's experts on its rows, combine; rows travel as ``wire`` says."""

    def body(rows, sizes, row_weights, gate_up, down):
        return experts(unpack(rows, x.shape[1], wire), gate_up, down, sizes[0], row_weights)

    sent = dispatch(pack(x, wire), Routing(ids, weights, None), plan=plan)
    tokens = P(token_axes(jax.sharding.get_abstract_mesh()))
    specs = (tokens, tokens, tokens, P(EXPERT), P(EXPERT))
    rows = per_device(body, in_specs=specs, out_specs=tokens)(
        sent.rows, sent.group_sizes, sent.row_weights, gate_up, down
    )
    out = combine(rows.astype(_back(wire)), sent).astype(jnp.float32)
    return out, {"counts": sent.counts, "group_sizes": sent.group_sizes}


def _padded(capacity: int, rows, gate_up, down, group_sizes, row_weights):
    """Experts as one batched product, each padded to ``capacity`` rows."""
    place = jnp.arange(capacity, dtype=jnp.int32)[None, :]
    filled = place < group_sizes[:, None]
    row = jnp.where(filled, group_offsets(group_sizes)[:, None] + place, rows.shape[0])
    batch = rows.at[row].get(mode="fill", fill_value=0)
    hidden = jnp.einsum("ecd,edf->ecf", batch, gate_up)
    hidden = activate(hidden.reshape(-1, hidden.shape[2])).reshape(*row.shape, -1)
    out = jnp.einsum("ecf,efd->ecd", hidden, down)
    (back, *_) = vary_alike(jnp.zeros_like(rows), rows)
    return back.at[row].set(out, mode="drop") * row_weights[:, None]


# --- what travels -----------------------------------------------------------------------------------------


def pack(x, wire: str):
    """Rows as they travel: float32, bfloat16, or MXFP8 as bytes, the scales behind the elements."""
    if wire == "mxfp8":
        q = quantize_mxfp8(x)
        return jnp.concatenate([lax.bitcast_convert_type(q.data, jnp.uint8), q.scale], axis=1)
    return x.astype(wire)


def unpack(rows, d_model: int, wire: str):
    """float32 rows of what :func:`pack` made."""
    if wire == "mxfp8":
        like = jax.eval_shape(quantize_mxfp8, jax.ShapeDtypeStruct((rows.shape[0], d_model), jnp.float32))
        data = lax.bitcast_convert_type(rows[:, :d_model], like.data.dtype)
        return dequantize(replace(like, data=data, scale=rows[:, d_model:]))
    return rows.astype(jnp.float32)


def _back(wire: str) -> str:
    return "bfloat16" if wire == "mxfp8" else wire


def _bytes_of_program(options: Options, hlo: str, sent) -> dict:
    per_token = round(collectives(hlo, DEVICES)[1] / options.tokens_per_rank, 1)
    return {"bytes_per_token": per_token, "program_bytes_per_token": per_token}


def _bytes_of_ledger(options: Options, plan: DispatchPlan, wire: str, real: bool, hlo: str, sent) -> dict:
    """Rows sent by the ledger, which must balance, times what a row is there and back."""
    books = pair_books(SimpleNamespace(plan=plan, **sent))
    if fault := check_pairs(books):
        raise RunError(f"the token ledger does not balance: {fault}.")
    rows = books.rows["sent"].sum() / (DEVICES * options.tokens_per_rank)
    beside = 4 * (
        1 if plan.dispatcher == "all_to_all" else 2 * options.top_k
    )  # weights; the experts' numbers too
    packed = jax.eval_shape(partial(pack, wire=wire), jax.ShapeDtypeStruct((1, options.d_model), jnp.float32))
    there, back = packed.shape[1] * packed.dtype.itemsize, options.d_model * jnp.dtype(_back(wire)).itemsize
    program = _bytes_of_program(options, hlo, sent)["program_bytes_per_token"]
    return {
        "bytes_per_token": round(float(rows) * (there + beside + back), 1),
        "rows_per_token": round(float(rows), 3),
        "program_bytes_per_token": program if real else None,
    }
