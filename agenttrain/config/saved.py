"""Configurations of earlier runs: what `resume=` and `eval run=` start from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf

from agenttrain.config.compose import Composed, Source, compose_raw, convert
from agenttrain.config.errors import ConfigError, explain
from agenttrain.config.schema import RunConfig
from agenttrain.config.suggest import did_you_mean

RESUMABLE = ("steps", "eval", "checkpoint", "tracker", "engine")
"""What a resumed run may change: the rest decides what it learns."""
EVALUABLE = ("eval", "data", "engine", "tracker", "rollout", "reward", "seed")
"""What an evaluation of a run may change: the rest is the agent itself."""


def saved_config(
    key: str, folder: Path, overrides: Sequence[str], *, allowed: Sequence[str], source: Source
) -> Composed:
    """The settings of the run in `folder`, with `overrides` of `allowed` sections on top.

    `key` is what the user typed for the folder (`resume` or `run`). Raises ConfigError. Needs a
    `hydra_session`.
    """
    parsed = [_parse(text, source) for text in overrides]
    for override in parsed:
        section = override.key_or_group.partition(".")[0]
        if section not in allowed or override.type is OverrideType.DEL:
            raise ConfigError(
                f"{override.input_line}: cannot be combined with {key}={folder}"
                f"{did_you_mean(section, allowed)}; what may change is: {', '.join(allowed)}"
            )
    node = _typed(key, folder)
    try:
        _apply(parsed, node, source)
        return convert(node)
    except Exception as error:
        raise explain(error, overrides, source.groups()) from error


def finished_steps(folder: Path) -> int | None:
    """Steps of a finished run; None for one that is not finished."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return int(summary.get("steps", 0)) if summary.get("status") == "finished" else None


def _parse(text: str, source: Source) -> Override:
    try:
        override: Override = OverridesParser.create().parse_override(text)
    except Exception as error:
        raise explain(error, [text], source.groups()) from error
    if override.is_sweep_override():
        raise ConfigError(f"{text}: a saved run takes one value, not several")
    return override


def _typed(key: str, folder: Path) -> DictConfig:
    file = folder / "config.yaml"
    try:
        plain: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{key}={folder}: is no run folder: there is no config.yaml") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}={folder}: its config.yaml cannot be read: {error}") from error
    if not isinstance(plain, dict):
        raise ConfigError(f"{key}={folder}: its config.yaml holds no settings")
    plain.pop("provenance", None)
    try:
        return OmegaConf.merge(OmegaConf.structured(RunConfig), plain)  # type: ignore[return-value]
    except Exception as error:
        problem = explain(error, [], {})
        raise ConfigError(f"{key}={folder}: its config.yaml does not fit: {problem}") from error


def _apply(overrides: Sequence[Override], node: DictConfig, source: Source) -> None:
    """First the groups that are chosen anew, then the single values, as Hydra does."""
    chosen = [o for o in overrides if o.key_or_group in source.groups() and _is_option(o)]
    if chosen:
        fresh = compose_raw([str(o.input_line) for o in chosen], source)
        for override in chosen:
            key = override.key_or_group
            OmegaConf.update(node, key, OmegaConf.to_container(fresh[key]), merge=False)
    for override in overrides:
        if override not in chosen:
            value = override.value()
            OmegaConf.update(node, override.key_or_group, value, merge=True, force_add=True)


def _is_option(override: Override) -> bool:
    return isinstance(override.value(), str | list)
