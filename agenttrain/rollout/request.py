"""What the engine is asked for one turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agenttrain.chat.template import Chat
from agenttrain.config.schema import RolloutConfig
from agenttrain.rollout.row_tools import RowTools
from agenttrain.rollout.seeds import derive_seed
from agenttrain.tools.coerce import plain_schema
from agenttrain.types import Sampling, Trajectory


def turn_sampling(
    sampling: Sampling,
    trajectory: Trajectory,
    chat: Chat,
    tools: RowTools,
    limits: RolloutConfig,
    *,
    budget: int,
) -> Sampling:
    """How the next turn is sampled: `sampling` is the rollout's, `budget` what the turn may have.

    Raises ChatError where the format of calls has no grammar, and the limits ask for one.
    """
    grammar = None
    if limits.structured_calls:
        grammar = grammar_of(chat, tools.schemas, after=trajectory.messages[-1]["role"])
    return replace(
        sampling,
        max_tokens=budget,
        seed=derive_seed(sampling.seed, trajectory.turns),
        stop_token_ids=sampling.stop_token_ids or chat.stop_token_ids,
        grammar=grammar,
    )


def grammar_of(chat: Chat, schemas: Sequence[Mapping[str, Any]], *, after: str = "user") -> str:
    """`Chat.grammar` of the tools whose arguments are read as `ArgumentSchema` reads them."""
    return chat.grammar([_plain(schema) for schema in schemas], after=after)


def _plain(schema: Mapping[str, Any]) -> dict[str, Any]:
    function = schema["function"]
    parameters = plain_schema(function.get("parameters") or {})
    return {**schema, "function": {"name": function["name"], "parameters": parameters}}
