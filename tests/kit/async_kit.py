"""A queue of groups over a scripted engine, whose rollouts wait until a test lets them go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import parts

from agenttrain.algorithms.config import AlgorithmConfig
from agenttrain.data.curriculum import Curriculum
from agenttrain.data.tasks import TaskSource
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.rewards.rubric import Rubric
from agenttrain.rollout.asynchronous.journal import Journal
from agenttrain.rollout.asynchronous.queue import GroupQueue
from agenttrain.rollout.collector import Collector
from agenttrain.rollout.monitoring import LoopMonitor
from agenttrain.rollout.source import RolloutSource
from agenttrain.runs.rollout_messages import CODEC
from agenttrain.types import Rollout

BYE = "7<|im_end|>"
PATIENCE_S = 60
"""Only a hang takes so long."""


class Held(ScriptedEngine):
    """Answers a rollout of group `train-<step>-<place>` once the test has let this group go."""

    def __init__(self, *, free: bool = False) -> None:
        super().__init__(parts.script(BYE), max_context=4096)
        self.begun: list[str] = []
        """Groups that asked for a completion, in order."""
        self.free = free
        self._let_go: dict[str, asyncio.Event] = {}

    async def generate(self, token_ids: Sequence[int], sampling: Any, **names: Any) -> Any:
        group = names["session"].rpartition("-")[0]
        if group not in self.begun:
            self.begun.append(group)
        if not self.free:
            await self._event(group).wait()
        return await super().generate(token_ids, sampling, **names)

    def let_go(self, *groups: str) -> None:
        """Let the rollouts of these groups end."""
        for group in groups:
            self._event(group).set()

    def _event(self, group: str) -> asyncio.Event:
        return self._let_go.setdefault(group, asyncio.Event())


def by_sample(rollout: Rollout) -> float:
    """Reward the first sample of a group."""
    return float(rollout.sample == 0)


def source(
    engine: ScriptedEngine, curriculum: Any = None, reward: Any = by_sample, **limits: Any
) -> RolloutSource:
    """Two tasks a step, two rollouts each."""
    rows = [{"prompt": "what is 3 + 4?", "id": str(n)} for n in range(20)]
    tasks = TaskSource(rows)
    return RolloutSource(
        collector=Collector(
            engine=engine,
            chat=parts.chat(),
            toolbox=parts.toolbox(),
            rubric=Rubric({"first": reward}),
            limits=parts.LIMITS,
        ),
        tasks=tasks,
        algorithm=AlgorithmConfig(name="test", group_size=2),
        tasks_per_step=2,
        seed=5,
        curriculum=None if curriculum is None else Curriculum(tasks, curriculum, seed=0),
    )


@asynccontextmanager
async def queue(
    folder: Path,
    made: RolloutSource,
    *,
    max_staleness: int,
    steps: int = 9,
    settings: str = "s",
) -> AsyncIterator[GroupQueue]:
    """A queue with its journal in `folder`, closed at the end."""
    limits = made.collector.limits
    async with (
        asyncio.timeout(PATIENCE_S),
        LoopMonitor(limits.max_loop_lag_s, made.collector.blocking) as monitor,
    ):
        journal = Journal(folder, CODEC, settings)
        queued = GroupQueue(made, journal, monitor, max_staleness=max_staleness, steps=steps)
        try:
            yield queued
        finally:
            await queued.aclose()


async def until(true: Any) -> None:
    """Wait for a condition."""
    while not true():
        await asyncio.sleep(0.01)
