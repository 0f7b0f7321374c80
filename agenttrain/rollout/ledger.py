"""The invariants of a finished rollout, checked at run time for every one of them (O(T))."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from agenttrain.chat.template import Chat
from agenttrain.types import Finish, LedgerError, Message, Origin, Rollout, Span


def verify(rollout: Rollout, chat: Chat, schemas: Sequence[dict]) -> None:
    """Raise LedgerError unless tokens, mask, logprobs and messages agree.

    What was sent to the engine is compared in `Rollout.append_sampled`, at the time of sending.
    """
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
        _check_turn(rollout, spans, message, chat, schemas, after)


def _check_lengths(rollout: Rollout) -> None:
    ids = [token for span in rollout.spans for token in span.token_ids]
    if ids != list(rollout.token_ids):
        raise LedgerError(f"rollout {rollout.rollout_id}: its ids are not those of its spans")
    first = rollout.spans[0].origin if rollout.spans else None
    prompts = sum(span.origin is Origin.prompt for span in rollout.spans)
    if first is not Origin.prompt or prompts != 1:
        raise LedgerError(
            f"rollout {rollout.rollout_id}: {prompts} prompt spans, the first span is {first}"
        )


def _check_turn(
    rollout: Rollout,
    spans: list[Span],
    message: Message,
    chat: Chat,
    schemas: Sequence[dict],
    after: str,
) -> None:
    """`after`: the role of the message before this one."""
    where = f"rollout {rollout.rollout_id} turn {spans[0].turn}"
    token_ids = [token for span in spans for token in span.token_ids]
    finish = spans[-1].finish
    if finish is None or any(span.finish is not None for span in spans[:-1]):
        raise LedgerError(f"{where}: only its last sampled span says how it finished")
    if finish is Finish.stop and token_ids[-1] not in chat.stop_token_ids:
        raise LedgerError(
            f"{where} position {_position(rollout, spans[-1])}: finished with `stop`, but its "
            f"last token {token_ids[-1]} ({chat.decode(token_ids[-1:])!r}) is no stop token "
            f"({list(chat.stop_token_ids)})"
        )
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
