"""Chats, schemas and literal ids that the chat tests share."""

from __future__ import annotations

from functools import cache

from tiny import TEMPLATE, tokenizer

from agenttrain.chat.chat import Chat
from agenttrain.chat.loading import load_spec
from agenttrain.types import AssistantTurn, Message, ToolCall

EOS = 2
TEMPLATES = {
    "eos": TEMPLATE,
    # The end of a turn is a token that is not EOS (id 0 instead of 2).
    "other": TEMPLATE.replace("<|im_end|>", "<|endoftext|>"),
    # Turns have no end: the next turn's header (id 1) follows at once, as in GLM's templates.
    "none": TEMPLATE.replace("<|im_end|>\\n", ""),
    # Blanks before the end of a turn, no separator after it.
    "blank": TEMPLATE.replace("<|im_end|>\\n", "\\n<|im_end|>"),
    # Replies are changed by the template.
    "trim": TEMPLATE.replace("n' + m.content + '\\n</tool", "n' + m.content | trim + '\\n</tool"),
    "tojson": TEMPLATE.replace(
        "n' + m.content + '\\n</tool", "n' + (m.content | tojson) + '\\n</tool"
    ),
    # No text and no control token between replies or around them.
    "bare": TEMPLATE.replace("\\n<tool_response>\\n", " ").replace("\\n</tool_response>", ""),
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}
#     <tc> \n  {"  name  ":   "    add  ",   "   args ":   {"  a  ":   ␣   3
CALL_IDS = [
    *(3, 205, 275, 298, 263, 267, 278, 282, 267, 319, 263, 308, 71, 263, 227, 25),
    #  ,   "   b   ":   ␣   4  }}\n </tc> <|im_end|>
    *(18, 267, 72, 263, 227, 26, 316, 4, EOS),
]
CALL_TEXT = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
CALL = AssistantTurn(
    content="",
    reasoning=None,
    calls=(ToolCall(id="call_0_0", name="add", arguments={"a": 3, "b": 4}, text=CALL_TEXT),),
)


@cache
def chat(name: str = "eos") -> Chat:
    """A Chat over the tiny tokenizer and one of TEMPLATES."""
    return Chat(tokenizer(), TEMPLATES[name], load_spec("hermes"), eos_token_ids=[EOS])


def replies(*texts: str) -> list[Message]:
    """Tool replies to the calls ``call_0_0``, ``call_0_1``, …"""
    return [
        {"role": "tool", "tool_call_id": f"call_0_{i}", "name": "add", "content": text}
        for i, text in enumerate(texts)
    ]
