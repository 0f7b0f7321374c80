"""Reward functions written for TRL: ``(prompts, completions, **columns) -> list[float | None]``.

TRL 1.16 passes by name `prompts`, `completions`, `completion_ids`, the dataset's columns as lists,
`trainer_state`, `log_extra` and `log_metric`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from agenttrain.types import Rollout

TRLS = ("prompts", "completions", "completion_ids")
"""What TRL passes beside the row's columns; a function may want one of them alone."""


def is_trl(function: Callable[..., Any]) -> bool:
    """Whether its parameters are TRL's: some of `TRLS`, and no `rollout`."""
    names = inspect.signature(function).parameters
    return any(name in names for name in TRLS) and "rollout" not in names


def batch_arguments(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """What TRL would pass for these rollouts.

    `completions` holds, for each, the list of messages after the prompt's, `completion_ids` the
    ids after the prompt's, tool results included, both of its last trajectory. Functions that log
    get a logger that does nothing, and there is no trainer: `trainer_state` is None.
    """
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.task.columns)
    last = [rollout.trajectories[-1] for rollout in rollouts]
    return {
        **{name: [rollout.task.columns.get(name) for rollout in rollouts] for name in names},
        "prompts": [list(rollout.task.messages) for rollout in rollouts],
        "completions": [t.added_messages for t in last],
        "completion_ids": [list(t.token_ids[t.prompt_length :]) for t in last],
        "trainer_state": None,
        "log_extra": _no_log,
        "log_metric": _no_log,
    }


def _no_log(name: str, value: object) -> None: ...


def batch_names() -> tuple[str, ...]:
    """What TRL's functions are given beside the row's columns."""
    return tuple(batch_arguments(()))
