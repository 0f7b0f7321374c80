"""A tool's return value or error -> the text that the model reads."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from agenttrain.tools.arguments import InvalidArguments
from agenttrain.types import Done, ToolError, ToolFailure, ToolUnavailable
from agenttrain.utils.threads import with_fixed_text

MAX_RESULT_CHARS = 2_000_000
"""Where a result is cut before anybody counts its tokens: far above any token limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The reply to one call."""

    content: str
    error: ToolError | None = None
    done: bool = False
    """The tool returned `Done`."""


def make_reply(value: object, *, max_chars: int) -> Reply:
    """Make a reply of a tool's return value; a value without a text becomes an error reply."""
    done = isinstance(value, Done)
    try:
        text = result_to_text(
            value.content if isinstance(value, Done) else value, max_chars=max_chars
        )
    except BaseException as error:  # e.g. the value's own __str__ or __iter__ raises
        return error_reply(with_fixed_text(error), max_chars=max_chars)
    return Reply(content=text, done=done)


def error_reply(
    error: BaseException,
    *,
    max_chars: int,
    faults: tuple[type[BaseException], ...] = (ToolUnavailable,),
) -> Reply:
    """Make an error reply: ``Error: KeyError: 'Oslo'``; of a ToolFailure its message alone.

    `error` has a text that is made already, as `agenttrain.utils.threads.attempt` leaves it.
    `faults` are errors of the infrastructure, which no model is to read.
    """
    for_model = isinstance(error, ToolFailure | InvalidArguments)
    name = "" if for_model else type(error).__name__
    text = ": ".join(part for part in ("Error", name, str(error)) if part)
    kind = ToolError.unavailable if isinstance(error, faults) else ToolError.exception
    if isinstance(error, InvalidArguments):
        kind = ToolError.invalid_arguments
    return Reply(content=_bounded(text, max_chars), error=kind)


def has_plain_text(value: object) -> bool:
    """Return True where `make_reply` makes the text of a value without any code of a user's."""
    content = value.content if type(value) is Done else value
    return content is None or type(content) in (str, int, float, bool)


def result_to_text(value: object, *, max_chars: int) -> str:
    """Make the text of a result: a string as it is, anything else as JSON, str() where JSON cannot.

    None is ``null``, a not-a-number ``NaN``, bytes are read as UTF-8, arrays and tensors as
    lists, sets as sorted lists. Text beyond `max_chars` is cut, visibly; lone surrogates, which no
    tokenizer takes, become U+FFFD.

    Example: ``result_text({"city": "Óbidos", "ok": None}, max_chars=99)`` is
    ``{"city": "Óbidos", "ok": null}``.
    """
    if not isinstance(value, str | dict | list | tuple | bool | int | float | None):
        value = _simpler(value)
    if isinstance(value, str):
        return _bounded(str.__str__(value), max_chars)
    chunks: list[str] = []
    size = 0
    try:
        # Piece by piece, so that what is far too long is not built first.
        for chunk in json.JSONEncoder(ensure_ascii=False, default=_simpler).iterencode(value):
            chunks.append(chunk)
            size += len(chunk)
            if size > max_chars:
                break
    except (TypeError, ValueError, RecursionError):
        return _bounded(str(value), max_chars)
    return _bounded("".join(chunks), max_chars)


def _simpler(value: Any) -> Any:
    """Return a JSON value in place of one that JSON does not have; a string as the last resort."""
    if isinstance(value, bytes | bytearray):
        return value.decode("utf-8", "replace")
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)


def _bounded(text: str, max_chars: int) -> str:
    if len(text) > max_chars:
        text = f"{text[:max_chars]}… [cut at {max_chars} characters]"
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
