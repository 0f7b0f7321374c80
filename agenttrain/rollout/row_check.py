"""Rows against the tools and environments of a run, before anything is sampled."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from agenttrain.data.source import LOOKED_AT, TaskSource
from agenttrain.rollout.environments import Environments
from agenttrain.rollout.row_tools import RowTools
from agenttrain.tools.toolbox import Toolbox
from agenttrain.types import AgenttrainError

CHECKED = 20_000
"""Rows of a dataset that are checked, from the first on."""
Schemas = list[dict[str, Any]]


class RowError(AgenttrainError, ValueError):
    """A row asks for tools or an environment that it cannot have; names the row."""


def check_collisions(toolbox: Toolbox, environments: Environments) -> None:
    """Raise ValueError when an environment's method has the name of one of the run's tools."""
    for name, methods in environments.toolboxes.items():
        for tool in methods.names:
            if tool in toolbox.names:
                raise ValueError(
                    f"environment.{name}: its method {tool!r} has the name of a tool of the run "
                    f"(tools.{tool}); rename the method, or leave the tool out"
                )


def tool_sets(toolbox: Toolbox, environments: Environments) -> list[Schemas]:
    """What rows see that list no tools: the run's with each environment's."""
    run = toolbox.schemas()
    return [run + methods.schemas() for methods in environments.toolboxes.values()] or [run]


def row_tool_sets(
    key: str, source: TaskSource, toolbox: Toolbox, environments: Environments
) -> Iterator[Schemas]:
    """What the rows of `source` see that list their tools, each set once, the first rows' first.

    Of rows that are generated without end only the first are looked at. Raises RowError that
    begins with `key` (data.train) and names the row.
    """
    seen: set[str] = set()
    count = LOOKED_AT if len(source) == sys.maxsize else min(len(source), CHECKED)
    for index in range(count):
        try:
            task = source.row(index)
            tools = RowTools(task, toolbox, environments)
        except ValueError as error:
            reason = str(error).removeprefix(f"data row {index}: ")
            raise RowError(f"{key}: {source.where(index)}: {reason}") from error
        names = json.dumps(tools.schemas)
        if task.tools is not None and names not in seen:
            seen.add(names)
            yield tools.schemas
