"""The `Tool` protocol; Python functions and the public methods of a class as tools.

`describe_function` makes the JSON schema that the model sees from a signature and a Google
docstring.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, get_args, get_type_hints, runtime_checkable

from agenttrain.tools.annotations import Build, ParameterType, build_instances, describe_type
from agenttrain.tools.config import LIFE_CYCLE
from agenttrain.tools.docstring import Docstring, read_docstring
from agenttrain.types import ToolContext
from agenttrain.utils.names import did_you_mean
from agenttrain.utils.threads import blocks


class Tool(Protocol):
    """A tool that the model can call.

    Its return value becomes the text of the reply (`agenttrain.tools.reply`). An exception becomes
    an error that the model reads. Returning `agenttrain.types.Done` ends the episode; raising
    `agenttrain.types.ToolUnavailable` ends the rollout. Optional methods, sync or async:
    ``release(rollout_id)`` at the end of a rollout, ``close()`` at the end of the run.
    """

    name: str
    schema: dict[str, Any]
    """Shown to the model: ``{"type": "function", "function": {"name": …, "parameters": …}}``."""

    async def __call__(self, arguments: dict[str, Any], context: ToolContext) -> object:
        """Run one call; `arguments` fit the schema, and the tool may change them."""
        ...


@runtime_checkable
class Tools(Protocol):
    """An object with several tools; a section's `_target_` may return one."""

    def tools(self) -> Sequence[Tool]:
        """Return the tools, each under its own name."""
        ...


