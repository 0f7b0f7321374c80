"""Standard output and error that cannot fail: printing never changes how a run ends.

Python's own streams raise: UnicodeEncodeError where the locale's encoding lacks a character (an
arrow of a table under ``LANG=C``), BrokenPipeError where the reader has gone (``… | head``), and
OSError where a terminal was closed or a disk is full. `protect` replaces both by streams that
escape characters that the encoding lacks, go on silently without a reader, and keep the first other
error for the end.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from typing import Any, TextIO

from agenttrain.utils.redaction import hide_secrets

NO_READER = (errno.EPIPE, errno.EIO, errno.ENXIO)
"""Errors of a pipe without a reader and of a terminal that was closed."""


class _Descriptor(io.RawIOBase):
    """A file descriptor whose writes never fail: a run goes on when its output cannot be written.

    `error` is the first suppressed error, other than that the reader has gone; None without one.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write what the descriptor takes; on an error pretend that all was written.

        Otherwise the buffer above would keep the text, and fail with it at the next write and again
        at exit.
        """
        try:
            return os.write(self._number, data)
        except BlockingIOError:  # another process made the pipe non-blocking, and it is full
            select.select([], [self._number], [])
            return 0  # nothing was written: the buffer tries again
        except OSError as error:
            if error.errno not in NO_READER:  # `… | head` has read what it wants: nothing is lost
                self.error = self.error or error
            return len(data)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)


def protect() -> None:
    """Replace `sys.stdout` and `sys.stderr` by streams that never raise (`unfailing`).

    A stream that is replaced already, by a test or a notebook, stays. The one for errors also hides
    the secrets of addresses, which tracebacks and logs may quote. A closed descriptor (``>&-``) is
    opened on the null device first: otherwise the next file that the process opens would get its
    number, and text that is printed would go into that file.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is getattr(sys, f"__{name}__"):
            stream = unfailing(number, like=getattr(sys, name), hides=name == "stderr")
            setattr(sys, name, stream)


class _HidingStream(io.TextIOWrapper):
    """A stream for errors, tracebacks and logs, which hides the secrets of addresses in them."""

    def write(self, text: str, /) -> int:
        return super().write(hide_secrets(text))


def unfailing(number: int, *, like: io.TextIOWrapper | None = None, hides: bool = False) -> TextIO:
    """Make a stream on descriptor `number` that never raises.

    With `hides` it hides secrets in addresses (`hide_secrets`). Its encoding and buffering are
    those of `like` (default: the locale's encoding, and blocks).
    """
    stream_class = _HidingStream if hides else io.TextIOWrapper
    return stream_class(
        io.BufferedWriter(_Descriptor(number)),
        encoding=getattr(like, "encoding", None),
        errors="backslashreplace",
        # Under PYTHONUNBUFFERED `like` writes through; this stream has a buffer, so it flushes.
        line_buffering=like is not None and (like.line_buffering or like.write_through),
        write_through=getattr(like, "write_through", False),
    )


def lost_output() -> str | None:
    """Flush standard output; return the error that lost some of it, or None.

    That the reader has gone is no such error: `_Descriptor.error` leaves it out.
    """
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if not isinstance(raw, _Descriptor):  # `protect` has not replaced the stream
        return None
    sys.stdout.flush()
    if raw.error is None:
        return None
    return f"standard output: {raw.error.strerror or raw.error}; some of it was not written"
