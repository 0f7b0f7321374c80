"""Settings as Python values -> overrides, as they are typed: what `agenttrain.train` takes.

    {"steps": 20, "optimizer": {"lr": 1e-4}, "tools": [add]}
    -> ["steps=20", "optimizer.lr=0.0001", "tools=[]", "tools.add._target_=my_tools.add"]

A function or class is written as its dotted name, so that config.yaml says what ran, and a resumed
run or another process of it can import the same. What was defined in a notebook or in the program
itself is ``__main__.add``, which is found in that process alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import isclass, isfunction
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

from agenttrain.data.config import SOURCES, SPLITS
from agenttrain.types import ConfigError
from agenttrain.utils.locate import locate
from agenttrain.utils.sections import shown

CHOSEN = ("tools", "reward")
"""Groups whose value is a list: it replaces the options that an experiment has chosen."""
IN_SOURCE = ("tools", "reward", "environment")
"""Sections of a source of a mixture whose value may be a list of functions and classes."""
FOLDERS = ("resume", "run")
"""Settings that are read from the command line as they are typed."""


def as_overrides(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the overrides of `settings`, whose keys are below `prefix` (``"optimizer."``).

    - A mapping sets keys of a section, whose other keys stay: ``{"optimizer": {"lr": 1e-4}}``.
    - A function or class becomes a `_target_`: ``{"user": my_user}`` is
      ``user._target_=my_module.my_user``.
    - A list may have names of options, functions and classes: ``{"tools": ["sql", add]}`` is
      ``tools=['sql']`` and ``tools.add._target_=my_module.add``.
    - Everything else is a value.

    Two things are replaced and not merged. Rows that are functions or classes replace the rows of
    the experiment (`_without_old_rows`). In a source of a mixture, a list of functions and classes
    replaces the source's tools, rewards or environments (`_of_list_in_source`).

    Raises ConfigError, with the key, for a value that cannot stand in config.yaml.
    """
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if key in FOLDERS and value is not None:  # read without Hydra's grammar: unquoted
            yield f"{key}={value}"
        elif _is_code(value):
            target = key if name == "_target_" else f"{key}._target_"
            yield f"{target}={dotted_name(value, target)}"
        elif isinstance(value, Mapping) and value:
            yield from _without_old_rows(key, value)
            yield from as_overrides(value, f"{key}.")
        elif _is_in_source(key) and isinstance(value, list | tuple):
            yield from _of_list_in_source(key, value)
        elif isinstance(value, list | tuple) and any(map(_is_code, value)):
            yield from _of_list(key, value)
        else:
            yield f"{key}={_literal(value, key)}"


def _without_old_rows(key: str, section: Mapping[str, Any]) -> Iterator[str]:
    """Yield the overrides that remove the experiment's rows, if `section` has rows of its own.

    Rows of its own are functions or classes: ``{"train": my_rows}`` at the key ``data``. Hydra
    merges mappings: the arguments of the experiment's rows would stay beside the new ones.
    """
    if key == "data" and any(map(_has_code, section.values())):
        yield "data=own"  # the option whose `train` and `test` are empty
    elif key == "data" and _has_own_rows(section.get("sources")):
        yield "data=mix"  # the option for sources, whose `train`, `test` and `sources` are empty
    elif _is_source(key) and any(_has_code(section.get(split)) for split in SPLITS):
        for split in SPLITS:
            yield f"{key}.{split}=null"


def _of_list(key: str, values: Sequence[Any]) -> Iterator[str]:
    """Yield the overrides of a list with functions or classes among the names of options."""
    options = [value for value in values if not _is_code(value)]
    if options or key in CHOSEN:
        yield f"{key}={_literal(options, key)}"
    yield from _by_name(key, [value for value in values if _is_code(value)])


def _is_in_source(key: str) -> bool:
    """Return True for a section such as ``data.sources.shop.tools``."""
    place, _, section = key.rpartition(".")
    return place.rpartition(".")[0] == SOURCES and section in IN_SOURCE


def _is_source(key: str) -> bool:
    """Return True for the section of a source, such as ``data.sources.shop``."""
    return key.rpartition(".")[0] == SOURCES


