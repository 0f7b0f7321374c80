"""Credit per turn: rewards of turns -> an advantage for each turn of each rollout.

A turn is one sampled completion. All of its tokens share its advantage, so that splitting a turn
into more tokens changes nothing. In means and deviations every rollout counts the same, however
many turns it took.

Shapes: P tasks of a step, G rollouts of a task, K turns of the longest rollout, R rollouts that are
compared. NaN stands for a turn that is not there, or a rollout without a reward.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agenttrain.algorithms.advantages import EPSILON, advantages
from agenttrain.algorithms.config import Advantage, AlgorithmConfig, Credit, Scale, StepCredit
from agenttrain.types import Rollout
from agenttrain.utils.turns import turns_in_time

VARIANCES = 8
"""Turns whose advantages have a metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRewards:
    """A rollout's rewards, as credit per turn reads them."""

    rewards: tuple[float, ...] | None
    """One per turn, in order of sampling. The last includes the reward of the whole rollout. None:
    the rollout has no reward."""
    states: tuple[str | None, ...] = ()
    """The environment's state before each turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnAdvantages:
    """Advantages of each turn of some groups' rollouts."""

    advantages: list[list[list[float] | None]]
    """By group, rollout and turn. None for a rollout without a reward."""
    compared: list[list[list[bool]]]
    """True for each turn whose state another rollout of the group was in too (credit=gigpo)."""


def rewards_of_turns(
    rollout: Rollout, weights: Mapping[str, float], penalty: float = 0.0
) -> TurnRewards:
    """Return the weighted reward of each turn. The last includes the reward of the whole rollout.

    `penalty`, the rollout's penalty on its KL to the reference, is subtracted from the reward of
    the last turn. Example: weights ``{"steps": 0.5}``, `turn_scores` ``{"steps": (1.0, 0.0)}`` and
    `rewards` ``{"steps": 1.0, "exact": 1.0}`` give (0.5, 1.0).
    """
    # Here, and in `values`, turns stand trajectory by trajectory. `order` has their indices in the
    # order of sampling, which is that of the result.
    states = tuple(state for trajectory in rollout.trajectories for state in trajectory.states)
    if rollout.reward is None or not rollout.turns:
        # The order of states does not matter: without rewards no turn is compared.
        return TurnRewards(rewards=None, states=states)
    order = _sampling_order(rollout)
    last_turn = order[-1]
    values = [0.0] * rollout.turns
    values[last_turn] = -penalty
    if states:  # empty if the environment names none
        states = tuple(states[turn] for turn in order)
    if not rollout.turn_scores:
        # The rubric has weighted and added the rewards already. Adding them up again here could
        # round to another sum.
        values[last_turn] += rollout.reward
        return TurnRewards(rewards=tuple(values[turn] for turn in order), states=states)
    for name, reward in rollout.rewards.items():
        weight = weights.get(name, 1.0)
        if name in rollout.turn_scores:
            scores = rollout.turn_scores[name]
            values = [v + weight * s for v, s in zip(values, scores, strict=True)]
        elif reward is not None:
            values[last_turn] += weight * reward
    return TurnRewards(rewards=tuple(values[turn] for turn in order), states=states)


def _sampling_order(rollout: Rollout) -> list[int]:
    """Return the indices of the rollout's turns in the order in which they were sampled.

    Turns are numbered trajectory by trajectory. Example: trajectories of 2 and 1 turns have the
    indices 0 1 | 2. If turn 0 called the sub-agent of the second trajectory, the order is
    [0, 2, 1].
    """
    delegations = [trajectory.delegation for trajectory in rollout.trajectories]
    if not any(delegations):
        return [*range(rollout.turns)]
    counts = [trajectory.turns for trajectory in rollout.trajectories]
    starts = [sum(counts[:index]) for index in range(len(counts))]
    callers = [None if delegation is None else delegation.caller for delegation in delegations]
    sampled_turns = turns_in_time([*zip(callers, counts, strict=True)])
    return [starts[trajectory] + turn for trajectory, turn in sampled_turns]


