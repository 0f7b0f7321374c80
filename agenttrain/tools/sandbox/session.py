"""Outside: one call in a sandbox, its output and its time."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shlex
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from agenttrain.tools.sandbox.config import SandboxSettings
from agenttrain.tools.sandbox.outside_process import Jail, SandboxError, SandboxProcess

DEATH_REPORT_S = 0.5
"""Seconds within which the death of a sandbox is reported."""
MAX_OUTPUT_BYTES = 4 << 20
"""Bytes of output after which a call is ended."""
MAX_NOISE_BYTES = 1 << 12
"""Bytes on the channel that are no answer, after which a call is ended."""
CHUNK = 1 << 16
PAUSE_S = 0.01
"""Seconds between two reads of the output: code that prints byte by byte must not keep us busy."""
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
"""A call of bash: the code, which sees neither the commands that follow nor the channel, and the
answer, whatever functions, aliases and options the code leaves behind.

A quoted word is no alias, and `builtin` finds no function. A function of that name is removed after
every call, by an `unset` that is the shell's own: in POSIX mode, which an assignment switches on,
functions do not hide special builtins. The options of `set` that would end the shell in a later
call (-e, -u) or show these commands (-v, -x) are off after a call. In one line: bash has read it
all before the code runs."""


class End(StrEnum):
    """How a call ended."""

    done = "done"
    """The code ran to its end."""
    failed = "failed"
    """It raised (`python`), or its status was not 0 (`bash`)."""
    exited = "exited"
    """Its interpreter ended."""
    timeout = "timeout"
    memory = "memory"
    flood = "flood"
    """It printed without end."""
    full = "full"
    """Its processes are as many as are allowed, and its interpreter is none of them."""
    broken = "broken"
    """The channel was closed, or filled with what is no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeOutcome:
    """A call's end and its output."""

    end: End
    output: str
    status: int = 0
    """With `failed` and `exited`: exit status, or minus the signal's number."""


class Output:
    """The output of a call: its beginning and its end are kept, in memory that is bounded.

    Example: of "abcdefghij", with ``max_chars=4``, it keeps "ab… [6 characters left out] …ij".
    """

    def __init__(self, max_chars: int) -> None:
        self._max_chars, self._room = max_chars, 4 * max_chars
        self._head, self._tail = bytearray(), bytearray()
        self.size = 0

    def add(self, data: bytes) -> None:
        """Take more bytes."""
        self.size += len(data)
        taken = max(self._room - len(self._head), 0)
        self._head += data[:taken]
        self._tail += data[taken:]
        del self._tail[: -self._room]

    def text(self) -> str:
        """Return the text, in the middle clipped with a marker; what is no UTF-8 becomes U+FFFD."""
        missing = self.size - len(self._head) - len(self._tail)
        if missing == 0:
            text = (self._head + self._tail).decode("utf-8", "replace").rstrip("\n")
            return text if len(text) <= self._max_chars else self._cut(text, text, len(text))
        head = self._head.decode("utf-8", "replace")
        tail = self._tail.decode("utf-8", "replace").rstrip("\n")
        return self._cut(head, tail, len(head) + missing + len(tail))

    def _cut(self, head: str, tail: str, length: int) -> str:
        half = (self._max_chars + 1) // 2
        last = self._max_chars - half
        end = tail[len(tail) - last :]
        return f"{head[:half]}… [{length - self._max_chars} characters left out] …{end}"


