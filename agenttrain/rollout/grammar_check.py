"""Grammars of a run's tools, before anything is sampled (`rollout.structured_calls`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agenttrain.chat.encoding import ChatError
from agenttrain.chat.template import Chat
from agenttrain.engine.grammars import grammar_problem
from agenttrain.rollout.request import grammar_of

KEY = "rollout.structured_calls=true"


def check_grammars(chat: Chat, sets: Iterable[Sequence[Mapping[str, Any]]]) -> None:
    """Raise ChatError where calls of these sets of tools have no grammar, naming the first tool.

    A set that only exists later, a row's own behind those that are looked at, fails its rollouts.
    """
    chat.grammar(())  # whether calls have one at all
    tools = {repr(schema): schema for schemas in sets for schema in schemas}
    for schema in tools.values():
        if problem := grammar_problem(grammar_of(chat, [schema])):
            raise ChatError(
                f"{KEY}: no grammar can be made of the parameters of the tool "
                f"{schema['function']['name']!r}: {problem}; change its schema, or leave "
                "structured_calls out"
            )
