"""Parse the text of a completion into content, reasoning and calls, good or malformed, in order.

A call is accepted where the parsers of inference servers accept it for the same family, so that
the trained habits work after deployment, and where its meaning is plain. A call whose meaning they
would guess, or whose arguments they would lose, is malformed, and the model reads the reason. A
malformed call never affects the calls beside it. `tests/kit/call_corpus.py` shows where vLLM reads
otherwise.

==========================================  ======================================================
in a call's text                            result
==========================================  ======================================================
arguments as a JSON string                  decoded: ``"{\\"a\\": 3}"`` is ``{"a": 3}``
… and encoded once more                     decoded once more, and no further
arguments whose braces the schema's own     read with their braces added
pattern consumes
arguments missing, null or an empty string  ``{}``
arguments under another key: "arguments",   read
"parameters", "args"
any key beside name, arguments, id, type    malformed: its value may be an argument
name missing, empty or no string            malformed
arguments that are no mapping               malformed
a key or parameter given twice              malformed: nothing says which was meant
keys without quotes                         read in Gemma's format; malformed in JSON
Python literals, single quotes              read in LFM2's format, where tuples and sets are lists;
                                            malformed in JSON
trailing commas                             read in LFM2's format; malformed in JSON
arguments without their braces              malformed: ``"arguments": "a": 3, "b": 4``
… ``response_schema.lenient=true``          the last four are read in JSON too, and such calls
                                            counted (`tools/lenient_calls`)
XML parameters, GLM's values                text, or the JSON value if the tool's schema asks for it
NaN, Infinity, 1e999                        malformed
lone surrogates, over 64 levels             malformed: no JSON file could hold them
text between a call and its closing mark    malformed
opening mark missing                        read in Qwen3-Coder's format if the tool exists
closing mark missing, call cut anywhere     malformed, to the next opening mark or the end
an id written twice in a turn               both calls get new ids; an id written once stays
a readable name in a malformed call         the malformed call's name
a mark inside a string or parameter         part of it, up to 16 marks
text after a call that has no closing mark  content (Llama, Mistral)
text without any sign of a call             content
calls beyond the 1,024th                    one malformed call
==========================================  ======================================================

`ResponseSpec` is the protocol of the families' parsers and `ParsedCompletion` their result, from
which `parse_response` makes the turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

from agenttrain.chat.parsers.patterns import search_budget
from agenttrain.chat.parsers.values import excerpt, is_portable, kind, read_json, read_loose
from agenttrain.types import AssistantTurn, ToolCall

CALL_ID = "call_{turn}_{index}"
"""Id of a call for which the model wrote none."""
MAX_CALLS = 1024
"""Calls of one completion that are read. An agent writes a few; each takes time to read."""
TOO_MANY = f"the message has over {MAX_CALLS:,} parts: this and what follows is not read"
"""Problem of the one malformed call that stands for the text after the last call that is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCall:
    """A call as it is written in a completion, before its name and arguments are checked.

    Made by a ResponseSpec; `parse_response` checks it and makes a ToolCall of it. Example:
    ``ParsedCall(text='<tool_call>{"name": "f"}</tool_call>', name="f", arguments={})``
    """

    text: str
    """The span of the completion that the call was read from."""
    name: Any = ""
    """The tool's name; anything but a text makes the call malformed."""
    arguments: Any = field(default_factory=dict)
    """A mapping, or the text of a JSON object; anything else makes the call malformed."""
    problem: str | None = None
    """Reason why the text cannot be read as a call."""
    id: str | None = None
    """The id that the model wrote, in formats that have one."""
    name_label: str = '"name"'
    """Term for the name in the text of a problem, which the model reads."""
    arguments_label: str = '"arguments"'
    """The same for the arguments."""
    lenient: bool = False
    """Only a spec with `lenient` accepts the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCompletion:
    """A completion split into content, reasoning and calls."""

    content: str
    reasoning: str | None
    calls: Sequence[ParsedCall] = ()
    """In the order in which they were written."""


class ResponseSpec(Protocol):
    """A family's parser of completions; `chat/loading.py` makes it from YAML or a tokenizer."""

    @property
    def call_id(self) -> str:
        """Format string, with `turn` and `index`, for the ids of calls that have none."""
        ...

    @property
    def lenient(self) -> bool:
        """True if arguments that are almost JSON are accepted."""
        ...

    def marks(self, controls: Iterable[str]) -> tuple[str, ...]:
        """Return the control tokens that `parse` must see. All others are removed first."""
        ...

    def opens_reasoning(self, prompt: str) -> bool:
        """Return True if a completion of this prompt begins inside the reasoning."""
        ...

    def parse(
        self, text: str, *, in_reasoning: bool, schemas: Sequence[Mapping]
    ) -> ParsedCompletion:
        """Split any completion into content, reasoning and calls, in linear time; never raise."""
        ...


