"""The worker process of a tool with isolation=process: it builds the tool and answers one call
after the other, until its parent is gone.

Requests are pickles, which only ever come from the parent; answers are JSON, so that a tool cannot
make the parent run anything.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from agenttrain.tools.reply import Reply, error_reply, make_reply, reply_to_json
from agenttrain.tools.tool import UNSEEN, FunctionTool
from agenttrain.types import ToolContext, ToolUnavailable
from agenttrain.utils.locate import locate
from agenttrain.utils.threads import attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All that a worker needs to build its tool; the first message to it, as a pickle."""

    name: str
    make: Callable[[], object]
    """Makes the tool; pickled, so what it names must be importable."""
    faults: tuple[str, ...]
    """Dotted paths of the errors that are the infrastructure's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRequest:
    """A call, and the rollouts to release before it; the call may be missing."""

    released: tuple[str, ...] = ()
    """Rollouts that are over."""
    arguments: dict[str, Any] | None = None
    """None: no call."""
    context: ToolContext | None = None
    """None: the tool takes no context."""
    close: bool = False
    """The last request: close the tool."""


def build(recipe: Recipe) -> FunctionTool:
    """Make the tool; raises ValueError for one that cannot run in another process."""
    tool = recipe.make()
    if not isinstance(tool, FunctionTool):
        raise ValueError(
            f"tools.{recipe.name}.isolation=process: {type(tool).__name__} is a tool of its own "
            "kind, which cannot be moved to another process; leave isolation=thread"
        )
    return tool


def fault_types(paths: tuple[str, ...]) -> tuple[type[BaseException], ...]:
    """Return ToolUnavailable and the exceptions at `paths`; raises ValueError for others."""
    errors = [locate(path, key="retry_on") for path in paths]
    for path, error in zip(paths, errors, strict=True):
        if not (isinstance(error, type) and issubclass(error, Exception)):
            raise ValueError(f"retry_on={path}: is no exception")
    return (ToolUnavailable, *errors)


class Server:
    """The tool of a worker process, and the answers to its parent's requests; `main` makes it."""

    def __init__(self, recipe: Recipe) -> None:
        self._tool = build(recipe)
        self._faults = fault_types(recipe.faults)
        self._loop = asyncio.new_event_loop()

    def answer(self, request: WorkerRequest) -> Reply:
        """Release rollouts and close the tool as requested, then run the call and return its reply.

        The reply is empty for a request without a call.
        """
        wait = self._loop.run_until_complete
        # `attempt` contains the errors of hooks: they must not lose the call's reply.
        for rollout_id in request.released:
            attempt(partial(wait, self._tool.release(rollout_id)))
        if request.close:
            attempt(partial(wait, self._tool.close()))
        if request.arguments is None:
            return Reply(content="")
        arguments = request.arguments

        def call() -> object:
            value = self._tool.call(arguments, request.context)  # type: ignore[arg-type]
            return wait(value) if inspect.isawaitable(value) else value

        outcome = attempt(call)
        if outcome.error is not None:
            return error_reply(outcome.error, faults=self._faults)
        return make_reply(outcome.value)


def main() -> None:
    """Serve the parent, whose requests come over the file on the command line."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    worker_pid = os.getpid()

    def send(answer: dict[str, Any]) -> None:
        # A tool that forks returns twice, but a call has one answer: the fork ends here.
        if os.getpid() != worker_pid:
            os._exit(0)
        connection.send_bytes(json.dumps(answer).encode())

    with suppress(EOFError, OSError):  # the parent is gone
        # First come the parent's path and the recipe, then requests.
        sys.path[:] = json.loads(connection.recv_bytes())
        recipe = connection.recv_bytes()
        UNSEEN.set(True)  # no model sees schemas that are made here
        building = attempt(lambda: Server(pickle.loads(recipe)))
        server = building.value
        send({"problem": None if building.error is None else str(building.error)})
        while isinstance(server, Server):
            request: WorkerRequest = pickle.loads(connection.recv_bytes())
            reply = server.answer(request)
            send(reply_to_json(reply))


if __name__ == "__main__":
    main()
