"""Permission for what the config.yaml of a saved run names besides data.

A run folder may come from somebody else: a `_target_` in it is imported and called, an MCP server's
command started, an address sent the run's text. Such values (`untrusted.py`) need `trust=true`, or
a yes on a terminal, unless the run is the user's own: every run signs the sections that have one,
with a key that only the user has.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain, combinations
from typing import Any

from agenttrain.settings.command_line import TRUSTED
from agenttrain.settings.untrusted import (
    UntrustedValue,
    bundled_targets,
    resolvers,
    untrusted_values,
)
from agenttrain.types import ConfigError
from agenttrain.utils.files import PACKAGE
from agenttrain.utils.moved import RENAMED
from agenttrain.utils.names import did_you_mean
from agenttrain.utils.redaction import hide_in_settings
from agenttrain.utils.signing import sign, verifies

SIGNATURE, SIGNED = "signature", "signed"
"""Keys of `provenance` in config.yaml: the signature, and the sections that it covers."""
LONGEST_SHOWN = 200
"""Characters of a value that are printed."""
ALWAYS_SIGNED = ("tools", "environment", "reward", "data")
SOMETIMES_SIGNED = (
    *("algorithm.objective", "engine", "rollout.compaction", "agent", "user", "tracker"),
)
"""Sections that the signature of an older version covers, which has no list of sections: all of
ALWAYS_SIGNED, and those of SOMETIMES_SIGNED that this version regarded as code."""


def _exists_in_package(path: str) -> bool:
    """Return True if this package has a dotted path; imports nothing.

    Example: ``agenttrain.tools.toolbox.Toolbox`` exists, as the file tools/toolbox.py has the word
    ``Toolbox``. The longest part of the path that is a module counts.
    """
    parts = path.split(".")[1:]
    for depth in range(len(parts), -1, -1):
        module = PACKAGE.joinpath(*parts[:depth])
        for file in (module.with_suffix(".py"), module / "__init__.py"):
            if file.is_file():
                text = file.read_text(encoding="utf-8")
                return depth == len(parts) or re.search(rf"\b{parts[depth]}\b", text) is not None
    return False


def check_trusted(
    argument: str,
    values: Sequence[UntrustedValue | str],
    *,
    trust: bool,
    what: str = "its config.yaml",
) -> None:
    """Raise ConfigError with the values, unless there are none or the user allows them.

    The user allows them with `trust`, or by answering yes on a terminal. `argument` is the typed
    argument that leads to them, `what` the file or section they are in. Also raises ConfigError for
    a path inside agenttrain that this version does not have.
    """
    for value in values:
        if isinstance(value, UntrustedValue):
            _check_bundled_path(argument, value, what)
    if trust or not values:
        return
    listed = "\n".join(f"  {_shown(value)}" for value in values)
    problem = (
        f"{argument}: {what} names code that is not bundled with agenttrain, or other values that "
        f"are not plain data; they would run as you, or get the run's data:\n{listed}"
    )
    if sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty():
        print(f"agenttrain: {problem}\nLet it run? [y/N] ", end="", file=sys.stderr)
        sys.stderr.flush()
        with suppress(EOFError):
            if input().strip().lower() in ("y", "yes"):
                return
        raise ConfigError(f"{argument}: not run")
    raise ConfigError(
        f"{problem}\nread it, and add {TRUSTED} if you trust who made this folder\n"
        f"a run of your own without a signature: resume it with {TRUSTED} once, which signs it"
    )


def _check_bundled_path(argument: str, value: UntrustedValue, what: str) -> None:
    """Raise ConfigError for a dotted path inside agenttrain that this version does not have.

    `what` ends with the name of the file that has the path: ``its config.yaml``.
    """
    path = value.value
    if not isinstance(path, str) or not re.fullmatch(r"agenttrain(\.[A-Za-z_]\w*)+", path):
        return
    # RENAMED has the paths of earlier versions that still have a meaning.
    if path not in RENAMED and not _exists_in_package(path):
        file = what.split()[-1]
        # Suggest a bundled class or function, or an argument's value in conf/, which may be a
        # dotted path too: {"agenttrain.….Sql": {"connect": ["agenttrain.data.…"]}}.
        bundled: list[Any] = list(bundled_targets())
        for values_by_argument in bundled_targets().values():
            for values in values_by_argument.values():
                bundled += values
        raise ConfigError(
            f"{argument}: {value.key}={path}: is no name of this version of agenttrain"
            f"{did_you_mean(path, map(str, bundled))}; write today's name into "
            f"{file}, or use the version that wrote it"
        )


def _shown(value: UntrustedValue | str) -> str:
    """Return a value as one line without secrets: ``tools.mcp.command=[npx, server]``.

    A `str` is a complete line of this form, in which secrets are still to be hidden.
    """
    if isinstance(value, str):
        return hide_in_settings(value)
    shown = _without_secrets(value)
    text = f"[{', '.join(map(str, shown))}]" if isinstance(shown, list) else str(shown)
    line = f"{value.key}={text}".replace("\n", "\\n")
    return line if len(line) <= LONGEST_SHOWN else f"{line[:LONGEST_SHOWN]}…"


def _without_secrets(value: UntrustedValue) -> Any:
    """Return the value with its secrets hidden, as `hide_in_settings` does for a section.

    All values of a section `env` are secrets, so the name of the section has to be shown to it.
    """
    name = value.path[-1]
    section = value.path[-2] if len(value.path) > 1 else ""
    return hide_in_settings({section: {name: value.value}})[section][name]


def signature(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `provenance` with which this user signs the settings.

    Signed are the sections that hold more than plain data: code, commands and addresses
    (`untrusted_values`), and texts that read outside the settings (`resolvers`), such as
    ``${oc.env:HOME}``. A later command runs them without asking if the signature is valid.

    Example: ``{"signed": ["tools", "servers"], "signature": "5a…"}``. The signature is None if all
    values are data, or the user's key can be neither read nor made.
    """
    values = chain(untrusted_values(plain), resolvers(plain))
    sections = list(dict.fromkeys(value.path[0] for value in values))
    content = _signed_content(plain, sections)
    return {SIGNED: sections, SIGNATURE: sign(content) if sections else None}


def own_sections(plain: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the paths of the sections that this user signed; empty without a valid signature.

    `plain` is a config.yaml with its `provenance`. Example: ``[("tools",), ("servers",)]``.
    """
    provenance = plain.get("provenance")
    if not isinstance(provenance, Mapping):
        return []
    saved_signature, sections = provenance.get(SIGNATURE), provenance.get(SIGNED)
    if isinstance(sections, list):  # top-level sections, as `signature` lists them
        if verifies(_signed_content(plain, sections), saved_signature):
            return [(str(name),) for name in sections]
        return []
    # A signature of an older version names no sections: find the set that it covers. Some of these
    # are below the top level: algorithm.objective.
    for count in range(len(SOMETIMES_SIGNED) + 1):
        for extra in combinations(SOMETIMES_SIGNED, count):
            covered = (*ALWAYS_SIGNED, *extra)
            if verifies({name: _value_at(plain, name) for name in covered}, saved_signature):
                return [tuple(name.split(".")) for name in covered]
    return []


def _signed_content(plain: Mapping[str, Any], sections: Sequence[Any]) -> Any:
    """Return the names and contents of these sections, from which their signature is computed."""
    return ["config.yaml", [[name, plain.get(name)] for name in sections]]


def _value_at(plain: Mapping[str, Any], key: str) -> Any:
    value: Any = plain
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
