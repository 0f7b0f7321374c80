"""Values in the near-JSON that some families write: Gemma's strings, Python's literals."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from agenttrain.chat.response_json import MAX_DEPTH, Json, excerpt, read_json, skip_blank, unique

_JSON_WORDS = {"true": True, "false": False, "null": None}
_PYTHON_WORDS = {**_JSON_WORDS, "True": True, "False": False, "None": None}
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?(?![\w.])", re.ASCII)
_WORD = re.compile(r"[^\W\d][\w-]*")
_KEY_AHEAD = re.compile(r"""(?:"[^"\\]*+"|'[^'\\]*+'|[^\W\d][\w-]*+)\s*+:""")
_ESCAPE = re.compile(
    r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|U00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4}|.)", re.DOTALL
)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"} | {c: c for c in "\\/'\"`"}


class LiteralError(ValueError):
    """A problem of a value; never leaves this folder."""

    def __init__(self, problem: str, *, cut: bool = False) -> None:
        super().__init__(problem)
        self.cut = cut
        """The text ends inside the value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How values are written where JSON's own rules do not hold."""

    raw_quotes: Sequence[tuple[str, str]] = ()
    """Openings and closings of strings without escapes, beside double quotes."""
    single_quotes: bool = False
    bare_keys: bool = False
    """Keys may stand without quotes."""
    trailing_commas: bool = False
    unbraced: bool = False
    """A mapping inside another may lack its opening brace, and its closing one."""
    words: Mapping[str, Any]


GEMMA = Dialect(
    raw_quotes=[('<|"|>', '<|"|>')], bare_keys=True, words={**_JSON_WORDS, "None": None}
)
"""``{city:<|"|>Oslo<|"|>,days:2}``; early templates write None for null"""
PYTHON = Dialect(single_quotes=True, trailing_commas=True, words=_PYTHON_WORDS)
"""``{'city': "Oslo", "exact": True}``, mixed with JSON, as templates write it"""
LENIENT = Dialect(
    single_quotes=True, bare_keys=True, trailing_commas=True, unbraced=True, words=_PYTHON_WORDS
)
"""JSON with what models often get wrong in it: ``{name: 'f', "arguments": {"x": True,}}``, and
``{"name": "f", "arguments": "x": 1, "y": 2}``"""


def take_literal(text: str, start: int, dialect: Dialect) -> tuple[Any, int]:
    """(value, its end) of the value at `start`, in linear time. Raises LiteralError."""
    start = skip_blank(text, start)
    if text[start : start + 1] in ("[", "{"):
        # What is JSON means the same in every dialect, and is read much faster as such.
        value, end, problem, _ = read_json(text, start)
        if (
            problem is None
            and text.count("[", start, end) + text.count("{", start, end) < MAX_DEPTH
        ):
            return value, end
    return _Reader(text, dialect).value(start, MAX_DEPTH)


def read_literal(text: str, start: int, dialect: Dialect) -> Json:
    """The same, with the problem in words."""
    try:
        value, end = take_literal(text, start, dialect)
    except LiteralError as error:
        return Json(problem=f"invalid arguments: {error}", cut=error.cut)
    return Json(value, end)


def read_loose(text: str) -> Json:
    """Read all of a text as LENIENT; the braces around an object may be missing.

    Example: ``read_loose("a: 3, 'b': 4").value == {"a": 3, "b": 4}``
    """
    text = text.strip()
    tries = [f"{{{text}}}", f"{{{text}"] if _KEY_AHEAD.match(text) else [text]
    for tried in tries:
        value, end, problem, cut = read_literal(tried, 0, LENIENT)
        if problem is None and tried[end:].strip():
            problem = f"text after the arguments: {excerpt(tried[end:])}"
        if problem is None:
            return Json(value, len(text))
    return Json(problem=problem, cut=cut)


def unbraced(text: str, at: int) -> bool:
    """Check that a key stands where a value should: an object's inside without its braces."""
    return _KEY_AHEAD.match(text, skip_blank(text, at)) is not None


