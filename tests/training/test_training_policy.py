"""Optimizer updates on the tiny model: exactness, metrics, what is skipped, what is refused."""

from __future__ import annotations

import asyncio
import math
import re

import pytest
import tiny
import torch
from training_cases import advantage, policy, random_groups, rollout, weights, with_tool

from agenttrain.algorithms.config import (
    Advantage,
    Aggregation,
    Behaviour,
    KlEstimator,
    KlPlace,
    Scale,
)
from agenttrain.algorithms.credit import set_advantages
from agenttrain.algorithms.objectives.config import Ratio, build_objective
from agenttrain.trainer import train_policy
from agenttrain.training.config import Schedule, WeightSyncConfig, optimizer_settings
from agenttrain.training.nonfinite import BrokenUpdate
from agenttrain.training.optimizers import learning_rate
from agenttrain.training.policy import Policy
from agenttrain.training.weight_sync import StaleWeights, named_weights, policy_logprobs, sync
from agenttrain.types import Completion, Finish, Origin, StopReason

RLOO = {
    "advantage": Advantage.leave_one_out,
    "scale": Scale.none,
    "objective": build_objective("clip", ratio=Ratio.sequence_sum),
    "aggregation": Aggregation.sequence_mean,
}


def pair(better: int, worse: int, **settings: object):
    """A group of two that differ in one token: 9 <better> 2 has reward 1, 9 <worse> 2 has 0."""
    return [
        rollout(
            [(Origin.prompt, [7, 8, 9]), (Origin.sampled, [token, 2])],
            sample=sample,
            reward=float(token == better),
            **settings,
        )
        for sample, token in enumerate((better, worse))
    ]


@pytest.mark.parametrize(
    ("aggregation", "of_three", "of_one"),
    [
        # 6 sampled tokens of a rollout in three trajectories, and 2 of another one
        (Aggregation.token_mean, 1 / 8, 1 / 8),
        (Aggregation.sequence_mean, 1 / (2 * 6), 1 / (2 * 2)),
        (Aggregation.sequence_sum, 1 / 2, 1 / 2),
        (Aggregation.fixed_length, 1 / (2 * 64), 1 / (2 * 64)),
    ],
)
def test_a_rollout_weighs_the_same_in_however_many_trajectories(
    aggregation: Aggregation, of_three: float, of_one: float
) -> None:
    three, one = pair(40, 41)
    for ids in ((20, 2), (21, 2)):
        branch = three.branch(0, 3, role="summary")
        done = Completion(
            token_ids=ids, logprobs=(-1.0,) * 2, finish=Finish.stop, versions=((0, 2),)
        )
        branch.append_sampled(done, branch.token_ids)
    trained = policy(algorithm={"aggregation": aggregation})
    (sequences,) = trained.score([[three, one]])
    set_advantages(three, 1.0)
    set_advantages(one, -1.0)
    minibatch = trained.minibatch(sequences)
    weights_ = [(sequence.key, sequence.weight) for sequence in minibatch.sequences]
    assert weights_ == [
        *((("g0-0", index), pytest.approx(of_three)) for index in range(3)),
        (("g0-1", 0), pytest.approx(of_one)),
    ]


def on_policy(trained: Policy, groups: list) -> list:
    """The groups with the policy's own logprobs, as an engine would report them."""
    result = []
    for group in groups:
        result.append([])
        for one in group:
            (trajectory,) = one.trajectories
            ids = torch.tensor(trajectory.token_ids)
            with torch.no_grad():
                full = trained.model(ids[None]).logits[0].log_softmax(-1)
            again = rollout([], group=one.group_id, sample=one.sample, reward=one.reward)
            again.stop_reason = one.stop_reason
            position = 0
            (made,) = again.trajectories
            for span in trajectory.spans:
                end = position + len(span.token_ids)
                if span.origin is Origin.sampled:
                    logprobs = tuple(full[p - 1, ids[p]].item() for p in range(position, end))
                    made.spans.append(
                        type(span)(span.origin, span.token_ids, logprobs, span.turn, 0, span.finish)
                    )
                else:
                    made.spans.append(span)
                position = end
            made._ids, made.turns = trajectory.token_ids, trajectory.turns
            result[-1].append(again)
    return result


