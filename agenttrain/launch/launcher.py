"""A run in several processes: one worker per device, on one node or several.

The launcher composes and checks the settings, as each worker does again. From then on it only
watches the workers, forwards signals, and reports which worker stopped first.

The workers have no keeper, because torch elastic's agent starts them: they call `end_with_parent`.
Nor could a keeper know which servers outlive a worker (`distributed.restarts`).
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from threading import current_thread, main_thread
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    MultiprocessContext,
    SignalException,
)

from agenttrain.engines.registry import specs
from agenttrain.engines.spec import SERVERS_OWNER
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
from agenttrain.settings.command_line import TRUSTED, Command, resuming
from agenttrain.settings.compose import Composed
from agenttrain.settings.pinning import pins
from agenttrain.tracking.run_folder import read_summary, update_summary
from agenttrain.training.checkpoint_files import newest_first
from agenttrain.training.heap import MAPPED_FROM_THE_START
from agenttrain.types import ConfigError
from agenttrain.utils.child_process import how_ended
from agenttrain.utils.exit_codes import DONE, FAILED, INTERRUPTED, REFUSED, STALLED, TERMINATED
from agenttrain.utils.keeper import adopt_orphans, end_children
from agenttrain.utils.temporary import TemporaryFolder

ELASTIC = (signal.SIGQUIT,)
"""Signals that elastic's agent handles by itself: it stops."""
ORPHANS_S = 5.0
"""Seconds for the orphaned processes of dead workers to end."""
UNFINISHED = ("running", "interrupted", "failed", None)
"""Statuses that summary.json may hold when a process of the run has died."""
PEER_GONE = (
    r"^WorldTimeout|^DistNetworkError|Connection (closed|reset) by peer|remote process exited"
)
"""Errors of a process whose peer was killed, as gloo, NCCL and the store report it."""
WHY = {
    FAILED: "failed",
    REFUSED: "refused to start",
    STALLED: "was ended by the watchdog (stall-{rank}.txt has its stack)",
}


def run_workers(command: Command, composed: Composed, folder: Path, program: str) -> int:
    """Run a command in the processes of `distributed`; return the exit code. Raises ConfigError.

    If a worker was killed, all are started again, up to `distributed.restarts` times.
    """
    section = composed.config.distributed
    processes, node = resolve(section), node_rank(section)
    # The workers compose the settings again. What is decided already is added: that a saved run's
    # code may run, or which revisions of the hub a new run uses.
    decided = [TRUSTED] if command.saved is not None else pins(composed, command.verb)
    arguments = [*command.arguments, *decided]
    # An eval writes no checkpoint from which it could go on.
    restarts = 0 if command.verb == "eval" else section.restarts
    received: list[signal.Signals] = []
    was_finished = _is_finished(folder)  # by an earlier command: a finished run is resumed
    with ExitStack() as stack:
        # `Workers` handles these signals, also between two starts: restore the handlers at the end.
        if current_thread() is main_thread():
            for number in (*PASSED_ON, *ELASTIC):
                stack.callback(signal.signal, number, signal.getsignal(number))
        if restarts:
            _take_over_servers(folder.resolve(), stack)
            adopt_orphans()  # for `_end_orphans`
        for restarts_left in range(restarts, -1, -1):  # the first start, and each restart
            worker_args = WorkerCommand(
                arguments=arguments,
                program=program,
                verb=command.verb,
                folder=str(folder),
                sys_path=sys.path,
            )
            with TemporaryFolder() as exchange:
                try:
                    workers = _run_once(worker_args, section, processes, node, exchange, received)
                except (NotMet, DistNetworkError, DistStoreError) as error:
                    print(f"agenttrain: {error}", file=sys.stderr)
                    return FAILED
                # True if a worker failed after the run's end, for which nothing is to be repeated.
                has_finished = _is_finished(folder) and not was_finished
                is_restarted = (
                    restarts_left > 0 and not has_finished and _is_restartable(workers, exchange)
                )
                if not is_restarted:
                    return _report(workers, exchange, command.verb, folder, first_node=node == 0)
                first = _first_failure(workers, exchange)
            assert first is not None, "`_is_restartable` is False without one"
            _print_restart(first, folder, restarts=restarts, restarts_left=restarts_left - 1)
            _end_orphans(folder)
            # A new run that has begun is resumed by its next workers.
            if command.saved is None and (folder / "config.yaml").exists():
                words = resuming(command.verb).split()
                arguments = [*words, f"resume={folder.resolve()}", TRUSTED]
    raise AssertionError("unreachable: the last start returns")


