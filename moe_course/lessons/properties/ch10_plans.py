"""Chapter 10: what a GPU keeps, the order of a pipeline stage, two meshes over the same GPUs, and the choice."""

import math

import numpy as np

from moe_course.errors import SettingError
from moe_course.lessons.compare import items, same, show
from moe_course.lessons.exercise import Broken, holds
from moe_course.lessons.properties.ch10 import number
from moe_course.scaling.simulate import Task, run

BYTES = {"optimizer": 8, "gradients": 4, "weights": 2}
"""Per parameter, in the order in which ZeRO shards them: stage 1 the first, stage 2 two, stage 3 all."""

# ---------------------------------------------------------------- 10.6 the memory wall


def kept_of(dense, routed, gpus, tp, pp, ep, zero) -> float:
    """Bytes of one GPU, by finding who else holds the same pieces."""
    places = [(g // (gpus // pp), g % tp, g % ep) for g in range(gpus)]  # stage, tensor rank, expert rank
    me, total = places[-1], 0.0
    twins = {
        "dense": sum(p[:2] == me[:2] for p in places),
        "routed": sum((p[0], p[2]) == (me[0], me[2]) for p in places),
    }
    sizes = {"dense": dense / (pp * tp), "routed": routed / (pp * ep)}
    for kind, size in sizes.items():
        for stage, width in enumerate(BYTES.values(), 1):
            total += size * width / (twins[kind] if zero >= stage else 1)
    return total


def _by_copies(sizes, copies, zero, order=(8, 4, 2)) -> float:
    return sum(
        size * width / (n if zero >= stage else 1)
        for size, n in zip(sizes, copies, strict=True)
        for stage, width in enumerate(order, 1)
    )


def _kept(fn, args, why="") -> None:
    dense, routed, gpus, tp, pp, ep, zero = args
    right = kept_of(*args)
    sizes, copies = (dense / (tp * pp), routed / (pp * ep)), (gpus // (tp * pp), gpus // (pp * ep))
    dp = copies[0]
    lines = {
        "An expert has GPUs / (PP EP) copies, fewer than the DP copies of a dense weight.": _by_copies(
            sizes, (dp, dp), zero
        ),
        "Experts are cut by EP, not by TP.": _by_copies((sizes[0], sizes[1] / tp), copies, zero),
        "EP cuts the experts: routed / (PP EP) of them are here.": _by_copies(
            (sizes[0], routed / pp), copies, zero
        ),
        "EP cuts the experts and nothing else.": _by_copies(
            ((dense + routed) / (tp * pp * ep), 0), copies, zero
        ),
        "A pipeline stage has its layers alone, experts included.": _by_copies(
            (sizes[0], routed / ep), (dp, gpus // ep), zero
        ),
        "ZeRO 1 shards the optimizer's states, 2 the gradients too, 3 the weights too.": _by_copies(
            sizes, copies, zero, (2, 4, 8)
        ),
        "Stage 0 shards nothing, stage 1 the optimizer's states alone.": _by_copies(sizes, copies, zero + 1),
        "ZeRO 1 leaves gradients and weights whole.": _by_copies(sizes, copies, 3 if zero else 0),
        "ZeRO shards over the copies, not over all GPUs.": _by_copies(sizes, (gpus, gpus), zero),
        "14 bytes a parameter: 2 for the weight, 4 for the gradient, 8 for the optimizer.": right * 16 / 14,
    }
    case = f"{dense:g} dense, {routed:g} routed, {gpus} GPUs, TP {tp} PP {pp} EP {ep}, ZeRO {zero}"
    number(fn(*args), right, case=case, what="bytes", why=why, suspects=lines)


@holds("nothing sharded: 14 bytes for every parameter that is here")
def nothing_sharded(fn) -> int:
    cases = ((1000, 6000, 8, 1, 1, 4, 0), (999, 5000, 16, 2, 2, 4, 0), (300, 4000, 12, 3, 2, 2, 0))
    for case in cases:
        _kept(fn, case)
    return len(cases)


@holds("ZeRO 1, 2 and 3 shard one state after another")
def zero_stages(fn) -> int:
    for zero in (1, 2, 3):
        for parallel in ((16, 2, 2, 4), (32, 1, 4, 8), (8, 4, 1, 2)):
            _kept(fn, (1000, 7000, *parallel, zero))
    return 9


@holds("experts have copies of their own")
def expert_copies(fn) -> int:
    cases = ((10, 9000, 64, 1, 2, 32, 1), (9000, 10, 64, 4, 2, 32, 1), (1000, 1000, 16, 8, 1, 16, 3))
    for case in cases:
        _kept(fn, case)
    return len(cases)


@holds("DeepSeek-V3's sizes")
def v3_state(fn) -> int:
    for parallel in ((256, 1, 4, 64), (2048, 1, 16, 64), (64, 4, 1, 64)):
        for zero in (0, 1):
            _kept(fn, (17.6e9, 665e9, *parallel, zero))
    return 6


# ---------------------------------------------------------------- 10.7 the order of a stage


def _stages(fn, stages, micro_batches, case) -> list[list[str]]:
    """What every stage does, after a look at each name."""
    orders = []
    expected = {kind + str(m) for kind in "FB" for m in range(micro_batches)}
    for stage in range(stages):
        order, here = fn(stage, stages, micro_batches), f"{case}, stage {stage}"
        if not isinstance(order, list | tuple) or not all(isinstance(name, str) for name in order):
            raise Broken(here, show(order), 'a list like ["F0", "B0"]', "Return a list of names.")
        if sorted(order) != sorted(expected):
            why = "Each micro-batch goes forward once and backward once through each stage."
            raise Broken(here, ", ".join(order[:8]), f"F0 to F{micro_batches - 1} and B0 to ...", why)
        for m in range(micro_batches):
            if order.index(f"B{m}") < order.index(f"F{m}"):
                why = "A micro-batch goes back only after it came through."
                raise Broken(here, f"B{m} before F{m}", f"F{m} before B{m}", why)
        orders.append(list(order))
    return orders


def _timeline(orders, case, forward=1.0, backward=2.0):
    last, tasks = len(orders) - 1, []
    for s, order in enumerate(orders):
        for name in order:
            kind, m = name[0], name[1:]
            before = f"F{s - 1}.{m}" if kind == "F" else f"B{s + 1}.{m}" if s < last else f"F{s}.{m}"
            after = () if kind == "F" and s == 0 else (before,)
            tasks.append(Task(f"{kind}{s}.{m}", f"stage {s}", forward if kind == "F" else backward, after))
    try:
        return run(tasks)
    except SettingError as error:
        why = f"The stages wait for one another: {error}"
        raise Broken(case, "a deadlock", "an order that ends", why) from error


PIPELINES = ((4, 8), (3, 3), (4, 2), (2, 5), (1, 3), (5, 12))


def _case(stages, micro_batches) -> str:
    return f"{stages} {'stage' if stages == 1 else 'stages'}, {micro_batches} micro-batches"


@holds("every micro-batch forward once and backward once, in this order, and nobody waits forever")
def complete(fn) -> int:
    for sizes in PIPELINES:
        _timeline(_stages(fn, *sizes, _case(*sizes)), _case(*sizes))
    return len(PIPELINES)


@holds("the step takes (m + p - 1) (f + b), not longer")
def no_longer(fn) -> int:
    for stages, micro_batches in PIPELINES:
        case = _case(stages, micro_batches)
        took = _timeline(_stages(fn, stages, micro_batches, case), case).makespan
        least = 3.0 * (micro_batches + stages - 1)
        if took > least + 1e-9:
            why = "A stage that starts to go back too early leaves the stages after it without work."
            raise Broken(f"{case}, forward 1 s, backward 2 s", f"{took:g} s", f"{least:g} s", why)
    return len(PIPELINES)


@holds("stage s keeps at most p - s micro-batches")
def bounded(fn) -> int:
    for stages, micro_batches in PIPELINES:
        case = _case(stages, micro_batches)
        for stage, order in enumerate(_stages(fn, stages, micro_batches, case)):
            kept = int(np.cumsum([1 if name[0] == "F" else -1 for name in order]).max())
            if kept > stages - stage:
                why = "Each micro-batch between its F and its B keeps its activations."
                if kept == micro_batches:
                    why = "All forwards first keeps all activations at once. Go back as soon as you can."
                raise Broken(f"{case}, stage {stage}", f"{kept} kept", f"at most {stages - stage}", why)
    return len(PIPELINES)


@holds("micro-batches go in order")
def in_order(fn) -> int:
    for sizes in PIPELINES:
        for stage, order in enumerate(_stages(fn, *sizes, _case(*sizes))):
            for kind in "FB":
                names = [name for name in order if name[0] == kind]
                if names != [f"{kind}{m}" for m in range(sizes[1])]:
                    why = "First in, first back: the neighbour sends and expects them in order."
                    raise Broken(
                        f"{_case(*sizes)}, stage {stage}", ", ".join(names[:6]), f"{kind}0, {kind}1, ...", why
                    )
    return len(PIPELINES)


# ---------------------------------------------------------------- 10.8 parallel folding


def meshes_of(gpus, pp, tp, cp, ep, etp):
    """Both meshes by digits: GPU g's place from the inside out. None if the sizes do not divide."""
    if gpus % (pp * tp * cp) or gpus % (pp * ep * etp):
        return None
    attention = np.zeros((pp, gpus // (pp * tp * cp), cp, tp), np.int64)
    experts = np.zeros((pp, gpus // (pp * ep * etp), ep, etp), np.int64)
    for g in range(gpus):
        stage, within = divmod(g, gpus // pp)
        attention[stage, within // (tp * cp), within // tp % cp, within % tp] = g
        experts[stage, within // (etp * ep), within // etp % ep, within % etp] = g
    return attention, experts


def _meshes(fn, args, why="") -> None:
    gpus, pp, tp, cp, ep, etp = args
    right, case = meshes_of(*args), f"{gpus} GPUs, PP {pp}, TP {tp} CP {cp}, EP {ep} ETP {etp}"
    found = fn(*args)
    if right is None:
        if found is not None:
            reason = f"{pp * tp * cp} or {pp * ep * etp} does not divide {gpus}."
            raise Broken(case, show(found), "None", f"This cannot be laid out: {reason}")
        return
    if found is None:
        why = f"PP TP CP = {pp * tp * cp} and PP EP ETP = {pp * ep * etp} both divide {gpus}: it is legal."
        raise Broken(case, "None", "two meshes", why)
    names = ("attention", "experts")
    axes = (("stage", "dp", "cp", "tp"), ("stage", "expert dp", "ep", "etp"))
    for mesh, expected, name, axis in zip(
        items(found, 2, case=case, names="attention, experts"), right, names, axes, strict=True
    ):
        p, outer, middle, inner = expected.shape
        lines = {
            "Stages are the outermost axis: a stage is a run of neighbours.": np.arange(gpus)
            .reshape(outer, middle, inner, p)
            .transpose(3, 0, 1, 2),
            "The last axis is the innermost: its GPUs are neighbours.": np.arange(gpus)
            .reshape(p, inner, middle, outer)
            .transpose(0, 3, 2, 1),
            "Copies are outside, the groups that talk most inside.": np.arange(gpus)
            .reshape(p, middle, inner, outer)
            .transpose(0, 3, 1, 2),
            "The last two axes are swapped.": np.arange(gpus)
            .reshape(p, outer, inner, middle)
            .transpose(0, 1, 3, 2),
        }
        lines = {line: twin for line, twin in lines.items() if not np.array_equal(twin, expected)}
        same(mesh, expected, case=f"{case}, {name}", axes=axis, why=why, suspects=lines, what=name)


@holds("both meshes hold each GPU once, neighbours inside")
def each_once(fn) -> int:
    cases = ((8, 1, 2, 1, 4, 1), (24, 1, 2, 3, 4, 1), (16, 1, 1, 2, 4, 2), (32, 1, 4, 2, 8, 2))
    for case in cases:
        _meshes(fn, case)
    return len(cases)


@holds("a stage has the same GPUs in both")
def same_stage(fn) -> int:
    cases = ((8, 2, 2, 1, 4, 1), (48, 4, 3, 2, 6, 2), (64, 2, 4, 2, 16, 1), (6, 3, 1, 1, 2, 1))
    for case in cases:
        _meshes(fn, case, "The pipeline axis is shared: both meshes cut the same stages.")
    return len(cases)


@holds("EP may be larger than DP: experts take over the GPUs of TP and CP")
def larger_than_dp(fn) -> int:
    cases = ((16, 1, 8, 1, 16, 1), (32, 2, 4, 4, 8, 1), (8, 1, 1, 8, 8, 1))
    for case in cases:
        _meshes(fn, case, "Experts are cut independently of attention.")
    return len(cases)


@holds("None where the sizes do not divide")
def illegal(fn) -> int:
    cases = (
        (8, 1, 3, 1, 4, 1),
        (8, 1, 2, 1, 3, 1),
        (8, 3, 1, 1, 1, 1),
        (12, 2, 2, 1, 4, 1),
        (4, 2, 1, 1, 4, 1),
    )
    cases += ((4, 1, 8, 1, 4, 1), (4, 1, 1, 1, 8, 1))
    for case in cases:
        _meshes(fn, case)
    return len(cases)


# ---------------------------------------------------------------- 10.9 the choice


def choice_of(speed, memory, capacity, error) -> tuple[int, np.ndarray]:
    fits = [m <= capacity for m in memory]
    if not any(fits):
        return -1, np.zeros(len(fits), bool)
    best = max(s for s, fit in zip(speed, fits, strict=True) if fit)
    tied = np.array([bool(fit and s * (1 + error) >= best) for s, fit in zip(speed, fits, strict=True)])
    least = min((m, i) for i, m in enumerate(memory) if tied[i])
    return least[1], tied


def plans_of(seed, count) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([109, seed, count])
    speed = rng.uniform(1000, 5000, count).astype(np.float32)
    return speed, rng.uniform(40, 200, count).astype(np.float32)


def _choice(fn, speed, memory, capacity, error, why="") -> None:
    case = f"{len(speed)} plans, {capacity:g} GB, error {error:.0%}"
    index, tied = items(fn(speed, memory, capacity, error), 2, case=case, names="index, tied")
    right, mask = choice_of(speed, memory, capacity, error)
    fits = memory <= capacity
    lines = {
        "A plan that does not fit is no plan.": speed * (1 + error) >= speed.max(),
        "Those that fit are compared with the fastest that fits, not with the fastest of all.": fits
        & (speed * (1 + error) >= speed.max()),
        "That is every plan that fits. Tied: at most the error slower than the fastest of them.": fits,
    }
    lines = {line: twin for line, twin in lines.items() if not np.array_equal(twin, mask)}
    same(tied, mask, case=case + ", tied", axes=("plan",), why=why, suspects=lines, what="tied")
    best = int(np.argmax(np.where(fits, speed, -np.inf))) if fits.any() else -1
    wrong = {
        "The fastest is within the error of the others: the model cannot tell. Take the leanest.": best,
        "That is the leanest of all, however slow.": int(np.argmin(memory)),
    }
    number(index, right, case=case, what="index", why=why, suspects=wrong, within=0)


@holds("of those the model cannot tell apart, the leanest")
def leanest(fn) -> int:
    for seed in range(6):
        speed, memory = plans_of(seed, 40)
        _choice(fn, speed, memory, 150.0, 0.11)
    return 6


@holds("what does not fit neither wins nor sets the pace")
def must_fit(fn) -> int:
    for seed in range(6, 9):
        speed, memory = plans_of(seed, 30)
        memory[np.argsort(speed)[-4:]] = 190 + np.arange(4)  # the fastest need most
        _choice(fn, speed, memory, 120.0, 0.2)
    return 3


@holds("no error: the fastest that fits")
def no_error(fn) -> int:
    for seed in range(9, 12):
        speed, memory = plans_of(seed, 25)
        _choice(fn, speed, memory, 100.0, 0.0)
    return 3


@holds("nothing fits: -1, and nothing is tied")
def nothing_fits(fn) -> int:
    speed, memory = plans_of(12, 10)
    _choice(fn, speed, memory, 20.0, 0.11)
    _choice(fn, speed[:1], memory[:1], math.floor(float(memory[0])) - 1.0, 0.11)
    return 2