def set_advantages(rollout: Rollout, by_turn: float | Sequence[float] | None) -> None:
    """Set the advantages of a rollout's sampled tokens.

    `by_turn` is one number for all tokens, one for each turn in the order of sampling, or None for
    a rollout without advantages. A sub-agent's turns come after the turn that called it, and before
    the caller's next one.
    """
    turn_values = [0.0] * rollout.turns  # all turns of the first trajectory, then of the next, …
    if isinstance(by_turn, Sequence):
        if len(by_turn) != rollout.turns:
            raise ValueError(
                f"rollout {rollout.rollout_id}: {len(by_turn)} advantages for {rollout.turns} turns"
            )
        # Its n-th number is the index, in `turn_values`, of the n-th turn that was sampled.
        order = _sampling_order(rollout)
        for value, turn_index in zip(by_turn, order, strict=True):
            turn_values[turn_index] = value
    first_turn = 0  # index of the trajectory's first turn; `span.turn` counts within a trajectory
    for trajectory in rollout.trajectories:
        if by_turn is None:
            trajectory.advantages = None
        elif isinstance(by_turn, float | int):
            trajectory.advantages = array("d", [by_turn]) * trajectory.sampled_length
        else:
            spans = trajectory.sampled_spans()
            values = (turn_values[first_turn + span.turn] for span in spans for _ in span.token_ids)
            trajectory.advantages = array("d", values)
        first_turn += trajectory.turns


def turn_advantages(
    groups: Sequence[Sequence[TurnRewards]], config: AlgorithmConfig
) -> TurnAdvantages:
    """Return an advantage for each turn, and the turns that gigpo compared.

    Shapes: P groups, G rollouts of a group, K turns of the longest rollout.

    R_t is the return: the sum of the rewards from turn t on, discounted by
    `algorithm.credit.gamma`. `algorithm.advantage` and `algorithm.scale` choose baseline and scale
    of returns as they do for the rewards of whole rollouts (`advantages`).

    - `turn_reward` compares R_t with the returns of all turns of the group, where each rollout
      weighs 1 (turn-level credit, https://arxiv.org/abs/2505.11821). Departures: (1) that paper
      adds normalised rewards of two turns, and this takes returns of any number of turns. (2) Turns
      are not normalised by index, which `turn_baseline` does.
    - `turn_baseline` compares R_t with the returns of turn t of all rollouts. Those that ended
      before it take part with their last turn: the same rollouts are compared whichever of them
      is long.
    - `gigpo` adds two advantages: that of the rollout, and `algorithm.credit.step_weight` times
      that of the turn among the turns of the group that began in an equal state
      (https://arxiv.org/abs/2505.10978). Departures: (1) standard deviations are those of a sample
      (ddof=1), as everywhere here. (2) A rollout that was in a state several times counts once in
      its mean. (3) A state that only one rollout was in gives no advantage, however often it was
      there.

    With a reward at the end alone, gamma=1 and no equal states, all three equal credit=rollout.

    Example: rewards (0, 1) and (0, 0) of two rollouts, with advantage=leave_one_out, scale=none and
    gamma=1: returns (1, 1) and (0, 0), advantages (1, 1) and (-1, -1).
    """
    credit = config.turn_credit
    assert credit is not None
    returns_PGK = _pad_turns(
        [[returns(turns.rewards or (), credit.gamma) for turns in group] for group in groups]
    )
    # True for turns that gigpo compared with others from an equal state; for a metric.
    compared_PGK = torch.zeros_like(returns_PGK, dtype=torch.bool)
    if credit.name is Credit.turn_baseline:
        result_PGK = _advantages_by_turn(returns_PGK, config)
    elif not isinstance(credit, StepCredit):  # turn_reward
        result_PGK = _advantages_by_group(returns_PGK, config)
    else:  # gigpo, whose settings are a StepCredit
        # fsum: the same rewards in another order have exactly the same sum.
        totals = [
            [() if turns.rewards is None else (math.fsum(turns.rewards),) for turns in group]
            for group in groups
        ]
        totals_PG = _pad_turns(totals).sum(-1)
        rollout_advantages_PG = advantages(totals_PG, baseline=config.advantage, scale=config.scale)
        state_advantages_PGK, compared_PGK = _advantages_by_state(groups, returns_PGK, config)
        result_PGK = rollout_advantages_PG[:, :, None] + credit.step_weight * state_advantages_PGK
    return _without_padding(groups, result_PGK, compared_PGK)


