"""Credit per turn: advantages of turns, by hand and by what they must not depend on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from agenttrain.algorithms.advantages import advantages
from agenttrain.algorithms.config import Advantage, AlgorithmConfig, Credit, Scale
from agenttrain.algorithms.credit import (
    TurnRewards,
    returns,
    rewards_of_turns,
    set_advantages,
    turn_advantages,
)
from agenttrain.rollout.sampling import is_informative
from agenttrain.types import Completion, Finish, Rollout, Task

PER_TURN = [Credit.turn_reward, Credit.turn_baseline, Credit.gigpo]


def config(credit: Credit, **settings_: Any) -> AlgorithmConfig:
    keys = {key: settings_.pop(key) for key in ("gamma", "step_weight") if key in settings_}
    return AlgorithmConfig(name="test", credit={"name": credit, **keys}, **settings_)


def given_rewards(*rewards: tuple[float, ...] | None, states: Any = None) -> list[TurnRewards]:
    states = states or [()] * len(rewards)
    return [TurnRewards(rewards=r, states=s) for r, s in zip(rewards, states, strict=True)]


def advantages_of(group: list[TurnRewards], algorithm: AlgorithmConfig) -> list[Any]:
    (row,) = turn_advantages([group], algorithm).advantages
    return row


def close(values: Any) -> Any:
    return pytest.approx(values, abs=1e-12)


def test_a_return_is_the_discounted_sum_of_the_rewards_from_a_turn_on() -> None:
    assert returns((0.0, 1.0, 2.0), 0.5) == (1.0, 2.0, 2.0)
    assert returns((), 0.5) == ()


def test_turn_reward_by_hand() -> None:
    """Returns 2, 1, 1 and 0: the rollouts' means 4/3 and 0, the group's 2/3.

    Their mean squares are (16 + 1 + 1) / 27 = 2/3 and 4/9, so the deviation is sqrt(10/9).
    """
    group = given_rewards((1.0, 0.0, 1.0), (0.0,))
    plain = config(Credit.turn_reward, scale=Scale.none)
    assert advantages_of(group, plain) == [close([4 / 3, 1 / 3, 1 / 3]), close([-2 / 3])]
    scaled = (10 / 9) ** 0.5 + 1e-4
    assert advantages_of(group, config(Credit.turn_reward)) == [
        close([4 / 3 / scaled, 1 / 3 / scaled, 1 / 3 / scaled]),
        close([-2 / 3 / scaled]),
    ]
    alone = config(Credit.turn_reward, advantage=Advantage.leave_one_out, scale=Scale.none)
    assert advantages_of(group, alone) == [close([2.0, 1.0, 1.0]), close([-4 / 3])]
    nothing = config(Credit.turn_reward, advantage=Advantage.none, scale=Scale.none, gamma=0.5)
    assert advantages_of(group, nothing) == [[1.25, 0.5, 1.0], [0.0]]


def test_turn_baseline_by_hand() -> None:
    """Turn by turn: 2 against 0, 1 against the other's last 0, 1 against that again."""
    group = given_rewards((1.0, 0.0, 1.0), (0.0,))
    alone = config(Credit.turn_baseline, advantage=Advantage.leave_one_out, scale=Scale.none)
    assert advantages_of(group, alone) == [[2.0, 1.0, 1.0], [-2.0]]
    assert advantages_of(group, config(Credit.turn_baseline)) == [
        close([1 / (2**0.5 + 1e-4), 0.5 / (0.5**0.5 + 1e-4), 0.5 / (0.5**0.5 + 1e-4)]),
        close([-1 / (2**0.5 + 1e-4)]),
    ]


def test_gigpo_by_hand() -> None:
    """Returns 0.25, 0.5, 1 and 0, 0. In state s the first rollout's mean is 0.625, both's 0.3125.

    The states u and v have one rollout each: no advantage beside the rollout's +-0.5.
    """
    group = given_rewards((0.0, 0.0, 1.0), (0.0, 0.0), states=[("s", "u", "s"), ("s", "v")])
    algorithm = config(Credit.gigpo, scale=Scale.none, gamma=0.5)
    assert advantages_of(group, algorithm) == [[0.4375, 0.5, 1.1875], [-0.8125, -0.5]]
    result = turn_advantages([group], algorithm)
    assert result.compared == [[[True, False, True], [True, False]]]
    half = config(Credit.gigpo, scale=Scale.none, gamma=0.5, step_weight=0.5)
    assert advantages_of(group, half) == [[0.46875, 0.5, 0.84375], [-0.65625, -0.5]]


REWARD = st.sampled_from([None, -1.0, 0.0, 0.25, 1.0, 3.0])
GROUP = st.lists(st.tuples(REWARD, st.integers(1, 5)), min_size=2, max_size=6)
BASELINES = [
    (Advantage.group, Scale.group),
    (Advantage.group, Scale.none),
    (Advantage.group, Scale.batch),
    (Advantage.leave_one_out, Scale.none),
    (Advantage.leave_one_out, Scale.batch),
    (Advantage.batch, Scale.batch),
    (Advantage.none, Scale.none),
]


