"""Tools that a run declares, read from sources: a typo must not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agenttrain.config.schema import RunConfig
from agenttrain.config.suggest import did_you_mean
from agenttrain.config.targets import Kind, Target, look_up

HOOKS = ("reset", "done", "user", "reward", "close")
"""Methods of an environment that are no tools."""
LIFE_CYCLE = ("release", "close")
"""Methods of a class in `tools` that are no tools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolNames:
    """Names of tools as far as sources have them."""

    names: tuple[str, ...]
    complete: bool
    """No tools beside `names`; else `build` finds them, before weights are loaded."""


def tool_names(config: RunConfig) -> ToolNames:
    """Return the tools of `tools` and the methods of `environment`.

    Example: `tools.add` of a function and an environment with a method `move` are ``("add",
    "move")``.
    """
    parts = [_of_tool(name, _target(section)) for name, section in config.tools.items()]
    for section in config.environment.values():
        target = _target(section)
        complete = target.kind is Kind.whole_class
        parts.append(ToolNames(names=_public(target, HOOKS), complete=complete))
    names = dict.fromkeys(name for part in parts for name in part.names)
    return ToolNames(names=tuple(names), complete=all(part.complete for part in parts))


def stop_tools(config: RunConfig) -> tuple[str, ...]:
    """Return the stop tools that sources name: of `stop_tools`, and of sections with `stop`.

    Example: ``stop_tools: [quit]`` and ``tools.submit.stop: true`` are ``("quit", "submit")``. A
    section whose tools are known once it is built (an MCP server) stands for them as ``"mcp …"``.
    """
    names = dict.fromkeys(config.stop_tools)
    for name, section in config.tools.items():
        if isinstance(section, Mapping) and section.get("stop") is True:
            made = _of_tool(name, _target(section))
            known = made.complete or made.names == (name,)
            names.update(dict.fromkeys(made.names if known else (f"{name} …",)))
    return tuple(names)


def named_tool_problems(config: RunConfig) -> Iterator[str]:
    """Yield tools that `stop_tools` and `eval.tools` name and no source has."""
    known = tool_names(config)
    if not known.complete:
        return
    remedies = {"stop_tools": "stop_tools=[] is none (as with experiment=none)"}
    remedies["eval.tools"] = "eval.tools=null is all of them"
    for key, names in (("stop_tools", config.stop_tools), ("eval.tools", config.eval.tools or ())):
        for name in names:
            if name not in known.names:
                yield (
                    f"{key}=[{name}]: is not a tool of this run{did_you_mean(name, known.names)}; "
                    f"its tools are: {', '.join(known.names) or 'none'}; {remedies[key]}"
                )


def _target(section: Any) -> Target:
    return look_up(section.get("_target_")) if isinstance(section, Mapping) else Target()


def _of_tool(name: str, target: Target) -> ToolNames:
    if target.kind is Kind.function or "__call__" in target.methods:
        return ToolNames(names=(name,), complete=True)
    if "tools" in target.methods:  # it says itself which there are, once it is made
        return ToolNames(names=(), complete=False)
    if target.kind is Kind.whole_class:
        return ToolNames(names=_public(target, LIFE_CYCLE), complete=True)
    return ToolNames(names=(name, *_public(target, LIFE_CYCLE)), complete=False)


def _public(target: Target, reserved: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(n for n in target.methods if not n.startswith("_") and n not in reserved)
