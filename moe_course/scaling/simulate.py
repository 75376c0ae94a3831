"""One training step as events: kernels on a compute stream, collectives on a communication stream, stages in a row.

The closed form of ``costs`` adds numbers up; here they happen in time, so that one sees *where* a bubble, a hidden
all-to-all or a slow rank sits. Where nothing overlaps and nobody is slow the two agree to rounding (tests). No JAX.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from moe_course.errors import SettingError
from moe_course.scaling.plan import Prediction


@dataclass(frozen=True)
class Task:
    """A kernel, a collective or a whole chunk: what it needs, where it runs, how long it takes."""

    name: str
    resource: str
    """Tasks of one resource run one at a time, in the order given: ``stage 0``, ``rank 3 compute``."""
    seconds: float
    after: tuple[str, ...] = ()
    kind: str = "compute"


@dataclass(frozen=True)
class Event:
    """A task with its place in time."""

    name: str
    resource: str
    start: float
    end: float
    kind: str


@dataclass(frozen=True)
class Timeline:
    """What happened."""

    events: tuple[Event, ...]

    @property
    def makespan(self) -> float:
        return max((event.end for event in self.events), default=0.0)

    def busy(self, resource: str) -> float:
        """Seconds that a resource works."""
        return sum(event.end - event.start for event in self.events if event.resource == resource)

    def idle_share(self, resource: str) -> float:
        """Fraction of the whole in which a resource waits: a stage's bubble, a rank's wait for the slowest."""
        return 1 - self.busy(resource) / self.makespan if self.makespan else 0.0

    def resources(self) -> list[str]:
        return list(dict.fromkeys(event.resource for event in self.events))


def run(tasks: Sequence[Task]) -> Timeline:
    """Each task starts when its resource is free and all of ``after`` have ended.

    A resource keeps its order: the head of its queue waits even if a later task could start, as a GPU stream does.
    """
    names = {task.name for task in tasks}
    if len(names) != len(tasks):
        raise SettingError("two tasks have the same name. Give each its own.")
    queues: dict[str, list[Task]] = {}
    for task in tasks:
        if missing := [name for name in task.after if name not in names]:
            raise SettingError(f"{task.name} waits for {missing[0]}, which does not exist.")
        queues.setdefault(task.resource, []).append(task)
    heads = dict.fromkeys(queues, 0)
    free = dict.fromkeys(queues, 0.0)
    ended: dict[str, float] = {}
    events: list[Event] = []
    while len(events) < len(tasks):
        moved = False
        for resource, queue in queues.items():
            while heads[resource] < len(queue) and all(n in ended for n in queue[heads[resource]].after):
                task = queue[heads[resource]]
                start = max([free[resource], *(ended[name] for name in task.after)])
                ended[task.name] = free[resource] = start + task.seconds
                events.append(Event(task.name, resource, start, start + task.seconds, task.kind))
                heads[resource] += 1
                moved = True
        if not moved:
            stuck = next(queue[heads[r]] for r, queue in queues.items() if heads[r] < len(queue))
            raise SettingError(
                f"{stuck.name} waits for {', '.join(stuck.after)} forever: the order has a cycle."
            )
    return Timeline(tuple(sorted(events, key=lambda event: (event.start, event.resource))))


# --- pipeline ---------------------------------------------------------------------------------------------


def pipeline(
    stages: int, micro_batches: int, forward: float, backward: float, chunks: int = 1, send: float = 0.0
) -> Timeline:
    """1F1B, interleaved when ``chunks`` > 1 (arXiv 2104.04473, section 2.2).

    ``forward`` and ``backward``: seconds of one micro-batch in one stage, all of its chunks. ``send`` to a neighbour.
    """
    if chunks > 1 and micro_batches % stages:
        raise SettingError(
            f"interleaving needs micro-batches in groups of {stages}; there are {micro_batches}. Use a multiple."
        )
    tasks = []
    virtual = stages * chunks
    for stage in range(stages):
        for kind, chunk, micro in _order(stage, stages, micro_batches, chunks):
            place = chunk * stages + stage
            if kind == "F":
                seconds, before = forward / chunks, [f"F{place - 1}.{micro}"] if place else []
            else:
                seconds = backward / chunks
                before = [f"F{place}.{micro}"] if place == virtual - 1 else [f"B{place + 1}.{micro}"]
            link = f"send {kind}{place}.{micro}"
            if send and before and before[0][0] == kind:  # what comes from a neighbour travels first
                tasks.append(Task(link, f"link to {kind} {stage}", send, tuple(before), "communication"))
                before = [link]
            name = f"{kind}{place}.{micro}"
            tasks.append(
                Task(name, f"stage {stage}", seconds, tuple(before), "forward" if kind == "F" else "backward")
            )
    return run(tasks)


def _order(stage: int, stages: int, micro_batches: int, chunks: int):
    """(F or B, chunk, micro-batch) in the order in which a stage works."""
    total = micro_batches * chunks

    def unit(i: int, back: bool) -> tuple[int, int]:
        group, within = divmod(i, stages * chunks)
        chunk = within // stages
        return (chunks - 1 - chunk if back else chunk), group * stages + within % stages

    if chunks == 1:
        warm = min(stages - stage - 1, total)
        unit = lambda i, back: (0, i)  # noqa: E731
    else:
        warm = min((stages - stage - 1) * 2 + (chunks - 1) * stages, total)
    for i in range(warm):
        yield "F", *unit(i, False)
    for i in range(total - warm):
        yield "F", *unit(warm + i, False)
        yield "B", *unit(i, True)
    for i in range(total - warm, total):
        yield "B", *unit(i, True)


def closed_form(stages: int, micro_batches: int, forward: float, backward: float, chunks: int = 1) -> float:
    """(m + (p - 1) / v) (f + b): what the step-time model charges."""
    return (micro_batches + (stages - 1) / chunks) * (forward + backward)


# --- one MoE layer on several ranks -----------------------------------------------------------------------


def moe_layer(
    expert_seconds: Sequence[float], attention: float, dispatch: float, combine: float, *, halves: int = 1
) -> Timeline:
    """Attention, dispatch, experts, combine on every rank; a collective starts when the last rank arrives.

    ``expert_seconds``: one per rank, so imbalance is visible. ``halves`` > 1 cuts the tokens into parts that dispatch
    and compute beside each other on two streams: what overlap hides is then measured, not assumed.
    """
    tasks: list[Task] = []
    ranks = range(len(expert_seconds))
    for part in range(halves):
        for r in ranks:
            tasks.append(Task(f"attention {part}.{r}", f"rank {r} compute", attention / halves))
    for part in range(halves):
        arrived = tuple(f"attention {part}.{r}" for r in ranks)
        for r in ranks:
            tasks.append(
                Task(f"dispatch {part}.{r}", f"rank {r} network", dispatch / halves, arrived, "communication")
            )
    for part in range(halves):
        for r in ranks:
            tasks.append(
                Task(
                    f"experts {part}.{r}",
                    f"rank {r} compute",
                    expert_seconds[r] / halves,
                    (f"dispatch {part}.{r}",),
                )
            )
    for part in range(halves):
        done = tuple(f"experts {part}.{r}" for r in ranks)
        for r in ranks:
            tasks.append(
                Task(f"combine {part}.{r}", f"rank {r} network", combine / halves, done, "communication")
            )
    return run(tasks)


def simulate(prediction: Prediction, max_micro_batches: int = 32) -> Timeline:
    """The pipeline of a predicted step, with its micro-batch time from the model; many micro-batches are cut short.

    Forward is a third of a micro-batch. Communication exposed inside it is part of its time.
    """
    layout, outer = prediction.layout, ("pipeline bubble", "tensor parallel", "data parallel", "optimizer")
    busy = sum(seconds for name, seconds in prediction.parts.items() if name not in outer)
    one = busy / layout.micro_batches
    micro = min(int(layout.micro_batches), max_micro_batches)
    if layout.vpp > 1:
        micro = max(layout.pp, micro // layout.pp * layout.pp)
    return pipeline(layout.pp, micro, one / 3, 2 * one / 3, layout.vpp)


def slow_rank(timeline_seconds: Sequence[float]) -> float:
    """Step time over mean: what a synchronous step loses to its slowest rank."""
    return max(timeline_seconds) * len(timeline_seconds) / sum(timeline_seconds)


def draw(timeline: Timeline, axes) -> None:
    """Resources as rows, events as bars, on Matplotlib ``axes``."""
    colours = {
        "forward": "tab:blue",
        "backward": "tab:orange",
        "communication": "tab:red",
        "compute": "tab:blue",
    }
    rows = timeline.resources()
    for event in timeline.events:
        axes.barh(
            rows.index(event.resource), event.end - event.start, left=event.start, edgecolor="white",
            color=colours.get(event.kind, "tab:gray"), linewidth=0.5,
        )  # fmt: skip
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set(xlabel="seconds", title=f"{timeline.makespan:.3g} s")
