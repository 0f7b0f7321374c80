"""The text of a user's function, or class, and of what it uses of its own module."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from typing import Any


def code_of(target: Any) -> str | None:
    """Return the source of `target` and of everything that it names in its module, and so on.

    Comments, blank lines and the module's other functions are left out, so that a change in them is
    none. What it imports from other modules is not followed. None where there is no source.
    """
    module = sys.modules.get(getattr(target, "__module__", None) or "")
    name = getattr(target, "__qualname__", type(target).__qualname__).partition(".")[0]
    try:
        tree = ast.parse(inspect.getsource(module)) if module is not None else ast.Module([], [])
    except (OSError, TypeError, SyntaxError):
        return None
    definitions: dict[str, list[ast.stmt]] = {}
    for node in tree.body:
        for defined in _names(node):
            definitions.setdefault(defined, []).append(node)
    used: set[str] = set()
    waiting = [name]
    while waiting:
        name = waiting.pop()
        if name in used or name not in definitions:
            continue
        used.add(name)
        for node in definitions[name]:
            waiting += [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]
    texts = [ast.unparse(node) for node in tree.body if used & set(_names(node))]
    return "\n".join(texts) or None


def _names(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement of a module defines; an import is not its own code."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif not isinstance(node, ast.Import | ast.ImportFrom):
        yield from (
            part.id
            for part in ast.walk(node)
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
        )
