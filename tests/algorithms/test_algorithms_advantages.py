"""Advantages: TRL's numbers, hand-computed ones, and properties."""

from __future__ import annotations

import math
import statistics
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agenttrain.algorithms.advantages import advantages, normalized_advantages
from agenttrain.algorithms.config import Advantage, Scale

NAN = math.nan
# two reward functions weighted 1 and 0.5, over two groups of four; the fourth has no reward:
# [1 + 0, 0 + 2/2, .5, none], [0 + 1/2, 0 + 3/2, 0 + 1/2, 0 + 3/2]
REWARDS = torch.tensor([[1.0, 1.0, 0.5, NAN], [0.5, 1.5, 0.5, 1.5]], dtype=torch.float64)
A = 0.865875
TRL = {  # TRL 1.16's numbers
    (Advantage.group, Scale.group): [0.57715, 0.57715, -1.154301, NAN, -A, A, -A, A],
    (Advantage.group, Scale.batch): [
        *[0.370397, 0.370397, -0.740794, NAN],
        *[-1.111191, 1.111191, -1.111191, 1.111191],
    ],
    (Advantage.group, Scale.none): [0.166667, 0.166667, -0.333333, NAN, -0.5, 0.5, -0.5, 0.5],
    (Advantage.leave_one_out, Scale.none): [
        *[0.25, 0.25, -0.5, NAN],
        *[-0.666667, 0.666667, -0.666667, 0.666667],
    ],
    (Advantage.leave_one_out, Scale.batch): [
        *[0.417295, 0.417295, -0.834591, NAN],
        *[-1.112787, 1.112787, -1.112787, 1.112787],
    ],
}


@pytest.mark.parametrize(("baseline", "scale"), TRL)
def test_advantages_are_those_of_trl(baseline: Advantage, scale: Scale) -> None:
    result = advantages(REWARDS, baseline=baseline, scale=scale).flatten().tolist()
    expected = TRL[(baseline, scale)]
    assert result == pytest.approx(expected, abs=1e-6, nan_ok=True)


BASELINES = [baseline for baseline in Advantage if baseline is not Advantage.none]


def test_without_a_baseline_the_advantage_is_the_reward() -> None:
    rewards = torch.tensor([[1.0, 0.5, NAN]])
    result = advantages(rewards, baseline=Advantage.none, scale=Scale.none)
    assert result[0].tolist() == pytest.approx([1.0, 0.5, NAN], nan_ok=True)


def test_leave_one_out_is_the_mean_of_the_others() -> None:
    result = advantages(
        torch.tensor([[1.0, 0.0, 0.0, 0.0]]), baseline=Advantage.leave_one_out, scale=Scale.none
    )
    # 1 - 0, and 0 - (1 + 0 + 0) / 3
    assert result[0].tolist() == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])


def test_leave_one_out_is_as_precise_as_the_rewards() -> None:
    rewards = [0.1, 0.7, 0.2, NAN, 0.4, 0.9, 0.3]
    known = [Fraction(reward) for reward in rewards if reward == reward]
    expected = [
        float(Fraction(r) - (sum(known) - Fraction(r)) / (len(known) - 1)) if r == r else NAN
        for r in rewards
    ]
    result = advantages(
        torch.tensor([rewards], dtype=torch.float64),
        baseline=Advantage.leave_one_out,
        scale=Scale.none,
    )
    assert result[0].tolist() == pytest.approx(expected, rel=0, abs=1e-15, nan_ok=True)


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scale", Scale)
@pytest.mark.parametrize("rewards", [[0.1, 0.1, 0.1], [0.7, NAN, NAN], [NAN, NAN, NAN]])
def test_equal_rewards_have_advantage_zero_exactly(
    baseline: Advantage, scale: Scale, rewards: list[float]
) -> None:
    """(.1 + .1 + .1) / 3 is not .1 in floats; divided by a deviation of 0 + 1e-4 it would count."""
    result = advantages(
        torch.tensor([rewards], dtype=torch.float64), baseline=baseline, scale=scale
    )
    expected = [0.0 if reward == reward else NAN for reward in rewards]
    assert result[0].tolist() == pytest.approx(expected, abs=0, nan_ok=True)


groups = st.lists(
    st.lists(st.sampled_from([0.0, 0.25, 1.0, NAN]), min_size=4, max_size=4),
    min_size=1,
    max_size=3,
)


@settings(max_examples=50)
@given(rewards=groups, shift=st.sampled_from([-3.0, 0.5, 8.0]))
@pytest.mark.parametrize("baseline", [Advantage.group, Advantage.leave_one_out])
@pytest.mark.parametrize("scale", [Scale.group, Scale.none])
def test_a_groups_rewards_may_be_shifted(
    baseline: Advantage, scale: Scale, rewards: list[list[float]], shift: float
) -> None:
    before = torch.tensor(rewards, dtype=torch.float64)
    shifted = before.clone()
    shifted[0] += shift
    first, second = (
        advantages(values, baseline=baseline, scale=scale).flatten().tolist()
        for values in (before, shifted)
    )
    assert first == pytest.approx(second, abs=1e-9, nan_ok=True)


