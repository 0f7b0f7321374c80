"""vLLM's own tool parsers on the corpus of calls, so that the docs say what servers really read."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from call_corpus import CORPUS, MALFORMED, NO_CALL, NOT_COMPARED, TOOLS, Row

from agenttrain.chat.fixes import families
from agenttrain.commands.templates import small_tokenizer
from agenttrain.utils.files import conf_folder, parse_yaml

pytest.importorskip("vllm")
COMPARED = [row for row in CORPUS if row.vllm != NOT_COMPARED]


@cache
def parser_of(response: str) -> tuple[type, Any]:
    """vLLM's parser of a format, and a tokenizer with the format's control tokens."""
    from vllm.tool_parsers import ToolParserManager

    text = (conf_folder() / "response_schema" / f"{response}.yaml").read_text(encoding="utf-8")
    named = [family for family in families().values() if family.response == response]
    family = next((family for family in named if family.control), families()["qwen3"])
    name = parse_yaml(text)["server_parser"]
    return ToolParserManager.get_tool_parser(name), small_tokenizer(family)


def read(row: Row) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    messages = [{"role": "user", "content": "u"}]
    request = ChatCompletionRequest(messages=messages, model="m", tools=TOOLS)
    make, tokenizer = parser_of(row.format)
    try:
        found = make(tokenizer, request.tools).extract_tool_calls(row.text, request)
    except ValueError:
        return NO_CALL
    if not found.tools_called:
        return NO_CALL
    return [(c.function.name, value(c.function.arguments)) for c in found.tool_calls]


def value(arguments: str) -> Any:
    """What a client makes of arguments, whose text may be no JSON."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


@pytest.mark.parametrize("row", COMPARED, ids=lambda row: f"{row.format}/{row.what}")
def test_vllm_reads_a_completion_as_the_corpus_says(row: Row) -> None:
    wanted = row.ours if row.vllm is None else row.vllm
    assert wanted != MALFORMED, "vLLM knows no malformed calls: name what it reads"
    assert read(row) == wanted
