"""The first of some texts in a completion, found as its tokens arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agenttrain.chat.streaming import TextStream


class StopScan:
    """Reads a completion up to the first token behind which it holds one of the texts.

    Example, for the texts ``["Paris"]``: of the tokens ``in| Par|is|.`` the third one completes it,
    so that `end` is 3 and `text` is ``"in "``.
    """

    def __init__(self, text_of: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self.stops = stops
        self.text = ""
        """The text so far; once it is cut, that before the stop text."""
        self.count = 0
        """Tokens that were read."""
        self.end: int | None = None
        """Tokens up to the one that completes a stop text; None: there is none yet."""
        self._stream = TextStream(text_of)
        self._longest = max(map(len, stops), default=1)

    def push(self, token_id: int) -> bool:
        """Read a token; return True if the completion ends here, or did so before."""
        if self.end is None:
            self.count += 1
            self._append(self._stream.push(token_id))
        return self.end is not None

    def finish(self) -> None:
        """Read the text of tokens that wait for a character's end."""
        if self.end is None:
            self._append(self._stream.flush())

    def _append(self, text: str) -> None:
        begin = max(len(self.text) - self._longest + 1, 0)
        self.text += text
        found = [place for stop in self.stops if (place := self.text.find(stop, begin)) >= 0]
        if found:
            self.text, self.end = self.text[: min(found)], self.count


def before_stop(text: str, stops: Sequence[str]) -> str:
    """Return the part of a text before the first of the stop texts."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)]
