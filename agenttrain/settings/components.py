"""A run's components: tools, environments, rewards and data, each a `_target_` with arguments.

`section_problems` checks the settings beside a `_target_` and imports nothing. `code_problems`
imports the named modules and checks their signatures. It comes last, when all else is valid,
because a user's module may import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import isclass, signature
from typing import Any

from agenttrain.algorithms.config import Credit
from agenttrain.data.config import (
    ENDLESS,
    FILE_ROWS,
    HUB_ROWS,
    ROLLOUT_ROWS,
    check_hub,
    check_rollout_files,
    check_row_files,
    names_test_rows,
)
from agenttrain.environments.config import EnvironmentSettings, UserSettings
from agenttrain.rewards.config import RewardSettings
from agenttrain.settings.engine_checks import has_rollout_process
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
)
from agenttrain.tools.sandbox.config import INTERPRETER
from agenttrain.tracking.config import OwnTrackerSettings, missing_libraries
from agenttrain.types import ConfigError
from agenttrain.utils.locate import (
    PROGRAM,
    about_argument,
    call_parameters,
    class_method,
    locate,
    parameter_names,
)
from agenttrain.utils.names import did_you_mean
from agenttrain.utils.sections import field_names, shown, split_section

SECTIONS = ("tools", "environment", "user", "reward", "data", "tracker")
"""Sections that name code."""
SETTINGS_BESIDE: Mapping[str, type[Any]] = {
    "tools": ToolSettings,
    "environment": EnvironmentSettings,
    "reward": RewardSettings,
}
"""Sections whose components have names (``tools.sql``) -> the class of the settings that agenttrain
reads beside a component's `_target_`, such as a tool's `timeout_s`."""
ONE_BESIDE: Mapping[str, type[Any]] = {"user": UserSettings}
"""Section that is itself one component -> the settings beside its `_target_`."""
ALL_BESIDE: Mapping[str, type[Any]] = {
    **SETTINGS_BESIDE,
    **ONE_BESIDE,
    "tracker": OwnTrackerSettings,
}
"""All sections with settings beside a `_target_`; trackers stand deeper, in `tracker.own`."""
REWARD = "environment"
"""Name of the reward function that environments share."""
REWARD_TARGET = "agenttrain.rewards.builtin.tools.environment"
OUR_REWARDS = "agenttrain.rewards."
STOP_TOOL_CALLED = f"{OUR_REWARDS}builtin.tools.stop_tool_called"
TOOL_CHECKS: Mapping[str, Callable[..., object]] = {
    MCP_SERVER: check_mcp_server,
    SEARCH: check_corpus,
}
"""Checks of bundled tools' arguments that need no connection and no index."""
ROW_CHECKS: Mapping[str, Callable[..., object]] = {
    FILE_ROWS: check_row_files,
    ROLLOUT_ROWS: check_rollout_files,
    HUB_ROWS: check_hub,
}
TRACKER_METHODS = ("start", "log", "rollouts", "flush", "finish", "describe")
TOTAL_LIMITS = {"max_calls": "max_tool_calls", "max_result_tokens": "max_completion_tokens"}
"""Limit of a tool or environment -> the limit of `rollout` above which it has no effect."""


def section_problems(config: RunConfig) -> Iterator[str]:
    """Yield problems of every component that can be found without importing its `_target_`."""
    if config.algorithm.credit.name is Credit.gigpo and not config.environment:
        yield (
            "algorithm/credit=gigpo: compares turns that began in equal states of an environment, "
            "and the run has none; add one with a state(), or set algorithm/credit=turn_baseline"
        )
    for key, section, siblings in _components(config):
        if isinstance(section, Mapping) and "_target_" in section:
            yield from _settings_beside_problems(config, key, section)
        else:
            yield _no_target_problem(key, section, siblings)
    for name, section in config.reward.items():
        is_shared = isinstance(section, Mapping) and section.get("_target_") == REWARD_TARGET
        if is_shared and not config.environment:
            yield (
                f"reward.{name}: is the reward of an environment, and the run has none; add "
                "+environment.<name>._target_=<class>, or leave it out"
            )
    if not config.reward and not config.environment:  # an environment may have a reward
        yield "reward={}: without a reward nothing can be learnt; choose one: reward=[exact_match]"


