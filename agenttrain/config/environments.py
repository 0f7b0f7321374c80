"""Settings of environments, and the reward function that their `reward` is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agenttrain.config.schema import Isolation, RunConfig
from agenttrain.config.targets import Kind, look_up
from agenttrain.config.tool_limits import is_number, limit_problems

REWARD = "environment"
"""Name of the reward function that environments share."""
REWARD_TARGET = "agenttrain.rewards.environment.environment"


def setting_problems(key: str, section: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the settings of an environment, as ``key=value: problem``."""
    yield from limit_problems(key, section)
    value = section.get("hook_timeout_s", 1)
    if not is_number(value) or value <= 0:
        yield f"{key}.hook_timeout_s={value}: must be a number above 0"
    if section.get("isolation", Isolation.thread) != Isolation.thread:
        yield (
            f"{key}.isolation={section['isolation']}: an environment keeps its state in this "
            "process; leave isolation out, and let it start a process of its own"
        )
    value = section.get("pooled")
    if not isinstance(value, bool | None):
        yield f"{key}.pooled={value}: expected true or false; null: what the class says"
    if look_up(section.get("_target_")).kind is Kind.function:
        yield (
            f"{key}._target_={section['_target_']}: is a function; each rollout gets an instance "
            "of its own, so name a class"
        )


def rewarding(config: RunConfig) -> bool:
    """Return whether some environment's own source, not a base class's, has a `reward`."""
    targets = [look_up(section["_target_"]) for section in config.environment.values()]
    return any("reward" in target.methods for target in targets)


def reward_sections(config: RunConfig, *, rewarding: bool = False) -> dict[str, Any]:
    """Return the reward functions of a run, with the environments' own among them.

    It needs no `_target_`, so that ``+reward.environment.weight=0.5`` is enough, and with
    `rewarding` (some environment has a `reward`) no section at all.
    """
    sections = dict(config.reward)
    section = sections.get(REWARD, {} if rewarding else None)
    if config.environment and isinstance(section, Mapping):
        sections[REWARD] = {"_target_": REWARD_TARGET, **section}
    return sections
