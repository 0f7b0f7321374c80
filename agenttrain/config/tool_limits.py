"""Checks of a tool's settings, which stand beside its `_target_` in `tools.<name>`."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import fields
from math import isfinite
from typing import Any

from agenttrain.config.schema import Isolation, ToolLimits, ToolSettings
from agenttrain.config.suggest import did_you_mean
from agenttrain.config.targets import look_up

LIMITS = tuple(field.name for field in fields(ToolLimits))


def is_number(value: Any, *, whole: bool = False) -> bool:
    """Return whether a value is a finite number; true and false are none."""
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (not whole and isinstance(value, float) and isfinite(value))


def _is_count(value: Any) -> bool:
    return is_number(value, whole=True) and value >= 1


AT_LEAST_ONE = "a whole number of at least 1"
NUMBERS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "timeout_s": (lambda value: is_number(value) and value > 0, "a number above 0"),
    "concurrency": (_is_count, AT_LEAST_ONE),
    "max_calls": (lambda value: value is None or _is_count(value), AT_LEAST_ONE),
    "max_result_tokens": (lambda value: value is None or _is_count(value), AT_LEAST_ONE),
    "retries": (
        lambda value: is_number(value, whole=True) and value >= 0,
        "a whole number of at least 0",
    ),
    "retry_backoff_s": (lambda value: is_number(value) and value >= 0, "a number of at least 0"),
}
"""Limits that are numbers: their check, and its words."""


def limit_problems(key: str, section: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the limits in a tool's section, as ``key=value: problem``."""
    for name in LIMITS:
        if name not in section:
            continue
        value, problem = section[name], None
        if name == "isolation":
            known = [str(member) for member in Isolation]
            if value not in known:
                hint = did_you_mean(value, known) if isinstance(value, str) else ""
                problem = f"expected one of: {', '.join(known)}{hint}"
        elif name == "retry_on":
            if isinstance(value, str) or not hasattr(value, "__iter__"):
                problem = "expected a list of errors, e.g. [builtins.ConnectionError]"
            else:
                problem = next((p for path in value if (p := _error_problem(path))), None)
        else:
            valid, wanted = NUMBERS[name]
            problem = None if valid(value) else f"must be {wanted}"
        if problem:
            yield f"{key}.{name}={value}: {problem}"
    if section.get("retries") == 0 and "retry_backoff_s" in section:
        yield (
            f"{key}.retry_backoff_s={section['retry_backoff_s']}: has no effect with "
            f"{key}.retries=0; leave one of them out"
        )


def tool_setting_problems(key: str, section: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the settings in a tool's section, as ``key=value: problem``."""
    yield from limit_problems(key, section)
    stop = section.get("stop", False)
    if not isinstance(stop, bool):
        yield f"{key}.stop={stop}: expected true or false (true: a call to it ends the rollout)"


def take_settings(key: str, section: MutableMapping[str, Any]) -> tuple[ToolLimits, bool]:
    """Take limits and `stop` out of a tool's section; raises ValueError for the first wrong one."""
    for problem in tool_setting_problems(key, section):
        raise ValueError(problem)
    stop = section.pop("stop", ToolSettings.stop)
    given = {name: section.pop(name) for name in LIMITS if name in section}
    if "isolation" in given:
        given["isolation"] = Isolation(given["isolation"])
    return ToolLimits(**given), stop


def _error_problem(path: Any) -> str | None:
    """Return what is wrong with the dotted path of an exception; nothing is imported."""
    module, _, name = str(path).rpartition(".")
    if module != "builtins":
        problem = look_up(path).problem
        return None if problem is None else f"{path}: {problem}"
    error = getattr(builtins, name, None)
    if isinstance(error, type) and issubclass(error, Exception):
        return None
    errors = [n for n, v in vars(builtins).items() if isinstance(v, type) and n.endswith("Error")]
    return f"{path}: is no exception{did_you_mean(name, errors)}"
