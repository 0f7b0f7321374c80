"""Checks across settings, before anything heavy is imported.

Each check yields what it finds wrong as one line, ``key=value: problem; remedy``; all lines
are raised at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import fields, is_dataclass
from math import isfinite, isqrt
from operator import attrgetter
from pathlib import Path
from typing import Any

from agenttrain.config.algorithm_checks import algorithm_problems
from agenttrain.config.components import (
    data_problems,
    environment_problems,
    reward_problems,
    tool_problems,
)
from agenttrain.config.curriculum import curriculum_problems
from agenttrain.config.data_settings import data_setting_problems
from agenttrain.config.distributed import distributed_problems
from agenttrain.config.engine_checks import engine_problems
from agenttrain.config.errors import ConfigError
from agenttrain.config.guards import guard_problems
from agenttrain.config.model_path import PARTS, model_folder
from agenttrain.config.optimizer_checks import optimizer_problems, weight_problems
from agenttrain.config.schema import RunConfig
from agenttrain.config.slurm import slurm_problems
from agenttrain.config.suggest import did_you_mean

ENGINES = ("transformers", "vllm")
TRACKERS = ("trackio", "none")
MIXED_PRECISION = ("no", "bf16", "fp16")
SEEDS = 2**63
"""Seeds are below this; torch takes no more."""
DIVISORS = 6
"""Number of divisors that are suggested, the nearest."""
LARGEST_DIVISOR_TRIED = 10**6

AT_LEAST_ONE = (
    "steps",
    "tasks_per_step",
    *(f"rollout.max_{name}" for name in ("turns", "turn_tokens", "completion_tokens")),
    *(f"rollout.max_{name}" for name in ("result_tokens", "tool_calls", "invalid_calls")),
    "rollout.max_repeated_calls",
    "rollout.concurrency",
    *(f"engine.{name}" for name in ("max_context", "max_rows", "rejoin_steps")),
    *(f"training.{name}" for name in ("token_budget", "logits_budget_mb")),
    *("eval.every", "eval.samples", "checkpoint.every", "checkpoint.keep"),
    *(f"eval.max_{name}" for name in ("turns", "turn_tokens", "completion_tokens")),
    *("sft.batch_size", "sft.max_tokens", "sweep.trials"),
)
"""Whole numbers; null where the schema allows it."""
NOT_NEGATIVE = (
    *("seed", "optimizer.weight_decay", "optimizer.warmup_steps", "rollout.max_stuck_calls"),
    "sweep.trials_seed",
    *(f"eval.{name}" for name in ("questions", "temperature", "top_k", "min_p")),
)
POSITIVE = (
    *("rollout.temperature", "rollout.timeout_s", "rollout.max_loop_lag_s"),
    *("optimizer.lr", "optimizer.max_grad_norm", "weight_sync.tolerance"),
    *(f"watchdog.{name}_s" for name in ("load", "rollout", "train", "sync", "evaluation")),
    *("watchdog.checkpoint_s", "watchdog.heartbeat_s"),
)


def validate(config: RunConfig, model_parts: Collection[str] = tuple(PARTS)) -> None:
    """Raise ConfigError with every problem found, one per line.

    `model_parts` of the model's folder have to be there.
    """
    problems = [problem for check in CHECKS for problem in check(config)]
    try:
        model_folder(config.model.path, model_parts)
    except ConfigError as error:
        problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))


def _floats(section: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield every setting of a section, and of those in it, that is a float."""
    for field in fields(section):
        value = getattr(section, field.name)
        if is_dataclass(value):
            yield from _floats(value, f"{prefix}{field.name}.")
        elif isinstance(value, float):
            yield prefix + field.name, value


def _numbers(config: RunConfig) -> Iterator[str]:
    for key, number in _floats(config):
        if not isfinite(number):
            yield f"{key}={number}: must be a finite number"
    for keys, holds, wanted in (
        (AT_LEAST_ONE, lambda value: value >= 1, "at least 1"),
        (NOT_NEGATIVE, lambda value: value >= 0, "0 or more"),
        (POSITIVE, lambda value: value > 0, "more than 0"),
    ):
        for key in keys:
            value = attrgetter(key)(config)
            if value is not None and not holds(value):
                yield f"{key}={value}: must be {wanted}"
    if config.seed >= SEEDS:
        yield f"seed={config.seed}: must be below 2**63 = {SEEDS}"


