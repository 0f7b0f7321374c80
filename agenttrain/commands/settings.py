"""`agenttrain settings`: every setting with its type, default and description.

The same list is the page docs/reference/settings.md and, with `--schema`, a JSON schema by which
editors complete YAML files.
"""

from __future__ import annotations

import ast
import json
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from inspect import getsource
from itertools import groupby, pairwise
from textwrap import dedent, fill
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter

from agenttrain.commands.verb import STDOUT, write_report
from agenttrain.data.config import SOURCES, DataConfig, SourceConfig
from agenttrain.settings.components import ONE_BESIDE, SETTINGS_BESIDE
from agenttrain.settings.run_config import CHOICES, RunConfig, choices
from agenttrain.types import ConfigError
from agenttrain.utils.names import did_you_mean
from agenttrain.utils.sections import LARGEST, field_names, plain, sections_below, shown

TYPES = {int: "whole number", float: "number", bool: "true or false", str: "text"}
BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
INTERPOLATION = {"type": "string", "pattern": r"\$\{|^\?\?\?$"}
"""Value that any setting may have in a YAML file: ${optimizer.lr}, or ???, which asks for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting, as the lists print it."""

    key: str
    """Example: ``optimizer.lr``; of components ``tools.<name>.timeout_s``."""
    type: str
    """Type in words: ``whole number or null``, ``>= 1`` included."""
    default: str
    """Value as typed on the command line; empty: it has to be set."""
    description: str
    choices: tuple[str, ...] = ()
    """The choices of the section that have this key with this default: ``optimizer=muon``. A key
    whose default differs is listed once for each default. Empty: all choices agree, or the section
    has none."""
    values: tuple[str, ...] = ()
    """Every value that the setting takes, if these can be listed: ``sum``, ``mean``."""


def settings(args: Namespace) -> int:
    """Print all settings, those of a section or key, or their schema; raises ConfigError."""
    selected = args.section  # a section or a key: `eval`, `eval.samples`
    if args.schema and selected is not None:
        raise ConfigError(f"{selected}: the schema is of all sections; leave it out")
    if args.schema:
        print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
        return 0
    listed = list(all_settings())
    if selected is not None:
        sections = dict.fromkeys(setting.key.partition(".")[0] for setting in listed)
        section = selected.partition(".")[0]
        if section not in sections:
            hint = did_you_mean(selected, sections)
            raise ConfigError(
                f"{selected}: no such section{hint}; there are: {', '.join(sections)}"
            )
        all_keys = dict.fromkeys(setting.key for setting in listed)
        # The dots end both names: `eval` finds `eval.samples`, but no section `evaluator`.
        listed = [setting for setting in listed if f"{setting.key}.".startswith(f"{selected}.")]
        if not listed:
            raise ConfigError(
                f"{selected}: unknown key{did_you_mean(selected, all_keys)}; agenttrain settings "
                f"{section} prints those of its section"
            )
    write_report([asdict(setting) for setting in listed], args.json)
    if args.json == STDOUT:  # the JSON takes the place of the text
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
        "# Settings\n\nEvery setting of a run with its type, default and meaning; `agenttrain "
        "settings` prints the same. Change one on the command line with `section.key=value`. The "
        "groups in `conf/` set several at once. Where a section has choices (`optimizer=muon`), "
        "keys that only some of them have say which.\n"
    ]
    for section, group in groupby(all_settings(), lambda setting: setting.key.partition(".")[0]):
        parts.append(f"## {section}\n\n{settings_table(group)}")
    return "\n".join(parts)


def settings_table(settings: Iterable[Setting]) -> str:
    """Return settings as a Markdown table."""
    rows = [
        f"| `{setting.key}` | {_cell(setting.type + _only_with(setting))} "
        f"| {f'`{_cell(setting.default)}`' if setting.default else ''} "
        f"| {_cell(setting.description)} |"
        for setting in settings
    ]
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows, ""])


