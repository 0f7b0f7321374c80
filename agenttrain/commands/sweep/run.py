"""The jobs of a sweep: each in a process of its own, by whichever launcher Hydra has.

Hydra's launchers (basic, joblib, submitit) call `run_job` here, in this process, in a worker or on
another machine; it starts `agenttrain` for the job, passes on the signals that it gets, and waits.
So no job finds anything of another.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Thread, current_thread, main_thread
from types import FrameType
from typing import IO

from hydra._internal.callbacks import Callbacks
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig

from agenttrain.commands.sweep.config import OnFailedJob
from agenttrain.commands.sweep.record import (
    ENDED,
    FAILED,
    FINISHED,
    INTERRUPTED,
    SweepJob,
    SweepRecord,
    add_job,
    counted,
    is_held,
    named,
    quoted,
    read_record,
    shown,
    standing,
    standings,
    varying,
)
from agenttrain.commands.sweep.table import result
from agenttrain.settings.trust import TRUSTED
from agenttrain.tracking.run_folder import read_summary, update_summary
from agenttrain.types import ConfigError
from agenttrain.utils import exit_codes
from agenttrain.utils.signals import leave_terminal

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
    ended = run(arguments, output, sweep=owner)
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


def note(folder: Path, ended: JobEnd) -> None:
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


FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
GRACE_S = 60.0
"""Seconds between SIGTERM and SIGKILL for a job whose sweep ends with an exception."""
PIPE_S = 5.0
"""Longest wait for what is left in the pipe; a process that the job left behind may hold it."""
PARENT = "AGENTTRAIN_SWEEP_PROCESS"
"""Environment of a job: the process that started it."""
WATCH_S = 1.0
"""Seconds between two checks that the sweep lives, where the kernel does not say."""
TOLD = 4096
"""Bytes of the end of a job's messages that are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """How a job's process ended."""

    code: int
    """Exit code as shells have it: 130 after Ctrl-C, 128 + n after signal n."""
    signalled: bool
    """True if this process was told to stop meanwhile, and told the job."""
    last_words: str
    """The last line of its messages."""


@dataclass(slots=True)
class _Forward:
    """Passes signals on, those that come before there is a process too."""

    process: subprocess.Popen[bytes] | None = None
    seen: list[int] = field(default_factory=list)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.seen.append(number)
        leave_terminal()
        self._send(number)

    def started(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        for number in list(self.seen):
            self._send(number)

    def _send(self, number: int) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)


def end_with_sweep(environment: MutableMapping[str, str] = os.environ) -> None:
    """Kill this process, a job, as soon as the one that started it is gone, however.

    On Linux the kernel does it, without delay; elsewhere a thread checks every `WATCH_S`.
    """
    number = environment.pop(PARENT, None)
    if number is None:
        return
    parent = int(number)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_S)
        os.kill(os.getpid(), signal.SIGKILL)

    if sys.platform == "linux":
        from agenttrain.tools.sandbox import system

        system.prctl(system.PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        Thread(target=watch, daemon=True).start()
    if os.getppid() != parent:  # it was gone before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


def run(arguments: Sequence[str], output: Path | None, *, sweep: int | None = None) -> JobEnd:
    """Run `agenttrain <arguments>` in a fresh interpreter; it is killed if this process ends first.

    `output`: a file for all that it prints; None: it prints to the terminal. `sweep`: the process
    of the whole sweep. Where this is a child of that (joblib's workers), the job is killed with it.
    """
    command = [sys.executable, "-m", "agenttrain.cli", *arguments]
    with ExitStack() as stack:
        file = None if output is None else stack.enter_context(output.open("ab"))
        forward = stack.enter_context(_forwarding())
        # A group of its own: Ctrl-C reaches it once, through this process, and not twice.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.PIPE if file is None else file,
            process_group=0,
            env={**os.environ, PARENT: str(os.getpid())},
        )
        stack.callback(_stop, process)
        forward.started(process)
        words = _Words(process.stderr)
        code = _wait(process, sweep)
        end = words.last() if output is None else output.read_bytes()[-TOLD:]
    lines = [line.strip() for line in end.decode(errors="replace").splitlines()]
    return JobEnd(
        code=128 - code if code < 0 else code,
        signalled=bool(forward.seen),
        last_words=next((line for line in reversed(lines) if line), ""),
    )


def _wait(process: subprocess.Popen[bytes], sweep: int | None) -> int:
    """Wait for a job; it is killed when `sweep`, this process's parent, is gone."""
    if os.getppid() != sweep:
        return process.wait()
    while True:
        try:
            return process.wait(WATCH_S)
        except subprocess.TimeoutExpired:
            if os.getppid() != sweep:
                process.kill()


@contextmanager
def _forwarding() -> Iterator[_Forward]:
    """Pass this process's signals on to a job."""
    forward = _Forward()
    if current_thread() is not main_thread():  # signals are the main thread's
        yield forward
        return
    # A job inherits that nohup ignores SIGHUP; to forward it would end the sweep with its terminal.
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    numbers = [number for number in FORWARDED if number != signal.SIGHUP or not ignored]
    before = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield forward
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Leave no process behind, whatever ended the wait for it."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class _Words:
    """Passes a job's messages on and keeps their end."""

    def __init__(self, pipe: IO[bytes] | None) -> None:
        self._end = b""

        def pass_on() -> None:
            assert pipe is not None
            with pipe:
                while chunk := pipe.read1():  # type: ignore[attr-defined]
                    self._end = (self._end + chunk)[-TOLD:]
                    with suppress(OSError, ValueError):
                        sys.stderr.buffer.write(chunk)
                        sys.stderr.buffer.flush()

        self._thread = Thread(target=pass_on, daemon=True)
        if pipe is not None:
            self._thread.start()

    def last(self) -> bytes:
        """Return the end of the messages."""
        if self._thread.ident is not None:
            self._thread.join(PIPE_S)
        return self._end
