"""Runs an agent's program in a sandbox without a network, in which only the endpoint answers.

``python -I -S inside.py <settings as JSON> program argument …``: what connects to 127.0.0.1 at
`port` is connected to the Unix socket, on which the endpoint listens outside. Of `root`, the folder
of this package, it imports only what counts memory. It ends as the program did, and all processes
of the sandbox end with it; also when they use more memory than they may.
"""

import asyncio
import json
import os
import sys
from contextlib import suppress

DISKS = ("/tmp", "/run", "/dev", "/dev/shm")
"""Folders of the sandbox to which programs can write; they are in memory."""
MEMORY_CHECK_S = 0.1
"""Seconds between two checks of the memory in use."""


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy a stream until its end."""
    try:
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()
        writer.write_eof()
    except OSError:
        writer.close()


async def excess(memory_mb: int, disk_mb: int) -> str:
    """Wait until more memory is in use than allowed; return the setting that says so."""
    from agenttrain.tools.sandbox.memory import disk_in_use, memory_in_use

    while True:
        if disk_in_use(DISKS) > disk_mb << 20:
            return f"agent.disk_mb={disk_mb}: its files are larger"
        if memory_in_use(DISKS) > memory_mb << 20:
            return f"agent.memory_mb={memory_mb}: its processes and files use more"
        await asyncio.sleep(MEMORY_CHECK_S)


async def serve(settings: dict, command: list[str]) -> int:
    """Forward connections while the program runs; return its exit code."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, outer = await asyncio.open_unix_connection(settings["socket"])
        try:
            await asyncio.gather(carry(reader, outer), carry(inner, writer))
        finally:
            for end in (outer, writer):
                end.close()

    await asyncio.start_server(connected, "127.0.0.1", settings["port"])
    try:
        program = await asyncio.create_subprocess_exec(*command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    ended = asyncio.ensure_future(program.wait())
    watch = asyncio.ensure_future(excess(settings["memory_mb"], settings["disk_mb"]))
    await asyncio.wait((ended, watch), return_when=asyncio.FIRST_COMPLETED)
    if ended.done():
        return ended.result()
    print(f"{watch.result()}; the agent was ended", file=sys.stderr, flush=True)
    return 1


def main() -> None:
    """Serve, and end as the program did."""
    settings, *command = sys.argv[1:]
    given = json.loads(settings)
    sys.path.insert(0, given["root"])
    # If the machine runs out of memory, the kernel ends the agent first.
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    code = asyncio.run(serve(given, command))
    os._exit(128 - code if code < 0 else code)


if __name__ == "__main__":
    main()
