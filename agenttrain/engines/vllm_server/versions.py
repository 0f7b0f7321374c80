"""`Versions`: the versions of the weights on the servers, and the sessions that use them.

A server has one version of a model's weights, but several versions of its adapters, each with its
own name. A rollout samples all of its turns with the adapters that its first turn had.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from agenttrain.engines.weight_files import WeightFiles

ADAPTERS = 2
"""Versions of the adapters on a server: the newest and the one before. Each update by which
rollouts may be older (`async_training.max_staleness`) adds one."""


@dataclass(slots=True)
class Versions:
    """Versions in use, e.g. adapters 6 and 7 while a rollout that began with 6 goes on."""

    newest: WeightFiles | None = None
    adapters: int = ADAPTERS
    """Most versions of adapters in use at once."""
    _held: dict[int, WeightFiles] = field(default_factory=dict)
    """Versions that the servers have, by number."""
    _sessions: dict[str, int] = field(default_factory=dict)
    """Version of the adapters that each session began with."""
    _starts: dict[str, int] = field(default_factory=dict)
    """Version of the weights that each session began with."""

    def add(self, files: WeightFiles) -> list[WeightFiles]:
        """Make `files` the newest version. Return adapters that are no longer used, to be removed.

        Sessions with adapters older than the last `adapters` versions go on with the newest.
        """
        self.newest = files
        # A version of all weights replaces the earlier one on a server. Adapters are added to the
        # earlier adapters, which sessions may still use.
        older = self._held if files.adapters else {}
        files_by_version = {**older, files.version: files}
        recent_versions = sorted(files_by_version)[-self.adapters :]
        self._sessions = {
            session: version
            for session, version in self._sessions.items()
            if version in recent_versions
        }
        in_use = {files.version, *self._sessions.values()}
        self._held = {
            version: held_files
            for version, held_files in files_by_version.items()
            if version in in_use
        }
        return [old_files for version, old_files in older.items() if version not in in_use]

    def of(self, session: str) -> WeightFiles:
        """Return the weights of a session's next turn: the newest, or its first turn's adapters."""
        assert self.newest is not None
        if not self.newest.adapters:
            return self.newest
        return self._held[self._sessions.setdefault(session, self.newest.version)]

    def start(self, session: str) -> int:
        """Return the version that a session began with: the newest, if it begins now."""
        assert self.newest is not None
        return self._starts.setdefault(session, self.newest.version)

    def release(self, session: str) -> None:
        self._sessions.pop(session, None)
        self._starts.pop(session, None)

    def held(self) -> list[WeightFiles]:
        """Return the versions that a server must have, the newest last."""
        return [self._held[version] for version in sorted(self._held)]
