"""Find the rollout or the weight that made an update non-finite.

Each sequence of the update is run alone, forward and backward. A number that is not finite in such
a pass was caused by that sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from agenttrain.engines.registry import names_with
from agenttrain.training.batch import TrainingSequence, stand_in
from agenttrain.training.sharding import full_tensor, is_sharded, local_part
from agenttrain.training.world import World
from agenttrain.types import AgenttrainError, Rollout, Trajectory
from agenttrain.utils.names import list_names

RunAlone = Callable[[TrainingSequence], tuple[Tensor, Tensor]]
"""Runs one sequence forward and backward. Returns its loss and the policy's logprobs, [S]."""


class NotFinite(AgenttrainError):
    """A number that training depends on is NaN or infinite. No weight was updated with it."""

    def __init__(self, message: str, *, stage: str, culprits: Sequence[str] = ()) -> None:
        """`culprits`: ids of rollouts. In the stage `weights`: names of parameters."""
        super().__init__(message)
        self.stage = stage
        self.culprits = tuple(culprits)


class BrokenUpdate(NotFinite):
    """A loss or gradient is not finite. The weights are still those from before the update."""

    def __init__(
        self, message: str, culprits: Sequence[str], sequences: Sequence[TrainingSequence]
    ) -> None:
        """`sequences` are those of the update, to be run again."""
        super().__init__(message, stage="update", culprits=culprits)
        self.sequences = tuple(sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """A rollout, and its first number that is not finite."""

    rollout_id: str
    place: str
    """`place_of` its trajectory, such as ``<rollout_id> trajectory 1``."""
    what: str
    """The number, such as ``its advantage is nan``."""


def place_of(rollout: Rollout, trajectory: Trajectory) -> str:
    """Return the rollout's id, followed by ``trajectory 1`` if it has several."""
    place = rollout.rollout_id
    return place if len(rollout.trajectories) == 1 else f"{place} trajectory {trajectory.index}"


def broken_weights(model: nn.Module) -> dict[str, str]:
    """Return the parameters with non-finite values, each with their count: ``1 of 64 values``."""
    broken = {}
    for name, parameter in model.named_parameters():
        count = int((~local_part(parameter).isfinite()).sum())
        if count:
            broken[name] = f"{count} of {parameter.numel()} values"
    return broken


def check_weights(model: nn.Module, when: str, world: World | None = None) -> None:
    """Raise NotFinite in all processes, naming the weights, unless all weights are finite.

    All processes call this together. `world.gather` joins their lists, so that all of them see the
    same flags and names, and either all return or all raise.
    """
    world = world or World()
    # Stacked: one wait for the GPU instead of one per parameter.
    finite_flags = torch.stack(
        [_all_finite(local_part(parameter)) for parameter in model.parameters()]
    )
    if all(world.gather([bool(finite_flags.all())], f"the weights {when}")):
        return
    # The joined list may name a sharded weight once for each process whose part has such values.
    # The dictionary keeps the last: the message has the count of that part alone.
    broken = dict(world.gather(list(broken_weights(model).items()), "the names of broken weights"))
    where = list_names([f"{name} ({count})" for name, count in broken.items()])
    raise NotFinite(
        f"{when}: weights are not finite: {where}", stage="weights", culprits=tuple(broken)
    )


def _all_finite(values: Tensor) -> Tensor:
    """Return a boolean tensor without dimensions: whether all values are finite.

    The least and the greatest value are NaN if any value is. Finding them takes a fifteenth of the
    time that `isfinite` takes for every value on a CPU.
    """
    if not values.numel():  # another process has all rows of a sharded weight
        return torch.ones((), dtype=torch.bool, device=values.device)
    return torch.stack(values.detach().aminmax()).isfinite().all()


def check_logprobs(rollouts: Sequence[Rollout], world: World | None = None) -> None:
    """Raise NotFinite in all processes unless all logprobs of the engine are finite."""
    world = world or World()
    local = [
        Culprit(
            rollout_id=rollout.rollout_id,
            place=place_of(rollout, trajectory),
            what=f"token {trajectory.context_length + position}",
        )
        for rollout in rollouts
        for trajectory in rollout.trajectories
        if (position := _first_broken(trajectory.rollout_logprobs)) is not None
    ]
    shares = world.gather([(local, len(rollouts))], "the check of the rollouts")
    broken = [culprit for share, _ in shares for culprit in share]
    if broken:
        rollout_ids = tuple(dict.fromkeys(culprit.rollout_id for culprit in broken))
        where = list_names([f"{culprit.place} ({culprit.what})" for culprit in broken])
        total = sum(count for _, count in shares)
        raise NotFinite(
            f"the engine's logprob is not finite in {len(rollout_ids)} of {total} rollouts: "
            f"{where}. Check the engine's dtype, or sample with {names_with(own_weights=False)}",
            stage="logprobs",
            culprits=rollout_ids,
        )


def find_culprits(
    sequences: Sequence[TrainingSequence],
    run_alone: RunAlone,
    model: nn.Module,
    world: World | None = None,
    *,
    in_turns: bool = False,
) -> list[Culprit]:
    """Run this process's sequences one by one; return those with a number that is not finite.

    Clears the gradients after each. Sharded weights need all processes for every pass, and so does
    context parallel (`in_turns`): while one process runs a sequence of its own, the others run a
    stand-in.
    """
    world = world or World()
    passes: list[TrainingSequence | None] = list(sequences)
    if in_turns or is_sharded(model):
        # The ranks take turns. None: a pass for another process's sequence.
        counts = world.gather([len(sequences)], "the sequences of a broken update")
        earlier, later = sum(counts[: world.rank]), sum(counts[world.rank + 1 :])
        passes = [*[None] * earlier, *sequences, *[None] * later]
    culprits = []
    for sequence in passes:
        # Run it even if an input is broken: with sharded weights the other processes run along.
        loss, logprobs_S = run_alone(sequence or stand_in())
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        broken = [n for n, grad in gradients.items() if not local_part(grad).isfinite().all()]
        norm = full_tensor(nn.utils.get_total_norm(gradients.values()))
        model.zero_grad()
        del gradients  # they would stay in memory beside those of the next pass
        if sequence is None:
            continue
        problem = _first_problem(sequence, logprobs_S, loss, broken, norm)
        if problem is not None:
            rollout = sequence.rollout
            place = place_of(rollout, sequence.trajectory)
            culprits.append(Culprit(rollout_id=rollout.rollout_id, place=place, what=problem))
    return culprits


def _first_problem(
    sequence: TrainingSequence,
    logprobs_S: Tensor,
    loss: Tensor,
    broken_gradients: Sequence[str],
    norm: Tensor,
) -> str | None:
    """Return the first number that is not finite, in the order of computation; it breaks the rest.

    `broken_gradients` names the weights whose gradient is not finite.
    """
    # The trajectory's advantages are float64. One that is only too large for float32 is not named
    # here, but by the loss that it breaks.
    advantages = sequence.trajectory.advantages or ()
    index = _first_broken(advantages)
    if index is not None:
        return f"its advantage is {advantages[index]}"
    for name, values_S in (
        ("the engine's logprob", sequence.behaviour_S),
        ("the reference's logprob", sequence.ref_logprobs_S),
        ("the logprob before the step", sequence.old_logprobs_S),
        ("the policy's logprob", logprobs_S),
    ):
        index = None if values_S is None else _first_broken(values_S.tolist())
        if index is not None:
            return f"{name} of token {int(sequence.targets_S[index]) + 1}"
    if not loss.isfinite():
        return f"its loss is {loss.item():g}"
    if broken_gradients:
        return f"its gradient of {broken_gradients[0]}"
    return None if norm.isfinite() else "the norm of its gradient"


def _first_broken(values: Sequence[float]) -> int | None:
    """Return the index of the first value that is not finite. None: all are."""
    return next((i for i, value in enumerate(values) if not math.isfinite(value)), None)
