"""Containers by the programs podman and docker.

A container started by root has a user namespace of its own. All containers drop all capabilities
but those that the settings name, gain no privileges, and have the client's seccomp profile.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import resource
import secrets
import shutil
import socket
import stat
import tarfile
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from agenttrain.runtimes import allowlist
from agenttrain.runtimes.base import MachineLost, MachineSpec
from agenttrain.runtimes.channel import INSIDE, START, ExecChannel
from agenttrain.runtimes.client import ClientTimeout, call_client
from agenttrain.runtimes.leftovers import own_prefix, remove_leftovers, start_reaper
from agenttrain.runtimes.network import listener_inside
from agenttrain.runtimes.output import Clipped
from agenttrain.runtimes.reaper import LABEL
from agenttrain.types import CommandResult
from agenttrain.utils.temporary import TemporaryFolder

FIRST_ID, IDS = 0x7800_0000, 1 << 16
"""Host ids of the users in containers that root has started; the same for all, so that an image is
mapped once."""
ROOT = ("0", "root")
STOP_S = 30.0
"""Seconds that the removal of a container may take."""
COPY_S = 300.0
PROBLEM_CHARS = 500
"""Characters of a client's output that an error quotes."""
DISK_CHECK_S = 1.0
"""Seconds between two measurements of what containers have written."""
KILLED = 137
"""Exit code of a command that SIGKILL ended, as shells count: 128 + 9."""
INODE = 4096
"""Bytes that count for each file and folder, also an empty one."""
DEEPEST = 200
"""Folders within folders that are measured; a container that nests more counts as full."""
ABSENT = 77
"""Exit code for a path that is not there."""
TAR_CHANGED = 1
"""tar's exit code for a file that changed while it was read; the archive is whole."""
MB = 1 << 20
_numbers = itertools.count()


