"""The modules and weights of a model that get adapters, by the settings of `model.lora`.

transformers packs the experts of a layer into one weight for each projection, [experts, …]. Such a
weight is no module: peft adapts it by its name, as one of `target_parameters`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from agenttrain.training.config import ALL_LINEAR, LoraSettings
from agenttrain.types import ConfigError
from agenttrain.utils.names import did_you_mean
from agenttrain.utils.sections import shown

EXPERTS = "experts"
"""Name of the module that holds the experts of a layer, in every family of transformers."""
EXPERT_LAYERS = ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3")
"""Names of an expert's layers where each has a module of its own."""
MAMBA_TYPES = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
"""Model types in which peft refuses adapters of `OUT_PROJ`."""
OUT_PROJ = "out_proj"
"""Last projection of a Mamba layer. A kernel for training reads its weight and skips adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraTargets:
    """Modules and weights that get adapters, by names or ends of names."""

    modules: list[str]
    """Modules, such as ``q_proj`` or ``model.layers.0.self_attn.q_proj``."""
    parameters: list[str]
    """Packed weights of experts."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Linear layers that `ALL_LINEAR` leaves out, by the last part of their names -> reason."""


def choose_targets(
    model: PreTrainedModel, settings: LoraSettings, encoders: str | None = None
) -> LoraTargets:
    """Return the modules and parameters that get adapters, in a model that has none.

    With `all-linear` the result also has the linear layers that are left out, and why. `encoders`
    is a pattern of modules beside the language model, which get none. Raises ConfigError for names
    that the model does not have, and for names that peft takes for packed experts whatever module
    has them (`_taken_for_experts`).
    """
    # Packed experts: one weight [experts, …] for all experts of a layer. Each kind once, by the
    # last two parts of the name: ``experts.down_proj`` for all ``….3.mlp.experts.down_proj``.
    packed = list(dict.fromkeys(".".join(n.split(".")[-2:]) for n in packed_experts(model)))
    parameters = settings.target_parameters
    if settings.targets == [ALL_LINEAR]:
        modules, left_out = _linear_modules(model, encoders)
        parameters = packed if parameters is None else parameters
    else:
        _check_modules(model, settings.targets)
        modules, left_out = list(settings.targets), {}
    for target in parameters or ():
        _check_parameter(model, target, packed)
    return LoraTargets(modules=modules, parameters=list(parameters or ()), left_out=left_out)


def packed_experts(model: PreTrainedModel) -> list[str]:
    """Return the names of a model's packed experts, e.g. ``….mlp.experts.down_proj``.

    The model has no adapters yet.
    """
    return [
        name
        for name, weight in model.named_parameters()
        if weight.ndim == 3 and name.split(".")[-2:-1] == [EXPERTS]
    ]


def linear_modules(model: PreTrainedModel, encoders: str | None) -> list[str]:
    """Return the names of the linear layers besides head, encoders and routers.

    `encoders` is a pattern of the encoders' names. The model has no adapters yet.
    """
    routers = set(_routers(model))
    return [name for name in _all_linear(model, encoders) if name not in routers]


def _all_linear(model: PreTrainedModel, encoders: str | None) -> list[str]:
    """Return the names of the linear layers besides the head and those that match `encoders`."""
    head = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and module is not head
        and not (encoders and re.fullmatch(encoders, name))
    ]


