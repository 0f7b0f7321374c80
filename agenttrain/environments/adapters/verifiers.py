"""`Verifiers`: an environment of the package verifiers, in a process of its own Python.

    environment=verifiers environment.verifiers.id=my_taskset
    environment.verifiers.python=/path/to/its/bin/python data=verifiers

The package needs other versions of packages than agenttrain. So `verifiers_bridge.py` runs under
the package's own Python, in one process for all rollouts of a run. There verifiers plays the
episode: tasks, tools, the user's turns, stop conditions and scores are its own. Only the model's
turns come from here: the rollout loop samples them.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import uuid
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from agenttrain.types import MAIN, Message, Rollout, ToolContext, ToolFailure, ToolUnavailable
from agenttrain.utils.child_process import ChildGone, ChildProcess
from agenttrain.utils.data_fields import Data

BRIDGE = Path(__file__).with_name("verifiers_bridge.py")
INSTALL = "python3 -m venv verifiers && verifiers/bin/pip install 'verifiers>=0.4,<0.5'"
COLUMN = "verifiers_task"
"""Column with the number of a row's task."""
MAX_TASKS = 10_000
"""Default of `limit`, the number of tasks that are loaded: a taskset may have no end."""
FOREVER_S = 1e8
END_S = 5.0
"""Seconds that a child has to end before it is killed."""
Replies = dict[int, "queue.SimpleQueue[Mapping[str, Any]]"]


class Verifiers:
    """An episode of a verifiers environment, which a column `verifiers_task` of the row selects.

    `id` is the taskset's package or module, `python` the Python that has it and verifiers. `args`
    is the environment's configuration: ``{taskset: {split: train}, agent: {max_turns: 4}}``.
    `limit` is the number of tasks that are loaded. Starting and loading takes at most
    `start_timeout_s`; replies are limited by the environment's `hook_timeout_s`.
    """

    def __init__(
        self,
        *,
        id: str,
        python: str,
        args: Mapping[str, Any] | None = None,
        limit: Data[int] = MAX_TASKS,
        start_timeout_s: Data[float] = 300.0,
    ) -> None:
        """Get the process that plays the environment; raises ValueError if it does not start.

        Episodes with the same arguments share a process. `python` is the path of an interpreter
        that has verifiers, `args` the environment's configuration, `limit` a number of tasks.
        """
        self._process_arguments = (id, python, args, limit, start_timeout_s)
        """Arguments of `environment_process`. `reset` calls it again: the process may have died."""
        self._process = environment_process(*self._process_arguments)
        self._name = uuid.uuid4().hex
        """Name of the episode in requests."""
        self._begun = False
        """True while the process has this episode: between its reset and its score."""
        self._where = f"verifiers {id}"
        self.done = False

    @classmethod
    def check(
        cls,
        *,
        id: str,
        python: str,
        args: Mapping[str, Any] | None = None,
        limit: int = MAX_TASKS,
        start_timeout_s: float = 300.0,
    ) -> None:
        """Raise ValueError for arguments that cannot work, without starting a process."""
        if not isinstance(id, str) or not id:
            raise ValueError(f"id={id}: must name a taskset's package or module")
        path = Path(str(python)).expanduser()
        if not path.is_file() or not os.access(path, os.X_OK):
            raise ValueError(
                f"python={python}: is no program; make an environment of its own ({INSTALL}) and "
                "name its bin/python"
            )
        if args is not None and not isinstance(args, Mapping):
            raise ValueError(f"args={args}: must have names, e.g. {{taskset: {{split: train}}}}")
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise ValueError(f"limit={limit}: must be a number of tasks of 1 or more")
        if isinstance(start_timeout_s, bool) or not start_timeout_s > 0:
            raise ValueError(f"start_timeout_s={start_timeout_s}: must be a number above 0")

    @classmethod
    def tools(cls, **arguments: Any) -> list[dict[str, Any]]:
        """Load the environment, and return the schemas of its tools. Raises ValueError."""
        cls.check(**arguments)
        return list(environment_process(**arguments).loaded["tools"])

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Begin the row's task, and return its prompt."""
        if COLUMN not in row:
            raise ValueError(f"the row has no column {COLUMN!r}; use data=verifiers")
        # A pooled instance may outlive a process.
        self._process = environment_process(*self._process_arguments)
        self._begun, self.done = True, False
        return list(self._ask("begin", task=row[COLUMN])["messages"])

    def call_tool(self, name: str, arguments: Mapping[str, Any], context: ToolContext) -> str:
        """Run a call of one of the environment's tools."""
        reply = self._ask(
            "call", name=name, arguments=arguments, turn=context.turn, call_id=context.call_id
        )
        self.done = reply["done"] is not None
        if reply["failed"]:
            raise ToolFailure(reply["content"])
        return str(reply["content"])

    def user(self, message: Message) -> str | None:
        """Return the environment's reply to an answer, or None if the conversation is over."""
        reply = self._ask("answer", content=message.get("content") or "")
        messages = reply.get("messages")
        if messages is None:
            return None
        if any(message["role"] != "user" for message in messages):
            raise ToolUnavailable(f"{self._where}: a turn has messages that are not the user's")
        return "\n\n".join(message["content"] for message in messages)

    def reward(self, rollout: Rollout) -> float | None:
        """Return the sum of the weighted rewards, or None if the environment has none."""
        trajectory, *later = (t for t in rollout.trajectories if t.role == MAIN)
        if later:
            raise ToolUnavailable(
                f"{self._where}: scores one conversation, and rollout.compaction has cut it into "
                "several; leave it out"
            )
        value = self._ask("finish", messages=trajectory.messages)["reward"]
        self._begun = False
        return None if value is None else float(value)

    def close(self) -> None:
        """End the episode, if it has no score yet."""
        if self._begun:
            self._process.notify("abandon", episode=self._name)

    def _ask(self, do: str, **arguments: Any) -> Mapping[str, Any]:
        """Return the reply to a request. Raises ToolUnavailable if there is none."""
        try:
            return self._process.ask(do, episode=self._name, **arguments)
        except EnvironmentFailed as error:
            raise ToolUnavailable(f"{self._where}: {do} failed: {error}") from error


