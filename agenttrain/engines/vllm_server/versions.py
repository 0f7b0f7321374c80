"""`Versions`: the weights that requests are sampled with, and the rollouts that still use them.

A server has one version of a model's weights, but several of its adapters, each under a name of
its own. A rollout then samples all its turns with the version that its first turn had.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from agenttrain.engines.weight_files import WeightFiles

ADAPTERS = 2
"""Versions of the adapters that a server samples with at once: the newest, the one before, and one
more for each update by which rollouts may be older (`async_training.max_staleness`)."""


@dataclass(slots=True)
class Versions:
    """Versions in use, e.g. adapters 6 and 7 while a rollout that began with 6 goes on."""

    newest: WeightFiles | None = None
    adapters: int = ADAPTERS
    """Versions of adapters that may be in use at once."""
    _held: dict[int, WeightFiles] = field(default_factory=dict)
    _sessions: dict[str, int] = field(default_factory=dict)
    """Version of the adapters that each session began with."""
    _starts: dict[str, int] = field(default_factory=dict)
    """Version of the weights that each session began with."""

    def add(self, files: WeightFiles) -> list[WeightFiles]:
        """Make `files` the newest; return those that nothing uses any more.

        With more than `adapters` in use, rollouts of the oldest go on with the newest.
        """
        self.newest = files
        before = self._held if files.adapters else {}
        self._held = {**before, files.version: files}
        recent = sorted(self._held)[-self.adapters :]
        self._sessions = {name: one for name, one in self._sessions.items() if one in recent}
        used = {files.version, *self._sessions.values()}
        unused = [one for version, one in before.items() if version not in used]
        self._held = {version: one for version, one in self._held.items() if version in used}
        return unused

    def of(self, session: str) -> WeightFiles:
        """Return the weights of a session's next turn."""
        assert self.newest is not None
        if not self.newest.adapters:
            return self.newest
        return self._held[self._sessions.setdefault(session, self.newest.version)]

    def start(self, session: str) -> int:
        """Return the version that a session began with."""
        assert self.newest is not None
        return self._starts.setdefault(session, self.newest.version)

    def release(self, session: str) -> None:
        """End a session."""
        self._sessions.pop(session, None)
        self._starts.pop(session, None)

    def held(self) -> list[WeightFiles]:
        """Return the versions that a server must have, the newest last."""
        return [self._held[version] for version in sorted(self._held)]