@pytest.mark.parametrize("algorithm", [{}, RLOO], ids=["grpo", "rloo"])
def test_the_better_answer_becomes_likelier(algorithm: dict) -> None:
    trained = policy(algorithm=algorithm, lr=5e-3)
    prompt = torch.tensor([[7, 8, 9]])

    def preference() -> float:
        logits = trained.model(prompt).logits[0, -1]
        return (logits[20] - logits[21]).item()

    before = preference()
    for _ in range(3):
        train_policy(trained, on_policy(trained, [pair(20, 21)]))
    assert preference() > before + 0.1
    assert trained.step == 3


@pytest.mark.parametrize("aggregation", Aggregation)
@pytest.mark.parametrize("ratio", Ratio)
def test_microbatches_do_not_change_the_update(aggregation: Aggregation, ratio: Ratio) -> None:
    algorithm = {
        "aggregation": aggregation,
        "objective": build_objective("clip", ratio=ratio),
        "kl": {"beta": 0.1},
    }
    groups = random_groups(1, groups=3)
    gradients, losses = [], []
    for token_budget in (10_000, 1):
        trained = policy(algorithm=algorithm, training={"token_budget": token_budget}, lr=0.0)
        captured: list = []
        trained.optimizer.optimizer.register_step_pre_hook(
            lambda *_, t=trained, c=captured: c.extend(p.grad.clone() for p in t.model.parameters())
        )
        losses.append(train_policy(trained, on_policy(trained, groups))["loss"])
        gradients.append(captured)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5, abs=1e-6)
    scale = max(g.abs().max().item() for g in gradients[0])
    assert scale > 0
    for whole, parts in zip(*gradients, strict=True):
        assert torch.allclose(whole, parts, atol=1e-5 * scale)


def test_same_rollouts_same_bits_in_any_order_of_arrival() -> None:
    first, second = policy(), policy()
    for seed in range(2):
        groups = random_groups(seed)
        metrics = train_policy(first, groups)
        again = train_policy(second, [list(reversed(group)) for group in random_groups(seed)])
        assert metrics == pytest.approx(again, rel=0, abs=0, nan_ok=True)
    for name, tensor in weights(first).items():
        assert torch.equal(tensor, weights(second)[name]), name


def test_what_the_environment_tells_accelerate_changes_no_update(monkeypatch) -> None:
    expected = train_policy(policy(), random_groups(0))["grad_norm"]
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert train_policy(policy(), random_groups(0))["grad_norm"] == expected


def test_metrics_of_an_update() -> None:
    trained = policy()
    metrics = train_policy(trained, on_policy(trained, [pair(20, 21)]))
    assert metrics["train/tokens"] == 4
    assert metrics["lr"] == 1e-3
    assert metrics["sampling/logprob_gap"] <= metrics["sampling/logprob_gap_max"] < 1e-5
    assert metrics["clip_ratio/region_mean"] == 0.0
    # a random model over its whole vocabulary
    assert metrics["entropy"] == pytest.approx(math.log(len(tiny.tokenizer())), rel=0.02)
    # rewards 1 and 0: advantages of both signs and one size, ratio 1: they cancel
    assert metrics["loss"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["grad_norm"] > 0


def test_the_gap_tells_the_engines_logprobs_from_the_trainers() -> None:
    trained = policy()
    groups = on_policy(trained, [pair(20, 21)])
    (trajectory,) = groups[0][0].trajectories
    span = trajectory.spans[1]
    shifted = (span.logprobs[0] - 0.5, span.logprobs[1])
    trajectory.spans[1] = type(span)(span.origin, span.token_ids, shifted, 0, 0, span.finish)
    metrics = train_policy(trained, groups)
    # one of four tokens is off by 0.5
    assert metrics["sampling/logprob_gap"] == pytest.approx(0.125, abs=1e-5)
    assert metrics["sampling/logprob_gap_max"] == pytest.approx(0.5, abs=1e-5)


@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"minibatches": 2},
        {"num_epochs": 2},
        {"num_epochs": 2, "behaviour": Behaviour.recomputed},
        {"top_entropy": 0.5},
    ],
    ids=str,
)
def test_rollouts_keep_what_the_trainer_computed(algorithm: dict) -> None:
    """With a learning rate of 0 they are the policy's own, whatever update computes them."""
    trained = policy(algorithm=algorithm, lr=0.0)
    groups = [[with_tool(sample=0, reward=1.0), with_tool(sample=1, reward=0.0)], pair(20, 21)]
    for one in groups[1]:
        one.reward, one.group_id = 0.5, "equal"
        one.rollout_id = f"equal-{one.sample}"
    train_policy(trained, groups)
    for one in groups[0]:
        ids = torch.tensor(one.trajectories[0].token_ids)
        full = trained.model(ids[None]).logits[0].log_softmax(-1)
        sampled = [p for p, mask in enumerate(one.trajectories[0].loss_mask) if mask]
        expected = [full[p - 1, ids[p]].item() for p in sampled]
        entropies = [-(full[p - 1].exp() * full[p - 1]).sum().item() for p in sampled]
        assert list(one.trajectories[0].trainer_logprobs) == pytest.approx(expected, abs=1e-5)
        assert list(one.trajectories[0].entropies) == pytest.approx(entropies, abs=1e-5)
    # a group of equal rewards is scored only where the algorithm asks for it
    asked = "behaviour" in algorithm or "top_entropy" in algorithm
    assert [one.trajectories[0].entropies is not None for one in groups[1]] == [asked] * 2


