"""What is told of a step's rollouts besides what is learnt from them."""

from __future__ import annotations

from collections.abc import Mapping

from agenttrain.rollout.collect import Collected, Collector
from agenttrain.tracking.metrics import rollout_metrics


def step_figures(
    collector: Collector, collected: Collected, seconds: Mapping[str, float]
) -> dict[str, float]:
    """The metrics of the rollouts of all processes; `seconds` by phase, `rollout` among them."""
    tokens = sum(rollout.sampled_length for rollout in collected.rollouts)
    return {
        **rollout_metrics(
            collected.groups, tools=collector.tool_names, rewards=collector.rubric.names
        ),
        "rollout/dropped": collected.dropped,
        "rollout/ledger_breaks": collected.broken,
        "time/loop_lag_max_s": collected.loop_lag_s,
        "data/overlong": collected.overlong,
        "data/uneven_prompts": collected.uneven_prompts,
        "time/reward_s": collected.reward_s,
        **{f"time/{phase}_s": value for phase, value in seconds.items()},
        "tokens_per_s": tokens / seconds["rollout"],
    }
