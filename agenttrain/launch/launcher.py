"""A run in several processes: one worker per device, on one node or several.

The launcher composes and checks the settings, as each worker does again. From then on it only
watches the workers, passes signals on, and reports which worker stopped first.
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
from contextlib import ExitStack, contextmanager, suppress
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

from agenttrain.engines.vllm_server.local import OWNER, end_servers
from agenttrain.launch.config import DistributedConfig, DistributedName
from agenttrain.launch.processes import (
    EXCHANGE,
    QUIET,
    WorkerCommand,
    node_rank,
    read_crash,
    resolve,
)
from agenttrain.launch.rendezvous import NotMet, meet
from agenttrain.launch.worker import SIGNAL_FILE
from agenttrain.launch.workers import PASSED_ON, WorkerEnd, Workers
from agenttrain.settings.command_line import Command, resuming
from agenttrain.settings.compose import Composed
from agenttrain.settings.pinning import pins
from agenttrain.settings.trust import TRUSTED
from agenttrain.tracking.run_folder import read_summary, update_summary
from agenttrain.training.heap import MAPPED_FROM_THE_START
from agenttrain.types import ConfigError
from agenttrain.utils.exit_codes import FAILED, INTERRUPTED, REFUSED, STALLED, TERMINATED

ELASTIC = (signal.SIGQUIT,)
"""Signals that elastic's agent handles by itself: it stops."""
UNFINISHED = ("running", "interrupted", "failed", None)
"""Statuses that summary.json may hold when a process of the run has died."""
WHY = {
    FAILED: "failed",
    REFUSED: "refused to start",
    STALLED: "was ended by the watchdog (stall-{rank}.txt has its stack)",
}


def run_workers(command: Command, composed: Composed, folder: Path, program: str) -> int:
    """Run a command in as many processes as the settings say; return the exit code.

    Raises ConfigError if this machine cannot run as many.
    """
    section = composed.config.distributed
    processes, node = resolve(section), node_rank(section)
    # The launcher has asked the user already whether a saved run's code may run.
    trusted = [TRUSTED] if command.saved is not None else pins(composed.config, command.verb)
    arguments = [*command.arguments, *trusted]
    restarts = 0 if command.verb == "eval" else section.restarts
    with ExitStack() as stack:
        if restarts:
            # The servers outlive the processes that start them; the next ones take them over.
            os.environ[OWNER] = str(os.getpid())
            stack.callback(end_servers, folder.resolve())
            stack.callback(os.environ.pop, OWNER)
        for left in range(restarts, -1, -1):
            words = WorkerCommand(
                arguments=arguments,
                program=program,
                verb=command.verb,
                folder=str(folder),
                sys_path=sys.path,
            )
            with tempfile.TemporaryDirectory(prefix="agenttrain-") as name:
                exchange = Path(name)
                try:
                    workers = _run_once(words, section, processes, node, exchange)
                except (NotMet, DistNetworkError, DistStoreError) as error:
                    print(f"agenttrain: {error}", file=sys.stderr)
                    return FAILED
                first = _first(workers, exchange)
                lost = first is not None and (first.code < 0 or first.code == STALLED)
                if not (left and lost) or workers.received:
                    return _verdict(workers, exchange, command.verb, folder, first_node=node == 0)
            assert first is not None
            print(
                f"agenttrain: {_named(first)} {_how(first, folder)}; the run goes on from its "
                f"newest checkpoint (distributed.restarts={restarts}, {left - 1} left)",
                file=sys.stderr,
            )
            arguments = [*resuming(command.verb).split(), f"resume={folder}", TRUSTED]
    raise AssertionError("the last attempt has a verdict")


def _run_once(
    words: WorkerCommand, section: DistributedConfig, processes: int, node: int, exchange: Path
) -> Workers:
    """Run the workers to their end; raises NotMet."""
    with _prepared(section, processes, exchange):
        spec = WorkerSpec(
            role="worker",
            local_world_size=processes,
            entrypoint=sys.executable,
            args=("-u", "-m", "agenttrain.launch.worker", json.dumps(asdict(words))),
            rdzv_handler=meet(section, node),
            max_restarts=0,
            monitor_interval=0.1,
        )
        workers = Workers(
            lambda ended: f"{_named(ended)} of node {node} {_how(ended)}",
            (exchange / SIGNAL_FILE).write_text,
            spec=spec,
            logs_specs=DefaultLogsSpecs(log_dir=str(exchange)),
        )
        # Elastic's own report of a failed worker; `_verdict` prints ours.
        logging.getLogger(MultiprocessContext.__module__).setLevel(logging.CRITICAL)
        try:
            workers.listen()
            workers.run()
        except SignalException as error:
            workers.received.append(error.sigval)
    return workers


@contextmanager
def _prepared(section: DistributedConfig, processes: int, exchange: Path) -> Iterator[None]:
    """Set the environment variables that the workers inherit; at the end restore the environment
    and this process's signal handlers."""
    share = max(len(os.sched_getaffinity(0)) // processes, 1)
    wanted = {"OMP_NUM_THREADS": str(share), **QUIET}
    if section.name is DistributedName.fsdp2:
        wanted |= MAPPED_FROM_THE_START
    if section.nodes == 1:
        wanted["GLOO_SOCKET_IFNAME"] = "lo"  # a host's own name may lead nowhere
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    added[EXCHANGE] = str(exchange)
    os.environ.update(added)
    handlers = {number: signal.getsignal(number) for number in (*PASSED_ON, *ELASTIC)}
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
        for number, handler in handlers.items():  # last: a restored one may raise
            with suppress(ValueError):  # not in the main thread
                signal.signal(number, handler)


def _first(workers: Workers, exchange: Path) -> WorkerEnd | None:
    """Return the worker that made the others end, of those that ended together the first one that
    did not end for a peer's sake; None: they finished, or were asked to stop."""

    def when(ended: WorkerEnd) -> tuple[bool, bool, float]:
        crash = read_crash(exchange, ended.rank)
        return ended.code >= 0, crash.get("of_peer", False), crash.get("time", time.time())

    return min(workers.early, key=when, default=None)


def _verdict(workers: Workers, exchange: Path, verb: str, folder: Path, *, first_node: bool) -> int:
    """Return the run's exit code; print and record what the first rank could not report itself."""
    first = _first(workers, exchange)
    if first is None and workers.other_node is None:  # they finished, or were asked to stop
        lowest = min(workers.ended, default=None)
        code = workers.ended[lowest].code if lowest is not None else INTERRUPTED
        if code in (INTERRUPTED, TERMINATED) or code < 0:
            code = INTERRUPTED if signal.SIGINT in workers.received else TERMINATED
            if first_node:
                _record(folder, {"running": "interrupted"})
        return code
    crash: dict[str, Any] = {}
    if first is None:
        message = str(workers.other_node)
    else:
        crash = read_crash(exchange, first.rank)
        if first.code == REFUSED and crash:
            raise ConfigError(crash["error"])
        for line in crash.get("trace", "").splitlines():
            print(f"rank {first.rank}: {line}", file=sys.stderr)
        message = f"{_named(first)} {_how(first, folder, crash.get('error'))}"
    for rank in workers.killed:
        pid = workers.ended[rank].pid
        message += f"; rank {rank} (process {pid}) did not answer and was killed"
    reports_itself = first is not None and first.rank == 0 and first.code > 0
    if not reports_itself or crash.get("of_peer") or workers.killed:
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
    """Change the status in summary.json that the first rank had no time to change."""
    status = read_summary(folder).get("status")
    if status in statuses:
        with suppress(OSError):
            update_summary(folder, status=statuses[status], error=error)
