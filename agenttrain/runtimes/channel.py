"""Commands in a running container, over FIFOs in a folder that it sees read-only.

The container's first process is its ``sh``, which reads shell text from one FIFO and reports to
another, so that a command costs a fork and no client::

    host  ──>  in      { ( cd /app; exec ls ) </dev/null >/.agenttrain/7 2>&1; echo "7 $?" >&9; } &
    host  <──  7       the output of command 7
    host  <──  status  "7 p 12": it is process 12 in the container; "7 0": it has ended

The shell ends when the host's end of `in` closes, and the container with it: also when the run was
killed, and no process of ours is left.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agenttrain.runtimes.base import MachineLost
from agenttrain.runtimes.output import Clipped
from agenttrain.types import CommandResult

INSIDE = "/.agenttrain"
"""Where the container sees the folder."""
START = (
    # podman makes "/" read-only even for its owner, who lacks the capability to write nevertheless.
    "chmod u+w / 2>/dev/null; "
    # An open for both never waits, and with it the open of one end does not: a host that died while
    # the container started opens the other end no more. Then the shell reads an end of file.
    f"exec 8<>{INSIDE}/in; exec /bin/sh -s <{INSIDE}/in 8>&-"
)
INIT = (
    f"exec 8<>{INSIDE}/status 9>{INSIDE}/status 8>&-\n"
    # Ends process $1 with its descendants. No command is started: there may be no room for one.
    'k() { t=$1; f=1; while [ -n "$f" ]; do f=; for s in /proc/[0-9]*/stat; do l=; '
    "{ read -r l <$s; } 2>/dev/null; p=${s#/proc/}; p=${p%/stat}; set -- ${l##*) }; "
    'case " $t " in *" $p "*) ;; *" ${2:-x} "*) t="$t $p"; f=1;; esac; done; done; '
    "kill -9 $t 2>/dev/null; }\n"
    "echo ready >&9\n"
)
LONGEST_TEXT = 2048
"""Bytes of a command that goes through the FIFO; a longer one goes into a file."""
KILL_S = 5.0
"""Seconds that the shell has to end a command."""
MAX_LINE = 4096
"""Bytes of a report without a line's end, at which the channel counts as broken."""
CHUNK = 1 << 16
PAUSE_S = 0.005
"""Seconds between two reads of an output, so that a program that prints byte by byte does not keep
the event loop busy."""
KILLED = 137
"""Exit code of a command that SIGKILL ended, as shells count: 128 + 9."""
ENDED = "the container ended by itself"
HANGS = "its shell hangs"


@dataclass(slots=True, eq=False)
class _Command:
    """A command in progress."""

    reader: int
    """File descriptor of its output."""
    output: Clipped
    ended: asyncio.Future[int]
    """Gets its exit code when the shell reports its end: ``7 0``."""
    killed: asyncio.Future[None]
    """Done when the shell reports that it has killed the command: ``7 k``."""
    pid: str = ""
    """Its process in the container; empty until the shell has started it."""
    is_ending: bool = False
    """The shell is asked to end it as soon as it has started it."""
    files: list[Path] = field(default_factory=list)
    """FIFO and files in the channel's folder that are removed with it."""


