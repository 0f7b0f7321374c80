"""Run by torchrun in each of two processes: a step's tasks, an evaluation, and errors of one.

Each process tells what it found; without torchrun one process has all tasks.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from itertools import chain

import parts
from parts import LIMITS, call, ids
from torchrun import tell

from agenttrain.algorithms.config import AlgorithmConfig
from agenttrain.engines.base import EngineError
from agenttrain.engines.config import Sampling
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.evaluation import evaluate
from agenttrain.launch.worker import leave
from agenttrain.rewards.rubric import Rubric
from agenttrain.rollout.collector import Collector
from agenttrain.rollout.config import EvalConfig, tasks_of_round
from agenttrain.rollout.request import BatchRequest
from agenttrain.rollout.sampling import sample_groups
from agenttrain.rollout.sharing import Costs, merge_shares
from agenttrain.rollout.step_batch import StepBatch
from agenttrain.training.world import World
from agenttrain.types import AgenttrainError, Completion, Rollout, Task
from agenttrain.utils.exit_codes import DONE

BYE = "7<|im_end|>"
ADD = call("add", '{"a": 3, "b": 4}')


class Seeds(ScriptedEngine):
    """Every third task calls a tool first; remembers the seed of every request."""

    def __init__(self) -> None:
        super().__init__(self._answer, max_context=4096)
        self.seeds: dict[str, list[int]] = {}

    def _answer(self, token_ids: object, session: str, turn: int) -> tuple[int, ...]:
        calls = int(session.split("-")[-2]) % 3 == 0 and turn == 0
        return ids(ADD if calls else BYE)

    async def generate(
        self, token_ids, sampling: Sampling, *, session: str, **others: object
    ) -> Completion:
        self.seeds.setdefault(session, []).append(sampling.seed)
        return await super().generate(token_ids, sampling, session=session, **others)


class Dead(ScriptedEngine):
    """Fails every request for tasks of some places."""

    def __init__(self, *places: int) -> None:
        super().__init__(parts.script(BYE), max_context=4096)
        self.places = places

    async def generate(
        self, token_ids, sampling: Sampling, *, session: str, **others: object
    ) -> Completion:
        if int(session.split("-")[-2]) in self.places:
            raise EngineError("out of memory")
        return await super().generate(token_ids, sampling, session=session, **others)


def tasks(start: int, count: int) -> list[Task]:
    """Tasks whose prompts grow; the even ones teach something."""
    return [
        Task(
            task_id=f"t{number}",
            messages=({"role": "user", "content": "what is 3 + 4? " * (1 + number % 4)},),
            columns={"number": number, "kind": number % 3},
        )
        for number in range(start, start + count)
    ]


def first(rollout: Rollout, number: int) -> float:
    """1 for all samples of odd tasks, and for the first sample of even ones."""
    return float(rollout.sample == 0 or number % 2 == 1)


def breaks(rollout: Rollout, number: int) -> float:
    """A reward function with a mistake in task 2."""
    return 1 / (number - 2)


def collector(engine: ScriptedEngine, reward: object = first) -> Collector:
    return Collector(
        engine=engine,
        chat=parts.chat(),
        toolbox=parts.toolbox(),
        rubric=Rubric({"reward": reward}),
        limits=LIMITS,
    )


async def drawn(world: World, made: Collector, count: int, **settings: object) -> StepBatch:
    config = AlgorithmConfig(name="test", group_size=2, **settings)
    request = BatchRequest(
        tasks=tasks(0, tasks_of_round(count, config.oversample)),
        samples=config.group_size,
        sampling=Sampling(),
        seed_path=(0, "train", 5),
    )
    return await sample_groups(
        made, request, tasks, count=count, config=config, peers=world, costs=Costs("kind")
    )


async def step(world: World, count: int, **settings: object) -> dict:
    """What the processes draw together, and what is theirs of it."""
    engine = Seeds()
    found = await drawn(world, collector(engine), count, **settings)
    shares = world.gather([found.collected])
    trained = world.gather([[[r.rollout_id for r in group] for group in found.groups]])
    return {
        "ids": [rollout.rollout_id for rollout in merge_shares(shares).rollouts],
        "rewards": [rollout.reward for rollout in merge_shares(shares).rollouts],
        "shares": [len(share.rollouts) for share in shares],
        "trained": [[*chain(*of_all)] for of_all in zip(*trained, strict=True)],
        "holders": [[bool(group) for group in of_one] for of_one in trained],
        "seeds": dict(sorted(s for d in world.gather([engine.seeds]) for s in d.items())),
        "metrics": found.metrics,
    }


async def evaluation(world: World) -> list[dict]:
    """The figures, which every process has."""
    config = EvalConfig(samples=2, group_by="kind")
    found = await evaluate(collector(Seeds()), tasks(0, 5), config, seed=0, world=world)
    ids = [[rollout.rollout_id for rollout in one.rollouts] for one in found]
    return [
        {**asdict(replace(one, rollouts=[])), "ids": known}
        for one, known in zip(found, ids, strict=True)
    ]


async def error(world: World, made: Collector, count: int = 4) -> str:
    """What the processes raise."""
    try:
        await drawn(world, made, count)
    except AgenttrainError as raised:
        return f"{type(raised).__name__}: {raised}"
    return "nothing"


async def all_of_it(world: World) -> dict:
    return {
        "step": await step(world, 5),
        "one task": await step(world, 1),
        "more rounds": await step(world, 3, dynamic_sampling=2, oversample=1.5),
        "evaluation": await evaluation(world),
        "reward": await error(world, collector(Seeds(), breaks)),
        "some fail": await error(world, collector(Dead(0, 1, 2))),
        "all fail": await error(world, collector(Dead(*range(4)))),
    }


def main() -> None:
    """Everything, one after the other: an error of one process leaves the others whole."""
    world = World.start(timeout_s=300)
    found = asyncio.run(all_of_it(world))
    tell(world.rank, found)


if __name__ == "__main__":
    main()
    leave(DONE)
