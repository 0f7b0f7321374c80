"""Reward functions, and how the columns that they read reach them."""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import Any

from agenttrain.types import AgenttrainError, Rollout

RewardFunction = Callable[..., Any]
"""``(rollout, **task columns) -> float | None``, sync or async; None: not applicable.

Only the columns that the signature names are passed, all of them with ``**columns``. Example::

    def short(rollout: Rollout, limit: int) -> float:
        return float(rollout.sampled_length <= limit)
"""


class RewardError(AgenttrainError):
    """Failure of a reward function, or a value of its that is no reward; ends the run."""

    def __init__(self, message: str, *, culprits: Sequence[str] = ()) -> None:
        """`culprits` are the ids of the rollouts that it failed on."""
        super().__init__(message)
        self.culprits = tuple(culprits)
        self.rollouts: Sequence[Rollout] = ()
        """All rollouts that were to be scored; set by the collector."""


class RewardUnavailable(AgenttrainError):
    """Missing score: something that a reward function needs is broken (a judge's server).

    A function raises it instead of returning 0, which would teach something false.
    `reward.<name>.on_unavailable` says whether the run stops or the rollout is dropped.
    """


class NoNumber(RewardUnavailable):
    """NaN, infinity or no number as a function's value, where that does not end the run."""


class Columns:
    """Columns of a row that a function's signature asks for."""

    def __init__(self, function: RewardFunction, *, taken: Collection[str] = ()) -> None:
        """`taken` are parameters that get their value elsewhere."""
        kinds = inspect.Parameter
        wanted = [
            parameter
            for parameter in inspect.signature(function).parameters.values()
            if parameter.name not in taken
        ]
        self._taken = frozenset(taken)
        self._all = any(parameter.kind is kinds.VAR_KEYWORD for parameter in wanted)
        named = [p for p in wanted if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
        self._names = [parameter.name for parameter in named]
        self.required = tuple(p.name for p in named if p.default is kinds.empty)
        """Columns that every row must have."""

    def pick(self, available: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns to pass; raises KeyError naming a required one that is not there."""
        for name in self.required:
            if name not in available:
                raise KeyError(
                    f"it needs the column {name!r}, and the row has {sorted(available) or 'none'}"
                )
        names = available if self._all else self._names
        return {k: available[k] for k in names if k in available and k not in self._taken}


LARGEST = 1e100
"""Largest absolute reward: the squares of as many as a step can have still add up to a number."""


def checked(value: Any) -> float | None:
    """Return `value` as a reward; raise ValueError unless it is None or a number up to `LARGEST`.

    Numbers of numpy and torch count. Example: ``checked(True) == 1.0``
    """
    result = number(value)
    if result is not None and not math.isfinite(result):
        raise ValueError(f"it returned {_excerpt(value)}; a reward is a finite number, or None")
    if result is not None and abs(result) > LARGEST:
        raise ValueError(
            f"it returned {result:g}; a reward is a number of at most {LARGEST:g}, or None"
        )
    return result


def number(value: Any) -> float | None:
    """Return `value` as `checked` does, but let NaN and infinity pass; too large is infinite."""
    if value is None:
        return None
    if not isinstance(value, Real) and hasattr(value, "item"):
        with suppress(Exception):  # an array of several values stays what it is
            value = value.item()
    if not isinstance(value, Real):
        raise ValueError(f"it returned {_excerpt(value)}; a reward is a finite number, or None")
    try:
        return float(value)
    except OverflowError:  # 10**400
        return math.inf


def _excerpt(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python prints no integer of more than 4,300 digits
        return "an integer of more than 4,300 digits"
    return text if len(text) <= 200 else f"{text[:199]}…"


def failed(name: str, rollout: Rollout, error: BaseException) -> RewardError:
    """Return an error naming the function, the rollout, and the line of the function that raised.

    Example: ``reward 'short' on rollout 'train-1-0-3' of task '17': ZeroDivisionError: division by
    zero (my_agent.py, line 12)``.
    """
    text = error.args[0] if isinstance(error, KeyError) and error.args else str(error)
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    message = f"{about(name, rollout)}: {type(error).__name__}: {text}{at}"
    return RewardError(message, culprits=[rollout.rollout_id])


def about(name: str, rollout: Rollout) -> str:
    """Return the beginning of an error about one reward function and one rollout."""
    return f"reward {name!r} on rollout {rollout.rollout_id!r} of task {rollout.task.task_id!r}"
