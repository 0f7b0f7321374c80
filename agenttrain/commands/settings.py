"""`agenttrain settings`: every setting with its type, default and description.

The same list is the page docs/reference/settings.md and, with `--schema`, a JSON schema by which
editors complete YAML files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass, replace
from enum import Enum
from itertools import groupby
from textwrap import fill
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter

from agenttrain.settings.components import SETTINGS_BESIDE
from agenttrain.settings.run_config import RunConfig, choices
from agenttrain.types import ConfigError
from agenttrain.utils.names import did_you_mean
from agenttrain.utils.sections import descriptions, field_names, plain, shown

USAGE = "settings [section] [--json | --schema]"
TYPES = {int: "whole number", float: "number", bool: "true or false", str: "text"}
BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
INTERPOLATION = {"type": "string", "pattern": r"\$\{"}
"""Value such as ${optimizer.lr}, which any setting may have in a YAML file."""

OUTSIDE = {"type": "object", "required": ["_target_"]}
"""Section of code from outside the package, which has keys of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting, as the lists print it."""

    key: str
    """Example: ``optimizer.lr``; of components ``tools.<name>.timeout_s``."""
    type: str
    default: str
    """As it is typed; empty: it has to be set."""
    description: str
    choices: tuple[str, ...] = ()
    """Options of the section's group that have the key, where not all have it."""


def settings(arguments: Sequence[str]) -> int:
    """`settings [section] [--json | --schema]`: print them; exit code 0. Raises ConfigError."""
    options = [word for word in arguments if word.startswith("-")]
    sections = [word for word in arguments if word not in options]
    if unknown := [word for word in options if word not in ("--json", "--schema")]:
        raise ConfigError(f"{unknown[0]}: is no option of settings; {USAGE}")
    if len(options) > 1 or len(sections) > 1:
        raise ConfigError(f"{' '.join(arguments)}: one section, one option: {USAGE}")
    if options == ["--schema"]:
        if sections:
            raise ConfigError(f"{sections[0]}: the schema is of all sections; leave it out")
        print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
        return 0
    listed = list(all_settings())
    if sections:
        known = dict.fromkeys(setting.key.partition(".")[0] for setting in listed)
        if sections[0].partition(".")[0] not in known:
            hint = did_you_mean(sections[0], known)
            raise ConfigError(
                f"{sections[0]}: no such section{hint}; there are: {', '.join(known)}"
            )
        prefix = f"{sections[0]}."
        listed = [setting for setting in listed if f"{setting.key}.".startswith(prefix)]
    if options == ["--json"]:
        print(json.dumps([asdict(setting) for setting in listed], indent=2, ensure_ascii=False))
        return 0
    for setting in listed:
        default = f" = {setting.default}" if setting.default else ""
        print(f"{setting.key}{default}   ({setting.type}{_only_with(setting)})")
        if setting.description:
            indent = "    "
            print(fill(setting.description, 100, initial_indent=indent, subsequent_indent=indent))
    return 0


def settings_page() -> str:
    """Return the page docs/reference/settings.md."""
    parts = [
        "# Settings\n\nEvery setting with its type, default and meaning; `agenttrain settings` "
        "prints the same. A setting is written `key=value` on the command line. Where a section "
        "has options (`optimizer=muon`), keys that only some of them have say which.\n"
    ]
    for section, group in groupby(all_settings(), lambda setting: setting.key.partition(".")[0]):
        rows = [
            f"| `{setting.key}` | {_cell(setting.type + _only_with(setting))} "
            f"| {f'`{_cell(setting.default)}`' if setting.default else ''} "
            f"| {_cell(setting.description)} |"
            for setting in group
        ]
        head = ["| key | type | default | meaning |", "|---|---|---|---|"]
        parts.append("\n".join([f"## {section}\n", *head, *rows, ""]))
    return "\n".join(parts)


def _only_with(setting: Setting) -> str:
    group = setting.key.rpartition(".")[0].replace(".", "/")
    options = " or ".join(f"{group}={choice}" for choice in setting.choices)
    return f"; with {options}" if options else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def all_settings() -> Iterator[Setting]:
    """Yield every setting, in the order of `RunConfig`."""
    yield from _of_class(RunConfig, "")


def _of_class(cls: type, prefix: str) -> Iterator[Setting]:
    hints = get_type_hints(cls)
    for field in fields(cls):
        key = prefix + field.name
        if options := choices().get(key):
            yield from _of_choices(key, options)
        elif is_dataclass(hints[field.name]):
            yield from _of_class(hints[field.name], f"{key}.")
        else:
            yield _setting(cls, field, hints[field.name], key)
            if cls is RunConfig and key in SETTINGS_BESIDE:
                yield from _of_class(SETTINGS_BESIDE[key], f"{key}.<name>.")


