"""Servers of a run: those that it starts and ends, on this machine, and those of others."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from agenttrain.engines.base import EngineError
from agenttrain.engines.config import ServersConfig
from agenttrain.engines.vllm_server import scratch
from agenttrain.engines.vllm_server.files_transport import BACKEND
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
from agenttrain.engines.vllm_server.status import OF_ROLES
from agenttrain.engines.vllm_server.wrapper import END_S
from agenttrain.engines.weights_place import new_weights_folder, remove_weights_folder
from agenttrain.utils.child_process import ChildProcess

MEMORY = Path("/dev/shm")
"""A file system in memory, where there is one."""
VERSIONS = 3
"""Versions of the weights that may be on disk at once: two, and one that is being written."""
LOOK_S = 0.1
"""Seconds between two looks whether an earlier server has ended."""
OWNER = "AGENTTRAIN_SERVERS_OWNER"
"""Environment variable: the process, by its number, with which the servers of a run end, if that is
not the one that starts them."""
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
        if OWNER not in os.environ:
            _end(self._folder, {})


class KeptWrapper:
    """The wrapper of a server that an earlier process of the run has started."""

    def __init__(self, record: ServerRecord) -> None:
        self._record = record

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        if self._record.wrapper_exists:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self._record.wrapper, number)

    def ended(self, timeout_s: float) -> bool:
        """Wait for its end; return False if it still runs."""
        deadline = time.monotonic() + timeout_s
        while self._record.wrapper_exists:
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK_S)
        return True

    def kill(self) -> None:
        """End it, with its server, which follows it."""
        self.signal(signal.SIGKILL)


class LocalServers:
    """The wrappers of a run's servers.

    They end with this process, however it ends: each of them watches it. Where the environment
    names another owner, the launcher of a run that restarts its processes, they end with that one,
    and the next process of the run takes them over if it wants the same.
    """

    def __init__(self, folder: Path, plan: ServerPlan, count: int) -> None:
        """Start them; raises EngineError if those of an earlier process still run."""
        self._folder, self._count = folder, count
        takes = taken_over(folder, plan) is not None
        kept = {
            number: read_record(folder, number) if takes and is_running(folder, number) else None
            for number in range(count)
        }
        try:
            self._await_end_of_earlier([number for number in kept if kept[number] is None])
        except EngineError:
            remove_weights_folder(folder)
            raise
        plan.write(folder)
        command = [sys.executable, "-m", WRAPPER, str(folder)]
        owner = os.environ.get(OWNER, str(os.getpid()))
        self._wrappers: list[ChildProcess | KeptWrapper] = []
        for number, record in kept.items():
            if record is not None:
                self._wrappers.append(KeptWrapper(record))
                continue
            remove_record(folder, number)
            log_path(folder, number).unlink(missing_ok=True)
            wrapper = ChildProcess(
                [*command, str(number), owner],
                print_line=partial(_append, log_path(folder, number)),
            )
            self._wrappers.append(wrapper)
            # It may end before it has written one.
            ServerRecord.of(number, wrapper.pid).write_first(folder)

    def _await_end_of_earlier(self, numbers: Sequence[int]) -> None:
        deadline = time.monotonic() + 2 * END_S
        for number in numbers:
            record = read_record(self._folder, number)
            if OWNER in os.environ and record is not None and is_running(self._folder, number):
                KeptWrapper(record).signal(signal.SIGTERM)
            while is_running(self._folder, number):
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"{record_path(self._folder, number)}: the server of an earlier process "
                        "still runs; end its wrapper, whose process number is in the file"
                    )
                time.sleep(LOOK_S)

    def end(self) -> None:
        """End all servers and remove their files; the logs stay. Another owner ends its own."""
        if OWNER not in os.environ:
            _end(self._folder, dict(enumerate(self._wrappers)))


def taken_over(folder: Path, plan: ServerPlan) -> ServerPlan | None:
    """Return the plan of servers that an earlier process of this run has started and left.

    None: there are none, or they cannot be taken over. They must have been started with the same
    plan. A broadcast whose sender has ended still holds its servers, and servers with adapters have
    those of steps that are trained again.
    """
    count = plan.servers["count"]
    if OWNER not in os.environ or not any(is_running(folder, one) for one in range(count)):
        return None
    try:
        earlier = ServerPlan.read(folder)
    except OSError:
        return None
    wanted, given = (json.dumps(asdict(replace(one, weights=None))) for one in (plan, earlier))
    return earlier if wanted == given and not plan.rank and plan.backend == BACKEND else None


def end_servers(run: Path) -> None:
    """End all servers of a run, those of its roles too, and remove their files; the logs stay.

    For the launcher that owns them. Servers of other machines end when they miss the plan.
    """
    for folder in (run, *(run / OF_ROLES).glob("*")):
        numbers = [int(path.stem) for path in (folder / FOLDER).glob("[0-9]*.json")]
        records = {number: read_record(folder, number) for number in numbers}
        _end(
            folder,
            {
                number: KeptWrapper(record)
                for number, record in records.items()
                if record is not None and record.host == socket.gethostname()
            },
        )


def _end(folder: Path, wrappers: Mapping[int, ChildProcess | KeptWrapper]) -> None:
    for wrapper in wrappers.values():
        wrapper.signal(signal.SIGTERM)
    for wrapper in wrappers.values():
        wrapper.ended(2 * END_S)
        wrapper.kill()
    remove_weights_folder(folder)
    for number in wrappers:
        remove_record(folder, number)
    (folder / FOLDER / PLAN).unlink(missing_ok=True)
