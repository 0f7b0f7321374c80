"""Outside: the processes of one sandbox, from their start to their end."""

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
"""Seconds that a sandbox has to start."""
END_S = 5.0
"""Seconds that a sandbox has to end before it is killed from outside."""


class SandboxError(Exception):
    """A sandbox cannot be started, or has ended by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxProcess:
    """One interpreter in a sandbox."""

    channel: socket.socket
    """Outer end of the channel to the interpreter."""
    output: int
    """File descriptor from which its output is read."""


class Jail:
    """A sandbox with its own files, processes and network, which ends as a whole.

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
        """Held during a call: calls run one at a time. Between them SIGSTOP halts all processes."""
        self.alive = False
        """True while calls can run."""
        self.started = False
        """True once `start` was called, also if it failed."""
        self.interrupt: Callable[[], None] | None = None
        """Set during a call: `kill` calls it before it closes the files that the call reads."""
        # The connection to the sandbox's first process: `init.py` lists the messages. The first
        # process inherits the inner end from `_launch`, which then closes it in this process.
        self.control, self._inner_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.setblocking(False)
        self._process: ChildProcess | None = None
        """The first process, or bubblewrap around it."""
        self._workers: dict[str, SandboxProcess] = {}
        """`python` or `bash` -> its interpreter."""
        self._folder: TemporaryFolder | None = None
        """Holds /work if the backend is `none`."""

    async def start(self) -> None:
        """Start the sandbox; raises SandboxError with the reason if it does not start."""
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
                # b"": the process ended before it could answer. Its last line of output says why.
                lines = self._process.printed().splitlines()
                problem = lines[-1] if lines else "it ended before it was ready"
            self.kill()
            raise SandboxError(problem)
        self.alive = True

    def worker(self, kind: str) -> SandboxProcess:
        """Return the interpreter of this kind, `python` or `bash`; start it if there is none."""
        if kind not in self._workers:
            channel, inner_channel = socket.socketpair()
            output, inner_output = os.pipe()
            with inner_channel:
                try:
                    files = [inner_channel.fileno(), inner_output]
                    socket.send_fds(self.control, [f"start {kind}".encode()], files)
                finally:
                    os.close(inner_output)
            channel.setblocking(False)
            os.set_blocking(output, False)
            self._workers[kind] = SandboxProcess(channel=channel, output=output)
        return self._workers[kind]

    def forget(self, kind: str) -> None:
        """Close the files of an interpreter that has ended."""
        worker = self._workers.pop(kind, None)
        if worker is not None:
            worker.channel.close()
            os.close(worker.output)

    def kill(self) -> None:
        """End the sandbox without waiting; it cannot be used again."""
        self.alive = False
        if self.interrupt is not None:  # a call is in progress: it must not read closed files
            self.interrupt()
        # The first process ends when this connection closes, and all others with it.
        self.control.close()
        self._inner_end.close()  # open if the sandbox was never started
        for kind in list(self._workers):
            self.forget(kind)

    async def wait(self) -> None:
        """Wait until all processes of a killed sandbox have ended, and remove its folder."""
        process, self._process = self._process, None
        folder, self._folder = self._folder, None
        waited, pause = 0.0, 0.002
        while process is not None and process.alive:
            if waited > END_S:  # it should have ended itself when `kill` closed the connection
                process.signal(signal.SIGKILL)
            await asyncio.sleep(pause)
            waited, pause = waited + pause, min(pause * 2, 0.1)
        if process is not None:
            process.kill()  # it has ended: this closes our files of it
        if folder is not None:  # also if no process could be started
            folder.remove()

    def _launch(self) -> None:
        """Start the first process, which then says `ready` or `failed …`."""
        work = "/work"
        if self.backend == "none":
            self._folder = TemporaryFolder()
            work = str(self._folder.path / "work")
            os.mkdir(work)
        with self._inner_end as inner_end:
            control_fd = inner_end.fileno()
            user = None if self.backend == "none" else next_user()
            settings = settings_inside(
                self.settings, self.backend, control=control_fd, work=work, user=user
            )
            wrapper = [*bubblewrap(user), "--"] if self.backend == "bwrap" else []
            code = START.format(root=PACKAGE_ROOT)  # calls `inside_setup.main`
            # Messages of a failed start, which `ChildProcess.printed` reads from its own descriptor
            # of the file. Not a pipe, whose reading would take a thread for each rollout.
            with tempfile.TemporaryFile() as output:
                # -I -S: without the user's packages and without those of site-packages.
                self._process = ChildProcess(
                    [*wrapper, base_python(), "-I", "-S", "-c", code, json.dumps(settings)],
                    # The kernel ends a namespace as a whole with its first process. Without one,
                    # a keeper has to end what the process leaves behind.
                    keeper=self.backend == "none",
                    pass_fds=(control_fd,),
                    env=code_environment(work),
                    cwd="/",
                    output=output,
                )


