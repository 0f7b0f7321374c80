"""Low-rank adapters through peft: added in place or loaded, saved alone, merged.

peft is imported where there are adapters: it takes as long as a tenth of a start.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from agenttrain.engines.language_model import encoder_pattern
from agenttrain.engines.mixers import keeping_float32, stays_float32
from agenttrain.training.checkpoint_files import auto_class, loading_options, set_stop_tokens
from agenttrain.training.config import LoraSettings
from agenttrain.training.gathering import gather_by_layer
from agenttrain.training.lora_targets import EXPERTS, LoraTargets, choose_targets
from agenttrain.training.quantization import (
    NF4,
    dequantize,
    has_double_scales,
    has_quantized,
    quantize,
)
from agenttrain.training.sharding import assign, full_tensor, like_part, own_rows
from agenttrain.training.tensor_files import read_header
from agenttrain.types import ConfigError
from agenttrain.utils.model_path import BASE_QUANTIZATION, base_folder
from agenttrain.utils.sections import shown

ADAPTER = "default"
"""peft's name of the only adapter."""
WEIGHTS_FILE = "adapter_model.safetensors"
CONVERSIONS = "_weight_conversions"
"""transformers' attribute with the conversions of the files that a model was loaded from."""
PEFT = "base_model.model."
"""Prefix that peft puts before the names of a model's modules."""


def add_lora(model: PreTrainedModel, settings: LoraSettings) -> LoraTargets | None:
    """Add adapters to the layers of `model`, in place, and freeze everything else.

    `model` stays the same object, so that an engine may sample from it. Returns the targets of new
    adapters. A model that was loaded with adapters continues with them, and the result is None.
    Raises ConfigError for targets that the model does not have, and for loaded adapters whose rank,
    alpha or targets differ from the settings.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    targets: LoraTargets | None = None
    if is_adapted(model):
        _check_same_adapters(model, settings)
        conversions = getattr(model, CONVERSIONS, None) or ()
        patterns = [p for conversion in conversions for p in conversion.source_patterns]
        # transformers converts names and shapes between files and model, and saving a model
        # reverts the conversions that loading recorded. Loading adapters has replaced the model's
        # record by the conversions of the adapters' file, whose names have peft's prefix. Without a
        # record, saving uses the conversions of the model's family.
        if any(PEFT in pattern for pattern in patterns):
            setattr(model, CONVERSIONS, None)
    else:
        targets = _add_new_adapters(model, settings)
    # Embedding and head may be one weight: the adapter of one layer must not change the other.
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    has_adapter = any(isinstance(module, BaseTunerLayer) for module in (embedding, head))
    if has_adapter and embedding.weight is head.weight:
        raise ConfigError(
            f"model.lora.targets={shown(settings.targets)}: embedding and head of "
            f"{type(model).__name__} are one weight (tie_word_embeddings), into which an adapter "
            "of one of them cannot be merged; leave both out"
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    # peft gives other adapters the format of their layer's weight; that of 4 bits is bytes.
    _cast_adapters_of_4_bits(model)
    return targets


def _add_new_adapters(model: PreTrainedModel, settings: LoraSettings) -> LoraTargets:
    """Add adapters with new weights to the targets, and return these."""
    from peft import LoraConfig

    encoders = encoder_pattern(model)
    targets = choose_targets(model, settings, encoders)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # a float works too
        target_modules=targets.modules,
        target_parameters=targets.parameters or None,
        exclude_modules=encoders,
        task_type="CAUSAL_LM",
    )
    try:
        model.add_adapter(config, ADAPTER)
    except ValueError as error:
        raise ConfigError(f"model.lora.targets={shown(settings.targets)}: {error}") from error
    return targets


def _cast_adapters_of_4_bits(model: PreTrainedModel) -> None:
    """Cast the adapters of a base in 4 bits to the model's format, as peft does beside others."""
    if has_quantized(model):
        for weight in adapter_parameters(model).values():
            weight.data = weight.data.to(model.dtype)


