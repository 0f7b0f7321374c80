"""Hydra's and OmegaConf's errors as one line with key, value and remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from functools import cache
from pathlib import Path
from shlex import quote
from traceback import extract_tb
from types import NoneType, UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationKeyError,
    InterpolationResolutionError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)
from yaml import MarkedYAMLError

from agenttrain.data.config import LEAVE_OUT_SOURCES, SOURCES
from agenttrain.settings.overrides import as_typed, key_of
from agenttrain.settings.run_config import RunConfig, choices
from agenttrain.types import AgenttrainError, ConfigError
from agenttrain.utils.files import parse_yaml
from agenttrain.utils.moved import moved_key
from agenttrain.utils.names import did_you_mean
from agenttrain.utils.sections import field_names, sections_below, shown

EXPECTED = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
SEVERAL = ("tools", "reward", "environment", "tracker")
"""Groups whose options are combined; the other groups of a section take one option."""
REPLACED = {
    "launcher": "agenttrain starts the jobs itself; sweep.parallel=2 runs two at a time, and "
    "agenttrain submit -m makes them an array of SLURM's",
    "sweeper": "agenttrain chooses the runs itself; sweep.trials=20 draws so many at random, and "
    "sweep=optuna searches by sweep.objective",
}
"""Parts of Hydra whose plugins have no effect on a sweep, and the settings in their place."""
SECTIONS_ELSEWHERE = ("actor_rollout_ref", "trainer", "critic")


@cache
def elsewhere() -> Mapping[str, str]:
    """Map the names of settings in TRL and verl to ours: ``engine.name (engine=vllm or …)``."""
    file = Path(__file__).with_name("elsewhere.yaml")
    settings: dict[str, str] = parse_yaml(file.read_text(encoding="utf-8"))
    return settings


@contextmanager
def explained(
    overrides: Sequence[str], groups: Callable[[], Mapping[str, Sequence[str]]]
) -> Iterator[None]:
    """Turn Hydra's and OmegaConf's errors in the block into a ConfigError about the `overrides`.

    Example: ``algorithm.group_sise=4`` becomes "algorithm.group_sise=4: unknown key (did you mean
    'algorithm.group_size'?)". `groups` gives every group's options.
    """
    try:
        yield
    except AgenttrainError:
        raise
    except Exception as error:
        raise ConfigError(_explain(error, overrides, groups())) from error


def _is_about_defaults(error: AssertionError) -> bool:
    """Return True if Hydra's reader of defaults lists raised the error, which has no message."""
    return Path(extract_tb(error.__traceback__)[-1].filename).name == "default_element.py"


def _explain(
    error: Exception, overrides: Sequence[str], groups: Mapping[str, Sequence[str]]
) -> str:
    """Return the message for an error, by its kind: YAML, an override, an option, a key, other."""
    # A mistake in a file is the error's context and not its cause.
    chain = (error, error.__cause__, error.__context__)
    yaml_error = next((e for e in chain if isinstance(e, MarkedYAMLError)), None)
    key_error = next(
        (e for e in chain if isinstance(e, OmegaConfBaseException) and e.full_key), None
    )
    if yaml_error is not None:
        mark = yaml_error.problem_mark or yaml_error.context_mark
        where = f"{mark.name}, line {mark.line + 1}" if mark else "a YAML file"
        return f"{where}: is no YAML: {yaml_error.problem or yaml_error.context}"
    if isinstance(error, OverrideParseException):
        if "=" not in error.override and not error.override.startswith("~"):
            return f"{error.override}: settings are written key=value"
        typed = as_typed(error.override)
        return (
            f"{typed}: cannot be read; put a value with blanks, commas, brackets, = or "
            "letters such as ü in quotes that the shell leaves alone, e.g. 'model.path=\"a, b\"'"
        )
    if isinstance(error, MissingConfigException):
        return _unknown_option(error, groups)
    if isinstance(error, AssertionError) and _is_about_defaults(error):
        return (
            "defaults: lines that begin with `override` stand after all others of a defaults list; "
            "move them to its end"
        )
    if key_error is not None:
        return _explain_key_error(key_error, str(error), overrides, groups)
    return _explain_other(error, overrides, groups)


