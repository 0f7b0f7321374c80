"""OpenAI's responses: requests in the form of all APIs, answers in the API's shape.

A conversation is a list of items. Reasoning, text and calls of one turn are items of their own::

    message (user)  reasoning  function_call  function_call  function_call_output  …_output
                    `---------- one assistant message -----'  `------ two tool messages ----'

The id of an item names the turn that it belongs to: ``rs_`` and ``msg_`` stand before the turn's
handle, ``fc_`` before the id of a call. A client may send the id alone (`item_reference`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel, Field

from agenttrain.chat.grammar import ANY_FORM, AnswerForm
from agenttrain.chat.wire.events import event_text, unsent
from agenttrain.chat.wire.fields import RESPONSES, field_problem, quote, unfollowed_fields
from agenttrain.chat.wire.normal import (
    HANDLE,
    Answer,
    AnswerHead,
    FindIssued,
    Namespaces,
    Question,
)
from agenttrain.chat.wire.openai import (
    RequestError,
    SamplingFields,
    argument_text,
    check_demanded_call,
    demanded_schema,
    forced_call_error,
    read_call,
    read_role,
    tool_schema,
    validate,
)
from agenttrain.types import Finish, Message

SAMPLING = ("temperature", "top_p")
"""Fields that change the distribution sampled from."""
IGNORED = ("reasoning", "stream_options", "max_tool_calls")
"""Fields that change nothing here: the template says whether the model reasons, and the tools that
`max_tool_calls` counts are left out."""
STATE = ("previous_response_id", "conversation", "prompt", "background")
"""Fields that ask for what the provider keeps."""
TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")


class ResponsesRequest(BaseModel):
    """The supported fields of a request, except those of sampling."""

    input: str | list[dict[str, Any]] = Field(min_length=1)
    model: str | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    text: dict[str, Any] | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    stream: bool = False


def read_question(
    data: Mapping[str, Any], roles: Mapping[str, str], find_issued: FindIssued
) -> Question:
    """Return a request's body as a Question; raises RequestError.

    `roles` are those of `chat_template.roles`. The question's `sampling` has the sampling
    parameters and, beside them, the fields that would change the answer but are not followed: the
    endpoint refuses or overrides both.
    """
    not_followed = unfollowed_fields(
        data, {*ResponsesRequest.model_fields, *SAMPLING, *IGNORED}, RESPONSES
    )
    for name in STATE:
        if name in not_followed:
            raise RequestError(
                f"{name}={quote(not_followed[name])}: nothing is kept here between requests; send "
                "the whole conversation as `input`, with store=false",
                param=name,
                code="unsupported_value",
            )
    if "top_logprobs" in not_followed:  # an answer can hold none, so it cannot be left out silently
        raise _refused_field("top_logprobs", not_followed["top_logprobs"])
    request = validate(ResponsesRequest, data)
    sampling = {name: data[name] for name in SAMPLING if data.get(name) is not None}
    tools = _Tools()
    tools.read(request.tools or (), "tools")
    answer_form = _read_answer_form(request)
    schemas = [] if request.tool_choice == "none" else tools.schemas
    check_demanded_call(answer_form, schemas)
    return Question(
        messages=_ItemReader(roles, find_issued, tools.namespaces).read(request),
        schemas=schemas,
        form=answer_form,
        model=request.model,
        max_tokens=request.max_output_tokens,
        sampling=not_followed | sampling,
        stream=request.stream,
        namespaces=tools.namespaces,
        left_out=tools.left_out,
    )


def read_served(
    data: Mapping[str, Any], roles: Mapping[str, str], find_issued: FindIssued
) -> Question:
    """Return the body of a request to `agenttrain serve` as a Question.

    Raises RequestError for a field that `serve` would not follow.
    """
    question = read_question(data, roles, find_issued)
    for name, value in question.sampling.items():
        if name not in SAMPLING:
            raise _refused_field(name, value)
    # `serve` samples without a grammar, and only a grammar could force a call or JSON.
    if question.form.call:
        raise forced_call_error("tool_choice", data["tool_choice"])
    if question.form != ANY_FORM:
        raise _refused_field("text.format", (data.get("text") or {}).get("format"))
    sampling = validate(SamplingFields, question.sampling).model_dump(exclude_none=True)
    return replace(question, sampling=sampling)


def _refused_field(name: str, value: object) -> RequestError:
    names = {*RESPONSES, *ResponsesRequest.model_fields, *SAMPLING, *IGNORED}
    return RequestError(field_problem(name, value, names), param=name, code="unsupported_value")


@dataclass(slots=True)
class _Tools:
    """The tools of a request that the model is shown, collected by `read`."""

    schemas: list[dict[str, Any]] = field(default_factory=list)
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Name of a tool for the model -> (namespace, name) of the tool for the client."""
    left_out: int = 0
    """Tools of other types, which the model is not shown."""

    def read(self, tools: Sequence[Any], where: str, namespace: str | None = None) -> None:
        """Add functions, and those inside namespaces; count the others. Raises RequestError."""
        for index, tool in enumerate(tools):
            place = f"{where}[{index}]"
            kind = tool.get("type") if isinstance(tool, Mapping) else None
            if not isinstance(kind, str):
                raise RequestError(f"{place}: needs a type", param=place)
            if kind == "function":
                schema = tool_schema(tool, place)
                if namespace is not None:
                    schema = self._name_in_namespace(schema, namespace)
                self.schemas.append(schema)
            elif kind == "namespace" and namespace is None:
                nested, name = tool.get("tools"), tool.get("name")
                if not isinstance(nested, list) or not isinstance(name, str):
                    raise RequestError(f"{place}: needs a name and a list of tools", param=place)
                self.read(nested, f"{place}.tools", name)
            else:
                self.left_out += 1

    def _name_in_namespace(self, schema: dict[str, Any], namespace: str) -> dict[str, Any]:
        """Return the schema of a tool in a namespace, under a name that no other tool has.

        Example: if there is a tool ``find`` already, that of the namespace ``mail`` becomes
        ``mail__find``.
        """
        function = schema["function"]
        name = model_name = function["name"]
        if name in {other["function"]["name"] for other in self.schemas}:
            model_name = f"{namespace}__{name}"
        self.namespaces[model_name] = (namespace, name)
        return {**schema, "function": {**function, "name": model_name}}


