"""Checks across settings, before anything heavy is imported.

Each check yields what it finds wrong as one line, ``key=value: problem; remedy``; all lines are
told at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any

from agenttrain.config.errors import ConfigError
from agenttrain.config.model_path import model_folder
from agenttrain.config.schema import Advantage, KlEstimator, KlIn, RunConfig, Scale, ToolLimits
from agenttrain.config.suggest import did_you_mean
from agenttrain.config.targets import look_up

ENGINES = ("transformers",)
TRACKERS = ("trackio", "none")
MIXED_PRECISION = ("no", "bf16", "fp16")

AT_LEAST_ONE = (
    "steps",
    "tasks_per_step",
    "algorithm.num_epochs",
    "algorithm.minibatches",
    *(f"rollout.max_{name}" for name in ("turns", "turn_tokens", "completion_tokens")),
    *(f"rollout.max_{name}" for name in ("result_tokens", "tool_calls", "invalid_calls")),
    "rollout.max_repeated_calls",
    "rollout.concurrency",
    *(f"engine.{name}" for name in ("max_context", "max_rows", "rejoin_steps")),
    *(f"training.{name}" for name in ("token_budget", "logits_budget_mb")),
    *("eval.every", "eval.samples", "checkpoint.every", "checkpoint.keep"),
)
"""Whole numbers; null where the schema allows it."""
NOT_NEGATIVE = (
    *("seed", "algorithm.beta", "algorithm.clip_low", "algorithm.clip_high"),
    *("optimizer.weight_decay", "optimizer.warmup_steps"),
    *(f"eval.{name}" for name in ("questions", "temperature", "top_k", "min_p")),
)
POSITIVE = (
    *("rollout.temperature", "rollout.timeout_s"),
    *("optimizer.lr", "optimizer.max_grad_norm"),
)


def validate(config: RunConfig) -> None:
    """Raise ConfigError with every problem found, one per line."""
    found = [problem for check in CHECKS for problem in check(config)]
    if found:
        raise ConfigError("\n".join(found))


def _numbers(config: RunConfig) -> Iterator[str]:
    for keys, holds, wanted in (
        (AT_LEAST_ONE, lambda value: value >= 1, "at least 1"),
        (NOT_NEGATIVE, lambda value: value >= 0, "0 or more"),
        (POSITIVE, lambda value: value > 0, "more than 0"),
    ):
        for key in keys:
            value = attrgetter(key)(config)
            if value is not None and not holds(value):
                yield f"{key}={value}: must be {wanted}"


def _batch(config: RunConfig) -> Iterator[str]:
    tasks, algorithm = config.tasks_per_step, config.algorithm
    if algorithm.group_size < 2:
        yield (
            f"algorithm.group_size={algorithm.group_size}: a rollout is compared with the others "
            "of its group, so it takes at least 2"
        )
    if algorithm.minibatches >= 1 and tasks % algorithm.minibatches:
        divisors = [str(n) for n in range(1, tasks + 1) if tasks % n == 0]
        yield (
            f"algorithm.minibatches={algorithm.minibatches}: does not divide "
            f"tasks_per_step={tasks}; take one of {', '.join(divisors)}"
        )


def _lengths(config: RunConfig) -> Iterator[str]:
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


def _algorithm(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.beta == 0 and algorithm.kl_in is KlIn.reward:
        yield (
            "algorithm.kl_in=reward: has no effect with algorithm.beta=0; set algorithm.beta above "
            "0, or leave algorithm.kl_in=loss"
        )
    if algorithm.beta > 0 and algorithm.kl_in is KlIn.loss and algorithm.kl is KlEstimator.k1:
        yield (
            "algorithm.kl=k1: has a gradient of zero on average in the loss; set algorithm.kl=k3, "
            "or algorithm.kl_in=reward"
        )
    if algorithm.advantage is Advantage.leave_one_out and algorithm.scale is Scale.group:
        yield (
            "algorithm.scale=group: after the division a leave-one-out advantage is the group's "
            "times G / (G - 1); set algorithm.scale=none or batch, or algorithm.advantage=group"
        )
    if algorithm.clip_low >= 1:
        yield f"algorithm.clip_low={algorithm.clip_low}: must be below 1: ratios are positive"


def _tools(config: RunConfig) -> Iterator[str]:
    limits = tuple(field.name for field in fields(ToolLimits))
    for name, section in config.tools.items():
        yield from _component(f"tools.{name}", section, extra=limits, others=config.tools)
        for limit in limits:
            value = section.get(limit, 1) if isinstance(section, Mapping) else 1
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                yield f"tools.{name}.{limit}={value}: must be a number above 0"
    for name in config.stop_tools:
        if name not in config.tools:
            hint = did_you_mean(name, config.tools)
            known = ", ".join(config.tools) or "none"
            yield f"stop_tools=[{name}]: is not a tool of this run{hint}; its tools are: {known}"


def _rewards(config: RunConfig) -> Iterator[str]:
    if not config.reward:
        yield "reward={}: without a reward nothing can be learnt; choose one: reward=[exact_match]"
    for name, section in config.reward.items():
        yield from _component(f"reward.{name}", section, extra=("weight",), others=config.reward)


def _data(config: RunConfig) -> Iterator[str]:
    for split in ("train", "test"):
        yield from _component(f"data.{split}", getattr(config.data, split), extra=())


def _component(
    key: str, section: Any, *, extra: tuple[str, ...], others: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """Check a `_target_` with its arguments; `extra` are keys of ours that stand beside them."""
    if not isinstance(section, Mapping) or "_target_" not in section:
        *_, name = key.split(".")
        built = [n for n, s in (others or {}).items() if isinstance(s, Mapping) and "_target_" in s]
        hint = did_you_mean(name, built)
        yield f"{key}={section}: has no _target_{hint}; add one: {key}._target_=my_module.{name}"
        return
    target = look_up(section["_target_"])
    if target.problem is not None:
        yield f"{key}._target_={section['_target_']}: {target.problem}"
    for name, value in section.items():
        known = (*(target.parameters or ()), *extra)
        if target.parameters is not None and name not in (*known, "_target_"):
            yield (
                f"{key}.{name}={value}: {section['_target_']} has no such argument"
                f"{did_you_mean(name, known)}; known are: {', '.join(known)}"
            )


def _model(config: RunConfig) -> Iterator[str]:
    try:
        model_folder(config.model.path)
    except ConfigError as error:
        yield str(error)


def _files(config: RunConfig) -> Iterator[str]:
    for group in ("chat_template", "response_schema"):
        section = getattr(config, group)
        if section.name == "file" and section.path is None:
            yield f"{group}.name=file: which one? add {group}.path=…"
        elif section.path is not None and section.name != "file":
            yield (
                f"{group}.path={section.path}: is not used with {group}.name={section.name}; "
                f"add {group}=file"
            )
        elif section.path is not None and not Path(section.path).expanduser().is_file():
            yield f"{group}.path={section.path}: there is no such file"


def _names(config: RunConfig) -> Iterator[str]:
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


def _optimizer(config: RunConfig) -> Iterator[str]:
    betas = config.optimizer.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        shown = ",".join(str(beta) for beta in betas)
        yield f"optimizer.betas=[{shown}]: must be two numbers from 0 to below 1, e.g. [0.9,0.99]"


def _evaluation(config: RunConfig) -> Iterator[str]:
    evaluation = config.eval
    if not 0 < evaluation.top_p <= 1:
        yield f"eval.top_p={evaluation.top_p}: must be above 0 and at most 1"
    if evaluation.min_p > 1:
        yield f"eval.min_p={evaluation.min_p}: must be at most 1"
    if evaluation.temperature == 0 and evaluation.samples > 1:
        yield (
            f"eval.samples={evaluation.samples}: at eval.temperature=0 all samples are the same; "
            "set eval.samples=1 or raise the temperature"
        )


CHECKS: tuple[Callable[[RunConfig], Iterator[str]], ...] = (
    *(_numbers, _batch, _lengths, _algorithm, _tools, _rewards, _data, _model, _files, _names),
    *(_optimizer, _evaluation),
)
