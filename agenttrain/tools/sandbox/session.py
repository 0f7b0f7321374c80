"""Outside the sandbox: run one call, collect its output and limit its time."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shlex
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from agenttrain.tools.sandbox.config import SandboxSettings
from agenttrain.tools.sandbox.outside_process import Jail, SandboxError, SandboxProcess
from agenttrain.types import ToolFailure

DEATH_REPORT_S = 0.5
"""Seconds within which a sandbox's end is reported over its connection."""
MAX_OUTPUT_BYTES = 4 << 20
"""Bytes of output at which a call is ended."""
MAX_NOISE_BYTES = 1 << 12
"""Bytes without an answer on the channel at which a call is ended."""
CHUNK = 1 << 16
PAUSE_S = 0.01
"""Seconds between two reads of the output, so that code that prints byte by byte does not keep the
event loop busy."""
MAX_CODE = 50_000
"""Characters of a call."""

BASH_CALL = (
    r"\builtin eval {code} </dev/null 9>&-; "
    r"{{ __agenttrain_status=$? __agenttrain_options=$BASHOPTS POSIXLY_CORRECT=y; "
    r"\set +euvx; \unset -f builtin; \unset POSIXLY_CORRECT; "
    r"\builtin eval 'if [[ $__agenttrain_options == *expand_aliases* ]]; "
    r"then \builtin shopt -s expand_aliases; fi'; "
    r"""\builtin printf '\n%s %s\n' {nonce} "$__agenttrain_status" >&9; """
    r"\unset __agenttrain_status __agenttrain_options; }} >/dev/null 2>&1"
    "\n"
)
"""The input of one call of bash: the code, then commands that send the answer.

The code sees neither these commands nor the channel, and the answer is sent whatever functions,
aliases and options the code defines. A quoted word is no alias, and `builtin` skips functions. A
function named `builtin` is removed after every call by the shell's own `unset`: in POSIX mode,
which the assignment switches on, functions do not hide special builtins. Options of `set` that
would end the shell in a later call (-e, -u) or show these commands (-v, -x) are switched off. All
of it is one line, which bash reads completely before the code runs."""


class End(StrEnum):
    """The way in which a call ended."""

    done = "done"
    """The code ran to its end."""
    failed = "failed"
    """The code raised (`python`), or its status was not 0 (`bash`)."""
    exited = "exited"
    """The interpreter ended."""
    timeout = "timeout"
    """The time limit is over."""
    memory = "memory"
    """The memory limit is exceeded."""
    flood = "flood"
    """The code printed too much."""
    full = "full"
    """The interpreter cannot start: the sandbox has as many processes as are allowed."""
    broken = "broken"
    """The channel was closed, or filled with data that is no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeOutcome:
    """A call's end and its output."""

    end: End
    output: str
    status: int = 0
    """For `failed` and `exited`: the exit status, or minus the signal's number."""


class Output:
    """The beginning and the end of a call's output, in bounded memory.

    Example: with ``max_chars=4``, "abcdefghij" becomes "ab… [6 characters left out] …ij".
    """

    def __init__(self, max_chars: int) -> None:
        self._max_chars = max_chars
        self._max_bytes = 4 * max_chars  # of head and tail each; UTF-8 has up to 4 per character
        self._head, self._tail = bytearray(), bytearray()
        self.size = 0
        """Bytes of the whole output."""

    def add(self, data: bytes) -> None:
        """Append output."""
        self.size += len(data)
        remaining = max(self._max_bytes - len(self._head), 0)
        self._head += data[:remaining]
        self._tail += data[remaining:]
        del self._tail[: -self._max_bytes]

    def text(self) -> str:
        """Return the text, clipped in the middle with a marker; invalid UTF-8 becomes U+FFFD.

        The marker's number is too high if bytes were dropped that are parts of longer characters.
        """
        dropped_bytes = self.size - len(self._head) - len(self._tail)
        if dropped_bytes == 0:
            # Joined before decoding: the border may be inside of a character.
            text = (self._head + self._tail).decode("utf-8", "replace").rstrip("\n")
            if len(text) <= self._max_chars:
                return text
            head = tail = text
            length = len(text)
        else:  # each of the two holds the bytes of `max_chars` characters or more
            head = self._head.decode("utf-8", "replace")
            tail = self._tail.decode("utf-8", "replace").rstrip("\n")
            length = len(head) + dropped_bytes + len(tail)  # as if each byte were a character
        head_chars = (self._max_chars + 1) // 2
        tail_chars = self._max_chars - head_chars
        end = tail[len(tail) - tail_chars :]  # not tail[-tail_chars:], which is all of it for 0
        left_out = length - self._max_chars
        return f"{head[:head_chars]}… [{left_out} characters left out] …{end}"


