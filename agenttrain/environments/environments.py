"""Build the environments of a run from `environment:`, with their methods as tools."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agenttrain.environments.config import EnvironmentSettings
from agenttrain.environments.environment import EnvironmentKind
from agenttrain.tools.annotations import build_instances
from agenttrain.tools.config import HOOKS
from agenttrain.tools.tool import Tool, ToolSpec, describe_method, public_methods
from agenttrain.tools.toolbox import StuckTools, Toolbox
from agenttrain.types import Task, ToolContext
from agenttrain.utils.locate import about_argument, class_method, locate_section
from agenttrain.utils.names import did_you_mean
from agenttrain.utils.redaction import hide_in_settings
from agenttrain.utils.sections import split_section

COLUMN = "environment"
"""Column that selects a row's environment if the run has several."""


class Environments:
    """The declared environments, each with a toolbox of its methods. A run has one object.

    Example: ``Environments({"maze": EnvironmentKind("maze", Maze)}).kind_of(task)``
    """

    def __init__(
        self,
        kinds: Mapping[str, EnvironmentKind] | None = None,
        *,
        stop_tools: Sequence[str] = (),
        max_stuck: int = 32,
    ) -> None:
        """Make the toolbox of each environment.

        `stop_tools` may hold tools of other toolboxes too. `max_stuck` is the most calls that may
        run on after their time limit; `check_stuck` raises above it. Raises ValueError for a method
        of which no schema can be made; it says what to add to it.
        """
        self.kinds = dict(kinds or {})
        self.toolboxes: dict[str, Toolbox] = {}
        for name, kind in self.kinds.items():
            tools: dict[str, Tool] = {}
            try:
                # All public methods are tools but the hooks, such as `reset` and `reward`. A class
                # may also list schemas of tools that are no methods: `described_tools`.
                for method in public_methods(kind.cls, HOOKS):
                    spec = describe_method(kind.cls, method)
                    tools[method] = _MethodTool(
                        name=method, schema=spec.schema, kind=kind, spec=spec
                    )
                for schema in described_tools(kind):
                    tool = schema["function"]["name"]
                    if tool in tools:
                        raise ValueError(f"it has two tools with the name {tool!r}; rename one")
                    tools[tool] = _DescribedTool(name=tool, schema=schema, kind=kind)
            except ValueError as error:
                key = f"environment.{name}"
                # If the error begins with an argument of the constructor (they are `kind.bound`),
                # its message begins with that argument's whole key: `environment.maze.size`.
                raise ValueError(about_argument(error, key, kind.bound)) from error
            self.toolboxes[name] = Toolbox(
                tools,
                limits=dict.fromkeys(tools, kind.settings),
                stop_tools=[stop for stop in stop_tools if stop in tools],
            )
        self._empty = Toolbox({})
        """The toolbox of rollouts without an environment."""
        self._max_stuck = max_stuck
        self._warned = False
        """True once `warn_uneven_prompts` has warned."""

    @property
    def tool_names(self) -> tuple[str, ...]:
        """The names of all methods that are tools, each once."""
        names = (name for toolbox in self.toolboxes.values() for name in toolbox.names)
        return tuple(dict.fromkeys(names))

    @property
    def stuck(self) -> tuple[str, ...]:
        """A label (``environment maze``) for each call that still runs although it was cancelled.

        These are all such calls: `check_stuck` counts only those whose time limit is over too.
        """
        instances = (instance for kind in self.kinds.values() for instance in kind.busy())
        return tuple(label for instance in instances for label in instance.threads.stuck)

    def check_stuck(self) -> None:
        """Raise StuckTools if more than `max_stuck` calls still run after their time limit.

        A cancelled call that may still end within its limit does not count.
        """
        instances = (instance for kind in self.kinds.values() for instance in kind.busy())
        overdue = Counter(label for instance in instances for label in instance.threads.overdue)
        if overdue.total() > self._max_stuck:
            names = ", ".join(f"{label} ({count})" for label, count in overdue.most_common())
            raise StuckTools(
                f"rollout.max_stuck_calls={self._max_stuck}: {overdue.total()} calls of "
                f"environments still run past their time limit: {names}; their threads cannot be "
                "ended: give what they wait for a time limit of its own"
            )

    @property
    def rewards(self) -> tuple[str, ...]:
        """Names of the environments that have a `reward`."""
        return tuple(name for name, kind in self.kinds.items() if kind.has_reward)

    def kind_of(self, task: Task) -> EnvironmentKind | None:
        """Return the task's environment, or None if the run has none.

        Raises ValueError, with a remedy, for a row that names an unknown one, or none of several.
        """
        if not self.kinds:
            return None
        names = ", ".join(self.kinds)
        name = task.columns.get(COLUMN)
        if name is None and len(self.kinds) == 1:
            return next(iter(self.kinds.values()))
        if name is None:
            example = next(iter(self.kinds))
            raise ValueError(
                f"it has no column {COLUMN!r}, and the run has several environments: {names}; add "
                f'the column, e.g. "{COLUMN}": "{example}"'
            )
        if name not in self.kinds:
            raise ValueError(
                f"{COLUMN}={name!r}: there is no such environment"
                f"{did_you_mean(str(name), self.kinds)}; there are: {names}"
            )
        return self.kinds[name]

    def toolbox_of(self, kind: EnvironmentKind | None) -> Toolbox:
        """Return the toolbox of an environment's methods; for None, an empty toolbox."""
        return self._empty if kind is None else self.toolboxes.get(kind.name, self._empty)

    def warn_uneven_prompts(self, groups: int, total: int) -> None:
        """Warn once that in `groups` of `total` groups rollouts began with different prompts."""
        if groups and not self._warned:
            self._warned = True
            print(
                f"note: in {groups} of {total} groups the environment's reset gave the rollouts of "
                "one task different prompts, and their rewards are compared with each other; take "
                "from `group_seed`, not `seed`, what they must share (metric: data/uneven_prompts; "
                "logged once)",
                file=sys.stderr,
            )

    async def aclose(self) -> None:
        """Close every instance and toolbox at the end of the run."""
        await asyncio.gather(*(kind.aclose() for kind in self.kinds.values()))
        await asyncio.gather(*(toolbox.aclose() for toolbox in self.toolboxes.values()))


