"""Rollouts of literal ids and policies over the tiny model, for the tests of training."""

from __future__ import annotations

import random

import tiny
import torch

from agenttrain.algorithms.config import AlgorithmConfig
from agenttrain.training.batch import Microbatch, TrainingSequence, make_sequences, pack
from agenttrain.training.config import TrainingConfig, optimizer_settings
from agenttrain.training.policy import Policy
from agenttrain.types import Completion, Finish, Origin, Rollout, StopReason, Task

torch.set_num_threads(1)  # small tensors; more threads only wait for each other

TASK = Task(task_id="t", messages=({"role": "user", "content": "?"},))


def advantage(rollout: Rollout) -> float | None:
    """The advantage that all sampled tokens of its one trajectory share; None without any."""
    (trajectory,) = rollout.trajectories
    if trajectory.advantages is None:
        return None
    (shared,) = set(trajectory.advantages)
    return shared


def rollout(
    spans: list[tuple[Origin, list[int]]],
    *,
    group: str = "g0",
    sample: int = 0,
    reward: float | None = 1.0,
    logprob: float = -5.0,
    stop_reason: StopReason = StopReason.completed,
) -> Rollout:
    """A rollout of these spans; every sampled token has the same logprob."""
    grown = Rollout(
        task=TASK, rollout_id=f"{group}-{sample}", group_id=group, sample=sample, reward=reward
    )
    (trajectory,) = grown.trajectories
    for origin, ids in spans:
        if origin is Origin.sampled:
            completion = Completion(
                token_ids=tuple(ids),
                logprobs=(logprob,) * len(ids),
                finish=Finish.stop,
                versions=((0, len(ids)),),
            )
            trajectory.append_sampled(completion, trajectory.token_ids)
        else:
            trajectory.append_context(ids, origin)
    grown.stop_reason = stop_reason
    return grown


def with_tool(**settings: object) -> Rollout:
    """Two turns with a tool's reply between them.

    ids   7 8 9 10  20 21 2  30 31   40 41 42  30 3   22 2
          prompt    sampled  glue    tool      glue   sampled
    """
    return rollout(
        [
            (Origin.prompt, [7, 8, 9, 10]),
            (Origin.sampled, [20, 21, 2]),
            (Origin.template, [30, 31]),
            (Origin.tool, [40, 41, 42]),
            (Origin.template, [30, 3]),
            (Origin.sampled, [22, 2]),
        ],
        **settings,
    )


def one_microbatch(*sequences: Rollout | TrainingSequence) -> Microbatch:
    """Rollouts packed together, none of whose prompts is shared."""
    made = [
        make_sequences(sequence)[0] if isinstance(sequence, Rollout) else sequence
        for sequence in sequences
    ]
    (microbatch,) = pack(made, 10_000, torch.device("cpu"))
    return microbatch


def random_groups(seed: int, groups: int = 2, size: int = 4, longest: int = 30) -> list[list]:
    """Groups of rollouts of random ids and lengths, with a tool's reply in each."""
    rng = random.Random(seed)

    def ids(low: int, high: int) -> list[int]:
        return [rng.randrange(7, 260) for _ in range(rng.randint(low, high))]

    def one(group: int, sample: int) -> Rollout:
        spans = [
            (Origin.prompt, ids(2, longest)),
            (Origin.sampled, ids(1, longest)),
            (Origin.tool, ids(1, 6)),
            (Origin.sampled, ids(1, 5)),
        ]
        return rollout(
            spans,
            group=f"g{group}",
            sample=sample,
            reward=float(sample % 2 or rng.random() < 0.3),
            logprob=-5.5,
        )

    return [[one(group, sample) for sample in range(size)] for group in range(groups)]


def policy(
    model: torch.nn.Module | None = None,
    *,
    algorithm: dict | None = None,
    training: dict | None = None,
    temperature: float = 1.0,
    reward_weights: dict[str, float] | None = None,
    processes: dict | None = None,
    **optimizer: object,
) -> Policy:
    """A policy over the tiny model; `processes` are its `world`, `sharding` and `sampled`."""
    lr = optimizer.pop("lr", 1e-3)
    settings = optimizer_settings({"name": "adamw", **optimizer})
    settings.lr = lr  # a run cannot have 0; here it shows an update without a change
    return Policy(
        model if model is not None else tiny.model(),
        algorithm=AlgorithmConfig(name="test", **(algorithm or {})),
        optimizer=settings,
        training=TrainingConfig(**(training or {})),
        temperature=temperature,
        max_completion_tokens=64,
        steps=10,
        reward_weights=reward_weights,
        **(processes or {}),
    )


def weights(trained: Policy) -> dict[str, torch.Tensor]:
    """A copy of the policy's weights."""
    return {name: tensor.clone() for name, tensor in trained.model.state_dict().items()}