class VerifiersRows:
    """The tasks of a verifiers environment as rows that hold only the task's number.

    Example: ``{"task_id": "verifiers/my_taskset/3", "verifiers_task": 3}``. The arguments are those
    of `Verifiers`, and the process is shared with it.
    """

    def __init__(self, **arguments: Any) -> None:
        """Raises ValueError that begins with the argument."""
        Verifiers.check(**arguments)
        self._id = arguments["id"]
        self._process = environment_process(**arguments)
        self._count = int(self._process.loaded["tasks"])

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._count:
            raise IndexError(index)
        return {"task_id": f"verifiers/{self._id}/{index}", COLUMN: index}


class EnvironmentFailed(Exception):
    """The environment's code raised an error, or its process has ended."""


class UnsupportedEnvironment(Exception):
    """The environment cannot be trained here; the text begins with the argument at fault."""


class EnvironmentProcess:
    """A child process that runs verifiers_bridge.py with a loaded environment.

    All `Verifiers` with the same arguments share one, from `environment_process`.
    """

    def __init__(
        self, id: str, python: str, args: Mapping[str, Any], limit: int, start_timeout_s: float
    ) -> None:
        """Raises ValueError that begins with the argument that does not fit."""
        # -P: the bridge's folder holds our verifiers.py, which is not the library.
        command = [str(Path(python).expanduser()), "-P", str(BRIDGE)]
        try:
            # With pipes: requests go to its standard input, replies come from its standard output.
            self._child = ChildProcess(command, requests=True, replies=True)
        except OSError as error:
            raise ValueError(f"python={python}: cannot be started: {error}") from error
        self._replies: Replies = {}
        """Number of a request -> queue that gets its reply."""
        self._sending = threading.Lock()
        self._number = 0
        """Number of the last request."""
        # When no `Verifiers` uses this object any more, it is collected and `_end` ends the child.
        # The thread gets the child and the replies, not `self`: it would keep the object alive.
        weakref.finalize(self, _end, self._child)
        threading.Thread(target=_deliver, args=(self._child, self._replies), daemon=True).start()
        try:
            load = {"id": id, "args": args, "limit": limit}
            self.loaded = self.ask("load", limit_s=start_timeout_s, **load)
            """Schemas of the `tools`, and the number of `tasks`."""
        except EnvironmentFailed as error:
            self._child.kill()
            text = str(error)
            if "No module named 'verifiers" in text:
                raise ValueError(
                    f"python={python}: has no package verifiers 0.4; {INSTALL}"
                ) from error
            # `_send` and `_deliver` begin with these words if the child itself has ended: then the
            # interpreter is at fault. Any other error is a reply of the child, about the taskset.
            process_ended = text.startswith("its process")
            argument = f"python={python}" if process_ended else f"id={id}"
            raise ValueError(f"{argument}: {text}") from error
        except UnsupportedEnvironment as error:
            self._child.kill()
            raise ValueError(str(error)) from error

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self._child.alive

    def ask(self, do: str, *, limit_s: float | None = None, **arguments: Any) -> Mapping[str, Any]:
        """Send a request and return the value of the reply.

        Raises EnvironmentFailed if the request fails or no reply comes, UnsupportedEnvironment if
        the environment cannot be trained.
        """
        number, reply = self._send(do, arguments)
        try:
            answer = reply.get(timeout=limit_s)
        except queue.Empty:
            raise EnvironmentFailed(f"no reply in {limit_s:g} s") from None
        finally:
            self._replies.pop(number, None)
        if answer.get("unsupported"):
            raise UnsupportedEnvironment(answer["error"])
        if "error" in answer:
            raise EnvironmentFailed(answer["error"])
        return answer["value"] or {}

    def notify(self, do: str, **arguments: Any) -> None:
        """Send a request without waiting for its reply."""
        try:
            number, _ = self._send(do, arguments)
        except EnvironmentFailed:
            return
        self._replies.pop(number, None)

    def _send(
        self, do: str, arguments: Mapping[str, Any]
    ) -> tuple[int, queue.SimpleQueue[Mapping[str, Any]]]:
        """Send a request; return (its number, the queue that gets its reply)."""
        reply: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        with self._sending:  # rollouts send from threads, and a line must not be torn
            self._number += 1
            number = self._number
            self._replies[number] = reply
            try:
                self._child.send(json.dumps({"n": number, "do": do, **arguments}))
            except ChildGone as error:
                self._replies.pop(number, None)
                raise EnvironmentFailed(f"its process {error}") from error
        # If the child ended meanwhile, `_deliver` may have returned before it saw this request.
        if not self._child.alive:
            reply.put({"error": f"its process {self._child.gone_error()}"})
        return number, reply


