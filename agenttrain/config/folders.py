"""The folder in which Hydra puts a run, and a check that a folder can be written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from agenttrain.config.compose import Source, compose_raw
from agenttrain.config.errors import ConfigError, explained


def check_writable(folder: Path, setting: str, remedy: str) -> None:
    """Raise ConfigError, ``<setting>: …; <remedy>``, unless files can be written into the folder.

    A folder that is not there must be one that can be made.
    """
    nearest = next((p for p in (folder, *folder.absolute().parents) if p.exists()), Path("/"))
    if not nearest.is_dir():
        raise ConfigError(f"{setting}: {nearest} is a file, not a folder; {remedy}")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{setting}: {nearest} may not be written (read-only?); {remedy}")


def run_folder(overrides: Sequence[str], source: Source) -> Path:
    """Return the absolute folder of a run, with the time of this call. Needs a `hydra_session`."""
    raw = compose_raw(overrides, source, with_hydra=True)
    with explained(overrides, source.groups):
        return Path(str(raw.hydra.run.dir)).absolute()


def job_name(overrides: Sequence[str], source: Source) -> str:
    """Return Hydra's name of the run: the experiment's name. Needs a `hydra_session`."""
    return str(compose_raw(overrides, source, with_hydra=True).hydra.job.name)
