"""One run, from a checked configuration to its summary, in this process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from agenttrain.clock import Clock
from agenttrain.config.errors import ConfigError
from agenttrain.config.exit_codes import DONE, FAILED
from agenttrain.config.model_path import model_folder
from agenttrain.config.saved import done_steps
from agenttrain.config.schema import RunConfig
from agenttrain.crash import Evidence
from agenttrain.ending import failed, interrupted, preempted, record, told
from agenttrain.evaluate import Best, Evaluation, from_json, to_json
from agenttrain.guards import Guards
from agenttrain.job import Job, Work, checkpoints_of, restored, tracker_of
from agenttrain.rollout.collect import Collected, NoRewards, unrewarded
from agenttrain.rollout.deal import Costs
from agenttrain.rollout.declared import write_declared
from agenttrain.runs.fingerprints import check_unchanged, fingerprints
from agenttrain.runs.fingerprints import write as write_fingerprints
from agenttrain.runs.loading import curriculum_of, make_engine, make_policy
from agenttrain.runs.setup import Components, prepare
from agenttrain.signals import Preempted, listening
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
    write_config,
)
from agenttrain.tracking.tracker import Tracker
from agenttrain.tracking.trackio_sink import dashboard_command
from agenttrain.trainer import Trainer
from agenttrain.training.policy import Policy
from agenttrain.training.weight_sync import sync
from agenttrain.training.world import World
from agenttrain.types import Rollout
from agenttrain.watchdog import Watchdog

SHOWN = 3
"""Rollouts printed at the end of a run."""


def launch(
    config: RunConfig,
    plain: dict[str, Any],
    run_folder: Path,
    verb: str,
    sweep: bool = False,
    work: Work | None = None,
    world: World | None = None,
) -> int:
    """Run `verb`, `train` or `eval`, or another whose `work` is given; the process's exit code.

    `sweep`: the folder is one of a sweep's. Every process of `world` makes the same call (None:
    there is one); what goes wrong is told by the main one and raised by the others. Raises
    ConfigError for a folder of another verb.
    """
    world = world or World()
    with listening() as stop:
        if world.size > 1:
            stop.agree = lambda told: world.max(float(told), "whether a signal came") > 0
        job = Job(
            config=config, plain=plain, folder=run_folder, sweep=sweep, world=world, stop=stop
        )
        return _launch(job, verb, work or WORK[verb])


def _launch(job: Job, verb: str, work: Work) -> int:
    """`launch` where signals are heard."""
    if not job.world.is_main:
        return _run(job, verb, work)
    try:
        with held(job.folder):
            earlier = read_summary(job.folder)
            _refuse_other_verb(job.folder, earlier, verb)
            job = replace(job, sweep=job.sweep or earlier.get("sweep", False))
            processes = job.world.size if job.world.size > 1 else None
            sweep = job.sweep or None
            job.record(verb=verb, sweep=sweep, processes=processes, stalled_phase=None)
            return _run(job, verb, work)
    except (FolderInUse, OSError) as error:
        print(told(error, job.folder), file=sys.stderr)
        return FAILED


def _refuse_other_verb(folder: Path, summary: dict[str, Any], verb: str) -> None:
    found = summary.get("verb", verb)
    if found != verb:
        raise ConfigError(
            f"{folder}: holds a run of `agenttrain {found}`, and `agenttrain {verb}` cannot go on "
            "with it. Give another folder: resume= the run that was trained, or hydra.run.dir= a "
            "new one."
        )


def _run(job: Job, verb: str, work: Work) -> int:
    """`launch` in a folder that is held; errors are told and recorded by the main process."""
    try:
        with Watchdog(job.folder, job.config.watchdog, job.world) as watchdog:
            job = replace(job, watchdog=watchdog)
            watchdog.begin("load")
            asyncio.run(work.run(job, _prepare(job, work.prepare)))
    except Preempted as stopped:
        return preempted(job, verb, str(stopped))
    except KeyboardInterrupt:
        return interrupted(job, verb)
    except ConfigError:
        raise
    except Exception as error:
        if not job.world.is_main:
            raise
        return failed(job, verb, error)
    return DONE


def _prepare(job: Job, prepare: Callable[[RunConfig], Components]) -> Components:
    """The run's parts; config.yaml stands before anything slow, so that a stopped run can go on."""
    if not job.world.is_main:
        return prepare(job.config)
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
    _same_as_before(job, prepared)
    write_config(job.folder, job.plain, prepared.certificate.hash)
    write_declared(job.folder, prepared.toolbox, prepared.environments)
    record_fix(job.folder, prepared)
    for note in prepared.tasks.notes:
        print(note, flush=True)
    return prepared


def _same_as_before(job: Job, prepared: Components) -> None:
    """Raise ConfigError where a run that has learnt something would go on with another thing."""
    now = fingerprints(prepared)
    if job.config.resume is not None and done_steps(job.folder):
        check_unchanged(job.folder, now, job.config.resume_changed)
    write_fingerprints(job.folder, now)


def record_fix(folder: Path, prepared: Components) -> None:
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


def record_kernel(job: Job, prepared: Components, policy: Policy) -> None:
    """Record in config.yaml which kernels compute the attention of training; on a GPU print it."""
    if not job.world.is_main:
        return
    write_config(job.folder, job.plain, prepared.certificate.hash, policy.kernel)
    if policy.device.type == "cuda":
        print(f"attention: training/kernel={policy.kernel}", flush=True)


