"""The jobs of a sweep: each in a process of its own, by whichever launcher Hydra has.

Hydra's launchers (basic, joblib, submitit) call `run_job` here, in this process, in a worker or on
another machine; it starts `agenttrain` for the job and waits. So no job finds anything of another.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hydra._internal.callbacks import Callbacks
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig

from agenttrain.config import exit_codes
from agenttrain.config.errors import ConfigError
from agenttrain.config.sweep_settings import OnFailedJob
from agenttrain.config.trust import TRUSTED
from agenttrain.sweep import process
from agenttrain.sweep.record import (
    SweepJob,
    SweepRecord,
    add_job,
    named,
    quoted,
    read_record,
    shown,
    varying,
)
from agenttrain.sweep.results import result
from agenttrain.sweep.status import (
    ENDED,
    FAILED,
    FINISHED,
    INTERRUPTED,
    counted,
    is_held,
    standing,
    standings,
)
from agenttrain.tracking.run_folder import read_summary, update_summary

OUTPUT = "output.txt"
"""File in a job's folder: its output where several run at once."""
BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"


class SweepStopped(BaseException):
    """The sweep was told to stop, and so was its job.

    No Exception: Hydra would take it for the job's result and start the next job.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A sweep that is to be run."""

    folder: Path
    """Its record is there."""
    config_name: str
    overrides: list[str]
    """They compose the settings of Hydra and of the sweep, e.g. ["hydra/launcher=joblib"]."""
    changes: list[str] = field(default_factory=list)
    """Overrides by which `agenttrain -m resume=…` changes every job."""
    trust: bool = False
    """True: the code that the jobs' config.yaml name may run."""

    def composed(self) -> DictConfig:
        """Compose Hydra's settings and the sweep's."""
        return _hydra().compose_config(
            config_name=self.config_name,
            overrides=self.with_folder(),
            run_mode=RunMode.MULTIRUN,
            with_log_configuration=True,
        )

    def with_folder(self) -> list[str]:
        """Return the overrides, with the sweep's folder as it was resolved."""
        return [*self.overrides, f"hydra.sweep.dir={quoted(self.folder)}"]


def run_listed(sweep: Sweep) -> int:
    """Run every job of the record that is not finished; the exit code. Needs a `hydra_session`."""
    config = sweep.composed()
    one_by_one = str(config.hydra.launcher["_target_"]) == BASIC
    stop = config.sweep.on_failed_job is OnFailedJob.stop
    if stop and not one_by_one:
        raise ConfigError(
            "sweep.on_failed_job=stop: needs hydra/launcher=basic, which runs one job at a time"
        )
    folder, changes = sweep.folder.resolve(), tuple(sweep.changes)
    job = partial(
        run_job,
        sweep=folder,
        shows=one_by_one,
        changes=changes,
        owner=os.getpid(),
        trust=sweep.trust,
    )

    def launch() -> None:
        context = HydraContext(config_loader=_hydra().config_loader, callbacks=Callbacks(config))
        launcher = Plugins.instance().instantiate_launcher(context, job, config)
        jobs = standings(folder, read_record(folder))
        waiting = [(number, one) for number, one in enumerate(jobs) if one.unfinished]
        batches = [waiting] if waiting else []
        if one_by_one:
            batches = [[one] for one in waiting]
        for batch in batches:
            # By name: Hydra numbers the jobs of one launch, and a sweep that goes on has gaps.
            overrides = [
                [
                    *(text for text in one.job.overrides if not text.startswith("hydra.")),
                    f"hydra.sweep.subdir={quoted(Path(one.job.folder))}",
                ]
                for _, one in batch
            ]
            launcher.launch(overrides, initial_job_idx=batch[0][0])
            last = batch[-1][1]
            if stop and standing(last.folder, last.job).status != FINISHED:
                print("the others wait: sweep.on_failed_job=stop", flush=True)
                break

    return concluded(sweep.folder, _code_of(launch))


def run_searched(sweep: Sweep) -> int:
    """Let a sweeper choose jobs as it goes; the exit code. Needs a `hydra_session`."""
    folder = sweep.folder.resolve()
    one_by_one = str(sweep.composed().hydra.launcher["_target_"]) == BASIC
    job = partial(run_job, sweep=folder, shows=one_by_one, changes=(), owner=os.getpid())
    name, overrides = sweep.config_name, sweep.with_folder()
    return concluded(sweep.folder, _code_of(lambda: _hydra().multirun(name, job, overrides)))