class Container:
    """A running container; see `RolloutMachine`.

    Commands run over its `channel`, in the shell that is its first process: that costs a fork, and
    podman's or docker's own `exec` costs a client. But the shell has one user, so commands of
    another user go by the client. The host's folder of the channel is INSIDE in the container,
    read-only; `copy_in` stages files there.
    """

    def __init__(
        self,
        client: str,
        name: str,
        spec: MachineSpec,
        channel: ExecChannel,
        forget: Callable[[str], object],
    ) -> None:
        """`forget` is called with the name once the container is removed."""
        self.client, self.name, self.spec = client, name, spec
        self.channel, self._forget = channel, forget
        self.pid = 0
        """Id of its first process, as the host sees it."""
        self.is_root = False
        """True if commands of the channel run as root of the container."""
        self.upper: str | None = None
        """Folder on the host that holds what it wrote; None for a storage driver without one."""
        self.proxy: asyncio.Server | None = None
        """Proxy through which its programs reach `spec.hosts`."""
        self._staged = itertools.count()
        """Numbers of the copies that `copy_in` stages in the channel's folder."""

    async def exec(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        max_bytes: int = 1 << 20,
        on_output: Callable[[bytes], object] | None = None,
    ) -> CommandResult:
        """Run a command: over the channel, whose shell runs as `spec.user`, or by the client.

        The shell cannot become another user. For one, the client's `exec` runs the command.
        """
        folder = cwd if cwd is not None else self.spec.workdir
        if user is None or user == self.spec.user or (user in ROOT and self.is_root):
            return await self.channel.exec(
                command,
                timeout_s=timeout_s,
                stdin=stdin,
                env=env,
                cwd=folder,
                max_bytes=max_bytes,
                on_output=on_output,
            )
        if self.channel.problem is not None:
            raise MachineLost(self.channel.problem)
        output = _AfterMark(Clipped(max_bytes, on_output))
        return await self._exec_by_client(
            user, command, output, timeout_s=timeout_s, stdin=stdin, env=env or {}, folder=folder
        )

    async def _exec_by_client(
        self,
        user: str,
        command: Sequence[str],
        output: _AfterMark,
        *,
        timeout_s: float,
        stdin: bytes,
        env: Mapping[str, str],
        folder: str | None,
    ) -> CommandResult:
        """Run a command as `user` by the client's `exec`; its output goes to `output`."""
        options = ["--interactive"] if stdin else []
        options += [] if folder is None else ["-w", folder]
        # The client's errors and exit codes look like the command's. So the container prints a mark
        # just before it starts the command: without it the client has failed.
        print_mark = ("sh", "-c", f'echo {output.mark}; exec "$@"', "sh")
        try:
            with env_options(env) as variables:
                result = await call_client(
                    [
                        self.client,
                        "exec",
                        "-u",
                        user,
                        *options,
                        *variables,
                        self.name,
                        *print_mark,
                        *command,
                    ],
                    timeout_s=timeout_s,
                    stdin=stdin,
                    on_output=output.add,
                )
        except ClientTimeout:
            # The client was killed; the command goes on in the container, and no client can end it
            # with all that it has started. So the container ends.
            await self.stop()
            return output.result(KILLED, timed_out=True)
        except OSError as error:
            raise MachineLost(f"{self.name}: a command cannot be started: {error}") from error
        if not output.is_marked:  # the exit code is the client's own
            raise MachineLost(f"{self.name}: a command cannot be started: {output.problem}")
        return output.result(result.code)

    async def copy_in(self, source: Path, target: str) -> None:
        """Copy a file or a folder's contents; by the container's own mkdir and cp, as its root."""
        name = f"copy{next(self._staged)}"
        staged = self.channel.folder / name
        try:
            await asyncio.to_thread(_stage, source, staged)
        except OSError as error:
            raise MachineLost(f"{source}: cannot be copied: {error}") from error
        inside, parent = f"{INSIDE}/{name}", target.rpartition("/")[0] or "/"
        # $1 is the staged copy, $2 the target, $3 the folder of the target.
        script = 'mkdir -p "$2" && cp -R "$1/." "$2"'
        if source.is_file():
            script = 'mkdir -p "$3" && cp "$1" "$2"'
        try:
            result = await self.exec(
                ["sh", "-c", script, "sh", inside, target, parent],
                timeout_s=COPY_S,
                cwd="/",
                user="0",
            )
        finally:
            if source.is_file():
                staged.unlink(missing_ok=True)
            else:
                shutil.rmtree(staged, ignore_errors=True)
        if result.code:
            raise MachineLost(f"{source}: cannot be copied to {target}: {result.text.strip()}")

    async def copy_out(self, source: str, target: Path) -> bool:
        """Copy a file or folder out, by the container's own tar; return False if there is none."""
        folder, _, name = source.rstrip("/").rpartition("/")
        script = f'test -e "$1/$2" || exit {ABSENT}; exec tar -c -f - -C "$1" -- "$2" 2>/dev/null'
        with tempfile.TemporaryFile() as archive:
            result = await self.exec(
                ["sh", "-c", script, "sh", folder or "/", name or "."],
                timeout_s=COPY_S,
                cwd="/",
                # The whole archive goes into the file. The result has a copy, which nobody reads:
                # a few bytes of it are enough.
                on_output=archive.write,
                max_bytes=1 << 12,
            )
            if result.code == ABSENT:
                return False
            # 0, and TAR_CHANGED (1): a file changed while it was read, and the archive is whole.
            # Errors of tar are 2 and more; an image without tar gives 127.
            if result.code > TAR_CHANGED:
                raise MachineLost(f"{source}: cannot be copied out: tar: exit code {result.code}")
            archive.seek(0)
            await asyncio.to_thread(_unpack, archive, name, target)
        return True

    async def end_processes(self) -> None:
        """End all processes of its user but its shell. Raises MachineLost."""
        await self.channel.end_processes()

    def listener(self, port: int) -> socket.socket:
        """Return a socket that listens on 127.0.0.1 in the container's network."""
        return listener_inside(self.pid, port)

    async def stop(self) -> None:
        """Remove the container. Raises MachineLost if the client does not."""
        self.channel.close()
        if self.proxy is not None:
            self.proxy.close()
        result = await call_client([self.client, "rm", "-f", self.name], timeout_s=STOP_S)
        if result.code and "no such container" not in result.problem.lower():
            raise MachineLost(f"{self.name}: cannot be removed: {result.problem}")
        self._forget(self.name)


class _AfterMark:
    """Splits the output of `podman exec` into the client's own text and the command's output.

    The container prints a line with a random `mark` just before it starts the command.
    """

    def __init__(self, output: Clipped) -> None:
        self.mark = f"started-{secrets.token_hex(8)}"
        self.is_marked = False
        """True once the mark was read: the command has started."""
        self._output = output
        self._client_text = b""
        """Text before the mark: error messages of the client, if any."""

    def add(self, data: bytes) -> None:
        """Add the next piece of output; the mark may be split over two of them."""
        if self.is_marked:
            self._output.add(data)
            return
        self._client_text += data
        client_text, mark, output = self._client_text.partition(f"{self.mark}\n".encode())
        if mark:
            self.is_marked, self._client_text = True, client_text
            if output:
                self._output.add(output)

    @property
    def problem(self) -> str:
        """The client's error message, for a command that was not started."""
        text = self._client_text.decode("utf-8", "replace").strip()
        return text[-PROBLEM_CHARS:] or "its client says nothing"

    def result(self, code: int, *, timed_out: bool = False) -> CommandResult:
        """Return the outcome of the command."""
        output = self._output
        return CommandResult(
            code=code, output=output.bytes(), size=output.size, timed_out=timed_out
        )


