"""Checks of a run's components: tools, environments, rewards and data.

Nothing of other people's is imported, and a typo must not import torch: the arguments that a
`_target_` takes, and the names of tools that a run declares, are read from its source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import isclass
from typing import Any

from agenttrain.data.config import (
    ENDLESS,
    FILE_ROWS,
    HUB_ROWS,
    check_hub,
    check_row_file,
    names_test_rows,
)
from agenttrain.environments.config import EnvironmentSettings
from agenttrain.rewards.config import RewardSettings, reward_setting_problems
from agenttrain.settings.run_config import RunConfig
from agenttrain.tools.config import (
    HOOKS,
    LIFE_CYCLE,
    MCP_SERVER,
    SEARCH,
    Isolation,
    ToolLimits,
    ToolSettings,
    check_corpus,
    check_mcp_server,
    is_number,
    limit_problems,
    tool_setting_problems,
)
from agenttrain.tools.sandbox.config import INTERPRETER, interpreter_problems
from agenttrain.utils.locate import Kind, Target, about_argument, locate, look_up
from agenttrain.utils.names import did_you_mean

OUR_REWARDS = "agenttrain.rewards."
STOP_TOOL_CALLED = f"{OUR_REWARDS}builtin.tools.stop_tool_called"
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
            problems += reward_setting_problems(key, section)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolNames:
    """Names of tools as far as sources have them."""

    names: tuple[str, ...]
    complete: bool
    """No tools beside `names`; else `build` finds them, before weights are loaded."""


def tool_names(config: RunConfig) -> ToolNames:
    """Return the tools of `tools` and the methods of `environment`.

    Example: `tools.add` of a function and an environment with a method `move` are ``("add",
    "move")``.
    """
    parts = [_of_tool(name, _target(section)) for name, section in config.tools.items()]
    for section in config.environment.values():
        target = _target(section)
        complete = target.kind is Kind.whole_class
        parts.append(ToolNames(names=_public(target, HOOKS), complete=complete))
    names = dict.fromkeys(name for part in parts for name in part.names)
    return ToolNames(names=tuple(names), complete=all(part.complete for part in parts))


def stop_tools(config: RunConfig) -> tuple[str, ...]:
    """Return the stop tools that sources name: of `stop_tools`, and of sections with `stop`.

    Example: ``stop_tools: [quit]`` and ``tools.submit.stop: true`` are ``("quit", "submit")``. A
    section whose tools are known once it is built (an MCP server) stands for them as ``"mcp …"``.
    """
    names = dict.fromkeys(config.stop_tools)
    for name, section in config.tools.items():
        if isinstance(section, Mapping) and section.get("stop") is True:
            made = _of_tool(name, _target(section))
            known = made.complete or made.names == (name,)
            names.update(dict.fromkeys(made.names if known else (f"{name} …",)))
    return tuple(names)


def named_tool_problems(config: RunConfig) -> Iterator[str]:
    """Yield tools that `stop_tools` and `eval.tools` name and no source has."""
    known = tool_names(config)
    if not known.complete:
        return
    remedies = {"stop_tools": "stop_tools=[] is none (as with experiment=none)"}
    remedies["eval.tools"] = "eval.tools=null is all of them"
    for key, names in (("stop_tools", config.stop_tools), ("eval.tools", config.eval.tools or ())):
        for name in names:
            if name not in known.names:
                yield (
                    f"{key}=[{name}]: is not a tool of this run{did_you_mean(name, known.names)}; "
                    f"its tools are: {', '.join(known.names) or 'none'}; {remedies[key]}"
                )


def _target(section: Any) -> Target:
    return look_up(section.get("_target_")) if isinstance(section, Mapping) else Target()


def _of_tool(name: str, target: Target) -> ToolNames:
    if target.kind is Kind.function or "__call__" in target.methods:
        return ToolNames(names=(name,), complete=True)
    if "tools" in target.methods:  # it says itself which there are, once it is made
        return ToolNames(names=(), complete=False)
    if target.kind is Kind.whole_class:
        return ToolNames(names=_public(target, LIFE_CYCLE), complete=True)
    return ToolNames(names=(name, *_public(target, LIFE_CYCLE)), complete=False)


def _public(target: Target, reserved: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(n for n in target.methods if not n.startswith("_") and n not in reserved)


REWARD = "environment"
"""Name of the reward function that environments share."""
REWARD_TARGET = "agenttrain.rewards.builtin.tools.environment"


def environment_setting_problems(key: str, section: Mapping[str, Any]) -> Iterator[str]:
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
