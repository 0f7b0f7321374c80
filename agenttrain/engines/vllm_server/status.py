"""`<run>/servers/status.json`: the fleet as the run sees it, for `agenttrain servers`::

{"time": 1795665600.0, "host": "node7", "pid": 4711, "started": 81234, "ended": false,
 "servers": [{"number": 0, "role": "", "state": "live", "version": 7, "requests": 12,
              "completions": 3400, "boot": 1, "url": "http://127.0.0.1:40123", "reason": ""}, …]}
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from agenttrain.engines.vllm_server.health import Member
from agenttrain.engines.vllm_server.server_records import FOLDER, last_lines, write_private
from agenttrain.utils.process_ids import process_exists, started_at

STATUS = "status.json"
OF_PROCESSES = "status"
"""Folder in a role's `servers` folder: one status file for each process that uses its servers."""
OF_ROLES = "roles"
"""Folder in a run's, with a folder for the servers of each role."""
EVERY_S = 1.0
"""Least time between two writes, unless a server's state has changed."""


class StatusFile:
    """Writes the status file: at each change of a server's state, else at most once a second."""

    def __init__(self, folder: Path, *, per_process: bool = False) -> None:
        """`per_process`: several processes use these servers, and each writes its own file."""
        name = f"{OF_PROCESSES}/{os.getpid()}.json" if per_process else STATUS
        self._path = folder / FOLDER / name
        self._host, self._started = socket.gethostname(), started_at(os.getpid())
        self._states: list[object] = []
        self._written = 0.0

    def write(self, members: Sequence[Member], *, ended: bool = False) -> None:
        """Write the state of the servers. A full disk does not stop the run."""
        now, states = time.time(), [(member.state, member.boot) for member in members]
        if not ended and states == self._states and now < self._written + EVERY_S:
            return
        self._states, self._written = list(states), now
        rows = [
            {
                "number": member.number,
                "role": member.role,
                "state": str(member.state),
                "version": member.version,
                "requests": member.requests,
                "completions": member.served,
                "boot": member.boot,
                "url": member.url,
                "reason": member.reason,
            }
            for member in members
        ]
        writer = {"host": self._host, "pid": os.getpid(), "started": self._started}
        with suppress(OSError):
            write_private(self._path, {"time": now, **writer, "ended": ended, "servers": rows})


def read_status(folder: Path, lines: int) -> dict[str, Any] | None:
    """Return the state of a run's servers, or None if the run has had no servers.

    Each server comes with the last `lines` lines of its log. Role servers come last. Several
    processes may use them, and their counts are added up. `running`: the process that wrote the
    newest status still runs, as far as this machine can see.
    """
    files_by_folder = {
        folder: [folder / FOLDER / STATUS],
        **{
            role: sorted((role / FOLDER / OF_PROCESSES).glob("*.json"))
            for role in sorted((folder / OF_ROLES).glob("*"))
        },
    }
    statuses: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for servers_folder, files in files_by_folder.items():
        by_process = [status for file in files if (status := _read_file(file)) is not None]
        statuses += by_process
        for row in _merge_rows(by_process):
            log = last_lines(servers_folder, row["number"], lines) if lines else ""
            rows.append({**row, "log": log.splitlines()})
    if not statuses:
        return None
    # A process that ended last may be one of several, so those that have not ended come first.
    candidates = [status for status in statuses if not status["ended"]] or statuses
    # Among these a process that runs comes before one that was killed.
    newest = max(candidates, key=lambda status: (_is_running(status), float(status["time"])))
    return {
        "time": newest["time"],
        "pid": newest["pid"],
        "ended": newest["ended"],
        "running": _is_running(newest),
        "servers": rows,
    }


def _is_running(status: dict[str, Any]) -> bool:
    """Return True if the process that wrote a status still runs, or is on another machine."""
    if status["ended"]:
        return False
    if status.get("host", socket.gethostname()) != socket.gethostname():
        return True
    return process_exists(status["pid"], status.get("started") or 0)


def _read_file(path: Path) -> dict[str, Any] | None:
    try:
        status: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return status


def _merge_rows(by_process: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per server: its newest state, and the counts of all processes added up."""
    rows: dict[int, dict[str, Any]] = {}
    running = [status for status in by_process if _is_running(status)]
    for status in sorted(by_process, key=lambda status: float(status["time"])):
        # While any process runs, those that have ended have no requests in flight.
        has_requests = status in running or not running
        for row in status["servers"]:
            total = rows.get(row["number"], {"requests": 0, "completions": 0})
            rows[row["number"]] = {
                **row,
                "requests": total["requests"] + (row["requests"] if has_requests else 0),
                "completions": total["completions"] + row["completions"],
            }
    return [rows[number] for number in sorted(rows)]
