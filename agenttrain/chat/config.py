"""Settings of the chat template and of the response format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Any

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from agenttrain.utils.data_fields import Data
from agenttrain.utils.sections import SETTINGS, Quoted, raise_problems


@dataclass(config=SETTINGS)
class ChatTemplateConfig:
    """Settings for rendering conversations."""

    name: Data[str] = "auto"
    """`auto`: the fix that the model's family needs, if any; `none`: the model's own; a family."""
    path: Data[str | None] = None
    """For name=file: a Jinja file, or a model with one: a folder, `bundled:<name>`, `org/name`."""
    revision: Quoted = None
    """Branch, tag or commit of a model of the hub in `path`."""
    kwargs: Data[dict[str, Any]] = field(default_factory=dict)
    """Passed to the template, e.g. {enable_thinking: false}."""
    roles: Data[dict[str, str]] = field(default_factory=dict)
    """Roles of messages -> roles to render, e.g. {human: user}. Without it, developer is system,
    human is user, gpt is assistant, function and observation are tool, if the template has no such
    role."""
    family: Data[dict[str, Any]] = field(default_factory=dict)
    """The family's marks, fixes and tokens, as the files of this group hold them: see
    `agenttrain/chat/fixes.py`."""

    @model_validator(mode="after")
    def _check(self) -> ChatTemplateConfig:
        raise_problems(_file_problems("chat_template", self.name, self.path))
        return self


@dataclass(config=SETTINGS)
class ResponseSchemaConfig:
    """Settings for parsing completions."""

    name: Data[str] = "auto"
    """`auto`: the schema that the tokenizer carries, else that of the chat template's family;
    `file`: the one in `path`; any other name: a format in conf/response_schema/, such as hermes."""
    path: Data[str | None] = None
    """A YAML or JSON file of the user's, for name=file."""
    spec: Data[dict[str, Any]] = field(default_factory=dict)
    """The format itself: a mapping under `spec`, as in the files of conf/response_schema/. Empty:
    the file `conf/response_schema/<name>.yaml`."""
    lenient: Data[bool] = False
    """Read arguments that are almost JSON (`{a: 3}`, `{'a': 3}`, no braces), which parsers of
    inference servers may refuse; counted as `tools/lenient_calls`."""
    server_parser: Data[str | None] = None
    """vLLM's name for a parser of these calls, with which `agenttrain serve` starts an engine's own
    server; None: the bundled format's."""

    @model_validator(mode="after")
    def _check(self) -> ResponseSchemaConfig:
        raise_problems(_file_problems("response_schema", self.name, self.path))
        return self


def _file_problems(key: str, name: str, path: str | None) -> Iterator[str]:
    if name == "file" and path is None:
        yield f"{key}.name=file: which one? add {key}.path=…"
    elif path is not None and name != "file":
        yield f"{key}.path={path}: is not used with {key}.name={name}; add {key}=file"
