"""Plan the ids of a request: behind the turn that it continues, or rendered anew."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from agenttrain.chat.wire.issued_turns import IssuedTurn, Match, Restart, text_ids
from agenttrain.agents.transcript import Transcript
from agenttrain.chat.chat import Chat
from agenttrain.chat.encoding import ChatError
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
    """Messages of the trajectory once the ids are in it. With `extends` only those to add."""
    suffix: Suffix
    """The part of `ids` that the trajectory lacks, by origin."""
    session: str
    parent: tuple[int, int] | None = None
    """Place of the trajectory from which a new one branches."""
    extends: Trajectory | None = None
    """Trajectory that goes on. None: a new one begins."""
    seed: int = 0
    answers: IssuedTurn | None = None
    """The turn whose calls the request answers."""
    restart: Restart | None = None
    """Why the request does not continue the turns that it holds. None: it does, or holds none."""
    difference: str = ""
    """The first difference from those turns."""


class RequestPlanner:
    """Plans the requests of one rollout."""

    def __init__(self, chat: Chat, rollout_id: str, seed: int) -> None:
        self._chat, self._rollout_id, self._seed = chat, rollout_id, seed

    def plan(
        self,
        transcript: Transcript,
        messages: Sequence[Message],
        schemas: Sequence[dict[str, Any]],
        match: Match,
    ) -> Plan:
        """Return the ids to continue: those behind the matched turn, or else a rendered prompt.

        Raises RequestError.
        """
        turn, restart, difference = match.turn, match.restart, match.difference
        if turn is not None:
            with suppress(ChatError):  # a role that the template refuses behind an answer
                return self._continue_turn(transcript, turn, match)
            restart, difference = Restart.edited, "the template refuses them behind a turn"
        ids = self.render(messages, schemas)
        # Branch from the trajectory with the longest common prefix.
        longest, parent = 0, 0
        ids_array = np.array(ids)
        for trajectory in transcript.rollout.trajectories:
            length = common_prefix(np.array(trajectory.token_ids), ids_array)
            if length > longest:
                longest, parent = length, trajectory.index
        return Plan(
            ids=ids,
            messages=[without_handle(message) for message in messages],
            suffix=[(Origin.prompt, ids[longest:])],
            session=self._session(transcript),
            parent=(parent, longest) if longest else None,
            seed=self._opening_seed(transcript, ids),
            restart=restart,
            difference=difference,
        )

    def _continue_turn(self, transcript: Transcript, turn: IssuedTurn, match: Match) -> Plan:
        """Return a plan behind an issued turn. Raises ChatError if the template refuses it."""
        trajectory = transcript.rollout.trajectories[turn.trajectory]
        replies = self.replies(turn, match.new_messages)
        suffix = self.suffix(turn, replies, generation_prompt=True)
        suffix_ids = [token_id for _, ids in suffix for token_id in ids]
        ids = [*trajectory.token_ids[: turn.end], *suffix_ids]
        if transcript.is_tail(turn):
            return Plan(
                ids=ids,
                messages=replies,
                suffix=suffix,
                session=transcript.sessions[trajectory.index],
                extends=trajectory,
                answers=turn,
            )
        return Plan(
            ids=ids,
            messages=[*trajectory.messages[: turn.message_count], *replies],
            suffix=suffix,
            session=self._session(transcript),
            parent=(trajectory.index, turn.end),
            seed=self._opening_seed(transcript, ids),
            answers=turn,
            restart=Restart.dropped,
            difference="a turn was sampled from these messages already",
        )

    def render(self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]]) -> list[int]:
        """Return the ids of a prompt. Raises RequestError."""
        try:
            return self._chat.prompt_ids(
                [without_handle(m) for m in messages], schemas, may_omit=("assistant",)
            )
        except ChatError as error:
            raise RequestError(f"messages: {error}", param="messages") from error

    def replies(self, turn: IssuedTurn, new_messages: Sequence[Message]) -> list[Message]:
        """Return the messages behind a turn, the replies under the ids that the model's calls have.

        The client never saw a malformed call that was part of the text, and the template shows a
        reply to each call. Such a call gets our own reply.
        """
        contents = {m["tool_call_id"]: m["content"] for m in new_messages if m["role"] == "tool"}
        replies: list[Message] = []
        for call_id, call in zip(turn.call_ids, turn.turn.calls, strict=True):
            content = contents.get(call_id, call.malformed_reply)
            replies.append(
                {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}
            )
        return [*replies, *(without_handle(m) for m in new_messages if m["role"] != "tool")]

    def suffix(
        self, turn: IssuedTurn, replies: Sequence[Message], *, generation_prompt: bool
    ) -> Suffix:
        """Return the ids that follow a turn, by origin."""
        return self._chat.suffix(
            turn.turn,
            replies,
            completion_ids=turn.completion.token_ids,
            finish=turn.completion.finish,
            generation_prompt=generation_prompt,
        )

    def _session(self, transcript: Transcript) -> str:
        """Return the engine's session of a new trajectory. The first has the rollout's."""
        transcript.trajectory_count += 1
        if transcript.trajectory_count == 1 and transcript.trained:
            return self._rollout_id
        return f"{transcript.prefix}/{transcript.trajectory_count - 1}"

    def _opening_seed(self, transcript: Transcript, ids: Sequence[int]) -> int:
        """Return the seed of a new trajectory. The first has the seed of the run's own loop.

        The seed of another depends on the ids with which it begins and on how often that happened,
        and not on the order in which requests arrive.
        """
        if transcript.trajectory_count == 1 and transcript.trained:
            return self._seed
        digest = text_ids(ids)
        transcript.openings[digest] += 1
        return derive_seed(self._seed, transcript.prefix, digest, transcript.openings[digest])


def without_handle(message: Message) -> Message:
    """Return a message without the keys that templates do not know."""
    return {key: value for key, value in message.items() if key != "handle"}