def check_values(
    overrides: Sequence[Override], groups: Callable[[], Mapping[str, Sequence[str]]]
) -> None:
    """Raise ConfigError for values of a wrong type that Hydra accepts or does not explain."""
    options = groups()
    for override in overrides:
        # The key is typed as that of a section, algorithm.credit, or of a group, algorithm/credit.
        key, value = override.key_or_group, override.value()
        line = as_typed(override.input_line)
        if not key:
            raise ConfigError(f"{line}: names no setting; settings are written key=value")
        if override.is_delete() or override.is_sweep_override():
            continue
        group = key.replace(".", "/")
        # algorithm.objective=[clip], which should be algorithm/objective=clip. A text or a mapping
        # in its place is checked with the settings.
        if group != key and group in options and not isinstance(value, str | dict):
            choose = f"choose one with {group}={'|'.join(options[group])}"
            raise ConfigError(
                f"{line}: is a section; {choose}, and set its keys with {key}.<key>=…"
            )
        if key in options:
            _check_options(line, key, value, options[key])
        annotation = _annotation(key)
        is_flag = bool in (annotation, *get_args(annotation))
        # OmegaConf takes any number for a flag: 2 is true. (True and False are equal to 1 and 0.)
        if is_flag and isinstance(value, int) and value not in (0, 1):
            raise ConfigError(f"{line}: expected true or false")


def setting_keys(cls: type = RunConfig, prefix: str = "") -> Iterator[str]:
    """Yield every key of the configuration, e.g. `algorithm` and `algorithm.group_size`."""
    sections = sections_below(cls)
    for field in fields(cls):
        key = prefix + field.name
        yield key
        if options := choices().get(key):
            # A section whose keys depend on a choice: those of every choice.
            names = dict.fromkeys(
                name for choice in options.values() for name in field_names(choice)
            )
            yield from (f"{key}.{name}" for name in names)
        elif field.name in sections:
            yield from setting_keys(sections[field.name], f"{key}.")


def _check_options(line: str, group: str, value: object, options: Sequence[str]) -> None:
    """Raise ConfigError unless the typed `value` may be one or several options of a group.

    `line` is the override as it was typed, with which the error begins.
    """
    listed = f"the options are: {', '.join(options)}"
    section = group.replace("/", ".")
    if isinstance(value, int | float):  # model=3
        raise ConfigError(f"{line}: no such option; {listed}")
    # experiment={…}: a group that is no section of the settings has no keys.
    if isinstance(value, dict) and group not in setting_keys():
        raise ConfigError(f"{line}: takes one option; {listed}")
    if isinstance(value, list):
        # Only some groups, such as tools, take a list of options.
        if section in setting_keys() and section not in SEVERAL:
            raise ConfigError(f"{line}: takes one option; {listed}")
        if not_texts := [shown(name) for name in value if not isinstance(name, str)]:
            raise ConfigError(f"{line}: {not_texts[0]} is no option; {listed}")


