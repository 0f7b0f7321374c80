"""Advantages from a teacher's probabilities, by hand; and the settings that do not go with them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from agenttrain.algorithms.config import AlgorithmConfig, Gate, TeacherConfig
from agenttrain.algorithms.distillation import is_gated_in, mixed_advantages
from agenttrain.utils.sections import validated


def logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def test_both_parts_by_hand() -> None:
    config = TeacherConfig(path="t", weight=2.0, reward_weight=0.5)
    # policy 0.2 0.5 0.8, teacher 0.4 0.5 0.2: ln 2, 0, -ln 4
    mixed_S = mixed_advantages(
        torch.tensor([1.0, 1.0, -1.0]), logs(0.2, 0.5, 0.8), logs(0.4, 0.5, 0.2), config
    )
    expected = [0.5 + 2 * math.log(2), 0.5, -0.5 - 2 * math.log(4)]
    assert mixed_S.dtype is torch.float64
    assert mixed_S.tolist() == pytest.approx(expected, abs=1e-12)


def test_a_rollout_that_is_not_gated_in_keeps_the_rewards_part() -> None:
    config = TeacherConfig(path="t", reward_weight=0.5, gate=Gate.failed)
    mixed_S = mixed_advantages(
        torch.tensor([1.0, -3.0]), logs(0.2, 0.5), logs(0.4, 0.1), config, gated_in=False
    )
    assert mixed_S.tolist() == [0.5, -1.5]


def test_its_mean_over_samples_is_the_gradient_of_the_kl() -> None:
    """Over a whole vocabulary: sum p (log p - log q) grad log p, against autograd."""
    torch.manual_seed(0)
    logits_V = torch.randn(7, dtype=torch.float64, requires_grad=True)
    teacher_V = torch.randn(7, dtype=torch.float64).log_softmax(0)
    logprobs_V = logits_V.log_softmax(0)
    kl = (logprobs_V.exp() * (logprobs_V - teacher_V)).sum()
    (exact_V,) = torch.autograd.grad(kl, logits_V, retain_graph=True)
    advantages_V = mixed_advantages(
        torch.zeros(7), logprobs_V.detach(), teacher_V, TeacherConfig(path="t")
    )
    loss = -(logprobs_V.exp().detach() * advantages_V * logprobs_V).sum()
    (estimated_V,) = torch.autograd.grad(loss, logits_V)
    assert torch.allclose(estimated_V, exact_V, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("gate", "passing"),
    [
        (Gate.all, [0.0, 0.5, 0.7, 1.0]),
        (Gate.failed, [0.0, 0.5]),
        (Gate.succeeded, [0.7, 1.0]),
    ],
)
def test_the_gate_is_the_rollouts_reward(gate: Gate, passing: list[float]) -> None:
    config = TeacherConfig(path="t", gate=gate, success=0.7)
    assert [r for r in (0.0, 0.5, 0.7, 1.0) if is_gated_in(r, config)] == passing


def problems(**settings: Any) -> str:
    with pytest.raises(ValueError, match=r"algorithm\.") as caught:
        validated(AlgorithmConfig, {"name": "test", **settings}, "algorithm")
    return str(caught.value)


TEACHER = {"path": "bundled:shop"}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"teacher": {"weight": 2.0}},
            "algorithm.teacher.weight=2.0: there is no algorithm.teacher without "
            "algorithm.teacher.path; add algorithm.teacher.path=…",
        ),
        ({"teacher": {"path": None}}, "algorithm.teacher.path=null: is algorithm.teacher=null now"),
        (
            {"teacher": {**TEACHER, "success": 0.5}},
            "algorithm.teacher.success=0.5: has no effect here; it needs algorithm.teacher.gate=",
        ),
        ({"teacher": {**TEACHER, "weight": 0.0}}, "algorithm.teacher.weight=0.0: must be more"),
        ({"teacher": {**TEACHER, "reward_weight": -1.0}}, "must be 0 or more"),
        ({"teacher": {**TEACHER, "gate": "won"}}, "expected one of: all, failed, succeeded"),
        (
            {"teacher": TEACHER, "objective": {"name": "vespo"}},
            "algorithm.teacher.path=bundled:shop: algorithm.objective=vespo has one advantage",
        ),
        (
            {"teacher": TEACHER, "objective": {"name": "geometric_mean"}},
            "algorithm.teacher.path=bundled:shop: algorithm.objective=geometric_mean has one",
        ),
        (
            {"teacher": TEACHER, "off_policy_threshold": 0.1},
            "algorithm.off_policy_threshold=0.1: leaves out rollouts of negative advantage",
        ),
        (
            {"teacher": TEACHER, "dynamic_sampling": 2},
            "algorithm.dynamic_sampling=2: replaces groups of equal rewards, and with "
            "algorithm.teacher.path these teach as much as any; set algorithm.dynamic_sampling=0",
        ),
        ({"teacher": TEACHER, "oversample": 1.5}, "set algorithm.oversample=1"),
    ],
)
def test_what_has_no_meaning_with_a_teacher_is_refused(settings: dict, text: str) -> None:
    assert text in problems(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"objective": {"name": "reinforce"}, "behaviour": "recomputed"},
        {"objective": {"name": "cispo"}, "credit": {"name": "turn_baseline"}},
        {"top_entropy": 0.5, "entropy": {"bonus": 0.01}},
        {"kl": {"beta": 0.1, "place": "reward", "estimator": "k1"}, "num_epochs": 2},
        {"advantage": "none", "scale": "none", "group_size": 1},
        {"rewards": "normalize_each", "scale": "batch", "mask_truncated": True},
    ],
)
def test_what_goes_with_a_teacher(settings: dict) -> None:
    validated(AlgorithmConfig, {"name": "test", "teacher": TEACHER, **settings}, "algorithm")
