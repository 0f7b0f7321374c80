"""OpenAI's chat completions: requests as this package's messages, answers in OpenAI's shape.

Fields that would change an answer are followed or refused; `wire/fields.py` names the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, cast

from pydantic import AfterValidator, BaseModel, Field, ValidationError
from pydantic_core import PydanticCustomError

from agenttrain.chat.grammar import ANY_FORM, AnswerForm
from agenttrain.chat.omissions import ALIASES, ROLES, role_of
from agenttrain.chat.wire.events import event_text, unsent
from agenttrain.chat.wire.fields import OPENAI, SHAPE, field_problem, quote, unfollowed_fields
from agenttrain.chat.wire.normal import Answer, AnswerHead, Question, call_message
from agenttrain.engines.config import LEAST_TEMPERATURE
from agenttrain.types import Finish, Message
from agenttrain.utils.json_lines import read_json
from agenttrain.utils.messages import REASONING_KEYS, call_arguments

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
"""Fields that change the distribution sampled from, and that `ChatRequest` reads."""
GREATEST_TOP_K = 2**31 - 1
"""More tokens than any vocabulary has."""
API_FIELDS = ("type", "strict", "defer_loading", "allowed_callers", "output_schema")
"""Fields of a function that say how the provider treats it."""
DONE = "data: [DONE]\n\n"
"""Last event of a stream."""
CHUNK = "chat.completion.chunk"


class RequestError(Exception):
    """A request that is answered with an error of an HTTP `status`.

    `param` is the field at fault, `code` OpenAI's word for the kind of error.
    """

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        # The message may repeat a lone surrogate of the request, which could not be sent.
        super().__init__(message.encode(errors="replace").decode())
        self.param = None if param is None else param.encode(errors="replace").decode()
        self.code, self.status = code, status

    def body(self) -> dict[str, Any]:
        """Return the answer's body in OpenAI's shape."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def _not_too_cold(value: float) -> float:
    """Return a temperature; refuse one so small that logits divided by it overflow."""
    if 0 < value < LEAST_TEMPERATURE:
        raise PydanticCustomError(
            "too_cold",
            "logits divided by so little overflow; take {least} or more, or 0",
            {"least": LEAST_TEMPERATURE},
        )
    return value


Temperature = Annotated[float, AfterValidator(_not_too_cold)]


class SamplingFields(BaseModel):
    """The fields that change the distribution sampled from."""

    temperature: Temperature | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=GREATEST_TOP_K)
    min_p: float | None = Field(default=None, ge=0, le=1)


class ChatRequest(SamplingFields):
    """The supported fields of a request."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool = False
    """As in vLLM: the answer holds `prompt_token_ids`, and its choice `token_ids`."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end the answer, which does not hold them."""
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        return tuple(text for text in texts if text)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Schemas of the tools that may be called; none with `tool_choice="none"`."""
        if self.tool_choice == "none":
            return []
        schemas = []
        for index, tool in enumerate(self.tools or ()):
            function = tool.get("function")
            if tool.get("type") != "function" or not isinstance(function, Mapping):
                raise RequestError(
                    f"tools[{index}]: only tools of the type function are supported",
                    param=f"tools[{index}].type",
                )
            schemas.append(tool_schema(function, f"tools[{index}].function"))
        return schemas


def tool_schema(function: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a function of a request as a schema for chat templates. Raises RequestError."""
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(function.get("name"), str) or not isinstance(parameters, Mapping):
        raise RequestError(f"{where}: needs a name, and a JSON schema as parameters", param=where)
    # `type`, `strict` and the like are the API's: chat templates do not know them.
    fields = {k: v for k, v in function.items() if k not in API_FIELDS and v is not None}
    return {"type": "function", "function": {**fields, "parameters": parameters}}


