"""Child processes: start one, speak with it in JSON lines, read its last words, end it.

    child = ChildProcess([sys.executable, "-P", "adder.py"], requests=True, replies=True)
    child.send("[1, 2]")
    child.receive(limit_s=5.0)   # 3
    child.kill()

A child that hangs or ends instead raises, e.g. ``ChildGone: ended with exit code 1; it printed:
ModuleNotFoundError: No module named 'numpy'``.

A child is killed when this process ends, even if that is killed, and so is everything that the
child has started, also in groups and sessions of their own: a keeper (`keeper.py`) runs between the
two. Only our own processes run without a keeper: they end their children themselves, outlive this
process for a moment to save or to clean up, and call `end_with_parent`.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from threading import Lock, Thread
from typing import IO, Any, Self

from agenttrain.utils.keeper import HEARD, TO_GROUP
from agenttrain.utils.signals import signal_name

KEEPER = str(Path(__file__).with_name("keeper.py"))
MAX_TAIL = 2000
"""Bytes of a child's output that are kept: its end."""
LAST_WORDS_S = 1.0
"""Longest wait for the last words of a child: a process that it left behind may hold the pipe."""
KILL_S = 5.0
"""Longest wait for a keeper to end its processes before it is killed itself."""
WATCH_S = 1.0
"""Seconds between two checks of the parent, where the system has no pidfd."""


class ChildGone(Exception):
    """A child ended, or did not answer in time; the message has its end and its last output."""


def how_ended(code: int) -> str:
    """Return how a process ended: ``was ended by SIGKILL`` for -9, ``ended with exit code 1``."""
    return f"was ended by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"


class _Lifeline:
    """This process's socket to a keeper: the process between this one and a program.

    The keeper starts the program. It kills the program and all that this has started if the socket
    closes, because this process has ended. A process that is forked from this one inherits the
    socket and may outlive it. So the keeper also watches this process's pid, and `close` sends
    SIGKILL first.

    `keeper_fd` is the descriptor for the keeper to inherit; the caller then closes it here.
    """

    def __init__(self) -> None:
        own_end, keeper_end = socket.socketpair()
        self._own_fd, self.keeper_fd = own_end.detach(), keeper_end.detach()
        self._is_open = True

    def keeper_command(
        self,
        command: Sequence[str],
        *,
        files: Sequence[int] = (),
        grace_s: float = 0.0,
        deaf: bool = False,
    ) -> list[str]:
        """Return the command line of a keeper that runs `command`.

        `files` are descriptors that only the command uses; the keeper closes its own. If this
        process ends, the command has `grace_s` to end by itself. A `deaf` one ignores SIGTERM and
        the other signals that ask to stop.
        """
        # `keeper.py` reads its arguments by their places: "5,7," for two files, "" for none.
        program_files = "".join(f"{file}," for file in files)
        # -I -S: the keeper needs no installed packages, and starts faster without looking for them.
        words = [self.keeper_fd, os.getpid(), grace_s, "deaf" if deaf else "", program_files]
        return [sys.executable, "-I", "-S", KEEPER, *map(str, words), *command]

    def read_program_pid(self) -> int | None:
        """Return the program's pid; None if its keeper ended before it started the program."""
        line = b""
        while not line.endswith(b"\n"):  # a short line, and the only one
            byte = b""
            with suppress(OSError):
                byte = os.read(self._own_fd, 1)
            if not byte:
                return None
            line += byte
        return int(line)

    def signal(self, number: int) -> None:
        """Have the keeper send the program a signal; SIGKILL ends all of the keeper's processes."""
        if self._is_open:
            with suppress(OSError):
                os.write(self._own_fd, bytes([number]))

    def close(self) -> None:
        """Have the keeper end all of its processes, and close the socket."""
        self.signal(signal.SIGKILL)  # a forked process may still hold the socket open
        if self._is_open:
            self._is_open = False
            os.close(self._own_fd)


