"""Inside: the worker of `python`, an interpreter that keeps its variables between calls.

The model's code runs in this process and can imitate it. The parent therefore trusts it little: it
takes one line of bounded length per call, and only with the random word that came with the call.
"""

from __future__ import annotations

import ast
import builtins
import io
import json
import linecache
import os
import socket
import sys
import traceback
from types import CodeType
from typing import Any

FRAMES = 8
"""Frames of a traceback that are shown, the innermost ones."""


def run(channel: socket.socket, packages: str | None) -> None:
    """Run the code of each request on `channel` until the parent has closed it.

    A request is a line ``{"nonce": "9f…", "code": "1 + 1"}``; its answer is ``9f… 0``, or ``9f… 1``
    if the code raised. What the code prints goes to stdout. `packages` is a folder of further
    packages to import, or None.
    """
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    for number, name in ((1, "stdout"), (2, "stderr")):
        # Unbuffered, so that both streams and the output of subprocesses keep their order.
        raw = io.FileIO(number, "w", closefd=False)
        text = io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)
        setattr(sys, name, text)
    # As in an interactive Python: no arguments, and the current folder ("") is searched first.
    sys.argv, sys.path[:] = [""], ["", *(path for path in sys.path if os.path.isdir(path))]
    if packages is not None:
        sys.path.append(packages)
    namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
    requests, process = channel.makefile("rb"), os.getpid()
    for number, line in enumerate(requests, start=1):
        request = json.loads(line)
        failed = _run_call(request["code"], f"<call {number}>", namespace)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BaseException:
                continue  # the code closed or replaced it
        if os.getpid() != process:  # a fork that the code made and forgot
            os._exit(0)
        # A line of its own, whatever the code wrote before.
        channel.sendall(f"\n{request['nonce']} {int(failed)}\n".encode())


def _run_call(code: str, name: str, namespace: dict[str, Any]) -> bool:
    """Run the code of one call; return True if it raised."""
    # Tracebacks then show the lines of this code.
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    try:
        for part, is_shown in _compile_parts(code, name):
            value = eval(part, namespace)
            if is_shown and value is not None:
                namespace["_"] = value
                print(repr(value))
    except SystemExit as stop:  # it ends the call and not the session
        if stop.code in (None, 0):
            return False
        print(f"SystemExit: {stop.code}", file=sys.stderr)
        return True
    except BaseException as error:
        try:
            # The first frame is this file's; the frames of a syntax error are the parser's.
            frames = error.__traceback__.tb_next if error.__traceback__ else None
            if isinstance(error, SyntaxError):
                frames = None
            lines = traceback.format_exception(type(error), error, frames, limit=-FRAMES)
            print("".join(lines), end="", file=sys.stderr)
        except BaseException:
            # The traceback cannot be printed: no memory, or a `__str__` that raises.
            os.write(2, type(error).__name__.encode(errors="replace") + b"\n")
        return True
    return False


def _compile_parts(code: str, name: str) -> list[tuple[CodeType, bool]]:
    """Compile the code as (part, True if its value is shown): a last expression is shown."""
    tree = ast.parse(code, name)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        return [(compile(tree, name, "exec"), False)]
    tree.body.pop()
    return [
        (compile(tree, name, "exec"), False),
        (compile(ast.Expression(last.value), name, "eval"), True),
    ]
