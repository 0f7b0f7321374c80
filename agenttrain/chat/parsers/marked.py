"""Parse completions whose reasoning and calls stand between marks: all families but gpt-oss."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import regex

from agenttrain.chat.parsers.base import CALL_ID, MAX_CALLS, TOO_MANY, ParsedCall, ParsedCompletion
from agenttrain.chat.parsers.calls import READERS, ReadCalls, Schemas, Syntax
from agenttrain.chat.parsers.parameter_types import ParameterTypes
from agenttrain.chat.parsers.values import excerpt, written_name

MARKS_IN_STRINGS = (1, 4, 16)
"""Numbers of marks that a call may run over, tried in turn; over more, the call is malformed."""


@dataclass(frozen=True, kw_only=True)
class MarkedSpec(Syntax):
    """The marks and the syntax of a family's reasoning and calls: the keys of its YAML.

    Example: ``<think>2 + 2</think>Let me see.<tool_call>{"name": "add", "arguments": {}}
    </tool_call>``

    Formats are of three kinds, by what begins a call::

        call_open                      <tool_call>{"name": "f"}   always a mark
        call_open and call_open_also   <function=f>               the mark, which may be forgotten
        call_open_pattern              {"name": "f"}              no mark: the call's own beginning

    Calls with their mark and calls of the third kind begin regions, which `_split_calls` reads. The
    calls of the second kind without their mark stand between the regions: `_read_outside`. The
    third kind has two more cases: an object that names no tool is content, and a call that is cut
    before the pattern matches has to be found (`_cut_call`).
    """

    reasoning_open: str = ""
    """Empty, like the closing mark, for a family without reasoning."""
    reasoning_close: str = ""
    call_open: str = ""
    """The mark that begins a call or a list of calls."""
    call_open_pattern: str | None = None
    """A regular expression instead, for calls without an opening mark."""
    call_open_also: str | None = None
    """A regular expression for further openings, which models write and templates do not. In a
    format without an opening mark, an object after such an opening that names no tool is content.
    In a format with one, so is a call of a tool that does not exist. The `response_template` of
    checkpoints lacks these openings."""
    call_close: str | None = None
    """The mark that ends a call; None: a call ends where its arguments end."""
    syntax: str = "json"
    """Syntax of the text between the marks; one of `calls.READERS`."""
    separator: str = ""
    """A character that may stand between calls; it is part of neither the calls nor the content."""
    ignored: tuple[str, ...] = ()
    """Marks around all calls of a completion, left out of the content."""
    controls: tuple[str, ...] = ()
    """Control tokens that occur inside calls."""
    call_id: str = CALL_ID

    @property
    def _opening_source(self) -> str:
        """The regular expression for the beginning of a call.

        A spec has a mark, `call_open`, or an expression for calls without one, `call_open_pattern`.
        Openings that only models write, `call_open_also`, are added in a format without a mark. In
        one with a mark they count only where a tool's name follows: `_read_outside` reads them.
        """
        opening = self.call_open_pattern or re.escape(self.call_open)
        if self.call_open or self.call_open_also is None:
            return opening
        return f"{self.call_open_also}|{opening}"

    @cached_property
    def _unmarked_pattern(self) -> re.Pattern[str] | None:
        """Matches the beginning of a call that lacks its opening mark, in a format that has one."""
        if not self.call_open or self.call_open_also is None:
            return None
        return re.compile(self.call_open_also)

    @cached_property
    def _closing_pattern(self) -> re.Pattern[str]:
        """Matches a closing mark right after a call."""
        return re.compile(rf"\s*+{re.escape(self.call_close or '')}")

    @cached_property
    def _mark_pattern(self) -> re.Pattern[str]:
        """Matches openings of calls, as the group `_open`, and closing marks."""
        opening = self._opening_source
        closing = "" if self.call_close is None else "|" + re.escape(self.call_close)
        return re.compile(f"(?P<_open>{opening}){closing}", re.DOTALL)

    def marks(self, controls: Iterable[str]) -> tuple[str, ...]:
        """See ResponseSpec."""
        marks = (self.reasoning_open, self.reasoning_close, self.call_open, self.call_close or "")
        texts = (*marks, *self.ignored, *self.controls, self.call_open_pattern or "")
        all_texts = "\n".join(texts).replace("\\", "")  # the pattern's escapes
        return tuple(control for control in controls if control in all_texts)

    def opens_reasoning(self, prompt: str) -> bool:
        """See ResponseSpec."""
        opening = self.reasoning_open.rstrip()
        return bool(opening) and prompt.rstrip().endswith(opening)

    def parse(
        self, text: str, *, in_reasoning: bool, schemas: Sequence[Mapping]
    ) -> ParsedCompletion:
        """Split a completion into content, reasoning and calls; see `ResponseSpec.parse`."""
        reasoning, text = self._split_reasoning(text, in_reasoning)
        content, calls = self._split_calls(text, types_by_tool(schemas))
        for mark in self.ignored:
            content = content.replace(mark, "")
        return ParsedCompletion(content=content.strip(), reasoning=reasoning, calls=calls)

    def _split_reasoning(self, text: str, inside: bool) -> tuple[str | None, str]:
        """Return (reasoning or None, the text without it).

        `inside`: the text begins inside the reasoning. Examples::

            <think>a</think>b               -> "a", "b"
            <think>a                        -> "a", ""       not closed: it reaches to the end
            a</think>b                      -> "a", "b"      no opening: it began with the text
            <tool_call>…</tool_call></think>  -> None, text    a stray closing mark after a call
        """
        if not self.reasoning_close:
            return None, text
        before, opening, after = text.partition(self.reasoning_open)
        # An opening mark inside a call is a part of the call: it opens no reasoning.
        is_opened = not inside and bool(opening) and not self._opens_call(before)
        if not is_opened:
            before, after = "", text
        if inside:  # some models repeat the opening mark that ends the prompt
            after = after.lstrip().removeprefix(self.reasoning_open.rstrip())
        reasoning, closing, answer = after.partition(self.reasoning_close)
        # Without an opening, only a closing mark shows that the text began with reasoning. After a
        # call it is a stray mark, which must not turn that call into reasoning.
        lacks_opening = not inside and not is_opened
        if lacks_opening and (not closing or self._opens_call(reasoning)):
            return None, text
        return reasoning.strip(), before + answer

    def _opens_call(self, text: str) -> bool:
        """Return True if a call begins in the text."""
        return any(mark["_open"] is not None for mark in self._mark_pattern.finditer(text))

    def _split_calls(self, text: str, schemas: Schemas) -> tuple[str, list[ParsedCall]]:
        """Return (content outside calls, calls).

        A region begins with an opening mark and holds one call, or a list of calls. Other text is
        content, except for calls without their opening mark (`_read_outside`).
        """
        marks = self._find_marks(text)
        content: list[str] = []
        calls: list[ParsedCall] = []
        position = 0  # all text before it is in `content` or `calls`
        index = 0  # of the next mark in `marks`
        while index < len(marks):
            mark = marks[index]
            index += 1
            if mark["_open"] is None:  # a closing mark without a call is content
                continue
            content.append(self._read_outside(text[position : mark.start()], calls, schemas))
            if len(calls) >= MAX_CALLS:
                beyond = ParsedCall(text=text[mark.start() :], problem=TOO_MANY)
                return "".join(content), [*calls, beyond]
            read = self._read_at(text, mark.end(), marks, index, schemas)
            end = mark.end() + read.end  # of the calls in the region
            while index < len(marks) and marks[index].start() < end:  # marks inside the call
                index += 1
            # In a format without marks (`call_open_pattern`) the opening matches no text: it is the
            # place of the call's first character.
            has_no_mark = mark.end() == mark.start()
            names_no_tool = len(read.calls) == 1 and read.calls[0].name is None
            if has_no_mark and names_no_tool:
                # A JSON object that names no tool is content. But right after a call without
                # arguments, {"name": "find"} {"q": "tea"}, it may be these: that call is malformed.
                between = text[position : mark.start()].strip(self.separator + " \t\r\n")
                after = text[mark.start() :]
                if calls and not between and _may_lack_arguments(calls[-1], after):
                    calls[-1] = replace(calls[-1], problem=_text_after_call(after))
                # The next round, or the end, adds the object to the content.
                position = mark.start()
                continue
            next_mark = marks[index] if index < len(marks) else None
            region_calls, position = self._finish_region(text, mark.start(), end, read, next_mark)
            calls += region_calls
        tail = self._read_outside(text[position:], calls, schemas)
        if calls and (cut_call := self._cut_call(tail)) is not None:
            return "".join(content), [*calls, cut_call]  # the tail is the text of this call
        return "".join([*content, tail]), calls

    def _find_marks(self, text: str) -> list[re.Match[str]]:
        """Return the marks that open and close calls, in order."""
        marks: list[re.Match[str]] = []
        for mark in self._mark_pattern.finditer(text):
            # A match of no width right after another one is the same opening.
            if mark.end() > mark.start() or not marks or mark.start() > marks[-1].end():
                marks.append(mark)
        return marks

    def _cut_call(self, tail: str) -> ParsedCall | None:
        """Return the malformed call that begins in `tail`, e.g. ``{"na``; None if there is none.

        `tail` is the text after all calls. In a format without marks, such as Llama's
        ``{"name": …}``, an expression finds the calls, and a call that was cut off early does not
        match it. With marks, a call is recognised by its opening mark, wherever it is cut.
        """
        has_marks = self.call_open_pattern is None or self.call_close is not None
        if has_marks:
            return None
        head = tail.strip(self.separator + " \t\r\n")
        beginning = regex.compile(self._opening_source, regex.DOTALL)  # the library caches it
        # With `partial`, a text matches too if more text could complete the match.
        match = beginning.match(head, partial=True) if head else None
        is_cut_opening = match is not None and match.partial and match.end() == len(head)
        if not is_cut_opening:
            return None
        name = written_name(head, self.name_key)
        return ParsedCall(text=head, name=name, problem="the call is not closed")

    def _finish_region(
        self, text: str, start: int, end: int, read: ReadCalls, next_mark: re.Match[str] | None
    ) -> tuple[list[ParsedCall], int]:
        """Return (the calls of one region with the text of each, the position after the region).

        A region begins with the opening mark at `start`. It reaches to the closing mark, or without
        one to the next opening mark or the end of the text. `read` are its calls, `end` is where
        they end in the text, and `next_mark` is the mark after that.
        """
        limit = next_mark.start() if next_mark is not None else len(text)
        unread = text[end:limit]  # between the calls and the next mark
        position, problem = self._end_region(end, limit, unread, read, next_mark)
        region = text[start:position]
        if self.separator and any(call.problem is not None for call in read.calls):
            # The separator after a malformed call is not part of the call.
            region = region.rstrip(self.separator + " \t\r\n")
        # Readers give each call of a list its own text, and a single call none: that is the region.
        is_single_call = len(read.calls) == 1 and not read.calls[0].text
        if is_single_call:
            (call,) = read.calls
            return [replace(call, text=region, problem=problem or call.problem)], position
        return self._finish_list(read.calls, region, unread, problem), position

    def _end_region(
        self, end: int, limit: int, unread: str, read: ReadCalls, next_mark: re.Match[str] | None
    ) -> tuple[int, str | None]:
        """Return (the position after a region, the problem of a region that ends badly or None).

        The region's calls, `read`, end at `end`. `unread` is the text from there to `limit`, where
        `next_mark` or the end of the text stands.
        """
        is_malformed = any(call.problem is not None for call in read.calls)
        if self.call_close is None:
            # Without closing marks a good call ends with its arguments. A malformed one has all
            # text up to the next mark. So has one without arguments, which may stand in that text.
            if read.calls and _may_lack_arguments(read.calls[-1], unread):
                return limit, _text_after_call(unread)
            return (limit if is_malformed else end), None
        is_closed = next_mark is not None and next_mark["_open"] is None
        if next_mark is None or not is_closed:  # the text ends, or another call opens
            return limit, f"the call is not closed: {self.call_close} is missing"
        has_text_after = not is_malformed and bool(unread.strip())
        return next_mark.end(), _text_after_call(unread) if has_text_after else None

    def _finish_list(
        self, read_calls: Sequence[ParsedCall], region: str, unread: str, problem: str | None
    ) -> list[ParsedCall]:
        """Return the calls of a region that is a list of calls.

        A call may have been written apart from its arguments, and must not run without them: a call
        without arguments becomes malformed if a value follows that may be these. Examples::

            [{"name": "f"}] {"x": 1}    `unread`, the text after the list, may be the arguments
            [{"name": "f"}, {"x": 1}]   the next item, which is no call, may be the arguments

        `read_calls` has at least one call; a reader that found none returns a malformed one.
        `problem` is that of the region: it is not closed, or text follows the list.
        """
        # An item has no text if the completion ends after its comma.
        calls = [call if call.text else replace(call, text=region) for call in read_calls]
        if _may_lack_arguments(calls[-1], unread):
            # This call reports the region's problem, so that no further call has to.
            calls[-1] = replace(calls[-1], problem=problem or _text_after_call(unread))
            return calls
        for index, (call, next_call) in enumerate(pairwise(calls)):
            # A malformed call with a name does not hold the arguments of the call before it.
            has_name = next_call.name or f'"{self.name_key}"' in next_call.text
            if next_call.problem is None or has_name:
                continue
            if _may_lack_arguments(call, next_call.text):
                calls[index] = replace(call, problem=_text_after_call(next_call.text))
        if problem is not None and calls[-1].problem is None:
            # The complete calls of a list that was cut stay good. The remaining text becomes a
            # malformed call with the problem.
            remainder = region[region.rfind(calls[-1].text) + len(calls[-1].text) :]
            calls.append(ParsedCall(text=remainder, problem=problem))
        return calls

    def _read_outside(self, text: str, calls: list[ParsedCall], schemas: Schemas) -> str:
        """Return the content of a text outside the regions; append calls without a mark to `calls`.

        `_unmarked_pattern` matches where such a call may begin: ``<function=`` in a format whose
        mark is ``<tool_call>``. The call ends before the next such place, so that a value that is
        not closed cannot run over it. The separator alone is no content.
        """
        if self._unmarked_pattern is None:  # every call has its mark: all of the text is content
            return "" if calls and self.separator and text.strip() == self.separator else text
        openings = [opening.start() for opening in self._unmarked_pattern.finditer(text)]
        content: list[str] = []
        position = 0  # all text before it is in `content` or `calls`
        for start, next_start in pairwise([*openings, len(text)]):
            if len(calls) > MAX_CALLS:
                break
            read = READERS[self.syntax](text[start:next_start], self, schemas)
            name = read.calls[0].name if len(read.calls) == 1 else None
            # Without the mark only the name of a tool shows that the text is a call. The model may
            # write any JSON as name. Other text is content, with the text before the next call.
            if not isinstance(name, str) or name not in schemas:
                continue
            (call,) = read.calls
            # A malformed call has all text up to the next one. `read.end` counts from `start`.
            end = next_start if call.problem is not None else start + read.end
            if (closing := self._closing_pattern.match(text, end)) is not None:
                end = closing.end()  # the model may write the closing mark all the same
            calls.append(replace(call, text=text[start:end]))
            content.append(text[position:start])
            position = end
        return "".join([*content, text[position:]])

    def _read_at(
        self, text: str, start: int, marks: list[re.Match[str]], index: int, schemas: Schemas
    ) -> ReadCalls:
        """Read the calls at `start`; `marks[index]` is the first mark after it.

        A mark inside a string argument is part of the string, so a string that runs into a mark is
        read again up to a later mark. Example: in ``{"x": "</tool_call>"}</tool_call>`` the string
        runs into the first mark. The number of tries is bounded, so parsing stays linear.
        """
        read_body = READERS[self.syntax]
        bodies = _bodies(text, start, marks, index)
        first = read_body(next(bodies), self, schemas)
        if not first.is_cut_off:
            return first
        for longer_body in bodies:
            longer = read_body(longer_body, self, schemas)
            if longer.is_cut_off:
                continue
            # It counts only if it completes the call that was cut off, the last one of the first
            # try. A list may turn out to be shorter: then its last call counts. Each reader returns
            # at least one call.
            cut_index = min(len(first.calls), len(longer.calls)) - 1
            return longer if longer.calls[cut_index].problem is None else first
        return first  # no try has reached the end of the string


def _bodies(text: str, start: int, marks: Sequence[re.Match[str]], index: int) -> Iterator[str]:
    """Yield the text from `start` up to the 1st, 4th and 16th mark (MARKS_IN_STRINGS).

    `marks[index]` is the 1st. If there are fewer marks, the last body is all of the text.
    """
    for count in MARKS_IN_STRINGS:
        end_index = index + count - 1
        if end_index >= len(marks):
            yield text[start:]
            return
        yield text[start : marks[end_index].start()]


def _may_lack_arguments(call: ParsedCall, behind: str) -> bool:
    """Return True if a call without arguments is followed by a value that may be its arguments.

    Such a call must not run without them. Example: ``{"name": "find"} {"q": "tea"}``.
    """
    if call.problem is not None or call.arguments not in (None, {}):
        return False
    return behind.lstrip(" \t\r\n,;").startswith(("{", "[", "("))


def _text_after_call(text: str) -> str:
    """Return the problem of a call that is followed by a text."""
    return f"text after the call: {excerpt(text)}"


def types_by_tool(schemas: Sequence[Mapping[str, Any]]) -> Schemas:
    """Return the JSON types of parameters, by tool and parameter name."""
    functions = [schema.get("function", schema) for schema in schemas]
    return {
        str(function.get("name")): ParameterTypes(function.get("parameters") or {})
        for function in functions
    }
