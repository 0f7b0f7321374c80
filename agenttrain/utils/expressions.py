"""JMESPath expressions in settings: compiled once; errors name the position of the mistake."""

from __future__ import annotations

import json
from collections.abc import Sequence
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

    def search(self, value: Any) -> Any:
        """Return its value on plain data; ValueError for what it cannot compute."""
        try:
            return self.parsed.search(value, OPTIONS)
        except (JMESPathError, regex.error, TimeoutError, ValueError) as error:
            raise ValueError(f"{self.text!r}: {_first_line(error)}") from error


def compiled(text: object, key: str) -> Expression:
    """Compile the expression of the setting `key`; ValueError ``key=…: …`` says where it is wrong.

    Example: ``compiled("row.answer", "data.map.answer").search({"row": {"answer": 7}}) == 7``. The
    functions `split(text, separator)`, `match(text, regex)` and `from_json(text)` are added to
    JMESPath's own.
    """
    if not isinstance(text, str):
        raise ValueError(f"{key}={text}: must be a JMESPath expression, given as a text")
    try:
        expression = Expression(text, jmespath.compile(text))
    except JMESPathError as error:
        where = f": {_first_line(error)}"
        if isinstance(error, ParseError) and error.lex_position is not None:
            position = min(error.lex_position, len(text))
            near = f"before {text[position:][:20]!r}" if text[position:] else "at its end"
            where = f" (position {position}, {near})"
        raise ValueError(f"{key}={text}: is no JMESPath expression{where}") from error
    _refuse_unknown_functions(expression.parsed.parsed, f"{key}={text}")
    return expression


def _refuse_unknown_functions(node: dict[str, Any], where: str) -> None:
    """Raise ValueError for them; JMESPath itself does only when the expression is first used."""
    if node.get("type") == "function_expression" and node["value"] not in _known():
        raise ValueError(
            f"{where}: there is no function {node['value']}(); there are: {', '.join(_known())}"
        )
    for child in node.get("children", ()):
        if isinstance(child, dict):
            _refuse_unknown_functions(child, where)


def _known() -> Sequence[str]:
    return sorted(_MoreFunctions.FUNCTION_TABLE)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
