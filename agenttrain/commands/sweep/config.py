"""Settings of a sweep, and the names that its objective may have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field
from enum import StrEnum
from typing import Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from agenttrain.data.config import has_questions
from agenttrain.utils.data_fields import Data
from agenttrain.utils.names import did_you_mean
from agenttrain.utils.sections import SETTINGS, Whole


class OnFailedJob(StrEnum):
    """Effect of a failed job on those that have not started."""

    go_on = "go_on"
    """They run; the sweep's exit code is 1."""
    stop = "stop"
    """They wait for `agenttrain -m resume=<sweep folder>`."""


class Sampler(StrEnum):
    """Source of the trials of `sweep.trials`; Optuna has both."""

    random = "random"
    """All are drawn before the first one runs; they only depend on `sweep.trials_seed`."""
    tpe = "tpe"
    """Each is chosen by the objective of those before it (tree-structured Parzen estimator). The
    first ten are drawn at random."""


class Direction(StrEnum):
    """Direction in which the objective gets better."""

    maximize = "maximize"
    minimize = "minimize"


@dataclass(config=SETTINGS)
class SweepConfig:
    """Runs of `agenttrain -m`, beside the values that are typed as `key=a,b`."""

    objective: Data[str | None] = None
    """Figure to compare runs by: `eval/<name>` as in summary.json, or a name in the last row of
    metrics.jsonl. `sweep.sampler=tpe` chooses by it; `agenttrain compare` shows it first."""
    runs: list[str] = field(default_factory=list)
    """Configurations one by one, each `key=value key=value …`; each is combined with the values of
    `key=a,b`."""
    trials: Whole | None = Field(default=None, ge=1)
    """Number of configurations that the sampler takes from ranges and choices; None: every
    combination of the values. Each trial is run with every value of `seed`, and is combined with
    every entry of `runs`."""
    sampler: Data[Sampler] = Sampler.random
    """Choice of the `trials`."""
    direction: Data[Direction | None] = None
    """Used by `sweep.sampler=tpe`. None: an objective of LOWER_IS_BETTER is minimized, any other
    is maximized."""
    trials_seed: Whole = Field(default=0, ge=0)
    """Seed of the sampler."""
    parallel: Whole = Field(default=1, ge=1)
    """Jobs at a time. They divide the GPUs and, unless OMP_NUM_THREADS is set, the cores."""
    on_failed_job: Data[OnFailedJob] = OnFailedJob.go_on
    """Effect of a failed job on those that have not started."""


LOWER_IS_BETTER = ("eval/loss", "loss", "kl", "seconds", "training_seconds", "usage/cost")
METRICS = {
    "train": (
        *("reward", "reward_std", "frac_reward_zero_std", "success", "loss", "grad_norm"),
        *("entropy", "kl", "lr", "tokens_per_s", "turns/mean"),
    ),
    "sft": ("loss", "grad_norm", "entropy", "lr", "tokens_per_s"),
    "eval": (),
}
"""Figures of metrics.jsonl by verb, without those of OPEN_SECTIONS."""
OPEN_SECTIONS = {
    "train": (
        *("rewards", "tools", "completions", "stop", "clip_ratio", "sampling", "mask", "train"),
        *("rollout", "time", "data", "resample", "vespo"),
        *("tokens", "idle", "perf", "cost", "usage"),
    ),
    "sft": ("train", "sft", "data", "time", "tokens", "perf", "cost", "usage"),
    "eval": (),
}
"""Sections of metrics.jsonl whose names depend on tools, rewards, the algorithm or the machine, and
of `usage` in summary.json."""
SUMMARY = ("seconds", "training_seconds", "steps")
"""Figures of summary.json beside `eval`."""


def objective_problems(verb: str, config: Any) -> Iterator[str]:
    """Yield the problems of the objective for runs of `verb` with a RunConfig."""
    name = config.sweep.objective
    if name is None:
        return
    key = f"sweep.objective={name}"
    if name.startswith("eval/"):
        if not has_questions(config.data, config.eval.questions):
            yield f"{key}: eval.questions=0 evaluates nothing; raise it, or take another objective"
        elif name not in (figures := evaluation_figures(verb, config)):
            yield f"{key}: expected one of: {', '.join(figures)}{did_you_mean(name, figures)}"
        return
    if name == "kl" and config.algorithm.kl is None:
        yield f"{key}: there is no KL; set algorithm.kl.beta=…, or take another objective"
    section, slash, _ = name.partition("/")
    if slash and section in OPEN_SECTIONS[verb]:  # its names are not known before the run
        return
    figures = [*evaluation_figures(verb, config), *METRICS[verb], *SUMMARY]
    if name not in figures:
        sections = "".join(f", {section}/…" for section in OPEN_SECTIONS[verb])
        yield f"{key}: expected one of: {', '.join(figures)}{sections}{did_you_mean(name, figures)}"


def evaluation_figures(verb: str, config: Any) -> Sequence[str]:
    """Return the names of an evaluation's figures.

    Example: ``["eval/reward", "eval/pass@1", "eval/reward_greedy", "eval/pass@1_greedy"]``.
    """
    if verb == "sft":
        return ["eval/loss"]
    sampled = [f"pass@{k}" for k in sorted({1, config.eval.samples})]
    greedy = ["reward_greedy", "pass@1_greedy"] if config.eval.greedy else []
    return [f"eval/{name}" for name in ("reward", *sampled, *greedy)]
