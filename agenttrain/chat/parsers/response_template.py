"""Parse with the `response_template` dialect of transformers >= 5.13, losing no call.

https://huggingface.co/docs/transformers/chat_response_parsing describes it. A completion is a
sequence of regions: each field's `open` (text, list, or `open_pattern`) begins one and its `close`
ends it; text outside of them belongs to the field without an `open`. Departures, all on completions
for which transformers raises or loses text:

1. a region of calls that cannot be read, or is not closed, is a malformed call, not an exception;
2. a closing mark inside a JSON string belongs to the string;
3. regions of a field that does not repeat are joined; transformers keeps the last one;
4. `optional: false` has no effect: a missing field is empty.

A field's `content` parser (`CONTENT`) reads the text of a region, and `reshape` brings the value
into the field's shape.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from functools import cache, partial
from typing import Any

from agenttrain.chat.parsers.base import CALL_ID, MAX_CALLS, TOO_MANY, ParsedCall, ParsedCompletion
from agenttrain.chat.parsers.calls import Schemas, find_arguments_key, typed_value
from agenttrain.chat.parsers.marked import MARKS_IN_STRINGS, types_by_tool
from agenttrain.chat.parsers.patterns import Hit, Pattern
from agenttrain.chat.parsers.values import (
    Dialect,
    LiteralError,
    excerpt,
    kind,
    read_json,
    read_literal,
    read_loose,
    written_name,
)
from agenttrain.utils.messages import ARGUMENT_KEYS

CALLS = "tool_calls"
EMPTY: tuple[Any, ...] = (None, "", {}, [])
CONTENT_FIELD = "content"
MAX_REGIONS = 8 * MAX_CALLS
"""Regions of one completion that are read."""
REASONING = ("reasoning_content", "reasoning", "thinking")
# A mark that ends with an opening brace and perhaps blanks: <tool_call>\{
_OPEN_BRACE = re.compile(r"\{(?:\\s[*+]\+?|\s)*$")
_TEMPLATE_KEYS = ("version", "defaults", "fields", "start_anchor", "start_anchor_pattern")
_FIELD_KEYS = (
    *("open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats"),
    *("join", "optional", "transform", "transform_each"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    """A field of the template, with compiled marks."""

    name: str
    """Field of the message: `content`, `tool_calls` or one of REASONING."""
    open: Pattern | None
    """Opening mark. None: the field has the text outside the regions of the other fields."""
    close: Pattern | None
    """Closing mark. None: a region reaches to the end of the text."""
    content: str
    """Name of the parser in CONTENT that reads a region's text."""
    content_args: Mapping[str, Any]
    """Arguments of that parser."""
    transform: Any
    """Shape of the value, with placeholders: ``{"function": "{content}"}``; None leaves it."""
    transform_each: bool
    """The value is a list, and the transform is that of each item."""
    join: str
    """Text between the joined regions of the field."""


@dataclass(slots=True)
class _Region:
    """A stretch of a completion that belongs to one field.

    ::

        <tool_call>{"name": "f"}</tool_call>
        |start     |body        |stop       |end
    """

    field: _Field
    start: int
    """Beginning of its opening mark."""
    body: int
    """End of its opening mark."""
    captures: dict[str, str | None]
    """Named groups of the marks, e.g. a call's name."""
    stop: int = 0
    """Beginning of its closing mark."""
    end: int = 0
    """End of its closing mark."""
    closed: bool = True
    """It has its closing mark, or the field needs none."""
    value: Any = None
    """The calls, in the transform's shape; None for other fields."""
    json: Any = None
    """The JSON value that was read, before the field's transform; None for other content."""
    problem: str | None = None
    """Reason why the calls cannot be read."""
    loose: bool = False
    """Only a spec with `lenient` accepts the value."""


