"""Settings of environments, and the reward function that their `reward` is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

from agenttrain.config.schema import RunConfig
from agenttrain.config.targets import Kind, look_up

REWARD = "environment"
"""Name of the reward function that environments share."""
REWARD_TARGET = "agenttrain.rewards.environment.environment"


def setting_problems(key: str, section: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the settings of an environment, as ``key=value: problem``."""
    for name in ("timeout_s", "hook_timeout_s"):
        value = section.get(name, 1)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not isfinite(value) or value <= 0:
            yield f"{key}.{name}={value}: must be a number above 0"
    value = section.get("concurrency", 1)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        yield f"{key}.concurrency={value}: must be a whole number of at least 1"
    value = section.get("pooled")
    if not isinstance(value, bool | None):
        yield f"{key}.pooled={value}: expected true or false; null: what the class says"
    if look_up(section.get("_target_")).kind is Kind.function:
        yield (
            f"{key}._target_={section['_target_']}: is a function; each rollout gets an instance "
            "of its own, so name a class"
        )


def rewarding(config: RunConfig) -> bool:
    """Whether the source of some environment has a `reward` (that of a base class is not seen)."""
    targets = [look_up(section["_target_"]) for section in config.environment.values()]
    return any("reward" in target.methods for target in targets)


def reward_sections(config: RunConfig, *, rewarding: bool = False) -> dict[str, Any]:
    """The reward functions of a run, with the environments' own among them.

    It needs no `_target_`, so that ``+reward.environment.weight=0.5`` is enough, and with
    `rewarding` (some environment has a `reward`) no section at all.
    """
    sections = dict(config.reward)
    section = sections.get(REWARD, {} if rewarding else None)
    if config.environment and isinstance(section, Mapping):
        sections[REWARD] = {"_target_": REWARD_TARGET, **section}
    return sections
