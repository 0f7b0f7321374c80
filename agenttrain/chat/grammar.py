"""Grammars that make an engine sample only calls that fit their tools.

A grammar is a structural tag of xgrammar, which vLLM accepts
(https://xgrammar.mlc.ai/docs/structural_tag/structural_tag_spec.html). A completion may hold any
tokens, except after the opening mark of a call: there it must be a call of one of the tools, in
the form that the chat template writes, up to the closing mark. The grammar reads a completion as
`MarkedSpec` does: a mark inside the reasoning opens no call, and no reasoning begins after a call.
vLLM's compiler tries a grammar before an engine is built.

An `AnswerForm` allows less: only a call, or only a text that is JSON. Reasoning may come first.

The grammar lets some calls pass that the parser or the tool refuses: a number beyond the range of
floats, half of a surrogate pair, a key given twice in an object whose schema leaves its keys open,
over 16 marks in a string, and violations of keywords that xgrammar ignores (`multipleOf`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agenttrain.chat.encoding import ChatError
from agenttrain.chat.parsers.base import ResponseSpec
from agenttrain.chat.parsers.marked import MarkedSpec
from agenttrain.chat.probing import USER
from agenttrain.types import Message
from agenttrain.utils.json_schema import SchemaResolver, without_nullable

Format = dict[str, Any]
"""A node of a structural tag."""
KEY = "rollout.structured_calls=true"
"""The setting that the errors name."""
BLANKS = 8
"""Most blanks in a row inside a call's arguments: enough to indent, but a model cannot write
blanks for ever."""
CACHED_GRAMMARS = 1024
"""Grammars in the cache."""
NAME, ID = "a_tool", "abcdefgh1"
ARGUMENTS = {"x": 1}
CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": ID, "type": "function", "function": {"name": NAME, "arguments": ARGUMENTS}}
    ],
}
GAP = ("", "\n", "\n\n")
"""Line breaks that may stand between the reasoning and an answer of a given form."""
_ARGUMENTS = re.compile(r'\{\s*"x"\s*:\s*1\s*\}')
_TYPE_KEYWORDS = ("type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const")
"""Keywords with which a schema may say of what type its values are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallGlue:
    """The texts around a call's name and arguments, between the marks.

    Example, for Qwen: ``("\\n{\\"name\\": \\"", "\\", \\"arguments\\": ", "}\\n")``.
    """

    before: str
    """Text before the name."""
    between: str
    """Text between the name and the arguments."""
    after: str
    """Text after the arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """The form that a completion must have after its reasoning; by default, any text and calls.

    The fields together::

        call=True               a call of any tool first, then text and calls
        call=True, tool="f"     one call of f first, then text
        schema="{…}"            a call first, or JSON of the schema
        call=True, schema=…     as without the schema
    """

    call: bool = False
    """It must begin with a call."""
    tool: str | None = None
    """Name of the only tool that may be called, once; None: any tools."""
    schema: str | None = None
    """JSON schema, as JSON text, of an answer without a call; None: any text."""


ANY_FORM = AnswerForm()


class CallGrammar:
    """Makes the grammars for one response schema and template.

    With a grammar, an engine samples only calls of the tools, with arguments that fit their
    schemas, in the exact form of the chat template. A grammar is built of formats, the nodes of
    xgrammar's structural tags. `grammar_for` returns the whole as JSON. A `Chat` makes a
    CallGrammar when its first grammar is needed.

    Raises ChatError for a schema whose calls are not JSON between two marks.
    """

    def __init__(self, spec: ResponseSpec, render: Callable[[Sequence[Message]], str]) -> None:
        """`render` renders messages to text, without a generation prompt."""
        if not isinstance(spec, MarkedSpec) or not _is_json_between_marks(spec):
            raise ChatError(
                f"{KEY}: the response schema does not read calls as JSON between two marks, as "
                "response_schema=hermes and qwen do; leave structured_calls out"
            )
        self._spec = spec
        # The constant texts around a call's name and arguments. Only the template knows them (its
        # blanks, the order of keys), so they are cut out of a call that it rendered.
        self._glue = _find_glue(spec, render([USER, CALL]))
        self._cache: dict[tuple[str, bool, AnswerForm], str] = {}
        """(schemas as JSON, begins in the reasoning, form) -> grammar."""

    def grammar_for(
        self,
        schemas: Sequence[Mapping[str, Any]],
        *,
        in_reasoning: bool,
        form: AnswerForm = ANY_FORM,
    ) -> str:
        """Return the grammar, as JSON, of a completion that may call these tools.

        `in_reasoning`: the completion begins inside the reasoning. Arguments fit the schemas as
        the tools check them (`ArgumentSchema`).
        """
        key = json.dumps(schemas), in_reasoning, form
        if key not in self._cache:
            if len(self._cache) >= CACHED_GRAMMARS:
                self._cache.clear()
            calls = self._calls(schemas)
            if form == ANY_FORM:
                completion = self._completion(calls, in_reasoning)
            else:
                completion = self._completion_of_form(schemas, calls, form, in_reasoning)
            self._cache[key] = json.dumps({"type": "structural_tag", "format": completion})
        return self._cache[key]

    def _calls(self, schemas: Sequence[Mapping[str, Any]]) -> list[Format]:
        """Return the format of a call of each tool, without the opening mark.

        Example, for Qwen: the text ``\\n{"name": "f", "arguments": ``, the arguments as JSON of the
        tool's schema, the text ``}\\n</tool_call>``. The texts are those of CallGlue with the
        tool's name, and the closing mark.
        """
        spec, glue = self._spec, self._glue
        calls = []
        for schema in schemas:
            function = schema["function"]
            name = json.dumps(function["name"], ensure_ascii=False)[1:-1]  # without its quotes
            parameters = _xgrammar_schema(function.get("parameters") or {})
            says_type = any(keyword in parameters for keyword in _TYPE_KEYWORDS)
            if not says_type:  # e.g. only `properties`; arguments are an object all the same
                parameters = {"type": "object", **parameters}
            value = {"type": "json_schema", "json_schema": parameters, "max_whitespace_cnt": BLANKS}
            before, after = f"{glue.before}{name}{glue.between}", f"{glue.after}{spec.call_close}"
            calls.append(_sequence(_text(before), value, _text(after)))
        return calls

    def _completion(self, calls: Sequence[Format], in_reasoning: bool) -> Format:
        """Return the format of a whole completion: reasoning, free text and calls."""
        spec = self._spec
        any_call = _either(calls)
        # Text and calls. An opening mark of reasoning in it is mere text: reasoning comes first.
        # Without tools no call is allowed.
        if calls:
            answer = _text_with([(spec.call_open, any_call)], goes_on=True)
        else:
            answer = _text_without(spec.call_open)
        # Reasoning that is closed, and the answer after it; or reasoning that is never closed.
        reasoning = _text_without(spec.reasoning_close)
        closed = _sequence(reasoning, _text(spec.reasoning_close), answer)
        reasoned = _either([closed, reasoning])
        if in_reasoning:
            return reasoned
        if not spec.reasoning_open:
            return answer
        # Text up to the first mark, which decides on all that follows it: after the opening mark of
        # a call, that call and the answer, in which no reasoning begins.
        reasoning_rule = (spec.reasoning_open, reasoned)
        if not calls:
            return _text_with([reasoning_rule], excluded=[spec.call_open], goes_on=False)
        call_rule = (spec.call_open, _sequence(any_call, answer))
        return _text_with([call_rule, reasoning_rule], goes_on=False)

    def _completion_of_form(
        self,
        schemas: Sequence[Mapping[str, Any]],
        calls: Sequence[Format],
        form: AnswerForm,
        in_reasoning: bool,
    ) -> Format:
        """Return the format of a completion that must have the form: a call, or a JSON answer.

        Reasoning may come first. `calls` are the formats of calls of the tools in `schemas`.
        """
        spec = self._spec
        allowed_calls = [
            call
            for schema, call in zip(schemas, calls, strict=True)
            if form.tool in (None, schema["function"]["name"])
        ]
        # After the first call: text and more calls, but only text if the form names the tool.
        if form.tool is None:
            after_call = _text_with([(spec.call_open, _either(calls))], goes_on=True)
        else:
            after_call = _text_without(spec.call_open)
        # Not empty: a request that demands a call has the tool to call (`check_demanded_call`).
        answers = []
        if allowed_calls:
            answers.append(_sequence(_text(spec.call_open), _either(allowed_calls), after_call))
        if form.schema is not None and not form.call:
            schema = _xgrammar_schema(json.loads(form.schema))
            value = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": BLANKS}
            answers.append(value)
        line_breaks = _either([_text(gap) for gap in GAP])  # models write some after reasoning
        answer = _sequence(line_breaks, _either(answers))
        reasoning = _text_without(spec.reasoning_close)
        reasoned = _sequence(reasoning, _text(spec.reasoning_close), answer)
        if in_reasoning:
            return reasoned
        if not spec.reasoning_open:
            return answer
        return _either([answer, _sequence(_text(spec.reasoning_open), reasoned)])


def _xgrammar_schema(schema: Any) -> Any:
    """Return a schema for xgrammar, which ignores an `allOf` of several schemas."""
    return SchemaResolver(without_nullable(schema)).merged()


def _text(value: str) -> Format:
    """Return the format of just this text."""
    return {"type": "const_string", "value": value}


def _text_without(excluded: str) -> Format:
    """Return the format of any text that does not contain `excluded`."""
    return {"type": "any_text", "excludes": [excluded]}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _either(elements: Sequence[Format]) -> Format:
    return {"type": "or", "elements": list(elements)}


def _is_json_between_marks(spec: MarkedSpec) -> bool:
    """Return True if each call is JSON between two fixed marks, and no text joins calls."""
    has_fixed_marks = bool(spec.call_open and spec.call_close) and not spec.call_open_pattern
    return has_fixed_marks and spec.syntax == "json" and not spec.separator


def _find_glue(spec: MarkedSpec, rendering: str) -> CallGlue:
    """Return the texts around the name and the arguments of `CALL` in a rendering of it.

    `CALL` calls NAME, "a_tool", with ARGUMENTS, ``{"x": 1}``, which _ARGUMENTS matches. Example::

        …<tool_call>\\n{"name": "a_tool", "arguments": {"x": 1}}\\n</tool_call>…
        before: \\n{"name": "        between: ", "arguments":      after: }\\n

    Raises ChatError if they and the call do not form the JSON that the response schema reads.
    """
    before_name, name, after_name = rendering.partition(NAME)
    _, opening, before = before_name.rpartition(spec.call_open)
    arguments = _ARGUMENTS.search(after_name)
    if name and opening and arguments and spec.call_close:
        between = after_name[: arguments.start()]
        after_arguments = after_name[arguments.end() :]
        after, closing, _ = after_arguments.partition(spec.call_close)
        try:
            call = json.loads(f"{before}{NAME}{between}{arguments[0]}{after}")
        except ValueError:
            call = None
        if closing and call == {spec.name_key: NAME, spec.arguments_key: ARGUMENTS}:
            return CallGlue(before=before, between=between, after=after)
    raise ChatError(
        f"{KEY}: the chat template does not write calls as the response schema reads them, "
        f"{spec.call_open}, JSON of {spec.name_key} and {spec.arguments_key}, {spec.call_close}; "
        "leave structured_calls out"
    )


def _text_with(
    rules: Sequence[tuple[str, Format]], *, excluded: Sequence[str] = (), goes_on: bool
) -> Format:
    """Return the format of any text in which something must follow each mark of a rule.

    `rules` are (mark, format of all that follows it). The text contains none of the `excluded`.
    With `goes_on`, text with further marks may follow the format. Without it, the format ends the
    text. Example: ``_text_with([("<call>", call)], goes_on=True)`` is text with any number of
    calls.
    """
    return {
        "type": "dispatch",
        "rules": [list(rule) for rule in rules],
        "excludes": list(excluded),
        "loop": goes_on,
    }


_PLACE = re.compile(r"^\[.*?\] \S+: ")
"""The time and the source line with which xgrammar's messages begin."""


def grammar_problem(grammar: str) -> str | None:
    """Return xgrammar's objection to a structural tag, or None if it has none.

    Without xgrammar the result is None too: vLLM, where grammars are used, installs xgrammar.
    """
    try:
        import xgrammar
    except ImportError:
        return None
    try:
        xgrammar.Grammar.from_structural_tag(grammar)
    except Exception as error:  # its own, pydantic's, and C++'s as RuntimeError
        return _PLACE.sub("", str(error).strip()).strip() or type(error).__name__
    return None
