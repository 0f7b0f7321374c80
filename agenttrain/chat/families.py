"""Model families as data: how their templates are fixed and how they write calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseSpec:
    """How a family writes reasoning and calls inside a completion.

    Example: ``<think>2 + 2</think>Let me see.<tool_call>{"name": "add", "arguments": {}}
    </tool_call>``
    """

    reasoning_open: str
    reasoning_close: str
    call_open: str
    call_close: str
    name_key: str
    """Key of the call's JSON object that holds the tool's name."""
    arguments_key: str
    """Key of the call's JSON object that holds the arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One entry of the table below."""

    edits: tuple[tuple[str, str], ...]
    """(find, replace) on the model's own template, each of which must apply; none: it is right."""
    response: ResponseSpec


HERMES = ResponseSpec(
    reasoning_open="<think>",
    reasoning_close="</think>",
    call_open="<tool_call>",
    call_close="</tool_call>",
    name_key="name",
    arguments_key="arguments",
)

FAMILIES: dict[str, Family] = {
    "hermes": Family(edits=(), response=HERMES),
    "qwen": Family(edits=(), response=HERMES),
}
"""By the names that ``chat_template=`` and ``response_schema=`` take; `auto` takes the first whose
parser reads back a call that the model's own template has rendered."""
