"""Turns that were sent to the client of a rollout, and errors of their tool calls."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from agenttrain.agents.restarts import opening_of
from agenttrain.chat.wire.issued_turns import IssuedTurn, IssuedTurns
from agenttrain.tools.arguments import ArgumentSchema, InvalidArguments
from agenttrain.types import Message, Rollout, ToolCall, ToolError


@dataclass(slots=True, eq=False, kw_only=True)
class AgentTurn(IssuedTurn):
    """A turn with its place in the rollout."""

    trajectory: int
    """Index of its trajectory."""
    end: int
    """Position behind its last sampled token in the trajectory."""
    message_count: int
    """Messages of the trajectory up to and with it."""


@dataclass(slots=True, eq=False)
class Transcript:
    """A rollout with the turns that were issued in it."""

    rollout: Rollout
    prefix: str
    """Beginning of the names of its sessions in the engine."""
    trained: bool = False
    """True for the rollout's own turns, which are trained."""
    issued: IssuedTurns[AgentTurn] = field(default_factory=IssuedTurns)
    sessions: list[str] = field(default_factory=list)
    """Session of each trajectory."""
    seeds: list[int] = field(default_factory=list)
    """Seed of each trajectory."""
    growing: set[int] = field(default_factory=set)
    """Trajectories that a request in flight extends."""
    openings: Counter[str] = field(default_factory=Counter)
    """Number of trajectories that began with the same ids."""
    trajectory_count: int = 0
    """Trajectories that were planned, some of which may not have begun yet."""

    def is_tail(self, turn: AgentTurn) -> bool:
        """Return True if nothing follows a turn in its trajectory, and nothing is about to."""
        trajectory = self.rollout.trajectories[turn.trajectory]
        return trajectory.length == turn.end and trajectory.index not in self.growing

    def begins_alike(self, messages: Sequence[Message]) -> bool:
        """Return True if a conversation begins like the first that was issued."""
        turns = self.issued.turns
        return not turns or opening_of(messages) == opening_of(turns[0].conversation)


@lru_cache(maxsize=1024)
def _argument_schema(parameters: str) -> ArgumentSchema:
    """Return the schema of a tool's parameters, given as JSON: making one takes milliseconds."""
    return ArgumentSchema(json.loads(parameters))


def call_error(call: ToolCall, parameters: Mapping[str, Mapping[str, Any]]) -> ToolError | None:
    """Return why a tool could not have run a call, or None. `parameters` has schemas by tool."""
    if call.malformed is not None:
        return ToolError.malformed
    if call.name not in parameters:
        return ToolError.unknown_tool
    try:
        _argument_schema(json.dumps(parameters[call.name])).read(call.arguments)
    except InvalidArguments:
        return ToolError.invalid_arguments
    return None
