"""JSON as a model may write it: strict, of bounded depth, with a reason where it is wrong."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

MAX_DEPTH = 64
"""Nesting of a call's arguments."""
UNTERMINATED = "Unterminated string"
_BLANK = re.compile(r"[ \t\r\n]*")
_PYTHON = {"True": "true", "False": "false", "None": "null"}


def skip_blank(text: str, start: int = 0) -> int:
    """Position of the first character that is not JSON's white space."""
    if text[start : start + 1] not in " \t\r\n":
        return start
    blank = _BLANK.match(text, start)
    return blank.end() if blank else start


class Json(NamedTuple):
    """A value read from a text, or why there is none."""

    value: Any = None
    end: int = 0
    """Position after the value; 0 beside a problem."""
    problem: str | None = None
    cut: bool = False
    """The problem is that the text ends inside the value."""


def read_json(text: str, start: int = 0) -> Json:
    """The JSON value at `start`.

    Strict JSON: what other parsers would guess differently at is a problem (keys without quotes,
    Python's literals, trailing commas, a key given twice, NaN).
    """
    try:
        value, end = _DECODER.raw_decode(text, skip_blank(text, start))
    except json.JSONDecodeError as error:
        # Python's message names the string's start, which the position already does.
        problem = error.msg.replace(" starting at", "")
        for python, write in _PYTHON.items():
            if text.startswith(python, error.pos):
                problem += f" (write {write}, not {python})"
        line = text.count("\n", start, error.pos) + 1
        column = error.pos - max(text.rfind("\n", start, error.pos), start - 1)
        began = skip_blank(text, start) < error.pos
        cut = UNTERMINATED in error.msg or (began and skip_blank(text, error.pos) == len(text))
        return Json(problem=f"invalid JSON at line {line} column {column}: {problem}", cut=cut)
    except RecursionError:
        return Json(problem="invalid JSON: nested too deeply")
    except ValueError as error:
        return Json(problem=f"invalid JSON: {error}")
    return Json(value, end)


class Item(NamedTuple):
    """One item of an array that may be wrong elsewhere."""

    text: str
    value: Any = None
    problem: str | None = None
    name: str = ""
    """The name in the head of an item that cannot be read."""


Read = Callable[[str, int], Json]


def read_items(
    text: str, start: int, key: str, read: Read = read_json, *, limit: int | None = None
) -> tuple[list[Item], int]:
    """(items, end) of the array of objects that is open at `start`, behind its bracket.

    An item that cannot be read is one with a problem: the next begins at a comma and an object with
    `key` first. The end is the text's where the array is not closed. The rest after `limit` items
    is one item.
    """
    items: list[Item] = []
    at = skip_blank(text, start)
    following = re.compile(rf",\s*+(?=\{{\s*+{re.escape(json.dumps(key))}\s*+:)")
    while not text.startswith("]", at):
        if limit is not None and len(items) >= limit:
            return [*items, Item(text[at:], problem="there are too many items")], len(text)
        value, end, problem, cut = read(text, at)
        if problem is not None:
            resume = None if cut else following.search(text, at)
            end = resume.start() if resume else len(text)
            items.append(Item(text[at:end], problem=problem, name=written_name(text[at:end], key)))
        else:
            items.append(Item(text[at:end], value))
        at = skip_blank(text, end)
        if problem is not None and at == len(text):
            return items, at
        if text.startswith(",", at):
            at = skip_blank(text, at + 1)
        elif not text.startswith("]", at):
            return [*items, Item(text[at:], problem="the array of calls is not closed")], len(text)
    return items, at + 1


_OTHER = r"""["']?+\w++["']?+\s*+:\s*+(?:"[^"\\]*+"|'[^'\\]*+')\s*+,\s*+"""
MAX_NAME = 128


def written_name(text: str, key: str = "name") -> str:
    """The name in the head of a call that is no JSON, or empty: what a text begins with.

    Example: ``written_name('{"name": "f", "arguments": {"x": oops')`` is ``"f"``.
    """
    start = text.find("{")
    if start < 0:
        return ""
    name = rf"""(?P<quote>["'])(?P<name>[^"'\\\r\n]{{1,{MAX_NAME}}})(?P=quote)"""
    head = re.compile(rf"""\{{\s*+(?:{_OTHER})*?["']?{re.escape(key)}["']?\s*+:\s*+{name}""")
    match = head.match(text, start)
    return match["name"] if match else ""


def _reject(literal: str) -> float:
    raise ValueError(f"{literal} is not a JSON number")


def _finite(literal: str) -> float:
    number = float(literal)
    return number if math.isfinite(number) else _reject(literal)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The mapping of the pairs. Raises ValueError for a key given twice: which one was meant?"""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {excerpt(key)} is given twice")
            seen.add(key)
    return mapping


_DECODER = json.JSONDecoder(parse_constant=_reject, parse_float=_finite, object_pairs_hook=unique)


def portable(value: Any, text: str) -> bool:
    """Check that other code can write the value: no lone surrogates, no extreme nesting.

    Both come from text that is valid JSON (``"\\ud800"``, a thousand brackets) and would raise far
    from here, in a template or a rollouts file.
    """
    if text.count("[") + text.count("{") > MAX_DEPTH and not _shallow(value, MAX_DEPTH):
        return False
    if "\\" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return False
    return True


def _shallow(value: Any, depth: int) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth > 0 and all(_shallow(item, depth - 1) for item in items)


def kind(value: Any) -> str:
    """Name the kind of a JSON value, in words."""
    kinds = {bool: "a boolean", dict: "an object", list: "an array", str: "a string"}
    return "null" if value is None else kinds.get(type(value), "a number")


def excerpt(text: str) -> str:
    """The text's head in quotes, for a problem's text."""
    text = text.strip()
    return repr(text if len(text) <= 60 else text[:59] + "…")
