"""Render a chat template, and find out what it reads, refuses and leaves out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, Protocol

from jinja2 import TemplateError, TemplateSyntaxError

from agenttrain.chat.encoding import CLOSE, OPEN, ChatError
from agenttrain.types import Message
from agenttrain.utils.messages import REASONING_KEYS

USER: Message = {"role": "user", "content": "u"}
"""The first message of every probe conversation."""
REFUSALS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)
"""Errors that a template raises for messages that it cannot render, on purpose or by accident."""


def render(
    tokenizer: Any,
    template: str,
    messages: Sequence[Message],
    schemas: Sequence[dict] = (),
    *,
    generation_prompt: bool = False,
    kwargs: Mapping[str, Any],
) -> str:
    """Render messages with `template` and its `kwargs`. Raises ChatError."""
    try:
        return tokenizer.apply_chat_template(
            list(messages),
            tools=list(schemas) or None,
            chat_template=template,
            add_generation_prompt=generation_prompt,
            tokenize=False,
            **kwargs,
        )
    except TemplateSyntaxError as error:
        raise ChatError(f"{syntax_problem(error)}; correct it, or set chat_template") from error
    except REFUSALS as error:
        roles = [message.get("role") for message in messages]
        raise ChatError(
            f"the chat template refuses messages of the roles {roles}: {error}; change the "
            "messages or set chat_template"
        ) from error


def syntax_problem(error: TemplateSyntaxError) -> str:
    """Describe a syntax error: ``the chat template has a syntax error in line 3: …``."""
    message = (error.message or "").rstrip(".")
    return f"the chat template has a syntax error in line {error.lineno}: {message}"


class Render(Protocol):
    """Renders marked messages to marked text; raises ChatError if the template refuses them."""

    def __call__(self, messages: Sequence[Message], *, generation_prompt: bool) -> str: ...


PROBE = "\ufdd5"
"""A character that no template contains, so that its count shows what was rendered."""
SHORT_ID = re.compile("[A-Za-z0-9]{9}")
"""The only form of call ids that Mistral's templates accept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateBehaviour:
    """Behaviour of a template, found by rendering probe conversations."""

    renders_calls: bool
    """The assistant's tool calls are rendered."""
    one_call_per_turn: bool
    """A turn of two calls is refused, or one of them is left out."""
    reasoning_key: str | None
    """Key of a message under which the template reads reasoning; None: it renders none."""
    short_ids: bool
    """Call ids must have nine letters and digits."""
    shows_ids: bool
    """Call ids are rendered."""
    text_arguments: bool
    """Calls are rendered only if their arguments are JSON text."""


def probe_behaviour(render: Render) -> TemplateBehaviour:
    """Render probe conversations and return the template's behaviour."""
    behaviour = _probe(render)
    if behaviour.renders_calls:
        return behaviour

    def render_text_arguments(messages: Sequence[Message], *, generation_prompt: bool) -> str:
        return render(
            list(map(_with_text_arguments, messages)), generation_prompt=generation_prompt
        )

    # Some templates render only calls whose arguments are JSON text.
    with_text = _probe(render_text_arguments)
    return replace(with_text, text_arguments=True) if with_text.renders_calls else behaviour


def _probe(render: Render) -> TemplateBehaviour:
    """Return the behaviour of a template for arguments as `render` passes them on."""
    usual, short = ("call_0_0", "call_0_1"), ("abcdefgh1", "abcdefgh2")
    renders_usual_ids = _shows(render, [_call_message(("one", usual[0]))], "one")
    if renders_usual_ids:
        # Some templates accept any id in a call, but only short ones in the reply to it.
        short_ids = not _shows_reply(render, usual[0]) and _shows_reply(render, short[0])
    else:
        short_ids = _shows(render, [_call_message(("one", short[0]))], "one")
    renders_calls = renders_usual_ids or short_ids
    ids = short if short_ids else usual
    two_calls = _call_message(("one", ids[0]), ("two", ids[1]))
    renders_both = all(_shows(render, [two_calls], word) for word in ("one", "two"))
    # Some templates show reasoning only beside calls, whose id is one that any template accepts.
    # `_shows` counts a word that stands in the rendering twice, as in a call's name and argument.
    # So the reasoning has its word twice.
    turns = ({"role": "assistant", "content": "c"}, _call_message(("one", short[0])))
    reasoning_keys = (
        key
        for key in REASONING_KEYS
        for turn in turns
        if _shows(render, [{**turn, key: f"{PROBE}why{PROBE}why"}], "why")
    )
    return TemplateBehaviour(
        renders_calls=renders_calls,
        one_call_per_turn=renders_calls and not renders_both,
        reasoning_key=next(reasoning_keys, None),
        short_ids=short_ids,
        shows_ids=_shows_reply(render, ids[0], text=ids[0]),
        text_arguments=False,  # `probe_behaviour` sets it
    )


def _call_message(*calls: tuple[str, str]) -> Message:
    """Return an assistant's message that calls tools, given as (name, id).

    A call's name and its argument are the same probe word, so that `_shows` finds it twice.
    """
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": f"{PROBE}{name}", "arguments": {"a": f"{PROBE}{name}"}},
            }
            for name, call_id in calls
        ],
    }


def _with_text_arguments(message: Message) -> Message:
    """Return a message whose calls, if it has any, have their arguments as JSON text."""
    if "tool_calls" not in message:
        return message
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _shows(render: Render, messages: Sequence[Message], text: str) -> bool:
    """Return True if PROBE with `text` is rendered twice: as a call's name and its argument."""
    try:
        rendering = render([USER, *messages], generation_prompt=False)
        return rendering.count(f"{PROBE}{text}") >= 2
    except ChatError:
        return False


def _shows_reply(render: Render, call_id: str, text: str = PROBE) -> bool:
    """Return True if a call with this id and its reply are rendered, and `text` in them."""
    reply = {"role": "tool", "tool_call_id": call_id, "name": f"{PROBE}one", "content": PROBE}
    try:
        conversation = [USER, _call_message(("one", call_id)), reply]
        return text in render(conversation, generation_prompt=True)
    except ChatError:
        return False


def short_id(call_id: str) -> str:
    """Return nine letters and digits in place of an id; an id of that form stays as it is."""
    unmarked = call_id.replace(OPEN, "").replace(CLOSE, "")
    if SHORT_ID.fullmatch(unmarked):
        return unmarked
    return sha256(unmarked.encode()).hexdigest()[:9]


def adapt_message(message: Message, behaviour: TemplateBehaviour) -> Message:
    """Return a message with its reasoning, ids and arguments in the form the template reads."""
    changes: Message = {}
    key = behaviour.reasoning_key  # our messages have reasoning under REASONING_KEYS[0]
    if key is not None and key not in message and REASONING_KEYS[0] in message:
        changes[key] = message[REASONING_KEYS[0]]
    if behaviour.short_ids and message.get("tool_call_id"):
        changes["tool_call_id"] = short_id(message["tool_call_id"])
    if behaviour.short_ids and message.get("tool_calls"):
        changes["tool_calls"] = [
            {**call, "id": short_id(call["id"])} if call.get("id") else call
            for call in message["tool_calls"]
        ]
    if changes:
        message = {**message, **changes}
    return _with_text_arguments(message) if behaviour.text_arguments else message
