"""`Channel`: messages between two processes over a socket, each with its length before it.

channel = await Channel.over(connection, codec)
await channel.send(GroupsRequest(step=3))
groups = await channel.receive()
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Self

from agenttrain.utils.codec import Codec

LENGTH_BYTES = 8
"""Bytes of the number before each message, which says how long the message is."""


class ChannelClosed(Exception):
    """The process at the other end is gone, or has closed the channel."""


class Channel:
    """One end of a socket connection that carries messages, each with its length before it.

    Both ends may send at any time.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, codec: Codec
    ) -> None:
        self._reader, self._writer, self._codec = reader, writer, codec

    @classmethod
    async def over(cls, connection: socket.socket, codec: Codec) -> Self:
        """Return the channel over a connected socket, which it owns from then on."""
        reader, writer = await asyncio.open_connection(sock=connection)
        return cls(reader, writer, codec)

    async def send(self, message: Any) -> None:
        """Send a message; raises ChannelClosed."""
        content = self._codec.encode(message)
        try:
            self._writer.write(len(content).to_bytes(LENGTH_BYTES, "little") + content)
            await self._writer.drain()
        except OSError as error:
            raise ChannelClosed from error

    async def receive(self) -> Any:
        """Wait for the next message; raises ChannelClosed."""
        try:
            length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "little")
            content = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise ChannelClosed from error
        return self._codec.decode(content)

    def close(self) -> None:
        """Close it; the other end's next `receive` raises ChannelClosed."""
        self._writer.close()