def suggest_key(key: str, groups: Iterable[str] = ()) -> str:
    """Return a hint at the setting that was probably meant; empty if there is none.

    The candidates, in this order: our setting for a name of TRL or verl, a section of verl's, a key
    of the same name in another section, a key of similar spelling in the same section, a key of
    very similar spelling in any section.

    Example: ``suggest_key("lr") == " (did you mean 'optimizer.lr'?)"``
    """
    # A name alone may have been typed below a section: optimizer.learning_rate.
    foreign = next((name for name in (key, _split(key)[1]) if name in elsewhere()), None)
    if foreign is not None and key not in setting_keys():
        # Our key, and perhaps a remark: "engine.name (engine=vllm or engine=transformers)".
        ours, space, remark = elsewhere()[foreign].partition(" ")
        return f"; it is {ours} here{space}{remark}"
    if key.partition(".")[0] in SECTIONS_ELSEWHERE:
        return "; that is verl's; `agenttrain settings` prints ours"
    candidates = [*setting_keys(), *groups]
    section, leaf = _split(key)
    in_section = {_split(name)[1]: name for name in candidates if _split(name)[0] == section}
    anywhere = {_split(name)[1]: name for name in candidates}
    # (keys by their names, least similarity; 1 is equal). A similar name in another section is more
    # often a coincidence than a typing error.
    for names, cutoff in ((anywhere, 1.0), (in_section, 0.6), (anywhere, 0.8)):
        near = get_close_matches(leaf, names, n=1, cutoff=cutoff)
        if near:
            return f" (did you mean '{names[near[0]]}'?)"
    return ""


def _split(key: str) -> tuple[str, str]:
    """Return the section and the last name of a key: ``("optimizer", "lr")``, ``("", "steps")``."""
    section, _, leaf = key.rpartition(".")
    return section, leaf


def _explain_key_error(
    cause: OmegaConfBaseException,
    text: str,
    overrides: Sequence[str],
    groups: Mapping[str, Sequence[str]],
) -> str:
    """Return the message for OmegaConf's error about a key; `text` is that of Hydra's error.

    `groups` maps a config group to its options: ``{"algorithm": ["grpo", "rloo"]}``.
    """
    key = str(cause.full_key)  # OmegaConf's key, perhaps of an entry of a list: tools[0]
    setting = key.partition("[")[0]  # tools
    # The override or setting with which the message begins, and the key that the user wrote.
    where, written_key = _locate_mistake(key, text, overrides)
    if _chosen_file_lacks_package(key, where, groups):
        return (
            f"{where}: its file lacks the first line `# @package _global_`, so that its keys would "
            f"stand in a section {key!r}; put that line at its top"
        )
    if isinstance(cause, MissingMandatoryValue):
        section = key.rpartition(".")[0].replace(".", "/")
        section = section if section in groups else key.partition(".")[0]
        needs_path = ("file", "folder", "own")  # these options lack a value themselves
        options = [name for name in groups.get(section, ()) if name not in needs_path]
        remedy = f"set it: {key}=…"
        if options and section != "reward":  # another reward would leave the key as it is
            remedy += f", or choose {section}={'|'.join(options)}"
        return f"{key}: has no value; {remedy}"
    first_line = str(cause).partition("\n")[0]
    if isinstance(cause, InterpolationResolutionError):
        return _explain_interpolation(cause, where, first_line)
    if where.startswith("~"):
        expected = _expected(setting, value=None) or f"set another value: {setting}=…"
        expected = expected.removeprefix("is a section; ")
        return f"{where}: cannot be left out, as every run has it; {expected}"
    if (new := moved_key(where)) is not None:
        return f"{where}: is {new} now"
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        return f"{where}: {_about_unknown_key(key, written_key, groups)}"
    return f"{where}: {_expected(setting, getattr(cause, 'value', None)) or first_line}"


def _chosen_file_lacks_package(key: str, where: str, groups: Mapping[str, Sequence[str]]) -> bool:
    """Return True if the keys of a chosen file stand in a section with the name of its group.

    Example: for ``experiment=mine`` OmegaConf refuses the key `experiment`. That is a group, and no
    section of the settings, so mine.yaml lacks the line that puts its keys at the top.
    """
    typed_key = where.partition("=")[0].partition(" ")[0].lstrip("+")
    return key in groups and key == typed_key and key not in setting_keys()