def _linear_modules(
    model: PreTrainedModel, encoders: str | None
) -> tuple[list[str], dict[str, str]]:
    """Return the names of the linear layers that can have adapters, and why others cannot.

    The reasons are by the last part of a layer's name, e.g. ``{"gate": "a router"}``. Head and
    encoders are in neither: nobody expects adapters of them.
    """
    linear = _all_linear(model, encoders)
    routers = set(_routers(model))
    taken = _taken_for_experts(model, {_last(name) for name in linear})
    refuses_out_proj = getattr(model.config, "model_type", None) in MAMBA_TYPES
    modules: list[str] = []
    left_out: dict[str, str] = {}
    for name in linear:
        last = _last(name)
        if name in routers:
            left_out[last] = "a router"
        elif refuses_out_proj and last == OUT_PROJ:
            left_out[last] = "peft refuses it beside Mamba"
        elif last in taken:
            left_out[last] = "peft takes it for a packed expert"
        else:
            modules.append(name)
    return modules, left_out


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _routers(model: PreTrainedModel) -> Iterator[str]:
    """Yield the names of linear layers that weigh experts.

    Such a layer is beside the experts, has `router` or `gate` in its name, and a score for each
    expert, or one for the shared expert. A shared expert's `gate_proj` lies deeper, in a module of
    another name.
    """
    for block_name, block in model.named_modules():
        experts = getattr(block, EXPERTS, None)
        if not isinstance(experts, nn.Module):
            continue
        if isinstance(experts, nn.ModuleList):  # each expert is a module
            expert_count = len(experts)
        else:  # a packed weight is [experts, …]
            expert_count = max((len(w) for w in experts.parameters() if w.ndim == 3), default=0)
        for name, module in block.named_modules():
            is_scorer = isinstance(module, nn.Linear) and module.out_features in (1, expert_count)
            child = name.split(".")[0]  # the module directly in the block, beside the experts
            if is_scorer and ("router" in child or "gate" in child):
                yield f"{block_name}.{name}"


def _taken_for_experts(model: PreTrainedModel, names: Iterable[str]) -> set[str]:
    """Return those of the target names that peft replaces by packed experts in this model's family.

    Before transformers 5 each expert was a module with layers such as `gate_proj`. Adapters from
    that time name these layers, and peft puts the packed weight of all experts in their place. It
    does so whatever module has the name: also a dense layer or a shared expert.

    Each name is tried by a config with this name as its only target, which peft converts.
    """
    from peft import LoraConfig

    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # a peft that replaces no names
        return set()
    taken: set[str] = set()
    for name in names:
        config = LoraConfig(target_modules=[name])
        try:
            convert_peft_config_for_transformers(config, model, None)
        except ValueError:
            # peft replaces the name only together with another one: `gate_proj` and `up_proj` are
            # halves of one packed weight.
            taken.add(name)
            continue
        if name not in (config.target_modules or ()):
            taken.add(name)
    return taken


def _check_modules(model: PreTrainedModel, targets: list[str]) -> None:
    """Raise ConfigError for a target that is no module of the model, or stands for experts to peft.

    peft ignores a target that does not exist as long as another one does. Targets concern experts
    in two ways: a model with packed experts has no modules inside `experts` that could have
    adapters (`names_experts`), and peft replaces some names, such as `gate_proj`, by packed experts
    even where a dense layer has the name (`_taken_for_experts`).
    """
    modules = [name for name, _ in model.named_modules()]
    packed = sorted({".".join(name.split(".")[-2:]) for name in packed_experts(model)})
    taken = _taken_for_experts(model, targets)
    for target in targets:
        key = f"model.lora.targets={shown(targets)}: {type(model).__name__}"
        is_module = any(f".{name}".endswith(f".{target}") for name in modules)
        # The experts themselves, or one of their layers that no module of the model is named like.
        names_experts = target == EXPERTS or (target in EXPERT_LAYERS and not is_module)
        if packed and names_experts:
            raise ConfigError(
                f"{key} has packed experts, without a module {target}; leave it out, and name "
                f"weights with model.lora.target_parameters=[{','.join(packed)}]"
            )
        if not is_module:
            raise ConfigError(
                f"{key} has no module {target}"
                f"{did_you_mean(target, sorted({_last(name) for name in modules}))}"
            )
        if target in taken:
            raise ConfigError(
                f"model.lora.targets={shown(targets)}: in {type(model).__name__} peft takes "
                f"{target} for packed experts, whatever module has that name; leave it out, and "
                "name the experts' weights in model.lora.target_parameters"
            )


def _check_parameter(model: PreTrainedModel, target: str, packed: list[str]) -> None:
    """Raise ConfigError for a target parameter that is no packed weight of experts.

    `packed` has the last parts of the names of those that exist, for the message.
    """
    if any(f".{name}".endswith(f".{target}") for name in packed_experts(model)):
        return
    key = f"model.lora.target_parameters=[{target}]"
    if not packed:
        raise ConfigError(
            f"{key}: {type(model).__name__} has no packed experts; leave it out, and name modules "
            "in model.lora.targets"
        )
    raise ConfigError(
        f"{key}: {type(model).__name__} has no packed weight of experts {target}"
        f"{did_you_mean(target, packed)}; it has {', '.join(packed)}"
    )
