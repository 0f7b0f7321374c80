"""Metrics of a step's rollouts, as one flat dict of floats, and estimates with their uncertainty.

Names are TRL's if the meaning is. Metrics that depend on the clock, and so differ between two runs
of one seed, are those of `names.depends_on_clock`. The estimates are for evaluation tables.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from agenttrain.tracking.answers import answer_metrics
from agenttrain.types import Rollout, StopReason, ToolError, ToolResult

SUCCESS_REWARD = 1.0
"""A rollout succeeds when its reward reaches this, within 1e-6 for sums of weighted rewards."""


def solved(reward: float) -> bool:
    """Return True if a rollout with this reward succeeded."""
    return reward >= SUCCESS_REWARD - 1e-6


def rollout_metrics(
    groups: Sequence[Sequence[Rollout]], *, tools: Iterable[str] = (), rewards: Iterable[str] = ()
) -> dict[str, float]:
    """Return the metrics of a step's groups.

    The run's `tools` and `rewards` have metrics in every step, also in one that uses none of them.
    An average over nothing is NaN.

    Example: three rollouts, two of which call a tool once, one of them with an error, give
    ``tools/call_frequency`` 2/3 and ``tools/failure_frequency`` 1/2.
    """
    rollouts = [rollout for group in groups for rollout in group]
    lengths = [rollout.sampled_length for rollout in rollouts]  # sampled tokens only
    return {
        **_reward_metrics(groups, rewards),
        **_tool_metrics(rollouts, tools),
        "completions/mean_length": _mean(lengths),
        "completions/min_length": float(min(lengths, default=math.nan)),
        "completions/max_length": float(max(lengths, default=math.nan)),
        # By stop reason, not by the last token.
        "completions/clipped_ratio": _mean([rollout.truncated for rollout in rollouts]),
        **{
            f"stop/{reason}": _mean([rollout.stop_reason is reason for rollout in rollouts])
            for reason in StopReason
        },
        **answer_metrics(rollouts),
        "turns/mean": _mean([rollout.turns for rollout in rollouts]),
        "trajectories/mean": _mean([len(rollout.trajectories) for rollout in rollouts]),
    }


OF_SOURCES = (
    *("reward", "reward_std", "frac_reward_zero_std", "success", "turns/mean"),
    *("completions/mean_length", "completions/clipped_ratio"),
    *("tools/call_frequency", "tools/failure_frequency"),
)
"""Metrics of `rollout_metrics` that each source of a mixture has too."""


def source_metrics(groups: Sequence[Sequence[Rollout]], sources: Iterable[str]) -> dict[str, float]:
    """Return the metrics of the groups of each source of a mixture.

    Example: ``{"source/shop/tasks": 5.0, "source/shop/reward": 0.4, …}``
    """
    metrics: dict[str, float] = {}
    for source in sources:
        of_source = [group for group in groups if group and group[0].task.source == source]
        values = rollout_metrics(of_source)
        metrics[f"source/{source}/tasks"] = float(len(of_source))
        metrics |= {f"source/{source}/{name}": values[name] for name in OF_SOURCES}
    return metrics


def agent_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the metrics of rollouts that outside agents made.

    Example: 10 turns in 4 trajectories, of 2 rollouts with 3 conversations. Of the 7 turns that
    could have continued a trajectory, 6 did: ``agent/merged_share`` is 6/7.
    """
    names: tuple[str, ...] = ("requests", "ambiguous", "overridden", "unforced_forms")
    names += ("respelled_calls", "hosted_tools")
    names += tuple(f"restarts/{kind}" for kind in ("system", "tools", "edited", "dropped"))
    counts = {
        f"agent/{name}": float(sum(r.counts.get(f"agent/{name}", 0) for r in rollouts))
        for name in names
    }
    with_turns = [rollout for rollout in rollouts if rollout.turns]
    turns = sum(rollout.turns for rollout in with_turns)
    # Every turn but the first of its trajectory continued one. Every turn but the first of its
    # conversation could have.
    continued = turns - sum(len(rollout.trajectories) for rollout in with_turns)
    conversations = sum(rollout.counts.get("agent/conversations", 1) for rollout in with_turns)
    could_continue = turns - conversations
    sampled = sum(rollout.sampled_length for rollout in rollouts)
    untrained = sum(
        conversation.sampled_length for rollout in rollouts for conversation in rollout.untrained
    )
    total = sampled + untrained
    return {
        **counts,
        "agent/merged_share": continued / could_continue if could_continue else math.nan,
        "agent/untrained_share": untrained / total if total else math.nan,
    }


def _reward_metrics(
    groups: Sequence[Sequence[Rollout]], declared: Iterable[str]
) -> dict[str, float]:
    """Return the metrics of rewards, overall and by reward function.

    `reward_std` is the mean over groups of the group's sample standard deviation, as in TRL.
    Rollouts without a reward do not count. A group of one counts in neither metric of spread.
    """
    scored = [[r.reward for r in group if r.reward is not None] for group in groups]
    values = [reward for group in scored for reward in group]
    compared = [group for group in scored if len(group) > 1]
    metrics = {
        "reward": _mean(values),
        "reward_std": _mean([_std(group) for group in compared]),
        "frac_reward_zero_std": _mean([len(set(group)) == 1 for group in compared]),
        "success": _mean([solved(reward) for reward in values]),
    }
    rewards_of_rollouts = [rollout.rewards for group in groups for rollout in group]
    used = (name for rewards in rewards_of_rollouts for name in rewards)
    for name in _declared_first(declared, used):
        results = [rewards.get(name) for rewards in rewards_of_rollouts]
        values = [value for value in results if value is not None]
        metrics[f"rewards/{name}/mean"] = _mean(values)
        metrics[f"rewards/{name}/std"] = _std(values)
    return metrics