def _only_with(setting: Setting) -> str:
    return f"; with {' or '.join(setting.choices)}" if setting.choices else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def all_settings(cls: type = RunConfig, prefix: str = "") -> Iterator[Setting]:
    """Yield every setting of a class, and of the sections below it, in their order.

    `prefix` is that of the keys: ``algorithm.`` for `AlgorithmConfig`. A key is one of these::

        optimizer       in `choices()`: its name, then the keys of every choice
        training        a section: its own settings, recursively
        tools           a mapping of components: also what agenttrain reads beside each `_target_`
        user            one component: the same, without a name in the key
        data.sources    a mapping of sources: also the settings of one
        seed            anything else: a single setting
    """
    hints, below = get_type_hints(cls), sections_below(cls)
    for field in fields(cls):
        key = prefix + field.name
        if key in choices():
            yield from _choice_settings(key, _description(cls, field.name))
        elif field.name in below:
            yield from all_settings(below[field.name], f"{key}.")
        else:
            yield _setting(cls, field, hints[field.name], key)
            # Settings that a component has beside the arguments of its `_target_`.
            if cls is RunConfig and key in SETTINGS_BESIDE:  # tools.<name>.timeout_s
                yield from all_settings(SETTINGS_BESIDE[key], f"{key}.<name>.")
            if cls is RunConfig and key in ONE_BESIDE:  # user.max_turns
                yield from all_settings(ONE_BESIDE[key], f"{key}.")
            if key == SOURCES:
                yield from _source_settings()


def _source_settings() -> Iterator[Setting]:
    """Yield the settings that a source of a mixture has beside those of `data`."""
    shared = tuple(f"{SOURCES}.<name>.{name}" for name in field_names(DataConfig))
    for setting in all_settings(SourceConfig, f"{SOURCES}.<name>."):
        if not any(setting.key == key or setting.key.startswith(f"{key}.") for key in shared):
            yield setting


def _choice_settings(section: str, description: str) -> Iterator[Setting]:
    """Yield `<section>.name`, then the keys of all choices of a section.

    A key that has different defaults in different choices comes once for each default.
    """
    classes = choices()[section]
    yield Setting(
        key=f"{section}.name",
        type=", ".join(classes),
        default=next(iter(classes)),
        description=description,
        values=tuple(classes),
    )
    all_names = (name for cls in classes.values() for name in field_names(cls))
    for name in dict.fromkeys(name for name in all_names if name != "name"):
        # Setting -> the choices in which it has the same type, default and meaning.
        overrides_by_setting: dict[Setting, list[str]] = {}
        for option, cls in classes.items():
            for field in (field for field in fields(cls) if field.name == name):
                setting = _setting(cls, field, get_type_hints(cls)[name], f"{section}.{name}")
                override = f"{section.replace('.', '/')}={option}"
                overrides_by_setting.setdefault(setting, []).append(override)
        for setting, overrides in overrides_by_setting.items():
            in_all = len(overrides) == len(classes)
            yield replace(setting, choices=() if in_all else tuple(overrides))


def _classes_below(cls: type) -> Iterator[type]:
    """Yield the settings classes of the sections below a class."""
    for section in sections_below(cls).values():
        yield section
        yield from _classes_below(section)


def _setting(cls: type, field: Field[Any], hint: Any, key: str) -> Setting:
    """Return the setting `key`, a field of the settings class `cls` with the annotation `hint`."""
    # pydantic's record of the field, with its bounds; None for a field without one.
    info = getattr(cls, "__pydantic_fields__", {}).get(field.name)
    default = _default(field, info)
    is_required = info is not None and info.is_required()
    text = "" if is_required or default == "???" else shown(plain(default))
    kind = ", ".join([_type(hint), *_describe_bounds(() if info is None else info.metadata)])
    # The values of an enum follow with their own texts: "`sum`: …; `mean`: …".
    types = [part for part in (hint, *get_args(hint)) if isinstance(part, type)]
    enums = [part for part in types if issubclass(part, Enum)]
    members = "; ".join(
        f"`{member.value}`: {about.rstrip('.')}"
        for enum in enums
        for member in enum
        if (about := _field_texts(enum).get(member.name))
    )
    description = " ".join(part for part in (_description(cls, field.name), members) if part)
    values = [str(member.value) for enum in enums for member in enum]
    if bool in types:
        values += ["true", "false"]
    if values and NoneType in types:
        values.append("null")
    return Setting(key=key, type=kind, default=text, description=description, values=tuple(values))


