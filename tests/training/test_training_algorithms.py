"""Algorithm settings on the tiny model: scoring passes, references, entropy, masks, presets."""

from __future__ import annotations

import math
import random
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from test_training_policy import on_policy, pair
from training_cases import advantage, policy, random_groups, rollout, weights, with_tool

from agenttrain.algorithms.config import (
    AlgorithmConfig,
    Behaviour,
    KlEstimator,
    KlPlace,
    Rewards,
    Scale,
)
from agenttrain.algorithms.losses import EntropyBonus
from agenttrain.algorithms.objectives.config import build_objective
from agenttrain.settings.compose import Source, compose_run, hydra_session
from agenttrain.trainer import train_policy
from agenttrain.training.config import SharePrefix
from agenttrain.training.policy import Policy
from agenttrain.types import Completion, Finish, Origin, Rollout, StopReason

RECOMPUTED = {"behaviour": Behaviour.recomputed}
TWO = [(Origin.prompt, [7]), (Origin.sampled, [20, 2]), (Origin.tool, [30]), (Origin.sampled, [2])]
"""Spans of two turns."""
KEYS = {field.name for field in fields(AlgorithmConfig)} - {"name"}
CONF = Path(__file__).parents[2] / "conf" / "algorithm"


def preset(name: str) -> dict:
    with hydra_session(Source()):
        settings = compose_run(["experiment=none", f"algorithm={name}"], Source()).config.algorithm
    return {key: value for key, value in vars(settings).items() if key in KEYS}


def captured(algorithm: dict, groups: list, **settings: object) -> tuple[list, dict]:
    """Gradients of the step's first update and its metrics; nothing moves."""
    trained = policy(algorithm=algorithm, lr=0.0, **settings)
    gradients: list = []

    def keep_first(*_: object) -> None:
        if not gradients:
            gradients.extend(p.grad.clone() for p in trained.model.parameters())

    trained.optimizer.optimizer.register_step_pre_hook(keep_first)
    metrics = train_policy(trained, groups)
    return gradients, metrics


def assert_equal(first: list, second: list) -> None:
    scale = max(gradient.abs().max().item() for gradient in first)
    assert scale > 0
    for one, other in zip(first, second, strict=True):
        assert torch.allclose(one, other, atol=1e-5 * scale)


@pytest.mark.parametrize("name", sorted(file.stem for file in CONF.glob("*.yaml")))
def test_every_preset_prefers_the_better_answer(name: str) -> None:
    trained = policy(algorithm=preset(name), lr=5e-3)

    def preference() -> float:
        logits = trained.model(torch.tensor([[7, 8, 9]])).logits[0, -1]
        return (logits[20] - logits[21]).item()

    before = preference()
    for _ in range(3):
        train_policy(trained, on_policy(trained, [pair(20, 21)]))
    assert preference() > before + 0.1


@pytest.mark.parametrize("name", ["gspo", "luspo", "rloo"])
def test_ratios_of_whole_rollouts_do_not_read_the_engines_rounding(name: str) -> None:
    """An engine in bfloat16 is off by some .02 per token: GSPO's clip of 3e-4 would take it all."""
    rng = random.Random(0)
    groups = on_policy(policy(), random_groups(0))
    for one in (each for group in groups for each in group):
        one.trajectories[0].spans = [
            span
            if span.logprobs is None
            else replace(span, logprobs=tuple(p + rng.gauss(0, 0.02) for p in span.logprobs))
            for span in one.trajectories[0].spans
        ]
    _, metrics = captured(preset(name), groups)
    assert metrics["sampling/logprob_gap"] == pytest.approx(0.016, abs=0.003)
    assert metrics["clip_ratio/region_mean"] == 0.0
    _, of_engine = captured({**preset(name), "behaviour": Behaviour.engine}, groups)
    assert (of_engine["clip_ratio/region_mean"] > 0.3) is (name != "rloo")  # 40 tokens: not yet


