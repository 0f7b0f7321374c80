"""What the settings of a tool may be; they stand beside its `_target_` in `tools.<name>`."""

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
    """Whether a value is a finite number; true and false are none."""
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (not whole and isinstance(value, float) and isfinite(value))


def limit_problems(key: str, section: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the limits in a tool's section, as ``key=value: problem``."""
    for name, check in CHECKS.items():
        if name in section and (problem := check(section[name])):
            yield f"{key}.{name}={section[name]}: {problem}"
    if section.get("retries") == 0 and "retry_backoff_s" in section:
        yield (
            f"{key}.retry_backoff_s={section['retry_backoff_s']}: has no effect with "
            f"{key}.retries=0; leave one of them out"
        )


def tool_setting_problems(key: str, section: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the settings in a tool's section, as ``key=value: problem``."""
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


def _seconds(value: Any) -> str | None:
    return None if is_number(value) and value > 0 else "must be a number above 0"


def _delay(value: Any) -> str | None:
    return None if is_number(value) and value >= 0 else "must be a number of at least 0"


def _count(value: Any) -> str | None:
    valid = is_number(value, whole=True) and value >= 1
    return None if valid else "must be a whole number of at least 1"


def _count_or_none(value: Any) -> str | None:
    return None if value is None else _count(value)


def _count_or_zero(value: Any) -> str | None:
    valid = is_number(value, whole=True) and value >= 0
    return None if valid else "must be a whole number of at least 0"


def _isolation(value: Any) -> str | None:
    known = [str(member) for member in Isolation]
    if value in known:
        return None
    hint = did_you_mean(value, known) if isinstance(value, str) else ""
    return f"expected one of: {', '.join(known)}{hint}"


def _errors(value: Any) -> str | None:
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        return "expected a list of errors, e.g. [builtins.ConnectionError]"
    return next((problem for path in value if (problem := _error(path))), None)


def _error(path: Any) -> str | None:
    """What is wrong with the dotted path of an exception; nothing is imported."""
    module, _, name = str(path).rpartition(".")
    if module != "builtins":
        problem = look_up(path).problem
        return None if problem is None else f"{path}: {problem}"
    found = getattr(builtins, name, None)
    if isinstance(found, type) and issubclass(found, Exception):
        return None
    errors = [n for n, v in vars(builtins).items() if isinstance(v, type) and n.endswith("Error")]
    return f"{path}: is no exception{did_you_mean(name, errors)}"


CHECKS: dict[str, Callable[[Any], str | None]] = {
    "timeout_s": _seconds,
    "concurrency": _count,
    "max_calls": _count_or_none,
    "max_result_tokens": _count_or_none,
    "retries": _count_or_zero,
    "retry_on": _errors,
    "retry_backoff_s": _delay,
    "isolation": _isolation,
}