def _locate_mistake(key: str, text: str, overrides: Sequence[str]) -> tuple[str, str]:
    """Return the beginning of a message about OmegaConf's `key`, and the key that the user wrote.

    The message begins with the override that has the mistake, or with the setting and the YAML file
    that Hydra's message `text` names: ``optimizer.lrr (in experiment/mine.yaml)``.
    """
    setting = key.partition("[")[0]  # tools of tools[0]
    for override in overrides:
        name = key_of(override)
        # OmegaConf only names the first unknown part: `a.b` for the override `a.b.c=1`.
        if name == setting or name.startswith(setting + "."):
            return as_typed(override), name
    file = re.match(r"In '([^']+)'", text)
    return f"{setting} (in {file[1]}.yaml)" if file else setting, key


def _explain_interpolation(cause: InterpolationResolutionError, where: str, first_line: str) -> str:
    """Return the message for an interpolation at `where`; `first_line` is that of its error."""
    if isinstance(cause, InterpolationToMissingValueError):
        # "MissingMandatoryValue while resolving interpolation: Missing mandatory value: data.path"
        missing_key = first_line.rpartition(": ")[2]
        return f"{missing_key}: has no value; set it: {missing_key}=…"
    if isinstance(cause, InterpolationKeyError):
        # "Interpolation key 'lr' not found": ${lr} is looked for at the top of the settings.
        return f"{where}: {first_line}; write the whole key, e.g. ${{optimizer.lr}}"
    # 'KeyError raised while resolving interpolation: "Environment variable 'HOME' not found"'
    reason = first_line.partition(": ")[2].strip("\"'") or first_line
    return f"{where}: the interpolation cannot be resolved: {reason}"


def _about_unknown_key(key: str, written_key: str, groups: Mapping[str, Sequence[str]]) -> str:
    """Return what to do about an unknown key.

    `key` is the part that OmegaConf names, `written_key` what the user wrote: for ``optimizer.lrr``
    both, for ``optimzer.lr`` the first is ``optimzer``.
    """
    if key.startswith("hydra."):
        hydra_section = key.removeprefix("hydra.").partition(".")[0]
        no_such_key = "Hydra has no such key; `agenttrain --cfg hydra` shows those it has"
        return REPLACED.get(hydra_section, no_such_key)
    hint = suggest_key(written_key, groups)
    if not hint:
        section = _split(key)[0]
        siblings = [_split(name)[1] for name in setting_keys() if _split(name)[0] == section]
        hint = f"; the keys {f'of {section} ' if section else ''}are: {', '.join(siblings)}"
        if not siblings:  # no section that has known keys: Hydra adds a key there only with +
            hint = f"; a new one begins with +: +{key}=…"
    return f"unknown key{hint}"


def _annotation(key: str) -> Any:
    """Return the type annotation of a setting; None for an unknown key."""
    cls: Any = RunConfig
    for part in key.split("."):
        if not is_dataclass(cls):
            return None
        # The class of a section is looked up first: its type hint may be `Class | None`, which has
        # no fields to go on with. Other settings have their hint only.
        section: Any = sections_below(cast(type, cls)).get(part)
        cls = section or get_type_hints(cls).get(part)
    return cls


def _expected(key: str, value: object) -> str | None:
    """Return what a key expects, e.g. "expected one of: group, leave_one_out", or None.

    `value` is the value that was refused; None: null, or the key was to be left out (``~key``).
    """
    annotation = _annotation(key)
    if key == SOURCES and value is None:
        return f"is a section; {LEAVE_OUT_SOURCES}"
    # `choices` has sections whose class depends on a choice, e.g. engine=vllm.
    is_section = is_dataclass(annotation) or get_origin(annotation) is dict or key in choices()
    if is_section:
        return f"is a section; set its keys with {key}.<key>=…"
    kind, or_null = annotation, ""
    if get_origin(annotation) in (Union, UnionType):  # X | None
        (kind,) = (part for part in get_args(annotation) if part is not NoneType)
        or_null = ", or null"
    if isinstance(kind, type) and issubclass(kind, Enum):
        names = [member.name for member in kind]
        return f"expected one of: {', '.join(names)}{or_null}{did_you_mean(str(value), names)}"
    if get_origin(kind) in (list, tuple):
        items = " of texts" if get_args(kind) == (str,) else ""
        return f"expected a list{items}, e.g. {key}=[…]"
    return f"expected {EXPECTED[kind]}{or_null}" if kind in EXPECTED else None


