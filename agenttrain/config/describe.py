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
from agenttrain.config.schema import DistributedName, RewardSettings, RunConfig
from agenttrain.config.tool_names import stop_tools, tool_names

AXES = ("advantage", "scale", "surrogate", "ratio", "aggregation")
COUNTED = ("name", "group_size", "num_epochs", "minibatches")
"""Settings that stand among the sizes."""
INDENT = "\n            "
"""Between lines of one part."""


def describe(config: RunConfig) -> str:
    """Summarise the parts of a run and its size in a few lines."""
    optimizer, processes = config.optimizer, config.distributed
    environments = []
    for name, section in config.environment.items():
        tools = tool_names(RunConfig(environment={name: section}))
        names = [*tools.names, *([] if tools.complete else ["…"])]  # as far as its source tells
        environments.append(f"{name} {_call(section)}, tools {', '.join(names) or 'none'}")
    test = "none, so no evaluation"
    if names_test_rows(config.data):
        test = _call(config.data.test)
    elif has_test_rows(config.data):
        test = "held out of the train data"
    sections = reward_sections(config, rewarding=rewarding(config))
    ours = {field.name for field in fields(RewardSettings)}
    width = max(map(len, sections), default=0)
    rewards = [
        f"{name:<{width}}  weight {part.get('weight', 1.0):g}  "
        + _call({key: value for key, value in part.items() if key not in ours})
        for name, part in sections.items()
    ]
    parts = {
        "model": f"{config.model.path} ({config.model.dtype})",
        "template": f"{config.chat_template.name}, response schema {config.response_schema.name}",
        "tools": ", ".join(config.tools) or "none",
        "stop tools": ", ".join(stop_tools(config)) or "none",
        **({"environment": INDENT.join(environments)} if environments else {}),
        "train data": _call(config.data.train),
        "test data": test,
        "reward": INDENT.join(rewards) or "none",
        "algorithm": _algorithm(config.algorithm),
        "optimizer": f"lr {optimizer.lr:g}, {optimizer.schedule} after {optimizer.warmup_steps} "
        f"warm-up steps, gradient norm at most {optimizer.max_grad_norm:g}",
        "engine": config.engine.name,
        "tracker": config.tracker.name,
    }
    if processes.name is not DistributedName.single:
        nodes = f" on each of {processes.nodes} nodes" if processes.nodes > 1 else ""
        count = processes.processes or "one per GPU"
        parts["processes"] = f"{count}{nodes}, {processes.name}"
    lines = [f"{name:<12}{text}" for name, text in parts.items()]
    return "\n".join([*lines, "", *arithmetic(config).lines()])


def _algorithm(config: AlgorithmConfig) -> str:
    """Name the axes, and every other setting that is not its default."""
    words = [f"{key} {getattr(config, key)}" for key in AXES]
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in (*AXES, *COUNTED) and value != field.default:
            words.append(f"{field.name} {shown(value)}")
    return f"{config.name}: {', '.join(words)}"


def _call(section: Mapping[str, Any]) -> str:
    """Write `{_target_: my.rows, seed: 0}` as `my.rows(seed=0)`."""
    bound = ", ".join(f"{key}={value}" for key, value in section.items() if key != "_target_")
    return f"{section['_target_']}({bound})"
