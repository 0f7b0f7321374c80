"""One form of chat messages, whatever dataset or API they came from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agenttrain.utils.json_lines import read_json

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys under which messages hold an assistant's reasoning; ours is the first."""
ARGUMENT_KEYS = ("arguments", "parameters", "args")
"""Keys under which calls hold their arguments; ours is the first."""


def normal_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in the form that `AssistantTurn.message` has.

    Calls stand in `tool_calls` as ``{"type": "function", "function": {"name": …, "arguments":
    {…}}}``, whose arguments are an object and not its JSON text. A message without calls has no
    such key. Reasoning stands under the first of `REASONING_KEYS`. Example::

        {"role": "assistant", "content": "7", "tool_calls": []}
        -> {"role": "assistant", "content": "7"}

    Raises ValueError for calls that cannot be read.
    """
    normal = dict(message)
    if (calls := normal.pop("tool_calls", None)) is not None:
        if isinstance(calls, str):
            calls = _decode(calls, "tool_calls")
        if not isinstance(calls, list | tuple):
            raise ValueError(f"tool_calls: expected a list of calls, not {calls!r:.100}")
        if calls:
            normal["tool_calls"] = [normal_call(call) for call in calls]
    our_key, *other_keys = REASONING_KEYS
    for key in other_keys:
        if isinstance(normal.get(key), str) and not normal.get(our_key):
            normal[our_key] = normal.pop(key)
    return normal


def normal_call(call: Any) -> dict[str, Any]:
    """Return a call of an assistant's message in OpenAI's form, its arguments as a mapping.

    Example: ``{"name": "add", "args": '{"a": 1}'}`` -> ``{"type": "function", "function": {"name":
    "add", "arguments": {"a": 1}}}``. A call may be JSON text, lack OpenAI's wrapper, and have its
    arguments under any of ARGUMENT_KEYS. Raises ValueError if it cannot be read.
    """
    if isinstance(call, str):
        call = _decode(call, "tool_calls")
    function = call.get("function") if isinstance(call, Mapping) else None
    if isinstance(call, Mapping) and function is None:  # a call without OpenAI's wrapper
        function = {key: call[key] for key in ("name", *ARGUMENT_KEYS) if key in call}
        call = {key: value for key, value in call.items() if key not in function}
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"tool_calls: {call!r:.100} is no call with a name")
    function = dict(function)
    # Datasets that are tables have every key in every row, those without a value as null.
    candidates = [function.pop(key) for key in ARGUMENT_KEYS if key in function]
    present = [candidate for candidate in candidates if candidate is not None]
    if len(present) > 1:
        raise ValueError(f"tool_calls: the arguments of {function['name']} are given twice")
    arguments = present[0] if present else None  # None: a call without arguments
    function["arguments"] = call_arguments(arguments, function["name"])
    return {"type": "function", **call, "function": function}


def call_arguments(arguments: Any, name: str) -> dict[str, Any]:
    """Return the arguments of a call as an object.

    They may be its JSON text, encoded once or twice, or missing. Raises ValueError for others.
    """
    for _ in range(2):
        if isinstance(arguments, str) and arguments.strip():
            arguments = _decode(arguments, f"the arguments of {name}")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if not isinstance(arguments, Mapping):
        raise ValueError(f"the arguments of {name} are no JSON object: {arguments!r:.100}")
    return dict(arguments)


def _decode(text: str, what: str) -> Any:
    try:
        return read_json(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} are no JSON: {text!r:.100}: {error}") from error