def _has_own_rows(sources: object) -> bool:
    """Return True for a section `data.sources` whose rows are functions or classes in some."""
    return isinstance(sources, Mapping) and any(
        isinstance(source, Mapping) and any(_has_code(source.get(split)) for split in SPLITS)
        for source in sources.values()
    )


def _of_list_in_source(key: str, values: Sequence[Any]) -> Iterator[str]:
    """Yield the overrides that make a source's section exactly these functions and classes.

    Example: ``[add]`` at ``data.sources.shop.tools`` is ``data.sources.shop.tools=null`` and
    ``data.sources.shop.tools.add._target_=my_module.add``. Hydra would merge the second one alone
    into the tools that the source has; the null erases these before.

    Raises ConfigError for the name of an option, which Hydra puts into a source by another kind of
    override (``+tools@<key>``).
    """
    options = [value for value in values if not _is_code(value)]
    if options:
        section = key.rpartition(".")[2]
        raise ConfigError(
            f"{key}={shown(options)}: a source's list has functions and classes only; choose an "
            f"option by the override +{section}@{key}.{options[0]}={options[0]}, and give what "
            "stands beside it by name: {'mine': …}"
        )
    yield f"{key}=null"
    if values:
        yield from _by_name(key, values)
    else:  # none at all; with null the source would have those of the run
        yield f"{key}={{}}"


def _by_name(key: str, functions: Sequence[Callable[..., Any]]) -> Iterator[str]:
    """Yield an override for each function and class: ``<key>.add._target_=my_module.add``.

    Raises ConfigError if two have the same name.
    """
    names = set[str]()
    for value in functions:
        name = value.__name__
        if name in names:
            raise ConfigError(
                f"{key}: two are called {name}; give them names: {key}={{'first': …, 'second': …}}"
            )
        names.add(name)
        yield f"{key}.{name}._target_={dotted_name(value, key)}"


def _is_code(value: object) -> bool:
    return isfunction(value) or isclass(value)


def _has_code(section: object) -> bool:
    """Return True for a function or class, alone or as a section with arguments.

    Example of a section: ``{"_target_": my_rows, "n": 100}``.
    """
    return _is_code(section.get("_target_") if isinstance(section, Mapping) else section)


def dotted_name(code: Callable[..., Any], key: str) -> str:
    """Return the path by which `locate` finds a function or class: ``my_tools.add``.

    Raises ConfigError, with `key`, if there is none: it was defined inside a function, is a lambda,
    or its name means something else by now.
    """
    path = f"{code.__module__}.{code.__qualname__}"
    if "<" in path:  # <lambda>, or <locals> of a function
        raise ConfigError(
            f"{key}={path}: has no name by which the run's config.yaml could name it; define it "
            "with def or class at the top of a module or of the notebook"
        )
    try:
        located = locate(path, key=key)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if located is not code:  # another run could not import the same
        raise ConfigError(
            f"{key}={path}: that name means something else now (is it decorated, or defined "
            "again?); give what it means now"
        )
    return path


def _literal(value: object, key: str) -> str:
    """Return a value as Hydra's grammar writes it: ``null``, ``[1,2]``, ``'a, b'``."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    # A number of numpy or of an enum has another repr than its value.
    if isinstance(value, Integral):
        return repr(int(value))
    if isinstance(value, Real):
        return repr(float(value))
    if isinstance(value, str | Path):
        return _text(str(value))
    if isinstance(value, list | tuple):
        return f"[{','.join(_literal(entry, key) for entry in value)}]"
    if isinstance(value, Mapping):
        pairs = (f"{name}:{_literal(entry, key)}" for name, entry in value.items())
        return f"{{{','.join(pairs)}}}"
    raise ConfigError(
        f"{key}={shown(value)}: config.yaml cannot hold a {type(value).__name__}; give plain "
        "values, and for an object its class or function with the arguments: "
        f"{key}={{'_target_': Search, 'path': 'docs/'}}"
    )


def _text(text: str) -> str:
    """Return a text as it is typed, with quotes if Hydra would read it as something else."""
    try:
        # In a list, where commas and brackets mean more than they do alone.
        plain = OverridesParser.create().parse_overrides([f"x=[{text}]"])[0].value() == [text]
    except HydraException:
        plain = False
    return text if plain and text else QuotedString(text=text, quote=Quote.single).with_quotes()
