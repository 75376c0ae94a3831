"""Chapter 09, reading what was compiled: collectives, how often a computation runs, bytes by hand."""

import math
import re

import numpy as np

from moe_course.lessons.exercise import holds
from moe_course.lessons.properties.ch09 import plain

KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"

# ---------------------------------------------------------------- 09.7 collectives


def bytes_of(shapes: str) -> int:
    total = 0
    for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
        bits = re.search(r"\d+", dtype)
        total += math.prod(int(n) for n in dims.split(",") if n) * (int(bits[0]) // 8 if bits else 1)
    return total


def collectives_in(lines) -> dict:
    total = {}
    for line in lines:
        call = re.search(rf" = (\(.*?\)|\S+) ({KINDS})(?:-done)?\(", line)
        if call:
            count, size = total.get(call[2], (0, 0))
            total[call[2]] = count + 1, size + bytes_of(call[1])
    return total


def _collectives(fn, lines, case, why="") -> None:
    right = collectives_in(lines)
    result = fn(list(lines))
    if isinstance(result, dict):
        result = {kind: tuple(value) if isinstance(value, list) else value for kind, value in result.items()}
    twins = {
        "Numbers, not bytes: bf16 takes 2 bytes, s32 4, pred 1.": {
            kind: (count, sum(math.prod(int(n) for n in dims.split(",") if n) for dims in _dims(lines, kind)))
            for kind, (count, _) in right.items()
        },
        "Every number was taken for 4 bytes. The dtype says how many bits.": {
            kind: (
                count,
                4 * sum(math.prod(int(n) for n in dims.split(",") if n) for dims in _dims(lines, kind)),
            )
            for kind, (count, _) in right.items()
        },
        "Bytes first: return (count, bytes).": {kind: value[::-1] for kind, value in right.items()},
    }
    twins = {line: twin for line, twin in twins.items() if twin != right}
    plain(result, right, case=case, why=why, suspects=twins)


def _dims(lines, kind) -> list[str]:
    calls = (re.search(rf" = (\(.*?\)|\S+) {kind}(?:-done)?\(", line) for line in lines)
    return [dims for call in calls if call for dims in re.findall(r"\[([\d,]*)\]", call[1])]


META = (
    'channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, metadata={op_name="jit(step)/while/body/all_to_all"}'
)


@holds("by hand: one of each kind")
def each_kind(fn) -> int:
    for number, kind in enumerate(KINDS.split("|")):
        line = f"  %{kind}.{number} = f32[{number + 2},16]{{1,0}} {kind}(%dot.3), {META}"
        _collectives(fn, [line], f"f32[{number + 2},16] {kind}")
    _collectives(fn, ["  %add.1 = f32[2,16]{1,0} add(%a, %b)"], "a line without a collective")
    return 6


@holds("bytes follow the dtype")
def widths(fn) -> int:
    dtypes = ("f32", "bf16", "f16", "s32", "u8", "pred", "f8e4m3fn", "f8e8m0fnu", "s64")
    for dtype in dtypes:
        line = f"  %all-gather.1 = {dtype}[3,8]{{1,0}} all-gather(%p), {META}"
        why = "The first number in a dtype's name is its bits: f8e4m3fn has 8. pred takes a byte."
        _collectives(fn, [line], f"{dtype}[3,8] all-gather", why)
    return len(dtypes)


@holds("a tuple is the sum of its parts, and a scalar is one number")
def tuples(fn) -> int:
    parts = ", ".join(["f32[1,2,16]{2,1,0}"] * 5 + ["/*index=5*/s32[1,4]{1,0}", "f32[]"])
    line = f"  %all-to-all = ({parts}) all-to-all(%a, %b, %c, %d, %e, %f, %g), {META}"
    _collectives(fn, [line], "an all-to-all with seven results", "Add up every shape of the result.")
    line = f"  ROOT %psum.7 = f32[] all-reduce(%sum), {META}, to_apply=%region_3"
    _collectives(fn, [line], "f32[] all-reduce, the root", "The product of no dimensions is 1.")
    return 2


@holds("all of a kind are counted and added")
def adds_up(fn) -> int:
    rng = np.random.default_rng(97)
    lines = []
    for number in range(14):
        kind = KINDS.split("|")[rng.integers(5)]
        dims = ",".join(str(n) for n in rng.integers(1, 9, rng.integers(1, 4)))
        dtype = ("f32", "bf16", "s32", "u8")[rng.integers(4)]
        lines.append(
            f"  %{kind.replace('-', '_')}.{number} = {dtype}[{dims}]{{0}} {kind}(%p.{number}), {META}"
        )
    _collectives(fn, lines, "14 collectives of five kinds and four dtypes")
    twice = [f"  %all-gather.{n} = bf16[8,4]{{1,0}} all-gather(%w.{n}), {META}" for n in (1, 2)]
    _collectives(fn, twice, "two all-gathers of one shape", "Two tensors may well have the same shape.")
    _collectives(fn, [], "no lines")
    return 3


@holds("an asynchronous pair is one collective")
def pairs(fn) -> int:
    lines = [
        f"  %all-gather-start.1 = (bf16[8,16]{{1,0}}, bf16[64,16]{{1,0}}) all-gather-start(%p.1), {META}",
        "  %dot.1 = f32[8,8]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        "  %all-gather-done.1 = bf16[64,16]{1,0} all-gather-done(%all-gather-start.1)",
        f"  %all-reduce-start = f32[32]{{0}} all-reduce-start(%g), {META}, to_apply=%add",
        "  %all-reduce-done = f32[32]{0} all-reduce-done(%all-reduce-start)",
    ]
    why = "A start's result repeats the operand; the done has the result alone. Count the done, or what has neither."
    _collectives(fn, lines, "an all-gather and an all-reduce, each as start and done", why)
    return 1


@holds("who only mentions a collective is none")
def mentions(fn) -> int:
    lines = [
        "  %get-tuple-element.3 = f32[1,2,16]{2,1,0} get-tuple-element(%all-to-all), index=0",
        '  %fusion.4 = f32[8,16]{1,0} fusion(%all-gather.3), calls=%f, metadata={op_name="jit(f)/all-reduce(g)"}',
        "  %copy.all-gather = f32[8]{0} copy(%all-reduce.9)",
    ]
    why = "The operation stands behind the result's type: name = type operation(operands)."
    _collectives(fn, lines, "three lines that mention collectives", why)
    return 1


# ---------------------------------------------------------------- 09.8 how often


def times_of(calls, entry) -> dict:
    times = dict.fromkeys(calls, 0)

    def visit(name, n):
        times[name] += n
        for callee, trips in calls[name]:
            visit(callee, n * trips)

    visit(entry, 1)
    return times


def _times(fn, calls, entry, case, why="") -> None:
    right = times_of(calls, entry)
    once = times_of({name: [(callee, 1) for callee, _ in callees] for name, callees in calls.items()}, entry)
    lines = {"The trips are missing: a loop's body runs as often as the line says.": once}
    lines = {line: twin for line, twin in lines.items() if twin != right}
    plain(fn(calls, entry), right, case=case, why=why, suspects=lines)


@holds("by hand: a body of five trips")
def one_loop(fn) -> int:
    _times(
        fn,
        {"main": [("body", 5), ("tail", 1)], "body": [], "tail": []},
        "main",
        "main calls body 5 times, tail once",
    )
    _times(fn, {"f": [], "main": [("f", 1)]}, "main", "main calls f once")
    _times(fn, {"main": []}, "main", "main calls nothing", "The entry runs once.")
    return 3


@holds("loops within loops multiply")
def nested_loops(fn) -> int:
    calls = {
        "main": [("layers", 58), ("dense", 3)],
        "layers": [("chunk", 8)],
        "dense": [("chunk", 8)],
        "chunk": [],
    }
    _times(fn, calls, "main", "58 layers and 3, with 8 chunks each", "58 times 8 and 3 times 8.")
    calls = {"a": [("b", 2)], "b": [("c", 3)], "c": [("d", 4)], "d": [("e", 5)], "e": []}
    _times(fn, calls, "a", "five levels of 2, 3, 4 and 5 trips")
    return 2


@holds("what is called from two places runs for both")
def shared(fn) -> int:
    calls = {"main": [("f", 1), ("g", 7), ("f", 1)], "g": [("f", 2), ("h", 1)], "h": [("f", 3)], "f": []}
    why = "f runs for each of its callers: add them up, and visit it again with what it calls."
    _times(fn, calls, "main", "f called from main twice, from g and from h", why)
    calls = {"main": [("p", 2), ("q", 3)], "p": [("s", 1)], "q": [("s", 1)], "s": [("t", 4)], "t": []}
    _times(fn, calls, "main", "t below s, s below p and q", why)
    return 2


@holds("what nothing calls does not run, whatever comes first in the text")
def unreached(fn) -> int:
    calls = {"stray": [("f", 9)], "f": [("g", 2)], "g": [], "entry": [("f", 3)], "other": []}
    _times(
        fn, calls, "entry", "stray calls f, and nothing calls stray", "It runs 0 times, and so what it calls."
    )
    return 1


@holds("random programs")
def random_programs(fn) -> int:
    rng = np.random.default_rng(98)
    for _ in range(4):
        names = [f"c{n}" for n in rng.permutation(9)]
        calls = {
            name: [
                (names[int(to)], int(rng.integers(1, 6)))
                for to in rng.integers(at + 1, 9, rng.integers(0, 3))
            ]
            for at, name in enumerate(names)
            if at < 8
        }
        calls = calls | {names[8]: []}
        order = sorted(calls)
        _times(fn, {name: calls[name] for name in order}, names[0], "a random program of nine computations")
    return 4


# ---------------------------------------------------------------- 09.9 bytes by hand


def bytes_by_hand(tokens, d_model, d_ff, num_experts, top_k, ranks, fsdp, factor, width) -> dict:
    rows = ranks * math.ceil(factor * tokens * top_k / ranks)
    exchange = 2 * rows * d_model * width + 4 * rows + 4 * num_experts
    weights = 3 * d_model * d_ff * width * (num_experts // ranks + 1)
    return {"all-to-all": exchange, "all-gather": weights if fsdp > 1 else 0}


def _bytes(fn, *args, case="", why="") -> None:
    tokens, d_model, d_ff, experts, top_k, ranks, fsdp, factor, width = args
    names = "T D F E K R fsdp factor width".split()
    case = case or ", ".join(f"{name} {value:g}" for name, value in zip(names, args, strict=True))
    right = bytes_by_hand(*args)
    rows = ranks * math.ceil(factor * tokens * top_k / ranks)
    gathered = right["all-gather"]
    lines = {
        "One way only: rows go there, and answers come back.": right["all-to-all"] - rows * d_model * width,
        "The weights that travel with the rows are missing, a float32 each.": right["all-to-all"] - 4 * rows,
        "The sizes are missing: an int32 for each expert.": right["all-to-all"] - 4 * experts,
        "The blocks are padded: the capacity travels, not the rows that are used.": 2
        * tokens
        * top_k
        * d_model
        * width
        + 4 * tokens * top_k
        + 4 * experts,
    }
    lines = {line: right | {"all-to-all": wrong} for line, wrong in lines.items()}
    lines |= {
        "The shared expert is missing.": right
        | {"all-gather": gathered // (experts // ranks + 1) * (experts // ranks)},
        "Only the rank's own experts are gathered, E/R of them.": right
        | {"all-gather": 3 * d_model * d_ff * width * (experts + 1) if fsdp > 1 else 0},
        "Gate, up and down: three matrices.": right | {"all-gather": gathered // 3 * 2},
        "Weights that are not cut need no gather: 0 with fsdp = 1.": right
        | {"all-gather": 3 * d_model * d_ff * width * (experts // ranks + 1)},
    }
    lines = {line: wrong for line, wrong in lines.items() if wrong != right}
    plain(fn(*args), right, case=case, why=why, suspects=lines)


@holds("by hand: two ranks, two tokens")
def two_ranks(fn) -> int:
    _bytes(fn, 2, 8, 4, 4, 1, 2, 1, 1.0, 4, why="Rows 2: 2 * 2 * 8 * 4 + 4 * 2 + 4 * 4 bytes.")
    return 1


@holds("rows, both ways, with their weights and the sizes")
def exchange_bytes(fn) -> int:
    cases = [
        (128, 64, 32, 16, 4, 4, 1, 1.0, 4),
        (128, 64, 32, 16, 4, 4, 1, 1.0, 2),
        (64, 32, 8, 64, 6, 8, 1, 2.0, 2),
    ]
    for case in cases:
        _bytes(fn, *case)
    return len(cases)


@holds("the capacity travels: a multiple of the ranks, rounded up")
def padded_rows(fn) -> int:
    cases = [
        (128, 64, 32, 16, 4, 4, 1, 1.25, 4),
        (5, 8, 4, 8, 3, 4, 1, 1.3, 2),
        (7, 8, 4, 16, 2, 16, 1, 1.0, 2),
    ]
    for case in cases:
        _bytes(fn, *case)
    return len(cases)


@holds("weights are gathered where fsdp cuts them: a rank's own experts and the shared one")
def gathered_bytes(fn) -> int:
    cases = [
        (128, 64, 32, 16, 4, 4, 2, 1.0, 4),
        (128, 64, 48, 16, 4, 16, 4, 1.0, 2),
        (64, 32, 8, 64, 6, 8, 8, 1.5, 2),
    ]
    for case in cases:
        _bytes(fn, *case)
    return len(cases)


@holds("DeepSeek-V3's layer on 64 and on 256 GPUs")
def at_scale(fn) -> int:
    _bytes(fn, 4096, 7168, 2048, 256, 8, 64, 1, 1.25, 2)
    _bytes(fn, 4096, 7168, 2048, 256, 8, 64, 4, 1.25, 2)
    return 2
