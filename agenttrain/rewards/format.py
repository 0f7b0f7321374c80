"""`format`: what the model wrote has the form of a regular expression."""

from __future__ import annotations

import regex

from agenttrain.rewards.answer import assistant_messages
from agenttrain.types import Rollout

MATCH_S = 1.0
"""Seconds that one match may take: some patterns need years for some texts."""
PARTS = ("content", "reasoning")
TURNS = ("last", "all")


class Format:
    """1 if the pattern matches, else 0.

    `part` is the message's `content` (what the response schema leaves of a completion: no thoughts,
    no calls) or its `reasoning`. `turns`: the `last` assistant message, or `all` of them. `whole`:
    the pattern must match all of the text, not a part. `.` matches line ends too. Example:
    ``Format(pattern="Answer: [0-9]+")`` gives 1.0 to a last message ``Answer: 7``.
    """

    def __init__(
        self, *, pattern: str, part: str = "content", turns: str = "last", whole: bool = True
    ) -> None:
        for name, value, known in (("part", part, PARTS), ("turns", turns, TURNS)):
            if value not in known:
                raise ValueError(f"{name}={value}: must be one of {', '.join(known)}")
        try:
            self._pattern = regex.compile(pattern, regex.DOTALL)
        except regex.error as error:
            raise ValueError(
                f"pattern={pattern!r}: is no regular expression: {error.msg} (position {error.pos})"
            ) from error
        self._key = "content" if part == "content" else "reasoning_content"
        self._all, self._whole = turns == "all", whole

    def __call__(self, rollout: Rollout) -> float:
        messages = assistant_messages(rollout)
        judged = messages if self._all else messages[-1:]
        match = self._pattern.fullmatch if self._whole else self._pattern.search
        for message in judged:
            text = (message.get(self._key) or "").strip()
            try:
                if match(text, timeout=MATCH_S) is None:
                    return 0.0
            except TimeoutError:
                raise ValueError(
                    f"pattern={self._pattern.pattern!r} took over {MATCH_S:g} s on {len(text)} "
                    "characters; write it without nested repetitions"
                ) from None
        return float(bool(judged))
