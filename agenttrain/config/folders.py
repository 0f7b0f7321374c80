"""Where Hydra would put a run, and whether a folder can be written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from agenttrain.config.compose import Source, compose_raw
from agenttrain.config.errors import ConfigError, explained


def check_writable(folder: Path, said: str, remedy: str) -> None:
    """Raise ConfigError, ``<said>: …; <remedy>``, unless files can be written into the folder.

    A folder that is not there must be one that can be made.
    """
    nearest = next((p for p in (folder, *folder.absolute().parents) if p.exists()), Path("/"))
    if not nearest.is_dir():
        raise ConfigError(f"{said}: {nearest} is a file, not a folder; {remedy}")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{said}: {nearest} may not be written (read-only?); {remedy}")


def run_folder(overrides: Sequence[str], source: Source) -> Path:
    """The absolute folder of a run, with the time of this call. Needs a `hydra_session`."""
    raw = compose_raw(overrides, source, with_hydra=True)
    with explained(overrides, source.groups):
        return Path(str(raw.hydra.run.dir)).absolute()


def job_name(overrides: Sequence[str], source: Source) -> str:
    """What Hydra calls the run: the experiment's name. Needs a `hydra_session`."""
    return str(compose_raw(overrides, source, with_hydra=True).hydra.job.name)
