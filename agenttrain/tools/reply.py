"""Make the text that the model reads from a tool's return value or error."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from agenttrain.tools.arguments import InvalidArguments
from agenttrain.types import Done, ToolError, ToolFailure, ToolUnavailable, TurnReward
from agenttrain.utils.threads import with_fixed_text

MAX_RESULT_CHARS = 2_000_000
"""Characters at which a result is cut before its tokens are counted; far above any token limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The reply to one call."""

    content: str
    error: ToolError | None = None
    done: bool = False
    """The tool returned `Done`."""
    reward: float | None = None
    """Value of the `TurnReward` that the tool returned."""


def make_reply(value: Any, *, max_chars: int) -> Reply:
    """Make a reply of a tool's return value; a value without a text becomes an error reply."""
    reward: float | None = None
    try:
        if isinstance(value, TurnReward):
            reward, value = float(value.value), value.content
        done = isinstance(value, Done)
        text = result_to_text(
            value.content if isinstance(value, Done) else value, max_chars=max_chars
        )
    except BaseException as error:  # e.g. the value's own __str__ or __iter__ raises
        return error_reply(with_fixed_text(error), max_chars=max_chars)
    return Reply(content=text, done=done, reward=reward)


def error_reply(
    error: BaseException,
    *,
    max_chars: int,
    faults: tuple[type[BaseException], ...] = (ToolUnavailable,),
) -> Reply:
    """Make an error reply: ``Error: KeyError: 'Oslo'``, or only the message of a ToolFailure.

    The text of `error` must be made already, as `agenttrain.utils.threads.attempt` does. `faults`
    are types of infrastructure errors, which no model should read.
    """
    for_model = isinstance(error, ToolFailure | InvalidArguments)
    name = "" if for_model else type(error).__name__
    text = ": ".join(part for part in ("Error", name, str(error)) if part)
    kind = ToolError.unavailable if isinstance(error, faults) else ToolError.exception
    if isinstance(error, InvalidArguments):
        kind = ToolError.invalid_arguments
    return Reply(content=_bounded(text, max_chars), error=kind)


def result_to_text(value: object, *, max_chars: int) -> str:
    """Make the text of a result: strings unchanged, other values as JSON, else by str().

    None becomes ``null`` and a not-a-number ``NaN``. Bytes are decoded as UTF-8, arrays and tensors
    become lists, sets sorted lists. Text beyond `max_chars` is cut with a visible marker. Lone
    surrogates, which tokenizers refuse, become U+FFFD.

    Example: ``result_to_text({"city": "Óbidos", "ok": None}, max_chars=99)`` is
    ``{"city": "Óbidos", "ok": null}``.
    """
    if not isinstance(value, str | dict | list | tuple | bool | int | float | None):
        value = _simpler(value)
    if isinstance(value, str):
        return _bounded(str.__str__(value), max_chars)
    chunks: list[str] = []
    size = 0
    try:
        # Piece by piece, so that a text that is far too long is never built.
        for chunk in json.JSONEncoder(ensure_ascii=False, default=_simpler).iterencode(value):
            chunks.append(chunk)
            size += len(chunk)
            if size > max_chars:
                break
    except (TypeError, ValueError, RecursionError):
        return _bounded(str(value), max_chars)
    return _bounded("".join(chunks), max_chars)


def _simpler(value: Any) -> Any:
    """Replace a value that JSON does not have by one that it has, at worst by a string."""
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
    """Cut a text to `max_chars`, and replace lone surrogates."""
    if len(text) > max_chars:
        text = f"{text[:max_chars]}… [cut at {max_chars} characters]"
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
