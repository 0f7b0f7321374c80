"""Completions of every call format, and how each format is written, for the response tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from agenttrain.chat.loading import load_spec, make_spec
from agenttrain.chat.parsers.base import ResponseSpec

Call = tuple[str, dict[str, Any]]

FORECAST = {
    "type": "function",
    "function": {
        "name": "forecast",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "scale": {"type": "number"},
                "hourly": {"type": "boolean"},
                "place": {"type": "object"},
                "tags": {"type": "array"},
                "until": {"type": "string", "nullable": True},
                "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
            },
        },
    },
}

# The dialect of transformers >= 5.13.
TEMPLATES: dict[str, dict[str, Any]] = {
    "tags": {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "reasoning_content": {"open": "<think>", "close": "</think>"},
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|eot_id\|>)"},
        },
    },
    "parameters": {
        "start_anchor_pattern": r"<\|im_start\|>assistant\n(?:<think>\n)?",
        "fields": {
            "reasoning_content": {
                "open_pattern": r"(?=[\s\S]*?</think>)",
                "close_pattern": r"</think>\s*",
            },
            "tool_calls": {
                "open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
                "close_pattern": r"</tool_call>\s*",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>",
                },
                "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"close_pattern": r"<\|im_end\|>\s*"},
        },
    },
    "delimited": {
        "start_anchor": ["<|turn>model\n", "<tool_response|>"],
        "fields": {
            "thinking": {"open": "<|channel>thought\n", "close": "<channel|>"},
            "tool_calls": {
                "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
                "close": "<tool_call|>",
                "repeats": True,
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
                "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"close": ["<turn|>", "<|tool_response>"]},
        },
    },
    "list": {
        "start_anchor": "<BOT>",
        "fields": {
            "content": {"open": "<SAY>", "close": "</SAY>", "repeats": True, "join": " "},
            "tool_calls": {
                "open": "<ACT>",
                "close": "</ACT>",
                "content": "json",
                "transform_each": True,
                "transform": {"function": {"name": "{tool}", "arguments": "{input}"}},
            },
        },
    },
    "lines": {
        "start_anchor": "<BOT>",
        "fields": {
            "tool_calls": {
                "open_pattern": r"<CALL (?P<name>\w+)>",
                "close": "</CALL>",
                "repeats": True,
                "content": "kv-lines",
                "transform": {"name": "{name}", "arguments": "{content}"},
            },
            "content": {},
        },
    },
}

_JSON_ITEM = {
    "x-parser": "json",
    "x-parser-args": {"transform": "{type: 'function', function: @}"},
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "arguments": {"type": "object"}},
        },
    },
}
# The dialect of transformers 5.0 to 5.12.
SCHEMAS: dict[str, dict[str, Any]] = {
    "tags": {
        "x-regex": (
            r"^(?:<think>\n?(?:(?P<reasoning_content>.*?\S.*?)\n?|\s*)</think>\s*)?"
            r"(?P<content>(?:(?!<tool_call>).)*?)(?=(?:<tool_call>|<\|im_end\|>|$))"
            r"(?P<tool_calls>(?:<tool_call>(?:(?!</tool_call>).)+</tool_call>\s*)+)?"
            r"\s*(?:<\|im_end\|>|$)"
        ),
        "type": "object",
        "properties": {
            "role": {"const": "assistant"},
            "content": {"type": "string"},
            "reasoning_content": {"type": "string"},
            "tool_calls": {
                "type": "array",
                "x-regex-iterator": r"<tool_call>\s*(.+?)\s*</tool_call>",
                "items": _JSON_ITEM,
            },
        },
    },
    "parameters": {
        "type": "object",
        "properties": {
            "content": {"type": "string", "x-regex": r"^(.*?)(?:<tool_call>|<\|im_end\|>|$)"},
            "tool_calls": {
                "type": "array",
                "x-regex-iterator": r"<tool_call>\s*(.+?)\s*</tool_call>",
                "items": {
                    "type": "object",
                    "properties": {
                        "function": {
                            "type": "object",
                            "properties": {
                                "name": {"type": "string", "x-regex": r"<function=([^\n>]+)>"},
                                "arguments": {
                                    "type": "object",
                                    "x-regex-key-value": (
                                        r"<parameter=(?P<key>[^>\n]+)>\n(?P<value>.*?)\n</parameter>"
                                    ),
                                    "default": {},
                                    "additionalProperties": {
                                        "x-parser": "json",
                                        "x-parser-args": {"allow_non_json": True},
                                    },
                                },
                            },
                        },
                    },
                },
            },
        },
    },
    "list": {
        "type": "object",
        "properties": {
            "content": {"type": "string", "x-regex": r"<\|SAY\|>(.*?)(?:<\|END_SAY\|>|$)"},
            "thinking": {"type": "string", "x-regex": r"<\|THINK\|>(.*?)(?:<\|END_THINK\|>|$)"},
            "tool_calls": {
                "x-regex": r"<\|ACT\|>(.*?)(?:<\|END_ACT\|>|$)",
                "x-parser": "json",
                "x-parser-args": {
                    "transform": "[*].{function: {name: tool_name, arguments: parameters}}"
                },
                "type": "array",
                "items": {"type": "object", "properties": {"function": {"type": "object"}}},
            },
        },
    },
    "substitutions": {
        "x-regex-substitutions": [[r"<\|channel\|>final<\|message\|>", ""]],
        "x-regex": r"^(?P<content>(?:(?!to=).)*)(?P<tool_calls>to=functions\..*<\|call\|>)?$",
        "type": "object",
        "properties": {
            "content": {"type": "string"},
            "tool_calls": {
                "type": "array",
                "x-regex-iterator": r"(to=functions\.\S+<\|message\|>.*?<\|call\|>)",
                "items": {
                    "x-regex-substitutions": [
                        [
                            r"to=functions\.(\S+)<\|message\|>(.*?)<\|call\|>",
                            r'{"name": "\1", "arguments": \2}',
                        ]
                    ],
                    "x-parser": "json",
                    "type": "object",
                },
            },
        },
    },
}


def all_specs() -> dict[str, ResponseSpec]:
    """Every parser under a name of its own."""
    names = (
        *("hermes", "qwen_xml", "llama3", "gpt_oss", "glm4_moe", "gemma4", "lfm2", "deepseek"),
        *("mistral", "pythonic"),
    )
    specs = {name: load_spec(name) for name in names}
    specs |= {f"template/{k}": make_spec(v, source=k) for k, v in TEMPLATES.items()}
    return specs | {f"schema/{k}": make_spec(v, source=k) for k, v in SCHEMAS.items()}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def hermes(name: str, arguments: dict) -> str:
    call = {"name": name, "arguments": arguments}
    return f"<tool_call>\n{_json(call)}\n</tool_call>"


def qwen_xml(name: str, arguments: dict) -> str:
    values = {k: v if isinstance(v, str) else _json(v) for k, v in arguments.items()}
    inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def llama3(name: str, arguments: dict) -> str:
    return _json({"name": name, "parameters": arguments})


def gpt_oss(name: str, arguments: dict) -> str:
    head = f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json"
    return f"{head}<|message|>{_json(arguments)}<|call|>"


def glm4_moe(name: str, arguments: dict) -> str:
    values = {k: v if isinstance(v, str) else _json(v) for k, v in arguments.items()}
    pairs = [f"\n<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>" for k, v in values.items()]
    return f"<tool_call>{name}{''.join(pairs)}\n</tool_call>"


def _gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        inner = ",".join(f"{_gemma_key(k)}:{_gemma(v)}" for k, v in value.items())
        return f"{{{inner}}}"
    return f"[{','.join(map(_gemma, value))}]" if isinstance(value, list) else _json(value)


def _gemma_key(key: str) -> str:
    plain = key.isascii() and key.replace("_", "a").isalnum() and not key[0].isdigit()
    return key if plain else f'<|"|>{key}<|"|>'


def gemma4(name: str, arguments: dict) -> str:
    return f"<|tool_call>call:{name}{_gemma(arguments)}<tool_call|>"


def lfm2(name: str, arguments: dict) -> str:
    inner = ", ".join(f"{k}={v!r}" for k, v in arguments.items())
    return f"<|tool_call_start|>[{name}({inner})]<|tool_call_end|>"


def deepseek(name: str, arguments: dict) -> str:
    head = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}"
    return f"{head}\n```json\n{_json(arguments)}\n```<｜tool▁call▁end｜>"


def mistral(name: str, arguments: dict) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}"


WRITERS: dict[str, Callable[[str, dict], str]] = {
    f.__name__: f
    for f in (hermes, qwen_xml, llama3, gpt_oss, glm4_moe, gemma4, lfm2, deepseek, mistral)
}
"""Family -> (name, arguments) -> the call as the family's template writes it."""
REASONING = {
    "gpt_oss": ("<|channel|>analysis<|message|>", "<|end|>"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "llama3": None,
}
