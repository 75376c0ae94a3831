"""What a compiled program allows to run at the same time, read from its text (HLO).

Two instructions may overlap if neither needs the other's result, directly or through others: a scheduler is then
free to start both. Whether it does is the machine's business; a dependence forbids it on every machine.

Instructions are found by what they do (``dot``, ``all-to-all``) and by the ``jax.named_scope`` they come from.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

_HEAD = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.\-]+) (?:\(.*)?.*\{$")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|branch_computations|called_computations)=\{?([^{}=]*)"
)
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_NAME = re.compile(r"%?([\w.\-]+)")


@dataclass(frozen=True)
class Work:
    """One instruction, or one inside a fusion, loop or call: its operation and the scopes it comes from."""

    operation: str
    scopes: str


@dataclass
class _Instruction:
    work: Work
    operands: set[str]
    called: list[str]


class Program:
    """The entry computation of a compiled program (``jitted.lower(...).compile().as_text()``)."""

    def __init__(self, hlo: str):
        self._computations, self._entry = _parse(hlo)
        self._before: dict[str, frozenset[str]] = {}
        for name, instruction in self._entry.items():  # printed in an order in which all operands come first
            above = [self._before[o] | {o} for o in instruction.operands if o in self._before]
            self._before[name] = frozenset().union(*above)

    def find(self, *scopes: str, operations: tuple[str, ...]) -> list[str]:
        """Names of entry instructions that do one of ``operations`` under all of ``scopes``, themselves or inside."""

        def wanted(work: Work) -> bool:
            kind = work.operation.removesuffix("-start")
            return kind in operations and all(scope in work.scopes for scope in scopes)

        return [name for name in self._entry if self._contains(name, wanted)]

    def needs(self, later: str, earlier: str) -> bool:
        """Whether ``later`` can only run after ``earlier``."""
        return earlier in self._before[later]

    def may_overlap(self, some: list[str], others: list[str]) -> bool:
        """Whether no instruction of either list needs one of the other."""
        return not any(a == b or self.needs(a, b) or self.needs(b, a) for a in some for b in others)

    def _contains(self, name: str, wanted: Callable[[Work], bool]) -> bool:
        todo, seen = [self._entry[name]], set()
        while todo:
            instruction = todo.pop()
            if wanted(instruction.work):
                return True
            for called in set(instruction.called) - seen:
                seen.add(called)
                todo += self._computations[called].values()
        return False


def _parse(hlo: str):
    computations: dict[str, dict[str, _Instruction]] = {}
    entry = current = None
    for line in hlo.splitlines():
        if not line.startswith((" ", "}")) and line.endswith("{") and (head := _HEAD.match(line)):
            current = computations[head["name"]] = {}
            entry = current if line.startswith("ENTRY") else entry
        elif line.startswith(" ") and " = " in line and current is not None:
            name, instruction = _instruction(line, current)
            current[name] = instruction
    for instructions in computations.values():
        for instruction in instructions.values():
            instruction.called = [name for name in instruction.called if name in computations]
    if entry is None:
        raise ValueError("no ENTRY computation: this is not the text of a compiled program")
    return computations, entry


def _instruction(line: str, known: dict) -> tuple[str, _Instruction]:
    """``%name = type operation(operands), attributes``, one line."""
    left, right = line.strip().removeprefix("ROOT ").split(" = ", 1)
    right = right[_end_of_type(right) :].lstrip()
    operation, rest = right.split("(", 1)
    close = _closing(rest)
    attributes = rest[close:]
    control = re.search(r"control-predecessors=\{([^}]*)\}", attributes)
    mentioned = rest[:close] + (" " + control[1] if control else "")
    op_name = _OP_NAME.search(attributes)
    called = [name for group in _CALLED.findall(attributes) for name in _NAME.findall(group)]
    operands = {name for name in _NAME.findall(mentioned) if name in known}
    return left.lstrip("%"), _Instruction(Work(operation, op_name[1] if op_name else ""), operands, called)


def _end_of_type(text: str) -> int:
    return _closing(text[1:]) + 2 if text.startswith("(") else text.index(" ")


def _closing(text: str) -> int:
    """Index of the parenthesis that closes one opened just before ``text``."""
    depth = 1
    for i, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if not depth:
            return i
    return len(text)
