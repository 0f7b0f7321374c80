"""Weights under the names and in the pieces that the files of their model have.

transformers renames and joins weights when it loads them: the experts of a layer are two weights in
memory, and many in most files. Files of the model, and engines that read such files, know the
files' names alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

from agenttrain.training.lora import CONVERSIONS, base_name
from agenttrain.training.quantization import full_state


def in_files(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights of `model` as its files have them.

    The conversions are those with which the model was loaded. A model that was built without files
    has those of its family.

    Example: ``….experts.down_proj`` of 2 experts becomes ``….experts.0.down_proj.weight`` and
    ``….experts.1.down_proj.weight``.
    """
    return _convert(model, _table(model).conversions, weights)


def piece_by_piece(
    model: PreTrainedModel, name: str, weight: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Yield what `in_files` returns for one weight or adapter.

    A weight that is only renamed costs a look into a table: transformers would search the patterns
    of all conversions for each weight of each sync.
    """
    table = _table(model)
    if not table.conversions:
        yield name, weight
    elif name in table.names:
        yield table.names[name], weight
    else:
        pieces = _convert(model, table.conversions, {name: weight})
        for file_name, piece in pieces.items():
            if piece is weight:  # renamed, and not converted
                table.names[name] = file_name
            yield file_name, piece


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
    table = _table(model)
    if table.one_by_one is None:
        table.one_by_one = not table.conversions or _try_one_by_one(model, table)
    return table.one_by_one


@dataclass(slots=True, kw_only=True)
class _Table:
    """Conversions of a model, and the names that they give its weights."""

    record: Any
    """transformers' record of the model's files. Another one makes the table invalid."""
    conversions: list[Any]
    names: dict[str, str] = field(default_factory=dict)
    """Weights that are only renamed: name in memory -> name in the files."""
    one_by_one: bool | None = None
    """See `one_by_one`. None: not asked for."""


_TABLES: WeakKeyDictionary[PreTrainedModel, _Table] = WeakKeyDictionary()


def _table(model: PreTrainedModel) -> _Table:
    """Return the table of a model, of which one is cached.

    Loading adapters may replace the record of the model's files (`lora.add_lora`).
    """
    record = getattr(model, CONVERSIONS, None)
    table = _TABLES.get(model)
    if table is None or table.record is not record:
        conversions = _family_conversions(model) if record is None else record
        table = _TABLES[model] = _Table(record=record, conversions=conversions)
    return table


def _family_conversions(model: PreTrainedModel) -> list[Any]:
    """Return the conversions that `revert_weight_conversion` takes for a model without a record."""
    # As there: without the renamings of legacy files, which are not written again, and without
    # prefixes, which the record of loaded files alone could justify.
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    return [conversion for conversion in conversions if not isinstance(conversion, PrefixChange)]


def _convert(
    model: PreTrainedModel, conversions: list[Any], weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Revert the conversions of a model's files.

    They are the model's record during the call, because without a record transformers walks
    through all modules to find those of the family.
    """
    record = getattr(model, CONVERSIONS, None)
    setattr(model, CONVERSIONS, conversions)
    try:
        reverted: dict[str, Tensor] = revert_weight_conversion(model, dict(weights))
    finally:
        setattr(model, CONVERSIONS, record)
    return reverted


def _try_one_by_one(model: PreTrainedModel, table: _Table) -> bool:
    """Return True if weights converted one at a time give the same files as all together.

    Then weights can be gathered, converted and sent one after the other, and never have to be in
    memory together. A conversion may need several weights at once, and renamings can depend on
    other weights too (transformers' `GroupWeightRename`).

    It is tried on tensors on the meta device, which have no values: names and shapes are compared.
    """
    shapes: dict[str, Tensor] = {}
    for name, tensor in full_state(model):
        if "lora_" not in name:  # the model's files hold no adapters
            shapes |= on_meta({base_name(name): tensor})
    together = {name: t.shape for name, t in _convert(model, table.conversions, shapes).items()}
    alone: dict[str, torch.Size] = {}
    for name, tensor in shapes.items():
        try:
            converted = _convert(model, table.conversions, {name: tensor})
        except Exception:  # an operation that misses its other inputs raises anything
            return False
        alone.update((n, t.shape) for n, t in converted.items())
    return alone == together
