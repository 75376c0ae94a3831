"""The Makefile and its scripts, on made-up machines: which Python they take, and what they say is missing."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs a POSIX shell")

SHIM = "echo 'pyenv: command not found' >&2; exit 127"


def answers(version: str, venv: bool = True) -> str:
    """A stand-in for a Python behind a shim: has a version, and can or cannot make environments."""
    major, minor, _ = (int(part) for part in version.split("."))
    return f"""case "$2" in
        *version_info?:3*) echo {version} ;;
        *sys.executable*) echo /real/python{version} ;;
        *sys.exit*) exit {int((major, minor) < (3, 11))} ;;
        *ensurepip*) exit {int(not venv)} ;;
    esac"""


def find_python(folder: Path, machine: dict[str, str], **env: str) -> subprocess.CompletedProcess:
    for name, script in machine.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return subprocess.run(
        ["/bin/sh", str(ROOT / "scripts" / "find-python")],
        env={"PATH": str(folder), **env},
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize(
    ("machine", "chosen"),
    [
        ({"python3.13": answers("3.13.0"), "python3.12": answers("3.12.1")}, "3.13.0"),
        ({"python3.13": SHIM, "python3.12": answers("3.12.1"), "python3": answers("3.11.7")}, "3.12.1"),
        ({"python3.13": SHIM, "python3.12": SHIM, "python3": answers("3.11.7")}, "3.11.7"),
        ({"python3.12": answers("3.12.1", venv=False), "python3": answers("3.11.7")}, "3.11.7"),
        ({"python3": answers("3.9.6"), "python3.11": answers("3.11.7")}, "3.11.7"),
        ({"python3": answers("3.12.1", venv=False), "uv": "exit 0"}, "3.12.1"),
    ],
    ids=["newest", "one-shim", "two-shims", "no-venv-there", "old-python3", "uv-needs-no-venv"],
)
def test_takes_the_newest_that_works(tmp_path, machine, chosen):
    done = find_python(tmp_path, machine)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, f"/real/python{chosen}", "")


@pytest.mark.parametrize(
    ("machine", "says"),
    [
        ({}, ["Python 3.11 or newer is needed, and none was found", "python3-full"]),
        ({"python3": SHIM}, ["none was found"]),
        ({"python3": answers("3.8.10")}, ["python3 is Python 3.8.10", "PYTHON=/path"]),
        ({"python3": answers("3.12.3", venv=False)}, ["no venv module", "apt install python3.12-venv"]),
    ],
    ids=["none", "only-a-shim", "too-old", "no-venv"],
)
def test_says_in_one_line_what_is_missing(tmp_path, machine, says):
    done = find_python(tmp_path, machine)
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    for words in says:
        assert words in done.stderr


def test_python_variable_wins_and_is_checked(tmp_path):
    folder = tmp_path / "a folder"
    folder.mkdir()
    machine = {"python3.13": answers("3.13.0"), "mine": answers("3.11.9"), "old": answers("3.10.1")}
    assert find_python(folder, machine, PYTHON=str(folder / "mine")).stdout == "/real/python3.11.9\n"
    assert "Python 3.10.1" in find_python(folder, machine, PYTHON=str(folder / "old")).stderr
    assert "does not run" in find_python(folder, machine, PYTHON="no-such-python").stderr


def make(*arguments: str) -> str:
    if not shutil.which("make"):
        pytest.skip("needs make")
    command = ["make", "--no-print-directory", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_help_names_every_target():
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    listed = [line.split()[0] for line in make().splitlines()[1:]]
    assert sorted(listed) == sorted(phony)


def test_train_and_test_do_what_the_readme_says():
    assert "moe-course train --preset tiny" in make("-n", "train")
    assert "not parity and not gpu" in make("-n", "test")
    assert "not slow" in make("-n", "test-quick")


def test_te_is_built_before_it_is_tested_and_nothing_is_skipped_then():
    commands = make("-n", "test-te").splitlines()
    assert commands[0] == "scripts/te-wheel"
    assert "MOE_COURSE_TE=required" in commands[1]
    assert "tests/te" in commands[1]


def test_only_virtual_environments_are_replaced(tmp_path):
    """make-venv deletes what it replaces, so it refuses any name that is not a virtual environment's."""
    script = str(ROOT / "scripts" / "make-venv")
    done = subprocess.run([script, str(tmp_path), "dev"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert ".venv" in done.stderr
    assert tmp_path.exists()