def cut_rollout(*, whole: bool) -> Rollout:
    """The ids 7 8 9 | 20 21 22 | 30 | 23 2: in one trajectory, or cut after the first sampled id.

    In both cases each sampled token follows the same ids.
    """
    parts = [(Origin.sampled, [20]), (Origin.sampled, [21, 22]), (Origin.tool, [30])]
    parts += [(Origin.sampled, [23, 2])]
    made = rollout([(Origin.prompt, [7, 8, 9]), *([] if not whole else parts)])
    if whole:
        return made
    made.trajectories[0].append_sampled(sampled(20), made.trajectories[0].token_ids)
    second = made.branch(0, 4)
    second.append_sampled(sampled(21, 22), second.token_ids)
    second.append_context([30], Origin.tool)
    third = made.branch(1, 7)
    third.append_sampled(sampled(23, 2), third.token_ids)
    return made


def sampled(*ids: int) -> Completion:
    return Completion(
        token_ids=ids, logprobs=(-5.0,) * len(ids), finish=Finish.stop, versions=((0, len(ids)),)
    )


@pytest.mark.parametrize("budget", [10_000, 1])
@pytest.mark.parametrize("name", ["rloo", "gspo", "luspo", "gmpo", "vespo", "grpo"])
def test_a_rollout_trains_the_same_however_it_is_cut(name: str, budget: int) -> None:
    """With `budget` 1 each trajectory is in a microbatch of its own."""
    algorithm = {**preset(name), "behaviour": Behaviour.recomputed}
    gradients = []
    for whole in (True, False):
        other = rollout([(Origin.prompt, [7, 8, 9]), (Origin.sampled, [24, 2])], sample=1, reward=0)
        groups = [[cut_rollout(whole=whole), other]]
        gradients.append(captured(algorithm, groups, training={"token_budget": budget})[0])
    assert_equal(*gradients)


EXTRAS = {
    "top_entropy": {"top_entropy": 0.5, "entropy": {"bonus": 0.1}},
    "correction": {
        **RECOMPUTED,
        "minibatches": 1,
        "correction": {"level": "sequence", "max": 1e9},
        "off_policy_threshold": 0.0,
    },
    "gmpo": {"objective": build_objective("geometric_mean")},
    "vespo": {"objective": build_objective("vespo"), "kl": {"beta": 0.1}},
}


@pytest.mark.parametrize("algorithm", EXTRAS.values(), ids=EXTRAS)
def test_microbatches_do_not_change_the_update(algorithm: dict) -> None:
    groups = random_groups(1, groups=3)
    whole, first = captured(algorithm, groups, training={"token_budget": 10_000})
    parts, second = captured(algorithm, groups, training={"token_budget": 1})
    assert_equal(whole, parts)
    assert first == {
        key: pytest.approx(value, rel=1e-3, nan_ok=True, abs=1e-5) for key, value in second.items()
    }


def test_recomputed_behaviour_forgets_the_engines_probabilities() -> None:
    """The engine's are -5.5 in one run and the policy's own in the other: the same update."""
    groups = random_groups(0)
    exact = on_policy(policy(), groups)
    expected, _ = captured({}, exact)
    found, metrics = captured(RECOMPUTED, groups)
    assert_equal(expected, found)
    assert metrics["clip_ratio/region_mean"] == 0.0
    # with several updates per step they are scored beforehand, to the same numbers
    scored, _ = captured({**RECOMPUTED, "num_epochs": 2}, groups)
    assert_equal(expected, scored)


def test_correction_weighs_by_trainer_over_engine() -> None:
    (group,) = on_policy(policy(), [pair(20, 21)])
    (trajectory,) = group[0].trajectories
    span = trajectory.spans[1]
    # the trainer finds the first token exp(.3) times as likely as the engine said
    shifted = (span.logprobs[0] - 0.3, span.logprobs[1])
    trajectory.spans[1] = type(span)(span.origin, span.token_ids, shifted, 0, 0, span.finish)
    _, metrics = captured(
        {
            **RECOMPUTED,
            "correction": {"level": "token", "mode": "mask", "max": 1.2},
        },
        [group],
    )
    # exp(.3) = 1.35 is masked: weights 0, 1, 1, 1
    assert metrics["mask/correction"] == pytest.approx(0.25)
    name = "sampling/importance_sampling_ratio"
    found = [metrics[f"{name}/{kind}"] for kind in ("min", "mean", "max")]
    assert found == pytest.approx([0.0, 0.75, 1.0], abs=1e-5)


