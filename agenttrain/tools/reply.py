"""Make the text that the model reads from a tool's return value or error."""

from __future__ import annotations

import base64
import dataclasses
import enum
import json
from collections import UserString
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, MappingView, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from types import SimpleNamespace
from typing import Any

from agenttrain.tools.arguments import InvalidArguments
from agenttrain.types import Done, Image, ToolError, ToolFailure, ToolUnavailable, TurnReward
from agenttrain.utils.content import text_of
from agenttrain.utils.image_files import BadImage, is_image, read_image
from agenttrain.utils.redaction import hide_secrets
from agenttrain.utils.threads import with_fixed_text

MAX_RESULT_CHARS = 2_000_000
"""Characters at which a result is cut before its tokens are counted; far above any token limit."""
REMEDY = "return text, numbers, or lists and dicts of them"
MAX_FORMS = 8
"""Maximum number of steps from a value to one of a JSON type, each by `plain_form`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The reply to one call."""

    content: str
    """Text that the model reads."""
    error: ToolError | None = None
    """The kind of error that `content` reports; None: the call succeeded."""
    done: bool = False
    """The tool returned `Done`."""
    reward: float | None = None
    """Value of the `TurnReward` that the tool returned."""
    parts: tuple[str | Image, ...] = ()
    """Texts and images of a reply with images, of which `content` has the texts."""


def make_reply(value: Any, *, max_chars: int = MAX_RESULT_CHARS) -> Reply:
    """Make a reply of a tool's return value; a value without a text becomes an error reply."""
    reward: float | None = None
    try:
        if isinstance(value, TurnReward):
            reward, value = float(value.value), value.content
        done = isinstance(value, Done)
        value = value.content if isinstance(value, Done) else value
        if parts := _with_images(value, max_chars):
            return Reply(content=text_of(parts), done=done, reward=reward, parts=parts)
        text = result_to_text(value, max_chars=max_chars)
    except BaseException as error:  # the value's own __str__ or __iter__ may raise anything
        return error_reply(with_fixed_text(error), max_chars=max_chars)
    return Reply(content=text, done=done, reward=reward)


def _with_images(value: Any, max_chars: int) -> tuple[str | Image, ...]:
    """Return the texts and images of a value that is an image or a list with one; else ().

    Raises ToolFailure for an image that cannot be read.
    """
    values = value if isinstance(value, list | tuple) else (value,)
    if isinstance(value, str) or not any(map(is_image, values)):
        return ()
    try:
        return tuple(
            read_image(item) if is_image(item) else result_to_text(item, max_chars=max_chars)
            for item in values
        )
    except BadImage as error:
        raise ToolFailure(f"the tool returned an image that cannot be read: {error}") from error


def reply_to_json(reply: Reply) -> dict[str, Any]:
    """Return a reply as JSON data; an image is the base64 text of its file, in a list."""
    parts = [
        part if isinstance(part, str) else [base64.b64encode(part.data).decode()]
        for part in reply.parts
    ]
    fields = {name: getattr(reply, name) for name in ("content", "error", "done", "reward")}
    return {**fields, "parts": parts}


def reply_from_json(data: Any) -> Reply:
    """Return the reply of `reply_to_json`'s data. Raises KeyError, TypeError or ValueError."""
    error, parts = data["error"], data["parts"]
    return Reply(
        content=str(data["content"]),
        error=None if error is None else ToolError(error),
        done=data["done"] is True,
        reward=data["reward"],
        parts=tuple(
            part if isinstance(part, str) else read_image(base64.b64decode(part[0]))
            for part in parts
        ),
    )


def error_reply(
    error: BaseException,
    *,
    max_chars: int = MAX_RESULT_CHARS,
    faults: tuple[type[BaseException], ...] = (ToolUnavailable,),
) -> Reply:
    """Make an error reply: ``Error: KeyError: 'Oslo'``, or only the message of a ToolFailure.

    The text of a ToolFailure, or of refused arguments, is for the model and stays as it is. Other
    exceptions are written for people: their secrets are hidden here, before the model reads them,
    so that token ids, messages and records agree.

    `error` comes from `agenttrain.utils.threads.attempt`, which has already called a `__str__` of
    the user's and stored its text: none runs here. `faults` are types of infrastructure errors;
    their reply is marked `unavailable`, and no model reads it.
    """
    is_for_model = isinstance(error, ToolFailure | InvalidArguments)
    name = "" if is_for_model else type(error).__name__
    message = str(error) if is_for_model else hide_secrets(str(error))
    text = ": ".join(part for part in ("Error", name, message) if part)
    kind = ToolError.unavailable if isinstance(error, faults) else ToolError.exception
    if isinstance(error, InvalidArguments):
        kind = ToolError.invalid_arguments
    return Reply(content=_cut_text(text, max_chars), error=kind)