def describe_adapters(model: PreTrainedModel, targets: LoraTargets | None = None) -> str:
    """Return a line that names what has adapters, and the linear layers that `targets` leaves out.

    Example: ``adapters of rank 16: q_proj, o_proj, experts.down_proj; none: gate (a router)``.
    """
    adapted_names: dict[str, None] = {}  # each once, in order
    for name in adapted_weights(model):
        parts = name.removesuffix(".weight").split(".")
        # Layers share the last part of a name. Of experts the part before is kept too, as in
        # ``experts.down_proj``, because a dense layer may have a `down_proj` as well.
        is_expert = EXPERTS in parts[-2:]
        adapted_names[".".join(parts[-2:] if is_expert else parts[-1:])] = None
    line = f"adapters of rank {model.peft_config[ADAPTER].r}: {', '.join(adapted_names)}"
    if targets is not None and targets.left_out:
        reasons = (f"{name} ({reason})" for name, reason in targets.left_out.items())
        line += f"; none: {', '.join(reasons)}"
    return line


def adapted_experts(model: PreTrainedModel) -> list[str]:
    """Return the names of experts' weights that have adapters, packed or single ones."""
    if not is_adapted(model):  # `adapted_weights` imports peft, which takes seconds
        return []
    return [name for name in adapted_weights(model) if EXPERTS in name.split(".")]


def add_saved_adapters(model: PreTrainedModel, folder: Path) -> None:
    """Add the adapters that a folder describes, with new weights."""
    from peft import LoraConfig

    with _without_pattern_warning():
        model.add_adapter(LoraConfig.from_pretrained(str(folder)), ADAPTER)


def load_saved_adapters(model: Any, folder: Path) -> None:
    """Load the adapters in a folder onto a model that has none.

    transformers overwrites the model's `CONVERSIONS` by those of the adapters' file. They are put
    back, because saving the model reads them.
    """
    conversions = getattr(model, CONVERSIONS, None)
    with _without_pattern_warning():
        model.load_adapter(str(folder))
    _cast_adapters_of_4_bits(model)
    setattr(model, CONVERSIONS, conversions)


@contextmanager
def _without_pattern_warning() -> Iterator[None]:
    """Hide a wrong warning of peft within the block.

    A `rank_pattern` of packed experts is applied, but peft 0.21 looks for it among modules alone.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys did not match")
        yield


def _check_same_adapters(model: Any, settings: LoraSettings) -> None:
    """Raise ConfigError if a model was loaded with other adapters than `settings` ask for."""
    config = model.peft_config[ADAPTER]
    if (config.r, config.lora_alpha) != (settings.rank, settings.alpha):
        remedy = f"model.lora.rank={config.r} model.lora.alpha={config.lora_alpha:g}"
        raise ConfigError(
            f"model.lora.rank={settings.rank} model.lora.alpha={settings.alpha:g}: model.path "
            f"holds other adapters; set {remedy} to continue with them, or merge them first "
            "(agenttrain export)"
        )
    # Default targets ask for nothing: a run that continues need not repeat them.
    is_default = settings.targets == LoraSettings().targets
    checked = {"target_parameters": (settings.target_parameters, config.target_parameters)}
    if not is_default:
        checked["targets"] = (settings.targets, config.target_modules)
    for name, (requested, loaded) in checked.items():
        if requested is not None and set(requested) != set(loaded or ()):
            raise ConfigError(
                f"model.lora.{name}={shown(requested)}: model.path holds adapters of "
                f"{', '.join(sorted(loaded or ())) or 'none'}; leave it out to continue with them, "
                "or merge them first (agenttrain export)"
            )


def is_adapted(model: PreTrainedModel) -> bool:
    """Return True if the model has adapters."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def base_name(name: str) -> str:
    """Return the name of a weight or module in the model without adapters.

    Example: peft nests the adapters of packed experts, and ``experts.base_layer.base_layer.down``
    is ``experts.down`` in the model.
    """
    return ".".join(part for part in name.split(".") if part != "base_layer")