@contextmanager
def env_options(env: Mapping[str, str]) -> Iterator[list[str]]:
    """Yield the client's options that set a container's variables.

    Values are passed in a file, not on the command line, which other users of the host can read,
    and not in the client's own environment, where they could change what the client does. Values of
    several lines are an exception: they stand on the command line.
    """
    options, lines = [], []
    for key, value in env.items():
        if os.environ.get(key) == value:
            options += ["--env", key]  # the client passes its own value on
        elif "\n" in value or "\r" in value:
            # The file has one line per variable and cannot hold this value. So other users of the
            # host can read it.
            options += ["--env", f"{key}={value}"]
        else:
            lines.append(f"{key}={value}\n")
    with tempfile.NamedTemporaryFile("w", errors="surrogateescape") as file:
        file.writelines(lines)
        file.flush()
        yield [*options, "--env-file", file.name] if lines else options


class Containers:
    """Starts containers, and ends those that are left.

    A run has one, in one event loop. `Container.stop` removes a container, `aclose` all others.
    Containers that outlive this process are removed by a reaper, a process beside it, or at the
    start of the next run (`remove_leftovers`). A task of the event loop ends containers that write
    more to their disk than `MachineSpec.disk_mb`.
    """

    def __init__(self, client: str, *, start_timeout_s: float = 60.0, pull: bool = False) -> None:
        self.client, self._start_timeout_s = client, start_timeout_s
        self._pull = "missing" if pull else "never"
        self._live: dict[str, Container] = {}
        """Name -> a container that is not removed yet."""
        self._prefix = own_prefix()
        """Beginning of the containers' names, by which leftovers of this process are found."""
        self._is_podman = os.path.basename(client) == "podman"
        self._maps_ids = self._is_podman and os.geteuid() == 0
        """True: a container's users 0, 1, … are FIRST_ID, FIRST_ID + 1, … on the host, IDS of them,
        so that its root is not the host's."""
        self._folder: TemporaryFolder | None = None
        """Folder of the containers' channels, from the first start on."""
        self._has_reaper = False
        self._warned_of_disk = False
        self._watching: asyncio.Task[None] | None = None
        """Measures what containers have written, as long as there are any."""

    async def start(self, spec: MachineSpec) -> Container:
        """Start a container; raises MachineLost."""
        try:
            return await self._start(spec)
        except OSError as error:  # a full disk, or no file can be opened any more
            raise MachineLost(f"image {spec.image}: no container starts: {error}") from error

    async def _start(self, spec: MachineSpec) -> Container:
        """Start a container, and remove it if a part of the start fails. Raises OSError too."""
        if self._folder is None:
            self._folder = TemporaryFolder()
        if not self._has_reaper:
            start_reaper(self.client)  # removes this process's containers if it is killed
            self._has_reaper = True
            await asyncio.to_thread(remove_leftovers, self.client)  # of earlier processes
        number = next(_numbers)
        name, folder = f"{self._prefix}{number}", self._folder.path / str(number)
        folder.mkdir()
        container = Container(self.client, name, spec, ExecChannel(folder), self._forget)
        self._live[name] = container
        try:
            proxy = allowlist.environment() if spec.hosts else {}
            with env_options({**proxy, **spec.env}) as variables:
                options = [*self._run_options(name, folder, spec), *variables]
                # The first process is a shell: by START it reads commands from the channel.
                result = await call_client(
                    [self.client, *options, spec.image, "-c", START],
                    timeout_s=self._start_timeout_s,
                    # podman's monitor writes a file `oom` where it was started.
                    cwd=self._folder.path,
                )
            if result.code:
                raise MachineLost(f"image {spec.image}: no container starts: {result.problem}")
            await container.channel.ready(timeout_s=self._start_timeout_s)
            container.pid = await self._pid_of(name)
            container.is_root = runs_as_root(container.pid)
            if self._is_podman:
                # A program could make itself a user namespace, and be root with all capabilities in
                # it. The limit against that belongs to a user namespace. podman's containers have
                # their own; docker's share the host's, whose limit is not ours to change.
                await self._forbid_namespaces(container.pid)
            if spec.hosts:  # the only ones that its programs reach, through a proxy
                listener = container.listener(allowlist.PORT)
                container.proxy = await allowlist.serve(listener, spec.hosts)
            container.upper = upper_folder(container.pid)  # which `_watch_disks` measures
        except BaseException:
            await asyncio.shield(_try_to_stop(container))
            raise
        if self._watching is None or self._watching.done():
            self._watching = asyncio.ensure_future(self._watch_disks())
        return container

    async def aclose(self) -> None:
        """Remove all containers that are left."""
        if self._watching is not None:
            self._watching.cancel()
        for container in list(self._live.values()):
            await _try_to_stop(container)
        if self._folder is not None:
            self._folder.remove()

    def _forget(self, name: str) -> None:
        """Drop a container that was removed."""
        self._live.pop(name, None)

    def _run_options(self, name: str, folder: Path, spec: MachineSpec) -> list[str]:
        """Return the client's arguments that start a container in the background: `run …`.

        `folder` is that of the container's `ExecChannel`. `disk_mb` limits single files here, and
        `_watch_disks` all of them together.
        """
        memory = f"{spec.memory_mb}m"
        processes = _at_most(spec.processes, resource.RLIMIT_NPROC)
        files = _at_most(spec.open_files, resource.RLIMIT_NOFILE)
        options = [
            *("run", "--detach", "--rm", "--name", name, "--pull", self._pull),
            *("--log-driver", "none", "--hostname", "sandbox", "--stop-timeout", "0"),
            *("--network", "bridge" if spec.is_open else "none"),
            *("--cpus", f"{spec.cpus:g}", "--memory", memory, "--memory-swap", memory),
            # The first limits the container by its cgroup, the second each of its users: it holds
            # also where the client has no cgroup to set.
            *("--pids-limit", str(spec.processes), "--ulimit", f"nproc={processes}:{processes}"),
            *("--ulimit", f"nofile={files}:{files}", "--ulimit", "core=0:0"),
            *("--ulimit", f"fsize={spec.disk_mb * MB}:{spec.disk_mb * MB}"),
            *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
            *("--volume", f"{folder}:{INSIDE}:ro", "--label", f"{LABEL}={self._prefix}"),
            *("--entrypoint", "/bin/sh"),
        ]
        if self._is_podman:
            options += ["--http-proxy=false"]  # a proxy's address may hold a password
            if self._maps_ids:
                ids = f"0:{FIRST_ID}:{IDS}"
                options += ["--uidmap", ids, "--gidmap", ids]
        for capability in spec.capabilities:
            options += ["--cap-add", capability]
        for key, value in spec.labels.items():
            options += ["--label", f"{key}={value}"]
        if spec.user is not None:
            options += ["--user", spec.user]
        return options

    async def _pid_of(self, name: str) -> int:
        """Return the pid of a container's first process."""
        result = await call_client(
            [self.client, "inspect", "--format", "{{.State.Pid}}", name],
            timeout_s=self._start_timeout_s,
        )
        text = result.out.decode().strip()
        if result.code or not text.isdigit():
            raise MachineLost(f"{name}: is not running: {result.problem}")
        return int(text)

    async def _forbid_namespaces(self, pid: int) -> None:
        """Forbid a container user namespaces of its own, in which it would have capabilities.

        The limit belongs to the container's user namespace, so it is written from inside of it.
        """
        script = "echo 0 > /proc/sys/user/max_user_namespaces"
        command = ["nsenter", "--target", str(pid), "--user", "sh", "-c", script]
        result = await call_client(command, timeout_s=self._start_timeout_s)
        if result.code:
            raise MachineLost(f"its user namespaces cannot be limited: {result.problem}")

    async def _watch_disks(self) -> None:
        """End containers that have written more than they may."""
        while self._live:
            await asyncio.sleep(DISK_CHECK_S)
            # A channel with a problem is that of a container that has ended or is being ended.
            watched = [c for c in self._live.values() if c.upper and c.channel.problem is None]
            sizes = await asyncio.to_thread(_sizes, [container.upper for container in watched])
            full = [
                container
                for container, size in zip(watched, sizes, strict=True)
                if size is not None and size > container.spec.disk_mb * MB
            ]
            for container, size in zip(watched, sizes, strict=True):
                if size is None and not self._warned_of_disk:
                    self._warned_of_disk = True
                    warnings.warn(
                        f"runtime.disk_mb={container.spec.disk_mb}: what a container wrote cannot "
                        "be read, so that only single files are limited",
                        RuntimeWarning,
                        stacklevel=2,
                    )
            for container in full:
                limit = f"runtime.disk_mb={container.spec.disk_mb}"
                container.channel.fail(f"{limit}: the container wrote more and was ended")
            await asyncio.gather(*map(_try_to_stop, full))


