"""The older `response_schema` dialect, which transformers 5.0 to 5.12 read, with every call kept.

A JSON schema whose nodes say how to take text apart: ``x-regex`` (one match), ``x-regex-iterator``
(all matches, for arrays), ``x-regex-key-value`` (a mapping), ``x-regex-substitutions``, ``x-parser:
json`` with a JMESPath ``transform``. The root's properties are the message's fields. Departures, on
completions that transformers raises on or returns nothing for:

1. a call that cannot be read is a malformed call, not an exception, and takes no other with it;
2. where the root's expression matches nothing (a call that is cut, text behind the calls), what
   stands before the first call is read by it, and the calls are looked for one by one;
3. parameters are typed by the tool's schema before any guess at what their text might be.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from agenttrain.chat.response_calls import Schemas, typed
from agenttrain.chat.response_content import INSIDE, LOOSE, ContentError, captures_inside
from agenttrain.chat.response_json import read_items, skip_blank, written_name
from agenttrain.chat.response_marked import parameters
from agenttrain.chat.response_node import Node, groups, node_of
from agenttrain.chat.response_parts import CALL_ID, MAX_CALLS, Found, Parts
from agenttrain.chat.response_regex import Pattern
from agenttrain.chat.response_template import CALLS, CONTENT_FIELD, REASONING, call_of

_REASONING_MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought\n", "<channel|>"),
)


@dataclass(frozen=True, kw_only=True)
class SchemaSpec:
    """A ResponseSpec made from a `response_schema`."""

    root: Node
    loose: Node
    """The same, but for JSON that may be almost JSON."""
    inside: bool = False
    """An expression captures the inside of an object's braces."""
    call_id: str = CALL_ID
    lenient: bool = False

    def marks(self, controls: Iterable[str]) -> tuple[str, ...]:
        """See ResponseSpec."""
        return tuple(control for control in controls if control in self._patterns)

    def opens_reasoning(self, prompt: str) -> bool:
        """See ResponseSpec."""
        opening = self._reasoning[0].rstrip()
        return bool(opening) and prompt.rstrip().endswith(opening)

    def parse(self, text: str, *, in_reasoning: bool, schemas: Sequence[Mapping]) -> Parts:
        """See ResponseSpec."""
        text = self._reasoning[0] + text if in_reasoning else text
        fields, beside = self.root.split(text), ""
        if fields is not None:
            calls = self._calls(fields.get(CALLS), text, parameters(schemas))
        else:
            # The root's expression reads what stands before the first call outside the reasoning.
            opening, closing = self._reasoning
            before, opened, _ = text.partition(self._opener) if self._opener else (text, "", "")
            start = len(before)
            if opened and closing and opening in before:
                # A stray closing mark after a call does not turn that call into reasoning.
                start = text.find(self._opener, max(text.find(closing), 0))
                start = len(text) if start < 0 else start
            fields = self.root.split(text[:start]) or {CONTENT_FIELD: text[:start]}
            calls, beside = self._each(text[start:], parameters(schemas))
        content = (self._text(fields, CONTENT_FIELD) or "") + beside
        thoughts = (self._text(fields, name) for name in REASONING)
        reasoning = next((text for text in thoughts if text is not None), None)
        return Parts(content=content.strip(), reasoning=reasoning, calls=calls)

    @cached_property
    def _patterns(self) -> str:
        return "\n".join(self.root.sources()).replace("\\n", "\n").replace("\\", "")

    @cached_property
    def _reasoning(self) -> tuple[str, str]:
        """The marks of reasoning that the expressions name."""
        return next((m for m in _REASONING_MARKS if m[1] in self._patterns), ("", ""))

    @cached_property
    def _iterator(self) -> Pattern | None:
        calls = self.root.properties.get(CALLS)
        return None if calls is None else calls.iterator

    @cached_property
    def _opener(self) -> str:
        """The text that every call begins with, if there is one."""
        source = self._iterator.source if self._iterator is not None else ""
        literal = re.match(r"\^?\(?((?:\\[^\w\s]|[^\\()\[\]{}.*+?|^$])+)", source)
        if literal is None:
            return ""
        # A last character that may be missing, or repeated, is not part of it.
        repeated = source[literal.end() :][:1] in ("?", "*", "+", "{")
        text = literal[1][:-1] if repeated else literal[1]
        return text.replace("\\", "") if len(text) > 2 else ""

    def _text(self, fields: Mapping[str, Any], name: str) -> str | None:
        node = self.root.properties.get(name)
        try:
            value = node.value(fields.get(name)) if node is not None else None
        except ContentError:
            return None
        return value.strip() if isinstance(value, str) else None

    def _calls(self, value: Any, completion: str, schemas: Schemas) -> list[Found]:
        node = self.root.properties.get(CALLS)
        if node is None or not isinstance(value, str):
            return []
        if node.iterator is not None:
            inner = node.inner(value)
            calls = self._each(inner, schemas)[0] if isinstance(inner, str) else []
            # Substitutions leave no span of the completion behind.
            return [c if c.text in completion else replace(c, text=completion) for c in calls]
        # Calls that are read as one value: all of a list, or item by item where it is broken.
        loose = False
        try:
            read = node.value(value)
        except ContentError as error:
            try:
                if not self.lenient:
                    raise
                read, loose = self.loose.properties[CALLS].value(value), True
            except ContentError:
                return self._repaired(node, value) or [Found(text=value, problem=str(error))]
        inner = node.inner(value)
        text = inner if isinstance(inner, str) else value
        values = read if isinstance(read, list) else [] if read is None else [read]
        values = values[: MAX_CALLS + 1]  # `capped` reports what is beyond
        calls = [call_of(item, text, schemas, inside=self.inside) for item in values]
        return [replace(call, lenient=loose) for call in calls]

    def _each(self, text: str, schemas: Schemas) -> tuple[list[Found], str]:
        """(calls, the text that is in none of them)."""
        calls: list[Found] = []
        outside: list[str] = []
        at = 0
        for match in self._iterator.matches(text) if self._iterator is not None else ():
            calls += self._unread(text[at : match.start()], outside)
            if len(calls) > MAX_CALLS:
                return calls, "".join(outside)
            calls += self._item(match, schemas)
            at = match.end()
        calls += self._unread(text[at:], outside)
        return calls, "".join(outside)

    def _unread(self, text: str, outside: list[str]) -> Iterator[Found]:
        """A malformed call for each opening in text that no match covers."""
        if not self._opener:
            outside.append(text)
            return
        before, *opened = text.split(self._opener, MAX_CALLS + 1)
        outside.append(before)
        for inside in opened:
            text = self._opener + inside
            yield Found(text=text, name=written_name(inside), problem="the call is not closed")

    def _item(self, match: Any, schemas: Schemas) -> list[Found]:
        """The call of one match; an opening inside it that is better read alone is a second."""
        text = match.group()
        call = self._call(match, text, schemas)
        inside = text.rfind(self._opener, 1) if self._opener else -1
        if call.problem is None or inside <= 0 or self._iterator is None:
            return [call]
        again = self._iterator.match(text[inside:])
        if again is None:
            return [call]
        second = self._call(again, text[inside:], schemas)
        if second.problem is not None:
            return [call]
        name = written_name(text[:inside])
        return [Found(text=text[:inside], name=name, problem="the call is not closed"), second]

    def _call(self, match: Any, text: str, schemas: Schemas) -> Found:
        given = groups(match)
        loose = False
        try:
            value = self._item_value(given, schemas, self.root)
        except ContentError as error:
            try:
                if not self.lenient:
                    raise
                value, loose = self._item_value(given, schemas, self.loose), True
            except ContentError:
                return Found(text=text, name=written_name(text), problem=str(error))
        return replace(call_of(value, text, {}, inside=self.inside), lenient=loose)

    def _item_value(self, given: Any, schemas: Schemas, root: Node) -> Any:
        """Read a call, with the parameters typed whose type the tool's schema tells."""
        items = root.properties[CALLS].items
        if items is None:
            return given
        value = items.value(given)
        name = call_of(value, "", {}).name
        if not isinstance(name, str) or not schemas.get(name):
            return value
        raw = items.value(given, raw=True)
        if not isinstance(value, dict) or not isinstance(raw, dict):
            return value
        inner, texts = value.get("function", value), raw.get("function", raw)
        if not isinstance(inner, dict) or not isinstance(texts, dict):
            return value
        arguments, written = inner.get("arguments"), texts.get("arguments")
        if not isinstance(arguments, dict) or not isinstance(written, dict):
            return value
        typed_arguments = {
            key: typed(text, schemas[name][key])
            for key, text in written.items()
            if isinstance(text, str) and key in schemas[name]
        }
        return {**inner, "arguments": arguments | typed_arguments}

    def _repaired(self, node: Node, value: str) -> list[Found]:
        try:
            inner = node.inner(value)
        except ContentError:
            return []
        if not isinstance(inner, str) or not inner.lstrip().startswith("["):
            return []
        key = "tool_name" if '"tool_name"' in inner else "name"
        calls: list[Found] = []
        for item in read_items(inner, skip_blank(inner) + 1, key, limit=MAX_CALLS + 1)[0]:
            if item.problem is not None:
                calls.append(Found(text=item.text, name=item.name, problem=item.problem))
                continue
            try:
                read = node.parsed(f"[{item.text}]")
                calls += [call_of(one, item.text, {}) for one in read or ()]
            except ContentError as error:
                calls.append(Found(text=item.text, problem=str(error)))
        return calls


def schema_spec(schema: Mapping[str, Any]) -> SchemaSpec:
    """The spec that a `response_schema` describes. Raises ValueError with the wrong key."""
    root = node_of(schema)
    inside = any(captures_inside(source) for source in root.sources())
    spec = SchemaSpec(
        root=node_of(schema, json_args={INSIDE: True}) if inside else root,
        loose=node_of(schema, json_args={INSIDE: inside, LOOSE: True}),
        inside=inside,
    )
    if spec.root.type not in ("object", None) or not spec.root.properties:
        raise ValueError("response_schema: the root must be an object with properties")
    return spec
