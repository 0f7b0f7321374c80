"""The `tools:` section of a configuration -> a Toolbox."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, get_origin, get_type_hints

from agenttrain.config.schema import Isolation, ToolLimits
from agenttrain.config.target import locate_section
from agenttrain.config.tool_limits import take_limits
from agenttrain.tools.base import FunctionTool, Tool
from agenttrain.tools.process import ProcessTool
from agenttrain.tools.toolbox import Toolbox


def build_toolbox(
    tools: Mapping[str, Any],
    stop_tools: Sequence[str] = (),
    *,
    threads: int = 512,
    max_stuck: int = 32,
) -> Toolbox:
    """Build every declared tool.

    Example: ``{"lookup": {"_target_": "my_pkg.lookup", "timeout_s": 2.0, "table": "a.csv"}}`` is a
    tool `lookup` of two seconds whose parameter `table` is bound. `_target_` names a function, a
    class whose instances are callable (built once, with the bound arguments), or a function
    annotated to return a Tool or a callable. Raises ValueError with key, value and remedy.
    """
    built: dict[str, Tool] = {}
    limits: dict[str, ToolLimits] = {}
    for name, section in tools.items():
        key = f"tools.{name}"
        located = locate_section(section, key=key)
        limits[name] = take_limits(key, located.bound)
        if limits[name].isolation is Isolation.process:
            built[name] = ProcessTool(name, partial(_rebuild, name, dict(section)), limits[name])
        else:
            built[name] = _build(located.found, name, located.bound, located.where)
    return Toolbox(
        built, limits=limits, stop_tools=stop_tools, threads=threads, max_stuck=max_stuck
    )


def _rebuild(name: str, section: Mapping[str, Any]) -> Tool:
    """The tool of a section, in whichever process this is."""
    key = f"tools.{name}"
    located = locate_section(section, key=key)
    take_limits(key, located.bound)
    return _build(located.found, name, located.bound, located.where)


def _build(target: Any, name: str, bound: dict[str, Any], where: str) -> Tool:
    if not callable(target):
        raise ValueError(f"{where}: {target!r} is not a function or a class")
    if not inspect.isclass(target) and not _makes_tool(target):
        return _wrap(target, name, bound, where)
    try:
        inspect.signature(target).bind(**bound)
        made = target(**bound)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} with {bound}: {error}") from error
    if hasattr(made, "schema") and hasattr(made, "name"):
        return made
    if not callable(made):
        raise ValueError(f"{where}: its instances cannot be called; give the class a __call__")
    return _wrap(made, name, {}, where)


def _wrap(function: Callable[..., object], name: str, bound: dict[str, Any], where: str) -> Tool:
    try:
        return FunctionTool(function, name=name, bound=bound)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _makes_tool(target: Callable[..., object]) -> bool:
    """Whether a function is annotated to return a tool, or a callable to make one of."""
    try:
        made = get_type_hints(target).get("return")
    except (NameError, TypeError):
        return False
    return made in (Tool, FunctionTool, Callable) or get_origin(made) is get_origin(
        Callable[[], None]
    )