def with_files(text: str, overrides: Sequence[str], config_name: str) -> str:
    """Add to each problem the YAML file that sets its key, unless the key was typed.

    Example: ``optimizer.lrr=1: unknown key …`` -> ``optimizer.lrr=1 (in experiment/mine.yaml):
    unknown key …``. A key that no file sets, such as a default, stays alone. Needs a
    `hydra_session`.
    """
    typed_keys = [key_of(override) for override in overrides]
    lines = []
    for line in text.splitlines():
        setting, colon, problem = line.partition(": ")
        key = setting.partition("=")[0]
        is_typed = any(key == name or key.startswith(f"{name}.") for name in typed_keys)
        file = None if is_typed else _file_that_sets(key, overrides, config_name)
        lines.append(line if file is None else f"{setting} (in {file}.yaml){colon}{problem}")
    return "\n".join(lines)


def _file_that_sets(key: str, overrides: Sequence[str], config_name: str) -> str | None:
    """Return the composed YAML file that sets a key, such as ``experiment/mine``, or None.

    If several do, it is the last, whose value replaces those of the others. The keys in a file are
    below its package: with the package ``tools.sql`` its ``timeout_s`` is ``tools.sql.timeout_s``.
    """
    loader = cast(ConfigLoaderImpl, cast(Hydra, GlobalHydra.instance().hydra).config_loader)
    composed = loader.compute_defaults_list(config_name, list(overrides), RunMode.RUN).defaults
    for part in reversed(composed):
        loaded = loader.repository.load_config(str(part.config_path))
        if loaded is None or not loaded.path.startswith("file://"):  # the schema, `run_config`
            continue
        package = f"{part.package}." if part.package not in (None, "", "_global_") else ""
        if not key.startswith(package):
            continue
        if OmegaConf.select(loaded.config, key.removeprefix(package)) is not None:
            return str(part.config_path)
    return None


ROW_FILES = (".jsonl", ".json", ".csv", ".parquet")


def _unknown_option(error: MissingConfigException, groups: Mapping[str, Sequence[str]]) -> str:
    """Return the message for a group's option, or a --config-name, that has no YAML file."""
    missing = error.missing_cfg_file or ""  # "experiment/mine", without .yaml
    missing = missing if isinstance(missing, str) else missing[0]
    group, _, option = missing.rpartition("/")
    local_files = _local_files(missing)
    if not group:
        remedy = (
            local_files or "; name one of conf/, or the folder that has it: --config-dir <folder>"
        )
        return f"--config-name {option}: there is no {option}.yaml where it is looked for{remedy}"
    if group in ("hydra/launcher", "hydra/sweeper"):  # plugins, which have no effect here
        return f"{group}={option}: {REPLACED[group.removeprefix('hydra/')]}"
    if group not in groups:
        # An option with a slash, such as model=org/name: the group ends at the first slash.
        group, _, option = missing.partition("/")
    if group not in groups:
        return str(error).partition("\n")[0]
    settings_hint = _probable_settings(group, option)
    spelling_hint = ""
    if not local_files:
        spelling_hint = did_you_mean(option.rpartition("/")[2].lower(), groups[group])
    return (
        f"{group}={option}: no such option{spelling_hint}{local_files}{settings_hint}; the options "
        f"are: {', '.join(groups[group])}"
    )


