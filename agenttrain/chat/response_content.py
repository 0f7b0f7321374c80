"""Content of the regions of a `response_template`, and the shape that it is given."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from agenttrain.chat.response_json import excerpt, kind, read_json
from agenttrain.chat.response_literal import Dialect, read_literal, read_loose
from agenttrain.chat.response_regex import Pattern

INSIDE, LOOSE = " inside", " loose"
"""Arguments of ours for `json`, whose blanks no key of a user's has: the text is what stands inside
an object's braces; it may be almost JSON."""
_CAPTURED_INSIDE = re.compile(r"(?:\\?\{|\[\{\])(?:\\s[*+]\+?|\s)*\((?!\?(?:[:=!>#]|<[=!]))")
_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")


class ContentError(ValueError):
    """A problem of a region's text; never leaves this folder."""

    def __init__(self, problem: str, *, cut: bool = False) -> None:
        super().__init__(problem)
        self.cut = cut
        """The text ends inside a value."""


def captures_inside(pattern: str) -> bool:
    """Check that an expression captures what stands behind an opening brace, without the brace.

    Example: ``"arguments": \\{(?P<arguments>.*)\\}``
    """
    return _CAPTURED_INSIDE.search(pattern) is not None


def with_braces(arguments: Any) -> Any:
    """Add to the captured inside of an object its braces, where the text has none."""
    if isinstance(arguments, str) and arguments.strip() and not arguments.lstrip().startswith("{"):
        return f"{{{arguments}}}"
    return arguments


def _text(text: str, args: Mapping[str, Any]) -> str:
    return text.strip() if args.get("strip", True) else text


def _number(text: str, args: Mapping[str, Any]) -> int | float:
    value, _, problem, _ = read_json(text.strip())
    if problem is not None or isinstance(value, bool) or not isinstance(value, int | float):
        raise ContentError(f"not a number: {excerpt(text)}")
    return value


def _json(text: str, args: Mapping[str, Any]) -> Any:
    quotes = [(str(opening), str(closing)) for opening, closing in args.get("string_delims", ())]
    if quotes or args.get("unquoted_keys"):
        words = {"true": True, "false": False, "null": None}
        dialect = Dialect(raw_quotes=quotes, bare_keys=bool(args.get("unquoted_keys")), words=words)
        value, end, problem, cut = read_literal(text, 0, dialect)
    else:
        value, end, problem, cut = read_json(text)
    if problem is None and text[end:].strip():
        problem = f"text after the JSON value: {excerpt(text[end:])}"
    if problem is not None and args.get(INSIDE):
        inner, end, wrong, _ = read_json(f"{{{text}}}")
        if wrong is None and end == len(text) + 2:
            return inner
    if problem is not None and args.get(LOOSE) and not args.get("allow_non_json"):
        loose = read_loose(text)
        if loose.problem is None:
            return loose.value
    if problem is None:
        return value
    if args.get("allow_non_json"):
        return text.strip()
    raise ContentError(problem, cut=cut)


@cache
def _tags(source: str) -> Pattern:
    return Pattern(source, "tag_pattern")


def _xml_inline(text: str, args: Mapping[str, Any]) -> dict[str, Any]:
    parameters: dict[str, Any] = {}
    for tag in _tags(args["tag_pattern"]).matches(text):
        value = _inner(tag["value"] or "", args.get("value_parser"))
        _put(parameters, tag["key"], value, merge=bool(args.get("merge_duplicates")))
    return parameters


def _put(parameters: dict[str, Any], key: str, value: Any, *, merge: bool) -> None:
    if key not in parameters:
        parameters[key] = value
        return
    if not merge:
        raise ContentError(f"the parameter {excerpt(key)} is given twice")
    held = parameters[key]
    parameters[key] = [*(held if isinstance(held, list) else [held]), value]


def _kv_lines(text: str, args: Mapping[str, Any]) -> dict[str, Any]:
    parameters: dict[str, Any] = {}
    for line in text.split(args.get("line_sep", "\n")):
        key, separator, value = _text(line, args).partition(args.get("kv_sep", ":"))
        if separator:
            value = _inner(_text(value, args), args.get("value_parser"))
            _put(parameters, _text(key, args), value, merge=False)
    return parameters


