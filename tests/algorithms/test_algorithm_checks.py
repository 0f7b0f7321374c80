"""Settings of the algorithm that have no meaning together are refused, and only those.

The matrix holds both directions: a setting is refused where it would change nothing, and where it
is accepted it changes something.
"""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product
from pathlib import Path

import pytest
import torch
from loss_cases import config

from agenttrain.algorithms.config import (
    Advantage,
    AlgorithmConfig,
    Behaviour,
    CorrectionConfig,
    KlConfig,
    KlEstimator,
    KlPlace,
    Rewards,
    Scale,
)
from agenttrain.algorithms.loss import LossInputs, policy_loss
from agenttrain.algorithms.losses import token_weights
from agenttrain.algorithms.objectives.config import KEY, all_objectives, build_objective
from agenttrain.settings.checks import validate
from agenttrain.settings.run_config import RunConfig
from agenttrain.types import ConfigError
from agenttrain.utils.sections import plain, validated

# Two rollouts in which every bound is crossed on both sides.
BEHAVIOUR = torch.tensor([-1.0, -0.9, -0.5, -0.4, -1.2, -1.0, -0.6], dtype=torch.float64)
NEW = BEHAVIOUR + torch.tensor([0.4, -0.1, 0.05, -0.5, -0.4, 0.5, 0.15], dtype=torch.float64)
ENGINE = BEHAVIOUR - torch.tensor([1.2, -0.5, 0.1, 0.05, -0.8, 0.45, 0.02], dtype=torch.float64)
REF = NEW + torch.tensor([0.1, -0.2, 0.3, 0.0, -0.1, 0.2, 0.1], dtype=torch.float64)
ROW = torch.tensor([0, 0, 0, 0, 1, 1, 1])

CHANGED = {
    "kl": [
        {"estimator": KlEstimator.k2},
        {"bias_correction": True},
        {"beta": 0.2},
    ],
    "correction": [
        {"mode": "mask"},
        {"max": 1.1},
        {"min": 0.9},
    ],
}
"""Section -> changes of a key, each of which acts wherever the section is set."""
OF_OBJECTIVES = {
    "low": 0.05,
    "high": 0.05,
    "dual": 1.3,
    "tau_pos": 2.0,
    "tau_neg": 2.0,
    "k_pos": 2.5,
    "lambda_pos": 2.5,
    "k_neg": 2.5,
    "lambda_neg": 2.5,
    "ratio": "sequence_mean",
}
BASES = [
    config(objective=build_objective(name), kl={"beta": beta}, **correction)
    for name, beta, correction in product(
        all_objectives(),
        (0.0, 0.3),
        (
            {},
            {"behaviour": Behaviour.recomputed, "correction": {"level": "token"}},
            {"behaviour": Behaviour.recomputed, "correction": {"level": "sequence"}},
        ),
    )
]


def loss(settings: AlgorithmConfig) -> float:
    inputs = LossInputs(
        logprobs_S=NEW,
        behaviour_S=BEHAVIOUR,
        engine_S=ENGINE,
        ref_logprobs_S=REF,
        sequence_S=ROW,
        advantages_S=torch.tensor([1.5, -0.75], dtype=torch.float64)[ROW],
        weights_B=token_weights(
            torch.tensor([4, 3]), settings.aggregation, tokens=7, rollouts=2, fixed_length=8
        ),
    )
    return policy_loss(inputs, settings)[0].item()


def problems(**settings: object) -> str:
    """Return what is wrong with the settings, as a run is refused with it."""
    try:
        validated(AlgorithmConfig, {"name": "test", **settings}, "algorithm")
    except ConfigError as error:
        return str(error)
    return ""


def sections(settings: AlgorithmConfig) -> dict[str, object]:
    return {field.name: getattr(settings, field.name) for field in fields(settings)}


def name(settings: AlgorithmConfig) -> str:
    beta = settings.kl.beta if settings.kl else 0
    level = settings.correction.level if settings.correction else None
    return f"{settings.objective.name}-{beta}-{level}"


@pytest.mark.parametrize("base", BASES, ids=name)
def test_every_key_of_a_section_acts(base: AlgorithmConfig) -> None:
    for key, changes in CHANGED.items():
        if (section := getattr(base, key)) is None:
            continue
        for change in changes:
            changed = {**plain(section), **change}
            if problems(**{**sections(base), key: changed}):
                continue  # bias_correction without a ratio of tokens
            assert abs(loss(replace(base, **{key: changed})) - loss(base)) > 1e-9, change
    assert abs(loss(replace(base, off_policy_threshold=-0.5)) - loss(base)) > 1e-9


@pytest.mark.parametrize("base", BASES, ids=name)
def test_every_key_of_an_objective_acts_and_those_of_others_are_refused(
    base: AlgorithmConfig,
) -> None:
    section = dict(base.objective.section)
    for key, value in OF_OBJECTIVES.items():
        changed = {**section, key: value}
        if key in section:
            objective = build_objective(**changed)
            assert abs(loss(replace(base, objective=objective)) - loss(base)) > 1e-9, key
        else:
            text = problems(objective=changed)
            assert text.startswith(f"{KEY}.{key}={value}: no key of {section['name']}; ")
            assert "have it: algorithm/objective=" in text or " has it: " in text