async def _try_to_stop(container: Container) -> None:
    """Remove a container; what the client cannot remove now is left to a later attempt."""
    with suppress(MachineLost):
        await container.stop()


def runs_as_root(pid: int) -> bool:
    """Return True if a process has id 0 in its user namespace; False if it cannot be seen."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        outside = int(status.partition("\nUid:")[2].split()[0])
        # A line has the first id inside, the first id outside, and the number of ids.
        for line in Path(f"/proc/{pid}/uid_map").read_text().splitlines():
            first, mapped, _ = map(int, line.split())
            if first == 0:
                return outside == mapped
    return False


def upper_folder(pid: int) -> str | None:
    """Return the folder on the host that holds what a container wrote: overlayfs' upper one.

    The container's disk use is measured there. None if its storage driver is not overlayfs.
    """
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines():
            words = line.split()  # the fifth is the mount point, the last the options
            if words[4] == "/":
                options = words[-1].split(",")
                upper = next((o for o in options if o.startswith("upperdir=")), "")
                folder = upper.partition("=")[2]
                return folder if os.path.isdir(folder) else None
    return None


def _sizes(folders: Sequence[str | None]) -> list[float | None]:
    """Return the bytes on disk of each folder; None for one that cannot be read.

    A folder of None has 0: the container's storage driver has no folder to measure.
    """
    sizes: list[float | None] = []
    for folder in folders:
        try:
            sizes.append(0.0 if folder is None else size_of(folder))
        except OSError:
            sizes.append(None)
    return sizes


def size_of(folder: str | int, depth: int = DEEPEST) -> float:
    """Return the bytes on disk below a folder, with INODE for each entry; infinity if too deep.

    What disappears meanwhile does not count. Raises OSError for what cannot be read.
    """
    if not depth:
        return math.inf
    total = 0.0
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError, NotADirectoryError):
                status = entry.stat(follow_symlinks=False)
                total += INODE + 512 * status.st_blocks
                if stat.S_ISDIR(status.st_mode):
                    total += _size_inside(folder, entry.name, depth - 1)
    return total


def _size_inside(folder: str | int, name: str, depth: int) -> float:
    """Return the size of the subfolder `name`, measured by `size_of` to `depth` levels below it.

    `folder` is the path of the top folder, or the open descriptor of a folder below it. Names are
    opened relative to a descriptor, because a container can nest folders so deep that their path
    is longer than the system opens.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    if isinstance(folder, str):
        descriptor = os.open(os.path.join(folder, name), flags)
    else:
        descriptor = os.open(name, flags, dir_fd=folder)
    try:
        return size_of(descriptor, depth)
    finally:
        os.close(descriptor)


