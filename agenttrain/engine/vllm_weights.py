"""New weights for vLLM: in its own process, or through memory that its workers read."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

MEMORY = Path("/dev/shm")
"""A file system in memory, where there is one."""


NAMED = 4
"""Weights that a message names."""


@dataclass(slots=True)
class Manifest:
    """Names, formats and shapes of an engine's weights: those of the first that it was sent."""

    forms: dict[str, str] = field(default_factory=dict)
    """E.g. {"model.norm.weight": "torch.float32 [64]"}."""

    def checked(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The weights as they come.

        Raises ValueError where they are not all those of the manifest, and no others: vLLM keeps
        what it has of a weight that does not come, and says nothing.
        """
        came: dict[str, str] = {}
        for name, tensor in weights:
            came[name] = f"{tensor.dtype} {list(tensor.shape)}"
            if self.forms and self.forms.get(name) != came[name]:
                known = self.forms.get(name, "nothing of that name")
                raise ValueError(f"{name} is {came[name]}, and was {known} before")
            yield name, tensor
        if missing := [name for name in self.forms if name not in came]:
            more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
            raise ValueError(f"{', '.join(missing[:NAMED])}{more}: came before, and not now")
        self.forms = came


def load_weights(llm: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Replace the model's weights; what does not fit raises whatever vLLM raises."""
    if llm.vllm_config.parallel_config.world_size == 1:
        worker = llm.model_executor.driver_worker.worker
        try:
            worker.reload_weights(weights_iterator=iter(weights))
        except BaseException:
            _end_reload(worker)
            raise
        return
    # Workers are processes: each reads its part of a file. Tied weights are written twice.
    tensors = {name: tensor.cpu().clone() for name, tensor in weights}
    with folder_for(tensors) as name:
        save_file(tensors, Path(name, "model.safetensors"))
        llm.collective_rpc("reload_weights", kwargs={"weights_path": name})


def _end_reload(worker: Any) -> None:
    """Forget what came: vLLM 0.32 would put it together with the weights of the next reload."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    finalize_layerwise_reload(worker.get_model(), worker.model_config)


def folder_for(tensors: dict[str, Tensor]) -> tempfile.TemporaryDirectory[str]:
    """A folder that holds them until they are read, in memory where they fit."""
    size = sum(tensor.nbytes for tensor in tensors.values())
    fits = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 2 * size
    return tempfile.TemporaryDirectory(prefix="agenttrain-", dir=MEMORY if fits else None)