def read_object(body: bytes) -> dict[str, Any]:
    """Parse a body that has to be a JSON object; raises RequestError."""
    try:
        data = read_json(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise RequestError("the body is no JSON object")
    return data


def parse_request(body: bytes, roles: Mapping[str, str] = MappingProxyType({})) -> Question:
    """Read the body of a request to `agenttrain serve`; raises RequestError as `read_served`.

    It is for programs that check a body without a server.
    """
    return read_served(read_object(body), roles)


def read_served(data: Mapping[str, Any], roles: Mapping[str, str]) -> Question:
    """Return the body of a request to `agenttrain serve` as a Question.

    `roles` are those of `chat_template.roles`. Raises RequestError for the first field that is
    wrong, or that `serve` would not follow.
    """
    for name, value in unfollowed_fields(data, ChatRequest.model_fields, OPENAI).items():
        raise _refused_field(name, value)  # the first of them
    if data.get("tool_choice") not in (None, "auto", "none"):
        raise forced_call_error("tool_choice", data["tool_choice"])
    request = validate(ChatRequest, data)
    sampling = {name: value for name in SAMPLING if (value := getattr(request, name)) is not None}
    return _make_question(request, read_messages(request, roles), ANY_FORM, sampling)


def forced_call_error(param: str, value: object) -> RequestError:
    """Return `serve`'s error for a demand on the form of the answer."""
    return RequestError(
        f"{param}={quote(value)}: only auto and none are supported, because calls are not forced; "
        "leave it out",
        param=param,
        code="unsupported_value",
    )


def read_question(
    data: Mapping[str, Any], roles: Mapping[str, str] = MappingProxyType({})
) -> Question:
    """Return a request's body as a Question; raises RequestError.

    `roles` are those of `chat_template.roles`. The question's `sampling` has the sampling
    parameters and, beside them, the fields that would change the answer but are not followed: the
    endpoint refuses or overrides both.
    """
    answer_form = _read_answer_form(data)  # of tool_choice and response_format
    # Not validated with the other fields: those two were checked already, and the sampling
    # parameters are not used, whatever they are.
    read_here = {*SAMPLING, "tool_choice", "response_format"}
    fields = {name: value for name, value in data.items() if name not in read_here}
    not_followed = unfollowed_fields(fields, ChatRequest.model_fields, OPENAI)
    # Fields such as `n` ask for another kind of answer than one message: that cannot be given.
    for name in SHAPE:
        if name in not_followed:
            raise _refused_field(name, not_followed[name])
    # "none" is no demand on the answer: it hides the tools, which `ChatRequest.schemas` does.
    if data.get("tool_choice") == "none":
        fields["tool_choice"] = "none"
    request = validate(ChatRequest, fields)
    messages = read_messages(request, roles, text_arguments=True)
    sampling = {name: data[name] for name in SAMPLING if data.get(name) is not None}
    question = _make_question(request, messages, answer_form, sampling | not_followed)
    check_demanded_call(answer_form, question.schemas)
    return question


def _make_question(
    request: ChatRequest, messages: list[Message], form: AnswerForm, sampling: dict[str, Any]
) -> Question:
    """Return a validated request as a Question. `messages` are those of `read_messages`."""
    return Question(
        messages=messages,
        schemas=request.schemas,
        form=form,
        model=request.model,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        sampling=sampling,
        stops=request.stops,
        stream=request.stream,
        include_usage=bool((request.stream_options or {}).get("include_usage")),
        return_token_ids=request.return_token_ids,
    )


def _refused_field(name: str, value: object) -> RequestError:
    """Return the error for a field that would change the answer and is not supported."""
    names = {*OPENAI, *ChatRequest.model_fields}
    return RequestError(field_problem(name, value, names), param=name, code="unsupported_value")


def _read_answer_form(data: Mapping[str, Any]) -> AnswerForm:
    """Return the form that a request demands of the answer; raises RequestError."""
    tool = _chosen_tool(data.get("tool_choice"))
    schema = demanded_schema(data.get("response_format"), "response_format")
    return AnswerForm(
        call=data.get("tool_choice") == "required" or tool is not None,
        tool=tool,
        schema=None if schema is None else json.dumps(schema),
    )


def _chosen_tool(choice: Any) -> str | None:
    """Return the tool that `tool_choice` names, if it names one; raises RequestError."""
    if choice in (None, "auto", "none", "required"):
        return None
    function = choice.get("function") if isinstance(choice, Mapping) else None
    tool = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(tool, str) or choice.get("type") != "function":
        raise RequestError(
            f"tool_choice={quote(choice)}: expected auto, none, required, or "
            '{"type": "function", "function": {"name": …}}',
            param="tool_choice",
            code="unsupported_value",
        )
    return tool


def demanded_schema(response_format: Any, param: str) -> Mapping[str, Any] | None:
    """Return the JSON schema that a request demands of the answer, or None for any text.

    Example: for ``{"type": "json_object"}`` it is ``{"type": "object"}``. `param` is the field's
    name in errors. Raises RequestError.
    """
    is_mapping = isinstance(response_format, Mapping)
    # The bare text "text" is accepted too. Any other value that is no mapping is refused.
    kind = response_format.get("type") if is_mapping else response_format
    if kind is None or kind == "text":
        return None
    schema: Any = None
    if is_mapping and kind == "json_object":
        schema = {"type": "object"}
    elif is_mapping and kind == "json_schema":
        named_schema = response_format.get("json_schema")
        schema = named_schema.get("schema") if isinstance(named_schema, Mapping) else None
    if not isinstance(schema, Mapping):
        raise RequestError(
            f"{param}={quote(response_format)}: expected the type text, json_object, or "
            "json_schema with a schema",
            param=param,
            code="unsupported_value",
        )
    return cast(Mapping[str, Any], schema)


def check_demanded_call(form: AnswerForm, schemas: Sequence[Mapping[str, Any]]) -> None:
    """Raise RequestError if a request demands a call of a tool that it does not have."""
    names = [schema["function"]["name"] for schema in schemas]
    if form.call and (not names or form.tool not in (None, *names)):
        missing = "a tool" if form.tool is None else f"the tool {form.tool}"
        raise RequestError(
            f"tool_choice: demands a call of {missing}, and tools are {names}; add it to them",
            param="tool_choice",
        )


M = TypeVar("M", bound=BaseModel)


def validate(kind: type[M], data: Mapping[str, Any]) -> M:
    """Return `data` as a request of this kind; raises RequestError for the first bad field."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        param = ".".join(str(part) for part in first["loc"])
        raise RequestError(f"{param}: {first['msg']}", param=param) from error


def read_messages(
    request: ChatRequest, roles: Mapping[str, str], *, text_arguments: bool = False
) -> list[Message]:
    """Return a request's messages as chat templates take them; raises RequestError.

    `roles` are those of `chat_template.roles`. Other names of roles become the usual ones.
    `developer` becomes `system` with any template, because clients send either. Text parts are
    joined, arguments are decoded, and a tool's message gets the name of its call. Arguments that
    are no JSON object are an error, unless `text_arguments` keeps their text.
    """
    messages: list[Message] = []
    tool_names: dict[str, str] = {}  # by the id of the call
    for index, item in enumerate(request.messages):
        where = f"messages[{index}]"
        role = read_role(str(item.get("role")), roles)
        if role is None:
            expected = ", ".join(dict.fromkeys((*ROLES, *roles, *ALIASES)))
            raise RequestError(
                f"{where}.role={item.get('role')}: expected one of {expected}",
                param=f"{where}.role",
            )
        for key in ("function_call", "audio"):
            if item.get(key) is not None:
                raise RequestError(
                    f"{where}.{key}: is not supported here; write calls as tool_calls, and text as "
                    "content",
                    param=f"{where}.{key}",
                    code="unsupported_value",
                )
        message: Message = {"role": role, "content": _join_text(item.get("content"), where)}
        if role == "assistant":
            message |= _assistant_fields(item, message["content"], where, text_arguments)
            calls = message.get("tool_calls", ())
            tool_names |= {call["id"]: call["function"]["name"] for call in calls}
        elif role == "tool":
            call_id = item.get("tool_call_id")
            if not isinstance(call_id, str) or call_id not in tool_names:
                raise RequestError(
                    f"{where}.tool_call_id={call_id}: no assistant message before it has that call",
                    param=f"{where}.tool_call_id",
                )
            message |= {"tool_call_id": call_id, "name": tool_names[call_id]}
        messages.append(message)
    if messages[-1]["role"] == "assistant":
        raise RequestError(
            "messages: the last one is the assistant's, and answers are not continued; end with a "
            "message of the user or a tool",
            param="messages",
        )
    return messages


def read_role(name: str, roles: Mapping[str, str]) -> str | None:
    """Return the usual role that a name stands for; None if it is unknown.

    A name that `roles` maps to an unusual role stays as it is: rendering maps it.
    """
    if roles.get(name) in ROLES:
        return roles[name]
    return name if name in ROLES or name in roles else role_of(name)


def _assistant_fields(
    item: Mapping[str, Any], content: str, where: str, text_arguments: bool
) -> Message:
    """Return the fields that only an assistant message has: reasoning and calls.

    `content` is the message's text so far. If it is empty, a refusal takes its place.
    """
    fields: Message = {}
    if not content and isinstance(item.get("refusal"), str):
        fields["content"] = item["refusal"]
    reasonings = [item[key] for key in REASONING_KEYS if isinstance(item.get(key), str)]
    if reasoning := next(filter(None, reasonings), ""):
        fields[REASONING_KEYS[0]] = reasoning
    if item.get("tool_calls"):
        if not isinstance(item["tool_calls"], list):
            raise RequestError(f"{where}.tool_calls: expected a list", param=f"{where}.tool_calls")
        fields["tool_calls"] = [
            read_call(call, where, text_arguments) for call in item["tool_calls"]
        ]
    return fields


def _join_text(content: Any, where: str) -> str:
    """Return a content's text; a list's text parts are joined."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(
                f"{where}.content: holds a part of type {kind}; only text is supported",
                param=f"{where}.content",
            )
    return "".join(part["text"] for part in parts)