def adapted_weights(model: PreTrainedModel) -> dict[str, Any]:
    """Return peft's layer of each adapted weight, by the weight's name without adapters.

    Example: ``{"model.layers.0.mlp.down_proj.weight": …, "….mlp.experts.down_proj": …}``. The first
    is the weight of a linear module, the second a bare parameter that holds packed experts.
    """
    from peft.tuners.lora import LoraLayer

    layers = {}
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            # peft's layer of a bare parameter stands in place of the module that holds it, and has
            # the parameter's name.
            parameter = getattr(layer, "parameter_name", "weight")
            layers[f"{base_name(name)}.{parameter}"] = layer
    return layers


def delta(layer: Any, weight: Tensor) -> Tensor:
    """Return the change that a layer's adapters make to its weight, sharded as the weight is."""
    experts = getattr(layer, "num_experts", 1)
    if experts == 1 or not isinstance(weight, DTensor):
        change: Tensor = layer.get_delta_weight(ADAPTER)
        return change
    # Packed experts: E experts, R rank, I inputs, O outputs. A row of the weight is an expert, but
    # a row of an adapter's matrix is not, so the matrices are gathered before they are sliced.
    # peft stores A as [E * R, I] and B as [O, R * E], in this order of their factors.
    a, b = (full_tensor(m[ADAPTER].weight) for m in (layer.lora_A, layer.lora_B))
    rows = slice(*own_rows(weight))
    a_ERI = a.reshape(experts, -1, a.shape[-1])[rows]
    b_ORE = b.reshape(b.shape[0], -1, experts)[..., rows]
    change = torch.einsum("ore,eri->eoi", b_ORE, a_ERI) * layer.scaling[ADAPTER]
    # `change` is [experts, out, in]. For weights of this form peft has swapped its features; other
    # weights are [experts, in, out].
    if not layer._did_swap_in_out_features:
        change = change.transpose(1, 2)
    return like_part(weight, change)


def zero_matrix(layer: Any) -> Tensor:
    """Return the matrix of a layer's adapter that is zero at first: B, of an embedding A."""
    if ADAPTER in layer.lora_embedding_A:
        embedding_a: Tensor = layer.lora_embedding_A[ADAPTER]
        return embedding_a
    weight: Tensor = layer.lora_B[ADAPTER].weight
    return weight


