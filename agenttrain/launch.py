"""One run, from a checked configuration to its summary, in this process."""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event, current_thread, main_thread
from types import FrameType
from typing import Any

from rich.console import Console

from agenttrain.build import Prepared, load, prepare
from agenttrain.config.command import resuming
from agenttrain.config.errors import ConfigError
from agenttrain.config.model_path import model_folder
from agenttrain.config.schema import RunConfig
from agenttrain.crash import Evidence
from agenttrain.evaluate import Evaluation, from_json, to_json
from agenttrain.guards import Guards
from agenttrain.job import Checked, Job, Parts, Work, checkpoints_of, restored, tracker_of
from agenttrain.tracking import viewer
from agenttrain.tracking.report import print_report
from agenttrain.tracking.rollouts_file import (
    limit,
    read_step,
    rollout_record,
    step_path,
    write_step,
)
from agenttrain.tracking.run_folder import (
    FolderInUse,
    held,
    read_summary,
    update_summary,
    write_config,
)
from agenttrain.tracking.tracker import Tracker
from agenttrain.tracking.trackio_sink import dashboard_command
from agenttrain.trainer import Clock, Trainer
from agenttrain.training.weight_sync import sync
from agenttrain.types import AgenttrainError, Rollout

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""
TERMINATED = 143
"""Exit code after SIGTERM, as shells have it."""
SHOWN = 3
"""Rollouts printed at the end of a run."""


def launch(
    config: RunConfig,
    plain: dict[str, Any],
    run_folder: Path,
    verb: str,
    sweep: bool = False,
    work: Work[Any] | None = None,
) -> int:
    """Run `verb`, `train` or `eval`, or another whose `work` is given; the process's exit code.

    `sweep`: the folder is one of a sweep's. Raises ConfigError for a folder of another verb.
    """
    try:
        with held(run_folder):
            earlier = read_summary(run_folder)
            _refuse_other_verb(run_folder, earlier, verb)
            sweep = sweep or earlier.get("sweep", False)
            job = Job(config=config, plain=plain, folder=run_folder, sweep=sweep)
            update_summary(run_folder, verb=verb, sweep=sweep or None)
            return _run(job, verb, work or WORK[verb])
    except (FolderInUse, OSError) as error:
        print(_told(error, run_folder), file=sys.stderr)
        return 1


def _refuse_other_verb(folder: Path, summary: dict[str, Any], verb: str) -> None:
    found = summary.get("verb", verb)
    if found != verb:
        raise ConfigError(
            f"{folder}: holds a run of `agenttrain {found}`, and `agenttrain {verb}` cannot go on "
            "with it. Give another folder: resume= the run that was trained, or hydra.run.dir= a "
            "new one."
        )


def _run(job: Job, verb: str, work: Work[Any]) -> int:
    """`launch` in a folder that is held; errors are told and recorded."""
    with terminable() as terminated:
        try:
            asyncio.run(work.run(job, _prepare(job, work.prepare)))
        except KeyboardInterrupt:
            _record(job.folder, status="interrupted")
            again = f"agenttrain {resuming(verb)}resume={shlex.quote(str(job.folder))}"
            print(
                "interrupted" if verb == "eval" else f"interrupted; to go on: {again}",
                file=sys.stderr,
            )
            return TERMINATED if terminated.is_set() else INTERRUPTED
        except ConfigError:
            raise
        except (AgenttrainError, ValueError, OSError) as error:
            told = _told(error, job.folder)
            _record(job.folder, status="failed", error=told)
            print(told, file=sys.stderr)
            return 1
        except Exception as error:
            _record(job.folder, status="failed", error=f"{type(error).__name__}: {error}")
            raise
    return 0


def _told(error: Exception, folder: Path) -> str:
    """An error in a line, with the path that it is about."""
    nameless = isinstance(error, OSError) and error.filename is None
    return f"{type(error).__name__}: {error}" + (f" (run folder {folder})" if nameless else "")


def _record(folder: Path, **changes: Any) -> None:
    """`update_summary` where an error is being told already: a full disk is no second one."""
    with suppress(OSError):
        update_summary(folder, **changes)


@contextmanager
def terminable() -> Iterator[Event]:
    """Within, SIGTERM does what Ctrl-C does; the event that it sets tells the two apart."""
    terminated = Event()

    def terminate(number: int, frame: FrameType | None) -> None:
        terminated.set()
        # While asyncio runs this is its handler, which cancels the main task in good order.
        interrupt = signal.getsignal(signal.SIGINT)
        (interrupt if callable(interrupt) else signal.default_int_handler)(number, frame)

    if current_thread() is not main_thread():  # signals are the main thread's
        yield terminated
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield terminated
    finally:
        signal.signal(signal.SIGTERM, before)


def _prepare(job: Job, prepare: Callable[[RunConfig], Parts]) -> Parts:
    """The run's parts; config.yaml stands before anything slow, so that a stopped run can go on."""
    path = job.folder / "config.yaml"
    new = not path.exists()
    if new:
        write_config(job.folder, job.plain, None)
    try:
        prepared = prepare(job.config)
    except Exception:
        if new:  # a run that cannot be built has not begun: its folder is free for the next try
            path.unlink(missing_ok=True)
        raise
    write_config(job.folder, job.plain, prepared.certificate.hash)
    record_fix(job.folder, prepared)
    for note in prepared.data_notes:
        print(note, flush=True)
    return prepared


