"""Outside: the processes of one sandbox, from their start to their end."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from agenttrain.config.sandbox import SandboxSettings
from agenttrain.tools.sandbox.command import (
    bwrap_command,
    environment,
    inside,
    interpreter,
    next_user,
)

PACKAGE_ROOT = str(Path(__file__).parents[3])
START = (
    "import sys; sys.path.insert(0, {root!r}); "
    "from agenttrain.tools.sandbox.start import main; sys.path.remove({root!r}); main()"
)
START_S = 30.0
"""A sandbox that is not there by then is broken."""
END_S = 5.0
"""Seconds after which a sandbox that should end is killed from outside."""


class SandboxError(Exception):
    """A sandbox cannot be started, or died and nobody asked it to."""


class Worker:
    """One interpreter in a sandbox: the channel to it, and what it prints."""

    def __init__(self, channel: socket.socket, output: int) -> None:
        self.channel, self.output = channel, output
        self.calls = 0

    def close(self) -> None:
        """Close our ends."""
        self.channel.close()
        os.close(self.output)


class Jail:
    """A sandbox: an own view of files, processes and network, which ends as a whole.

    Example::

        jail = Jail(SandboxSettings(), "unshare")
        await jail.start()
        worker = jail.worker("python")
        jail.kill()
        await jail.wait()
    """

    def __init__(self, settings: SandboxSettings, backend: str) -> None:
        self.settings, self.backend = settings, backend
        self.lock = asyncio.Lock()
        """Calls run one at a time: between them everything in the sandbox stands still."""
        self.alive = False
        self.started = False
        self.interrupt: Callable[[], None] | None = None
        """Set during a call: what it does before its files are closed, whose numbers others get."""
        self.control, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.setblocking(False)
        self._process: subprocess.Popen[bytes] | None = None
        self._workers: dict[str, Worker] = {}
        self._folder: str | None = None

    async def start(self) -> None:
        """Start it; raises SandboxError with the reason if that cannot be done here."""
        self.started = True
        try:
            self._launch()
            async with asyncio.timeout(START_S):
                answer = await asyncio.get_running_loop().sock_recv(self.control, 4096)
        except TimeoutError:
            answer = b"failed it did not start in time"
        except OSError as error:
            self.kill()
            raise SandboxError(str(error)) from error
        except BaseException:
            self.kill()
            raise
        if answer != b"ready":
            problem = answer.removeprefix(b"failed ").decode(errors="replace")
            problem = problem or self._last_error_line()
            self.kill()
            raise SandboxError(problem)
        self.alive = True

    def worker(self, kind: str) -> Worker:
        """Return the interpreter of this kind, `python` or `bash`; started if there is none."""
        if kind not in self._workers:
            ours, theirs = socket.socketpair()
            output, printed = os.pipe()
            with theirs:
                try:
                    files = [theirs.fileno(), printed]
                    socket.send_fds(self.control, [f"start {kind}".encode()], files)
                finally:
                    os.close(printed)
            ours.setblocking(False)
            os.set_blocking(output, False)
            self._workers[kind] = Worker(ours, output)
        return self._workers[kind]

    def forget(self, kind: str) -> None:
        """Close the files of an interpreter that is gone."""
        worker = self._workers.pop(kind, None)
        if worker is not None:
            worker.close()

    def resume(self) -> None:
        """Let what is inside run."""
        self.control.send(b"go")

    def pause(self) -> None:
        """Stop everything inside where it is."""
        self.control.send(b"halt")

    def kill(self) -> None:
        """End it without waiting; it is then of no use."""
        self.alive = False
        if self.interrupt is not None:
            self.interrupt()
        # Its first process ends when it reads the end of the file, and all others with it.
        self.control.close()
        self._theirs.close()
        for kind in list(self._workers):
            self.forget(kind)

    async def wait(self) -> None:
        """Wait until nothing is left of it."""
        process, self._process = self._process, None
        if process is None:
            return
        waited, pause = 0.0, 0.002
        while process.poll() is None:
            if waited > END_S:
                process.kill()
            await asyncio.sleep(pause)
            waited, pause = waited + pause, min(pause * 2, 0.1)
        if process.stderr is not None:
            process.stderr.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _launch(self) -> None:
        if self.backend == "none":
            self._folder = tempfile.mkdtemp(prefix="agenttrain-")
        work = self._folder or "/work"
        with self._theirs as theirs:
            number = theirs.fileno()
            user = None if self.backend == "none" else next_user()
            settings = inside(self.settings, self.backend, control=number, work=work, user=user)
            before = bwrap_command(user) if self.backend == "bwrap" else []
            code = START.format(root=PACKAGE_ROOT)
            self._process = subprocess.Popen(
                [*before, interpreter(), "-I", "-S", "-c", code, json.dumps(settings)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(number,),
                env=environment(work),
                cwd="/",
                start_new_session=True,
            )

    def _last_error_line(self) -> str:
        """Read why a process ended before it could answer: the last line of its stderr."""
        if self._process is None or self._process.stderr is None:
            return "it did not start"
        os.set_blocking(self._process.stderr.fileno(), False)
        lines = (self._process.stderr.read() or b"").decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it ended before it was ready"
