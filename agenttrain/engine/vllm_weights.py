"""New weights for vLLM: in its own process, or through memory that its workers read."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

MEMORY = Path("/dev/shm")
"""A file system in memory, where there is one."""


def load_weights(llm: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Replace the model's weights; what does not fit raises whatever vLLM raises."""
    if llm.vllm_config.parallel_config.world_size == 1:
        worker = llm.model_executor.driver_worker.worker
        worker.reload_weights(weights_iterator=iter(weights))
        return
    # Workers are processes: each reads its part of a file. Tied weights are written twice.
    tensors = {name: tensor.cpu().clone() for name, tensor in weights}
    with folder_for(tensors) as name:
        save_file(tensors, Path(name, "model.safetensors"))
        llm.collective_rpc("reload_weights", kwargs={"weights_path": name})


def folder_for(tensors: dict[str, Tensor]) -> tempfile.TemporaryDirectory[str]:
    """A folder that holds them until they are read, in memory where they fit."""
    size = sum(tensor.nbytes for tensor in tensors.values())
    fits = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 2 * size
    return tempfile.TemporaryDirectory(prefix="agenttrain-", dir=MEMORY if fits else None)
