"""Inputs of a rollout: its request, the context shared with others, its prompt."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from agenttrain.chat.chat import Chat
from agenttrain.engines.base import Engine
from agenttrain.engines.config import Sampling
from agenttrain.environments.environments import Environments
from agenttrain.environments.user import SimulatedUser
from agenttrain.rollout.config import RolloutConfig
from agenttrain.rollout.ledger import ParsedTurns
from agenttrain.rollout.monitoring import Throttle
from agenttrain.rollout.row_tools import RowTools
from agenttrain.tools.toolbox import Toolbox
from agenttrain.types import AgenttrainError, Message, Origin, Rollout, Task


class PromptTooLong(AgenttrainError):
    """A prompt leaves no room for one sampled token (counted as ``data/overlong``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """Request for one rollout: its task, its ids and its seeds."""

    task: Task
    sampling: Sampling = field(default_factory=Sampling)
    """Sampling of every turn. `seed` is the rollout's; the loop derives each turn's from it and
    sets `max_tokens`."""
    rollout_id: str = "rollout"
    """Unique among the rollouts in flight: engines and tools file a rollout's state under it."""
    group_id: str = ""
    sample: int = 0
    """Position in the group, 0 … G-1."""
    group_seed: int = 0
    """Seed for the environment, the same in all rollouts of a group."""
    prompt_ids: Sequence[int] | None = None
    """The rendered prompt, if the rollouts of the group share it; None: the loop renders it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext:
    """Engine, chat, tools and limits, shared by all rollouts in flight together."""

    engine: Engine
    chat: Chat
    toolbox: Toolbox
    limits: RolloutConfig = field(default_factory=RolloutConfig)
    environments: Environments = field(default_factory=Environments)
    throttle: Throttle | None = None
    """Shared by the rollouts in flight on one event loop; None: this is the only rollout."""
    parsed_turns: ParsedTurns | None = None
    """Record of parsed completions, so that `ledger.verify` need not parse them again; None: it
    parses every one."""
    user: Callable[[Message], Awaitable[str | None]] | None = None
    """Gives the user's next message after an answer, in place of the task's later turns and of the
    environment's; None ends the rollout."""
    simulated_user: SimulatedUser | None = None
    """Gives the user's next message when the task has no later turn and the environment says
    nothing; None: the rollout ends then."""
    on_messages: Callable[[Rollout, Sequence[Message]], None] | None = None
    """Called with the messages that a rollout has just gained: a turn of the model before its
    calls run, then the replies."""


def append_prompt(
    rollout: Rollout,
    engine: Engine,
    chat: Chat,
    tools: RowTools,
    prompt_ids: Sequence[int] | None,
) -> None:
    """Begin the rollout's trajectory with its task's messages.

    `prompt_ids` is the rendered prompt if the rollouts of a group share it; None: render it here.
    Raises PromptTooLong as `check_room` does.
    """
    task, trajectory = rollout.task, rollout.trajectories[0]
    trajectory.messages.extend(dict(message) for message in task.messages)
    trajectory.prompt_messages = len(trajectory.messages)
    if prompt_ids is None:
        prompt_ids = chat.prompt_ids(task.messages, tools.schemas)
    check_room(task, len(prompt_ids), engine.max_context)
    images = chat.place(prompt_ids, task.messages)
    trajectory.append_context(prompt_ids, Origin.prompt, images)


def check_room(task: Task, prompt_length: int, max_context: int) -> None:
    """Raise PromptTooLong unless one token can follow the prompt."""
    if prompt_length >= max_context:
        raise PromptTooLong(
            f"task {task.task_id}: its prompt has {prompt_length} tokens, the engine's context "
            f"{max_context}: shorten the prompt or raise engine.max_context"
        )
