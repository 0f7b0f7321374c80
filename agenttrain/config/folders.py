"""Where Hydra would put a run, or a sweep and its jobs: for runs that somebody else starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, open_dict

from agenttrain.config.compose import Source, compose_raw
from agenttrain.config.errors import explained

NAMING = ("hydra.run.dir=", "hydra.sweep.dir=", "hydra.sweep.subdir=")


def run_folder(overrides: Sequence[str], source: Source) -> Path:
    """The absolute folder of a run, with the time of this call. Needs a `hydra_session`."""
    raw = compose_raw(overrides, source, with_hydra=True)
    return _absolute(raw, overrides, source, "run.dir")


def sweep_folders(runs: Sequence[Sequence[str]], source: Source) -> tuple[Path, list[str]]:
    """The absolute folder of a sweep, and the names of its runs' in it. Needs a `hydra_session`.

    Example: with ``[["seed=1"], ["seed=2"]]`` -> ``(Path("/…/sweep_2026-…"), ["0", "1"])``.
    """
    raws = [compose_raw(overrides, source, with_hydra=True) for overrides in runs]
    names = []
    for number, (raw, overrides) in enumerate(zip(raws, runs, strict=True)):
        with open_dict(raw):
            raw.hydra.job.num = number
            raw.hydra.job.id = str(number)
            raw.hydra.job.override_dirname = ",".join(sorted(overrides))
        with explained(overrides, source.groups):
            names.append(str(raw.hydra.sweep.subdir))
    return _absolute(raws[0], runs[0], source, "sweep.dir"), names


def job_name(overrides: Sequence[str], source: Source) -> str:
    """What Hydra calls the run: the experiment's name. Needs a `hydra_session`."""
    return str(compose_raw(overrides, source, with_hydra=True).hydra.job.name)


def unnamed(overrides: Sequence[str]) -> list[str]:
    """The overrides without those that name folders."""
    return [text for text in overrides if not text.lstrip("+").startswith(NAMING)]


def _absolute(raw: DictConfig, overrides: Sequence[str], source: Source, key: str) -> Path:
    with explained(overrides, source.groups):
        named = raw.hydra.run.dir if key == "run.dir" else raw.hydra.sweep.dir
    return Path(str(named)).absolute()
