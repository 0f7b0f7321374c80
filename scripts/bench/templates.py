"""Suffix and parse per turn, in microseconds of one core, by length of the history.

The fixed Qwen3 template with the packaged tokenizer, one call and one reply per turn. Beside it, in
the same run and with the same parser: what TRL 1.16 does per turn (`_get_tool_suffix_ids` of its
GRPO trainer: a dummy conversation is rendered and tokenised with and without the reply, and the
first is cut off the second), and the same two renders of the whole conversation, which is what a
loop does that takes the suffix from the real one. Both are written out here with transformers'
`apply_chat_template`. The figures:

    suffix_parse_us_200           ours, at a history of 200 tokens (median of turns)
    suffix_parse_us_20000         the same at 20,000 tokens
    suffix_parse_us_200000        the same at 200,000 tokens
    trl_suffix_parse_us           two renders of a dummy conversation, whatever the history
    whole_renders_us_200          two renders of the whole conversation, at 200 tokens
    whole_renders_us_20000        the same at 20,000 tokens
    whole_renders_us_200000       the same at 200,000 tokens
    first_turn_us                 ours, at the first turn of a shape (nothing cached)
    certificate_ms                certifying the fixed template on two tools, once per run
    parse_megabyte_worst_s        CPU seconds for the worst completion of a megabyte: the slowest of
                                  every response schema of conf/ with every text of HOSTILE
    parse_megabyte_median_s       the median of the same
    parse_megabyte_dialects_s     the worst for REGEXES, expressions that backtrack without end
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import harness
from transformers import AutoTokenizer

from agenttrain.chat.certificate import certify
from agenttrain.chat.chat import Chat
from agenttrain.chat.config import ChatTemplateConfig, ResponseSchemaConfig
from agenttrain.chat.loading import load_chat, load_spec, make_spec, spec_names
from agenttrain.chat.parsers.base import ResponseSpec, parse_response
from agenttrain.commands.templates import EXAMPLE_TOOLS, original
from agenttrain.types import Finish, Message, Origin, Rollout, Task
from agenttrain.utils.model_path import model_folder

MEGABYTE = 1_000_000
HOSTILE = (
    *(("", "a"), ("", "<tool_call>"), ("", '<tool_call>{"a'), ("", "<think>"), ("", "</think>")),
    *(("", "{"), ("", "["), ("", '"'), ("", "\\"), ("", "\n"), ("", "<|start|>x")),
    ("", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    *(("", "<tool_call><function=f><parameter=x>"), ("<tool_call><function=f>", "<parameter=")),
    *(("<tool_call>f", "<arg_key>x</arg_key><arg_value>"), ("", "<｜tool▁call▁begin｜>f```")),
    *(("<|tool_call>call:f{a:[", "{a:1},"), ("<|tool_call>call:f{a:[", "[1],")),
    *(("<|tool_call>call:f{a:[", "1,"), ("<|tool_call_start|>[f(x=[", "{'a':1},")),
    *(("<|tool_call_start|>[", "f(), "), ("[TOOL_CALLS][", "{},"), ("", "[TOOL_CALLS]f{}")),
    *(("", '{"name": "f", "parameters": '), ('{"name": "f", "parameters": {"a": "', "\\")),
    ("", "<|channel|>commentary to=functions.f<|message|>{}<|call|>"),
)
"""What a completion begins with, and what it repeats then."""
REGEXES = {
    "response_template": {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
                "close_pattern": r"</tool_call>\s*",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"
                },
                "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {},
        },
    },
    "response_schema": {
        "type": "object",
        "x-regex": (
            r"^(?:(?P<reasoning_content>.*?\S.*?)</think>\s*)?"
            r"(?P<content>(?:(?!<tool_call>).)*)$"
        ),
        "properties": {
            "content": {"type": "string"},
            "reasoning_content": {"type": "string"},
            "tool_calls": {
                "type": "array",
                "x-regex-iterator": r"<tool_call>\s*(.+?)\s*</tool_call>",
            },
        },
    },
}
HISTORIES = (200, 20_000, 200_000)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call><|im_end|>'
EXCHANGE: list[Message] = [
    {"role": "user", "content": "how much does the lamp cost? " * 10},
    {"role": "assistant", "content": "it costs 17 " * 10},
]
QUESTION: Message = {"role": "user", "content": "3 + 4?"}


def measure(quick: bool) -> dict[str, float]:
    """All figures; `quick` repeats less."""
    tokenizer = copy.copy(AutoTokenizer.from_pretrained(model_folder("bundled:shop")))
    tokenizer.chat_template = original("qwen3") or tokenizer.chat_template
    chat = load_chat(tokenizer, ChatTemplateConfig(), ResponseSchemaConfig())
    repeats = 3 if quick else 15
    figures = {}
    for history in HISTORIES:
        figures[f"suffix_parse_us_{history}"] = ours(chat, history, repeats * 20)
    figures["trl_suffix_parse_us"] = renders(chat, tokenizer, None, repeats * 20)
    for history in HISTORIES:
        times = repeats if history < 100_000 else max(repeats // 5, 2)
        figures[f"whole_renders_us_{history}"] = renders(chat, tokenizer, history, times)
    figures["first_turn_us"] = first_turn(tokenizer, repeats)
    figures["certificate_ms"] = median(lambda _: certify(chat, EXAMPLE_TOOLS), repeats) / 1000
    return figures | megabytes(quick)


def megabytes(quick: bool) -> dict[str, float]:
    """Parsing what no model should write; `quick` tries every fourth text."""
    tried = HOSTILE[:: 4 if quick else 1]
    texts = [begin + again * (MEGABYTE // len(again)) for begin, again in tried]
    own = [cpu_seconds(text, load_spec(name)) for name in spec_names() for text in texts]
    others = [make_spec(found, source=name) for name, found in REGEXES.items()]
    return {
        "parse_megabyte_worst_s": max(own),
        "parse_megabyte_median_s": statistics.median(own),
        "parse_megabyte_dialects_s": max(cpu_seconds(t, spec) for spec in others for t in texts),
    }


def cpu_seconds(text: str, spec: ResponseSpec) -> float:
    started = time.process_time()
    parse_response(text, spec, turn=0, schemas=EXAMPLE_TOOLS)
    return time.process_time() - started


def ours(chat: Chat, history: int, repeats: int) -> float:
    """Parse a call, make the suffix of its reply, append both to a ledger of that length."""
    sampled = chat.encoder.encode(CALL)
    rollout = Rollout(task=Task(task_id="bench", messages=()), rollout_id="bench")
    rollout.trajectories[0].append_context(
        (chat.encode_plain("lamp ") * history)[:history], Origin.prompt
    )

    def turn(index: int) -> None:
        parsed = chat.parse(sampled, EXAMPLE_TOOLS, turn=index, after="tool")
        for origin, ids in chat.suffix(
            parsed,
            [reply(parsed.calls[0].id, index)],
            completion_ids=sampled,
            finish=Finish.stop,
            generation_prompt=True,
        ):
            rollout.trajectories[0].append_context(ids, origin)

    return median(turn, repeats)


def renders(chat: Chat, tokenizer: Any, history: int | None, repeats: int) -> float:
    """The same ids from two renderings: of a conversation of about `history` tokens, its tools
    included, or of a dummy without tools."""
    messages = [QUESTION] if history is None else conversation(chat, history)
    tools = None if history is None else list(EXAMPLE_TOOLS)
    sampled = chat.encoder.encode(CALL)
    found: dict[str, list[int]] = {}

    def tokens(conversation: list[Message], generation_prompt: bool) -> list[int]:
        return tokenizer.apply_chat_template(
            conversation,
            tools=tools,
            chat_template=chat.template,
            add_generation_prompt=generation_prompt,
            return_dict=False,
        )

    def turn(index: int) -> None:
        parsed = chat.parse(sampled, EXAMPLE_TOOLS, turn=index, after="tool")
        said = [*messages, parsed.message()]
        prefix = tokens(said, False)
        whole = tokens([*said, reply(parsed.calls[0].id, index)], True)
        found["suffix"] = whole[len(prefix) :]

    result = median(turn, repeats)
    assert chat.decode(found["suffix"]).endswith("<|im_start|>assistant\n")
    return result


def first_turn(tokenizer: Any, repeats: int) -> float:
    """Ours with an empty cache: the shape's rendering is part of it."""
    chats = [
        load_chat(tokenizer, ChatTemplateConfig(), ResponseSchemaConfig()) for _ in range(repeats)
    ]
    return statistics.median(ours(chat, 200, 1) for chat in chats)


def conversation(chat: Chat, history: int) -> list[Message]:
    """Messages that render to about `history` tokens, a question last."""
    one = len(chat.prompt_ids(EXCHANGE, ()))
    return [*(EXCHANGE * (history // one)), QUESTION]


def reply(call_id: str, index: int) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "name": "add", "content": f"{index}, lamp"}


def median(work: Callable[[int], object], repeats: int) -> float:
    """Microseconds of one piece of work."""
    times = []
    for index in range(repeats):
        started = time.perf_counter()
        work(index)
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


if __name__ == "__main__":
    harness.run(__doc__ or "", measure)
