"""JMESPath expressions in settings: compiled once; errors name the position of the mistake."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import jmespath
import regex
from jmespath.exceptions import JMESPathError, ParseError
from jmespath.functions import Functions, signature

MATCH_S = 1.0
"""Seconds that one `match` may take."""


class _MoreFunctions(Functions):
    """Functions that columns of public datasets need and JMESPath lacks."""

    @signature({"types": ["string"]}, {"types": ["string"]})
    def _func_split(self, text: str, separator: str) -> list[str]:
        """``split('5 + 7 #### 12', '#### ')[-1]`` is ``'12'``."""
        return text.split(separator)

    @signature({"types": ["string"]})
    def _func_from_json(self, text: str) -> Any:
        """``from_json('[1, 2]')`` is ``[1, 2]``, for columns that hold JSON as a text."""
        return json.loads(text)

    @signature({"types": ["string"]}, {"types": ["string"]})
    def _func_match(self, text: str, pattern: str) -> str | None:
        """``match('boxed{12}', 'boxed.(.*).$')`` is ``'12'``: group 1, or all; null for none."""
        match = regex.search(pattern, text, timeout=MATCH_S)
        return None if match is None else match[1 if match.re.groups else 0]


OPTIONS = jmespath.Options(custom_functions=_MoreFunctions())


@dataclass(frozen=True, slots=True)
class Expression:
    """A compiled expression and its text."""

    text: str
    parsed: Any
    """The expression as `jmespath.compile` returns it."""

    def search(self, value: Any) -> Any:
        """Return its value on plain data; raise ValueError if it cannot be computed."""
        try:
            return self.parsed.search(value, OPTIONS)
        except (JMESPathError, regex.error, TimeoutError, TypeError, ValueError) as error:
            problem = str(error).partition("\n")[0]
            raise ValueError(f"{self.text!r}: {problem}") from error


def compiled(text: object, key: str) -> Expression:
    """Compile the expression of the setting `key`; a ValueError has the position of the mistake.

    Example: ``compiled("row.answer", "data.map.answer").search({"row": {"answer": 7}}) == 7``.
    Besides JMESPath's own functions it has `split(text, separator)`, `match(text, regex)` and
    `from_json(text)`.
    """
    if not isinstance(text, str):
        raise ValueError(f"{key}={text}: must be a JMESPath expression, given as a text")
    try:
        expression = Expression(text, jmespath.compile(text))
    except JMESPathError as error:
        where = ": " + str(error).partition("\n")[0]
        if isinstance(error, ParseError) and error.lex_position is not None:
            position = min(error.lex_position, len(text))
            near = f"before {text[position:][:20]!r}" if text[position:] else "at its end"
            where = f" (position {position}, {near})"
        raise ValueError(f"{key}={text}: is no JMESPath expression{where}") from error
    _check_functions(expression.parsed.parsed, f"{key}={text}")
    return expression


def _check_functions(node: dict[str, Any], where: str) -> None:
    """Raise ValueError for an unknown function; JMESPath itself only does so at the first use."""
    function_names = sorted(_MoreFunctions.FUNCTION_TABLE)
    if node.get("type") == "function_expression" and node["value"] not in function_names:
        raise ValueError(
            f"{where}: there is no function {node['value']}(); there are: "
            f"{', '.join(function_names)}"
        )
    for child in node.get("children", ()):
        if isinstance(child, dict):
            _check_functions(child, where)
