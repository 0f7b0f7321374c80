"""The `response_template` dialect of transformers >= 5.13, with every call kept.

https://huggingface.co/docs/transformers/chat_response_parsing describes it. A completion is a
sequence of regions: each field's `open` (text, list, or `open_pattern`) begins one and its `close`
ends it; what stands outside is the field without an `open`. Departures, all on completions that
transformers raises on or loses text of:

1. a region of calls that cannot be read, or is not closed, is a malformed call, not an exception;
2. a closing mark inside a JSON string belongs to the string;
3. regions of a field that does not repeat are joined, where transformers keeps the last;
4. `optional: false` asks for nothing: a missing field is empty.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from agenttrain.chat.response_calls import Schemas, typed
from agenttrain.chat.response_content import (
    CONTENT,
    INSIDE,
    LOOSE,
    ContentError,
    captures_inside,
    check_content,
    reshaped,
    with_braces,
)
from agenttrain.chat.response_json import kind, written_name
from agenttrain.chat.response_marked import MARKS_IN_STRINGS, parameters
from agenttrain.chat.response_parts import CALL_ID, MAX_CALLS, TOO_MANY, Found, Parts
from agenttrain.chat.response_regex import Hit, Pattern

CALLS = "tool_calls"
CONTENT_FIELD = "content"
MAX_REGIONS = 8 * MAX_CALLS
"""Regions of one completion that are read."""
REASONING = ("reasoning_content", "reasoning", "thinking")
_OPEN_BRACE = re.compile(r"\{(?:\\s[*+]\+?|\s)*$")
_TEMPLATE_KEYS = ("version", "defaults", "fields", "start_anchor", "start_anchor_pattern")
_FIELD_KEYS = (
    *("open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats"),
    *("join", "optional", "transform", "transform_each"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    name: str
    open: Pattern | None
    close: Pattern | None
    content: str
    content_args: Mapping[str, Any]
    transform: Any
    each: bool
    join: str


@dataclass(slots=True)
class _Region:
    """A stretch of text that one field has."""

    field: _Field
    start: int
    """Where its opening mark begins."""
    body: int
    captures: dict[str, str | None]
    stop: int = 0
    """Where its closing mark begins."""
    end: int = 0
    closed: bool = True
    value: Any = None
    problem: str | None = None
    loose: bool = False
    """Only a lenient spec reads it."""


@dataclass(frozen=True, kw_only=True)
class TemplateSpec:
    """A ResponseSpec made from a `response_template`."""

    fields: tuple[_Field, ...]
    anchor: Pattern
    source: Mapping[str, Any]
    """The `response_template` that it was made from."""
    call_id: str = CALL_ID
    lenient: bool = False

    @cached_property
    def _inside(self) -> bool:
        """Check that a mark captures the inside of an object's braces."""
        calls = (field for field in self.fields if field.name == CALLS)
        marks = (mark for field in calls for mark in (field.open, field.close))
        return any(mark is not None and captures_inside(mark.source) for mark in marks)

    def marks(self, controls: Iterable[str]) -> tuple[str, ...]:
        """See ResponseSpec."""
        patterns = [p for field in self.fields for p in (field.open, field.close) if p is not None]
        texts = [pattern.source for pattern in patterns]
        texts += [repr(field.content_args) for field in self.fields]
        read = "\n".join(texts).replace("\\", "")
        return tuple(control for control in controls if control in read)

    def opens_reasoning(self, prompt: str) -> bool:
        """See ResponseSpec."""
        start = None
        for anchor in self.anchor.matches(prompt):
            start = anchor.end()
        if start is None:
            return False
        last = self._regions(prompt[start:], inside=None)[-1:]
        return bool(last) and last[0].field.name in REASONING and not last[0].closed

    def parse(self, text: str, *, in_reasoning: bool, schemas: Sequence[Mapping]) -> Parts:
        """See ResponseSpec."""
        inside = next((f for f in self.fields if f.name in REASONING), None)
        regions = self._regions(text, inside=inside if in_reasoning else None)
        known = parameters(schemas)
        calls: list[Found] = []
        for region in regions:
            field = region.field
            if field.name != CALLS:
                continue
            span, problem = text[region.start : region.end], region.problem
            if problem is None and not region.closed and field.close is not None:
                problem = "the call is not closed"
            if problem is not None:
                name = region.captures.get("name") or written_name(span)
                calls.append(Found(text=span, name=name, problem=problem))
                continue
            values = region.value if isinstance(region.value, list) else [region.value]
            types = known if field.content in ("xml-inline", "kv-lines") else {}
            for value in values[: MAX_CALLS + 1]:  # `capped` reports what is beyond
                call = call_of(value, span, types, inside=self._inside)
                calls.append(replace(call, lenient=True) if region.loose else call)
        thoughts = [region for region in regions if region.field.name in REASONING]
        return Parts(
            content=_text(text, [r for r in regions if r.field.name == CONTENT_FIELD]),
            reasoning=_text(text, thoughts) if thoughts else None,
            calls=calls,
        )

    def _regions(self, text: str, *, inside: _Field | None) -> list[_Region]:
        """All regions in order; `inside`: the field whose region the text begins in."""
        regions: list[_Region] = []
        outside = next((field for field in self.fields if field.open is None), None)
        opening = [f for f in self.fields if f.open is not None]
        marks = _Marks(text, opening, outside, lenient=self.lenient)
        at = calls = 0
        if inside is not None:
            regions.append(_close(_Region(inside, 0, 0, {}), marks))
            at = regions[-1].end
        while at < len(text):
            field, hit = marks.next(at)
            if outside is not None and hit.start > at:
                regions.append(_Region(outside, at, at, {}, stop=hit.start, end=hit.end))
            if field is not None:
                calls += field.name == CALLS
                region = _Region(field, hit.start, hit.end, hit.groups)
                if calls > MAX_CALLS or len(regions) >= MAX_REGIONS:
                    # All that follows is one malformed call.
                    calls_field = next((f for f in self.fields if f.name == CALLS), field)
                    region = replace(region, field=calls_field, problem=TOO_MANY)
                    return [*regions, replace(region, stop=len(text), end=len(text))]
                regions.append(_close(region, marks))
            end = regions[-1].end if field is not None else hit.end
            # A mark of no width that nothing follows must not match again.
            at = end if end > at else at + 1
        return regions


