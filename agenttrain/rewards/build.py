"""The `reward:` section of a configuration -> a Rubric."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from agenttrain.config.reward_settings import reward_settings
from agenttrain.config.schema import RewardSettings
from agenttrain.config.target import about_argument, locate_section
from agenttrain.rewards.rubric import Rubric
from agenttrain.rewards.scorer import Scorer
from agenttrain.rewards.trl import is_trl

OURS = tuple(field.name for field in fields(RewardSettings))


def build_rubric(reward: Mapping[str, Any]) -> Rubric:
    """Build every declared reward function.

    Example: ``{"exact": {"_target_": "agenttrain.rewards.exact_match.ExactMatch", "weight": 1.0,
    "ignore_case": True}}``. `_target_` names a function, whose other settings are bound, or a class
    whose instances are callable; the fields of `RewardSettings` stand beside it. Raises ValueError
    with key, value and remedy.
    """
    if not reward:
        raise ValueError("reward={}: there is no reward function; choose one, e.g. exact_match")
    scorers: dict[str, Scorer] = {}
    settings: dict[str, RewardSettings] = {}
    for name, section in reward.items():
        key = f"reward.{name}"
        located = locate_section(section, key=key)
        settings[name] = reward_settings(key, located.bound)
        bound = {k: value for k, value in located.bound.items() if k not in OURS}
        scorers[name] = _build(located.found, name, bound, located.where, settings[name])
    return Rubric(
        scorers,
        {name: beside.weight for name, beside in settings.items()},
        on_unavailable={name: beside.on_unavailable for name, beside in settings.items()},
    )


def _build(
    target: Any, name: str, bound: dict[str, Any], where: str, settings: RewardSettings
) -> Scorer:
    if not callable(target):
        raise ValueError(f"{where}: {target!r} is not a function or a class")
    try:
        inspect.signature(target).bind_partial(**bound)
        if inspect.isclass(target):
            target, bound = target(**bound), {}
    except ValueError as error:
        raise ValueError(about_argument(error, f"reward.{name}", bound)) from error
    except TypeError as error:
        raise ValueError(f"{where} with {bound}: {error}") from error
    if not callable(target):
        raise ValueError(f"{where}: its instances cannot be called; give the class a __call__")
    function = functools.partial(target, **bound) if bound else target
    try:
        is_trl(function) or inspect.signature(function).bind_partial(None)
    except TypeError as error:
        raise ValueError(
            f"{where}: its first parameter cannot be the rollout ({error}); a reward gets it "
            "there, and the columns that it names: def mine(rollout, answer)"
        ) from error
    return Scorer(
        name,
        function,
        bound=bound,
        timeout_s=settings.timeout_s,
        concurrency=settings.concurrency,
    )
