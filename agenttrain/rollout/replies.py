"""Tool replies that fit: their texts are clipped, visibly, so that the next turn has room."""

from __future__ import annotations

from collections.abc import Sequence

from agenttrain.chat.chat import Chat
from agenttrain.rollout.image_replies import fit_parts
from agenttrain.types import (
    AssistantTurn,
    Completion,
    LedgerError,
    Message,
    Origin,
    PlacedImage,
    ToolResult,
    Trajectory,
)
from agenttrain.utils.content import content_of, images_in

Suffix = list[tuple[Origin, list[int]]]


def reply_message(result: ToolResult) -> Message:
    """Return a tool's result as a chat message."""
    return {
        "role": "tool",
        "tool_call_id": result.call.id,
        "name": result.call.name,
        "content": content_of(result.parts) if result.parts else result.content,
    }


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
    """Clip the replies' texts; return the replies and their suffix ids, at most `room` tokens.

    `max_result_tokens` has one limit per reply. If not even empty replies fit, which can happen
    only without a generation prompt (the reply of a stop tool), the suffix itself is cut.
    """

    def suffix_of(clipped: list[Message]) -> tuple[list[Message], Suffix, int]:
        suffix = chat.suffix(
            turn,
            clipped,
            completion_ids=completion.token_ids,
            finish=completion.finish,
            generation_prompt=generation_prompt,
        )
        return clipped, suffix, sum(len(ids) for _, ids in suffix)

    def render(texts: Sequence[str]) -> tuple[list[Message], Suffix, int]:
        return suffix_of(
            [{**reply, "content": text} for reply, text in zip(replies, texts, strict=True)]
        )

    if any(isinstance(reply["content"], list) for reply in replies):
        fitted = fit_parts(
            chat,
            replies,
            length=lambda clipped: suffix_of([*clipped])[2],
            room=room,
            max_result_tokens=max_result_tokens,
        )
        clipped, suffix, length = suffix_of(fitted)
    else:
        full = [str(reply["content"]) for reply in replies]
        texts = [chat.clip(text, most) for text, most in zip(full, max_result_tokens, strict=True)]
        clipped, suffix, length = render(texts)
        while length > room and any(texts):
            # A template may lengthen a text (JSON escapes), so one cut may not be enough.
            lengths = [len(chat.encode_plain(text)) for text in texts]
            limits = shares(lengths, max(sum(lengths) - (length - room), 0))
            texts = [chat.clip(text, limit) for text, limit in zip(full, limits, strict=True)]
            clipped, suffix, length = render(texts)
    if generation_prompt and length > room:
        raise LedgerError(
            f"the suffix of {length} tokens exceeds the {room} left, though its empty form fitted"
        )
    fitting: Suffix = []
    for origin, token_ids in suffix:
        fitting.append((origin, token_ids[: max(room, 0)]))
        room -= len(token_ids)
    return clipped, fitting


def append_suffix(
    trajectory: Trajectory, suffix: Suffix, replies: Sequence[Message], chat: Chat
) -> None:
    """Append the suffix of `replies` to a trajectory, each of their images with its span."""
    images = [] if chat.placeholders is None else [*images_in(replies)]
    for origin, token_ids in suffix:
        placed: tuple[PlacedImage, ...] = ()
        if (
            images
            and chat.placeholders is not None
            and token_ids[:1] == [chat.placeholders.token_id]
        ):
            placed = chat.placeholders.place(token_ids, [images.pop(0)])
        trajectory.append_context(token_ids, origin, placed)


def shares(lengths: Sequence[int], room: int) -> list[int]:
    """Split `room` so that short texts stay complete and long ones share what is left equally.

    Example: ``shares([2, 9, 9], 12) == [2, 5, 5]``
    """
    granted = [0] * len(lengths)
    left = room
    for rank, index in enumerate(sorted(range(len(lengths)), key=lambda i: lengths[i])):
        granted[index] = min(lengths[index], left // (len(lengths) - rank))
        left -= granted[index]
    return granted
