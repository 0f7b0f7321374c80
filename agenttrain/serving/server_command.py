"""Run another program's server of OpenAI's API as a child process, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from http.client import HTTPConnection, HTTPException

import psutil

from agenttrain.utils.child_process import ChildGone, ChildProcess
from agenttrain.utils.signals import handling

POLL_S = 0.2
"""Seconds between two checks of the child."""
HEALTH_S = 2.0
"""Longest wait for an answer of `/health`."""
TAIL_BYTES = 1 << 16
"""Last bytes of output that are kept: workers print the cause long before the server ends."""
ERROR = re.compile(r"\b\w+(?:Error|Exception): .+")
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses that stand for all of a machine, mapped to an address that clients can ask."""


def run_command(
    command: Sequence[str], host: str, port: int, *, on_ready: Callable[[], None]
) -> None:
    """Run a server's command until SIGTERM or Ctrl-C, and end all of its processes.

    `on_ready` is called once `/health` answers. The first signal is passed on as SIGTERM, upon
    which the server completes its answers. A second one ends it at once. Raises ChildGone if the
    server ends by itself.
    """
    signals: list[int] = []
    with ExitStack() as stack:
        stack.enter_context(
            handling((signal.SIGTERM, signal.SIGINT), lambda number, _: signals.append(number))
        )
        child = ChildProcess(command, tail_bytes=TAIL_BYTES)
        stack.callback(child.kill)
        is_ready = is_ending = False
        while child.alive and len(signals) < 2:
            if signals and not is_ending:
                child.signal(signal.SIGTERM)
                is_ending = True
            if not (is_ready or signals) and _listens(child.pid, port) and _is_healthy(host, port):
                is_ready = True
                on_ready()
            time.sleep(POLL_S)
    if not signals:
        errors = ERROR.findall(child.printed())
        if not errors:
            raise child.gone_error()
        # The first is the cause, the last the error with which the server ended.
        causes = "\n".join(dict.fromkeys([errors[0], errors[-1]]))
        raise ChildGone(f"ended with exit code {child.code}; it printed: {causes}")


def _listens(pid: int, port: int) -> bool:
    """Return True if the process or a descendant of it listens on the port.

    A foreign program on the port does not count.
    """
    with suppress(psutil.Error):
        server = psutil.Process(pid)
        for process in (server, *server.children(recursive=True)):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                    return True
    return False


def _is_healthy(host: str, port: int) -> bool:
    """Return True if the server's `/health` answers with status 200."""
    client = HTTPConnection(ANY_ADDRESS.get(host, host), port, timeout=HEALTH_S)
    with closing(client), suppress(OSError, HTTPException):
        client.request("GET", "/health")
        return client.getresponse().status == 200
    return False