@dataclass(frozen=True, slots=True)
class _Reader:
    text: str
    dialect: Dialect

    def value(self, at: int, depth: int) -> tuple[Any, int]:
        if depth == 0:
            raise LiteralError(f"nested more than {MAX_DEPTH} levels deep")
        first = self.text[at : at + 1]
        if first in _DIGITS and first:
            return self._scalar(at)
        if first == "{":
            return self._mapping(at + 1, depth)
        if first != "[":
            return self._string(at) or self._scalar(at)
        items: list[Any] = []
        at, comma = skip_blank(self.text, at + 1), False
        while self.text[at : at + 1] != "]" or self._lacks_value(at, comma):
            item, at = self.value(at, depth - 1)
            items.append(item)
            at, comma = self._after_item(at, "]", len(items))
        return items, at + 1

    def _mapping(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        pairs: list[tuple[str, Any]] = []
        at, comma = skip_blank(self.text, at), False
        while self.text[at : at + 1] != "}" or self._lacks_value(at, comma):
            if (string := self._string(at)) is not None:
                key, at = string
            else:
                word = _WORD.match(self.text, at) if self.dialect.bare_keys else None
                if word is None:
                    self._expected("a key in quotes", at)
                key, at = word.group(), word.end()
            at = skip_blank(self.text, at)
            if self.text[at : at + 1] != ":":
                self._expected("':'", at)
            at = skip_blank(self.text, at + 1)
            if self.dialect.unbraced and _KEY_AHEAD.match(self.text, at):
                if depth == 1:
                    raise LiteralError(f"nested more than {MAX_DEPTH} levels deep")
                value, end = self._mapping(at, depth - 1)
                pairs.append((key, value))
                # One brace closes both mappings, or each has its own.
                at = skip_blank(self.text, end)
                at = at if self.text[at : at + 1] == "}" else end - 1
                break
            value, at = self.value(at, depth - 1)
            pairs.append((key, value))
            at, comma = self._after_item(at, "}", len(pairs))
        try:
            return unique(pairs), at + 1
        except ValueError as error:
            raise LiteralError(str(error)) from None

    def _after_item(self, at: int, bracket: str, count: int) -> tuple[int, bool]:
        """(where the next item or the closing bracket stands, whether a comma came before)."""
        if count > MAX_ITEMS:
            raise LiteralError(f"a list or mapping of over {MAX_ITEMS:,} items")
        at = skip_blank(self.text, at)
        if self.text[at : at + 1] == ",":
            return skip_blank(self.text, at + 1), True
        if self.text[at : at + 1] != bracket:
            self._expected(f"',' or '{bracket}'", at)
        return at, False

    def _lacks_value(self, at: int, comma: bool) -> bool:
        """Raise where a container ends behind a comma that asks for another value; else False."""
        if comma and not self.dialect.trailing_commas:
            self._expected("a value", at)
        return False

    def _string(self, at: int) -> tuple[str, int] | None:
        for opening, closing in self.dialect.raw_quotes:
            if self.text.startswith(opening, at):
                start = at + len(opening)
                end = self.text.find(closing, start)
                if end < 0:
                    raise LiteralError("a string is not closed", cut=True)
                return self.text[start:end], end + len(closing)
        quote = self.text[at : at + 1]
        if quote != '"' and (quote != "'" or not self.dialect.single_quotes):
            return None
        string = _QUOTED[quote].match(self.text, at)
        if string is None:
            raise LiteralError("a string is not closed", cut=True)
        text = string.group()[1:-1]
        if "\\" in text:
            text = _ESCAPE.sub(
                lambda escape: (
                    chr(int(escape[1][1:], 16))
                    if len(escape[1]) > 1
                    else _ESCAPED.get(escape[1], escape[0])
                ),
                text,
            )
            with suppress(UnicodeDecodeError):
                # Two escaped halves of one character become that character.
                text = text.encode("utf-16", "surrogatepass").decode("utf-16")
        return text, string.end()

    def _scalar(self, at: int) -> tuple[Any, int]:
        if (number := _NUMBER.match(self.text, at)) is not None:
            literal = number.group()
            if len(literal) < SHORT and literal.isdigit():
                return int(literal), number.end()
            try:
                value = json.loads(literal)
            except ValueError as error:  # over the limit of digits that Python converts
                raise LiteralError(str(error)) from None
            if value in (float("inf"), float("-inf")):
                raise LiteralError(f"{literal} is not a finite number")
            return value, number.end()
        word = _WORD.match(self.text, at)
        if word is None or word.group() not in self.dialect.words:
            self._expected("a value", at)
        return self.dialect.words[word.group()], word.end()

    def _expected(self, what: str, at: int) -> NoReturn:
        cut = at >= len(self.text)
        actual = "the end" if cut else excerpt(self.text[at : at + 60])
        raise LiteralError(f"expected {what}, found {actual}", cut=cut)


MAX_ITEMS = 65_536
"""Items of a list or mapping that is no JSON; what is JSON has no such limit."""
SHORT = 16
"""Digits of a number that needs no further check."""
_DIGITS = "0123456789-"
_QUOTED = {
    quote: re.compile(rf"{quote}(?:[^{quote}\\]++|\\.)*+{quote}", re.DOTALL) for quote in "\"'"
}
