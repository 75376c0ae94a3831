"""Several processes, one program: join them, and end together when one is lost.

Left alone, a collective whose peer was killed waits, on a CPU until the coordination service misses heartbeats; then
JAX aborts with a stack trace. Here every process keeps a socket open to process 0. The operating system closes the
sockets of a process that dies, however it dies, so the others know at once, say which one it was and stop. A machine
that vanishes closes nothing: for that there are JAX's heartbeats, and ``lost_after``.
"""

import contextlib
import os
import socket
import struct
import sys
import threading
from collections.abc import Iterator

_FRAME = struct.Struct("!i")
_GOODBYE = -1
EXIT_CODE = 17
"""Of a process that ends because another one was lost."""


@contextlib.contextmanager
def join(
    coordinator: str, count: int, index: int, *, lost_after: int = 30, watch: bool = True
) -> Iterator[None]:
    """Run the body as process ``index`` of ``count``. Call before JAX starts, in all of them.

    Args:
      coordinator: ``host:port`` where process 0 can be reached, with the port free.
      lost_after: seconds without a heartbeat after which JAX gives up on a process that did not close its sockets.
      watch: end this process, with a message and :data:`EXIT_CODE`, when another one ends before it leaves the body
        in good order. An exception in the body counts as an end.
    """
    import jax

    if jax.config.jax_platforms == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, count, index, heartbeat_timeout_seconds=lost_after)
    peers = _connect(coordinator.rpartition(":")[0], count, index) if watch and count > 1 else {}
    for peer, connection in peers.items():
        threading.Thread(target=_wait_for, args=(peer, connection, peers, index, count), daemon=True).start()
    try:
        yield
    except BaseException:
        for connection in peers.values():
            connection.shutdown(socket.SHUT_RDWR)
        raise
    _tell(peers, _GOODBYE)
    jax.distributed.shutdown()


def _connect(host: str, count: int, index: int) -> dict[int, socket.socket]:
    """Process 0 gets a connection to every other process, every other process one to process 0."""
    import numpy as np
    from jax.experimental import multihost_utils

    server = socket.create_server(("", 0)) if index == 0 else None
    port = server.getsockname()[1] if server else 0
    port = int(multihost_utils.broadcast_one_to_all(np.int32(port)))
    if not server:
        connection = socket.create_connection((host, port))
        connection.sendall(_FRAME.pack(index))
        return {0: connection}
    peers = {}
    with server:
        while len(peers) < count - 1:
            connection, _ = server.accept()
            peers[_receive(connection)] = connection
    return peers


def _wait_for(peer: int, connection: socket.socket, peers: dict, index: int, count: int) -> None:
    """Return when ``peer`` says goodbye; end this process when it is gone, or says that another one is."""
    message = _receive(connection)
    if message == _GOODBYE:
        return
    lost = peer if message is None else message
    _tell({other: c for other, c in peers.items() if other != lost}, lost)
    sys.stderr.write(
        f"process {index} of {count} ends: process {lost} is gone (killed, crashed or out of memory; its own log "
        "says why), and no collective can finish without it. Start all processes again; a training run takes up at "
        "its last checkpoint with --resume.\n"
    )
    sys.stderr.flush()
    os._exit(EXIT_CODE)


def _receive(connection: socket.socket) -> int | None:
    """The next message, None when there will be none."""
    data = b""
    while len(data) < _FRAME.size:
        try:
            more = connection.recv(_FRAME.size - len(data))
        except OSError:
            return None
        if not more:
            return None
        data += more
    return _FRAME.unpack(data)[0]


def _tell(peers: dict[int, socket.socket], message: int) -> None:
    for connection in peers.values():
        with contextlib.suppress(OSError):
            connection.sendall(_FRAME.pack(message))
