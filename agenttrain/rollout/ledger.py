"""The invariants of a finished rollout, checked at run time for every one of them (O(T))."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain, groupby

from agenttrain.chat.template import Chat
from agenttrain.types import Finish, LedgerError, Message, Origin, Rollout, Span


@dataclass(slots=True)
class Readings:
    """What the loop has parsed which ids as, so that `verify` need not parse the same ids again.

    It keeps a digest and not the message, which others may change later.
    """

    _digests: dict[int, tuple[tuple[int, ...], str, bytes]] = field(default_factory=dict)

    def note(self, token_ids: tuple[int, ...], message: Message, *, turn: int, after: str) -> None:
        """`token_ids`, sampled in `turn` after a message of the role `after`, parse to this."""
        self._digests[turn] = token_ids, after, _digest(message)

    def confirm(
        self, token_ids: tuple[int, ...], message: Message, *, turn: int, after: str
    ) -> bool:
        """Whether exactly this was noted; where it was not, parsing must tell."""
        return self._digests.get(turn) == (token_ids, after, _digest(message))


def _digest(message: Message) -> bytes:
    """Of messages that compare equal some digests differ (1 and 1.0), but never the reverse."""
    return blake2b(repr(message).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def verify(
    rollout: Rollout, chat: Chat, schemas: Sequence[dict], readings: Readings | None = None
) -> None:
    """Raise LedgerError unless tokens, mask, logprobs and messages agree.

    What was sent to the engine is compared in `Rollout.append_sampled`, at the time of sending. A
    turn whose ids and message are those of `readings` has been parsed; every other one is, here.
    """
    readings = readings or Readings()
    _check_lengths(rollout)
    first = len(rollout.task.messages)
    spoken = [
        (message, rollout.messages[place - 1]["role"])
        for place, message in enumerate(rollout.messages)
        if place >= first and message["role"] == "assistant"
    ]
    turns = [list(spans) for _, spans in groupby(rollout.sampled_spans(), key=lambda s: s.turn)]
    if len(turns) != len(spoken):
        raise LedgerError(
            f"rollout {rollout.rollout_id}: {len(turns)} sampled turns, "
            f"but {len(spoken)} assistant messages"
        )
    for spans, (message, after) in zip(turns, spoken, strict=True):
        token_ids = _check_end(rollout, spans, chat)
        if not readings.confirm(token_ids, message, turn=spans[0].turn, after=after):
            _check_message(rollout, spans, message, chat, schemas, after)


def _check_lengths(rollout: Rollout) -> None:
    ids = array("q")
    for span in rollout.spans:
        ids.extend(span.token_ids)
    if ids != rollout.token_ids:
        raise LedgerError(f"rollout {rollout.rollout_id}: its ids are not those of its spans")
    first = rollout.spans[0].origin if rollout.spans else None
    prompts = sum(span.origin is Origin.prompt for span in rollout.spans)
    if first is not Origin.prompt or prompts != 1:
        raise LedgerError(
            f"rollout {rollout.rollout_id}: {prompts} prompt spans, the first span is {first}"
        )


def _check_end(rollout: Rollout, spans: list[Span], chat: Chat) -> tuple[int, ...]:
    """The sampled ids of a turn, which say rightly how they ended."""
    where = f"rollout {rollout.rollout_id} turn {spans[0].turn}"
    token_ids = tuple(chain.from_iterable(span.token_ids for span in spans))
    finish = spans[-1].finish
    if finish is None or any(span.finish is not None for span in spans[:-1]):
        raise LedgerError(f"{where}: only its last sampled span says how it finished")
    if finish is Finish.stop and token_ids[-1] not in chat.stop_token_ids:
        raise LedgerError(
            f"{where} position {_position(rollout, spans[-1])}: finished with `stop`, but its "
            f"last token {token_ids[-1]} ({chat.decode(token_ids[-1:])!r}) is no stop token "
            f"({list(chat.stop_token_ids)})"
        )
    return token_ids


def _check_message(
    rollout: Rollout,
    spans: list[Span],
    message: Message,
    chat: Chat,
    schemas: Sequence[dict],
    after: str,
) -> None:
    """Parse the sampled ids of a turn; `after`: the role of the message before this one."""
    where = f"rollout {rollout.rollout_id} turn {spans[0].turn}"
    token_ids = [token for span in spans for token in span.token_ids]
    parsed = chat.parse(token_ids, schemas, turn=spans[0].turn, after=after).message()
    if parsed != message:
        raise LedgerError(
            f"{where} position {_position(rollout, spans[0])}: the sampled tokens decode to "
            f"{chat.decode(token_ids)!r}, which parses to {parsed!r}, but the recorded message "
            f"is {message!r}"
        )


def _position(rollout: Rollout, wanted: Span) -> int:
    position = 0
    for span in rollout.spans:
        if span is wanted:
            break
        position += len(span.token_ids)
    return position
