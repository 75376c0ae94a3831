"""Chapter 09, compile once: which calls trace, buckets, and sizes that are data."""

import jax
import jax.numpy as jnp
import numpy as np

from moe_course.lessons.compare import close
from moe_course.lessons.exercise import Broken, holds
from moe_course.lessons.learner import compiled


def plain(result, expected, *, case: str, why: str = "", suspects=None) -> None:
    """Equal Python values: lists, dicts, numbers. ``suspects`` maps a teaching line to the wrong value it explains."""
    if result is None:
        raise Broken(case, "None", _short(expected), "The function returned nothing: is a return missing?")
    if isinstance(expected, list | dict) and type(result) is not type(expected):
        kind = type(expected).__name__
        raise Broken(case, type(result).__name__, f"a {kind}", f"Return a {kind}.")
    if result != expected:
        lines = (line for line, wrong in (suspects or {}).items() if wrong == result)
        raise Broken(case, _short(result), _short(expected), next(lines, why))


def _short(value) -> str:
    text = str(value)
    return text if len(text) < 100 else text[:97] + "..."


# ---------------------------------------------------------------- 09.1 who traces


def traces_of(body, calls, static=()) -> list[bool]:
    """Whether each call traces: a counter inside the function, which Python runs only then."""
    runs = []

    def counting(*args):
        runs.append(None)
        return body(*args)

    step, new = jax.jit(counting, static_argnums=static), []
    for args in calls:
        before = len(runs)
        step(*args)
        new.append(len(runs) > before)
    return new


def _traced(fn, body, calls, case, static=(), why="", twins=None) -> None:
    runs = []

    def watched(*args):
        runs.append(None)
        return body(*args)

    result = fn(watched, calls, static) if static else fn(watched, calls)
    right = traces_of(body, calls, static)
    lines = {
        "These are the calls that do not trace.": [not new for new in right],
        "A new jax.jit of a new function has an empty cache. Make it once, before the calls.": [True]
        * len(right),
        "Count inside the function that is jitted: outside, every call counts.": [True] * len(right),
    } | (twins or {})
    lines = {line: wrong for line, wrong in lines.items() if wrong != right}
    if isinstance(result, list):
        result = [bool(new) for new in result]
    plain(result, right, case=case, why=why, suspects=lines)
    if len(runs) != sum(right):
        why = "Python runs the function when it is traced and at no other time: pass it to jax.jit, and only there."
        raise Broken(case, f"fn ran {len(runs)} times", f"{sum(right)} times, once for each trace", why)


def _scaled(x, s):
    return x * s


@holds("by hand: another value is known, another shape is not")
def shapes(fn) -> int:
    a, b = np.ones(4, np.float32), np.ones(5, np.float32)
    _traced(fn, _scaled, [(a, 0.1), (a, 0.2), (b, 0.1)], "x [4] times 0.1, x [4] times 0.2, x [5] times 0.1")
    _traced(
        fn,
        jnp.sin,
        [(a,), (b,), (a,), (b,)],
        "x [4], x [5], x [4], x [5]",
        why="Both are in the cache by now.",
    )
    _traced(fn, jnp.sin, [(a,), (a[None],), (a[:, None],)], "x [4], [1, 4], [4, 1]")
    return 3


@holds("another dtype is another trace")
def dtypes(fn) -> int:
    calls = [(np.ones(4, dtype),) for dtype in (np.float32, np.int32, jnp.bfloat16, np.float32)]
    _traced(fn, lambda x: x + x, calls, "x [4] in float32, int32, bfloat16, float32")
    return 1


@holds("a Python number is weakly typed, an array is not")
def weak_types(fn) -> int:
    x = np.ones(4, np.float32)
    calls = [(x, 0.1), (x, np.float32(0.1)), (x, jnp.float32(0.2)), (x, 2), (x, 3.0), (x, jnp.asarray(0.3))]
    why = (
        "0.1 is a weakly typed float32: times a bfloat16 it would stay bfloat16. np.float32(0.1) is not weak, so that is "
        "another program; jnp.asarray(0.3) is weak again."
    )
    case = "x times 0.1, np.float32(0.1), jnp.float32(0.2), 2, 3.0, jnp.asarray(0.3)"
    _traced(fn, _scaled, calls, case, why=why)
    return 1


