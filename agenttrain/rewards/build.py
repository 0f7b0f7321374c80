"""The `reward:` section of a configuration -> a Rubric."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from agenttrain.config.components import is_number
from agenttrain.config.target import locate_section
from agenttrain.rewards.rubric import Rubric
from agenttrain.rewards.scorer import Scorer


def build_rubric(reward: Mapping[str, Any]) -> Rubric:
    """Build every declared reward function.

    Example: ``{"exact": {"_target_": "agenttrain.rewards.exact_match.ExactMatch", "weight": 1.0,
    "ignore_case": True}}``. `_target_` names a function, whose other settings are bound, or a class
    whose instances are callable. Raises ValueError with key, value and remedy.
    """
    if not reward:
        raise ValueError("reward={}: there is no reward function; choose one, e.g. exact_match")
    scorers: dict[str, Scorer] = {}
    weights: dict[str, float] = {}
    for name, section in reward.items():
        key = f"reward.{name}"
        located = locate_section(section, key=key)
        weights[name] = _weight(located.bound.pop("weight", 1.0), key)
        scorers[name] = _build(located.found, name, located.bound, located.where)
    return Rubric(scorers, weights)


def _weight(value: Any, key: str) -> float:
    if not is_number(value):
        raise ValueError(f"{key}.weight={value!r}: expected a finite number")
    return float(value)


def _build(target: Any, name: str, bound: dict[str, Any], where: str) -> Scorer:
    if not callable(target):
        raise ValueError(f"{where}: {target!r} is not a function or a class")
    try:
        inspect.signature(target).bind_partial(**bound)
        if inspect.isclass(target):
            target, bound = target(**bound), {}
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} with {bound}: {error}") from error
    if not callable(target):
        raise ValueError(f"{where}: its instances cannot be called; give the class a __call__")
    return Scorer(name, functools.partial(target, **bound) if bound else target, bound=bound)