def result_to_text(value: object, *, max_chars: int = MAX_RESULT_CHARS) -> str:
    """Make the text of a result: strings unchanged, other values as JSON of their `plain_form`.

    None becomes ``null`` and a not-a-number ``NaN``. Keys of mappings become text: ``{(1, 2): 3}``
    is ``{"[1, 2]": 3}``. Text beyond `max_chars` is cut with a visible marker. Lone surrogates,
    which tokenizers refuse, become U+FFFD. Raises ToolFailure that names a type without a plain
    form.

    Example: ``result_to_text({"city": "Óbidos", "ok": None}, max_chars=99)`` is
    ``{"city": "Óbidos", "ok": null}``.
    """
    value = _in_json_type(value)  # a date becomes text here; parts of a list only in `_json_text`
    if isinstance(value, str):
        # Not str(value), which would run the `__str__` of a user's subclass.
        return _cut_text(str.__str__(value), max_chars)
    try:
        return _json_text(value, max_chars)
    except TypeError:  # a key that JSON lacks, such as a tuple: the encoder converts only values
        return _json_text(_with_plain_keys(value), max_chars)


def _json_text(value: Any, max_chars: int) -> str:
    """Return a value as JSON text, cut at `max_chars`.

    Raises ToolFailure for a part without a plain form, for two keys with the same text and for too
    deep a value; TypeError for a key that JSON lacks, such as a tuple.
    """

    def default(part: Any) -> Any:
        """Return the plain form of a part that JSON lacks; the encoder calls this."""
        form = plain_form(part)
        _check_keys(form, max_chars)
        return form

    chunks: list[str] = []
    size = 0
    try:
        _check_keys(value, max_chars)  # the encoder would write both of two keys of the same text
        # In chunks, so that a text that is far too long is never built.
        encoder = json.JSONEncoder(ensure_ascii=False, default=default)
        for chunk in encoder.iterencode(value):
            chunks.append(chunk)
            size += len(chunk)
            if size > max_chars:
                break
    except RecursionError as error:
        raise ToolFailure("the tool returned a value that is nested too deeply") from error
    return _cut_text("".join(chunks), max_chars)


def plain_form(value: Any) -> Any:
    """Replace a value that JSON does not have by a simpler one, which may again need a plain form.

    Its parts stay as they are: the JSON encoder calls this for each of them later. Dates, paths,
    decimals and other values whose type has a `__str__` become text. Sequences, sets and mappings,
    which are finite, become lists and dicts of their parts; an iterator may have no end. Raises
    ToolFailure that names the type of any other value, and for an image, whose text says nothing.

    Examples: ``date(2024, 5, 1)`` -> ``"2024-05-01"``, ``deque([Path("a")])`` -> ``[Path("a")]``.
    """
    kind, value_type = type(value).__name__, type(value)
    if is_image(value):
        raise ToolFailure(
            f"the tool returned a {kind} with an image inside of other values; "
            "images are returned alone, or in a list beside texts"
        )
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode("utf-8", "replace")
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if not isinstance(value, type):  # a class has the attributes of its instances, but no values
        # Ask the type: a mock has every attribute, and each would return yet another mock.
        if hasattr(value_type, "model_dump"):  # of pydantic
            return value.model_dump(mode="json")
        if dataclasses.is_dataclass(value):
            return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if hasattr(value_type, "__attrs_attrs__"):
            return {field.name: getattr(value, field.name) for field in value.__attrs_attrs__}
        if hasattr(value_type, "tolist"):  # an array or a tensor; with to_dict a pandas column
            return _column(value) if hasattr(value_type, "to_dict") else value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    # The type has a `__str__` of its own: the default one shows only an address.
    # A complex number has one only in its `__repr__`.
    has_text = value_type.__str__ is not object.__str__ or isinstance(value, complex)
    # A database's row or a table. Before the sequences: as one of those a row would lose its keys.
    if hasattr(value_type, "keys") and not has_text and not isinstance(value, type):
        return {key: value[key] for key in value.keys()}  # noqa: SIM118 - it is no mapping
    # Not every MappingView can be iterated.
    is_finite = isinstance(value, Sequence | Set | MappingView) and isinstance(value, Iterable)
    # A UserString is a Sequence of characters, but a text.
    if is_finite and not isinstance(value, UserString):
        return list(islice(value, MAX_RESULT_CHARS))  # range(10**12) fits no memory
    if has_text:
        return str(value)
    if isinstance(value, SimpleNamespace):
        return vars(value)
    remedy = REMEDY
    if isinstance(value, Iterator | AsyncIterator):
        remedy = "it may have no end: return list(…) of it"
    raise ToolFailure(f"the tool returned a {kind}, which has no plain form; {remedy}")


