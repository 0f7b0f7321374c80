"""The programs podman and docker, called as they are."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agenttrain.runtimes.base import MachineLost

LAST_LINES = 3
"""Lines of a client's error output that an error quotes."""


class ClientTimeout(MachineLost):
    """A client took too long, and was ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientResult:
    """Outcome of a call of the client."""

    code: int
    out: bytes
    err: bytes

    @property
    def problem(self) -> str:
        """The last lines of its error output, as one line."""
        lines = (self.err or self.out).decode("utf-8", "replace").strip().splitlines()
        return " ".join(lines[-LAST_LINES:]) or f"it ended with exit code {self.code}"


async def call_client(
    arguments: Sequence[str],
    *,
    timeout_s: float,
    stdin: bytes = b"",
    on_output: Callable[[bytes], object] | None = None,
    cwd: Path | None = None,
) -> ClientResult:
    """Run a client to its end. Raises MachineLost if it is missing, ClientTimeout if it hangs.

    With `on_output` standard output and error go there together. `cwd` is the client's working
    folder, by default this process's.
    """
    # Started directly, not by the keeper process that starts our other children: when a child
    # ends, the keeper kills all its descendants, and podman's container monitors must go on.
    try:
        process = await asyncio.create_subprocess_exec(
            *arguments,
            stdin=asyncio.subprocess.PIPE if stdin else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE if on_output is None else asyncio.subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C of the run must not end it halfway
            cwd=cwd,
        )
    except OSError as error:
        raise MachineLost(f"{arguments[0]}: {error.strerror}") from error
    try:
        async with asyncio.timeout(timeout_s):
            if on_output is None:
                out, err = await process.communicate(stdin or None)
                return ClientResult(code=process.returncode or 0, out=out, err=err)
            assert process.stdout is not None
            if process.stdin is not None:
                process.stdin.write(stdin)
                process.stdin.close()
            while data := await process.stdout.read(1 << 16):
                on_output(data)
            return ClientResult(code=await process.wait(), out=b"", err=b"")
    except TimeoutError as error:
        words = " ".join(arguments[:2])
        raise ClientTimeout(f"`{words}` did not end within {timeout_s:g} s") from error
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        # Its pipes first: a process that the client left behind may hold them open.
        process._transport.close()  # type: ignore[attr-defined]
        await process.wait()
