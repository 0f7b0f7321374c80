"""Export a chat's response schema as the `response_template` of transformers.

It is saved in checkpoints, so that ``tokenizer.parse_response(ids, prefix=prompt, tools=tools)``
returns messages (https://huggingface.co/docs/transformers/chat_response_parsing). The language can
express less than our schemas: each region of a completion is one field, read by one of a few
parsers, and a call that cannot be read is an exception. A template is therefore tried on turns that
the chat template renders, and dropped if it reads any of them differently.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from agenttrain.chat.boundary import BODY, CALL
from agenttrain.chat.chat import Chat
from agenttrain.chat.demonstrations import completion_ids
from agenttrain.chat.encoding import ChatError
from agenttrain.chat.parsers.harmony import HarmonySpec
from agenttrain.chat.parsers.marked import MarkedSpec
from agenttrain.chat.parsers.response_template import TemplateSpec
from agenttrain.types import AssistantTurn, Message, ToolCall

Field = dict[str, Any]
USER_TEXT = "Will it rain?"
FORECAST = {
    "type": "function",
    "function": {
        "name": "forecast",
        "description": "The weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "hourly": {"type": "boolean"},
                "tags": {"type": "array"},
            },
        },
    },
}
OSLO = {"city": 'Oslo "S" {1}\nNorway', "days": 2, "hourly": True, "tags": ["a", 1]}
BERGEN = {"city": "7", "days": 1}
FUNCTION = {"name": "{name}", "arguments": "{content}"}
# The recipient stands in one of two places of a header: <|start|>assistant to=functions.f
# <|channel|>commentary …, or <|channel|>commentary to=functions.f ….
_HARMONY_CALL = (
    r"(?:<\|end\|>)?(?:<\|start\|>assistant)?\s*(?:to=functions\.(?P<name>[^\s<]+)\s*"
    r"<\|channel\|>[^<]*|<\|channel\|>\w+\s+to=functions\.(?P<name>[^\s<]+)[^<]*)"
    r"(?:<\|constrain\|>\w*\s*)?<\|message\|>"
)


def response_template(chat: Chat) -> dict[str, Any] | None:
    """Return a chat's `tokenizer.response_template`; None if its format cannot be expressed.

    Example: ``{"defaults": {"role": "assistant"}, "start_anchor": ["<|im_start|>assistant\\n"],
    "fields": {"tool_calls": {"open_pattern": …, "content": "json", …}, …}}``
    """
    if isinstance(chat.response, TemplateSpec):
        return dict(chat.response.source)
    anchors, stops = _start_anchors(chat), _stop_pattern(chat)
    if not anchors or not stops:
        return None
    for fields in _field_candidates(chat, stops):
        template = {"defaults": {"role": "assistant"}, "start_anchor": anchors, "fields": fields}
        if _reads_back(chat, template):
            return template
    return None


def _start_anchors(chat: Chat) -> list[str]:
    """Return the texts that begin an assistant's turn after a user's message and after a reply.

    Each is the end of the generation prompt: from its last control token, without reasoning that
    it opens. Example: of ``<|im_end|>\\n<|im_start|>assistant\\n<think>\\n`` it is
    ``<|im_start|>assistant\\n``.
    """
    # BODY is the content of the last message, so the text after it holds the generation prompt.
    user: Message = {"role": "user", "content": BODY}
    reply = {"role": "tool", "tool_call_id": CALL.calls[0].id, "name": "f", "content": BODY}
    beginnings = []
    for messages in [user], [{**user, "content": "u"}, CALL.message(), reply]:
        with suppress(ChatError):  # a template may refuse one of the two
            after_body = chat.render(messages, generation_prompt=True).rpartition(BODY)[2]
            reasoning_open = getattr(chat.response, "reasoning_open", "").rstrip()
            # All of it if the prompt opens no reasoning.
            header = after_body.partition(reasoning_open)[0] if reasoning_open else after_body
            pieces = list(chat.encoder.pieces(header))
            last = max((i for i, (control, _) in enumerate(pieces) if control), default=0)
            beginnings.append("".join(text for _, text in pieces[last:]))
    return [text for text in dict.fromkeys(beginnings) if text.strip()]


def _stop_pattern(chat: Chat) -> str:
    """Return an expression for the control tokens of a turn that are no part of the message.

    They are those that end it, and others that the template writes into it: Cohere's answers end
    with <|END_RESPONSE|><|END_OF_TURN_TOKEN|>, and only the second is a stop token. Such tokens are
    found in rendered probe turns: answers, reasoning and calls of the tool FORECAST.
    """
    # The marks of reasoning and calls are a part of the message.
    mark_ids = {chat.encoder.control[text] for text in chat.response.marks(chat.encoder.control)}
    stop_ids = list(chat.stop_token_ids)
    for turn in _probe_turns(chat):
        with suppress(ChatError):  # the chat template cannot render this turn
            ids = completion_ids(chat, [{"role": "user", "content": USER_TEXT}], [FORECAST], turn)
            # `steering_ids` are the special control tokens, and those in the template.
            stop_ids += [i for i in ids if i in chat.encoder.steering_ids and i not in mark_ids]
    return "|".join(re.escape(chat.decode([token])) for token in dict.fromkeys(stop_ids))


def _field_candidates(chat: Chat, stops: str) -> Iterator[dict[str, Field]]:
    """Yield candidates for the template's fields: {field of a message: its settings}.

    A setting is a key of transformers: `open_pattern` and `close_pattern` match the marks around
    the field's text. `repeats` allows several such texts, joined by `join`. `content` names the
    parser of the text, and `transform` is the shape of the result.

    There are several candidates where models write calls in several ways, of which a template can
    read only one. `response_template` tries them in this order and takes the first with which
    transformers reads the probe turns as our parser does. `stops` is an expression for the control
    tokens that end a turn.
    """
    spec = chat.response
    if isinstance(spec, HarmonySpec):
        # A turn is a list of messages: <|start|>assistant<|channel|>NAME<|message|>TEXT<|end|>. The
        # prompt holds the first <|start|>assistant, and an <|end|> stands before each later one.
        start = r"(?:<\|end\|>)?(?:<\|start\|>assistant)?<\|channel\|>"
        end = r"\s*<\|(?:end|return|call)\|>"
        joined = {"repeats": True, "join": "\n"}
        yield {
            "reasoning_content": {
                "open_pattern": rf"{start}analysis<\|message\|>",
                "close_pattern": end,
                **joined,
            },
            "tool_calls": {
                **_delimited(_HARMONY_CALL, end, "json"),
                "repeats": True,
                "transform": {"type": "function", "function": FUNCTION},
            },
            "content": {
                "open_pattern": rf"{start}(?:final|commentary)<\|message\|>",
                "close_pattern": end,
                **joined,
            },
        }
    if not isinstance(spec, MarkedSpec):
        return
    # Blanks beside a mark belong to it; otherwise they would be a region of content.
    content = {"close_pattern": rf"\s*(?:{stops})\s*", "repeats": True, "join": "\n"}
    fields: dict[str, Field] = {}
    if spec.reasoning_open:
        fields["reasoning_content"] = {
            "open_pattern": rf"\s*{re.escape(spec.reasoning_open.rstrip())}",
            "close_pattern": rf"\s*{re.escape(spec.reasoning_close)}\s*",
        }
    for calls in _call_field_candidates(spec, stops):
        yield {**fields, "tool_calls": {"repeats": True, **calls}, "content": content}


def _call_field_candidates(spec: MarkedSpec, stops: str) -> Iterator[Field]:
    """Yield candidates for the field of the calls; none for syntaxes that transformers lacks.

    A candidate says where a call begins and ends, which parser reads the text between, and how the
    result becomes a call. Example, for Qwen, without escapes and blanks::

        {"open_pattern": "<tool_call>", "close_pattern": "</tool_call>", "content": "json",
         "transform": {"type": "function", "function": "{content}"}}

    `response_template` tries the candidates in order. FUNCTION is the shape of a call whose name a
    group `name` of the opening captures.
    """
    # `opening` and `closing` match all that stands around a call: its marks, blanks, and the marks
    # around all calls (`ignored`).
    ignored = "|".join(map(re.escape, spec.ignored))
    ignored_marks = rf"(?:(?:{ignored})\s*)*" if ignored else ""
    mark = spec.call_open_pattern or re.escape(spec.call_open)
    opening = rf"\s*{ignored_marks}(?:{mark})"
    if spec.call_close is not None:
        closing = rf"\s*{re.escape(spec.call_close)}\s*{ignored_marks}"
    else:
        # A call ends before the next call's mark, or where the turn stops. The next mark is not
        # consumed, because it opens the next region. The separator is: with the lookahead alone,
        # the pattern would match an empty text.
        closing = rf"\s*{re.escape(spec.separator)}\s*(?={mark})|\s*(?:{stops})\s*"
    if spec.syntax == "json":  # {"name": "f", "arguments": {}}
        function: str | dict[str, str] = "{content}"
        if (spec.name_key, spec.arguments_key) != ("name", "arguments"):
            function = {
                "name": f"{{content.{spec.name_key}}}",
                "arguments": f"{{content.{spec.arguments_key}}}",
            }
        yield {
            **_delimited(opening, closing, "json"),
            "transform": {"type": "function", "function": function},
        }
    elif spec.syntax == "named_json":  # two ways to write calls: a candidate for each
        footer = rf"\s*(?:{re.escape(spec.footer)})?" if spec.footer else ""
        yield {  # f{"x": 1}
            **_delimited(opening + (spec.header or ""), footer + closing, "json"),
            "transform": {"type": "function", "function": FUNCTION},
        }
        yield {  # [{"name": "f", "arguments": {}}]: one region, each of whose items is a call
            **_delimited(opening, closing, "json"),
            "repeats": False,
            "transform_each": True,
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{arguments}"},
            },
        }
    elif spec.syntax in ("xml", "pairs"):
        if spec.syntax == "xml":  # <function=f><parameter=x>1</parameter></function>
            name = r"\s*<function=(?P<name>[^>\n]+)>"
            tag = r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
            closing = r"\s*</function>" + closing
        else:  # f<arg_key>x</arg_key><arg_value>1</arg_value>
            name = r"\s*(?P<name>[^\s<]+)"
            tag = r"<arg_key>\s*(?P<key>.*?)\s*</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
        yield {
            **_delimited(opening + name, closing, "xml-inline"),
            "content_args": {"tag_pattern": tag},
            "transform": {"type": "function", "function": FUNCTION},
        }
    elif spec.syntax == "gemma":  # call:f{x:1}
        yield {
            **_delimited(opening + r"call:(?P<name>[^\s{]+)\s*", closing, "json"),
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {"type": "function", "function": FUNCTION},
        }


def _delimited(opening: str, closing: str, content: str) -> Field:
    """Return the field whose text stands between two patterns and is read by the parser `content`.

    The caller adds the shape of the result, `transform`.
    """
    return {"open_pattern": opening, "close_pattern": closing, "content": content}


def _reads_back(chat: Chat, template: Mapping[str, Any]) -> bool:
    """Return True if transformers reads the completions of all probe turns as our parser does."""
    user: Message = {"role": "user", "content": USER_TEXT}
    prompt = chat.rendered_ids([user], [FORECAST])
    turns_read = 0
    for turn in _probe_turns(chat):
        try:
            ids = completion_ids(chat, [user], [FORECAST], turn)
        except ChatError:  # the chat template cannot render this turn
            continue
        ours = chat.parse(ids, [FORECAST], turn=0)
        try:
            message = chat.tokenizer.parse_response(ids, template, prefix=prompt, tools=[FORECAST])
        except (ValueError, KeyError, TypeError, AttributeError):
            return False
        functions = [call["function"] for call in message.get("tool_calls", ())]
        calls = [(function.get("name"), function.get("arguments")) for function in functions]
        if calls != [(call.name, call.arguments) for call in ours.calls]:
            return False
        if (message.get("content") or "", message.get("reasoning_content")) != (
            ours.content,
            ours.reasoning or None,
        ):
            return False
        turns_read += 1
    return turns_read > 0


def _probe_turns(chat: Chat) -> Iterator[AssistantTurn]:
    """Yield turns of every kind that the chat template renders."""
    yield AssistantTurn(content="No rain.\n\nSun.", reasoning=None, calls=())
    yield AssistantTurn(content="No rain.", reasoning="Well.\nIt is dry.", calls=())
    if not chat.renders_calls:
        return
    first, second = (
        ToolCall(id=f"call_0_{index}", name="forecast", arguments=arguments)
        for index, arguments in enumerate((OSLO, BERGEN))
    )
    call_lists = [(first,)] if chat.one_call_per_turn else [(first,), (first, second)]
    for calls in call_lists:
        yield AssistantTurn(content="", reasoning=None, calls=calls)
        yield AssistantTurn(content="", reasoning="It may.", calls=calls)
        yield AssistantTurn(content="Let me see.", reasoning=None, calls=calls)