def test_an_entropy_bonus_raises_the_entropy() -> None:
    dead = [[with_tool(sample=i, reward=0.0) for i in range(2)]]
    trained = policy(algorithm={"entropy": {"bonus": 1.0}}, lr=1e-2)
    with torch.no_grad():  # away from the uniform distribution
        trained.model.get_output_embeddings().weight.mul_(20)
    found = [train_policy(trained, dead)["entropy"] for _ in range(4)]
    assert found[-1] > found[0] + 0.1
    assert train_policy(trained, dead)["entropy_coef"] == 1.0
    # without a bonus, groups of equal rewards change nothing
    without = policy(lr=1e-2)
    before = weights(without)
    train_policy(without, dead)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(without).items())


def test_an_adaptive_bonus_follows_its_target() -> None:
    algorithm = {"entropy": {"bonus": 0.05, "adaptive": {"target": 1e9, "step": 0.02}}}
    below = policy(algorithm=algorithm, lr=0.0)
    coefficients = [train_policy(below, random_groups(0))["entropy_coef"] for _ in range(2)]
    assert coefficients == pytest.approx([0.07, 0.09])
    adaptive = {"target": 0.0, "step": 0.02}
    above = policy(algorithm={"entropy": {"bonus": 0.05, "adaptive": adaptive}}, lr=0.0)
    first, second, third, fourth = (train_policy(above, random_groups(0)) for _ in range(4))
    coefficients = [m["entropy_coef"] for m in (first, second, third, fourth)]
    assert coefficients == pytest.approx([0.03, 0.01, 0.0, 0.0])
    # the coefficient of the first update acted, and later ones were held back
    assert first["loss"] < second["loss"] == third["loss"]


def test_the_bonus_of_the_docstring() -> None:
    config = AlgorithmConfig(name="test", entropy={"adaptive": {"target": 1.0, "step": 0.01}})
    bonus = EntropyBonus(0.02)
    assert bonus.weight(config) == 0.02
    bonus.observe(0.8, config)
    assert (bonus.coefficient, bonus.weight(config)) == (pytest.approx(0.03),) * 2
    bonus.observe(1.2, config)
    assert (bonus.coefficient, bonus.weight(config)) == (pytest.approx(0.02), 0.0)


def test_top_entropy_masks_the_same_share_whatever_the_packing() -> None:
    for budget in (10_000, 1):
        _, metrics = captured(
            {"top_entropy": 0.25}, random_groups(0), training={"token_budget": budget}
        )
        # of an update's n tokens, those from position .75 (n - 1) on
        assert metrics["mask/top_entropy"] == pytest.approx(0.75, abs=0.02)


def alike(group: str) -> list:
    """Six rollouts that begin with the same eight sampled tokens: their entropies are equal."""
    rng = random.Random(group)
    spans = [
        (Origin.prompt, [7, 8, 9]),
        (Origin.sampled, [rng.randrange(7, 260) for _ in range(8)]),
    ]
    return [
        rollout(
            [*spans, (Origin.tool, [5, 6]), (Origin.sampled, [30 + sample] * (1 + 3 * sample))],
            group=group,
            sample=sample,
            reward=float(sample % 2),
        )
        for sample in range(6)
    ]


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_equal_entropies_are_not_told_apart_by_packing(share: float) -> None:
    groups = [alike("a"), alike("b")]
    first, metrics = captured({"top_entropy": share}, groups)
    tokens = sum(one.sampled_length for group in groups for one in group)
    masked = math.ceil((1 - share) * (tokens - 1)) / tokens
    assert metrics["mask/top_entropy"] == pytest.approx(masked)
    for training in ({"token_budget": 1}, {"share_prefix": SharePrefix.always}):
        other, metrics = captured({"top_entropy": share}, groups[::-1], training=training)
        assert metrics["mask/top_entropy"] == pytest.approx(masked)
        assert_equal(first, other)


