"""The batch script of a job: what SLURM is asked for, what runs, and how it goes on."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from agenttrain.config.slurm import SlurmConfig

FOLDER = Path(__file__).parent
NAME = "job.sbatch"
"""The script's file in the run's folder, or the sweep's."""
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
"""Environment variables that keep Hugging Face's libraries from the network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobScript:
    """The content of the script beside the settings."""

    name: str
    """The job's, where the settings have none."""
    folder: Path
    """The run's, or the sweep's."""
    workdir: Path
    """Where the command was typed: relative paths and the user's modules are found from there."""
    jobs: Sequence[Sequence[str]]
    """Arguments of `agenttrain` for each job of an array; of one job for a run."""
    array: bool = False
    python: Path
    """The interpreter that submits."""

    @property
    def path(self) -> Path:
        """The script's file."""
        return self.folder / NAME

    @property
    def log(self) -> Path:
        """Output file, with SLURM's %-signs: %j is the job's number, %A_%a an array's."""
        numbers = "%A_%a" if self.array else "%j"
        return Path(str(self.folder).replace("%", "%%")) / f"slurm-{numbers}.out"


def core() -> str:
    """Return the part that is the same in every script, those of scripts/slurm/ included."""
    return (FOLDER / "core.sh").read_text(encoding="utf-8")


def render(script: JobScript, settings: SlurmConfig) -> str:
    """Return the script's text."""
    own_path = [f'export PATH={shlex.quote(str(script.python.parent))}:"$PATH"']
    offline = [f"export {' '.join(f'{name}=1' for name in OFFLINE)}"] if settings.offline else []
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"quote": shlex.quote, "words": shlex.join}
    return environment.get_template("job.sbatch.jinja").render(
        path=str(script.path),
        directives=_directives(script, settings),
        setup=[*(own_path if settings.setup is None else settings.setup), *offline],
        max_requeues=settings.max_requeues,
        srun=settings.srun,
        single=not script.array,
        jobs=script.jobs,
        core=core(),
    )


def _directives(script: JobScript, settings: SlurmConfig) -> list[str]:
    throttle = "" if settings.concurrent is None else f"%{settings.concurrent}"
    wanted = {
        "job-name": settings.name or script.name,
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "time": settings.time,
        "nodes": settings.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": settings.gpus or None,
        "cpus-per-task": settings.cpus,
        "mem": settings.memory,
        "array": f"0-{len(script.jobs) - 1}{throttle}" if script.array else None,
        "signal": f"B:USR1@{settings.signal_s}",
        "chdir": shlex.quote(str(script.workdir)),
        "output": shlex.quote(str(script.log)),
        "open-mode": "append",
    }
    given = [f"--{key}={value}" for key, value in wanted.items() if value is not None]
    return [*given, "--requeue", *settings.directives]
