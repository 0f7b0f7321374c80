"""Step metrics and evaluation estimates, by hand."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tracking_rollouts import call, new, say, three

from agenttrain.tracking.metrics import mean_estimate, pass_at_k, rollout_metrics, solved, wilson
from agenttrain.types import StopReason, ToolError


def test_metrics_of_three_rollouts():
    metrics = rollout_metrics([three()])
    expected = {
        "reward": 0.5,  # (1 + 0 + 0.5) / 3
        "reward_std": 0.5,  # sqrt((0.5^2 + 0.5^2 + 0) / 2)
        "frac_reward_zero_std": 0.0,
        "success": 1 / 3,  # only the first reaches 1
        "rewards/answer/mean": 0.5,
        "rewards/answer/std": 0.5,
        "tools/call_frequency": 2 / 3,  # 2 calls, 3 rollouts
        "tools/failure_frequency": 1 / 2,  # 1 of 2 calls
        "tools/unavailable": 0.0,
        "tools/lenient_calls": 0.0,
        "tools/rollout_share": 2 / 3,
        "tools/add/calls": 2.0,
        "tools/add/failures": 1.0,
        "tools/add/latency_s": 0.25,  # the refused call never ran
        "completions/mean_length": 3.0,  # sampled tokens: (4 + 3 + 2) / 3
        "completions/min_length": 2.0,
        "completions/max_length": 4.0,
        "completions/clipped_ratio": 1 / 3,  # the second stopped by max_tokens
        **{f"stop/{reason}": 0.0 for reason in StopReason},
        "stop/completed": 2 / 3,
        "stop/max_tokens": 1 / 3,
        "answers/empty": 2 / 3,  # these rollouts have ids, and no messages
        "answers/copied": 0.0,
        "answers/repeated": 0.0,
        "turns/mean": 5 / 3,  # (2 + 2 + 1) / 3
        "trajectories/mean": 1.0,
    }
    assert metrics == pytest.approx(expected)
    assert list(metrics) == list(expected)


def test_reward_spread_is_taken_within_groups():
    # [1, 0]: std sqrt(0.5); [0.5, 0.5]: std 0. Over all four values it would be another number.
    groups = [[new(0, 1.0), new(1, 0.0)], [new(0, 0.5, "g1"), new(1, 0.5, "g1")]]
    metrics = rollout_metrics(groups)
    assert metrics["reward_std"] == pytest.approx(math.sqrt(0.5) / 2)
    assert metrics["frac_reward_zero_std"] == 0.5


def test_a_sum_of_weighted_rewards_may_miss_success_by_its_rounding():
    # .1 + .2 + .7 is 1 - 1.1e-16
    assert solved(0.1 + 0.2 + 0.7) and solved(1.5)
    assert not solved(0.99)


def test_rewards_that_do_not_apply_count_nowhere():
    metrics = rollout_metrics([[new(0, 1.0), new(1, None), new(2, 0.0)]])
    assert metrics["reward"] == 0.5  # (1 + 0) / 2
    assert metrics["rewards/answer/mean"] == 0.5
    assert metrics["success"] == 0.5


def test_declared_columns_are_there_without_any_call():
    rollout = new(0, 1.0)
    say(rollout, (10, 2))
    metrics = rollout_metrics([[rollout]], tools=("sql", "add"), rewards=("style",))
    assert [n for n in metrics if n.endswith("/calls")] == ["tools/sql/calls", "tools/add/calls"]
    assert metrics["tools/sql/calls"] == 0.0
    assert metrics["tools/failure_frequency"] == 0.0
    assert math.isnan(metrics["tools/sql/latency_s"])
    assert math.isnan(metrics["rewards/style/mean"])


def test_a_made_up_tool_name_gets_no_column():
    rollout = new(0, 0.0)
    say(rollout, (5, 2))
    call(rollout, 9, name="teleport", error=ToolError.unknown_tool)
    metrics = rollout_metrics([[rollout]])
    assert not any("teleport" in name for name in metrics)
    assert metrics["tools/failure_frequency"] == 1.0


def test_a_step_without_rollouts_has_the_same_columns():
    columns = {"tools": ("add",), "rewards": ("answer",)}
    assert list(rollout_metrics([], **columns)) == list(rollout_metrics([three()], **columns))


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        # Newcombe 1998, Statistics in Medicine 17, table I, method 3 (score, no correction).
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_intervals_of_the_literature(successes, n, low, high):
    interval = wilson(successes, n)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=5e-5)
    assert interval.mean == successes / n


def test_mean_estimate_of_graded_rewards():
    # mean 0.5; std sqrt((0.0625 + 0.0625) / 2) = 0.25; half 1.96 * 0.25 / sqrt(3) = 0.2829
    interval = mean_estimate([0.25, 0.5, 0.75])
    assert (interval.low, interval.high) == pytest.approx((0.2171, 0.7829), abs=5e-5)
    assert str(interval) == "0.50 [0.22, 0.78]"


def test_intervals_of_values_within_0_and_1_stay_there():
    # mean .875, spread .25, half 1.96 x .25 / 2 = .245
    high = mean_estimate([0.5, 1.0, 1.0, 1.0])
    assert (high.low, high.high) == (pytest.approx(0.630, abs=1e-3), 1.0)
    low = mean_estimate([0.5, 0.0, 0.0, 0.0])
    assert (low.low, low.high) == (0.0, pytest.approx(0.370, abs=1e-3))
    beyond = mean_estimate([1.5, 1.0, 1.0, 1.0])
    assert beyond.high == pytest.approx(1.125 + 0.245, abs=1e-3)
    assert math.isnan(mean_estimate([0.5]).high)


def test_mean_estimate_of_zeros_and_ones_is_wilson():
    assert mean_estimate([0.0] * 20) == wilson(0, 20)
    assert mean_estimate([]).n == 0


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), *[st.integers(0, n)] * 2)))
def test_pass_at_k_counts_the_subsets_that_hold_a_success(case):
    n, correct, k = case[0], case[1], max(case[2], 1)
    subsets = list(itertools.combinations(range(n), k))
    solved = sum(any(index < correct for index in subset) for subset in subsets)
    assert pass_at_k(n, correct, k) == pytest.approx(solved / len(subsets))


def test_pass_at_k_by_hand():
    assert pass_at_k(4, 1, 2) == 0.5  # 3 of 6 pairs


def test_pass_at_k_refuses_more_than_was_sampled():
    with pytest.raises(ValueError, match=r"n=1.*k=4.*eval\.samples"):
        pass_at_k(1, 0, 4)