@dataclass(frozen=True, kw_only=True)
class TemplateSpec:
    """A ResponseSpec made from a `response_template`.

    `parse` splits a completion into regions: each field's opening mark begins one. Then it joins
    the regions of content and of reasoning, and makes calls of those of `tool_calls`.
    """

    fields: tuple[_Field, ...]
    anchor: Pattern
    """Matches the text that begins an assistant's turn."""
    source: Mapping[str, Any]
    """The `response_template` from which it was made."""
    lacks_braces: bool = False
    """A mark of the calls captures the members of an object without its braces: ``"x": 1``."""
    call_id: str = CALL_ID
    """Format string for the ids of calls, as in ResponseSpec."""
    lenient: bool = False
    """Arguments that are almost JSON are accepted."""

    def marks(self, controls: Iterable[str]) -> tuple[str, ...]:
        """See ResponseSpec."""
        patterns = [p for field in self.fields for p in (field.open, field.close) if p is not None]
        texts = [pattern.source for pattern in patterns]
        # The parsers' settings may hold control tokens too: string_delims [['<|"|>', '<|"|>']].
        texts += [repr(field.content_args) for field in self.fields]
        all_texts = "\n".join(texts).replace("\\", "")  # the patterns' escapes
        return tuple(control for control in controls if control in all_texts)

    def opens_reasoning(self, prompt: str) -> bool:
        """See ResponseSpec."""
        anchors = self.anchor.matches(prompt)
        if not anchors:
            return False
        turn = prompt[anchors[-1].end() :]
        last = self._split_regions(turn, begins_in=None)[-1:]
        return bool(last) and last[0].field.name in REASONING and not last[0].closed

    def parse(
        self, text: str, *, in_reasoning: bool, schemas: Sequence[Mapping]
    ) -> ParsedCompletion:
        """Split a completion into content, reasoning and calls; see `ResponseSpec.parse`."""
        reasoning_field = next((f for f in self.fields if f.name in REASONING), None)
        regions = self._split_regions(text, begins_in=reasoning_field if in_reasoning else None)
        types_by_name = types_by_tool(schemas)
        calls: list[ParsedCall] = []
        for region in regions:
            if region.field.name == CALLS:
                calls += self._region_calls(region, text[region.start : region.end], types_by_name)
        reasoning = [region for region in regions if region.field.name in REASONING]
        return ParsedCompletion(
            content=_join_bodies(text, [r for r in regions if r.field.name == CONTENT_FIELD]),
            reasoning=_join_bodies(text, reasoning) if reasoning else None,
            calls=calls,
        )

    def _region_calls(self, region: _Region, span: str, schemas: Schemas) -> Iterator[ParsedCall]:
        """Yield the calls of a region, whose whole text is `span`.

        A region whose calls could not be read, or that is not closed, is one malformed call.
        """
        field, problem = region.field, region.problem
        if problem is None and not region.closed and field.close is not None:
            problem = "the call is not closed"
        if problem is not None:
            name = region.captures.get("name") or written_name(span)
            yield ParsedCall(text=span, name=name, problem=problem)
            return
        values = region.value if isinstance(region.value, list) else [region.value]
        # The parsers `xml-inline` and `kv-lines` leave arguments as text, which the tools' schemas
        # give types. JSON has types of its own.
        argument_schemas = schemas if field.content in ("xml-inline", "kv-lines") else {}
        # `values` have the transform's shape, `region.json` is the JSON before it, as the model
        # wrote it. One call beyond MAX_CALLS is read, so that `parse_response` reports it.
        for value, json_value in pair_with_json(values[: MAX_CALLS + 1], region.json):
            call = call_from_item(value, span, argument_schemas, lacks_braces=self.lacks_braces)
            # The transform may have left out an argument that stands under an unexpected key.
            call = with_all_arguments(call, json_value, schemas)
            yield replace(call, lenient=True) if region.loose else call

    def _split_regions(self, text: str, *, begins_in: _Field | None) -> list[_Region]:
        """Split a text into regions; with `begins_in`, it begins inside a region of that field.

        `_find_end` sets where a region ends. Two kinds end otherwise: text between the marks of
        other fields ends at the next mark, and a region after too many has all remaining text.
        """
        regions: list[_Region] = []
        # The field that has the text outside the regions of the others, usually the content. Its
        # closing mark, e.g. <|im_end|>, ends such text and belongs to no field.
        outside_field = next((field for field in self.fields if field.open is None), None)
        searches: list[tuple[_Field | None, Pattern]] = []
        searches += [(field, field.open) for field in self.fields if field.open is not None]
        if outside_field is not None and outside_field.close is not None:
            searches.append((None, outside_field.close))
        marks = _Marks(text, searches, lenient=self.lenient)
        at = 0  # end of the text that has been split
        call_regions = 0  # so far
        if begins_in is not None:
            regions.append(_find_end(_Region(begins_in, start=0, body=0, captures={}), marks))
            at = regions[-1].end
        while at < len(text):
            # The field is None for the closing mark of `outside_field`, and at the text's end.
            field, mark = marks.next(at)
            if outside_field is not None and mark.start > at:
                before = _Region(outside_field, start=at, body=at, captures={})
                regions.append(replace(before, stop=mark.start, end=mark.end))
            if field is None:
                end = mark.end
            else:
                call_regions += 1 if field.name == CALLS else 0
                region = _Region(field, start=mark.start, body=mark.end, captures=mark.groups)
                if call_regions > MAX_CALLS or len(regions) >= MAX_REGIONS:
                    # The remaining text is one malformed call.
                    calls_field = next((f for f in self.fields if f.name == CALLS), field)
                    region = replace(region, field=calls_field, problem=TOO_MANY)
                    return [*regions, replace(region, stop=len(text), end=len(text))]
                region = _find_end(region, marks)
                regions.append(region)
                end = region.end
            at = max(end, at + 1)  # a mark of no width must not match again at the same position
        return regions


