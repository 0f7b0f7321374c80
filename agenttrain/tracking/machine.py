"""Load of the machine and its GPUs, sampled beside a run; `system/…` at its trackers."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import psutil

GB = 1e9


class MachineLoad:
    """Mean load of the machine, of a process with its children, and of each GPU.

    Example: ``{"system/cpu_percent": 91.5, "system/memory_gb": 11.2, "system/run_memory_gb": 2.1,
    "system/gpu0/percent": 87.0, "system/gpu0/memory_gb": 61.3}``.

    `follow` calls `sample` at intervals, and `take` when it sends metrics.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._gpus = _gpus()
        self._sums: dict[str, float] = {}
        self._samples = 0
        psutil.cpu_percent()  # the first call returns 0

    def sample(self) -> None:
        """Take one sample."""
        values = {
            "system/cpu_percent": psutil.cpu_percent(),
            "system/memory_gb": psutil.virtual_memory().used / GB,
        }
        with suppress(psutil.Error):
            process = psutil.Process(self._pid)
            family = [process, *process.children(recursive=True)]
            values["system/run_memory_gb"] = sum(map(_resident_bytes, family)) / GB
        for read in self._gpus:
            values |= read()
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._samples += 1

    def take(self) -> dict[str, float]:
        """Return the means of the samples since the last call; empty without any."""
        count, sums = self._samples, self._sums
        self._samples, self._sums = 0, {}
        return {name: value / count for name, value in sums.items()}


def _resident_bytes(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        return int(process.memory_info().rss)
    return 0


def _gpus() -> list[Callable[[], dict[str, float]]]:
    """Return a reader for each NVIDIA GPU that the run may use; none without a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
        # CUDA_VISIBLE_DEVICES names GPUs by number or by UUID.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            devices = list(map(str, range(pynvml.nvmlDeviceGetCount())))
        else:
            devices = [d for d in visible.split(",") if d not in ("", "-1")]
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(int(d))
            if d.isdecimal()
            else pynvml.nvmlDeviceGetHandleByUUID(d)
            for d in devices
        ]
    except Exception:  # no library, no driver, a device of another kind
        return []

    def read(index: int, handle: Any) -> dict[str, float]:
        with suppress(pynvml.NVMLError):
            busy = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
            used = pynvml.nvmlDeviceGetMemoryInfo(handle).used
            prefix = f"system/gpu{index}"
            return {f"{prefix}/percent": float(busy), f"{prefix}/memory_gb": used / GB}
        return {}

    return [partial(read, index, handle) for index, handle in enumerate(handles)]
