"""Where the time of a training step goes, on the bundled agent.

One run of `agenttrain` (side by side in one run: the phases of the same steps). The figures:

    share_rollout, share_train, share_sync, share_other    of the wall time between two steps
    share_reward                                           of the same, a part of share_rollout
    step_s                                                 median seconds of a step
    rollout_tokens_per_s                                   sampled tokens per second of rollout
    tracking_share                                         rollout files and metrics, of a step
    rollouts_file_share                                    the rollout files alone, of a step
    finite_share                                           looking for weights and logprobs that
                                                           are not finite, of a step
    timeline_cpu_share                                     CPU time of recording who did what when
                                                           (timeline/*.jsonl), of that of the steps
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import harness

from agenttrain.runs.run import Run, make_trainer
from agenttrain.runs.setup import prepare
from agenttrain.settings.compose import Source, compose_run, hydra_session
from agenttrain.tracking.rollouts import write_step
from agenttrain.tracking.timeline import Timeline
from agenttrain.trainer import Trainer
from agenttrain.training.nonfinite import check_logprobs, check_weights


class TimedTimeline(Timeline):
    """Adds up the CPU time that recording takes."""

    cpu_s = 0.0

    def _add(self, *arguments: Any) -> None:
        started = time.thread_time()
        super()._add(*arguments)
        self.cpu_s += time.thread_time() - started


def measure(quick: bool) -> dict[str, float]:
    """Train some steps and take them apart; the first two warm up."""
    steps = 6 if quick else 22
    source = Source()
    with hydra_session(source), tempfile.TemporaryDirectory() as folder:
        composed = compose_run([f"steps={steps}", "tracker.console=false"], source)
        run = Run(
            verb="train",
            config=composed.config,
            plain=composed.plain,
            folder=Path(folder) / "run",
        )
        run.folder.mkdir()
        return asyncio.run(measured(run, steps))


async def measured(run: Run, steps: int) -> dict[str, float]:
    """Seconds by phase over the steps after the second."""
    async with AsyncExitStack() as stack:
        run.timeline = timeline = stack.enter_context(TimedTimeline(run.folder, "trainer-0"))
        trainer = await make_trainer(run, prepare(run.config), stack)
        for step in (1, 2):
            await one_step(run, trainer, step)
        before, started = timeline.cpu_s, time.process_time()
        rows = [await one_step(run, trainer, step) for step in range(3, steps + 1)]
        recording = (timeline.cpu_s - before) / (time.process_time() - started)
    whole = sum(row["step_s"] for row in rows)
    share = {
        f"share_{phase}": sum(row[f"time/{phase}_s"] for row in rows) / whole
        for phase in ("rollout", "train", "sync", "reward")
    }
    known = sum(share[f"share_{phase}"] for phase in ("rollout", "train", "sync"))
    return {
        **share,
        "share_other": 1 - known,
        "rollouts_file_share": sum(row["rollouts_file_s"] for row in rows) / whole,
        "finite_share": sum(row["finite_s"] for row in rows) / whole,
        "timeline_cpu_share": recording,
        "tracking_share": sum(row["tracking_s"] for row in rows) / whole,
        "step_s": statistics.median(row["step_s"] for row in rows),
        "rollout_tokens_per_s": statistics.median(row["tokens_per_s"] for row in rows),
    }


async def one_step(run: Run, trainer: Trainer, step: int) -> dict[str, float]:
    """One step and its record, timed."""
    started = time.perf_counter()
    metrics, rollouts = await trainer.step(step)
    finished = time.perf_counter()
    run.tracker.step(step, metrics, rollouts)
    recorded = time.perf_counter()
    # What the tracker and the step did among other things, once more by itself.
    arrays_above = run.config.tracker.arrays_above
    write_step(run.folder / "again", step, rollouts, arrays_above=arrays_above)
    written = time.perf_counter()
    for _ in range(2):  # before the step and after its update
        check_weights(trainer.policy.model, "")
    check_logprobs(rollouts)
    checked = time.perf_counter()
    return {
        **metrics,
        "step_s": recorded - started,
        "tracking_s": recorded - finished,
        "rollouts_file_s": written - recorded,
        "finite_s": checked - written,
    }


if __name__ == "__main__":
    harness.run(__doc__ or "", measure)
