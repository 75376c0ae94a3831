"""Running a notebook where nothing but its code decides what comes out.

The kernel gets a fixed environment: CPU only, static widgets, its own IPython profile and progress file, no
way out to the network from Python. Tests give nbval's kernel the same one.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from moe_course.errors import RunError

CELL_TIMEOUT = 300
"""Seconds a cell may run."""

OFFLINE = """
import socket


def _blocked(self, address, *_):
    host = address[0] if isinstance(address, tuple) else ""
    if host and not str(host).startswith(("127.", "localhost", "::1")):
        raise OSError(f"a notebook must not use the network, and wanted {host}")
    return _connect(self, address)


def _unresolved(host, *args, **kwargs):
    if host not in (None, "", "localhost", "127.0.0.1", "::1"):
        raise OSError(f"a notebook must not use the network, and wanted {host}")
    return _getaddrinfo(host, *args, **kwargs)


_connect, _getaddrinfo = socket.socket.connect, socket.getaddrinfo
socket.socket.connect, socket.getaddrinfo = _blocked, _unresolved
"""
"""Startup file of the kernel's IPython profile. Reaches Python's sockets, not those of compiled code."""


@contextlib.contextmanager
def kernel_environment() -> Iterator[dict[str, str]]:
    """Environment variables for a kernel; the files they name live as long as the context."""
    with tempfile.TemporaryDirectory() as folder:
        startup = Path(folder, "ipython", "profile_default", "startup")
        startup.mkdir(parents=True)
        (startup / "00-offline.py").write_text(OFFLINE)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "NPROC"))}
        yield {
            **inherited,
            "IPYTHONDIR": str(startup.parents[1]),
            "MOE_COURSE_PROGRESS": str(Path(folder, "progress.json")),
            "MOE_COURSE_STATIC": "1",
            "JAX_PLATFORMS": "cpu",
            "PYTHONHASHSEED": "0",
            "MPLBACKEND": "agg",
            "TZ": "UTC",
        }


def execute(notebook, folder: Path):
    """Run every cell of ``notebook`` (changed in place) in ``folder``. RunError at the first cell that raises."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(folder)}},
    )
    with kernel_environment() as env:
        try:
            client.execute(env=env)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            raise RunError(f"the notebook does not run:\n{error}") from error
    return notebook
