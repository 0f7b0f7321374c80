"""A Python function's signature and Google docstring -> the JSON schema that the model sees."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from typing import Any, get_args, get_type_hints

from agenttrain.config.suggest import did_you_mean
from agenttrain.tools.structured import Build, Structure, structure_of, structured
from agenttrain.types import ToolContext

Function = Callable[..., object]

UNSEEN: ContextVar[bool] = ContextVar("UNSEEN", default=False)
"""Set where no model sees the schemas, in a tool's worker process: they are left empty there, so
that it need not wait for the import of transformers."""


def function_schema(
    function: Function, *, name: str, hidden: Collection[str] = ()
) -> dict[str, Any]:
    """Make the OpenAI-style schema of a function, through transformers' `get_json_schema`.

    Parameters in `hidden` and a ``context: ToolContext`` are left out, and so is the return type,
    which tool schemas sent to a served model do not have either. Raises ValueError that quotes
    what to add when an annotation, the docstring or a parameter's description is missing.

    Example: for ``def add(a: int, b: int)``, documented: ``{"type": "function", "function":
    {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {"a":
    {"type": "integer", "description": "First."}, …}, "required": ["a", "b"]}}}``
    """
    target = _routine(function)
    where = f"tool {name!r} ({target.__module__}.{target.__qualname__})"
    signature = inspect.signature(target)
    known = list(signature.parameters)
    for parameter_name in hidden:
        if parameter_name not in known:
            raise ValueError(
                f"{where}: it has no parameter {parameter_name!r} to bind"
                f"{did_you_mean(parameter_name, known)}; its parameters: "
                f"{', '.join(known) or 'none'}"
            )
    if UNSEEN.get():
        return {"type": "function", "function": {"name": name}}
    hints = _hints(target, where)
    shown = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.name not in hidden and not _is_context(parameter.name, hints)
    ]
    doc = inspect.getdoc(target)
    _check_described(shown, doc, where)
    own = _structures({p.name: hints[p.name] for p in shown}, where)
    hints = {p.name: dict if p.name in own else hints[p.name] for p in shown}
    schema = _json_schema(name, doc, shown, hints, where)
    for parameter, structure in own.items():
        properties = schema["function"]["parameters"]["properties"]
        words = {"description": properties[parameter]["description"]}
        properties[parameter] = {**structure.schema, **words}
    return schema


def argument_builders(function: Function, *, hidden: Collection[str] = ()) -> dict[str, Build]:
    """Builders of a function's structured parameters (`agenttrain.tools.structured`), by name.

    Raises ValueError for a type that has no JSON.
    """
    target = _routine(function)
    where = f"{target.__module__}.{target.__qualname__}"
    hints = _hints(target, where)
    names = [name for name in inspect.signature(target).parameters if name in hints]
    shown = {n: hints[n] for n in names if n not in hidden and not _is_context(n, hints)}
    return {name: one.build for name, one in _structures(shown, where).items()}


def _structures(hints: dict[str, Any], where: str) -> dict[str, Structure]:
    structures = {}
    for name, hint in hints.items():
        try:
            if structured(hint) and hint is not ToolContext:
                structures[name] = structure_of(hint)
        except (ValueError, NameError) as error:
            raise ValueError(f"{where}: parameter {name!r}: {error}") from error
    return structures


def takes_context(function: Function) -> bool:
    """Return True if the function has a parameter ``context: ToolContext``."""
    return _is_context("context", get_type_hints(_routine(function)))


def _routine(function: Function) -> Any:
    """Return what has signature and docstring: the function, or an instance's `__call__`."""
    return function if inspect.isroutine(function) else getattr(function, "__call__")  # noqa: B004, B009


def _is_context(name: str, hints: dict[str, Any]) -> bool:
    hint = hints.get(name)
    return name == "context" and (hint is ToolContext or ToolContext in get_args(hint))


def _hints(target: Any, where: str) -> dict[str, Any]:
    try:
        return get_type_hints(target)
    except NameError as error:
        raise ValueError(
            f"{where}: an annotation cannot be resolved: {error}; import it at run time, not only "
            "under TYPE_CHECKING"
        ) from error


def _check_described(shown: Sequence[inspect.Parameter], doc: str | None, where: str) -> None:
    """Raise ValueError, quoting what to add, unless a model is told what the parameters mean."""
    from transformers.utils.chat_template_utils import parse_google_format_docstring

    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for parameter in shown:
        if parameter.kind not in named:
            raise ValueError(
                f"{where}: `{parameter}` cannot be described to a model; give every parameter a "
                "name and a type, e.g. `query: str`"
            )
        if parameter.annotation is inspect.Parameter.empty:
            raise ValueError(
                f"{where}: parameter {parameter.name!r} has no type; annotate it, e.g. "
                f"`{parameter.name}: str`"
            )
    described = parse_google_format_docstring(doc.strip())[1] if doc else {}
    missing = [parameter.name for parameter in shown if parameter.name not in described]
    lines = "\n".join(f"        {name}: What it means." for name in missing)
    if not doc:
        arguments = f"\n\n    Args:\n{lines}\n    " if missing else ""
        raise ValueError(
            f'{where}: it has no docstring; add\n    """What it does, in a line.{arguments}"""'
        )
    if missing:
        raise ValueError(
            f"{where}: its docstring does not describe {', '.join(missing)}; add to it\n"
            f"    Args:\n{lines}"
        )


def _json_schema(
    name: str,
    doc: str | None,
    shown: Sequence[inspect.Parameter],
    hints: dict[str, Any],
    where: str,
) -> dict[str, Any]:
    from transformers.utils import chat_template_utils as utils
    from transformers.utils import get_json_schema

    def shape() -> None: ...  # a function with this name, docstring and signature

    shape.__name__, shape.__doc__, shape.__annotations__ = name, doc, hints
    shape.__signature__ = inspect.Signature(list(shown))  # type: ignore[attr-defined]
    available = utils.is_torch_available
    if "torch" not in sys.modules:
        # transformers would import torch to know tensors in annotations; now none can be one.
        utils.is_torch_available = lambda: False
    try:
        return get_json_schema(shape)
    except (
        utils.DocstringParsingException,
        utils.TypeHintParsingException,
        ValueError,
    ) as error:
        raise ValueError(f"{where}: no JSON schema can be made of it: {error}") from error
    finally:
        utils.is_torch_available = available
