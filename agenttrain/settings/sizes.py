"""The size of a run, in one vocabulary: tasks, groups, rollouts, tokens, updates.

`describe` writes a configuration in a few lines, for `agenttrain check`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from agenttrain.algorithms.config import AlgorithmConfig
from agenttrain.data.config import has_test_rows, known_rows, names_test_rows
from agenttrain.data.mixture import shares_of
from agenttrain.launch.config import DistributedName
from agenttrain.rewards.config import RewardSettings
from agenttrain.rollout.config import tasks_of_round
from agenttrain.settings.components import (
    has_rewarding_environment,
    reward_sections,
    stop_tools,
    tool_names,
)
from agenttrain.settings.mixture import source_views
from agenttrain.settings.run_config import RunConfig
from agenttrain.utils.sections import plain, shown

PROMPT_TOKENS = 1024
"""Tokens of a prompt, for estimates that were given no number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """Sizes that follow from a configuration.

    Example: 12 tasks a step in groups of 8, 2 epochs of 3 minibatches and 80 steps are 96 rollouts
    a step, 32 rollouts an update, 6 updates a step and 480 updates a run.
    """

    steps: int
    end: str
    """What may end the run before its last step, e.g. ", or until mean reward of 5 steps above
    0.93"; may be empty."""
    tasks_per_step: int
    """Also the number of groups: each task has one."""
    group_size: int
    rollouts_per_step: int
    most_tasks_per_step: int
    """The number with over-sampling and all rounds of dynamic sampling."""
    rollouts_per_update: int
    updates_per_step: int
    """Optimizer updates: epochs x minibatches."""
    sampled_tokens_per_rollout: int
    """The most that the model samples, limited by the turns and by the completion."""
    tokens_per_rollout: int
    """The most of the completion, which are sampled tokens and tool replies together."""
    evaluations: int
    rollouts_per_evaluation: int
    evaluation_is_exact: bool
    """True: the number of test rows is known; False: rollouts_per_evaluation is the most."""

    @property
    def updates(self) -> int:
        """Optimizer updates of the run."""
        return self.steps * self.updates_per_step

    @property
    def tokens_per_step(self) -> int:
        """The most tokens, sampled and of tools."""
        return self.rollouts_per_step * self.tokens_per_rollout

    def lines(self) -> list[str]:
        """Return the sizes as text, one line per noun."""
        resampled = self.most_tasks_per_step > self.tasks_per_step
        most = f"            at most {self.most_tasks_per_step:,} sampled for a step"
        return [
            f"tasks       {self.tasks_per_step:,} per step, {self.steps * self.tasks_per_step:,} "
            f"in {self.steps:,} steps{self.end}",
            *([most] if resampled else []),
            f"groups      one per task, {self.group_size} rollouts each",
            f"rollouts    {self.rollouts_per_step:,} per step, "
            f"{self.steps * self.rollouts_per_step:,} in all",
            f"tokens      at most {self.sampled_tokens_per_rollout:,} sampled and "
            f"{self.tokens_per_rollout:,} with tool replies per rollout, beside the prompt",
            f"            at most {self.tokens_per_step:,} per step",
            f"updates     {self.updates_per_step:,} per step of {self.rollouts_per_update:,} "
            f"rollouts each, {self.updates:,} in all",
            f"evaluation  {self.evaluations} x {'' if self.evaluation_is_exact else 'at most '}"
            f"{self.rollouts_per_evaluation:,} rollouts",
        ]


def arithmetic(config: RunConfig) -> Arithmetic:
    """Compute the sizes of a validated configuration."""
    rollout, algorithm, evaluation = config.rollout, config.algorithm, config.eval
    rollouts = config.tasks_per_step * algorithm.group_size
    # Dynamic sampling may add this many rounds to the first.
    rounds = 1 + algorithm.dynamic_sampling
    tasks_per_round = tasks_of_round(config.tasks_per_step, algorithm.oversample)
    # The evaluations before the first step and after the last are added below.
    evaluations_between_steps = (config.steps - 1) // evaluation.every if evaluation.every else 0
    views = list(source_views(config).values()) or [config]
    rows = [_test_rows(view) for view in views]  # None: the number of rows is not known
    questions = sum(
        view.eval.questions if count is None else min(view.eval.questions, count)
        for view, count in zip(views, rows, strict=True)
    )
    rollouts_per_question = evaluation.samples + (1 if evaluation.greedy else 0)
    return Arithmetic(
        steps=config.steps,
        end=f", or until {config.stop_when}" if config.stop_when.enabled else "",
        tasks_per_step=config.tasks_per_step,
        group_size=algorithm.group_size,
        rollouts_per_step=rollouts,
        most_tasks_per_step=rounds * tasks_per_round,
        rollouts_per_update=rollouts // algorithm.minibatches,
        updates_per_step=algorithm.num_epochs * algorithm.minibatches,
        sampled_tokens_per_rollout=min(
            rollout.max_turns * rollout.max_turn_tokens, rollout.max_completion_tokens
        ),
        tokens_per_rollout=rollout.max_completion_tokens,
        # One before the first step, one after the last.
        evaluations=2 + evaluations_between_steps if questions else 0,
        rollouts_per_evaluation=questions * rollouts_per_question,
        evaluation_is_exact=None not in rows,
    )