def _column(value: Any) -> Any:
    """Return a column of a table (pandas) as a list if its labels are 0, 1, …; else as a dict.

    Raises ToolFailure for a label that stands twice.
    """
    labels = value.index.tolist()
    if labels == list(range(len(labels))):
        return value.tolist()
    by_label = value.to_dict()
    if len(by_label) < len(labels):
        raise ToolFailure(
            f"the tool returned a {type(value).__name__} with a label that stands twice; return "
            "its values with .tolist(), or pairs"
        )
    return by_label


def _in_json_type(value: Any) -> Any:
    """Return a value in a type that JSON has; only its top level is converted.

    Several steps may be needed: an enum's value may be a date, whose plain form is text. Raises
    ToolFailure after MAX_FORMS steps, as for a mock, whose every method returns another mock.
    """
    for _ in range(MAX_FORMS):
        if isinstance(value, str | dict | list | tuple | bool | int | float | None):
            return value
        value = plain_form(value)
    kind = type(value).__name__
    raise ToolFailure(f"the tool returned a {kind}, which has no plain form; {REMEDY}")


def _with_plain_keys(value: Any) -> Any:
    """Return a value in which the keys of all mappings are those of JSON. Raises ToolFailure."""
    value = _in_json_type(value)
    if isinstance(value, list | tuple):
        return [_with_plain_keys(item) for item in value]
    if not isinstance(value, dict):
        return value
    plain = {_plain_key(key): _with_plain_keys(item) for key, item in value.items()}
    if len(plain) < len(value):
        raise ToolFailure(SAME_KEYS)
    return plain


SAME_KEYS = "the tool returned a mapping of which two keys have the same text"


def _check_keys(value: Any, limit: int) -> None:
    """Raise ToolFailure if two keys of a mapping in `value` become the same text.

    Example: ``{1: "a", "1": "b"}``. Only the first `limit` parts are checked: each takes at least
    a character of the text, which is cut there.
    """
    to_check, checked = [value], 0
    while to_check and checked < limit:
        part = to_check.pop()
        checked += 1
        if isinstance(part, dict):
            if not all(isinstance(key, str) for key in part):
                texts = {_key_text(key) for key in part}
                if len(texts) < len(part):
                    raise ToolFailure(SAME_KEYS)
            to_check += islice(part.values(), limit)
        elif isinstance(part, list | tuple):
            to_check += islice(part, limit)


def _key_text(key: Any) -> Any:
    """Return the JSON text of a key; a key of a type that JSON lacks is returned as it is."""
    is_plain = not isinstance(key, str) and isinstance(key, bool | int | float | None)
    return json.dumps(key) if is_plain else key


def _plain_key(key: Any) -> str | int | float | None:
    """Return a key in a type that JSON has, else its text."""
    if isinstance(key, str | int | float | None):
        return key
    return result_to_text(key)


def _cut_text(text: str, max_chars: int) -> str:
    """Cut a text to `max_chars`, and replace lone surrogates."""
    if len(text) > max_chars:
        text = f"{text[:max_chars]}… [cut at {max_chars} characters]"
    try:
        text.encode()
    except UnicodeEncodeError:  # UTF-16 decodes a pair of surrogates to its character
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
