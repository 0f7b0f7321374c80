"""Rotary frequencies that follow the length of a sequence: which rollouts share a forward pass.

LongRoPE (Phi) has a set of frequencies up to the length of the pretraining and another beyond it,
dynamic scaling one for each length beyond. transformers chooses by the last position of a forward
pass: a short rollout beside a long one would silently be another than alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthLimits:
    """Lengths up to which a model has its own frequencies."""

    long: tuple[int, ...] = ()
    """One set for all that is longer."""
    dynamic: tuple[int, ...] = ()
    """A set for each length above."""

    def kind(self, length: int) -> tuple[int, ...]:
        """Return the kind of a rollout's length; lengths of one kind have the same frequencies.

        Example: with long=(4096,) lengths 10 and 4096 are (0,), 4097 and 9000 are (1,).
        """
        return (
            *(int(length > limit) for limit in self.long),
            *(max(length - limit, 0) for limit in self.dynamic),
        )


def length_limits(model: PreTrainedModel) -> LengthLimits:
    """Read the limits from the model's config; most models have none."""
    config: Any = model.config.get_text_config()
    parameters: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    # One for all layers, or one for each of their types.
    of_types = [parameters] if "rope_type" in parameters else parameters.values()
    ropes = [rope for rope in of_types if isinstance(rope, Mapping)]
    kinds = [(str(rope.get("rope_type")), rope) for rope in ropes]
    return LengthLimits(
        long=tuple(
            rope["original_max_position_embeddings"] for kind, rope in kinds if kind == "longrope"
        ),
        dynamic=tuple(config.max_position_embeddings for kind, _ in kinds if "dynamic" in kind),
    )
