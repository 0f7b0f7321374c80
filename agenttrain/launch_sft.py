"""`agenttrain sft` in its run folder: what it is made of, and its beginning and end."""

from __future__ import annotations

import shlex
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agenttrain.build import check_model, make_policy
from agenttrain.chat.certificate import Certificate
from agenttrain.chat.response_export import response_template
from agenttrain.chat.template import Chat
from agenttrain.check import certified, check_rows
from agenttrain.config.schema import RunConfig
from agenttrain.data.build import build_tasks
from agenttrain.data.source import TaskSource
from agenttrain.imitation import CROSS_ENTROPY, Imitation, try_rows
from agenttrain.job import Job, Work, checkpoints_of, restored, tracker_of
from agenttrain.launch import evaluated_before, launch, record_kernel, timed
from agenttrain.rollout.demonstration import Demonstrator
from agenttrain.rollout.environments import Environments
from agenttrain.tools.toolbox import Toolbox
from agenttrain.training.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What needs no weights."""

    tokenizer: Any
    chat: Chat
    toolbox: Toolbox
    environments: Environments
    certificate: Certificate
    train_tasks: TaskSource
    test_tasks: TaskSource
    data_notes: tuple[str, ...]

    def demonstrator(self, config: RunConfig) -> Demonstrator:
        """What makes rollouts of the rows."""
        return Demonstrator(
            chat=self.chat,
            toolbox=self.toolbox,
            limits=config.rollout,
            environments=self.environments,
        )


def prepare(config: RunConfig) -> Prepared:
    """Tokenizer, template, tools and conversations, of which the first are tried."""
    check_model(config, sampled=False)
    found = certified(config)
    found.certificate.raise_if_refused()
    found.tokenizer.chat_template = found.chat.saved_template
    found.tokenizer.response_template = response_template(found.chat)
    tasks = build_tasks(config.data, seed=config.seed)
    check_rows(found, tasks.by_key)
    prepared = Prepared(
        tokenizer=found.tokenizer,
        chat=found.chat,
        toolbox=found.toolbox,
        environments=found.environments,
        certificate=found.certificate,
        train_tasks=tasks.train,
        test_tasks=tasks.test,
        data_notes=tasks.notes,
    )
    sources = [("data.train", tasks.train)]
    sources += [("data.test", tasks.test)] if config.eval.questions else []
    try_rows(prepared.demonstrator(config), sources, config)
    return prepared


async def _imitate(job: Job, prepared: Prepared) -> None:
    config = job.config
    with timed(job) as clock:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(prepared.toolbox.aclose)
            stack.push_async_callback(prepared.environments.aclose)
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


def _imitation(job: Job, prepared: Prepared, policy: Policy) -> Imitation:
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
        demonstrator=prepared.demonstrator(config),
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
    work = Work(prepare=prepare, run=_imitate)
    return launch(config, plain, run_folder, "sft", sweep=sweep, work=work)