async def run_call(jail: Jail, kind: str, code: str, settings: SandboxSettings) -> CodeOutcome:
    """Run `code` in the sandbox's interpreter of this kind; `settings` limit time and output.

    After any end but `done`, `failed` and `exited` the sandbox is dead, and so it is when the
    caller is cancelled. Raises SandboxError when it was dead before or died by itself.
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
    """A call in progress: what comes in from three sides until one of them ends it."""

    def __init__(self, jail: Jail, kind: str, settings: SandboxSettings) -> None:
        self._jail, self._kind, self._limit_s = jail, kind, settings.call_s
        self._worker: SandboxProcess = jail.worker(kind)
        self._output = Output(settings.max_chars)
        self._noise = bytearray()
        self._nonce = secrets.token_hex(16)
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[tuple[End, int]] = self._loop.create_future()
        self._watched: set[int] = set()

    async def run(self, code: str) -> CodeOutcome:
        self._jail.interrupt = self._on_interrupt
        if self._kind == "python":
            request = json.dumps({"nonce": self._nonce, "code": code}) + "\n"
        else:
            request = BASH_CALL.format(code=shlex.quote(code), nonce=self._nonce)
        data = request.encode("utf-8", "replace")
        self._jail.resume()
        try:
            sent = self._worker.channel.send(data)
        except OSError:
            sent = 0
        if sent != len(data):
            # The code closed it, or read nothing of what came before; unless the sandbox is
            # dying, which is reported within this time.
            self._loop.call_later(DEATH_REPORT_S, self._finish, End.broken)
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
            self._unwatch_all()
        if end in (End.done, End.failed, End.exited):
            self._jail.pause()
            # What was printed before the end is in the pipe by now.
            limit = self._output.size + (1 << 20)
            with suppress(BlockingIOError):
                while self._output.size < limit and (data := os.read(self._worker.output, CHUNK)):
                    self._output.add(data)
            if end is End.exited:
                self._jail.forget(self._kind)
        else:
            self._jail.kill()
        return CodeOutcome(end=end, output=self._output.text(), status=status)

    def _watch(self, number: int, reader: Callable[[], None]) -> None:
        if not self._ended.done():
            self._watched.add(number)
            self._loop.add_reader(number, reader)

    def _unwatch(self, number: int) -> None:
        self._watched.discard(number)
        self._loop.remove_reader(number)

    def _unwatch_all(self) -> None:
        for number in list(self._watched):
            self._unwatch(number)

    def _on_interrupt(self) -> None:
        """The sandbox is being ended by somebody else, who closes what is watched here."""
        if not self._ended.done():
            self._ended.set_exception(SandboxError("it was ended during a call"))
        self._unwatch_all()

    def _finish(self, end: End, status: int = 0) -> None:
        if not self._ended.done():
            self._ended.set_result((end, status))

    def _read_output(self) -> None:
        number = self._worker.output
        data = os.read(number, CHUNK)
        self._output.add(data)
        self._unwatch(number)
        if self._output.size > MAX_OUTPUT_BYTES:
            self._finish(End.flood)
        elif data:  # without, nobody can print any more; how it ended comes from elsewhere
            self._loop.call_later(PAUSE_S, self._watch, number, self._read_output)

    def _read_answer(self) -> None:
        try:
            data = self._worker.channel.recv(CHUNK)
        except OSError:
            data = b""
        self._noise += data
        if not data:
            self._unwatch(self._worker.channel.fileno())
        for line in self._noise.split(b"\n")[:-1]:
            words = line.split()
            if len(words) == 2 and words[0] == self._nonce.encode() and words[1].isdigit():
                status = int(words[1][:3])
                self._finish(End.failed if status else End.done, status)
        if len(self._noise) > MAX_NOISE_BYTES:
            self._finish(End.broken)

    def _read_control(self) -> None:
        try:
            words = self._jail.control.recv(4096).decode().split()
        except OSError:
            words = []
        if not words:
            self._unwatch(self._jail.control.fileno())
            if not self._ended.done():
                self._ended.set_exception(SandboxError("the sandbox ended by itself"))
        elif words[0] in (End.memory, End.full):
            self._finish(End(words[0]))
        elif words[:2] == ["exit", self._kind]:
            self._finish(End.exited, int(words[2]))
        elif words[0] == "exit":
            self._jail.forget(words[1])


def signal_name(status: int) -> str:
    """Name the signal of a negative exit status: -9 -> `SIGKILL`."""
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
