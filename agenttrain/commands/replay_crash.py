"""`agenttrain replay <run>/crash/step-000012`: repeat the failure that stopped a run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agenttrain.algorithms.loss import Averages
from agenttrain.commands.recorded import recorded_rubric, recorded_tasks, step_records
from agenttrain.health.crash import read_batch
from agenttrain.rewards.function import RewardError
from agenttrain.runs.loading import make_policy
from agenttrain.runs.setup import Components
from agenttrain.settings.run_config import RunConfig
from agenttrain.tracking.rollouts import read_rollout, step_path
from agenttrain.trainer import update_once
from agenttrain.training.checkpoint import Checkpoints
from agenttrain.training.nonfinite import check_logprobs, check_weights
from agenttrain.types import NotFinite, Rollout, Task


def replay_crash(config: RunConfig, bundle: Path) -> int:
    """Repeat the stage that failed and print the outcome.

    Returns exit code 0 for the same culprits, 1 for others or none.
    """
    crash = json.loads((bundle / "crash.json").read_text(encoding="utf-8"))
    print(f"recorded  {crash['error']}")
    try:
        STAGES[crash["stage"]](config, bundle, crash)
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
            record,
            tasks.get(record["rollout_id"]) or Task(task_id=record["task_id"], messages=()),
        )
        for record in records
    ]


def _logprobs(config: RunConfig, bundle: Path, crash: dict[str, Any]) -> None:
    check_logprobs(_rollouts(bundle, crash["step"], {}))


def _reward(config: RunConfig, bundle: Path, crash: dict[str, Any]) -> None:
    records = step_records(bundle, crash["step"], f"replay {bundle}")
    tasks = recorded_tasks(config, Components(config).tasks, records, crash["step"])
    rubric = recorded_rubric(config, bundle, records, tasks.values())
    asyncio.run(rubric.score(_rollouts(bundle, crash["step"], tasks)))


def _weights(config: RunConfig, bundle: Path, crash: dict[str, Any]) -> None:
    check_weights(_policy(config, bundle).model, f"step {crash['step']}")


def _update(config: RunConfig, bundle: Path, crash: dict[str, Any]) -> None:
    policy = _policy(config, bundle)
    sequences = read_batch(bundle, _rollouts(bundle, crash["step"], {}))
    with policy.ready():
        minibatch = policy.minibatch(sequences)
        if minibatch is not None:
            update_once(policy, minibatch, Averages())


def _policy(config: RunConfig, bundle: Path) -> Any:
    """Return the policy as it was before the failed stage."""
    policy = make_policy(config, config.algorithm, temperature=config.rollout.temperature)
    Checkpoints(bundle / "checkpoints", tokenizer=None, keep=1).load_latest(policy)
    return policy


STAGES: Mapping[str, Callable[[RunConfig, Path, dict[str, Any]], None]] = {
    "weights": _weights,
    "logprobs": _logprobs,
    "reward": _reward,
    "update": _update,
}
"""Stage that failed -> function that repeats it."""
