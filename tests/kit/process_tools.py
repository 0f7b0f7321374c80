"""Tools for worker processes: they must be importable there."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from agenttrain.tools.tool import FunctionTool, Tool
from agenttrain.types import Done, ToolContext, ToolFailure, ToolUnavailable


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: First.
        b: Second.
    """
    return a + b


async def async_add(a: int, b: int) -> int:
    """Add after a turn of the event loop.

    Args:
        a: First.
        b: Second.
    """
    await asyncio.sleep(0)
    return a + b


def pid() -> int:
    """Say which process this is."""
    return os.getpid()


def behave(how: str) -> object:
    """Do something that a tool should not do.

    Args:
        how: What.
    """
    match how:
        case "hang":
            threading.Event().wait()
        case "child":  # leaves a child that ignores what can be ignored
            program = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
            subprocess.Popen([sys.executable, "-c", program])
            threading.Event().wait()
        case "exit":
            print("last words", flush=True)
            os._exit(3)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "fork":  # returns in two processes
            os.fork()
            return "once"
        case "noise":
            print("noise " * 100_000)
            os.write(1, b"raw noise\n")
            return "quiet"
        case "huge":
            return "x" * 100_000_000
        case "raise":
            raise KeyboardInterrupt("by the tool")
        case "fail":
            raise ToolFailure("no such table")
        case "unavailable":
            raise ToolUnavailable("the server is gone")
        case "done":
            return Done("over")
        case "stdin":
            return sys.stdin.read() + "nothing"
    return how


SLEEP = ("sleep", "600")


def leave(way: str, then: str) -> str:
    """Leave a process behind that is in no group or session of this one.

    Args:
        way: How it leaves.
        then: What becomes of the call.
    """
    match way:
        case "start_new_session":
            subprocess.Popen(SLEEP, start_new_session=True)
        case "setpgid":
            subprocess.Popen(SLEEP, process_group=0)
        case "setsid":
            subprocess.run(["setsid", "--fork", *SLEEP], check=True)
        case "double fork":
            _daemon(1)
        case "orphans of orphans":
            _daemon(4)
    match then:
        case "hang":
            threading.Event().wait()
        case "exit":
            os._exit(3)
        case "kill parent":
            os.kill(os.getppid(), signal.SIGKILL)
            threading.Event().wait()
    return "left"


def _daemon(depth: int) -> None:
    """Leave a chain of sleeping processes without a parent, each in a session of its own."""
    first = os.fork()
    if first:
        os.waitpid(first, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    for _ in range(depth - 1):
        if os.fork():
            break
        os.setsid()
    os.execvp(SLEEP[0], SLEEP)


def flaky(file: str, failures: int) -> int:
    """Lose its connection some times.

    Args:
        file: Where the calls are counted.
        failures: How many calls fail.
    """
    with Path(file).open("a") as log:
        log.write("x")
    calls = Path(file).stat().st_size
    if calls <= failures:
        raise ConnectionResetError("peer is away")
    return calls


def slow(seconds: float) -> str:
    """Take its time.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "done"


class Notebook:
    """Holds something for every rollout; writes down what becomes of it."""

    def __init__(self, log: str) -> None:
        self.log = Path(log)
        self.notes: dict[str, int] = {}

    def __call__(self, context: ToolContext) -> str:
        """Count the calls of a rollout."""
        rollout = context.rollout_id
        self.notes[rollout] = self.notes.get(rollout, 0) + 1
        return f"{context.task.columns['city']} {self.notes[rollout]}"

    def release(self, rollout_id: str) -> None:
        with self.log.open("a") as log:
            log.write(f"release {rollout_id} {self.notes.pop(rollout_id, None)}\n")

    def close(self) -> None:
        with self.log.open("a") as log:
            log.write(f"close {len(self.notes)}\n")


def has_machine(context: ToolContext) -> bool:
    """Say whether the call's context has a machine."""
    return context.machine is not None


def own_kind() -> Tool:
    """A tool that is no function."""

    class Remote:
        name = "remote"
        schema: dict = {"type": "function", "function": {"name": "remote", "parameters": {}}}  # noqa: RUF012

        async def __call__(self, arguments: dict, context: ToolContext) -> object:
            return None

    return Remote()


def only_in(process: int) -> FunctionTool:
    """A tool that can be built in one process only."""
    if os.getpid() != process:
        raise RuntimeError(f"made for process {process}")
    return FunctionTool(add)
