"""The `environment:` section of a configuration -> environment kinds."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from agenttrain.config.schema import EnvironmentSettings
from agenttrain.config.target import locate_section
from agenttrain.environments.kind import EnvironmentKind


def build_kinds(environment: Mapping[str, Any]) -> dict[str, EnvironmentKind]:
    """Build every declared environment; nothing of it is constructed yet.

    Example: ``{"maze": {"_target_": "my_pkg.Maze", "size": 5, "pooled": True}}`` makes instances
    with ``Maze(size=5)``. Raises ValueError with key, value and remedy.
    """
    kinds: dict[str, EnvironmentKind] = {}
    known = [field.name for field in fields(EnvironmentSettings)]
    for name, section in environment.items():
        located = locate_section(section, key=f"environment.{name}")
        bound = dict(located.bound)
        settings = EnvironmentSettings(**{key: bound.pop(key) for key in known if key in bound})
        if not inspect.isclass(located.found):
            raise ValueError(
                f"{located.where}: is no class; each rollout gets an instance of its own, so name "
                "the class itself"
            )
        try:
            inspect.signature(located.found).bind(**bound)
        except TypeError as error:
            raise ValueError(f"{located.where} with {bound}: {error}") from error
        kinds[name] = EnvironmentKind(name, located.found, bound=bound, settings=settings)
    return kinds