def _tool_metrics(rollouts: Sequence[Rollout], declared: Iterable[str]) -> dict[str, float]:
    """Return the metrics of tool calls, overall and by tool."""
    results = [result for rollout in rollouts for result in rollout.tool_results]
    failed = sum(result.error is not None for result in results)
    metrics = {
        # Calls per rollout, as in TRL: above 1 when rollouts call more than once.
        "tools/call_frequency": _mean([len(rollout.tool_results) for rollout in rollouts]),
        "tools/failure_frequency": failed / len(results) if results else 0.0,
        "tools/unavailable": float(sum(r.error is ToolError.unavailable for r in results)),
        # Calls that could be parsed only because `response_schema.lenient` is set.
        "tools/lenient_calls": float(sum(r.call.lenient for r in results)),
        "tools/rollout_share": _mean([bool(rollout.tool_results) for rollout in rollouts]),
    }
    # Each row may bring tools with names of its own. Their calls count for the tool of the run that
    # executes them (`executor`): metrics of ever new names would have no end.
    by_tool: dict[str, list[ToolResult]] = {}
    # Names that the model made up are not among these, and so get no metric.
    existing: list[str] = []
    for result in results:
        tool = result.executor or result.call.name
        by_tool.setdefault(tool, []).append(result)
        if result.error not in _NO_SUCH_TOOL:
            existing.append(tool)
    for name in _declared_first(declared, existing):
        calls = by_tool.get(name, [])
        metrics[f"tools/{name}/calls"] = float(len(calls))
        metrics[f"tools/{name}/failures"] = float(sum(r.error is not None for r in calls))
        metrics[f"tools/{name}/latency_s"] = _mean([r.seconds for r in calls if r.error in _RAN])
    return metrics


_NO_SUCH_TOOL = (ToolError.unknown_tool, ToolError.malformed)
"""Errors of calls whose name may be no tool's."""
_RAN = (None, ToolError.exception, ToolError.timeout)
"""Outcomes of calls in which the tool ran."""


def _declared_first(declared: Iterable[str], used: Iterable[str]) -> list[str]:
    """Return the declared names in their order, then the other used names alphabetically."""
    names = list(dict.fromkeys(declared))
    return names + sorted(set(used) - set(names) - {""})


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def _std(values: Sequence[float]) -> float:
    """Return the sample standard deviation (n - 1); NaN for fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else math.nan


Z_95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean of `n` values and its 95 % confidence interval.

    Example: ``Estimate(mean=0.25, low=0.2101, high=0.2947, n=400)``
    """

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Results of one evaluation that summary.json stores.

    Intervals are 95 % over questions, because the samples of one question are not independent. They
    are Wilson's if every question is worth 0 or 1, else normal.
    """

    label: str
    """`sampled` or `greedy`."""
    questions: int
    reward: Estimate
    """Mean reward."""
    pass_at: dict[int, Estimate]
    """By k: share of questions solved (reward 1) by at least one of k samples, unbiased."""
    by_group: dict[str, Estimate]
    """Mean reward by the values of the column `eval.group_by`."""
    by_source: dict[str, Scores] = field(default_factory=dict)
    """The same scores of each source of a mixture; empty for other runs."""


def wilson(successes: int, n: int) -> Estimate:
    """Return a proportion with Wilson's score interval, which holds at 0, at 1 and for small n.

    https://doi.org/10.1080/01621459.1927.10502953 ; raises ValueError unless 0 <= successes <= n
    and n >= 1.
    """
    if not 0 <= successes <= n or n < 1:
        raise ValueError(f"wilson: {successes} successes of {n}; need 0 <= successes <= n, n >= 1")
    p = successes / n
    z2 = Z_95 * Z_95
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    # At 0 and at n successes the bound is exactly 0 or 1, which rounding would miss.
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == n else centre + half
    return Estimate(mean=p, low=low, high=high, n=n)


def mean_estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of independent values with a 95 % interval.

    The interval is Wilson's if all values are 0 or 1, else the normal one, cut to [0, 1] if all
    values are in it: [0.5, 1, 1, 1] gives 0.875 [0.63, 1], not 1.12. It is NaN for a single value
    that is neither 0 nor 1, and everything is NaN without values. Several rollouts of one question
    are not independent: pass their mean as one value.
    """
    if not values:
        return Estimate(mean=math.nan, low=math.nan, high=math.nan, n=0)
    if all(value in (0, 1) for value in values):
        return wilson(sum(value == 1 for value in values), len(values))
    mean = statistics.fmean(values)
    spread = statistics.stdev(values) if len(values) > 1 else math.nan
    half = Z_95 * spread / math.sqrt(len(values))
    low, high = mean - half, mean + half
    if not math.isnan(half) and all(0 <= value <= 1 for value in values):
        low, high = max(low, 0.0), min(high, 1.0)
    return Estimate(mean=mean, low=low, high=high, n=len(values))


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Estimate, without bias, the probability that one of `k` rollouts succeeds.

    Of the `n` rollouts of a question `correct` succeeded. The estimate is
    1 - C(n - c, k) / C(n, k), Chen et al. 2021, https://arxiv.org/abs/2107.03374 , section 2.1.
    Raises ValueError unless 0 <= correct <= n and 1 <= k <= n.

    Example: ``pass_at_k(4, 1, 2)`` is 0.5: of the 6 pairs, 3 hold the one success.
    """
    if not 0 <= correct <= n or not 1 <= k <= n:
        raise ValueError(
            f"pass_at_k: n={n}, correct={correct}, k={k}; need 0 <= correct <= n and 1 <= k <= n "
            "(raise eval.samples to at least k)"
        )
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)
