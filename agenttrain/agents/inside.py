"""Runs an agent's program in a sandbox without a network, in which only the endpoint answers.

``python -I -S inside.py <socket> <port> program argument …``: what connects to 127.0.0.1 at `port`
is connected to the Unix socket, on which the endpoint listens outside. It imports nothing of this
package, and ends as the program did.
"""

import asyncio
import os
import sys


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy a stream until its end."""
    try:
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()
        writer.write_eof()
    except OSError:
        writer.close()


async def serve(socket: str, port: int, command: list[str]) -> int:
    """Forward connections while the program runs; return its exit code."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, outer = await asyncio.open_unix_connection(socket)
        try:
            await asyncio.gather(carry(reader, outer), carry(inner, writer))
        finally:
            for end in (outer, writer):
                end.close()

    await asyncio.start_server(connected, "127.0.0.1", port)
    try:
        program = await asyncio.create_subprocess_exec(*command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    return await program.wait()


def main() -> None:
    """Serve, and end as the program did."""
    socket, port, *command = sys.argv[1:]
    code = asyncio.run(serve(socket, int(port), command))
    os._exit(128 - code if code < 0 else code)


if __name__ == "__main__":
    main()
