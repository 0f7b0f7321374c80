"""Losses, gradients and metrics against TRL 1.16's numbers and a float64 reference in plain Python.

Inputs (4 rollouts, 5 completion tokens) and TRL's results are in `golden/losses.py`.
"""

from __future__ import annotations

import math

import pytest
import torch
from golden import losses as golden
from hypothesis import given, settings
from hypothesis import strategies as st

from agenttrain.algorithms.aggregate import token_weights
from agenttrain.algorithms.kl import kl_estimate
from agenttrain.algorithms.loss import LossInputs, policy_loss
from agenttrain.algorithms.surrogate import clipped_surrogate, importance_ratio
from agenttrain.config.schema import Aggregation, AlgorithmConfig, KlEstimator, KlIn, Ratio

OFF_POLICY, ON_POLICY = False, True


def weights(config: AlgorithmConfig, lengths: torch.Tensor, tokens: int, rollouts: int):
    return token_weights(
        lengths, config.aggregation, tokens=tokens, rollouts=rollouts, fixed_length=8
    )


def golden_loss(
    config: AlgorithmConfig, *, mask: torch.Tensor, tokens: int, on_policy: bool = OFF_POLICY
):
    """Loss, gradient [4, 5] and metrics of the golden inputs; 8 rollouts in an update of two."""
    new = golden.NEW.clone().requires_grad_()
    sampled = mask.bool()
    inputs = LossInputs(
        logprobs_S=new[sampled],
        behaviour_S=new.detach()[sampled] if on_policy else golden.OLD[sampled],
        ref_logprobs_S=golden.REF[sampled],
        row_S=sampled.nonzero()[:, 0],
        advantages_B=golden.ADVANTAGES,
        weights_B=weights(config, sampled.sum(1), tokens, rollouts=8),
    )
    loss, metrics = policy_loss(inputs, config)
    (gradient,) = torch.autograd.grad(loss, new)
    means = {name: (part[0] / part[1]).item() for name, part in metrics.items()}
    return loss.item(), gradient, means


def config(**settings: object) -> AlgorithmConfig:
    return AlgorithmConfig(name="test", **settings)


