"""On an NVIDIA GPU (``make test-gpu``): every backend that runs there against the oracle, and a step without the host.

Skipped with its reason elsewhere. Nobody has run these on a GPU yet; ``moe-course bench gpu`` measures the rest.
"""

import os
import subprocess
import sys

import pytest

from moe_course.environment import visible_gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not visible_gpus(), reason="no NVIDIA GPU is visible here; make test-gpu runs it on one"
    ),
]


def on_gpu(code: str, timeout: int = 300) -> str:
    """Output of code in a process whose JAX uses the GPU: this one's is held to simulated devices."""
    env = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "NPROC")}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


BACKEND = """
from moe_course.bench import gpu
from moe_course.bench.gpu_kernels import correctness
gpu.setup(devices=1, quiet=True, platform="gpu")
for backend, figures in correctness(False):
    if backend == {backend!r}:
        if "refused" in figures:
            print("REFUSED " + figures["refused"])
        for case, found in figures.items():
            if isinstance(found, dict) and "refused" not in found:
                assert found.get("ok"), (case, found)
"""


@pytest.mark.parametrize("backend", ["pallas", "ragged_dot", "tokamax", "te"])
def test_backend_equals_the_oracle(backend):
    said = on_gpu(BACKEND.format(backend=backend))
    if "REFUSED" in said:
        pytest.skip(said.partition("REFUSED ")[2].strip())


STEP = """
import sys
from moe_course.bench import gpu
from moe_course.bench.gpu_training import small_step
gpu.setup(devices=1, quiet=True, platform="gpu")
((_, figures),) = small_step(False)
assert "error" not in figures, figures
assert (figures["host_syncs"], figures["recompilations"]) == (0, 0), figures
assert figures["losses"][-1] < figures["losses"][0] + 1, figures
"""


def test_a_step_needs_no_host_and_compiles_once():
    on_gpu(STEP)


def test_training_runs(tmp_path):
    command = (
        "train --preset tiny --devices 1 --mesh.fsdp 1 --mesh.expert 1 --steps 20 --optimizer.warmup-steps 5"
    )
    words = [*command.split(), "--runs-dir", str(tmp_path)]
    on_gpu(f"from moe_course.cli import main; assert main({words!r}) == 0", timeout=540)
