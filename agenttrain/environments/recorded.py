"""`RecordedKind`: an environment that says again what it said once, and keeps no world."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agenttrain.environments.instance import Instance
from agenttrain.environments.kind import EnvironmentKind, Episode, Reward, Start
from agenttrain.types import Message, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """Recorded answers of the environment of one rollout."""

    messages: tuple[Message, ...]
    """Messages of its reset."""
    user: Sequence[str]
    """Messages of its `user`, in order."""
    reward: float | None
    over: Callable[[], bool]
    """Returns True once the episode is over."""


class RecordedKind(EnvironmentKind):
    """A declared environment, of which nothing is run; for one rollout."""

    def __init__(self, kind: EnvironmentKind, said: Said) -> None:
        super().__init__(kind.name, kind.cls, bound=kind.bound, settings=kind.settings)
        self._said = said

    async def start(self, start: Start) -> Episode:
        """Return the recorded episode."""
        return RecordedEpisode(self, self._said, start.rollout_id)


class RecordedEpisode(Episode):
    """An episode without an instance; its methods' replies are a recorded toolbox's."""

    def __init__(self, kind: RecordedKind, said: Said, rollout_id: str) -> None:
        super().__init__(kind, Instance(kind.name, kind.settings.timeout_s), rollout_id)
        self.messages = said.messages
        self._said = said
        self._user: Iterator[str] = iter(said.user)

    @property
    def done(self) -> bool:
        """True once the environment had declared the episode over."""
        return self._said.over()

    @done.setter
    def done(self, value: bool) -> None:
        """Ignore the value: the record alone says so."""

    async def user(self, message: Message) -> str | None:
        """Return the user's next recorded message; None after the last."""
        return next(self._user, None)

    async def reward(self, rollout: Rollout, read: Callable[[Any], Reward]) -> Reward | None:
        """Return the recorded reward."""
        return read(self._said.reward)

    async def finish(self, *, again: bool = True) -> None:
        """Do nothing: nothing was begun."""
