"""Two processes with four devices each, on loopback: the same dispatcher tests, and what happens when one is killed."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from moe_course.processes import EXIT_CODE
from tests.dispatch.dispatch_cases import EXCHANGES

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PATIENCE = 600
"""Seconds after which a test gives up; nothing here waits for it in good order."""


class Pair:
    """Both processes, killed at the end whatever happens."""

    def __init__(self, watch: str, what: str):
        with socket.create_server(("127.0.0.1", 0)) as free:
            coordinator = f"127.0.0.1:{free.getsockname()[1]}"
        command = [sys.executable, "-m", "tests.dispatch.process_worker", coordinator]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
        environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
        self.processes = [
            subprocess.Popen([*command, str(i), watch, what], env=environment, **options) for i in range(2)
        ]
        self.alarm = threading.Timer(PATIENCE, self.kill)

    def __enter__(self):
        self.alarm.start()
        return self

    def __exit__(self, *_):
        self.alarm.cancel()
        self.kill()
        for process in self.processes:
            process.communicate()

    def kill(self):
        for process in self.processes:
            process.kill()

    def wait_until_both_step(self):
        for process in self.processes:
            assert any(line == "stepped\n" for line in process.stdout)  # Gloo prints lines of its own


def test_dispatchers_across_processes():
    with Pair("watch", "check") as pair:
        for index, process in enumerate(pair.processes):
            out, err = process.communicate()
            assert process.returncode == 0, f"process {index}: {err[-4000:]}"
            said = [line for line in out.splitlines() if line.startswith("checked")]
            assert said == [f"checked {dispatcher}" for dispatcher in EXCHANGES]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_process_ends_the_other_with_a_message(victim):
    """In seconds, though JAX would wait a minute for a heartbeat."""
    with Pair("watch", "loop") as pair:
        pair.wait_until_both_step()
        pair.processes[victim].send_signal(signal.SIGKILL)
        other = pair.processes[1 - victim]
        _, err = other.communicate(timeout=20)
        assert other.returncode == EXIT_CODE, err[-4000:]
        message = f"process {1 - victim} of 2 ends: process {victim} is gone"
        assert message in err
        assert "with --resume" in err
        assert "Check failure stack trace" not in err


def test_broken_twin_nobody_watches():
    """The survivor sits in its collective and says nothing: what the test above is there to notice."""
    with Pair("blind", "loop") as pair:
        pair.wait_until_both_step()
        pair.processes[1].send_signal(signal.SIGKILL)
        with pytest.raises(subprocess.TimeoutExpired):
            pair.processes[0].communicate(timeout=8)
