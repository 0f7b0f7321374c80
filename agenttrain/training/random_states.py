"""The states of every random generator that training, tools and rewards draw from."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """States of this process; plain values and tensors, which torch loads with weights_only."""
    version, numbers, gauss = random.getstate()
    state: Any = np.random.get_state(legacy=True)
    name, keys, *position = state
    return {
        "python": (version, list(numbers), gauss),
        "numpy": (name, keys.tolist(), *position),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "cuda_device": torch.cuda.current_device() if torch.cuda.is_available() else None,
    }


def set_random_states(states: Mapping[str, Any]) -> None:
    """Continue from where `random_states` was called.

    On a machine with other GPUs: the state of the GPU that this process computed on goes to the GPU
    that it computes on now, and the states of the others to as many others as there are.
    """
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *position = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *position))
    torch.set_rng_state(states["torch"])
    saved = states["cuda"]
    count = torch.cuda.device_count() if saved and torch.cuda.is_available() else 0
    if count:
        own = torch.cuda.current_device()
        # A checkpoint of before `cuda_device` was kept: as far as can be known the same one.
        before = states.get("cuda_device", own if own < len(saved) else 0)
        for device in range(min(len(saved), count)):
            torch.cuda.set_rng_state(saved[device], device)
        torch.cuda.set_rng_state(saved[before], own)


def seed_random(seed: int) -> None:
    """Seed all of them; numpy takes 32 bits."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