def code_environment(work: str) -> dict[str, str]:
    """Return the environment variables of the code: none of this process's own."""
    return {
        "PATH": f"{os.path.dirname(base_python())}:/usr/local/bin:/usr/bin:/bin",
        "HOME": work,
        "LANG": "C.UTF-8",
        "TMPDIR": "/tmp" if work == "/work" else work,
        # One thread per processor would use up the processes that are allowed.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def settings_inside(
    settings: SandboxSettings, backend: str, *, control: int, work: str, user: int | None
) -> dict[str, object]:
    """Return the settings with which `inside_setup.py` starts a sandbox.

    `control` is the number of the file that is connected to this process, `work` the folder in
    which the code begins, `user` the id that it runs under (None: outside it stays our user's).
    """
    limits = asdict(settings)
    for name in ("sandbox", "call_s", "max_chars"):  # of use outside only
        del limits[name]
    packages = None if settings.packages is None else os.path.realpath(settings.packages)
    prefix = os.path.realpath(sys.base_prefix)
    # Folders to make visible. /usr and what is in it are visible in every sandbox.
    folders = [path for path in (prefix, packages) if path and not f"{path}/".startswith("/usr/")]
    return {
        **limits,
        "packages": packages,
        "backend": backend,
        "control": control,
        "work": work,
        "user": user,
        "folders": folders,
    }


def base_python() -> str:
    """Return the Python that runs agenttrain, outside of any virtual environment."""
    path = getattr(sys, "_base_executable", sys.executable) or sys.executable
    return os.path.realpath(path)


def bubblewrap(user: int | None) -> list[str]:
    """Return the bubblewrap command that makes new namespaces; `--` and a command follow it.

    The command is a program of ours (`inside_setup.py`). It starts with all capabilities and the
    machine's files, because it builds the sandbox's file system itself; `confine` drops both before
    any code of the model runs. `user` is the id to which `confine` then changes. None: this process
    is not root and can change to no other user, so a user namespace gives it the capabilities, and
    the id INNER_ID in it. Raises FileNotFoundError.
    """
    program = shutil.which("bwrap")
    if program is None:
        raise FileNotFoundError("bwrap is not installed")
    inner = str(INNER_ID)
    user_options = ["--unshare-user", "--uid", inner, "--gid", inner] if user is None else []
    options = [f"--unshare-{name}" for name in ("pid", "net", "ipc", "uts", "cgroup-try")]
    options += ["--as-pid-1", "--cap-add", "ALL", "--dev-bind", "/", "/"]
    return [program, *user_options, *options]


_user_numbers = iter(range(1, 1 << 62))


def next_user() -> int | None:
    """Return an unused user id for a sandbox if this process is root; else None.

    None means that the sandbox gets a user namespace. Each sandbox of root has a user of its own,
    by which Linux counts its processes: root itself has no limit, and could write to /proc/sys.
    Raises PermissionError if the machine's root can become no other user.
    """
    if os.geteuid() != 0:
        return None
    with open("/proc/self/uid_map", encoding="utf-8") as file:
        # "0 0 4294967295": ids from 0 on in here are those from 0 on outside, and so many exist.
        inner, outer, count = (int(number) for number in file.readline().split())
    has_ids = count >= 1 << 31  # the ids returned below are less, so this process can take them
    if not has_ids and inner == 0 and outer == 0:
        # A user namespace would not help: its code would be the machine's root outside.
        raise PermissionError("this process is the machine's root and can become no other user")
    if not has_ids:  # root of a container, who is an ordinary user outside
        return None
    # 16 bits of the process id and 11 of a counter: unused ids, distinct in concurrent runs, from
    # 0x7000_0000 to 0x77FF_FFFF.
    return 0x7000_0000 + ((os.getpid() & 0xFFFF) << 11) + (next(_user_numbers) & 0x7FF)
