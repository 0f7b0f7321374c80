"""Starting and ending the servers of a run: on this machine, on its nodes, or outside ones."""

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
from agenttrain.engines.vllm_server.server_records import (
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
from agenttrain.engines.weights_place import VERSIONS, new_weights_folder, remove_weights_folder
from agenttrain.utils.child_process import ChildProcess
from agenttrain.utils.process_ids import process_exists

POLL_S = 0.1
"""Seconds between two checks whether an earlier server has ended."""
WRAPPER = "agenttrain.engines.vllm_server.wrapper"
"""Run as a module: it imports in a third of the command line's time."""


def weights_folder(run: Path, sync_folder: str | None, size: int, servers: ServersConfig) -> Path:
    """Create a folder for weights of `size` bytes: in `sync_folder`, in memory, or in the run.

    `sync_folder` is weight_sync.folder. Servers of other machines do not see this one's memory.
    """
    is_local = not servers.outside and not servers.nodes and scratch.MEMORY.is_dir()
    if sync_folder is not None:
        parent = Path(sync_folder).expanduser()
    elif is_local and shutil.disk_usage(scratch.MEMORY).free > VERSIONS * size:
        parent = scratch.MEMORY
    else:
        parent = run.resolve() / FOLDER
    return new_weights_folder(run, parent)


def remove_record(folder: Path, number: int) -> None:
    """Remove the record of a server that has ended, and files that its killed processes left."""
    if (record := read_record(folder, number)) is not None:
        scratch.remove(record.scratch)
    record_path(folder, number).unlink(missing_ok=True)
    update_path(folder, number).unlink(missing_ok=True)


def _append(log: Path, line: str) -> None:
    """Append a line that a wrapper printed, e.g. of a traceback, to the log of its server."""
    with suppress(OSError), log.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")


def plan_node_servers(folder: Path, plan: ServerPlan) -> None:
    """Write the plan for which `agenttrain engine-server` waits on other nodes.

    Records and orders of an earlier start of the run are removed.
    """
    for number in range(plan.servers["count"]):
        record_path(folder, number).unlink(missing_ok=True)
        # Without its record a wrapper counts its starts from 1 again. An old order to kill start 1
        # would then kill the new server.
        order_path(folder, number).unlink(missing_ok=True)
    plan.write(folder)


def end_node_servers(folder: Path) -> None:
    """Remove the weight files and the plan. The servers end when they miss the plan."""
    if launcher_of(folder) is None:
        _end(folder, {})


class KeptWrapper:
    """A wrapper that an earlier process of the run started, with the methods of `ChildProcess`.

    It is no child of this process, which knows it by its record alone.
    """

    def __init__(self, record: ServerRecord) -> None:
        self._record = record

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the wrapper, unless it has ended."""
        if self._record.wrapper_exists:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self._record.wrapper, number)

    def wait_for_end(self, timeout_s: float) -> bool:
        """Wait for the wrapper's end. Return False if it still runs after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self._record.wrapper_exists:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def kill(self) -> None:
        """End the wrapper, and its server, which ends with it."""
        self.signal(signal.SIGKILL)


class LocalServers:
    """The servers of a run on this machine, each behind a wrapper.

    Each wrapper watches this process and ends with it, however it ends. Under a launcher that
    restarts its run (`distributed.restarts`) they watch the launcher instead, and outlive this
    process. The next process of the run reuses the servers that it can (`reusable_servers`), ends
    the others, and starts new ones.
    """

    def __init__(self, folder: Path, plan: ServerPlan, count: int) -> None:
        """Take the settings of the servers; `start` starts them."""
        self._folder, self._plan, self._count = folder, plan, count
        self._wrappers: list[ChildProcess | KeptWrapper] = []
        """The wrappers that were started or are reused, by the number of their server."""

    def start(self) -> None:
        """Start the servers, but for those of the run's former process that can be reused.

        Under a launcher servers outlive the process that started them. Those that cannot be reused
        are ended first. Raises EngineError if one of them does not end.
        """
        folder = self._folder
        reused = reusable_servers(folder, self._plan)  # by number
        try:
            self._await_end_of_former([n for n in range(self._count) if n not in reused])
        except EngineError:
            # This process's new folder: `weights_folder` made it, and no server will read it.
            remove_weights_folder(folder)
            raise
        self._plan.write(folder)
        command = [sys.executable, "-m", WRAPPER, str(folder)]
        owner = launcher_of(folder) or os.getpid()  # the wrappers end with this process
        for number in range(self._count):
            if number in reused:  # its wrapper goes on, but is no child of this process
                self._wrappers.append(KeptWrapper(reused[number]))
                continue
            remove_record(folder, number)
            log_path(folder, number).unlink(missing_ok=True)
            wrapper = ChildProcess(
                [*command, str(number), str(owner)],
                keeper=False,  # the wrapper itself watches its owner, which may be another process
                print_line=partial(_append, log_path(folder, number)),
            )
            self._wrappers.append(wrapper)
            # Written here too: the wrapper may end before it has written a record.
            ServerRecord.of(number, wrapper.pid).write_first(folder)

    def _await_end_of_former(self, numbers: Sequence[int]) -> None:
        """Wait until servers of a former process have ended. Raises EngineError if one goes on."""
        from agenttrain.engines.vllm_server.wrapper import END_S  # imports httpx

        # A wrapper kills its server after END_S. Without a launcher all wrappers end at once: with
        # the process that started them. A launcher keeps them running, so each gets a signal.
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
                time.sleep(POLL_S)

    def end(self) -> None:
        """End all servers and remove their files except the logs, unless a launcher owns them."""
        if launcher_of(self._folder) is None:
            _end(self._folder, dict(enumerate(self._wrappers)))


def launcher_of(folder: Path) -> int | None:
    """Return the process id of the launcher that owns a folder's servers, or None.

    The launcher sets the environment variable `SERVERS_OWNER` to ``<its process id> <run folder>``.
    It owns the servers of the run, and those of its roles, whose folders are in the run's.
    """
    pid, _, run = os.environ.get(SERVERS_OWNER, "").partition(" ")
    if not pid:
        return None
    path = folder.resolve()
    is_of_run = Path(run) in (path, *path.parents)
    return int(pid) if is_of_run and process_exists(int(pid)) else None


def reusable_servers(folder: Path, plan: ServerPlan) -> dict[int, ServerRecord]:
    """Return the records of a former process's servers that can be reused, by server number.

    They still run, by the same plan, and no weight update of theirs was cut short. With weights by
    broadcast none is reused, because the servers wait for the former sender. With adapters none is
    reused, because the servers have adapters of steps that are now trained again.
    """
    has_adapters = plan.rank > 0  # rank of LoRA; 0: no adapters
    is_broadcast = plan.backend != BACKEND  # BACKEND: weights come by files
    if launcher_of(folder) is None or has_adapters or is_broadcast:
        return {}
    try:
        former_plan = ServerPlan.read(folder)
    except OSError:
        return {}
    # Compared as JSON, from which the former plan was read: tuples became lists. `weights` is left
    # out: each process of the run makes a folder of its own.
    plans = [json.dumps(asdict(replace(p, weights=None))) for p in (plan, former_plan)]
    if plans[0] != plans[1]:
        return {}
    servers = {}
    for number in range(plan.servers["count"]):
        record = read_record(folder, number)
        # Without its wrapper's start time another process may have taken the wrapper's id.
        if record is not None and record.wrapper_started and is_running(folder, number):
            # The former process wrote the number of the server's start (`boot`) to this file, and
            # removed it once the server had all weights of an update.
            update = update_path(folder, number)
            is_mixed = update.exists() and update.read_text(encoding="utf-8") == str(record.boot)
            if not is_mixed:
                servers[number] = record
    return servers


def server_records(run: Path) -> list[tuple[Path, ServerRecord]]:
    """Return the records of a run's servers on this machine, each with its folder."""
    records = []
    for folder in (run, *(run / OF_ROLES).glob("*")):
        for path in (folder / FOLDER).glob("[0-9]*.json"):  # plan.json and the like are no records
            record = read_record(folder, int(path.stem))
            if record is not None and record.host == socket.gethostname():
                records.append((folder, record))
    return records


def server_wrappers(run: Path) -> list[int]:
    """Implement `EngineSpec.server_wrappers`."""
    return [record.wrapper for _, record in server_records(run)]


def end_servers(run: Path) -> None:
    """Implement `EngineSpec.end_servers`. Servers of other machines end when they miss the plan."""
    records = server_records(run)
    for folder in {run, *(folder for folder, _ in records)}:  # and the folders of its roles
        wrappers = {record.number: KeptWrapper(record) for f, record in records if f == folder}
        _end(folder, wrappers)


def _end(folder: Path, wrappers: Mapping[int, ChildProcess | KeptWrapper]) -> None:
    """End wrappers, with their servers, and remove the files of the servers except the logs."""
    from agenttrain.engines.vllm_server.wrapper import END_S

    for wrapper in wrappers.values():
        wrapper.signal(signal.SIGTERM)
    for wrapper in wrappers.values():
        # A wrapper gives its server END_S before it kills it.
        wrapper.wait_for_end(2 * END_S)
        wrapper.kill()
    remove_weights_folder(folder)
    for number in wrappers:
        remove_record(folder, number)
    (folder / FOLDER / PLAN).unlink(missing_ok=True)
