"""`files`: tools that read and write files in the rollout's container."""

from __future__ import annotations

from io import StringIO

from agenttrain.tools.machine import machine_of
from agenttrain.types import CommandResult, ToolContext, ToolFailure
from agenttrain.utils.data_fields import Data

LARGEST = 1 << 20
"""Bytes of a file that is read or changed."""
CALL_S = 20.0


class Files:
    """Reads, writes, changes and lists files; paths may be relative to the container's folder.

    A result has at most `max_chars` characters; of a longer file `read_file` shows the lines from
    `first_line` on that fit, and says how many there are.
    """

    def __init__(self, *, max_chars: Data[int] = 4000) -> None:
        if max_chars < 1:
            raise ValueError(f"max_chars={max_chars}: must be at least 1")
        self._max_chars = max_chars

    async def read_file(self, path: str, context: ToolContext, first_line: int = 1) -> str:
        """Read a text file.

        Args:
            path: The file.
            first_line: The line with which to begin, from 1.
        """
        text = await _read(path, context)
        lines = StringIO(text).readlines()  # as programs count lines: only "\n" ends one
        shown, count, first = "", 0, max(first_line, 1)
        for line in lines[first - 1 :]:
            if len(shown) + len(line) > self._max_chars:
                break
            shown += line
            count += 1
        is_whole_file = first == 1 and count == len(lines)
        if is_whole_file:
            return shown or "(empty file)"
        is_first_too_long = count == 0 and first <= len(lines)
        if is_first_too_long:  # show its beginning rather than nothing
            shown, count = lines[first - 1][: self._max_chars], 1
        # Past the end of the file no line is shown. The note then still has the number of lines:
        # "[lines 9 to 8 of 5]".
        note = f"[lines {first} to {first + count - 1} of {len(lines)}]"
        return f"{shown.rstrip()}\n{note}"

    async def write_file(self, path: str, content: str, context: ToolContext) -> str:
        """Write a text file, and its folders if they are missing.

        Args:
            path: The file.
            content: The whole new text.
        """
        await _write(path, content, context)
        return f"wrote {len(content)} characters to {path}"

    async def replace_in_file(self, path: str, old: str, new: str, context: ToolContext) -> str:
        """Replace a text that occurs exactly once in a file.

        Args:
            path: The file.
            old: The text to replace, with enough around it to be unique.
            new: The text in its place.
        """
        text = await _read(path, context)
        count = text.count(old) if old else 0
        if count != 1:
            raise ToolFailure(f"{path}: the text occurs {count} times; it must occur once")
        await _write(path, text.replace(old, new), context)
        return f"replaced 1 occurrence in {path}"

    async def list_files(self, context: ToolContext, path: str = ".") -> str:
        """List a folder: permissions, sizes and names.

        Args:
            path: The folder.
        """
        result = await _exec(["ls", "-lA", "--", path], context)
        if result.code:
            raise ToolFailure(result.text.strip())
        text = result.text.rstrip()
        if len(text) <= self._max_chars:
            return text
        lines = text[: self._max_chars].splitlines()[:-1]  # without the last, which may be cut
        return "\n".join([*lines, f"[{len(text.splitlines()) - len(lines)} more entries]"])


async def _read(path: str, context: ToolContext) -> str:
    """Return a file's text. Raises ToolFailure."""
    script = 'test -f "$1" || { echo "$1: there is no such file"; exit 1; }; cat -- "$1"'
    result = await _exec(["sh", "-c", script, "sh", path], context)
    if result.code:
        raise ToolFailure(result.text.strip())
    if result.size > LARGEST:
        raise ToolFailure(f"{path}: has {result.size} bytes, at most {LARGEST} are read")
    return result.text


async def _write(path: str, content: str, context: ToolContext) -> None:
    """Write a file's text. Raises ToolFailure."""
    script = 'case "$1" in */*) mkdir -p -- "${1%/*}/";; esac && cat >"$1"'
    data = content.encode("utf-8", "replace")
    result = await _exec(["sh", "-c", script, "sh", path], context, data)
    if result.code:
        raise ToolFailure(result.text.strip())


async def _exec(command: list[str], context: ToolContext, stdin: bytes = b"") -> CommandResult:
    if any("\0" in word for word in command):
        raise ToolFailure("the path holds a NUL character")
    machine = machine_of(context)
    return await machine.exec(command, timeout_s=CALL_S, stdin=stdin, max_bytes=2 * LARGEST)