def _deliver(child: ChildProcess, replies: Replies) -> None:
    """Give each reply of the child to the request that waits for it, until the child ends."""
    while True:
        try:
            answer = child.receive(limit_s=FOREVER_S)
        except (ChildGone, OSError, ValueError) as error:
            for reply in list(replies.values()):
                reply.put({"error": f"its process {error}"})
            return
        if (reply_queue := replies.get(answer["n"])) is not None:
            reply_queue.put(answer)


def _end(child: ChildProcess) -> None:
    """Ask a child to end; kill it after END_S."""
    with suppress(ChildGone):
        child.send(json.dumps({"do": "end"}))
        child.wait_for_end(END_S)
    child.kill()


_PROCESSES: weakref.WeakValueDictionary[str, EnvironmentProcess] = weakref.WeakValueDictionary()
_STARTING = threading.Lock()


def environment_process(
    id: str,
    python: str,
    args: Mapping[str, Any] | None = None,
    limit: int = MAX_TASKS,
    start_timeout_s: float = 300.0,
) -> EnvironmentProcess:
    """Return the running process of a verifiers environment, or start one.

    The arguments are those of `Verifiers`; all that agree on them share a process, whatever their
    `start_timeout_s`. Raises ValueError.
    """
    key = json.dumps([id, python, args, limit], sort_keys=True)
    with _STARTING:
        process = _PROCESSES.get(key)
        if process is None or not process.alive:
            process = EnvironmentProcess(id, python, args or {}, limit, start_timeout_s)
            _PROCESSES[key] = process
        return process
