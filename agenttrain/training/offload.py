"""The optimizer's state in host memory while a colocated engine samples.

Moments and float32 copies of the weights are needed only during updates: 12 of the 16 bytes that
training a bfloat16 parameter with AdamW takes. The tensors stay the same objects; only their memory
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
    """Moves an optimizer's state from `device` to host memory and back.

    Example: ``offload = StateOffload(optimizer, device)``; ``offload.to_host()`` after an update,
    ``offload.to_device()`` before the next.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer, self._device = optimizer, device
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}
        """Host memory of each tensor, by its id; kept, because pinning memory takes long."""

    @torch.no_grad()
    def to_host(self) -> None:
        """Move the state to host memory; free its memory on the device."""
        known, self._buffers = self._buffers, {}  # without those of a state that was replaced
        for tensor in _state(self._optimizer):
            _, buffer = known.get(id(tensor), (None, None))
            if buffer is None:
                pinned = self._device.type == "cuda"
                buffer = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
            if tensor.data_ptr() != buffer.data_ptr():
                buffer.copy_(tensor, non_blocking=True)
            self._buffers[id(tensor)] = (tensor, buffer)
        self._wait()
        for tensor, buffer in self._buffers.values():
            tensor.data = buffer
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # for the engine, which has an allocator of its own

    @torch.no_grad()
    def to_device(self) -> None:
        """Move the state back."""
        for tensor, buffer in self._buffers.values():
            if tensor.data_ptr() == buffer.data_ptr():
                tensor.data = torch.empty_like(buffer, device=self._device).copy_(
                    buffer, non_blocking=True
                )
        self._wait()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _state(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield this process's parts of the moments and the float32 copies; no weight of the model."""
    parts: list[Optimizer] | None = getattr(optimizer, "parts", None)
    if isinstance(optimizer, MasterWeights):
        for _, master in optimizer.pairs:
            yield local_part(master)
    for part in parts or ():
        yield from _state(part)
    if parts is None:
        states: Any = optimizer.state.values()
        for values in states:
            yield from (local_part(v) for v in values.values() if isinstance(v, Tensor) and v.ndim)
