"""From a tokenizer and two configuration groups to a `Chat`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from agenttrain.chat.behaviour import behaviour
from agenttrain.chat.carried import carried_template, read_template
from agenttrain.chat.encoding import ChatError
from agenttrain.chat.families import Family, families, parse_family
from agenttrain.chat.fix import REMEDY, Fix, described, fixed, recognise
from agenttrain.chat.render import USER, render
from agenttrain.chat.response import parse_response
from agenttrain.chat.response_export import response_template
from agenttrain.chat.response_parts import ResponseSpec
from agenttrain.chat.response_template import TemplateSpec
from agenttrain.chat.specs import load_spec, resolve_spec, spec_names
from agenttrain.chat.template import Chat
from agenttrain.config.schema import ChatTemplateConfig, ResponseSchemaConfig
from agenttrain.types import Message

PLAIN = "hermes"
"""Response schema of templates that render no calls."""
OURS = ("messages", "tools", "add_generation_prompt")
"""Variables of a template that are not the user's."""
CALL_ARGUMENTS = {"city": "Oslo", "days": 2}
FORECAST = {
    "type": "function",
    "function": {
        "name": "forecast",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}


def load_chat(
    tokenizer: Any,
    template: ChatTemplateConfig,
    response_schema: ResponseSchemaConfig,
    *,
    tools: bool = True,
) -> Chat:
    """Return the tokenizer's own chat template, fixed and parsed as the two groups say.

    `tools`: whether the run has any; a tokenizer may carry a template of its own for them. Raises
    ChatError that names the group and the key to change.
    """
    known = dict(families())
    if template.family:
        known[template.name] = parse_family(template.name, template.family)
    source, chosen = _source(tokenizer, template, known, tools=tools)
    fix = replace(make_fix(tokenizer, source, template, known), chosen=chosen)
    _read_by(fix.template, template.kwargs)
    family = known.get(fix.family or "")
    # The tokenizer's end of sequence, then those of the generation config beside it.
    eos_token_ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    path = Path(str(tokenizer.name_or_path)) / "generation_config.json"
    if tokenizer.name_or_path and path.is_file():
        ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        eos_token_ids += ids if isinstance(ids, list) else [] if ids is None else [ids]
    # Ordinary tokens of the family, and of those whose template the model has where another's
    # tools were added to it.
    taken = [other for other in known.values() if other == family or described(source, other)]
    make = partial(
        Chat,
        tokenizer,
        fix.template,
        kwargs=template.kwargs,
        eos_token_ids=eos_token_ids,
        fix=fix,
        plain={text: plain.why for one in taken for plain in one.plain for text in plain.tokens},
    )
    response = family.response if family else None
    if response is None and not renders_calls(tokenizer, fix.template, template.kwargs):
        response = PLAIN
    # What the tokenizer carries is for its own template, not for one that was put in its place.
    replaced = family is not None and not family.marks and bool(fix.changes)
    spec = resolve_spec(None if replaced else tokenizer, response_schema, response)
    if family is not None and isinstance(spec, TemplateSpec) and response_schema.name == "auto":
        # A checkpoint of ours carries its family's format in transformers' words, which say less.
        chat = make(load_spec(family.response))
        if response_template(chat) == spec.source:
            return chat
    return make(spec)


def make_fix(
    tokenizer: Any, source: str, config: ChatTemplateConfig, known: Mapping[str, Family]
) -> Fix:
    """Fix the source as the group says: recognised, left alone, or as a given family's."""

    def reads(family: Family, template: str) -> bool:
        return reads_back(tokenizer, template, load_spec(family.response), config.kwargs)

    name: str | None = config.name
    if name not in known:
        name = recognise(source, known, reads)
    if name is None or config.name in ("none", "file"):
        return Fix(family=name, stock=source, template=source)
    family = known[name]
    if not family.marks and reads(family, source):
        # A family of no model in particular has nothing to add to a template that behaves so.
        return Fix(family=name, stock=source, template=source)
    try:
        fix = fixed(name, family, source)
        if family.tools and reads(family, source) and not reads(family, fix.template):
            # A fork may hold what an edit looks for and not the variables that it writes with.
            raise ChatError(
                f"chat_template={name}: with the fix of {name}, the model's template no longer "
                f"renders the calls that it renders without; {REMEDY}"
            )
        return fix
    except ChatError as error:
        if config.name != "auto":
            raise
        return Fix(family=name, stock=source, template=source, problem=str(error))


def _source(
    tokenizer: Any, config: ChatTemplateConfig, known: Mapping[str, Family], *, tools: bool
) -> tuple[str, str | None]:
    """Return the template before fixes, the user's file or what the tokenizer carries, and in
    words which of several it is."""
    names = sorted(["auto", "none", "file", *known])
    if config.name not in names:
        close = get_close_matches(config.name, names, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ChatError(
            f"chat_template.name={config.name} is not known: it is one of {', '.join(names)}{hint}"
        )
    if (config.path is not None) != (config.name == "file"):
        raise ChatError(
            f"chat_template.name={config.name} with chat_template.path={config.path}: a file is "
            "used by `chat_template=file chat_template.path=<file.jinja>`, both together"
        )
    if config.path is not None:
        return read_template(config.path), None
    return carried_template(getattr(tokenizer, "chat_template", None), tools=tools)


def renders_calls(tokenizer: Any, template: str, kwargs: Mapping[str, Any]) -> bool:
    """Check that a template shows the assistant's tool calls."""

    def rendering(messages: Sequence[Message], generation_prompt: bool) -> str:
        return render(
            tokenizer, template, messages, generation_prompt=generation_prompt, kwargs=kwargs
        )

    return behaviour(rendering).renders_calls


def reads_back(
    tokenizer: Any, template: str, response: ResponseSpec, kwargs: Mapping[str, Any]
) -> bool:
    """Check that the parser reads back a call that the template has rendered."""
    call: Message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "abcdefgh1",
                "type": "function",
                "function": {"name": "forecast", "arguments": CALL_ARGUMENTS},
            }
        ],
    }
    try:
        rendering = render(tokenizer, template, [USER, call], kwargs=kwargs)
        prompts = [
            render(tokenizer, template, [USER], generation_prompt=opened, kwargs=kwargs)
            for opened in (True, False)
        ]
    except ChatError:
        return False
    # Behind the generation prompt, or from the header on where that has opened the reasoning.
    completions = [rendering.removeprefix(p) for p in prompts if rendering.startswith(p)]
    for completion in completions or [rendering]:
        calls = parse_response(completion, response, turn=0, schemas=[FORECAST]).calls
        read = [(call.name, call.arguments, call.malformed) for call in calls]
        if read == [("forecast", CALL_ARGUMENTS, None)]:
            return True
    return False


def formats(chat: Chat) -> list[str]:
    """Names of the response schemas that read the calls of a chat's template."""
    return [
        name
        for name in spec_names()
        if reads_back(chat.tokenizer, chat.template, load_spec(name), chat.kwargs)
    ]


def _read_by(template: str, kwargs: Mapping[str, Any]) -> None:
    """Raise ChatError for a variable that the template does not read: it would change nothing."""
    words = set(re.findall(r"\w+", template))
    for key in kwargs:
        if key in OURS:
            raise ChatError(f"chat_template.kwargs.{key}: is what agenttrain fills in; remove it")
        if key not in words:
            close = get_close_matches(key, words, n=1, cutoff=0.8)
            hint = f"did you mean {close[0]}?" if close else "remove it"
            raise ChatError(
                f"chat_template.kwargs.{key}: the chat template reads no such variable; {hint}"
            )