def test_masked_truncated_rollouts_are_counted() -> None:
    (group,) = on_policy(policy(), [pair(20, 21)])
    group[1].stop_reason = StopReason.context_full
    summary = group[1].branch(0, 3, role="summary")  # a rollout counts once
    (sampled,) = group[1].trajectories[0].sampled_spans()
    summary.spans.append(sampled)
    summary._ids.extend(sampled.token_ids)
    _, metrics = captured({"mask_truncated": True}, [group])
    assert metrics["mask/truncated"] == 0.5


SYNCED = {"kl": {"beta": 0.1, "reference": {"sync_steps": 2, "mixup": 0.5}}}


def test_a_synced_reference_is_mixed_every_n_steps() -> None:
    trained = policy(algorithm=SYNCED, lr=1e-2)
    initial = weights(trained)

    def reference() -> dict:
        return {k: v.clone() for k, v in trained._reference.state_dict().items()}

    train_policy(trained, random_groups(0))
    assert all(torch.equal(v, initial[k]) for k, v in reference().items())
    train_policy(trained, random_groups(1))
    now = weights(trained)
    for name, tensor in reference().items():
        assert torch.allclose(tensor, (initial[name] + now[name]) / 2, atol=1e-7), name


@pytest.mark.parametrize(
    "algorithm",
    [SYNCED, {"entropy": {"bonus": 0.1, "adaptive": {"target": 1e9}}}],
    ids=["synced reference", "adaptive bonus"],
)
def test_a_resumed_policy_goes_on_to_the_same_bits(algorithm: dict, tmp_path: Path) -> None:
    whole = policy(algorithm=algorithm, lr=1e-2)
    for seed in range(3):
        train_policy(whole, random_groups(seed))
    torch.save(whole.state_dict(), tmp_path / "policy.pt")
    resumed: Policy = policy(algorithm=algorithm, lr=1e-2)
    resumed.model.load_state_dict(whole.model.state_dict())
    resumed.load_state_dict(torch.load(tmp_path / "policy.pt", weights_only=True))
    metrics = train_policy(resumed, random_groups(3))
    assert train_policy(whole, random_groups(3)) == pytest.approx(
        metrics, rel=0, abs=0, nan_ok=True
    )
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(resumed)[name]), name


def test_kl_in_the_reward_uses_the_recomputed_probabilities() -> None:
    """The engine says -5.5 for every token; the policy is its own reference, so the KL is 0."""
    algorithm = {
        **RECOMPUTED,
        "kl": {"beta": 0.1, "estimator": KlEstimator.k1, "place": KlPlace.reward},
    }
    assert train_policy(policy(algorithm=algorithm), random_groups(0))["kl"] == pytest.approx(
        0, abs=1e-6
    )


@pytest.mark.parametrize("other", [{}, {"top_entropy": 0.5}], ids=["alone", "top_entropy"])
def test_a_kl_in_the_reward_is_of_the_probabilities_that_behaviour_names(other: dict) -> None:
    """The engine is .3 nats below the policy at each token; the policy is its own reference."""
    settings = {"kl": {"beta": 0.1, "estimator": KlEstimator.k1, "place": KlPlace.reward}, **other}
    for behaviour, kl in ((Behaviour.engine, -0.3), (Behaviour.recomputed, 0.0)):
        trained = policy(algorithm={**settings, "behaviour": behaviour, "scale": Scale.none})
        (group,) = on_policy(trained, [alike("a")])
        for one in group:
            one.reward = 1.0
            one.trajectories[0].spans = [
                replace(span, logprobs=tuple(p - 0.3 for p in span.logprobs or ()))
                if span.logprobs
                else span
                for span in one.trajectories[0].spans
            ]
        assert train_policy(trained, [group])["kl"] == pytest.approx(kl, abs=1e-5)
        # 9 to 24 sampled tokens, 3 more each: a penalty of kl x tokens, less the group's mean
        expected = [-0.1 * kl * (9 + 3 * sample - 16.5) for sample in range(6)]
        assert [advantage(one) for one in group] == pytest.approx(expected, abs=1e-5)


