"""Read JSON values as models write them, of bounded depth; a problem is returned, not raised.

`read_json` is strict. `read_literal` reads the near-JSON of some families, described by a
`Dialect`: Gemma's strings, Python's literals.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from agenttrain.utils.json_lines import finite_float, refuse_constant

MAX_DEPTH = 64
"""Levels of nesting that a call's arguments may have."""
UNTERMINATED = "Unterminated string"
_BLANK = re.compile(r"[ \t\r\n]*")
_PYTHON = {"True": "true", "False": "false", "None": "null"}


def skip_blank(text: str, start: int = 0) -> int:
    """Return the position of the first character that is not white space in JSON."""
    if text[start : start + 1] not in " \t\r\n":
        return start
    blank = _BLANK.match(text, start)
    return blank.end() if blank else start


class Json(NamedTuple):
    """A value read from a text, or the problem because of which there is none."""

    value: Any = None
    end: int = 0
    """Position after the value; 0 with a problem."""
    problem: str | None = None
    is_cut_off: bool = False
    """The problem is that the text ends inside the value."""


def read_json(text: str, start: int = 0) -> Json:
    """Read the JSON value at `start`.

    Only strict JSON is accepted. Text that parsers read in different ways is a problem: keys
    without quotes, Python's literals, trailing commas, a key given twice, NaN.
    """
    try:
        value, end = _DECODER.raw_decode(text, skip_blank(text, start))
    except json.JSONDecodeError as error:
        # Python's message repeats the position of the string's start.
        problem = error.msg.replace(" starting at", "")
        for python_word, json_word in _PYTHON.items():
            if text.startswith(python_word, error.pos):
                problem += f" (write {json_word}, not {python_word})"
        # Line and column count from `start`, not from the beginning of the text.
        line = text.count("\n", start, error.pos) + 1
        newline = text.rfind("\n", start, error.pos)
        line_start = newline + 1 if newline >= 0 else start
        column = error.pos - line_start + 1
        # The text ends inside the value: in a string, or where more must follow ({"x": 1). The
        # caller may have cut it there, and tries again with a longer text.
        value_has_begun = skip_blank(text, start) < error.pos
        is_at_end = skip_blank(text, error.pos) == len(text)
        is_cut_off = UNTERMINATED in error.msg or (value_has_begun and is_at_end)
        return Json(
            problem=f"invalid JSON at line {line} column {column}: {problem}", is_cut_off=is_cut_off
        )
    except RecursionError:
        return Json(problem="invalid JSON: nested too deeply")
    except ValueError as error:
        return Json(problem=f"invalid JSON: {error}")
    return Json(value, end)


class Item(NamedTuple):
    """One item of an array whose other items may be wrong."""

    text: str
    """The item as it is written."""
    value: Any = None
    """The value read from the text."""
    problem: str | None = None
    """Reason why there is no value."""
    name: str = ""
    """The tool's name at the beginning of an item that cannot be read."""


ReadValue = Callable[[str, int], Json]


def read_items(
    text: str, start: int, key: str, read: ReadValue = read_json, *, limit: int | None = None
) -> tuple[list[Item], int]:
    """Read an array of calls from `start`, after its bracket; return (items, end of the array).

    One item that cannot be read must not cost those beside it. Example, with the key "name": in
    ``{"name": oops}, {"name": "g"}]`` the first item has a problem, and ends before the comma that
    an object with the first key `key` follows.

    An array that is not closed ends with the text: its last item has a problem. So has the item of
    all the text after `limit` items. `read` reads one item.
    """
    items: list[Item] = []
    at = skip_blank(text, start)
    # A comma before an object whose first key is `key`: ,{"name":
    next_item = re.compile(rf",\s*+(?=\{{\s*+{re.escape(json.dumps(key))}\s*+:)")
    while not text.startswith("]", at):
        if limit is not None and len(items) >= limit:
            return [*items, Item(text[at:], problem="there are too many items")], len(text)
        value, end, problem, is_cut_off = read(text, at)
        if problem is not None:
            # If the text ended inside of the value, what looks like a next item is a part of it.
            next_match = None if is_cut_off else next_item.search(text, at)
            end = next_match.start() if next_match else len(text)
            items.append(Item(text[at:end], problem=problem, name=written_name(text[at:end], key)))
        else:
            items.append(Item(text[at:end], value))
        at = skip_blank(text, end)
        # The array is not closed either, but the item's problem is enough.
        if problem is not None and at == len(text):
            return items, at
        if text.startswith(",", at):
            at = skip_blank(text, at + 1)
        elif not text.startswith("]", at):
            return [*items, Item(text[at:], problem="the array of calls is not closed")], len(text)
    return items, at + 1