@dataclass(slots=True)
class _Marks:
    """Finds the marks that open and close fields in a text; made for one parse.

    The next hit of each mark is kept until the position is past it, so that parsing stays linear.
    """

    text: str
    searches: Sequence[tuple[_Field | None, Pattern]]
    """(field, its opening mark) of the fields that have one, then (None, mark) of the field that
    has the text outside of the others: its closing mark ends such text."""
    lenient: bool
    """The spec accepts calls that are almost JSON."""
    _hits: dict[Pattern, Hit | None] = dataclass_field(default_factory=dict, init=False)
    """Next hit of each mark that was searched; None: no more in this text."""
    _openings: list[int] | None = dataclass_field(default=None, init=False)
    """Positions of all opening marks of calls, once they are needed."""

    def next(self, at: int) -> tuple[_Field | None, Hit]:
        """Return (field, hit) of the next mark from `at` on; the field is None for a closing mark.

        The earliest mark wins, among these the longest. Of equal ones an opening mark wins, because
        it stands before the closing mark in `searches`. Without a mark, it is (None, an empty hit
        at the end of the text).
        """
        text_end = len(self.text)
        best_field, best = None, Hit(text_end, text_end, {})
        for field, pattern in self.searches:
            hit = self.search(pattern, at)
            if hit is None:
                continue
            is_earlier = hit.start < best.start
            is_longer = hit.start == best.start and hit.end > best.end
            if is_earlier or is_longer:
                best_field, best = field, hit
        return best_field, best

    def call_openings(self, field: _Field, at: int, *, count: int) -> list[int]:
        """Return the positions where the next `count` calls open, from `at` on."""
        if self._openings is None:
            self._openings = field.open.starts(self.text) if field.open is not None else []
        first = bisect_left(self._openings, at)
        return self._openings[first : first + count]

    def search(self, pattern: Pattern, at: int) -> Hit | None:
        """Return the first match of a mark from `at` on."""
        hit = self._hits.get(pattern)
        is_passed = hit is not None and hit.start < at
        if pattern not in self._hits or is_passed:
            self._hits[pattern] = hit = pattern.search(self.text, at)
        return hit


def _find_end(region: _Region, marks: _Marks) -> _Region:
    """Find the end of a region; read the value too if the field is that of the calls."""
    field = region.field
    hit = None if field.close is None else marks.search(field.close, region.body)
    region.closed = hit is not None or field.close is None
    region.stop, region.end = (hit.start, hit.end) if hit else (len(marks.text), len(marks.text))
    region.captures = {**region.captures, **(hit.groups if hit else {})}
    return _read_calls(region, marks) if field.name == CALLS else region


