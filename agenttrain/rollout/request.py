"""Inputs of rollouts: requests for many and for one, the context they share, and the prompt."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from agenttrain.chat.chat import Chat
from agenttrain.engines.base import Engine
from agenttrain.engines.config import Sampling
from agenttrain.environments.environments import Environments
from agenttrain.environments.user import SimulatedUser
from agenttrain.rollout.config import RolloutConfig, RolloutRequest
from agenttrain.rollout.ledger import ParsedTurns
from agenttrain.rollout.monitoring import Throttle
from agenttrain.rollout.row_tools import RowTools
from agenttrain.runtimes.machines import Machines
from agenttrain.tools.toolbox import Toolbox
from agenttrain.types import AgenttrainError, Message, Origin, Rollout, Task
from agenttrain.utils.seeds import derive_seed


class PromptTooLong(AgenttrainError):
    """A prompt leaves no room for one sampled token (counted as ``data/overlong``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """Request for `samples` rollouts of each task.

    Example: the rollouts of ``BatchRequest(tasks=[task], samples=2, sampling=Sampling(),
    seed_path=(7, "train", 3))`` are ``train-3-0-0`` and ``train-3-0-1``.
    """

    tasks: Sequence[Task]
    samples: int
    sampling: Sampling
    """Sampling of every turn, but for the seed."""
    seed_path: tuple[int | str, ...]
    """(seed of the run, name, …). A rollout's seed derives from it, the task's place and the
    sample, so that sampling noise depends on nothing else."""
    places: Sequence[int] | None = None
    """Positions of the tasks in the step, if it has other tasks too; None: 0, 1, …"""
    may_be_empty: bool = False
    """It is no error if no rollout can be learned from: the step has other requests."""

    @property
    def name(self) -> str:
        """Name of the request in its rollouts' ids: ``train-3``."""
        return "-".join(str(part) for part in self.seed_path[1:])

    def placed_tasks(self) -> list[tuple[int, Task]]:
        """Return each task with its position in the step."""
        places = range(len(self.tasks)) if self.places is None else self.places
        return list(zip(places, self.tasks, strict=True))

    def share(self, places: Sequence[int]) -> BatchRequest:
        """Return the request for the tasks at these places, which keep their seeds and ids."""
        tasks = dict(self.placed_tasks())
        return replace(self, tasks=[tasks[place] for place in places], places=places)

    def rollouts(
        self, place: int, task: Task, prompt_ids: Sequence[int] | None
    ) -> list[RolloutRequest]:
        """Return the requests for the group of `task`, which stands at `place` in the step.

        `prompt_ids` is the rendered prompt, if the rollouts of the group share it.
        """
        group_id = f"{self.name}-{place}"
        group_seed = derive_seed(*self.seed_path, place)
        requests = []
        for sample in range(self.samples):
            # The 0 is the same in every such path. Without it all seeds would change, and saved
            # runs would not repeat.
            seed = derive_seed(*self.seed_path, place, sample, 0)
            request = RolloutRequest(
                task=task,
                sampling=replace(self.sampling, seed=seed),
                rollout_id=f"{group_id}-{sample}",
                group_id=group_id,
                place=place,
                sample=sample,
                group_seed=group_seed,
                prompt_ids=prompt_ids,
            )
            requests.append(request)
        return requests


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext:
    """Engine, chat, tools and limits, shared by all rollouts in flight together."""

    engine: Engine
    chat: Chat
    toolbox: Toolbox
    limits: RolloutConfig = field(default_factory=RolloutConfig)
    environments: Environments = field(default_factory=Environments)
    machines: Machines | None = None
    """Gives each rollout a machine; None: its tools run commands in sandboxes of their own."""
    throttle: Throttle | None = None
    """Shared by the rollouts in flight on one event loop; None: this is the only rollout."""
    parsed_turns: ParsedTurns | None = None
    """Record of parsed completions, so that `ledger.verify` need not parse them again; None: it
    parses every one."""
    user: Callable[[Message], Awaitable[str | None]] | None = None
    """Returns the user's next message after an answer, or None to end the rollout. It replaces the
    task's later turns and the environment's messages."""
    simulated_user: SimulatedUser | None = None
    """Writes the user's next message once the task has no later turn and the environment says
    nothing. Without it the rollout ends there."""
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
    """Begin the rollout's trajectory with its task's messages. Raises PromptTooLong."""
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
