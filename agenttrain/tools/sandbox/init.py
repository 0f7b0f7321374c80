"""Inside the sandbox: the first process. It starts workers and watches the memory in use.

It runs none of the model's code, and no process of the sandbox can signal or inspect it. It trusts
no data from the sandbox. If the parent closes the connection or dies, this process ends, and the
kernel then ends all other processes of the namespace. Messages:

    from the parent   `start <kind>`            with two files: start the worker `python` or `bash`
                      `go`, `halt`              let the workers run; stop them where they are
    to the parent     `ready`
                      `exit <kind> <status>`    a worker has ended
                      `memory`                  the memory limit is exceeded: all were killed
                      `full`                    a worker could not start: too many processes
"""

from __future__ import annotations

import os
import select
import signal
import socket
from contextlib import suppress
from typing import Any

from agenttrain.tools.sandbox import repl
from agenttrain.tools.sandbox.confine import limit_worker
from agenttrain.tools.sandbox.memory_use import memory_in_use

MEMORY_CHECK_MS = 50
"""Milliseconds between two checks of the memory in use."""
EXITS_AT_ONCE = 100
"""Ended processes that are handled before the next message of the parent is read."""
CHANNEL = 9
"""File descriptor of bash's channel to the parent."""


class InitProcess:
    """The first process of a sandbox, with its workers and its connection to the parent.

    A worker is an interpreter, `python` or `bash`, that runs the model's code. The sandbox runs
    only during a call: `halt` stops all its processes (SIGSTOP) when the call has ended, so that
    background processes take no processor time between calls, and `go` lets them run (SIGCONT).
    """

    def __init__(self, control: socket.socket, settings: dict[str, Any]) -> None:
        self._control, self._settings = control, settings
        self._pipe = os.pipe()
        """A byte in it wakes `run` when a child has ended."""
        self._isolated = settings["backend"] != "none" and os.getpid() == 1
        """True in a process namespace, where all other processes are the sandbox's."""
        self._workers: dict[int, str] = {}
        """Process id -> `python` or `bash`."""
        self._running = False
        """True between `go` and `halt`."""

    def run(self) -> None:
        """Serve the parent until it closes the connection; does not return."""
        for name in (signal.SIGINT, signal.SIGTERM):
            # Ignore them: the kernel drops signals to a first process that has no handler.
            signal.signal(name, signal.SIG_DFL)
        # SIGCHLD, at the end of a child, writes a byte to the pipe. It needs a handler for that.
        wakeup_read, wakeup_write = self._pipe
        os.set_blocking(wakeup_write, False)
        os.set_blocking(wakeup_read, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        poller.register(wakeup_read, select.POLLIN)
        self._control.send(b"ready")
        try:
            while True:
                watches_memory = self._running and self._isolated
                wait_ms = MEMORY_CHECK_MS if watches_memory else None
                for descriptor, _ in poller.poll(wait_ms):
                    if descriptor == wakeup_read:
                        with suppress(BlockingIOError):
                            os.read(descriptor, 4096)
                    elif not self._handle_message():
                        return
                self._report_exits()
                limit = self._settings["memory_mb"] << 20
                # All writable folders are one file system, so that one of them counts for all.
                if watches_memory and memory_in_use(("/work",)) > limit:
                    self._control.send(b"memory")
                    self._signal_all(signal.SIGKILL)
        finally:
            self._signal_all(signal.SIGKILL)
            os._exit(0)

    def _report_exits(self) -> None:
        """Reap children that have ended, and tell the parent of the workers among them."""
        with suppress(ChildProcessError):  # there is no child
            # The parent's messages do not wait for more. The next pass of `run` reaps further ones:
            # within MEMORY_CHECK_MS while the workers run.
            for _ in range(EXITS_AT_ONCE):
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:  # all children run
                    return
                kind = self._workers.pop(pid, None)
                if kind is not None:  # None: a process that the code started and left behind
                    exit_code = os.waitstatus_to_exitcode(status)
                    self._control.send(f"exit {kind} {exit_code}".encode())

    def _handle_message(self) -> bool:
        """Handle one message of the parent; return False if it closed the connection."""
        message, files, *_ = socket.recv_fds(self._control, 64, 2)
        if message.startswith(b"start "):
            kind, (channel, output) = message.split()[1].decode(), files
            try:
                worker = os.fork()
            except OSError:
                self._control.send(b"full")
                return True
            if worker == 0:
                try:
                    self._exec_worker(kind, channel, output)
                finally:
                    os._exit(1)
            self._workers[worker] = kind
            os.close(channel)
            os.close(output)
        elif message == b"go":
            self._running = True
            self._signal_all(signal.SIGCONT)
        elif message == b"halt":
            self._signal_all(signal.SIGSTOP)
            self._running = False
        return bool(message)

    def _signal_all(self, number: int) -> None:
        """Signal every other process of the sandbox."""
        if self._isolated:
            with suppress(ProcessLookupError):
                os.kill(-1, number)
            return
        # Without a process namespace, -1 would be every process of the user.
        for worker in self._workers:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(worker, number)

    def _exec_worker(self, kind: str, channel: int, output: int) -> None:
        """Turn this fork into the worker `kind`; drop files and handlers of the first process.

        `channel` is the worker's socket to the parent, `output` the pipe for what its code prints.
        """
        os.setsid()  # a process group of its own, which `_signal_all` signals
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._control.close()
        for number in self._pipe:
            os.close(number)
        if self._isolated:
            from agenttrain.tools.sandbox.system import PR_SET_DUMPABLE, prctl

            # The first process has set 0 for itself. The code may inspect its own processes.
            prctl(PR_SET_DUMPABLE, 1)
        limits = ("memory_mb", "file_mb", "cpu_s")
        limit_worker(**{name: self._settings[name] for name in limits})
        for number in (1, 2):
            os.dup2(output, number)
        os.close(output)
        if kind == "python":  # in this very interpreter, which ignores SIGPIPE as Python does
            repl.run(socket.socket(fileno=channel), self._settings["packages"])
            return
        # Programs of a shell expect to be ended by SIGPIPE: `yes | head`.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.dup2(channel, CHANNEL)  # for answers
        os.dup2(channel, 0)  # for commands
        # bash gets no other file of this process, which has far fewer than 64 open.
        os.closerange(3, CHANNEL)
        os.closerange(CHANNEL + 1, 64)
        os.execv("/bin/bash", ["bash", "--noprofile", "--norc"])