def _read_calls(region: _Region, marks: _Marks) -> _Region:
    """Read the value of a region of calls; return the region, perhaps with a later end.

    `region` ends with the first closing mark after its opening. But a mark inside a string is part
    of the string: ``{"x": "</tool_call>"}</tool_call>``. So while the value ends inside a string,
    it is read again up to the next closing mark. The tries, and the length of a region, are limited
    so that parsing stays linear.
    """
    field = region.field
    max_marks = MARKS_IN_STRINGS[-1]  # the most marks that a call's strings may hold
    # The value reaches at most to the opening mark after as many others.
    openings = marks.call_openings(field, region.body, count=max_marks + 1)
    limit = openings[-1] if len(openings) > max_marks else len(marks.text)
    # `_read_value` sets the region's value or its problem. It returns True if the text ended inside
    # a value, as a region beyond the limit does, which is not read.
    is_cut_off = region.stop > limit or _read_value(region, marks)
    longer = region
    for _ in range(max_marks):
        if not is_cut_off or not longer.closed:  # it was read to its end, or no mark closes it
            break
        hit = field.close.search(marks.text, longer.end) if field.close else None
        # A mark of no width at the end of the region would not make it longer.
        if hit is None or hit.end <= longer.end or hit.start > limit:
            break
        longer = replace(longer, stop=hit.start, end=hit.end, problem=None)
        is_cut_off = _read_value(longer, marks)
    is_read = longer.problem is None and not is_cut_off
    if is_read:
        return longer
    # No closing mark completes the value: the first region stays, with its problem. But it ends
    # where the next call opens.
    if openings and openings[0] < region.stop:
        problem = "the call is not closed"
        return replace(region, stop=openings[0], end=openings[0], closed=False, problem=problem)
    return region


def _read_value(region: _Region, marks: _Marks) -> bool:
    """Set the value or the problem of a region of calls.

    Return True if the region ends inside a value, which a later closing mark may complete.
    """
    field, text = region.field, marks.text[region.body : region.stop]
    tried_args = [field.content_args]
    if marks.lenient and field.content == "json":
        tried_args.append({**field.content_args, LOOSE: True})
    problem: str | None = None
    is_cut_off = False
    for args in tried_args:
        try:
            content = CONTENT[field.content](text, args)
            region.value = reshape(
                field.transform, content, region.captures, each=field.transform_each
            )
            region.json = content if field.content == "json" else None
        except ContentError as error:
            if problem is None:  # report the strict reader's problem
                problem, is_cut_off = str(error), error.is_cut_off
        else:
            region.loose = problem is not None
            return False
    region.problem = problem
    return is_cut_off


def _join_bodies(text: str, regions: Sequence[_Region]) -> str:
    """Return the joined texts of the regions of one field."""
    if not regions:
        return ""
    bodies = [text[region.body : region.stop] for region in regions]
    return regions[0].field.join.join(bodies).strip()


def call_from_item(
    value: Any, text: str, schemas: Schemas, *, lacks_braces: bool = False
) -> ParsedCall:
    """Make a call of ``{"function": {"name": …, "arguments": …}}``, or of the mapping inside it.

    The arguments may be a mapping, or a text, which `parse_response` decodes::

        {"x": "1"}    `schemas` give types to arguments that are text; without types they stay text
        '{"x": 1}'    stays as it is
        '"x": 1'      gets its braces if `lacks_braces`

    `text` is the span of the completion that the call was read from. A key that is none of a call's
    makes the call malformed.
    """
    function = value.get("function", value) if isinstance(value, dict) else value
    if not isinstance(function, dict):
        problem = f"the call must be a JSON object, not {kind(function)}"
        return ParsedCall(text=text, problem=problem)
    arguments_key, keys_problem = find_arguments_key(function)
    name, arguments = function.get("name"), function.get(arguments_key)
    if lacks_braces and isinstance(arguments, str) and arguments.strip():
        has_braces = arguments.lstrip().startswith("{")
        arguments = arguments if has_braces else f"{{{arguments}}}"
    types: Mapping[str, Sequence[str]] = schemas.get(name, {}) if isinstance(name, str) else {}
    if isinstance(arguments, dict) and types:
        arguments = {
            parameter: typed_value(argument, types.get(parameter, ()))
            if isinstance(argument, str)
            else argument
            for parameter, argument in arguments.items()
        }
    call_id = value.get("id") if isinstance(value, dict) else None
    return ParsedCall(
        text=text,
        name=name,
        arguments=arguments,
        problem=keys_problem,
        id=call_id if isinstance(call_id, str) else None,
    )