def join_lines(first: str, second: str) -> str:
    """Join the lines of two texts, of which the first may be empty."""
    return f"{first}\n{second}" if first else second


def check_code(code: str) -> None:
    """Raise ToolFailure for code that cannot be run."""
    if len(code) > MAX_CODE:
        raise ToolFailure(f"the code has {len(code)} characters, at most {MAX_CODE} are run")
    if "\0" in code:
        raise ToolFailure("the code holds a NUL character")


async def run_call(jail: Jail, kind: str, code: str, settings: SandboxSettings) -> CodeOutcome:
    """Run `code` in the sandbox's `python` or `bash`, within the limits of `settings`.

    The sandbox is dead after any end but `done`, `failed` and `exited`, and after a cancellation.
    Raises SandboxError if it was dead before, or died by itself.
    """
    try:
        return await _Call(jail, kind, settings).run(code)
    except OSError as error:
        jail.kill()
        raise SandboxError(f"the connection to the sandbox broke: {error}") from error
    except BaseException:
        jail.kill()
        raise


class _Call:
    """A call in progress: three readers on the event loop, of which one ends the call.

    - `_read_answer`: the interpreter's channel. ``<nonce> <status>`` says that the code has run.
    - `_read_output`: what the code prints; too much of it ends the call.
    - `_read_control`: messages of the sandbox's first process. `exit python 1`: an interpreter has
      ended; `memory` and `full`: a limit is reached; end of the connection: the sandbox is gone.

    The call sends the first process `go` at its beginning and `halt` at its end. From a `halt` to
    the next `go`, all processes of the sandbox are stopped.
    """

    def __init__(self, jail: Jail, kind: str, settings: SandboxSettings) -> None:
        """Prepare a call of the interpreter `kind`, `python` or `bash`; start it if need be."""
        self._jail, self._kind, self._limit_s = jail, kind, settings.call_s
        self._worker: SandboxProcess = jail.worker(kind)
        self._output = Output(settings.max_chars)
        self._received = bytearray()
        """Data of the interpreter's channel: the answer, and what the code may have written."""
        self._nonce = secrets.token_hex(16)
        """First word of the answer. The code cannot guess it, and so cannot fake an answer."""
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[tuple[End, int]] = self._loop.create_future()
        """(how the call ended, exit status as in `CodeOutcome`), set by the first reader that ends
        the call, or SandboxError if the sandbox is gone."""
        self._watched: set[int] = set()
        """File descriptors with a reader on the event loop, which must be removed at the end."""

    async def run(self, code: str) -> CodeOutcome:
        """Run the code until a reader below ends the call by `_finish`, or the time limit does.

        After a limit or a fault the sandbox is killed.
        """
        self._jail.interrupt = self._on_interrupt  # called if the sandbox is killed meanwhile
        self._jail.control.send(b"go")
        self._send(code)
        self._watch(self._jail.control.fileno(), self._read_control)
        self._watch(self._worker.channel.fileno(), self._read_answer)
        self._watch(self._worker.output, self._read_output)
        try:
            async with asyncio.timeout(self._limit_s):
                end, status = await self._ended
        except TimeoutError:
            end, status = End.timeout, 0
        finally:
            self._jail.interrupt = None
            self._unwatch(*self._watched)
        if end in (End.done, End.failed, End.exited):  # the sandbox serves further calls
            self._jail.control.send(b"halt")
            self._drain_output()  # the answer may arrive before the last output was read
            if end is End.exited:
                self._jail.forget(self._kind)  # the next call starts another interpreter
        else:
            self._jail.kill()
        return CodeOutcome(end=end, output=self._output.text(), status=status)

    def _send(self, code: str) -> None:
        """Send the code to the interpreter."""
        if self._kind == "python":
            request = json.dumps({"nonce": self._nonce, "code": code}) + "\n"
        else:
            request = BASH_CALL.format(code=shlex.quote(code), nonce=self._nonce)
        data = request.encode("utf-8", "replace")
        try:
            sent_bytes = self._worker.channel.send(data)
        except OSError:
            sent_bytes = 0
        if sent_bytes != len(data):
            # The rest is not sent: an interpreter that waits for code takes all of it at once. So
            # earlier code closed the channel or left it unread. Or the sandbox is ending: then
            # `_read_control` ends the call before this does, and with the better reason.
            self._loop.call_later(DEATH_REPORT_S, self._finish, End.broken)

    def _drain_output(self) -> None:
        """Read what the code printed before its end, all of which is in the pipe by now."""
        # A pipe holds 1 MB at most. Background processes may print until `halt` reaches them.
        limit = self._output.size + (1 << 20)
        with suppress(BlockingIOError):
            while self._output.size < limit and (data := os.read(self._worker.output, CHUNK)):
                self._output.add(data)

    def _watch(self, number: int, reader: Callable[[], None]) -> None:
        """Call `reader` when the file of this number can be read, until the call ends."""
        if not self._ended.done():
            self._watched.add(number)
            self._loop.add_reader(number, reader)

    def _unwatch(self, *numbers: int) -> None:
        for number in numbers:
            self._watched.discard(number)
            self._loop.remove_reader(number)

    def _on_interrupt(self) -> None:
        """End the call, because the sandbox was killed meanwhile and its files are closed."""
        if not self._ended.done():
            self._ended.set_exception(SandboxError("it was ended during a call"))
        self._unwatch(*self._watched)

    def _finish(self, end: End, status: int = 0) -> None:
        """End the call, unless it has ended."""
        if not self._ended.done():
            self._ended.set_result((end, status))

    def _read_output(self) -> None:
        """Read output of the code; end the call if it is too much."""
        number = self._worker.output
        data = os.read(number, CHUNK)
        self._output.add(data)
        # For PAUSE_S: code that prints byte by byte must not keep the event loop busy.
        self._unwatch(number)
        if self._output.size > MAX_OUTPUT_BYTES:
            self._finish(End.flood)
        elif data:  # b"": the interpreter has ended, and `_read_control` will read its status
            self._loop.call_later(PAUSE_S, self._watch, number, self._read_output)

    def _read_answer(self) -> None:
        """Read the interpreter's channel; end the call at its answer, ``<nonce> <status>``.

        The model's code can write to the channel too, but does not know the nonce.
        """
        try:
            data = self._worker.channel.recv(CHUNK)
        except OSError:
            data = b""
        self._received += data
        if not data:
            self._unwatch(self._worker.channel.fileno())
        for line in self._received.split(b"\n")[:-1]:  # the complete lines
            words = line.split()
            if len(words) == 2 and words[0] == self._nonce.encode() and words[1].isdigit():
                # 0 to 255. Cut, for code that reads the nonce in its own interpreter may send a
                # number of any length.
                status = int(words[1][:3])
                self._finish(End.failed if status else End.done, status)
        if len(self._received) > MAX_NOISE_BYTES:
            self._finish(End.broken)

    def _read_control(self) -> None:
        """Read a message of the sandbox's first process; it may end the call."""
        try:
            words = self._jail.control.recv(4096).decode().split()
        except OSError:
            words = []
        if not words:  # the connection is closed
            self._unwatch(self._jail.control.fileno())
            if not self._ended.done():
                self._ended.set_exception(SandboxError("the sandbox ended by itself"))
        elif words[0] in (End.memory, End.full):  # a StrEnum: its members equal the texts
            self._finish(End(words[0]))
        elif words[:2] == ["exit", self._kind]:  # `exit python 1`, in a call of `python`
            self._finish(End.exited, int(words[2]))
        elif words[0] == "exit":  # the other interpreter, which a later call starts again
            self._jail.forget(words[1])