TOKEN, SEQUENCE, FIXED = (
    Aggregation.token_mean,
    Aggregation.sequence_mean,
    Aggregation.fixed_length,
)
# name in TRL -> our settings, and the tokens that TRL divides by:
# bnpo: 11 sampled tokens here, times 2 accumulated batches; dapo: 24 items x 2 / 2 a generation
CASES = {
    "grpo": (config(aggregation=SEQUENCE), 22, OFF_POLICY),
    "bnpo": (config(aggregation=TOKEN), 22, OFF_POLICY),
    "dr_grpo": (config(aggregation=FIXED), 22, OFF_POLICY),
    "dapo": (config(aggregation=TOKEN), 24, OFF_POLICY),
    "dapo_onpolicy(old=None)": (config(aggregation=TOKEN), 24, ON_POLICY),
    "dapo_beta.1_nobc": (config(aggregation=TOKEN, beta=0.1), 24, OFF_POLICY),
    "gspo(grpo,seq,3e-4/4e-4)": (
        config(aggregation=SEQUENCE, ratio=Ratio.sequence_mean, clip_low=3e-4, clip_high=4e-4),
        22,
        OFF_POLICY,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_metrics_are_those_of_trl(name: str) -> None:
    settings_, tokens, on_policy = CASES[name]
    mask = golden.COMPLETION_MASK * golden.TOOL_MASK
    loss, gradient, means = golden_loss(settings_, mask=mask, tokens=tokens, on_policy=on_policy)
    expected_loss, expected_gradient, expected_means = golden.TRL[name]
    assert loss == pytest.approx(expected_loss, abs=1e-9)
    assert gradient.abs().sum().item() == pytest.approx(expected_gradient, abs=1e-9)
    assert gradient[1, 1:3].tolist() == [0.0, 0.0]  # the tool's tokens
    # TRL's metrics are in single precision
    assert means == {key: pytest.approx(expected_means[key], abs=1e-7) for key in means}
    assert "clip_ratio/region_mean" in means


def test_rloo_is_that_of_trl() -> None:
    """Without a tool mask (TRL's RLOO knows none), and without accumulation.

    TRL's fourth rollout, of no token at all, has ratio 1: a constant -1 x -2 / 4 = 0.5 in the loss.
    Ours has a sampled token in every rollout, and nowhere to put that constant.
    """
    settings_ = config(aggregation=SEQUENCE, ratio=Ratio.sequence_sum)
    loss, gradient, means = golden_loss(settings_, mask=golden.COMPLETION_MASK, tokens=13)
    # 8 rollouts in our update are 4 here: TRL's RLOO does not divide by the accumulation
    expected_loss, expected_gradient, expected_means = golden.TRL["rloo"]
    assert 2 * loss + 0.5 == pytest.approx(expected_loss, abs=1e-9)
    assert 2 * gradient.abs().sum().item() == pytest.approx(expected_gradient, abs=1e-9)
    assert means == {key: pytest.approx(expected_means[key], abs=1e-9) for key in means}


def test_rloo_leaves_the_tokens_of_tools_alone() -> None:
    settings_ = config(aggregation=SEQUENCE, ratio=Ratio.sequence_sum, clip_high=5.0)
    mask = golden.COMPLETION_MASK * golden.TOOL_MASK
    loss, gradient, _ = golden_loss(settings_, mask=mask, tokens=11)
    # log ratios over the sampled tokens: rollout 0: .15; 1: -.2 + .3 + .25 = .35;
    # 2: 0 + .15 - .35 = -.2; 3 has none, ratio 1, but no token to carry it
    ratios = [math.exp(0.15), math.exp(0.35), math.exp(-0.2)]
    # rollout 1 has A < 0 and r > 1.2: the unclipped term is the smaller one
    by_rollout = [-1 * ratios[0], 0.5 * ratios[1], -0.25 * max(ratios[2], 0.0)]
    assert ratios[2] > 0.8  # so that the clip is not active
    assert loss == pytest.approx(sum(by_rollout) / 8, abs=1e-12)
    assert gradient[1, 1:3].tolist() == [0.0, 0.0]
    # each sampled token of rollout 0 has the gradient -A r / rollouts
    assert gradient[0].tolist() == pytest.approx([-ratios[0] / 8] * 5)


def python_loss(rows: list[dict], settings_: AlgorithmConfig, *, fixed_length: int) -> float:
    """The loss from its definition, one token at a time, in Python's floats."""
    tokens = sum(len(row["new"]) for row in rows)
    total = 0.0
    for row in rows:
        deltas = [a - b for a, b in zip(row["new"], row["old"], strict=True)]
        levels = {
            Ratio.token: [math.exp(d) for d in deltas],
            Ratio.sequence_mean: [math.exp(sum(deltas) / len(deltas))] * len(deltas),
            Ratio.sequence_sum: [math.exp(sum(deltas))] * len(deltas),
        }
        weight = {TOKEN: tokens, SEQUENCE: len(rows) * len(deltas), FIXED: len(rows) * fixed_length}
        low, high = 1 - settings_.clip_low, 1 + settings_.clip_high
        for index, ratio in enumerate(levels[settings_.ratio]):
            a = row["advantage"]
            term = -min(ratio * a, min(max(ratio, low), high) * a)
            d = row["new"][index] - row["ref"][index]
            kl = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[settings_.kl.value]
            total += (term + settings_.beta * kl) / weight[settings_.aggregation]
    return total


numbers = st.floats(-2, 0, allow_nan=False, width=32)
shifts = st.floats(-0.5, 0.5, allow_nan=False, width=32)


@st.composite
def batches(draw: st.DrawFn) -> list[dict]:
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        new = draw(st.lists(numbers, min_size=1, max_size=4))
        rows.append(
            {
                "new": new,
                "old": [x + draw(shifts) for x in new],
                "ref": [x + draw(shifts) for x in new],
                "advantage": draw(st.sampled_from([-1.5, -0.25, 0.0, 0.5, 2.0])),
            }
        )
    return rows


configs = st.builds(
    AlgorithmConfig,
    name=st.just("test"),
    ratio=st.sampled_from(Ratio),
    aggregation=st.sampled_from(Aggregation),
    beta=st.sampled_from([0.0, 0.3]),
    kl=st.sampled_from(KlEstimator),
    clip_low=st.sampled_from([0.1, 0.2]),
    clip_high=st.sampled_from([0.2, 0.28]),
)


def tensor_inputs(rows: list[dict], settings_: AlgorithmConfig, whole: list[dict]) -> LossInputs:
    """Our inputs for `rows`, a part of the update `whole`."""

    def packed(key: str) -> torch.Tensor:
        return torch.tensor([x for row in rows for x in row[key]], dtype=torch.float64)

    lengths = torch.tensor([len(row["new"]) for row in rows])
    return LossInputs(
        logprobs_S=packed("new").requires_grad_(),
        behaviour_S=packed("old"),
        ref_logprobs_S=packed("ref"),
        row_S=torch.repeat_interleave(torch.arange(len(rows)), lengths),
        advantages_B=torch.tensor([row["advantage"] for row in rows], dtype=torch.float64),
        weights_B=weights(settings_, lengths, sum(len(row["new"]) for row in whole), len(whole)),
    )


@settings(max_examples=60, deadline=None)
@given(rows=batches(), settings_=configs)
def test_loss_is_its_definition(rows: list[dict], settings_: AlgorithmConfig) -> None:
    loss, _ = policy_loss(tensor_inputs(rows, settings_, rows), settings_)
    assert loss.item() == pytest.approx(python_loss(rows, settings_, fixed_length=8), abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(rows=batches(), settings_=configs, cut=st.integers(0, 4))
def test_parts_of_an_update_add_up(rows: list[dict], settings_: AlgorithmConfig, cut: int) -> None:
    inputs = tensor_inputs(rows, settings_, rows)
    whole, _ = policy_loss(inputs, settings_)
    (gradient,) = torch.autograd.grad(whole, inputs.logprobs_S)
    total, pieces = 0.0, []
    for part in (rows[:cut], rows[cut:]):
        if part:
            inputs = tensor_inputs(part, settings_, rows)
            loss, _ = policy_loss(inputs, settings_)
            total += loss.item()
            pieces += torch.autograd.grad(loss, inputs.logprobs_S)[0].tolist()
    assert total == pytest.approx(whole.item(), abs=1e-12)
    assert pieces == pytest.approx(gradient.tolist(), abs=1e-12)


@pytest.mark.parametrize("level", Ratio)
@pytest.mark.parametrize("aggregation", Aggregation)
def test_gradient_is_the_difference_quotient(level: Ratio, aggregation: Aggregation) -> None:
    settings_ = config(ratio=level, aggregation=aggregation, beta=0.1, kl=KlEstimator.k3)
    rows = [
        {"new": [-0.5, -1.0], "old": [-0.6, -0.9], "ref": [-0.4, -1.3], "advantage": 1.0},
        {"new": [-0.7], "old": [-0.72], "ref": [-0.5], "advantage": -0.5},
    ]
    inputs = tensor_inputs(rows, settings_, rows)
    loss, _ = policy_loss(inputs, settings_)
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs_S)
    h = 1e-6
    for index, (row, token) in enumerate([(0, 0), (0, 1), (1, 0)]):
        quotients = []
        for step in (h, -h):
            moved = [{**r, "new": list(r["new"])} for r in rows]
            moved[row]["new"][token] += step
            quotients.append(python_loss(moved, settings_, fixed_length=8))
        difference = (quotients[0] - quotients[1]) / (2 * h)
        assert gradient[index].item() == pytest.approx(difference, abs=1e-8)


def test_clipping_removes_the_gradient_only_where_it_would_go_on() -> None:
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    loss = clipped_surrogate(ratio, advantages, low=0.2, high=0.25)
    # -1.25 (clipped), 1.5, -0.5, 0.8 (clipped)
    assert loss.tolist() == pytest.approx([-1.25, 1.5, -0.5, 0.8])
    loss.sum().backward()
    assert ratio.grad.tolist() == [0.0, 1.0, -1.0, 0.0]


def test_ratio_levels() -> None:
    new = torch.tensor([0.1, 0.3, 0.7])
    rows = torch.tensor([0, 0, 1])
    ratios = {
        level: importance_ratio(new, torch.zeros(3), rows, rollouts=2, level=level).log().tolist()
        for level in Ratio
    }
    assert ratios[Ratio.token] == pytest.approx([0.1, 0.3, 0.7])
    assert ratios[Ratio.sequence_mean] == pytest.approx([0.2, 0.2, 0.7])
    assert ratios[Ratio.sequence_sum] == pytest.approx([0.4, 0.4, 0.7])


def test_kl_estimators() -> None:
    new, ref = torch.tensor([-1.0], dtype=torch.float64), torch.tensor([-1.5], dtype=torch.float64)
    values = {e: kl_estimate(new, ref, e).item() for e in KlEstimator}
    # d = 0.5: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d
    assert values[KlEstimator.k1] == 0.5
    assert values[KlEstimator.k2] == 0.125
    assert values[KlEstimator.k3] == pytest.approx(0.10653065971263342, abs=1e-15)


def test_kl_in_the_reward_is_not_in_the_loss_too() -> None:
    rows = [{"new": [-0.5], "old": [-0.5], "ref": [-2.0], "advantage": 1.0}]
    settings_ = config(beta=0.5, kl=KlEstimator.k1, kl_in=KlIn.reward)
    loss, metrics = policy_loss(tensor_inputs(rows, settings_, rows), settings_)
    assert loss.item() == -1.0
    assert "kl" not in metrics


def test_clip_ratios_count_rollouts_where_ratios_are_of_rollouts() -> None:
    rows = [
        {"new": [0.2, 0.2], "old": [0.0, 0.0], "ref": [0.0, 0.0], "advantage": 1.0},  # clipped
        {"new": [0.0], "old": [0.0], "ref": [0.0], "advantage": 1.0},
    ]
    by_level = {}
    for level in (Ratio.token, Ratio.sequence_sum):
        settings_ = config(ratio=level)
        _, metrics = policy_loss(tensor_inputs(rows, settings_, rows), settings_)
        by_level[level] = metrics["clip_ratio/high_mean"].tolist()
    assert by_level == {Ratio.token: [2.0, 3.0], Ratio.sequence_sum: [1.0, 2.0]}