def _no_target_problem(key: str, section: Any, siblings: Mapping[str, Any]) -> str:
    """Return the problem of a component without a `_target_`.

    `siblings` are all sections of its kind: for ``tools.sql`` those of `tools`.
    """
    kind, name = key.partition(".")[0], key.rpartition(".")[2]
    # In ``tools: {_target_: my.find}`` the name of the tool is left out.
    if name == "_target_" and isinstance(section, str):
        return (
            f"{key}={section}: has no name; a file in {kind}/ begins with the line "
            f"`# @package {kind}.<name>`, and a setting is written {kind}.<name>._target_=…"
        )
    # A misspelled name makes a new section, which holds only the typed keys.
    complete = [n for n, s in siblings.items() if isinstance(s, Mapping) and "_target_" in s]
    return (
        f"{key}={shown(section)}: has no _target_{did_you_mean(name, complete)}; add one: "
        f"{key}._target_=my_module.{name}"
    )


def _settings_beside_problems(
    config: RunConfig, key: str, section: Mapping[str, Any]
) -> Iterator[str]:
    """Yield problems of agenttrain's own settings in a component, such as a tool's `timeout_s`.

    The other keys are arguments of the `_target_`, which `code_problems` checks.
    """
    kind = key.partition(".")[0]
    if kind not in ALL_BESIDE:  # rows have arguments only
        return
    try:
        settings, _ = split_section(ALL_BESIDE[kind], section, key)
    except ConfigError as error:
        yield from str(error).splitlines()
    else:
        yield from _useless_limits(config, key, settings)


def _useless_limits(config: RunConfig, key: str, settings: Any) -> Iterator[str]:
    """Yield the limits of a tool or environment that are above those of the whole rollout."""
    if not isinstance(settings, ToolLimits):
        return
    for limit, total in TOTAL_LIMITS.items():
        value, maximum = getattr(settings, limit), getattr(config.rollout, total)
        if None not in (value, maximum) and value > maximum:
            yield (
                f"{key}.{limit}={value}: has no effect, the whole rollout is limited "
                f"to rollout.{total}={maximum}; lower one or raise the other"
            )


