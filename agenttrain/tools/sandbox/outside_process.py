"""Outside: the processes of one sandbox, from their start to their end.

`inside` makes the settings that one starts with.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from agenttrain.tools.sandbox.config import SandboxSettings
from agenttrain.tools.sandbox.confine import INNER_ID
from agenttrain.utils.child_process import ChildProcess
from agenttrain.utils.temporary import TemporaryFolder

PACKAGE_ROOT = str(Path(__file__).parents[3])
START = (
    "import sys; sys.path.insert(0, {root!r}); "
    "from agenttrain.tools.sandbox.inside_setup import main; sys.path.remove({root!r}); main()"
)
START_S = 30.0
"""A sandbox that is not there by then is broken."""
END_S = 5.0
"""Seconds after which a sandbox that should end is killed from outside."""


class SandboxError(Exception):
    """A sandbox cannot be started, or died and nobody asked it to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxProcess:
    """One interpreter in a sandbox."""

    channel: socket.socket
    """Our end of the channel to it."""
    output: int
    """The file with its output."""


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
        # Its first process reads `go` (everything inside runs) and `halt` (stops where it is).
        self.control, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.setblocking(False)
        self._process: ChildProcess | None = None
        self._workers: dict[str, SandboxProcess] = {}
        self._folder: TemporaryFolder | None = None

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
            if not problem and self._process is not None:
                # It ended before it could answer: the last line that it printed says why.
                lines = self._process.printed().splitlines()
                problem = lines[-1] if lines else "it ended before it was ready"
            self.kill()
            raise SandboxError(problem)
        self.alive = True

    def worker(self, kind: str) -> SandboxProcess:
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
            self._workers[kind] = SandboxProcess(channel=ours, output=output)
        return self._workers[kind]

    def forget(self, kind: str) -> None:
        """Close the files of an interpreter that is gone."""
        worker = self._workers.pop(kind, None)
        if worker is not None:
            worker.channel.close()
            os.close(worker.output)

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
        folder, self._folder = self._folder, None
        waited, pause = 0.0, 0.002
        while process is not None and process.alive:
            if waited > END_S:
                process.signal(signal.SIGKILL)
            await asyncio.sleep(pause)
            waited, pause = waited + pause, min(pause * 2, 0.1)
        if process is not None:
            process.kill()  # closes its files
        if folder is not None:  # also if no process could be started
            folder.remove()

    def _launch(self) -> None:
        work = "/work"
        if self.backend == "none":
            self._folder = TemporaryFolder()
            work = str(self._folder.path / "work")
            os.mkdir(work)
        with self._theirs as theirs:
            number = theirs.fileno()
            user = None if self.backend == "none" else next_user()
            settings = inside(self.settings, self.backend, control=number, work=work, user=user)
            before = [*bubblewrap(user), "--"] if self.backend == "bwrap" else []
            code = START.format(root=PACKAGE_ROOT)
            # The code sees none of our variables.
            environment = {
                "PATH": f"{os.path.dirname(interpreter())}:/usr/local/bin:/usr/bin:/bin",
                "HOME": work,
                "LANG": "C.UTF-8",
                "TMPDIR": "/tmp" if work == "/work" else work,
                # A pool of threads per processor would use up the processes that are allowed.
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
                "PYTHONDONTWRITEBYTECODE": "1",
            }
            # No pipe: the thread that reads it would be one for each rollout.
            with tempfile.TemporaryFile() as output:
                self._process = ChildProcess(
                    [*before, interpreter(), "-I", "-S", "-c", code, json.dumps(settings)],
                    keeper=self.backend == "none",  # a namespace of processes ends as a whole
                    pass_fds=(number,),
                    env=environment,
                    cwd="/",
                    output=output,
                )


def inside(
    settings: SandboxSettings, backend: str, *, control: int, work: str, user: int | None
) -> dict[str, object]:
    """Collect the settings that `inside_setup.py` gets."""
    limits = asdict(settings)
    for name in ("sandbox", "call_s", "max_chars"):
        del limits[name]
    packages = None if settings.packages is None else os.path.realpath(settings.packages)
    prefix = os.path.realpath(sys.base_prefix)
    folders = [path for path in (prefix, packages) if path and not path.startswith("/usr/")]
    return {
        **limits,
        "packages": packages,
        "backend": backend,
        "control": control,
        "work": work,
        "user": user,
        "folders": [path for path in folders if path != "/usr"],
    }


def interpreter() -> str:
    """Return the Python that runs agenttrain, outside of any virtual environment."""
    path = getattr(sys, "_base_executable", sys.executable) or sys.executable
    return os.path.realpath(path)


def bubblewrap(user: int | None) -> list[str]:
    """Return bubblewrap with options that make new namespaces, and leave all privileges in them:
    the command, which follows `--`, calls `confine`. Raises FileNotFoundError.

    `user` is the one that the command will become; None: it gets a user namespace.
    """
    program = shutil.which("bwrap")
    if program is None:
        raise FileNotFoundError("bwrap is not installed")
    inner = str(INNER_ID)
    mapped = ["--unshare-user", "--uid", inner, "--gid", inner] if user is None else []
    spaces = [f"--unshare-{name}" for name in ("pid", "net", "ipc", "uts", "cgroup-try")]
    return [program, *mapped, *spaces, "--as-pid-1", "--cap-add", "ALL", "--dev-bind", "/", "/"]


_users = iter(range(1, 1 << 62))


def next_user() -> int | None:
    """Return a user id that nobody has, if this process is root; else None: a user namespace.

    The processes of a sandbox are counted by it, and root itself has no limit and could write to
    /proc/sys. Raises PermissionError where the machine's root has no other user to become.
    """
    if os.geteuid() != 0:
        return None
    with open("/proc/self/uid_map", encoding="utf-8") as file:
        inner, outer, count = (int(number) for number in file.readline().split())
    if inner == 0 and outer == 0 and count < 1 << 31:
        raise PermissionError("this process is the machine's root and can become no other user")
    if count < 1 << 31:
        return None
    return 0x7000_0000 + ((os.getpid() & 0xFFFF) << 11) + (next(_users) & 0x7FF)
