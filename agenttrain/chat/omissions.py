"""Find the messages that a chat template leaves out of a prompt.

Templates drop messages silently: of a role that they do not know, in a place where they expect
none, or beside a call. A text that stands in the rendering was not dropped. If a text is missing,
or its message stands in a place that was not seen yet, the conversation is rendered again with a
probe word in place of each text, which shows exactly what is left out. So a row costs a second
rendering only if it has a new place, or a text that the template changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from agenttrain.chat.encoding import ChatError
from agenttrain.types import Message

Render = Callable[[Sequence[Message]], str]
"""Renders messages as a prompt; raises ChatError if the template refuses them."""


class Place(NamedTuple):
    """The place of a message: all that decides if a template shows its text.

    A role is empty where no message stands: before the first one and after the last.
    """

    role: str
    has_calls: bool
    role_before: str
    has_calls_before: bool
    role_after: str


ROLES = ("system", "user", "assistant", "tool")
ALIASES: Mapping[str, str] = {
    "developer": "system",
    "human": "user",
    "gpt": "assistant",
    "function": "tool",
    "observation": "tool",
}
"""Other names of roles, OpenAI's and ShareGPT's. `role_of` adds those that differ in case."""


def role_of(name: str) -> str | None:
    """Return the role that another name stands for: `human` is `user`, `System` is `system`.

    None for a usual name itself, and for a name that is not known.
    """
    lower = name.lower()
    return ALIASES.get(lower) or (lower if lower in ROLES and lower != name else None)


def _probe_word(index: int, part: int = 0) -> str:
    """Return a message part's probe word: a text that no template contains or changes."""
    return f"zqtext{index}x{part}qz"


def _filled_texts(content: Any) -> list[str]:
    """Return the texts of a message's content that are not blank."""
    parts = content if isinstance(content, list | tuple) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return [text for text in texts if isinstance(text, str) and text.strip()]


def _with_probe_words(message: Message, index: int) -> Message:
    """Return a message whose texts are replaced by probe words of its index, one for each part.

    Empty texts and images stay as they are.
    """
    content = message.get("content")
    if isinstance(content, list | tuple):
        parts = [
            {**part, "text": _probe_word(index, number)} if _filled_texts([part]) else part
            for number, part in enumerate(content)
        ]
        return {**message, "content": parts}
    return {**message, "content": _probe_word(index)} if _filled_texts(content) else message


def places(messages: Sequence[Message]) -> dict[int, Place]:
    """Return the place of each message with a text, by the message's index."""
    no_message: Message = {"role": ""}
    around = [no_message, *messages, no_message]
    triples = zip(around, around[1:], around[2:], strict=False)
    return {
        index: Place(
            role=str(message.get("role")),
            has_calls=bool(message.get("tool_calls")),
            role_before=str(before.get("role")),
            has_calls_before=bool(before.get("tool_calls")),
            role_after=str(after.get("role")),
        )
        for index, (before, message, after) in enumerate(triples)
        if _filled_texts(message.get("content"))
    }


def find_omitted(messages: Sequence[Message], render: Render) -> list[int]:
    """Return the indices of the messages whose texts a rendering of the conversation lacks.

    The list is also empty if the template refuses the conversation with probe words in it.
    """
    try:
        rendering = render([_with_probe_words(m, i) for i, m in enumerate(messages)])
    except ChatError:
        return []
    omitted = []
    for index in places(messages):  # messages with a text
        content = messages[index].get("content")
        parts = content if isinstance(content, list | tuple) else [content]
        words = [
            _probe_word(index, number) for number, part in enumerate(parts) if _filled_texts([part])
        ]
        if not all(word in rendering for word in words):
            omitted.append(index)
    return omitted


def texts_stand_in(messages: Sequence[Message], rendering: str, reasoning_close: str) -> bool:
    """Return True if all texts stand in a rendering, in their order and without overlap.

    Templates may trim texts, write them as JSON, and leave out the reasoning with which an
    assistant's text begins.
    """
    position = 0
    for message in messages:
        for text in _filled_texts(message.get("content")):
            if reasoning_close and message.get("role") == "assistant":
                text = text.rpartition(reasoning_close)[2]
            text = text.strip()
            as_json = json.dumps(text, ensure_ascii=False)[1:-1]  # without its quotes
            for form in (text, as_json):
                start = rendering.find(form, position)
                if start >= 0:
                    position = start + len(form)
                    break
            else:
                return False
    return True


def omission_remedy(messages: Sequence[Message], index: int, rendered_roles: Sequence[str]) -> str:
    """Return a remedy for a message that the template leaves out.

    `rendered_roles` are those of ROLES, the usual roles, whose messages the template renders.
    """
    message = messages[index]
    role = str(message.get("role"))
    usual_name = role_of(role)  # None for a usual role itself, and for an unknown one
    if usual_name is not None:
        return f"write the role {usual_name}, or set chat_template.roles={{{role}: {usual_name}}}"
    if role == "assistant" and message.get("tool_calls"):
        return "remove the text beside its calls, or set chat_template to one that renders it"
    if role == "tool":
        return (
            "put the assistant's message with its call before it: tool_calls with the id of its "
            "tool_call_id"
        )
    if role == "system" and index > 0:
        return "put its text into the first message, or into the user's message behind it"
    if role == "system":
        return "put its text into the first message of the user, or set chat_template"
    if role in ROLES:
        return "write it in another place, or set chat_template"
    return f"write one of the roles {', '.join(rendered_roles)}"  # the role is not known