def _components(config: RunConfig) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Yield (key, section, siblings) of each component.

    Example: ``("tools.sql", {"_target_": …}, config.tools)``. The siblings are all components of
    the section by name: a message about a misspelled name suggests one of them. They are {} for a
    component without a name of its own, such as ``user``.
    """
    for kind in SETTINGS_BESIDE:  # tools, environment, reward
        siblings = getattr(config, kind)
        # `reward.environment` needs no `_target_`: `reward_sections` adds it.
        sections = reward_sections(config) if kind == "reward" else siblings
        for name, section in sections.items():
            yield f"{kind}.{name}", section, siblings
    if config.user:
        yield "user", config.user, {}
    for name, section in config.tracker.own.items():
        yield f"tracker.own.{name}", section, config.tracker.own
    splits = ("train", "test") if names_test_rows(config.data) else ("train",)
    for split in splits:
        yield f"data.{split}", getattr(config.data, split), {}


def code_problems(config: RunConfig, sections: Collection[str] = SECTIONS) -> Iterator[str]:
    """Import the code that `sections` name, and yield settings that do not fit it.

    Call it once `section_problems` yields nothing. Bundled code imports no torch.
    """
    for key, section, _siblings in _components(config):
        if key.partition(".")[0] in sections:
            yield from _component_code_problems(config, key, section)
    if "tracker" in sections:
        yield from missing_libraries(config.tracker)
    if config.agent._target_ is not None:
        yield from _out_of_reach(config, "agent._target_", config.agent._target_, {})
    # An environment brings tools too: only with both are the names complete.
    if {"tools", "environment"} <= set(sections):
        yield from _named_tools(config)


def _component_code_problems(
    config: RunConfig, key: str, section: Mapping[str, Any]
) -> Iterator[str]:
    """Import the `_target_` of the component at `key`, and yield problems of its arguments."""
    kind = key.partition(".")[0]
    try:
        target = locate(section["_target_"], key=f"{key}._target_")
    except ValueError as error:
        yield str(error)
        return
    parameters = parameter_names(target)
    if parameters is not None:  # else it takes any name, or its parameters are unknown
        # A section has settings of its kind (ToolSettings, …) and the arguments of `target`.
        settings = field_names(ALL_BESIDE[kind]) if kind in ALL_BESIDE else ()
        valid_names = (*parameters, *settings)
        unknown = [name for name in section if name not in (*valid_names, "_target_")]
        for name in unknown:
            yield (
                f"{key}.{name}={shown(section[name])}: {section['_target_']} has no such "
                f"argument{did_you_mean(name, valid_names)}; known are: "
                f"{', '.join(valid_names)}"
            )
        if unknown:
            return
    yield from _out_of_reach(config, f"{key}._target_", section["_target_"], section)
    yield from CODE_CHECKS[kind](config, key, section, target)


def _out_of_reach(
    config: RunConfig, key: str, path: str, section: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the problem of code in ``__main__`` that another process of the run has to import.

    Such code is defined in a notebook or in the program itself.

    `path` is the code's dotted path, the value of `key`, and `section` its component's settings.
    """
    if not path.startswith(f"{PROGRAM}."):
        return
    if key.startswith("tracker."):
        process, remedy = "the trackers' process", ""
    elif key.startswith("tools.") and section.get("isolation") == Isolation.process:
        process, remedy = "a process of its own (isolation=process)", ", or leave isolation out"
    elif has_rollout_process(config):
        process = "the rollout process"
        remedy = ", or keep the rollouts in this one (rollout.process=same)"
    else:
        return
    yield (
        f"{key}={path}: is defined in the notebook or program itself, and {process} cannot import "
        f"it; move it into a module, e.g. my_code.py beside it, and import it from there{remedy}"
    )


def _tool(config: RunConfig, key: str, section: Mapping[str, Any], target: Any) -> Iterator[str]:
    """Yield the problems of a tool's section; entries of CODE_CHECKS share this signature."""
    settings, bound = split_section(ToolSettings, section, key)
    yield from _errors_to_retry(key, settings)
    if section["_target_"] == INTERPRETER:
        from agenttrain.tools.sandbox.tool import interpreter_problems  # with the pool: late

        yield from interpreter_problems(key, settings, bound)
    check = TOOL_CHECKS.get(section["_target_"])
    if check is None:
        return
    problems = list(_argument_problems(check, key, bound))
    yield from problems
    if problems:
        return
    reconnect_s = section.get("reconnect_s", 5.0)  # the default of an MCP server
    if check is check_mcp_server and reconnect_s >= settings.timeout_s:
        yield (
            f"{key}.reconnect_s={reconnect_s}: must be below "
            f"{key}.timeout_s={settings.timeout_s:g}, or a call times out before its server counts "
            "as unreachable"
        )


def _environment(
    config: RunConfig, key: str, section: Mapping[str, Any], target: Any
) -> Iterator[str]:
    """Yield the problems of an environment; `target` is the object that its `_target_` names.

    `key` is for example ``environment.shop``, and `section` its settings.
    """
    settings, arguments = split_section(EnvironmentSettings, section, key)
    yield from _errors_to_retry(key, settings)
    compares_states = config.algorithm.credit.name is Credit.gigpo
    if compares_states and not callable(getattr(target, "state", None)):
        yield (
            f"{key}._target_={section['_target_']}: has no state(), and algorithm/credit=gigpo "
            "compares turns that began in equal states; add the method, or set "
            "algorithm/credit=turn_baseline"
        )
    if not isclass(target):
        yield (
            f"{key}._target_={section['_target_']}: is a function; each rollout gets an instance "
            "of its own, so name a class"
        )
    # An environment's class may check the arguments of its instances, before one is made.
    elif (check := class_method(target, "check")) is not None:
        yield from _argument_problems(check, key, arguments)


