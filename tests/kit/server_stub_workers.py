"""The workers of stub servers in a double of a NCCL group: sockets from rank 0 to each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from math import prod
from typing import Any

JOIN_S = 10.0
"""Seconds within which all workers have to join."""
POLL_S = 0.02
"""Seconds between two attempts to join."""
NUMBER = 8
"""Bytes of a rank and of a length."""
RECEIVED = b"+"
"""A worker's answer to a tensor."""
ITEMSIZES = {"float32": 4, "bfloat16": 2}
"""Bytes of a number, by vLLM's name of its format."""
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class StubWorkers:
    """The workers of one stub server in a group."""

    def __init__(self) -> None:
        self._streams: list[Stream] = []

    async def join(self, info: Mapping[str, Any], count: int) -> None:
        """Join a group as `count` ranks, from `rank_offset` on."""
        address = info["master_address"], info["master_port"]
        for number in range(count):
            async with asyncio.timeout(JOIN_S):
                while len(self._streams) == number:
                    with suppress(ConnectionRefusedError):  # rank 0 may come later
                        self._streams.append(await asyncio.open_connection(*address))
                    await asyncio.sleep(POLL_S)
            # A connection begins with the worker's rank.
            self._streams[number][1].write((info["rank_offset"] + number).to_bytes(NUMBER))

    async def receive(self, info: Mapping[str, Any]) -> dict[str, bytes]:
        """Return the bytes of each tensor. Raises EOFError if the group is destroyed."""
        forms = zip(info["dtype_names"], info["shapes"], strict=True)
        sizes = [ITEMSIZES[dtype] * prod(shape) for dtype, shape in forms]
        # All workers receive the same bytes: keep those of the first.
        content, *_ = await asyncio.gather(
            *(_receive(stream, sum(sizes)) for stream in self._streams)
        )
        tensors = {}
        for name, size in zip(info["names"], sizes, strict=True):
            tensors[name], content = content[:size], content[size:]
        return tensors

    def leave(self) -> None:
        for _, writer in self._streams:
            writer.close()
        self._streams.clear()


async def _receive(stream: Stream, size: int) -> bytes:
    """Return `size` bytes, which come in pieces, each with its length. Confirm each piece."""
    reader, writer = stream
    content = b""
    while len(content) < size:
        length = int.from_bytes(await reader.readexactly(NUMBER))
        content += await reader.readexactly(length)
        writer.write(RECEIVED)
    return content
