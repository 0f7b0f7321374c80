"""Values of a stranger's settings that are not declared as data: code, commands, addresses.

A value is data if its field says so (`utils/data_fields.py`), if it is the field's default, or if
the installed groups (conf/) have it in the same place. Everything else is untrusted: fields that
declare nothing, all of a component, engine or objective that is not bundled, and unknown keys.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from inspect import Parameter, isclass, signature
from typing import Any, cast, get_type_hints

from agenttrain.data.config import OWN_SECTIONS, SOURCES, SourceConfig
from agenttrain.engines.config import EngineSettings
from agenttrain.settings.components import ONE_BESIDE, REWARD, REWARD_TARGET, SETTINGS_BESIDE
from agenttrain.settings.run_config import RunConfig, choices
from agenttrain.tracking.config import OwnTrackerSettings
from agenttrain.utils.data_fields import is_data
from agenttrain.utils.files import conf_folder, parse_yaml
from agenttrain.utils.locate import locate
from agenttrain.utils.sections import field_names, plain, sections_below

SECTIONS = field_names(RunConfig)
"""All of a run's sections."""
COMPONENTS: Mapping[str, type[Any] | None] = {**ONE_BESIDE, "data.train": None, "data.test": None}
"""Section that is one component -> the class of agenttrain's settings in it; None: it has none."""
NAMED_COMPONENTS: Mapping[str, type[Any]] = {**SETTINGS_BESIDE, "tracker.own": OwnTrackerSettings}
"""Section of components by name -> the class of agenttrain's settings in each of them."""
BESIDE_CHOICES: Mapping[tuple[str, ...], type[Any]] = {("engine",): EngineSettings}
"""Section whose `_target_` names a choice from outside -> the settings that every choice has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UntrustedValue:
    """A value of the settings that is not declared as data."""

    path: tuple[str, ...]
    """Keys that lead to it, e.g. ``("tools", "mcp", "command")``."""
    value: Any

    @property
    def key(self) -> str:
        """The path as it is typed: ``tools.mcp.command``."""
        return ".".join(self.path)


def untrusted_values(
    settings: Mapping[str, Any], sections: Collection[str] = SECTIONS
) -> list[UntrustedValue]:
    """Return the values in `sections` of complete or partial settings that are not data.

    Example: ``{"tools": {"lookup": {"_target_": "my_agent.lookup", "timeout_s": 5.0}}}`` has one,
    at ``("tools", "lookup", "_target_")``.
    """
    chosen = {name: value for name, value in settings.items() if name in sections}
    return list(_values_of_class(RunConfig, chosen, ()))


def _values_of_class(
    cls: type, section: Mapping[str, Any], path: tuple[str, ...]
) -> Iterator[UntrustedValue]:
    """Yield the untrusted values of a section with the settings class `cls` at `path`.

    Untrusted is what is not declared as data: it could make the program import, run or open
    something.
    """
    hints, defaults = _read_type_hints(cls), _defaults(cls)
    sections = sections_below(cls)
    for name, value in section.items():
        place = (*path, str(name))
        # The key in a run of one source: `tools` for data.sources.shop.tools.
        key, is_section = ".".join(run_place(place)), isinstance(value, Mapping)
        # Sections whose keys are not the fields of one class come first.
        if is_section and key == SOURCES:
            for source, source_section in value.items():
                yield from _values_of_source(source_section, (*place, str(source)))
        elif is_section and key in COMPONENTS:  # `_target_` and arguments: data.train
            yield from _values_of_component(COMPONENTS[key], value, place)
        elif is_section and key in NAMED_COMPONENTS:  # names -> components: tools
            yield from _values_of_components(NAMED_COMPONENTS[key], value, place)
        elif is_section and key in choices():  # keys that depend on `name`: engine
            yield from _values_of_choice(choices()[key], value, place)
        elif is_section and name in sections:
            yield from _values_of_class(sections[name], value, place)
        elif name in defaults and value == defaults[name]:
            continue  # the default is this package's, whatever its type
        elif name not in hints or not is_data(hints[name], value):
            yield from _leaves(value, place)


def run_place(place: tuple[str, ...]) -> tuple[str, ...]:
    """Return the path that a setting of a mixture's source has in a run of that source alone.

    Example: ("data", "sources", "shop", "tools", "sql") becomes ("tools", "sql"), and ("data",
    "sources", "shop", "train") becomes ("data", "train"). Any other path stays as it is.
    """
    inside = place[3:] if ".".join(place[:2]) == SOURCES else ()
    if not inside:
        return place
    return inside if inside[0] in OWN_SECTIONS else ("data", *inside)


def _values_of_source(section: Any, path: tuple[str, ...]) -> Iterator[UntrustedValue]:
    """Yield the untrusted values of a source of a mixture."""
    if isinstance(section, Mapping):
        yield from _values_of_class(SourceConfig, section, path)
    else:
        yield from _leaves(section, path)


def _values_of_choice(
    classes: Mapping[str, type], section: Mapping[str, Any], path: tuple[str, ...]
) -> Iterator[UntrustedValue]:
    """Yield the untrusted values of a section whose keys depend on its `name`."""
    cls = classes.get(str(section.get("name")))
    if cls is None or "_target_" in section:  # a choice from outside the package
        yield from _values_of_component(BESIDE_CHOICES.get(path), section, path)
        return
    yield from _values_of_class(cls, {n: v for n, v in section.items() if n != "name"}, path)


def _values_of_components(
    settings_class: type[Any], section: Mapping[str, Any], path: tuple[str, ...]
) -> Iterator[UntrustedValue]:
    """Yield the untrusted values of the section at `path` that maps names to components: `tools`.

    `settings_class` is that of agenttrain's settings in each component: ToolSettings for `tools`.
    """
    for name, component in section.items():
        place = (*path, str(name))
        if not isinstance(component, Mapping):  # a mistake, which later checks report
            yield from _leaves(component, place)
            continue
        # `reward.environment`, in a source too, has a default `_target_`.
        if run_place(place) == ("reward", REWARD):
            component = {"_target_": REWARD_TARGET, **component}
        yield from _values_of_component(settings_class, component, place)


def _values_of_component(
    settings_class: type[Any] | None, component: Mapping[str, Any], path: tuple[str, ...]
) -> Iterator[UntrustedValue]:
    """Yield the untrusted values of the component at `path`: its `_target_` and its arguments.

    Agenttrain's own settings may stand among the arguments: in ``{"_target_": "my.find", "table":
    "a.csv", "timeout_s": 5.0}`` the last one is a field of ToolSettings, the `settings_class`. It
    is None where there are none.
    """
    target = str(component.get("_target_") or "")
    is_bundled = target in bundled_targets()
    settings = {}
    if settings_class is not None:
        names = field_names(settings_class)
        settings = {name: value for name, value in component.items() if name in names}
        yield from _values_of_class(settings_class, settings, path)
    hints, defaults = _parameters(target) if is_bundled else ({}, {})
    for name, value in component.items():
        # `_values_of_class` has judged the settings. A bundled or empty `_target_` runs no code.
        if name in settings or (name == "_target_" and (is_bundled or not target)):
            continue
        if is_bundled:
            # Values that this package itself gives to its code are as safe as data.
            is_default = name in defaults and defaults[name] == value
            values_in_conf = bundled_targets()[target].get(str(name), ())
            if is_data(hints.get(name), value) or is_default or value in values_in_conf:
                continue
        yield from _leaves(value, (*path, str(name)))


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[UntrustedValue]:
    """Yield each single value of a nested mapping, without None, "" and []."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _leaves(part, (*path, str(name)))
    elif value not in (None, "", []):
        yield UntrustedValue(path=path, value=value)


