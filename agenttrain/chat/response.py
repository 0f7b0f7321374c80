"""Completion text -> AssistantTurn: content, reasoning, and calls good and malformed in order.

What is accepted is what the parsers of inference servers accept for the same family, so that what
is trained works where it is deployed; what they would drop or guess at is a malformed call, whose
reason the model reads. A malformed call never takes its siblings with it.

==========================================  ======================================================
in a call's text                            result
==========================================  ======================================================
arguments as a JSON string                  decoded: ``"{\\"a\\": 3}"`` is ``{"a": 3}``
arguments missing, null or an empty string  ``{}``
name missing, empty or no string            malformed
arguments that are no mapping               malformed
a key or parameter given twice              malformed: nothing says which was meant
keys without quotes                         read in Gemma's format; malformed in JSON
Python literals, single quotes              read in LFM2's format; malformed in JSON
trailing commas                             read in LFM2's format; malformed in JSON
… and with ``lenient: true`` in the spec    the last three are read in JSON too
XML parameters, GLM's values                text, or by the tool's schema what the text is JSON of
NaN, Infinity, 1e999                        malformed
lone surrogates, over 64 levels             malformed: no JSON file could hold them
text between a call and its closing mark    malformed
closing mark missing, call cut anywhere     malformed, to the next opening mark or the end
a name that can be read, in a malformed call the malformed call's name
a mark inside a string or parameter         part of it, up to 16 marks
text after a call that has no closing mark  content (Llama, Mistral)
text that no call can be seen in            content
calls beyond the 1,024th                    one malformed call
==========================================  ======================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from agenttrain.chat.response_json import excerpt, kind, portable, read_json
from agenttrain.chat.response_parts import Found, ResponseSpec, capped
from agenttrain.chat.response_regex import search_budget
from agenttrain.types import AssistantTurn, ToolCall

NO_NAME = "must be the name of a tool"


def parse_response(
    text: str,
    spec: ResponseSpec,
    *,
    turn: int,
    in_reasoning: bool = False,
    schemas: Sequence[Mapping] = (),
) -> AssistantTurn:
    """Parse one completion; takes any text, in linear time, and never raises.

    `in_reasoning`: the generation prompt has already opened the reasoning. `schemas`: of the tools,
    for formats whose arguments carry no types. A call that cannot be used is in the list too, with
    `malformed` saying why. Example (turn 3)::

        'Sum: <tool_call>{"name": "add", "arguments": "{\\\\"a\\\\": 3}"}</tool_call>'
        -> content "Sum:", calls (ToolCall(id="call_3_0", name="add", arguments={"a": 3}),)
    """
    with search_budget():
        parts = spec.parse(text, in_reasoning=in_reasoning, schemas=schemas)
    found_calls = capped(parts.calls)
    ids = [found.id for found in found_calls if found.id]
    written = Counter(ids) if ids else {}
    calls = tuple(
        _call(
            found,
            # An id that the model wrote twice would give one reply to two calls.
            found.id
            if found.id and written[found.id] == 1
            else spec.call_id.format(turn=turn, index=index),
        )
        for index, found in enumerate(found_calls)
    )
    return AssistantTurn(content=parts.content, reasoning=parts.reasoning, calls=calls)


def _call(found: Found, call_id: str) -> ToolCall:
    arguments, problem = _arguments(found.arguments, found.arguments_label)
    if found.problem is not None:
        problem = found.problem
    elif not isinstance(found.name, str) or not found.name:
        problem = f"{found.name_label} {NO_NAME}"
    name = found.name if isinstance(found.name, str) else ""
    if not portable([name, arguments], found.text):
        name = name if portable(name, found.text) else ""
        problem = problem or "the call holds values that JSON text cannot carry"
    return ToolCall(
        id=call_id,
        name=name,
        arguments=arguments if problem is None else {},
        malformed=problem,
        text=found.text,
    )


def _arguments(value: Any, label: str) -> tuple[dict[str, Any], str | None]:
    """(arguments, problem); a JSON object in a string is decoded."""
    if isinstance(value, str) and value.strip():
        text = value
        value, end, problem, _ = read_json(text)
        if problem is not None or text[end:].strip():
            return {}, f"{label} is a string without a JSON object: {excerpt(text)}"
    if value is None or value == "":
        return {}, None
    if not isinstance(value, dict):
        return {}, f"{label} must be a JSON object, not {kind(value)}"
    return value, None
