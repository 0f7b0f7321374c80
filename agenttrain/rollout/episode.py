"""A rollout's environment: started before the prompt, scored and ended after the last turn."""

from __future__ import annotations

from dataclasses import replace

from agenttrain.environments.environment import Episode, Start
from agenttrain.environments.environments import Environments
from agenttrain.rewards.function import (
    ChangedRollout,
    as_number,
    check_unchanged,
    copy_rollout,
    scoring_error,
)
from agenttrain.types import Rollout, RolloutMachine, StopReason, ToolUnavailable
from agenttrain.utils.seeds import derive_seed

REWARD = "environment"
"""Name of an environment's `reward` in errors about reward functions."""


async def start_episode(
    rollout: Rollout,
    environments: Environments,
    *,
    seed: int,
    group_seed: int,
    machine: RolloutMachine | None = None,
) -> Episode | None:
    """Start the environment of the rollout's task, and add the messages of its reset to the task.

    Returns None if the task has no environment. Raises StuckTools if abandoned calls pile up, and
    ToolUnavailable if the environment cannot be started or neither row nor reset gives a message.
    """
    environments.check_stuck()
    kind = environments.kind_of(rollout.task)
    if kind is None:
        return None
    episode = await kind.start(
        Start(
            rollout_id=rollout.rollout_id,
            row=rollout.task.columns,
            seed=derive_seed(seed, "environment"),
            group_seed=derive_seed(group_seed, "environment"),
            machine=machine,
        )
    )
    messages = (*rollout.task.messages, *episode.messages)
    if not messages:
        await episode.finish()
        raise ToolUnavailable(
            f"environment {kind.name!r}: there is no prompt: the row has none, and reset gave no "
            "message; let reset return one, or add a column `prompt`"
        )
    rollout.task = replace(rollout.task, messages=messages)
    return episode


async def score_episode(rollout: Rollout, episode: Episode | None) -> None:
    """Set the rollout's `environment_reward`, unless it failed. Raises RewardError."""
    failure_reasons = (StopReason.error, StopReason.aborted)
    if episode is None or not episode.kind.has_reward:
        return
    if not rollout.turns or rollout.stop_reason in failure_reasons:
        return
    rollout_copy = copy_rollout(rollout)  # user code must not change what is trained
    try:
        value = await episode.reward(rollout_copy, read=as_number)
        check_unchanged(rollout_copy, rollout)
    except ToolUnavailable:
        raise
    except ChangedRollout as error:  # our traceback would point away from the user's method
        raise scoring_error(REWARD, rollout, error.with_traceback(None)) from error
    except Exception as error:
        raise scoring_error(REWARD, rollout, error) from error
    rollout.environment_reward = value


async def end_episode(rollout: Rollout, episode: Episode | None) -> None:
    """End the episode. Its instance is reused unless the rollout failed or timed out."""
    if episode is not None:
        ended_well = rollout.stop_reason not in (None, StopReason.error, StopReason.timeout)
        await episode.finish(reusable=ended_well)
