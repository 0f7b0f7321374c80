"""Settings of a SLURM job, which only `agenttrain submit` reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import field
from typing import Any

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from agenttrain.utils.data_fields import Data
from agenttrain.utils.sections import SETTINGS, Whole, raise_problems

TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
LONGEST_SIGNAL_S = 65535
"""SLURM's limit."""
RENDERED = {
    **{"job-name": "name", "partition": "partition", "account": "account", "qos": "qos"},
    **{"time": "time", "nodes": "nodes", "gpus-per-node": "gpus", "cpus-per-task": "cpus"},
    **{"mem": "memory", "array": "concurrent", "signal": "signal_s", "requeue": "max_requeues"},
}
"""Directives, mapped to the settings that write them."""
FIXED = ("ntasks", "ntasks-per-node", "output", "open-mode", "chdir", "no-requeue")
"""Directives that submit writes as the job needs them."""


@dataclass(config=SETTINGS)
class SlurmConfig:
    """A SLURM job with one task on each node, which starts the processes there."""

    name: Data[str | None] = None
    """Name of the job; None: the experiment's."""
    partition: Data[str | None] = None
    """None: the cluster's default, as for account, qos and memory."""
    account: Data[str | None] = None
    """Account that the job is charged to."""
    qos: Data[str | None] = None
    """Quality of service."""
    time: Data[str] = "04:00:00"
    """Wall time, hours:minutes:seconds or days-hours:minutes:seconds. A run that needs
    more is put back into the queue and resumed."""
    nodes: Whole = Field(default=1, ge=1)
    """Machines: those that train (`distributed.nodes`), and those that serve (`servers.nodes`)."""
    gpus: Whole = Field(default=0, ge=0)
    """GPUs of each node; one process each (`distributed.processes`)."""
    cpus: Whole = Field(default=8, ge=1)
    """Cores of each node."""
    memory: Data[str | None] = None
    """Memory of each node, e.g. 64G; 0: all of it."""
    concurrent: Whole | None = Field(default=None, ge=1)
    """Jobs of a sweep that run at the same time; None: as many as the cluster allows."""
    signal_s: Whole = Field(default=300, ge=1, le=LONGEST_SIGNAL_S)
    """Seconds before the end of the wall time at which the run is asked to save and to stop. SLURM
    may be 60 seconds early. Must be enough for one update and a checkpoint."""
    max_requeues: Whole = Field(default=100, ge=0)
    """How often one job may go back into the queue."""
    setup: list[str] | None = None
    """Lines of shell before the run, e.g. [module load cuda/12.8, source ~/venv/bin/activate].
    None: the Python that submits."""
    directives: list[str] = field(default_factory=list)
    """Further options of sbatch, e.g. ['--constraint=h100', '--exclude=node7'], in quotes."""
    srun: list[str] = field(default_factory=list)
    """Further options of srun, e.g. ['--container-image=/shared/agenttrain.sqsh']."""
    offline: Data[bool] = True
    """Keep the Hugging Face libraries off the network, which compute nodes often lack."""

    @model_validator(mode="after")
    def _check(self) -> SlurmConfig:
        raise_problems(self._problems())
        return self

    def _problems(self) -> Iterator[str]:
        """Yield settings that SLURM would refuse or read otherwise than they are meant."""
        seconds = wall_seconds(self.time)
        if seconds is None or seconds == 0:
            # YAML reads 4:00:00 without quotes as the number 14400, which SLURM takes for minutes.
            yield (
                f"slurm.time={self.time}: write hours:minutes:seconds (04:00:00) or "
                "days-hours:minutes:seconds (1-12:00:00), in YAML in quotes"
            )
        elif self.signal_s >= seconds:
            yield (
                f"slurm.signal_s={self.signal_s}: leaves nothing of slurm.time={self.time}, "
                f"{seconds} seconds; lower it, or give more time"
            )
        # Each becomes a line #SBATCH of the script, in which % begins a placeholder.
        for key in ("name", "partition", "account", "qos", "memory"):
            value = getattr(self, key)
            if value is not None and not re.fullmatch(r"[^\s%]+", value):
                yield f"slurm.{key}={value!r}: must be one word"
        for key in ("directives", "srun"):
            for text in getattr(self, key):
                if not text.startswith("-") or "\n" in text:
                    yield f"slurm.{key}: {text!r}: must be an option, e.g. --exclude=node7"
        for text in self.directives:
            name = text.partition("=")[0].partition(" ")[0].lstrip("-")
            if name in RENDERED:
                yield f"slurm.directives: {text}: use slurm.{RENDERED[name]}=…, which writes it"
            elif name in FIXED:
                yield f"slurm.directives: {text}: submit writes --{name} itself; leave it out"


