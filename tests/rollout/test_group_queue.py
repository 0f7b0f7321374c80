"""Groups ahead of the update: who may start, in which order they are trained, what is kept."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from async_kit import Held, queue, source, until

from agenttrain.data.config import CurriculumConfig
from agenttrain.rewards.function import RewardError
from agenttrain.rollout.asynchronous.queue import GroupQueue, staleness_metrics
from agenttrain.rollout.collector import NoRewards
from agenttrain.rollout.source import RolloutSource
from agenttrain.types import Completion, Finish, Rollout, Task


def serials(batch) -> list[int]:
    return [(int(g[0].group_id.split("-")[1]) - 1) * 2 + int(g[0].group_id[-1]) for g in batch]


async def update(engine: Held, queued: GroupQueue, version: int) -> None:
    """What a weight sync is for the queue."""
    await engine.update((), version)
    queued.admit(version)


def test_no_group_starts_that_could_become_too_old(tmp_path: Path) -> None:
    """With P = 2 and k = 1, serial s may start at version s // 2 - 1."""
    engine = Held()

    async def main() -> None:
        made = source(engine)
        async with queue(tmp_path, made, max_staleness=1, steps=4) as queued:
            await queued.begin(1)
            first = ["train-1-0", "train-1-1", "train-2-0", "train-2-1"]
            await until(lambda: len(engine.begun) == 4)
            engine.let_go(*first)
            made.finish(await queued.take(1))
            await asyncio.sleep(0.05)
            assert engine.begun == first  # step 1 is trained: the engine still has version 0
            await update(engine, queued, 1)
            await until(lambda: len(engine.begun) == 6)
            assert engine.begun[4:] == ["train-3-0", "train-3-1"]
            made.finish(await queued.take(2))
            await update(engine, queued, 2)
            await until(lambda: len(engine.begun) == 8)
            engine.let_go("train-3-0", "train-3-1", "train-4-0", "train-4-1")
            made.finish(await queued.take(3))
            await update(engine, queued, 3)
            made.finish(await queued.take(4))
            assert len(engine.begun) == 8  # the run has four steps

    asyncio.run(main())


def test_groups_are_trained_in_the_order_of_their_serials(tmp_path: Path) -> None:
    """Step 2 is ready first, and waits; each rollout has the age of its oldest token."""
    engine = Held()

    async def main() -> None:
        made = source(engine)
        async with queue(tmp_path, made, max_staleness=2) as queued:
            await queued.begin(1)
            engine.let_go("train-2-0", "train-2-1")
            await until(lambda: queued._groups[2].done() and queued._groups[3].done())
            taking = asyncio.create_task(queued.take(1))
            await asyncio.sleep(0.05)
            assert not taking.done()
            engine.let_go("train-1-0")
            engine.let_go("train-1-1")
            batch = await taking
            assert serials(batch.groups) == [0, 1]
            assert batch.metrics["async/queue"] == 2
            made.finish(batch)
            await update(engine, queued, 1)
            engine.let_go("train-3-0", "train-3-1")
            batch = await queued.take(2)
            assert serials(batch.groups) == [2, 3]
            assert batch.metrics["async/staleness/max"] == 1
            made.finish(batch)
            await update(engine, queued, 2)
            batch = await queued.take(3)
            # Sampled under version 1 (they ended after the update), trained on version 2.
            assert batch.metrics["async/staleness/1"] == 4
            assert batch.metrics["async/dropped"] == 0

    asyncio.run(main())


def test_staleness_by_hand() -> None:
    def rollout(*versions: int) -> Rollout:
        made = Rollout(task=Task(task_id="t", messages=()), rollout_id="r")
        completion = Completion(
            token_ids=tuple(range(len(versions))),
            logprobs=(-0.5,) * len(versions),
            finish=Finish.length,
            versions=tuple((version, 1) for version in versions),
        )
        made.trajectories[0].append_sampled(completion, ())
        return made

    # Step 7 trains version 6: the oldest tokens are of 6, 5 and 5.
    metrics = staleness_metrics([rollout(6), rollout(5, 6), rollout(5)], 7, 2)
    assert metrics == {
        "async/staleness/mean": pytest.approx(2 / 3),
        "async/staleness/max": 1,
        "async/staleness/0": 1,
        "async/staleness/1": 2,
        "async/staleness/2": 0,
    }


def kept(batch) -> list[tuple]:
    """A batch but for seconds."""
    return [
        (r.rollout_id, r.task.task_id, r.reward, r.rewards, r.trajectories[0].token_ids)
        for r in batch.rollouts
    ]


def test_a_bound_of_zero_is_the_synchronous_run(tmp_path: Path) -> None:
    async def main() -> None:
        engine = Held(free=True)
        ahead, plain = source(Held(free=True)), source(engine)
        async with queue(tmp_path, ahead, max_staleness=0) as queued:
            await queued.begin(1)
            for step in range(1, 5):
                theirs = await plain.batch(step)
                plain.finish(theirs)
                mine = await queued.take(step)
                ahead.finish(mine)
                assert kept(mine) == kept(theirs)
                assert mine.collected.places == theirs.collected.places == [0, 1]
                assert ahead.state_dict() == plain.state_dict()
                queued.admit(step)

    asyncio.run(main())


