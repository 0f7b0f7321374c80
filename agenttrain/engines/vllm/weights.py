"""New weights for vLLM: loaded in this process, or written to memory that its workers read.

Low-rank adapters are replaced while requests are in flight. The base weights stay.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from agenttrain.engines.adapters import adapter_config
from agenttrain.utils.names import list_names
from agenttrain.utils.temporary import TemporaryFolder

MEMORY = Path("/dev/shm")
"""A file system in memory, where there is one."""
NAME, NUMBER = "policy", 1
"""Name and number of the adapters in vLLM."""
CHUNK, CHUNK_ON_CPU = 2**22, 2**15
"""Values of a checksum that are widened at once: bounds the copy of a large embedding, and on a CPU
keeps it in the processor's cache."""
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SPREAD = 2**40 + 15
"""Factor of the sum of values in a checksum, which also has the sum of their squares."""


@dataclass(slots=True)
class Manifest:
    """Loads weights into vLLM, and checks that nothing is missing and that vLLM has what was sent.

    There are two checks. Each load must send weights of the same names, formats and shapes as the
    first one (`forms`). And vLLM's parameters must have the bytes that were sent, by checksums.
    vLLM keeps some parameters in another form: packed for a CPU's kernels, quantised, or spread
    over several workers. They differ after the first load already, so they are not compared, and
    only the probe of a weight sync checks them.

    `load` is called at each update, in the thread that steps vLLM.
    """

    forms: dict[str, str] = field(default_factory=dict)
    """E.g. {"model.norm.weight": "torch.float32 [64]"}. Empty: nothing was loaded yet."""
    comparable: dict[str, list[str]] | None = None
    """vLLM's parameters that had exactly the sent bytes after the first load, and so must have them
    after each load: name -> names of the weights that it is made of. None: nothing was loaded yet.
    """
    check_s: float = 0.0
    """Seconds that the checksums of the last load took."""

    def load(self, llm: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the model's weights, and compare the model's bytes with those that were sent.

        Raises ValueError as `check_each` does, and for a comparable parameter that has other bytes
        now. vLLM's own errors pass through.
        """
        self.check_s = 0.0
        sums: dict[str, Tensor] = {}  # checksums of the weights, by name
        sent = self.check_each(weights, sums)  # a generator: it fills `sums` while vLLM reads it
        if llm.vllm_config.parallel_config.world_size == 1:
            worker = llm.model_executor.driver_worker.worker
            try:
                worker.reload_weights(weights_iterator=sent)
            except BaseException:
                from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

                # Otherwise vLLM 0.32 would mix the weights so far with those of the next reload.
                finalize_layerwise_reload(worker.get_model(), worker.model_config)
                raise
        else:
            # Workers are processes: each reads its part of a file. Cloned, because tied weights
            # share memory, which safetensors refuses.
            tensors = {name: tensor.cpu().clone() for name, tensor in sent}
            with make_folder_for(tensors) as folder:
                save_file(tensors, folder / "model.safetensors")
                llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        self._compare(llm, sums)

    def _compare(self, llm: Any, sums: dict[str, Tensor]) -> None:
        """Compare vLLM's parameters with the checksums of the weights that were just sent.

        The first load decides which parameters are comparable. With several workers none is. Then
        later loads compute no checksums. Raises ValueError for a comparable one that differs.
        """
        start = time.perf_counter()
        equal = _find_equal_parameters(llm, sums) if sums else {}
        self.check_s += time.perf_counter() - start
        if self.comparable is None:  # the first load
            self.comparable = equal
        if differing := sorted(self.comparable.keys() - equal.keys()):
            raise ValueError(
                f"{list_names(differing)}: hold other bytes than were sent, and held them after "
                "the first load"
            )

    def check_each(
        self, weights: Iterable[tuple[str, Tensor]], sums: dict[str, Tensor] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights as they come, and add to `sums` the checksums that are needed.

        Needed are those of the weights that comparable parameters are made of. At the first load,
        which decides what is comparable, all are.

        Raises ValueError unless the weights have the names, formats and shapes of the last load:
        vLLM silently keeps the old value of a weight that does not come.
        """
        forms: dict[str, str] = {}
        compared: set[str] | None = None  # all
        if self.comparable is not None:
            compared = set(chain.from_iterable(self.comparable.values()))
        for name, tensor in weights:
            forms[name] = f"{tensor.dtype} {list(tensor.shape)}"
            if self.forms and self.forms.get(name) != forms[name]:
                former = self.forms.get(name, "nothing of that name")
                raise ValueError(f"{name} is {forms[name]}, and was {former} before")
            if sums is not None and (compared is None or name in compared):
                start = time.perf_counter()
                sums[name] = checksum(tensor)
                self.check_s += time.perf_counter() - start
            yield name, tensor
        if missing := [name for name in self.forms if name not in forms]:
            raise ValueError(f"{list_names(missing)}: came before, and not now")
        self.forms = forms


def checksum(tensor: Tensor) -> Tensor:
    """Return a checksum [] of the values' bits, as integers b: the sum of b x (b + SPREAD).

    It ignores their order, and zeros. vLLM joins several weights into one parameter, and pads it
    with zeros: the parameter's checksum is the sum of the weights' checksums. Example: the bits
    1, 0, 3 give 1 x (1 + SPREAD) + 3 x (3 + SPREAD) = 10 + 4 SPREAD.

    The sum of the bits alone would be the same for 2, 2 as for 1, 3. So their squares are summed
    too. SPREAD keeps the two sums apart in one number, which may wrap around.
    """
    bits = tensor.detach().contiguous().view(-1).view(BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in bits.split(CHUNK_ON_CPU if tensor.device.type == "cpu" else CHUNK):
        wide = chunk.long()
        total += (wide * (wide + SPREAD)).sum()
    return total


def _find_equal_parameters(llm: Any, sums: dict[str, Tensor]) -> dict[str, list[str]]:
    """Return vLLM's parameters that have the sent bytes, mapped to the weights they are made of.

    Example: with {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}, "h.0.qkv_proj.weight" is made of
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
        path = name.split(".")
        parts = [name]  # the names of the weights that it is made of
        for index, module in enumerate(path):
            if module in packed:
                parts = [".".join((*path[:index], p, *path[index + 1 :])) for p in packed[module]]
                break
        if parameter.numel() and all(part in sums for part in parts):
            made_of[name] = parts
            # Sums of 64 bits wrap around here as they do in a checksum.
            device = parameter.device
            sent = torch.stack([sums[part].to(device, non_blocking=True) for part in parts]).sum()
            differences.append(sent - checksum(parameter))
    if not made_of:
        return {}
    # One copy to the host for all: each would wait for all work that the device still has.
    are_equal = [difference == 0 for difference in torch.stack(differences).tolist()]
    return {name: made_of[name] for name, equal in zip(made_of, are_equal, strict=True) if equal}


def make_folder_for(tensors: dict[str, Tensor]) -> TemporaryFolder:
    """Create a temporary folder for tensors, in memory if they fit there."""
    size = sum(tensor.nbytes for tensor in tensors.values())
    fits = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 2 * size
    return TemporaryFolder(MEMORY if fits else None)


def load_adapters(llm: Any, weights: Iterable[tuple[str, Tensor]], *, alpha: float) -> Any:
    """Replace the adapters by `weights`, with peft's names. Return their `LoRARequest`."""
    from vllm.lora.request import LoRARequest

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights}
    with make_folder_for(tensors) as folder:
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(adapter_config(tensors, alpha)))
        llm.add_lora(LoRARequest(NAME, NUMBER, str(folder), load_inplace=True))
    # For requests: vLLM finds the adapters, which it has read, by NUMBER. So the folder may be gone
    # by now. `load_inplace` replaces adapters of that number, and would read the folder every step.
    return LoRARequest(NAME, NUMBER, str(folder))


def split_adapters(
    weights: Iterable[tuple[str, Tensor]],
) -> tuple[Iterator[tuple[str, Tensor]], Iterator[tuple[str, Tensor]]]:
    """Split weights into base weights, which come first, and adapters.

    Exhaust the iterator of the base weights before the other: both read from `weights`.
    """
    items = iter(weights)
    # Reading it ends the base weights. It is kept for the second iterator.
    first_adapter: list[tuple[str, Tensor]] = []

    def base() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in items:
            if "lora_" in name:
                first_adapter.append((name, tensor))
                return
            yield name, tensor

    def adapters() -> Iterator[tuple[str, Tensor]]:
        yield from first_adapter
        yield from items

    return base(), adapters()