def test_every_setting_of_the_loss_is_in_the_matrix() -> None:
    assert {key for change in CHANGED["kl"] for key in change} | {"place", "reference"} == {
        field.name for field in fields(KlConfig)
    }
    assert {key for change in CHANGED["correction"] for key in change} | {"level"} == {
        field.name for field in fields(CorrectionConfig)
    }
    keys = {field.name for one in all_objectives().values() for field in fields(one.settings)}
    assert keys == set(OF_OBJECTIVES)


GSPO = {"name": "clip", "ratio": "sequence_mean"}
BATCH = {"advantage": Advantage.batch, "scale": Scale.none}
EACH = {"rewards": Rewards.normalize_each}
TOKEN = {"behaviour": Behaviour.recomputed}
REFUSED = [
    ({"kl": {"place": KlPlace.reward}}, "there is no algorithm.kl without algorithm.kl.beta; add"),
    (
        {"kl": {"beta": 0.1, "reference": {"mixup": 0.5}}},
        "there is no algorithm.kl.reference without algorithm.kl.reference.sync_steps; add",
    ),
    (
        {"kl": {"beta": 0.1, "betta": 0.1}},
        "algorithm.kl.betta=0.1: unknown key (did you mean 'beta'?)",
    ),
    ({"kl": "k1"}, "algorithm.kl=k1: is algorithm.kl.estimator now"),
    ({"kl": 3}, "algorithm.kl=3: is algorithm.kl.estimator now"),
    (
        {"entropy": {"bonus": 0.1, "adaptive": {"step": 0.1}}},
        "there is no algorithm.entropy.adaptive without algorithm.entropy.adaptive.target; add",
    ),
    (
        {"entropy": {"adaptive": 0.1}},
        "is a section; set its keys with algorithm.entropy.adaptive.<key>",
    ),
    (
        {"correction": {"max": 3.0}},
        "there is no algorithm.correction without algorithm.correction.level; add",
    ),
    (
        {"credit": "gigpo"},
        "algorithm.credit=gigpo: is a section; choose one with algorithm/credit=",
    ),
    (
        {"behaviour": Behaviour.recomputed, "objective": {"name": "reinforce"}},
        "algorithm.behaviour=recomputed: has no effect",
    ),
    (
        {"kl": {"beta": 0.1, "bias_correction": True, "place": KlPlace.reward}},
        "set algorithm.kl.place=loss",
    ),
    ({"dynamic_sampling": 2, **BATCH}, "algorithm.dynamic_sampling=2: has no effect"),
    ({"oversample": 1.5, **BATCH}, "or algorithm.oversample=1.0, the default"),
    (
        {"dynamic_sampling": 2, "kl": {"beta": 0.1, "place": KlPlace.reward}},
        "algorithm.dynamic_sampling=2: groups are replaced by their rewards before the KL is known",
    ),
    (
        {"oversample": 1.5, "kl": {"beta": 0.1, "place": KlPlace.reward}},
        "set algorithm.kl.place=loss, or algorithm.oversample=1",
    ),
    ({"advantage": Advantage.batch}, "algorithm.scale=group: advantages over the mean"),
    ({"advantage": Advantage.leave_one_out}, "algorithm.scale=none or batch"),
    ({"group_size": 1}, "takes at least 2"),
    ({"group_size": 0, **BATCH}, "takes at least 1"),
    (EACH, "set algorithm.scale=batch"),
    (
        {**EACH, "scale": Scale.none, "advantage": Advantage.leave_one_out},
        "set algorithm.advantage=group",
    ),
    (
        {**EACH, "scale": Scale.batch, "kl": {"beta": 0.1, "place": KlPlace.reward}},
        "set algorithm.kl.place=loss",
    ),
    ({"objective": {"low": 1.0}}, "algorithm.objective.low=1.0: must be below 1"),
    ({"objective": {"low": -0.1}}, "algorithm.objective.low=-0.1: must be 0 or more"),
    ({"objective": {"high": -0.1}}, "algorithm.objective.high=-0.1: must be 0 or more"),
    ({"objective": {"dual": 1.1}}, "must be above 1 + algorithm.objective.high=1.2"),
    (
        {"objective": {"name": "reinforce"}, "num_epochs": 2},
        "algorithm.num_epochs=2: algorithm.objective=reinforce has no ratio",
    ),
    ({"objective": {"name": "reinforce"}, "minibatches": 2}, "only the first update"),
    ({"kl": {"beta": 0.1, "estimator": KlEstimator.k1}}, "algorithm.kl.bias_correction=true"),
    ({"kl": {"beta": 0.1, "estimator": KlEstimator.k2, "bias_correction": True}}, "would bias it"),
    (
        {"kl": {"beta": 0.1, "bias_correction": True}, "objective": GSPO},
        "set algorithm.objective.ratio=token",
    ),
    (
        {"entropy": {"bonus": 2.0, "adaptive": {"target": 1.0}}},
        "starts above algorithm.entropy.adaptive.max=1.0",
    ),
    ({"correction": {"level": "token"}}, "set algorithm.behaviour=recomputed"),
    (
        {**TOKEN, "correction": {"level": "token", "max": None}},
        "algorithm.correction.max=null: without a bound",
    ),
    (
        {**TOKEN, "correction": {"level": "token", "min": 3.0}},
        "must be below algorithm.correction.max=2.0",
    ),
    (
        {**TOKEN, "correction": {"level": "geometric"}, "objective": {"name": "vespo"}},
        "set algorithm.correction.level=token or sequence",
    ),
    (
        {**TOKEN, "correction": {"level": "token", "mode": "mask", "max": 0.5}},
        "algorithm.correction.max=0.5: must be at least 1, the ratio",
    ),
    (
        {**TOKEN, "correction": {"level": "token", "mode": "mask", "min": 1.5}},
        "algorithm.correction.min=1.5: must be at most 1, the ratio",
    ),
    (
        {**TOKEN, "correction": {"level": "token", "max": 0.0}},
        "correction.max=0.0: must be more than",
    ),
    ({"kl": {"beta": -0.1}}, "algorithm.kl.beta=-0.1: must be 0 or more"),
    (
        {"kl": {"beta": 0.1, "reference": {"sync_steps": 1, "mixup": 0.0}}},
        "algorithm.kl.reference.mixup=0.0: must be more than 0",
    ),
    ({"entropy": {"bonus": -0.1}}, "algorithm.entropy.bonus=-0.1: must be 0 or more"),
    (
        {"entropy": {"adaptive": {"target": -0.1, "step": 0.0}}},
        "algorithm.entropy.adaptive.target=-0.1: must be 0 or more",
    ),
    (
        {"entropy": {"adaptive": {"target": 0.1, "step": 0.0}}},
        "algorithm.entropy.adaptive.step=0.0: must be more than 0",
    ),
    (
        {"top_entropy": 0.5, "objective": GSPO},
        "algorithm.top_entropy=0.5: the gradient of algorithm.objective.ratio=sequence_mean reach",
    ),
    (
        {"top_entropy": 0.5, "objective": {"name": "geometric_mean"}},
        "algorithm.top_entropy=0.5: algorithm.objective=geometric_mean has one loss",
    ),
    *(
        ({key: value, **needed}, f"algorithm.{key}={value}: must be {wanted}")
        for key, value, wanted, needed in (
            ("num_epochs", 0, "at least 1", {}),
            ("minibatches", 0, "at least 1", {}),
            ("oversample", 0.5, "at least 1", {}),
            ("dynamic_sampling", -1, "0 or more", {}),
            ("top_entropy", 0.0, "more than 0", {}),
            ("top_entropy", 1.5, "at most 1", {}),
        )
    ),
]