def _without_padding(
    groups: Sequence[Sequence[TurnRewards]], advantages_PGK: Tensor, compared_PGK: Tensor
) -> TurnAdvantages:
    """Return the values of each rollout's turns, from tensors padded to the longest rollout."""
    by_turn: list[list[list[float] | None]] = []
    compared: list[list[list[bool]]] = []
    for group, values_GK, flags_GK in zip(groups, advantages_PGK, compared_PGK, strict=True):
        lengths = [len(turns.rewards or ()) for turns in group]
        by_turn.append(
            [
                None if turns.rewards is None else values_GK[g, : lengths[g]].tolist()
                for g, turns in enumerate(group)
            ]
        )
        compared.append([flags_GK[g, :length].tolist() for g, length in enumerate(lengths)])
    return TurnAdvantages(advantages=by_turn, compared=compared)


def returns(rewards: Sequence[float], gamma: float) -> tuple[float, ...]:
    """Return the discounted sum of the rewards from each turn on.

    Example: ``returns((0.0, 1.0, 2.0), 0.5) == (1.0, 2.0, 2.0)``.
    """
    result: list[float] = []
    for reward in reversed(rewards):
        result.append(reward + gamma * (result[-1] if result else 0.0))
    return tuple(reversed(result))


def _pad_turns(values: Sequence[Sequence[Sequence[float]]]) -> Tensor:
    """Return values by group, rollout and turn as one tensor, [P, G, K], padded with NaN."""
    # One at least, for the baselines of a process without rollouts.
    rollouts = max([1, *(len(group) for group in values)])
    turns = max((len(by_turn) for group in values for by_turn in group), default=0)
    result_PGK = torch.full((len(values), rollouts, turns), torch.nan, dtype=torch.float64)
    for p, group in enumerate(values):
        for g, by_turn in enumerate(group):
            result_PGK[p, g, : len(by_turn)] = torch.tensor(by_turn, dtype=torch.float64)
    return result_PGK


def _advantages_by_turn(returns_PGK: Tensor, config: AlgorithmConfig) -> Tensor:
    """Return the advantage of each turn k among the k-th turns of the group's rollouts, [P, G, K].

    A rollout that ended before turn k takes part with its last turn. So the last turns of long
    rollouts still have the whole group as their baseline.
    """
    turns_PG = (~returns_PGK.isnan()).sum(-1)
    result_PGK = torch.full_like(returns_PGK, torch.nan)
    for k in range(returns_PGK.shape[-1]):
        # Turn k, or the last turn of a rollout that ended before it.
        turn_PG1 = turns_PG.sub(1).clamp(min=0, max=k)[..., None]
        returns_PG = returns_PGK.gather(-1, turn_PG1)[..., 0]
        result_PGK[..., k] = advantages(returns_PG, baseline=config.advantage, scale=config.scale)
    return result_PGK.masked_fill(returns_PGK.isnan(), torch.nan)


def _advantages_by_group(returns_PGK: Tensor, config: AlgorithmConfig) -> Tensor:
    """Return the advantage of each turn among all turns of its group, or of the batch.

    The returns and the result are [P groups, G rollouts, K turns], NaN where a rollout has no such
    turn. In the mean and the deviation each rollout weighs 1, however many turns it has.
    """
    if config.advantage is Advantage.none:
        return returns_PGK
    shape = returns_PGK.shape
    if config.advantage is Advantage.batch:  # the batch is compared as one large group
        returns_PGK = returns_PGK.flatten(0, 1)[None]
    leave_one_out = config.advantage is Advantage.leave_one_out
    result_PGK = torch.zeros_like(returns_PGK)
    std_P11 = returns_PGK.new_zeros(len(returns_PGK), 1, 1)
    for p, group_GK in enumerate(returns_PGK):
        result_PGK[p] = _subtract_mean(group_GK, leave_one_out=leave_one_out)
        std_P11[p] = _std(group_GK)
    if config.scale is Scale.group:
        result_PGK = result_PGK / (std_P11 + EPSILON)
    elif config.scale is Scale.batch:
        # GRPO divides by the deviation of the returns, RLOO by that of the advantages (as TRL).
        scaling_PGK = result_PGK if leave_one_out else returns_PGK
        result_PGK = result_PGK / (_std(scaling_PGK.flatten(0, 1)) + EPSILON)
    return result_PGK.reshape(shape)


