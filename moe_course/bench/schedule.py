"""What a compiled program allows to run at the same time, read from its text (HLO).

Two instructions may overlap if neither needs the other's result, directly or through others: a scheduler is then
free to start both. Whether it does is the machine's business; a dependence forbids it on every machine.

Instructions are found by what they do (``dot``, ``all-to-all``) and by the ``jax.named_scope`` they come from.
"""

import re
from collections.abc import Callable

from moe_course.aot import hlo

_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|branch_computations|called_computations)=\{?([^{}=]*)"
)
_CONTROL = re.compile(r"control-predecessors=\{([^}]*)\}")
_NAME = re.compile(r"%?([\w.\-]+)")


class Program:
    """The entry computation of a compiled program (``jitted.lower(...).compile().as_text()``)."""

    def __init__(self, text: str):
        module = hlo.parse(text)
        self._computations, self._entry = module.computations, module.computations[module.entry]
        self._before: dict[str, frozenset[str]] = {}
        for name, instruction in self._entry.items():  # printed in an order in which all operands come first
            control = _CONTROL.search(instruction.attributes)
            needed = [*instruction.operands, *(_NAME.findall(control[1]) if control else ())]
            above = [self._before[o] | {o} for o in needed if o in self._before]
            self._before[name] = frozenset().union(*above)

    def find(self, *scopes: str, operations: tuple[str, ...]) -> list[str]:
        """Names of entry instructions that do one of ``operations`` under all of ``scopes``, themselves or inside.

        Inside is what a fusion, loop or call holds.
        """

        def wanted(one: hlo.Instruction) -> bool:
            kind = one.opcode.removesuffix("-start")
            return kind in operations and all(scope in one.op_name for scope in scopes)

        return [name for name in self._entry if self._contains(name, wanted)]

    def needs(self, later: str, earlier: str) -> bool:
        """Whether ``later`` can only run after ``earlier``."""
        return earlier in self._before[later]

    def may_overlap(self, some: list[str], others: list[str]) -> bool:
        """Whether no instruction of either list needs one of the other."""
        return not any(a == b or self.needs(a, b) or self.needs(b, a) for a in some for b in others)

    def _contains(self, name: str, wanted: Callable[[hlo.Instruction], bool]) -> bool:
        todo, seen = [self._entry[name]], set()
        while todo:
            instruction = todo.pop()
            if wanted(instruction):
                return True
            named = {one for group in _CALLED.findall(instruction.attributes) for one in _NAME.findall(group)}
            for called in (named & self._computations.keys()) - seen:
                seen.add(called)
                todo += self._computations[called].values()
        return False
