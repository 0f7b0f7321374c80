"""The tracker of a process that is not the run's main one: the main one tells for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from agenttrain.tracking.console import ConsoleProgress
from agenttrain.tracking.tracker import Tracker
from agenttrain.types import Rollout


class Silent(Tracker):
    """Writes nothing and shows nothing."""

    def __init__(self) -> None:
        # Not Tracker's, which makes files.
        self.progress = ConsoleProgress(0, live=False, console=Console(quiet=True))

    @property
    def has_dashboard(self) -> bool:
        """There is none."""
        return False

    def step(self, step: int, metrics: Mapping[str, float], rollouts: Sequence[Rollout]) -> None:
        """Nothing."""

    def check_folder(self) -> None:
        """The main process does."""

    def checkpoint(self, path: Path) -> None:
        """Nothing."""

    def evaluation(self, label: str, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing."""

    def best(self, found: Mapping[str, Any] | None) -> None:
        """Nothing."""

    def warn(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
