"""Losses, gradients and metrics that TRL 1.16 has on the same numbers: `golden/losses.py`."""

from __future__ import annotations

import math

import pytest
import torch
from golden import losses as golden
from loss_cases import Padded, Update, clip, config, loss_and_gradient

from agenttrain.algorithms.config import (
    Aggregation,
    AlgorithmConfig,
    Behaviour,
)
from agenttrain.algorithms.loss import mean_parts
from agenttrain.algorithms.objectives.config import build_objective

MASK = golden.COMPLETION_MASK * golden.TOOL_MASK
TOKEN, SEQUENCE = Aggregation.token_mean, Aggregation.sequence_mean
# dapo, cispo, vespo: 24 items x 2 accumulated batches / 2 steps a generation
DAPO = Update(tokens=24, rollouts=8)
# bnpo: 11 sampled tokens here, times 2 accumulated batches
BNPO = Update(tokens=22, rollouts=8)
# The bonus is a mean over the 11 sampled tokens, over 2 accumulated batches.
BONUS = Update(tokens=24, rollouts=8, bonus=0.01 / 22)


def batch(mask: torch.Tensor = MASK, old: torch.Tensor = golden.OLD) -> Padded:
    return Padded(
        new=golden.NEW,
        old=old,
        mask=mask,
        advantages=golden.ADVANTAGES,
        ref=golden.REF,
        engine=golden.ENGINE,
        entropy=golden.ENTROPY,
    )


def corrected(level: str, mode: str, high: float, **settings: object) -> AlgorithmConfig:
    return config(
        behaviour=Behaviour.recomputed,
        correction={"level": level, "mode": mode, "max": high},
        **settings,
    )


# name in TRL -> our settings, and what the update divides by. TRL's cap of cispo is 1 + high.
CASES: dict[str, tuple[AlgorithmConfig, Update]] = {
    "grpo": (config(aggregation=SEQUENCE), BNPO),
    "bnpo": (config(aggregation=TOKEN), BNPO),
    "dr_grpo": (config(aggregation=Aggregation.fixed_length), BNPO),
    "dapo": (config(aggregation=TOKEN), DAPO),
    "luspo": (config(aggregation=Aggregation.sequence_sum), BNPO),
    "luspo_seq": (
        config(aggregation=Aggregation.sequence_sum, objective=clip(ratio="sequence_mean")),
        BNPO,
    ),
    "sapo": (config(aggregation=SEQUENCE, objective=build_objective("sapo")), BNPO),
    "vespo": (config(objective=build_objective("vespo")), DAPO),
    "cispo_epshigh5": (config(objective=build_objective("cispo", high=4.0)), DAPO),
    "cispo_epshigh1.2": (config(objective=build_objective("cispo", high=0.2)), DAPO),
    "gspo(grpo,seq,3e-4/4e-4)": (
        config(
            aggregation=SEQUENCE,
            objective=clip(ratio="sequence_mean", low=3e-4, high=4e-4),
        ),
        BNPO,
    ),
    "dapo_beta.1_bc": (config(kl={"beta": 0.1, "bias_correction": True}), DAPO),
    "dapo_beta.1_nobc": (config(kl={"beta": 0.1}), DAPO),
    "dapo_delta1.3": (config(objective=clip(dual=1.3, high=0.28)), DAPO),
    "dapo_onpolicy(old=None)": (config(), DAPO),
    "dapo_opsm-.2": (config(off_policy_threshold=-0.2), DAPO),
    "dapo_topent.5": (config(top_entropy=0.5), DAPO),
    "dapo_ent.01": (config(entropy={"bonus": 0.01}), BONUS),
    **{
        f"dapo_is_{level}_{mode}_{high}": (corrected(level, mode, high), DAPO)
        for level in ("token", "sequence")
        for mode in ("truncate", "mask")
        for high in (1.5, 1.05)
    },
    "vespo_is_token_mask_1.05": (
        corrected("token", "mask", 1.05, objective=build_objective("vespo")),
        DAPO,
    ),
}


def test_no_case_of_trl_is_left_out() -> None:
    assert set(golden.TRL) == {*CASES, "rloo"}


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_metrics_are_those_of_trl(name: str) -> None:
    settings, update = CASES[name]
    old = golden.NEW if "old=None" in name else golden.OLD
    loss, gradient, means = loss_and_gradient(batch(old=old), settings, update)
    expected_loss, expected_gradient, expected_means = golden.TRL[name]
    assert loss == pytest.approx(expected_loss, abs=1e-9)
    assert gradient.abs().sum().item() == pytest.approx(expected_gradient, abs=1e-9)
    assert gradient[1, 1:3].tolist() == [0.0, 0.0]  # the tool's tokens
    # TRL's metrics are in single precision
    shared = {key: means[key] for key in expected_means}
    assert shared == pytest.approx(expected_means, abs=1e-7)
    assert {key for key in means if "clip" in key or key == "kl"} <= set(expected_means)


def test_the_gradient_of_a_correction_is_constant() -> None:
    """The ratio trainer / engine weighs a token; it is not differentiated through."""
    settings, update = CASES["dapo_is_token_truncate_1.5"]
    _, gradient, _ = loss_and_gradient(batch(), settings, update)
    # rollout 0, token 0: r = exp(.1) is not clipped, A = 1, trainer / engine = exp(-.02):
    # -r A w / 24
    assert gradient[0, 0].item() == pytest.approx(-math.exp(0.1) * math.exp(-0.02) / 24, abs=1e-12)


def test_entropy_is_that_of_trl() -> None:
    total, count = mean_parts(golden.ENTROPY[MASK.bool()]).tolist()
    assert total / count == pytest.approx(1.0454545455, abs=1e-6)


def test_rloo_is_that_of_trl() -> None:
    """Without a tool mask (TRL's RLOO knows none), and without accumulation.

    TRL's fourth rollout, of no token at all, has ratio 1: a constant -1 x -2 / 4 = 0.5 in the loss.
    Ours has a sampled token in every rollout, and nowhere to put that constant.
    """
    settings = config(aggregation=SEQUENCE, objective=clip(ratio="sequence_sum"))
    whole = batch(mask=golden.COMPLETION_MASK)
    loss, gradient, means = loss_and_gradient(whole, settings, Update(tokens=13, rollouts=4))
    expected_loss, expected_gradient, expected_means = golden.TRL["rloo"]
    assert loss + 0.5 == pytest.approx(expected_loss, abs=1e-9)
    assert gradient.abs().sum().item() == pytest.approx(expected_gradient, abs=1e-9)
    # 1.2 and 2 of rollout 1, whose tool tokens TRL trains on
    assert gradient[1, 1:3].abs().sum().item() == pytest.approx(0.7144127795157914, abs=1e-9)
    assert means == pytest.approx(expected_means, abs=1e-9)


def test_rloo_leaves_the_tokens_of_tools_alone() -> None:
    settings = config(aggregation=SEQUENCE, objective=clip(ratio="sequence_sum", high=5.0))
    loss, gradient, _ = loss_and_gradient(batch(), settings, Update(tokens=11, rollouts=8))
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
