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
    """Purpose of the edit, given once per fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """Added tokens that a model knows from ordinary text.

    Example: ``Plain(why="HTML", tokens=("<table>", "</table>"))``
    """

    why: str
    tokens: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family: its templates, their fixes and its tokens."""

    models: str = ""
    """Which models these are, for people."""
    response: str = "hermes"
    """Name of the response schema."""
    tools: bool = True
    """The template, once fixed, renders tools."""
    marks: tuple[str, ...] = ()
    """Texts in the source of every template of this family, read as `Edit.find` is; without any,
    the family is never recognised by its source."""
    absent: tuple[str, ...] = ()
    """Texts that no template of this family holds."""
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
    """Compile a pattern of `find` in a template, whatever its blanks, quotes and dashes."""
    parts = []
    for token in _TOKEN.finditer(find):
        if tag := token["tag"]:
            opens = tag.startswith("{")
            mark = re.escape(tag.strip().replace("-", ""))
            parts.append(rf"{mark}[-+]?\s*" if opens else rf"\s*[-+]?{mark}")
        elif token["quote"]:
            parts.append("['\"]")
        elif token["blank"]:
            parts.append(r"\s*")
        elif key := token["key"]:
            parts.append(rf"(?:\.{key}\b|\[['\"]{key}['\"]\])")
        else:
            parts.append(re.escape(token["other"]))
    return re.compile("".join(parts))


def parse_family(name: str, content: Mapping[str, Any]) -> Family:
    """Return the family that the YAML of its file describes.

    Raises ChatError with the key that is wrong.
    """
    known = {field.name for field in fields(Family)}
    if unknown := sorted(set(map(str, content)) - known):
        raise ChatError(
            f"chat_template={name}: family.{unknown[0]} is no key; they are "
            f"{', '.join(sorted(known))}"
        )
    lists = {
        key: tuple(content.get(key) or ())
        for key in ("marks", "absent", "originals", "control", "added")
    }
    try:
        fixes = tuple(tuple(Edit(**edit) for edit in fix) for fix in content.get("fixes") or ())
    except TypeError as error:
        raise ChatError(f"chat_template={name}: family.fixes: {error}") from error
    try:
        plain = tuple(
            Plain(why=str(entry["why"]), tokens=tuple(map(str, entry["tokens"])))
            for entry in content.get("plain") or ()
        )
    except (KeyError, TypeError) as error:
        raise ChatError(
            f"chat_template={name}: family.plain: must be a list of {{why: …, tokens: […]}}"
        ) from error
    return Family(**{**content, **lists, "fixes": fixes, "plain": plain})


@cache
def families() -> dict[str, Family]:
    """Read the families of ``conf/chat_template/``, by name."""
    by_name = {}
    for file in sorted((conf_folder() / "chat_template").glob("*.yaml")):
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        if content and "family" in content:
            by_name[content["name"]] = parse_family(content["name"], content["family"])
    return by_name
