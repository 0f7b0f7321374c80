"""A run in several processes: one worker per device, on one node or several.

The launcher composes and checks, as each worker does again; from then on it only watches, passes
signals on, and reports which worker was the first to go.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    MultiprocessContext,
    SignalException,
)

from agenttrain.launch.config import DistributedConfig
from agenttrain.launch.processes import (
    EXCHANGE,
    QUIET,
    WorkerCommand,
    node_rank,
    read_crash,
    resolve,
)
from agenttrain.launch.rendezvous import NotMet, meet
from agenttrain.launch.worker import TOLD
from agenttrain.launch.workers import PASSED_ON, WorkerEnd, Workers
from agenttrain.settings.command_line import Command, resuming
from agenttrain.settings.compose import Composed
from agenttrain.settings.trust import TRUSTED
from agenttrain.tracking.run_folder import read_summary, update_summary
from agenttrain.types import ConfigError
from agenttrain.utils.exit_codes import FAILED, INTERRUPTED, REFUSED, STALLED, TERMINATED

ELASTIC = (signal.SIGQUIT,)
"""Signals that elastic's agent handles by itself: it stops."""
UNFINISHED = ("running", "interrupted", "failed", None)
"""Statuses that summary.json may hold for a run that a process did not survive."""
WHY = {
    FAILED: "failed",
    REFUSED: "refused to start",
    STALLED: "was ended by the watchdog (stall-{rank}.txt says where it stood)",
}


def run_workers(command: Command, composed: Composed, folder: Path, program: str) -> int:
    """Run a command in as many processes as the settings say; return the exit code.

    Raises ConfigError where this machine cannot run as many.
    """
    section = composed.config.distributed
    processes, node = resolve(section), node_rank(section)
    shared = WorkerCommand(
        # The user has let the saved run's code run already, where that was asked.
        arguments=[*command.arguments, *([TRUSTED] if command.saved is not None else [])],
        program=program,
        verb=command.verb,
        folder=str(folder),
        sys_path=sys.path,
    )
    with tempfile.TemporaryDirectory(prefix="agenttrain-") as name:
        exchange = Path(name)
        try:
            with _environment(section, processes, exchange):
                spec = WorkerSpec(
                    role="worker",
                    local_world_size=processes,
                    entrypoint=sys.executable,
                    args=("-u", "-m", "agenttrain.launch.worker", json.dumps(asdict(shared))),
                    rdzv_handler=meet(section, node),
                    max_restarts=0,
                    monitor_interval=0.1,
                )
                workers = Workers(
                    lambda ended: f"{_named(ended)} of node {node} {_how(ended)}",
                    (exchange / TOLD).write_text,
                    spec=spec,
                    logs_specs=DefaultLogsSpecs(log_dir=str(exchange)),
                )
                # Elastic's own report of a failed worker; `_verdict` prints ours.
                logging.getLogger(MultiprocessContext.__module__).setLevel(logging.CRITICAL)
                with _signals_restored():
                    try:
                        workers.listen()
                        workers.run()
                    except SignalException as error:
                        workers.asked.append(error.sigval)
        except (NotMet, DistNetworkError, DistStoreError) as error:
            print(f"agenttrain: {error}", file=sys.stderr)
            return FAILED
        return _verdict(workers, exchange, command.verb, folder, first_node=node == 0)


@contextmanager
def _environment(section: DistributedConfig, processes: int, exchange: Path) -> Iterator[None]:
    """Set the variables that the workers inherit, until they have ended."""
    share = max(len(os.sched_getaffinity(0)) // processes, 1)
    wanted = {"OMP_NUM_THREADS": str(share), **QUIET}
    if section.nodes == 1:
        wanted["GLOO_SOCKET_IFNAME"] = "lo"  # a host's own name may lead nowhere
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    added[EXCHANGE] = str(exchange)
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextmanager
def _signals_restored() -> Iterator[None]:
    """Undo what the workers make of this process's signals."""
    handlers = {number: signal.getsignal(number) for number in (*PASSED_ON, *ELASTIC)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            with suppress(ValueError):
                signal.signal(number, handler)


def _verdict(workers: Workers, exchange: Path, verb: str, folder: Path, *, first_node: bool) -> int:
    """Return the run's exit code; print and record what the first rank could not."""

    def when(ended: WorkerEnd) -> tuple[bool, bool, float]:
        crash = read_crash(exchange, ended.rank)
        return ended.code >= 0, crash.get("of_peer", False), crash.get("time", time.time())

    # The cause of several that went together: the first to go that did not go for another's sake.
    first = min(workers.early, key=when, default=None)
    if first is None and workers.far is None:  # they were done, or were asked to stop
        lowest = min(workers.ended, default=None)
        code = workers.ended[lowest].code if lowest is not None else INTERRUPTED
        if code in (INTERRUPTED, TERMINATED) or code < 0:
            code = INTERRUPTED if signal.SIGINT in workers.asked else TERMINATED
            if first_node:
                _record(folder, {"running": "interrupted"})
        return code
    crash: dict[str, Any] = {}
    if first is None:
        message = str(workers.far)
    else:
        crash = read_crash(exchange, first.rank)
        if first.code == REFUSED and crash:
            raise ConfigError(crash["error"])
        for line in crash.get("trace", "").splitlines():
            print(f"rank {first.rank}: {line}", file=sys.stderr)
        message = f"{_named(first)} {_how(first, folder, crash.get('error'))}"
    for rank in workers.silent:
        pid = workers.ended[rank].pid
        message += f"; rank {rank} (process {pid}) did not answer and was killed"
    says_it_itself = first is not None and first.rank == 0 and first.code > 0
    if not says_it_itself or crash.get("of_peer") or workers.silent:
        again = f"agenttrain {resuming(verb)}resume={quote(str(folder))}"
        remedy = "" if verb == "eval" else f". To go on: {again}"
        print(f"agenttrain: {message}; the other processes were stopped{remedy}", file=sys.stderr)
        if first_node:
            _record(folder, dict.fromkeys(UNFINISHED, "failed"), message)
    return first.code if first is not None and first.code > 0 else FAILED


def _named(ended: WorkerEnd) -> str:
    return f"rank {ended.rank} (process {ended.pid} on {socket.gethostname()})"


def _how(ended: WorkerEnd, folder: Path | None = None, error: str | None = None) -> str:
    if ended.code < 0:
        how = f"was killed by {signal.Signals(-ended.code).name}"
    else:
        how = WHY.get(ended.code, f"ended with exit code {ended.code}").format(rank=ended.rank)
    how += f": {error}" if error else ""
    if folder is not None and ended.rank != 0:
        how += f" (its log: {folder / 'logs' / f'rank-{ended.rank}.log'})"
    return how


def _record(folder: Path, statuses: dict[str | None, str], error: str | None = None) -> None:
    """Change the status that the first rank left, where it had not the time to."""
    status = read_summary(folder).get("status")
    if status in statuses:
        with suppress(OSError):
            update_summary(folder, status=statuses[status], error=error)
