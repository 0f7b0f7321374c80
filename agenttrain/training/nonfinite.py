"""Which rollout, or which weight, made an update that is not finite.

Each row of the update is run alone, forward and backward: what is not finite then is its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from agenttrain.training.batch import TrainingSequence, stand_in
from agenttrain.training.sharding import full_tensor, local_part
from agenttrain.training.world import World
from agenttrain.types import NotFinite, Rollout

Alone = Callable[[TrainingSequence], tuple[Tensor, Tensor]]
"""One row -> its loss, after the backward pass, and the policy's logprobs of it, [S]."""
NAMED = 4
"""Culprits that a message names."""


class BrokenUpdate(NotFinite):
    """A loss or gradient is not finite; the weights are still those before the update."""

    def __init__(
        self, message: str, culprits: Sequence[str], sequences: Sequence[TrainingSequence]
    ) -> None:
        """`sequences` are those of the update, to be run again."""
        super().__init__(message, stage="update", culprits=culprits)
        self.sequences = tuple(sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """A rollout, and its part that is not finite."""

    rollout_id: str
    what: str


def broken_weights(model: nn.Module) -> dict[str, str]:
    """Every parameter with values that are not finite, and how many: ``1 of 64 values``."""
    broken = {}
    for name, parameter in model.named_parameters():
        count = int((~local_part(parameter).isfinite()).sum())
        if count:
            broken[name] = f"{count} of {parameter.numel()} values"
    return broken


def check_weights(model: nn.Module, when: str, world: World | None = None) -> None:
    """Raise NotFinite on all processes, naming the weights, unless all are finite on each."""
    world = world or World()
    # Stacked, so that a GPU is waited for once and not for every parameter.
    finite = torch.stack(
        [local_part(parameter).isfinite().all() for parameter in model.parameters()]
    )
    if world.min(float(finite.all()), f"the weights {when}"):
        return
    # Where weights are sharded each process sees its part, and counts in that.
    broken = dict(world.gather(list(broken_weights(model).items()), "the names of broken weights"))
    where = _listed([f"{name} ({count})" for name, count in broken.items()])
    raise NotFinite(
        f"{when}: weights are not finite: {where}", stage="weights", culprits=tuple(broken)
    )


def check_logprobs(rollouts: Sequence[Rollout], world: World | None = None) -> None:
    """Raise NotFinite on all processes, naming rollout and position, unless all the engines'
    logprobs are finite."""
    world = world or World()
    positions = [
        (rollout.rollout_id, position)
        for rollout in rollouts
        for trajectory in rollout.trajectories
        if (position := _first_broken(trajectory.rollout_logprobs)) is not None
    ]
    shares = world.gather([(positions, len(rollouts))], "the check of the rollouts")
    broken = dict(pair for pairs, _ in shares for pair in pairs)
    if broken:
        where = _listed([f"{name} (token {position})" for name, position in broken.items()])
        total = sum(count for _, count in shares)
        raise NotFinite(
            f"the engine's logprob is not finite in {len(broken)} of {total} rollouts: "
            f"{where}. Look at the engine's dtype and at engine.name=transformers",
            stage="logprobs",
            culprits=tuple(broken),
        )


def culprits(
    sequences: Sequence[TrainingSequence],
    alone: Alone,
    model: nn.Module,
    world: World | None = None,
) -> list[Culprit]:
    """Run rows alone and return this process's that are not finite; clears gradients after each.

    Where weights are sharded all processes run every row of any together: one has the row, and the
    others one that stands in.
    """
    world = world or World()
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return [culprit for sequence in sequences if (culprit := _culprit(sequence, alone, model))]
    result = []
    for rank, count in enumerate(world.gather([len(sequences)], "the rows of a broken update")):
        for index in range(count):
            own = rank == world.rank
            culprit = _culprit(sequences[index] if own else stand_in(), alone, model)
            if own and culprit:
                result.append(culprit)
    return result


def _culprit(sequence: TrainingSequence, alone: Alone, model: nn.Module) -> Culprit | None:
    # Run whatever the inputs are, so that processes that run it together do the same.
    loss, logprobs_S = alone(sequence)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    finite = {n: bool(local_part(gradient).isfinite().all()) for n, gradient in gradients.items()}
    norm = full_tensor(nn.utils.get_total_norm(gradients.values()))
    model.zero_grad()

    # Inputs before outputs: a broken input breaks all that follows from it.
    problems = []
    if not math.isfinite(sequence.advantage):
        problems.append(f"its advantage is {sequence.advantage}")
    for name, values_S in (
        ("the engine's logprob", sequence.behaviour_S),
        ("the reference's logprob", sequence.ref_logprobs_S),
        ("the logprob before the step", sequence.old_logprobs_S),
        ("the policy's logprob", logprobs_S),
    ):
        index = None if values_S is None else _first_broken(values_S.tolist())
        if index is not None:
            problems.append(f"{name} of token {int(sequence.targets_S[index]) + 1}")
    if not loss.isfinite():
        problems.append(f"its loss is {loss.item():g}")
    problems += [f"its gradient of {name}" for name, is_finite in finite.items() if not is_finite]
    if not norm.isfinite():
        problems.append("the norm of its gradient")
    return Culprit(rollout_id=sequence.rollout.rollout_id, what=problems[0]) if problems else None


def describe_culprits(found: Sequence[Culprit], packed: Sequence[str]) -> str:
    """Name the culprits; `packed` are the rollouts to name when no rollout is broken alone."""
    if found:
        return _listed([f"rollout {culprit.rollout_id}: {culprit.what}" for culprit in found])
    return f"no rollout is by itself; they were {_listed(packed)}" if packed else ""


def _first_broken(values: Sequence[float]) -> int | None:
    return next((i for i, value in enumerate(values) if not math.isfinite(value)), None)


def _listed(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - NAMED} more" if len(texts) > NAMED else ""
    return ", ".join(texts[:NAMED]) + more
