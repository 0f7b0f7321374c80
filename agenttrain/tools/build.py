"""Build a Toolbox from the `tools:` section of a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, get_origin, get_type_hints

from agenttrain.tools.config import Isolation, ToolLimits, ToolSettings
from agenttrain.tools.isolation import ProcessTool
from agenttrain.tools.tool import FunctionTool, Tool, Tools, method_tools
from agenttrain.tools.toolbox import Toolbox
from agenttrain.utils.locate import Located, about_argument, locate_section
from agenttrain.utils.redaction import hide_in_settings
from agenttrain.utils.sections import split_section


def build_toolbox(
    tools: Mapping[str, Any],
    stop_tools: Sequence[str] = (),
    *,
    threads: int = 512,
    max_stuck: int = 32,
) -> Toolbox:
    """Build every declared tool.

    Example: ``{"lookup": {"_target_": "my_pkg.lookup", "timeout_s": 2.0, "table": "a.csv"}}`` is a
    tool `lookup` with a limit of two seconds, whose parameter `table` is bound. `_target_` names

    - a function, which is the tool;
    - a class whose instances are callable: an instance, made with the bound arguments, is the tool;
    - a class whose instances are not callable: each public method of the instance is a tool;
    - a class with a method ``tools() -> list[Tool]``: these are the tools;
    - a function annotated to return a Tool or a callable: it is called and returns the tool.

    At most `threads` blocking calls run at once, and at most `max_stuck` may run past their time
    limit. All tools of a section have its limits. A section with `stop: true` makes stop tools,
    like the names in `stop_tools`. Raises ValueError with key, value and remedy.
    """
    tools_by_name: dict[str, Tool] = {}
    limits: dict[str, ToolLimits] = {}
    stops = list(stop_tools)
    for name, section in tools.items():
        key = f"tools.{name}"
        located = locate_section(section, key=key)
        # Our settings stand beside the arguments of the user's own code.
        settings, located.bound = split_section(ToolSettings, located.bound, key)
        if settings.isolation is Isolation.process:
            # A worker gets `make_tool` by pickle and calls it to build its own copy of the tool.
            # It raises ValueError for a section with several tools.
            make_tool = partial(_rebuild, name, dict(section))
            section_tools: list[Tool] = [ProcessTool(name, make_tool, settings)]
        else:
            section_tools = _build(located, name)
        for tool in section_tools:
            if tool.name in tools_by_name:
                raise ValueError(
                    f"{located.where}: its tool {tool.name!r} is the second of that name; rename "
                    "one of the two (those of an MCP server: with prefix)"
                )
            tools_by_name[tool.name], limits[tool.name] = tool, settings
            if settings.stop:
                stops.append(tool.name)
    return Toolbox(
        tools_by_name, limits=limits, stop_tools=stops, threads=threads, max_stuck=max_stuck
    )


def _rebuild(name: str, section: Mapping[str, Any]) -> Tool:
    """Build the one tool of a section with isolation=process.

    Each worker does so to run the tool's calls, and the main process for the tool's schema.
    """
    key = f"tools.{name}"
    located = locate_section(section, key=key)
    # The arguments alone: the limits and `stop` beside them are not the target's.
    _, arguments = split_section(ToolSettings, located.bound, key)
    tools = _build(replace(located, bound=arguments), name)
    # A class without `__call__` makes tools named like its methods. Even a single one has no place
    # in a worker, whose one tool is named like the section.
    are_methods = any(isinstance(tool, FunctionTool) and tool.name != name for tool in tools)
    if len(tools) != 1 or are_methods:
        names = ", ".join(tool.name for tool in tools)
        raise ValueError(
            f"{key}.isolation=process: it makes the tools {names}, which cannot be moved to "
            "another process; leave isolation=thread"
        )
    return tools[0]


def _build(located: Located, name: str) -> list[Tool]:
    """Build the tools of a section.

    A plain function is the tool itself. A class, and a function annotated to return a tool
    (`_makes_tool`), is first called with the bound arguments. The result is then an object with a
    method `tools()`, a Tool, a callable that becomes the tool, or an object whose public methods
    become the tools. Raises ValueError.
    """
    target, bound, where = located.target, located.bound, located.where
    if not callable(target):
        raise ValueError(f"{where}: {target!r} is not a function or a class")
    if _makes_tool(target):
        try:
            # Wrong arguments are found before the target has done anything, say opened a file.
            inspect.signature(target).bind(**bound)
            result = target(**bound)
        except TypeError as error:  # wrong arguments, or an error of the target's own code
            raise ValueError(f"{where} with {hide_in_settings(bound)}: {error}") from error
        except ValueError as error:
            # The target's own check, e.g. `path=docs/: there is no such folder`: the message gets
            # the full key, tools.<name>.path. Other errors get the whole section before them.
            if str(error).partition("=")[0] in bound:
                raise ValueError(about_argument(error, f"tools.{name}", bound)) from error
            raise ValueError(f"{where} with {hide_in_settings(bound)}: {error}") from error
        if isinstance(result, Tools):
            return list(result.tools())
        if hasattr(result, "schema") and hasattr(result, "name"):  # a Tool
            return [result]
        if not callable(result):
            return list(method_tools(result, where).values())
        target, bound = result, {}  # a callable, which is the tool
    try:
        return [FunctionTool(target, name=name, bound=bound)]
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _makes_tool(target: Callable[..., Any]) -> bool:
    """Return True for a class, and for a function annotated to return a tool or a callable."""
    if inspect.isclass(target):
        return True
    with suppress(NameError, TypeError):  # annotations that cannot be resolved
        return_hint = get_type_hints(target).get("return")
        # Callable[[str], str] and the like; the bare Callable is compared below.
        is_callable_hint = get_origin(return_hint) is get_origin(Callable[[], None])
        return return_hint in (Tool, FunctionTool, Callable) or is_callable_hint
    return False