def record_fix(folder: Path, prepared: Checked) -> None:
    """Say once which chat template it is and what was changed in it, and keep that with the run."""
    fix = prepared.chat.fix
    if fix.chosen:
        print(f"chat template: {fix.chosen}")
    if changes := fix.text():
        file = folder / "chat_template.diff"
        file.write_text(changes, encoding="utf-8")
        print(f"{changes.splitlines()[0]} ({file})")
    for warning in prepared.certificate.warnings:
        print(f"  {warning}")


async def _train(job: Job, prepared: Prepared) -> None:
    with timed(job.folder) as clock:
        async with AsyncExitStack() as stack:
            trainer = await make_trainer(job, prepared, stack)
            before = read_summary(job.folder).get("eval", {}).get("before")
            if before is None:
                before = to_json(await trainer.evaluate("before"))
            update_summary(job.folder, status="running", error=None, eval={"before": before})
            with clock("training_"):
                await trainer.train()
            after = await trainer.evaluate("after")
            trainer.save()
    update_summary(
        job.folder,
        status="finished",
        steps=trainer.done,
        eval={"before": before, "after": to_json(after)},
    )
    _report(job, prepared, trainer.tracker, before, after)


@contextmanager
def timed(folder: Path) -> Iterator[Clock]:
    """Add wall seconds to summary.json's, however the work ends: `seconds` for all of it, and
    `<phase>seconds` for the phases of the clock."""
    earlier = read_summary(folder)
    clock = Clock()
    try:
        with clock(""):
            yield clock
    finally:
        names = {f"{phase}seconds": seconds for phase, seconds in clock.seconds.items()}
        _record(folder, **{name: earlier.get(name, 0.0) + value for name, value in names.items()})


async def _evaluate(job: Job, prepared: Prepared) -> None:
    with timed(job.folder):
        async with AsyncExitStack() as stack:
            trainer = await make_trainer(job, prepared, stack)
            evaluations = await trainer.evaluate("eval")
    rollouts = [rollout for evaluation in evaluations for rollout in evaluation.rollouts]
    write_step(job.folder, 0, rollouts, limit(job.config.tracker.rollouts))
    update_summary(job.folder, status="finished", steps=0, eval={"after": to_json(evaluations)})
    _report(job, prepared, trainer.tracker, {}, evaluations)


async def make_trainer(job: Job, prepared: Prepared, stack: AsyncExitStack) -> Trainer:
    """A trainer at the run's newest checkpoint, or at its start; the stack closes what it uses."""
    config = job.config
    loaded = load(config, prepared)
    stack.push_async_callback(loaded.engine.aclose)
    stack.push_async_callback(prepared.toolbox.aclose)
    stack.push_async_callback(prepared.environments.aclose)
    checkpoints = checkpoints_of(job, prepared.tokenizer)
    done = cursor = 0
    guards = Guards(config=config.guards)
    if (state := restored(job, checkpoints, loaded.policy)) is not None:
        done, cursor = state["step"], state["cursor"]
        guards.streak = state.get("streak", 0)
    await sync(loaded.policy, loaded.engine, done, config.weight_sync)
    tracker = tracker_of(job, done)
    stack.enter_context(tracker)
    return Trainer(
        config=config,
        collector=loaded.collector,
        policy=loaded.policy,
        train_tasks=prepared.train_tasks,
        test_tasks=prepared.test_tasks,
        tracker=tracker,
        checkpoints=checkpoints,
        evidence=Evidence(folder=job.folder, policy=loaded.policy, checkpoints=checkpoints),
        guards=guards,
        done=done,
        cursor=cursor,
    )


def write_page(config: RunConfig, folder: Path, step: int) -> Path:
    """The HTML page of a step's rollouts; it lies beside their file."""
    from transformers import AutoTokenizer

    # The checkpoint's tokenizer is the one that the run had; model.path may have changed since.
    saved = folder / "checkpoints" / "latest"
    source = saved if saved.exists() else model_folder(config.model.path)
    tokenizer = AutoTokenizer.from_pretrained(source)
    path = step_path(folder, step).with_suffix(".html")
    title = f"{folder.resolve().name}, step {step}"
    viewer.write(path, read_step(folder, step), tokenizer.decode, title=title)
    return path


def _report(
    job: Job,
    prepared: Prepared,
    tracker: Tracker,
    before: dict[str, Any],
    after: Sequence[Evaluation],
) -> None:
    command = dashboard_command(job.folder, job.project, trackio_folder=job.trackio_folder)
    print_report(
        Console(),
        before=from_json(before),
        after=after,
        rollouts=[rollout_record(rollout) for rollout in _telling(after)],
        decode=prepared.chat.decode,
        run_folder=job.folder,
        dashboard=command if tracker.has_dashboard else None,
    )


def _telling(evaluations: Sequence[Evaluation]) -> list[Rollout]:
    """Sampled rollouts that show the most: the longest solved ones, and last an unsolved one."""
    rollouts = [
        rollout
        for evaluation in evaluations[:1]
        for rollout in evaluation.rollouts
        if rollout.reward is not None
    ]
    ranked = sorted(rollouts, key=lambda r: (r.reward, len(r.tool_results)), reverse=True)
    return ranked if len(ranked) < SHOWN else [*ranked[: SHOWN - 1], ranked[-1]]


WORK: dict[str, Work[Any]] = {
    "train": Work(prepare=prepare, run=_train),
    "eval": Work(prepare=prepare, run=_evaluate),
}