def _advantages_by_state(
    groups: Sequence[Sequence[TurnRewards]], returns_PGK: Tensor, config: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    """Return the advantage of each turn among the group's turns that began in an equal state.

    Both tensors are [P, G, K]: the advantages, and True for each turn that was compared. A turn is
    not compared, and has the advantage 0, if no other rollout of the group was in its state.
    """
    result_PGK = torch.zeros_like(returns_PGK)
    compared_PGK = torch.zeros_like(returns_PGK, dtype=torch.bool)
    for p, group in enumerate(groups):
        visits: dict[str, list[tuple[int, int]]] = {}  # state -> (rollout, turn)
        for g, turns in enumerate(group):
            if turns.rewards is None:
                continue
            for k, state in enumerate(turns.states):
                if state is not None:
                    visits.setdefault(state, []).append((g, k))
        for state_visits in visits.values():
            rollouts_in_state = {g for g, _ in state_visits}
            if len(rollouts_in_state) < 2:
                continue
            mask_GK = torch.zeros_like(compared_PGK[p])
            mask_GK[tuple(zip(*state_visits, strict=True))] = True  # (rollouts, turns)
            returns_GK = returns_PGK[p].masked_fill(~mask_GK, torch.nan)
            advantages_GK = _subtract_mean(
                returns_GK, leave_one_out=config.advantage is Advantage.leave_one_out
            )
            if config.scale is Scale.group:
                advantages_GK = advantages_GK / (_std(returns_GK) + EPSILON)
            result_PGK[p][mask_GK] = advantages_GK[mask_GK]
            compared_PGK[p] |= mask_GK
    return result_PGK, compared_PGK


def _subtract_mean(values_RK: Tensor, *, leave_one_out: bool) -> Tensor:
    """Subtract a baseline from the values of all turns, [R rollouts, K turns].

    The baseline is the mean of the rollouts' means, so that a rollout of many turns weighs no more
    than one of few. With `leave_one_out` each rollout's baseline is the mean of the others' means.
    NaN, which stays NaN, stands for a turn that is not there or a rollout without a reward. The
    result is exactly 0 if all values are equal, and for a single rollout.
    """
    means_R = values_RK.nanmean(1)
    has_reward_R = ~means_R.isnan()
    count = int(has_reward_R.sum())
    values_N = values_RK[~values_RK.isnan()]
    if count < 2 or values_N.min() == values_N.max():
        return torch.zeros_like(values_RK).masked_fill(values_RK.isnan(), torch.nan)
    mean = means_R[has_reward_R].mean()
    if leave_one_out:
        baseline_R = (mean * count - means_R) / (count - 1)
        return values_RK - baseline_R[:, None]
    return values_RK - mean


def _std(values_RK: Tensor) -> Tensor:
    """Return the standard deviation (ddof=1) of [R rollouts, K turns], each rollout weighing 1.

    The mean is that of the rollouts' means. The squares of a rollout's deviations from it are
    averaged over its turns first: otherwise one rollout of many turns would outweigh the others.
    """
    means_R = values_RK.nanmean(1)
    has_reward_R = ~means_R.isnan()
    count = int(has_reward_R.sum())
    if count < 2:
        return values_RK.new_zeros(())
    squares_R = (values_RK - means_R[has_reward_R].mean()).square().nanmean(1)
    return (squares_R[has_reward_R].sum() / (count - 1)).sqrt()
