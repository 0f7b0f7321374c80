"""Child processes: start one, speak with it in JSON lines, read its last words, end it.

    child = ChildProcess([sys.executable, "-P", "adder.py"], requests=True, replies=True)
    child.send("[1, 2]")
    child.receive(limit_s=5.0)   # 3
    child.kill()

A child that hangs or ends instead raises, e.g. ``ChildGone: ended with exit code 1; it printed:
ModuleNotFoundError: No module named 'numpy'``.

A child must end with this process, even if that is killed. One that takes requests ends when its
standard input does; any other calls `end_with_parent`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Thread
from typing import IO, Any

from agenttrain.utils.signals import signal_name

MAX_TAIL = 2000
"""Bytes of a child's output that are kept: its end."""
LAST_WORDS_S = 1.0
"""Longest wait for the last words of a child: a process that it left behind may hold the pipe."""
WATCH_S = 1.0
"""Seconds between two checks of the parent, where the system has no pidfd."""


class ChildGone(Exception):
    """A child ended, or did not answer in time; the message has its end and its last output."""


class ChildProcess:
    """A child process of this one, in a session of its own: only the parent gets a Ctrl-C.

    Its output is read all the time, so that it never waits for a reader, and the end of it is kept.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        requests: bool = False,
        replies: bool = False,
        own_session: bool = True,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        tail_bytes: int = MAX_TAIL,
        print_line: Callable[[str], object] | None = None,
    ) -> None:
        """Start the command; raises OSError.

        `requests`: `send` writes to its standard input, which is otherwise empty. `replies`:
        `receive` reads its standard output, which otherwise counts as printed. Without a session of
        its own it gets the signals of this process's group, and `kill` ends only it. Of its output
        the last `tail_bytes` are kept, and each line is given to `print_line`, in a thread.
        """
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if requests else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if replies else subprocess.STDOUT,
            start_new_session=own_session,
            env=env,
            pass_fds=pass_fds,
        )
        self.pid = self._process.pid
        """Its process number, also that of its group if it has a session of its own."""
        self._own_session = own_session
        self._replies = replies
        self._tail = b""
        self._tail_bytes = tail_bytes
        self._unread = b""
        self._print_line = print_line
        printed = self._process.stderr if replies else self._process.stdout
        self._reader = Thread(target=self._collect, args=(printed,), daemon=True)
        self._reader.start()

    @property
    def alive(self) -> bool:
        """True while it runs."""
        return self.code is None

    @property
    def code(self) -> int | None:
        """Its exit code, less than 0 for a signal; None while it runs."""
        return self._process.poll()

    def send(self, line: str) -> None:
        """Send a line; raises ChildGone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as error:  # its end is closed, or ours
            raise self.gone() from error

    def receive(self, *, limit_s: float) -> Any:
        """Return the next line of its standard output, which is JSON; raises ChildGone."""
        assert self._process.stdout is not None
        end = time.monotonic() + limit_s
        while b"\n" not in self._unread:
            left = max(end - time.monotonic(), 0)
            ready, _, _ = select.select([self._process.stdout], [], [], left)
            piece = os.read(self._process.stdout.fileno(), 65536) if ready else b""
            if not piece:
                raise self.gone()
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def ended(self, timeout_s: float) -> bool:
        """Wait for its end; return False if it still runs."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def exited(self) -> bool:
        """Return True if it has ended, without collecting it: `kill` still ends its group."""
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def gone(self) -> ChildGone:
        """Return an error with its end and last output, after at most two `LAST_WORDS_S`."""
        self.ended(LAST_WORDS_S)
        code = self.code
        if code is None:
            how = "hangs"
        elif code < 0:
            how = f"was ended by {signal_name(-code)}"
        else:
            how = f"ended with exit code {code}"
        printed = self.printed()
        return ChildGone(how + (f"; it printed: {printed}" if printed else ""))

    def printed(self) -> str:
        """Return the end of its output."""
        if not self.alive:
            self._reader.join(LAST_WORDS_S)
        return self._tail.decode("utf-8", "replace").strip()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it, and all processes in its session's group; harmless when it has ended.

        After a child ended by itself and was collected (`alive`, `ended`), the group's number may
        be another's: the group is left alone.
        """
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                (os.killpg if self._own_session else os.kill)(self.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout if self._replies else None):
            if pipe is not None:
                with suppress(OSError):  # unsent requests
                    pipe.close()

    def _collect(self, pipe: IO[bytes]) -> None:
        unprinted = b""
        with pipe:
            while piece := os.read(pipe.fileno(), 65536):
                self._tail = (self._tail + piece)[-self._tail_bytes :]
                if self._print_line is not None:
                    *lines, unprinted = (unprinted + piece).split(b"\n")
                    for line in lines:
                        self._print_line(line.decode("utf-8", "replace"))
        if unprinted and self._print_line is not None:
            self._print_line(unprinted.decode("utf-8", "replace"))


def end_with_parent(
    message: str = "", *, after_s: float = 0.0, at_end: Callable[[], object] = lambda: None
) -> None:
    """Kill this process's group `after_s` seconds after its parent has ended in any way.

    `at_end` is called just before.

    Call it first in the child. The kernel's PR_SET_PDEATHSIG would also act at the end of the
    thread that started the child.
    """
    parent = os.getppid()

    def watch() -> None:
        with suppress(AttributeError, OSError):  # no Linux, or the parent has ended already
            poller = select.poll()
            poller.register(os.pidfd_open(parent), select.POLLIN)
            poller.poll()
        while os.getppid() == parent:
            time.sleep(WATCH_S)
        time.sleep(after_s)
        if message:
            print(message, file=sys.stderr, flush=True)
        at_end()
        os.killpg(os.getpgid(0), signal.SIGKILL)

    Thread(target=watch, daemon=True).start()
