"""The first process of an agent's sandbox: it runs the program, to which only the endpoint answers.

``python -I -S -c "… main()" <settings as JSON> program argument …``: what connects to 127.0.0.1 at
`port` is connected to the Unix socket, on which the endpoint listens outside. It ends as the
program did, and the kernel then ends all processes of the sandbox; also when they use more memory
than they may.
"""

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress

from agenttrain.tools.sandbox.confine import CORE_BYTES, confine, die_first, set_limit
from agenttrain.tools.sandbox.memory_use import disk_in_use, memory_in_use
from agenttrain.tools.sandbox.root import Root
from agenttrain.tools.sandbox.system import PR_SET_DUMPABLE, prctl

MEMORY_CHECK_S = 0.1
"""Seconds between two checks of the memory in use."""
PROCESSES = 1024
"""Processes and threads at once."""
OPEN_FILES = 1024
"""Open files of a process."""
PERMITTED = ("inotify_init", "inotify_init1")
"""System calls that agents may make and a model's code may not: programs that watch files."""


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy a connection's bytes until its end, and pass the end on."""
    try:
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()
        writer.write_eof()
    except OSError:
        writer.close()


async def wait_for_excess(settings: dict) -> str:
    """Wait until the sandbox exceeds a limit of memory or of files, which are in memory too.

    Return the setting and the problem.
    """
    disk_mb, memory_mb = settings["disk_mb"], settings["memory_mb"]
    disks = (settings["home"],)  # all writable folders are of one file system, in memory
    while True:
        if disk_in_use(disks) > disk_mb << 20:
            return f"agent.disk_mb={disk_mb}: its files are larger"
        if memory_in_use(disks, max_files=OPEN_FILES) > memory_mb << 20:
            return f"agent.memory_mb={memory_mb}: its processes and files use more"
        await asyncio.sleep(MEMORY_CHECK_S)


def reap(program: int, ended: asyncio.Future[int]) -> None:
    """Reap all children that have ended, and give `ended` the exit code of the program.

    This process has pid 1 in the sandbox: it inherits the orphans of all its processes, which stay
    zombies until it has reaped them.
    """
    with suppress(ChildProcessError):  # there is no child left
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:  # the other children still run
                return
            if pid == program and not ended.done():
                ended.set_result(os.waitstatus_to_exitcode(status))


def show_files() -> None:
    """Let the first process count the files of this one while it becomes the program.

    `confine` made this process undumpable, which hides its open files from others.
    """
    prctl(PR_SET_DUMPABLE, 1)


async def serve(settings: dict, command: list[str]) -> int:
    """Run the program and forward its connections until it ends. Return its exit code.

    Return 1 without ending the program if it exceeds a limit of memory: once this process, the
    sandbox's first, has exited, the kernel kills all others.
    """

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connect a client in the sandbox to the endpoint outside, until both ends are done."""
        from_endpoint, to_endpoint = await asyncio.open_unix_connection(settings["socket"])
        try:
            await asyncio.gather(carry(reader, to_endpoint), carry(from_endpoint, writer))
        finally:
            to_endpoint.close()
            writer.close()

    if settings["socket"] is not None:
        await asyncio.start_server(forward, "127.0.0.1", settings["port"])
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()
    environment = {**os.environ, "HOME": settings["home"], "TMPDIR": "/tmp"}
    try:
        # `show_files` lets `wait_for_excess` count the program's open files.
        program = subprocess.Popen(
            command, env=environment, cwd=settings["work"], preexec_fn=show_files
        )
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    loop.add_signal_handler(signal.SIGCHLD, reap, program.pid, ended)
    reap(program.pid, ended)  # it may have ended before the handler was set
    limit_exceeded = asyncio.ensure_future(wait_for_excess(settings))
    await asyncio.wait((ended, limit_exceeded), return_when=asyncio.FIRST_COMPLETED)
    if ended.done():
        return ended.result()
    print(f"{limit_exceeded.result()}; the agent was ended", file=sys.stderr, flush=True)
    return 1


def main() -> None:
    """Confine this process, run the program in it, and exit with the program's code.

    The arguments are the settings of the sandbox as JSON, and the program's command.
    """
    settings_json, *command = sys.argv[1:]
    settings = json.loads(settings_json)
    try:
        die_first()  # before other processes, if the machine's memory is full
        confine(
            Root(**settings["root"]),
            user=settings["user"],
            processes=PROCESSES,
            permitted=PERMITTED,
        )
        set_limit(resource.RLIMIT_CORE, CORE_BYTES)
        set_limit(resource.RLIMIT_NOFILE, OPEN_FILES)
    except OSError as error:
        print(f"agent.sandbox=bwrap: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    code = asyncio.run(serve(settings, command))
    os._exit(128 - code if code < 0 else code)  # -9, a SIGKILL, becomes 137 as in a shell
