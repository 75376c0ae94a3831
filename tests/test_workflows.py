"""GitHub Actions: pinned, least privileges, and calling only what exists."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def faults(text: str, targets: set[str]) -> list[str]:
    """What a workflow may not do, in words."""
    flow = yaml.safe_load(text)
    told = [] if flow.get("permissions") == {"contents": "read"} else ["permissions are not contents: read"]
    for name, job in flow["jobs"].items():
        if "timeout-minutes" not in job:
            told.append(f"{name} has no timeout")
        for step in job["steps"]:
            uses, run = step.get("uses"), step.get("run", "")
            if uses and not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", uses):
                told.append(f"{uses} is not pinned to a commit")
            if (
                uses
                and uses.startswith("actions/checkout@")
                and step.get("with", {}).get("persist-credentials", True)
            ):
                told.append(f"{name} keeps the token after checkout")
            told += [
                f"make {target} does not exist"
                for target in re.findall(r"\bmake ([\w-]+)", run)
                if target not in targets
            ]
            told += [
                f"{path} does not exist"
                for path in re.findall(r"\btests/\S+", run)
                if not (ROOT / path).exists()
            ]
            if "${{" in run:
                told.append(f"{name} pastes an expression into a shell line")
    if "self-hosted" in text and "pull_request" in (flow.get(True) or flow.get("on")):
        told.append("a pull request would run on a machine of one's own")
    return told


@pytest.fixture(scope="module")
def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow(path, make_targets):
    assert faults(path.read_text(), make_targets) == []


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        (("@11bd71901bbe5b1630ceea73d27597364c9af683", "@v4"), "not pinned"),
        (("contents: read", "contents: write"), "permissions"),
        (("make lint", "make linnt"), "make linnt"),
        (("persist-credentials: false", "persist-credentials: true"), "token"),
        (("with: {persist-credentials: false}", "with: {}"), "token"),
        (("test_run_solutions.py", "test_run_solution.py"), "does not exist"),
        (("timeout-minutes: 90", ""), "no timeout"),
        (("make lint PYTHON=python", "make lint PYTHON=${{ github.head_ref }}"), "shell line"),
        (("runs-on: ubuntu-24.04", "runs-on: self-hosted"), "machine of one's own"),
    ],
)
def test_a_broken_workflow_is_found(broken, fault, make_targets):
    text = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    assert any(fault in told for told in faults(text.replace(*broken), make_targets))
