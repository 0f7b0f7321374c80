"""Settings of the policy: its weights, adapters, chat template and response format."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omegaconf import MISSING


class Dtype(StrEnum):
    """Number format of the policy's weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class Init(StrEnum):
    """Where a run's first weights come from."""

    pretrained = "pretrained"
    """The files in `model.path`."""
    random = "random"
    """Drawn with `seed`, of the sizes that its config.json says; for `agenttrain sft`."""


@dataclass
class LoraSettings:
    """Low-rank adapters (https://arxiv.org/abs/2106.09685) instead of training every weight."""

    rank: int = 0
    """Rank of each adapter's matrices; 0: no adapters, all weights are trained."""
    alpha: float = 32.0
    """An adapter's output is scaled by alpha / rank."""
    targets: list[str] = field(default_factory=lambda: ["all-linear"])
    """Names of the modules with an adapter, e.g. [q_proj,v_proj]; all-linear: all but the head."""


@dataclass
class ModelConfig:
    """The policy. `path` is a folder that transformers can load, or `bundled:<name>`."""

    path: str = MISSING
    """Folder with config.json, weights and tokenizer; `bundled:shop` is the packaged model."""
    dtype: Dtype = Dtype.float32
    """Number format of the weights; the optimizer keeps float32 copies of others."""
    init: Init = Init.pretrained
    lora: LoraSettings = field(default_factory=LoraSettings)


@dataclass
class ChatTemplateConfig:
    """How conversations are rendered."""

    name: str = "auto"
    """`auto`: the fix that the model's family needs, if any; `none`: the model's own; a family."""
    path: str | None = None
    """A Jinja file of the user's, for name=file."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to the template, e.g. {enable_thinking: false}."""
    family: dict[str, Any] = field(default_factory=dict)
    """Knowledge of a family in a file of this group: see `agenttrain/chat/families.py`."""


@dataclass
class ResponseSchemaConfig:
    """How completions are parsed."""

    name: str = "auto"
    """`auto`: what the tokenizer carries, else the family's; `file`; else a format's name."""
    path: str | None = None
    """A YAML or JSON file of the user's, for name=file."""
    spec: dict[str, Any] = field(default_factory=dict)
    """The format, as the group's files hold it; empty: the file of that name in conf/."""
    lenient: bool = False
    """Read arguments that are almost JSON (`{a: 3}`, `{'a': 3}`, no braces), which parsers of
    inference servers may refuse; counted as `tools/lenient_calls`."""
