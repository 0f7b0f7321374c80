"""What tensors take while something runs: the storages alive at once, as the CPU's allocator sees.

Counted are storages that an operation of torch returns; what a kernel allocates and frees within
one operation is not seen.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocated(TorchDispatchMode):
    """Within, `live` is the bytes of the storages made since, and `peak` the most so far."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs or {})):
            if isinstance(tensor, torch.Tensor):
                self._known.add(_storage(tensor)._cdata)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._see(_storage(tensor))
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self.live -= size
        self._known.discard(key)


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """That of a tensor, or of this process's part of it."""
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own.untyped_storage()


def peak_bytes(profile: torch.profiler.profile) -> int:
    """Most bytes that were allocated at once within a profile, kernels' own included."""
    live = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most
