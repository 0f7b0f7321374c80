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
from agenttrain.engines.spec import SERVERS_OWNER
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
    update_path,
)
from agenttrain.engines.vllm_server.status import OF_ROLES
from agenttrain.engines.weights_place import new_weights_folder, remove_weights_folder
from agenttrain.utils.child_process import ChildProcess
from agenttrain.utils.processes import process_exists

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
    seen = not servers.outside and not servers.nodes and MEMORY.is_dir()
    if chosen is not None:
        parent = Path(chosen).expanduser()
    elif seen and shutil.disk_usage(MEMORY).free > VERSIONS * size:
        parent = MEMORY
    else:
        parent = run.resolve() / FOLDER
    return new_weights_folder(run, parent)


def remove_record(folder: Path, number: int) -> None:
    """Remove the record of a server that has ended, and what its killed processes left behind."""
    if (record := read_record(folder, number)) is not None:
        scratch.remove(record.scratch)
    record_path(folder, number).unlink(missing_ok=True)
    update_path(folder, number).unlink(missing_ok=True)


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
        if launcher_of(self._folder) is None:
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

    They end with this process, however it ends: each of them watches it. The servers of a launcher
    that restarts its run (`distributed.restarts`) end with the launcher, and the next process of
    the run reuses them.
    """

    def __init__(self, folder: Path, plan: ServerPlan, count: int) -> None:
        """Start them; raises EngineError if those of an earlier process still run."""
        self._folder, self._count = folder, count
        reused = reusable(folder, plan)
        try:
            self._await_end_of_earlier([one for one in range(count) if one not in reused])
        except EngineError:
            remove_weights_folder(folder)
            raise
        plan.write(folder)
        command = [sys.executable, "-m", WRAPPER, str(folder)]
        owner = launcher_of(folder) or os.getpid()
        self._wrappers: list[ChildProcess | KeptWrapper] = []
        for number in range(count):
            if number in reused:
                self._wrappers.append(KeptWrapper(reused[number]))
                continue
            remove_record(folder, number)
            log_path(folder, number).unlink(missing_ok=True)
            wrapper = ChildProcess(
                [*command, str(number), str(owner)],
                print_line=partial(_append, log_path(folder, number)),
            )
            self._wrappers.append(wrapper)
            # It may end before it has written one.
            ServerRecord.of(number, wrapper.pid).write_first(folder)

    def _await_end_of_earlier(self, numbers: Sequence[int]) -> None:
        from agenttrain.engines.vllm_server.wrapper import END_S  # imports httpx

        deadline = time.monotonic() + 2 * END_S
        for number in numbers:
            record = read_record(self._folder, number)
            if record is not None and launcher_of(self._folder) is not None:
                KeptWrapper(record).signal(signal.SIGTERM)
            while is_running(self._folder, number):
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"{record_path(self._folder, number)}: the server of an earlier process "
                        "still runs; end its wrapper, whose process number is in the file"
                    )
                time.sleep(LOOK_S)

    def end(self) -> None:
        """End all servers and remove their files; the logs stay. A launcher ends its own."""
        if launcher_of(self._folder) is None:
            _end(self._folder, dict(enumerate(self._wrappers)))


def launcher_of(folder: Path) -> int | None:
    """Return the process number of the launcher that owns the servers of the run in `folder`, or of
    its roles; None: the process that starts them does."""
    number, _, run = os.environ.get(SERVERS_OWNER, "").partition(" ")
    own = folder.resolve()
    owns = bool(number) and Path(run) in (own, *own.parents) and process_exists(int(number))
    return int(number) if owns else None


def reusable(folder: Path, plan: ServerPlan) -> dict[int, ServerRecord]:
    """Return the servers, by number, that an earlier process of this run has left to the launcher.

    They have the same plan, and no update of their weights was cut short. A broadcast whose sender
    has ended still holds its servers, and servers with adapters have those of steps that are
    trained again: none of these can be reused.
    """
    if launcher_of(folder) is None or plan.rank or plan.backend != BACKEND:
        return {}
    try:
        earlier = ServerPlan.read(folder)
    except OSError:
        return {}
    if len({json.dumps(asdict(replace(one, weights=None))) for one in (plan, earlier)}) > 1:
        return {}
    servers = {}
    for number in range(plan.servers["count"]):
        record = read_record(folder, number)
        if record is not None and record.wrapper_started and is_running(folder, number):
            update = update_path(folder, number)
            if not (update.exists() and update.read_text(encoding="utf-8") == str(record.boot)):
                servers[number] = record
    return servers


def server_records(run: Path) -> list[tuple[Path, ServerRecord]]:
    """Return the records of a run's servers on this machine, and of its roles', with their folder:
    the run's, or the role's in it."""
    records = []
    for folder in (run, *(run / OF_ROLES).glob("*")):
        for path in (folder / FOLDER).glob("[0-9]*.json"):
            record = read_record(folder, int(path.stem))
            if record is not None and record.host == socket.gethostname():
                records.append((folder, record))
    return records


def server_wrappers(run: Path) -> list[int]:
    """Implement `EngineSpec.server_wrappers`."""
    return [record.wrapper for _, record in server_records(run)]


def end_servers(run: Path) -> None:
    """Implement `EngineSpec.end_servers`; servers of other machines end when they miss the plan."""
    records = server_records(run)
    for folder in {run, *(folder for folder, _ in records)}:
        _end(folder, {r.number: KeptWrapper(r) for own, r in records if own == folder})


def _end(folder: Path, wrappers: Mapping[int, ChildProcess | KeptWrapper]) -> None:
    from agenttrain.engines.vllm_server.wrapper import END_S

    for wrapper in wrappers.values():
        wrapper.signal(signal.SIGTERM)
    for wrapper in wrappers.values():
        wrapper.ended(2 * END_S)
        wrapper.kill()
    remove_weights_folder(folder)
    for number in wrappers:
        remove_record(folder, number)
    (folder / FOLDER / PLAN).unlink(missing_ok=True)
