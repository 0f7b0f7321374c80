"""Text of tokens that arrive one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class TextStream:
    """Decodes tokens as they arrive. A character in several tokens appears with the last of them.

    Example: ``stream = TextStream(chat.decode)``, then ``stream.push(token)`` for each token.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        """The tokens whose text was returned last, then those that wait for a character's end."""
        self._shown = 0
        """Number of the tokens in `_ids` whose text was returned."""

    def push(self, token_id: int) -> str:
        """Return the text that this token completes, perhaps empty."""
        self._ids.append(token_id)
        # Some tokenizers drop the blank before the first token: decode after an earlier token.
        before = self._decode(self._ids[: self._shown])
        text = self._decode(self._ids)[len(before) :]
        if text.endswith("\ufffd"):  # an incomplete character
            return ""
        # Forget the earlier tokens. Those of this text are the earlier ones of the next.
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)
        return text

    def flush(self) -> str:
        """Return the text of tokens that wait for a character's end, as it is."""
        before = self._decode(self._ids[: self._shown])
        text = self._decode(self._ids)[len(before) :]
        self._shown = len(self._ids)
        return text
