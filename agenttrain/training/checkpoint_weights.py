"""The weights of a checkpoint: a model folder of transformers, written by all processes together.

    model.safetensors                     all weights, by a policy that is not sharded
    model-00001-of-00002.safetensors, …   otherwise one file by each process that holds a part
    model.safetensors.index.json          then names each weight's file

Every weight has one writer. The others send it their parts, so that no process ever holds more of
the model than it writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

from agenttrain.training.sharding import gather_to, shard_of

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenWeights:
    """The weights that one process writes, on the CPU, by their names in the file."""

    file: str
    tensors: dict[str, Tensor]


def weights_to_write(
    model: PreTrainedModel, *, is_main: bool, copies: bool
) -> WrittenWeights | None:
    """Return the weights that this process writes; None if it writes none.

    All processes that hold a sharded model call it together. `copies`: the tensors do not change
    when the policy does.
    """
    weights = _untied(model)
    shard = shard_of(model)
    if shard is None:
        if not is_main:
            return None
        own = {n: _on_cpu(tensor.detach(), copies) for n, tensor in weights.items()}
        return WrittenWeights(file="model.safetensors", tensors=_original(model, own))
    if shard.replica:
        return None
    owners = _owners(model, weights, shard.count)
    own = {}
    for name, tensor in weights.items():
        full = gather_to(tensor.detach(), owners[name])
        if full is not None:
            own[name] = _on_cpu(full, copies)
    # The names in the files, for which one weight may become several.
    written = _original(model, own)
    file = f"model-{shard.index + 1:05}-of-{shard.count:05}.safetensors"
    return WrittenWeights(file=file, tensors=written) if written else None


def weights_index(shares: list[tuple[str, dict[str, int]]]) -> dict[str, Any]:
    """Return the content of the index of (file, {name: bytes}) of each process."""
    return {
        "metadata": {"total_size": sum(sum(sizes.values()) for _, sizes in shares)},
        "weight_map": dict(sorted((name, file) for file, sizes in shares for name in sizes)),
    }


def _untied(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the model's weights and buffers by name, tied ones under the name that is saved."""
    ignored = set(model._keys_to_ignore_on_save or ())
    tied = set(model.all_tied_weights_keys)
    names: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        known = names.get(id(tensor))
        if name not in ignored and (known is None or known in tied):
            names[id(tensor)] = name
    return {name: state[name] for name in state if names.get(id(state[name])) == name}


def _on_cpu(tensor: Tensor, copies: bool) -> Tensor:
    on_cpu = tensor.cpu()
    return on_cpu.clone() if copies and on_cpu is tensor else on_cpu


def _original(model: PreTrainedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights under the names and in the shapes of the files that the model is from."""
    reverted: Mapping[str, Tensor] = revert_weight_conversion(model, weights)
    return {name: tensor.contiguous() for name, tensor in reverted.items()}


def _owners(model: PreTrainedModel, weights: Mapping[str, Tensor], count: int) -> dict[str, int]:
    """Return the writer of each weight, so that all of them write about as many bytes.

    The first one writes all weights of a model some of whose tensors in files are made of several
    weights.
    """
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    if any(isinstance(one, WeightConverter) for one in conversions):
        shapes = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in weights.items()
        }
        if not _one_by_one(model, shapes):
            return dict.fromkeys(weights, 0)
    loads = [0] * count
    owners = {}
    for name in sorted(weights, key=lambda name: (-weights[name].nbytes, name)):
        owners[name] = min(range(count), key=lambda rank: loads[rank])
        loads[owners[name]] += weights[name].nbytes
    return owners


def _one_by_one(model: PreTrainedModel, shapes: dict[str, Tensor]) -> bool:
    """Return True if converting the weights one by one gives what converting all of them does."""
    together = {name: t.shape for name, t in _original(model, shapes).items()}
    alone: dict[str, torch.Size] = {}
    for name, tensor in shapes.items():
        try:
            made = _original(model, {name: tensor})
        except Exception:  # an operation that misses its other inputs raises anything
            return False
        alone.update((n, t.shape) for n, t in made.items())
    return alone == together