def _of_choices(section: str, options: Mapping[str, type]) -> Iterator[Setting]:
    """Yield the settings of a section's choices, each with the choices that have it."""
    for name in dict.fromkeys(name for cls in options.values() for name in field_names(cls)):
        owners = [option for option, cls in options.items() if name in field_names(cls)]
        cls = options[owners[0]]
        (field,) = (field for field in fields(cls) if field.name == name)
        some = () if len(owners) == len(options) else tuple(owners)
        setting = _setting(cls, field, get_type_hints(cls)[name], f"{section}.{name}", some)
        yield replace(setting, type=", ".join(options)) if name == "name" else setting


def _setting(
    cls: type, field: Field[Any], hint: Any, key: str, choices: tuple[str, ...] = ()
) -> Setting:
    info = getattr(cls, "__pydantic_fields__", {}).get(field.name)
    made = field.default_factory() if field.default_factory is not MISSING else field.default
    default = getattr(made, "default", made)  # pydantic leaves its own description of a field
    if info is not None:
        default = info.get_default(call_default_factory=True)
    text = "" if default == "???" else _default(default)
    bounds = [
        f"{sign} {bound:g}" if isinstance(bound, float) else f"{sign} {bound}"
        for part in (info.metadata if info is not None else ())
        for name, sign in BOUNDS.items()
        if (bound := getattr(part, name, None)) is not None
    ]
    kind = ", ".join([_type(hint), *bounds])
    description = descriptions(cls).get(field.name, "")
    if not description and isinstance(hint, type) and issubclass(hint, Enum):
        description = " ".join((hint.__doc__ or "").split())
    return Setting(key=key, type=kind, default=text, description=description, choices=choices)


def _default(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {shown(part)}" for key, part in value.items()) + "}"
    return shown(plain(value))


def _type(hint: Any) -> str:
    """Return a type in words: ``int | None`` -> "whole number or null"."""
    parts = [part for part in get_args(hint) if part is not NoneType]
    if NoneType in get_args(hint):
        return f"{_type(parts[0])} or null"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return ", ".join(str(member.value) for member in hint)
    if get_origin(hint) is tuple:
        return f"{len(parts)} numbers"
    if get_origin(hint) is list:
        return "list"
    return "keys and values" if get_origin(hint) is dict else TYPES.get(hint, "text or null")


def _sections(cls: type) -> Iterator[type]:
    """Yield the settings classes of the sections in a section."""
    for hint in get_type_hints(cls).values():
        if is_dataclass(hint) and isinstance(hint, type):
            yield from (hint, *_sections(hint))


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of files that begin with ``# @package _global_``, and of train.yaml.

    Any setting may be left out, and may be an interpolation.
    """
    classes: dict[str, type] = {"": RunConfig, **SETTINGS_BESIDE}
    for section, options in choices().items():
        classes |= {f"{section}={name}": cls for name, cls in options.items()}
    references, whole = TypeAdapter.json_schemas(
        [(name, "validation", TypeAdapter[Any](cls)) for name, cls in classes.items()]
    )
    definitions = whole["$defs"]
    for definition in definitions.values():
        definition.pop("required", None)
        for name, part in definition.get("properties", {}).items():
            about = {
                key: part.pop(key) for key in ("title", "description", "default") if key in part
            }
            definition["properties"][name] = {**about, "anyOf": [part, INTERPOLATION]}
    for cls in {*classes.values(), *_sections(RunConfig)}:
        for key, text in descriptions(cls).items():
            definitions[cls.__name__]["properties"][key]["description"] = text
    root = definitions[references["", "validation"]["$ref"].rpartition("/")[2]]
    root["properties"] |= {
        "defaults": {"type": "array", "description": "Options of groups: see Hydra."},
        "hydra": {"type": "object"},
    }
    for section, options in choices().items():
        parent, _, key = section.rpartition(".")
        within = definitions[f"{parent.capitalize()}Config"] if parent else root
        own = [references[f"{section}={name}", "validation"] for name in options]
        within["properties"][key]["anyOf"] = [*own, OUTSIDE]
        for reference in own:
            properties = definitions[reference["$ref"].rpartition("/")[2]]["properties"]
            properties.setdefault("name", {"type": "string"})
    for section in SETTINGS_BESIDE:
        beside = references[section, "validation"]
        target: dict[str, Any] = {"type": "object", "properties": {"_target_": {"type": "string"}}}
        name = beside["$ref"].rpartition("/")[2]
        # Beside the settings stand the arguments of the `_target_`.
        target["properties"] |= definitions[name]["properties"]
        root["properties"][section] |= {"additionalProperties": target}
        root["properties"][section].pop("anyOf")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **root, "$defs": definitions}
