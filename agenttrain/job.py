"""A run and its folder: what every verb that works in one needs, whatever it does there."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agenttrain.config.schema import RunConfig
from agenttrain.runs.setup import Components
from agenttrain.signals import StopRequest
from agenttrain.tracking.run_folder import read_summary, update_summary
from agenttrain.tracking.silent import Silent
from agenttrain.tracking.tracker import Tracker
from agenttrain.training.checkpoint import CheckpointError, Checkpoints
from agenttrain.training.policy import Policy
from agenttrain.training.world import World
from agenttrain.watchdog import Watchdog


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to run, and where it is recorded."""

    config: RunConfig
    plain: dict[str, Any]
    """The resolved settings, as config.yaml keeps them."""
    folder: Path
    """The run folder; a run that is in it already goes on."""
    sweep: bool = False
    """Whether the folder is one of a sweep's, `<experiment>/<sweep>/<number>`."""
    stop: StopRequest = field(default_factory=StopRequest)
    """Whether the run was told to stop."""
    watchdog: Watchdog = field(default_factory=Watchdog)
    world: World = field(default_factory=World)
    """The processes that run it; the main one alone writes into the folder, besides checkpoints."""

    def record(self, **changes: Any) -> None:
        """`update_summary` by the main process; the others leave it to that one."""
        if self.world.is_main:
            update_summary(self.folder, **changes)

    @property
    def project(self) -> str:
        """The experiment's name: the folder that holds the run's, or the sweep's."""
        parent = self.folder.resolve().parent
        return parent.parent.name if self.sweep else parent.name

    @property
    def group(self) -> str | None:
        """The sweep's name."""
        return self.folder.resolve().parent.name if self.sweep else None

    @property
    def trackio_folder(self) -> Path:
        """The dashboard's data: a sweep's runs share them."""
        return (self.folder.parent if self.sweep else self.folder) / "trackio"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a verb does in its run folder."""

    prepare: Callable[[RunConfig], Components]
    """What needs no weights."""
    run: Callable[[Job, Components], Coroutine[Any, Any, None]]


def checkpoints_of(job: Job, tokenizer: Any) -> Checkpoints:
    """The run's checkpoints."""
    folder, keep = job.folder / "checkpoints", job.config.checkpoint.keep
    return Checkpoints(folder, tokenizer=tokenizer, keep=keep, main=job.world.is_main)


def restored(job: Job, checkpoints: Checkpoints, policy: Policy) -> dict[str, Any] | None:
    """What a resumed run's newest checkpoint says, its policy put back; None: a run from step 0."""
    if job.config.resume is None:
        return None
    found, world = False, job.world
    with world.together("whether there is a checkpoint", CheckpointError):
        found = world.is_main and _has_checkpoint(job.folder, checkpoints)
    return checkpoints.load_latest(policy) if world.broadcast(found) else None


def tracker_of(job: Job, done: int) -> Tracker:
    """The tracker of a run that has done so many steps."""
    if not job.world.is_main:
        return Silent()
    config = job.config
    return Tracker(
        job.folder,
        config.tracker,
        project=job.project,
        name=job.folder.resolve().name,
        total_steps=config.steps,
        resume_step=None if config.resume is None else done,
        trackio_folder=job.trackio_folder,
        group=job.group,
        run_config=job.plain,
    )


def _has_checkpoint(folder: Path, checkpoints: Checkpoints) -> bool:
    """Whether a run goes on from a checkpoint; if it starts again, a line says what that costs.

    Raises CheckpointError when there was one and it is gone.
    """
    if not checkpoints.empty:
        return True
    saved = read_summary(folder).get("latest_checkpoint")
    if saved is not None:
        raise CheckpointError(
            f"{folder / saved}: the run saved this checkpoint, and {checkpoints.folder} holds none "
            "now. Put it back; or start a new run: resuming would begin at step 0."
        )
    metrics = folder / "metrics.jsonl"
    rows = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
    cut = f", {rows} recorded steps are cut" if rows else ""
    print(f"no checkpoint yet: starting again from step 0{cut}", flush=True)
    return False