@cache
def _read_type_hints(cls: type) -> Mapping[str, Any]:
    """Return the types of a settings class's fields, with what `Annotated` says of them."""
    return get_type_hints(cls, include_extras=True)


@cache
def _defaults(cls: type) -> Mapping[str, Any]:
    """Return the defaults of a settings class as plain data, without keys that have to be set."""
    infos = getattr(cls, "__pydantic_fields__", {})
    required = {name for name, info in infos.items() if info.is_required()}
    if not required:
        return cast(Mapping[str, Any], plain(cls()))
    return {
        name: plain(infos[name].get_default(call_default_factory=True))
        for name in field_names(cls)
        if name not in required
    }


def _parameters(target: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the annotations and the defaults of a bundled component's arguments."""
    function = locate(target, key="_target_")
    hints = get_type_hints(
        function.__init__ if isclass(function) else function, include_extras=True
    )
    parameters = signature(function).parameters.values()
    return hints, {p.name: p.default for p in parameters if p.default is not Parameter.empty}


@cache
def bundled_targets() -> Mapping[str, Mapping[str, list[Any]]]:
    """Return each `_target_` of this package in the YAML files of conf/, with its arguments there.

    The user trusts these: they came with the package. Example of one target, with the values that
    one of its arguments has: ``{"agenttrain.tools.builtin.sql.Sql": {"connect":
    ["agenttrain.data.…"]}, …}``.
    """
    # The default of `reward.environment`, which no file names.
    targets: dict[str, dict[str, list[Any]]] = {REWARD_TARGET: {}}
    for file in sorted(conf_folder().rglob("*.yaml")):
        for component in _components(parse_yaml(file.read_text(encoding="utf-8"))):
            values_by_argument = targets.setdefault(component["_target_"], {})
            for name, value in component.items():
                values_by_argument.setdefault(name, []).append(value)
    return targets


def _components(part: Any) -> Iterator[Mapping[str, Any]]:
    """Yield every section at any depth of `part` whose `_target_` is code of this package."""
    if isinstance(part, Mapping):
        if str(part.get("_target_")).startswith("agenttrain."):
            yield part
        for inner in part.values():
            yield from _components(inner)


_NODE = re.compile(r"\$\{[\w.\[\]-]+\}")
"""An interpolation of another setting: ``${data.path}``."""


def resolvers(part: Any, path: tuple[str, ...] = ()) -> Iterator[UntrustedValue]:
    """Yield the texts with a resolver such as ``${oc.env:HOME}``: it reads outside the settings."""
    if isinstance(part, Mapping):
        for name, inner in part.items():
            yield from resolvers(inner, (*path, str(name)))
    elif isinstance(part, list):
        for index, inner in enumerate(part):
            yield from resolvers(inner, (*path, str(index)))
    # _NODE matches ${optimizer.lr}, which names another setting: these are removed first.
    elif isinstance(part, str) and "${" in _NODE.sub("", part):
        yield UntrustedValue(path=path, value=part)