def _user(config: RunConfig, key: str, section: Mapping[str, Any], target: Any) -> Iterator[str]:
    from agenttrain.environments.user import build_user  # httpx comes with it

    try:
        build_user(section)
    except ValueError as error:
        yield str(error)


def _errors_to_retry(key: str, limits: ToolLimits) -> Iterator[str]:
    """Yield the entries of `retry_on` that name no exception."""
    for path in limits.retry_on:
        try:
            error = locate(path, key=f"{key}.retry_on")
        except ValueError as problem:
            yield str(problem)
            continue
        if not (isclass(error) and issubclass(error, Exception)):
            yield f"{key}.retry_on={path}: is no exception"


def _reward(config: RunConfig, key: str, section: Mapping[str, Any], target: Any) -> Iterator[str]:
    """Yield the problems of a reward's section and signature."""
    path = section["_target_"]
    if call_parameters(target) == 0:
        yield (
            f"{key}._target_={path}: takes no argument; a reward gets the rollout, and the "
            "columns that it names: def mine(rollout, answer)"
        )
    settings = field_names(RewardSettings)
    try:
        valid_names = (*settings, *signature(target).parameters, "_target_")
    except (TypeError, ValueError):  # compiled code may have no signature
        valid_names = (*settings, "_target_")
    for name in section:
        # A reward with `**columns` would accept a misspelled setting.
        if name not in valid_names and (hint := did_you_mean(name, settings)):
            yield (
                f"{key}.{name}={shown(section[name])}: is neither a setting of a reward{hint} nor "
                f"a parameter that {path} names; the settings are: {', '.join(settings)}"
            )
    if path == STOP_TOOL_CALLED and not (config.stop_tools or _stop_sections(config)):
        yield f"{key}: would always be 0 with stop_tools=[]; name one: stop_tools=[final_answer]"
    if not path.startswith(OUR_REWARDS) or not isclass(target):
        return
    # Classes of bundled rewards check their arguments, and import nothing heavy.
    yield from _argument_problems(target, key, split_section(RewardSettings, section, key)[1])


def _rows(config: RunConfig, key: str, section: Mapping[str, Any], target: Any) -> Iterator[str]:
    """Yield the problem of the arguments of bundled rows; those without end make their row 0."""
    path = section["_target_"]
    check = partial(target, index=0) if path in ENDLESS else ROW_CHECKS.get(path)
    if check is not None:
        bound = {name: value for name, value in section.items() if name != "_target_"}
        yield from _argument_problems(check, key, bound)