def _sizes(config: RunConfig) -> Iterator[str]:
    """Check the size of a step's batch and the lengths of completions."""
    tasks, algorithm = config.tasks_per_step, config.algorithm
    if algorithm.group_size * tasks < 2:
        yield f"tasks_per_step={tasks}: one rollout a step has nothing to be compared with"
    if algorithm.minibatches >= 1 and tasks % algorithm.minibatches:
        tried = range(1, min(isqrt(max(tasks, 0)), LARGEST_DIVISOR_TRIED) + 1)
        divisors = {d for n in tried if tasks % n == 0 for d in (n, tasks // n)}
        nearest = sorted(divisors, key=lambda divisor: abs(divisor - algorithm.minibatches))
        shown = ", ".join(map(str, sorted(nearest[:DIVISORS])))
        yield (
            f"algorithm.minibatches={algorithm.minibatches}: does not divide "
            f"tasks_per_step={tasks}; take one of {shown}"
        )
    rollout, context = config.rollout, config.engine.max_context
    if rollout.max_turn_tokens > rollout.max_completion_tokens:
        yield (
            f"rollout.max_turn_tokens={rollout.max_turn_tokens}: more than the whole completion "
            f"may have; lower it, or raise "
            f"rollout.max_completion_tokens={rollout.max_completion_tokens}"
        )
    if context is not None and rollout.max_turn_tokens >= context:
        yield (
            f"rollout.max_turn_tokens={rollout.max_turn_tokens}: leaves no room for a prompt in "
            f"engine.max_context={context}; lower one or raise the other"
        )


def _names(config: RunConfig) -> Iterator[str]:
    """Check names of files, and names with a fixed list of values."""
    for group in ("chat_template", "response_schema"):
        section = getattr(config, group)
        if section.name == "file" and section.path is None:
            yield f"{group}.name=file: which one? add {group}.path=…"
        elif section.path is not None and section.name != "file":
            yield (
                f"{group}.path={section.path}: is not used with {group}.name={section.name}; "
                f"add {group}=file"
            )
        elif section.path is not None and Path(section.path).expanduser().is_dir():
            yield f"{group}.path={section.path}: is a folder; name the file in it"
        elif section.path is not None and not Path(section.path).expanduser().is_file():
            yield f"{group}.path={section.path}: there is no such file"

    for key, known in (
        ("engine.name", ENGINES),
        ("tracker.name", TRACKERS),
        ("training.mixed_precision", MIXED_PRECISION),
    ):
        value = attrgetter(key)(config)
        if value not in known:
            yield f"{key}={value}: expected one of: {', '.join(known)}{did_you_mean(value, known)}"
    rollouts = config.tracker.rollouts
    if rollouts not in ("all", "none") and not rollouts.isdecimal():
        hint = did_you_mean(rollouts, ("all", "none"))
        yield f"tracker.rollouts={rollouts}: expected all, none, or a whole number{hint}"


def _evaluation(config: RunConfig) -> Iterator[str]:
    evaluation = config.eval
    if config.checkpoint.keep_best and (evaluation.every is None or evaluation.questions == 0):
        yield (
            "checkpoint.keep_best=true: nothing says which one is the best; add eval.every=… and "
            "eval.questions=…"
        )
    if not 0 < evaluation.top_p <= 1:
        yield f"eval.top_p={evaluation.top_p}: must be above 0 and at most 1"
    if evaluation.min_p > 1:
        yield f"eval.min_p={evaluation.min_p}: must be at most 1"
    if evaluation.temperature == 0 and evaluation.samples > 1:
        yield (
            f"eval.samples={evaluation.samples}: at eval.temperature=0 all samples are the same; "
            "set eval.samples=1 or raise the temperature"
        )
    if evaluation.tools == []:
        yield "eval.tools=[]: evaluated rollouts need a tool; null: all of the run's"


CHECKS: tuple[Callable[[RunConfig], Iterator[str]], ...] = (
    *(_numbers, _sizes, algorithm_problems),
    *(tool_problems, environment_problems, reward_problems, data_problems, data_setting_problems),
    _names,
    *(optimizer_problems, weight_problems, engine_problems, _evaluation),
    *(guard_problems, distributed_problems, slurm_problems, curriculum_problems),
)
