"""The `Tool` protocol, and Python functions as tools."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from agenttrain.threads import blocks
from agenttrain.tools.schema import argument_builders, function_schema, takes_context
from agenttrain.tools.structured import built
from agenttrain.types import ToolContext


class Tool(Protocol):
    """Something that the model can call.

    What it returns becomes the reply's text (`agenttrain.tools.reply`), what it raises an error
    that the model reads; `agenttrain.types.Done` ends the episode,
    `agenttrain.types.ToolUnavailable` the rollout. Optional methods, sync or async:
    ``release(rollout_id)`` when a rollout is over, ``close()`` when the run is.
    """

    name: str
    schema: dict[str, Any]
    """Shown to the model: ``{"type": "function", "function": {"name": …, "parameters": …}}``."""

    async def __call__(self, arguments: dict[str, Any], context: ToolContext) -> object:
        """Run one call; `arguments` fit the schema and belong to the tool."""
        ...


@runtime_checkable
class Tools(Protocol):
    """The object that a section's `_target_` makes when it makes several tools."""

    def tools(self) -> Sequence[Tool]:
        """The tools, each under its own name."""
        ...


class FunctionTool:
    """A typed Python function, method or callable instance as a tool; sync or async.

    The schema comes from its signature and Google docstring. A parameter ``context: ToolContext``
    is passed by us, `bound` ones are settings: the model sees neither. Arguments are plain JSON
    values (a list for a tuple), and instances where the annotation is a dataclass, a pydantic
    model, an Enum or the like (`agenttrain.tools.structured`).

    Example::

        def lookup(key: str, table: dict) -> str:
            \"\"\"Look up a key.

            Args:
                key: What to look up.
                table: Where to look.
            \"\"\"
            return table[key]

        FunctionTool(lookup, bound={"table": {"capital": "Oslo"}})   # the model sees lookup(key)
    """

    def __init__(
        self,
        function: Callable[..., object],
        *,
        name: str | None = None,
        bound: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises ValueError, quoting what to add, unless a schema can be made of the function."""
        settings = dict(bound or {})
        while isinstance(function, functools.partial):  # its arguments become bound ones
            partial = inspect.signature(function.func).bind_partial(
                *function.args, **function.keywords
            )
            function, settings = function.func, {**partial.arguments, **settings}
        self.function = function
        self.owner: object = function
        """The object to release and close: an instance that can be called may hold something."""
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        self.schema = function_schema(function, name=self.name, hidden=settings)
        self.blocking = blocks(function)
        """True where a call occupies its thread; the toolbox then gives it one of its own."""
        self._bound = settings
        self._builders = argument_builders(function, hidden=settings)
        self.takes_context = takes_context(function) and "context" not in settings
        """True where calls are given the ToolContext."""

    def call(self, arguments: dict[str, Any], context: ToolContext) -> object:
        """Call the function in this thread; an async one returns its awaitable."""
        extra = {"context": context} if self.takes_context else {}
        if self._builders:
            arguments = built(self._builders, arguments)
        return self.function(**self._bound, **extra, **arguments)

    async def __call__(self, arguments: dict[str, Any], context: ToolContext) -> object:
        """Call the function; a blocking one blocks the event loop here."""
        result = self.call(arguments, context)
        return await result if inspect.isawaitable(result) else result

    async def release(self, rollout_id: str) -> None:
        """Let the callable instance behind the tool free what it holds for a rollout."""
        await call_optional(self.owner, "release", rollout_id)

    async def close(self) -> None:
        """Close the callable instance behind the tool, if it can be closed."""
        await call_optional(self.owner, "close")


async def call_optional(owner: object, method: str, *arguments: object) -> None:
    """Call a method that `owner` may lack, sync or async."""
    hook = getattr(owner, method, None)
    if hook is not None:
        result = hook(*arguments)
        if inspect.isawaitable(result):
            await result
