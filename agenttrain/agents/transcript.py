"""Turns that were sent to the client of a rollout, and errors of their tool calls."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from agenttrain.agents.config import Trained
from agenttrain.agents.restarts import find_relation
from agenttrain.chat.wire.issued_turns import IssuedTurn, IssuedTurns, Match
from agenttrain.tools.arguments import ArgumentSchema, InvalidArguments
from agenttrain.types import Message, Rollout, ToolCall, ToolError
from agenttrain.utils.content import parts


@dataclass(slots=True, eq=False, kw_only=True)
class AgentTurn(IssuedTurn):
    """A turn with its place in the rollout."""

    trajectory: int
    """Index of its trajectory."""
    end: int
    """Position after its last sampled token in the trajectory."""
    message_count: int
    """Messages of the trajectory up to and with it."""


@dataclass(slots=True, eq=False)
class Transcript:
    """A rollout with the turns that were issued to its agent.

    A conversation of the agent may have several trajectories: where the client rewrites its
    history, a restart, a new trajectory begins. Conversations are numbered from 0. Lists have an
    entry for each trajectory. Example: two conversations, of which the first was restarted, have
    three trajectories with ``conversation_numbers=[0, 1, 0]``.
    """

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
    conversation_numbers: list[int] = field(default_factory=list)
    """Number of the conversation of each trajectory. A restart keeps its conversation's number."""
    models: list[str | None] = field(default_factory=list)
    """Name of the model that each trajectory's first request asked for."""
    openings: Counter[str] = field(default_factory=Counter)
    """Digest of a prompt's ids -> number of trajectories that began with them. Seeds need it."""
    trajectory_count: int = 0
    """Trajectories that have a name and a seed. The newest may not be in `rollout` yet, because a
    trajectory is added to it only after its first turn was sampled."""

    def is_tail(self, turn: AgentTurn) -> bool:
        """Return True if nothing follows a turn in its trajectory, and nothing is about to."""
        trajectory = self.rollout.trajectories[turn.trajectory]
        return trajectory.length == turn.end and trajectory.index not in self.growing

    def conversation_of(self, messages: Sequence[Message], match: Match[AgentTurn]) -> int:
        """Return the number of the conversation of a request's messages: a new one if it is new."""
        position = find_relation(messages, self.issued.turns, match).position
        if position is None:
            return max(self.conversation_numbers, default=-1) + 1
        return self.conversation_numbers[self.issued.turns[position].trajectory]

    def indices_of(self, conversations: Collection[int]) -> list[int]:
        """Return the indices of the trajectories of some conversations."""
        return [i for i, number in enumerate(self.conversation_numbers) if number in conversations]

    def trained_conversations(self, trained: Trained) -> set[int]:
        """Return the numbers of the conversations that are trained.

        `trained` is the setting `agent.train`. With `agents` they are those with tools, or all if
        none has any, so that a later request may change the result.
        """
        numbers = set(self.conversation_numbers)
        if trained is Trained.all or len(numbers) < 2:
            return numbers
        if trained is Trained.main:
            return {self.main_conversation()}
        with_tools = {number for number in numbers if self._has_tools(number)}
        return with_tools or numbers

    def main_conversation(self) -> int:
        """Return the number of the conversation that attempts the task.

        A conversation with tools goes before any without. Between two that are equal in this, one
        whose opening holds the task's prompt goes first, and then the one that began first.
        """
        # Each number once: a conversation may have several trajectories.
        numbers_in_order = dict.fromkeys(self.conversation_numbers)
        # `max` returns the first of those that are equal.
        return max(
            numbers_in_order,
            key=lambda number: (self._has_tools(number), self._holds_prompt(number)),
        )

    def _has_tools(self, conversation: int) -> bool:
        indices = self.indices_of({conversation})
        return any(self.rollout.trajectories[index].schemas for index in indices)

    def _holds_prompt(self, conversation: int) -> bool:
        """Return True if a message before a conversation's first answer holds the task's prompt."""
        first = self.rollout.trajectories[self.conversation_numbers.index(conversation)]
        task_messages = self.rollout.task.messages
        task_texts = [_text_of(m).strip() for m in task_messages if m["role"] == "user"]
        texts = [_text_of(message) for message in first.messages[: first.prompt_messages]]
        if not task_texts:
            return False
        # The last message asks for the answer, and earlier ones may be examples. An agent may put
        # texts of its own around it.
        return any(task_texts[-1] in text for text in texts)


def _text_of(message: Message) -> str:
    """Return a message's text, without its images."""
    return "".join(part for part in parts(message.get("content")) if isinstance(part, str))


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