def test_the_error_of_a_group_is_raised_at_its_step(tmp_path: Path) -> None:
    def broken(rollout: Rollout) -> float:
        if rollout.group_id == "train-2-1":
            raise RuntimeError("boom")
        return 1.0

    async def main() -> None:
        made = source(Held(free=True), reward=broken)
        async with queue(tmp_path, made, max_staleness=1) as queued:
            await queued.begin(1)
            made.finish(await queued.take(1))
            with pytest.raises(RewardError, match="boom"):
                await queued.take(2)

    asyncio.run(main())


def test_a_group_without_rewards_leaves_the_step_to_the_others(tmp_path: Path) -> None:
    def partly(rollout: Rollout) -> float | None:
        return None if rollout.group_id in ("train-1-0", "train-2-0", "train-2-1") else 1.0

    async def main() -> None:
        made = source(Held(free=True), reward=partly)
        async with queue(tmp_path, made, max_staleness=1) as queued:
            await queued.begin(1)
            batch = await queued.take(1)
            assert [one.reward for one in batch.rollouts] == [None, None, 1.0, 1.0]
            with pytest.raises(NoRewards, match="step 2: not one rollout has a reward"):
                await queued.take(2)

    asyncio.run(main())


def test_nothing_starts_while_an_evaluation_holds_it(tmp_path: Path) -> None:
    engine = Held(free=True)

    async def main() -> None:
        made = source(engine)
        async with queue(tmp_path, made, max_staleness=1) as queued:
            with queued.held():
                await queued.begin(1)
                await asyncio.sleep(0.05)
                assert engine.begun == []
            await queued.take(1)

    asyncio.run(main())


@pytest.mark.parametrize("late", [False, True])
def test_what_a_step_draws_does_not_depend_on_the_clock(tmp_path: Path, late: bool) -> None:
    """Step 3 knows the results of step 1 alone, whether step 2 was sampled before it or after."""
    drawn: dict[int, list[str]] = {}

    def reward(rollout: Rollout) -> float:
        return float(int(rollout.task.task_id) % 3 == rollout.sample)

    def source_with_order(engine: Held) -> RolloutSource:
        return source(engine, CurriculumConfig(enabled=True, explore=0.3), reward)

    async def main() -> None:
        engine = Held()
        made = source_with_order(engine)
        async with queue(tmp_path, made, max_staleness=1) as queued:
            await queued.begin(1)
            for step in range(1, 7):
                groups = [f"train-{step}-{place}" for place in (0, 1)]
                ahead = [f"train-{step + 1}-{place}" for place in (0, 1)]
                engine.let_go(*groups, *(() if late else ahead))
                batch = await queued.take(step)
                drawn[step] = [group[0].task.task_id for group in batch.groups]
                made.finish(batch)
                await update(engine, queued, step)

    asyncio.run(main())
    # By hand: the same draws, each with the results of the steps before the last one.
    order = source_with_order(Held()).curriculum
    assert order is not None
    expected = {}
    for step in range(1, 7):
        expected[step] = [one.task_id for one in order.tasks(2 * (step - 1), 2)]
        order.close(2 * step)
        if step > 1:
            names = expected[step - 1]
            results = [(name, int(int(name) % 3 < 2), 2) for name in names]
            order.learn(2 * (step - 1), results)
    assert drawn == expected


def test_a_resumed_run_samples_only_what_is_missing(tmp_path: Path) -> None:
    """Stopped after step 1 with serials 2 and 4 in the journal, and 3 and 5 on their way."""

    async def main() -> None:
        engine = Held()
        made = source(engine)
        async with queue(tmp_path, made, max_staleness=2) as queued:
            await queued.begin(1)
            engine.let_go("train-1-0", "train-1-1", "train-2-0", "train-3-0")
            made.finish(await queued.take(1))
            await until(lambda: len((tmp_path / "journal.jsonl").read_text().splitlines()) == 4)
            state = made.state_dict()
        with (tmp_path / "journal.jsonl").open("a") as file:
            file.write('{"serial": 3, "st')  # torn
        engine = Held(free=True)
        engine.version = 1
        made = source(engine)
        made.load_state_dict(state)
        async with queue(tmp_path, made, max_staleness=2) as queued:
            await queued.begin(2)
            batch = await queued.take(2)
            assert serials(batch.groups) == [2, 3]
            assert [one.trajectories[0].spans[1].policy_version for one in batch.rollouts] == [
                *(0, 0),  # from the journal
                *(1, 1),
            ]
            made.finish(batch)
            await update(engine, queued, 2)
            assert serials((await queued.take(3)).groups) == [4, 5]
            assert "train-2-0" not in engine.begun and "train-3-0" not in engine.begun
        lines = (tmp_path / "journal.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert sorted(row["serial"] for row in rows if row["step"] < 4) == [0, 1, 2, 3, 4, 5]

    asyncio.run(main())