class ChildProcess:
    """A child process of this one, in a session of its own: only the parent gets a Ctrl-C.

    Its output is read all the time, so that it never waits for a reader, and the end of it is kept.
    Unless it runs without a keeper, the process that this one starts is the keeper, which starts
    the command and exits as that does. Requests to the keeper go over the lifeline.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        requests: bool = False,
        replies: bool = False,
        keeper: bool = True,
        grace_s: float = 0.0,
        deaf: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        pass_fds: Sequence[int] = (),
        tail_bytes: int = MAX_TAIL,
        output: IO[bytes] | None = None,
        show: bool = False,
        print_line: Callable[[str], object] | None = None,
    ) -> None:
        """Start the command; raises OSError.

        `requests`: `send` writes to its standard input, which is otherwise empty. Its output::

                        standard output       standard error
            by default  printed               printed
            `replies`   read by `receive`     printed
            `show`      this process's own    printed, and copied to this process's own

        A thread keeps the last `tail_bytes` of what is printed and calls `print_line` with each
        line. With a readable file `output`, what is printed goes there and no thread is started.

        The `keeper` kills the child with all that it has started, `grace_s` after the end of this
        process. A `deaf` child ignores the signals that ask this process to stop.
        """
        path = (os.environ if env is None else env).get("PATH")
        if shutil.which(command[0], path=path) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
        lifeline = _Lifeline() if keeper else None
        arguments = list(command)
        if lifeline is not None:
            arguments = lifeline.keeper_command(command, files=pass_fds, grace_s=grace_s, deaf=deaf)
            pass_fds = [*pass_fds, lifeline.keeper_fd]
        printed_to = subprocess.PIPE if output is None else output
        stdout: int | IO[bytes] | None = printed_to
        if replies:
            stdout = subprocess.PIPE
        elif show:
            stdout = None  # this process's own
        only_stderr = replies or show
        stderr = printed_to if only_stderr else subprocess.STDOUT
        try:
            # The keeper inherits the blocked signals: none can end it before it blocks them itself.
            with _signals_blocked(HEARD if keeper else ()):
                self._process = subprocess.Popen(
                    arguments,
                    stdin=subprocess.PIPE if requests else subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    start_new_session=True,
                    env=env,
                    cwd=cwd,
                    pass_fds=pass_fds,
                )
        except BaseException:
            if lifeline is not None:
                lifeline.close()
            raise
        finally:
            if lifeline is not None:
                os.close(lifeline.keeper_fd)  # the keeper has a copy of its own
        self._lifeline = lifeline
        """To the keeper; None without one: then `_process` is the command itself."""
        self._replies = replies
        self._tail = b""
        self._tail_bytes = tail_bytes
        self._unread = b""
        self._output = None if output is None else os.dup(output.fileno())
        self._print_line = print_line
        self._show = show
        self._reader: Thread | None = None
        if output is None:
            printed = self._process.stderr if only_stderr else self._process.stdout
            self._reader = Thread(target=self._read_output, args=(printed,), daemon=True)
            self._reader.start()

    @cached_property
    def pid(self) -> int:
        """Its pid and process group id; the keeper's pid if the program was never started."""
        program_pid = None if self._lifeline is None else self._lifeline.read_program_pid()
        return self._process.pid if program_pid is None else program_pid

    @property
    def alive(self) -> bool:
        """True while it runs."""
        return self.code is None

    @property
    def code(self) -> int | None:
        """Its exit code, less than 0 for a signal; None while it runs."""
        return self._process.poll()

    def send(self, line: str) -> None:
        """Write a line to its standard input; raises ChildGone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as error:  # one end of the pipe is closed
            raise self.gone_error() from error

    def receive(self, *, limit_s: float) -> Any:
        """Wait for the next line of its standard output and return the line's JSON value.

        Raises ChildGone if the child has ended, or if no whole line comes within `limit_s` seconds.
        """
        assert self._process.stdout is not None
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._unread:
            remaining_s = max(deadline - time.monotonic(), 0)
            ready, _, _ = select.select([self._process.stdout], [], [], remaining_s)
            chunk = os.read(self._process.stdout.fileno(), 65536) if ready else b""
            if not chunk:
                raise self.gone_error()
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def wait_for_end(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for the child to end; return False if it still runs."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def gone_error(self) -> ChildGone:
        """Return an error with how it ended, or that it hangs, and its last output; waits 2 s."""
        self.wait_for_end(LAST_WORDS_S)
        code = self.code
        printed = self.printed()
        how = "hangs" if code is None else how_ended(code)
        return ChildGone(how + (f"; it printed: {printed}" if printed else ""))

    def printed(self) -> str:
        """Return the last `tail_bytes` that it printed; waits for the reader of an ended child."""
        if self._reader is not None and not self.alive:
            self._reader.join(LAST_WORDS_S)
        if self._output is not None:
            start = max(os.fstat(self._output).st_size - self._tail_bytes, 0)
            self._tail = os.pread(self._output, self._tail_bytes, start)
        return self._tail.decode("utf-8", "replace").strip()

    def signal(self, number: signal.Signals, *, to_group: bool = False) -> None:
        """Send a signal to the child, or to its process group, unless it has ended.

        With a keeper, SIGKILL ends all that the child has started. `kill` also waits for the end.
        """
        if self._lifeline is not None:
            # A request to the keeper is one byte: the signal's number, with TO_GROUP as a flag bit.
            self._lifeline.signal(number | TO_GROUP if to_group else number)
            if number == signal.SIGKILL:
                # Wakes the keeper to read it: the program may have sent its parent a SIGSTOP.
                self._process.send_signal(signal.SIGCONT)
        elif not to_group:
            self._process.send_signal(number)  # not after the end: Popen checks that
        elif self.alive:
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """Kill the child with all that it has started, and wait for its end.

        May be called after the child's end, and twice. Without a keeper, only the child's process
        group is killed, and only if the child has not been reaped (by `code`, `alive` or
        `wait_for_end`): after that, its process group id may belong to another process. The files
        of this process that lead to the child are closed.
        """
        if self._lifeline is not None:  # with a keeper, which kills the others and then exits
            self.signal(signal.SIGKILL)
            if not self.wait_for_end(KILL_S):
                self._process.kill()
            self._lifeline.close()
        elif self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._output is not None:
            self.printed()  # keeps the tail of the file, for calls after this one
            os.close(self._output)
            self._output = None
        for pipe in (self._process.stdin, self._process.stdout if self._replies else None):
            if pipe is not None:
                with suppress(OSError):  # closing flushes requests that the child never read
                    pipe.close()

    def _read_output(self, pipe: IO[bytes]) -> None:
        """Read `pipe` to its end: keep its tail, copy it, pass on its lines. A thread's body."""
        unfinished_line = b""
        with pipe:
            while chunk := os.read(pipe.fileno(), 65536):
                self._tail = (self._tail + chunk)[-self._tail_bytes :]
                if self._show:
                    with suppress(OSError, ValueError):
                        sys.stderr.buffer.write(chunk)
                        sys.stderr.buffer.flush()
                if self._print_line is not None:
                    *lines, unfinished_line = (unfinished_line + chunk).split(b"\n")
                    for line in lines:
                        self._print_line(line.decode("utf-8", "replace"))
        if unfinished_line and self._print_line is not None:
            self._print_line(unfinished_line.decode("utf-8", "replace"))


