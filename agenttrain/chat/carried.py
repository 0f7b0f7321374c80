"""Where a template comes from before any fix: a tokenizer that may carry several, or a file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agenttrain.chat.encoding import ChatError
from agenttrain.chat.render import syntax_problem

TOOL_USE, DEFAULT = "tool_use", "default"
"""Names under which tokenizers carry templates with and without tools."""
FILE_REMEDY = "set `chat_template=file chat_template.path=<file.jinja>`"
# Marks what the assistant writes, for transformers' own masks; a block of a single tag each.
_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")


def carried_template(carried: Any, *, tools: bool) -> tuple[str, str | None]:
    """The template that a tokenizer carries, and in words which one, where it carries several.

    `carried` is a text, a mapping, or a list of ``{"name": …, "template": …}``. As transformers
    does, a run with tools takes the one named `tool_use`, where there is one. Raises ChatError.
    """
    if isinstance(carried, str) and carried:
        return carried, None
    if isinstance(carried, list | tuple):
        carried = {entry["name"]: entry["template"] for entry in carried}
    if not carried:
        raise ChatError(f"model.path: the tokenizer carries no chat template; {FILE_REMEDY}")
    names = ", ".join(sorted(carried))
    for name in (TOOL_USE, DEFAULT) if tools else (DEFAULT,):
        if name in carried:
            only = "" if len(carried) > 1 else ", and no other"
            run = "a run with tools" if tools else "a run without tools"
            return carried[name], (
                f"of the templates that the tokenizer carries ({names}{only}), {run} takes {name}; "
                "it is the one that is saved with checkpoints"
            )
    raise ChatError(
        f"model.path: the tokenizer carries the chat templates {names}, and none named default; "
        f"save the one to train with as a file and {FILE_REMEDY}"
    )


def read_template(path: str) -> str:
    """The Jinja file of `chat_template.path`. Raises ChatError where it is none."""
    file = Path(path).expanduser()
    if file.is_dir():
        raise ChatError(f"chat_template.path={path}: is a folder; name the file in it")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ChatError(f"chat_template.path={path} cannot be read: {error}") from error
    try:
        _ENVIRONMENT.parse(_GENERATION.sub("", text))
    except TemplateSyntaxError as error:
        raise ChatError(f"chat_template.path={path}: {syntax_problem(error)}") from error
    return text


_ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
)
