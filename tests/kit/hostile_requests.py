"""Strategies of requests that no honest client sends: bodies, changed in places, and headers."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st


def nested(depth: int) -> dict[str, Any]:
    """A schema of an object that holds an object, `depth` times."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


HUGE = 10**399
"""A number of 400 digits."""
VALUES = (
    *(None, True, False, 0, -1, 1, 5, HUGE, -HUGE, 2**63, 1e-300, 1e308, 0.5, 3.0),
    *("", "5", "x", "\ud800", "\x00", "é" * 50, "<|im_end|>", "user", "system", "tool", "auto"),
    *([], [5], [[]], [None], ["x"], [{}], {}, {"type": 5}, {"type": "text"}, {"text": 5}),
    *({"$ref": "#/$defs/x"}, {"$ref": 5}, {"type": [5]}, {"multipleOf": 0}, {"pattern": "("}),
    *({"minimum": HUGE, "type": "integer"}, {"enum": 5}, {"properties": 5}, {"required": [5]}),
    *({"type": "object", "properties": {"a": {"anyOf": 5}}}, {"$defs": 5, "type": "object"}),
    *({"type": "tool_use", "id": 5}, {"type": "tool_result", "tool_use_id": []}, {"name": {}}),
    *(nested(20), nested(100), nested(230), nested(400), [[[[[[[[]]]]]]]], {"items": nested(150)}),
    *({"type": "item_reference", "id": "msg_1"}, {"id": "x"}, {"type": "reasoning"}),
    *({"type": "object", "properties": {"a": nested(depth)}} for depth in (40, 90, 140, 190)),
)
"""JSON values in the places of others."""
KEYS = (
    *("model", "messages", "tools", "tool_choice", "temperature", "top_p", "top_k", "min_p"),
    *("max_tokens", "max_completion_tokens", "seed", "stop", "stop_sequences", "stream", "n"),
    *("stream_options", "response_format", "logit_bias", "system", "thinking", "output_config"),
    *("context_management", "reward", "api", "content", "role", "tool_calls", "tool_call_id"),
    *("input", "instructions", "text", "max_output_tokens", "previous_response_id", "call_id"),
    *("type", "id", "namespace", "encrypted_content", "summary", "output", "arguments", "name"),
    *("return_token_ids", "parallel_tool_calls", "\ud800", "", "reasoning_content", "unheard_of"),
)
"""Keys of requests and their messages, and some that are none."""
TEXTS = (
    *(b"", b"null", b"5", b"[]", b"\xff{", b'"\\ud800"', b'{"messages": NaN}', b"{" * 3000),
    *(b'{"messages":' + b"[" * 5000, b'{"temperature": 1e999}', b'{"seed": ' + b"9" * 4400 + b"}"),
    *(b'{"reward": -1e999}', b'{"messages": 5}', b'{"reward": ' + b"9" * 400 + b"}"),
)
"""Bodies that are no requests."""


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to all values inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, item in items:
        found.append((*path, key))
        if isinstance(item, dict | list):
            found += places(item, (*path, key))
    return found


@st.composite
def bodies(draw: st.DrawFn, honest: list[dict[str, Any]]) -> bytes:
    """One of some honest bodies with up to three values changed, added or removed."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.sampled_from(TEXTS))
    body = copy.deepcopy(draw(st.sampled_from(honest)))
    for _ in range(draw(st.integers(1, 3))):
        paths = places(body)
        if not paths:
            break
        path = draw(st.sampled_from(paths))
        parent = body
        for key in path[:-1]:
            parent = parent[key]
        kind = draw(st.sampled_from(("change", "change", "add", "remove")))
        if kind == "remove":
            del parent[path[-1]]
        elif kind == "add" and isinstance(parent, dict):
            parent[draw(st.sampled_from(KEYS))] = copy.deepcopy(draw(st.sampled_from(VALUES)))
        else:
            parent[path[-1]] = copy.deepcopy(draw(st.sampled_from(VALUES)))
    return json.dumps(body).encode()


def responses(function: dict[str, Any]) -> list[dict[str, Any]]:
    """Honest requests of the API of responses, with a tool."""
    user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    tools = [
        {"type": "function", "strict": False, **function},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", **function}]},
        {"type": "web_search", "external_web_access": False},
    ]
    thought = [{"type": "reasoning_text", "text": "I look"}]
    turn = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": thought},
        {"type": "message", "id": "msg_1", "role": "assistant", "content": "So"},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 3}'},
        {"type": "function_call_output", "call_id": "c", "output": "7"},
    ]
    return [
        {"model": "policy", "input": "3 + 4?"},
        {
            "input": [{"role": "developer", "content": "Be brief."}, user, *turn],
            "tools": tools,
            "tool_choice": "auto",
            "stream": True,
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "reasoning": {"summary": "auto"},
            "text": {"format": {"type": "text"}, "verbosity": "low"},
        },
        {"instructions": "x", "input": [user, *turn[1:], user], "max_output_tokens": 20},
    ]


ODD = (b"", b"9" * 4400, b"-1", b"1.5", b"\xe9\xff", b"x" * 300, b"0", b"1", b"\xc2\xb2", b"a, b")
NAMES = (
    *("x-stainless-retry-count", "idempotency-key", "accept", "content-type", "content-encoding"),
    *("origin", "x-forwarded-for", "anthropic-version", "cookie", "range", "expect-ct"),
)
headers = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(ODD), max_size=3)
