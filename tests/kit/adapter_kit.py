"""One rollout through an adapter's environment, with its ledger checked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import parts
from parts import LIMITS, call, script

from agenttrain.engines.config import Sampling
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.environments.environment import EnvironmentKind
from agenttrain.environments.environments import Environments
from agenttrain.rollout.config import RolloutRequest
from agenttrain.rollout.ledger import verify
from agenttrain.rollout.loop import run_rollout
from agenttrain.rollout.request import RolloutContext
from agenttrain.rollout.row_tools import RowTools
from agenttrain.tools.toolbox import Toolbox
from agenttrain.types import Message, Rollout, Task


def environments(cls: type, **arguments: Any) -> Environments:
    """A run whose only environment is of this class."""
    return Environments({"world": EnvironmentKind("world", cls, bound=arguments)})


def step(action: str) -> str:
    """A call of `step`; `action` is its JSON text."""
    return call("step", f'{{"action": {action}}}')


async def arun(
    *answers: str,
    worlds: Environments,
    rollout_id: str = "rollout",
    row: dict[str, Any] | None = None,
    messages: Sequence[Message] = (),
    group_seed: int = 0,
    **limits: Any,
) -> Rollout:
    """Run one rollout whose completions are `answers`; the environments stay open.

    `messages` are the row's, for an environment whose reset makes no prompt.
    """
    chat, tools = parts.chat(), Toolbox({})
    done = await run_rollout(
        RolloutRequest(
            task=Task(task_id="t", messages=tuple(messages), columns=row or {}),
            sampling=Sampling(seed=0),
            rollout_id=rollout_id,
            group_seed=group_seed,
        ),
        RolloutContext(
            engine=ScriptedEngine(script(*answers)),
            chat=chat,
            toolbox=tools,
            limits=replace(LIMITS, max_turns=20, **limits),
            environments=worlds,
        ),
    )
    if done.trajectories[0].spans:
        verify(done, chat, RowTools(done.task, tools, worlds).schemas)
    return done


def run(*answers: str, worlds: Environments, **keywords: Any) -> Rollout:
    """`arun`, with the environments closed after it."""

    async def work() -> Rollout:
        try:
            return await arun(*answers, worlds=worlds, **keywords)
        finally:
            await worlds.aclose()

    return asyncio.run(work())


def texts(done: Rollout, role: str) -> Sequence[str]:
    """The contents of the messages of a role."""
    return [m["content"] for m in done.trajectories[0].messages if m["role"] == role]