def _take_over_servers(folder: Path, stack: ExitStack) -> None:
    """Make this launcher the owner of a run's servers, which are ended when `stack` closes.

    Workers that find SERVERS_OWNER in their environment leave the servers running when they end, so
    that the workers of a restart can use them.
    """
    os.environ[SERVERS_OWNER] = f"{os.getpid()} {folder}"
    # Of all engines: a role, such as a judge, may have servers of another engine than the policy.
    for spec in specs().values():
        if spec.end_servers is not None:
            stack.callback(spec.end_servers, folder)
    # The last callback runs first: nobody is the owner any more when the servers are ended.
    stack.callback(os.environ.pop, SERVERS_OWNER)


def _print_restart(first: WorkerEnd, folder: Path, *, restarts: int, restarts_left: int) -> None:
    """Print why the run is restarted, and from where."""
    checkpoints = newest_first(folder / "checkpoints")
    print(
        f"agenttrain: {_rank_name(first)} {_how(first, folder)}; the run is restarted from "
        f"{f'checkpoints/{checkpoints[0].name}' if checkpoints else 'its beginning'} "
        f"(distributed.restarts={restarts}, {restarts_left} left)",
        file=sys.stderr,
    )


def _is_finished(folder: Path) -> bool:
    return read_summary(folder).get("status") == "finished"


def _is_restartable(workers: Workers, exchange: Path) -> bool:
    """Return True if a signal or the watchdog ended the worker that failed first.

    Return False nevertheless if the run was asked to stop, or a worker had an error of its own,
    which it would have again.
    """
    first = _first_failure(workers, exchange)
    if first is None or workers.received:
        return False
    for ended in workers.failed:
        crash = read_crash(exchange, ended.rank)  # empty for a worker that was killed
        # After the death of a worker its peers fail too: such an error does not come again.
        is_caused_by_peer = crash and (crash["of_peer"] or re.search(PEER_GONE, crash["error"]))
        if crash and not is_caused_by_peer:
            return False
    was_killed = first.code < 0  # minus the number of the signal
    return was_killed or first.code == STALLED


def _end_orphans(folder: Path) -> None:
    """Kill the orphaned processes of dead workers, such as a rollout process, except servers."""
    list_wrappers = [s.server_wrappers for s in specs().values() if s.server_wrappers is not None]
    server_pids = {pid for wrappers in list_wrappers for pid in wrappers(folder)}
    end_children(spared=server_pids, limit_s=ORPHANS_S)


def _run_once(
    command: WorkerCommand,
    section: DistributedConfig,
    processes: int,
    node: int,
    exchange: Path,
    received: list[signal.Signals],
) -> Workers:
    """Start the workers and wait for their end; raises NotMet if another node does not come.

    `exchange` is the folder by which the launcher and its workers exchange files.

    `received` are the signals of this launcher so far; new ones are added. Workers that start after
    a signal get it.
    """
    added = _worker_variables(section, processes, exchange)
    os.environ.update(added)  # the workers inherit them
    try:
        spec = WorkerSpec(
            role="worker",
            local_world_size=processes,
            entrypoint=sys.executable,
            args=("-u", "-m", "agenttrain.launch.worker", json.dumps(asdict(command))),
            rdzv_handler=meet(section, node),
            max_restarts=0,  # elastic's: `run_workers` decides on restarts itself
            monitor_interval=0.1,
        )
        workers = Workers(
            describe=lambda ended: f"{_rank_name(ended)} of node {node} {_how(ended)}",
            announce=(exchange / SIGNAL_FILE).write_text,
            spec=spec,
            logs_specs=DefaultLogsSpecs(log_dir=str(exchange)),
        )
        workers.received = received  # the same list, so that the caller sees new signals
        # Silence elastic's report of a failed worker: `_report` prints ours.
        logging.getLogger(MultiprocessContext.__module__).setLevel(logging.CRITICAL)
        try:
            workers.listen()
            workers.run()
        except SignalException as error:
            workers.received.append(error.sigval)
    finally:
        for name in added:
            del os.environ[name]
    return workers


