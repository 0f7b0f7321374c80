"""Parse with the older `response_schema` dialect of transformers 5.0 to 5.12, losing no call.

It is a JSON schema whose nodes split text: ``x-regex`` (one match), ``x-regex-iterator`` (all
matches, for arrays), ``x-regex-key-value`` (a mapping), ``x-regex-substitutions``, ``x-parser:
json`` with a JMESPath ``transform``. The root's properties are the message's fields. Departures, on
completions for which transformers raises or returns nothing:

1. a call that cannot be read is a malformed call, not an exception, and affects no other call;
2. if the root's expression does not match (a call is cut, text follows the calls), it reads the
   text before the first call, and the calls are searched one by one;
3. parameters get their types from the tool's schema; only others are guessed from their text.

A `Node` is one node of the schema: it splits its text and converts the result to its type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jmespath

from agenttrain.chat.parsers.base import CALL_ID, MAX_CALLS, ParsedCall, ParsedCompletion
from agenttrain.chat.parsers.calls import Schemas, typed_value
from agenttrain.chat.parsers.marked import types_by_tool
from agenttrain.chat.parsers.patterns import Pattern
from agenttrain.chat.parsers.response_template import (
    CALLS,
    CAPTURED_WITHOUT_BRACES,
    CONTENT,
    CONTENT_FIELD,
    LACKS_BRACES,
    LOOSE,
    REASONING,
    ContentError,
    call_from_item,
    pair_with_json,
    with_all_arguments,
)
from agenttrain.chat.parsers.values import (
    excerpt,
    kind,
    read_items,
    read_json,
    skip_blank,
    written_name,
)

_REASONING_MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought\n", "<channel|>"),
)


@dataclass(frozen=True, kw_only=True)
class SchemaSpec:
    """A ResponseSpec made from a `response_schema`.

    The root node's expression splits a completion into the fields of a message. If it does not
    match, e.g. because a call is not closed, `iterator` finds the calls one by one.
    """

    root: Node
    """The schema, which reads JSON strictly."""
    loose_root: Node
    """The same schema, compiled to accept text that is almost JSON too."""
    lacks_braces: bool
    """An expression captures the members of an object without its braces: ``"x": 1``."""
    patterns: str
    """The regular expressions of the schema, without their escapes."""
    reasoning: tuple[str, str]
    """(opening, closing) mark of the reasoning, found in the expressions; empty without any."""
    iterator: Pattern | None
    """The expression that finds single calls; None if the schema has none."""
    call_id: str = CALL_ID
    """Format string for the ids of calls, as in ResponseSpec."""
    lenient: bool = False
    """Arguments that are almost JSON are accepted."""

    def _read_strictly_first(self, read: Callable[[Node], Any]) -> tuple[Any, bool, str | None]:
        """Read with the strict schema, then, if `lenient`, with the loose one.

        `read` is called with the root node. Return (its value, True if only the loose schema could
        read it, the strict schema's problem if neither could or None).
        """
        problem: str | None = None
        for root in (self.root, self.loose_root) if self.lenient else (self.root,):
            try:
                return read(root), root is self.loose_root, None
            except ContentError as error:
                problem = problem or str(error)
        return None, False, problem

    def marks(self, controls: Iterable[str]) -> tuple[str, ...]:
        """See ResponseSpec."""
        return tuple(control for control in controls if control in self.patterns)

    def opens_reasoning(self, prompt: str) -> bool:
        """See ResponseSpec."""
        opening = self.reasoning[0].rstrip()
        return bool(opening) and prompt.rstrip().endswith(opening)

    def parse(
        self, text: str, *, in_reasoning: bool, schemas: Sequence[Mapping]
    ) -> ParsedCompletion:
        """Split a completion into content, reasoning and calls; see `ResponseSpec.parse`."""
        reasoning_open, _ = self.reasoning
        if in_reasoning:  # the expressions expect the mark, which the prompt holds
            text = reasoning_open + text
        fields = self.root.split(text)
        if fields is not None:
            calls = self._read_calls(fields.get(CALLS), text, types_by_tool(schemas))
            later_content = ""  # the expression has put all content into its field
        else:
            # The root's expression does not match, e.g. because a call is not closed. So it is
            # tried on the text before the calls, and the calls are read one by one.
            start = self._find_first_call(text)
            fields = self.root.split(text[:start]) or {CONTENT_FIELD: text[:start]}
            calls, later_content = self._read_each(text[start:], types_by_tool(schemas))
        content = (self._read_text(fields, CONTENT_FIELD) or "") + later_content
        # Schemas give the reasoning's field one of several names.
        reasonings = (self._read_text(fields, name) for name in REASONING)
        reasoning = next((text for text in reasonings if text is not None), None)
        return ParsedCompletion(content=content.strip(), reasoning=reasoning, calls=calls)

    def _find_first_call(self, text: str) -> int:
        """Return the position of the first call outside the reasoning; the text's end without one.

        Example: in ``<think><call>f</think><call>g`` it is that of the second ``<call>``. Reasoning
        that is not closed counts as none: in ``<think><call>f`` it is that of ``<call>``.
        """
        first = text.find(self._opener) if self._opener else -1
        opening, closing = self.reasoning
        # A call in the reasoning is none: search after the closing mark. A closing mark without
        # an opening mark does not turn the call before it into reasoning.
        if first >= 0 and closing and opening in text[:first]:
            reasoning_end = text.find(closing)
            if reasoning_end >= 0:  # else it is not closed, and the first call counts all the same
                first = text.find(self._opener, reasoning_end)
        return len(text) if first < 0 else first

    @cached_property
    def _opener(self) -> str:
        """The text with which calls begin; empty if the expression for calls begins with none.

        It shows where a call begins that is not closed, so that `iterator` does not match it.
        Example: ``<call>`` for the expression ``<call>(.*?)</call>``.
        """
        opener = _literal_beginning(self.iterator.source) if self.iterator is not None else ""
        # One or two characters, e.g. "{", stand in other texts too.
        return opener if len(opener) > 2 else ""

    def _read_text(self, fields: Mapping[str, Any], name: str) -> str | None:
        """Return the text of a field, read by its node; None if it has none."""
        node = self.root.properties.get(name)
        try:
            value = node.value(fields.get(name)) if node is not None else None
        except ContentError:
            return None
        return value.strip() if isinstance(value, str) else None

    def _read_calls(self, value: Any, completion: str, schemas: Schemas) -> list[ParsedCall]:
        """Read the calls in `value`, the text that the root's expression gives to `tool_calls`.

        A node with an `iterator` finds each call in the text. Otherwise the text is one value.
        """
        node = self.root.properties.get(CALLS)
        if node is None or not isinstance(value, str):
            return []
        if node.iterator is not None:
            inner = node.extract(value)
            calls = self._read_each(inner, schemas)[0] if isinstance(inner, str) else []
            # After substitutions a call's text may not occur in the completion.
            return [c if c.text in completion else replace(c, text=completion) for c in calls]
        return self._read_whole_value(node, value, schemas)

    def _read_whole_value(self, node: Node, value: str, schemas: Schemas) -> list[ParsedCall]:
        """Read calls that are one value: a whole list, or item by item if it cannot be read.

        `node` is that of `tool_calls`, and `value` is its text, e.g. ``[{"name": "f"}]``.
        """
        calls_value, is_loose, problem = self._read_strictly_first(
            lambda root: root.properties[CALLS].value(value)
        )
        if problem is not None:
            return self._read_list_items(node, value, schemas) or [
                ParsedCall(text=value, problem=problem)
            ]
        # `value` may be the JSON of the calls inside of marks: the node's expression cuts it out.
        inner = node.extract(value)
        calls_json = inner if isinstance(inner, str) else value
        if isinstance(calls_value, list):
            items = calls_value[: MAX_CALLS + 1]  # `parse_response` reports the last as too many
        else:
            items = [] if calls_value is None else [calls_value]
        calls = [
            call_from_item(item, calls_json, schemas, lacks_braces=self.lacks_braces)
            for item in items
        ]
        # The schema keeps only the keys that it describes. The JSON as the model wrote it shows
        # whether an argument stands under another key, and must not get lost.
        pairs = pair_with_json(calls, read_json(calls_json).value)
        return [
            replace(with_all_arguments(call, json_value, schemas), lenient=is_loose)
            for call, json_value in pairs
        ]

    def _read_each(self, text: str, schemas: Schemas) -> tuple[list[ParsedCall], str]:
        """Search the calls with `iterator`, one by one; return (calls, text outside of them).

        A text between two matches holds content and calls that are not closed.
        """
        calls: list[ParsedCall] = []
        content: list[str] = []
        at = 0  # end of the last match
        for match in self.iterator.matches(text) if self.iterator is not None else ():
            content_between, unclosed = self._unclosed_calls(text[at : match.start()])
            content.append(content_between)
            calls += unclosed
            if len(calls) > MAX_CALLS:
                return calls, "".join(content)
            at, text_of_call = match.end(), match.group()
            call = self._read_call(match, text_of_call, schemas)
            if call.problem is None:
                calls.append(call)
            else:
                # Its problem may be that it is two calls: one that is not closed, and the next one,
                # over whose opening the match ran.
                calls += self._split_merged(call, schemas)
        content_after, unclosed_after = self._unclosed_calls(text[at:])
        return [*calls, *unclosed_after], "".join([*content, content_after])

    def _split_merged(self, call: ParsedCall, schemas: Schemas) -> list[ParsedCall]:
        """Return the two calls in the text of a malformed one, or the call alone.

        The match of a call that is not closed may run over a good call after it:
        ``<call>{"name": <call>{"name": "f"}</call>``.
        """
        # Searched from 1 on: the opener at the beginning is the call's own.
        last_opener = call.text.rfind(self._opener, 1) if self._opener else -1
        if last_opener <= 0 or self.iterator is None:
            return [call]
        head, tail = call.text[:last_opener], call.text[last_opener:]
        match = self.iterator.find_match(tail)
        second = self._read_call(match, tail, schemas) if match else None
        if second is None or second.problem is not None:
            return [call]
        problem = "the call is not closed"
        return [ParsedCall(text=head, name=written_name(head), problem=problem), second]

    def _unclosed_calls(self, text: str) -> tuple[str, list[ParsedCall]]:
        """Return (content, malformed calls) of a text between the matches of the calls' expression.

        The text before the first opening is content. Each opening begins a call that is not closed:
        if it were, the expression would have matched it. Above MAX_CALLS, the last has all the
        remaining text.
        """
        if not self._opener:
            return text, []
        content, *bodies = text.split(self._opener, MAX_CALLS + 1)
        problem = "the call is not closed"
        return content, [
            ParsedCall(text=self._opener + body, name=written_name(body), problem=problem)
            for body in bodies
        ]

    def _read_call(self, match: Any, text: str, schemas: Schemas) -> ParsedCall:
        """Read the call that `iterator` has matched; `text` is that of the match."""
        captured = captured_groups(match)
        value, is_loose, problem = self._read_strictly_first(
            lambda root: self._value_with_types(captured, schemas, root)
        )
        if problem is not None:
            return ParsedCall(text=text, name=written_name(text), problem=problem)
        call = replace(
            call_from_item(value, text, {}, lacks_braces=self.lacks_braces), lenient=is_loose
        )
        if not isinstance(captured, str):  # named groups, not the text of the call's JSON
            return call
        # The schema keeps only the keys that it describes. The JSON as it was written shows whether
        # an argument got lost with another key.
        return with_all_arguments(call, read_json(captured).value, schemas)

    def _value_with_types(self, captured: Any, schemas: Schemas, root: Node) -> Any:
        """Return the value of a call, with parameters of the types in the tool's schema.

        `captured` is what the calls' expression has captured: a text, or named groups. The node for
        a call guesses types from the texts of parameters: ``7`` is a number. Where the tool's
        schema has a type, it is applied to the parameter's text instead. Raises ContentError.
        """
        call_node = root.properties[CALLS].items
        if call_node is None:  # the schema does not describe a call: the groups are the call
            return captured
        value = call_node.value(captured)
        name = call_from_item(value, "", {}).name
        if not isinstance(name, str) or not schemas.get(name):
            return value
        function = _function_with_arguments(value)
        # The same call with `raw`: parameters whose type the node would guess stay text.
        raw_function = _function_with_arguments(call_node.value(captured, raw=True))
        if function is None or raw_function is None:
            return value
        typed_arguments = {
            key: typed_value(text, schemas[name][key])
            for key, text in raw_function["arguments"].items()
            if isinstance(text, str) and key in schemas[name]
        }
        typed = {**function, "arguments": function["arguments"] | typed_arguments}
        # A call is {"function": {"name": …, "arguments": …}}, or only the inner mapping.
        return {**value, "function": typed} if "function" in value else typed

    def _read_list_items(self, node: Node, value: str, schemas: Schemas) -> list[ParsedCall]:
        """Read the calls of a malformed list one by one; return [] if the text is no list.

        One item that cannot be read must not cost the calls beside it. `node` is that of
        `tool_calls`, and `value` its text. The node cuts the list out of its marks (`extract`).
        """
        try:
            inner = node.extract(value)
        except ContentError:
            return []
        if not isinstance(inner, str) or not inner.lstrip().startswith("["):
            return []
        # `read_items` finds by this key where the next item begins after one that cannot be read.
        key = "tool_name" if '"tool_name"' in inner else "name"  # Cohere writes tool_name
        calls: list[ParsedCall] = []
        items, _ = read_items(inner, skip_blank(inner) + 1, key, limit=MAX_CALLS + 1)
        for item in items:
            if item.problem is not None:
                calls.append(ParsedCall(text=item.text, name=item.name, problem=item.problem))
                continue
            try:
                # The node converts lists of calls, so it gets a list of this item alone.
                converted = node.convert(f"[{item.text}]")
                # Arguments that the schema's keys do not cover are taken from the JSON itself.
                calls += [
                    with_all_arguments(call_from_item(call, item.text, {}), item.value, schemas)
                    for call in converted or ()
                ]
            except ContentError as error:
                calls.append(ParsedCall(text=item.text, problem=str(error)))
        return calls


_LITERAL_CHARACTER = r"(?:\\[^\w\s]|[^\\()\[\]{}.*+?|^$])"  # a plain one, or escaped: \{
_LITERAL_BEGINNING = re.compile(rf"\^?\(?({_LITERAL_CHARACTER}+)")


def _literal_beginning(source: str) -> str:
    """Return the text with which each match of an expression begins, as far as that is plain.

    Examples: ``<call>`` for ``(<call>.*)``, and ``[f`` for ``\\[fo?``. Of an expression with
    alternatives at its top level, ``ab|cd``, it is the beginning of the first.
    """
    literal = _LITERAL_BEGINNING.match(source)
    if literal is None:
        return ""
    text = literal[1]
    if source[literal.end() :][:1] in ("?", "*", "+", "{"):
        text = text[:-1]  # a quantifier makes the last character optional or repeats it
    # Without the escapes. One at the end has lost its character to the quantifier.
    return re.sub(r"\\(.?)", r"\1", text)


def _function_with_arguments(call: Any) -> dict[str, Any] | None:
    """Return the ``{"name": …, "arguments": {…}}`` of a call, which may stand under `function`.

    None for a call of another shape: a schema may give a call any.
    """
    function = call.get("function", call) if isinstance(call, dict) else None
    has_arguments = isinstance(function, dict) and isinstance(function.get("arguments"), dict)
    return function if has_arguments else None


def make_schema_spec(schema: Mapping[str, Any]) -> SchemaSpec:
    """Make a spec of a `response_schema`. Raises ValueError that names a wrong key.

    The schema is compiled to read JSON strictly, and once more with LOOSE, to accept almost JSON
    (keys without quotes, trailing commas), which a lenient spec tries second.
    """
    root = compile_node(schema)
    if root.type not in ("object", None) or not root.properties:
        raise ValueError("response_schema: the root must be an object with properties")
    sources = list(root.sources())
    # An expression may capture an object's members without its braces: \{(?P<arguments>.*)\}
    # Then the schema is compiled anew, to accept JSON without braces.
    lacks_braces = any(CAPTURED_WITHOUT_BRACES.search(source) for source in sources)
    # Without their escapes: marks of calls and reasoning stand in them as plain text.
    patterns = "\n".join(sources).replace("\\n", "\n").replace("\\", "")
    calls = root.properties.get(CALLS)
    return SchemaSpec(
        root=compile_node(schema, json_args={LACKS_BRACES: True}) if lacks_braces else root,
        loose_root=compile_node(schema, json_args={LACKS_BRACES: lacks_braces, LOOSE: True}),
        lacks_braces=lacks_braces,
        patterns=patterns,
        # The known pair of marks whose closing mark occurs. The opening one may be missing in an
        # expression for completions whose prompt holds it, <think>. The parser needs both: to see
        # that a prompt opens reasoning, and to look for calls only after the reasoning.
        reasoning=next((pair for pair in _REASONING_MARKS if pair[1] in patterns), ("", "")),
        iterator=None if calls is None else calls.iterator,
    )


_PARSERS: dict[str, dict[str, Any]] = {
    "json": {},
    "gemma4-tool-call": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
}
_TYPES = ("object", "array", "string", "integer", "number", "boolean", "any", None)
_SCALARS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}
NOTHING = object()
"""Stands for a key that a node does not have."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node of a `response_schema`, made by `compile_node`: it converts a text to a value.

    `value` runs `extract`, which applies the regular expression, and then `convert`, which parses
    the result. The root is used by `split` too. The fields without a docstring are JSON schema's
    keywords.

    A result of None means that there is no value: an expression does not match, the JSON is null,
    or the parent has no such key. The parent leaves the property out then.

    The methods' argument `raw` is for parameters, which may be text or JSON (`allow_non_json`).
    With `raw` they stay text, because the tool's schema decides later what they are.
    """

    type: str | None = None
    const: Any = NOTHING
    default: Any = NOTHING
    substitutions: tuple[tuple[Pattern, str], ...] = ()
    """(expression, replacement) of `x-regex-substitutions`."""
    regex: Pattern | None = None
    """`x-regex`: its groups are the value."""
    iterator: Pattern | None = None
    """`x-regex-iterator`: all its matches are the value, a list."""
    key_value: Pattern | None = None
    """`x-regex-key-value`: all its matches are the value, a mapping."""
    parser: str | None = None
    """`x-parser`, one of _PARSERS."""
    allow_non_json: bool = False
    """Text that is no JSON stays text instead of being an error."""
    transform: Callable[[Any], Any] | None = None
    """The compiled JMESPath expression `transform` of `x-parser-args`."""
    properties: Mapping[str, Node] = field(default_factory=dict)
    additional: Node | None = None
    """The node of keys that are not among the properties; None leaves them out."""
    items: Node | None = None
    prefix_items: tuple[Node, ...] = ()
    required: tuple[str, ...] = ()
    json_args: Mapping[str, Any] = field(default_factory=dict)
    """Our own arguments for the JSON parser: LACKS_BRACES and LOOSE."""

    def sources(self) -> Iterator[str]:
        """Yield the regular expressions of this node and those below it."""
        patterns = [p for p, _ in self.substitutions]
        for pattern in (*patterns, self.regex, self.iterator, self.key_value):
            if pattern is not None:
                yield pattern.source
        below = [*self.properties.values(), self.additional, self.items, *self.prefix_items]
        for node in below:
            if node is not None:
                yield from node.sources()

    def split(self, text: str) -> dict[str, Any] | None:
        """Return property -> its text or groups; None if this node's expression does not match.

        Without named groups in the expression, every property gets the whole text.
        """
        try:
            inner = self.extract(text)
        except ContentError:
            return None
        if isinstance(inner, str):
            return dict.fromkeys(self.properties, inner)
        return inner

    def extract(self, value: Any) -> Any:
        """Apply substitutions and ``x-regex``; return None if the expression does not match."""
        if self.substitutions or self.regex is not None:
            if not isinstance(value, str):
                raise ContentError(f"expected text, found {kind(value)}")
            for pattern, replacement in self.substitutions:
                value = pattern.substitute(replacement, value)
        if self.regex is None:
            return value
        match = self.regex.find_match(value)
        return None if match is None else captured_groups(match)

    def value(self, value: Any, *, raw: bool = False) -> Any:
        """Convert a value as this node says: a text, or a value that its parent has split off.

        `raw` leaves parameters text. Raises ContentError.
        """
        if self.const is not NOTHING:
            return self.const
        if value is None:
            return None
        value = self.extract(value)
        if value is None:
            return None
        return self.convert(value, raw=raw)

    def convert(self, value: Any, *, raw: bool = False) -> Any:
        """Convert the result of `extract`. Raises ContentError.

        The steps, of which a node may have any: `iterator` or `key_value` splits the text,
        `parser` reads it as JSON, `transform` picks parts of the value, `type` converts it. `raw`
        leaves parameters text.
        """
        pattern = self.iterator or self.key_value
        if pattern is not None:
            if not isinstance(value, str):
                raise ContentError(f"expected text, found {kind(value)}")
            matches = [captured_groups(match) for match in pattern.matches(value)]
            parts = matches if self.iterator is not None else _key_value_mapping(matches)
            value = parts or None  # a field without a match is left out
        stays_text = raw and self.allow_non_json
        if self.parser is not None and value is not None and not stays_text:
            if not isinstance(value, str):
                raise ContentError(f"expected JSON text, found {kind(value)}")
            # All parsers of this dialect read JSON, each with other arguments. `json_args` are
            # ours: the text may lack its braces, or be almost JSON.
            args = {**_PARSERS[self.parser], "allow_non_json": self.allow_non_json}
            value = CONTENT["json"](value, {**args, **self.json_args})
        if self.transform is not None:
            try:
                value = self.transform(value)
            except (jmespath.exceptions.JMESPathError, RecursionError, TypeError) as error:
                raise ContentError(f"the call does not fit the schema: {error}") from error
        if value is None:
            return None
        if self.type == "object":
            return self._convert_object(value, raw=raw)
        if self.type == "array":
            return self._convert_array(value, raw=raw)
        return _convert_scalar(self.type, value)

    def _convert_array(self, value: Any, *, raw: bool) -> list[Any]:
        """Convert the items of a list: each by `items`, or the n-th by the n-th of `prefix_items`.

        A value that is no list is taken for a list of one item if `prefix_items` describe just one.
        If a schema has both keywords, `items` counts. `raw` is that of `convert`.
        """
        if not isinstance(value, list) and len(self.prefix_items) == 1:
            value = [value]
        if not isinstance(value, list):
            raise ContentError(f"expected a JSON array, found {kind(value)}")
        if self.items is not None:
            return [self.items.value(item, raw=raw) for item in value]
        if len(value) != len(self.prefix_items):
            raise ContentError(f"expected {len(self.prefix_items)} items, found {len(value)}")
        return [n.value(v, raw=raw) for n, v in zip(self.prefix_items, value, strict=True)]

    def _convert_object(self, value: Any, *, raw: bool) -> dict[str, Any]:
        """Convert the properties of a call or message, given as a mapping or as a text.

        Of a text, each property's node gets all of it, and cuts its own part out with its
        ``x-regex``. `raw` is that of `convert`.
        """
        if isinstance(value, str):
            value = dict.fromkeys(self.properties, value)
        elif not isinstance(value, dict):
            raise ContentError(f"expected a JSON object, found {kind(value)}")
        fields: dict[str, Any] = {}
        for key, node in self.properties.items():
            converted = node.value(value.get(key), raw=raw)
            if converted is None and node.default is not NOTHING:
                converted = node.default
            if converted is not None:
                fields[key] = converted
        if self.additional is not None:
            extra = {k: v for k, v in value.items() if k not in self.properties}
            fields |= {k: self.additional.value(v, raw=raw) for k, v in extra.items()}
        missing = [key for key in self.required if key not in fields]
        if missing:
            raise ContentError(f"the call has no {', '.join(missing)}")
        return fields


def _key_value_mapping(matches: list[Any]) -> dict[str, Any]:
    """Return the mapping of the groups `key` and `value` of all matches. Raises ContentError."""
    pairs: dict[str, Any] = {}
    for pair in matches:
        if pair["key"] in pairs:
            raise ContentError(f"the parameter {excerpt(pair['key'])} is given twice")
        pairs[pair["key"]] = pair.get("value", "")
    return pairs


def captured_groups(match: Any) -> Any:
    """Return the named groups of a match, else its first group, else the whole match."""
    if match.re.groupindex:
        return {key: text for key, text in match.groupdict().items() if text is not None}
    return match.group(1) if match.re.groups else match.group()


def _convert_scalar(name: str | None, value: Any) -> Any:
    """Convert a value to the type of this name. Raises ContentError."""
    if name is None or name == "any":
        return value
    is_bool = isinstance(value, bool)  # Python's bool is an int, JSON's is not
    # `_SCALARS` are the Python types of a JSON type.
    if isinstance(value, _SCALARS[name]) and (name == "boolean") == is_bool:
        return value
    if isinstance(value, str):
        try:
            if name == "boolean" and value.lower() in ("true", "1", "false", "0"):
                return value.lower() in ("true", "1")
            if name in ("integer", "number"):
                return int(value) if name == "integer" else float(value)
        except ValueError:
            pass
    raise ContentError(f"expected {name}, found {excerpt(json.dumps(value, default=str))}")


def compile_node(
    schema: Any, scope: str = "response_schema", json_args: Mapping[str, Any] | None = None
) -> Node:
    """Compile a node and those below it.

    `scope` is the node's path, for errors. `json_args` are our own arguments for the JSON parser:
    LACKS_BRACES and LOOSE. Raises ValueError that names a wrong key.
    """
    if schema is True or schema is None:
        return Node()  # any value, as it is
    if not isinstance(schema, Mapping):
        raise ValueError(f"{scope}: must be a mapping, not {schema!r}")
    if schema.get("type") not in _TYPES:  # the last of them is None: no type
        raise ValueError(f"{scope}.type: {schema['type']!r} is not one of {_TYPES[:-1]}")
    if (parser := schema.get("x-parser")) not in (None, *_PARSERS):
        raise ValueError(f"{scope}.x-parser: {parser!r} is not one of {', '.join(_PARSERS)}")

    def checked_value(key: str, kind: type, kind_words: str) -> Any:
        """Return a key's value, or None; raise ValueError for one of another kind."""
        value = schema.get(key)
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{scope}.{key}: must be {kind_words}, not {value!r}")
        return value

    compile_child = partial(compile_node, json_args=json_args)
    # Two of its keys have an effect. `json_args` are other arguments, which no schema can set.
    parser_args = checked_value("x-parser-args", Mapping, "a mapping") or {}
    properties = checked_value("properties", Mapping, "a mapping") or {}
    # The schema of all other keys. False leaves them out. True, {} and none accept any value.
    additional = schema.get("additionalProperties", True)
    pairs = checked_value("x-regex-substitutions", list, "a list") or ()
    substitutions = tuple(_compile_substitution(pair, scope) for pair in pairs)
    patterns = {
        key: Pattern(schema[key], f"{scope}.{key}")
        for key in ("x-regex", "x-regex-iterator", "x-regex-key-value")
        if key in schema
    }
    key_value = patterns.get("x-regex-key-value")
    if key_value is not None and not {"key", "value"} <= set(key_value.names):
        raise ValueError(f"{scope}.x-regex-key-value: needs (?P<key>…) and (?P<value>…)")
    return Node(
        type=schema.get("type"),
        const=schema.get("const", NOTHING),
        default=schema.get("default", NOTHING),
        substitutions=substitutions,
        regex=patterns.get("x-regex"),
        iterator=patterns.get("x-regex-iterator"),
        key_value=key_value,
        parser=parser,
        allow_non_json=bool(parser_args.get("allow_non_json")),
        transform=_compile_transform(parser_args.get("transform"), scope),
        properties={str(key): compile_child(v, f"{scope}.{key}") for key, v in properties.items()},
        additional=None if additional is False else compile_child(additional or True, scope),
        items=compile_child(schema["items"], f"{scope}.items") if "items" in schema else None,
        prefix_items=tuple(
            compile_child(value, f"{scope}.prefixItems")
            for value in checked_value("prefixItems", list, "a list") or ()
        ),
        required=tuple(checked_value("required", list, "a list") or ()),
        json_args=json_args or {},
    )


def _compile_substitution(pair: Any, scope: str) -> tuple[Pattern, str]:
    """Compile ``["\\s+", " "]``, a pattern and its replacement. Raises ValueError."""
    key = f"{scope}.x-regex-substitutions"
    if not isinstance(pair, list) or len(pair) != 2:
        raise ValueError(f"{key}: {pair!r} is no pair of [pattern, replacement]")
    return Pattern(pair[0], key), str(pair[1])


def _compile_transform(expression: Any, scope: str) -> Callable[[Any], Any] | None:
    """Compile a JMESPath expression. Raises ValueError."""
    if expression is None:
        return None
    if not isinstance(expression, str):
        raise ValueError(f"{scope}.x-parser-args.transform: must be a text, not {expression!r}")
    try:
        return jmespath.compile(expression).search
    except jmespath.exceptions.JMESPathError as error:
        raise ValueError(f"{scope}.x-parser-args.transform: {error}") from error
