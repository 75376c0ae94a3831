"""launch/: the scripts parse, and the ``moe-course`` commands in them are ones that our command line takes."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from moe_course.cli import main

LAUNCH = Path(__file__).parents[1] / "launch"
SBATCH = LAUNCH / "train.sbatch"
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")

SRUN = """#!/usr/bin/env bash
# Takes its own options off, then runs the command once per process.
while [[ $1 == --* ]]; do shift; done
for ((i = 0; i < SLURM_NTASKS; i++)); do SLURM_PROCID=$i "$@"; done
"""
SAYS_ARGUMENTS = f"""#!{sys.executable}
import json, sys
print(json.dumps(sys.argv[1:]))
"""


@pytest.fixture
def cluster(tmp_path):
    """``cluster(script, *arguments, **env)``: the argument lists with which it calls moe-course."""
    tools = {"srun": SRUN, "moe-course": SAYS_ARGUMENTS, "scontrol": "#!/bin/sh\necho node1; echo node2\n"}
    for name, text in tools.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(script: str, *arguments: str, **env: str) -> list[list[str]]:
        done = subprocess.run(
            ["bash", "-c", script, "script", *arguments],
            env={"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", **env},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


def parsed(arguments: list[str], monkeypatch):
    """(config, options) that ``moe-course`` makes of these arguments; checks the settings, trains nothing."""
    from moe_course.train import run

    seen = []
    monkeypatch.setattr(run, "train", lambda config, preset, options, console: seen.append((config, options)))
    assert main(arguments) in (0, 130)
    ((config, options),) = seen
    config.validate()
    return config, options


def check_together(calls: list[list[str]], processes: int, devices: int, monkeypatch) -> None:
    """All processes of one run: the same settings but for their number."""
    chosen = [parsed(call, monkeypatch) for call in calls]
    assert [options.process for _, options in chosen] == list(range(processes))
    assert {options.processes for _, options in chosen} == {processes}
    assert len({options.coordinator for _, options in chosen}) == 1
    assert chosen[0][1].coordinator.count(":") == 1
    assert all(config == chosen[0][0] for config, _ in chosen)
    assert chosen[0][0].devices == devices == chosen[0][0].mesh.size


@pytest.mark.parametrize("nodes", [1, 2, 16])
def test_slurm(cluster, monkeypatch, nodes):
    job = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": str(nodes), "SLURM_JOB_ID": "7"}
    calls = cluster(SBATCH.read_text(), "--steps", "500", SLURM_NTASKS=str(nodes), **job)
    assert len(calls) == nodes
    check_together(calls, nodes, 8 * nodes, monkeypatch)
    config, options = parsed(calls[0], monkeypatch)
    assert config.steps == 500, "the script's own arguments come last"
    assert options.coordinator == "node1:29500"
    assert not options.resume


def test_slurm_resumes_a_run_that_is_there(cluster, monkeypatch, tmp_path):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    job = {"SLURM_JOB_NODELIST": "n", "SLURM_NNODES": "1", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "7"}
    (call,) = cluster(SBATCH.read_text(), NAME="mine", **job)
    assert parsed(call, monkeypatch)[1].resume


def test_every_flag_of_the_slurm_script_is_explained():
    text = SBATCH.read_text()
    used = set(re.findall(r"^\t\t(--[a-z.-]+)", text, re.MULTILINE))
    explained = set(re.findall(r"^# (--[a-z.-]+)(?:,| )", text, re.MULTILINE))
    assert len(used) > 10
    assert used <= explained | {"--runs-dir"}, used - explained
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if line.startswith("#SBATCH"):
            assert re.fullmatch(r"# .*:", lines[number - 1]), f"nothing explains {line}"


def test_slurm_script_parses():
    subprocess.run(["bash", "-n", SBATCH], check=True, timeout=60)
    broken = subprocess.run(["bash", "-n"], input=SBATCH.read_text() + "\nif", text=True, capture_output=True)
    assert broken.returncode != 0, "the check itself"


def jobset() -> dict:
    return yaml.safe_load((LAUNCH / "jobset.yaml").read_text())


def test_jobset(cluster, monkeypatch):
    spec = jobset()
    assert spec["kind"] == "JobSet"
    (job,) = spec["spec"]["replicatedJobs"]
    pods = job["template"]["spec"]
    pod = pods["template"]["spec"]
    (container,) = pod["containers"]
    env = {item["name"]: item["value"] for item in container["env"]}
    nodes = pods["parallelism"]
    assert pods["completions"] == nodes == int(env["NODES"])
    assert pods["completionMode"] == "Indexed"
    assert int(env["GPUS_PER_NODE"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    host = f"{spec['metadata']['name']}-{job['name']}-0-0.{spec['metadata']['name']}"
    assert env["COORDINATOR"] == f"{host}:{container['ports'][0]['containerPort']}"
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    assert container["command"] == ["bash", "-c"]
    (script,) = container["args"]
    calls = [c for i in range(nodes) for c in cluster(script, JOB_COMPLETION_INDEX=str(i), **env)]
    check_together(calls, nodes, nodes * int(env["GPUS_PER_NODE"]), monkeypatch)


def test_a_flag_that_we_do_not_have_is_noticed(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        parsed(["train", "--preset", "small", "--num-experts", "8"], monkeypatch)


def test_container_file():
    lines = [line for line in (LAUNCH / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    text = "\n".join(lines)
    assert re.search(r"^ARG BASE=ghcr.io/nvidia/jax:\w+$", text, re.MULTILINE)
    assert re.search(r"^FROM \$\{BASE\}$", text, re.MULTILINE)
    (install,) = [line for line in lines if "pip install" in line]
    assert "--editable '.[data]'" in install
    assert "gpu" not in install, "the image brings CUDA, JAX and Transformer Engine"
    words = json.loads(re.search(r"^CMD (.*)$", text, re.MULTILINE)[1])
    assert words == ["moe-course", "doctor", "--gpu"]
