"""The first of some texts in a completion, found as its tokens arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agenttrain.chat.streaming import TextStream
from agenttrain.types import Message


class StopScan:
    """Reads a completion up to the token that completes one of the stop texts.

    Call `push` for each token, and `finish` after the last one if no stop text was completed.

    Example, for the texts ``["Paris"]``: of the tokens ``in| Par|is|.`` the third one completes it,
    so that `end` is 3 and `text` is ``"in "``.
    """

    def __init__(self, text_of: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        """`text_of` decodes token ids. `stops` are the stop texts."""
        self.stops = stops
        self.text = ""
        """The text so far; once there is a stop text, the text before it."""
        self.count = 0
        """Number of tokens that were read."""
        self.end: int | None = None
        """Number of tokens up to the one that completes a stop text; None: no stop text yet."""
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
        # A stop text that `text` completes may begin in the text before.
        begin = max(len(self.text) - self._longest + 1, 0)
        self.text += text
        positions = [at for stop in self.stops if (at := self.text.find(stop, begin)) >= 0]
        if positions:
            self.text, self.end = self.text[: min(positions)], self.count


def cut_message(message: Message, stops: Sequence[str]) -> None:
    """Cut the content and the reasoning of an answer before the first of the stop texts.

    A stop text may only appear once the parts of the content are joined.
    """
    for key in ("content", "reasoning_content"):
        if text := message.get(key):
            position = min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)
            message[key] = text[:position]