@holds("every value of a static argument is a trace of its own")
def statics(fn) -> int:
    x = np.ones(6, np.float32)
    calls = [(x, 2), (x, 3), (x, 2), (x[:3], 3)]
    why = "static_argnums: a value that decides shapes. A new value is a new program."
    _traced(
        fn, lambda x, n: x.reshape(-1, n) if x.size > 3 else x * n, calls, "n = 2, 3, 2, static", (1,), why
    )
    calls = [(3, x, 0.5), (3, x, 0.6), (4, x, 0.5)]
    _traced(fn, lambda n, x, s: x * s + n, calls, "n = 3, 3, 4, static, at position 0", (0,), why)
    return 2


@holds("the structure of a tree counts, and the place of an array does not")
def trees(fn) -> int:
    a = np.ones(4, np.float32)
    calls = [({"w": a, "b": a},), ({"b": a, "w": a},), ({"w": a},), ([a, a],)]
    _traced(fn, lambda t: sum(jax.tree.leaves(t)), calls, "{w, b}, {b, w}, {w}, [w, b]")
    if len(jax.devices()) > 1:
        why = "On another device the same trace is compiled again. That is a compilation and no trace."
        calls = [(jax.device_put(a, device),) for device in jax.devices()[:2]]
        _traced(fn, jnp.cos, calls, "x on device 0, then on device 1", why=why)
    return 2


# ---------------------------------------------------------------- 09.2 the bucket


def bucket_of(rows, unit, most) -> int:
    size = unit
    while size < rows:
        size *= 2
    return min(size, most)


