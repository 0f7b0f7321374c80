"""Checks of the components that a run is made of: tools, rewards and data.

Nothing of other people's is imported: what a `_target_` takes is read from its source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from inspect import isclass
from typing import Any

from agenttrain.config.corpus import SEARCH, check_corpus
from agenttrain.config.data_settings import names_test_rows
from agenttrain.config.environments import REWARD_TARGET, reward_sections
from agenttrain.config.environments import setting_problems as environment_setting_problems
from agenttrain.config.mcp_server import MCP_SERVER, check_mcp_server
from agenttrain.config.reward_settings import setting_problems
from agenttrain.config.row_file import ENDLESS, FILE_ROWS, HUB_ROWS, check_hub, check_row_file
from agenttrain.config.sandbox import INTERPRETER, interpreter_problems
from agenttrain.config.schema import (
    EnvironmentSettings,
    RewardSettings,
    RunConfig,
    ToolLimits,
    ToolSettings,
)
from agenttrain.config.suggest import did_you_mean
from agenttrain.config.target import about_argument, locate
from agenttrain.config.targets import look_up
from agenttrain.config.tool_limits import is_number, tool_setting_problems
from agenttrain.config.tool_names import named_tool_problems, stop_tools

OUR_REWARDS = "agenttrain.rewards."
STOP_TOOL_CALLED = f"{OUR_REWARDS}stop_tool_called.stop_tool_called"
TOOL_CHECKS: Mapping[str, Callable[..., object]] = {
    MCP_SERVER: check_mcp_server,
    SEARCH: check_corpus,
}


def tool_problems(config: RunConfig) -> Iterator[str]:
    limits = tuple(field.name for field in fields(ToolSettings))
    for name, section in config.tools.items():
        problems = list(_component(f"tools.{name}", section, extra=limits, others=config.tools))
        yield from problems or _tool_arguments(f"tools.{name}", section, limits)
        if isinstance(section, Mapping):
            yield from tool_setting_problems(f"tools.{name}", section)
            yield from _without_effect(f"tools.{name}", section, config)
        if isinstance(section, Mapping) and section.get("_target_") == INTERPRETER:
            timeout_s = section.get("timeout_s", ToolLimits.timeout_s)
            yield from interpreter_problems(f"tools.{name}", section, timeout_s, limits)
    yield from named_tool_problems(config)


def environment_problems(config: RunConfig) -> Iterator[str]:
    settings = tuple(field.name for field in fields(EnvironmentSettings))
    for name, section in config.environment.items():
        key = f"environment.{name}"
        yield from _component(key, section, extra=settings, others=config.environment)
        if isinstance(section, Mapping):
            yield from environment_setting_problems(key, section)
            yield from _without_effect(key, section, config)
    for name, section in config.reward.items():
        ours = isinstance(section, Mapping) and section.get("_target_") == REWARD_TARGET
        if ours and not config.environment:
            yield (
                f"reward.{name}: is the reward of an environment, and the run has none; add "
                "+environment.<name>._target_=<class>, or leave it out"
            )


def _without_effect(key: str, section: Mapping[str, Any], config: RunConfig) -> Iterator[str]:
    """Yield limits of a tool or environment that one of the whole rollout makes meaningless."""
    for name, total in (
        ("max_calls", "max_tool_calls"),
        ("max_result_tokens", "max_completion_tokens"),
    ):
        value, most = section.get(name), getattr(config.rollout, total)
        if is_number(value, whole=True) and most is not None and value > most:
            yield (
                f"{key}.{name}={value}: has no effect, the whole rollout is limited to "
                f"rollout.{total}={most}; lower one or raise the other"
            )


def _tool_arguments(key: str, section: Mapping[str, Any], limits: Sequence[str]) -> Iterator[str]:
    """Check the arguments of our own tools that depend on what is outside."""
    check = TOOL_CHECKS.get(section["_target_"])
    bound = {k: v for k, v in section.items() if k != "_target_" and k not in limits}
    try:
        if check is not None:
            check(**bound)
    except ValueError as error:
        yield about_argument(error, key, bound)
        return
    if check is check_mcp_server:
        patience, limit = section.get("reconnect_s", 5.0), section.get("timeout_s", 10.0)
        if is_number(limit) and patience >= limit:
            yield (
                f"{key}.reconnect_s={patience}: must be below {key}.timeout_s={limit}, or a call "
                "times out before its server counts as unreachable"
            )


def reward_problems(config: RunConfig) -> Iterator[str]:
    if not config.reward and not config.environment:  # an environment may have a reward
        yield "reward={}: without a reward nothing can be learnt; choose one: reward=[exact_match]"
    settings = tuple(field.name for field in fields(RewardSettings))
    for name, section in reward_sections(config).items():
        key = f"reward.{name}"
        problems = list(_component(key, section, extra=settings, others=config.reward))
        if isinstance(section, Mapping):
            problems += setting_problems(key, section)
        yield from problems or _reward_arguments(key, section, config)


def _reward_arguments(key: str, section: Mapping[str, Any], config: RunConfig) -> Iterator[str]:
    """Check the arguments of our own rewards, which import nothing heavy."""
    target, ours = section["_target_"], {field.name for field in fields(RewardSettings)}
    if look_up(target).takes_nothing:
        yield (
            f"{key}._target_={target}: takes no argument; a reward gets the rollout, and the "
            "columns that it names: def mine(rollout, answer)"
        )
    if target == STOP_TOOL_CALLED and not stop_tools(config):
        yield f"{key}: would always be 0 with stop_tools=[]; name one: stop_tools=[final_answer]"
    if not target.startswith(OUR_REWARDS):
        return
    module = target.rpartition(".")[0]
    bound = {k: v for k, v in section.items() if k not in ours and k != "_target_"}
    reward = locate(target, key=f"{key}._target_")
    try:
        if isclass(reward) and reward.__module__ == module:  # not what the module imports itself
            reward(**bound)
    except TypeError as error:
        yield f"{key}: {error}"
    except ValueError as error:
        yield about_argument(error, key, bound)


def data_problems(config: RunConfig) -> Iterator[str]:
    for split in ("train", "test") if names_test_rows(config.data) else ("train",):
        key, section = f"data.{split}", getattr(config.data, split)
        problems = list(_component(key, section, extra=()))
        if problems:
            yield from problems
            continue
        # The arguments of our own datasets, whose checks import nothing heavy.
        target = section["_target_"]
        bound = {name: value for name, value in section.items() if name != "_target_"}
        try:
            if target == FILE_ROWS:
                check_row_file(**bound)
            elif target == HUB_ROWS:
                check_hub(**bound)
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
        kind, *_, name = key.split(".")
        if name == "_target_" and isinstance(section, str):
            yield (
                f"{key}={section}: has no name; a file in {kind}/ begins with the line "
                f"`# @package {kind}.<name>`, and a setting is written {kind}.<name>._target_=…"
            )
            return
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
