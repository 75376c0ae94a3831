"""Chapter 09: wrong answers that its checks must reject, and right ones that they must accept."""

import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np

from moe_course.bench.kill_rate import alternative, mutant

# ---------------------------------------------------------------- 09.1 who traces


def counted(fn, calls, static=(), read=lambda step, runs: len(runs), fresh=False):
    """Right; ``read`` says what is compared before and after a call, ``fresh`` makes a new jit for each."""

    def noting(*args):
        runs.append(None)
        return fn(*args)

    runs, answer = [], []
    step = jax.jit(noting, static_argnums=static)
    for args in calls:
        if fresh:
            step = jax.jit(lambda *args: noting(*args), static_argnums=static)
        before = read(step, runs)
        step(*args)
        answer.append(read(step, runs) > before)
    return answer


alternative("09.1", "the mutants' frame, with every part right")(counted)


@alternative("09.1", "jit in the loop, of one and the same function: it shares its cache")
def _(fn, calls, static=()):
    runs, answer = [], []

    def noting(*args):
        runs.append(None)
        return fn(*args)

    for args in calls:
        runs.clear()
        jax.jit(noting, static_argnums=static)(*args)
        answer.append(bool(runs))
    return answer


@mutant("09.1", "jits a new function for each call")
def _(fn, calls, static=()):
    return counted(fn, calls, static, fresh=True)


@mutant("09.1", "counts entries of the dispatch cache")
def _(fn, calls, static=()):
    return counted(fn, calls, static, read=lambda step, runs: step._cache_size())


@mutant("09.1", "counts outside of jit")
def _(fn, calls, static=()):
    step, runs, answer = jax.jit(fn, static_argnums=static), [], []
    for args in calls:
        before = len(runs)
        runs.append(None)
        step(*args)
        answer.append(len(runs) > before)
    return answer


@mutant("09.1", "no static arguments")
def _(fn, calls, static=()):
    return counted(fn, calls)


@mutant("09.1", "how many")
def _(fn, calls, static=()):
    return sum(counted(fn, calls, static))


@mutant("09.1", "how many so far")
def _(fn, calls, static=()):
    return list(np.cumsum(counted(fn, calls, static)).tolist())


@mutant("09.1", "the calls that do not trace")
def _(fn, calls, static=()):
    return [not new for new in counted(fn, calls, static)]


@mutant("09.1", "the first call only")
def _(fn, calls, static=()):
    counted(fn, calls, static)
    return [n == 0 for n in range(len(calls))]


@mutant("09.1", "one call late")
def _(fn, calls, static=()):
    return [True, *counted(fn, calls, static)[:-1]]


@mutant("09.1", "calls the function once more, to be sure")
def _(fn, calls, static=()):
    fn(*calls[0])
    return counted(fn, calls, static)


def by_key(key, only_last=False):
    """Never traces: compares a key of the arguments with those seen before."""

    def answer(fn, calls, static=()):
        seen, out = [], []
        for args in calls:
            k = tuple(
                repr(a)
                if n in static
                else (str(jax.tree.structure(a)), *(key(x) for x in jax.tree.leaves(a)))
                for n, a in enumerate(args)
            )
            out.append(k not in (seen[-1:] if only_last else seen))
            seen.append(k)
        counted(fn, calls, static)  # so that fn runs as often as it should
        return out

    return answer


def dtype_of(x):
    return jnp.result_type(x)


mutant("09.1", "by shape alone")(by_key(np.shape))
mutant("09.1", "by shape and dtype: no weak types")(by_key(lambda x: (np.shape(x), str(dtype_of(x)))))
mutant("09.1", "by shape, dtype and Python type")(
    by_key(lambda x: (np.shape(x), str(dtype_of(x)), type(x).__name__))
)
mutant("09.1", "by value")(by_key(lambda x: np.asarray(x).tobytes()))
mutant("09.1", "against the call before only")(
    by_key(
        lambda x: (np.shape(x), str(dtype_of(x)), bool(getattr(x, "weak_type", np.ndim(x) == 0))),
        only_last=True,
    )
)

# ---------------------------------------------------------------- 09.2 the bucket


@alternative("09.2", "the first of a list")
def _(rows, unit, most):
    sizes = [unit * 2**n for n in range(64)]
    return min(next(size for size in sizes if size >= rows), most)