def with_all_arguments(call: ParsedCall, json_value: Any, schemas: Schemas) -> ParsedCall:
    """Return a call with no argument lost; a transform made it from the JSON object `json_value`.

    The transform may read other keys than the model wrote. If the call has no arguments, they are
    taken from any of ARGUMENT_KEYS: with a transform that reads `arguments`, the object
    ``{"name": "f", "parameters": {"x": 1}}`` still gives a call with x=1.

    An unexpected key, such as ``{"name": "f", "x": 1}``, makes the call malformed if its value may
    be an argument: the call has none, or the object has the usual form {"name": …, "arguments": …}.
    `id` and `type` are unexpected if they are parameters of the tool in `schemas`.
    """
    function = json_value.get("function", json_value) if isinstance(json_value, dict) else None
    # The name stands outside the JSON, as in f{"x": 1}: the object is the arguments.
    is_arguments = call.arguments is json_value
    if call.problem is not None or not isinstance(function, dict) or is_arguments:
        return call
    argument_keys = [key for key in ARGUMENT_KEYS if key in function]
    # Leave only the keys whose values may be arguments: not the name, which is found by its value
    # because its key is not known, and no empty values. `argument_keys` stay in any case: two of
    # them are a problem even if they are empty.
    candidates = {
        key: value
        for key, value in function.items()
        if key in argument_keys or (value != call.name and value not in EMPTY)
    }
    types = schemas.get(call.name, {}) if isinstance(call.name, str) else {}
    # The only one of `argument_keys`, or the usual key if there is none. The problem is that there
    # are two, or an unexpected key.
    arguments_key, problem = find_arguments_key(candidates, parameters=types)
    is_given_twice = len(argument_keys) > 1
    has_usual_form = "name" in function
    lacks_arguments = not argument_keys and not call.arguments
    may_lose_argument = problem is not None and (has_usual_form or lacks_arguments)
    if is_given_twice or may_lose_argument:
        return replace(call, problem=problem)
    if argument_keys and not call.arguments:
        return replace(call, arguments=function[arguments_key])
    return call


def pair_with_json(values: Sequence[Any], json_value: Any) -> list[tuple[Any, Any]]:
    """Return the pairs (call, JSON object that it was made of); `values` are the calls.

    If there are fewer objects than calls, the pairs are not clear: each call gets None.
    """
    objects = json_value[: len(values)] if isinstance(json_value, list) else [json_value]
    if len(objects) != len(values):
        objects = [None] * len(values)
    return list(zip(values, objects, strict=True))


def make_template_spec(template: Mapping[str, Any]) -> TemplateSpec:
    """Make a spec of a `response_template`. Raises ValueError that names a wrong key."""
    _check_keys(template, _TEMPLATE_KEYS, "response_template")
    if template.get("version", 1) != 1:
        raise ValueError(f"version: {template['version']!r} is not known: it is 1")
    settings_by_field = template["fields"]
    if not isinstance(settings_by_field, Mapping) or not settings_by_field:
        raise ValueError("fields: must hold at least one field")
    fields = tuple(_compile_field(str(name), value) for name, value in settings_by_field.items())
    if sum(field.open is None for field in fields) > 1:
        raise ValueError("fields: only one of them may have neither open nor open_pattern")
    anchor = _compile_mark(template, "start_anchor", "response_template")
    if anchor is None:
        raise ValueError("start_anchor is missing: what does the assistant's turn begin with?")
    # A mark may capture the members of an object without its braces: \{(?P<arguments>.*)\}
    marks = (mark for field in fields if field.name == CALLS for mark in (field.open, field.close))
    lacks_braces = any(
        mark is not None and CAPTURED_WITHOUT_BRACES.search(mark.source) for mark in marks
    )
    return TemplateSpec(fields=fields, anchor=anchor, source=template, lacks_braces=lacks_braces)


