"""From source to notebooks: gaps, ids, kept outputs, canonical text. Nothing here starts a kernel."""

import base64
import copy
import json

import nbformat
import numpy as np
import pytest
from nbformat.v4 import new_output

from moe_course.cli import main
from moe_course.errors import RunError, SettingError
from moe_course.lessons import build, plots

SOURCE = '''\
# %% [markdown]
# # A chapter

# %%
def double(x):
    """x [T] -> [T]"""
    ### BEGIN SOLUTION
    twice = 2 * x
    return twice
    ### END SOLUTION


check("99.1", double)

# %%
quiz(
    "99.q1",
    ### BEGIN ANSWER
    "b",
    ### END ANSWER
)

# %% tags=["nbval-ignore-output"]
print("same")

# %%
print("same")
'''


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "solutions" / "99_test.py"
    path.parent.mkdir()
    path.write_text(SOURCE)
    return path


@pytest.fixture
def built(source):
    """The notebooks as if run: each code cell printed its number."""
    notebook = build.read(source)
    for cell in notebook.cells[1:]:
        cell.outputs = [new_output("stream", name="stdout", text=f"{cell.id}\n")]
    build.number_cells(notebook)
    for path, text in zip(build.targets(source), (notebook, build.chapter_of(notebook)), strict=True):
        build.write(path, build.dump(text))
    return source


def code(path):
    return [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def test_gaps(built):
    exercise, question, *_ = code(build.targets(built)[1])
    assert exercise.splitlines() == [
        "def double(x):",
        '    """x [T] -> [T]"""',
        '    raise NotImplementedError("exercise: write this")',
        "",
        "",
        'check("99.1", double)',
    ]
    assert question == 'quiz(\n    "99.q1",\n    ...,\n)'


def test_canonical_text(built):
    for path in build.targets(built):
        text = path.read_text()
        data = json.loads(text)
        assert text == json.dumps(data, sort_keys=True, indent=1, ensure_ascii=False) + "\n"
        assert (data["nbformat"], data["nbformat_minor"]) == (4, 5)
        assert data["metadata"] == build.METADATA
        nbformat.validate(nbformat.read(path, as_version=4))


def test_ids_come_from_content(source, built):
    before = [cell.id for cell in build.read(source).cells]
    assert len(set(before)) == len(before), "equal cells need different ids"
    source.write_text("# %%\nnew = 1\n\n" + SOURCE)
    assert [cell.id for cell in build.read(source).cells][1:] == before


def test_up_to_date(built):
    assert build.out_of_date(built) == []


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda source: source.write_text(SOURCE.replace("# A chapter", "# Another")), "cells differ"),
        (lambda source: build.targets(source)[1].unlink(), "is missing"),
        (lambda source: edit(build.targets(source)[1], "...,", '"b",'), "without its regions"),
        (lambda source: edit(build.targets(source)[0], '"python3"', '"other"'), "differ from its source"),
        (lambda source: edit(build.targets(source)[0], "\n ", "\n  "), "canonical form"),
    ],
    ids=["prose", "missing", "answer in the chapter", "kernel", "indent"],
)
def test_out_of_date_is_noticed(built, spoil, says):
    spoil(built)
    assert any(says in fault for fault in build.out_of_date(built))


def edit(path, old, new):
    text = path.read_text()
    assert old in text or json.dumps(old)[1:-1] in text
    path.write_text(text.replace(old, new).replace(json.dumps(old)[1:-1], json.dumps(new)[1:-1]))


def test_an_open_region_is_an_error(source):
    source.write_text(SOURCE.replace("    ### END SOLUTION\n", ""))
    with pytest.raises(RuntimeError, match="no end solution"):
        build.chapter_of(build.read(source))


# ---------------------------------------------------------------- outputs that are kept


def picture(change=0.0, seed=0):
    fig, ax = plots.figure(2, 1)
    ax.plot(np.random.default_rng(seed).normal(size=5) + change)
    ax.set_ylim(-3, 3)
    return base64.b64encode(plots.png(fig)).decode()


def outputs(text="1\n", png=None):
    made = [new_output("stream", name="stdout", text=text)]
    if png:
        made.append(new_output("display_data", {"image/png": png, "text/plain": "figure: f"}))
    return made


def test_pictures():
    base = picture()
    assert build.same_picture(base, base)
    assert build.same_picture(base, picture(1e-9)), "rounding"
    assert not build.same_picture(base, picture(0.05))
    assert not build.same_picture(base, picture(seed=1))
    assert not build.same_picture(base, base64.b64encode(plots.png(plots.figure(3, 1)[0])).decode())


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        (outputs("1\n"), outputs("1\n"), True),
        (outputs("1\n"), outputs("2\n"), False),
        (outputs("took 3 s\n"), outputs("took 4 s\n"), True),
        (outputs(png=picture()), outputs(png=picture(1e-9)), True),
        (outputs(png=picture()), outputs(png=picture(0.5)), False),
        (outputs(png=picture()), outputs(), False),
        ([new_output("stream", name="stderr", text="1\n")], outputs("1\n"), False),
    ],
)
def test_say_the_same(old, new, same):
    def sanitize(text):
        return "took N s\n" if text.startswith("took") else text

    assert build.say_the_same(old, new, sanitize) == same


def test_keep_outputs(built, source):
    old = nbformat.read(build.targets(built)[0], as_version=4)

    def run_again(notebook, words):
        made = copy.deepcopy(notebook)
        for cell in made.cells[1:]:
            cell.outputs = outputs(words)
        build.keep_outputs(made, old, lambda text: "")  # everything says the same
        return [
            cell.outputs == before.outputs for cell, before in zip(made.cells[1:], old.cells[1:], strict=True)
        ]

    assert run_again(build.read(source), "another") == [True] * 4
    build.keep_outputs(other := build.read(source), old, str)
    ignored = [build.IGNORED in cell.metadata.get("tags", ()) for cell in other.cells[1:]]
    kept = [
        cell.outputs == before.outputs for cell, before in zip(other.cells[1:], old.cells[1:], strict=True)
    ]
    assert kept == ignored == [False, False, True, False]
    source.write_text(SOURCE.replace("2 * x", "x + x"))
    build.keep_outputs(other := build.read(source), old, str)
    assert [bool(cell.outputs) for cell in other.cells[1:]] == [False] * 4, (
        "code before the ignored cell changed"
    )


# ---------------------------------------------------------------- the command


def test_unknown_chapter(capsys):
    assert main(["notebooks", "98", "--check"]) == 2
    assert "no chapter 98" in capsys.readouterr().err
    with pytest.raises(SettingError):
        build.sources(("98",))


def test_outside_a_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(build.moe_course, "__file__", str(tmp_path / "site" / "moe_course" / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match="checkout"):
        build.root()


def test_check_command_says_what_is_stale(monkeypatch, built, capsys):
    monkeypatch.setattr(build, "root", lambda: built.parents[1])
    assert build.build(build.Options(check=True)) == 0
    built.write_text(SOURCE + "\n# %%\nx = 1\n")
    assert build.build(build.Options(check=True)) == 1
    assert "make notebooks" in capsys.readouterr().out
