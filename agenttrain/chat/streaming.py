"""Text of tokens that arrive one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class TextStream:
    """Decodes tokens as they arrive. A character in several tokens appears with the last of them.

    Example: ``stream = TextStream(chat.decode)``, then ``stream.push(token)`` for each token.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._earlier: list[int] = []
        """Tokens whose text was returned last."""
        self._pending: list[int] = []
        """Tokens after these, which wait for the end of a character."""

    def push(self, token_id: int) -> str:
        """Return the text that this token completes, perhaps empty."""
        self._pending.append(token_id)
        text = self._pending_text()
        if text.endswith("\ufffd"):  # an incomplete character
            return ""
        self._earlier, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        """Return the text of tokens that wait for a character's end, as it is."""
        text = self._pending_text()
        self._earlier, self._pending = self._earlier + self._pending, []
        return text

    def _pending_text(self) -> str:
        """Return the text of the pending tokens.

        They are decoded after earlier ones, because some tokenizers drop the blank before the first
        token of a text.
        """
        before = self._decode(self._earlier)
        return self._decode(self._earlier + self._pending)[len(before) :]