_OTHER_KEY = r"""["']?+\w++["']?+\s*+:\s*+(?:"[^"\\]*+"|'[^'\\]*+')\s*+,\s*+"""
"""Matches a key with a short string as its value, and the comma after it: ``"id": "7", ``."""
MAX_NAME = 128


def written_name(text: str, key: str = "name") -> str:
    """Return the tool's name at the beginning of a call that cannot be read; empty without one.

    Example: ``written_name('{"name": "f", "arguments": {"x": oops')`` is ``"f"``.
    """
    start = text.find("{")
    if start < 0:
        return ""
    # {"id": "7", "name": "f": other keys may come first, and either quotes or none may stand around
    # keys. The possessive quantifiers (*+) keep the search linear.
    brace = r"\{\s*+"
    other_keys = rf"(?:{_OTHER_KEY})*?"
    name_key = rf"""["']?{re.escape(key)}["']?\s*+:\s*+"""
    name = rf"""(?P<quote>["'])(?P<name>[^"'\\\r\n]{{1,{MAX_NAME}}})(?P=quote)"""
    match = re.compile(brace + other_keys + name_key + name).match(text, start)
    return match["name"] if match else ""


def mapping_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a mapping of the pairs. Raises ValueError for a key given twice, which is ambiguous."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        earlier_keys: set[str] = set()
        for key, _ in pairs:
            if key in earlier_keys:
                raise ValueError(f"the key {excerpt(key)} is given twice")
            earlier_keys.add(key)
    return mapping


_DECODER = json.JSONDecoder(
    parse_constant=refuse_constant,  # NaN, Infinity
    parse_float=finite_float,
    object_pairs_hook=mapping_without_repeats,
)


def is_portable(value: Any, text: str) -> bool:
    """Return True if other code can write the value: no lone surrogates, no extreme nesting.

    Both occur in valid JSON (``"\\ud800"``, a thousand brackets). They would raise only later, in
    a template or while rollouts are written. `text` is the value's source, where a cheap look shows
    that most values need no check.
    """
    if text.count("[") + text.count("{") > MAX_DEPTH and not _is_shallow(value, MAX_DEPTH):
        return False
    if "\\" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return False
    return True