def _at_most(value: int, kind: int) -> int:
    """Return a limit that is not above this process's own, which the client could not raise."""
    hard = resource.getrlimit(kind)[1]
    return value if hard == resource.RLIM_INFINITY else min(value, hard)


def _stage(source: Path, target: Path) -> None:
    """Copy into the folder that a container sees, readable by all of its users."""
    if source.is_file():
        shutil.copyfile(source, target)
        target.chmod(0o755 if os.access(source, os.X_OK) else 0o644)
        return
    shutil.copytree(source, target, symlinks=True)
    for folder, _, files in os.walk(target):
        os.chmod(folder, 0o755)
        for name in files:
            path = Path(folder, name)
            if not path.is_symlink():
                path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)


def _unpack(archive: object, name: str, target: Path) -> None:
    """Copy the file or folder `name` of a container's archive to `target`. Raises MachineLost.

    An empty `name` stands for the archive's whole content: the container's root folder.
    """
    # First into a temporary folder, which the filter "data" never leaves: the archive is the
    # container's, and may name paths such as ../../etc or links to them.
    with tempfile.TemporaryDirectory() as folder:
        try:
            with tarfile.open(fileobj=archive) as tar:  # type: ignore[call-overload]
                tar.extractall(folder, filter="data")
        except (tarfile.TarError, OSError) as error:
            raise MachineLost(f"what the container sent cannot be unpacked: {error}") from error
        path = Path(folder, name or ".")
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, target, symlinks=True, dirs_exist_ok=True)
        elif path.is_file():
            shutil.copyfile(path, target)
        # Else it is a link whose target is not in the archive: there is nothing to copy.
