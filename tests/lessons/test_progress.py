"""The progress file and its tables: kept, merged, damaged, read-only, many learners."""

import io
import json
import os
import stat

import pytest
from rich.console import Console

from moe_course.cli import main
from moe_course.errors import RunError
from moe_course.lessons import progress


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_COURSE_PROGRESS", str(tmp_path / "own" / "progress.json"))
    monkeypatch.setattr(progress, "_warned", False)
    return tmp_path / "own" / "progress.json"


def record(passed, held=1, id="02.1"):
    progress.record(id, passed=passed, held=held, properties=4)


def test_a_pass_stays_and_tries_count(file):
    for passed, held in ((False, 2), (True, 4), (False, 3)):
        record(passed, held)
    assert progress.load(file)["02.1"] == progress.Entry(passed=True, held=3, properties=4, tries=3)
    assert [path.name for path in file.parent.iterdir()] == ["progress.json"], "temporary files are left"


def test_default_place(monkeypatch):
    monkeypatch.delenv("MOE_COURSE_PROGRESS")
    monkeypatch.setenv("XDG_STATE_HOME", "/somewhere")
    assert str(progress.path()) == "/somewhere/moe-course/progress.json"
    monkeypatch.delenv("XDG_STATE_HOME")
    assert str(progress.path()).endswith(".local/state/moe-course/progress.json")


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"exercises": {"02.1": {"passed": 1}}}'])
def test_a_damaged_file_is_set_aside(file, damage, capsys):
    file.parent.mkdir()
    file.write_text(damage)
    record(True)
    assert progress.load(file)["02.1"].passed
    assert file.with_suffix(".damaged").read_text() == damage
    assert capsys.readouterr().out == ""


def test_no_place_to_write_is_one_line_once(file, capsys):
    file.parent.write_text("a file where the folder should be")
    record(True)
    record(True)
    assert capsys.readouterr().out.count("progress is not kept") == 1


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() == 0, reason="root may write anywhere")
def test_read_only_folder(file, capsys):
    file.parent.mkdir()
    file.parent.chmod(stat.S_IRUSR | stat.S_IXUSR)
    record(True)
    assert "progress is not kept" in capsys.readouterr().out


def table(print_table, *args) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    print_table(console, *args)
    return console.export_text()


def test_own_table(file):
    assert "not attempted" in table(progress.print_own)
    record(False, 2)
    assert "tried (2 of 4 properties)" in table(progress.print_own)
    record(True, 4)
    text = table(progress.print_own)
    assert "passed" in text
    assert str(file) in text


def test_room(tmp_path):
    room = tmp_path / "room"
    states = {"ann": True, "bob/progress": False, "carol/progress": False}
    for name, passed in states.items():
        path = room / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        progress._write(path, {"02.1": progress.Entry(passed, 1, 4, 1)})
    (room / "other.json").write_text(json.dumps({"a": 1}))
    text = table(progress.print_room, room)
    for word in ("ann", "bob", "carol", "3 learners", "stuck at 02.1: 2 tried", "left out: other.json"):
        assert word in text
    with pytest.raises(RunError, match=r"no \*\.json"):
        progress.print_room(Console(), tmp_path / "nothing")


def test_command(file, capsys):
    record(True, 4)
    assert main(["progress"]) == 0
    assert "02.1" in capsys.readouterr().out
    assert main(["progress", "--all", str(file.parent)]) == 0
    assert "1 learners" in capsys.readouterr().out
    assert main(["progress", "--all", "nowhere"]) == 2