def _read_answer_form(request: ResponsesRequest) -> AnswerForm:
    """Return the form that a request demands of the answer; raises RequestError."""
    choice, tool = request.tool_choice, None
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        tool = choice.get("name")
    if choice not in (None, "auto", "none", "required") and not isinstance(tool, str):
        raise RequestError(
            f"tool_choice={quote(choice)}: expected auto, none, required, or "
            '{"type": "function", "name": …}',
            param="tool_choice",
            code="unsupported_value",
        )
    text_format = (request.text or {}).get("format")
    if isinstance(text_format, Mapping) and text_format.get("type") == "json_schema":
        # The schema stands beside the type here, but one level deeper in chat completions.
        text_format = {"type": "json_schema", "json_schema": text_format}
    schema = demanded_schema(text_format, "text.format")
    return AnswerForm(
        call=choice == "required" or tool is not None,
        tool=tool,
        schema=None if schema is None else json.dumps(schema),
    )


class _ItemReader:
    """Reads the items of one request as messages; `read` is called once.

    The items of one turn of the assistant (reasoning, text, calls) become one message, the current
    turn. An item names its turn by a key: the handle, under which this server issued the turn, or
    the id of a call. Items that another server issued have other keys, or none.
    """

    def __init__(
        self, roles: Mapping[str, str], find_issued: FindIssued, namespaces: Namespaces
    ) -> None:
        """`roles` are those of `chat_template.roles`.

        `find_issued` returns the answer that was issued under a handle or with a call's id, or
        None. `namespaces` maps a tool's name for the model to (namespace, name) for the client.
        """
        self.roles, self.find_issued = roles, find_issued
        self.model_names = {tool: name for name, tool in namespaces.items()}
        """(namespace, name) of a tool for the client -> its name for the model."""
        self.messages: list[Message] = []
        self.tool_names: dict[str, str] = {}
        """Id of a call -> name of its tool."""
        self.current_turn: Message | None = None
        """The last assistant message, as the client sent it: its items so far. After it come at
        most replies to its calls. None after a message of another role."""
        self.current_as_issued: Message | None = None
        """The same turn as this server issued it; None if it did not, or if no item of the turn has
        shown so. Like `current_turn`, set by `_turn_for_item`."""

    def read(self, request: ResponsesRequest) -> list[Message]:
        """Return the messages. Raises RequestError."""
        if request.instructions:
            self.messages.append({"role": "system", "content": request.instructions})
        items = request.input
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        for index, item in enumerate(items):
            self._read_item(self._resolve_reference(item, f"input[{index}]"), f"input[{index}]")
        if self.messages[-1]["role"] == "assistant":
            raise RequestError(
                "input: the last item is the assistant's, and answers are not continued; end with "
                "a message of the user or an output of a call",
                param="input",
            )
        return self.messages

    def _resolve_reference(self, item: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        """Return an item, or the issued one that an `item_reference` names.

        A reference holds the id of an item in place of the item. The id holds the key of its turn:
        ``msg_7f`` is an item of the turn with the handle ``7f``.
        """
        # Some clients leave the type of a reference out.
        has_only_id = item.keys() - {"type"} == {"id"}
        if item.get("type") != "item_reference" and not has_only_id:
            return item
        item_id = str(item.get("id"))
        issued_turn = self.find_issued(_turn_key(item_id))
        if issued_turn is not None:
            # A tool in a namespace has one name for the client and one for the model: find and
            # mail__find. The messages need the model's, which a call keeps without `namespaces`.
            for candidate in output_items(issued_turn, namespaces={}):
                if candidate["id"] == item_id:
                    return candidate
        raise RequestError(
            f"{where}.id={quote(item_id)}: no such item was issued in this conversation; send the "
            "items themselves, with store=false",
            param=f"{where}.id",
            code="unsupported_value",
        )

    def _read_item(self, item: Mapping[str, Any], where: str) -> None:
        """Add an item to the messages, as one of its own or as a part of the current turn."""
        kind = item.get("type", "message")
        if kind == "reasoning":
            handle = item.get("encrypted_content")  # as in the items that we issue
            # Some clients send only the id, which holds the handle too: ``rs_<handle>``.
            key = handle or _turn_key(item.get("id"))
            turn = self._turn_for_item(key, kind)  # sets `self.current_as_issued` too
            texts = item.get("content") or item.get("summary")
            if isinstance(handle, str) and handle:
                turn[HANDLE] = handle
            if texts:
                turn["reasoning_content"] = _join_text(texts, where)
            # Some clients send the item without its text: it is the one that was issued.
            elif self.current_as_issued and "reasoning_content" in self.current_as_issued:
                turn["reasoning_content"] = self.current_as_issued["reasoning_content"]
        elif kind == "function_call":
            self._read_call(item, where)
        elif kind == "function_call_output":
            call_id = item.get("call_id")
            if not isinstance(call_id, str) or call_id not in self.tool_names:
                raise RequestError(
                    f"{where}.call_id={call_id}: no item before it is that call",
                    param=f"{where}.call_id",
                )
            self.messages.append(
                {
                    "role": "tool",
                    "content": _join_text(item.get("output"), where),
                    "tool_call_id": call_id,
                    "name": self.tool_names[call_id],
                }
            )
        elif kind == "message":
            self._read_message(item, where)
        else:
            raise RequestError(
                f"{where}: items of the type {kind} are not supported here; functions are the only "
                "tools",
                param=f"{where}.type",
                code="unsupported_value",
            )

    def _read_message(self, item: Mapping[str, Any], where: str) -> None:
        """Add a message; an assistant's text is added to the turn that it belongs to.

        The item's id names that turn: ``msg_<handle>``. An item without an id, or with another
        server's, goes by its place among the items (`_turn_for_item`).
        """
        role = read_role(str(item.get("role")), self.roles)
        if role is None or role == "tool":
            raise RequestError(
                f"{where}.role={item.get('role')}: expected user, assistant, system or developer",
                param=f"{where}.role",
            )
        text = _join_text(item.get("content"), where)
        if role == "assistant":
            turn = self._turn_for_item(_turn_key(item.get("id")), "message")
            turn["content"] += text
        else:
            self.messages.append({"role": role, "content": text})
            # Later items of the assistant begin a new turn.
            self.current_turn = self.current_as_issued = None

    def _read_call(self, item: Mapping[str, Any], where: str) -> None:
        """Add a call to the turn that it belongs to."""
        call_id, name = item.get("call_id"), item.get("name")
        if not isinstance(call_id, str) or not isinstance(name, str):
            raise RequestError(f"{where}: a function_call needs a call_id and a name", param=where)
        # Only a tool in a namespace has another name for the model, e.g. mail__find. A call without
        # a namespace is not among `model_names`, and keeps its name.
        model_name = self.model_names.get((str(item.get("namespace")), name), name)
        function = {"name": model_name, "arguments": item.get("arguments")}
        call = read_call({"id": call_id, "function": function}, where, text_arguments=True)
        turn = self._turn_for_item(call_id, "function_call")
        turn.setdefault("tool_calls", []).append(call)
        self.tool_names[call_id] = model_name

    def _turn_for_item(self, key: object, kind: str) -> Message:
        """Return the assistant message that an item belongs to: the current one, or a new one.

        `key` is the handle or the id of a call in the item, `kind` the item's type. Sets
        `current_turn` and `current_as_issued`.
        """
        item_turn = self.find_issued(key) if isinstance(key, str) and key else None
        if self.current_turn is None or self._begins_turn(self.current_turn, item_turn, kind):
            self.current_turn = {"role": "assistant", "content": ""}
            self.messages.append(self.current_turn)
            self.current_as_issued = item_turn
        elif item_turn is not None:
            # An earlier item of the turn may have come without its key.
            self.current_as_issued = item_turn
        return self.current_turn

    def _begins_turn(self, current: Message, item_turn: Message | None, kind: str) -> bool:
        """Return True if an item begins a new turn, False if it is a part of the current one.

        `item_turn` is the turn that this server issued with the item in it, or None. `kind` is the
        item's type.
        """
        if item_turn is not None and self.current_as_issued is not None:
            # This server issued both. They may be one turn even if replies stand between: some
            # clients put each reply right after its call.
            return item_turn is not self.current_as_issued
        if current is not self.messages[-1]:  # a reply follows the turn
            return True
        # Reasoning comes first in a turn, so it begins a new one if this one has anything already.
        is_empty = not current["content"] and current.keys() == {"role", "content"}
        return kind == "reasoning" and not is_empty


def _turn_key(item_id: object) -> str:
    """Return the key of an item's turn, which its id holds: ``"7f"`` of ``"msg_7f"``.

    It is the turn's handle, or the id of one of its calls.
    """
    return item_id.partition("_")[2] if isinstance(item_id, str) else ""


def _join_text(content: Any, where: str) -> str:
    """Return the joined text of a content. Raises RequestError for a part that is no text."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text_key = "refusal" if kind == "refusal" else "text"
        text = part.get(text_key) if kind in TEXT_PARTS else None
        if not isinstance(text, str):
            raise RequestError(
                f"{where}: holds a part of type {kind}; only text is supported here", param=where
            )
        texts.append(text)
    return "".join(texts)


def output_items(
    message: Message, namespaces: Namespaces, status: str = "completed"
) -> list[dict[str, Any]]:
    """Return an answer of this server as output items: reasoning, text, calls.

    `message` holds the turn's handle, a random id, under HANDLE. The items' ids contain it, so that
    the turn is found again when a client sends an item back.
    """
    handle, items = message[HANDLE], []
    if "reasoning_content" in message:
        text = {"type": "reasoning_text", "text": message["reasoning_content"]}
        items.append(_reasoning_item(handle, [text], is_complete=True))
    calls = message.get("tool_calls", ())
    if message["content"] or not calls:  # an answer has at least one message or call
        items.append(_message_item(handle, [_output_text(message["content"])], status))
    items += [_call_item(call, namespaces) for call in calls]
    return items


def _reasoning_item(
    handle: str, content: list[dict[str, Any]], *, is_complete: bool
) -> dict[str, Any]:
    """Return an item of reasoning.

    `handle` names the turn. `content` is a list of ``{"type": "reasoning_text", "text": …}``. A
    complete item has the handle as `encrypted_content` too: clients send that field back unchanged,
    so that the turn is found again. An item whose text is still being streamed has None there.
    """
    return {
        "id": f"rs_{handle}",
        "type": "reasoning",
        "summary": [],
        "content": content,
        "encrypted_content": handle if is_complete else None,
    }


def _message_item(handle: str, content: list[dict[str, Any]], status: str) -> dict[str, Any]:
    head = {"id": f"msg_{handle}", "type": "message", "role": "assistant"}
    return {**head, "status": status, "content": content}


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_item(call: Mapping[str, Any], namespaces: Namespaces) -> dict[str, Any]:
    """Return the output item of a call, with the tool's name and namespace for the client."""
    function = call["function"]
    # A tool in a namespace has another name for the model: {"mail__find": ("mail", "find")}.
    namespace, name = namespaces.get(function["name"], (None, function["name"]))
    item = {
        "id": f"fc_{call['id']}",
        "type": "function_call",
        "call_id": call["id"],
        "name": name,
        "arguments": argument_text(function),
        "status": "completed",
    }
    return item if namespace is None else {**item, "namespace": namespace}


def response_body(answer: Answer) -> dict[str, Any]:
    """Return an answer as a `response`."""
    is_cut = answer.finish is Finish.length
    status = "incomplete" if is_cut else "completed"
    return {
        **_response(answer, status),
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": output_items(answer.message, answer.namespaces, status),
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens or 0},
            "output_tokens": answer.sampled_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
        },
    }


