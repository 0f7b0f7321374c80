"""What a completion may be where calls must fit their tools, as a grammar for the engine.

The grammar is a structural tag of xgrammar, which vLLM takes
(https://xgrammar.mlc.ai/docs/structural_tag/structural_tag_spec.html). Everything is free, any
token at all, but what follows a call's opening mark: that is a call of one of the tools, as the
chat template writes calls, up to its closing mark. As `MarkedSpec` reads a completion, a mark
inside the reasoning opens nothing, and reasoning behind a call is none.

Some calls stay for the parser and the tool to refuse: a number beyond a float's range, half of a
surrogate pair, a key given twice in an object whose keys the schema leaves open, over 16 marks in a
string; and what xgrammar leaves out of a schema, such as `multipleOf` or `allOf` of several.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agenttrain.chat.encoding import ChatError
from agenttrain.chat.render import USER
from agenttrain.chat.response_marked import MarkedSpec
from agenttrain.chat.response_parts import ResponseSpec
from agenttrain.types import Message

Format = dict[str, Any]
"""A part of a structural tag."""
KEY = "rollout.structured_calls=true"
BLANKS = 8
"""Most blanks in a row inside a call's arguments: enough to indent, too few to never end."""
MOST_KNOWN = 1024
"""Grammars that are kept."""
NAME, ID = "a_tool", "abcdefgh1"
ARGUMENTS = {"x": 1}
CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": ID, "type": "function", "function": {"name": NAME, "arguments": ARGUMENTS}}
    ],
}
_ARGUMENTS = re.compile(r'\{\s*"x"\s*:\s*1\s*\}')
_ANYTHING = {"$ref", "anyOf", "oneOf", "allOf", "enum", "const"}
"""Keywords of a schema that say what it takes without `type`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallGlue:
    """What the template writes around a call's name and arguments, between the marks.

    Example: of Qwen's ``("\\n{\\"name\\": \\"", "\\", \\"arguments\\": ", "}\\n")``.
    """

    before: str
    between: str
    after: str


class CallGrammar:
    """The grammars of one response schema and template; raises ChatError where there are none."""

    def __init__(self, spec: ResponseSpec, render: Callable[[Sequence[Message]], str]) -> None:
        """`render` is the template's text for messages, without a generation prompt."""
        if not (isinstance(spec, MarkedSpec) and _expressible(spec)):
            raise ChatError(
                f"{KEY}: the response schema does not read calls as JSON between two marks, as "
                "response_schema=hermes and qwen do; leave structured_calls out"
            )
        self._spec = spec
        self._glue = _glue(spec, render([USER, CALL]))
        self._known: dict[tuple[str, bool], str] = {}

    def of(self, schemas: Sequence[Mapping[str, Any]], *, in_reasoning: bool) -> str:
        """The grammar, JSON, of a completion that may call these tools.

        `in_reasoning`: it begins inside the reasoning.
        """
        key = json.dumps(schemas), in_reasoning
        if key not in self._known:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            found = {"type": "structural_tag", "format": self._completion(schemas, in_reasoning)}
            self._known[key] = json.dumps(found)
        return self._known[key]

    def _completion(self, schemas: Sequence[Mapping[str, Any]], in_reasoning: bool) -> Format:
        spec = self._spec
        calls = [_or(*map(self._call, schemas))] if schemas else []
        # Where there is no tool, no call can be right, and its mark is not written either.
        excluded = [] if calls else [spec.call_open]
        answer = _dispatch([(spec.call_open, call) for call in calls], excluded, loop=True)
        if in_reasoning:
            return self._thought(answer)
        if not spec.reasoning_open:
            return answer
        opened = [(spec.call_open, _sequence(call, answer)) for call in calls]
        opened.append((spec.reasoning_open, self._thought(answer)))
        return _dispatch(opened, excluded, loop=False)

    def _thought(self, answer: Format) -> Format:
        """The rest of reasoning, and the answer behind it if it is closed."""
        close = self._spec.reasoning_close
        free = _text([close])
        return _or(_sequence(free, _literal(close), answer), free)

    def _call(self, schema: Mapping[str, Any]) -> Format:
        function, glue = schema["function"], self._glue
        name = json.dumps(function["name"], ensure_ascii=False)[1:-1]
        parameters = function.get("parameters") or {}
        if "type" not in parameters and not _ANYTHING & parameters.keys():
            parameters = {"type": "object", **parameters}
        return _sequence(
            _literal(f"{glue.before}{name}{glue.between}"),
            {"type": "json_schema", "json_schema": parameters, "max_whitespace_cnt": BLANKS},
            _literal(f"{glue.after}{self._spec.call_close}"),
        )


def _expressible(spec: MarkedSpec) -> bool:
    marks = spec.call_open and spec.call_close and not spec.call_open_pattern
    return bool(marks) and spec.syntax == "json" and not spec.separator


def _glue(spec: MarkedSpec, rendering: str) -> CallGlue:
    """What stands around the name and the arguments of `CALL`; raises ChatError."""
    head, found, tail = rendering.partition(NAME)
    arguments = _ARGUMENTS.search(tail)
    before = head.rpartition(spec.call_open)[2]
    if found and arguments and spec.call_open in head and spec.call_close:
        between, rest = tail[: arguments.start()], tail[arguments.end() :]
        after, closed, _ = rest.partition(spec.call_close)
        written = {spec.name_key: NAME, spec.arguments_key: ARGUMENTS}
        if closed and _json(f"{before}{NAME}{between}{arguments[0]}{after}") == written:
            return CallGlue(before=before, between=between, after=after)
    raise ChatError(
        f"{KEY}: the chat template does not write calls as the response schema reads them, "
        f"{spec.call_open}, JSON of {spec.name_key} and {spec.arguments_key}, {spec.call_close}; "
        "leave structured_calls out"
    )


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _literal(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _text(excluded: Sequence[str]) -> Format:
    return {"type": "any_text", "excludes": list(excluded)}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _or(*elements: Format) -> Format:
    return {"type": "or", "elements": list(elements)}


def _dispatch(
    rules: Sequence[tuple[str, Format]], excluded: Sequence[str], *, loop: bool
) -> Format:
    """Free text; behind each text of a rule, what the rule says."""
    if not rules:
        return _text(excluded)
    return {
        "type": "dispatch",
        "rules": [list(rule) for rule in rules],
        "excludes": list(excluded),
        "loop": loop,
    }
