"""A rollout's environment: begun before the prompt, scored and ended after the last turn."""

from __future__ import annotations

from dataclasses import replace

from agenttrain.environments.environment import Episode, Start
from agenttrain.environments.environments import Environments
from agenttrain.rewards.function import ChangedRollout, check_unchanged, failed, number, own_copy
from agenttrain.types import Rollout, StopReason, ToolUnavailable
from agenttrain.utils.seeds import derive_seed

REWARD = "environment"
"""Name of the reward function that an environment's `reward` is."""


async def begin(
    rollout: Rollout, environments: Environments, *, seed: int, group_seed: int
) -> Episode | None:
    """Start the environment of the rollout's task, whose messages then hold what reset gave.

    Raises ToolUnavailable when it cannot be started, or when nobody has asked anything; StuckTools.
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


async def score(rollout: Rollout, episode: Episode | None) -> None:
    """Keep what the environment's reward gives for a rollout that may be scored.

    Raises RewardError when it raises or gives no number, as other reward functions do. What to do
    about NaN says the rubric, as with theirs.
    """
    unscored = (StopReason.error, StopReason.aborted)
    if episode is None or not episode.kind.has_reward:
        return
    if not rollout.turns or rollout.stop_reason in unscored:
        return
    given = own_copy(rollout)
    try:
        value = await episode.reward(given, number)
        check_unchanged(given, rollout)
    except ToolUnavailable:
        raise
    except ChangedRollout as error:  # raised by us: no line of the method's
        raise failed(REWARD, rollout, error.with_traceback(None)) from error
    except Exception as error:
        raise failed(REWARD, rollout, error) from error
    rollout.environment_reward = value


async def end(rollout: Rollout, episode: Episode | None) -> None:
    """End the episode; after a rollout that did not end well its instance is not used again."""
    if episode is not None:
        well = rollout.stop_reason not in (None, StopReason.error, StopReason.timeout)
        await episode.finish(again=well)
