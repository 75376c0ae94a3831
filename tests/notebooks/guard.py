"""Running notebooks through nbval in a process of its own, and what must hold before nbval is believed.

nbval passes a notebook whose outputs and counts are stripped, waits for the full timeout on a dead kernel,
and goes on after a failure; hence :func:`faults` first, a hard limit, and the first failure as the verdict.
"""

import ast
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

import nbformat

from moe_course.lessons.build import IGNORED, METADATA
from moe_course.lessons.execute import CELL_TIMEOUT, kernel_environment
from moe_course.lessons.exercise import find

HERE = Path(__file__).parent
NOTEBOOK_TIMEOUT = 900
TRACES = re.compile(r"(?<![\w.])/(?:root|work|opt|home|Users|tmp)/|0x[0-9a-f]{6,}|\bat 0x")


def faults(path: Path) -> list[str]:
    """Why nbval's verdict on an executed notebook would mean nothing, or the file should not be published."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in code]
    found = [] if counts == [*range(1, len(code) + 1)] else [f"execution counts are {counts}: build it anew"]
    if not any(cell.outputs for cell in code):
        found.append("no cell has an output")
    if notebook.metadata != METADATA:
        found.append("metadata that is not ours (widget state, Python's patch version)")
    for cell in code:
        place = f"cell {cell.execution_count}"
        if cell.source.rstrip().endswith(";"):
            found.append(f"{place}: ends with ';', which hides nothing from nbval")
        for output in cell.outputs:
            text = output.get("text", "") + str(output.get("data", {}).get("text/plain", ""))
            if output.output_type == "error" or output.get("name") == "stderr":
                found.append(f"{place}: an error or a warning is in its output")
            if any("widget" in mime for mime in output.get("data", {})):
                found.append(f"{place}: a widget, which has no picture on GitHub")
            if TRACES.search(text):
                found.append(f"{place}: a path or an address: {TRACES.search(text)[0]}")
    return found


@dataclass(frozen=True)
class Verdict:
    cells: int
    failed: int
    first: str
    """The first failing cell and nbval's words; empty if none failed."""


def validate(path: Path, seconds: float = NOTEBOOK_TIMEOUT, cell_seconds: float = CELL_TIMEOUT) -> Verdict:
    """nbval's verdict, strict, with our sanitising file; an expected failure is a failure."""
    report = path.with_suffix(".nbval.xml") if path.parent.name not in ("solutions", "chapters") else None
    with kernel_environment() as env:
        report = report or Path(env["IPYTHONDIR"], "nbval.xml")
        command = [
            *(
                sys.executable,
                "-m",
                "pytest",
                str(path),
                "-c",
                str(HERE / "nbval.ini"),
                "--rootdir",
                str(path.parent),
            ),
            *("--nbval", "--nbval-current-env", f"--nbval-cell-timeout={cell_seconds}"),
            *(f"--nbval-sanitize-with={HERE / 'sanitize.cfg'}", f"--junitxml={report}"),
            *("-q", "--color=no", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:timeout"),
        ]
        try:
            done = subprocess.run(
                command, env=env, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            return Verdict(0, 1, f"not finished after {seconds} s")
        if not report.exists():
            return Verdict(0, 1, f"nbval did not run: {done.stdout[-500:]}{done.stderr[-500:]}")
        cases = list(ET.parse(report).iter("testcase"))
    bad = [(case, fault) for case in cases for fault in case if fault.tag in ("failure", "error", "skipped")]
    failed = len({case.get("name") for case, _ in bad})
    first = (
        f"{bad[0][0].get('name')}: {(bad[0][1].text or bad[0][1].get('message') or '')[:1500]}" if bad else ""
    )
    return Verdict(len(cases), failed, first)


def _in_words(case: ET.Element, fault: ET.Element) -> str:
    said = re.sub(r"#x1B\[[\d;]*m", "", fault.text or fault.get("message") or "")
    return f"{case.get('name')}: {said[:1500]}"


# ---------------------------------------------------------------- the calls of a notebook


def calls(source: str) -> list[tuple[str, str]]:
    """``(function, first argument)`` of the check, quiz and predict calls at the top level of a cell."""
    found = []
    for node in ast.parse(source).body:
        call = getattr(node, "value", None)
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("check", "quiz", "predict"):
            found.append((call.func.id, call.args[0].value))
    return found


def with_expectations(chapter):
    """The chapter with the outputs that an unsolved one must have: its checks say "not attempted"."""
    for count, cell in enumerate((c for c in chapter.cells if c.cell_type == "code"), 1):
        cell.execution_count = count
        lines = [unsolved(*call) for call in calls(cell.source)]
        if lines:
            text = "".join(line + "\n" for line in lines)
            cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)]
        else:
            cell.metadata["tags"] = [IGNORED]
    return chapter


def unsolved(function: str, what: str) -> str:
    if function == "check":
        return f"{what}  {find(what).title}   not attempted"
    if function == "quiz":
        return f"{what}   not answered: put your answer in place of the dots"
    return f"{what}: no prediction yet. Put a number in place of the dots, then run the cell."