def test_advantages_are_set_and_none_without_a_reward() -> None:
    group = [with_tool(sample=i, reward=r) for i, r in enumerate([1.0, 0.0, None, 0.0])]
    train_policy(policy(algorithm={"scale": Scale.none}), [group])
    # the mean of 1, 0, 0 is 1/3
    assert [advantage(one) for one in group] == [
        pytest.approx(2 / 3),
        pytest.approx(-1 / 3),
        None,
        pytest.approx(-1 / 3),
    ]


def gradient_norm(groups: list, **settings: object) -> float:
    trained = policy(lr=0.0, **settings)
    return train_policy(trained, on_policy(trained, groups))["grad_norm"]


def test_groups_without_variance_count_in_the_normaliser() -> None:
    live = pair(20, 21)
    dead = [with_tool(group="g1", sample=i, reward=0.0) for i in range(2)]
    # 4 sampled tokens alone, 4 of 14 beside two rollouts of 5 tokens
    assert gradient_norm([live, dead]) == pytest.approx(gradient_norm([live]) * 4 / 14, rel=1e-4)
    assert train_policy(policy(), [live, dead])["train/tokens"] == 14


def test_a_step_without_variance_changes_nothing() -> None:
    trained = policy()
    train_policy(trained, [pair(20, 21)])  # so that the optimizer has momentum
    before = weights(trained)
    metrics = train_policy(trained, [[with_tool(sample=i, reward=0.0) for i in range(2)]])
    assert {name: value for name, value in metrics.items() if not math.isnan(value)} == {
        "loss": 0.0,
        "grad_norm": 0.0,
        "train/tokens": 0.0,
        "lr": 1e-3,
    }
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trained).items())
    assert train_policy(trained, []).keys() == metrics.keys()


@pytest.mark.parametrize(
    "algorithm", [{}, {"kl": {"beta": 0.1}}, {"kl": {"beta": 0.1, "place": KlPlace.reward}}]
)
def test_a_step_without_a_reward_has_the_columns_of_any_other(algorithm: dict) -> None:
    trained = policy(algorithm=algorithm)
    nothing = train_policy(trained, [[with_tool(sample=i, reward=None) for i in range(2)]])
    assert nothing.keys() == train_policy(trained, [pair(20, 21)]).keys()


def test_a_minibatch_without_a_reward_is_left_out() -> None:
    trained = policy(algorithm={"minibatches": 2})
    updates: list = []
    trained.optimizer.optimizer.register_step_post_hook(lambda *_: updates.append(1))
    unscored = [with_tool(group="g1", sample=i, reward=None) for i in range(2)]
    metrics = train_policy(trained, [unscored, pair(20, 21)])
    assert len(updates) == 1
    assert metrics["train/tokens"] == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_half_precision_without_a_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match=r"training\.mixed_precision=fp16.*bf16 or no"):
        policy(training={"mixed_precision": "fp16"})


def test_masked_truncated_rollouts_count_but_do_not_train() -> None:
    trained = policy(algorithm={"mask_truncated": True}, lr=0.0)
    (group,) = on_policy(trained, [pair(20, 21)])
    group[1].stop_reason = StopReason.max_tokens
    metrics = train_policy(trained, [group])
    assert metrics["train/tokens"] == 4
    assert advantage(group[0]) == -advantage(group[1])  # it is in the baseline
    # only the first has a loss: -A at each of its 2 tokens, over 4 tokens
    assert metrics["loss"] == pytest.approx(-advantage(group[0]) / 2, rel=1e-4)


