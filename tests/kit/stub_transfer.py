"""Double of a NCCL group: sockets between the trainer and the workers of stub servers.

As with NCCL, a group starts once all ranks have joined, and a broadcast to a worker that has died
or hangs never ends by itself. `StubGroup.destroy` ends it.
"""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from threading import Event
from typing import Any

import torch
from server_stub_workers import JOIN_S, NUMBER, RECEIVED
from torch import Tensor

from agenttrain.engines.vllm_server.nccl_transport import FanOut, OnePass


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