@dataclass(slots=True, kw_only=True, eq=False)
class _MethodTool:
    """A method as a tool; a call reaches the instance of the calling rollout."""

    name: str
    schema: dict[str, Any]
    kind: EnvironmentKind
    spec: ToolSpec

    async def __call__(self, arguments: dict[str, Any], context: ToolContext) -> object:
        extra = {"context": context} if self.spec.takes_context else {}
        episode = self.kind.episodes[context.rollout_id]
        # `instance.call` runs any function in the thread of the rollout's environment object.
        # `episode.call` runs a method of the object there, and reads `done` after it.
        if self.spec.builders:  # arguments that the method takes as instances of a class
            # Their constructors are the user's code: they may block, or need the object's thread.
            arguments = await episode.instance.call(build_instances, self.spec.builders, arguments)
        return await episode.call(self.name, **arguments, **extra)


@dataclass(slots=True, kw_only=True, eq=False)
class _DescribedTool:
    """Tool of an environment class that lists its schemas (`tools`) instead of having methods.

    A call goes to `call_tool` of the rollout's own instance of the class.
    """

    name: str
    schema: dict[str, Any]
    kind: EnvironmentKind

    async def __call__(self, arguments: dict[str, Any], context: ToolContext) -> object:
        episode = self.kind.episodes[context.rollout_id]
        cls: Any = self.kind.cls
        takes_context = "context" in inspect.signature(cls.call_tool).parameters
        extra = {"context": context} if takes_context else {}
        return await episode.call("call_tool", self.name, arguments, **extra)


def described_tools(kind: EnvironmentKind) -> list[dict[str, Any]]:
    """Return the schemas of a class's `tools`, which depend on its arguments; often none."""
    describe = class_method(kind.cls, "tools")
    return [] if describe is None else list(describe(**kind.bound))


def build_kinds(environment: Mapping[str, Any]) -> dict[str, EnvironmentKind]:
    """Build every declared environment without making an instance.

    Example: ``{"maze": {"_target_": "my_pkg.Maze", "size": 5, "pooled": True}}`` makes instances
    with ``Maze(size=5)``. Raises ValueError with key, value and remedy.
    """
    kinds: dict[str, EnvironmentKind] = {}
    for name, section in environment.items():
        located = locate_section(section, key=f"environment.{name}")
        settings, bound = split_section(EnvironmentSettings, located.bound, f"environment.{name}")
        if not inspect.isclass(located.target):
            raise ValueError(
                f"{located.where}: is not a class; each rollout gets an instance of its own, so "
                "name the class itself"
            )
        try:
            inspect.signature(located.target).bind(**bound)
        except TypeError as error:
            raise ValueError(f"{located.where} with {hide_in_settings(bound)}: {error}") from error
        kinds[name] = EnvironmentKind(name, located.target, bound=bound, settings=settings)
    return kinds