def _check_keys(settings: Mapping[str, Any], allowed: Sequence[str], scope: str) -> None:
    for key in settings:
        if key not in allowed:
            raise ValueError(f"{scope}.{key} is not known: the keys are {', '.join(allowed)}")


def _compile_field(name: str, settings: Any) -> _Field:
    """Compile a field. Raises ValueError that names a wrong key."""
    scope = f"fields.{name}"
    if not isinstance(settings, Mapping):
        raise ValueError(f"{scope}: must be a mapping, not {settings!r}")
    _check_keys(settings, _FIELD_KEYS, scope)
    content, arguments = settings.get("content", "text"), settings.get("content_args") or {}
    check_content(content, arguments, settings.get("transform"), scope)
    opening = _compile_mark(settings, "open", scope)
    closing = _compile_mark(settings, "close", scope)
    # The opening mark may include the opening brace of the JSON object after it.
    takes_brace = opening is not None and _OPEN_BRACE.search(opening.source) is not None
    if takes_brace and content == "json":
        arguments = {**arguments, LACKS_BRACES: True}
    return _Field(
        name=name,
        open=opening,
        close=closing,
        content=content,
        content_args=arguments,
        transform=settings.get("transform"),
        transform_each=bool(settings.get("transform_each")),
        join=str(settings.get("join") or ""),
    )


def _compile_mark(settings: Mapping[str, Any], key: str, scope: str) -> Pattern | None:
    """Compile a mark that is given as text, as a list of texts, or as a pattern."""
    texts, source = settings.get(key), settings.get(f"{key}_pattern")
    if texts is not None and source is not None:
        raise ValueError(f"{scope}: {key} and {key}_pattern exclude each other")
    if source is not None:
        return Pattern(source, f"{scope}.{key}_pattern")
    if texts is None:
        return None
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, list) or not all(isinstance(t, str) and t for t in texts) or not texts:
        raise ValueError(f"{scope}.{key}: must be a text or a list of texts, none of them empty")
    # The longest text first, because an expression takes the first alternative that matches. Unlike
    # re.escape, this leaves blanks as they are: _OPEN_BRACE looks for them after a brace.
    escaped = (
        "".join(c if c.isalnum() or c.isspace() else f"\\{c}" for c in text)
        for text in sorted(texts, key=len, reverse=True)
    )
    only_text = texts[0] if len(texts) == 1 else None  # is searched faster than an expression
    return Pattern("|".join(escaped), f"{scope}.{key}", text=only_text)


LACKS_BRACES, LOOSE = " lacks_braces", " loose"
"""Further arguments for `json`: the text may be the members of an object without its braces
(``"x": 1``); it may be almost JSON (``{x: 1}``). Keys of users do not begin with a blank."""
CAPTURED_WITHOUT_BRACES = re.compile(r"(?:\\?\{|\[\{\])(?:\\s[*+]\+?|\s)*\((?!\?(?:[:=!>#]|<[=!]))")
"""Matches expressions that capture the text after an opening brace without the brace. Example:
``"arguments": \\{(?P<arguments>.*)\\}``"""
_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")


class ContentError(LiteralError):
    """A problem of a region's text; callers in this folder catch it."""


def parse_text(text: str, args: Mapping[str, Any]) -> str:
    """Return the text, without the blanks around it unless `strip` is false."""
    return text.strip() if args.get("strip", True) else text


def parse_number(text: str, args: Mapping[str, Any]) -> int | float:
    """Read a JSON number. Raises ContentError."""
    value, _, problem, _ = read_json(text.strip())
    if problem is not None or isinstance(value, bool) or not isinstance(value, int | float):
        raise ContentError(f"not a number: {excerpt(text)}")
    return value


