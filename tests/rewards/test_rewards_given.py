"""A reward function reads its rollout: what it does to it reaches no other reward and no loss."""

from __future__ import annotations

import asyncio
import copy
import gc
import math
from array import array
from dataclasses import fields, is_dataclass, replace

import parts
import pytest
from parts import LIMITS, acollect, call, toolbox
from reward_cases import called, made

from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.environments.environment import EnvironmentKind
from agenttrain.environments.environments import Environments
from agenttrain.rewards.function import RewardError, check_unchanged, copy_rollout
from agenttrain.rewards.rubric import Rubric
from agenttrain.rollout.collector import Collector
from agenttrain.types import Delegation, LedgerError, Rollout, Task, UntrainedConversation

ADD = call("add", '{"a": 3, "b": 4}')
BYE = "The answer is 7.<|im_end|>"


def collector(rubric: Rubric, environment: type | None = None) -> Collector:
    kinds = {} if environment is None else {"it": EnvironmentKind("it", environment)}
    return Collector(
        engine=ScriptedEngine(parts.script(ADD, BYE), max_context=4096),
        chat=parts.chat(),
        toolbox=toolbox(),
        rubric=rubric,
        limits=LIMITS,
        environments=Environments(kinds),
    )


def collect(rubric: Rubric, environment: type | None = None) -> list[Rollout]:
    question = {"role": "user", "content": "what is 3 + 4?"}
    task = Task(task_id="t", messages=(question,), columns={"answers": ["7", "8"]})
    return asyncio.run(acollect(collector(rubric, environment), [task], samples=2)).rollouts


def length(rollout) -> float:
    return float(len(rollout.trajectories[0].messages))


def pop(rollout):
    rollout.trajectories[0].messages.pop()


def cut(rollout):
    del rollout.trajectories[0].spans[1:]


def reword(rollout):
    rollout.trajectories[0].messages[-1]["content"] = "It is 8."


def rename(rollout):
    rollout.tool_results[0].call.arguments["a"] = 5


def grow(rollout):
    rollout.trajectories[0].append_context([1, 2], "tool")


def judge(rollout):
    rollout.reward = 1.0


def relabel(rollout):
    rollout.task.columns["answers"].append("9")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (pop, r"trajectories\[0\]\.messages"),
        (cut, r"trajectories\[0\]\.spans"),
        (reword, r"trajectories\[0\]\.messages"),
        (rename, "tool_results"),
        (grow, r"trajectories\[0\]\.spans, trajectories\[0\]\.ids"),
        (judge, "reward"),
        (relabel, "task"),
    ],
)
@pytest.mark.parametrize("kind", ["sync", "async", "environment"])
def test_a_reward_that_changes_its_rollout_is_named(change, field, kind):
    def reward(rollout) -> float:
        change(rollout)
        return 1.0

    async def later(rollout) -> float:
        await asyncio.sleep(0)
        change(rollout)
        return 1.0

    class World:
        def reward(self, rollout) -> float:
            return reward(rollout)

    named = "environment" if kind == "environment" else "bad"
    functions = {"length": length, "bad": later if kind == "async" else reward}
    rubric = Rubric({"length": length} if kind == "environment" else functions)
    environment = World if kind == "environment" else None
    match = rf"reward '{named}' on rollout 'test-1-0-\d' of task 't': .* it changed .*\({field}\)"
    with pytest.raises(RewardError, match=match):
        collect(rubric, environment)


def test_what_is_trained_is_what_was_sampled_whatever_a_reward_tries():
    wrong = made("It is 7.", called("add", a=3), sampled=3)
    before = copy_rollout(wrong)
    for change in (pop, cut, reword, rename, judge):
        with pytest.raises(RewardError):
            asyncio.run(Rubric({"bad": change}).score([wrong]))
    check_unchanged(before, wrong)


SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"required": ["a"]}}}


def of_an_outside_agent() -> Rollout:
    """A rollout with all that a reward could change in it."""
    rollout = made("It is 7.", called("add", a=3), sampled=3)
    rollout.counts = {"agent/requests": 2}
    rollout.grades = {"judge": 0.5}
    side = [{"role": "user", "content": "a title?"}]
    rollout.untrained = (
        UntrainedConversation(
            model="small", frozen=True, turns=1, sampled_length=2, messages=tuple(side)
        ),
    )
    delegation = Delegation(
        caller=(0, 0), call_id="c", schemas=(copy.deepcopy(SCHEMA),), max_turns=1, max_tokens=9
    )
    rollout.begin(role="helper", delegation=delegation)
    for trajectory in rollout.trajectories:
        trajectory.schemas = (copy.deepcopy(SCHEMA),)
        trajectory.advantages = array("d", [0.5])
    return rollout


def recount(rollout):
    rollout.counts["agent/requests"] = 0


def require(rollout):
    rollout.trajectories[0].schemas[0]["function"]["parameters"]["required"].clear()