class ExecChannel:
    """The connection to a container's shell. All of its methods run in one event loop.

    `exec` makes a FIFO for a command's output and sends the command to the shell as text. The shell
    starts it in the background, reports its process, and reports its end (`_handle_report`). A
    command whose time is up, or whose caller was cancelled, is killed by the shell's function `k`.
    If the shell does not answer in time, or its reports end, the channel is broken: `problem` says
    why, and every command raises MachineLost.

    Example::

        channel = ExecChannel(folder)             # before the container starts
        await channel.ready(timeout_s=60.0)
        result = await channel.exec(["id"], timeout_s=5.0)
        channel.close()                       # ends the container
    """

    def __init__(self, folder: Path) -> None:
        """Make the FIFOs in an empty folder, which the container gets as INSIDE, read-only.

        A FIFO can be written to on a read-only mount: only files cannot be made or changed there.
        """
        self.folder = folder
        folder.chmod(0o755)
        for name in ("in", "status"):
            _make_fifo(folder / name)
        # For reading too: a FIFO that is opened for writing alone needs a reader already.
        self._in_fd = os.open(folder / "in", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._status_fd = os.open(folder / "status", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._status_fd, self._read_status)
        self._shell_ready: asyncio.Future[None] = self._loop.create_future()
        """Done when the container's shell reports ``ready``, after its start or `end_processes`."""
        self._received = b""
        """The beginning of a report whose line has not ended yet."""
        self._commands: dict[str, _Command] = {}
        """Number of a command, as a text -> the command, until its output is read."""
        self._last_number = 0
        self._unreaped: list[str] = []
        """Processes that have ended and are zombies until the container's shell waits for them,
        which it does with the next command."""
        self.problem: str | None = None
        """Why no command can run any more; None while they can."""
        self._endings: set[asyncio.Task[None]] = set()
        """Tasks that end commands whose callers were cancelled."""
        # Read by the shell when it starts: its report descriptor 9, the function `k`, "ready".
        os.write(self._in_fd, INIT.encode())

    async def ready(self, *, timeout_s: float) -> None:
        """Wait until the shell answers. Raises MachineLost."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._shell_ready
        except TimeoutError as error:
            raise MachineLost(f"its shell did not answer within {timeout_s:g} s") from error
        # Both ends of the FIFOs are open, and stay so. Without their names no program of the
        # container can open them, to send commands to the shell or false reports to us.
        for name in ("in", "status"):
            (self.folder / name).unlink(missing_ok=True)

    async def exec(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        max_bytes: int = 1 << 20,
        on_output: Callable[[bytes], object] | None = None,
    ) -> CommandResult:
        """Run a command; see `RolloutMachine.exec`. Raises MachineLost."""
        if self.problem is not None:
            raise MachineLost(self.problem)
        self._last_number += 1
        name = str(self._last_number)
        try:
            running = self._start(name, command, stdin, env or {}, cwd, max_bytes, on_output)
        except OSError as error:
            raise MachineLost(f"a command cannot be started: {error}") from error
        timed_out, cancelled = False, False
        try:
            self._loop.add_reader(running.reader, self._read_output, running)
            try:
                async with asyncio.timeout(timeout_s):
                    code = await running.ended
            except TimeoutError:
                timed_out, code = True, KILLED
                await self._kill(name, running, waited_s=timeout_s)
            self._read_rest(running)
        except asyncio.CancelledError:
            cancelled = True
            raise
        finally:
            self._loop.remove_reader(running.reader)
            if cancelled:
                # The caller's own time limit cancels this. The command is killed all the same, in a
                # task, and a shell that hangs is noticed.
                task = self._loop.create_task(self._end_cancelled(name, running))
                self._endings.add(task)
                task.add_done_callback(self._endings.discard)
            else:
                self._forget(name, running)
        output = running.output
        return CommandResult(
            code=code, output=output.bytes(), size=output.size, timed_out=timed_out
        )

    async def end_processes(self) -> None:
        """End all processes of the shell's user but the shell itself. Raises MachineLost."""
        if self.problem is not None:
            raise MachineLost(self.problem)
        self._shell_ready, self._unreaped = self._loop.create_future(), []
        # Only the first process, which this signal spares, can send it and go on.
        self._write("kill -9 -1 2>/dev/null; wait; echo ready >&9\n")
        await self.ready(timeout_s=KILL_S)

    def close(self) -> None:
        """Close the connection, which ends the container."""
        self.fail("the container was stopped")
        if self._in_fd >= 0:
            os.close(self._in_fd)
            os.close(self._status_fd)
            self._in_fd = self._status_fd = -1
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(
        self,
        name: str,
        command: Sequence[str],
        stdin: bytes,
        env: Mapping[str, str],
        cwd: str | None,
        max_bytes: int,
        on_output: Callable[[bytes], object] | None,
    ) -> _Command:
        """Send a command to the shell, which starts it in the background."""
        words = [f"export {key}={shlex.quote(value)};" for key, value in env.items()]
        words += [f"cd {shlex.quote(cwd)} || exit 126;"] if cwd is not None else []
        text = " ".join([*words, "exec", *map(shlex.quote, command)])
        output_fifo = self.folder / name
        files = [output_fifo]  # those to remove with the command
        source = "/dev/null"
        try:
            _make_fifo(output_fifo)
            if len(text) > LONGEST_TEXT:
                files.append(self.folder / f"{name}.sh")
                _write_file(files[-1], text.encode("utf-8", "replace"))
                text = f". {INSIDE}/{name}.sh"
            if stdin:
                files.append(self.folder / f"{name}.in")
                _write_file(files[-1], stdin)
                source = f"{INSIDE}/{name}.in"
            # Before the command is sent: it could not open the FIFO for writing without a reader.
            reader = os.open(output_fifo, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            for path in files:
                path.unlink(missing_ok=True)
            raise
        # The shell waits for commands that have ended, so that they do not stay as zombies.
        pids, self._unreaped = " ".join(self._unreaped), []
        wait = f"wait {pids} 2>/dev/null; " if pids else ""
        running = _Command(
            reader=reader,
            output=Clipped(max_bytes, on_output),
            ended=self._loop.create_future(),
            killed=self._loop.create_future(),
            files=files,
        )
        self._commands[name] = running
        # Reports go to the shell's descriptor 9, which the command itself does not get.
        run = f"( exec 9>&-; {text} ) <{source} >{INSIDE}/{name} 2>&1"
        report_end = f'echo "{name} $?" >&9'  # `7 0`: command 7 has ended with exit code 0
        report_process = f'echo "{name} p $!" >&9'  # `7 p 12`: command 7 is process 12
        try:
            self._write(f"{wait}{{ {run}; {report_end}; }} & {report_process}\n")
        except MachineLost:
            self._forget(name, running)
            raise
        return running

    def _write(self, text: str) -> None:
        """Write to the shell. Raises MachineLost if it has stopped to read."""
        data = text.encode("utf-8", "replace")
        try:
            if self._in_fd < 0 or os.write(self._in_fd, data) != len(data):
                raise BlockingIOError
        except OSError as error:
            self.fail("its shell reads no commands any more")
            raise MachineLost("its shell reads no commands any more") from error

    async def _kill(self, name: str, running: _Command, waited_s: float) -> None:
        """End a command with its descendants, `waited_s` after it was sent. Raises MachineLost.

        A shell that cannot do it within KILL_S hangs, and so does one that has not even started the
        command in KILL_S since it was sent: the channel is broken.
        """
        running.is_ending = True
        if running.pid:
            self._write_kill(name, running)
            limit_s = KILL_S
        else:  # not started yet: when the shell reports its process, `_handle_report` kills it
            limit_s = max(KILL_S - waited_s, 0.0)
        try:
            async with asyncio.timeout(limit_s):
                # `_handle_report` sets it, when the shell reports `7 k`. Shielded: a later attempt
                # waits for it too.
                await asyncio.shield(running.killed)
        except TimeoutError as error:
            self.fail(HANGS)
            raise MachineLost(HANGS) from error

    def _write_kill(self, name: str, running: _Command) -> None:
        """Let the shell kill a command with its descendants, by the function `k` of INIT."""
        self._write(f'k {running.pid}; echo "{name} k" >&9\n')

    async def _end_cancelled(self, name: str, running: _Command) -> None:
        """End a command for which nobody waits any more."""
        try:
            with suppress(MachineLost):
                await self._kill(name, running, waited_s=0.0)
        finally:
            self._forget(name, running)

    def _forget(self, name: str, running: _Command) -> None:
        """Close a command's output and remove its files; a report that comes later is ignored."""
        del self._commands[name]
        self._loop.remove_reader(running.reader)
        os.close(running.reader)
        for path in running.files:
            path.unlink(missing_ok=True)

    def fail(self, problem: str) -> None:
        """Let all commands fail from now on, also those in progress."""
        if self.problem is None:  # the first failure: no report is read any more
            self.problem = problem
            if self._status_fd >= 0:
                self._loop.remove_reader(self._status_fd)
        futures: list[asyncio.Future[Any]] = [self._shell_ready]
        for running in self._commands.values():
            futures += [running.ended, running.killed]
        for future in futures:
            if not future.done():
                future.set_exception(MachineLost(self.problem))
                future.exception()  # no warning if nobody waits for it

    def _read_status(self) -> None:
        """Read the shell's reports."""
        try:
            data = os.read(self._status_fd, CHUNK)
        except BlockingIOError:
            return
        self._received += data
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            self._handle_report(line.decode("ascii", "replace").split())
        if not data or len(self._received) > MAX_LINE:
            self.fail(ENDED if not data else "its shell's connection was tampered with")

    def _handle_report(self, words: list[str]) -> None:
        """Handle a report of the shell, split into words.

        ``ready``: it runs. ``7 p 12``: command 7 is process 12 in the container. ``7 k``: command 7
        was killed. ``7 0``: command 7 has ended with exit code 0. Processes that have ended are
        `_unreaped`: the shell waits for them with the next command, or they would stay as zombies.
        """
        if words == ["ready"] and not self._shell_ready.done():
            self._shell_ready.set_result(None)
        running = self._commands.get(words[0]) if words else None
        if running is None:
            return
        if words[1:] == ["k"]:
            if not running.killed.done():
                running.killed.set_result(None)
            # The kill ends the subshell that would have reported the exit code: only this report
            # comes. If the command ended just before, a second wait for it does no harm.
            self._unreaped.append(running.pid)
        elif len(words) == 3 and words[1] == "p" and words[2].isdigit():
            running.pid = words[2]
            if running.is_ending:  # its time was up before its process was known
                with suppress(MachineLost):
                    self._write_kill(words[0], running)
        elif len(words) == 2 and words[1].isdigit() and not running.ended.done():
            # An exit code is 255 at most. A program of the container may forge a report, with a
            # number that is too long for `int`.
            running.ended.set_result(int(words[1][:3]))
            if running.pid:
                self._unreaped.append(running.pid)

    def _read_output(self, running: _Command) -> None:
        """Read some output, and go on after PAUSE_S.

        A program that prints byte by byte must not keep the event loop busy.
        """
        try:
            data = os.read(running.reader, CHUNK)
        except BlockingIOError:
            return
        self._loop.remove_reader(running.reader)
        if data:  # b"": all writers are gone, and the report of its end follows
            running.output.add(data)
            self._loop.call_later(PAUSE_S, self._resume_reading, running)

    def _resume_reading(self, running: _Command) -> None:
        """Read on after a pause, unless the command has ended or is being killed."""
        is_in_progress = running in self._commands.values() and not running.is_ending
        if is_in_progress and not running.ended.done():
            self._loop.add_reader(running.reader, self._read_output, running)

    def _read_rest(self, running: _Command) -> None:
        """Read what was printed before the end; processes left behind may print on."""
        limit = running.output.size + (1 << 20)
        with suppress(BlockingIOError):
            while running.output.size < limit and (data := os.read(running.reader, CHUNK)):
                running.output.add(data)


def _write_file(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    path.chmod(0o644)


def _make_fifo(path: Path) -> None:
    """Make a FIFO that every user of the container can open; the parent folder lets nobody in."""
    os.mkfifo(path)
    path.chmod(0o666)
