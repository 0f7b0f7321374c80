"""How rewards are called: time limits, concurrency, what is unavailable, TRL's own functions."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from parts import chat, ids, toolbox
from reward_cases import made, reward

from agenttrain.engines.config import Sampling
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.rewards.config import OnUnavailable
from agenttrain.rewards.function import FunctionScorer, RewardError, RewardUnavailable
from agenttrain.rewards.rubric import Rubric, build_rubric
from agenttrain.rollout.collector import Collector, NoRollouts, collect
from agenttrain.rollout.config import RolloutConfig
from agenttrain.rollout.request import BatchRequest
from agenttrain.types import Rollout, Task

DROP = {"it": OnUnavailable.drop}


def test_a_function_that_hangs_is_given_up():
    go = threading.Event()

    def waits(rollout: Rollout, number: int) -> float:
        if number == 1:
            go.wait(30)
        return number

    rows = [made("", number=number) for number in range(3)]
    rubric = Rubric({"it": FunctionScorer("it", waits, timeout_s=0.2)}, on_unavailable=DROP)
    (told,) = asyncio.run(rubric.score(rows))
    go.set()
    assert [row.reward for row in rows] == [0.0, None, 2.0]
    assert "a call took longer than reward.it.timeout_s=0.2" in told


def test_an_async_function_that_hangs_is_cancelled():
    cancelled = []

    async def waits(rollout: Rollout) -> float:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(rollout.rollout_id)
            raise
        return 1.0

    with pytest.raises(RewardError, match=r"timeout_s=0.1 \(reward.it.on_unavailable=drop leaves"):
        asyncio.run(Rubric({"it": FunctionScorer("it", waits, timeout_s=0.1)}).score([made("")]))
    assert cancelled == ["r"]


class Worded(RewardUnavailable):
    """Its text is made by its own code."""

    def __str__(self) -> str:
        how = self.args[0]
        if isinstance(how, BaseException):
            raise how
        time.sleep(how)
        return "at last"


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("how", [SystemExit(3), KeyboardInterrupt(), 3.0])
def test_the_text_of_an_error_is_made_where_the_function_runs(is_async, how):
    def sync(rollout: Rollout) -> float:
        raise Worded(how)

    async def waits(rollout: Rollout) -> float:
        await asyncio.sleep(0)
        raise Worded(how)

    async def main() -> int:
        scorer = FunctionScorer("it", waits if is_async else sync, timeout_s=0.3)
        rubric = Rubric({"it": scorer}, on_unavailable=DROP)
        scoring = asyncio.create_task(rubric.score([rollout := made("")]))
        beats = 0
        while not scoring.done():
            await asyncio.sleep(0.01)
            beats += 1
        assert rollout.reward is None
        if how == 3.0:
            assert "a call took longer than reward.it.timeout_s=0.3" in str(scoring.result())
        return beats

    beats = asyncio.run(main())
    assert beats > 3 or how != 3.0


class SlowNumber(float):
    def __float__(self) -> float:
        time.sleep(3.0)
        return 1.0


def in_a_batch(completions: list, **columns: object) -> list[float]:
    return [SlowNumber(1.0) for _ in completions]


async def later(rollout: Rollout) -> float:
    return SlowNumber(1.0)


@pytest.mark.parametrize("function", [lambda rollout: SlowNumber(1.0), later, in_a_batch])
def test_a_number_that_takes_its_time_is_read_off_the_event_loop(function):
    async def main() -> int:
        rubric = Rubric({"it": FunctionScorer("it", function, timeout_s=0.3)}, on_unavailable=DROP)
        scoring = asyncio.create_task(rubric.score([made("")]))
        beats = 0
        while not scoring.done():
            await asyncio.sleep(0.01)
            beats += 1
        assert "a call took longer than reward.it.timeout_s=0.3" in str(scoring.result())
        return beats

    assert asyncio.run(main()) > 3


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_an_async_function_that_would_end_the_event_loop_is_a_reward_error(kind):
    async def stop() -> float:
        await asyncio.sleep(0)
        raise kind("enough")

    async def waits(rollout: Rollout) -> float:
        return await asyncio.wait_for(stop(), 5)

    with pytest.raises(RewardError, match=f"{kind.__name__}: enough"):
        asyncio.run(Rubric({"it": FunctionScorer("it", waits)}).score([made("")]))


def test_a_timeout_of_the_functions_own_is_its_error():
    async def late(rollout: Rollout) -> float:
        raise TimeoutError("mine")

    with pytest.raises(RewardError, match=r"TimeoutError: mine \(test_rewards_scorer.py, line \d+"):
        asyncio.run(Rubric({"it": FunctionScorer("it", late, timeout_s=5)}).score([made("")]))


@pytest.mark.parametrize("concurrency", [None, 2])
def test_groups_that_are_scored_at_once_share_the_limit(concurrency):
    """Asynchronous training scores each group as it is ready, beside others and evaluations."""
    running, most, lock = 0, 0, threading.Lock()

    def counts(rollout: Rollout) -> float:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1
        return 1.0

    rubric = Rubric({"it": FunctionScorer("it", counts, concurrency=concurrency)})

    async def main() -> None:
        groups = [[made("") for _ in range(3)] for _ in range(6)]
        scorers = [rubric, rubric.lenient()] * 3
        await asyncio.gather(*(one.score(g) for one, g in zip(scorers, groups, strict=True)))
        assert {rollout.reward for group in groups for rollout in group} == {1.0}

    asyncio.run(main())
    assert most == (concurrency or 1)


@pytest.mark.parametrize("concurrency", [None, 1, 3])
def test_at_most_so_many_calls_at_once(concurrency):
    running, most = [], []

    def counts(rollout: Rollout) -> float:
        running.append(1)
        most.append(len(running))
        time.sleep(0.02)
        running.pop()
        return 1.0

    rows = [made("") for _ in range(6)]
    asyncio.run(Rubric({"it": FunctionScorer("it", counts, concurrency=concurrency)}).score(rows))
    assert max(most) <= (concurrency or 1)
    assert [row.reward for row in rows] == [1.0] * 6


def test_threads_really_run_at_once():
    both = threading.Barrier(2)

    def pair(rollout: Rollout) -> float:
        both.wait(timeout=20)
        return 1.0

    rows = [made(""), made("")]
    asyncio.run(Rubric({"it": FunctionScorer("it", pair, concurrency=2)}).score(rows))
    assert [row.reward for row in rows] == [1.0, 1.0]


def unavailable(rollout: Rollout) -> float:
    raise RewardUnavailable("the database is down")


def test_unavailable_is_neither_zero_nor_an_error_where_it_is_declared():
    rows = [made("", sampled=2)]
    rubric = Rubric({"it": unavailable, "one": lambda rollout: 1.0}, on_unavailable=DROP)
    assert asyncio.run(rubric.score(rows)) == [
        "reward 'it' on rollout 'r' of task 't': the database is down"
    ]
    assert (rows[0].reward, rows[0].rewards) == (None, {"it": None, "one": 1.0})
    with pytest.raises(RewardError, match="database is down"):
        asyncio.run(Rubric({"it": unavailable}).score(rows))


def collector(rubric: Rubric) -> Collector:
    engine = ScriptedEngine(lambda token_ids, session, turn: ids("7<|im_end|>"))
    return Collector(
        engine=engine, chat=chat(), toolbox=toolbox(), rubric=rubric, limits=RolloutConfig()
    )


def test_rollouts_without_a_score_are_counted_as_dropped():
    def second_is_lost(rollout: Rollout) -> float:
        if rollout.sample == 1:
            raise RewardUnavailable("lost")
        return 1.0

    async def run(rubric: Rubric):
        task = Task(task_id="t", messages=({"role": "user", "content": "3 + 4?"},))
        request = BatchRequest(
            tasks=[task], samples=3, sampling=Sampling(), seed_path=(0, "test", 1)
        )
        return await collect(collector(rubric), request)

    collected = asyncio.run(run(Rubric({"it": second_is_lost}, on_unavailable=DROP)))
    assert [rollout.reward for rollout in collected.rollouts] == [1.0, None, 1.0]
    assert collected.dropped == 1
    with pytest.raises(NoRollouts, match=r"not one of 3 rollouts could be scored; reward 'it' on"):
        asyncio.run(run(Rubric({"it": unavailable}, on_unavailable=DROP)))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"timeout_s": 0}, "reward.it.timeout_s=0: must be more than 0"),
        ({"timeout_s": "long"}, "reward.it.timeout_s=long: expected a number"),
        ({"concurrency": 1.5}, "reward.it.concurrency=1.5: expected a whole number"),
        ({"concurrency": True}, "reward.it.concurrency=true: expected a whole number"),
        ({"on_unavailable": "dropp"}, r"expected one of: stop, drop \(did you mean 'drop'\?\)"),
        ({"weight": True}, "reward.it.weight=true: expected a number"),
    ],
)
def test_settings_that_cannot_work(settings, said):
    with pytest.raises(ValueError, match=said):
        build_rubric({"it": {"_target_": f"{__name__}.unavailable", **settings}})


def test_settings_arrive():
    section = {"_target_": f"{__name__}.unavailable", "timeout_s": None, "on_unavailable": "drop"}
    assert reward(lambda rollout: 1.0, made("")) == 1.0
    assert len(asyncio.run(build_rubric({"it": section}).score([made("")]))) == 1


def test_the_columns_that_rewards_need():
    def mine(rollout: Rollout, level: int, wanted: int = 2) -> float:
        return 0.0

    def trl(prompts, completions, solution, **kwargs) -> list[float]:
        return []

    rubric = build_rubric(
        {
            "exact": {
                "_target_": "agenttrain.rewards.builtin.answers.ExactMatch",
                "column": "city",
            },
            "calls": {"_target_": "agenttrain.rewards.builtin.tools.tool_success"},
        }
    )
    assert rubric.columns == {"exact": ("city",), "calls": ()}
    assert Rubric({"mine": mine, "trl": trl}).columns == {"mine": ("level",), "trl": ("solution",)}


def test_a_reward_on_a_tool_that_is_not_there_is_refused():
    rubric = build_rubric({"it": {"_target_": "agenttrain.rewards.builtin.answers.ExactMatch"}})
    rubric.check_tools(["final_answer"])
    with pytest.raises(ValueError, match=r"it.tool=final_answer: .*mean 'final_answr'\?\), "):
        rubric.check_tools(["final_answr"])


def test_trls_own_rewards_score_our_rollouts():
    rewards = pytest.importorskip("trl.rewards", reason="needs pip install trl")
    rows = [
        made("<think>\nfirst\n</think>\n\\boxed{\\frac{1}{2}}", solution="0.5", sampled=3),
        made("\\boxed{3}", solution="0.5", sampled=3),
        made("\\boxed{3}", solution="", sampled=3),
    ]
    rubric = Rubric(
        {
            "format": rewards.think_format_reward,
            "accuracy": rewards.accuracy_reward,
            "overlong": rewards.get_soft_overlong_punishment(
                max_completion_len=4, soft_punish_cache=2
            ),
        }
    )
    asyncio.run(rubric.score(rows))
    # overlong: 3 tokens, 2 without penalty, full at 4: -(3 - 2) / 2
    assert [row.rewards for row in rows] == [
        {"format": 1.0, "accuracy": 1.0, "overlong": -0.5},
        {"format": 0.0, "accuracy": 0.0, "overlong": -0.5},
        {"format": 0.0, "accuracy": None, "overlong": -0.5},
    ]
