"""A configuration in a few lines, for `agenttrain check`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from agenttrain.config.algorithm import AlgorithmConfig
from agenttrain.config.algorithm_checks import shown
from agenttrain.config.arithmetic import arithmetic
from agenttrain.config.data_settings import has_test_rows, names_test_rows
from agenttrain.config.environments import reward_sections, rewarding
from agenttrain.config.schema import DataConfig, DistributedName, RewardSettings, RunConfig
from agenttrain.config.tool_names import stop_tools, tool_names


def describe(config: RunConfig) -> str:
    """What the run is made of, and how large it is."""
    optimizer = config.optimizer
    parts = {
        "model": f"{config.model.path} ({config.model.dtype})",
        "template": f"{config.chat_template.name}, response schema {config.response_schema.name}",
        "tools": ", ".join(config.tools) or "none",
        "stop tools": ", ".join(stop_tools(config)) or "none",
        **_environments(config),
        "train data": _call(config.data.train),
        "test data": _test_rows(config.data),
        "reward": "\n            ".join(_rewards(_reward_sections(config))) or "none",
        "algorithm": _algorithm(config.algorithm),
        "optimizer": f"lr {optimizer.lr:g}, {optimizer.schedule} after {optimizer.warmup_steps} "
        f"warm-up steps, gradient norm at most {optimizer.max_grad_norm:g}",
        "engine": config.engine.name,
        "tracker": config.tracker.name,
        **_processes(config),
    }
    lines = [f"{name:<12}{text}" for name, text in parts.items()]
    return "\n".join([*lines, "", *arithmetic(config).lines()])


def _processes(config: RunConfig) -> dict[str, str]:
    section = config.distributed
    if section.name is DistributedName.single:
        return {}
    nodes = f" on each of {section.nodes} nodes" if section.nodes > 1 else ""
    return {"processes": f"{section.processes or 'one per GPU'}{nodes}, {section.name}"}


def _test_rows(data: DataConfig) -> str:
    if names_test_rows(data):
        return _call(data.test)
    return "held out of the train data" if has_test_rows(data) else "none, so no evaluation"


AXES = ("advantage", "scale", "surrogate", "ratio", "aggregation")
COUNTED = ("name", "group_size", "num_epochs", "minibatches")
"""Told among the sizes."""


def _algorithm(config: AlgorithmConfig) -> str:
    """The axes, and every other setting that is not its default."""
    told = [f"{key} {getattr(config, key)}" for key in AXES]
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in (*AXES, *COUNTED) and value != field.default:
            told.append(f"{field.name} {shown(value)}")
    return f"{config.name}: {', '.join(told)}"


def _rewards(rewards: Mapping[str, Any]) -> list[str]:
    """One line per reward: its weight, and what it is without the settings of ours."""
    ours = {field.name for field in fields(RewardSettings)}
    width = max(map(len, rewards), default=0)
    return [
        f"{name:<{width}}  weight {part.get('weight', 1.0):g}  "
        + _call({key: value for key, value in part.items() if key not in ours})
        for name, part in rewards.items()
    ]


def _reward_sections(config: RunConfig) -> Mapping[str, Any]:
    return reward_sections(config, rewarding=rewarding(config))


def _environments(config: RunConfig) -> dict[str, str]:
    """Each environment with the tools that it adds, as far as its source tells."""
    lines = []
    for name, section in config.environment.items():
        found = tool_names(RunConfig(environment={name: section}))
        tools = [*found.names, *([] if found.complete else ["…"])]
        lines.append(f"{name} {_call(section)}, tools {', '.join(tools) or 'none'}")
    return {"environment": "\n            ".join(lines)} if lines else {}


def _call(section: Mapping[str, Any]) -> str:
    """`{_target_: my.rows, seed: 0}` -> `my.rows(seed=0)`."""
    bound = ", ".join(f"{key}={value}" for key, value in section.items() if key != "_target_")
    return f"{section['_target_']}({bound})"
