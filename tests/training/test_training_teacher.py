"""The teacher: what it reads, and what its probabilities do to an update."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import tiny
import torch
from accelerate import Accelerator
from torch import Tensor
from training_cases import policy, random_groups, rollout, weights, with_tool

from agenttrain.algorithms.config import Behaviour, Gate, TeacherConfig
from agenttrain.algorithms.objectives.config import build_objective
from agenttrain.trainer import train_policy
from agenttrain.training.batch import TrainingSequence, make_sequences
from agenttrain.training.config import SharePrefix, TrainingConfig
from agenttrain.training.logprobs import UnsupportedModel
from agenttrain.training.policy import Policy
from agenttrain.training.teacher_scores import ModelTeacher, PromptIds, TeacherFailed
from agenttrain.types import Completion, Finish, Origin, Rollout, Trajectory

TEACHER = TeacherConfig(path="bundled:shop")


def teacher(
    *,
    seed: int = 5,
    temperature: float = 0.7,
    prompt_ids: PromptIds | None = None,
    share: str = "auto",
    **model: object,
) -> ModelTeacher:
    return ModelTeacher(
        tiny.model(seed, **model),
        temperature=temperature,
        training=TrainingConfig(token_budget=60, share_prefix=SharePrefix(share)),
        accelerator=Accelerator(cpu=True),
        prompt_ids=prompt_ids,
    )


def by_hand(ids: Sequence[int], sampled: Sequence[int], *, seed: int = 5) -> list[float]:
    """The logprobs of the ids at `sampled`, from one forward pass in float64."""
    model = tiny.model(seed).double()
    with torch.no_grad():
        logits_TV = model(input_ids=torch.tensor([ids])).logits[0] / 0.7
    logprobs_TV = logits_TV.log_softmax(-1)
    return [logprobs_TV[at - 1, ids[at]].item() for at in sampled]


def scores(one: Rollout, by: ModelTeacher) -> list[list[float]]:
    found = by.score(make_sequences(one))
    return [found[one.rollout_id, t.index].tolist() for t in one.trajectories]


def sampled(trajectory: Trajectory, ids: list[int]) -> None:
    completion = Completion(
        token_ids=tuple(ids),
        logprobs=(-5.0,) * len(ids),
        finish=Finish.stop,
        versions=((0, len(ids)),),
    )
    trajectory.append_sampled(completion, trajectory.token_ids)


def test_it_scores_the_sampled_tokens_tools_replies_included() -> None:
    # 7 8 9 10 | 20 21 2 | 30 31 40 41 42 30 3 | 22 2
    ids = [7, 8, 9, 10, 20, 21, 2, 30, 31, 40, 41, 42, 30, 3, 22, 2]
    (found,) = scores(with_tool(), teacher())
    assert found == pytest.approx(by_hand(ids, [4, 5, 6, 14, 15]), abs=1e-5)


def test_its_own_prompt_stands_in_place_of_the_policys() -> None:
    asked = []

    def longer(one: Rollout, trajectory: Trajectory) -> list[int]:
        asked.append((one.rollout_id, trajectory.index))
        return [7, 50, 51, 52, 10]

    # 7 50 51 52 10 | 20 21 2 | 30 31 40 41 42 30 3 | 22 2
    ids = [7, 50, 51, 52, 10, 20, 21, 2, 30, 31, 40, 41, 42, 30, 3, 22, 2]
    (found,) = scores(with_tool(), teacher(prompt_ids=longer))
    assert found == pytest.approx(by_hand(ids, [5, 6, 7, 15, 16]), abs=1e-5)
    assert asked == [("g0-0", 0)]


def test_a_trajectory_that_branches_has_the_teachers_prompt_too() -> None:
    one = with_tool()
    late = one.branch(0, 6)  # 7 8 9 10 20 21
    sampled(late, [60, 2])
    early = one.branch(0, 3)  # 7 8 9: only a part of the prompt
    sampled(early, [61, 2])
    helper = Trajectory(rollout_id=one.rollout_id, index=3, role="helper")  # a sub-agent's
    helper.append_context([70, 71], Origin.prompt)
    one.trajectories.append(helper)
    sampled(helper, [62, 2])

    found = scores(one, teacher(prompt_ids=lambda one, trajectory: [7, 50], share="always"))
    assert found[1] == pytest.approx(by_hand([7, 50, 20, 21, 60, 2], [4, 5]), abs=1e-5)
    assert found[2] == pytest.approx(by_hand([7, 8, 9, 61, 2], [3, 4]), abs=1e-5)
    assert found[3] == pytest.approx(by_hand([70, 71, 62, 2], [2, 3]), abs=1e-5)


def test_a_packed_teacher_scores_as_one_by_one() -> None:
    """With prefixes shared among rollouts of equal prompts, and among those of unequal ones."""
    (group,) = random_groups(3, groups=1, size=5)
    by = teacher(prompt_ids=lambda one, _: [7, 8, 9, 40 + one.sample // 3], share="always")
    sequences = [sequence for one in group for sequence in make_sequences(one)]
    together = by.score(sequences)
    assert len(together) == 5
    for sequence in sequences:
        alone = by.score([sequence])[sequence.key]
        assert together[sequence.key].tolist() == pytest.approx(alone.tolist(), abs=1e-5)


def test_a_teacher_with_a_head_that_is_not_known_is_named() -> None:
    model = tiny.model(5)

    class Louder(type(model)):  # type: ignore[misc]
        def forward(self, *args: object, **settings: object) -> object:
            output = super().forward(*args, **settings)
            output.logits = 2 * output.logits
            return output

    model.__class__ = Louder
    problem = r"^algorithm.teacher.path: Louder changes its logits .* Choose another model\.$"
    with pytest.raises(UnsupportedModel, match=problem):
        ModelTeacher(
            model,
            temperature=1.0,
            training=TrainingConfig(),
            accelerator=Accelerator(cpu=True),
        )


def test_too_long_for_the_teacher_is_left_out() -> None:
    assert teacher(max_position_embeddings=15).score(make_sequences(with_tool())) == {}
    assert len(teacher(max_position_embeddings=16).score(make_sequences(with_tool()))) == 1


class Recorded:
    """A teacher of literal probabilities: those of a rollout id, or none."""

    def __init__(self, scores: dict[str, list[float]]) -> None:
        self.scores = scores

    def score(self, sequences: Sequence[TrainingSequence]) -> dict[tuple[str, int], Tensor]:
        return {
            one.key: torch.tensor(self.scores[one.rollout.rollout_id])
            for one in sequences
            if one.rollout.rollout_id in self.scores
        }


def pair() -> list[Rollout]:
    """Two rollouts of two sampled tokens each, with logprobs of -1; one has a reward."""
    return [
        rollout(
            [(Origin.prompt, [7, 8]), (Origin.sampled, [20 + sample, 2])],
            sample=sample,
            reward=float(sample),
            logprob=-1.0,
        )
        for sample in range(2)
    ]


def learned(settings: TeacherConfig, **algorithm: object) -> tuple[list[Rollout], dict]:
    group = pair()
    by = Recorded({"g0-0": [-1.5, -0.5], "g0-1": [-1.0, -3.0]})
    trained = policy(algorithm={"teacher": settings, "scale": "none", **algorithm})
    return group, train_policy(trained, [group], by)


def advantages(group: list[Rollout]) -> list[list[float] | None]:
    each = [one.trajectories[0].advantages for one in group]
    return [None if values is None else values.tolist() for values in each]


def test_advantages_are_the_rewards_plus_the_teachers() -> None:
    # rewards 0, 1: -0.5, 0.5; teacher - policy: -0.5 0.5 and 0 -2
    group, metrics = learned(TeacherConfig(path="t", weight=0.5, reward_weight=2.0))
    assert advantages(group) == [[-1.25, -0.75], [1.0, 0.0]]
    assert metrics["teacher/kl"] == pytest.approx((0.5 - 0.5 + 0 + 2) / 4)
    assert metrics["teacher/gated_in"] == 1.0
    assert metrics["teacher/too_long"] == 0.0


def test_the_teacher_alone() -> None:
    group, _ = learned(TeacherConfig(path="t", reward_weight=0.0))
    assert advantages(group) == [[-0.5, 0.5], [0.0, -2.0]]


def test_only_failed_rollouts_learn_from_the_teacher() -> None:
    group, metrics = learned(TeacherConfig(path="t", gate=Gate.failed))
    assert advantages(group) == [[-1.0, 0.0], [0.5, 0.5]]
    assert metrics["teacher/gated_in"] == 0.5
    assert metrics["teacher/kl"] == pytest.approx(0.5)  # of all rollouts


def test_with_credit_per_turn_each_turn_has_its_own_beside() -> None:
    group, _ = learned(TeacherConfig(path="t"), credit={"name": "turn_reward"})
    assert advantages(group) == [[-1.0, 0.0], [0.5, -1.5]]


def test_a_group_of_equal_rewards_learns_from_the_teacher() -> None:
    group = pair()
    group[0].reward = group[1].reward = 1.0
    by = Recorded({"g0-0": [-1.5, -0.5], "g0-1": [-1.0, -1.0]})
    trained = policy(algorithm={"teacher": TEACHER}, name="sgd", lr=0.1)
    before = weights(trained)
    metrics = train_policy(trained, [group], by)
    assert metrics["grad_norm"] > 0
    after = weights(trained)
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_a_rollout_without_a_reward_is_not_scored_and_not_trained() -> None:
    group = pair()
    group[0].reward = None
    by = Recorded({"g0-1": [-1.0, -3.0]})  # the other one would be too long
    metrics = train_policy(policy(algorithm={"teacher": TEACHER}), [group], by)
    assert advantages(group) == [None, [0.0, -2.0]]
    assert metrics["teacher/too_long"] == 0.0


def test_a_rollout_too_long_for_the_teacher_is_no_zero() -> None:
    group = pair()
    metrics = train_policy(
        policy(algorithm={"teacher": TEACHER, "scale": "none"}),
        [group],
        Recorded({"g0-1": [-1.0, -3.0]}),
    )
    assert advantages(group) == [None, [0.5, -1.5]]
    assert metrics["teacher/too_long"] == 0.5
    assert metrics["train/tokens"] == 2


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_broken_probabilities_end_the_run_and_change_no_weight(value: float) -> None:
    group, trained = pair(), policy(algorithm={"teacher": TEACHER})
    before = weights(trained)
    by = Recorded({"g0-0": [-1.5, -0.5], "g0-1": [-1.0, value]})
    with pytest.raises(TeacherFailed, match=r"rollout g0-1 trajectory 0: .* not finite; check"):
        train_policy(trained, [group], by)
    after = weights(trained)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_trainers_own_probabilities_where_the_algorithm_takes_those() -> None:
    group = pair()
    trained = policy(
        algorithm={
            "teacher": TeacherConfig(path="t", reward_weight=0.0),
            "behaviour": Behaviour.recomputed,
        }
    )
    own = trained.logprobs(group)
    train_policy(trained, [group], Recorded({"g0-0": [-1.5, -0.5], "g0-1": [-1.0, -3.0]}))
    expected = [-1.5 - own["g0-0", 0][0].item(), -0.5 - own["g0-0", 0][1].item()]
    assert advantages(group)[0] == pytest.approx(expected, abs=1e-6)


def test_the_update_of_one_token_by_hand() -> None:
    """One sequence, the teacher alone: the gradient is that of sum A log p over 2 tokens."""
    one = pair()[1]
    settings = TeacherConfig(path="t", reward_weight=0.0)
    trained = policy(
        tiny.model().double(),
        algorithm={
            "teacher": settings,
            "objective": build_objective("reinforce"),
            "group_size": 1,
            "advantage": "none",
            "scale": "none",
        },
        name="sgd",
        lr=0.25,
        max_grad_norm=1e9,
    )
    before = weights(trained)
    train_policy(trained, [[one]], Recorded({"g0-1": [-1.25, -3.0]}))
    model = tiny.model().double()
    logprobs_TV = model(input_ids=torch.tensor([[7, 8, 21, 2]])).logits[0].log_softmax(-1)
    # A = -0.25, -2; the mean over the update's 2 tokens
    (-(-0.25 * logprobs_TV[1, 21] + -2.0 * logprobs_TV[2, 2]) / 2).backward()
    after = weights(trained)
    for name, parameter in model.named_parameters():
        moved = before[name] - 0.25 * parameter.grad
        assert torch.allclose(after[name], moved, rtol=0, atol=1e-7), name


def test_learning_from_a_model_lowers_its_kl() -> None:
    trained = policy(algorithm={"teacher": TeacherConfig(path="t", reward_weight=0.0)}, lr=3e-3)
    by, noise = teacher(seed=9, temperature=1.0), torch.Generator().manual_seed(0)
    kls = [train_policy(trained, [drawn(trained, noise)], by)["teacher/kl"] for _ in range(8)]
    assert sum(kls[-3:]) < 0.8 * sum(kls[:3])


def drawn(trained: Policy, noise: torch.Generator) -> list[Rollout]:
    """Sixteen rollouts of ten tokens of the policy, after a prompt of two."""
    ids_BT = torch.tensor([[7, 8]] * 16)
    logprobs_BT = torch.zeros(16, 0)
    for _ in range(10):
        with torch.no_grad():
            logprobs_BV = trained.model(input_ids=ids_BT).logits[:, -1].log_softmax(-1)
        tokens_B1 = torch.multinomial(logprobs_BV.exp(), 1, generator=noise)
        ids_BT = torch.cat([ids_BT, tokens_B1], 1)
        logprobs_BT = torch.cat([logprobs_BT, logprobs_BV.gather(1, tokens_B1)], 1)
    group = []
    for sample, (ids, logprobs) in enumerate(zip(ids_BT.tolist(), logprobs_BT, strict=True)):
        one = rollout([(Origin.prompt, ids[:2])], sample=sample)
        completion = Completion(
            token_ids=tuple(ids[2:]),
            logprobs=tuple(logprobs.tolist()),
            finish=Finish.length,
            versions=((0, 10),),
        )
        one.trajectories[0].append_sampled(completion, ids[:2])
        group.append(one)
    return group
