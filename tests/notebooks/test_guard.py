"""The guard and nbval, on notebooks that are wrong in one way each: all must be noticed."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from moe_course.errors import RunError
from moe_course.lessons import build, execute
from tests.notebooks import guard

# One notebook, one kernel: each cell below is wrong on its own.
CELLS = {
    "right": ("print('a')", "a\n", True),
    "other output": ("print('b')", "something else\n", False),
    "missing output": ("print('c')", None, False),
    "output too many": ("pass", "d\n", False),
    "exception": ("raise ValueError('e')", None, False),
    "network": ("import socket; socket.create_connection(('example.org', 80), 2)", None, False),
    "network by address": ("socket.socket().connect(('192.0.2.1', 80))", None, False),
    "still there": ("print('f')", "f\n", True),
    "result shows nothing": ("from moe_course.lessons import quiz\nquiz('00.q0', ...)", "there is no", None),
}


def notebook(cells=CELLS):
    made = new_notebook(metadata=build.METADATA)
    for count, (source, text, _) in enumerate(cells.values(), 1):
        outputs = [] if text is None else [new_output("stream", name="stdout", text=text)]
        made.cells.append(new_code_cell(source, outputs=outputs, execution_count=count))
    return made


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    path = tmp_path_factory.mktemp("nbval") / "wrong.ipynb"
    nbformat.write(notebook(), path)
    return guard.validate(path)


def test_nbval_notices_each_wrong_cell(judged):
    wrong = [name for name, (_, _, right) in CELLS.items() if right is False]
    assert judged.cells == len(CELLS)
    assert judged.failed in (len(wrong), len(wrong) + 1), (
        "the last cell's text depends on the chapters there are"
    )
    assert judged.first.startswith("Cell 1: "), "the first failure is the verdict"


def test_network_is_blocked(tmp_path):
    made = notebook({"n": (CELLS["network"][0], None, False)})
    with pytest.raises(RunError, match="must not use the network"):
        execute.execute(made, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "failed"),
    # A dead kernel's next cell is an expected failure to nbval; after an interrupt the kernel goes on.
    [("import os; os._exit(1)", 2), ("while True: pass", 1)],
    ids=["dead kernel", "endless cell"],
)
def test_a_hang_ends(tmp_path, source, failed):
    path = tmp_path / "hang.ipynb"
    nbformat.write(notebook({"hang": (source, "x\n", False), "then": ("print(1)", "1\n", True)}), path)
    verdict = guard.validate(path, seconds=300, cell_seconds=3)
    assert (verdict.cells, verdict.failed) == (2, failed)
    assert verdict.first.startswith("Cell 0")


def spoiled(tmp_path, spoil):
    made = notebook({"right": CELLS["right"], "more": ("print('b')", "b\n", True)})
    spoil(made)
    path = tmp_path / "spoiled.ipynb"
    nbformat.write(made, path)
    return guard.faults(path)


def strip(made):
    for cell in made.cells:
        cell.outputs, cell.execution_count = [], None


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (strip, "execution counts"),
        (lambda made: made.cells[1].update(execution_count=7), "execution counts"),
        (lambda made: [cell.update(outputs=[]) for cell in made.cells], "no cell has an output"),
        (lambda made: made.metadata.update(widgets={}), "metadata"),
        (lambda made: made.metadata.language_info.update(version="3.11.7"), "metadata"),
        (lambda made: made.cells[0].update(source="f();"), "';'"),
        (lambda made: made.cells[0].outputs[0].update(name="stderr"), "warning"),
        (lambda made: made.cells[0].outputs[0].update(text="<f at 0x7f00aa11bb>"), "address"),
        (lambda made: made.cells[0].outputs[0].update(text="/".join(["saved ", "home", "ann", "x"])), "path"),
        (
            lambda made: made.cells[0].outputs.append(
                new_output("display_data", {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}})
            ),
            "a widget",
        ),
        (
            lambda made: made.cells[0].outputs.append(
                new_output("error", ename="E", evalue="", traceback=[])
            ),
            "an error",
        ),
    ],
)
def test_what_makes_nbval_blind_is_noticed(tmp_path, spoil, says):
    assert spoiled(tmp_path, lambda made: None) == []
    assert any(says in fault for fault in spoiled(tmp_path, spoil))


def test_calls():
    source = (
        'check("02.1", f)\nx = 1\nquiz(\n    "02.q1",\n    "b",\n)\npredict("rows", ..., 3)\nprint(check)'
    )
    assert guard.calls(source) == [("check", "02.1"), ("quiz", "02.q1"), ("predict", "rows")]
