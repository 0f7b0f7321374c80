"""One run, from a checked configuration to its summary, in this process."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from agenttrain.build import Prepared, load, prepare
from agenttrain.config.errors import ConfigError
from agenttrain.config.model_path import model_folder
from agenttrain.config.schema import RunConfig
from agenttrain.evaluate import Evaluation, from_json, to_json
from agenttrain.tracking import viewer
from agenttrain.tracking.report import print_report
from agenttrain.tracking.rollouts_file import read_step, rollout_record, step_path, write_step
from agenttrain.tracking.run_folder import read_summary, update_summary, write_config
from agenttrain.tracking.tracker import Tracker
from agenttrain.tracking.trackio_sink import dashboard_command
from agenttrain.trainer import Trainer
from agenttrain.training.checkpoint import Checkpoints
from agenttrain.training.weight_sync import sync
from agenttrain.types import AgenttrainError, Rollout

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""
SHOWN = 3
"""Rollouts printed at the end of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to run, and where it is recorded."""

    config: RunConfig
    plain: dict[str, Any]
    """The resolved settings, as config.yaml keeps them."""
    folder: Path
    """The run folder; a run that is in it already goes on."""

    @property
    def project(self) -> str:
        """The experiment's name: the folder that holds the run's."""
        return self.folder.resolve().parent.name


def launch(config: RunConfig, plain: dict[str, Any], run_folder: Path, verb: str) -> int:
    """Run `verb`, `train` or `eval`; the exit code of the process."""
    job = Job(config=config, plain=plain, folder=run_folder)
    work = {"train": _train, "eval": _evaluate}[verb]
    run_folder.mkdir(parents=True, exist_ok=True)
    try:
        prepared = prepare(config)
        record_fix(job.folder, prepared)
        asyncio.run(work(job, prepared))
    except KeyboardInterrupt:
        update_summary(run_folder, status="interrupted")
        print(f"interrupted; to go on: agenttrain resume={run_folder}", file=sys.stderr)
        return INTERRUPTED
    except ConfigError:
        raise
    except (AgenttrainError, ValueError) as error:
        update_summary(run_folder, status="failed", error=str(error))
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        update_summary(run_folder, status="failed", error=f"{type(error).__name__}: {error}")
        raise
    return 0


def record_fix(folder: Path, prepared: Prepared) -> None:
    """Say once what was changed in the chat template, and keep it with the run."""
    changes = prepared.chat.fix.text()
    if changes:
        file = folder / "chat_template.diff"
        file.write_text(changes, encoding="utf-8")
        print(f"{changes.splitlines()[0]} ({file})")
        for warning in prepared.certificate.warnings:
            print(f"  {warning}")


async def _train(job: Job, prepared: Prepared) -> None:
    started = time.perf_counter()
    async with AsyncExitStack() as stack:
        trainer = await make_trainer(job, prepared, stack)
        summary = read_summary(job.folder)
        before = summary.get("eval", {}).get("before")
        if before is None:
            before = to_json(await trainer.evaluate("before"))
        update_summary(job.folder, status="running", error=None, eval={"before": before})
        training = time.perf_counter()
        await trainer.train()
        training = time.perf_counter() - training
        after = await trainer.evaluate("after")
        checkpoint = trainer.save()
    update_summary(
        job.folder,
        status="finished",
        steps=trainer.done,
        seconds=summary.get("seconds", 0.0) + time.perf_counter() - started,
        training_seconds=summary.get("training_seconds", 0.0) + training,
        eval={"before": before, "after": to_json(after)},
        latest_checkpoint=str(checkpoint.relative_to(job.folder)),
    )
    _report(job, prepared, before, after)


async def _evaluate(job: Job, prepared: Prepared) -> None:
    started = time.perf_counter()
    async with AsyncExitStack() as stack:
        trainer = await make_trainer(job, prepared, stack)
        evaluations = await trainer.evaluate("eval")
    rollouts = [rollout for evaluation in evaluations for rollout in evaluation.rollouts]
    write_step(job.folder, 0, rollouts)
    found = to_json(evaluations)
    update_summary(
        job.folder,
        status="finished",
        steps=0,
        seconds=time.perf_counter() - started,
        eval={"after": found},
    )
    _report(job, prepared, {}, evaluations)


async def make_trainer(job: Job, prepared: Prepared, stack: AsyncExitStack) -> Trainer:
    """A trainer at the run's newest checkpoint, or at its start; the stack closes what it uses."""
    config = job.config
    random.seed(config.seed)
    loaded = load(config, prepared)
    stack.push_async_callback(loaded.engine.aclose)
    stack.push_async_callback(prepared.toolbox.aclose)
    checkpoints = Checkpoints(
        job.folder / "checkpoints", tokenizer=prepared.tokenizer, keep=config.checkpoint.keep
    )
    done = 0
    if config.resume is not None and not checkpoints.empty:
        done = checkpoints.load_latest(loaded.policy)["step"]
        await sync(loaded.policy, loaded.engine, version=done)
    write_config(job.folder, job.plain, prepared.certificate.hash)
    tracker = Tracker(
        job.folder,
        config.tracker,
        project=job.project,
        name=job.folder.resolve().name,
        total_steps=config.steps,
        resume_step=None if config.resume is None else done,
        run_config=job.plain,
    )
    stack.enter_context(tracker)
    return Trainer(
        config=config,
        collector=loaded.collector,
        policy=loaded.policy,
        train_tasks=prepared.train_tasks,
        test_tasks=prepared.test_tasks,
        tracker=tracker,
        checkpoints=checkpoints,
        done=done,
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
    job: Job, prepared: Prepared, before: dict[str, Any], after: Sequence[Evaluation]
) -> None:
    tracked = job.config.tracker.name == "trackio"
    print_report(
        Console(),
        before=from_json(before),
        after=after,
        rollouts=[rollout_record(rollout) for rollout in _telling(after)],
        decode=prepared.chat.decode,
        run_folder=job.folder,
        dashboard=dashboard_command(job.folder, job.project) if tracked else None,
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