def parse_json(text: str, args: Mapping[str, Any]) -> Any:
    """Read a text that is one JSON value, or the near-JSON that the parser's `args` describe.

    `args` are `content_args` of a `response_template` and our own LACKS_BRACES and LOOSE::

        string_delims   marks of strings beside quotes, [['<|"|>', '<|"|>']]
        unquoted_keys   {x: 1} is read
        LACKS_BRACES    "x": 1 is read
        LOOSE           almost JSON is read
        allow_non_json  other text is returned as it is; without this, it raises ContentError
    """
    delimiters = args.get("string_delims", ())
    marks = [(str(opening), str(closing)) for opening, closing in delimiters]
    if marks or args.get("unquoted_keys"):
        words = {"true": True, "false": False, "null": None}
        dialect = Dialect(raw_quotes=marks, bare_keys=bool(args.get("unquoted_keys")), words=words)
        value, end, problem, is_cut_off = read_literal(text, 0, dialect)
    else:
        value, end, problem, is_cut_off = read_json(text)
    if problem is None and text[end:].strip():
        problem = f"text after the JSON value: {excerpt(text[end:])}"
    if problem is None:
        return value
    if args.get(LACKS_BRACES):
        braced, end, braced_problem, _ = read_json(f"{{{text}}}")
        if braced_problem is None and end == len(text) + 2:
            return braced
    if args.get("allow_non_json"):  # before LOOSE: a text that is almost JSON is a text
        return text.strip()
    if args.get(LOOSE):
        loose = read_loose(text)
        if loose.problem is None:
            return loose.value
    raise ContentError(problem, is_cut_off=is_cut_off)


_tag_pattern = cache(partial(Pattern, key="tag_pattern"))


