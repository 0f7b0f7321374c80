"""Completion text -> AssistantTurn: content, reasoning, and calls good and malformed in order."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from agenttrain.chat.families import ResponseSpec
from agenttrain.types import AssistantTurn, ToolCall

DELIMITERS_IN_STRINGS = (1, 2, 4, 8, 16)
"""How many delimiters further a call may reach, tried in turn; beyond the last it is malformed."""
MAX_DEPTH = 64
"""Nesting of a call's JSON."""
UNTERMINATED = "Unterminated string"
_BLANK = re.compile(r"[ \t\r\n]*")


def parse_response(
    text: str, spec: ResponseSpec, *, turn: int, in_reasoning: bool = False
) -> AssistantTurn:
    """Parse one completion; takes any text, in linear time, and never raises.

    `in_reasoning`: the generation prompt has already opened the reasoning. A call that cannot be
    used is in the list too, with `malformed` saying why. Example (turn 3)::

        'Sum: <tool_call>{"name": "add", "arguments": "{\\\\"a\\\\": 3}"}</tool_call>'
        -> content "Sum:", calls (ToolCall(id="call_3_0", name="add", arguments={"a": 3}),)
    """
    reasoning, text = _split_reasoning(text, spec, in_reasoning)
    content, bodies = _split_calls(text, spec)
    calls = tuple(
        _call(body, spec, call_id=f"call_{turn}_{index}") for index, body in enumerate(bodies)
    )
    return AssistantTurn(content=content.strip(), reasoning=reasoning, calls=calls)


def _split_reasoning(text: str, spec: ResponseSpec, inside: bool) -> tuple[str | None, str]:
    """(reasoning, the rest); reasoning that is not closed reaches to the end."""
    before, opened, after = text.partition(spec.reasoning_open)
    if inside or not opened or spec.call_open in before:
        before, opened, after = "", "", text
    thought, closed, rest = after.partition(spec.reasoning_close)
    if not closed and not opened and not inside:
        return None, text
    if not opened and not inside and spec.call_open in thought:
        # A stray closing mark after a call must not turn that call into reasoning.
        return None, text
    return thought.strip(), before + rest


@dataclass(frozen=True, slots=True, kw_only=True)
class _Body:
    """A call as found in the text: what it decodes to, or why it does not."""

    text: str
    value: Any = None
    problem: str | None = None


def _split_calls(text: str, spec: ResponseSpec) -> tuple[str, list[_Body]]:
    """(content outside calls, call bodies)."""
    marks = [*_delimiters(spec.call_open, spec.call_close).finditer(text)]
    content: list[str] = []
    bodies: list[_Body] = []
    position = index = 0
    while index < len(marks):
        mark = marks[index]
        index += 1
        if mark["open"] is None:
            continue
        content.append(text[position : mark.start()])
        value, end, problem = _decode(text, mark.end(), marks, index)
        while index < len(marks) and marks[index].start() < end:
            index += 1
        position = marks[index].start() if index < len(marks) else len(text)
        if index == len(marks) or marks[index]["open"] is not None:
            problem = f"the call is not closed: {spec.call_close} is missing"
        else:
            if problem is None and text[end:position].strip():
                problem = f"text after the JSON object: {_excerpt(text[end:position])}"
            position = marks[index].end()
            index += 1
        bodies.append(_Body(text=text[mark.start() : position], value=value, problem=problem))
    content.append(text[position:])
    return "".join(content), bodies


@cache
def _delimiters(opening: str, closing: str) -> re.Pattern[str]:
    return re.compile(f"(?P<open>{re.escape(opening)})|{re.escape(closing)}")


def _decode(
    text: str, start: int, marks: list[re.Match[str]], index: int
) -> tuple[Any, int, str | None]:
    """(value, its end, problem) of the JSON at `start`; `index`: the first delimiter after it.

    A call ends where its JSON ends: a delimiter inside a string argument is part of the string, so
    a string that runs into one is tried with more text. That is bounded, so parsing stays linear.
    """
    first_problem = None
    for count in DELIMITERS_IN_STRINGS:
        last = index + count - 1
        body = text[start : marks[last].start() if last < len(marks) else len(text)]
        value, end, problem = _json(body)
        if problem is None:
            return value, start + end, None
        first_problem = first_problem or problem
        if last >= len(marks) or not problem.endswith(UNTERMINATED):
            break
    return None, start, first_problem


def _json(text: str) -> tuple[Any, int, str | None]:
    """(value, its end, problem) of the JSON value that `text` begins with."""
    try:
        blank = _BLANK.match(text)
        value, end = _DECODER.raw_decode(text, blank.end() if blank else 0)
    except json.JSONDecodeError as error:
        # Python's message names the string's start, which the position already does.
        what = error.msg.replace(" starting at", "")
        return None, 0, f"invalid JSON at line {error.lineno} column {error.colno}: {what}"
    except RecursionError:
        return None, 0, "invalid JSON: nested too deeply"
    except ValueError as error:
        return None, 0, f"invalid JSON: {error}"
    return value, end, None


def _reject(literal: str) -> float:
    raise ValueError(f"{literal} is not a JSON number")


def _finite(literal: str) -> float:
    number = float(literal)
    return number if math.isfinite(number) else _reject(literal)


_DECODER = json.JSONDecoder(parse_constant=_reject, parse_float=_finite)


def _call(body: _Body, spec: ResponseSpec, *, call_id: str) -> ToolCall:
    value = body.value if isinstance(body.value, dict) else {}
    name = value.get(spec.name_key)
    arguments, problem = _arguments(value.get(spec.arguments_key, {}), spec)
    if body.problem is not None:
        problem = body.problem
    elif not isinstance(body.value, dict):
        problem = f"the call must be a JSON object, not {_kind(body.value)}"
    elif not isinstance(name, str) or not name:
        problem = f'"{spec.name_key}" must be the name of a tool'
    name = name if isinstance(name, str) else ""
    if not _portable([name, arguments], body.text):
        name, problem = "", problem or "the call holds values that JSON text cannot carry"
    return ToolCall(
        id=call_id,
        name=name,
        arguments=arguments if problem is None else {},
        malformed=problem,
        text=body.text,
    )


def _arguments(value: Any, spec: ResponseSpec) -> tuple[dict[str, Any], str | None]:
    """(arguments, problem); a JSON object in a string is decoded."""
    key = f'"{spec.arguments_key}"'
    if isinstance(value, str):
        text = value
        value, end, problem = _json(text)
        if problem is not None or text[end:].strip():
            return {}, f"{key} is a string without a JSON object: {_excerpt(text)}"
    if not isinstance(value, dict):
        return {}, f"{key} must be a JSON object, not {_kind(value)}"
    return value, None


def _portable(value: Any, text: str) -> bool:
    """Whether other code can write the value: no lone surrogates, no extreme nesting.

    Both come from text that is valid JSON (``"\\ud800"``, a thousand brackets) and would raise far
    from here, in a template or a rollouts file.
    """
    if text.count("[") + text.count("{") > MAX_DEPTH and not _shallow(value, MAX_DEPTH):
        return False
    if "\\" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return False
    return True


def _shallow(value: Any, depth: int) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth > 0 and all(_shallow(item, depth - 1) for item in items)


def _kind(value: Any) -> str:
    kinds = {bool: "a boolean", dict: "an object", list: "an array", str: "a string"}
    return "null" if value is None else kinds.get(type(value), "a number")


def _excerpt(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= 60 else text[:59] + "…")
