"""Requests and answers of chat APIs in one form, whatever API they came through."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from agenttrain.chat.grammar import ANY_FORM, AnswerForm
from agenttrain.types import AssistantTurn, Finish, Message

HANDLE = "handle"
"""Key of an assistant message: the name under which the client was given its turn."""
FindIssued = Callable[[str], Message | None]
"""Returns the answer that was issued with a handle or the id of a call, or None."""
Namespaces = Mapping[str, tuple[str, str]]
"""Name of a tool for the model -> (namespace, name) of the tool for the client."""


def find_none(key: str) -> Message | None:
    """Return None: nothing was issued. For `FindIssued`."""
    return None


@dataclass(kw_only=True)
class Question:
    """A request for an answer, whichever API it came through.

    Messages are those of chat templates, with two differences. A call whose arguments are no JSON
    object has their text under `text`. An answer that this server issued may have the `handle`
    under which it was issued, by which its turn is recognised.
    """

    messages: list[Message]
    schemas: list[dict[str, Any]]
    """The tools that may be called, in OpenAI's form."""
    model: str | None = None
    max_tokens: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters, and the fields that would change the answer but are not followed: the
    endpoint refuses or overrides both. All under their names in the request."""
    stops: tuple[str, ...] = ()
    """Texts that end the answer, which does not hold them."""
    form: AnswerForm = ANY_FORM
    """The form that the request demands of the answer: calls or JSON."""
    stream: bool = False
    include_usage: bool = False
    """The stream must end with the numbers of tokens."""
    return_token_ids: bool = False
    """As in vLLM: the answer holds the ids of the prompt and of the completion."""
    namespaces: Namespaces = field(default_factory=dict)
    """Name of a tool for the model -> (namespace, name) of the tool for the client. Only tools that
    the client has put into namespaces."""
    left_out: int = 0
    """Tools that the provider would run, such as a web search: the model is not shown them."""
    size: int = 0
    """Bytes of the request's body, which its reader sets."""

    @cached_property
    def schemas_json(self) -> str:
        """The tools as JSON, which stands for them in caches."""
        return json.dumps(self.schemas)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """The fields that every part of a streamed answer has."""

    model: str
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(AnswerHead):
    """A sampled turn in the form that the client gets."""

    message: Message
    """`content`, `reasoning_content` and `tool_calls` under the ids that the client gets."""
    finish: Finish
    prompt_tokens: int
    sampled_tokens: int
    cached_tokens: int | None = None
    """Tokens of the prompt that were reused from an earlier answer, not encoded anew; None if that
    is not counted."""
    token_ids: tuple[Sequence[int], Sequence[int]] | None = None
    """Prompt and completion, if the client asked for them."""
    namespaces: Namespaces = field(default_factory=dict)
    """Name of a tool for the model -> (namespace, name) of the tool for the client."""


def issue(
    turn: AssistantTurn, *, text_arguments: bool, handle: str
) -> tuple[Message, tuple[str, ...]]:
    """Return a turn as the client gets it under a handle, and the ids of its calls.

    The ids are new, because the model's may occur twice. How a call is issued::

        good                    as a call
        malformed, with a name  as a call whose arguments are the text that the model wrote, if the
                                API's arguments are a text (`text_arguments`); else as text
        malformed, without one  as text

    A call that is issued as text is a part of the content, and its id is "".
    """
    call_ids = []
    for call in turn.calls:
        is_issued_as_call = call.malformed is None or (text_arguments and bool(call.name))
        call_ids.append(f"call_{secrets.token_hex(12)}" if is_issued_as_call else "")
    calls = list(zip(call_ids, turn.calls, strict=True))
    texts = [call.text for call_id, call in calls if not call_id]
    content = "\n".join(text for text in (turn.content, *texts) if text)
    message: Message = {"role": "assistant", "content": content, HANDLE: handle}
    if turn.reasoning is not None:
        message["reasoning_content"] = turn.reasoning
    if any(call_ids):
        message["tool_calls"] = [
            call_message(
                call_id,
                call.name,
                call.arguments,
                text=None if call.malformed is None else call.text,
            )
            for call_id, call in calls
            if call_id
        ]
    return message, tuple(call_ids)


def call_message(
    call_id: str, name: str, arguments: Mapping[str, Any], text: str | None = None
) -> dict[str, Any]:
    """Return a call of an assistant message; `text` holds arguments that are no JSON object."""
    function: dict[str, Any] = {"name": name, "arguments": arguments}
    if text is not None:
        function |= {"malformed": "its arguments are not a JSON object", "text": text}
    return {"id": call_id, "type": "function", "function": function}
