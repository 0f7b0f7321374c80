"""Weights under the names and in the pieces that the files of their model have.

transformers renames and joins weights when it loads them: the experts of a layer are two weights in
memory, and many in most files. Files of the model, and engines that read such files, know the
files' names alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

from agenttrain.training.lora import CONVERSIONS, base_name
from agenttrain.training.quantization import full_state


def in_files(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights of `model` as its files have them.

    The conversions are those with which the model was loaded. A model that was built without files
    has those of its family.

    Example: ``….experts.down_proj`` of 2 experts becomes ``….experts.0.down_proj.weight`` and
    ``….experts.1.down_proj.weight``.
    """
    reverted: dict[str, Tensor] = revert_weight_conversion(model, dict(weights))
    return reverted


def on_meta(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of the same shapes and formats without storage."""
    return {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in weights.items()
    }


def one_by_one(model: PreTrainedModel) -> bool:
    """Return True if each tensor of the files comes from one weight.

    If so, `in_files` can convert some weights without the others. The answer is cached for each
    model: its experts make thousands of tensors.
    """
    if model not in _ONE_BY_ONE:
        _ONE_BY_ONE[model] = _try_one_by_one(model)
    return _ONE_BY_ONE[model]


_ONE_BY_ONE: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def _try_one_by_one(model: PreTrainedModel) -> bool:
    """Return True if weights converted one at a time give the same files as all together.

    Names and shapes are compared, of tensors on the meta device, which have no values.
    """
    conversions = getattr(model, CONVERSIONS, None)
    if conversions is None:  # no record of the model's files: the conversions of its family
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    if not any(isinstance(conversion, WeightConverter) for conversion in conversions):
        return True
    shapes: dict[str, Tensor] = {}
    for name, tensor in full_state(model):
        if "lora_" not in name:  # the model's files hold no adapters
            shapes |= on_meta({base_name(name): tensor})
    together = {name: t.shape for name, t in in_files(model, shapes).items()}
    alone: dict[str, torch.Size] = {}
    for name, tensor in shapes.items():
        try:
            converted = in_files(model, {name: tensor})
        except Exception:  # an operation that misses its other inputs raises anything
            return False
        alone.update((n, t.shape) for n, t in converted.items())
    return alone == together
