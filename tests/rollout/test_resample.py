"""Groups of equal rewards: which are drawn again, which are kept, and what is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import fields, replace

import parts
import pytest
from hypothesis import given
from hypothesis import strategies as st
from parts import LIMITS, toolbox

from agenttrain.algorithms.config import AlgorithmConfig, Rewards, Scale
from agenttrain.engines.base import EngineError
from agenttrain.engines.config import Sampling
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.rewards.rubric import Rubric
from agenttrain.rollout.collector import Collected, Collector, NoRollouts
from agenttrain.rollout.config import tasks_of_round
from agenttrain.rollout.request import BatchRequest
from agenttrain.rollout.sampling import is_informative, sample_groups, select
from agenttrain.rollout.step_batch import StepBatch
from agenttrain.types import Rollout, Task

BYE = "7<|im_end|>"


def task(number: int) -> Task:
    return Task(
        task_id=f"t{number}",
        messages=({"role": "user", "content": "what is 3 + 4?"},),
        columns={"number": number},
    )


def collector(
    informative_tasks: set[int],
    engine: ScriptedEngine | None = None,
    measured: dict[str, Callable] | None = None,
) -> Collector:
    """Rollouts whose first sample alone is rewarded, for these tasks; the others all get 1.

    `measured` are functions of weight 0.
    """

    def first(rollout: Rollout, number: int) -> float:
        return float(rollout.sample == 0 or number not in informative_tasks)

    return Collector(
        engine=engine or ScriptedEngine(parts.script(BYE), max_context=4096),
        chat=parts.chat(),
        toolbox=toolbox(),
        rubric=Rubric({"first": first, **(measured or {})}, dict.fromkeys(measured or {}, 0.0)),
        limits=LIMITS,
    )


def drawn(
    informative_tasks: set[int],
    *,
    count: int = 3,
    engine: ScriptedEngine | None = None,
    tasks: Callable[[int, int], list[Task]] | None = None,
    measured: dict[str, Callable] | None = None,
    **settings: object,
) -> StepBatch:
    config = AlgorithmConfig(name="test", group_size=2, **settings)
    draw = tasks or (lambda start, n: [task(i) for i in range(start, start + n)])
    request = BatchRequest(
        tasks=draw(0, tasks_of_round(count, config.oversample)),
        samples=config.group_size,
        sampling=Sampling(),
        seed_path=(0, "train", 5),
    )
    return asyncio.run(
        sample_groups(
            collector(informative_tasks, engine, measured),
            request,
            draw,
            count=count,
            config=config,
        )
    )


def numbers(groups: list[list[Rollout]]) -> list[int]:
    return [group[0].task.columns["number"] for group in groups]


def test_off_by_default() -> None:
    result = drawn({1})
    assert numbers(result.groups) == [0, 1, 2]
    assert (result.tasks, result.metrics["resample/rounds"]) == (3, 0)


def test_missing_groups_are_drawn_further_from_the_cursor() -> None:
    # 0 and 2 of the first round, then one more for the missing one: 3 is not, 4 is
    result = drawn({0, 2, 4}, dynamic_sampling=5)
    assert numbers(result.groups) == [0, 2, 4]
    assert numbers(result.collected.groups) == [0, 1, 2, 3, 4]
    assert result.metrics == {
        "data/tasks": 5.0,
        "resample/rounds": 2.0,
        "resample/uninformative": 2.0,
        "resample/surplus": 0.0,
    }


def test_rounds_are_bounded_and_what_is_missing_is_filled_in_task_order() -> None:
    result = drawn({4}, dynamic_sampling=1)
    # 3 tasks, then 3 more: only 4 is informative; 0 and 1 fill up
    assert numbers(result.groups) == [0, 1, 4]
    assert (result.tasks, result.metrics["resample/rounds"]) == (6, 1)
    assert result.metrics["resample/uninformative"] == 3.0


def test_the_lag_of_a_step_is_the_longest_of_its_rounds() -> None:
    collected = Collected()
    for lag in (0.2, 0.5, 0.1):
        collected.extend(Collected(loop_lag_s=lag))
    assert collected.loop_lag_s == 0.5


def test_extra_rounds_have_names_and_seeds_of_their_own() -> None:
    result = drawn({3, 4, 5}, dynamic_sampling=1)
    names = [group[0].rollout_id for group in result.collected.groups]
    assert names == [
        *("train-5-0-0", "train-5-1-0", "train-5-2-0"),
        *("train-5-r1-0-0", "train-5-r1-1-0", "train-5-r1-2-0"),
    ]


def test_the_surplus_is_the_last_in_task_order() -> None:
    result = drawn({1, 2, 3, 4}, oversample=2.0)
    assert numbers(result.groups) == [1, 2, 3]
    assert result.metrics == {
        "data/tasks": 6.0,
        "resample/rounds": 0.0,
        "resample/uninformative": 2.0,
        "resample/surplus": 1.0,
    }


def test_the_surplus_does_not_depend_on_who_arrives_first() -> None:
    class LateFirst(ScriptedEngine):
        """Answers later tasks first."""

        async def generate(self, token_ids, sampling, *, session, **others):
            await asyncio.sleep(0.02 * (6 - int(session.split("-")[2])))
            return await super().generate(token_ids, sampling, session=session, **others)

    engine = LateFirst(parts.script(BYE), max_context=4096)
    assert numbers(drawn({1, 2, 3, 4}, oversample=2.0, engine=engine).groups) == [1, 2, 3]


@pytest.mark.parametrize(
    ("missing", "factor", "tasks"), [(10, 1.1, 11), (3, 1.5, 5), (1, 1.0, 1), (8, 1.25, 10)]
)
def test_tasks_of_a_round(missing: int, factor: float, tasks: int) -> None:
    assert tasks_of_round(missing, factor) == tasks


def test_a_later_round_may_come_to_nothing_and_the_first_may_not() -> None:
    class Failing(ScriptedEngine):
        """Fails every request of the later rounds."""

        async def generate(self, token_ids, sampling, *, session, **others):
            if "-r" in session:
                raise EngineError("out of memory")
            return await super().generate(token_ids, sampling, session=session, **others)

    result = drawn({0, 2}, dynamic_sampling=2, engine=Failing(parts.script(BYE), max_context=4096))
    # the failed groups have no reward; they rank with those of equal ones
    assert numbers(result.groups) == [0, 1, 2]
    assert result.collected.dropped == 4
    with pytest.raises(NoRollouts):
        drawn(set(), engine=ScriptedEngine(lambda *_: (), max_context=4096))


def group(*rewards: float | None) -> list[Rollout]:
    return [
        Rollout(task=task(0), rollout_id=str(i), sample=i, reward=reward)
        for i, reward in enumerate(rewards)
    ]


SUM = AlgorithmConfig(name="test")
EACH = AlgorithmConfig(name="test", rewards=Rewards.normalize_each, scale=Scale.none)


def test_informative_is_exact_equality_of_what_was_rewarded() -> None:
    assert is_informative(group(1.0, 0.0, 0.0, 0.0), SUM)
    assert not is_informative(group(0.1, 0.1, 0.1), SUM)
    assert not is_informative(group(1.0, None, 1.0), SUM)
    assert not is_informative(group(1.0, None), SUM)
    assert not is_informative(group(None, None), SUM)
    assert is_informative(group(1.0, 1.0 + 2**-52), SUM)  # no tolerance


def test_functions_that_cancel_are_informative_where_each_counts_alone() -> None:
    both = group(1.0, 1.0)
    both[0].rewards, both[1].rewards = {"f": 1.0, "g": 0.0}, {"f": 0.0, "g": 1.0}
    assert not is_informative(both, SUM)
    assert is_informative(both, EACH)


def test_a_function_that_is_only_measured_teaches_nothing() -> None:
    both = group(1.0, 1.0)
    both[0].rewards, both[1].rewards = {"f": 1.0, "g": 0.0}, {"f": 1.0, "g": 1.0}
    assert is_informative(both, EACH, {"f": 1.0})
    assert not is_informative(both, EACH, {"f": 1.0, "g": 0.0})


def test_groups_in_which_only_a_measured_function_differs_are_drawn_again() -> None:
    def differs(rollout: Rollout) -> float:
        return float(rollout.sample)

    settings = {"rewards": Rewards.normalize_each, "scale": Scale.batch, "dynamic_sampling": 2}
    result = drawn({1, 3}, count=2, measured={"differs": differs}, **settings)
    assert numbers(result.groups) == [1, 3]


@given(
    rewards=st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=3, max_size=3), max_size=8),
    count=st.integers(1, 5),
)
def test_selection_keeps_whole_groups_in_order(rewards: list[list[float]], count: int) -> None:
    flags = [is_informative(group(*values), SUM) for values in rewards]
    positions = select(flags, count)
    assert positions == sorted(set(positions))
    assert len(positions) == min(count, len(rewards))
    live = [i for i, values in enumerate(rewards) if len(set(values)) > 1]
    assert [i for i in positions if i in live] == live[:count]


def test_nothing_that_a_round_counted_is_lost() -> None:
    # A field that `extend` forgets stays at its default.
    later = Collected(
        groups=[[]],
        places=[4],
        overlong=1,
        bad_rows=6,
        overlong_sources=["a"],
        bad_sources=["b"],
        dropped=2,
        broken=7,
        uneven_prompts=3,
        reward_s=4.0,
        loop_lag_s=5.0,
    )
    blank = Collected()
    assert all(getattr(later, f.name) != getattr(blank, f.name) for f in fields(Collected))
    total = Collected(loop_lag_s=6.0)
    total.extend(later)
    assert total == replace(later, loop_lag_s=6.0)
    total = Collected(loop_lag_s=1.0)
    total.extend(later)
    assert total == later