class _Marks:
    """Marks that open and close fields, each searched once: again only behind its last hit."""

    def __init__(
        self, text: str, opening: Sequence[_Field], outside: _Field | None, *, lenient: bool
    ) -> None:
        self.text, self.lenient = text, lenient
        self._searches: list[tuple[_Field | None, Pattern]] = [
            (field, field.open) for field in opening if field.open is not None
        ]
        if outside is not None and outside.close is not None:
            self._searches.append((None, outside.close))
        self._hits: dict[Pattern, Hit | None] = {}
        self._openings: list[int] | None = None

    def next(self, at: int) -> tuple[_Field | None, Hit]:
        """(the field that opens, or None for the outer field's close, its mark) from `at` on.

        The earliest mark counts, of these the longest, of these an opening one.
        """
        end = len(self.text)
        best: tuple[_Field | None, Hit] = (None, Hit(end, end, {}))
        for field, pattern in self._searches:
            hit = self._hit(pattern, at)
            if hit is not None and (hit.start, -hit.end) < (best[1].start, -best[1].end):
                best = (field, hit)
        return best

    def close(self, field: _Field, at: int) -> Hit | None:
        """The field's first closing mark from `at` on."""
        return None if field.close is None else self._hit(field.close, at)

    def opening(self, field: _Field, at: int, *, count: int) -> list[int]:
        """Positions where the next `count` calls open, from `at` on."""
        if self._openings is None:
            self._openings = field.open.starts(self.text) if field.open is not None else []
        first = bisect_left(self._openings, at)
        return self._openings[first : first + count]

    def _hit(self, pattern: Pattern, at: int) -> Hit | None:
        hit = self._hits.get(pattern)
        if pattern not in self._hits or (hit is not None and hit.start < at):
            self._hits[pattern] = hit = pattern.search(self.text, at)
        return hit


def _close(region: _Region, marks: _Marks) -> _Region:
    """Return the region with its end.

    A closing mark inside a string of a call's value is part of it; a call that is not closed ends
    where the next one opens.
    """
    field = region.field
    hit = None if field.close is None else marks.close(field, region.body)
    region.closed = hit is not None or field.close is None
    region.stop, region.end = (hit.start, hit.end) if hit else (len(marks.text), len(marks.text))
    region.captures = {**region.captures, **(hit.groups if hit else {})}
    if field.name != CALLS:
        return region
    opening = marks.opening(field, region.body, count=MARKS_IN_STRINGS[-1] + 1)
    limit = opening[-1] if len(opening) > MARKS_IN_STRINGS[-1] else len(marks.text)
    cut = _read(region, marks) if region.stop <= limit else True
    longer = region
    for _ in range(MARKS_IN_STRINGS[-1]):
        hit = field.close.search(marks.text, longer.end) if field.close else None
        if not cut or not hit or not longer.closed or hit.start > limit or hit.end <= longer.end:
            break
        longer = replace(longer, stop=hit.start, end=hit.end, problem=None)
        cut = _read(longer, marks)
    if longer.problem is None and not cut:
        return longer
    if opening and opening[0] < region.stop:
        problem = "the call is not closed"
        return replace(region, stop=opening[0], end=opening[0], closed=False, problem=problem)
    return region