def test_reward_functions_are_normalised_each() -> None:
    groups = [pair(20, 21)]
    for one, rewards in zip(groups[0], ({"f": 1.0, "g": 0.0}, {"f": 0.0, "g": 10.0}), strict=True):
        one.rewards, one.reward = dict(rewards), sum(rewards.values())
    algorithm = AlgorithmConfig(name="test", rewards=Rewards.normalize_each, scale=Scale.none)
    trained = policy(
        algorithm={"rewards": algorithm.rewards, "scale": algorithm.scale},
        reward_weights={"f": 1.0, "g": 0.5},
    )
    train_policy(trained, groups)
    # each is [1, -1] / sqrt 2, whatever g's factor of ten
    half = (1 - 0.5) / math.sqrt(2)
    assert [advantage(one) for one in groups[0]] == pytest.approx([half, -half], abs=1e-4)


@pytest.mark.parametrize(
    "algorithm",
    [
        {
            "objective": build_objective("cispo", high=0.2),
            "top_entropy": 0.5,
            "mask_truncated": True,
        },
        {
            "objective": build_objective("vespo"),
            "entropy": {"bonus": 0.1},
            "off_policy_threshold": 0.1,
        },
        {**RECOMPUTED, "correction": {"level": "geometric"}},
        {"objective": build_objective("geometric_mean"), "kl": {"beta": 0.1}},
        {"objective": build_objective("sapo")},
    ],
)
def test_every_step_has_the_same_columns(algorithm: dict) -> None:
    trained = policy(algorithm=algorithm)
    nothing = train_policy(trained, [[with_tool(sample=i, reward=None) for i in range(2)]])
    something = train_policy(trained, random_groups(0))
    assert nothing.keys() == something.keys()
    # It is the second update, and all tokens are of version 0.
    missing = {name for name, value in something.items() if math.isnan(value)}
    assert missing == {"sampling/logprob_gap_fresh", "sampling/logprob_gap_fresh_max"}


def test_a_reward_of_no_function_gives_no_advantage() -> None:
    """A rollout whose functions do not apply has none, though something else rewarded it."""
    groups = [pair(20, 21)]
    groups[0][0].rewards = {"f": None}
    groups[0][1].rewards = {"f": 1.0}
    trained = policy(algorithm={"rewards": Rewards.normalize_each, "scale": Scale.none})
    assert train_policy(trained, groups)["loss"] == 0.0
    assert [advantage(one) for one in groups[0]] == [None, 0.0]


def test_the_metrics_of_credit_per_turn_by_hand() -> None:
    """Rewards (1, 0) and (0, 0): returns 1, 0 against 0, 0, so turn 1 has +1 and -1, turn 2 zeros.

    The mean reward of the four turns is 1/4.
    """
    group = [rollout(TWO, sample=sample) for sample in range(2)]
    for one, scores in zip(group, ((1.0, 0.0), (0.0, 0.0)), strict=True):
        one.turn_scores, one.rewards = {"steps": scores}, {"steps": sum(scores)}
        one.reward = sum(scores)
        one.trajectories[0].states = ["start", f"{one.sample}"]
    per_turn = {"advantage": "leave_one_out", "scale": "none"}
    found = train_policy(
        policy(algorithm={"credit": {"name": "turn_baseline"}, **per_turn}), [group]
    )
    assert found["credit/turn_reward"] == 0.25
    variances = [found[f"credit/variance/turn_{turn}"] for turn in range(1, 9)]
    assert variances[:2] == [1.0, 0.0]
    assert all(math.isnan(variance) for variance in variances[2:])
    assert "credit/step_groups" not in found
    # Both began in one state, and their second turns in two.
    found = train_policy(policy(algorithm={"credit": {"name": "gigpo"}, **per_turn}), [group])
    assert found["credit/step_groups"] == 0.5
    # The rollout's +-1, and as much again among the first turns.
    variances = [found[f"credit/variance/turn_{turn}"] for turn in (1, 2)]
    assert variances == [4.0, 1.0]
