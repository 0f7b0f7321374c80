"""The optimizer's state in host memory while a colocated engine samples.

Moments and float32 copies of the weights are needed only during updates: 12 of the 16 bytes that
training a bfloat16 parameter with AdamW takes. The tensors stay the same objects. Only their memory
changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from agenttrain.training.optimizers import MasterWeights
from agenttrain.training.sharding import local_part


class StateOffload:
    """Moves an optimizer's state to host memory after a step's updates, and back before the next.

    `Policy.optimizer_on_device` calls `to_device` and `to_host` around the updates. Calling one of
    them twice changes nothing.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer, self._device = optimizer, device
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}
        """Tensor id -> the tensor and its host memory, which is reused: pinning it takes long."""

    @torch.no_grad()
    def to_host(self) -> None:
        """Move the state to host memory, and free its memory on the device."""
        # A new dict: buffers of tensors that are not in the state any more are dropped.
        former_buffers, self._buffers = self._buffers, {}
        for tensor in _state(self._optimizer):
            _, buffer = former_buffers.get(id(tensor), (None, None))
            if buffer is None:
                pin = self._device.type == "cuda"
                buffer = torch.empty_like(tensor, device="cpu", pin_memory=pin)
            is_on_host = tensor.data_ptr() == buffer.data_ptr()
            if not is_on_host:
                buffer.copy_(tensor, non_blocking=True)
            self._buffers[id(tensor)] = (tensor, buffer)
        self._wait()  # until the copies are complete: then the memory on the device can go
        for tensor, buffer in self._buffers.values():
            tensor.data = buffer
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # for the engine, which has an allocator of its own

    @torch.no_grad()
    def to_device(self) -> None:
        """Move the state from host memory back to the device."""
        for tensor, buffer in self._buffers.values():
            is_on_host = tensor.data_ptr() == buffer.data_ptr()
            if is_on_host:
                tensor.data = torch.empty_like(buffer, device=self._device).copy_(
                    buffer, non_blocking=True
                )
        self._wait()

    def _wait(self) -> None:
        """Wait for the copies, which are asynchronous on a GPU."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _state(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield this process's parts of the moments and the float32 copies, but no model weight."""
    parts: list[Optimizer] | None = getattr(optimizer, "parts", None)
    if isinstance(optimizer, MasterWeights):
        for _, master in optimizer.pairs:
            yield local_part(master)
    for part in parts or ():  # several optimizers in one
        yield from _state(part)
    if parts is None:
        states: Any = optimizer.state.values()
        for values in states:
            for value in values.values():
                if isinstance(value, Tensor) and value.ndim:  # not the step counter, a scalar
                    yield local_part(value)
