"""Anthropic's messages: requests in the form of all APIs, answers in Anthropic's shape.

Reasoning is a thinking block, whose signature is the handle of its turn: clients send it back
unchanged. A malformed call is text, because a `tool_use` block has no place for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, Field

from agenttrain.chat.grammar import AnswerForm
from agenttrain.chat.wire.events import event_text
from agenttrain.chat.wire.fields import ANTHROPIC, SHAPE, field_problem, quote, unfollowed_fields
from agenttrain.chat.wire.normal import HANDLE, Answer, AnswerHead, Question, call_message
from agenttrain.chat.wire.openai import RequestError, check_demanded_call, validate
from agenttrain.types import Finish, Message

SAMPLING = ("temperature", "top_p", "top_k")
"""Fields that change the distribution sampled from."""
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
"""Anthropic's names of errors by status; others are invalid_request_error and api_error."""


class MessagesRequest(BaseModel):
    """The supported fields of a request, except those of sampling."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    model: str | None = None
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    stop_sequences: list[str] | None = None
    stream: bool = False
    output_config: dict[str, Any] | None = None
    """`format` demands JSON; `effort` is for models that have one."""
    context_management: dict[str, Any] | None = None


def read_question(data: Mapping[str, Any]) -> Question:
    """Return a request's body as a Question; raises RequestError.

    The question's `sampling` has the sampling parameters and, beside them, all that the request
    asks for and that is not followed: the endpoint refuses or overrides both.
    """
    request = validate(MessagesRequest, data)
    not_followed = unfollowed_fields(data, {*MessagesRequest.model_fields, *SAMPLING}, ANTHROPIC)
    # Fields such as `n` ask for another kind of answer than one message: that cannot be given.
    for name in SHAPE:
        if name in not_followed:
            problem = field_problem(name, not_followed[name], {name})
            raise RequestError(problem, param=name, code="unsupported_value")
    parameters = {name: data[name] for name in SAMPLING if data.get(name) is not None}
    context_edits = _unfollowed_context_edits(request.context_management)
    sampling = not_followed | parameters | context_edits
    answer_form, forbids_parallel_calls = _read_answer_form(request)
    if forbids_parallel_calls:  # not followed either
        sampling["tool_choice.disable_parallel_tool_use"] = True
    messages: list[Message] = []
    if request.system:
        messages.append({"role": "system", "content": _join_text(request.system, "system")})
    tool_names: dict[str, str] = {}  # by the id of the call
    for index, message in enumerate(request.messages):
        where = f"messages[{index}]"
        if message.get("role") not in ("user", "assistant", "system"):
            raise RequestError(f"{where}: needs the role user, assistant or system", param=where)
        blocks = _content_blocks(message.get("content"), where)
        if message["role"] == "system":
            messages.append({"role": "system", "content": _join_text(blocks, where)})
        elif message["role"] == "assistant":
            messages.append(_read_assistant(blocks, where, tool_names))
        else:
            messages += _read_user(blocks, where, tool_names)
    if messages[-1]["role"] == "assistant":
        raise RequestError(
            "messages: the last one is the assistant's, and answers are not continued; end with a "
            "message of the user",
            param="messages",
        )
    choice = request.tool_choice
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    schemas = [] if kind == "none" else _read_tools(request.tools or [])
    check_demanded_call(answer_form, schemas)
    return Question(
        messages=messages,
        schemas=schemas,
        form=answer_form,
        model=request.model,
        max_tokens=request.max_tokens,
        sampling=sampling,
        stops=tuple(text for text in request.stop_sequences or () if text),
        stream=request.stream,
    )


def _read_answer_form(request: MessagesRequest) -> tuple[AnswerForm, bool]:
    """Return (the form that a request demands of the answer, True if it forbids parallel calls).

    Raises RequestError.
    """
    choice = request.tool_choice
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    tool = choice.get("name") if isinstance(choice, Mapping) and kind == "tool" else None
    if kind not in (None, "auto", "none", "any") and not isinstance(tool, str):
        raise RequestError(
            f"tool_choice={quote(choice)}: expected the type auto, none, any, or tool with a name",
            param="tool_choice",
            code="unsupported_value",
        )
    forbids_parallel_calls = (
        isinstance(choice, Mapping) and choice.get("disable_parallel_tool_use") is True
    )
    output_format = (request.output_config or {}).get("format")
    schema = None
    if isinstance(output_format, Mapping) and output_format.get("type") == "json_schema":
        schema = output_format.get("schema")
    if output_format is not None and not isinstance(schema, Mapping):
        raise RequestError(
            f"output_config.format={quote(output_format)}: expected the type json_schema with a "
            "schema",
            param="output_config.format",
            code="unsupported_value",
        )
    form = AnswerForm(
        call=kind in ("any", "tool"),
        tool=tool,
        schema=None if schema is None else json.dumps(schema),
    )
    return form, forbids_parallel_calls


def _unfollowed_context_edits(management: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return ``{"context_management": …}`` if it would change the prompt, else an empty mapping.

    The only edit that changes nothing is ``{"type": "clear_thinking_…", "keep": "all"}``.
    """
    edits = (management or {}).get("edits") or []
    keeps_all = isinstance(edits, list) and all(
        isinstance(edit, Mapping)
        and str(edit.get("type")).startswith("clear_thinking_")
        and edit.get("keep") == "all"
        for edit in edits
    )
    return {} if keeps_all else {"context_management": management}


