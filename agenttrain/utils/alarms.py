"""Alarms (SIGALRM) of users' functions: how math-verify and timeout_decorator limit time.

Python handles signals in the main thread. In another thread `signal.signal` raises ValueError,
which the function may swallow, and an alarm would interrupt the main thread.
"""

from __future__ import annotations

import functools
import inspect
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, ModuleType
from typing import Any

TIMER_SIGNALS = (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF)
SETTERS = ("alarm", "setitimer", "SIGALRM")
"""Names in the code of a function that sets an alarm."""
MOST_FUNCTIONS = 5_000
"""Functions that `may_set_alarms` reads."""
REMEDY = (
    "for math-verify take reward=[math_verify], which runs in a process of its own, or pass "
    "parse(…, parsing_timeout=None) and verify(…, timeout_seconds=None)"
)

_thread = threading.local()


@contextmanager
def alarms_refused() -> Iterator[list[str]]:
    """Make `signal.alarm`, `signal.setitimer` and handlers of alarms raise ValueError in the block.

    Yields a list to which the name of each refused function is added. It also reveals user code
    that swallows the ValueError. In the main thread, where alarms work, nothing is refused.

    In another thread Python itself refuses only the handler (`signal.signal`). The alarm would go
    to the main thread, where no handler is set, and kill the process.
    """
    refused: list[str] = []
    outer: list[str] | None = getattr(_thread, "refused", None)  # of a block around this one
    if threading.current_thread() is threading.main_thread():
        yield refused
        return
    _patch()  # the functions of `signal` then look at `_thread.refused`
    _thread.refused = refused
    try:
        yield refused
    finally:
        _thread.refused = outer
        if outer is not None:
            outer += refused


@functools.cache
def _patch() -> None:
    """Make the functions of `signal` check for refused alarms, once in a process."""
    # `signal.signal` calls `_signal.signal`, also where `signal.signal` was imported by name.
    _guard_setter(sys.modules["_signal"], "signal")
    for name in ("alarm", "setitimer"):
        _guard_setter(signal, name)


def _guard_setter(module: ModuleType, name: str) -> None:
    """Replace a function of `module` by one that raises ValueError where alarms are refused."""
    original = getattr(module, name)

    @functools.wraps(original)
    def checked(*arguments: Any) -> Any:
        """Call the original function, or raise ValueError if the call would set an alarm."""
        # The list of the innermost `alarms_refused` of this thread; None where alarms are allowed.
        refused: list[str] | None = getattr(_thread, "refused", None)
        # `signal.signal(number, handler)` is refused only for the signals of timers.
        is_alarm = name != "signal" or (len(arguments) > 0 and arguments[0] in TIMER_SIGNALS)
        if refused is not None and is_alarm:
            # `alarms_refused` yields this list. Its owner warns by it, even if user code swallows
            # the error.
            refused.append(name)
            raise ValueError(f"signal.{name}: alarms work in the main thread only")
        return original(*arguments)

    setattr(module, name, checked)


@contextmanager
def alarms_kept_apart() -> Iterator[None]:
    """Undo the alarm and the handler that the block leaves behind, in the main thread.

    An alarm that was set before stands still during the block, and goes on after it.
    """
    pending = signal.setitimer(signal.ITIMER_REAL, 0)
    handler = signal.getsignal(signal.SIGALRM)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if handler is not None:  # None: it was not set from Python, which cannot restore it
            signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *pending)


def warn_of_alarm(owner: str, remedy: str) -> None:
    """Warn that an alarm was refused outside the main thread, whatever the function made of it."""
    warnings.warn(
        f"{owner}: it tried to limit its time by an alarm (signal.alarm), which works in the main "
        f"thread only, and got a ValueError; {remedy}",
        RuntimeWarning,
        stacklevel=1,
    )


def may_set_alarms(function: Callable[..., Any]) -> str | None:
    """Return the dotted name of the first function that `function` may reach and that sets alarms.

    Reads code and calls nothing, so it does not know with which arguments the function is called.
    Example: ``"math_verify.utils.timeout"`` for a reward that calls `math_verify.parse`.
    """
    to_visit: list[Any] = [function]
    seen: set[int] = set()
    while to_visit and len(seen) < MOST_FUNCTIONS:
        called, methods = _called_function(to_visit.pop(0))
        if not inspect.isfunction(called) or id(called) in seen:
            continue
        seen.add(id(called))
        cells = zip(called.__code__.co_freevars, called.__closure__ or (), strict=True)
        closure = {name: cell.cell_contents for name, cell in cells if _has_contents(cell)}
        # Python's code lists the names of globals, imported modules and attributes together:
        # `math_verify.parse` gives both "math_verify" and "parse".
        names = sorted({*_names_in(called.__code__), *closure})
        if not set(names).isdisjoint(SETTERS):
            return f"{called.__module__}.{called.__qualname__}"
        # Look each name up in every scope in which it may stand. `sys.modules` is for an import
        # inside of the function, `methods` for ``self.name``.
        scopes = [closure, called.__globals__, sys.modules, methods]
        values = [scope[name] for scope in scopes for name in names if name in scope]
        # Then once more as attributes of the modules that were found.
        modules = [vars(value) for value in values if isinstance(value, ModuleType)]
        values += [module[name] for module in modules for name in names if name in module]
        to_visit += [value for value in values if callable(value) and not inspect.isclass(value)]
    return None


def _called_function(value: Any) -> tuple[Any, dict[str, Any]]:
    """Return the function that runs when `value` is called, and the methods of its object by name.

    `may_set_alarms` reads the code of both. The methods are those of a callable instance's class,
    which its `__call__` may call; none for a function. Instead of a function, a builtin or None is
    returned if no Python code runs.
    """
    if isinstance(value, functools.partial):
        value = value.func
    methods: dict[str, Any] = {}
    if not inspect.isroutine(value):
        for cls in reversed(type(value).__mro__):  # base classes first: subclasses override
            methods.update(vars(cls))
        value = methods.get("__call__")
    return getattr(value, "__func__", value), methods  # the function of a bound method


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names that code and the functions within it read."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _has_contents(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # not assigned yet
        return False
