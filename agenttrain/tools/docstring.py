"""Docstrings of tools, in Google's form: what the tool does, and what its parameters mean."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_DESCRIPTION = re.compile(r"^(.*?)[\n\s]*(Args:|Returns:|Raises:|\Z)", re.DOTALL)
_ARGS = re.compile(r"\n\s*Args:\n(.*?)[\n\s]*(Returns:|Raises:|\Z)", re.DOTALL)
_TYPE = r"(?:[ \t]*\((?:[^()\n]|\([^()\n]*\))*\))?"
_ARGUMENT = re.compile(
    rf"(?:^|\n)([ \t]*)(\w+){_TYPE}:\s*"  # its name, perhaps with a type: `a (int, optional):`
    # Its description ends before the next name that is not indented more.
    rf"(.*?)\s*(?=\n(?!\1[ \t])[ \t]*\w+{_TYPE}:|\Z)",
    re.DOTALL,
)
_OTHER_NAME = re.compile(
    r"^([ \t]*)(?:Args|Arguments|Parameters|Params|Keyword Args|Keyword Arguments)[ \t]*:[ \t]*$",
    re.MULTILINE,
)
"""Headings that are read as Args, in a docstring that has no Args as transformers writes it."""
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Docstring:
    """A docstring's parts."""

    text: str
    description: str
    parameters: Mapping[str, Mapping[str, Any]]
    """Keywords of the schema by parameter: its description, and its values if the docstring lists
    them as ``(choices: ["a", "b"])``."""


def read_docstring(text: str) -> Docstring:
    """Read a docstring as transformers' `get_json_schema` does, with types and other headings too.

    Raises ValueError for choices that are not JSON.
    """
    text = re.sub(r"\r\n?", "\n", text.strip())
    if _ARGS.search(text) is None:
        text = _OTHER_NAME.sub(r"\1Args:", text, count=1)
    described = _DESCRIPTION.search(text)
    section = _ARGS.search(text)
    parameters: dict[str, dict[str, Any]] = {}
    if section is not None:
        lines = "\n".join(line for line in section[1].split("\n") if line.strip())
        for _, name, words in _ARGUMENT.findall(lines):
            words = re.sub(r"\s*\n+\s*", " ", words.strip())
            parameters[name] = {"description": words}
            if (choices := _CHOICES.search(words)) is not None:
                parameters[name] = {
                    "enum": [c.strip() if isinstance(c, str) else c for c in _values(choices[1])],
                    "description": words[: choices.start()].strip(),
                }
    return Docstring(
        text=text, description=described[1].strip() if described else "", parameters=parameters
    )


def _values(text: str) -> list[Any]:
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, list):
        raise ValueError(f'(choices: {text}): must be a list in JSON, e.g. (choices: ["a", "b"])')
    return values
