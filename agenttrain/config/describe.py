"""A configuration in a few lines, for `agenttrain check`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agenttrain.config.arithmetic import arithmetic
from agenttrain.config.environments import reward_sections
from agenttrain.config.schema import RunConfig
from agenttrain.config.tool_names import tool_names


def describe(config: RunConfig) -> str:
    """What the run is made of, and how large it is."""
    algorithm, optimizer = config.algorithm, config.optimizer
    parts = {
        "model": f"{config.model.path} ({config.model.dtype})",
        "template": f"{config.chat_template.name}, response schema {config.response_schema.name}",
        "tools": ", ".join(config.tools) or "none",
        "stop tools": ", ".join(config.stop_tools) or "none",
        **_environments(config),
        "train data": _call(config.data.train),
        "test data": _call(config.data.test),
        "reward": ", ".join(
            f"{name} {_call(part)}" for name, part in reward_sections(config).items()
        )
        or "none",
        "algorithm": f"{algorithm.name}: advantage {algorithm.advantage}, scale {algorithm.scale}, "
        f"ratio {algorithm.ratio}, clip -{algorithm.clip_low:g} +{algorithm.clip_high:g}, "
        f"{algorithm.aggregation}, beta {algorithm.beta:g}",
        "optimizer": f"lr {optimizer.lr:g}, {optimizer.schedule} after {optimizer.warmup_steps} "
        f"warm-up steps, gradient norm at most {optimizer.max_grad_norm:g}",
        "engine": config.engine.name,
        "tracker": config.tracker.name,
    }
    lines = [f"{name:<12}{text}" for name, text in parts.items()]
    return "\n".join([*lines, "", *arithmetic(config).lines()])


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
