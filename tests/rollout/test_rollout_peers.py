"""Tasks of a step over processes: how they are dealt, and that one process would do the same."""

from __future__ import annotations

import asyncio
import json

import process_rollouts
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchrun import torchrun

from agenttrain.rollout.collector import Collected
from agenttrain.rollout.sharing import UNKNOWN_TOKENS, Costs, assign_tasks, merge_shares
from agenttrain.training.world import World
from agenttrain.types import Task


def test_the_longest_goes_first_to_the_one_with_least_to_do() -> None:
    # 5 to the first; 3 to the second; 1 to the second (3 < 5), 4; 1 to the second, 5
    assert assign_tasks([5, 1, 1, 3], 2) == [0, 1, 1, 1]
    assert assign_tasks([2, 2, 2, 2], 2) == [0, 1, 0, 1]  # of equals the first
    assert assign_tasks([4, 1], 3) == [0, 1]  # the third has none
    assert assign_tasks([], 2) == []


def test_each_minibatch_is_spread_evenly() -> None:
    # 9 to the first, 8 to the second, who then has least; then the first has
    assert assign_tasks([1, 1, 9, 8], 2, minibatches=1) == [1, 0, 0, 1]
    # the two of one token first, one to each
    assert assign_tasks([1, 1, 9, 8], 2, minibatches=2) == [0, 1, 0, 1]


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 6), st.integers(1, 4))
def test_nobody_waits_for_more_than_the_longest_task(
    costs: list[int], processes: int, parts: int
) -> None:
    owners = assign_tasks(costs, processes, parts)
    loads = [sum(c for c, o in zip(costs, owners, strict=True) if o == p) for p in range(processes)]
    assert max(loads) - min(loads) <= max(costs, default=0)


def test_what_a_kind_cost_is_expected_of_the_next_of_its_kind() -> None:
    def task(kind: str, prompt: str = "") -> Task:
        messages = ({"role": "user", "content": prompt},)
        return Task(task_id="t", messages=messages, columns={"kind": kind})

    costs = Costs("kind")
    assert costs.expected(task("a", "12345678")) == 2 + UNKNOWN_TOKENS  # 8 characters
    costs.learn([(costs.kind(task("a")), 300.0), (costs.kind(task("a")), 500.0)])
    costs.learn([(costs.kind(task("b")), 100.0)])
    assert costs.expected(task("a")) == 400.0
    assert costs.expected(task("b")) == 100.0
    assert costs.expected(task("c")) == 300.0  # the mean of all groups


def test_costs_are_the_same_after_a_checkpoint_and_a_copy_learns_alone() -> None:
    costs = Costs("kind")
    costs.learn([("None/a", 300.1), ("None/a", 500.7), ("None/b", 0.1)])
    kept = json.loads(json.dumps(costs.state_dict()))
    apart = costs.copy()
    apart.learn([("None/a", 10.0)])
    again = Costs("kind")
    again.load_state_dict(kept)
    tasks = [Task(task_id="t", messages=(), columns={"kind": kind}) for kind in "abc"]
    expected = [(300.1 + 500.7) / 2, 0.1, (300.1 + 500.7 + 0.1) / 3]
    for one in (costs, again):
        assert [one.expected(task) for task in tasks] == expected
    assert apart.expected(tasks[0]) == (300.1 + 500.7 + 10.0) / 3
    again.learn([("None/b", 0.3)])
    assert again.expected(tasks[1]) == (0.1 + 0.3) / 2


def test_shares_merge_in_task_order_and_the_slowest_counts() -> None:
    one = Collected(groups=[["a"], ["d"]], places=[0, 3], dropped=1, reward_s=2.0, loop_lag_s=0.1)
    two = Collected(groups=[["b"], ["c"]], places=[1, 2], dropped=2, reward_s=3.0, loop_lag_s=0.3)
    whole = merge_shares([one, two])
    assert (whole.groups, whole.places) == ([["a"], ["b"], ["c"], ["d"]], [0, 1, 2, 3])
    assert (whole.dropped, whole.reward_s, whole.loop_lag_s) == (3, 3.0, 0.3)


@pytest.fixture(scope="module")
def of_one() -> dict:
    """What one process does with all tasks."""
    return json.loads(json.dumps(asyncio.run(process_rollouts.all_of_it(World()))))


@pytest.fixture(scope="module")
def of_two() -> list[dict]:
    """What each of two processes says."""
    found = torchrun("process_rollouts.py")
    return [found[0], found[1]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["step", "one task", "more rounds"])
def test_two_processes_draw_what_one_draws(name: str, of_one: dict, of_two: list[dict]) -> None:
    for told in of_two:
        for what in ("ids", "rewards", "seeds", "trained", "metrics"):
            assert told[name][what] == of_one[name][what], what


@pytest.mark.slow
def test_groups_stay_whole_and_one_process_may_have_none(of_two: list[dict]) -> None:
    assert of_two[0]["one task"]["shares"] == [2, 0]
    shares = of_two[0]["step"]["shares"]
    assert sum(shares) == 10
    assert all(share % 2 == 0 and share > 0 for share in shares)
    for holders in zip(*of_two[0]["step"]["holders"], strict=True):
        assert sum(holders) == 1


@pytest.mark.slow
def test_an_evaluation_has_the_same_figures_on_every_process(
    of_one: dict, of_two: list[dict]
) -> None:
    assert of_two[0]["evaluation"] == of_one["evaluation"]
    assert [one["ids"] for one in of_two[1]["evaluation"]] == [[], []]  # the main one has them
    for mine, whole in zip(of_two[1]["evaluation"], of_one["evaluation"], strict=True):
        assert {**mine, "ids": None} == {**whole, "ids": None}


@pytest.mark.slow
def test_an_error_of_one_process_ends_the_step_of_all(of_one: dict, of_two: list[dict]) -> None:
    assert of_one["reward"].startswith("RewardError")
    told = sorted(told["reward"] for told in of_two)
    # which of the two has task 2 is the dealing's business
    assert told[0].startswith("PeerFailed: rank ")
    assert "RewardError" in told[0]
    assert told[1] == of_one["reward"]


def test_only_when_no_process_has_a_rollout_there_are_none(
    of_one: dict, of_two: list[dict]
) -> None:
    assert [told["some fail"] for told in of_two] == ["nothing", "nothing"]
    assert of_one["some fail"] == "nothing"
    for told in (*of_two, of_one):
        assert told["all fail"].startswith("NoRollouts: all ")
        assert "out of memory" in told["all fail"]
