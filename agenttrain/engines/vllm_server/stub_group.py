"""Double of a NCCL group: sockets between the trainer and the workers of stub servers.

As with NCCL, a group starts once all ranks have joined, and a broadcast to a worker that has died
or hangs never ends by itself. `StubGroup.destroy` ends it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from math import prod
from threading import Event
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from agenttrain.engines.vllm_server.nccl_transport import FanOut, OnePass

JOIN_S = 10.0
"""Seconds within which all workers have to join."""
LOOK_S = 0.02
"""Seconds between two attempts to join."""
NUMBER = 8
"""Bytes of a rank and of a length."""
RECEIVED = b"+"
"""A worker's answer to a tensor."""
ITEMSIZES = {"float32": 4, "bfloat16": 2}
"""Bytes of a number, by vLLM's name of its format."""
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class StubGroup:
    """Rank 0 of a group, with the methods of vLLM's `PyNcclCommunicator` that a broadcast needs."""

    def __init__(self, address: str, port: int, ranks: int) -> None:
        """Wait for the workers. Raises TimeoutError, and ValueError for a wrong rank."""
        self._workers: dict[int, socket.socket] = {}
        self._destroyed = Event()
        with socket.create_server((address, port)) as server, ExitStack() as joined:
            server.settimeout(JOIN_S)
            while len(self._workers) < ranks - 1:
                worker = joined.enter_context(server.accept()[0])
                rank = int.from_bytes(worker.recv(NUMBER, socket.MSG_WAITALL))
                if rank in self._workers or not 0 < rank < ranks:
                    raise ValueError(f"rank {rank} of {ranks} has come, after {[*self._workers]}")
                self._workers[rank] = worker
            joined.pop_all()

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        """Send a tensor to all workers, and wait until they have it."""
        import torch

        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for worker in self._workers.values():
            with suppress(OSError):
                worker.sendall(len(content).to_bytes(NUMBER) + content)
        for worker in self._workers.values():
            answer = b""
            with suppress(OSError):
                answer = worker.recv(1)
            if answer != RECEIVED:  # it has died: hang, as NCCL does
                self._destroyed.wait()
                raise RuntimeError("the group was destroyed")

    def destroy(self) -> None:
        """End a broadcast, and leave the group."""
        self._destroyed.set()
        for worker in self._workers.values():
            with suppress(OSError):
                worker.shutdown(socket.SHUT_RDWR)
            worker.close()


class StubTransfer:
    """Double of vLLM's `NCCLTrainerWeightTransferEngine`. The class itself is a `Join`."""

    def __init__(
        self, address: str, port: int, ranks: int, client: FanOut, source: OnePass
    ) -> None:
        self.client, self.source = client, source
        info = {"master_address": address, "master_port": port, "rank_offset": 1}
        # The workers join while this process waits for them.
        with ThreadPoolExecutor(1) as threads:
            joining = threads.submit(
                client.init_weight_transfer_engine, {**info, "world_size": ranks}
            )
            self._group = StubGroup(address, port, ranks)
            joining.result()

    def send_weights(self) -> None:
        """Do a whole update: the servers receive in a thread while this one broadcasts."""
        forms = self.source.metadata()
        info = {
            "names": [form.name for form in forms],
            "dtype_names": [str(form.dtype).removeprefix("torch.") for form in forms],
            "shapes": [list(form.shape) for form in forms],
        }
        self.client.start_weight_update()
        threads = ThreadPoolExecutor(1)
        receiving = threads.submit(self.client.update_weights, info)
        try:
            for _, tensor in self.source:
                self._group.broadcast(tensor, src=0)
            receiving.result()
        finally:
            threads.shutdown(wait=False)
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        """Leave the group."""
        self._group.destroy()


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
                    await asyncio.sleep(LOOK_S)
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
        """Leave the group, if there is one."""
        for _, writer in self._streams:
            writer.close()
        self._streams.clear()


async def _receive(stream: Stream, size: int) -> bytes:
    reader, writer = stream
    content = b""
    while len(content) < size:
        length = int.from_bytes(await reader.readexactly(NUMBER))
        content += await reader.readexactly(length)
        writer.write(RECEIVED)
    return content