def test_minibatches_and_epochs_are_optimizer_updates() -> None:
    trained = policy(algorithm={"minibatches": 2, "num_epochs": 3})
    updates: list = []
    trained.optimizer.optimizer.register_step_post_hook(lambda *_: updates.append(1))
    metrics = train_policy(trained, random_groups(0, groups=4))
    assert len(updates) == 6
    # sampled tokens of an update, on average: those of the step over 2
    tokens = sum(one.sampled_length for group in random_groups(0, groups=4) for one in group)
    assert metrics["train/tokens"] == tokens / 2
    assert trained.step == 1


def test_later_epochs_are_off_policy_and_clipped() -> None:
    trained = policy(algorithm={"num_epochs": 4}, lr=3e-2)
    metrics = train_policy(trained, on_policy(trained, random_groups(0)))
    assert metrics["clip_ratio/region_mean"] > 0
    assert metrics["sampling/logprob_gap_max"] < 1e-4  # measured before the first update


def test_kl_in_the_loss_pulls_to_the_frozen_reference() -> None:
    algorithm = {"kl": {"beta": 0.5, "estimator": KlEstimator.k3}}
    trained = policy(algorithm=algorithm, lr=1e-2)
    groups = random_groups(0)
    first = train_policy(trained, on_policy(trained, groups))
    assert first["kl"] == pytest.approx(0.0, abs=1e-9)
    second = train_policy(trained, on_policy(trained, groups))
    assert second["kl"] > 1e-6
    # without variance there is still a pull
    dead = [[with_tool(sample=i, reward=0.0) for i in range(2)]]
    assert train_policy(trained, on_policy(trained, dead))["grad_norm"] > 0


def test_kl_in_the_reward_is_taken_off_before_the_baseline() -> None:
    algorithm = {"kl": {"beta": 0.1, "estimator": KlEstimator.k1, "place": KlPlace.reward}, **RLOO}
    trained = policy(algorithm=algorithm, lr=1e-2)
    group = pair(20, 21)
    for one in group:
        one.reward = 1.0
    # the engine's logprobs are -5 each; k1 over a rollout's two tokens: -10 - sum(reference)
    penalties = []
    for one in group:
        ids = torch.tensor(one.trajectories[0].token_ids)
        full = trained.model(ids[None]).logits[0].log_softmax(-1)
        penalties.append(-10 - sum(full[p - 1, ids[p]].item() for p in (3, 4)))
    metrics = train_policy(trained, [group])
    assert metrics["kl"] == pytest.approx(sum(penalties) / 4, rel=1e-4)
    # leave-one-out of two: the difference of the penalised rewards
    assert advantage(group[0]) == pytest.approx(0.1 * (penalties[1] - penalties[0]), rel=1e-3)


@pytest.mark.parametrize("where", ["weight", "logprob"])
def test_what_is_not_finite_stops_before_the_update(where: str) -> None:
    trained = policy()
    if where == "weight":
        with torch.no_grad():
            trained.model.model.norm.weight[0] = math.nan
        groups = [pair(20, 21)]
    else:
        groups = [pair(20, 21, logprob=math.nan)]
    before = weights(trained)
    culprit = "weight model.norm.weight (1 of 32 values); rollout g0-0: the policy's logprob of"
    if where == "logprob":
        culprit = "rollout g0-0: the engine's logprob of token 3"
    with pytest.raises(BrokenUpdate, match=re.escape(f"(loss nan): {culprit}")):
        train_policy(trained, groups)
    for name, tensor in weights(trained).items():
        assert torch.equal(tensor.nan_to_num(), before[name].nan_to_num()), name


def test_a_broken_gradient_is_named() -> None:
    """The loss is finite; what comes back from it is not."""
    trained = policy()
    trained.model.model.norm.weight.register_hook(lambda gradient: gradient / 0)
    before = weights(trained)
    with pytest.raises(BrokenUpdate, match=r"rollout g0-0: its gradient of model\.norm\.weight"):
        train_policy(trained, [pair(20, 21)])
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trained).items())


def test_a_broken_reference_is_named() -> None:
    trained = policy(algorithm={"kl": {"beta": 0.1, "reference": {"sync_steps": 512}}})
    state = trained.state_dict()
    next(iter(state["reference"].values())).fill_(math.nan)
    trained.load_state_dict(state)
    with pytest.raises(BrokenUpdate, match="rollout g0-0: the reference's logprob of token 3"):
        train_policy(trained, [pair(20, 21)])