def _read(region: _Region, marks: _Marks) -> bool:
    """Fill in the value or problem of a call's region; return whether it ends inside a value."""
    field, text = region.field, marks.text[region.body : region.stop]

    def value(args: Mapping[str, Any]) -> Any:
        read = CONTENT[field.content](text, args)
        return reshaped(field.transform, read, region.captures, each=field.each)

    try:
        region.value = value(field.content_args)
    except ContentError as error:
        if marks.lenient and field.content == "json":
            with suppress(ContentError):
                region.value, region.loose = value({**field.content_args, LOOSE: True}), True
                return False
        region.problem = str(error)
        return error.cut
    return False


def _text(text: str, regions: Sequence[_Region]) -> str:
    if not regions:
        return ""
    bodies = [text[region.body : region.stop] for region in regions]
    return regions[0].field.join.join(bodies).strip()


def call_of(value: Any, text: str, schemas: Schemas, *, inside: bool = False) -> Found:
    """A call from a message's item: ``{"function": {"name": …, "arguments": …}}`` or its inside.

    `inside`: arguments that are text are what stands inside an object's braces.
    """
    inner = value.get("function", value) if isinstance(value, dict) else value
    if not isinstance(inner, dict):
        return Found(text=text, problem=f"the call must be a JSON object, not {kind(inner)}")
    name, arguments = inner.get("name"), inner.get("arguments")
    arguments = with_braces(arguments) if inside else arguments
    known = schemas.get(name, {}) if isinstance(name, str) else {}
    if isinstance(arguments, dict) and known:
        arguments = {
            key: typed(value, known.get(key)) if isinstance(value, str) else value
            for key, value in arguments.items()
        }
    written = value.get("id") if isinstance(value, dict) else None
    written = written if isinstance(written, str) else None
    return Found(text=text, name=name, arguments=arguments, id=written)


def template_spec(template: Mapping[str, Any]) -> TemplateSpec:
    """The spec that a `response_template` describes. Raises ValueError with the wrong key."""
    _only(template, _TEMPLATE_KEYS, "response_template")
    if template.get("version", 1) != 1:
        raise ValueError(f"version: {template['version']!r} is not known: it is 1")
    described = template["fields"]
    if not isinstance(described, Mapping) or not described:
        raise ValueError("fields: must hold at least one field")
    fields = tuple(_field(str(name), value) for name, value in described.items())
    if sum(field.open is None for field in fields) > 1:
        raise ValueError("fields: only one of them may have neither open nor open_pattern")
    anchor = _anchor(template, "start_anchor", "response_template")
    if anchor is None:
        raise ValueError("start_anchor is missing: what does the assistant's turn begin with?")
    return TemplateSpec(fields=fields, anchor=anchor, source=template)


def _only(settings: Mapping[str, Any], known: Sequence[str], scope: str) -> None:
    for key in settings:
        if key not in known:
            raise ValueError(f"{scope}.{key} is not known: the keys are {', '.join(known)}")


def _field(name: str, settings: Any) -> _Field:
    scope = f"fields.{name}"
    if not isinstance(settings, Mapping):
        raise ValueError(f"{scope}: must be a mapping, not {settings!r}")
    _only(settings, _FIELD_KEYS, scope)
    content, arguments = settings.get("content", "text"), settings.get("content_args") or {}
    check_content(content, arguments, settings.get("transform"), scope)
    opening, closing = _anchor(settings, "open", scope), _anchor(settings, "close", scope)
    # The marks may have taken the braces of what stands between them.
    taken = opening is not None and _OPEN_BRACE.search(opening.source) is not None
    return _Field(
        name=name,
        open=opening,
        close=closing,
        content=content,
        content_args={**arguments, INSIDE: True} if taken and content == "json" else arguments,
        transform=settings.get("transform"),
        each=bool(settings.get("transform_each")),
        join=str(settings.get("join") or ""),
    )


def _anchor(settings: Mapping[str, Any], key: str, scope: str) -> Pattern | None:
    """The pattern of a mark that is given as text, as a list of texts, or as a pattern."""
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
    escaped = (
        "".join(c if c.isalnum() or c.isspace() else f"\\{c}" for c in text)
        for text in sorted(texts, key=len, reverse=True)
    )
    return Pattern("|".join(escaped), f"{scope}.{key}", text=texts[0] if len(texts) == 1 else None)
