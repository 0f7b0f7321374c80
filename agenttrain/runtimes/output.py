"""Output of a command in bounded memory."""

from __future__ import annotations

from collections.abc import Callable

LEFT_OUT = b"\n[... %d bytes left out ...]\n"


class Clipped:
    """The beginning and the end of an output.

    Example: with ``max_bytes=4``, "abcdefghij" becomes "ab\\n[... 6 bytes left out ...]\\nij".
    """

    def __init__(self, max_bytes: int, on_output: Callable[[bytes], object] | None = None) -> None:
        self._half, self._on_output = max(max_bytes // 2, 1), on_output
        self._head, self._tail = bytearray(), bytearray()
        self.size = 0
        """Bytes of the whole output."""

    def add(self, data: bytes) -> None:
        """Append output, and pass it on to `on_output`.

        The head gets the first half of `max_bytes`; the tail keeps at least the last half.
        """
        self.size += len(data)
        room = max(self._half - len(self._head), 0)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._half + (1 << 16):  # cut seldom: each cut moves the rest
            del self._tail[: -self._half]
        if self._on_output is not None:
            self._on_output(data)

    def bytes(self) -> bytes:
        """Return the output, without its middle if it was too long."""
        tail = bytes(self._tail[-self._half :])
        missing = self.size - len(self._head) - len(tail)
        return bytes(self._head) + (LEFT_OUT % missing if missing else b"") + tail