def _bucket(fn, rows, unit, most, why="") -> None:
    right, result = bucket_of(rows, unit, most), fn(rows, unit, most)
    case = f"{rows} rows, unit {unit}, at most {most}"
    lines = {
        "Buckets double: unit, 2 unit, 4 unit. Multiples of unit are too many programs.": -(-rows // unit)
        * unit,
        "A power of two, but of unit: the smallest bucket is unit itself.": 1
        << max(rows - 1, 0).bit_length(),
        "A bucket holds the rows it is asked for: round up.": max(unit, right // 2),
        "What fits exactly, fits.": 2 * right,
    }
    lines = {line: wrong for line, wrong in lines.items() if wrong != right}
    plain(result, right, case=case, why=why, suspects=lines)
    if not isinstance(result, int) or isinstance(result, bool):
        raise Broken(case, type(result).__name__, "int", "It decides a shape: use Python's integers.")


@holds("by hand: 64 rows fit a bucket of 64, 65 need 128")
def edges(fn) -> int:
    cases = [
        (64, 64, 4096),
        (65, 64, 4096),
        (63, 64, 4096),
        (1, 64, 4096),
        (0, 64, 4096),
        (128, 64, 4096),
        (129, 64, 4096),
    ]
    for case in cases:
        _bucket(fn, *case)
    return len(cases)


@holds("multiples of unit that are no powers of two")
def other_units(fn) -> int:
    cases = [
        (97, 48, 3072),
        (96, 48, 3072),
        (49, 48, 3072),
        (700, 6, 100_000),
        (769, 6, 100_000),
        (1, 1, 64),
        (3, 1, 64),
    ]
    for case in cases:
        _bucket(fn, *case)
    return len(cases)


@holds("never more than the most there can be")
def capped(fn) -> int:
    cases = [(1000, 64, 1000), (513, 64, 1000), (512, 64, 1000), (5, 64, 70), (70, 64, 70), (65, 64, 70)]
    for case in cases:
        _bucket(fn, *case, why="The last bucket is the worst case: no batch has more rows.")
    return len(cases)


@holds("at most log2(most / unit) + 1 programs, and none twice as large as asked")
def few_programs(fn) -> int:
    unit, most = 32, 2048
    sizes = {}
    for rows in range(1, most + 1):
        sizes.setdefault(fn(rows, unit, most), rows)
    few = (most // unit).bit_length()
    if len(sizes) > few:
        raise Broken(
            f"rows 1 to {most}, unit {unit}", f"{len(sizes)} sizes", f"{few}", "Each size is a compilation."
        )
    for size, rows in sizes.items():
        if size < rows or (size > unit and size >= 2 * rows):
            raise Broken(
                f"{rows} rows, unit {unit}", f"{size}", f"{bucket_of(rows, unit, most)}", "Less than twice."
            )
    return most


# ---------------------------------------------------------------- 09.3 sizes as data

SIZES = ([3, 0, 5, 4], [12, 0, 0, 0], [0, 0, 0, 12], [1, 2, 3, 1], [0, 0, 0, 0], [0, 7, 0, 1], [3, 3, 3, 3])


def softmax_of(scores, sizes) -> np.ndarray:
    scores, out, start = np.asarray(scores, np.float64), np.zeros(len(scores)), 0
    for size in sizes:
        part = scores[start : start + size]
        if size:
            out[start : start + size] = np.exp(part - part.max()) / np.exp(part - part.max()).sum()
        start += size
    return np.where(out < 1e-38, 0.0, out)  # below float32


def _softmax(run, scores, sizes, case, why="") -> None:
    how = "Under jit group_sizes is data: no int(), no slice of that length, no loop over its values."
    result = compiled(run, scores, np.asarray(sizes, np.int32), case=case, why=how)
    right = softmax_of(scores, sizes)
    live = np.arange(len(scores)) < sum(sizes)
    whole = np.exp(np.where(live, scores, -np.inf) - np.max(scores[live], initial=-1e9))
    lines = {
        "This is one softmax over all rows. Each group sums to 1 for itself.": whole / max(whole.sum(), 1e-9)
    }
    lines = {line: wrong for line, wrong in lines.items() if not np.allclose(wrong, right)}
    if (
        getattr(result, "shape", ()) == right.shape
    ):  # each row for itself: weights differ by orders of magnitude
        result, right = result[:, None], right[:, None]
        lines = {line: wrong[:, None] for line, wrong in lines.items()}
    close(result, right, case=case, axes=("row",), why=why, terms=64, suspects=lines)


def scores_of(seed, spread=1.0, rows=12) -> np.ndarray:
    return (spread * np.random.default_rng([93, seed]).normal(size=rows)).astype(np.float32)


@holds("by hand: groups of 2 and 1")
def softmax_by_hand(fn) -> int:
    scores = np.array([0.0, np.log(3.0), 5.0], np.float32)
    close(
        fn(scores, np.array([2, 1], np.int32)),
        [0.25, 0.75, 1.0],
        case="scores [0, ln 3, 5], sizes [2, 1]",
        axes=("row",),
    )
    return 1


@holds("one program for every split of the rows")
def any_split(fn) -> int:
    run = jax.jit(fn)
    for seed, sizes in enumerate(SIZES):
        _softmax(run, scores_of(seed), sizes, f"12 rows, sizes {sizes}")
    return len(SIZES)


@holds("large scores, of either sign, in any group")
def large_scores(fn) -> int:
    run = jax.jit(fn)
    scores = scores_of(10, 3) + np.float32([0, 0, 0, 500, 500, 500, 500, 500, -900, -900, -900, -900])
    why = "exp(500) is inf, and exp(-900 - 500) is 0: subtract the largest of the row's own group."
    _softmax(run, scores, [3, 0, 5, 4], "group 0 near 0, group 2 near 500, group 3 near -900", why)
    _softmax(run, scores - np.float32(90), [3, 5, 0, 4], "all of them 90 lower", why)
    apart = np.float32([-150, 150, 150] * 4)
    _softmax(run, apart, [6, 0, 3, 2], "scores -150 and 150 in one group", why)
    return 3


@holds("rows past the groups reach nothing, NaN or not")
def tail_is_dead(fn) -> int:
    run = jax.jit(fn)
    for fill in (np.nan, np.inf, 1e30):
        scores = scores_of(11)
        scores[7:] = fill
        _softmax(
            run, scores, [4, 0, 2, 1], f"sizes [4, 0, 2, 1], rows 7 to 11 hold {fill:g}", "The tail gets 0."
        )
    return 3


@holds("its gradient is that of a softmax, and stops at the tail")
def softmax_gradient(fn) -> int:
    probe = scores_of(12)

    def loss(scores, sizes):
        return (fn(scores, sizes) * probe).sum()

    run = jax.jit(jax.grad(loss))
    for seed, sizes in ((13, [3, 0, 5, 4]), (14, [4, 0, 2, 1])):
        scores, end = scores_of(seed), sum(sizes)
        scores[end:] = np.nan
        p = softmax_of(np.nan_to_num(scores), sizes)
        group = np.repeat(np.arange(len(sizes) + 1), [*sizes, len(scores) - end])
        mean = np.array([(p * probe)[group == g].sum() for g in range(len(sizes) + 1)])
        case = f"sizes {sizes}, rows from {end} on hold NaN"
        result = compiled(
            run, scores, np.asarray(sizes, np.int32), case=case, why="The gradient does not compile."
        )
        why = "0 times NaN is NaN: replace what is in the tail before exp sees it, do not mask the result alone."
        close(result, p * (probe - mean[group]), case=case, axes=("row",), terms=64, why=why)
    return 2
