"""Times of a run: what each of its processes did when, in `timeline/<process>.jsonl`.

A process writes one object when it starts, one per phase and one per rollout::

    {"time": 1795665600.25, "process": "trainer-0", "host": "node3", "pid": 4711}
    {"time": 1795665603.5, "seconds": 1.25, "phase": "rollout", "step": 3}
    {"time": 1795665603.5, "seconds": 1.1, "rollout": "train-3-0-1",
     "turns": [[0.0, 0.4, 1], [0.6, 0.5, 1]], "calls": [["search", 0.4, 0.2]]}

`time` is in seconds since 1970. Turns and calls of tools begin relative to their rollout's: the
first turn took 0.4 seconds at server 1, then `search` ran for 0.2. The number of a server is left
out where there is no fleet.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from agenttrain.utils.json_lines import dumps, open_to_append

FOLDER = "timeline"
DIGITS = 4
"""Decimals of a time in seconds."""

Turn = tuple[float, float, int | None]
"""Start and end of a turn's sampling, by time.monotonic, and the number of its server."""
Call = tuple[str, float, float]
"""Tool of a call, its start and its end."""


class Timeline:
    """Appends what one process does to its file, which is created for the first line.

    Without a folder it records nothing. A file that cannot be written is no reason to stop a run: a
    warning is printed, and nothing more is recorded. Example::

        with Timeline(folder, "trainer-0") as timeline, timeline.phase("train", 3):
            …
    """

    def __init__(self, run_folder: Path | None = None, process: str = "") -> None:
        self._path = None if run_folder is None else run_folder / FOLDER / f"{process}.jsonl"
        self._file: IO[str] | None = None
        self._process = process
        self._began = time.monotonic()
        # Added to a time of the monotonic clock, it gives seconds since 1970. It is read once, so
        # that a later correction of the machine's time moves nothing.
        self._epoch = time.time() - self._began

    @contextmanager
    def phase(self, name: str, step: int | None = None, label: str = "") -> Iterator[None]:
        """Record the block as a phase of a step, also if it raises."""
        since = time.monotonic()
        try:
            yield
        finally:
            fields = {"phase": name, "step": step}
            self._add(since, time.monotonic(), fields | ({"label": label} if label else {}))

    def rollout(
        self, rollout_id: str, since: float, turns: Sequence[Turn], calls: Sequence[Call]
    ) -> None:
        """Record a rollout that began at `since` and ends now.

        Times are seconds of the monotonic clock: (start, end, server or None) of each turn, (tool,
        start, end) of each call. Example of a recorded turn: ``[0.6, 0.5, 1]`` began 0.6 s after
        the rollout, and took 0.5 s at the server 1.
        """

        def interval(start: float, end: float) -> list[Any]:
            return [round(start - since, DIGITS), round(end - start, DIGITS)]

        fields = {
            "rollout": rollout_id,
            "turns": [
                interval(start, end) + ([] if server is None else [server])
                for start, end, server in turns
            ],
            "calls": [[tool, *interval(start, end)] for tool, start, end in calls],
        }
        self._add(since, time.monotonic(), fields)

    def __enter__(self) -> Timeline:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; nothing more is recorded."""
        self._path = None
        if self._file is not None:
            self._file.close()

    def _add(self, since: float, until: float, fields: dict[str, Any]) -> None:
        """Append a line about the time from `since` until `until`, of the monotonic clock.

        Before the first one comes a line about the process.
        """
        if self._path is None:
            return
        try:
            if self._file is None:
                self._file = open_to_append(self._path)
                first = {"process": self._process, "host": socket.gethostname()}
                self._write(self._began, {**first, "pid": os.getpid()})
            self._write(since, {"seconds": round(until - since, DIGITS), **fields})
        except OSError as error:
            print(f"warning: {self._path}: no times are recorded: {error}", file=sys.stderr)
            self._path = None

    def _write(self, since: float, fields: dict[str, Any]) -> None:
        assert self._file is not None
        row = {"time": round(self._epoch + since, DIGITS), **fields}
        self._file.write(dumps(row) + "\n")


def timeline_paths(run_folder: Path) -> dict[str, Path]:
    """Return the files of a run's times by process: the trainers' first, in order of rank."""
    files = {path.stem: path for path in (run_folder / FOLDER).glob("*.jsonl")}

    def sort_key(name: str) -> tuple[bool, int, str]:
        kind, _, rank = name.rpartition("-")
        return kind != "trainer", int(rank) if rank.isdecimal() else 0, name

    return {name: files[name] for name in sorted(files, key=sort_key)}
