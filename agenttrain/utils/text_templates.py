"""Texts with columns in them, e.g. ``{{ question }} Answer with a number.``

Jinja's double braces, because single ones are LaTeX's: ``\\boxed{answer}`` must stay text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agenttrain.utils.names import did_you_mean

ENVIRONMENT = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)


class TextTemplate:
    """A compiled text; `fields` are the columns that it uses.

    Example: ``TextTemplate("{{ a }}!", "data.prompt").fill({"a": 3}) == "3!"``
    """

    def __init__(self, text: object, key: str) -> None:
        """Compile the text; raises ValueError ``key=…: …`` with the line of a mistake."""
        if not isinstance(text, str):
            raise ValueError(
                f"{key}={text}: must be a text; put it in quotes that the shell leaves alone, e.g. "
                f"'{key}=\"{{{{ question }}}} Think first.\"'"
            )
        self._key = key
        try:
            self._template = ENVIRONMENT.from_string(text)
            self.fields = tuple(sorted(meta.find_undeclared_variables(ENVIRONMENT.parse(text))))
        except TemplateSyntaxError as error:
            raise ValueError(
                f"{key}: is no template: {error.message} (line {error.lineno})"
            ) from error

    def fill(self, values: Mapping[str, Any]) -> str:
        """Return the text with the values; raises ValueError for a field without a value."""
        for name in self.fields:
            if name not in values:
                raise ValueError(
                    f"{self._key} has {{{{ {name} }}}}, and the row has no such column"
                    f"{did_you_mean(name, values)}; it has: {', '.join(values) or 'none'}"
                )
        try:
            return self._template.render(values)
        except (TemplateError, TypeError, ArithmeticError) as error:
            raise ValueError(f"{self._key}: {error}") from error
