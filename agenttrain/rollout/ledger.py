"""The invariants of a finished rollout, checked at run time for every one of them (O(T))."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain, groupby

from agenttrain.chat.chat import Chat
from agenttrain.types import Finish, LedgerError, Message, Origin, Rollout, Span, Trajectory

Place = tuple[str, int, int]
"""A rollout's id, the index of a trajectory and a turn of it."""


@dataclass(slots=True)
class ParsedTurns:
    """Turns that the loop has parsed, so that `verify` need not parse the same ids again.

    One may serve many rollouts, whose ids differ. It keeps a digest and not the message, which
    others may change later.
    """

    _digests: dict[Place, tuple[tuple[int, ...], str, bytes]] = field(default_factory=dict)

    def note(
        self,
        trajectory: Trajectory,
        token_ids: tuple[int, ...],
        message: Message,
        *,
        turn: int,
        after: str,
    ) -> None:
        """Note what `token_ids` parse to, sampled in `turn` after a message of role `after`."""
        place = trajectory.rollout_id, trajectory.index, turn
        self._digests[place] = token_ids, after, _digest(message)

    def matches(
        self,
        trajectory: Trajectory,
        token_ids: tuple[int, ...],
        message: Message,
        *,
        turn: int,
        after: str,
    ) -> bool:
        """Return whether exactly this was noted; where it was not, the ids have to be parsed."""
        place = trajectory.rollout_id, trajectory.index, turn
        return self._digests.get(place) == (token_ids, after, _digest(message))


def _digest(message: Message) -> bytes:
    """Hash a message; some that compare equal differ (1 and 1.0), but never the reverse."""
    return blake2b(repr(message).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def verify(
    rollout: Rollout, chat: Chat, schemas: Sequence[dict], parsed_turns: ParsedTurns | None = None
) -> None:
    """Raise LedgerError unless tokens, mask, logprobs and messages agree.

    What was sent to the engine is compared in `Trajectory.append_sampled`, at the time of sending.
    A turn whose ids and message are those of `parsed_turns` has been parsed; every other one is, here.
    """
    for trajectory in rollout.trajectories:
        _verify(trajectory, chat, schemas, parsed_turns or ParsedTurns())


def _verify(
    trajectory: Trajectory, chat: Chat, schemas: Sequence[dict], parsed_turns: ParsedTurns
) -> None:
    _check_lengths(trajectory)
    spoken = [
        (message, trajectory.messages[place - 1]["role"])
        for place, message in enumerate(trajectory.messages)
        if place >= trajectory.prompt_messages and message["role"] == "assistant"
    ]
    turns = [list(spans) for _, spans in groupby(trajectory.sampled_spans(), key=lambda s: s.turn)]
    if len(turns) != len(spoken):
        raise LedgerError(
            f"{trajectory.name}: {len(turns)} sampled turns, but {len(spoken)} assistant messages"
        )
    for spans, (message, after) in zip(turns, spoken, strict=True):
        token_ids = _check_end(trajectory, spans, chat)
        turn = spans[0].turn
        if not parsed_turns.matches(trajectory, token_ids, message, turn=turn, after=after):
            _check_message(trajectory, spans, message, chat, schemas, after)


def _check_lengths(trajectory: Trajectory) -> None:
    ids = array("q")
    for span in trajectory.spans:
        ids.extend(span.token_ids)
    if ids != trajectory.token_ids:
        raise LedgerError(f"{trajectory.name}: its ids are not those of its spans")
    first = trajectory.spans[0].origin if trajectory.spans else None
    prompts = sum(span.origin is Origin.prompt for span in trajectory.spans)
    if first is not Origin.prompt or prompts != 1:
        raise LedgerError(f"{trajectory.name}: {prompts} prompt spans, the first span is {first}")


def _check_end(trajectory: Trajectory, spans: list[Span], chat: Chat) -> tuple[int, ...]:
    """Return the sampled ids of a turn; raise unless they end as the spans say."""
    where = f"{trajectory.name} turn {spans[0].turn}"
    token_ids = tuple(chain.from_iterable(span.token_ids for span in spans))
    finish = spans[-1].finish
    if finish is None or any(span.finish is not None for span in spans[:-1]):
        raise LedgerError(f"{where}: only its last sampled span says how it finished")
    if finish is Finish.stop and token_ids[-1] not in chat.stop_token_ids:
        raise LedgerError(
            f"{where} position {_position(trajectory, spans[-1])}: finished with `stop`, but its "
            f"last token {token_ids[-1]} ({chat.decode(token_ids[-1:])!r}) is no stop token "
            f"({list(chat.stop_token_ids)})"
        )
    return token_ids


def _check_message(
    trajectory: Trajectory,
    spans: list[Span],
    message: Message,
    chat: Chat,
    schemas: Sequence[dict],
    after: str,
) -> None:
    """Parse the sampled ids of a turn; `after`: the role of the message before this one."""
    where = f"{trajectory.name} turn {spans[0].turn}"
    token_ids = [token for span in spans for token in span.token_ids]
    parsed = chat.parse(token_ids, schemas, turn=spans[0].turn, after=after).message()
    if parsed != message:
        raise LedgerError(
            f"{where} position {_position(trajectory, spans[0])}: the sampled tokens decode to "
            f"{chat.decode(token_ids)!r}, which parses to {parsed!r}, but the recorded message "
            f"is {message!r}"
        )


def _position(trajectory: Trajectory, wanted: Span) -> int:
    position = 0
    for span in trajectory.spans:
        if span is wanted:
            break
        position += len(span.token_ids)
    return position
