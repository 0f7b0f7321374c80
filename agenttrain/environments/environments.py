"""The environments of a run, built from `environment:`: a task's own, and its methods as tools."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from agenttrain.environments.config import EnvironmentSettings
from agenttrain.environments.environment import EnvironmentKind
from agenttrain.tools.config import HOOKS
from agenttrain.tools.structured import built
from agenttrain.tools.tool import Tool, method_builders, method_schema, public_methods
from agenttrain.tools.toolbox import StuckTools, Toolbox
from agenttrain.types import Task, ToolContext
from agenttrain.utils.locate import locate_section
from agenttrain.utils.names import did_you_mean
from agenttrain.utils.sections import beside

COLUMN = "environment"
"""Picks the environment of a row where there are several."""


class Environments:
    """Every declared environment with a toolbox of its methods.

    Example: ``Environments({"maze": EnvironmentKind("maze", Maze)}).kind_of(task)``
    """

    def __init__(
        self,
        kinds: Mapping[str, EnvironmentKind] | None = None,
        *,
        stop_tools: Sequence[str] = (),
        max_stuck: int = 32,
    ) -> None:
        """`stop_tools` of other toolboxes are ignored here; `max_stuck` is for `check_stuck`.

        Raises ValueError, quoting what to add, for a method that no schema can be made of.
        """
        self.kinds = dict(kinds or {})
        self.toolboxes = {name: _toolbox(kind, stop_tools) for name, kind in self.kinds.items()}
        self._empty = Toolbox({})
        self._max_stuck = max_stuck
        self._told = False

    @property
    def tool_names(self) -> tuple[str, ...]:
        """Names of all methods that are tools, each once."""
        names = (name for toolbox in self.toolboxes.values() for name in toolbox.names)
        return tuple(dict.fromkeys(names))

    @property
    def stuck(self) -> tuple[str, ...]:
        """Names of the environments of calls that were given up and still run, one per call."""
        return tuple(label for kind in self.kinds.values() for label in kind.stuck)

    def check_stuck(self) -> None:
        """Raise StuckTools when more than `max_stuck` calls run past all time limits."""
        stuck = Counter(label for kind in self.kinds.values() for label in kind.overdue)
        if stuck.total() > self._max_stuck:
            names = ", ".join(f"{label} ({count})" for label, count in stuck.most_common())
            raise StuckTools(
                f"rollout.max_stuck_calls={self._max_stuck}: {stuck.total()} calls of environments "
                f"still run past their time limit: {names}; their threads cannot be ended: give "
                "what they wait for a time limit of its own"
            )

    @property
    def rewards(self) -> tuple[str, ...]:
        """The environments that have a `reward`."""
        return tuple(name for name, kind in self.kinds.items() if kind.rewards)

    def kind_of(self, task: Task) -> EnvironmentKind | None:
        """The task's environment; None where the run has none.

        Raises ValueError, saying what to add, for a row that names none of several, or another.
        """
        if not self.kinds:
            return None
        known = ", ".join(self.kinds)
        name = task.columns.get(COLUMN)
        if name is None and len(self.kinds) == 1:
            return next(iter(self.kinds.values()))
        if name is None:
            first = next(iter(self.kinds))
            raise ValueError(
                f"it has no column {COLUMN!r}, and the run has several environments: {known}; add "
                f'the column, e.g. "{COLUMN}": "{first}"'
            )
        if name not in self.kinds:
            raise ValueError(
                f"{COLUMN}={name!r}: there is no such environment"
                f"{did_you_mean(str(name), self.kinds)}; there are: {known}"
            )
        return self.kinds[name]

    def toolbox_of(self, kind: EnvironmentKind | None) -> Toolbox:
        """The methods of an environment; an empty toolbox for None."""
        return self._empty if kind is None else self.toolboxes.get(kind.name, self._empty)

    def tell_uneven(self, groups: int, total: int) -> None:
        """Say once, on stderr, that groups began with different prompts."""
        if groups and not self._told:
            self._told = True
            print(
                f"note: in {groups} of {total} groups the environment's reset gave the rollouts of "
                "one task different prompts, and their rewards are compared with each other; take "
                "from `group_seed`, not `seed`, what they must share (metric: data/uneven_prompts; "
                "said once)",
                file=sys.stderr,
            )

    async def aclose(self) -> None:
        """The run is over: close every instance and its tools."""
        await asyncio.gather(*(kind.aclose() for kind in self.kinds.values()))
        await asyncio.gather(*(toolbox.aclose() for toolbox in self.toolboxes.values()))


class _Method:
    """A method of the environment that the calling rollout has."""

    def __init__(self, kind: EnvironmentKind, name: str) -> None:
        self.name = name
        self.schema, self._takes_context = method_schema(kind.cls, name)
        self._builders = method_builders(kind.cls, name)
        self._kind = kind

    async def __call__(self, arguments: dict[str, Any], context: ToolContext) -> object:
        extra = {"context": context} if self._takes_context else {}
        episode = self._kind.episode(context.rollout_id)
        if self._builders:
            arguments = await episode.instance.call(built, self._builders, arguments)
        return await episode.call(self.name, **arguments, **extra)


def _toolbox(kind: EnvironmentKind, stop_tools: Sequence[str]) -> Toolbox:
    try:
        tools: dict[str, Tool] = {
            name: _Method(kind, name) for name in public_methods(kind.cls, HOOKS)
        }
    except ValueError as error:
        raise ValueError(f"environment.{kind.name}: {error}") from error
    return Toolbox(
        tools,
        limits=dict.fromkeys(tools, kind.settings),
        stop_tools=[name for name in stop_tools if name in tools],
    )


def build_kinds(environment: Mapping[str, Any]) -> dict[str, EnvironmentKind]:
    """Build every declared environment; nothing of it is constructed yet.

    Example: ``{"maze": {"_target_": "my_pkg.Maze", "size": 5, "pooled": True}}`` makes instances
    with ``Maze(size=5)``. Raises ValueError with key, value and remedy.
    """
    kinds: dict[str, EnvironmentKind] = {}
    for name, section in environment.items():
        located = locate_section(section, key=f"environment.{name}")
        settings, bound = beside(EnvironmentSettings, located.bound, f"environment.{name}")
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
