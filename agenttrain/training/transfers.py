"""Copies from host to device for which neither waits."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on the device; on a GPU the copy is queued behind earlier work.

    A copy from pageable memory would first wait for all queued work, also with `non_blocking`. So
    the tensor is copied to pinned memory, which torch keeps until the GPU has read it.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