def read_call(call: Any, where: str, text_arguments: bool) -> dict[str, Any]:
    """Return a call of an assistant message with its arguments decoded. Raises RequestError.

    With `text_arguments`, arguments that are no JSON object are kept as text.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(
            f"{where}.tool_calls: each needs an id and a function with a name",
            param=f"{where}.tool_calls",
        )
    arguments = function.get("arguments")
    try:
        decoded = call_arguments(arguments, function["name"])
    except ValueError as error:
        if text_arguments and isinstance(arguments, str):
            return call_message(str(call.get("id")), function["name"], {}, arguments)
        raise RequestError(
            f"{where}.tool_calls: {error}",
            param=f"{where}.tool_calls",
        ) from error
    return call_message(str(call.get("id")), function["name"], decoded)


def finish_reason(finish: Finish, message: Mapping[str, Any]) -> str:
    """Return OpenAI's reason for the end of an answer."""
    if finish is Finish.length:
        return "length"
    return "tool_calls" if message.get("tool_calls") else "stop"


def completion_body(answer: Answer) -> dict[str, Any]:
    """Return an answer as a `chat.completion`."""
    message = _openai_message(answer.message)
    reason = finish_reason(answer.finish, message)
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
    body = {**_head(answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}
    return _with_token_ids(body, answer)


class CompletionWriter:
    """Writes an answer as `chat.completion.chunk` objects, and ``[DONE]``.

    `begin` comes first, then `add` for new text, then `end`, or `fail` in place of any of them.
    Each chunk has the fields of the AnswerHead: id, time and model. An Answer is one too, with the
    same values.
    """

    def __init__(self, head: AnswerHead, include_usage: bool) -> None:
        self.head, self.include_usage = head, include_usage
        self._sent = {"reasoning_content": "", "content": ""}
        """Text that was sent so far, by field."""

    def begin(self) -> Iterator[str]:
        """Yield the chunk with the role."""
        yield event_text(chunk(self.head, {"role": "assistant", "content": ""}))

    def add(self, delta: Mapping[str, str]) -> Iterator[str]:
        """Yield a chunk with more text."""
        for key, text in delta.items():
            self._sent[key] += text
        yield event_text(chunk(self.head, delta))

    def end(self, answer: Answer) -> Iterator[str]:
        """Yield the rest of the text, the calls, the reason of the end, and the usage."""
        message = _openai_message(answer.message)
        for key, earlier in self._sent.items():
            if text := unsent(message.get(key) or "", earlier):
                yield event_text(chunk(answer, {key: text}))
        for index, call in enumerate(message.get("tool_calls", ())):
            yield event_text(chunk(answer, {"tool_calls": [{"index": index, **call}]}))
        reason = finish_reason(answer.finish, message)
        # The token ids, if the client asked for them, come once and whole, with the reason.
        yield event_text(_with_token_ids(chunk(answer, {}, reason), answer))
        if self.include_usage:
            yield event_text({**_head(answer, CHUNK), "choices": [], "usage": _usage(answer)})
        yield DONE

    def fail(self, error: RequestError) -> Iterator[str]:
        """Yield an error, and the end of the stream."""
        yield event_text(error.body())
        yield DONE


def chunk(head: AnswerHead, delta: Mapping[str, Any], reason: str | None = None) -> dict[str, Any]:
    """Return a `chat.completion.chunk`."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
    return {**_head(head, CHUNK), "choices": [choice]}


def _with_token_ids(body: dict[str, Any], answer: Answer) -> dict[str, Any]:
    """Add the ids of prompt and completion, if the client asked for them (`return_token_ids`)."""
    if answer.token_ids is not None:
        prompt_ids, completion_ids = answer.token_ids
        body["prompt_token_ids"] = list(prompt_ids)
        body["choices"][0]["token_ids"] = list(completion_ids)
    return body


def _openai_message(issued: Message) -> dict[str, Any]:
    """Return an issued message as OpenAI's assistant message."""
    message: dict[str, Any] = {"role": "assistant", "content": issued["content"]}
    if "reasoning_content" in issued:
        message["reasoning_content"] = issued["reasoning_content"]
    if "tool_calls" in issued:
        message["content"] = issued["content"] or None
        message["tool_calls"] = []
        for call in issued["tool_calls"]:
            text = argument_text(call["function"])
            function = {"name": call["function"]["name"], "arguments": text}
            message["tool_calls"].append({**call, "function": function})
    return message


def argument_text(function: Mapping[str, Any]) -> str:
    """Return a call's arguments as the client gets them: JSON, or the text of a malformed call."""
    text: str | None = function.get("text")
    return json.dumps(function["arguments"], ensure_ascii=False) if text is None else text


def _head(head: AnswerHead, kind: str) -> dict[str, Any]:
    name = f"chatcmpl-{head.id}"
    return {"id": name, "object": kind, "created": head.created, "model": head.model}


def _usage(answer: Answer) -> dict[str, Any]:
    """Return the numbers of tokens in OpenAI's form."""
    usage: dict[str, Any] = {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.sampled_tokens,
        "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
    }
    if answer.cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": answer.cached_tokens}
    return usage
