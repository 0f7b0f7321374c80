"""Copies for code that is not ours: a tool's task, and the rollout that a reward function reads.

What is trained is what was verified, and what one function sees is what every other one sees. So a
reward function gets a copy that shares nothing that can be changed. Changing it is an error:
whatever the function meant by that would not happen.
"""

from __future__ import annotations

import copy
from array import array
from dataclasses import is_dataclass, replace
from typing import Any

from agenttrain.types import AgenttrainError, Rollout, Task, Trajectory

_PLAIN = (str, int, float, bool, array)


class ChangedRollout(AgenttrainError):
    """A reward function changed the rollout that it was given."""


def own_copy(rollout: Rollout) -> Rollout:
    """Return a copy that shares no list, mapping or ledger with the rollout.

    Costs O(messages) and one copy of the ids: strings and spans cannot be changed and are shared.
    """
    results = [
        replace(result, call=replace(result.call, arguments=own_value(result.call.arguments)))
        for result in rollout.tool_results
    ]
    return replace(
        rollout,
        task=own_task(rollout.task),
        trajectories=[
            replace(
                trajectory,
                spans=list(trajectory.spans),
                messages=own_value(trajectory.messages),
                _ids=trajectory.token_ids,
            )
            for trajectory in rollout.trajectories
        ],
        tool_results=results,
        rewards=dict(rollout.rewards),
    )


def own_task(task: Task) -> Task:
    """Return a copy of the task; columns that cannot be copied (an open file, say) are shared."""
    messages = tuple(own_value(message) for message in task.messages)
    return replace(task, messages=messages, columns=own_value(task.columns))


def own_value(value: Any) -> Any:
    """Return a deep copy of a JSON value, quickly; of anything else what `copy.deepcopy` makes."""
    if isinstance(value, str | int | float | None):
        return value
    if type(value) is dict:
        return {key: own_value(item) for key, item in value.items()}
    if type(value) is list:
        return [own_value(item) for item in value]
    try:
        return copy.deepcopy(value)
    except Exception:  # a column may hold anything
        return value


def check_unchanged(given: Rollout, rollout: Rollout) -> None:
    """Raise ChangedRollout, naming the fields, where `given` is no longer as the rollout."""
    if changed := _changed(given, rollout):
        raise ChangedRollout(
            f"it changed the rollout that it was given ({', '.join(changed)}), which changes "
            "nothing that is trained or that other rewards see; change a copy, such as "
            "copy.deepcopy(rollout.trajectories), and return the reward"
        )


def _changed(given: Rollout, rollout: Rollout) -> list[str]:
    """Return the names of the fields that differ, e.g. ``trajectories[0].messages``."""
    changed = _fields_changed(given, rollout)
    held = given.trajectories if type(given.trajectories) is list else []
    kinds = [type(trajectory) for trajectory in held]
    if "trajectories" in changed and kinds == [Trajectory] * len(rollout.trajectories):
        changed.remove("trajectories")
        for index, pair in enumerate(zip(given.trajectories, rollout.trajectories, strict=True)):
            changed += [f"trajectories[{index}].{name}" for name in _fields_changed(*pair)]
    return changed


def _fields_changed(given: Any, original: Any) -> list[str]:
    return [
        name.removeprefix("_")
        for name in original.__dataclass_fields__
        if not _same(getattr(given, name), getattr(original, name))
    ]


def _same(given: Any, original: Any) -> bool:
    """Compare JSON values and our records; of other objects nobody knows what equal means."""
    if given is original:
        return True
    kind = type(given)
    if kind is not type(original):
        return False
    if kind is dict:
        return given.keys() == original.keys() and all(
            _same(item, original[key]) for key, item in given.items()
        )
    if kind is list or kind is tuple:
        return len(given) == len(original) and all(map(_same, given, original))
    if kind in _PLAIN:
        return bool(given == original or (given != given and original != original))
    if is_dataclass(given):
        return all(
            _same(getattr(given, name), getattr(original, name))
            for name in given.__dataclass_fields__
        )
    return True