def _local_files(missing: str) -> str:
    """Return hints at files of a missing name in the current folder or in a folder of it.

    Example: for ``experiment/mine`` it is ``; my_conf/experiment/mine.yaml is found with
    --config-dir my_conf``, if there is that file.
    """
    files = [Path(f"{missing}.yaml"), *sorted(Path().glob(f"*/{missing}.yaml"))]
    depth = len(Path(missing).parts)  # 2: the folder to name is that above experiment/
    return "".join(
        f"; {file} is found with --config-dir {quote(str(file.parents[depth - 1]))}"
        for file in files
        if file.is_file()
    )


def _probable_settings(group: str, option: str) -> str:
    """Return a hint if an option is a path, a hub id or a dotted name; empty if it is none.

    Example: ``"; for this one: model=folder model.path=org/name"``.
    """
    is_path = "/" in option or Path(option).exists()
    is_name = "." in option and all(part.isidentifier() for part in option.split("."))
    settings = ""
    if group == "model" and is_path:
        settings = f"model=folder model.path={option}"
    elif group == "data" and (Path(option).suffix in ROW_FILES or Path(option).exists()):
        settings = f"data=file data.path={option} data.test_fraction=0.1"
    elif group == "data" and is_path:
        settings = f"data=hub data.path={option}"
    elif group in ("chat_template", "response_schema") and is_path:
        settings = f"{group}=file {group}.path={option}"
    elif group in ("tools", "reward") and is_name:
        settings = f"{group}=[] {group}.{option.rpartition('.')[2]}._target_={option}"
    return f"; for this one: {settings}" if settings else ""


def _explain_other(
    error: Exception, overrides: Sequence[str], groups: Mapping[str, Sequence[str]]
) -> str:
    """Return the message for an error that names no key: it is recognized by its text.

    Comments have an override that leads to each case.
    """
    # OmegaConf cannot set a key below a section that is null.
    if "Unexpected type for root" in str(error):
        # +hydra.sweeper.params.seed=1,2: that section is null unless a file of the group sweep,
        # which has such keys for Hydra's own sweepers, fills it.
        if any("hydra.sweeper" in text for text in overrides):
            remedy = "is for files of the group sweep; type the values: -m seed=1,2"
            return f"hydra.sweeper.params: {remedy}"
        # a.b=null a.b.c=1: the null section is within another one, so that the key below it has two
        # dots. The error does not name the key: show all overrides of this form.
        nested = [text for text in overrides if text.count(".") > 1]
        return f"{' '.join(nested)}: is below a section that is null; leave the null out"
    # Hydra's messages about a group, and a key, that is added and there already.
    several = re.match(r"Multiple values for ([^ ]+)\. ", str(error))
    present = re.match(r"Could not append to config\. An item is already at '([^']+)'", str(error))
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        # algorithm/objective@foo=cispo
        if str(error).startswith(f"Could not override '{key}'") and "@" in key:
            group = key.partition("@")[0]
            return f"{override}: no group stands at that place; write {group}={value}"
        # ~zzz
        if override.startswith("~") and "Could not delete" in str(error):
            remedy = f"; to leave all of it out write {key}=[]" if key in groups else ""
            return f"{override}: there is nothing of that name to leave out{remedy}"
        # experiment=null
        if key in groups and value == "null":
            options = ", ".join(groups[key])
            remedy = (
                f"{key}=[] leaves all out" if key in SEVERAL else "leave it out for the default"
            )
            return f"{override}: a group takes an option ({options}); {remedy}"
        # +experiment=shop
        if override.startswith("+") and (key in groups or (several and key == several[1])):
            return f"{override}: the group is there already; write {key}={value}"
        # +steps=5
        if present and override.startswith("+") and key == present[1]:
            return f"{override}: the key is there already; write {key}={value}"
        # seed=1,2
        if f"Ambiguous value for argument '{override}'" in str(error):
            return (
                f"{override}: several values; add -m to run one after the other, or write "
                f"{key}=[{value}] for a list"
            )
    return str(error).partition("\n")[0]