def _worker_variables(section: DistributedConfig, processes: int, exchange: Path) -> dict[str, str]:
    """Return the environment variables of workers that this process does not have yet."""
    threads = max(len(os.sched_getaffinity(0)) // processes, 1)
    defaults = {"OMP_NUM_THREADS": str(threads), **QUIET}
    if section.name is DistributedName.fsdp2:
        # fsdp2 gathers layer after layer. Such large blocks would fragment the heap of C.
        defaults |= MAPPED_FROM_THE_START
    if section.nodes == 1:
        defaults["GLOO_SOCKET_IFNAME"] = "lo"  # the host's name may not resolve
    # The user's own values of these variables stay.
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    return {**added, EXCHANGE: str(exchange)}


def _first_failure(workers: Workers, exchange: Path) -> WorkerEnd | None:
    """Return the worker whose end made the others stop; None if no worker ended early.

    Of workers that ended together it is one killed by a signal, else one whose error no peer
    caused, else the first.
    """

    def blame_order(ended: WorkerEnd) -> tuple[bool, bool, float]:
        """Return a sort key: False sorts before True, so the most probable cause comes first."""
        crash = read_crash(exchange, ended.rank)
        return ended.code >= 0, crash.get("of_peer", False), crash.get("time", time.time())

    return min(workers.failed, key=blame_order, default=None)


def _report(workers: Workers, exchange: Path, verb: str, folder: Path, *, first_node: bool) -> int:
    """Return the run's exit code. Print and record a failure, unless the first rank has done so.

    Raises ConfigError if a worker refused to start.
    """
    first = _first_failure(workers, exchange)
    if first is None and workers.other_node is None:  # they finished, or were asked to stop
        code = _code_without_failure(workers)
        if code != DONE and first_node:  # keeps any other status, which the first rank has written
            _replace_status(folder, {"running": "interrupted"})
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
        message = f"{_rank_name(first)} {_how(first, folder, crash.get('error'))}"
    for rank in workers.killed:
        pid = workers.ended[rank].pid
        message += f"; rank {rank} (process {pid}) did not answer and was killed"
    exit_code = first.code if first is not None and first.code > 0 else FAILED
    # The first rank prints and records its own errors, unless a signal killed it. It knows neither
    # why a peer failed nor which ranks were killed.
    has_own_error = first is not None and first.rank == 0 and first.code > 0
    if has_own_error and not crash.get("of_peer") and not workers.killed:
        return exit_code
    again = f"agenttrain {resuming(verb)}resume={quote(str(folder))}"
    remedy = "" if verb == "eval" else f". To go on: {again}"
    print(f"agenttrain: {message}; the other processes were stopped{remedy}", file=sys.stderr)
    if first_node:  # whatever status a process has left that died
        _replace_status(folder, dict.fromkeys(UNFINISHED, "failed"), message)
    return exit_code


def _rank_name(ended: WorkerEnd) -> str:
    """Return a worker's name in messages: ``rank 1 (process 4711 on node3)``."""
    return f"rank {ended.rank} (process {ended.pid} on {socket.gethostname()})"


def _how(ended: WorkerEnd, folder: Path | None = None, error: str | None = None) -> str:
    """Return how a worker ended, with its error and, given the run `folder`, its log file."""
    how = WHY.get(ended.code, how_ended(ended.code)).format(rank=ended.rank)
    how += f": {error}" if error else ""
    if folder is not None and ended.rank != 0:  # rank 0 prints to the terminal
        how += f" (its log: {folder / 'logs' / f'rank-{ended.rank}.log'})"
    return how


def _code_without_failure(workers: Workers) -> int:
    """Return the exit code of workers that finished, or that a signal to the launcher stopped."""
    lowest_rank = min(workers.ended, default=None)  # None: no worker has ended
    code = workers.ended[lowest_rank].code if lowest_rank is not None else INTERRUPTED
    # Workers get another signal than the launcher, whose own signal decides on the code.
    if code in (INTERRUPTED, TERMINATED) or code < 0:
        return INTERRUPTED if signal.SIGINT in workers.received else TERMINATED
    return code


def _replace_status(
    folder: Path, new_statuses: dict[str | None, str], error: str | None = None
) -> None:
    """Replace the status in summary.json, and set the error, if it is a key of `new_statuses`.

    Example: ``{"running": "interrupted"}`` changes ``running``, and no other status.
    """
    status = read_summary(folder).get("status")
    if status in new_statuses:
        with suppress(OSError):
            update_summary(folder, status=new_statuses[status], error=error)
