"""The public methods of a class as tools."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

from agenttrain.config.tool_names import LIFE_CYCLE
from agenttrain.tools.base import FunctionTool
from agenttrain.tools.schema import argument_builders, function_schema, takes_context
from agenttrain.tools.structured import Build


def public_methods(cls: type, reserved: Collection[str] = LIFE_CYCLE) -> list[str]:
    """Names of a class's public methods, inherited ones too, in the order they were written.

    Class methods (often constructors), nested classes and properties are none.
    """
    names = dict.fromkeys(name for base in reversed(cls.__mro__[:-1]) for name in vars(base))
    return [
        name
        for name in names
        if not name.startswith("_")
        and name not in reserved
        and inspect.isroutine(inspect.getattr_static(cls, name))
        and not isinstance(inspect.getattr_static(cls, name), classmethod)
    ]


def method_schema(cls: type, name: str) -> tuple[dict[str, Any], bool]:
    """Return the schema of a method that is a tool, and True if it takes the ToolContext.

    Raises ValueError that quotes what to add.
    """
    method = getattr(cls, name)
    static = isinstance(inspect.getattr_static(cls, name), staticmethod)
    this = [] if static else list(inspect.signature(method).parameters)[:1]
    try:
        return function_schema(method, name=name, hidden=this), takes_context(method)
    except ValueError as error:
        raise ValueError(f"{error}\nor begin its name with _ if it is no tool") from error


def method_builders(cls: type, name: str) -> dict[str, Build]:
    """Builders of a method's structured arguments, by name."""
    method = getattr(cls, name)
    static = isinstance(inspect.getattr_static(cls, name), staticmethod)
    this = [] if static else list(inspect.signature(method).parameters)[:1]
    return argument_builders(method, hidden=this)


def method_tools(made: object, where: str) -> dict[str, FunctionTool]:
    """Every public method of an object as a tool of its name.

    Raises ValueError when there is none, or for one that no schema can be made of.
    """
    names = public_methods(type(made))
    if not names:
        raise ValueError(
            f"{where}: its instances cannot be called; give the class a __call__, or public "
            "methods, each of which is a tool then"
        )
    tools: dict[str, FunctionTool] = {}
    for name in names:
        method_schema(type(made), name)  # its error says how a method is kept from being a tool
        tools[name] = FunctionTool(getattr(made, name), name=name)
    tools[names[0]].owner = made  # the first one alone: an object is released and closed once
    return tools
