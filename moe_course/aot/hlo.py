"""Reading a compiled program: its collectives and its matrix products, each as often as it runs.

Works on the text of an optimised, partitioned HLO module (``compiled.as_text()``), whose shapes are those of one
device. A loop is in the text once and runs many times, so the text is walked from its entry, and what is in a loop's
body counts as often as XLA says that the loop runs. Imports no JAX.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

COLLECTIVES = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_BITS = {"pred": 8, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,]*)\]")
_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*\(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT\s+)?%?([\w.\-]+)\s+=\s+(.*)$")
_CALLED = re.compile(r"\b(calls|body|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
_NAMED_GROUPS = re.compile(
    r"replica_groups=@?mesh\[(?P<mesh>[^\]]*)\](?:,\s*device_ids=\((?P<devices>\[[\d,]+\](?:T\([\d,]+\))?|[\d,]+)\))?"
    r"\s*\{(?P<axes>[^}]*)\}"
)
_TRIPS = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)"?')


def arrays(type_text: str) -> list[tuple[str, tuple[int, ...]]]:
    """(dtype, shape) of every array in an HLO type, which may be a tuple."""
    return [
        (kind, tuple(map(int, filter(None, dims.split(","))))) for kind, dims in _ARRAY.findall(type_text)
    ]


def bytes_of(type_text: str) -> int:
    """Bytes of an HLO type: four-bit types take half a byte, a token nothing."""
    total = 0
    for kind, shape in arrays(type_text):
        digits = re.search(r"\d+", kind)
        bits = _BITS.get(kind, int(digits.group()) if digits else 8)
        total += bits * math.prod(shape)
    return total // 8


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def op_name(self) -> str:
        """Where in the traced function this comes from."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found.group(1) if found else ""

    @property
    def target(self) -> str:
        """What a custom call calls."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found.group(1) if found else ""


def _instruction(line: str) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    if not match:
        return None
    rest = match.group(2)
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    type_text, rest = rest[:end], rest[end:].lstrip()
    opening = rest.find("(")
    if opening < 0:
        return None
    closing = _closing(rest, opening)
    operands = re.findall(r"%([\w.\-]+)", rest[opening:closing])
    return Instruction(match.group(1), type_text, rest[:opening], tuple(operands), rest[closing + 1 :])


def _closing(text: str, opening: int) -> int:
    depth = 0
    for i in range(opening, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if not depth:
            return i
    return len(text) - 1


@dataclass
class Module:
    """The computations of a module, by name."""

    entry: str
    computations: dict[str, dict[str, Instruction]]
    unknown_loops: list[str] = field(default_factory=list)
    """Loops that run as often as data says; they are counted once. Known after a first :meth:`walk`."""

    def walk(self) -> Iterator[tuple[str, Instruction, int]]:
        """(computation, instruction, how often it runs), for every instruction that runs."""
        for computation, times in self._times.items():
            for instruction in self.computations[computation].values():
                yield computation, instruction, times

    @cached_property
    def _times(self) -> Counter:
        """How often each computation runs."""
        calls: dict[str, list[tuple[str, int]]] = {}  # callees before their callers

        def visit(name: str) -> None:
            if name in calls:
                return
            callees = [call for one in self.computations[name].values() for call in self._callees(one)]
            for callee, _ in callees:
                visit(callee)
            calls[name] = callees

        visit(self.entry)
        times: Counter = Counter({self.entry: 1})
        for caller in reversed(calls):
            for callee, factor in calls[caller]:
                times[callee] += times[caller] * factor
        return times

    def _callees(self, instruction: Instruction) -> list[tuple[str, int]]:
        """Computations that an instruction runs, and how often. Not the sums of a reduction or a sort's order."""
        if "=" not in instruction.attributes:
            return []
        callees = []
        for role, name in _CALLED.findall(instruction.attributes):
            if role == "to_apply" and instruction.opcode not in ("call", "async-start"):
                continue
            factor = 1
            if role == "body":
                trips = _TRIPS.search(instruction.attributes)
                if trips:
                    factor = int(trips.group(1))
                else:
                    self.unknown_loops.append(instruction.name)
            callees.append((name, factor))
        for names in _BRANCHES.findall(instruction.attributes):
            callees += [(name.strip().lstrip("%"), 1) for name in names.split(",")]
        return [(name, factor) for name, factor in callees if name in self.computations]