def _describe_bounds(metadata: Iterable[Any]) -> Iterator[str]:
    """Yield the bounds of a field, without LARGEST, which every whole number has.

    pydantic keeps them as objects with one attribute of BOUNDS each: Ge(ge=1) -> ">= 1".
    """
    for constraint in metadata:
        for name, sign in BOUNDS.items():
            if (bound := getattr(constraint, name, None)) not in (None, LARGEST):
                yield f"{sign} {bound:g}" if isinstance(bound, float) else f"{sign} {bound}"


def _default(field: Field[Any], info: Any) -> Any:
    """Return the default of a field; `info` is pydantic's record of it, or None."""
    if info is not None:
        return info.get_default(call_default_factory=True)
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    return getattr(default, "default", default)  # of pydantic's Field(default=…)


def _description(cls: type, name: str) -> str:
    """Return the text under a field, in the class that declares it or in one of its bases."""
    texts = (_field_texts(base) for base in cls.__mro__ if is_dataclass(base))
    return next((of_base[name] for of_base in texts if name in of_base), "")


@cache
def _field_texts(cls: type) -> Mapping[str, str]:
    """Map each field or enum member that a class itself declares to its docstring.

    pydantic's `use_attribute_docstrings` would read all sources whenever a setting is composed.
    """
    (tree,) = ast.parse(dedent(getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    texts = {}
    # A docstring is a bare string on the line below its field.
    for node, next_node in pairwise(tree.body):
        match node, next_node:
            case (
                ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                texts[name] = " ".join(text.split())
    return texts


def _type(hint: Any) -> str:
    """Return a setting's type in words: ``int | None`` -> "whole number or null".

    Settings are plain values, enums, tuples of numbers, lists, mappings, and `Any`.
    """
    parts = [part for part in get_args(hint) if part is not NoneType]
    if NoneType in get_args(hint):
        return f"{_type(parts[0])} or null"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return ", ".join(str(member.value) for member in hint)
    if get_origin(hint) is tuple:
        return f"{len(parts)} numbers"
    if get_origin(hint) is list:
        return "list"
    if get_origin(hint) is dict:
        return "keys and values"
    return TYPES.get(hint, "text or null")  # only `Any` is not among TYPES


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of files that begin with ``# @package _global_``, and of train.yaml.

    pydantic makes a definition of each settings class. They are then changed in place: any setting
    may be left out or be an interpolation (`_allow_interpolations`), has its description, and a
    section may be any of its choices (`_add_choices`) or a component (`_add_components`).
    """
    # "" is the whole file; the others are names of sections for the functions below. Sections of
    # components (tools, user) have the class of the settings beside a `_target_`, and sections with
    # choices a class for each, "optimizer=muon".
    classes: dict[str, type] = {"": RunConfig, **SETTINGS_BESIDE, **ONE_BESIDE}
    for section, named in choices().items():
        classes |= {f"{section}={name}": cls for name, cls in named.items()}
    # "validation": of the values that are read, not of those that would be written.
    references_by_mode, schemas = TypeAdapter.json_schemas(
        [(name, "validation", TypeAdapter[Any](cls)) for name, cls in classes.items()]
    )
    definitions = schemas["$defs"]
    # Key of `classes` -> {"$ref": "#/$defs/<class name>"}.
    references = {name: references_by_mode[name, "validation"] for name in classes}
    _allow_interpolations(definitions)
    for cls in {*classes.values(), *_classes_below(RunConfig)}:
        for key, part in definitions.get(cls.__name__, {}).get("properties", {}).items():
            part["description"] = _description(cls, key)
    root = _definition(references[""], definitions)
    root["properties"] |= {
        "defaults": {"type": "array", "description": "Options of groups: see Hydra."},
        "hydra": {"type": "object"},
    }
    _add_choices(root, definitions, references)
    _add_components(root, definitions, references)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **root, "$defs": definitions}


def _definition(reference: Mapping[str, str], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the definition that a reference names: ``{"$ref": "#/$defs/RunConfig"}``."""
    definition: dict[str, Any] = definitions[reference["$ref"].rpartition("/")[2]]
    return definition


def _allow_interpolations(definitions: Mapping[str, Any]) -> None:
    """Let each setting be left out, and be an interpolation: ``{"anyOf": [<setting>, …]}``."""
    for definition in definitions.values():
        definition.pop("required", None)
        for name, part in definition.get("properties", {}).items():
            # These keys describe the setting as a whole, so they stay outside of `anyOf`.
            about = {
                key: part.pop(key) for key in ("title", "description", "default") if key in part
            }
            definition["properties"][name] = {**about, "anyOf": [part, INTERPOLATION]}


def _add_choices(
    root: dict[str, Any],
    definitions: Mapping[str, Any],
    references: Mapping[str, Mapping[str, str]],
) -> None:
    """Let each section with choices have the keys of any one of them.

    The section becomes an `anyOf` of its choices' definitions, and in each definition `name` is one
    of the choices that have it. `references` has each choice's definition by
    ``<section>=<choice>``.
    """
    for section, classes in choices().items():
        # A section with choices is at the top (`optimizer`) or below `algorithm`.
        parent_section, _, key = section.rpartition(".")
        parent = definitions["AlgorithmConfig"] if parent_section else root
        options = {name: references[f"{section}={name}"] for name in classes}
        for name, option in options.items():
            # Choices may share a class, and so a definition: it then lists all their names.
            properties = _definition(option, definitions)["properties"]
            earlier_names = properties.get("name", {}).get("enum", [])
            properties["name"] = {"enum": [*earlier_names, name]}
        alternatives: list[Mapping[str, Any]] = [
            *{option["$ref"]: option for option in options.values()}.values()  # each once
        ]
        # Sections of CHOICES have bundled choices only. The others, engines and objectives, may
        # come from outside the package, with other keys.
        if section not in CHOICES:
            alternatives.append({"type": "object", "required": ["_target_"]})
        # Any setting may be an interpolation, ${…}.
        parent["properties"][key]["anyOf"] = [*alternatives, INTERPOLATION]


def _add_components(
    root: dict[str, Any],
    definitions: Mapping[str, Any],
    references: Mapping[str, Mapping[str, str]],
) -> None:
    """Describe components: a `_target_`, settings of ours, and any arguments of the `_target_`.

    SETTINGS_BESIDE holds sections of components by name (`tools`), ONE_BESIDE sections that are one
    component (`user`). Each maps a section to the class of the settings of ours, such as a tool's
    `timeout_s`. `references` maps the section to the definition of that class:
    ``{"$ref": "#/$defs/ToolSettings"}``.
    """
    for section in (*SETTINGS_BESIDE, *ONE_BESIDE):
        settings_beside = _definition(references[section], definitions)["properties"]
        component = {
            "type": "object",
            "properties": {"_target_": {"type": "string"}, **settings_beside},
        }
        part = root["properties"][section]
        # So far the section is `anyOf` a mapping with any content and an interpolation, which would
        # accept every key. The content is described here instead.
        part.pop("anyOf")
        part |= component if section in ONE_BESIDE else {"additionalProperties": component}
