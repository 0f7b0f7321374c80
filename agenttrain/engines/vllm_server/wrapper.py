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
from agenttrain.engines.vllm_server.process_ids import process_exists, started_at
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

LOOK_S = 0.1
"""Seconds between two looks at the server, at the owner and for signals."""
ASK_S = 5.0
"""Seconds that a starting server has for an answer."""
SCAN_S = 5.0
"""Seconds between two looks for files that the server would leave behind."""
END_S = 10.0
"""Seconds between SIGTERM to the server's processes and SIGKILL."""
BEAT_S = 2.0
"""Seconds between two signs of life to a run on another machine, and two looks for its orders."""
HEALTH_S = 1.0
"""Seconds between two questions to a server that has started whether its engine lives."""
PORTS = 3
"""Ports of ours that are tried for a start, should other processes take them first."""
TAKEN = "address already in use"
"""Part of a server's log, in any case, whose port another process has."""


@dataclass(slots=True)
class Wrapper:
    """Runs one server of the run in `folder`, and ends with the process `owner`."""

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
    _stopping: bool = False
    _next_beat: float = 0.0
    _record: ServerRecord = field(init=False)

    def run(self) -> int:
        """Run until SIGTERM, the owner's end or the last restart; return the exit code."""
        plan = ServerPlan.read(self.folder)
        if self.owner is not None:
            started = started_at(self.owner)
            self._owner_started, self._stopping = started or 0, started is None
        # SIGUSR1: srun passes it on, and answers SIGTERM by killing.
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, self._stop)
        # SLURM sends SIGTERM to all steps of a job: the run, which then saves, ends its servers.
        in_job = plan.nodes and "SLURM_JOB_ID" in os.environ
        signal.signal(signal.SIGTERM, self._go_on if in_job else self._stop)
        adopt_orphans()  # this process is the keeper of its server
        earlier = read_record(self.folder, self.number)
        self._record = ServerRecord.of(self.number, os.getpid())
        if earlier is not None:
            self._record = replace(self._record, boot=earlier.boot)
            if earlier.host == self._record.host:  # its wrapper may have been killed
                scratch.remove(earlier.scratch)
        try:
            for left in range(plan.servers["restarts"], -1, -1):
                started = self._live_on_a_port(plan)
                if self._is_stopping():
                    return DONE
                # One that has never answered would not do so the next time either.
                if not (left and started):
                    break
                self._write(condition=Condition.ended)
            self._write(condition=Condition.gone)
            return FAILED
        finally:
            if self._is_stopping():
                record_path(self.folder, self.number).unlink(missing_ok=True)
                order_path(self.folder, self.number).unlink(missing_ok=True)
                with suppress(OSError):  # a later process of the run has given it another folder
                    plan = ServerPlan.read(self.folder)
                if self.owner is not None and plan.weights is not None:
                    shutil.rmtree(plan.weights, ignore_errors=True)

    def _live_on_a_port(self, plan: ServerPlan) -> bool:
        """Run the server once, to its end. Return True if it has answered."""
        log = log_path(self.folder, self.number)
        for _ in range(PORTS):
            size = log.stat().st_size if log.exists() else 0
            with _held_port(self.host, self.port) as port:
                started = self._live(plan, port)
            taken = TAKEN in text_since(log, size).lower()
            if started or self._is_stopping() or not taken:
                return started
            if self.port is not None:
                end = f"did not start: another process listens on {self.host} port={port}"
                self._record = replace(self._record, end=f"{end}; end that one, or name another")
                return False
        end = f"did not start: other processes took {PORTS} ports one after the other"
        self._record = replace(self._record, end=end)
        return False

    def _live(self, plan: ServerPlan, port: int) -> bool:
        """Run the server once, to its end; return True if it has answered."""
        token = self.token or secrets.token_urlsafe(32)
        # Of its own, as killed processes leave sockets behind.
        sockets = tempfile.mkdtemp(prefix=scratch.SOCKETS)
        environment = {**os.environ, TOKEN: token, HOST: self.host, "TMPDIR": sockets}
        if plan.gpus is not None:
            gpus = plan.gpus[self.number]
            if plan.nodes and (visible := os.environ.get("CUDA_VISIBLE_DEVICES")):
                gpus = tuple(visible.split(",")[int(position)] for position in gpus)
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        words = [str(self.folder), str(self.number), str(port)]
        with log_path(self.folder, self.number).open("ab+") as log:
            process = ChildProcess(
                [sys.executable, "-m", plan.module, *words],
                keeper=False,
                env=environment,
                output=log,
            )
        started = False
        url = f"http://{self.host}:{port}"
        http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=ASK_S,
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
            now = time.monotonic()
            deadline, next_scan = now + plan.servers["start_s"], now + SCAN_S
            asked = 0.0
            while process.alive and not self._is_stopping():
                if not started:
                    started = self._register(http)
                    if not started and time.monotonic() > deadline:
                        end = f"did not start within servers.start_s={plan.servers['start_s']:g} s"
                        self._record = replace(self._record, end=end)
                        break
                elif time.monotonic() - asked > HEALTH_S:
                    # vLLM's server waits for its clients' connections to close before it follows
                    # its dead engine, which may be for ever.
                    if _has_dead_engine(http):
                        end = "answered GET /health with 503: its engine has ended"
                        self._record = replace(self._record, end=end)
                        break
                    asked = time.monotonic()
                if plan.nodes and self._is_to_be_killed():
                    self._record = replace(self._record, end="was killed by the run")
                    break
                if time.monotonic() > next_scan:
                    self._note_scratch(process.pid)
                    next_scan = time.monotonic() + SCAN_S
                time.sleep(LOOK_S)
        finally:
            http.close()
            self._note_scratch(process.pid)
            self._end(process)
            scratch.remove(self._record.scratch)
        return started

    def _is_to_be_killed(self) -> bool:
        """Give the run a sign of life, now and then, and read its order."""
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

    def _note_scratch(self, group: int) -> None:
        """Add to the record what the server would leave behind if it were killed now."""
        known = {*self._record.scratch, *scratch.shared_by(group)}
        if len(known) > len(self._record.scratch):
            self._write(scratch=tuple(sorted(known)))

    def _register(self, http: httpx.Client) -> bool:
        """Write the record of a server that answers; return False if it does not yet."""
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
        """End all processes of the server, and collect them."""
        process.signal(signal.SIGTERM, to_group=True)
        process.ended(END_S)
        process.kill()
        end_children(process.pid)
        if not self._record.end:
            self._record = replace(self._record, end=how_ended(process.code or 0))

    def _write(self, **changes: object) -> None:
        self._record = replace(self._record, **changes)  # type: ignore[arg-type]
        self._record.write(self.folder)

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def _go_on(self, *_: object) -> None:
        """Handle a signal that means another process; the server would inherit SIG_IGN."""

    def _is_stopping(self) -> bool:
        if self.owner is not None and not process_exists(self.owner, self._owner_started):
            self._stopping = True
        return self._stopping


def _has_dead_engine(http: httpx.Client) -> bool:
    """Return True if the server answers that its engine has died. No answer: it may be busy."""
    try:
        return http.get("/health", timeout=HEALTH_S).status_code == httpx.codes.SERVICE_UNAVAILABLE
    except httpx.HTTPError:
        return False


@contextmanager
def _held_port(host: str, port: int | None) -> Iterator[int]:
    """Yield `port`, or a free port that is held, so that no other server gets it."""
    with socket.socket() as held:
        if port is None:
            # With it the server may bind the port too, as long as nobody listens.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind((host, 0))
            port = held.getsockname()[1]
            if sys.platform != "linux":
                held.close()
        yield port


if __name__ == "__main__":
    sys.exit(Wrapper(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])).run())
