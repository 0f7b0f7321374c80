"""`Wrapper`: supervise one vLLM server: start, register, restart, clean up.

`agenttrain engine-server <run folder> number=N` runs it, in a process of its own without torch; so
does a run by `python -m agenttrain.engines.vllm_server.wrapper <run folder> N <owner's process>`.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from agenttrain.engines.vllm_server import scratch
from agenttrain.engines.vllm_server.guard import HOST, TOKEN
from agenttrain.engines.vllm_server.server_records import (
    FOLDER,
    PLAN,
    Condition,
    ServerPlan,
    ServerRecord,
    log_path,
    order_path,
    read_record,
    record_path,
    text_since,
)
from agenttrain.utils.child_process import ChildProcess, how_ended
from agenttrain.utils.exit_codes import DONE, FAILED
from agenttrain.utils.keeper import adopt_orphans, end_children
from agenttrain.utils.process_ids import process_exists, started_at

POLL_S = 0.1
"""Seconds between two checks of the server, its owner and signals."""
ANSWER_S = 5.0
"""Seconds that a starting server has for an answer."""
SCAN_S = 5.0
"""Seconds between two searches for files that the server would leave behind."""
END_S = 10.0
"""Seconds between SIGTERM to the server's processes and SIGKILL."""
BEAT_S = 2.0
"""Seconds between two heartbeats for a run on another machine, and two readings of its order."""
HEALTH_S = 1.0
"""Seconds between two health checks of a server that has started."""
PORTS = 3
"""Ports that are tried for one start, should other processes take them first."""
TAKEN = "address already in use"
"""In the log, lower-cased, of a server whose port another process has."""