def _read_tools(tools: list[Any]) -> list[dict[str, Any]]:
    """Return the tools as OpenAI's schemas, which chat templates take."""
    schemas = []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        parameters = tool.get("input_schema") if isinstance(tool, Mapping) else None
        if not isinstance(parameters, Mapping) or not isinstance(tool.get("name"), str):
            raise RequestError(
                f"{where}: needs a name and an input_schema; tools that Anthropic runs are not "
                "served here",
                param=where,
            )
        function: dict[str, Any] = {"name": tool["name"]}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        schemas.append({"type": "function", "function": {**function, "parameters": parameters}})
    return schemas


def _content_blocks(content: Any, where: str) -> list[Mapping[str, Any]]:
    """Return the blocks of a message's content; a text is one block. Raises RequestError."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise RequestError(f"{where}.content: needs a text or a list of blocks", param=where)
    return content


def _join_text(content: Any, where: str) -> str:
    """Return the joined text of a content. Raises RequestError for a block of another type."""
    texts = []
    for block in _content_blocks(content, where):
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise RequestError(
                f"{where}: holds a block of type {block.get('type')}; only text is supported here",
                param=where,
            )
        texts.append(block["text"])
    return "".join(texts)


def _read_assistant(blocks: list[Mapping[str, Any]], where: str, names: dict[str, str]) -> Message:
    """Return an assistant message of its blocks; add its calls to `names`: call id -> tool."""
    texts = [block for block in blocks if block.get("type") == "text"]
    message: Message = {"role": "assistant", "content": _join_text(texts, where)}
    for block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            message["reasoning_content"] = str(block.get("thinking", ""))
            # The signature of a thinking block of ours is the handle of its turn.
            if isinstance(block.get("signature"), str) and block["signature"]:
                message[HANDLE] = block["signature"]
        elif kind == "tool_use":
            name, arguments = block.get("name"), block.get("input")
            if not isinstance(name, str) or not isinstance(arguments, Mapping):
                raise RequestError(f"{where}: a tool_use needs a name and an input", param=where)
            call_id = str(block.get("id"))
            names[call_id] = name
            message.setdefault("tool_calls", []).append(call_message(call_id, name, arguments))
        elif kind != "text":
            raise RequestError(f"{where}: holds a block of type {kind}", param=where)
    return message


def _read_user(
    blocks: list[Mapping[str, Any]], where: str, names: Mapping[str, str]
) -> list[Message]:
    """Return a user's blocks as messages: one of a tool for each tool_result, then the text.

    `names` maps the ids of earlier calls to their tools.
    """
    messages: list[Message] = []
    texts = []
    for block in blocks:
        if block.get("type") != "tool_result":
            texts.append(block)
            continue
        call_id = block.get("tool_use_id")
        if not isinstance(call_id, str) or call_id not in names:
            raise RequestError(
                f"{where}.tool_use_id={call_id}: no assistant message before it has that call",
                param=where,
            )
        content = block.get("content")
        text = "" if content is None else _join_text(content, where)
        messages.append(
            {"role": "tool", "content": text, "tool_call_id": call_id, "name": names[call_id]}
        )
    if texts or not messages:
        messages.append({"role": "user", "content": _join_text(texts, where)})
    return messages


def message_body(answer: Answer) -> dict[str, Any]:
    """Return an answer as the body of a `message`."""
    return {
        **_head(answer),
        "content": list(_answer_blocks(answer)),
        "stop_reason": _stop_reason(answer),
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "output_tokens": answer.sampled_tokens,
        },
    }


class MessageWriter:
    """Writes an answer as the events of a message, once it is complete: a `StreamWriter`."""

    def __init__(self, head: AnswerHead, include_usage: bool) -> None:
        """`include_usage` has no effect: a message always ends with its usage."""

    def begin(self) -> Iterator[str]:
        """Yield nothing: the first event has the number of tokens of the prompt."""
        yield from ()

    def add(self, delta: Mapping[str, str]) -> Iterator[str]:
        """Yield nothing: `end` yields all of the text."""
        yield from ()

    def end(self, answer: Answer) -> Iterator[str]:
        """Yield the message."""
        for name, data in message_events(answer):
            yield event_text({"type": name, **data}, name)

    def fail(self, error: RequestError) -> Iterator[str]:
        """Yield an error."""
        yield event_text(error_body(error), "error")


def message_events(answer: Answer) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield an answer as the events of a stream: (name, data)."""
    usage = {"input_tokens": answer.prompt_tokens, "output_tokens": 0}
    start = {**_head(answer), "content": [], "stop_reason": None, "usage": usage}
    yield "message_start", {"message": start}
    for index, block in enumerate(_answer_blocks(answer)):
        empty: dict[str, Any]  # the block without its texts; deltas: (type, key, text)
        if block["type"] == "text":
            empty, deltas = {"type": "text", "text": ""}, [("text_delta", "text", block["text"])]
        elif block["type"] == "thinking":
            empty = {"type": "thinking", "thinking": "", "signature": ""}
            deltas = [
                ("thinking_delta", "thinking", block["thinking"]),
                ("signature_delta", "signature", block["signature"]),
            ]
        else:
            empty = {**block, "input": {}}
            deltas = [("input_json_delta", "partial_json", json.dumps(block["input"]))]
        yield "content_block_start", {"index": index, "content_block": empty}
        for kind, key, text in deltas:
            yield "content_block_delta", {"index": index, "delta": {"type": kind, key: text}}
        yield "content_block_stop", {"index": index}
    end = {"stop_reason": _stop_reason(answer), "stop_sequence": None}
    yield "message_delta", {"delta": end, "usage": {"output_tokens": answer.sampled_tokens}}
    yield "message_stop", {}


def error_body(error: RequestError) -> dict[str, Any]:
    """Return an error in Anthropic's shape."""
    kind = "api_error" if error.status >= 500 else "invalid_request_error"
    details = {"type": ERROR_TYPES.get(error.status, kind), "message": str(error)}
    return {"type": "error", "error": details}


def _head(answer: Answer) -> dict[str, Any]:
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "stop_sequence": None,
    }


def _answer_blocks(answer: Answer) -> Iterator[dict[str, Any]]:
    """Yield the blocks of an answer: reasoning, text, calls."""
    message = answer.message
    if "reasoning_content" in message:
        reasoning = message["reasoning_content"]
        # Clients send signatures back as they are: this one names the turn.
        yield {"type": "thinking", "thinking": reasoning, "signature": message[HANDLE]}
    if message["content"]:
        yield {"type": "text", "text": message["content"]}
    for call in message.get("tool_calls", ()):
        function = call["function"]
        yield {
            "type": "tool_use",
            "id": call["id"],
            "name": function["name"],
            "input": function["arguments"],
        }


def _stop_reason(answer: Answer) -> str:
    if answer.finish is Finish.length:
        return "max_tokens"
    return "tool_use" if answer.message.get("tool_calls") else "end_turn"