def _inner(text: str, parser: Mapping[str, Any] | None) -> Any:
    if parser is None:
        return text
    return CONTENT[parser.get("name", "text")](text, parser.get("args") or {})


CONTENT: dict[str, Callable[[str, Mapping[str, Any]], Any]] = {
    "text": _text,
    "int": _number,
    "float": _number,
    "bool": lambda text, args: text.strip().lower() in ("true", "1"),
    "json": _json,
    "xml-inline": _xml_inline,
    "kv-lines": _kv_lines,
}
"""By the names that a field's `content` takes: (text, `content_args`) -> value, or ContentError."""


def check_content(name: Any, args: Any, transform: Any, scope: str) -> None:
    """Raise ValueError for what can be known to be wrong before any text is read."""
    if name not in CONTENT:
        raise ValueError(f"{scope}.content: {name!r} is not one of {', '.join(CONTENT)}")
    if not isinstance(args, Mapping):
        raise ValueError(f"{scope}.content_args: must be a mapping, not {args!r}")
    if name == "xml-inline":
        names = Pattern(args.get("tag_pattern"), f"{scope}.content_args.tag_pattern").names
        if not {"key", "value"} <= set(names):
            raise ValueError(f"{scope}.content_args.tag_pattern: needs (?P<key>…) and (?P<value>…)")
    if name == "json":
        quotes = args.get("string_delims", [])
        for pair in quotes if isinstance(quotes, list) else [quotes]:
            if not isinstance(pair, list) or len(pair) != 2 or not all(map(str, pair)):
                raise ValueError(
                    f"{scope}.content_args.string_delims: must be a list of [opening, closing], "
                    f"not {quotes!r}"
                )
    for key in ("line_sep", "kv_sep") if name == "kv-lines" else ():
        if not isinstance(text := args.get(key, ":"), str) or not text:
            raise ValueError(f"{scope}.content_args.{key}: must be a text, not {text!r}")
    if (parser := args.get("value_parser")) is not None:
        inner = f"{scope}.content_args.value_parser"
        if not isinstance(parser, Mapping):
            raise ValueError(f"{inner}: must be a mapping, as {{name: json}}, not {parser!r}")
        check_content(parser.get("name", "text"), parser.get("args") or {}, None, inner)
    _check_transform(transform, scope)


def _check_transform(transform: Any, scope: str) -> None:
    parts = transform.values() if isinstance(transform, Mapping) else transform
    if isinstance(transform, Mapping | list):
        for part in parts:
            _check_transform(part, scope)
    elif isinstance(transform, str) and _PLACEHOLDER.sub("", transform) not in ("", transform):
        raise ValueError(f"{scope}.transform: {transform!r} mixes a placeholder with text")


def reshaped(transform: Any, value: Any, captures: Mapping[str, Any], *, each: bool) -> Any:
    """Return the value in the transform's shape, ``{name}`` and ``{content.args}`` filled in."""
    if transform is None:
        return value
    given = {key: text for key, text in captures.items() if text is not None}
    if not each:
        return _filled(transform, {**given, "content": value})
    if not isinstance(value, list):
        raise ContentError(f"the calls must be a JSON array, not {kind(value)}")
    # An item that is no mapping is malformed on its own, beside the others.
    return [
        _filled(transform, {**given, **item}, partly=True) if isinstance(item, dict) else item
        for item in value
    ]


def _filled(transform: Any, scope: Mapping[str, Any], *, partly: bool = False) -> Any:
    if isinstance(transform, Mapping):
        return {key: _filled(part, scope, partly=partly) for key, part in transform.items()}
    if isinstance(transform, list):
        return [_filled(part, scope, partly=partly) for part in transform]
    placeholder = _PLACEHOLDER.fullmatch(transform) if isinstance(transform, str) else None
    if placeholder is None:
        return transform
    value: Any = scope
    for key in placeholder[1].split("."):
        if not isinstance(value, Mapping) or key not in value:
            if partly:
                return None
            raise ContentError(f"the call has no {placeholder[1].removeprefix('content.')}")
        value = value[key]
    return value