@alternative("09.2", "by a logarithm, rounded up")
def _(rows, unit, most):
    return min(unit * 2 ** max(0, math.ceil(math.log2(max(rows, 1) / unit))), most)


@mutant("09.2", "multiples of unit")
def _(rows, unit, most):
    return min(max(-(-rows // unit), 1) * unit, most)


@mutant("09.2", "a power of two, not of unit")
def _(rows, unit, most):
    return min(max(1 << max(rows - 1, 0).bit_length(), unit), most)


@mutant("09.2", "no smallest bucket")
def _(rows, unit, most):
    size = unit
    while size >= 2 * rows and size > 1:
        size //= 2
    while size < rows:
        size *= 2
    return min(size, most)


@mutant("09.2", "rounded down")
def _(rows, unit, most):
    return min(unit * 2 ** max(0, int(math.log2(max(rows, 1) / unit))), most)


@mutant("09.2", "what fits exactly moves up")
def _(rows, unit, most):
    size = unit
    while size <= rows:
        size *= 2
    return min(size, most)


@mutant("09.2", "no cap")
def _(rows, unit, most):
    return unit * 2 ** (max(-(-rows // unit), 1) - 1).bit_length()


@mutant("09.2", "the cap is the last bucket below")
def _(rows, unit, most):
    size = unit
    while size < rows and 2 * size <= most:
        size *= 2
    return size


@mutant("09.2", "buckets grow by four")
def _(rows, unit, most):
    size = unit
    while size < rows:
        size *= 4
    return min(size, most)


@mutant("09.2", "the rows themselves")
def _(rows, unit, most):
    return max(rows, unit)


@mutant("09.2", "a float")
def _(rows, unit, most):
    return min(unit * 2.0 ** max(0, math.ceil(math.log2(max(rows, 1) / unit))), most)


@mutant("09.2", "half a bucket more in between")
def _(rows, unit, most):
    size = unit
    while size < rows:
        if 3 * size // 2 >= rows:
            return min(3 * size // 2, most)
        size *= 2
    return min(size, most)


@mutant("09.2", "always the largest")
def _(rows, unit, most):
    return most


# ---------------------------------------------------------------- 09.3 sizes as data


def group_of(scores, sizes, side="right"):
    return jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(scores.shape[0]), side=side)


def make_softmax(
    group=group_of,
    clean=lambda scores, live: jnp.where(live, scores, 0.0),
    top=lambda scores, group, count: jax.ops.segment_max(scores, group, count)[group],
    total=lambda weight, group, count: jax.ops.segment_sum(weight, group, count)[group],
    divide=lambda weight, total: weight / jnp.where(total > 0, total, 1.0),
    finish=lambda out, live: out,
    mask=lambda weight, live: jnp.where(live, weight, 0.0),
):
    """A right softmax in groups, any part of which can be replaced."""

    def softmax(scores, sizes):
        groups, count = group(scores, sizes), sizes.shape[0] + 1
        live = groups < sizes.shape[0]
        x = clean(scores, live)
        weight = mask(jnp.exp(x - jax.lax.stop_gradient(top(x, groups, count))), live)
        return finish(divide(weight, total(weight, groups, count)), live)

    return softmax


alternative("09.3", "the mutants' frame, with every part right")(make_softmax())


@alternative("09.3", "a table of groups by rows")
def _(scores, sizes):
    member = group_of(scores, sizes) == jnp.arange(sizes.shape[0])[:, None]
    live = member.any(axis=0)
    table = jnp.where(member, jnp.where(live, scores, 0.0), -jnp.inf)
    top = jnp.where(member.any(axis=1), table.max(axis=1), 0.0)
    weight = jnp.where(member, jnp.exp(jnp.where(member, table - top[:, None], 0.0)), 0.0)
    total = weight.sum(axis=1, keepdims=True)
    return (weight / jnp.where(total > 0, total, 1.0)).sum(axis=0)


mutant("09.3", "one softmax over all rows")(
    make_softmax(
        top=lambda x, group, count: jnp.full_like(x, x.max()),
        total=lambda w, group, count: jnp.full_like(w, w.sum()),
    )
)
mutant("09.3", "groups end one row early")(make_softmax(group=lambda s, sizes: group_of(s, sizes, "left")))
mutant("09.3", "groups by exclusive ends")(
    make_softmax(
        group=lambda s, sizes: jnp.searchsorted(
            jnp.cumsum(sizes) - sizes, jnp.arange(s.shape[0]), side="right"
        )
    )
)
mutant("09.3", "the tail joins the last group")(
    make_softmax(group=lambda s, sizes: jnp.minimum(group_of(s, sizes), sizes.shape[0] - 1))
)
mutant("09.3", "nothing subtracted")(make_softmax(top=lambda x, group, count: jnp.zeros_like(x)))
mutant("09.3", "the largest of all subtracted")(
    make_softmax(top=lambda x, group, count: jnp.full_like(x, x.max()))
)
mutant("09.3", "the mean subtracted")(
    make_softmax(
        top=lambda x, group, count: (
            jax.ops.segment_sum(x, group, count)
            / jnp.maximum(jax.ops.segment_sum(jnp.ones_like(x), group, count), 1)
        )[group]
    )
)
mutant("09.3", "the tail is not cleaned: its gradient is NaN")(
    make_softmax(clean=lambda scores, live: scores)
)
mutant("09.3", "masked by a product")(
    make_softmax(clean=lambda scores, live: scores, mask=lambda weight, live: weight * live)
)
mutant("09.3", "not masked: the tail has weights of its own")(make_softmax(mask=lambda weight, live: weight))
mutant("09.3", "not divided")(make_softmax(divide=lambda weight, total: weight))
mutant("09.3", "0 / 0 in the tail")(make_softmax(divide=lambda weight, total: weight / total))
mutant("09.3", "divided by the size")(
    make_softmax(total=lambda w, group, count: jax.ops.segment_sum(jnp.ones_like(w), group, count)[group])
)
mutant("09.3", "no gradient through the sum")(
    make_softmax(total=lambda w, g, count: jax.lax.stop_gradient(jax.ops.segment_sum(w, g, count)[g]))
)
mutant("09.3", "masked at the end alone")(
    make_softmax(
        clean=lambda scores, live: scores,
        mask=lambda w, live: w,
        finish=lambda out, live: jnp.where(live, out, 0.0),
    )
)
mutant("09.3", "the logarithm of it")(
    make_softmax(finish=lambda out, live: jnp.log(jnp.where(live, out, 1.0)))
)


@mutant("09.3", "reads the sizes: a slice for each group")
def _(scores, sizes):
    out, start = [], 0
    for size in np.asarray(sizes).tolist():
        out.append(jax.nn.softmax(scores[start : start + size]))
        start += size
    return jnp.concatenate([*out, jnp.zeros(scores.shape[0] - start, scores.dtype)])


@mutant("09.3", "groups of equal size")
def _(scores, sizes):
    return jax.nn.softmax(scores.reshape(sizes.shape[0], -1), axis=1).reshape(-1)


# ---------------------------------------------------------------- 09.4 reused buffers


def alias_reader(
    cut=lambda text: text.splitlines()[0],
    pattern=r"\{(\d*)\}: \((\d+), \{\}, m",
    pair=lambda output, parameter: (int(output or 0), int(parameter)),
):
    return lambda text: dict(pair(*found) for found in re.findall(pattern, cut(text)))


alternative("09.4", "the mutants' frame, with every part right")(alias_reader())


@alternative("09.4", "without regular expressions")
def _(text):
    first = text.split("\n")[0]
    if "input_output_alias={" not in first:
        return {}
    inside = first.split("input_output_alias={")[1].split("-alias) }")[0]
    pairs = [piece.split("}: (") for piece in inside.split("-alias), ")]
    return {int(left.strip(" {") or 0): int(right.split(",")[0]) for left, right in pairs}


mutant("09.4", "swapped")(alias_reader(pair=lambda output, parameter: (int(parameter), int(output or 0))))
mutant("09.4", "misses a single output")(alias_reader(pattern=r"\{(\d+)\}: \((\d+), \{\}, m"))
mutant("09.4", "one digit")(alias_reader(pattern=r"\{(\d?)\}: \((\d), \{\}, m"))
mutant("09.4", "may-alias only")(alias_reader(pattern=r"\{(\d*)\}: \((\d+), \{\}, may"))
mutant("09.4", "whatever looks alike, in all lines")(
    alias_reader(cut=lambda text: text, pattern=r"\{(\d*)\}: \((\d+), \{\}")
)
mutant("09.4", "text, not numbers")(alias_reader(pair=lambda output, parameter: (output or "0", parameter)))


@mutant("09.4", "the first pair")
def _(text):
    return dict(list(alias_reader()(text).items())[:1])


@mutant("09.4", "in the order of writing, not by number")
def _(text):
    return dict(enumerate(alias_reader()(text).values()))


@mutant("09.4", "only which parameters")
def _(text):
    return sorted(alias_reader()(text).values())


@mutant("09.4", "takes the output for its parameter")
def _(text):
    return {output: output for output in alias_reader()(text)}


# ---------------------------------------------------------------- 09.5 every equation


def walker(
    program=lambda value: getattr(value, "jaxpr", value),
    values=lambda equation: jax.tree.leaves(list(equation.params.values())),
    inside_of=lambda inside, equation: (*inside, equation),
    deeper=True,
    itself=True,
):
    """A right walker, any part of which can be replaced."""

    def equations(fn, *args):
        found = []

        def within(jaxpr, inside):
            for equation in jaxpr.eqns:
                inner = (
                    [program(v) for v in values(equation) if hasattr(program(v), "eqns")] if deeper else []
                )
                if itself or not inner:
                    found.append((equation, inside))
                for one in inner:
                    within(one, inside_of(inside, equation))

        within(jax.make_jaxpr(fn)(*args).jaxpr, ())
        return found

    return equations


alternative("09.5", "the mutants' frame, with every part right")(walker())


@alternative("09.5", "breadth first, lists for tuples of programs")
def _(fn, *args):
    found = [(equation, ()) for equation in jax.make_jaxpr(fn)(*args).eqns]
    for equation, inside in found:
        for value in equation.params.values():
            for one in value if isinstance(value, tuple | list) else (value,):
                one = getattr(one, "jaxpr", one)
                found += [(inner, (*inside, equation)) for inner in getattr(one, "eqns", ())]
    return found


mutant("09.5", "the top level")(walker(deeper=False))
alternative("09.5", "takes a program as it is")(walker(program=lambda v: v))
mutant("09.5", "no tuples: misses the branches of a cond")(walker(values=lambda e: list(e.params.values())))
mutant("09.5", "only the parameter called jaxpr")(walker(values=lambda e: [e.params.get("jaxpr")]))
mutant("09.5", "one program for each equation")(
    walker(
        values=lambda e: [
            v for v in jax.tree.leaves(list(e.params.values())) if hasattr(getattr(v, "jaxpr", v), "eqns")
        ][:1]
    )
)
mutant("09.5", "innermost first")(walker(inside_of=lambda inside, equation: (equation, *inside)))
mutant("09.5", "knows its parent only")(walker(inside_of=lambda inside, equation: (equation,)))
mutant("09.5", "leaves out what holds others")(walker(itself=False))
mutant("09.5", "nothing is inside of anything")(walker(inside_of=lambda inside, equation: ()))


@mutant("09.5", "equations without their places")
def _(fn, *args):
    return [equation for equation, _ in walker()(fn, *args)]


@mutant("09.5", "two levels")
def _(fn, *args):
    return [(equation, inside) for equation, inside in walker()(fn, *args) if len(inside) < 2]


@mutant("09.5", "each primitive once")
def _(fn, *args):
    return list(
        {equation.primitive.name: (equation, inside) for equation, inside in walker()(fn, *args)}.values()
    )


# ---------------------------------------------------------------- 09.6 lost names


def names_in(program, args, walk=None):
    """(name, whether within recomputation) of each name equation."""
    pairs = (walk or walker())(program, *args)
    return [
        (e.params["name"], any(o.params.get("differentiated") for o in inside))
        for e, inside in pairs
        if e.primitive.name == "name"
    ]


@alternative("09.6", "by counting")
def _(loss, names, *args):
    found = names_in(jax.grad(loss), args)
    first, again = (Counter(name for name, twice in found if twice is which) for which in (False, True))
    return [name for name in sorted(names) if again[name] or not first[name]]


@alternative("09.6", "what is carried from the function itself, a set")
def _(loss, names, *args):
    carried = {name for name, _ in names_in(loss, args)}
    again = {name for name, twice in names_in(jax.grad(loss), args) if twice}
    return {name for name in names if name not in carried or name in again}


@mutant("09.6", "names that nothing carries, and no others")
def _(loss, names, *args):
    carried = {name for name, _ in names_in(loss, args)}
    return sorted(set(names) - carried)


@mutant("09.6", "names that are computed again, and no others")
def _(loss, names, *args):
    return sorted(set(names) & {name for name, twice in names_in(jax.grad(loss), args) if twice})


@mutant("09.6", "the names that are kept")
def _(loss, names, *args):
    again = {name for name, twice in names_in(jax.grad(loss), args) if twice}
    return sorted(name for name in names if name in dict(names_in(loss, args)) and name not in again)


@mutant("09.6", "looks at the top level")
def _(loss, names, *args):
    found = names_in(jax.grad(loss), args, walker(deeper=False))
    return sorted(name for name in names if name not in dict(found))


@mutant("09.6", "looks at the forward pass alone")
def _(loss, names, *args):
    found = names_in(loss, args)
    return sorted(name for name in names if name not in dict(found) or dict(found)[name])


@mutant("09.6", "every name that the gradient mentions")
def _(loss, names, *args):
    return sorted(set(names) & set(dict(names_in(jax.grad(loss), args))))


@mutant("09.6", "all names of the program, asked for or not")
def _(loss, names, *args):
    found = names_in(jax.grad(loss), args)
    again = {name for name, twice in found if twice}
    return sorted({name for name in names if name not in dict(found)} | again)


@mutant("09.6", "in any checkpoint or loop")
def _(loss, names, *args):
    found = walker()(jax.grad(loss), *args)
    deep = {e.params["name"] for e, inside in found if e.primitive.name == "name" and inside}
    there = {e.params["name"] for e, _ in found if e.primitive.name == "name"}
    return sorted(name for name in names if name in deep or name not in there)


@mutant("09.6", "unsorted, in the order asked, backwards")
def _(loss, names, *args):
    found = names_in(jax.grad(loss), args)
    again = {name for name, twice in found if twice}
    return [name for name in sorted(names, reverse=True) if name in again or name not in dict(found)]


@mutant("09.6", "a bool")
def _(loss, names, *args):
    found = names_in(jax.grad(loss), args)
    return any(name not in dict(found) for name in names)


# ---------------------------------------------------------------- 09.7 collectives

KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"


def bits_of(dtype):
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) if bits else 8


def reader(
    pattern=rf" = (\(.*?\)|\S+) ({KINDS})(?:-done)?\(",
    shape=r"(\w+)\[([\d,]*)\]",
    numbers=lambda dims: math.prod(int(n) for n in dims.split(",") if n),
    width=lambda dtype: bits_of(dtype) // 8,
    shapes=lambda found: found,
    result=lambda count, size: (count, size),
):
    """A right reader, any part of which can be replaced."""

    def collectives_of(lines):
        total = {}
        for line in lines:
            call = re.search(pattern, line)
            if call:
                count, size = total.get(call[2], (0, 0))
                found = shapes(re.findall(shape, call[1]))
                total[call[2]] = count + 1, size + sum(numbers(dims) * width(dtype) for dtype, dims in found)
        return {kind: result(*value) for kind, value in total.items()}

    return collectives_of


alternative("09.7", "the mutants' frame, with every part right")(reader())


@alternative("09.7", "by splitting")
def _(lines):
    total = {}
    for line in lines:
        _, _, right = line.partition(" = ")
        end = right.index(")") + 1 if right.startswith("(") else right.index(" ")
        kind = right[end:].strip().partition("(")[0].removesuffix("-done")
        if kind not in KINDS.split("|"):
            continue
        size = 0
        for part in re.findall(r"[a-z]\w*\[[\d,]*\]", right[:end]):
            dtype, _, dims = part.rstrip("]").partition("[")
            size += math.prod([int(n) for n in dims.split(",") if n]) * bits_of(dtype) // 8
        count, before = total.get(kind, (0, 0))
        total[kind] = (count + 1, before + size)
    return total


mutant("09.7", "counts numbers")(reader(width=lambda dtype: 1))
mutant("09.7", "bits")(reader(width=bits_of))
mutant("09.7", "all of four bytes")(reader(width=lambda dtype: 4))
mutant("09.7", "two bytes for bf16, four for the rest")(
    reader(width=lambda dtype: 2 if dtype == "bf16" else 4)
)
mutant("09.7", "pred is nothing")(reader(width=lambda dtype: 0 if dtype == "pred" else bits_of(dtype) // 8))
mutant("09.7", "all digits of the dtype")(
    reader(width=lambda dtype: int("".join(re.findall(r"\d", dtype)) or 8) // 8)
)
mutant("09.7", "the first of a tuple")(reader(shapes=lambda found: found[:1]))
mutant("09.7", "a scalar is nothing")(
    reader(numbers=lambda dims: math.prod(int(n) for n in dims.split(",")) if dims else 0)
)
mutant("09.7", "adds dimensions up")(reader(numbers=lambda dims: sum(int(n) for n in dims.split(",") if n)))
mutant("09.7", "starts, and no dones")(reader(pattern=rf" = (\(.*?\)|\S+) ({KINDS})(?:-start)?\("))
mutant("09.7", "starts and dones")(reader(pattern=rf" = (\(.*?\)|\S+) ({KINDS})(?:-start|-done)?\("))
mutant("09.7", "neither starts nor dones")(reader(pattern=rf" = (\(.*?\)|\S+) ({KINDS})\("))
mutant("09.7", "no tuples")(reader(pattern=rf" = (\S+) ({KINDS})(?:-done)?\("))
mutant("09.7", "whatever mentions a collective")(
    reader(pattern=rf" = (\(.*?\)|\S+) .*?({KINDS})(?:-done)?\b(?!-start)")
)
mutant("09.7", "no collective-permute")(
    reader(pattern=r" = (\(.*?\)|\S+) (all-gather|all-reduce|reduce-scatter|all-to-all)(?:-done)?\(")
)
mutant("09.7", "bytes, count")(reader(result=lambda count, size: (size, count)))
mutant("09.7", "bytes alone")(reader(result=lambda count, size: size))


@mutant("09.7", "the last of a kind only")
def _(lines):
    return {kind: value for line in lines for kind, value in reader()([line]).items()}


@mutant("09.7", "each different line once")
def _(lines):
    return reader()({re.sub(r"%\S+", "", line): line for line in lines}.values())


# ---------------------------------------------------------------- 09.8 how often it runs


@alternative("09.8", "a list of what is still to visit")
def _(calls, entry):
    times, waiting = dict.fromkeys(calls, 0), [(entry, 1)]
    while waiting:
        name, n = waiting.pop()
        times[name] += n
        waiting.extend((callee, n * trips) for callee, trips in calls[name])
    return times


def visits(count=lambda n, trips: n * trips, first=1, once=False, entry_of=lambda calls, entry: entry):
    def times_run(calls, entry):
        times, seen = dict.fromkeys(calls, 0), set()

        def visit(name, n):
            if once and name in seen:
                return
            seen.add(name)
            times[name] += n
            for callee, trips in calls[name]:
                visit(callee, count(n, trips))

        visit(entry_of(calls, entry), first)
        return times

    return times_run


mutant("09.8", "no trips")(visits(count=lambda n, trips: n))
mutant("09.8", "the innermost trips alone")(visits(count=lambda n, trips: trips))
mutant("09.8", "trips added")(visits(count=lambda n, trips: n + trips))
mutant("09.8", "one trip less, since the first is free")(visits(count=lambda n, trips: n * max(trips - 1, 1)))
mutant("09.8", "the entry does not run")(visits(first=0))
mutant("09.8", "each computation visited once")(visits(once=True))
mutant("09.8", "begins at the first in the text")(visits(entry_of=lambda calls, entry: next(iter(calls))))


@mutant("09.8", "one level of calls")
def _(calls, entry):
    times = dict.fromkeys(calls, 0) | {entry: 1}
    for callee, trips in calls[entry]:
        times[callee] += trips
    return times


@mutant("09.8", "everything runs, called or not")
def _(calls, entry):
    return {name: max(n, 1) for name, n in visits()(calls, entry).items()}


@mutant("09.8", "leaves out what does not run")
def _(calls, entry):
    return {name: n for name, n in visits()(calls, entry).items() if n}


@mutant("09.8", "the last caller counts")
def _(calls, entry):
    times = dict.fromkeys(calls, 0)

    def visit(name, n):
        times[name] = n
        for callee, trips in calls[name]:
            visit(callee, n * trips)

    visit(entry, 1)
    return times


@mutant("09.8", "calls from anywhere, once each")
def _(calls, entry):
    times = dict.fromkeys(calls, 0) | {entry: 1}
    for callees in calls.values():
        for callee, trips in callees:
            times[callee] += trips
    return times


# ---------------------------------------------------------------- 09.9 bytes by hand


def by_hand(
    rows=lambda tokens, k, ranks, factor: ranks * math.ceil(factor * tokens * k / ranks),
    ways=2,
    row_weight=4,
    size=lambda experts, ranks: 4 * experts,
    matrices=3,
    gathered=lambda experts, ranks: experts // ranks + 1,
    when=lambda fsdp: fsdp > 1,
    wide=lambda width: width,
    kinds=("all-to-all", "all-gather"),
):
    """Right; any part can be replaced."""

    def layer_bytes(tokens, d_model, d_ff, num_experts, top_k, ranks, fsdp, factor, width):
        n = rows(tokens, top_k, ranks, factor)
        exchange = ways * n * d_model * wide(width) + row_weight * n + size(num_experts, ranks)
        weights = matrices * d_model * d_ff * wide(width) * gathered(num_experts, ranks)
        return dict(zip(kinds, (exchange, weights * when(fsdp)), strict=True))

    return layer_bytes


alternative("09.9", "the mutants' frame, with every part right")(by_hand())


@alternative("09.9", "array by array")
def _(tokens, d_model, d_ff, num_experts, top_k, ranks, fsdp, factor, width):
    pair = math.ceil(factor * tokens * top_k / ranks)
    there = back = ranks * pair * d_model * width
    weights, sizes = ranks * pair * 4, ranks * (num_experts // ranks) * 4
    gate_up, down = d_model * 2 * d_ff * width, d_ff * d_model * width
    own = num_experts // ranks
    gather = own * gate_up + own * down + gate_up + down if fsdp > 1 else 0
    return {"all-gather": gather, "all-to-all": there + back + weights + sizes}


mutant("09.9", "one way")(by_hand(ways=1))
mutant("09.9", "forward and backward")(by_hand(ways=4))
mutant("09.9", "no weights of the rows")(by_hand(row_weight=0))
mutant("09.9", "no sizes")(by_hand(size=lambda experts, ranks: 0))
mutant("09.9", "a size for each rank")(by_hand(size=lambda experts, ranks: 4 * ranks))
mutant("09.9", "the rows that are used")(by_hand(rows=lambda tokens, k, ranks, factor: tokens * k))
mutant("09.9", "not rounded to the ranks")(
    by_hand(rows=lambda t, k, ranks, factor: math.ceil(factor * t * k))
)
mutant("09.9", "rounded down")(by_hand(rows=lambda t, k, ranks, factor: ranks * int(factor * t * k / ranks)))
mutant("09.9", "one pick")(by_hand(rows=lambda t, k, ranks, factor: ranks * math.ceil(factor * t / ranks)))
mutant("09.9", "what crosses a wire: not the own block")(
    by_hand(rows=lambda t, k, ranks, factor: (ranks - 1) * math.ceil(factor * t * k / ranks))
)
mutant("09.9", "two matrices")(by_hand(matrices=2))
mutant("09.9", "no shared expert")(by_hand(gathered=lambda experts, ranks: experts // ranks))
mutant("09.9", "all experts")(by_hand(gathered=lambda experts, ranks: experts + 1))
mutant("09.9", "gathered without fsdp too")(by_hand(when=lambda fsdp: True))
mutant("09.9", "float32 whatever the width")(by_hand(wide=lambda width: 4))
mutant("09.9", "kinds swapped")(by_hand(kinds=("all-gather", "all-to-all")))
