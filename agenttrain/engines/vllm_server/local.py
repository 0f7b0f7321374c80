"""Servers of a run: those that it starts and ends, on this machine, and those of others."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from agenttrain.engines.base import EngineError
from agenttrain.engines.config import ServersConfig
from agenttrain.engines.vllm_server import scratch
from agenttrain.engines.vllm_server.records import (
    FOLDER,
    PLAN,
    ServerPlan,
    ServerRecord,
    is_running,
    log_path,
    order_path,
    read_record,
    record_path,
)
from agenttrain.engines.vllm_server.wrapper import END_S
from agenttrain.engines.weights_place import new_weights_folder, remove_weights_folder
from agenttrain.utils.child_process import ChildProcess

MEMORY = Path("/dev/shm")
"""A file system in memory, where there is one."""
VERSIONS = 3
"""Versions of the weights that may be on disk at once: two, and one that is being written."""
LOOK_S = 0.1
"""Seconds between two looks whether an earlier server has ended."""
WRAPPER = "agenttrain.engines.vllm_server.wrapper"
"""Run as a module: in a third of the time that the command line takes to import."""


def weights_folder(run: Path, chosen: str | None, size: int, servers: ServersConfig) -> Path:
    """Return a new folder for the weight files of a run: in `chosen`, in memory, or in the run.

    `size`: bytes of one version. Outside servers see no other machine's memory.
    """
    if chosen is not None:
        parent = Path(chosen).expanduser()
    elif not servers.outside and not servers.nodes and _fits(VERSIONS * size):
        parent = MEMORY
    else:
        parent = run.resolve() / FOLDER
    return new_weights_folder(run, parent)


def _fits(size: int) -> bool:
    return MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > size


def remove_record(folder: Path, number: int) -> None:
    """Remove the record of a server that has ended, and what its killed processes left behind."""
    if (record := read_record(folder, number)) is not None:
        scratch.remove(record.scratch)
    record_path(folder, number).unlink(missing_ok=True)


def _append(log: Path, line: str) -> None:
    """Add a wrapper's line, e.g. of its traceback, to the log of its server."""
    with suppress(OSError), log.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")


class OutsideServers:
    """Servers that somebody else started: at the end only the weight files go, if any."""

    def __init__(self, run: Path) -> None:
        self._run = run

    def end(self) -> None:
        """Remove the weight files."""
        remove_weights_folder(self._run)


class NodeServers:
    """Servers of other nodes: `agenttrain engine-server` there waits for the plan of the run."""

    def __init__(self, folder: Path, plan: ServerPlan) -> None:
        """Write the plan; records of an earlier start of the run go, and its orders."""
        self._folder, self._plan = folder, plan
        for number in range(plan.servers["count"]):
            record_path(folder, number).unlink(missing_ok=True)
            # A wrapper without a record counts its starts from 1, which an old order may name.
            order_path(folder, number).unlink(missing_ok=True)
        plan.write(folder)

    def end(self) -> None:
        """Remove the weight files and the plan: the servers end when it is gone."""
        remove_weights_folder(self._folder)
        (self._folder / FOLDER / PLAN).unlink(missing_ok=True)


class LocalServers:
    """The wrappers of a run's servers.

    They end with this process, however it ends: each of them watches it.
    """

    def __init__(self, folder: Path, plan: ServerPlan, count: int) -> None:
        """Start them; raises EngineError if those of an earlier process still run."""
        self._folder, self._plan, self._count = folder, plan, count
        try:
            self._await_end_of_earlier()
        except EngineError:
            remove_weights_folder(folder)
            raise
        plan.write(folder)
        for number in range(count):
            remove_record(folder, number)
            log_path(folder, number).unlink(missing_ok=True)
        command = [sys.executable, "-m", WRAPPER, str(folder)]
        self._wrappers = []
        for number in range(count):
            wrapper = ChildProcess(
                [*command, str(number), str(os.getpid())],
                print_line=partial(_append, log_path(folder, number)),
            )
            self._wrappers.append(wrapper)
            # It may end before it has written one.
            ServerRecord.of(number, wrapper.pid).write_first(folder)

    def _await_end_of_earlier(self) -> None:
        deadline = time.monotonic() + 2 * END_S
        for number in range(self._count):
            while is_running(self._folder, number):
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"{record_path(self._folder, number)}: the server of an earlier process "
                        "still runs; end its wrapper, whose process number is in the file"
                    )
                time.sleep(LOOK_S)

    def end(self) -> None:
        """End all servers and remove their files; the logs stay."""
        for wrapper in self._wrappers:
            wrapper.signal(signal.SIGTERM)
        for wrapper in self._wrappers:
            wrapper.ended(2 * END_S)
            wrapper.kill()
        remove_weights_folder(self._folder)
        for number in range(self._count):
            remove_record(self._folder, number)
        (self._folder / FOLDER / PLAN).unlink(missing_ok=True)