def redirect(rollout):
    rollout.trajectories[1].delegation.schemas[0]["function"]["name"] = "subtract"


def praise(rollout):
    rollout.trajectories[0].advantages[0] = 1.0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (recount, "counts"),
        (require, r"trajectories\[0\]\.schemas"),
        (redirect, r"trajectories\[1\]\.delegation"),
        (praise, r"trajectories\[0\]\.advantages"),
    ],
)
def test_counts_and_schemas_are_copies_too(change, field):
    live = of_an_outside_agent()
    with pytest.raises(RewardError, match=rf"it changed .*\({field}\)"):
        asyncio.run(Rubric({"bad": change}).score([live]))
    check_unchanged(of_an_outside_agent(), live)


def changeable(value: object) -> set[int]:
    """The identities of all lists, dicts and arrays within a value."""
    if isinstance(value, dict | list | array):
        inner = value.values() if isinstance(value, dict) else value
        return {id(value)}.union(*map(changeable, inner))
    if isinstance(value, tuple):
        return set().union(*map(changeable, value))
    if is_dataclass(value):
        return set().union(*(changeable(getattr(value, f.name)) for f in fields(value)))
    return set()


def test_a_copy_shares_nothing_that_can_be_changed():
    live = of_an_outside_agent()
    given = copy_rollout(live)
    assert changeable(given) & changeable(live) == set()


def test_the_ledger_is_verified_after_the_rewards():
    def reach(rollout) -> float:
        rollouts = [found for found in gc.get_objects() if type(found) is Rollout]
        for other in rollouts:
            if other.rollout_id == "test-1-0-1" != rollout.rollout_id:
                del other.trajectories[0].spans[1:]
        return 1.0

    with pytest.raises(
        LedgerError, match="test-1-0-1 trajectory 0: its ids are not those of its spans"
    ):
        collect(Rubric({"reach": reach}))


def test_columns_and_what_trl_functions_get_are_copies_to_change():
    def first(rollout, answers) -> float:
        answers.reverse()
        return float(answers == ["8", "7"])

    def trl(completions, answers, **kwargs):
        for completion in completions:
            completion.pop()
        answers.clear()
        return [1.0] * len(completions)

    rubric = Rubric({"first": first, "trl": trl, "again": first, "length": length})
    rewards = [rollout.rewards for rollout in collect(rubric)]
    assert rewards == [{"first": 1.0, "trl": 1.0, "again": 1.0, "length": 4.0}] * 2


def test_a_copy_is_equal_whatever_the_columns_hold():
    class Odd:
        """Cannot be copied, and is equal to nothing."""

        def __deepcopy__(self, memo):
            raise TypeError("no")

        def __eq__(self, other):
            raise ValueError("no")

    rollout = made("x", called("add", a=3), odd=Odd(), nan=math.nan, open=[Odd(), {"a": (1, [2])}])
    rollout = replace(rollout, environment_reward=float("nan"))
    given = copy_rollout(rollout)
    given.environment_reward = float("nan")
    check_unchanged(given, rollout)


HUGE = [10**400, -(10**5000), 1e101, float("inf")]


@pytest.mark.parametrize("value", HUGE, ids=["10**400", "-10**5000", "1e101", "inf"])
def test_rewards_beyond_any_use_are_named(value):
    with pytest.raises(
        RewardError, match=r"reward 'huge' on rollout 'r' of task 't': .* returned "
    ):
        asyncio.run(Rubric({"huge": lambda rollout: value}).score([made("x")]))
    lenient = Rubric({"huge": lambda rollout: value}).lenient()
    (reason,) = asyncio.run(lenient.score([made("x")]))
    assert "a reward is a" in reason


def test_an_environments_reward_beyond_any_use_is_named():
    from agenttrain.rewards.builtin.tools import environment

    class World:
        def reward(self, rollout) -> int:
            return 10**400

    with pytest.raises(RewardError, match=r"reward 'environment' on rollout .* it returned inf"):
        collect(Rubric({"environment": environment}), World)


def test_a_sum_of_rewards_beyond_any_use_is_named():
    functions = {"a": lambda rollout: 1e100, "b": lambda rollout: 1e100}
    rollout = made("x")
    with pytest.raises(
        RewardError, match=r"rollout 'r' .* beyond 1e\+100: a 1e\+100 .*, b 1e"
    ) as e:
        asyncio.run(Rubric(functions).score([rollout]))
    assert e.value.culprits == ("r",)
    assert rollout.rewards == {} and rollout.reward is None
    with pytest.raises(RewardError, match="weight 1e"):
        asyncio.run(Rubric({"a": lambda rollout: 2.0}, {"a": 1e308}).score([rollout]))
    assert asyncio.run(Rubric(functions).lenient().score([rollout])) == [rollout.error]
    assert rollout.rewards == {"a": 1e100, "b": 1e100} and rollout.reward is None
