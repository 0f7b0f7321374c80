"""A recorded rollout's tools and environment, as the loop wants them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from agenttrain.environments.kind import EnvironmentKind
from agenttrain.environments.recorded import RecordedKind, Said
from agenttrain.rollout.environments import Environments
from agenttrain.tools.recorded import RecordedToolbox
from agenttrain.tools.toolbox import Toolbox
from agenttrain.tracking.rollouts_read import prompt_messages, tool_results
from agenttrain.types import StopReason, Task

Record = Mapping[str, Any]


class RecordedEnvironments(Environments):
    """The environment of one rollout; its methods are tools of the recorded toolbox."""

    def __init__(self, kind: RecordedKind) -> None:
        super().__init__()
        self._kind = kind

    def kind_of(self, task: Task) -> EnvironmentKind:
        """The one there is."""
        return self._kind


def recorded_tools(
    record: Record,
    task: Task,
    toolbox: Toolbox,
    environments: Environments,
    *,
    over: Callable[[], bool],
) -> tuple[Toolbox, Environments]:
    """What answers the calls of a record's rollout, and says what its environment said.

    `over` tells whether the rollout is in its last turn.
    """
    kind = environments.kind_of(task)
    boxes = [toolbox, *([] if kind is None else [environments.toolbox_of(kind)])]
    tools = RecordedToolbox(boxes, tool_results(record))
    if kind is None:
        return tools, Environments()
    return tools, RecordedEnvironments(RecordedKind(kind, _said(record, task, over)))


def _said(record: Record, task: Task, over: Callable[[], bool]) -> Said:
    main = record["trajectories"][0]
    before = prompt_messages(main)
    asked = [m["content"] for m in main["messages"][len(before) :] if m["role"] == "user"]
    ended = record["stop_reason"] == StopReason.environment_done
    return Said(
        messages=tuple(before[len(task.messages) :]),
        user=asked[len(task.user_turns) :],
        reward=record.get("environment_reward"),
        over=lambda: ended and over(),
    )