def parse_xml_inline(text: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Read parameters that `tag_pattern` finds: ``<a>1</a><b>2</b>`` is {"a": "1", "b": "2"}."""
    parameters: dict[str, Any] = {}
    for tag in _tag_pattern(args["tag_pattern"]).matches(text):
        value = _parse_value(tag["value"] or "", args.get("value_parser"))
        _add_parameter(parameters, tag["key"], value, merge=bool(args.get("merge_duplicates")))
    return parameters


def _add_parameter(parameters: dict[str, Any], key: str, value: Any, *, merge: bool) -> None:
    """Add a parameter; with `merge`, a key given twice has a list of values."""
    if key not in parameters:
        parameters[key] = value
        return
    if not merge:
        raise ContentError(f"the parameter {excerpt(key)} is given twice")
    earlier = parameters[key]
    parameters[key] = [*(earlier if isinstance(earlier, list) else [earlier]), value]


def parse_kv_lines(text: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Read parameters, one on each line: ``a: 1`` and ``b: 2`` are {"a": "1", "b": "2"}.

    A line without the separator is left out. `args` may hold other separators, `line_sep` and
    `kv_sep`, the `value_parser` of the values, and `strip: false`, which keeps the blanks around
    lines, keys and values. A key given twice is a ContentError: only `xml-inline` can merge.
    """
    parameters: dict[str, Any] = {}
    for line in text.split(args.get("line_sep", "\n")):
        # Stripped first, because the separator may be a blank: "  a 1".
        stripped_line = parse_text(line, args)
        key, separator, value = stripped_line.partition(args.get("kv_sep", ":"))
        if separator:
            value = _parse_value(parse_text(value, args), args.get("value_parser"))
            _add_parameter(parameters, parse_text(key, args), value, merge=False)
    return parameters


def _parse_value(text: str, parser: Mapping[str, Any] | None) -> Any:
    """Return a parameter's text, read by its `value_parser` if it has one."""
    if parser is None:
        return text
    return CONTENT[parser.get("name", "text")](text, parser.get("args") or {})


CONTENT: dict[str, Callable[[str, Mapping[str, Any]], Any]] = {
    "text": parse_text,
    "int": parse_number,
    "float": parse_number,
    "bool": lambda text, args: text.strip().lower() in ("true", "1"),
    "json": parse_json,
    "xml-inline": parse_xml_inline,
    "kv-lines": parse_kv_lines,
}
"""Parsers by the value of a field's `content`; called with the text and `content_args`."""


def check_content(name: Any, args: Any, transform: Any, scope: str) -> None:
    """Raise ValueError for settings of a template's field that cannot work.

    `name` is the content's parser, such as ``json``, `args` are its arguments, `transform` is the
    shape of the result, and `scope` is the field's path for errors: ``fields.tool_calls``.
    """
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
            # `all`: neither of the two may be an empty text.
            if not isinstance(pair, list) or len(pair) != 2 or not all(map(str, pair)):
                raise ValueError(
                    f"{scope}.content_args.string_delims: must be a list of [opening, closing], "
                    f"not {quotes!r}"
                )
    if name == "kv-lines":
        for key in ("line_sep", "kv_sep"):
            if key in args and (not isinstance(args[key], str) or not args[key]):
                raise ValueError(f"{scope}.content_args.{key}: must be a text, not {args[key]!r}")
    if (value_parser := args.get("value_parser")) is not None:
        parser_scope = f"{scope}.content_args.value_parser"
        if not isinstance(value_parser, Mapping):
            raise ValueError(
                f"{parser_scope}: must be a mapping, as {{name: json}}, not {value_parser!r}"
            )
        parser_args = value_parser.get("args") or {}
        check_content(value_parser.get("name", "text"), parser_args, None, parser_scope)
    _check_transform(transform, scope)


def _check_transform(transform: Any, scope: str) -> None:
    """Raise ValueError for a text with a placeholder and anything else: ``"my {name}"``.

    Two placeholders side by side are such a text too.
    """
    parts = transform.values() if isinstance(transform, Mapping) else transform
    if isinstance(transform, Mapping | list):
        for part in parts:
            _check_transform(part, scope)
    elif isinstance(transform, str):
        has_placeholder = _PLACEHOLDER.search(transform) is not None
        if has_placeholder and not _PLACEHOLDER.fullmatch(transform):
            raise ValueError(f"{scope}.transform: {transform!r} mixes a placeholder with more text")


def reshape(transform: Any, value: Any, captures: Mapping[str, Any], *, each: bool) -> Any:
    """Bring a value into the transform's shape: fill in its placeholders. Raises ContentError.

    Example, with the value ``{"f": "add", "args": {"x": 1}}``, which is named `content`::

        {"name": "{content.f}", "arguments": "{content.args}"}
        -> {"name": "add", "arguments": {"x": 1}}

    `captures` are the named groups of the region's marks, for placeholders such as ``{name}``. With
    `each`, the value is a list of calls: the result has each item in the transform's shape, and
    placeholders name the item's keys, ``{f}``.
    """
    if transform is None:
        return value
    captured = {key: text for key, text in captures.items() if text is not None}
    if not each:
        return _fill(transform, {**captured, "content": value})
    if not isinstance(value, list):
        raise ContentError(f"the calls must be a JSON array, not {kind(value)}")
    # A wrong item must not cost the calls beside it. With `partly`, a missing key becomes None
    # instead of an error, and a non-mapping stays: each becomes a malformed call of its own.
    return [
        _fill(transform, {**captured, **item}, partly=True) if isinstance(item, dict) else item
        for item in value
    ]


def _fill(transform: Any, scope: Mapping[str, Any], *, partly: bool = False) -> Any:
    """Fill the placeholders of a transform with values of `scope`.

    Example: ``{"name": "{content.f}"}`` and ``{"content": {"f": "add"}}`` give ``{"name": "add"}``.
    A placeholder without a value is None with `partly`. Otherwise it raises ContentError.
    """
    if isinstance(transform, Mapping):
        return {key: _fill(part, scope, partly=partly) for key, part in transform.items()}
    if isinstance(transform, list):
        return [_fill(part, scope, partly=partly) for part in transform]
    placeholder = _PLACEHOLDER.fullmatch(transform) if isinstance(transform, str) else None
    if placeholder is None:
        return transform
    value: Any = scope
    for key in placeholder[1].split("."):  # of `content.f`: content, then f
        if key in ARGUMENT_KEYS and isinstance(value, Mapping) and key not in value:
            # The model may have written the arguments under another key.
            key = next((alias for alias in ARGUMENT_KEYS if alias in value), key)
        if not isinstance(value, Mapping) or key not in value:
            if partly:
                return None
            raise ContentError(f"the call has no {placeholder[1].removeprefix('content.')}")
        value = value[key]
    return value
