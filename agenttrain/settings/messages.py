"""Hydra's and OmegaConf's errors as one line that says key, value and remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from shlex import quote
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)
from yaml import MarkedYAMLError

from agenttrain.engines.registry import known_keys
from agenttrain.settings.run_config import RunConfig
from agenttrain.types import AgenttrainError, ConfigError
from agenttrain.utils.moved import moved_key
from agenttrain.utils.names import did_you_mean

EXPECTED = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}

REPLACED = {
    "launcher": "agenttrain starts the jobs itself; sweep.parallel=2 runs two at a time, and "
    "agenttrain submit -m makes them an array of SLURM's",
    "sweeper": "agenttrain chooses the runs itself; sweep.trials=20 draws so many at random, and "
    "sweep=optuna searches by sweep.objective",
}
"""Parts of Hydra whose plugins have no effect on a sweep, and the settings in their place."""


@contextmanager
def explained(
    overrides: Sequence[str], groups: Callable[[], Mapping[str, Sequence[str]]]
) -> Iterator[None]:
    """Turn errors of Hydra and OmegaConf inside into a ConfigError about the typed `overrides`.

    Example: ``algorithm.group_sise=4`` becomes "algorithm.group_sise=4: unknown key (did you mean
    'algorithm.group_size'?)". `groups` gives every group's options.
    """
    try:
        yield
    except AgenttrainError:
        raise
    except Exception as error:
        raise ConfigError(_explain(error, overrides, groups())) from error


def _explain(
    error: Exception, overrides: Sequence[str], groups: Mapping[str, Sequence[str]]
) -> str:
    # What is wrong in a file has no cause, only a context.
    chain = (error, error.__cause__, error.__context__)
    broken = next((e for e in chain if isinstance(e, MarkedYAMLError)), None)
    cause = next((e for e in chain if isinstance(e, OmegaConfBaseException) and e.full_key), None)
    if broken is not None:
        mark = broken.problem_mark or broken.context_mark
        where = f"{mark.name}, line {mark.line + 1}" if mark else "a YAML file"
        return f"{where}: is no YAML: {broken.problem or broken.context}"
    if isinstance(error, OverrideParseException):
        if "=" not in error.override and not error.override.startswith("~"):
            return f"{error.override}: settings are written key=value"
        typed = error.override.removeprefix("++")  # which open_keys puts there
        return (
            f"{typed}: cannot be read; put a value with blanks, commas, brackets or = in "
            "quotes that the shell leaves alone, e.g. 'model.path=\"a, b\"'"
        )
    if isinstance(error, MissingConfigException):
        return _unknown_option(error, groups)
    if cause is not None:
        return _about_key(cause, str(error), overrides, groups)
    return _other(error, overrides, groups)


def setting_keys(cls: type = RunConfig, prefix: str = "") -> Iterator[str]:
    """Yield every key of the configuration, e.g. `algorithm` and `algorithm.group_size`."""
    types = get_type_hints(cls)
    for field in fields(cls):
        yield prefix + field.name
        if is_dataclass(types[field.name]):
            yield from setting_keys(types[field.name], f"{prefix}{field.name}.")
        elif cls is RunConfig and field.name == "engine":
            yield from (f"engine.{key}" for key in known_keys())


def suggest_key(key: str, groups: Iterable[str] = ()) -> str:
    """Suggest the setting that was probably meant: of the same name elsewhere, or spelt alike.

    Example: ``suggest_key("lr") == " (did you mean 'optimizer.lr'?)"``
    """
    known = [*setting_keys(), *groups]
    section, leaf = _split(key)
    beside = {_split(name)[1]: name for name in known if _split(name)[0] == section}
    anywhere = {_split(name)[1]: name for name in known}
    for names in (beside, anywhere):
        near = get_close_matches(leaf, names, n=1)
        if near:
            return f" (did you mean '{names[near[0]]}'?)"
    return ""


def _split(key: str) -> tuple[str, str]:
    section, _, leaf = key.rpartition(".")
    return section, leaf


def _about_key(
    cause: OmegaConfBaseException,
    text: str,
    overrides: Sequence[str],
    groups: Mapping[str, Sequence[str]],
) -> str:
    key = str(cause.full_key)
    # The override that is to blame, else the key and the file that Hydra names.
    setting = key.partition("[")[0]
    file = re.match(r"In '([^']+)'", text)
    where = f"{setting} (in {file[1]}.yaml)" if file else setting
    for override in overrides:
        name = override.partition("=")[0].lstrip("+~")
        if name == setting or name.startswith(setting + "."):
            where = override
            break
    chosen = where.partition("=")[0].partition(" ")[0].lstrip("+")
    if key in groups and key == chosen and key not in setting_keys():
        return (
            f"{where}: its file lacks the first line `# @package _global_`, so that its keys would "
            f"stand in a section {key!r}; put that line at its top"
        )
    if isinstance(cause, MissingMandatoryValue):
        section = key.rpartition(".")[0].replace(".", "/")
        section = section if section in groups else key.partition(".")[0]
        # The options `file`, `folder` and `own` are those that ask for a path.
        paths = ("file", "folder", "own")
        options = [name for name in groups.get(section, ()) if name not in paths]
        remedy = f"set it: {key}=…"
        if options and section != "reward":  # another reward would leave the key as it is
            remedy += f", or choose {section}={'|'.join(options)}"
        return f"{key}: has no value; {remedy}"
    if isinstance(cause, InterpolationKeyError):
        return f"{where}: {_first_line(cause)}; write the whole key, e.g. ${{optimizer.lr}}"
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        if (new := moved_key(where)) is not None:
            return f"{where}: is {new} now"
        section = ".".join(key.split(".")[1:2]) if key.startswith("hydra.") else ""
        if section in REPLACED:
            return f"{where}: {REPLACED[section]}"
        if key.startswith("hydra."):
            return f"{where}: Hydra has no such key; `agenttrain --cfg hydra` shows those it has"
        hint = suggest_key(key, groups)
        if not hint:
            section = _split(key)[0]
            beside = [_split(name)[1] for name in setting_keys() if _split(name)[0] == section]
            hint = f"; the keys {f'of {section} ' if section else ''}are: {', '.join(beside)}"
        return f"{where}: unknown key{hint}"
    return f"{where}: {_expected(key, getattr(cause, 'value', None)) or _first_line(cause)}"


def _expected(key: str, value: object) -> str | None:
    """Return what the key takes, e.g. "expected one of: group, leave_one_out"; None: unknown."""
    cls: Any = RunConfig
    for part in key.split("."):
        if not is_dataclass(cls):
            return None
        cls = get_type_hints(cls).get(part)
    optional = NoneType in get_args(cls)
    if get_origin(cls) is UnionType:
        (cls,) = (kind for kind in get_args(cls) if kind is not NoneType)
    tail = ", or null" if optional else ""
    if isinstance(cls, type) and issubclass(cls, Enum):
        names = [member.name for member in cls]
        return f"expected one of: {', '.join(names)}{tail}{did_you_mean(str(value), names)}"
    if get_origin(cls) in (list, tuple):
        return f"expected a list, e.g. {key}=[…]"
    return f"expected {EXPECTED[cls]}{tail}" if cls in EXPECTED else None


def _unknown_option(error: MissingConfigException, groups: Mapping[str, Sequence[str]]) -> str:
    missing = error.missing_cfg_file or ""
    missing = missing if isinstance(missing, str) else missing[0]
    group, _, option = missing.rpartition("/")
    # Folders beside the user that have the file: "; my_conf/experiment/mine.yaml is found with
    # --config-dir my_conf"
    files = [Path(f"{missing}.yaml"), *sorted(Path().glob(f"*/{missing}.yaml"))]
    depth = len(Path(missing).parts)
    others = "".join(
        f"; {file} is found with --config-dir {quote(str(file.parents[depth - 1]))}"
        for file in files
        if file.is_file()
    )
    if not group:
        remedy = others or "; name one of conf/, or the folder that has it: --config-dir <folder>"
        return f"--config-name {option}: there is no {option}.yaml where it is looked for{remedy}"
    if group in ("hydra/launcher", "hydra/sweeper"):
        return f"{group}={option}: {REPLACED[group.removeprefix('hydra/')]}"
    if group not in groups:
        return _first_line(error)
    hint = "" if others else did_you_mean(option, groups[group])
    known = ", ".join(groups[group])
    return f"{group}={option}: no such option{hint}{others}; the options are: {known}"


def _other(error: Exception, overrides: Sequence[str], groups: Mapping[str, Sequence[str]]) -> str:
    present = re.match(r"Could not append to config\. An item is already at '([^']+)'", str(error))
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        if override.startswith("~") and "Could not delete" in str(error):
            remedy = f"; to leave all of it out write {key}=[]" if key in groups else ""
            return f"{override}: there is nothing of that name to leave out{remedy}"
        if key in groups and value == "null":
            options = ", ".join(groups[key])
            return f"{override}: a group takes an option ({options}); ~{key} leaves it out"
        if override.startswith("+") and key in groups:
            return f"{override}: the group is there already; write {key}={value}"
        if present and override.startswith("+") and key == present[1]:
            return f"{override}: the key is there already; write {key}={value}"
        if f"Ambiguous value for argument '{override}'" in str(error):
            return (
                f"{override}: several values; add -m to run one after the other, or write "
                f"{key}=[{value}] for a list"
            )
    return _first_line(error)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
