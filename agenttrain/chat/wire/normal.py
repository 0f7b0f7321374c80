"""Requests and answers of chat APIs in one form, whatever API they came through."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agenttrain.chat.grammar import ANY_FORM, AnswerForm
from agenttrain.types import AssistantTurn, Finish, Message, ToolCall

HANDLE = "handle"
"""Key of an assistant message: the name under which the client was given its turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A request for an answer, whichever API it came through.

    Messages are those of chat templates, with two differences: a call whose arguments are no JSON
    object has their text under `text`, and a message may have a `handle`.
    """

    messages: list[Message]
    schemas: list[dict[str, Any]]
    model: str | None = None
    max_tokens: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters, texts that end the answer, and fields that `unfollowed` returns, under
    their names in the request."""
    form: AnswerForm = ANY_FORM
    """The form that the request demands of the answer: calls or JSON."""
    stream: bool = False
    include_usage: bool = False
    """The stream must end with the numbers of tokens."""
    size: int = 0
    """Bytes of the request's body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A sampled turn in the form in which the client gets it."""

    message: Message
    """`content`, `reasoning_content` and `tool_calls` under the ids that the client gets."""
    finish: Finish
    prompt_tokens: int
    sampled_tokens: int
    model: str
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))


def issued_message(
    turn: AssistantTurn, call_ids: Sequence[str], handle: str, *, text_arguments: bool
) -> Message:
    """Return the message that the client gets for a turn; its calls have the ids `call_ids`.

    They are the calls of `issued_calls`. The other calls are malformed: their texts are part of the
    content.
    """
    calls = issued_calls(turn, text_arguments=text_arguments)
    texts = [call.text for call in turn.calls if call not in calls]
    content = "\n".join(text for text in (turn.content, *texts) if text)
    message: Message = {"role": "assistant", "content": content, HANDLE: handle}
    if turn.reasoning is not None:
        message["reasoning_content"] = turn.reasoning
    if calls:
        message["tool_calls"] = [
            call_message(call_id, call.name, call.arguments, call.text if call.malformed else None)
            for call_id, call in zip(call_ids, calls, strict=True)
        ]
    return message


def issued_calls(turn: AssistantTurn, *, text_arguments: bool) -> list[ToolCall]:
    """Return the calls of a turn that the client gets as calls, and not as text.

    `text_arguments`: the API's arguments are text, so that a malformed call with a name is one too.
    """
    return [call for call in turn.calls if call.malformed is None or (text_arguments and call.name)]


def call_message(
    call_id: str, name: str, arguments: Mapping[str, Any], text: str | None = None
) -> dict[str, Any]:
    """Return a call of an assistant message; `text` holds arguments that are no JSON object."""
    function: dict[str, Any] = {"name": name, "arguments": arguments}
    if text is not None:
        function |= {"malformed": "its arguments are not a JSON object", "text": text}
    return {"id": call_id, "type": "function", "function": function}
