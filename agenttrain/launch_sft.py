"""`agenttrain sft` in its run folder: what it is made of, and its beginning and end."""

from __future__ import annotations

import shlex
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from agenttrain.config.schema import RunConfig
from agenttrain.imitation import CROSS_ENTROPY, Imitation
from agenttrain.job import Job, Work, checkpoints_of, restored, tracker_of
from agenttrain.launch import evaluated_before, launch, record_kernel, timed
from agenttrain.runs.loading import make_policy
from agenttrain.runs.setup import Components, prepare
from agenttrain.training.policy import Policy


async def _imitate(job: Job, prepared: Components) -> None:
    config = job.config
    with timed(job) as clock:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(prepared.aclose)
            policy = make_policy(config, CROSS_ENTROPY, temperature=1.0)
            record_kernel(job, prepared, policy)
            imitation = _imitation(job, prepared, policy)
            stack.enter_context(imitation.tracker)
            with job.stop.deferred(imitation.keep):
                before = evaluated_before(job)
                if before is None:
                    before = imitation.evaluate("before")
                job.record(status="running", error=None, eval={"before": before})
                with clock("training_"):
                    imitation.train()
                after = imitation.evaluate("after")
                imitation.keep()
    job.record(
        status="finished",
        steps=imitation.done,
        eval={"before": before, "after": after},
    )
    _report(job.folder, before, after)


def _imitation(job: Job, prepared: Components, policy: Policy) -> Imitation:
    """At the run's newest checkpoint, or at its start."""
    config = job.config
    job.watchdog.watch(None, policy.model.get_input_embeddings())
    checkpoints = checkpoints_of(job, prepared.tokenizer)
    state = restored(job, checkpoints, policy) or {"step": 0, "evaluated": 0}
    done = state["step"]
    text = policy.model.config.get_text_config()
    context = getattr(text, "max_position_embeddings", None)
    limits = [limit for limit in (config.sft.max_tokens, context) if limit is not None]
    return Imitation(
        config=config,
        demonstrator=prepared.demonstrator,
        policy=policy,
        train_tasks=prepared.train_tasks,
        test_tasks=prepared.test_tasks,
        tracker=tracker_of(job, done),
        checkpoints=checkpoints,
        max_tokens=min(limits, default=2**31),
        stop=job.stop,
        watchdog=job.watchdog,
        done=done,
        saved=done,
        evaluated=state["evaluated"],
    )


def _report(folder: Path, before: dict[str, Any], after: dict[str, Any]) -> None:
    if before and after:
        print(
            f"held-out loss  {before['loss']:.4f} -> {after['loss']:.4f} nats per token, "
            f"{after['conversations']:.0f} conversations"
        )
    model = shlex.quote(str(folder / "checkpoints" / "latest"))
    print(f"run            {folder}")
    print(f"tokens         agenttrain view {shlex.quote(str(folder))}")
    print(f"next           agenttrain eval model.path={model}   how good is it at its tasks?")
    print(f"               agenttrain model.path={model}        reinforcement learning from here")


def launch_sft(
    config: RunConfig, plain: dict[str, Any], run_folder: Path, *, sweep: bool = False
) -> int:
    """`launch` of the verb `sft`."""
    work = Work(prepare=partial(prepare, verb="sft"), run=_imitate)
    return launch(config, plain, run_folder, "sft", sweep=sweep, work=work)