@pytest.mark.parametrize(("settings", "expected"), REFUSED)
def test_refused(settings: dict, expected: str) -> None:
    assert expected in problems(**settings)


def test_a_synced_reference_needs_weights_of_its_own() -> None:
    settings = config(kl={"beta": 0.1, "reference": {"sync_steps": 512}})
    run = RunConfig(algorithm=settings)
    run.model.lora.rank = 8
    with pytest.raises(
        ConfigError, match=r"algorithm\.kl\.reference\.sync_steps=512: .* leave it out"
    ):
        validate(run)


ACCEPTED = [
    {"kl": {"beta": 0.1, "estimator": KlEstimator.k1, "place": KlPlace.reward}},
    {"kl": {"beta": 0.1, "estimator": KlEstimator.k1, "bias_correction": True}},
    {"kl": {"beta": 0.1, "reference": {"sync_steps": 3, "mixup": 1.0}}},
    {"entropy": {"adaptive": {"target": 1.0, "step": 0.1, "max": 0.5}}},
    {"behaviour": Behaviour.recomputed},
    {
        "behaviour": Behaviour.recomputed,
        "objective": {"name": "reinforce"},
        "correction": {"level": "geometric", "max": None, "min": 0.5},
    },
    {"group_size": 1, **BATCH},
    {**EACH, "scale": Scale.batch},
    {"dynamic_sampling": 2, "oversample": 1.5},
    {"top_entropy": 0.5, "objective": {"name": "cispo", "ratio": "sequence_mean"}},
    {"credit": {"name": "turn_reward"}, "objective": GSPO},
    {"top_entropy": 0.5, "objective": {"name": "vespo"}},
]


@pytest.mark.parametrize("settings", ACCEPTED)
def test_accepted(settings: dict) -> None:
    assert problems(**settings) == ""


def test_the_guide_names_every_preset() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "guides" / "algorithms.md").read_text()
    presets = {file.stem for file in (root / "conf" / "algorithm").glob("*.yaml")}
    assert {preset for preset in presets if f"`{preset}`" not in page} == set()
