"""Engines by name: the bundled ones, each a folder with a `spec.py`, and those from outside.

`engine._target_` names an engine from outside by the dotted path of its EngineSpec. Its module is
the user's code: only `admit` imports it, once everything else in the settings is valid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass

from agenttrain.engines.config import DEFAULT_ENGINE, EngineSettings
from agenttrain.engines.spec import EngineSpec, S
from agenttrain.types import ConfigError
from agenttrain.utils import sections
from agenttrain.utils.locate import locate
from agenttrain.utils.names import did_you_mean
from agenttrain.utils.sections import (
    SETTINGS,
    field_names,
    owners_of,
    raise_problems,
    shown,
    with_known_keys,
)

TARGET = "_target_"


@dataclass(config=SETTINGS, kw_only=True)
class OutsideEngine(EngineSettings):
    """Settings of an engine from outside before its module is imported."""

    keys: dict[str, Any]
    """The section as the user wrote it; the engine's own settings class checks it."""


@cache
def specs() -> Mapping[str, EngineSpec[Any]]:
    """Return the bundled engines by name: every folder beside this file that has a `spec.py`."""
    names = sorted(file.parent.name for file in Path(__file__).parent.glob("*/spec.py"))
    return {name: import_module(f"agenttrain.engines.{name}.spec").SPEC for name in names}


def spec_of(settings: S) -> EngineSpec[S]:
    """Return the spec of an engine. An engine from outside must have passed `admit` before."""
    assert not isinstance(settings, OutsideEngine), "its module is not imported yet"
    bundled = specs().get(settings.name)
    if bundled is not None:
        return bundled
    spec: EngineSpec[S] = locate(settings.name, key=f"engine.{TARGET}")
    return spec


def names_with(**abilities: bool) -> str:
    """Return the bundled engines that have these abilities, as an override.

    Example: ``names_with(grammars=True) == "engine=vllm|vllm_server"``.
    """
    names = [
        name
        for name, spec in specs().items()
        if all(getattr(spec, ability) == value for ability, value in abilities.items())
    ]
    return f"engine={'|'.join(names)}"


def read_engine(section: Any) -> EngineSettings:
    """Return the section `engine` as the settings of the engine that it names.

    The section always has a `name`: DEFAULT_ENGINE, unless somebody has chosen another engine. With
    `_target_` the engine is from outside: the result is an `OutsideEngine`, whose own keys are not
    checked before `admit` imports its module. Raises InvalidSettings.
    """
    if isinstance(section, EngineSettings):
        return section
    if not isinstance(section, Mapping):
        raise ValueError("expected keys and values, e.g. {name: transformers}")
    keys = {str(key): value for key, value in section.items()}
    if TARGET in keys and not isinstance(keys[TARGET], str):
        path = shown(keys[TARGET])
        raise_problems([f"engine.{TARGET}={path}: expected a dotted path, e.g. my_pkg.engine.SPEC"])
    if TARGET in keys:
        path, name = keys.pop(TARGET), keys.pop("name")
        if name != DEFAULT_ENGINE:  # somebody has chosen a bundled engine too
            raise_problems(
                [
                    f"engine.{TARGET}={path}: engine={name} is chosen beside it; leave engine="
                    f"{name} out, or where a file chooses it add engine={DEFAULT_ENGINE}"
                ]
            )
        # The keys that all engines have can be checked without the engine's module.
        shared = {key: keys[key] for key in field_names(EngineSettings) if key in keys}
        checked = asdict(_validated(EngineSettings, shared, f"engine.{TARGET}={path}"))
        checked["name"] = path  # `spec_of` finds the engine by it
        return OutsideEngine(**checked, keys=keys)
    name = keys["name"]
    if not isinstance(name, str) or name not in specs():
        choices = f"{', '.join(specs())}{did_you_mean(str(name), specs())}"
        raise_problems([f"engine.name={shown(name)}: expected one of: {choices}"])
    return _validated(specs()[name].settings, keys, f"engine={name}")


def admit(settings: EngineSettings) -> EngineSettings:
    """Import an outside engine and return its checked settings. Raises ConfigError."""
    if not isinstance(settings, OutsideEngine):
        return settings
    key, path = f"engine.{TARGET}", settings.name
    try:
        spec = locate(path, key=key)
        if not isinstance(spec, EngineSpec):
            raise ValueError(f"{key}={path}: is no EngineSpec; name the object that is one")
        cls: Any = spec.settings
        if not isinstance(cls, type) or not issubclass(cls, EngineSettings):
            raise ValueError(
                f"{key}={path}: its settings={getattr(cls, '__name__', cls)} is no class of "
                "settings; derive a pydantic dataclass from EngineSettings: class "
                "MySettings(EngineSettings)"
            )
        checked = _validated(spec.settings, settings.keys, f"{key}={path}")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    checked.name = path  # `spec_of` finds the spec by it
    return checked


def plain(settings: EngineSettings) -> dict[str, Any]:
    """Return the section as config.yaml stores it. Before `admit` it has only the user's keys."""
    if isinstance(settings, OutsideEngine):
        return {TARGET: settings.name, **settings.keys}
    keys = sections.plain(settings)
    if settings.name not in specs():  # an engine from outside, after `admit`: `name` is its path
        return {TARGET: keys.pop("name"), **keys}
    return keys


def _validated(settings: type[S], keys: Mapping[str, Any], engine: str) -> S:
    """Build settings from keys; raises InvalidSettings. `engine` names the engine in messages."""
    names = field_names(settings)

    # `with_known_keys` calls it for each of `keys` that the settings do not have.
    def unknown_key_problems(key: str, value: Any) -> Iterator[str]:
        """Yield messages about an unknown key: the engine that has it, or a key that is meant."""
        # A section, e.g. of engine.cache.size=1. No bundled engine has any, so only the overrides
        # are named, as they were written.
        if isinstance(value, Mapping) and value:
            for name, inner in value.items():
                yield f"engine.{key}.{name}={shown(inner)}: unknown key"
            return
        override = f"engine.{key}={shown(value)}"
        owners = owners_of(key, {name: spec.settings for name, spec in specs().items()})
        if owners:
            yield f"{override}: {engine} has no such key; it belongs to engine={'|'.join(owners)}"
            return
        hint = f"; the keys of {engine} are: {', '.join(names)}"
        if close := get_close_matches(key, names, n=1):
            hint = f" (did you mean 'engine.{close[0]}'?)"
        yield f"{override}: unknown key{hint}"

    return with_known_keys(settings, keys, "engine", unknown_key_problems)
