"""A sharded policy in a checkpoint: each process writes its part, any number reads them.

policy-0.pt, policy-1.pt, …   what policy.pt holds of a policy that is not sharded; a tensor that
                              the process has a part of is ``{"part": tensor, "shape": [all]}``

Parts follow each other along the first dimension, in the order of the processes. Readers map the
files into memory, and put a tensor together where it is used (`Parted`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from agenttrain.training.checkpoint_files import only_tensors
from agenttrain.training.sharding import Parted, spread_like, whole

WHOLE = "policy.pt"
PART = "policy-{}.pt"


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether this process holds only a part of the model's weights."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def write_part(state: Any, folder: Path, rank: int) -> None:
    """Write this process's part of a policy's state."""
    torch.save(_parted(state), folder / PART.format(rank))


def read_state(folder: Path) -> Any:
    """The state of a policy, however many processes wrote it; tensors are on the CPU, and Parted
    where several processes wrote them."""
    if (folder / WHOLE).exists():
        return read_tensors(folder / WHOLE)
    count = len(list(folder.glob(PART.format("*"))))
    paths = [folder / PART.format(rank) for rank in range(count)]
    return _joined([read_tensors(path, mmap=True) for path in paths])


def read_tensors(path: Path, *, mmap: bool = False) -> Any:
    """Read tensors and plain values that `torch.save` wrote; raises NotRead for anything else."""
    with only_tensors(path):
        return torch.load(path, weights_only=True, mmap=mmap)


def _parted(state: Any) -> Any:
    if isinstance(state, DTensor):
        # A copy: a part that is a view would be written with all that it is a view of.
        return {"part": state.to_local().detach().cpu().clone(), "shape": list(state.shape)}
    if isinstance(state, Mapping):
        return {name: _parted(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_parted(value) for value in state)
    return state


def _joined(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if isinstance(first, dict) and first.keys() == {"part", "shape"}:
        return Parted(tuple(one["part"] for one in parts), torch.Size(first["shape"]))
    if isinstance(first, dict):
        return {name: _joined([one[name] for one in parts]) for name in first}
    if isinstance(first, list | tuple):
        return type(first)(_joined(values) for values in zip(*parts, strict=True))
    return first.clone() if isinstance(first, Tensor) else first


def spread(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state as it lies in this process's part of its parameters."""
    if "parts" in state:
        pairs = zip(optimizer.parts, state["parts"], strict=True)  # type: ignore[attr-defined]
        return {**state, "parts": [spread(part, of_part) for part, of_part in pairs]}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def lying(index: int, value: Any) -> Any:
        alike = isinstance(value, Tensor | Parted) and value.shape == parameters[index].shape
        return spread_like(parameters[index], value) if alike else value

    kept = {
        index: {name: lying(index, value) for name, value in values.items()}
        for index, values in state["state"].items()
    }
    return {**state, "state": kept}


def whole_weights(model: PreTrainedModel, keep: bool) -> dict[str, Tensor]:
    """Every weight by its name in `state_dict`, on the CPU, where `keep`; nothing elsewhere.

    All processes gather one weight after the other; tied weights are one tensor.
    """
    owners = dict(model.named_parameters(remove_duplicate=False))
    found: dict[int, Tensor] = {}
    named: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        key = id(owners.get(name, tensor))
        if key not in found:
            gathered = whole(tensor.detach())
            found[key] = gathered.cpu() if keep else gathered.new_empty(0)
        named[name] = found[key]
    return named if keep else {}