def test_gradients_are_clipped() -> None:
    """With momentum off, AdamW's second moment shows the gradient that it was given."""
    trained = policy(max_grad_norm=1e-3)
    assert train_policy(trained, on_policy(trained, [pair(20, 21)]))["grad_norm"] > 1e-2
    squares = sum(s["exp_avg_sq"].sum().item() for s in trained.optimizer.state.values())
    # exp_avg_sq = (1 - .99) g^2 after the first update
    assert math.sqrt(squares / 0.01) == pytest.approx(1e-3, rel=1e-3)


def test_mixed_precision_trains() -> None:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        trained = policy(training={"mixed_precision": "bf16"})
        metrics = train_policy(trained, on_policy(trained, [pair(20, 21)]))
        assert 0 < metrics["sampling/logprob_gap"] < 0.1
        assert metrics["grad_norm"] > 0
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_learning_rates() -> None:
    def rates(schedule: Schedule, warmup: int) -> list[float]:
        config = optimizer_settings(
            {"name": "adamw", "lr": 1.0, "warmup_steps": warmup, "schedule": schedule}
        )
        return [learning_rate(config, step, 6) for step in range(1, 7)]

    assert rates(Schedule.constant, 0) == [1.0] * 6
    assert rates(Schedule.constant, 4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates(Schedule.linear, 2) == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2])
    assert rates(Schedule.linear, 0) == pytest.approx([1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])
    # (1 + cos(pi k / 6)) / 2
    assert rates(Schedule.cosine, 0) == pytest.approx([1, 0.9330127, 0.75, 0.5, 0.25, 0.0669873])


class Recorder:
    """An engine that notes the weights it is given."""

    max_context = 8

    def __init__(self) -> None:
        self.updates: list = []

    async def update(self, weights: object, version: int) -> None:
        self.updates.append((dict(weights), version))


def test_sync_sends_nothing_to_an_engine_that_shares_the_module() -> None:
    engine = Recorder()
    asyncio.run(sync(policy(), engine, 7, WeightSyncConfig()))
    assert engine.updates == [({}, 7)]


class Copy:
    """An engine with a model of its own; `lost` is dropped on its way there."""

    max_context = 64
    takes_adapters = False

    def __init__(self, lost: str | None = None) -> None:
        self.model, self.lost = tiny.model(seed=1), lost

    async def update(self, weights, version: int) -> None:
        state = {name: tensor for name, tensor in weights if name != self.lost}
        self.model.load_state_dict(state, strict=self.lost is None)

    async def score(self, token_ids) -> list[float]:
        return policy_logprobs(self.model, token_ids)

    async def sleep(self) -> None:
        raise AssertionError("nothing rests here")


def test_sync_checks_that_an_engine_with_weights_of_its_own_holds_the_policys() -> None:
    trained = policy()
    with torch.no_grad():  # every weight differs from a new model's, the norms' ones too
        for parameter in trained.model.parameters():
            parameter.mul_(1 + 0.2 * torch.rand_like(parameter))
    engine = Copy()
    asyncio.run(sync(trained, engine, 7, WeightSyncConfig()))
    for name, tensor in trained.model.state_dict().items():
        assert torch.equal(tensor, engine.model.state_dict()[name])
    assert "lm_head.weight" in dict(named_weights(trained.model))  # tied, and sent all the same
    for name, _ in trained.model.named_parameters():
        if name == "model.embed_tokens.weight":
            continue  # tied: the head's name brings it
        with pytest.raises(StaleWeights, match=r"weight sync 8: .* weight_sync\.tolerance=0\.001"):
            asyncio.run(sync(trained, Copy(lost=name), 8, WeightSyncConfig()))


class Deaf(Copy):
    """An engine that takes no update but the first."""

    async def update(self, weights, version: int) -> None:
        if version == 0:
            await super().update(weights, version)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sync_notices_an_update_that_did_not_arrive_however_small(dtype: torch.dtype) -> None:
    """A step of a small learning rate stays below any tolerance that kernels need."""
    trained = policy()
    trained.model.to(dtype)

    async def steps(engine: Copy) -> None:
        engine.model.to(dtype)
        before = await sync(trained, engine, 0, WeightSyncConfig())
        same = await sync(trained, engine, 1, WeightSyncConfig(), before)  # a step without gradient
        with torch.no_grad():  # the least change of a weight in a hundred
            for parameter in trained.model.parameters():
                parameter.view(-1)[::100] *= 1.008 if dtype is torch.bfloat16 else 1.00001
        await sync(trained, engine, 2, WeightSyncConfig(), same)

    asyncio.run(steps(Copy()))
    with pytest.raises(StaleWeights, match=r"weight sync 2: .* moved by up to .* did not reach it"):
        asyncio.run(steps(Deaf()))
