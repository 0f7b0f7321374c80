"""Model families as data: how their templates are known, fixed and parsed.

A family is one file in ``conf/chat_template/``, whose key `family` holds the fields of `Family`;
a user's own file in ``<--config-dir>/chat_template/`` is read the same way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import yaml

from agenttrain.chat.encoding import ChatError
from agenttrain.config.groups import conf_folder

# Quotes, tags with or without their dash, attributes and items, blanks: what forks change.
_TOKEN = re.compile(
    r"(?P<tag>\{[%{]-?\s*|\s*-?[%}]\})|(?P<quote>['\"])|(?P<blank>\s+)|(?<=\w)\.(?P<key>[A-Za-z_]\w*)"
    r"|(?P<other>.)",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One change of a template: `put` for `find`, or `put` before all of it where `find` is empty.

    Example: ``Edit(why="keeps past reasoning", find="loop.index0 > ns.last and reasoning",
    put="reasoning")``
    """

    put: str
    find: str = ""
    """Read without regard to blanks, kinds of quotes, dashes of tags, and `.key` or `['key']`."""
    why: str = ""
    """What it is good for, said once per fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """Added tokens that a model knows from ordinary text.

    Example: ``Plain(why="HTML", tokens=("<table>", "</table>"))``
    """

    why: str
    tokens: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What is known of one family."""

    models: str = ""
    """Which models these are, for people."""
    response: str = "hermes"
    """Name of the response schema."""
    tools: bool = True
    """Whether the template, fixed, renders tools."""
    marks: tuple[str, ...] = ()
    """What the source of a template of this family holds, read as `Edit.find` is; without any,
    the family is never recognised by its source."""
    absent: tuple[str, ...] = ()
    """What it does not hold."""
    fixes: tuple[tuple[Edit, ...], ...] = ()
    """Ways of fixing its revisions; the first whose every edit applies is taken."""
    originals: tuple[str, ...] = ()
    """Names of its templates in `originals.py`."""
    control: tuple[str, ...] = ()
    """Special tokens, for `agenttrain templates`: end of sequence first."""
    added: tuple[str, ...] = ()
    """Added tokens that are not special, for `agenttrain templates`."""
    bos: str | None = None
    plain: tuple[Plain, ...] = ()
    """Added tokens that are ordinary text: all others of the tokenizer, but those of white space,
    are control tokens, which no text of a user or a tool can become."""


def pattern(find: str) -> re.Pattern[str]:
    """What finds `find` in a template, whatever its blanks, quotes and dashes."""
    parts = []
    for found in _TOKEN.finditer(find):
        if tag := found["tag"]:
            opens = tag.startswith("{")
            mark = re.escape(tag.strip().replace("-", ""))
            parts.append(rf"{mark}[-+]?\s*" if opens else rf"\s*[-+]?{mark}")
        elif found["quote"]:
            parts.append("['\"]")
        elif found["blank"]:
            parts.append(r"\s*")
        elif key := found["key"]:
            parts.append(rf"(?:\.{key}\b|\[['\"]{key}['\"]\])")
        else:
            parts.append(re.escape(found["other"]))
    return re.compile("".join(parts))


def parse_family(name: str, found: Mapping[str, Any]) -> Family:
    """A family from the YAML of its file. Raises ChatError with the key that is wrong."""
    known = {field.name for field in fields(Family)}
    if unknown := sorted(set(map(str, found)) - known):
        raise ChatError(
            f"chat_template={name}: family.{unknown[0]} is no key; they are "
            f"{', '.join(sorted(known))}"
        )
    lists = {
        key: tuple(found.get(key) or ())
        for key in ("marks", "absent", "originals", "control", "added")
    }
    try:
        fixes = tuple(tuple(Edit(**edit) for edit in fix) for fix in found.get("fixes") or ())
    except TypeError as error:
        raise ChatError(f"chat_template={name}: family.fixes: {error}") from error
    try:
        plain = tuple(
            Plain(why=str(entry["why"]), tokens=tuple(map(str, entry["tokens"])))
            for entry in found.get("plain") or ()
        )
    except (KeyError, TypeError) as error:
        raise ChatError(
            f"chat_template={name}: family.plain: must be a list of {{why: …, tokens: […]}}"
        ) from error
    return Family(**{**found, **lists, "fixes": fixes, "plain": plain})


@cache
def families() -> dict[str, Family]:
    """The families of ``conf/chat_template/`` by name."""
    found = {}
    for file in sorted((conf_folder() / "chat_template").glob("*.yaml")):
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        if content and "family" in content:
            found[content["name"]] = parse_family(content["name"], content["family"])
    return found
