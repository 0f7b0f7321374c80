"""A check that vLLM's grammar compiler takes a grammar, before there is an engine."""

from __future__ import annotations

import re

_PLACE = re.compile(r"^\[.*?\] \S+: ")
"""The time and the line of xgrammar's source that its messages begin with."""


def grammar_problem(grammar: str) -> str | None:
    """Return xgrammar's objection to a structural tag; None: none, or it is not installed.

    It comes with vLLM, so that it is where grammars are used.
    """
    try:
        import xgrammar
    except ImportError:
        return None
    try:
        xgrammar.Grammar.from_structural_tag(grammar)
    except Exception as error:  # its own, pydantic's, and C++'s as RuntimeError
        return _PLACE.sub("", str(error).strip()).strip() or type(error).__name__
    return None