class ChildNotReady(ChildGone):
    """A child did not say in time that it is ready."""


class OnDemandChild:
    """A child that answers requests in JSON lines, one after the other; `ask` starts it if needed.

    A child that does not reply is killed, because a late reply would be taken for that to the next
    request.
    """

    def __init__(self, command: Sequence[str], *, ready_s: float | None = None) -> None:
        """`ready_s`: seconds in which a new child prints a JSON value; None: it prints none."""
        self._command, self._ready_s = command, ready_s
        self._lock = Lock()
        self.child: ChildProcess | None = None
        """The child of the last request, which may have ended."""

    def ask(self, request: Any, *, limit_s: float) -> Any:
        """Return the reply to a request; both are JSON values.

        Raises OSError if the command cannot be started, ChildNotReady if it ends or hangs before it
        is ready, and ChildGone if it does so before it replies.
        """
        with self._lock:
            if self.child is None or not self.child.alive:
                self.child = ChildProcess(self._command, requests=True, replies=True)
                if self._ready_s is not None:
                    try:
                        self.child.receive(limit_s=self._ready_s)
                    except ChildGone as error:
                        self.child.kill()
                        raise ChildNotReady(str(error)) from error
            try:
                self.child.send(json.dumps(request))
                return self.child.receive(limit_s=limit_s)
            except ChildGone:
                self.child.kill()
                raise


