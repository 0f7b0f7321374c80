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
    """Return whether this process holds only a part of the model's weights."""
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
    """Replace each sharded tensor in a state by this process's part and the tensor's shape."""
    if isinstance(state, DTensor):
        # A copy: a part that is a view would be written with all that it is a view of.
        return {"part": state.to_local().detach().cpu().clone(), "shape": list(state.shape)}
    if isinstance(state, Mapping):
        return {name: _parted(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_parted(value) for value in state)
    return state


def _joined(parts: Sequence[Any]) -> Any:
    """Join the states that all processes wrote, in the order of their ranks."""
    first = parts[0]
    if isinstance(first, dict) and first.keys() == {"part", "shape"}:
        return Parted(tuple(part["part"] for part in parts), torch.Size(first["shape"]))
    if isinstance(first, dict):
        return {name: _joined([part[name] for part in parts]) for name in first}
    if isinstance(first, list | tuple):
        return type(first)(_joined(values) for values in zip(*parts, strict=True))
    return first.clone() if isinstance(first, Tensor) else first


def spread(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Split an optimizer's state as its parameters are split."""
    if "parts" in state:
        pairs = zip(optimizer.parts, state["parts"], strict=True)  # type: ignore[attr-defined]
        return {**state, "parts": [spread(part, of_part) for part, of_part in pairs]}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def of_parameter(index: int, value: Any) -> Any:
        alike = isinstance(value, Tensor | Parted) and value.shape == parameters[index].shape
        return spread_like(parameters[index], value) if alike else value

    by_parameter = {
        index: {name: of_parameter(index, value) for name, value in values.items()}
        for index, values in state["state"].items()
    }
    return {**state, "state": by_parameter}


def whole_weights(model: PreTrainedModel, keep: bool) -> dict[str, Tensor]:
    """Every weight by its name in `state_dict`, on the CPU, where `keep`; nothing elsewhere.

    All processes gather one weight after the other; tied weights are one tensor.
    """
    owners = dict(model.named_parameters(remove_duplicate=False))
    weights: dict[int, Tensor] = {}
    named: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        key = id(owners.get(name, tensor))
        if key not in weights:
            gathered = whole(tensor.detach())
            weights[key] = gathered.cpu() if keep else gathered.new_empty(0)
        named[name] = weights[key]
    return named if keep else {}