@settings(max_examples=50)
@given(rewards=groups)
@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scale", Scale)
def test_rollouts_without_reward_change_nothing(
    baseline: Advantage, scale: Scale, rewards: list[list[float]]
) -> None:
    values = torch.tensor(rewards, dtype=torch.float64)
    wider = torch.cat([torch.full((len(rewards), 1), NAN, dtype=torch.float64), values], 1)
    first = advantages(values, baseline=baseline, scale=scale)
    second = advantages(wider, baseline=baseline, scale=scale)[:, 1:]
    assert first.flatten().tolist() == pytest.approx(second.flatten().tolist(), nan_ok=True)
    assert torch.equal(first.isnan(), values.isnan())
    # what is compared adds up to zero
    compared = first.reshape(1, -1) if baseline is Advantage.batch else first
    assert compared.nansum(1).tolist() == pytest.approx([0.0] * len(compared), abs=1e-9)


def test_reinforce_pp_compares_with_the_batch() -> None:
    rewards = torch.tensor([[1.0, 0.0], [2.0, NAN]], dtype=torch.float64)
    # mean 1, deviation 1 over [1, 0, 2]
    plain = advantages(rewards, baseline=Advantage.batch, scale=Scale.none)
    assert plain.flatten().tolist() == pytest.approx([0, -1, 1, NAN], nan_ok=True)
    scaled = advantages(rewards, baseline=Advantage.batch, scale=Scale.batch)
    expected = [0, -1 / 1.0001, 1 / 1.0001, NAN]
    assert scaled.flatten().tolist() == pytest.approx(expected, nan_ok=True)


def test_single_rollouts_are_compared_with_the_batch() -> None:
    rewards = torch.tensor([[1.0], [0.0], [0.0], [1.0]], dtype=torch.float64)
    result = advantages(rewards, baseline=Advantage.batch, scale=Scale.none)
    assert result.flatten().tolist() == [0.5, -0.5, -0.5, 0.5]


# f1 and f2 of TRL's example: [1, 0, .5, none | 0, 0, 0, 0], [0, 2, none, none | 1, 3, 1, 3]
EACH = torch.tensor(
    [
        [[1.0, 0.0, 0.5, NAN], [0.0, 0.0, 0.0, 0.0]],
        [[0.0, 2.0, NAN, NAN], [1.0, 3.0, 1.0, 3.0]],
    ],
    dtype=torch.float64,
)


def test_gdpo_normalises_each_function_in_its_group() -> None:
    result = normalized_advantages(EACH, [1.0, 0.5], scale=Scale.none)
    # f1, group 0: mean .5, deviation .5: [1, -1, 0, none] x .5 / .5001; group 1: zeros
    # f2, group 0: mean 1, deviation sqrt 2: [-1, 1] / 1.4143136; group 1: mean 2, deviation
    # sqrt(4 / 3): [-1, 1, -1, 1] / 1.1548005
    a, b, c = 0.5 / 0.5001, 0.5 / (math.sqrt(2) + 1e-4), 0.5 / (math.sqrt(4 / 3) + 1e-4)
    expected = [a - b, -a + b, 0, NAN, -c, c, -c, c]
    assert result.flatten().tolist() == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_gdpo_over_the_batch_is_trls_formula() -> None:
    """`normalize_then_sum` of TRL 1.16: (x - mean) / (deviation + 1e-4) of those seven."""
    result = normalized_advantages(EACH, [1.0, 0.5], scale=Scale.batch).flatten()
    plain = normalized_advantages(EACH, [1.0, 0.5], scale=Scale.none).flatten()
    known = [value for value in plain.tolist() if not math.isnan(value)]
    mean, deviation = statistics.fmean(known), statistics.stdev(known)
    expected = [(value - mean) / (deviation + 1e-4) for value in plain.tolist()]
    assert result.tolist() == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_gdpo_does_not_see_the_size_of_a_functions_rewards() -> None:
    rewards = torch.tensor([[[1.0, 0.0]], [[0.0, 10.0]]], dtype=torch.float64)
    first = normalized_advantages(rewards, [1.0, 0.5], scale=Scale.none)
    rewards[1] /= 10
    second = normalized_advantages(rewards, [1.0, 0.5], scale=Scale.none)
    # .70711 x (1 - .5)
    assert first[0].tolist() == pytest.approx([0.353553, -0.353553], abs=1e-4)
    assert first[0].tolist() == pytest.approx(second[0].tolist(), abs=1e-3)


def test_leave_one_out_over_single_rows_would_be_zero_had_rows_been_filtered() -> None:
    """[1, 0, 0, 0] with its zeros dropped row by row would leave one rollout and no signal."""
    whole = advantages(
        torch.tensor([[1.0, 0.0, 0.0, 0.0]]), baseline=Advantage.leave_one_out, scale=Scale.none
    )
    filtered = advantages(
        torch.tensor([[1.0, NAN, NAN, NAN]]), baseline=Advantage.leave_one_out, scale=Scale.none
    )
    assert whole[0, 0] == 1.0
    assert filtered[0, 0] == 0.0