class AsyncChildProcess:
    """A child process whose three streams are asyncio's.

    A keeper, the process between the two, kills it with all that it has started when this process
    ends.
    """

    def __init__(self, process: asyncio.subprocess.Process, lifeline: _Lifeline) -> None:
        assert process.stdin and process.stdout and process.stderr
        self.stdin, self.stdout, self.stderr = process.stdin, process.stdout, process.stderr
        self._process, self._lifeline = process, lifeline

    @classmethod
    async def start(
        cls, command: Sequence[str], *, env: Mapping[str, str], line_limit: int = 2**16
    ) -> Self:
        """Start a command by way of a keeper; raises OSError and ValueError.

        A missing program is no error here: only the keeper looks for it, and exits with code 127.
        `line_limit` is the maximum of bytes that `stdout.readline` returns.
        """
        lifeline = _Lifeline()
        try:
            process = await asyncio.create_subprocess_exec(
                *lifeline.keeper_command(command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=env,
                pass_fds=(lifeline.keeper_fd,),
                start_new_session=True,
                limit=line_limit,
            )
        except BaseException:
            lifeline.close()
            raise
        finally:
            os.close(lifeline.keeper_fd)  # the keeper, if it was started, has a copy of its own
        return cls(process, lifeline)

    async def send(self, line: str) -> None:
        """Write a line to its standard input; ignored if the child has ended."""
        with suppress(OSError):
            self.stdin.write(line.encode() + b"\n")
            await self.stdin.drain()

    async def wait(self) -> int:
        """Wait for its end; return its exit code, less than 0 for a signal."""
        return await self._process.wait()

    async def end(self) -> None:
        """Kill the child with all that it has started, and wait for its end."""
        self._lifeline.close()  # has the keeper, the parent of the child, kill them all
        self.stdin.close()
        try:
            async with asyncio.timeout(KILL_S):
                await self._process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


@contextmanager
def _signals_blocked(signals: Sequence[signal.Signals]) -> Iterator[None]:
    """Block signals in this thread, so that a process started in the block inherits the mask."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def end_with_parent(
    message: str = "",
    *,
    parent: int | None = None,
    after_s: float = 0.0,
    at_end: Callable[[], object] = lambda: None,
) -> None:
    """Kill this process's group `after_s` seconds after its parent has ended in any way.

    `at_end` is called just before. Pass the pid `parent` if the parent may have ended already: its
    children then have another one.

    A child that was started without a keeper calls this first. The kernel's PR_SET_PDEATHSIG is no
    substitute: it would kill the child at the end of the thread that started it.
    """
    parent_pid = os.getppid() if parent is None else parent

    def watch() -> None:
        """Wait for the parent's end, and then end this process's group: a thread's body."""
        with suppress(AttributeError, OSError):  # no Linux, or the parent has ended already
            poller = select.poll()
            poller.register(os.pidfd_open(parent_pid), select.POLLIN)
            poller.poll()
        # Without a pidfd, ask. After the parent's end, above or earlier, this is false at once.
        while os.getppid() == parent_pid:
            time.sleep(WATCH_S)
        time.sleep(after_s)
        if message:
            print(message, file=sys.stderr, flush=True)
        at_end()
        os.killpg(os.getpgid(0), signal.SIGKILL)

    Thread(target=watch, daemon=True).start()