class FunctionTool:
    """A typed Python function, method or callable instance as a tool; sync or async.

    The schema is made of its signature and Google docstring. A parameter ``context: ToolContext``
    gets the call's context, and `bound` parameters are settings: the model sees neither. Arguments
    are plain JSON values, or what the annotation says where JSON lacks it: a tuple, a date, an
    instance of a dataclass, a pydantic model, an Enum (`agenttrain.tools.annotations`).

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
        """Make a tool of `function`, called `name` if one is given and as the function otherwise.

        Raises ValueError if no schema can be made of the function; it quotes what to add to the
        function, such as a line of its docstring.
        """
        all_bound = dict(bound or {})
        # Arguments of a partial count as bound. The outer value wins, as in a call of a partial:
        # `bound` before the partial, and an outer partial before the one inside of it.
        while isinstance(function, functools.partial):
            signature = inspect.signature(function.func)
            of_partial = signature.bind_partial(*function.args, **function.keywords).arguments
            function, all_bound = function.func, {**of_partial, **all_bound}
        self.function = function
        self.owner: object = function
        """The object whose `release` and `close` are called: callable instances may have them."""
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        spec = describe_function(function, name=self.name, hidden=all_bound)
        self.schema = spec.schema
        self.blocking = blocks(function)
        """True if a call blocks its thread; the toolbox then gives it a thread of its own."""
        self._bound = all_bound
        self._builders = spec.builders
        """Parameter -> what makes its argument, where that is no plain JSON value."""
        self.takes_context = spec.takes_context and "context" not in all_bound
        """True if the function gets the ToolContext."""

    def call(self, arguments: dict[str, Any], context: ToolContext) -> object:
        """Call the function in this thread; an async function returns its awaitable."""
        extra = {"context": context} if self.takes_context else {}
        if self._builders:
            arguments = build_instances(self._builders, arguments)
        return self.function(**self._bound, **extra, **arguments)

    async def __call__(self, arguments: dict[str, Any], context: ToolContext) -> object:
        """Call the function on the event loop, which a blocking function blocks."""
        result = self.call(arguments, context)
        return await result if inspect.isawaitable(result) else result

    async def release(self, rollout_id: str) -> None:
        """Call the `release` of the callable instance behind the tool, if it has one."""
        await call_optional(self.owner, "release", rollout_id)

    async def close(self) -> None:
        """Call the `close` of the callable instance behind the tool, if it has one."""
        await call_optional(self.owner, "close")


async def call_optional(owner: object, method: str, *arguments: object) -> None:
    """Call a sync or async method of `owner`, if it has the method."""
    hook = getattr(owner, method, None)
    if hook is not None:
        result = hook(*arguments)
        if inspect.isawaitable(result):
            await result


def public_methods(cls: type, reserved: Collection[str] = LIFE_CYCLE) -> list[str]:
    """Return the names of a class's public methods, inherited ones too, in source order.

    Names in `reserved`, class methods (often constructors), nested classes and properties are left
    out.
    """
    # The base classes first, without `object`.
    names = dict.fromkeys(name for base in reversed(cls.__mro__[:-1]) for name in vars(base))
    return [
        name
        for name in names
        if not name.startswith("_")
        and name not in reserved
        and inspect.isroutine(inspect.getattr_static(cls, name))
        and not isinstance(inspect.getattr_static(cls, name), classmethod)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """Description of a function or a method as a tool; the class may have no instance yet."""

    schema: dict[str, Any]
    """Shown to the model; without description and parameters in a worker (`UNSEEN`)."""
    takes_context: bool
    """True if it has a parameter ``context: ToolContext``."""
    builders: dict[str, Build]
    """Builders of arguments that are not plain JSON, by name (`agenttrain.tools.annotations`)."""


def describe_method(cls: type, name: str) -> ToolSpec:
    """Describe a method as a tool. Raises ValueError that quotes what to add."""
    method = getattr(cls, name)
    is_static = isinstance(inspect.getattr_static(cls, name), staticmethod)
    # The class's function still has `self`, which no call passes: hide it from the schema.
    self_name = [] if is_static else list(inspect.signature(method).parameters)[:1]
    try:
        return describe_function(method, name=name, hidden=self_name)
    except ValueError as error:
        raise ValueError(f"{error}\nor begin its name with _ if it is no tool") from error


def method_tools(owner: object, where: str) -> dict[str, FunctionTool]:
    """Make a tool of each public method of an object, by name.

    Raises ValueError if there is none, or for a method of which no schema can be made.
    """
    names = public_methods(type(owner))
    if not names:
        raise ValueError(
            f"{where}: its instances cannot be called; give the class a __call__, or public "
            "methods, each of which is then a tool"
        )
    tools: dict[str, FunctionTool] = {}
    for name in names:
        describe_method(type(owner), name)  # its error says how to exclude a method
        tools[name] = FunctionTool(getattr(owner, name), name=name)
    tools[names[0]].owner = owner  # of the first tool only: the object is released and closed once
    return tools


Function = Callable[..., object]

UNSEEN: ContextVar[bool] = ContextVar("UNSEEN", default=False)
"""Set in a tool's worker process, where no model sees the schemas. They are left empty there."""


