"""Plan the ids that a request is sampled from: after the turn that it continues, or rendered."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from agenttrain.agents.restarts import Restart, find_relation
from agenttrain.agents.transcript import AgentTurn, Transcript
from agenttrain.chat.chat import Chat
from agenttrain.chat.encoding import ChatError
from agenttrain.chat.wire.issued_turns import Match, render_prompt
from agenttrain.chat.wire.openai import RequestError
from agenttrain.types import Message, Origin, Trajectory
from agenttrain.utils.arrays import common_prefix
from agenttrain.utils.seeds import derive_seed

Suffix = list[tuple[Origin, list[int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Ids to continue for a request, and how they become part of a trajectory."""

    ids: list[int]
    messages: list[Message]
    """Messages to add to the trajectory, which for a new trajectory are all."""
    suffix: Suffix
    """The end of `ids`, which is not yet in the trajectory (or in `parent`), as pieces of one
    origin each: ``[(Origin.tool, [5, 6]), (Origin.template, [7])]``."""
    session: str
    """Name of the engine's session, which keeps the cache of one trajectory."""
    parent: tuple[int, int] | None = None
    """Index of the trajectory from which a new one branches, and the number of ids they share."""
    extends: Trajectory | None = None
    """Trajectory that goes on. None: a new one begins."""
    seed: int = 0
    """Seed of a new trajectory. One that goes on has its seed already."""
    answered_turn: AgentTurn | None = None
    """The turn whose calls the request answers."""
    restart: Restart | None = None
    """How the request differs from the earlier conversation that it repeats, so that it cannot
    extend that one's trajectory. None: it extends it, or repeats none."""
    difference: str = ""
    """With `restart`: the first difference from that conversation, in words."""


class RequestPlanner:
    """Plans the requests of one rollout: the ids that each is sampled from, and its trajectory.

    `EndpointRollout` has one, and calls `plan` for each request before it is sampled.
    """

    def __init__(self, chat: Chat, rollout_id: str, seed: int) -> None:
        self._chat, self._rollout_id, self._seed = chat, rollout_id, seed

    def plan(
        self,
        transcript: Transcript,
        messages: Sequence[Message],
        schemas: Sequence[dict[str, Any]],
        match: Match[AgentTurn],
    ) -> Plan:
        """Plan to continue the matched turn, or else to render a prompt. Raises RequestError."""
        restart: Restart | None
        if match.turn is not None:
            with suppress(ChatError):  # a role that the template refuses after an answer
                return self._continue_turn(transcript, match.turn, match)
            restart, difference = Restart.edited, "the template refuses them behind a turn"
        else:
            # None and "" for a new conversation, else how the client has rewritten an earlier one.
            _, restart, difference = find_relation(messages, transcript.issued.turns, match)
        shown_messages, ids = self.render(messages, schemas)
        # Branch from the trajectory with the longest common prefix.
        longest, parent = 0, 0
        ids_array = np.array(ids)
        for trajectory in transcript.rollout.trajectories:
            length = common_prefix(np.array(trajectory.token_ids), ids_array)
            if length > longest:
                longest, parent = length, trajectory.index
        session, seed = self._new_session(transcript, ids)
        return Plan(
            ids=ids,
            messages=shown_messages,
            suffix=[(Origin.prompt, ids[longest:])],
            session=session,
            parent=(parent, longest) if longest else None,
            seed=seed,
            restart=restart,
            difference=difference,
        )

    def _continue_turn(
        self, transcript: Transcript, turn: AgentTurn, match: Match[AgentTurn]
    ) -> Plan:
        """Plan to extend a turn's trajectory, or to branch from it if the turn is not its last.

        Raises ChatError if the template refuses the messages after the turn.
        """
        trajectory = transcript.rollout.trajectories[turn.trajectory]
        # The messages after the turn, and their ids in pieces of one origin each.
        replies, suffix = turn.continuation(self._chat, match.new_messages, generation_prompt=True)
        suffix_ids = [token_id for _, ids in suffix for token_id in ids]
        ids = [*trajectory.token_ids[: turn.end], *suffix_ids]
        if transcript.is_tail(turn):
            return Plan(
                ids=ids,
                messages=replies,
                suffix=suffix,
                session=transcript.sessions[trajectory.index],
                extends=trajectory,
                answered_turn=turn,
            )
        # Another request continued this turn before. A trajectory holds one continuation, so this
        # one branches off after the turn. It counts as a restart: the client dropped the other.
        session, seed = self._new_session(transcript, ids)
        return Plan(
            ids=ids,
            messages=[*trajectory.messages[: turn.message_count], *replies],
            suffix=suffix,
            session=session,
            parent=(trajectory.index, turn.end),
            seed=seed,
            answered_turn=turn,
            restart=Restart.dropped,
            difference="a turn was sampled from these messages already",
        )

    def render(
        self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]]
    ) -> tuple[list[Message], list[int]]:
        """Return messages as they are shown, and the ids of their prompt. Raises RequestError."""
        try:
            return render_prompt(self._chat, messages, schemas)
        except ChatError as error:
            raise RequestError(f"messages: {error}", param="messages") from error

    def _new_session(self, transcript: Transcript, ids: Sequence[int]) -> tuple[str, int]:
        """Count a new trajectory. Return the name of its session in the engine, and its seed.

        The first trajectory of the policy has the rollout's id and the seed of the request for the
        rollout, as a rollout of the run's own loop has.

        The seed of any other depends on the ids with which it begins and on the number of
        trajectories that began with them so far. It does not depend on the order in which requests
        arrive, so that a run repeats.
        """
        number = transcript.trajectory_count
        transcript.trajectory_count += 1
        if number == 0 and transcript.trained:  # the untrained transcript is of frozen models
            return self._rollout_id, self._seed
        name = f"{transcript.prefix}/{number}"
        digest = hashlib.sha256(array("q", ids).tobytes()).hexdigest()
        transcript.openings[digest] += 1
        seed = derive_seed(self._seed, transcript.prefix, digest, transcript.openings[digest])
        return name, seed
