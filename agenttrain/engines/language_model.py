"""The language model of a model in this process, and the encoders beside it.

transformers knows the language model of a model that reads images or sound (`get_decoder`). The
rest of its backbone are encoders, under other names in each family: `visual`, or `vision_tower`
with `multi_modal_projector`, or with `embed_vision` and `audio_tower`. The head belongs to neither.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from agenttrain.utils.placeholders import SEEING

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


STATEFUL = {"linear_attention", "mamba", "hybrid"}
"""Names in `layer_types` of a config for layers with a recurrent state."""


def has_states(architecture: Any) -> bool:
    """Return True if layers of a language model, by its config, have recurrent states."""
    return bool(STATEFUL.intersection(getattr(architecture, "layer_types", None) or ()))


def model_class(model_type: str) -> Any:
    """Return transformers' class that loads the models of a type (`model_type` in config.json).

    A model of a type in `SEEING`, whose images agenttrain reads, is loaded with its encoders. So is
    one that AutoModelForCausalLM cannot load, such as LFM2-VL. All others are loaded by
    AutoModelForCausalLM, which drops most models' encoders, but keeps those of Gemma 3.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto import modeling_auto

    reads_text = model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    reads_images = model_type in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    with_encoders = model_type in SEEING or (reads_images and not reads_text)
    return AutoModelForImageTextToText if with_encoders else AutoModelForCausalLM


def backbone(model: PreTrainedModel) -> nn.Module:
    """Return the model without its head. `base_model` does not find it in some models (Llama4)."""
    return model.model if model.base_model is model else model.base_model


def language_model(model: PreTrainedModel) -> Any:
    """Return the backbone without encoders: the part that computes hidden states of tokens."""
    decoder = model.get_decoder()
    return backbone(model) if decoder is model else decoder


def encoder_weights(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the weights of encoders by their names in the model. Empty: it reads text alone.

    Example: of a Gemma 3 those of ``model.vision_tower`` and ``model.multi_modal_projector``.
    """
    net, decoder = backbone(model), language_model(model)
    if net is decoder:
        return {}
    in_decoder = {id(weight) for weight in decoder.parameters()}
    in_encoders = {id(weight) for weight in net.parameters()} - in_decoder
    return {name: weight for name, weight in model.named_parameters() if id(weight) in in_encoders}


def encoder_pattern(model: PreTrainedModel) -> str | None:
    r"""Return a regular expression of the names of encoders' modules. None: there are none.

    LoRA and quantisation leave these modules out by it. They are all modules of the backbone
    outside the language model: towers and projectors, but not the head, which is in neither.
    Example: ``model\.(?!language_model\.).*`` matches ``model.visual.merger`` of a Qwen3-VL, and
    not ``model.language_model.layers.0``.
    """
    if not encoder_weights(model):
        return None
    names = {module: name for name, module in model.named_modules()}
    outer, inner = names[backbone(model)], names[language_model(model)]
    inner_in_outer = inner.removeprefix(f"{outer}.")  # "language_model" of "model.language_model"
    # Names that begin with the backbone's, and do not go on with the language model's.
    return rf"{re.escape(outer)}\.(?!{re.escape(inner_in_outer)}\.).*"
