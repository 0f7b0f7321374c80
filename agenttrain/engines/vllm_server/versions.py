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
    """Versions in use, e.g. adapters 6 and 7 while a rollout that began with 6 goes on.

    If all weights are sent, every session samples with the newest.
    """

    newest: WeightFiles | None = None
    adapters: int = ADAPTERS
    """Most versions of adapters in use at once."""
    _held: dict[int, WeightFiles] = field(default_factory=dict)
    """Versions that the servers have, by number."""
    _adapters_of: dict[str, int] = field(default_factory=dict)
    """Version of the adapters that each session samples with: the newest at its first turn. A
    session without an entry gets one at its next turn."""
    _start_of: dict[str, int] = field(default_factory=dict)
    """Newest version at the start of each session, whatever it samples with later."""

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
        # A session that is left out here gets the newest version in `of`.
        self._adapters_of = {
            session: version
            for session, version in self._adapters_of.items()
            if version in recent_versions
        }
        in_use = {files.version, *self._adapters_of.values()}
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
        return self._held[self._adapters_of.setdefault(session, self.newest.version)]

    def start(self, session: str) -> int:
        """Return the version that a session began with: the newest, if it begins now.

        The session's prefix cache is kept apart by it from that of older weights.
        """
        assert self.newest is not None
        return self._start_of.setdefault(session, self.newest.version)

    def release(self, session: str) -> None:
        self._adapters_of.pop(session, None)
        self._start_of.pop(session, None)

    def held(self) -> list[WeightFiles]:
        """Return the versions that a server must have, the newest last."""
        return [self._held[version] for version in sorted(self._held)]
