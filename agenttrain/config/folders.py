"""Where Hydra would put a run, for one that somebody else starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agenttrain.config.compose import Source, compose_raw
from agenttrain.config.errors import explained


def run_folder(overrides: Sequence[str], source: Source) -> Path:
    """The absolute folder of a run, with the time of this call. Needs a `hydra_session`."""
    raw = compose_raw(overrides, source, with_hydra=True)
    with explained(overrides, source.groups):
        return Path(str(raw.hydra.run.dir)).absolute()


def job_name(overrides: Sequence[str], source: Source) -> str:
    """What Hydra calls the run: the experiment's name. Needs a `hydra_session`."""
    return str(compose_raw(overrides, source, with_hydra=True).hydra.job.name)
