"""Read the inside of a call: one function for each syntax."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from agenttrain.chat.parsers.base import MAX_CALLS, TOO_MANY, ParsedCall
from agenttrain.chat.parsers.values import (
    GEMMA,
    KEY_AHEAD,
    LENIENT,
    PYTHON,
    Json,
    LiteralError,
    excerpt,
    kind,
    read_items,
    read_json,
    read_literal,
    read_loose,
    skip_blank,
    take_literal,
    written_name,
)
from agenttrain.utils.messages import ARGUMENT_KEYS


@dataclass(frozen=True, slots=True, kw_only=True)
class Syntax:
    """Settings of the functions that read calls; they are fields of a spec's YAML."""

    name_key: str = "name"
    """Key of a JSON call that holds the tool's name."""
    arguments_key: str = "arguments"
    """Key of a JSON call that holds the arguments."""
    header: str | None = None
    """With syntax=named_json: expression for a call's head; groups `name` and perhaps `id`."""
    footer: str | None = None
    """With syntax=named_json: text after the arguments, e.g. a code fence; optional."""
    lenient: bool = False
    """JSON may have keys without quotes, Python's literals, trailing commas, and arguments without
    braces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadCalls:
    """The calls read from the beginning of a body, which is the text after an opening mark.

    Example: in the body ``{"name": "f"}</tool_call>`` there is one call, and `end` is 13.
    """

    calls: Sequence[ParsedCall] = ()
    """Calls of a list have their own span as `text`. A call that is no list item has "" there: the
    caller sets it to the whole region between the marks."""
    end: int = 0
    """Position in the body after the calls."""
    is_cut_off: bool = False
    """The body ended inside a string, so the mark that ended it may be part of that string: the
    caller may read again with a longer body."""


Schemas = Mapping[str, Mapping[str, Sequence[str]]]
"""Tool name -> parameter name -> JSON types that its schema allows."""
Reader = Callable[[str, Syntax, Schemas], ReadCalls]


def _malformed(problem: str, *, name: Any = "", is_cut_off: bool = False) -> ReadCalls:
    """Return one malformed call."""
    return ReadCalls(calls=[ParsedCall(text="", name=name, problem=problem)], is_cut_off=is_cut_off)


def _read_value(body: str, at: int, syntax: Syntax) -> Json:
    """Read the value at `at`: JSON, or near-JSON if the syntax is lenient."""
    return read_literal(body, at, LENIENT) if syntax.lenient else read_json(body, at)


def _is_loose(text: str, syntax: Syntax, at: int = 0) -> bool:
    """Return True if the value at `at`, which a lenient syntax has read, is not strict JSON."""
    return syntax.lenient and read_json(text, at).problem is not None


def read_object(body: str, syntax: Syntax, schemas: Schemas) -> ReadCalls:
    """Read the call in a body (the text after an opening mark).

    Example: ``{"name": "f", "arguments": {"x": 1}}``
    """
    value, end, problem, is_cut_off = _read_value(body, 0, syntax)
    if problem is not None:
        return _malformed(
            problem, name=written_name(body, syntax.name_key) or None, is_cut_off=is_cut_off
        )
    call = _make_object_call(value, syntax, schemas, lenient=_is_loose(body, syntax))
    return ReadCalls(calls=[call], end=end)


def _make_object_call(
    value: Any, syntax: Syntax, schemas: Schemas, text: str = "", *, lenient: bool
) -> ParsedCall:
    """Make a call of a JSON value, which should be an object with its name and arguments.

    A problem of the value becomes the call's problem. `lenient`: the value was read from text that
    is not strict JSON. A tool may have parameters named like keys of a call (`id`, `type`), so the
    tool's schema decides what such a key is.
    """
    if not isinstance(value, dict):
        return ParsedCall(text=text, problem=f"the call must be a JSON object, not {kind(value)}")
    name = value.get(syntax.name_key)
    parameters = schemas.get(name, {}) if isinstance(name, str) else {}
    key, problem = find_arguments_key(value, syntax.name_key, syntax.arguments_key, parameters)
    call_id = value.get("id")
    return ParsedCall(
        text=text,
        name=name,
        arguments=value.get(key),
        problem=problem,
        id=call_id if isinstance(call_id, str) else None,
        name_label=f'"{syntax.name_key}"',
        arguments_label=f'"{key}"',
        lenient=lenient,
    )


BESIDE_ARGUMENTS = ("id", "type")
"""Keys of a call that say nothing about its arguments."""


def find_arguments_key(
    call: Mapping[str, Any],
    name_key: str = "name",
    arguments_key: str = "arguments",
    parameters: Container[str] = (),
) -> tuple[str, str | None]:
    """Return (the key of a JSON call that holds its arguments, a problem of its keys or None).

    Models also write the arguments under other keys than the format's: ARGUMENT_KEYS, such as
    ``parameters``. An unexpected key is a problem: its value may be an argument, and the call would
    run without it. Example: for ``{"name": "find", "q": "tea"}`` the problem names the key ``q``.
    `parameters` are the names of the tool's parameters.
    """
    argument_keys = dict.fromkeys((arguments_key, *ARGUMENT_KEYS))  # the format's own goes first
    used_keys = [key for key in argument_keys if key in call]
    if len(used_keys) > 1:
        first, second = used_keys[:2]
        return first, f'the arguments are given twice, as "{first}" and "{second}"'
    allowed_keys = [name_key, *argument_keys]
    for key_beside in BESIDE_ARGUMENTS:  # id and type
        # In {"name": "get", "id": "7"} the id is an argument if the tool has a parameter `id`.
        may_be_argument = not used_keys and key_beside in parameters
        if not may_be_argument:
            allowed_keys.append(key_beside)
    for key in call:
        if key not in allowed_keys:
            form = f'{{"{name_key}": …, "{arguments_key}": {{…}}}}'
            return arguments_key, f"{excerpt(key)} is no key of a call: write {form}"
    return used_keys[0] if used_keys else arguments_key, None


def read_list(body: str, syntax: Syntax, schemas: Schemas) -> ReadCalls:
    """Read the list of calls in a body (the text after an opening mark).

    Example: ``[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]``
    """
    start = skip_blank(body)
    if not body.startswith("[", start):
        return _malformed("the calls must be a JSON array")
    read_value = partial(_read_value, syntax=syntax)
    # One item above MAX_CALLS: `parse_response` sees by it that there are too many.
    items, end = read_items(body, start + 1, syntax.name_key, read_value, limit=MAX_CALLS + 1)
    calls = []
    for item in items:
        if item.problem is not None:
            calls.append(ParsedCall(text=item.text, name=item.name, problem=item.problem))
            continue
        is_loose = _is_loose(item.text, syntax)
        calls.append(_make_object_call(item.value, syntax, schemas, item.text, lenient=is_loose))
    # The body ends at a mark. If the last call is malformed up to there, the mark may stand inside
    # of a string, as in [{"name": "f", "arguments": {"x": "</tool_call>"}}]: then the caller reads
    # again with a longer body.
    is_cut_off = bool(calls) and calls[-1].problem is not None and end == len(body)
    return ReadCalls(
        calls=calls or [ParsedCall(text="", problem="the array holds no call")],
        end=end,
        is_cut_off=is_cut_off,
    )


def read_named(body: str, syntax: Syntax, schemas: Schemas) -> ReadCalls:
    """Read the call in a body: a header with the tool's name, the arguments, perhaps a footer.

    Example: ``f[ARGS]{"x": 1}``. The body may also be an array of JSON calls.
    """
    start = skip_blank(body)
    # A bracket begins an array of JSON calls, unless it is that of a header without a name.
    if body.startswith("[", start) and not body.startswith("[ARGS]", start):
        return read_list(body, syntax, schemas)
    # Every spec with this syntax has a header: `or ""` is for the type checker.
    header = re.compile(syntax.header or "", re.DOTALL).match(body, start)
    if header is None:
        return _malformed(f"the call must begin with the name of a tool: {excerpt(body)}")
    groups = header.groupdict()
    name = groups["name"]
    # `footer` is `syntax.footer`, without a brace that closed the arguments.
    arguments, footer, is_loose = _read_named_arguments(body, header, syntax)
    if arguments.problem is not None:
        return _malformed(arguments.problem, name=name, is_cut_off=arguments.is_cut_off)
    end = arguments.end
    if footer:
        at = skip_blank(body, end)
        end = at + len(footer) if body.startswith(footer, at) else end
    call = ParsedCall(
        text="",  # the caller sets it to the text between the marks
        name=name,
        arguments=arguments.value,
        id=groups.get("id"),
        name_label="the text before the arguments",
        arguments_label="the value of the arguments",
        lenient=is_loose,
    )
    return ReadCalls(calls=[call], end=end)


def _read_named_arguments(
    body: str, header: re.Match[str], syntax: Syntax
) -> tuple[Json, str, bool]:
    """Read the arguments after a header; return (value, footer to expect, True if not JSON).

    "Not JSON": only a lenient syntax reads them. The body has one of these forms::

        f[ARGS]{"x": 1}    header ``f[ARGS]``: the arguments have their own braces
        f({"x": 1})        header ``f({``, footer ``})``: its brace closes the arguments
        f({"x": 1          header ``f({``: the closing brace begins the call's closing mark
        f[ARGS]x: 1        lenient only: the arguments lack their braces
    """
    at, footer = header.end(), syntax.footer or ""
    if header.group().rstrip().endswith("{"):
        brace = body.rindex("{", 0, at)
        for text in (body, body + "}"):  # the second is for a brace in the closing mark
            value = _read_value(text, brace, syntax)
            if value.problem is None:
                end = min(value.end, len(body))  # an added brace is not in the body
                footer = footer.lstrip().removeprefix("}")  # it has been read with the arguments
                return value._replace(end=end), footer, _is_loose(text, syntax, brace)
    if syntax.lenient and KEY_AHEAD.match(body, skip_blank(body, at)):
        members = body[at:].rstrip()
        members = members.removesuffix(footer) if footer else members
        return read_loose(members)._replace(end=at + len(members)), footer, True
    return _read_value(body, at, syntax), footer, _is_loose(body, syntax, at)


_GEMMA_NAME = re.compile(r"\s*call:(?P<name>[\w.-]*)\s*")


def read_gemma(body: str, syntax: Syntax, schemas: Schemas) -> ReadCalls:
    """Read the call in a body (the text after an opening mark) in Gemma's syntax.

    Example: ``call:f{city:<|"|>Oslo<|"|>,days:2}``. Syntax and schemas are not needed: the format
    has no variants, and its arguments have types.
    """
    header = _GEMMA_NAME.match(body)
    if header is None:
        return _malformed(f"the call must begin with call:NAME: {excerpt(body)}")
    value, end, problem, is_cut_off = read_literal(body, header.end(), GEMMA)
    if problem is not None:
        return _malformed(problem, name=header["name"], is_cut_off=is_cut_off)
    call = ParsedCall(
        text="",
        name=header["name"],
        arguments=value,
        name_label="the text after call:",
        arguments_label="the value of the arguments",
    )
    return ReadCalls(calls=[call], end=end)


_FUNCTION = re.compile(r"\s*<function=(?P<name>[^>\n]*)>")
_FUNCTION_END = re.compile(r"\s*</function>")
_PARAMETER = re.compile(r"\s*<parameter=(?P<name>[^>\n]*)>")
# A closing tag ends a value only if a tag of the format follows; otherwise it is part of it.
_PARAMETER_END = re.compile(r"\n?</parameter>(?=\s*+(?:<parameter=|</function>))")
# A value that contains the beginning of another call was never closed. The same holds for a value
# that contains a line with the tag of another parameter of the tool.
_NEXT_CALL = re.compile(r"</(?:tool_call|function)>\s*+<(?:tool_call>\s*+<)?function=")
_NEXT_PARAMETER = re.compile(r"^[ \t]*<(?:parameter=|arg_key>)(?P<name>[^<>\n]*)[<>]", re.MULTILINE)


def _runs_over(value: str, key: str, parameters: Container[str]) -> bool:
    """Return True if a value contains the line of another parameter: it was never closed.

    `parameters` are those of the tool, `key` is the name of the one that the value belongs to.
    """
    if "<parameter=" not in value and "<arg_key>" not in value:
        return False
    names = (line["name"].strip() for line in _NEXT_PARAMETER.finditer(value))
    return any(name != key and name in parameters for name in names)


def read_xml(body: str, syntax: Syntax, schemas: Schemas) -> ReadCalls:
    """Read the call in a body, whose parameters stand in tags; the tool's schema gives them types.

    Example: ``<function=f>\\n<parameter=x>\\n1\\n</parameter>\\n</function>``
    """
    header = _FUNCTION.match(body)
    if header is None:
        return _malformed(f"the call must begin with <function=NAME>: {excerpt(body)}")
    name, at = header["name"].strip(), header.end()
    parameters: list[tuple[str, str]] = []
    while (parameter := _PARAMETER.match(body, at)) is not None:
        end = _PARAMETER_END.search(body, parameter.end())
        if end is None:
            problem = f"the parameter {excerpt(parameter['name'])} is not closed"
            # The body ends at the next mark of the format, which may be text of this value. So the
            # caller reads again with a body that ends at a later mark.
            return _malformed(problem, name=name, is_cut_off=True)
        # One newline at either end of a value is the format's. `end` begins with the second.
        value = body[parameter.end() : end.start()].removeprefix("\n")
        key = parameter["name"].strip()
        # A value that runs into the next call, or into another parameter, was never closed.
        if _NEXT_CALL.search(value) or _runs_over(value, key, schemas.get(name, {})):
            return _malformed(f"the parameter {excerpt(key)} is not closed", name=name)
        parameters.append((key, value))
        at = end.end()
    if (closing := _FUNCTION_END.match(body, at)) is None:
        actual = f", found {excerpt(body[at:])}" if body[at:].strip() else ""
        return _malformed(f"the call is not closed: </function> is missing{actual}", name=name)
    return ReadCalls(calls=[_make_typed_call(name, parameters, schemas)], end=closing.end())


_KEY = re.compile(r"\s*<arg_key>(?P<name>.*?)</arg_key>\s*<arg_value>", re.DOTALL)
_LONE_KEY = re.compile(r"\s*<arg_key>(?:(?P<name>.*?)</arg_key>)?", re.DOTALL)
_SECOND_VALUE = re.compile(r"</arg_value>\s*+<arg_value>")
_VALUE_END = re.compile(r"</arg_value>(?=\s*+(?:<arg_key>|$|</tool_call>))")


def read_pairs(body: str, syntax: Syntax, schemas: Schemas) -> ReadCalls:
    """Read the call in a body: the tool's name, then pairs of a parameter's key and value.

    Example: ``f\\n<arg_key>x</arg_key>\\n<arg_value>1</arg_value>``. The tool's schema gives the
    values types. `syntax` is not needed: the format has no variants.
    """
    tag = body.find("<")
    at = tag if tag >= 0 else len(body)
    name = body[:at].strip()
    parameters: list[tuple[str, str]] = []
    while (key := _KEY.match(body, at)) is not None:
        end = _VALUE_END.search(body, key.end())
        if end is None:
            problem = f"the value of {excerpt(key['name'])} is not closed"
            # The body ends at the next mark of the format, which may be text of this value. So the
            # caller reads again with a body that ends at a later mark.
            return _malformed(problem, name=name, is_cut_off=True)
        parameter, value = key["name"].strip(), body[key.end() : end.start()]
        if _SECOND_VALUE.search(value):  # 1</arg_value><arg_value>2
            return _malformed(f"the parameter {excerpt(parameter)} has two values", name=name)
        # A line of the value opens another parameter of the tool: the value's closing tag, and
        # perhaps that parameter's opening tag, are broken.
        if _runs_over(value, parameter, schemas.get(name, {})):
            return _malformed(f"the value of {excerpt(parameter)} is not closed", name=name)
        parameters.append((parameter, value))
        at = end.end()
    if (key := _LONE_KEY.match(body, at)) is not None:  # <arg_key>x, or <arg_key>x</arg_key>
        fault = "is not closed" if key["name"] is None else f"{excerpt(key['name'])} has no value"
        return _malformed(f"the <arg_key> {fault}", name=name)
    return ReadCalls(calls=[_make_typed_call(name, parameters, schemas)], end=at)


def _make_typed_call(name: str, parameters: list[tuple[str, str]], schemas: Schemas) -> ParsedCall:
    """Make a call of parameters that are written as text and typed by the tool's schema."""
    arguments: dict[str, Any] = {}
    problem = None
    for key, text in parameters:
        if key in arguments:
            problem = f"the parameter {excerpt(key)} is given twice"
        arguments[key] = typed_value(text, schemas.get(name, {}).get(key, ()))
    return ParsedCall(
        text="",  # the caller sets it to the text between the marks
        name=name,
        arguments=arguments,
        problem=problem,
        # How a problem with the name is worded for the model: <function=f> or f<arg_key> has no
        # key "name", only a head before the parameters.
        name_label="the text of the call's head",
    )


_WORDS = {"True": True, "False": False, "None": None}
"""Python's words for JSON values, which models write too."""
_TYPES: dict[str, Callable[[Any], bool]] = {
    "integer": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    "boolean": lambda v: isinstance(v, bool),
    "null": lambda v: v is None,
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
}
"""JSON type -> True for its values. There is no string: every text is one."""


def typed_value(text: str, types: Sequence[str]) -> Any:
    """Return a parameter's text as a JSON value of one of these types, or as it is.

    Example: "7" becomes 7 for an integer, and stays "7" for a string or without types.
    """
    checks = [_TYPES[name] for name in types if name in _TYPES]
    if not checks:
        return text
    stripped = text.strip()
    value, end, problem, _ = read_json(stripped)
    if stripped in _WORDS:  # True, False or None, as in Python
        value = _WORDS[stripped]
    elif problem is not None or end != len(stripped):
        return text
    return value if any(has_type(value) for has_type in checks) else text


_CALL = re.compile(r"(?P<name>[^\W\d][\w.-]*)\s*\(")
_ARGUMENT = re.compile(r"(?P<key>[^\W\d]\w*)\s*=")


def read_python(body: str, syntax: Syntax, schemas: Schemas) -> ReadCalls:
    """Read the calls in a body (the text after an opening mark), written in Python's syntax.

    Examples: ``[f(x=1, y='a'), g()]`` and ``f(x=1)``. An array of JSON calls is read too.
    """
    start = skip_blank(body)
    if not body.startswith("[", start):  # f(x=1)
        call, end, is_cut_off = _read_python_call(body, start)
        # The text of a single call is left to the caller, which knows its marks.
        return ReadCalls(calls=[replace(call, text="")], end=end, is_cut_off=is_cut_off)
    at = skip_blank(body, start + 1)
    if body.startswith("{", at):  # [{"name": "f", "arguments": {}}]
        return read_list(body, syntax, schemas)
    calls: list[ParsedCall] = []
    while not body.startswith("]", at):
        if len(calls) >= MAX_CALLS:
            beyond = ParsedCall(text=body[at:], problem=TOO_MANY)
            return ReadCalls(calls=[*calls, beyond], end=len(body))
        call, end, is_cut_off = _read_python_call(body, at)
        calls.append(call)
        if is_cut_off or (end == len(body) and call.problem is not None):  # [f(x='a
            return ReadCalls(calls=calls, end=end, is_cut_off=is_cut_off)
        at = skip_blank(body, end)
        if body.startswith(",", at):
            at = skip_blank(body, at + 1)
        elif not body.startswith("]", at):  # [f() and text
            calls.append(ParsedCall(text=body[at:], problem="the list of calls is not closed"))
            return ReadCalls(calls=calls, end=len(body))
    return ReadCalls(
        calls=calls or [ParsedCall(text="", problem="the list holds no call")], end=at + 1
    )


def _read_python_call(body: str, at: int) -> tuple[ParsedCall, int, bool]:
    """Read the call at `at`: (call, position after it, True if the body ends inside a value).

    A malformed call ends where the next one begins, or where the list ends.
    """
    header = _CALL.match(body, at)
    if header is None:
        end = _end_of_broken_call(body, at)
        problem = f"expected NAME(KEY=VALUE, …), found {excerpt(body[at:end][:80])}"
        return ParsedCall(text=body[at:end], problem=problem), end, False
    try:
        arguments, end = _read_python_arguments(body, header.end())
    except LiteralError as error:
        end = len(body) if error.is_cut_off else _end_of_broken_call(body, header.end())
        problem = f"invalid arguments: {error}"
        malformed = ParsedCall(text=body[at:end], name=header["name"], problem=problem)
        return malformed, end, error.is_cut_off
    return ParsedCall(text=body[at:end], name=header["name"], arguments=arguments), end, False


def _read_python_arguments(body: str, at: int) -> tuple[dict[str, Any], int]:
    """Read arguments up to their closing parenthesis: (arguments, end). Raises LiteralError."""
    arguments: dict[str, Any] = {}
    at = skip_blank(body, at)
    while not body.startswith(")", at):
        key = _ARGUMENT.match(body, at)
        if key is None:
            problem = f"expected KEY=VALUE, found {excerpt(body[at : at + 60])}"
            raise LiteralError(problem, is_cut_off=at == len(body))
        if key["key"] in arguments:
            raise LiteralError(f"the argument {excerpt(key['key'])} is given twice")
        arguments[key["key"]], at = take_literal(body, key.end(), PYTHON)
        at = skip_blank(body, at)
        if body.startswith(",", at):
            at = skip_blank(body, at + 1)
        elif not body.startswith(")", at):
            problem = f"expected ',' or ')', found {excerpt(body[at : at + 60])}"
            raise LiteralError(problem, is_cut_off=at == len(body))
    return arguments, at + 1


# A parenthesis that ends a call: a comma and another call follow, or the list's end.
_CALL_END = re.compile(r"\)(?=\s*+(?:,\s*+[^\W\d][\w.-]*+\(|\]))")


def _end_of_broken_call(body: str, at: int) -> int:
    """Return the position after a call that cannot be read.

    It ends with a parenthesis after which another call or the list's end follows: in
    ``[f(x=), g()]`` with the first one. Without such a parenthesis, it reaches to the last bracket
    or to the end of the text.
    """
    parenthesis = _CALL_END.search(body, at)
    if parenthesis is not None:
        return parenthesis.end()
    bracket = body.rfind("]", at)
    return bracket if bracket >= 0 else len(body)


READERS: dict[str, Reader] = {
    "json": read_object,
    "json_list": read_list,
    "named_json": read_named,
    "xml": read_xml,
    "pairs": read_pairs,
    "gemma": read_gemma,
    "python": read_python,
}
"""Readers by the value of a spec's `syntax`."""