def wall_seconds(time: str) -> int | None:
    """Return the seconds of SLURM's days-hours:minutes:seconds; None if its unit is ambiguous.

    Example: ``"1-12:30:00"`` -> 131400, ``"04:00:00"`` -> 14400. ``"90"`` -> None: SLURM takes it
    for minutes, a reader perhaps for seconds.
    """
    match = TIME.fullmatch(time)
    if match is None:
        return None
    days, hours, minutes, seconds = (None if part is None else int(part) for part in match.groups())
    # After days SLURM reads "1-12" and "1-12:30" too. Without days "30:00" is minutes and seconds.
    if days is None and (minutes is None or seconds is None):
        return None
    return 86400 * (days or 0) + 3600 * (hours or 0) + 60 * (minutes or 0) + (seconds or 0)


def job_problems(config: Any) -> Iterator[str]:
    """Yield why a job cannot run the processes of `config`, a RunConfig."""
    section: SlurmConfig = config.slurm
    distributed = config.distributed
    serving = config.servers.nodes  # nodes whose GPUs are the servers'
    training = section.nodes - serving
    if training < 1:
        yield (
            f"servers.nodes={serving}: of slurm.nodes={section.nodes}, and at least one has to "
            f"train; set slurm.nodes={serving + 1} or more"
        )
    if serving and section.gpus:
        servers = config.servers
        needed = servers.per_node * servers.tensor_parallel_size  # GPUs of one node
        if needed > section.gpus:
            yield (
                f"servers.count={servers.count}: with servers.nodes={serving} and servers."
                f"tensor_parallel_size={servers.tensor_parallel_size} a node's servers need "
                f"{needed} GPUs, and it has slurm.gpus={section.gpus}; lower one of them"
            )
    if distributed.name == "single":
        yield from _single_problems(section, serving=serving, training=training)
    elif not section.gpus and distributed.processes is None:
        yield (
            f"distributed={distributed.name}: how many processes on each node? add slurm.gpus=…, "
            "or without GPUs distributed.processes=…"
        )
    elif section.gpus and distributed.processes not in (None, section.gpus):
        yield (
            f"distributed.processes={distributed.processes}: one per GPU, and there are "
            f"slurm.gpus={section.gpus}; leave it out, or make them equal"
        )


def _single_problems(section: SlurmConfig, *, serving: int, training: int) -> Iterator[str]:
    """Yield why a job cannot run distributed=single, one process on one node with one GPU.

    Of the job's nodes, `serving` run servers and `training` train. All nodes have the same
    slurm.gpus: with serving nodes there may be several, which the servers use.
    """
    if serving:
        if training > 1:
            yield (
                f"slurm.nodes={section.nodes}: servers.nodes={serving} of them serve, and "
                f"distributed=single trains on one; add distributed=ddp or distributed=fsdp2, or "
                f"slurm.nodes={serving + 1}"
            )
        return
    for key, value in (("gpus", section.gpus), ("nodes", training)):
        if value > 1:
            yield (
                f"slurm.{key}={value}: distributed=single uses one; add distributed=ddp or "
                f"distributed=fsdp2, or slurm.{key}=1"
            )