def _hydra() -> Hydra:
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None, "a sweep outside of a hydra_session"
    return hydra


def _code_of(launch: Callable[[], object]) -> int:
    """Launch jobs; return the exit code. Their own failures are on record elsewhere."""
    try:
        launch()
    except SweepStopped as stopped:
        return stopped.code
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    except ConfigError:
        raise
    except Exception as error:  # of a launcher or sweeper: what it raises is its own
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return exit_codes.FAILED
    return exit_codes.DONE


def run_job(
    settings: DictConfig,
    *,
    sweep: Path,
    shows: bool,
    changes: Sequence[str],
    owner: int,
    trust: bool = False,
) -> float | None:
    """Run the job that Hydra is at, as its task function; its objective, None where there is none.

    `shows`: its output goes to the terminal, not to OUTPUT. `owner`: the process of the whole
    sweep, of which this may be a child. Raises SweepStopped.
    """
    hydra = HydraConfig.get()
    name = Path(hydra.runtime.output_dir).name
    add_job(sweep, SweepJob(folder=name, overrides=list(hydra.overrides.task)))
    record = read_record(sweep)
    number, job = next((n, j) for n, j in enumerate(record.jobs) if j.folder == name)
    folder = sweep / name
    if is_held(folder):
        print(f"{folder}: another process works there; left to it", flush=True)
        return None
    if standing(folder, job).status == FINISHED:  # since it was put on the list
        print(f"{folder}: finished meanwhile", flush=True)
        return None if record.objective is None else result(folder, record.objective)
    chosen = named(varying(record)[number])
    print(f"\njob {number + 1} of {len(record.jobs)}: {chosen} -> {folder}", flush=True)
    if read_summary(folder):
        update_summary(folder, status=None, error=None)  # of the last time
    output = None if shows else folder / OUTPUT
    arguments = _arguments(sweep, record, job, changes, trust)
    ended = process.run(arguments, output, sweep=owner)
    note(folder, ended)
    now = standing(folder, job)
    message, objective = now.status, None
    if now.status != FINISHED:
        message += f": {now.error}" if now.error else ""
    elif record.objective is not None:
        objective = result(folder, record.objective)
        if objective is None:
            message += f", but it has no {record.objective}"
        else:
            message += f", {record.objective} {objective:.4g}"
    print(f"job {number + 1}: {message}", flush=True)
    if ended.signalled:
        raise SweepStopped(ended.code or exit_codes.INTERRUPTED)
    return objective


def _arguments(
    sweep: Path, record: SweepRecord, job: SweepJob, changes: Sequence[str], trust: bool
) -> list[str]:
    """Return the arguments that start the job, or go on with it."""
    folder = sweep / job.folder
    config = folder / "config.yaml"
    if record.verb == "eval":
        config.unlink(missing_ok=True)  # an evaluation has nothing to go on with: it starts anew
    if config.exists():
        allowed = [TRUSTED] if trust else []
        return [record.verb, *record.options, f"resume={folder}", *changes, *allowed]
    return record.arguments(sweep, job, *changes)


def note(folder: Path, ended: process.Ended) -> None:
    """Record how a job ended that could not do so itself."""
    if ended.code == 0 or is_held(folder) or read_summary(folder).get("status") in ENDED[1:]:
        return
    if ended.signalled:
        update_summary(folder, status=INTERRUPTED)
        return
    words = f": {ended.last_words}" if ended.last_words else ""
    update_summary(folder, status=FAILED, error=f"exit code {ended.code}{words}")


def concluded(sweep: Path, code: int) -> int:
    """Print how the sweep stands; return the exit code, 1 where a job is not finished."""
    jobs = standings(sweep, read_record(sweep))
    print(f"\nsweep      {sweep}: {counted(jobs)}")
    print(f"results    {shown(['compare', str(sweep)])}")
    sys.stdout.flush()
    if any(one.unfinished for one in jobs):
        print(f"to go on   {shown(['-m', f'resume={sweep}'])}", flush=True)
        return code or exit_codes.FAILED
    return code
