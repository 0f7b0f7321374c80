"""`agenttrain replay <run>/crash/step-000012`: repeat the failure that stopped a run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

from agenttrain.algorithms.loss import Averages
from agenttrain.commands.recorded import recorded_rubric, recorded_tasks, step_records
from agenttrain.health.crash import read_batch
from agenttrain.rewards.function import RewardError
from agenttrain.runs.loading import make_policy
from agenttrain.runs.setup import Components
from agenttrain.settings.mixture import refuse_sources
from agenttrain.settings.run_config import RunConfig
from agenttrain.tracking.rollouts import read_rollout, step_path
from agenttrain.trainer import train_minibatch
from agenttrain.training.checkpoint import Checkpoints
from agenttrain.training.nonfinite import NotFinite, check_logprobs, check_weights
from agenttrain.types import Rollout, Task


def replay_crash(config: RunConfig, bundle: Path) -> int:
    """Repeat the stage that failed; return exit code 0 for the same culprits, else 1.

    Culprits are the rollouts or weights that are at fault: none if each rollout alone is finite.
    """
    crash = json.loads((bundle / "crash.json").read_text(encoding="utf-8"))
    print(f"recorded  {crash['error']}")
    try:
        _repeat(crash["stage"], config, bundle, crash["step"])
    except (NotFinite, RewardError) as error:
        print(f"replayed  {error}")
        same = list(error.culprits) == crash["culprits"]
        who = ", ".join(error.culprits) or "none by itself"
        print(f"the same culprit: {who}" if same else f"another culprit: {who}")
        return int(not same)
    print("replayed  nothing failed this time")
    return 1


def _rollouts(bundle: Path, step: int, tasks: Mapping[str, Task]) -> list[Rollout]:
    """Return the step's rollouts; without its task a rollout has no columns."""
    if not step_path(bundle, step).exists():
        return []
    records = step_records(bundle, step, f"replay {bundle}")
    return [
        read_rollout(
            record, tasks.get(record["rollout_id"]) or Task(task_id=record["task_id"], messages=())
        )
        for record in records
    ]


def _repeat(stage: str, config: RunConfig, bundle: Path, step: int) -> None:
    """Repeat the stage of a training step that failed; raises the error that it fails with.

    `bundle` is the folder of the crash: its rollouts, its batch, and the policy's weights as they
    were before the stage.
    """
    if stage == "logprobs":
        # Without tasks, whose columns only rewards read.
        check_logprobs(_rollouts(bundle, step, {}))
        return
    if stage == "reward":
        refuse_sources(f"replay {bundle}", config)
        records = step_records(bundle, step, f"replay {bundle}")
        tasks = recorded_tasks(config, Components(config).tasks, records, step)
        rubric = recorded_rubric(config, bundle, records, tasks.values())
        asyncio.run(rubric.score(_rollouts(bundle, step, tasks)))
        return
    # The policy as it was before the stage that failed.
    policy = make_policy(config, config.algorithm, temperature=config.rollout.temperature)
    Checkpoints(bundle / "checkpoints", tokenizer=None, keep=1).load_latest(policy)
    if stage == "weights":
        check_weights(policy.model, f"step {step}")
        return
    assert stage == "update", stage
    sequences = read_batch(bundle, _rollouts(bundle, step, {}))
    with policy.ready():
        minibatch = policy.minibatch(sequences)
        if minibatch is not None:  # None: no sequence has a gradient
            train_minibatch(policy, minibatch, Averages())