def parse(text: str) -> Module:
    """The computations of an HLO module's text."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if not line.startswith(" "):
            header = _HEADER.match(line)
            if header:
                current = computations.setdefault(header.group(2), {})
                entry = header.group(2) if header.group(1) else entry
        elif current is not None and (instruction := _instruction(line)):
            current[instruction.name] = instruction
    if not entry:
        raise ValueError("this is no HLO module: it has no ENTRY computation")
    return Module(entry, computations)


# --- collectives ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Collective:
    """One collective instruction, as often as it runs in a step."""

    kind: str
    axis: str
    """Mesh axes of its groups, joined by +; "?" if they are none of the mesh's."""
    group: int
    """Devices in a group."""
    count: int
    operand_bytes: int
    """Bytes of its operands on one device, each time."""
    op_name: str
    dtype: str

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends in a step: see :func:`wire_bytes`."""
        return self.count * wire_bytes(self.kind, self.operand_bytes, self.group)


def wire_bytes(kind: str, operand_bytes: float, group: int) -> float:
    """Bytes that each of ``group`` devices sends, by the bandwidth-optimal algorithm.

    The operand is what one device puts in: its shard of an all-gather, the whole tensor of a reduce-scatter or an
    all-reduce, its rows for everyone (its own too) of an all-to-all. Of a ragged one that is the upper bound.
    """
    if kind == "all-gather":
        return operand_bytes * (group - 1)
    if kind == "collective-permute":
        return operand_bytes
    return (2 if kind == "all-reduce" else 1) * operand_bytes * (group - 1) / group


def collectives(module: Module, mesh: dict[str, int]) -> list[Collective]:
    """Every collective that runs. ``mesh``: axis sizes in the order in which devices are numbered."""
    found = []
    for computation, instruction, times in module.walk():
        kind = instruction.opcode.removesuffix("-start")
        if kind not in COLLECTIVES:
            continue
        table = module.computations[computation]
        operands = [table[name].type for name in instruction.operands if name in table]
        if kind == "ragged-all-to-all":
            operands = operands[:1]
        axis, group = group_axes(instruction.attributes, mesh)
        found.append(
            Collective(
                kind=kind,
                axis=axis,
                group=group,
                count=times,
                operand_bytes=sum(map(bytes_of, operands)),
                op_name=instruction.op_name,
                dtype=arrays(operands[0])[0][0] if operands and arrays(operands[0]) else "",
            )
        )
    return found


def group_axes(attributes: str, mesh: dict[str, int]) -> tuple[str, int]:
    """(mesh axes, devices) of the groups of a collective, from any of the ways in which XLA writes them."""
    first = _first_group(attributes, math.prod(mesh.values()))
    if first is None:
        return "?", 0
    coordinates = np.array(np.unravel_index(first, tuple(mesh.values())))
    axes = [axis for axis, at in zip(mesh, coordinates, strict=True) if len(set(at.tolist())) > 1]
    whole = math.prod(mesh[axis] for axis in axes)
    name = "+".join(axes) if axes else "none"
    if "source_target_pairs" in attributes:
        return name, len(first)
    return (name, len(first)) if whole == len(first) else ("?", len(first))


def _first_group(attributes: str, devices: int) -> list[int] | None:
    """Device numbers of the first group."""
    pairs = re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", attributes)
    if pairs:
        return [int(pairs.group(1)), int(pairs.group(2))]
    if iota := re.search(rf"replica_groups=\[([\d,]+)\]<={_IOTA}", attributes):
        groups, dims, order = (_ints(part) for part in iota.groups())
        return _iota(dims, order).reshape(groups)[0].tolist()
    if named := _NAMED_GROUPS.search(attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'?([\w.]+)'?=(\d+)", named["mesh"])}
        used = re.findall(r"'?([\w.]+)'?", named["axes"])
        if not set(used) <= set(sizes):
            return None
        if listed := re.fullmatch(r"[\d,]+", named["devices"] or ""):
            ids = np.array(_ints(listed.group()))
        elif iota := re.fullmatch(_IOTA, named["devices"] or ""):
            ids = _iota(*(_ints(part) for part in iota.groups()))
        else:
            ids = np.arange(math.prod(sizes.values()))
        ids = ids.reshape(tuple(sizes.values()))
        return ids[tuple(slice(None) if name in used else 0 for name in sizes)].reshape(-1).tolist()
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return _ints(listed.group(1)) or list(range(devices))
    if "replica_groups={}" in attributes:
        return list(range(devices))
    return None


def _iota(dims: list[int], order: list[int]) -> np.ndarray:
    ids = np.arange(math.prod(dims)).reshape(dims)
    return ids.transpose(order) if order else ids


def _ints(text: str | None) -> list[int]:
    return [int(n) for n in (text or "").split(",") if n]


# --- matrix products --------------------------------------------------------------------------------------

_PRODUCTS = ("dot", "ragged-dot", "__cublas$gemm", "__cudnn$blockScaledDot", "__op$block_scaled_dot")


@dataclass(frozen=True)
class Product:
    """One matrix product, as often as it runs in a step."""

    flops: int
    """Of one device, each time: 2 for a multiply-add."""
    count: int
    op_name: str
    how: str
    """``dot``, or the library call that does it."""

    @property
    def phase(self) -> str:
        """forward, recompute or backward, by what JAX wrote into ``op_name``."""
        if "rematted_computation" in self.op_name:
            return "recompute"
        return "backward" if "transpose(" in self.op_name else "forward"


def products(module: Module) -> list[Product]:
    """Every matrix product that runs and that XLA can see. A kernel of our own is a closed box: :func:`kernels`."""
    found = []
    for computation, instruction, times in module.walk():
        how = instruction.opcode if instruction.opcode != "custom-call" else instruction.target
        if how not in _PRODUCTS and not how.startswith("__cublas$lt$matmul"):
            continue
        table = module.computations[computation]
        lhs = arrays(table[instruction.operands[0]].type)[0][1]
        out = arrays(instruction.type)[0][1]
        depth = math.prod(lhs[d] for d in _contracted(instruction, len(lhs)))
        found.append(Product(2 * math.prod(out) * depth, times, instruction.op_name, how))
    return found


def _contracted(instruction: Instruction, rank: int) -> list[int]:
    listed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
    if listed:
        return _ints(listed.group(1))
    in_config = re.search(r'"lhs_contracting_dimensions":\s*(\[[^\]]*\])', instruction.attributes)
    return [int(d) for d in json.loads(in_config.group(1))] if in_config else [rank - 1]


def kernels(module: Module) -> Counter:
    """How often each custom call runs, by target: Pallas kernels and TE's calls among them."""
    found: Counter = Counter()
    for _, instruction, times in module.walk():
        if instruction.opcode in ("custom-call", "custom-call-start"):
            found[instruction.target] += times
    return found
