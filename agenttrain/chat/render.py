"""The text that a chat template makes of messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from agenttrain.chat.encoding import ChatError
from agenttrain.types import Message

USER: Message = {"role": "user", "content": "u"}
"""The first message of conversations that are rendered to learn how a template behaves."""
REFUSALS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)
"""Errors of a template, in words or by what it computes, for messages that it cannot render."""


def render(
    tokenizer: Any,
    template: str,
    messages: Sequence[Message],
    schemas: Sequence[dict] = (),
    *,
    generation_prompt: bool = False,
    kwargs: Mapping[str, Any],
) -> str:
    """Render messages with `template`; `kwargs` are the template's own variables.

    Raises ChatError when the template refuses the messages, or is no template.
    """
    try:
        return tokenizer.apply_chat_template(
            list(messages),
            tools=list(schemas) or None,
            chat_template=template,
            add_generation_prompt=generation_prompt,
            tokenize=False,
            **kwargs,
        )
    except TemplateSyntaxError as error:
        raise ChatError(f"{syntax_problem(error)}; correct it, or set chat_template") from error
    except REFUSALS as error:
        roles = [message.get("role") for message in messages]
        raise ChatError(
            f"the chat template refuses messages of the roles {roles}: {error}; change the "
            "messages or set chat_template"
        ) from error


def syntax_problem(error: TemplateSyntaxError) -> str:
    """A syntax error in words. Example: ``the chat template has a syntax error in line 3: …``"""
    message = (error.message or "").rstrip(".")
    return f"the chat template has a syntax error in line {error.lineno}: {message}"
