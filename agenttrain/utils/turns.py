"""The order of turns in a rollout of several trajectories."""

from __future__ import annotations

from collections.abc import Sequence


def turns_in_time(
    trajectories: Sequence[tuple[tuple[int, int] | None, int]],
) -> list[tuple[int, int]]:
    """Return (trajectory, turn) of each turn, in the order in which they were sampled.

    Each trajectory is given as (caller, number of turns): the turns of a sub-agent come after the
    turn that called it, `caller`, and before that agent's next one. Example: ``[(None, 2),
    ((0, 0), 1)]`` gives ``[(0, 0), (1, 0), (0, 1)]``. Raises ValueError for a caller that is no
    earlier trajectory.
    """

    def call_path(index: int, turn: int) -> tuple[tuple[int, int], ...]:
        """Return the turns from the first agent's down to this one: their order is that of time."""
        caller = trajectories[index][0]
        if caller is None:
            return ((index, turn),)
        if not 0 <= caller[0] < index:
            raise ValueError(f"trajectory {index}: its caller {caller} is no earlier trajectory")
        return (*call_path(*caller), (index, turn))

    turns = [(i, turn) for i, (_, count) in enumerate(trajectories) for turn in range(count)]
    return sorted(turns, key=lambda turn: call_path(*turn))
