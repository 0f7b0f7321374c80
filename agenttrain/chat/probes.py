"""The conversations that a certificate tries a template with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from agenttrain.chat.template import Chat
from agenttrain.types import AssistantTurn, Message, ToolCall

Step = tuple[AssistantTurn, list[Message]]
"""A turn and the replies to it."""

EXAMPLES = {"integer": 3, "number": 2.5, "boolean": True, "array": [], "object": {}, "null": None}
TEXT = "a b"
"""Argument values by JSON schema type, and of any other type."""
LONG = "17 lamps, 4 chairs\n" * 400
REPLIES = {
    "empty reply": "",
    "error reply": "Error: no such column: 'prize'\n  line 1\n",
    "unicode reply": " naïve 東京 🙂 \u2028 ",
    "long reply": LONG,
}


def conversations(chat: Chat, schemas: Sequence[dict]) -> Iterator[tuple[str, list[Step]]]:
    """Named probe conversations; those with calls use every tool of the user's."""
    controls = "".join(chat.encoder.control)
    answer = AssistantTurn(content="It is 7.", reasoning=None, calls=())
    yield "no call", [(answer, _user("And 4 + 5?"))]
    yield (
        "reasoning without a call",
        [
            (replace(answer, reasoning="3 and 4"), _user("And 4 + 5?")),
            (replace(answer, reasoning="4 and 5"), _user("Thanks.")),
        ],
    )
    yield "control tokens in a user reply", [(answer, _user(controls))]
    if not schemas:
        return
    tools = [schema.get("function", schema) for schema in schemas]
    for tool in tools:
        yield f"call of {tool['name']}", [_step(0, [tool], ["7"])]
    yield "parallel calls", [_step(0, [tools[0], tools[-1]], ["7", "\nseven\n"])]
    turns = [_step(turn, [tools[turn % len(tools)]], [str(turn)]) for turn in range(3)]
    yield "three turns", turns
    yield "content beside a call", [_step(0, tools[:1], ["7"], "Let me see."), turns[1]]
    thought = _step(0, tools[:1], ["7"], reasoning="3 and 4")
    yield "reasoning", [thought, _step(1, tools[:1], ["8"], reasoning="one more")]
    for name, text in {**REPLIES, "control tokens in a tool reply": controls}.items():
        yield name, [_step(0, tools[:1], [text]), turns[1]]
    last = (replace(answer, reasoning="7 it is"), _user("And 4 + 5?"))
    yield "later user message", [thought, last, _step(2, tools[:1], ["9"], reasoning="4 and 5")]


def _user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def _step(
    turn: int, tools: list[dict], texts: list[str], content: str = "", reasoning: str | None = None
) -> Step:
    calls = []
    for index, tool in enumerate(tools):
        properties = (tool.get("parameters") or {}).get("properties", {})
        examples = {name: _example(schema) for name, schema in properties.items()}
        # In a message, what is None is as good as missing.
        arguments = {name: value for name, value in examples.items() if value is not None}
        calls.append(ToolCall(id=f"call_{turn}_{index}", name=tool["name"], arguments=arguments))
    replies: list[Message] = [
        {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
        for call, text in zip(calls, texts, strict=True)
    ]
    return AssistantTurn(content=content, reasoning=reasoning, calls=tuple(calls)), replies


def _example(schema: Any) -> Any:
    if not isinstance(schema, dict):  # `true`: anything
        return TEXT
    if schema.get("enum"):
        return next((value for value in schema["enum"] if value is not None), None)
    kinds = schema.get("type", "string")
    kinds = [kinds] if isinstance(kinds, str) else [kind for kind in kinds if kind != "null"]
    return EXAMPLES.get(kinds[0], TEXT) if kinds else None