def adapter_parameters(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the adapters' parameters by their names in the model."""
    return {name: weight for name, weight in model.named_parameters() if "lora_" in name}


def changes_nothing(model: PreTrainedModel) -> bool:
    """Return True if the adapters are new: the second matrix of each is zero."""
    second_matrices = ("lora_B", "lora_embedding_B")
    return not any(
        weight.any()
        for name, weight in adapter_parameters(model).items()
        if any(matrix in name for matrix in second_matrices)
    )


def adapter_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the adapters' weights by peft's names, on the CPU. All processes gather together."""
    from peft import get_peft_model_state_dict

    # Not the default "auto", which saves embeddings that differ from those of the base on the hub.
    state = get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False)
    return {
        f"{PEFT}{name}": tensor.contiguous().cpu()
        for name, tensor in gather_by_layer(model, state.items())
    }


def save_adapter_config(model: PreTrainedModel, folder: Path) -> None:
    """Write the settings that transformers needs to load the adapters onto their base model.

    Those of a base in 4 bits are in `BASE_QUANTIZATION`, which agenttrain alone reads.
    """
    config: Any = model.peft_config[ADAPTER]
    config.save_pretrained(folder)
    if has_quantized(model):
        keys = {"quantization": NF4, "double_quantization": has_double_scales(model)}
        (folder / BASE_QUANTIZATION).write_text(json.dumps(keys), encoding="utf-8")
    if model.generation_config is not None:  # has the tokens that end a turn
        model.generation_config.save_pretrained(folder)


def load_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Load the weights of a checkpoint into the adapters of `model`."""
    from peft.utils import load_peft_weights

    state = load_peft_weights(str(folder), device="cpu")
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            # Files lack the adapter's name, `default`: a linear layer has …lora_A.default.weight in
            # the model, an embedding …lora_embedding_A.default.
            stored_name = name.removesuffix(f".{ADAPTER}").replace(f".{ADAPTER}.", ".")
            assign(parameter, state[f"{PEFT}{stored_name}"])


def merged(
    folder: Path, dtype: torch.dtype | str, *, double: bool | None = None
) -> tuple[PreTrainedModel, float]:
    """Load the base model of a folder of adapters and merge the adapters into its weights.

    Base and adapters are added in float32, whatever the files' formats, and the sum is cast once:
    to `dtype`, or for ``auto`` to the format of the adapters, which is that of their training. The
    end-of-sequence tokens are those of the folder. Returns the model, and the rounding of the cast:
    how far it moves the adapted weights, divided by how far the adapters move them (`_rounding`).

    `double` is not None for adapters that were trained on a base in 4 bits, and says whether its
    scales are in 8 bits (`quantize`). The adapters are then merged into the numbers that the 4 bits
    stand for: the base is loaded in the format of training, quantised as it was there, dequantised,
    and then cast to float32. None: into the weights as they are in the base's files.
    """
    from peft import PeftModel

    base = base_folder(str(folder))
    assert base is not None
    trained_dtype = adapter_dtype(folder)
    # The base's format until it is quantised: training made the 4 bits of weights in its format.
    load_dtype = torch.float32 if double is None else trained_dtype
    with keeping_float32():  # training loads the base in the same formats
        model = auto_class(base).from_pretrained(base, dtype=load_dtype, **loading_options(base))
    if double is not None:
        quantize(model, double=double)
        dequantize(model)
        model = model.float().cpu()  # from here on as without 4 bits
    target_dtype = trained_dtype if isinstance(dtype, str) else dtype
    with _without_pattern_warning():
        adapted = PeftModel.from_pretrained(model, str(folder))
        rounding = _rounding(adapted, target_dtype)
        model = adapted.merge_and_unload()
    if (folder / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
        eos_ids = model.generation_config.eos_token_id
        if eos_ids is not None:
            set_stop_tokens(model, eos_ids if isinstance(eos_ids, list) else [eos_ids])
    return cast(model, target_dtype), rounding


@torch.no_grad()
def _rounding(model: Any, dtype: torch.dtype) -> float:
    """Return how far casting the merged weights moves them, as a share of the adapters' change.

    Both are norms over all adapted weights, in float32. Example: a weight of 1 and a change of
    0.003 give 1.003, which bfloat16 rounds to 1: the share is 1, the change is lost.
    """
    rounding_sum = change_sum = 0.0
    for layer in adapted_weights(model).values():
        is_packed = hasattr(layer, "parameter_name")
        weight = layer.get_param() if is_packed else layer.get_base_layer().weight
        change = delta(layer, weight).float()
        total = weight.float() + change
        rounding_sum += float((total.to(dtype).float() - total).square().sum())
        change_sum += float(change.square().sum())
    return (rounding_sum / change_sum) ** 0.5 if change_sum else 0.0


def adapter_dtype(folder: Path) -> torch.dtype:
    """Return the number format of the adapters in a folder."""
    return next(iter(read_header(folder / WEIGHTS_FILE).values())).dtype


def cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Cast the weights to a format, except those that stay in float32."""
    dtype_plan = model._get_dtype_plan(dtype)
    for name, weight in model.named_parameters():
        if dtype_plan.keys().isdisjoint(name.split(".")) and not stays_float32(name):
            weight.data = weight.data.to(dtype)
    model.config.dtype = dtype
    return model
