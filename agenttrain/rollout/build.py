"""The `tools:` and `environment:` sections of a configuration -> what rows can call."""

from __future__ import annotations

from agenttrain.config.schema import RunConfig
from agenttrain.environments.build import build_kinds
from agenttrain.rollout.environments import Environments
from agenttrain.rollout.row_check import check_collisions
from agenttrain.tools.build import build_toolbox
from agenttrain.tools.toolbox import Toolbox


def build_tools(config: RunConfig) -> tuple[Toolbox, Environments]:
    """The run's own tools, and its environments with their methods.

    Raises ValueError with key, value and remedy, also for a stop tool that is neither.
    """
    environments = Environments(
        build_kinds(config.environment),
        stop_tools=config.stop_tools,
        max_stuck=config.rollout.max_stuck_calls,
    )
    stops = [name for name in config.stop_tools if name not in environments.tool_names]
    toolbox = build_toolbox(
        config.tools,
        stops,
        threads=config.rollout.concurrency,
        max_stuck=config.rollout.max_stuck_calls,
    )
    check_collisions(toolbox, environments)
    return toolbox, environments
