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
    Standing,
    counted,
    is_held,
    standing,
    standings,
)
from agenttrain.tracking.run_folder import read_summary, update_summary

OUTPUT = "output.txt"
"""In a job's folder: what it says where several run at once."""
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
    """What is to be run."""

    folder: Path
    """Its record is there."""
    config_name: str
    overrides: list[str]
    """What composes the settings of Hydra and of the sweep, e.g. ["hydra/launcher=joblib"]."""
    changes: list[str] = field(default_factory=list)
    """What `agenttrain -m resume=…` changes in every job."""
    trust: bool = False
    """Whether the code that the jobs' config.yaml name may run."""

    def composed(self) -> DictConfig:
        """Hydra's settings and the sweep's."""
        return _hydra().compose_config(
            config_name=self.config_name,
            overrides=self.with_folder(),
            run_mode=RunMode.MULTIRUN,
            with_log_configuration=True,
        )

    def with_folder(self) -> list[str]:
        """The overrides, with the sweep's folder as it was resolved."""
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
        found = standings(folder, read_record(folder))
        waiting = [(number, one) for number, one in enumerate(found) if one.unfinished]
        for batch in [[one] for one in waiting] if one_by_one else [waiting] if waiting else []:
            overrides = [_overrides(one) for _, one in batch]
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
    """The exit code of what launches jobs, whose own failures are on record elsewhere."""
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


def _overrides(found: Standing) -> list[str]:
    own = [text for text in found.job.overrides if not text.startswith("hydra.")]
    # By name: Hydra numbers the jobs of one launch, and a sweep that goes on has gaps.
    return [*own, f"hydra.sweep.subdir={quoted(Path(found.job.folder))}"]


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
    found = standing(folder, job)
    objective = None if record.objective is None else result(folder, record.objective)
    objective = objective if found.status == FINISHED else None
    print(f"job {number + 1}: {_told(found, record, objective)}", flush=True)
    if ended.signalled:
        raise SweepStopped(ended.code or exit_codes.INTERRUPTED)
    return objective


def _told(found: Standing, record: SweepRecord, objective: float | None) -> str:
    if found.status != FINISHED:
        return found.status + (f": {found.error}" if found.error else "")
    if record.objective is None:
        return FINISHED
    if objective is None:
        return f"{FINISHED}, but it has no {record.objective}"
    return f"{FINISHED}, {record.objective} {objective:.4g}"


def _arguments(
    sweep: Path, record: SweepRecord, job: SweepJob, changes: Sequence[str], trust: bool
) -> list[str]:
    """What starts the job, or goes on with it."""
    folder = sweep / job.folder
    config = folder / "config.yaml"
    if record.verb == "eval":
        config.unlink(missing_ok=True)  # an evaluation has nothing to go on with: it starts anew
    if config.exists():
        allowed = [TRUSTED] if trust else []
        return [record.verb, *record.options, f"resume={folder}", *changes, *allowed]
    return record.arguments(sweep, job, *changes)


def note(folder: Path, ended: process.Ended) -> None:
    """Put on record how a job ended that could not do so itself."""
    if ended.code == 0 or is_held(folder) or read_summary(folder).get("status") in ENDED[1:]:
        return
    if ended.signalled:
        update_summary(folder, status=INTERRUPTED)
        return
    words = f": {ended.last_words}" if ended.last_words else ""
    update_summary(folder, status=FAILED, error=f"exit code {ended.code}{words}")


def concluded(sweep: Path, code: int) -> int:
    """Say how the sweep stands and how to go on; the exit code, 1 where a job is not finished."""
    found = standings(sweep, read_record(sweep))
    print(f"\nsweep      {sweep}: {counted(found)}")
    print(f"results    {shown(['compare', str(sweep)])}")
    sys.stdout.flush()
    if any(one.unfinished for one in found):
        print(f"to go on   {shown(['-m', f'resume={sweep}'])}", flush=True)
        return code or exit_codes.FAILED
    return code