def _response(head: AnswerHead, status: str) -> dict[str, Any]:
    """Return a `response` without output, with all fields that OpenAI's clients require."""
    return {
        "id": f"resp_{head.id}",
        "object": "response",
        "created_at": head.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": head.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": None,
    }


class ResponseWriter:
    """Writes an answer as the events of a response: `begin`, then `add` for new text, then `end`.

    `fail` may take the place of any of them.
    """

    def __init__(self, head: AnswerHead, include_usage: bool) -> None:
        """`include_usage` has no effect: a response always ends with its usage."""
        self.head = head
        self._number = 0
        """Sequence number of the next event."""
        self._sent: dict[str, str] = {}
        """Text of each message and reasoning that has begun, by the item's id. Their order is that
        of the output, in which the calls come last."""

    def begin(self) -> Iterator[str]:
        """Yield the events of a response without output."""
        response = _response(self.head, "in_progress")
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def add(self, delta: Mapping[str, str]) -> Iterator[str]:
        """Yield the events of more text, in an item that has begun or in a new one."""
        handle = self.head.id
        for key, text in delta.items():
            if key == "reasoning_content":
                item = _reasoning_item(handle, [], is_complete=False)
                yield from self._text_events(item, text)
            else:
                yield from self._text_events(_message_item(handle, [], "in_progress"), text)

    def end(self, answer: Answer) -> Iterator[str]:
        """Yield the rest of the items, and the complete response."""
        body = response_body(answer)
        # Items that were streamed keep their place. The others follow them in their own order:
        # texts, then calls. So an item's index here is that of `_place`.
        begun = list(self._sent)
        body["output"].sort(
            key=lambda item: begun.index(item["id"]) if item["id"] in begun else len(begun)
        )
        for index, item in enumerate(body["output"]):
            if item["type"] == "function_call":
                yield from self._call_events(item, index)
            else:
                text, earlier = item["content"][0]["text"], self._sent.get(item["id"], "")
                yield from self._text_events(item, unsent(text, earlier))
                yield from self._text_end_events(item)
            yield self._event("response.output_item.done", output_index=index, item=item)
        is_cut = body["status"] == "incomplete"
        yield self._event(f"response.{'incomplete' if is_cut else 'completed'}", response=body)

    def fail(self, error: RequestError) -> Iterator[str]:
        """Yield the events of a response that failed, which may not have begun."""
        if not self._number:
            yield from self.begin()
        failure = {"code": error.code or "server_error", "message": str(error)}
        response = {**_response(self.head, "failed"), "error": failure}
        yield self._event("response.failed", response=response)

    def _text_events(self, item: Mapping[str, Any], text: str) -> Iterator[str]:
        """Yield the events of more text of an item, and first those that begin a new item."""
        is_new = item["id"] not in self._sent
        earlier = self._sent.setdefault(item["id"], "")
        place = self._place(item)
        is_message = item["type"] == "message"
        if is_new:
            empty = {**item, "content": []}
            if is_message:  # in `end` the item is complete, but an item begins in progress
                empty["status"] = "in_progress"
            yield self._event(
                "response.output_item.added", output_index=place["output_index"], item=empty
            )
            if is_message:
                yield self._event("response.content_part.added", **place, part=_output_text(""))
        if text:
            self._sent[item["id"]] = earlier + text
            kind = "output_text" if is_message else "reasoning_text"
            logprobs: dict[str, Any] = {"logprobs": []} if is_message else {}
            yield self._event(f"response.{kind}.delta", **place, delta=text, **logprobs)

    def _text_end_events(self, item: Mapping[str, Any]) -> Iterator[str]:
        """Yield the events that close the text of an item."""
        place, part = self._place(item), item["content"][0]
        if item["type"] == "message":
            yield self._event("response.output_text.done", **place, text=part["text"], logprobs=[])
            yield self._event("response.content_part.done", **place, part=part)
        else:
            yield self._event("response.reasoning_text.done", **place, text=part["text"])

    def _call_events(self, item: Mapping[str, Any], index: int) -> Iterator[str]:
        """Yield the events of a whole call: calls are not streamed in parts."""
        place = {"item_id": item["id"], "output_index": index}
        empty = {**item, "arguments": "", "status": "in_progress"}
        arguments = item["arguments"]
        yield self._event("response.output_item.added", output_index=index, item=empty)
        yield self._event("response.function_call_arguments.delta", **place, delta=arguments)
        yield self._event(
            "response.function_call_arguments.done",
            **place,
            arguments=arguments,
            name=item["name"],
        )

    def _place(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that name the place of an item of text in the output."""
        index = list(self._sent).index(item["id"])
        return {"item_id": item["id"], "output_index": index, "content_index": 0}

    def _event(self, kind: str, /, **fields: Any) -> str:
        number, self._number = self._number, self._number + 1
        return event_text({"type": kind, "sequence_number": number, **fields}, kind)