def _is_shallow(value: Any, depth: int) -> bool:
    """Return True if a value has at most `depth` levels."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth > 0 and all(_is_shallow(item, depth - 1) for item in items)


def kind(value: Any) -> str:
    """Return the kind of a JSON value in words: "an object"."""
    kinds = {bool: "a boolean", dict: "an object", list: "an array", str: "a string"}
    return "null" if value is None else kinds.get(type(value), "a number")


def excerpt(text: str) -> str:
    """Quote the beginning of a text, at most 60 characters, for error messages."""
    text = text.strip()
    return repr(text if len(text) <= 60 else text[:59] + "…")


_JSON_WORDS = {"true": True, "false": False, "null": None}
_PYTHON_WORDS = {**_JSON_WORDS, "True": True, "False": False, "None": None}
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?(?![\w.])", re.ASCII)
_WORD = re.compile(r"[^\W\d][\w-]*")
KEY_AHEAD = re.compile(r"""(?:"[^"\\]*+"|'[^'\\]*+'|[^\W\d][\w-]*+)\s*+:""")
_CODES = r"u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|U00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4}|."
_ESCAPE = re.compile(rf"\\({_CODES})", re.DOTALL)
_PYTHON_ESCAPE = re.compile(rf"\\([0-7]{{1,3}}|N\{{[^}}]*\}}|{_CODES})", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"} | {c: c for c in "\\/'\"`"}
_PYTHON_ESCAPED = _ESCAPED | {"a": "\a", "v": "\v", "\n": ""}


@dataclass(eq=False)  # an exception must stay hashable
class LiteralError(ValueError):
    """A value that cannot be read. Callers in this folder catch it."""

    problem: str
    is_cut_off: bool = field(default=False, kw_only=True)
    """The text ends inside the value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The ways in which a format departs from JSON."""

    raw_quotes: Sequence[tuple[str, str]] = ()
    """Opening and closing marks of strings without escapes, beside double quotes."""
    single_quotes: bool = False
    """Strings may stand in single quotes."""
    bare_keys: bool = False
    """Keys may stand without quotes."""
    trailing_commas: bool = False
    """A comma may stand before a closing bracket."""
    unbraced: bool = False
    """A mapping inside another may lack its braces."""
    python: bool = False
    """All literals of Python that JSON has a value for: tuples, sets, hexadecimal numbers, strings
    in three quotes or with a prefix, adjacent strings, keys that are no strings."""
    words: Mapping[str, Any]
    """Words such as `true` or `None` -> their values."""


GEMMA = Dialect(
    raw_quotes=[('<|"|>', '<|"|>')], bare_keys=True, words={**_JSON_WORDS, "None": None}
)
"""Gemma's format: ``{city:<|"|>Oslo<|"|>,days:2}``. Early templates write None for null."""
PYTHON = Dialect(single_quotes=True, trailing_commas=True, python=True, words=_PYTHON_WORDS)
"""Python mixed with JSON, as templates write it: ``{'city': "Oslo", "exact": True}``."""
LENIENT = Dialect(
    single_quotes=True, bare_keys=True, trailing_commas=True, unbraced=True, words=_PYTHON_WORDS
)
"""JSON with frequent mistakes of models: ``{name: 'f', "arguments": {"x": True,}}``, and
``{"name": "f", "arguments": "x": 1, "y": 2}``."""


def take_literal(text: str, start: int, dialect: Dialect) -> tuple[Any, int]:
    """Read the value at `start` in linear time; return (value, end). Raises LiteralError."""
    start = skip_blank(text, start)
    if text[start : start + 1] in ("[", "{"):
        # Strict JSON means the same in every dialect, and its reader is much faster. It has no
        # MAX_DEPTH, so that the value is taken only if it has too few brackets to be deeper.
        value, end, problem, _ = read_json(text, start)
        brackets = text.count("[", start, end) + text.count("{", start, end)
        if problem is None and brackets < MAX_DEPTH:
            return value, end
    return _Reader(text, dialect).read(start, MAX_DEPTH)


def read_literal(text: str, start: int, dialect: Dialect) -> Json:
    """Read the value at `start` as `take_literal` does; an error becomes the result's problem."""
    try:
        value, end = take_literal(text, start, dialect)
    except LiteralError as error:
        return Json(problem=f"invalid arguments: {error}", is_cut_off=error.is_cut_off)
    return Json(value, end)


def read_loose(text: str) -> Json:
    """Read a whole text as near-JSON (LENIENT); the braces around an object may be missing.

    Example: ``read_loose("a: 3, 'b': 4").value == {"a": 3, "b": 4}``
    """
    text = text.strip()
    # A text that begins with a key lacks both braces, or only the opening one: a: 3}
    candidates = [f"{{{text}}}", f"{{{text}"] if KEY_AHEAD.match(text) else [text]
    for candidate in candidates:
        value, end, problem, is_cut_off = read_literal(candidate, 0, LENIENT)
        if problem is None and candidate[end:].strip():
            problem = f"text after the arguments: {excerpt(candidate[end:])}"
        if problem is None:
            return Json(value, len(text))
    return Json(problem=problem, is_cut_off=is_cut_off)


def _replace_escapes(text: str, *, python: bool = False) -> str:
    """Return a string's text with its escapes replaced: JSON's and `\\x41`, or all of Python's."""
    if "\\" not in text:
        return text
    pattern, escaped = (_PYTHON_ESCAPE, _PYTHON_ESCAPED) if python else (_ESCAPE, _ESCAPED)

    def character(escape: re.Match[str]) -> str:
        """Return the character of one escape; an unknown escape stays as it is.

        `escaped` maps the escapes of one letter to their characters.
        """
        code = escape[1]  # without the backslash
        if code in escaped:  # n
            return escaped[code]
        if len(code) > 1 and code[0] in "xuU":  # x41, u0041
            return chr(int(code[1:], 16))
        if len(code) > 1 and code[0] == "N":  # N{BULLET}
            try:
                return unicodedata.lookup(code[2:-1])
            except KeyError as error:
                raise LiteralError(f"no character is called {excerpt(code[2:-1])}") from error
        is_octal = python and code[0] in _OCTAL  # 101
        return chr(int(code, 8)) if is_octal else escape[0]

    text = pattern.sub(character, text)
    with suppress(UnicodeDecodeError):
        # Join two escaped surrogates to one character.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16")
    return text


def _convert_python_number(number: re.Match[str]) -> int | float:
    """Return the value of a number in Python's notation, such as ``-1_000``. Raises LiteralError.

    `number` is a match with one of the groups `float`, `based` (``0x1f``) and `whole`.
    """
    sign = -1 if number["sign"] == "-" else 1
    if number["float"] is not None:
        value = float(number["float"])
        if math.isinf(value):
            raise LiteralError(f"{number.group()} is not a finite number")
        return sign * value
    try:
        if number["based"]:  # 0x1f, 0o17 or 0b11
            return sign * int(number["based"], 0)
        # Zeros before a decimal number are an error in Python, and what a model means is clear.
        return sign * int(number["whole"])
    except ValueError as error:  # more digits than Python converts
        raise LiteralError(str(error)) from None


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the values in a text of one dialect; made by `take_literal`.

    Methods return (value, position after it), or raise LiteralError.
    """

    text: str
    dialect: Dialect
    """The ways in which the text may depart from JSON: Python's literals, keys without quotes."""

    def read(self, at: int, depth: int) -> tuple[Any, int]:
        """Read the value at the position `at`; return (value, position after it).

        The value may be nested at most `depth` levels deep, else LiteralError is raised.
        """
        if depth == 0:
            raise LiteralError(f"nested more than {MAX_DEPTH} levels deep")
        first = self.text[at : at + 1]
        if first and first in _DIGITS:  # at the end of the text, `first` is empty
            return self._read_scalar(at)
        if first == "{":
            return self._read_mapping(at + 1, depth)
        if first == "[":
            items, end, _ = self._read_items(at + 1, "]", depth)
            return items, end
        if first == "(" and self.dialect.python:
            items, end, commas = self._read_items(at + 1, ")", depth)
            # Parentheses around one value without a comma are no tuple: (1) is 1, (1,) is [1].
            return (items[0] if len(items) == 1 and not commas else items), end
        return self._read_strings(at) or self._read_scalar(at)

    def _read_items(self, at: int, bracket: str, depth: int) -> tuple[list[Any], int, int]:
        """Read values up to a closing bracket: (values, position after it, number of commas).

        The commas tell the tuple ``(1,)`` from ``(1)``.
        """
        items: list[Any] = []
        commas = 0
        at = skip_blank(self.text, at)
        while self.text[at : at + 1] != bracket:
            item, at = self.read(at, depth - 1)
            items.append(item)
            at = skip_blank(self.text, at)
            if self.text[at : at + 1] == ",":
                commas += 1
            at = self._skip_comma(at, bracket, len(items))
        return items, at + 1, commas

    def _read_mapping(self, at: int, depth: int) -> tuple[dict[str, Any] | list[Any], int]:
        """Read a mapping after its brace, or the values of a set in Python."""
        pairs: list[tuple[str, Any]] = []
        start = at = skip_blank(self.text, at)
        if self.dialect.python and self.text[at : at + 1] == "(":  # a set of tuples: {(1, 2)}
            items, end, _ = self._read_items(at, "}", depth)
            return items, end
        while self.text[at : at + 1] != "}":
            key, at = self._read_key(at)
            at = skip_blank(self.text, at)
            next_character = self.text[at : at + 1]
            if self.dialect.python and not pairs and next_character in (",", "}"):  # {1, 2}
                items, end, _ = self._read_items(start, "}", depth)
                return items, end
            if next_character != ":":
                self._raise_expected("':'", at)
            at = skip_blank(self.text, at + 1)
            if self.dialect.unbraced and KEY_AHEAD.match(self.text, at):  # {"a": "x": 1}
                # The value has all of the text up to the closing brace of this mapping.
                value, at = self._read_unbraced_mapping(at, depth - 1)
                pairs.append((key, value))
                break
            value, at = self.read(at, depth - 1)
            pairs.append((key, value))
            at = self._skip_comma(at, "}", len(pairs))
        # At the closing brace.
        try:
            return mapping_without_repeats(pairs), at + 1
        except ValueError as error:
            raise LiteralError(str(error)) from None

    def _read_unbraced_mapping(self, at: int, depth: int) -> tuple[dict[str, Any] | list[Any], int]:
        """Read a mapping without its opening brace; return (mapping, position of the outer brace).

        Models forget the braces of a call's arguments: ``{"name": "f", "arguments": "x": 1}`` means
        ``{"name": "f", "arguments": {"x": 1}}``. The inner mapping reaches to the end of the outer
        one, whose closing brace the caller reads. Examples::

            {"a": "x": 1}     one brace closes both: its position is returned
            {"a": "x": 1}}    the inner mapping has a closing brace: the position of the second one
        """
        # `read` checks the depth of every other value.
        if depth == 0:
            raise LiteralError(f"nested more than {MAX_DEPTH} levels deep")
        value, after_first_brace = self._read_mapping(at, depth)
        next_at = skip_blank(self.text, after_first_brace)
        has_second_brace = self.text[next_at : next_at + 1] == "}"
        return value, next_at if has_second_brace else after_first_brace - 1

    def _read_key(self, at: int) -> tuple[str, int]:
        """Read the key of a mapping: a string, in Python any scalar, or a bare word."""
        if (string := self._read_strings(at)) is not None:
            return string
        if self.dialect.python and _PYTHON_SCALAR.match(self.text, at):
            value, end = self._read_scalar(at)
            return json.dumps(value), end  # {1: "x"} has the key "1"
        word = _WORD.match(self.text, at) if self.dialect.bare_keys else None
        if word is None:
            self._raise_expected("a key in quotes", at)
        return word.group(), word.end()

    def _skip_comma(self, at: int, bracket: str, count: int) -> int:
        """Return the position of the next item, or of the closing `bracket`, after `count` items.

        Raises LiteralError if neither a comma nor the bracket follows.
        """
        if count > MAX_ITEMS:
            raise LiteralError(f"a list or mapping of over {MAX_ITEMS:,} items")
        at = skip_blank(self.text, at)
        if self.text[at : at + 1] == ",":
            at = skip_blank(self.text, at + 1)
            if self.text[at : at + 1] == bracket and not self.dialect.trailing_commas:
                self._raise_expected("a value", at)
        elif self.text[at : at + 1] != bracket:
            self._raise_expected(f"',' or '{bracket}'", at)
        return at

    def _read_strings(self, at: int) -> tuple[str, int] | None:
        """Read the string at `at`; return (text, position after it), or None if there is none.

        In Python's dialect, ``'a' 'b'`` is one string, ``ab``.
        """
        if not self.dialect.python:
            return self._read_string(at)
        texts: list[str] = []
        end = at
        while (string := self._read_python_string(at)) is not None:
            text, end = string
            texts.append(text)
            at = skip_blank(self.text, end)
        return ("".join(texts), end) if texts else None

    def _read_python_string(self, at: int) -> tuple[str, int] | None:
        """Read one Python string with its prefix, e.g. ``r'a'``; None if there is none.

        Return (text, position after it). Raises LiteralError for bytes, and for an f-string with a
        placeholder, whose value is not known.
        """
        opening = _PYTHON_STRING_OPENING.match(self.text, at)
        if opening is None:
            return None
        prefix, quote = opening["prefix"].lower(), opening["quote"]  # quote: ', ", ''' or three "
        string = _QUOTED[quote].match(self.text, opening.start("quote"))
        if string is None:
            raise LiteralError("a string is not closed", is_cut_off=True)
        text = string.group()[len(quote) : -len(quote)]
        if "b" in prefix:
            raise LiteralError("bytes, which JSON has no value for")
        if "f" in prefix:
            # {{ and }} stand for braces. A single { opens a placeholder.
            if "{" in text.replace("{{", ""):
                raise LiteralError("a text with placeholders, whose values are not known")
            text = text.replace("{{", "{").replace("}}", "}")
        return (text if "r" in prefix else _replace_escapes(text, python=True)), string.end()

    def _read_string(self, at: int) -> tuple[str, int] | None:
        """Read a string between the dialect's marks or quotes; None if there is none."""
        for opening, closing in self.dialect.raw_quotes:
            if self.text.startswith(opening, at):
                start = at + len(opening)
                end = self.text.find(closing, start)
                if end < 0:
                    raise LiteralError("a string is not closed", is_cut_off=True)
                return self.text[start:end], end + len(closing)
        quote = self.text[at : at + 1]
        if quote != '"' and (quote != "'" or not self.dialect.single_quotes):
            return None
        string = _QUOTED[quote].match(self.text, at)
        if string is None:
            raise LiteralError("a string is not closed", is_cut_off=True)
        return _replace_escapes(string.group()[1:-1]), string.end()

    def _read_scalar(self, at: int) -> tuple[Any, int]:
        """Read a number, or a word such as `true`."""
        if self.dialect.python and (number := _PYTHON_NUMBER.match(self.text, at)) is not None:
            return _convert_python_number(number), number.end()
        if (number := _NUMBER.match(self.text, at)) is not None:
            literal = number.group()
            if len(literal) < SHORT and literal.isdigit():  # the common case, read faster
                return int(literal), number.end()
            try:
                value = json.loads(literal)
            except ValueError as error:  # more digits than Python converts
                raise LiteralError(str(error)) from None
            if value in (float("inf"), float("-inf")):
                raise LiteralError(f"{literal} is not a finite number")
            return value, number.end()
        word = _WORD.match(self.text, at)
        if word is None or word.group() not in self.dialect.words:
            self._raise_expected("a value", at)
        return self.dialect.words[word.group()], word.end()

    def _raise_expected(self, what: str, at: int) -> NoReturn:
        """Raise LiteralError that says what stands in place of `what`."""
        is_cut_off = at >= len(self.text)
        actual = "the end" if is_cut_off else excerpt(self.text[at : at + 60])
        raise LiteralError(f"expected {what}, found {actual}", is_cut_off=is_cut_off)


MAX_ITEMS = 65_536
"""Items of a list or mapping that is not JSON; JSON has no such limit."""
SHORT = 16
"""Digits of a number that needs no further check."""
_DIGITS = "0123456789-"
_OCTAL = "01234567"
_QUOTED = {
    quote: re.compile(rf"{quote}(?:[^{quote}\\]++|\\.)*+{quote}", re.DOTALL) for quote in "\"'"
} | {
    3 * quote: re.compile(
        rf"{3 * quote}(?:[^{quote}\\]++|\\.|{quote}(?!{2 * quote}))*+{3 * quote}", re.DOTALL
    )
    for quote in "\"'"
}
_PYTHON_STRING_OPENING = re.compile(
    r"""(?P<prefix>[rR][bBfF]?|[bBfF][rR]?|[uU]|)(?P<quote>'''|\"\"\"|'|")"""
)
_PYTHON_SCALAR = re.compile(rf"[+-]?\.?\d|(?:{'|'.join(_PYTHON_WORDS)})\b", re.ASCII)
_PYTHON_NUMBER = re.compile(
    r"(?P<sign>[+-]?)(?:(?P<based>0[xX](?:_?[0-9a-fA-F])+|0[oO](?:_?[0-7])+|0[bB](?:_?[01])+)"
    r"|(?P<float>(?:(?:\d(?:_?\d)*+)?\.\d(?:_?\d)*+|\d(?:_?\d)*+\.)(?:[eE][+-]?\d(?:_?\d)*+)?"
    r"|\d(?:_?\d)*+[eE][+-]?\d(?:_?\d)*+)|(?P<whole>\d(?:_?\d)*+))(?![\w.])",
    re.ASCII,
)