@dataclass(slots=True)
class Wrapper:
    """Runs one server of the run in `folder`, and ends with the process `owner`.

    `run` starts the server, and starts it again if it dies, up to `servers.restarts` times. Each
    start has a number (`boot`), a token and perhaps a port of its own. The run finds them in the
    server's record, a file: `_write` changes `_record` and stores it.

    `_watch` is the loop while a server runs. It ends when the server has died, or has to end: after
    a signal, at the owner's end, or by an order of a run on another machine. `_end` then ends all
    processes that the server has left, and `scratch.remove` removes their files outside the run's
    folder. If this wrapper is killed, the next one removes them.
    """

    folder: Path
    number: int
    owner: int | None = None
    host: str = "127.0.0.1"
    """Address that the server listens on."""
    port: int | None = None
    """None: a free one, another at each start."""
    token: str | None = None
    """None: a new one at each start."""
    _owner_started: int = 0
    """Start time of the owner: its number may go to another process once it has ended."""
    _stopping: bool = False
    """The server has to end, and is not started again."""
    _next_beat: float = 0.0
    """Time of the next heartbeat."""
    _record: ServerRecord = field(init=False)

    def run(self) -> int:
        """Run until SIGTERM, the owner's end or the last restart; return the exit code."""
        plan = ServerPlan.read(self.folder)
        if self.owner is not None:
            owner_started = started_at(self.owner)
            self._owner_started = owner_started or 0
            self._stopping = owner_started is None  # the owner has ended already
        self._handle_signals(plan)
        adopt_orphans()  # processes that the server leaves become children, which `_end` ends
        self._record = self._make_record()
        try:
            for restarts_left in range(plan.servers["restarts"], -1, -1):
                has_answered = self._run_on_a_port(plan)
                if self._is_stopping():
                    return DONE
                # A server that never answered would not do so the next time either.
                if not (restarts_left and has_answered):
                    break
                self._write(condition=Condition.ended)
            self._write(condition=Condition.gone)  # the run reads there how the server ended
            return FAILED
        finally:
            if self._is_stopping():
                self._remove_files(plan)

    def _handle_signals(self, plan: ServerPlan) -> None:
        """Have signals end the server and this wrapper, between two checks of `_watch`."""
        # SIGUSR1 comes from the script of a SLURM job, by way of the `srun` that runs this wrapper.
        # srun passes it on. After SIGTERM it would kill the wrapper, which could clean nothing up.
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, self._stop)
        # SLURM sends SIGTERM to all steps of a job. The run saves then, and ends its servers later.
        in_job = plan.nodes and "SLURM_JOB_ID" in os.environ
        signal.signal(signal.SIGTERM, self._ignore if in_job else self._stop)

    def _make_record(self) -> ServerRecord:
        """Return the server's first record, and remove files that a killed wrapper has left."""
        record = ServerRecord.of(self.number, os.getpid())
        former = read_record(self.folder, self.number)
        if former is None:
            return record
        if former.host == record.host:  # else its files are on another machine
            scratch.remove(former.scratch)
        # Go on counting, so that no two starts of this server have the same number.
        return replace(record, boot=former.boot)

    def _remove_files(self, plan: ServerPlan) -> None:
        """Remove the files by which the run finds the server, and the owner's weight files.

        `plan` is the plan of this wrapper's start.
        """
        record_path(self.folder, self.number).unlink(missing_ok=True)
        order_path(self.folder, self.number).unlink(missing_ok=True)
        # A wrapper may outlive the process that wrote its plan. The next process of the run writes
        # a new one, with its own folder of weights.
        with suppress(OSError):  # the plan has been removed
            plan = ServerPlan.read(self.folder)
        if self.owner is not None and plan.weights is not None:
            shutil.rmtree(plan.weights, ignore_errors=True)

    def _run_on_a_port(self, plan: ServerPlan) -> bool:
        """Run the server to its end, on other ports if its port is taken.

        Return True if it has answered.
        """
        log = log_path(self.folder, self.number)
        for _ in range(PORTS):
            log_size = log.stat().st_size if log.exists() else 0
            # Bound by this process too, the port goes to no other server, and this one can use it.
            with _reserve_port(self.host, self.port) as port:
                has_answered = self._run_once(plan, port)
            # A server that finds its port taken ends, and says so in its log.
            is_taken = TAKEN in text_since(log, log_size).lower()
            if has_answered or self._is_stopping() or not is_taken:
                return has_answered
            if self.port is not None:
                end = f"did not start: another process listens on {self.host} port={port}"
                self._record = replace(self._record, end=f"{end}; end that one, or name another")
                return False
        end = f"did not start: other processes took {PORTS} ports one after the other"
        self._record = replace(self._record, end=end)
        return False

    def _run_once(self, plan: ServerPlan, port: int) -> bool:
        """Run the server once, until it ends or has to end. Return True if it has answered."""
        token = self.token or secrets.token_urlsafe(32)
        # A folder of its own, to be removed: killed processes leave sockets behind.
        sockets = tempfile.mkdtemp(prefix=scratch.SOCKETS)
        process = self._start_process(plan, port, token, sockets)
        url = f"http://{self.host}:{port}"
        http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=ANSWER_S,
            trust_env=False,
            verify=False,  # plain HTTP: no certificates are read
        )
        try:
            self._write(
                condition=Condition.starting,
                boot=self._record.boot + 1,
                pid=process.pid,
                url=url,
                token=token,
                end="",
                scratch=(sockets,),
            )
            return self._watch(process, http, plan)
        finally:
            http.close()
            self._record_scratch(process.pid)
            self._end(process)
            scratch.remove(self._record.scratch)

    def _start_process(self, plan: ServerPlan, port: int, token: str, sockets: str) -> ChildProcess:
        """Start the server's process. Its output goes to the log.

        `sockets` is a folder: the server makes its sockets in TMPDIR.
        """
        environment = {**os.environ, TOKEN: token, HOST: self.host, "TMPDIR": sockets}
        if plan.gpus is not None:
            gpus = plan.gpus[self.number]
            # Servers on other nodes (`nodes` > 0): the run that wrote the plan did not see their
            # GPUs, and numbered each node's from 0. The node's job may have other names for them.
            if plan.nodes and (visible := os.environ.get("CUDA_VISIBLE_DEVICES")):
                gpus = tuple(visible.split(",")[int(position)] for position in gpus)
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        arguments = [str(self.folder), str(self.number), str(port)]
        with log_path(self.folder, self.number).open("ab+") as log:
            return ChildProcess(
                [sys.executable, "-m", plan.module, *arguments],
                # A keeper is a process between the two that ends what the server leaves. `_end`
                # does that here.
                keeper=False,
                env=environment,
                output=log,
            )

    def _watch(self, process: ChildProcess, http: httpx.Client, plan: ServerPlan) -> bool:
        """Watch the server until it ends or has to end. Return True if it has answered.

        It has to end if this wrapper is stopped, if it does not answer in time, if its engine has
        died, or if the run orders it to be killed. The caller, `_run_once`, ends it.
        """
        has_answered = False
        now = time.monotonic()
        deadline, next_scan = now + plan.servers["start_s"], now + SCAN_S
        health_checked = 0.0
        while process.alive and not self._is_stopping():
            if not has_answered:
                has_answered = self._register(http)
                if not has_answered and time.monotonic() > deadline:
                    end = f"did not start within servers.start_s={plan.servers['start_s']:g} s"
                    self._record = replace(self._record, end=end)
                    break
            elif time.monotonic() - health_checked > HEALTH_S:
                # After its engine's death vLLM's server ends only once its clients have closed
                # their connections, which may be never.
                if _has_dead_engine(http):
                    end = "answered GET /health with 503: its engine has ended"
                    self._record = replace(self._record, end=end)
                    break
                health_checked = time.monotonic()
            # A run on another machine sees no process and sends no signal: it reads heartbeats and
            # writes orders.
            if plan.nodes and self._beat_and_read_order():
                self._record = replace(self._record, end="was killed by the run")
                break
            if time.monotonic() > next_scan:
                # Files that somebody has to remove if server and wrapper are killed.
                self._record_scratch(process.pid)
                next_scan = time.monotonic() + SCAN_S
            time.sleep(POLL_S)
        return has_answered

    def _beat_and_read_order(self) -> bool:
        """Write a heartbeat every `BEAT_S`. Return True if the run orders to kill this start."""
        if time.monotonic() < self._next_beat:
            return False
        self._next_beat = time.monotonic() + BEAT_S
        if not (self.folder / FOLDER / PLAN).exists():
            self._stopping = True  # the run has ended
            return False
        self._write(beat=self._record.beat + 1)
        try:
            order = order_path(self.folder, self.number).read_text(encoding="utf-8")
        except OSError:
            return False
        return order == str(self._record.boot)

    def _record_scratch(self, group: int) -> None:
        """Add to the record the files that the process group would leave if it were killed now."""
        paths = {*self._record.scratch, *scratch.shared_by(group)}
        if len(paths) > len(self._record.scratch):
            self._write(scratch=tuple(sorted(paths)))

    def _register(self, http: httpx.Client) -> bool:
        """Write to the record that the server answers. Return False if it does not answer yet."""
        try:
            if http.get("/health").status_code != httpx.codes.OK:
                return False
            answers = [http.get(path) for path in ("/version", "/get_world_size")]
            version, world_size = [answer.raise_for_status().json() for answer in answers]
        except (httpx.HTTPError, ValueError):
            return False
        self._write(
            condition=Condition.ready,
            version=str(version["version"]),
            world_size=int(world_size["world_size"]),
        )
        return True

    def _end(self, process: ChildProcess) -> None:
        """End all processes of the server, and reap them."""
        process.signal(signal.SIGTERM, to_group=True)
        process.wait_for_end(END_S)
        process.kill()
        end_children(process.pid)
        if not self._record.end:
            self._record = replace(self._record, end=how_ended(process.code or 0))

    def _write(self, **changes: object) -> None:
        self._record = replace(self._record, **changes)  # type: ignore[arg-type]
        self._record.write(self.folder)

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def _ignore(self, *_: object) -> None:
        """Handle a signal by doing nothing. SIG_IGN would be inherited by the server."""

    def _is_stopping(self) -> bool:
        if self.owner is not None and not process_exists(self.owner, self._owner_started):
            self._stopping = True
        return self._stopping


def _has_dead_engine(http: httpx.Client) -> bool:
    """Return True if the server answers that its engine has died. A busy one may not answer."""
    try:
        return http.get("/health", timeout=HEALTH_S).status_code == httpx.codes.SERVICE_UNAVAILABLE
    except httpx.HTTPError:
        return False


@contextmanager
def _reserve_port(host: str, port: int | None) -> Iterator[int]:
    """Yield `port`, or a free port that is bound for the block, so that no other server gets it."""
    with socket.socket() as reservation:
        if port is None:
            # Linux lets the server bind the port too with this option, as long as nobody listens.
            reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reservation.bind((host, 0))
            port = reservation.getsockname()[1]
            if sys.platform != "linux":
                reservation.close()
        yield port


if __name__ == "__main__":
    sys.exit(Wrapper(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])).run())