def describe_function(function: Function, *, name: str, hidden: Collection[str] = ()) -> ToolSpec:
    """Describe a function with an OpenAI-style schema, in the form of `get_json_schema`.

    Parameters in `hidden` and a ``context: ToolContext`` are left out. So is the return type, which
    the tool schemas of served models lack too. In a worker process the schema has only the name.
    The description of a parameter stands in the docstring or in its annotation. Raises ValueError,
    with the text to add, if an annotation, the docstring or a description is missing, and for a
    type that cannot be written as JSON.

    Example: for ``def add(a: int, b: int)``, documented: ``{"type": "function", "function":
    {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {"a":
    {"type": "integer", "description": "First."}, …}, "required": ["a", "b"]}}}``
    """
    # An instance has its signature and docstring in `__call__`.
    is_routine = inspect.isroutine(function)
    target: Any = function if is_routine else getattr(function, "__call__")  # noqa: B004, B009
    where = f"tool {name!r} ({target.__module__}.{target.__qualname__})"
    parameters = _find_parameters(target, hidden, where)
    hints = _resolve_hints(target, where)
    context_hint = hints.get("context")  # ToolContext, or ToolContext | None
    takes_context = context_hint is ToolContext or ToolContext in get_args(context_hint)
    left_out = {*hidden, "context"} if takes_context else {*hidden}
    shown = [parameter for parameter in parameters.values() if parameter.name not in left_out]
    doc = read_docstring(inspect.getdoc(target) or "")
    needs_schema = not UNSEEN.get()  # a worker process calls the tool and shows it to no model
    if needs_schema:
        _check_annotated(shown, where)
    types: dict[str, ParameterType] = {}
    for parameter in shown:
        try:
            hint = hints.get(parameter.name, Any)
            types[parameter.name] = describe_type(hint, shown=needs_schema)
        except (ValueError, NameError) as error:
            raise ValueError(
                f"{where}: no JSON schema can be made of it: parameter {parameter.name!r}: {error}"
            ) from error
    schema: dict[str, Any] = {"type": "function", "function": {"name": name}}
    if needs_schema:
        properties = {
            parameter: {**kind.schema, **doc.parameters.get(parameter, {})}
            for parameter, kind in types.items()
        }
        _check_described(properties, doc, where)
        required = [p.name for p in shown if p.default is inspect.Parameter.empty]
        schema["function"]["description"] = doc.description
        schema["function"]["parameters"] = {
            "type": "object",
            "properties": properties,
            **({"required": required} if required else {}),
        }
    # They make a tuple, say, of the JSON list that the model sends, before the function is called.
    builders = {parameter: kind.build for parameter, kind in types.items() if kind.build}
    return ToolSpec(schema=schema, takes_context=takes_context, builders=builders)


def _find_parameters(
    target: Any, hidden: Collection[str], where: str
) -> Mapping[str, inspect.Parameter]:
    """Return the parameters by name. Raises ValueError for a generator or a wrong hidden name."""
    if inspect.isgeneratorfunction(target) or inspect.isasyncgenfunction(target):
        raise ValueError(
            f"{where}: it yields its result in parts, and a model reads one reply to a call; "
            "return the whole result, e.g. a list of the parts"
        )
    parameters = inspect.signature(target).parameters
    for hidden_name in hidden:
        if hidden_name not in parameters:
            raise ValueError(
                f"{where}: it has no parameter {hidden_name!r} to bind"
                f"{did_you_mean(hidden_name, parameters)}; its parameters: "
                f"{', '.join(parameters) or 'none'}"
            )
    return parameters


def _resolve_hints(target: Any, where: str) -> dict[str, Any]:
    """Return the annotations by name. Raises ValueError for one that cannot be resolved."""
    try:
        return get_type_hints(target, include_extras=True)
    except NameError as error:
        raise ValueError(
            f"{where}: an annotation cannot be resolved: {error}; import it at run time, not only "
            "under TYPE_CHECKING"
        ) from error


def _check_annotated(shown: Sequence[inspect.Parameter], where: str) -> None:
    """Raise ValueError unless all parameters have a name and a type."""
    with_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for parameter in shown:
        if parameter.kind not in with_name:
            raise ValueError(
                f"{where}: `{parameter}` cannot be described to a model; give every parameter a "
                "name and a type, e.g. `query: str`"
            )
        if parameter.annotation is inspect.Parameter.empty:
            raise ValueError(
                f"{where}: parameter {parameter.name!r} has no type; annotate it, e.g. "
                f"`{parameter.name}: str`"
            )


def _check_described(properties: Mapping[str, Any], doc: Docstring, where: str) -> None:
    """Raise ValueError, with the text to add, unless everything has a description."""
    missing = [name for name, schema in properties.items() if "description" not in schema]
    lines = "\n".join(f"        {name}: What it means." for name in missing)
    if not doc.text:
        arguments = f"\n\n    Args:\n{lines}\n    " if missing else ""
        raise ValueError(
            f'{where}: it has no docstring; add\n    """What it does, in a line.{arguments}"""'
        )
    if missing:
        raise ValueError(
            f"{where}: its docstring does not describe {', '.join(missing)}; add to it\n"
            f"    Args:\n{lines}"
        )
