"""Parse completions whose reasoning and calls stand between marks: all families but gpt-oss."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import regex

from agenttrain.chat.parsers.base import CALL_ID, MAX_CALLS, TOO_MANY, ParsedCall, ParsedCompletion
from agenttrain.chat.parsers.calls import READERS, Read, Schemas, Syntax
from agenttrain.chat.parsers.parameter_types import ParameterTypes
from agenttrain.chat.parsers.values import excerpt, written_name

MARKS_IN_STRINGS = (1, 4, 16)
"""Numbers of marks that a call may run over, tried in turn; over more, the call is malformed."""


@dataclass(frozen=True, kw_only=True)
class MarkedSpec(Syntax):
    """The marks and the syntax of a family's reasoning and calls: the keys of its YAML.

    Example: ``<think>2 + 2</think>Let me see.<tool_call>{"name": "add", "arguments": {}}
    </tool_call>``
    """

    reasoning_open: str = ""
    """Empty, like the closing mark, for a family without reasoning."""
    reasoning_close: str = ""
    call_open: str = ""
    """The mark that begins a call or a list of calls."""
    call_open_pattern: str | None = None
    """A regular expression instead, for calls without an opening mark."""
    call_open_also: str | None = None
    """A regular expression for other openings, which models write and templates do not. Without an
    opening mark, an object that names no tool is content; in a format with one, so is a call of a
    tool that does not exist. Checkpoints' `response_template` lacks these openings."""
    call_close: str | None = None
    """None: a call ends where its arguments end."""
    syntax: str = "json"
    """Syntax of the text between the marks; one of `calls.READERS`."""
    separator: str = ""
    """A character that may stand between calls; it belongs neither to them nor to the content."""
    ignored: tuple[str, ...] = ()
    """Marks around all calls of a completion, left out of the content."""
    controls: tuple[str, ...] = ()
    """Control tokens that occur inside calls."""
    call_id: str = CALL_ID

    @property
    def _opening(self) -> str:
        """The expression that begins a call; in a format with an opening mark, that mark."""
        if self.call_open or self.call_open_also is None:
            return self.call_open_pattern or re.escape(self.call_open)
        return f"{self.call_open_also}|{self.call_open_pattern}"

    @cached_property
    def _unmarked(self) -> re.Pattern[str] | None:
        """Matches calls without the opening mark, in a format that has one."""
        if not self.call_open or self.call_open_also is None:
            return None
        return re.compile(self.call_open_also)

    @cached_property
    def _closing(self) -> re.Pattern[str]:
        """Matches a closing mark right behind a call."""
        return re.compile(rf"\s*+{re.escape(self.call_close or '')}")

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        opening = self._opening
        closing = "" if self.call_close is None else "|" + re.escape(self.call_close)
        return re.compile(f"(?P<_open>{opening}){closing}", re.DOTALL)

    def marks(self, controls: Iterable[str]) -> tuple[str, ...]:
        """See ResponseSpec."""
        own = (self.reasoning_open, self.reasoning_close, self.call_open, self.call_close or "")
        texts = (*own, *self.ignored, *self.controls, self.call_open_pattern or "")
        read = "\n".join(texts).replace("\\", "")
        return tuple(control for control in controls if control in read)

    def opens_reasoning(self, prompt: str) -> bool:
        """See ResponseSpec."""
        opening = self.reasoning_open.rstrip()
        return bool(opening) and prompt.rstrip().endswith(opening)

    def parse(
        self, text: str, *, in_reasoning: bool, schemas: Sequence[Mapping]
    ) -> ParsedCompletion:
        """See ResponseSpec."""
        reasoning, text = self._split_reasoning(text, in_reasoning)
        content, calls = self._split_calls(text, parameters(schemas))
        for mark in self.ignored:
            content = content.replace(mark, "")
        return ParsedCompletion(content=content.strip(), reasoning=reasoning, calls=calls)

    def _split_reasoning(self, text: str, inside: bool) -> tuple[str | None, str]:
        """Return (reasoning, other text); reasoning that is not closed reaches to the end."""
        if not self.reasoning_close:
            return None, text
        before, opened, after = text.partition(self.reasoning_open)
        if inside or not opened or self._opens_call(before):
            before, opened, after = "", "", text
        if inside:  # some models repeat the opening mark that ends the prompt
            after = after.lstrip().removeprefix(self.reasoning_open.rstrip())
        thought, closed, behind = after.partition(self.reasoning_close)
        if not closed and not opened and not inside:
            return None, text
        if not opened and not inside and self._opens_call(thought):
            # A stray closing mark after a call must not turn that call into reasoning.
            return None, text
        return thought.strip(), before + behind

    def _opens_call(self, text: str) -> bool:
        return any(mark["_open"] is not None for mark in self._marks.finditer(text))

    def _split_calls(self, text: str, schemas: Schemas) -> tuple[str, list[ParsedCall]]:
        """Return (content outside calls, calls)."""
        marks: list[re.Match[str]] = []
        for mark in self._marks.finditer(text):
            # A match of no width right behind another one is the same opening.
            if mark.end() > mark.start() or not marks or mark.start() > marks[-1].end():
                marks.append(mark)
        content: list[str] = []
        calls: list[ParsedCall] = []
        position = index = 0
        while index < len(marks):
            mark = marks[index]
            index += 1
            if mark["_open"] is None:
                continue
            content.append(self._beside(text[position : mark.start()], calls, schemas))
            if len(calls) >= MAX_CALLS:
                beyond = ParsedCall(text=text[mark.start() :], problem=TOO_MANY)
                return "".join(content), [*calls, beyond]
            read = self._read(text, mark.end(), marks, index, schemas)
            end = mark.end() + read.end
            while index < len(marks) and marks[index].start() < end:
                index += 1
            if mark.end() == mark.start() and [call.name for call in read.calls] == [None]:
                between = text[position : mark.start()].strip(self.separator + " \t\r\n")
                if calls and not between and _lost_arguments(calls[-1], text[mark.start() :]):
                    what = f"text after the call: {excerpt(text[mark.start() :])}"
                    calls[-1] = replace(calls[-1], problem=what)
                position = mark.start()  # JSON that no mark opens and that names no tool
                continue
            following = marks[index] if index < len(marks) else None
            region, position = self._region(text, mark.start(), end, read, following)
            calls += region
        behind = self._beside(text[position:], calls, schemas)
        if calls and self.call_open_pattern is not None and self.call_close is None:
            # Without an opening mark, a completion may be cut before a call is recognisable.
            head = behind.strip(self.separator + " \t\r\n")
            beginning = regex.compile(self._opening, regex.DOTALL)  # the library caches it
            match = beginning.match(head, partial=True) if head else None
            if match is not None and match.partial and match.end() == len(head):
                name = written_name(head, self.name_key)
                cut = ParsedCall(text=head, name=name, problem="the call is not closed")
                return "".join(content), [*calls, cut]
        return "".join([*content, behind]), calls

    def _region(
        self, text: str, start: int, end: int, read: Read, following: re.Match[str] | None
    ) -> tuple[list[ParsedCall], int]:
        """Return (the calls of one region with their texts, the position behind the region)."""
        bad = any(call.problem is not None for call in read.calls)
        limit = following.start() if following is not None else len(text)
        problem = None
        if self.call_close is None:
            lost = bool(read.calls) and _lost_arguments(read.calls[-1], text[end:limit])
            position = limit if bad or lost else end
            if lost:
                problem = f"text after the call: {excerpt(text[end:limit])}"
        elif following is None or following["_open"] is not None:
            position, problem = limit, f"the call is not closed: {self.call_close} is missing"
        else:
            position = following.end()
            if not bad and text[end:limit].strip():
                problem = f"text after the call: {excerpt(text[end:limit])}"
        region = text[start:position]
        if bad and self.separator:  # the separator behind a malformed call is not part of it
            region = region.rstrip(self.separator + " \t\r\n")
        if len(read.calls) == 1 and not read.calls[0].text:
            (call,) = read.calls
            return [replace(call, text=region, problem=problem or call.problem)], position
        calls = [call if call.text else replace(call, text=region) for call in read.calls]
        if calls and _lost_arguments(calls[-1], text[end:limit]):
            what = problem or f"text after the call: {excerpt(text[end:limit])}"
            calls[-1] = replace(calls[-1], problem=what)
            return calls, position
        for index, (call, item) in enumerate(pairwise(calls)):
            # A broken call that writes a name holds no arguments of another one.
            if item.problem is None or item.name or f'"{self.name_key}"' in item.text:
                continue
            if _lost_arguments(call, item.text):
                calls[index] = replace(call, problem=f"text after the call: {excerpt(item.text)}")
        if problem is not None and calls[-1].problem is None:
            # The complete calls of a list that was cut stay good.
            behind = region[region.rfind(calls[-1].text) + len(calls[-1].text) :]
            calls.append(ParsedCall(text=behind, problem=problem))
        return calls, position

    def _beside(self, text: str, calls: list[ParsedCall], schemas: Schemas) -> str:
        """Return the content beside calls; append to them those that lack their opening mark."""
        if self._unmarked is None:
            return "" if calls and self.separator and text.strip() == self.separator else text
        openings = [opening.start() for opening in self._unmarked.finditer(text)]
        content: list[str] = []
        position = 0
        for start, limit in pairwise([*openings, len(text)]):
            if len(calls) > MAX_CALLS:
                break
            read = READERS[self.syntax](text[start:limit], self, schemas)
            if [call.name in schemas for call in read.calls] != [True]:
                continue
            (call,) = read.calls
            end = limit if call.problem is not None else start + read.end
            if (closing := self._closing.match(text, end)) is not None:
                end = closing.end()
            calls.append(replace(call, text=text[start:end]))
            content.append(text[position:start])
            position = end
        return "".join([*content, text[position:]])

    def _read(
        self, text: str, start: int, marks: list[re.Match[str]], index: int, schemas: Schemas
    ) -> Read:
        """Read the calls at `start`; `index` is the number of the first mark after it.

        A mark inside a string argument is part of the string, so a string that runs into a mark is
        read again with more text. The number of tries is bounded, so parsing stays linear.
        """
        first = None
        for count in MARKS_IN_STRINGS:
            last = index + count - 1
            body = text[start : marks[last].start() if last < len(marks) else len(text)]
            read = READERS[self.syntax](body, self, schemas)
            if first is None:
                first = read
            elif not read.cut:
                # More text is right only if it completes the call that ran into the mark.
                at = min(len(first.calls), len(read.calls)) - 1
                return read if read.calls[at].problem is None else first
            if not read.cut:
                return read
            if last >= len(marks):
                break
        return first or read


def _lost_arguments(call: ParsedCall, behind: str) -> bool:
    """Return True if a call without arguments is followed by a value that may be its arguments.

    It must not run without them. Example: ``{"name": "find"} {"q": "tea"}``.
    """
    if call.problem is not None or call.arguments not in (None, {}):
        return False
    return behind.lstrip(" \t\r\n,;").startswith(("{", "[", "("))


def parameters(schemas: Sequence[Mapping[str, Any]]) -> Schemas:
    """Return the JSON types of parameters, by tool and parameter name."""
    functions = [schema.get("function", schema) for schema in schemas]
    return {
        str(function.get("name")): ParameterTypes(function.get("parameters") or {})
        for function in functions
    }
