"""Settings that a verb reads: `agenttrain sft` and reinforcement learning differ."""

from __future__ import annotations

from collections.abc import Sequence

from agenttrain.config.errors import ConfigError
from agenttrain.config.schema import Init, RunConfig

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