def _test_rows(config: RunConfig) -> int | None:
    """Return the number of test rows; None: it is not cheap to get."""
    held_out = config.data.test_fraction is not None
    return None if held_out else known_rows(config.data.test)


AXES = ("advantage", "scale", "objective", "aggregation")
COUNTED = ("name", "group_size", "num_epochs", "minibatches")
"""Settings that are among the sizes."""
INDENT = "\n            "
"""Between lines of one part."""


def describe(config: RunConfig) -> str:
    """Summarise the parts of a run and its size in a few lines."""
    optimizer, processes, algorithm = config.optimizer, config.distributed, config.algorithm
    # The axes, and every other setting that is not at its default.
    axes = [f"{key} {getattr(algorithm, key)}" for key in AXES]
    default = AlgorithmConfig()
    for field in fields(AlgorithmConfig):
        value = getattr(algorithm, field.name)
        is_listed = field.name in (*AXES, *COUNTED)  # COUNTED: among the sizes below
        if not is_listed and value != getattr(default, field.name):
            axes.append(f"{field.name} {shown(plain(value))}")
    parts = {
        "model": f"{config.model.path} ({config.model.dtype})",
        "template": f"{config.chat_template.name}, response schema {config.response_schema.name}",
        **(_tasks(config) if not config.data.sources else {}),
        "algorithm": f"{algorithm.name}: {', '.join(axes)}",
        "optimizer": f"lr {optimizer.lr:g}, {optimizer.schedule} after {optimizer.warmup_steps} "
        f"warm-up steps, gradient norm at most {optimizer.max_grad_norm:g}",
        "engine": config.engine.name,
        "tracker": ", ".join(tracker.name for tracker in config.tracker.sections()) or "none",
    }
    if processes.name is not DistributedName.single:
        nodes = f" on each of {processes.nodes} nodes" if processes.nodes > 1 else ""
        count = processes.processes or "one per GPU"
        parts["processes"] = f"{count}{nodes}, {processes.name}"
    lines = [f"{name:<12}{text}" for name, text in parts.items()]
    lines += _source_lines(config)
    return "\n".join([*lines, "", *arithmetic(config).lines()])


def _tasks(config: RunConfig) -> dict[str, str]:
    """Summarise the rows, tools and rewards of a run of one source."""
    environments = []
    for name, section in config.environment.items():
        # A run with this environment alone: its tools are those of the environment.
        tools = tool_names(RunConfig(environment={name: section}))
        # "…": only an instance of the environment knows all of its tools.
        names = [*tools.names, *([] if tools.complete else ["…"])]
        environments.append(f"{name} {_as_call(section)}, tools {', '.join(names) or 'none'}")
    test = "none, so no evaluation"
    if names_test_rows(config.data):  # by `data.test`
        test = _as_call(config.data.test)
    elif has_test_rows(config.data):  # by `data.test_fraction`
        test = "held out of the train data"
    sections = reward_sections(config, add_environment=has_rewarding_environment(config))
    settings = {field.name for field in fields(RewardSettings)}
    width = max(map(len, sections), default=0)
    rewards = [
        f"{name:<{width}}  weight {part.get('weight', 1.0):g}  "
        # Only the arguments of the `_target_`: the settings of all rewards are left out.
        + _as_call({key: value for key, value in part.items() if key not in settings})
        for name, part in sections.items()
    ]
    return {
        "tools": ", ".join(config.tools) or "none",
        "stop tools": ", ".join(stop_tools(config)) or "none",
        **({"environment": INDENT.join(environments)} if environments else {}),
        **({"user": _as_call(config.user)} if config.user else {}),
        "train data": _as_call(config.data.train),
        "test data": test,
        "reward": INDENT.join(rewards) or "none",
    }


def _source_lines(config: RunConfig) -> Iterator[str]:
    """Yield the summary of each source of a mixture."""
    shares = shares_of(config.data.sources, config.tasks_per_step)
    for name, view in source_views(config).items():
        tasks = float(shares[name] * config.tasks_per_step)
        end = f", at its end: {config.data.sources[name].at_end}"
        yield f"\nsource      {name}: {tasks:.4g} of {config.tasks_per_step} tasks a step{end}"
        yield from (f"  {key:<12}{text}" for key, text in _tasks(view).items())


def _as_call(section: Mapping[str, Any]) -> str:
    """Write `{_target_: my.rows, seed: 0}` as `my.rows(seed=0)`."""
    bound = ", ".join(f"{key}={value}" for key, value in section.items() if key != "_target_")
    return f"{section['_target_']}({bound})"
