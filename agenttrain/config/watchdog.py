"""Settings of the watchdog: seconds without progress after which a run ends with evidence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class WatchdogConfig:
    """Seconds that a phase may pass without any progress; None: as long as it likes.

    Progress is a completion asked for or had, a rollout that ended, a forward pass of the policy,
    and the beginning of the phase. A process that waits for another one is not judged: that one is,
    by its own watchdog. Time in which the whole process is stopped does not count.
    """

    load_s: float | None = 3600.0
    """Data, tools, weights and the engine, up to the first phase."""
    rollout_s: float | None = 3600.0
    """Rollouts and their rewards; of `agenttrain sft`: making rollouts of the rows."""
    train_s: float | None = 3600.0
    """Advantages and updates."""
    sync_s: float | None = 3600.0
    """The engine takes the new weights."""
    evaluation_s: float | None = 3600.0
    checkpoint_s: float | None = 3600.0
    heartbeat_s: float = 5.0
    """Seconds between two writings of <run>/heartbeat.json."""

    def deadline_of(self, phase: str | None) -> tuple[str, float | None]:
        """Return the setting that limits a phase, and its value; ``("", None)`` for others."""
        name = f"{'rollout' if phase == 'data' else phase}_s"
        return (name, getattr(self, name)) if hasattr(self, name) else ("", None)
