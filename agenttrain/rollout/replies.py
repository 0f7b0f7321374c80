"""Replies that fit: tool texts are clipped, visibly, so that what follows them still has room."""

from __future__ import annotations

from collections.abc import Sequence

from agenttrain.chat.chat import Chat
from agenttrain.types import AssistantTurn, Completion, LedgerError, Message, Origin

Suffix = list[tuple[Origin, list[int]]]


def fit_replies(
    chat: Chat,
    turn: AssistantTurn,
    replies: Sequence[Message],
    *,
    completion: Completion,
    room: int,
    max_result_tokens: Sequence[int],
    generation_prompt: bool,
) -> tuple[list[Message], Suffix]:
    """The replies with clipped texts, and their suffix ids: at most `room` tokens.

    `max_result_tokens` has the limit of each reply. Where not even the empty replies fit (a
    stop tool's may not), the suffix itself is cut.
    """

    def render(texts: Sequence[str]) -> tuple[list[Message], Suffix, int]:
        clipped = [{**reply, "content": text} for reply, text in zip(replies, texts, strict=True)]
        suffix = chat.suffix(
            turn,
            clipped,
            completion_ids=completion.token_ids,
            finish=completion.finish,
            generation_prompt=generation_prompt,
        )
        return clipped, suffix, sum(len(ids) for _, ids in suffix)

    full = [str(reply["content"]) for reply in replies]
    texts = [chat.clip(text, most) for text, most in zip(full, max_result_tokens, strict=True)]
    clipped, suffix, length = render(texts)
    while length > room and any(texts):
        # A template may lengthen a text (JSON escapes), so the first cut can be too small.
        lengths = [len(chat.encode_plain(text)) for text in texts]
        limits = shares(lengths, max(sum(lengths) - (length - room), 0))
        texts = [chat.clip(text, limit) for text, limit in zip(full, limits, strict=True)]
        clipped, suffix, length = render(texts)
    if generation_prompt and length > room:
        raise LedgerError(
            f"the suffix of {length} tokens exceeds the {room} left, though its empty form fitted"
        )
    return clipped, cut(suffix, room)


def shares(lengths: Sequence[int], room: int) -> list[int]:
    """Split `room` so that short texts stay whole and long ones share the rest equally.

    Example: ``shares([2, 9, 9], 12) == [2, 5, 5]``
    """
    granted = [0] * len(lengths)
    left = room
    for rank, index in enumerate(sorted(range(len(lengths)), key=lambda i: lengths[i])):
        granted[index] = min(lengths[index], left // (len(lengths) - rank))
        left -= granted[index]
    return granted


def cut(suffix: Suffix, room: int) -> Suffix:
    """The first `room` tokens of a suffix."""
    kept: Suffix = []
    for origin, token_ids in suffix:
        kept.append((origin, token_ids[: max(room, 0)]))
        room -= len(token_ids)
    return kept
