"""From a tokenizer and two configuration groups to a `Chat`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from agenttrain.chat.encoding import ChatError
from agenttrain.chat.families import FAMILIES, Family, ResponseSpec
from agenttrain.chat.render import USER, render
from agenttrain.chat.response import parse_response
from agenttrain.chat.template import Chat
from agenttrain.config.schema import ChatTemplateConfig, ResponseSchemaConfig
from agenttrain.types import Message


def load_chat(
    tokenizer: Any, template: ChatTemplateConfig, response_schema: ResponseSchemaConfig
) -> Chat:
    """The tokenizer's own chat template, fixed and parsed as the two groups say.

    Raises ChatError that names the group and the key to change.
    """
    source = _source(tokenizer, template)
    family = _recognise(tokenizer, source, template.kwargs)
    if template.name == "auto" and family is not None:
        source = _edited(source, FAMILIES[family], family)
    elif template.name in FAMILIES:
        source = _edited(source, FAMILIES[template.name], template.name)
    return Chat(
        tokenizer,
        source,
        _response(response_schema, family),
        kwargs=template.kwargs,
        eos_token_ids=_eos_token_ids(tokenizer),
    )


def _source(tokenizer: Any, config: ChatTemplateConfig) -> str:
    """The template before fixes: the user's file, or what the tokenizer carries."""
    _known("chat_template.name", config.name, ["auto", "none", "file", *FAMILIES])
    if (config.path is not None) != (config.name == "file"):
        raise ChatError(
            f"chat_template.name={config.name} with chat_template.path={config.path}: a file is "
            "used by `chat_template=file chat_template.path=<file.jinja>`, both together"
        )
    if config.path is not None:
        try:
            return Path(config.path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ChatError(f"chat_template.path={config.path} cannot be read: {error}") from error
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        raise ChatError(
            "model.path: the tokenizer carries no chat template, or several without a default; "
            "set `chat_template=file chat_template.path=<file.jinja>`"
        ) from error


def _recognise(tokenizer: Any, source: str, kwargs: dict[str, Any]) -> str | None:
    """The first family whose parser reads back a call that the template has rendered."""
    arguments = {"city": "Oslo", "days": 2}
    call: Message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call_0_0",
                "type": "function",
                "function": {"name": "forecast", "arguments": arguments},
            }
        ],
    }
    for name, family in FAMILIES.items():
        try:
            rendering = render(
                tokenizer, _edited(source, family, name), [USER, call], kwargs=kwargs
            )
        except ChatError:
            continue
        calls = parse_response(rendering, family.response, turn=0).calls
        if [(c.name, c.arguments, c.malformed) for c in calls] == [("forecast", arguments, None)]:
            return name
    return None


def _edited(source: str, family: Family, name: str) -> str:
    for find, put in family.edits:
        if find not in source:
            raise ChatError(
                f"chat_template={name}: the model's template does not hold {find!r}, which the "
                "fix replaces; set chat_template=none or chat_template=file"
            )
        source = source.replace(find, put)
    return source


def _response(config: ResponseSchemaConfig, family: str | None) -> ResponseSpec:
    _known("response_schema.name", config.name, ["auto", "file", *FAMILIES])
    if (config.path is not None) != (config.name == "file"):
        raise ChatError(
            f"response_schema.name={config.name} with response_schema.path={config.path}: a file "
            "is used by `response_schema=file response_schema.path=<file.yaml>`, both together"
        )
    if config.path is not None:
        return _response_file(config.path)
    name = family if config.name == "auto" else config.name
    if name is None:
        raise ChatError(
            "response_schema=auto: the chat template renders tool calls in no known format; set "
            f"response_schema to one of {', '.join(FAMILIES)}, or chat_template to a template "
            "that renders calls so"
        )
    return FAMILIES[name].response


def _response_file(path: str) -> ResponseSpec:
    """A YAML mapping with exactly the fields of ResponseSpec."""
    keys = [field.name for field in fields(ResponseSpec)]
    try:
        found = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
        raise ChatError(f"response_schema.path={path} cannot be read: {error}") from error
    if not isinstance(found, dict) or sorted(map(str, found)) != sorted(keys):
        raise ChatError(f"response_schema.path={path} must hold the keys {', '.join(keys)}")
    bad = [key for key, value in found.items() if not isinstance(value, str) or not value]
    if bad:
        raise ChatError(f"response_schema.path={path}: {', '.join(map(str, bad))} must be text")
    return ResponseSpec(**{key: str(found[key]) for key in keys})


def _known(key: str, value: str, names: Iterable[str]) -> None:
    names = sorted(names)
    if value not in names:
        close = get_close_matches(value, names, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ChatError(f"{key}={value} is not known: it is one of {', '.join(names)}{hint}")


def _eos_token_ids(tokenizer: Any) -> list[int]:
    """The tokenizer's end of sequence, then those of the generation config beside it."""
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    path = Path(str(tokenizer.name_or_path)) / "generation_config.json"
    if tokenizer.name_or_path and path.is_file():
        found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        ids += found if isinstance(found, list) else [] if found is None else [found]
    return ids