NO_NAME = "must be the name of a tool"


def parse_response(
    text: str,
    spec: ResponseSpec,
    *,
    turn: int | str,
    in_reasoning: bool = False,
    schemas: Sequence[Mapping] = (),
) -> AssistantTurn:
    """Parse one completion: any text, in linear time, without raising.

    `in_reasoning`: the generation prompt has already opened the reasoning. `schemas` are those of
    the tools, for formats that write arguments without types. A call that cannot be used is in the
    list too, with the reason in `malformed`. Example (turn 3)::

        'Sum: <tool_call>{"name": "add", "arguments": "{\\\\"a\\\\": 3}"}</tool_call>'
        -> content "Sum:", calls (ToolCall(id="call_3_0", name="add", arguments={"a": 3}),)
    """
    with search_budget():
        parsed = spec.parse(text, in_reasoning=in_reasoning, schemas=schemas)
    parsed_calls = list(parsed.calls[:MAX_CALLS])
    if len(parsed.calls) > MAX_CALLS:
        parsed_calls.append(ParsedCall(text=parsed.calls[MAX_CALLS].text, problem=TOO_MANY))
    ids = _unique_ids(parsed_calls, lambda index: spec.call_id.format(turn=turn, index=index))
    calls = []
    for call, call_id in zip(parsed_calls, ids, strict=True):
        label = call.arguments_label
        arguments, problem, is_loose = _decode_arguments(call.arguments, label, spec.lenient)
        name = call.name if isinstance(call.name, str) else ""
        # One problem is reported: of the call's text, else of its name, else of its arguments.
        if call.problem is not None:
            problem = call.problem
        elif not name:
            problem = f"{call.name_label} {NO_NAME}"  # "name" must be the name of a tool
        # E.g. a lone surrogate: it would raise only later, where rollouts are written.
        if not is_portable([name, arguments], call.text):
            name = name if is_portable(name, call.text) else ""
            problem = problem or "the call holds values that JSON text cannot carry"
        calls.append(
            ToolCall(
                id=call_id,
                name=name,
                arguments=arguments if problem is None else {},
                malformed=problem,
                text=call.text,
                lenient=problem is None and (is_loose or call.lenient),
            )
        )
    return AssistantTurn(content=parsed.content, reasoning=parsed.reasoning, calls=tuple(calls))


def _unique_ids(calls: Sequence[ParsedCall], numbered_id: Callable[[int], str]) -> list[str]:
    """Return a unique id for each call; with equal ids one reply would answer two calls.

    An id that the model wrote once stays. Other calls get a numbered id that no call has. Example:
    a call with the id ``call_0_1`` and one without an id get ``call_0_1`` and ``call_0_2``.
    """
    written_ids = Counter(call.id for call in calls if call.id and is_portable(call.id, call.text))
    unique_ids = {call_id for call_id, times in written_ids.items() if times == 1}
    spare_numbers = count(len(calls))
    ids = []
    for index, call in enumerate(calls):
        if call.id in unique_ids:
            ids.append(call.id)
            continue
        call_id = numbered_id(index)
        while call_id in unique_ids:  # the model wrote this id itself
            call_id = numbered_id(next(spare_numbers))
        ids.append(call_id)
    return ids


def _decode_arguments(
    value: Any, label: str, lenient: bool, *, again: bool = True
) -> tuple[dict[str, Any], str | None, bool]:
    """Return (arguments, problem or None, True if only a lenient spec accepts the arguments).

    With a problem no spec accepts them: the last is False. `value` is a mapping, or the text of
    one, which is decoded. With `again`, a text that was encoded twice is decoded twice. `label`
    names the value in a problem. Examples, with `lenient`::

        {"x": 1} or '{"x": 1}'  -> {"x": 1}, None, False
        "{x: 1}"                -> {"x": 1}, None, True
        "[1]"                   -> {}, '"arguments" must be a JSON object, not an array', False
    """
    decoded, is_loose = value, False
    if isinstance(value, str) and value.strip():
        reading = read_json(value)
        is_loose = reading.problem is not None or bool(value[reading.end :].strip())
        if is_loose and lenient:
            reading = read_loose(value)
        is_unreadable = reading.problem is not None or (is_loose and not lenient)
        if is_unreadable:
            return {}, f"{label} is a string without a JSON object: {excerpt(value)}", False
        decoded = reading.value
        if isinstance(decoded, str) and again:  # encoded twice: "\"{\\\"x\\\": 1}\""
            inner, problem, inner_is_loose = _decode_arguments(decoded, label, lenient, again=False)
            if problem is None:
                return inner, None, is_loose or inner_is_loose
            # Otherwise `decoded` is just a string, which the check below reports.
    if decoded is None or decoded == "":
        return {}, None, is_loose
    if not isinstance(decoded, dict):
        return {}, f"{label} must be a JSON object, not {kind(decoded)}", False
    return decoded, None, is_loose