def _argument_problems(
    check: Callable[..., object], key: str, bound: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the problem that `check` raises for the arguments of the component at `key`."""
    try:
        check(**bound)
    except TypeError as error:
        yield f"{key}: {error}"
    except ValueError as error:
        yield about_argument(error, key, bound)


def _own_tracker(
    config: RunConfig, key: str, section: Mapping[str, Any], target: Any
) -> Iterator[str]:
    """Yield the methods that a tracker of the user's lacks, as one problem."""
    missing = [name for name in TRACKER_METHODS if not callable(getattr(target, name, None))]
    if missing:
        yield (
            f"{key}._target_={section['_target_']}: has no {', '.join(missing)}; derive it from "
            "agenttrain.tracking.backends.base.ExperimentTracker"
        )


CODE_CHECKS: Mapping[str, Callable[..., Iterator[str]]] = {
    "tools": _tool,
    "environment": _environment,
    "user": _user,
    "reward": _reward,
    "data": _rows,
    "tracker": _own_tracker,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolNames:
    """Names of tools that classes and functions show without being built."""

    names: tuple[str, ...]
    complete: bool
    """False: there are tools beside `names`, which only built components know."""


def tool_names(config: RunConfig) -> ToolNames:
    """Return the tools of `tools` and the methods of `environment`; imports their modules.

    Example: `tools.add` of a function and an environment with a method `move` are ``("add",
    "move")``.
    """
    parts = [_tool_names(name, section) for name, section in config.tools.items()]
    for name, section in config.environment.items():
        target = locate(section["_target_"], key=f"environment.{name}._target_")
        # HOOKS are the methods that rollouts call themselves, so they are no tools.
        names = _methods(target, HOOKS) if isclass(target) else ()
        # An instance with a method `tools` names further ones.
        has_further = isclass(target) and class_method(target, "tools") is not None
        parts.append(ToolNames(names=names, complete=not has_further))
    names_once = dict.fromkeys(name for part in parts for name in part.names)
    return ToolNames(names=tuple(names_once), complete=all(part.complete for part in parts))


def _tool_names(name: str, section: Mapping[str, Any]) -> ToolNames:
    """Return the names of the tools that the section `tools.<name>` makes."""
    target = locate(section["_target_"], key=f"tools.{name}._target_")
    # A function, or a class whose instance is called: one tool, with the name of its section.
    # `callable(target)` would be True for any class; the last base is `object`.
    if not isclass(target) or any("__call__" in vars(base) for base in target.__mro__[:-1]):
        return ToolNames(names=(name,), complete=True)
    if hasattr(target, "tools"):  # only an instance has their names
        return ToolNames(names=(), complete=False)
    return ToolNames(names=_methods(target, LIFE_CYCLE), complete=True)


def _methods(cls: type, reserved: tuple[str, ...]) -> tuple[str, ...]:
    """Return the public methods of a class, without the `reserved` ones that the run calls."""
    from agenttrain.tools.tool import public_methods  # jsonschema comes with it

    return tuple(public_methods(cls, reserved))


def stop_tools(config: RunConfig) -> tuple[str, ...]:
    """Return the stop tools: those of `stop_tools`, and of sections with `stop`.

    Example: ``stop_tools: [quit]`` and ``tools.submit.stop: true`` are ``("quit", "submit")``. A
    section whose tools are unknown before it is built (an MCP server) is listed as ``"mcp …"``.
    """
    names = dict.fromkeys(config.stop_tools)
    for name in _stop_sections(config):
        tool = _tool_names(name, config.tools[name])
        names.update(dict.fromkeys(tool.names if tool.complete else (f"{name} …",)))
    return tuple(names)


def _stop_sections(config: RunConfig) -> list[str]:
    """Return the sections of `tools` whose tools are stop tools by `stop`."""
    return [name for name, section in config.tools.items() if section.get("stop") is True]


def _named_tools(config: RunConfig) -> Iterator[str]:
    """Yield tools that `stop_tools` and `eval.tools` name although no section has them."""
    try:
        tools = tool_names(config)
    except ValueError:  # `code_problems` has reported it
        return
    if not tools.complete:  # some tools have names only once they are built (an MCP server)
        return
    remedies = {"stop_tools": "stop_tools=[] is none (as with experiment=none)"}
    remedies["eval.tools"] = "eval.tools=null is all of them"
    for key, names in (("stop_tools", config.stop_tools), ("eval.tools", config.eval.tools or ())):
        for name in names:
            if name not in tools.names:
                yield (
                    f"{key}=[{name}]: is not a tool of this run{did_you_mean(name, tools.names)}; "
                    f"its tools are: {', '.join(tools.names) or 'none'}; {remedies[key]}"
                )


def has_rewarding_environment(config: RunConfig) -> bool:
    """Return True if some environment has a `reward`; imports their modules."""
    classes = (
        locate(section["_target_"], key=f"environment.{name}._target_")
        for name, section in config.environment.items()
    )
    return any(callable(getattr(cls, "reward", None)) for cls in classes)


def reward_sections(config: RunConfig, *, add_environment: bool = False) -> dict[str, Any]:
    """Return the sections of a run's reward functions, `reward.environment` with its `_target_`.

    That reward is the one that environments give. Its section needs no `_target_`:
    ``+reward.environment.weight=0.5`` is enough. With `add_environment`, for a run in which some
    environment has a `reward`, a missing section is added.
    """
    sections = dict(config.reward)
    if not config.environment:
        return sections
    if add_environment:
        sections.setdefault(REWARD, {})
    if isinstance(sections.get(REWARD), Mapping):  # else `section_problems` reports the value
        sections[REWARD] = {"_target_": REWARD_TARGET, **sections[REWARD]}
    return sections
