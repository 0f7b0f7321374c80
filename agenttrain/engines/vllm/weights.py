"""New weights for vLLM: in its own process, or through memory that its workers read.

Low-rank adapters are loaded under requests in flight, over base weights that stay.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from agenttrain.engines.adapters import adapter_config
from agenttrain.utils.temporary import TemporaryFolder

MEMORY = Path("/dev/shm")
"""A file system in memory, where there is one."""
NAMED = 4
"""Weights that a message names."""
NAME, NUMBER = "policy", 1
"""Name and number of the adapters in vLLM."""
CHUNK, CHUNK_ON_CPU = 2**22, 2**15
"""Values that are checked at once: no tensor of the vocabulary's size is copied, and on a CPU the
copy stays in its cache."""
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SPREAD = 2**40 + 15
"""Keeps the sum of values and the sum of their squares apart in one number."""


@dataclass(slots=True)
class Manifest:
    """Names, formats and shapes of an engine's weights, as they were in the first load."""

    forms: dict[str, str] = field(default_factory=dict)
    """E.g. {"model.norm.weight": "torch.float32 [64]"}."""
    held: dict[str, list[str]] | None = None
    """vLLM's parameters that had the very bytes that were sent after the first load, mapped to the
    weights that each is made of; None: before the first load."""

    def load(self, llm: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the model's weights, and compare the model's bytes with those that were sent.

        Raises ValueError as `checked`, and for parameters that had the sent bytes after the first
        load and have others now; vLLM's own errors pass. vLLM keeps some parameters in another form
        (packed for a CPU's kernels, quantised, spread over several workers): only the probe of a
        weight sync checks these.
        """
        sums: dict[str, Tensor] = {}
        sent = self.checked(weights, sums)
        if llm.vllm_config.parallel_config.world_size == 1:
            worker = llm.model_executor.driver_worker.worker
            try:
                worker.reload_weights(weights_iterator=sent)
            except BaseException:
                from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

                # vLLM 0.32 would otherwise join the weights so far with those of the next reload.
                finalize_layerwise_reload(worker.get_model(), worker.model_config)
                raise
        else:
            # Workers are processes: each reads its part of a file. Tied weights are written twice.
            tensors = {name: tensor.cpu().clone() for name, tensor in sent}
            with folder_for(tensors) as folder:
                save_file(tensors, folder / "model.safetensors")
                llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        held = _holds(llm, sums) if sums else {}
        self.held = held if self.held is None else self.held
        if lost := sorted(self.held.keys() - held.keys()):
            more = f" and {len(lost) - NAMED} more" if len(lost) > NAMED else ""
            raise ValueError(
                f"{', '.join(lost[:NAMED])}{more}: hold other bytes than were sent, and held them "
                "after the first load"
            )

    def checked(
        self, weights: Iterable[tuple[str, Tensor]], sums: dict[str, Tensor] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights as they come; add to `sums` the checksums of those to compare.

        Raises ValueError unless they are exactly the weights of the manifest: vLLM silently keeps
        its old values of a weight that does not come.
        """
        came: dict[str, str] = {}
        compared = None if self.held is None else set(chain.from_iterable(self.held.values()))
        for name, tensor in weights:
            came[name] = f"{tensor.dtype} {list(tensor.shape)}"
            if self.forms and self.forms.get(name) != came[name]:
                known = self.forms.get(name, "nothing of that name")
                raise ValueError(f"{name} is {came[name]}, and was {known} before")
            if sums is not None and (compared is None or name in compared):
                sums[name] = checksum(tensor)
            yield name, tensor
        if missing := [name for name in self.forms if name not in came]:
            more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
            raise ValueError(f"{', '.join(missing[:NAMED])}{more}: came before, and not now")
        self.forms = came


def checksum(tensor: Tensor) -> Tensor:
    """Return a number [] of the values' bits that depends on neither their order nor on zeros.

    The checksum of a parameter that vLLM makes of several weights, and pads, is the sum of theirs.
    Example: the bits 1, 0, 3 give 1 x (1 + SPREAD) + 3 x (3 + SPREAD) = 10 + 4 SPREAD.
    """
    bits = tensor.detach().contiguous().view(-1).view(BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in bits.split(CHUNK_ON_CPU if tensor.device.type == "cpu" else CHUNK):
        wide = chunk.long()
        total += (wide * (wide + SPREAD)).sum()
    return total


def _holds(llm: Any, sums: dict[str, Tensor]) -> dict[str, list[str]]:
    """Map vLLM's parameters that have the bytes that were sent to the weights each is made of.

    Example: "h.0.qkv_proj.weight" with {"qkv_proj": ["q_proj", "k_proj", "v_proj"]} is made of
    "h.0.q_proj.weight", "h.0.k_proj.weight" and "h.0.v_proj.weight", whose checksums are in `sums`.
    Only parameters of one worker in this process can be read.
    """
    if llm.vllm_config.parallel_config.world_size > 1:
        return {}
    model = llm.model_executor.driver_worker.worker.get_model()
    packed = getattr(model, "packed_modules_mapping", {})
    made_of: dict[str, list[str]] = {}
    differences: list[Tensor] = []
    for name, parameter in model.named_parameters():
        path, parts = name.split("."), [name]
        for index, module in enumerate(path):
            if module in packed:
                parts = [".".join((*path[:index], p, *path[index + 1 :])) for p in packed[module]]
                break
        if parameter.numel() and all(part in sums for part in parts):
            made_of[name] = parts
            # Checksums are of 64 bits and wrap around, as these sums do.
            device = parameter.device
            sent = torch.stack([sums[part].to(device, non_blocking=True) for part in parts]).sum()
            differences.append(sent - checksum(parameter))
    if not made_of:
        return {}
    # One copy for all: each would wait for everything that the device still has to do.
    equal = [difference == 0 for difference in torch.stack(differences).tolist()]
    return {name: made_of[name] for name, same in zip(made_of, equal, strict=True) if same}


def folder_for(tensors: dict[str, Tensor]) -> TemporaryFolder:
    """Make a folder for tensors until they are read, in memory if they fit."""
    size = sum(tensor.nbytes for tensor in tensors.values())
    fits = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 2 * size
    return TemporaryFolder(MEMORY if fits else None)


def load_adapters(llm: Any, weights: Iterable[tuple[str, Tensor]], *, alpha: float) -> Any:
    """Replace the adapters by `weights`, with peft's names; return the `LoRARequest` for them.

    Requests in flight go on with the new ones. vLLM reads adapters from a folder only.
    """
    from vllm.lora.request import LoRARequest

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights}
    with folder_for(tensors) as folder:
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(adapter_config(tensors, alpha)))
        llm.add_lora(LoRARequest(NAME, NUMBER, str(folder), load_inplace=True))
    # Without load_inplace, or every step would read the folder again.
    return LoRARequest(NAME, NUMBER, str(folder))


def split_adapters(
    weights: Iterable[tuple[str, Tensor]],
) -> tuple[Iterator[tuple[str, Tensor]], Iterator[tuple[str, Tensor]]]:
    """Split into the weights before the first adapter, and the others; read them in this order."""
    items = iter(weights)
    first: list[tuple[str, Tensor]] = []

    def base() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in items:
            if "lora_" in name:
                first.append((name, tensor))
                return
            yield name, tensor

    def adapters() -> Iterator[tuple[str, Tensor]]:
        yield from first
        yield from items

    return base(), adapters()
