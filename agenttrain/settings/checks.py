"""Checks that span sections of the settings, before anything heavy is imported.

Each check yields what is wrong as one line, ``key=value: problem; remedy``; all lines are raised at
once. Among them: `data:` beside its two sections of rows, `rollout.structured_calls` (the gradient
must be that of the policy), and settings that a verb does not read (`agenttrain sft` and
reinforcement learning differ).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import fields, is_dataclass
from math import isfinite, isqrt
from operator import attrgetter
from pathlib import Path
from typing import Any

from agenttrain.algorithms.config import Correction, CorrectionMode, Reference, load_objective
from agenttrain.commands.slurm.config import slurm_problems
from agenttrain.data.config import (
    ENDLESS,
    HOLD_OUT,
    curriculum_problems,
    has_test_rows,
    names_test_rows,
)
from agenttrain.health.config import guard_problems
from agenttrain.launch.config import distributed_problems
from agenttrain.settings.component_checks import (
    data_problems,
    environment_problems,
    reward_problems,
    tool_problems,
)
from agenttrain.settings.engine_checks import engine_problems
from agenttrain.settings.optimizer_checks import optimizer_problems, weight_problems
from agenttrain.settings.run_config import RunConfig
from agenttrain.training.config import Init
from agenttrain.types import ConfigError
from agenttrain.utils.expressions import compiled
from agenttrain.utils.model_path import PARTS, model_folder
from agenttrain.utils.names import did_you_mean
from agenttrain.utils.text_templates import TextTemplate

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
    *(f"training.{name}" for name in ("token_budget", "logits_budget_mb")),
    *("eval.every", "eval.samples", "checkpoint.every", "checkpoint.keep"),
    *(f"eval.max_{name}" for name in ("turns", "turn_tokens", "completion_tokens")),
    *("sft.batch_size", "sft.max_tokens", "sweep.trials", "sweep.parallel"),
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


def _reference(config: RunConfig) -> Iterator[str]:
    if config.algorithm.reference is Reference.synced and config.model.lora.rank:
        yield (
            f"algorithm.reference=synced: the reference of a model with adapters (model.lora.rank="
            f"{config.model.lora.rank}) is the model without them; set algorithm.reference=frozen"
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


def check_test_rows(verb: str, config: RunConfig) -> None:
    """Raise ConfigError for an evaluation without rows."""
    if verb == "eval" and not has_test_rows(config.data):
        raise ConfigError("data.test: names no rows to evaluate on; add data.test.path=<file>")


def data_setting_problems(config: RunConfig) -> Iterator[str]:
    """Yield what is wrong with the settings that both splits share."""
    data = config.data
    for name, group in (("path", "file or data=hub"), ("subset", "hub"), ("revision", "hub")):
        value = getattr(data, name)
        if value is not None and all(s.get(name) != value for s in (data.train, data.test)):
            yield f"data.{name}={value}: is not used by these rows; add data={group}"
    if data.shuffle and data.train.get("_target_") in ENDLESS:
        yield "data.shuffle=true: rows without end have no shuffled order; leave it out"
    yield from _held_out(config)
    for name, text in data.map.items():
        try:
            compiled(text, f"data.map.{name}")
        except ValueError as error:
            yield str(error)
    if data.prompt is None:
        return
    try:
        TextTemplate(data.prompt, "data.prompt")
    except ValueError as error:
        yield str(error)
    for name in {"messages", "prompt"} & set(data.map):
        yield f"data.map.{name}={data.map[name]}: data.prompt makes the question already; drop one"


def _held_out(config: RunConfig) -> Iterator[str]:
    data, same = config.data, config.data.train == config.data.test
    fraction = data.test_fraction
    if not has_test_rows(data) and config.eval.every is not None:
        yield f"eval.every={config.eval.every}: data.test names no rows; {HOLD_OUT}"
    if fraction is None:
        # Whoever names one file twice wants to be tested on what was trained.
        if data.path is not None and same and config.eval.questions:
            yield (
                "data.test: has the same rows as data.train; hold some out with "
                "data.test_fraction=0.1, or choose others with data.test.split=… or "
                "data.test.path=…, or eval.questions=0"
            )
    elif not 0 < fraction < 1:
        yield f"data.test_fraction={fraction}: must be between 0 and 1"
    elif (names_test_rows(data) and not same) or data.train.get("_target_") in ENDLESS:
        yield (
            f"data.test_fraction={fraction}: data.test has rows of its own; leave it out, or let "
            "both read the same: data=file data.path=…"
        )
    if fraction is None and data.test_seed:
        yield f"data.test_seed={data.test_seed}: has no effect without data.test_fraction"


CHECKS: tuple[Callable[[RunConfig], Iterator[str]], ...] = (
    *(_numbers, _sizes, _reference),
    *(tool_problems, environment_problems, reward_problems, data_problems, data_setting_problems),
    _names,
    *(optimizer_problems, weight_problems, engine_problems, _evaluation),
    *(guard_problems, distributed_problems, slurm_problems, curriculum_problems),
)


KEY = "rollout.structured_calls=true"
UNTRAINED = ("eval", "sft", "plan")
"""Verbs that train nothing by what is sampled."""


def check_structured(verb: str, config: RunConfig) -> None:
    """Raise ConfigError where training would take a grammar's samples for the policy's own."""
    if not config.rollout.structured_calls or verb in UNTRAINED:
        return
    if problems := list(_problems(config)):
        raise ConfigError("\n".join(problems))


def check_own_objective(verb: str, config: RunConfig) -> None:
    """Raise ConfigError for what is wrong with an objective of the user's.

    Last of all checks: it imports the user's module, and torch with it.
    """
    if verb not in UNTRAINED:
        load_objective(config.algorithm)


def _problems(config: RunConfig) -> Iterator[str]:
    a = config.algorithm
    if a.correction not in (Correction.token, Correction.sequence):
        yield (
            f"algorithm.correction={a.correction}: with {KEY} completions are sampled from the "
            "policy renormalised over what the grammar allows, and only the ratio of both makes "
            "the gradient the policy's; set algorithm.correction=token or sequence, with "
            "algorithm.behaviour=recomputed, or leave structured_calls out"
        )
    elif a.correction_min is not None and a.correction_mode is CorrectionMode.truncate:
        yield (
            f"algorithm.correction_min={a.correction_min}: with {KEY} it would raise the weight of "
            "tokens that the policy would hardly have written; leave it out, or set "
            "algorithm.correction_mode=mask"
        )
    if a.kl_in_loss:
        yield (
            f"algorithm.beta={a.beta}: with {KEY} tokens are not the policy's own, and nothing "
            "weighs their KL; set algorithm.kl_in=reward, whose KL is weighed with the reward, or "
            "algorithm.beta=0"
        )
    if a.off_policy_threshold is not None:
        yield (
            f"algorithm.off_policy_threshold={a.off_policy_threshold}: with {KEY} it would take "
            "what the grammar rules out for a policy that has moved; leave it out"
        )
    limit = config.guards.logprob_gap.limit
    if limit is not None:
        yield (
            f"guards.logprob_gap.limit={limit}: with {KEY} the gap of a token holds what the "
            "grammar ruled out before it, without a bound; add guards.logprob_gap.limit=null"
        )


RL_ONLY = (
    *("algorithm", "reward", "engine", "weight_sync", "tasks_per_step", "rollout", "guards"),
    *("data.curriculum", "checkpoint.keep_best"),
    *(f"eval.{name}" for name in ("samples", "greedy", "group_by", "temperature")),
    *(f"eval.{name}" for name in ("top_p", "top_k", "min_p", "tools")),
    *(f"eval.max_{name}" for name in ("turns", "turn_tokens", "completion_tokens")),
)
"""Sections and settings that nothing of supervised learning reads."""
READ = ("rollout.max_result_tokens", "rollout.concurrency", "rollout.max_stuck_calls")
"""Settings of those sections that are read all the same."""


UNREAD = {
    "sft": (*RL_ONLY, "slurm"),
    "train": ("sft", "slurm"),
    "eval": ("sft", "slurm", "data.curriculum"),
}
"""Verb -> settings without effect in it."""


def check_verb(verb: str, overrides: Sequence[str]) -> None:
    """Raise ConfigError for what was typed and has no effect with `verb`."""
    unread = UNREAD.get(verb, ())
    problems = []
    for text in overrides:
        key = text.lstrip("+~").partition("=")[0].partition("@")[0]
        parts = key.split(".")
        prefixes = {".".join(parts[: end + 1]) for end in range(len(parts))}
        if prefixes & set(unread) and key not in READ:
            problems.append(f"{text}: has no effect in agenttrain {verb}; leave it out")
    if problems:
        raise ConfigError("\n".join(problems))


def check_init(verb: str, config: RunConfig) -> None:
    """Raise ConfigError where a new run would let a model act that has learnt nothing."""
    if verb in ("train", "eval") and config.model.init is Init.random:
        raise ConfigError(
            "model.init=random: such a model cannot act yet; train it with agenttrain sft, and "
            "name what comes out: model.path=<run>/checkpoints/latest model.init=pretrained"
        )
