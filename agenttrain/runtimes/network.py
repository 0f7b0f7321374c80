"""A port that only a container reaches: a socket of the run in the container's network."""

from __future__ import annotations

import ctypes
import os
import socket
import threading

from agenttrain.runtimes.base import MachineLost

CLONE_NEWNET = 0x4000_0000
BACKLOG = 256


def listener_inside(pid: int, port: int) -> socket.socket:
    """Return a socket that listens on 127.0.0.1 in the network of process `pid`; port 0: any.

    A socket stays in the network in which it was made, so a thread enters that network, makes the
    socket and ends. Needs root. Raises MachineLost.
    """
    sockets: list[socket.socket] = []
    failures: list[OSError] = []

    def make() -> None:
        """Enter the network of `pid` in this thread, and make the socket or record the failure."""
        try:
            descriptor = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            try:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(descriptor, CLONE_NEWNET):
                    number = ctypes.get_errno()
                    raise OSError(number, os.strerror(number))
            finally:
                os.close(descriptor)
            sockets.append(socket.create_server(("127.0.0.1", port), backlog=BACKLOG))
        except OSError as error:
            failures.append(error)

    # The thread ends in that network: no other work may ever run in it.
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if failures:
        raise MachineLost(f"its network cannot be entered: {failures[0].strerror}")
    sockets[0].setblocking(False)
    return sockets[0]
