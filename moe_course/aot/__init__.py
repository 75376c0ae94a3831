"""A training step compiled for GPUs that are not here, by XLA's own GPU compiler, on any Linux machine.

``compile_plan(fit_to(config, 64), "gb200", 64)`` returns a :class:`Compiled`: bytes of state and temporary memory,
every collective with the bytes that it sends beside a formula, FLOPs in parts, and the program itself. It is the
trainer's own step, sharded as it would be; nothing is allocated and nothing runs. So all of it is *compiled, never
run*: no time, no numbers, no overlap, and memory only to within some 10 GB. Needs the ``aot`` extra.
"""

from moe_course.aot.compiled import STATEMENT, Compiled, compile_plan
from moe_course.aot.request import fit_to
from moe_course.aot.targets import TARGETS, missing

__all__ = ["STATEMENT", "TARGETS", "Compiled", "compile_plan", "fit_to", "missing"]
