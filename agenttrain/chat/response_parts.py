"""Results of a parser of completions, and the protocol that it follows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

CALL_ID = "call_{turn}_{index}"
"""How a call without an id of its own is named."""
MAX_CALLS = 1024
"""Calls of one completion that are read: what an agent writes has a few, and each costs time."""
TOO_MANY = f"the message has over {MAX_CALLS:,} parts: this and what follows is not read"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A call as found in a completion, before its name and arguments are checked.

    Example: ``Found(text='<tool_call>{"name": "f"}</tool_call>', name="f", arguments={})``
    """

    text: str
    """The span of the completion that the call was read from."""
    name: Any = ""
    arguments: Any = field(default_factory=dict)
    """A mapping, or the text of a JSON object; anything else makes the call malformed."""
    problem: str | None = None
    """Why the text cannot be read as a call."""
    id: str | None = None
    """The id that the model wrote, in formats that have one."""
    name_label: str = '"name"'
    """Term for the name in a problem's text, which the model reads."""
    arguments_label: str = '"arguments"'
    lenient: bool = False
    """Only a lenient spec reads it."""


def unread(text: str) -> Found:
    """Return the end of a completion of too many calls as one malformed call."""
    return Found(text=text, problem=TOO_MANY)


def capped(calls: Sequence[Found]) -> Sequence[Found]:
    """The calls, those over the limit as one malformed call."""
    return calls if len(calls) <= MAX_CALLS else [*calls[:MAX_CALLS], unread(calls[MAX_CALLS].text)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A completion taken apart."""

    content: str
    reasoning: str | None
    calls: Sequence[Found] = ()
    """In the order written."""


class ResponseSpec(Protocol):
    """How completions are read; `specs.py` makes them from YAML and from tokenizers."""

    @property
    def call_id(self) -> str:
        """Format of the ids of calls that have none, of `turn` and `index`."""
        ...

    @property
    def lenient(self) -> bool:
        """Arguments that are almost JSON are read."""
        ...

    def marks(self, controls: Iterable[str]) -> tuple[str, ...]:
        """Those of a tokenizer's control tokens that `parse` must see in the completion's text.

        An end of turn is among them where the format tells by it how a message ended; all other
        control tokens are to be left out.
        """
        ...

    def opens_reasoning(self, prompt: str) -> bool:
        """Check that a completion of this prompt begins inside the reasoning."""
        ...

    def parse(self, text: str, *, in_reasoning: bool, schemas: Sequence[Mapping]) -> Parts:
        """Take any text apart, in linear time; never raises."""
        ...
