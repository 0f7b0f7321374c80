"""Docstrings of tools, in Google's form: what the tool does, and what its parameters mean."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_DESCRIPTION = re.compile(r"^(.*?)[\n\s]*(Args:|Returns:|Raises:|\Z)", re.DOTALL)
"""The text above the first heading: ``Look up a key.``"""
_ARGS = re.compile(r"\n\s*Args:\n(.*?)[\n\s]*(Returns:|Raises:|\Z)", re.DOTALL)
"""The lines below ``Args:``, up to the next heading."""
# " (int, optional)", with one level of parentheses inside: " (tuple(int), optional)".
_TYPE = r"(?:[ \t]*\((?:[^()\n]|\([^()\n]*\))*\))?"
_ARGUMENT = re.compile(
    rf"(?:^|\n)([ \t]*)(\w+){_TYPE}:\s*"  # a name, perhaps with a type: `a (int, optional):`
    # The description ends before the next name that is not indented more.
    rf"(.*?)\s*(?=\n(?!\1[ \t])[ \t]*\w+{_TYPE}:|\Z)",
    re.DOTALL,
)
"""A parameter below ``Args:``: its indent, its name, and its description, which may have more
lines. A type after the name is skipped."""
_OTHER_NAME = re.compile(
    r"^([ \t]*)(?:Args|Arguments|Parameters|Params|Keyword Args|Keyword Arguments)[ \t]*:[ \t]*$",
    re.MULTILINE,
)
"""Headings that are read as `Args:`, in a docstring without a readable `Args:`."""
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)
"""The end of ``The unit. (choices: ["C", "F"])``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Docstring:
    """The parts of a tool's docstring."""

    text: str
    """All of it, with `Args:` as the heading of the parameters."""
    description: str
    """What the tool does: the text above the first heading."""
    parameters: Mapping[str, Mapping[str, Any]]
    """Parameter -> keywords of its schema: `description`, and `enum` if the docstring lists its
    values as ``(choices: ["a", "b"])``."""


def read_docstring(text: str) -> Docstring:
    """Split a Google docstring into its description and the descriptions of its parameters.

    Reads what transformers' `get_json_schema` reads, and two more forms: parameters with a type,
    ``limit (int, optional): …``, whose type is ignored, and other headings, such as `Parameters:`.
    Raises ValueError for choices that are not JSON.
    """
    text = re.sub(r"\r\n?", "\n", text.strip())
    if _ARGS.search(text) is None:  # a heading of another name, e.g. `Parameters:`
        text = _OTHER_NAME.sub(r"\1Args:", text, count=1)
    description = _DESCRIPTION.search(text)
    section = _ARGS.search(text)
    parameters: dict[str, dict[str, Any]] = {}
    if section is not None:
        lines = "\n".join(line for line in section[1].split("\n") if line.strip())
        for _indent, name, lines_of_meaning in _ARGUMENT.findall(lines):
            meaning = re.sub(r"\s*\n+\s*", " ", lines_of_meaning.strip())
            parameters[name] = {"description": meaning}
            if (choices := _CHOICES.search(meaning)) is not None:
                values = _choice_values(choices[1])
                parameters[name] = {
                    "enum": [
                        value.strip() if isinstance(value, str) else value for value in values
                    ],
                    "description": meaning[: choices.start()].strip(),
                }
    return Docstring(
        text=text, description=description[1].strip() if description else "", parameters=parameters
    )


def _choice_values(text: str) -> list[Any]:
    """Return the values of a list in JSON. Raises ValueError."""
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, list):
        raise ValueError(f'(choices: {text}): must be a list in JSON, e.g. (choices: ["a", "b"])')
    return values