@settings(max_examples=40)
@given(
    groups=st.lists(GROUP, min_size=1, max_size=3),
    credit=st.sampled_from(PER_TURN),
    axes=st.sampled_from(BASELINES),
)
def test_a_reward_at_the_end_alone_gives_every_turn_the_rollouts_advantage(
    groups: list[Any], credit: Credit, axes: tuple[Advantage, Scale]
) -> None:
    baseline, scale = axes
    if credit is Credit.gigpo and (
        scale is Scale.batch or baseline in (Advantage.batch, Advantage.none)
    ):
        return
    width = max(map(len, groups))
    rewards = torch.full((len(groups), width), torch.nan, dtype=torch.float64)
    for p, group in enumerate(groups):
        for g, (reward, _) in enumerate(group):
            rewards[p, g] = torch.nan if reward is None else reward
    expected = advantages(rewards, baseline=baseline, scale=scale)
    made = [
        [
            TurnRewards(
                rewards=None if reward is None else (*[0.0] * (turns - 1), reward),
                states=tuple(f"{p}-{g}-{k}" for k in range(turns)),
            )
            for g, (reward, turns) in enumerate(group)
        ]
        for p, group in enumerate(groups)
    ]
    algorithm = config(credit, advantage=baseline, scale=scale)
    for p, row in enumerate(turn_advantages(made, algorithm).advantages):
        for g, values in enumerate(row):
            reward, turns = groups[p][g]
            if reward is None:
                assert values is None
            else:
                assert values == pytest.approx([expected[p, g].item()] * turns, abs=1e-9)


@settings(max_examples=40)
@given(
    credit=st.sampled_from(PER_TURN[:2]),
    rewards=st.lists(st.sampled_from([0.0, 1.0, 2.5]), min_size=2, max_size=5),
    turns=st.lists(st.integers(1, 6), min_size=5, max_size=5),
)
def test_how_many_turns_the_others_took_changes_no_advantage(
    credit: Credit, rewards: list[float], turns: list[int]
) -> None:
    """Rollouts of constant returns, however long, are compared as if they had one turn."""
    long = given_rewards(*((*[0.0] * (n - 1), r) for r, n in zip(rewards, turns, strict=False)))
    short = given_rewards(*((r,) for r in rewards))
    firsts = [values[0] for values in advantages_of(long, config(credit))]
    assert firsts == close([values[0] for values in advantages_of(short, config(credit))])


def scored(*turn_rewards: float, sample: int = 0, exact: float = 0.0) -> Rollout:
    """A rollout of a turn of two tokens for each number, scored by two functions."""
    rollout = Rollout(task=Task(task_id="t", messages=()), rollout_id=f"r-{sample}")
    (trajectory,) = rollout.trajectories
    for _ in turn_rewards:
        done = Completion(
            token_ids=(5, 2), logprobs=(-0.1, -0.2), finish=Finish.stop, versions=((0, 2),)
        )
        trajectory.append_sampled(done, trajectory.token_ids)
    rollout.turn_scores = {"steps": turn_rewards}
    rollout.rewards = {"steps": sum(turn_rewards), "exact": exact, "other": None}
    rollout.reward = 0.5 * sum(turn_rewards) + exact
    return rollout


def test_rewards_of_turns_are_weighted_and_the_rollouts_own_is_the_last_turns() -> None:
    rollout = scored(1.0, 0.0, exact=1.0)
    assert rewards_of_turns(rollout, {"steps": 0.5}).rewards == (0.5, 1.0)
    assert rewards_of_turns(rollout, {"steps": 0.5}, 0.25).rewards == (0.5, 0.75)
    rollout.reward = None
    assert rewards_of_turns(rollout, {"steps": 0.5}).rewards is None


def test_all_tokens_of_a_turn_share_its_advantage() -> None:
    rollout = scored(1.0, 0.0)
    set_advantages(rollout, [0.5, -0.5])
    assert list(rollout.trajectories[0].advantages or ()) == [0.5, 0.5, -0.5, -0.5]
    with pytest.raises(ValueError, match=r"rollout r-0: 3 advantages for 2 turns"):
        set_advantages(rollout, [0.5, -0.5, 0.0])


def test_a_group_of_equal_rewards_can_have_advantages() -> None:
    """Both got 1, in unequal turns: nothing to learn for the rollout, something for its turns."""
    group = [scored(1.0, 0.0), scored(0.0, 1.0, sample=1)]
    assert not is_informative(group, config(Credit.rollout), {"steps": 1.0})
    assert is_informative(group, config(Credit.turn_reward), {"steps": 1.0})
    same = [scored(0.0, 1.0), scored(0.0, 1.0, sample=1)]
    assert not is_informative(same, config(Credit.turn_baseline), {"steps": 1.0})


@pytest.mark.parametrize(
    "settings_, problem",
    [
        (
            {"credit": {"name": "rollout", "gamma": 0.9}},
            "algorithm.credit.gamma=0.9: unknown key of algorithm/credit=rollout; ",
        ),
        (
            {"credit": {"name": "turn_reward", "step_weight": 2.0}},
            "algorithm.credit.step_weight=2.0: unknown key of algorithm/credit=turn_reward; "
            "algorithm/credit=gigpo has it",
        ),
        (
            {"credit": {"name": "turn_reward"}, "rewards": "normalize_each", "scale": "none"},
            "algorithm/credit=turn_reward: returns add the rewards of all functions",
        ),
        (
            {"credit": {"name": "gigpo"}, "advantage": "batch", "scale": "batch"},
            "algorithm.advantage=batch: algorithm/credit=gigpo compares the turns of a group",
        ),
        (
            {"credit": {"name": "gigpo"}, "scale": "batch"},
            "algorithm.scale=batch: with algorithm/credit=gigpo each state's turns",
        ),
        (
            {"credit": {"name": "turn_baseline"}, "off_policy_threshold": 0.1},
            "algorithm.off_policy_threshold=0.1: leaves out rollouts of negative advantage",
        ),
        (
            {"credit": {"name": "turn_reward"}, "objective": {"name": "vespo"}},
            "algorithm/credit=turn_reward: algorithm.objective=vespo has one advantage for all",
        ),
    ],
)
def test_settings_that_do_not_go_together(settings_: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError) as caught:
        AlgorithmConfig(name="test", **settings_)
    assert problem in str(caught.value)
