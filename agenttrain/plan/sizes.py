"""Sizes of a run's model: read from its config.json, traced without weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from agenttrain.config.errors import ConfigError
from agenttrain.config.model_path import SIZES, model_folder
from agenttrain.config.schema import ModelConfig, OptimizerConfig
from agenttrain.training import sharding
from agenttrain.training.footprint import (
    Saved,
    Updating,
    cached_shapes,
    empty_model,
    updating,
    weight_bytes,
)

AUTOCAST = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
Value = TypeVar("Value")


class Sizes:
    """A model without weights, and what was traced with it; equal questions are traced once.

    Raises ConfigError for a model that transformers cannot build from its config.json, or run.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._path = config.path
        folder = model_folder(config.path, SIZES)
        dtype = getattr(torch, config.dtype)
        self.model: PreTrainedModel = self._told(
            lambda: empty_model(AutoConfig.from_pretrained(folder), dtype, config.lora)
        )
        self._saved = {name: Saved(self.model, dtype) for name, dtype in AUTOCAST.items()}

    @cached_property
    def parameters(self) -> int:
        """Numbers of all weights; tied ones count once."""
        return sum(p.numel() for p in self.model.parameters())

    @cached_property
    def trained_bytes(self) -> int:
        """Bytes of the weights that are trained."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)

    @cached_property
    def weights(self) -> int:
        """Bytes of all weights."""
        return weight_bytes(self.model)

    @cached_property
    def largest_weight(self) -> int:
        """Bytes of the largest weight: the embedding of a small model."""
        return max(p.numel() * p.element_size() for p in self.model.parameters())

    @property
    def itemsize(self) -> int:
        """Bytes of a number of the weights."""
        return self.model.dtype.itemsize

    @property
    def width(self) -> int:
        """Numbers of one token's hidden state."""
        size: int = self.model.config.get_text_config().hidden_size
        return size

    @property
    def inner_width(self) -> int:
        """Numbers of one token in the widest linear layer of a decoder layer."""
        linear = (m for m in sharding.layers(self.model)[0].modules() if isinstance(m, nn.Linear))
        return max((max(m.in_features, m.out_features) for m in linear), default=self.width)

    @property
    def vocabulary(self) -> int:
        """Entries of the language-model head."""
        head: Any = self.model.get_output_embeddings()
        size: int = head.weight.shape[0]
        return size

    @property
    def max_context(self) -> int | None:
        """Tokens of one sequence that the model's config allows, if it says so."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    @property
    def hidden(self) -> int:
        """Bytes of one token's hidden state."""
        return self.width * self.itemsize

    @cached_property
    def layers(self) -> int:
        """Number of layers."""
        return len(sharding.layers(self.model))

    @cached_property
    def largest_layer(self) -> int:
        """Bytes of the largest layer's weights."""
        return max(map(weight_bytes, sharding.layers(self.model)))

    @cached_property
    def all_layers(self) -> int:
        """Bytes of the weights of all layers."""
        return sum(map(weight_bytes, sharding.layers(self.model)))

    @cached_property
    def token_cache(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        numbers = self._told(lambda: cached_shapes(self.model))
        return sum(key + value for key, value in numbers) * self.model.dtype.itemsize

    def updating(self, config: OptimizerConfig) -> Updating:
        """Gradients and optimizer state."""
        return updating(self.model, config)

    def saved(self, tokens: int, mixed_precision: str) -> int:
        """Bytes that a forward pass over `tokens` keeps for its backward pass."""
        return self._told(lambda: self._saved[mixed_precision](tokens))

    def _told(self, make: Callable[[], Value]) -> Value:
        try:
            return make()
        except Exception as error:
            first = str(error).partition("\n")[0]
            raise ConfigError(
                f"model.path={self._path}: cannot be planned from its config.json: "
                f"{type(error).__name__}: {first}"
            ) from error
