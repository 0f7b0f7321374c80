"""A rollout's prompt: rendered, or taken from its group, and never longer than the context."""

from __future__ import annotations

from collections.abc import Sequence

from agenttrain.chat.template import Chat
from agenttrain.engine.base import Engine
from agenttrain.rollout.row_tools import RowTools
from agenttrain.types import Origin, PromptTooLong, Rollout, Task


def append_prompt(
    rollout: Rollout,
    engine: Engine,
    chat: Chat,
    tools: RowTools,
    prompt_ids: Sequence[int] | None,
) -> None:
    """Begin the rollout's trajectory with its task's messages; `prompt_ids`: rendered already.

    Raises PromptTooLong as `check_room`.
    """
    task, trajectory = rollout.task, rollout.trajectories[0]
    trajectory.messages.extend(dict(message) for message in task.messages)
    trajectory.prompt_messages = len(trajectory.messages)
    if prompt_ids is None:
        prompt_ids = chat.prompt_ids(task.messages, tools.schemas)
    check_room(task, len(prompt_ids), engine.max_context)
    trajectory.append_context(prompt_ids, Origin.prompt)


def check_room(task: Task, prompt_length: int, max_context: int) -> None:
    """Raise PromptTooLong unless one token can follow the prompt."""
    if prompt_length >= max_context:
        raise PromptTooLong(
            f"task {task.task_id}: its prompt has {prompt_length} tokens, the engine's context "
            f"{max_context}: shorten the prompt or raise engine.max_context"
        )
