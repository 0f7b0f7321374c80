"""Soft caps of attention scores, which fused attention may ignore."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def keep_soft_cap(model: PreTrainedModel) -> None:
    """Use eager attention where fused attention would ignore the model's soft cap of scores.

    Before transformers 5.21, Gemma 2 loads with `sdpa`, which drops the cap without a word.
    """
    config: Any = model.config.get_text_config()
    if (
        getattr(config, "attn_logit_softcapping", None) is not None
        and config._attn_implementation == "sdpa"
    ):
        model.set_attn_implementation("eager")
