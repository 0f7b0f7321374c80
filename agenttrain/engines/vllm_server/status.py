"""`<run>/servers/status.json`: the fleet as the run sees it, for `agenttrain servers`.

{"time": 1795665600.0, "pid": 4711, "ended": false, "servers": [{"number": 0, "state": "live",
 "version": 7, "requests": 12, "completions": 3400, "boot": 1, "url": "http://127.0.0.1:40123",
 "reason": ""}, …]}
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from agenttrain.engines.vllm_server.health import Member
from agenttrain.engines.vllm_server.records import FOLDER, last_lines, write_private

STATUS = "status.json"
EVERY_S = 1.0
"""Least time between two writes, unless a server's state has changed."""


class StatusFile:
    """Writes the file, at most once a second without need."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FOLDER / STATUS
        self._states: list[object] = []
        self._written = 0.0

    def write(self, members: Sequence[Member], *, ended: bool = False) -> None:
        """Write the state of the servers; a full disk is no reason to stop a run."""
        now, states = time.time(), [(member.state, member.boot) for member in members]
        if not ended and states == self._states and now < self._written + EVERY_S:
            return
        self._states, self._written = list(states), now
        rows = [
            {
                "number": member.number,
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
        with suppress(OSError):
            content = {"time": now, "pid": os.getpid(), "ended": ended, "servers": rows}
            write_private(self._path, content)


def read_status(folder: Path, lines: int) -> dict[str, Any] | None:
    """Read the state of a run's servers and the last lines of their logs; None: it has had none."""
    try:
        status: dict[str, Any] = json.loads((folder / FOLDER / STATUS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    for row in status["servers"]:
        log = last_lines(folder, row["number"], lines) if lines else ""
        row["log"] = log.splitlines()
    return status
