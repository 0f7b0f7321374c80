"""The harmony format of gpt-oss: messages with a header, on channels.

::

    <|channel|>analysis<|message|>2 + 2<|end|><|start|>assistant<|channel|>commentary
    to=functions.add <|constrain|>json<|message|>{"a": 2, "b": 2}<|call|>

The analysis channel is the reasoning. A message with a recipient, anywhere in its header, is a
call. Every other message is content.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from agenttrain.chat.parsers.base import CALL_ID, MAX_CALLS, ParsedCall, ParsedCompletion
from agenttrain.chat.parsers.values import excerpt, read_json, read_loose

ANALYSIS = "<|channel|>analysis<|message|>"
CONTROLS = ("start", "channel", "constrain", "message", "end", "call", "return")
_MARK = re.compile(r"<\|(start|message|end|call|return)\|>")
_RECIPIENT = re.compile(r"\bto=([^\s<]*)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """A message of a completion: a header, and a body after <|message|>."""

    header: str
    """E.g. ``<|channel|>commentary to=functions.add``."""
    body: str | None
    """None if there is no <|message|>: the completion ends inside the header, or has no marks."""
    closed: bool
    """The message ends with <|end|>, <|call|> or <|return|>, not at <|start|> or the text's end."""
    text: str
    """The whole message with its marks."""


@dataclass(frozen=True, kw_only=True)
class HarmonySpec:
    """The ResponseSpec of harmony; its settings are the ids of calls and `lenient`."""

    call_id: str = CALL_ID
    """Format string for the ids of calls, as in ResponseSpec."""
    lenient: bool = False
    """Arguments that are almost JSON are accepted."""

    def marks(self, controls: Iterable[str]) -> tuple[str, ...]:
        """Return the control tokens that `parse` must see: those of harmony's headers and ends.

        All others are removed from a completion's text first.
        """
        marks = [f"<|{name}|>" for name in CONTROLS]
        return tuple(control for control in controls if control in marks)

    def opens_reasoning(self, prompt: str) -> bool:
        """Return True if a completion of this prompt begins inside the reasoning."""
        return prompt.endswith(ANALYSIS)

    def parse(
        self, text: str, *, in_reasoning: bool, schemas: Sequence[Mapping]
    ) -> ParsedCompletion:
        """Split a completion into content, reasoning and calls; see `ResponseSpec.parse`."""
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[ParsedCall] = []
        for message in _split_messages(ANALYSIS + text if in_reasoning else text):
            # One call above the limit is kept: `parse_response` sees by it that there are too many.
            if len(calls) > MAX_CALLS:
                break
            channel = _CHANNEL.search(message.header)
            if (recipient := _RECIPIENT.search(message.header)) is not None:
                calls.append(_make_call(message, recipient[1], lenient=self.lenient))
            elif message.body is None:
                # The message has no <|message|>: it is text without any mark, which is content, or
                # a header that was cut off, which is dropped.
                is_header = channel is not None or "<|" in message.header
                if not is_header:
                    content.append(message.header.strip())
            elif channel is not None and channel[1] == "analysis":
                reasoning.append(message.body.strip())
            else:
                content.append(message.body.strip())
        return ParsedCompletion(
            content="\n".join(filter(None, content)),
            reasoning="\n".join(filter(None, reasoning)) if reasoning else None,
            calls=calls,
        )


def _split_messages(text: str) -> Iterator[_Message]:
    """Split a completion at the marks that begin and end messages, and at its end.

    Example: ``<|channel|>final<|message|>4<|end|>`` is one message with the body ``4``.
    """
    start = 0  # of the current message
    body_mark: re.Match[str] | None = None  # its <|message|>, between header and body
    for mark in chain(_MARK.finditer(text), (None,)):  # None: the end of the text
        kind = mark[1] if mark else "end of text"  # or: start, message, end, call, return
        if kind == "message":
            if body_mark is None:  # else it stands inside the body, as text
                body_mark = mark
            continue
        stop = mark.start() if mark else len(text)  # the message's text stops here
        closed = kind in ("end", "call", "return")
        # A mark that ends a message belongs to it; <|start|> belongs to the next message.
        end = mark.end() if mark and closed else stop
        header = text[start : body_mark.start() if body_mark else stop]
        if body_mark is not None or header.strip():
            yield _Message(
                header=header,
                body=text[body_mark.end() : stop] if body_mark else None,
                closed=closed and body_mark is not None,
                text=text[start:end],
            )
        start, body_mark = end, None


def _make_call(message: _Message, recipient: str, *, lenient: bool) -> ParsedCall:
    """Make a call of a message to the `recipient`, e.g. ``functions.add``."""
    name = recipient.removeprefix("functions.")
    problem = None if message.closed else "the call is not closed: <|call|> is missing"
    arguments: Any = {}
    body = message.body or ""
    is_loose = False
    if problem is None and body.strip():
        arguments, end, problem, _ = read_json(body)
        if problem is None and body[end:].strip():
            problem = f"text after the arguments: {excerpt(body[end:])}"
        if problem is not None and lenient:  # again, as text that is almost JSON
            arguments, _, problem, _ = read_loose(body)
            is_loose = problem is None
    return ParsedCall(
        text=message.text,
        name=name,
        arguments=arguments,
        problem=problem,
        name_label="the text after to=functions.",
        arguments_label="the value of the arguments",
        lenient=is_loose,
    )
