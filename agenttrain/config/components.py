"""Checks of the components that a run is made of: tools, rewards and data.

Nothing of other people's is imported: what a `_target_` takes is read from its source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from agenttrain.config.environments import REWARD_TARGET, reward_sections, setting_problems
from agenttrain.config.row_file import ENDLESS, FILE_ROWS, check_row_file
from agenttrain.config.schema import EnvironmentSettings, RunConfig, ToolLimits
from agenttrain.config.suggest import did_you_mean
from agenttrain.config.target import about_argument, locate
from agenttrain.config.targets import look_up
from agenttrain.config.tool_limits import is_number, limit_problems
from agenttrain.config.tool_names import stop_tool_problems


def tool_problems(config: RunConfig) -> Iterator[str]:
    limits = tuple(field.name for field in fields(ToolLimits))
    for name, section in config.tools.items():
        yield from _component(f"tools.{name}", section, extra=limits, others=config.tools)
        if isinstance(section, Mapping):
            yield from limit_problems(f"tools.{name}", section)
            yield from _without_effect(f"tools.{name}", section, config)
    yield from stop_tool_problems(config)


def environment_problems(config: RunConfig) -> Iterator[str]:
    settings = tuple(field.name for field in fields(EnvironmentSettings))
    for name, section in config.environment.items():
        key = f"environment.{name}"
        yield from _component(key, section, extra=settings, others=config.environment)
        if isinstance(section, Mapping):
            yield from setting_problems(key, section)
    for name, section in config.reward.items():
        ours = isinstance(section, Mapping) and section.get("_target_") == REWARD_TARGET
        if ours and not config.environment:
            yield (
                f"reward.{name}: is the reward of an environment, and the run has none; add "
                "+environment.<name>._target_=<class>, or leave it out"
            )


def _without_effect(key: str, section: Mapping[str, Any], config: RunConfig) -> Iterator[str]:
    """A tool's limits that a limit of the whole rollout makes meaningless."""
    for name, whole in (
        ("max_calls", "max_tool_calls"),
        ("max_result_tokens", "max_completion_tokens"),
    ):
        value, most = section.get(name), getattr(config.rollout, whole)
        if is_number(value, whole=True) and most is not None and value > most:
            yield (
                f"{key}.{name}={value}: has no effect, the whole rollout is limited to "
                f"rollout.{whole}={most}; lower one or raise the other"
            )


def reward_problems(config: RunConfig) -> Iterator[str]:
    if not config.reward and not config.environment:  # an environment may have a reward
        yield "reward={}: without a reward nothing can be learnt; choose one: reward=[exact_match]"
    for name, section in reward_sections(config).items():
        yield from _component(f"reward.{name}", section, extra=("weight",), others=config.reward)
        weight = section.get("weight", 1) if isinstance(section, Mapping) else 1
        if not is_number(weight):
            yield f"reward.{name}.weight={weight}: must be a finite number"


def data_problems(config: RunConfig) -> Iterator[str]:
    for split in ("train", "test"):
        key, section = f"data.{split}", getattr(config.data, split)
        problems = list(_component(key, section, extra=()))
        yield from problems or _arguments(key, section)


def _arguments(key: str, section: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the arguments of our own datasets, which import nothing heavy."""
    target = section["_target_"]
    bound = {name: value for name, value in section.items() if name != "_target_"}
    try:
        if target == FILE_ROWS:
            check_row_file(**bound)
        elif target in ENDLESS:
            locate(target, key=f"{key}._target_")(index=0, **bound)
    except TypeError as error:
        yield f"{key}: {error}"
    except ValueError as error:
        yield about_argument(error, key, bound)


def _component(
    key: str, section: Any, *, extra: tuple[str, ...], others: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """Check a `_target_` with its arguments; `extra` are keys of ours that stand beside them."""
    if not isinstance(section, Mapping) or "_target_" not in section:
        *_, name = key.split(".")
        built = [n for n, s in (others or {}).items() if isinstance(s, Mapping) and "_target_" in s]
        hint = did_you_mean(name, built)
        yield f"{key}={section}: has no _target_{hint}; add one: {key}._target_=my_module.{name}"
        return
    target = look_up(section["_target_"])
    if target.problem is not None:
        yield f"{key}._target_={section['_target_']}: {target.problem}"
    for name, value in section.items():
        known = (*(target.parameters or ()), *extra)
        if target.parameters is not None and name not in (*known, "_target_"):
            yield (
                f"{key}.{name}={value}: {section['_target_']} has no such argument"
                f"{did_you_mean(name, known)}; known are: {', '.join(known)}"
            )
