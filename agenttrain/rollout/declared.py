"""Declarations of a run's tools and environments, saved in the run's folder as tools.json.

A replay of recorded replies needs only schemas and limits. With this file it imports no user code
and starts no MCP server.

    {"run": {"tools": [{"schema": {…}, "limits": {…}}], "stop_tools": ["final_answer"]},
     "environments": {"maze": {"tools": […], "stop_tools": [], "hooks": ["reset", "reward"]}}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from agenttrain.environments.environment import EnvironmentKind
from agenttrain.environments.environments import Environments
from agenttrain.tools.config import Isolation, ToolLimits
from agenttrain.tools.toolbox import Toolbox
from agenttrain.types import ToolContext, ToolUnavailable
from agenttrain.utils.files import write_atomically

FILE = "tools.json"
DECLARED_HOOKS = ("reset", "user", "reward")
"""Optional methods of an environment's class that the loop calls."""
LIMITS = tuple(field.name for field in fields(ToolLimits))


class DeclaredTool:
    """Tool without its code: only its schema is known."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self.name, self.schema = str(schema["function"]["name"]), schema

    async def __call__(self, arguments: dict[str, Any], context: ToolContext) -> object:
        """Raise ToolUnavailable: there is no code to call."""
        raise ToolUnavailable(f"tool {self.name}: only its schema was recorded")


def write_declared(folder: Path, toolbox: Toolbox, environments: Environments) -> None:
    """Write tools.json into a run's folder, so that a replay needs none of the user's code."""
    declared = {
        "run": _describe(toolbox),
        "environments": {
            name: {
                **_describe(environments.toolbox_of(kind)),
                "hooks": [
                    hook for hook in DECLARED_HOOKS if callable(getattr(kind.cls, hook, None))
                ],
            }
            for name, kind in environments.kinds.items()
        },
    }
    write_atomically(folder / FILE, json.dumps(declared, indent=1) + "\n")


def read_declared(folder: Path) -> tuple[Toolbox, Environments] | None:
    """Read tools.json as tools that cannot be called, or None. Raises ValueError."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        declared = json.loads(path.read_text(encoding="utf-8"))
        # Environments without their code: each gets an empty class that has only the recorded
        # hooks. The hooks are looked for, and never called.
        environments = Environments()
        for name, environment in declared["environments"].items():
            hooks = {
                hook: lambda self: None for hook in DECLARED_HOOKS if hook in environment["hooks"]
            }
            environments.kinds[name] = EnvironmentKind(name, type(name, (), hooks))
            environments.toolboxes[name] = _make_toolbox(environment)
        return _make_toolbox(declared["run"]), environments
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: is not what the run wrote: {error}") from error


def _describe(toolbox: Toolbox) -> dict[str, Any]:
    """Return a toolbox as JSON: schemas, limits and stop tools."""
    tools = [
        {"schema": toolbox.tool(name).schema, "limits": asdict(toolbox.limits(name))}
        for name in toolbox.names
    ]
    return {"tools": tools, "stop_tools": sorted(toolbox.stop_tools)}


def _make_toolbox(declared: Mapping[str, Any]) -> Toolbox:
    """Return the toolbox that `_describe` described; its tools cannot be called."""
    tools = [DeclaredTool(tool["schema"]) for tool in declared["tools"]]
    # A limit that another version of the package recorded may be unknown to this one.
    limits = [
        {name: tool["limits"][name] for name in LIMITS if name in tool["limits"]}
        for tool in declared["tools"]
    ]
    # Nothing is called, so no exception class of the user's is imported and no worker started.
    unused = {"retry_on": [], "isolation": Isolation.thread}
    return Toolbox(
        {tool.name: tool for tool in tools},
        limits={
            tool.name: ToolLimits(**{**limit, **unused})
            for tool, limit in zip(tools, limits, strict=True)
        },
        stop_tools=declared["stop_tools"],
    )
