"""Names of settings in saved runs and sweeps, and their names today."""

from __future__ import annotations

import pytest

from agenttrain.algorithms.config import AlgorithmConfig
from agenttrain.utils.moved import (
    RENAMED,
    in_this_layout,
    moved_key,
    overrides_in_this_layout,
)
from agenttrain.utils.sections import plain, validated

WRITTEN = {
    **{"name": "grpo", "credit": "rollout", "gamma": 1.0, "step_weight": 1.0, "beta": 0.0},
    **{"kl": "k3", "kl_in": "loss", "kl_bias_correction": False, "reference": "frozen"},
    **{"ref_sync_steps": 512, "ref_mixup": 0.6, "entropy_bonus": 0.0, "entropy_target": None},
    **{"entropy_bonus_step": 0.005, "entropy_bonus_max": 1.0, "behaviour": "recomputed"},
    **{"correction": "none", "correction_mode": "truncate", "correction_max": 2.0},
    **{"correction_min": None, "teacher": {"path": None, "weight": 1.0}},
}
"""The flat keys as a run without a KL, bonus, correction or credit per turn wrote them."""
NOTHING = {
    "kl": None,
    "entropy": {"bonus": 0.0, "adaptive": None},
    "correction": None,
    "credit": {"name": "rollout"},
    "teacher": None,
}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, {}),
        (
            {"beta": 0.1, "kl": "k2"},
            {
                "kl": {
                    **{"beta": 0.1, "estimator": "k2", "place": "loss", "bias_correction": False},
                    "reference": None,
                }
            },
        ),
        (
            {"beta": 0.1, "kl_in": "reward", "reference": "synced", "ref_sync_steps": 4},
            {
                "kl": {
                    **{"beta": 0.1, "estimator": "k3", "place": "reward"},
                    **{"bias_correction": False, "reference": {"sync_steps": 4, "mixup": 0.6}},
                }
            },
        ),
        (
            {"entropy_target": 0.5, "entropy_bonus": 0.1},
            {
                "entropy": {
                    "bonus": 0.1,
                    "adaptive": {"target": 0.5, "step": 0.005, "max": 1.0},
                }
            },
        ),
        (
            {"correction": "token", "correction_min": 0.5},
            {"correction": {"level": "token", "mode": "truncate", "max": 2.0, "min": 0.5}},
        ),
        (
            {"credit": "turn_reward", "gamma": 0.9},
            {"credit": {"name": "turn_reward", "gamma": 0.9}},
        ),
        (
            {"credit": "gigpo"},
            {"credit": {"name": "gigpo", "gamma": 1.0, "step_weight": 1.0}},
        ),
    ],
)
def test_the_flat_keys_of_a_saved_run_become_sections(changed: dict, expected: dict) -> None:
    settings = in_this_layout({"algorithm": {**WRITTEN, **changed}})["algorithm"]
    assert settings == {"name": "grpo", "behaviour": "recomputed", **NOTHING, **expected}
    config = validated(AlgorithmConfig, settings)
    assert {key: plain(getattr(config, key)) for key in NOTHING} == {**NOTHING, **expected}
    assert in_this_layout({"algorithm": settings})["algorithm"] == settings


def test_old_keys_have_their_new_names() -> None:
    assert moved_key("algorithm.beta=0.1") == "algorithm.kl.beta"
    assert moved_key("++algorithm.entropy_bonus=0.1") == "algorithm.entropy.bonus"
    assert moved_key("algorithm.credit=gigpo") == "algorithm/credit=gigpo"
    assert moved_key("algorithm.gamma (in algorithm/mine.yaml)") == "algorithm.credit.gamma"
    assert moved_key("algorithm.teacher.path=null") == "algorithm.teacher=null"
    assert moved_key("rollout.gamma") is None
    assert all(moved_key(key) == new for key, new in RENAMED.items())


def test_the_overrides_of_a_sweep_have_todays_keys() -> None:
    recorded = [
        *("seed=1", "algorithm.beta=0.04", "algorithm.kl=k1", "algorithm.kl_in=reward"),
        *("algorithm.reference=synced", "algorithm.correction=none", "algorithm.credit=gigpo"),
    ]
    assert overrides_in_this_layout(recorded) == [
        *("seed=1", "algorithm.kl.beta=0.04", "algorithm.kl.estimator=k1"),
        *("algorithm.kl.place=reward", "algorithm.kl.reference.sync_steps=512"),
        *("algorithm.correction=null", "algorithm/credit=gigpo"),
    ]
    synced = ["algorithm.ref_sync_steps=4", "algorithm.reference=synced"]
    assert overrides_in_this_layout(synced) == ["algorithm.kl.reference.sync_steps=4"]


@pytest.mark.parametrize(("flag", "level"), [(True, "all"), (False, "none")])
def test_gradient_checkpointing_is_a_level_today(flag: bool, level: str) -> None:
    saved = {"training": {"token_budget": 8, "gradient_checkpointing": flag}}
    today = {"training": {"token_budget": 8, "activation_checkpointing": level}}
    assert in_this_layout(saved) == today == in_this_layout(today)
    # YAML writes true, and so do people, in capitals too.
    for text in (str(flag), str(flag).lower()):
        word = f"training.gradient_checkpointing={text}"
        assert overrides_in_this_layout([word]) == [f"training.activation_checkpointing={level}"]
        assert moved_key(word) == f"training.activation_checkpointing={level}"