async def _train(job: Job, prepared: Components) -> None:
    with timed(job) as clock:
        async with AsyncExitStack() as stack:
            trainer = await make_trainer(job, prepared, stack)
            with job.stop.deferred(trainer.keep):
                before = evaluated_before(job)
                if before is None:
                    before = to_json(await trainer.evaluate("before"))
                found = {"before": before, "best": trainer.best.found}
                job.record(status="running", error=None, eval=found)
                with clock("training_"):
                    await trainer.train()
                after = await trainer.evaluate("after")
                trainer.keep()
    job.record(
        status="finished",
        steps=trainer.done,
        eval={"before": before, "after": to_json(after), "best": trainer.best.found},
    )
    if job.world.is_main:
        _report(job, prepared, trainer.tracker, before, after, trainer.best)


def evaluated_before(job: Job) -> dict[str, Any] | None:
    """What a run that goes on was worth before its first step; every process is told the same."""
    found = None
    if job.world.is_main:
        found = read_summary(job.folder).get("eval", {}).get("before")
    return job.world.broadcast(found, "the evaluation before training")


@contextmanager
def timed(job: Job) -> Iterator[Clock]:
    """Add wall seconds to summary.json's, however the work ends: `seconds` for all of it, and
    `<phase>seconds` for the phases of the clock."""
    earlier = read_summary(job.folder)
    clock = Clock()
    try:
        with clock(""):
            yield clock
    finally:
        names = {f"{phase}seconds": seconds for phase, seconds in clock.seconds.items()}
        record(job, **{name: earlier.get(name, 0.0) + value for name, value in names.items()})


async def _evaluate(job: Job, prepared: Components) -> None:
    with timed(job):
        async with AsyncExitStack() as stack:
            trainer = await make_trainer(job, prepared, stack)
            evaluations = await trainer.evaluate("eval")
    rollouts = [rollout for evaluation in evaluations for rollout in evaluation.rollouts]
    if not job.world.is_main:
        return
    write_step(job.folder, 0, rollouts, limit(job.config.tracker.rollouts))
    found = {"after": to_json(evaluations)}
    if (reason := unrewarded(rollouts)) is not None:
        job.record(steps=0, eval=found)
        told = f"not one of {len(rollouts)} rollouts has a reward: {reason or 'all of them failed'}"
        raise NoRewards(told, Collected())
    job.record(status="finished", steps=0, eval=found)
    _report(job, prepared, trainer.tracker, {}, evaluations)


async def make_trainer(job: Job, prepared: Components, stack: AsyncExitStack) -> Trainer:
    """A trainer at the run's newest checkpoint, or at its start; the stack closes what it uses."""
    config = job.config
    policy = make_policy(
        config,
        config.algorithm,
        temperature=config.rollout.temperature,
        reward_weights=prepared.rubric.weights,
        world=job.world,
    )
    engine = make_engine(config, policy, job.folder)
    collector = prepared.collector(engine)
    stack.push_async_callback(engine.aclose)
    stack.push_async_callback(prepared.aclose)
    record_kernel(job, prepared, policy)
    job.watchdog.watch(collector, policy.model.get_input_embeddings())
    checkpoints = checkpoints_of(job, prepared.tokenizer)
    state = restored(job, checkpoints, policy)
    done = 0 if state is None else state["step"]
    # One engine may compile minutes longer than another.
    job.world.exchange((), "the engine in every process", patient=True)
    with job.world.collective("the first weight sync"):
        probed = await sync(
            policy,
            engine,
            done,
            config.weight_sync,
            prompt_ids=prepared.probe_prompt(),
        )
    tracker = tracker_of(job, done)
    stack.enter_context(tracker)
    trainer = Trainer(
        config=config,
        collector=replace(collector, stop=job.stop, progress=tracker.progress.rollouts),
        policy=policy,
        train_tasks=prepared.train_tasks,
        test_tasks=prepared.test_tasks,
        tracker=tracker,
        checkpoints=checkpoints,
        evidence=Evidence(folder=job.folder, policy=policy, checkpoints=checkpoints),
        guards=Guards(config=config.guards),
        watchdog=job.watchdog,
        curriculum=curriculum_of(config, prepared.train_tasks),
        stop=job.stop,
        world=job.world,
        costs=Costs(config.eval.group_by),
        probed=probed,
    )
    if state is not None:
        trainer.load_state_dict(state)
    return trainer


def write_page(config: RunConfig, folder: Path, step: int, to: Path | None = None) -> Path:
    """Write the HTML page of a step's rollouts; without `to` it lies beside their file."""
    from transformers import AutoTokenizer

    # The checkpoint's tokenizer is the one that the run had; model.path may have changed since.
    saved = folder / "checkpoints" / "latest"
    source = saved if saved.exists() else model_folder(config.model.path)
    tokenizer = AutoTokenizer.from_pretrained(source)
    path = to or step_path(folder, step).with_suffix(".html")
    title = f"{folder.resolve().name}, step {step}"
    viewer.write(path, read_step(folder, step), tokenizer.decode, title=title)
    return path


def _report(
    job: Job,
    prepared: Components,
    tracker: Tracker,
    before: dict[str, Any],
    after: Sequence[Evaluation],
    best: Best | None = None,
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
        # One that was made on the way; the table has what the run ended with.
        best=best.found if best and best.step != job.config.steps else None,
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


WORK: dict[str, Work] = {
    "train": Work(prepare=prepare, run=_train),
    "eval": Work(prepare=partial(prepare, verb="eval"), run=_evaluate),
}
