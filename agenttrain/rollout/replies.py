"""Tool replies that fit: their texts are clipped, visibly, so that the next turn has room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

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


class RenderedReplies(NamedTuple):
    """Replies to a turn, clipped, and the suffix that they make."""

    replies: list[Message]
    suffix: Suffix
    length: int
    """Tokens of the suffix."""


def reply_message(result: ToolResult) -> Message:
    """Return a tool's result as a chat message."""
    return {
        "role": "tool",
        "tool_call_id": result.call.id,
        "name": result.call.name,
        "content": content_of(result.parts) if result.parts else result.content,
    }


def suffix_after(
    chat: Chat,
    turn: AssistantTurn,
    completion: Completion,
    replies: Sequence[Message],
    *,
    generation_prompt: bool = True,
) -> Suffix:
    """Return the ids that follow a sampled turn: its replies, and the next generation prompt."""
    return chat.suffix(
        turn,
        replies,
        completion_ids=completion.token_ids,
        finish=completion.finish,
        generation_prompt=generation_prompt,
    )


def fit_replies(
    chat: Chat,
    turn: AssistantTurn,
    replies: Sequence[Message],
    *,
    completion: Completion,
    max_suffix_tokens: int,
    max_result_tokens: Sequence[int],
    generation_prompt: bool,
) -> tuple[list[Message], Suffix]:
    """Return clipped replies and their suffix, which has at most `max_suffix_tokens`.

    `max_result_tokens` has one limit per reply. With a `generation_prompt`, after which the model
    takes another turn, the caller has made sure that the suffix of empty replies fits. Without one,
    as after a stop tool, not even that may fit: then the ids of the suffix itself are cut.
    """

    def render(clipped: list[Message]) -> RenderedReplies:
        suffix = suffix_after(chat, turn, completion, clipped, generation_prompt=generation_prompt)
        return RenderedReplies(clipped, suffix, sum(len(ids) for _, ids in suffix))

    if any(isinstance(reply["content"], list) for reply in replies):  # texts and images
        fitted = fit_parts(  # renders as often as it takes
            chat,
            replies,
            length=lambda clipped: render([*clipped]).length,
            max_suffix_tokens=max_suffix_tokens,
            max_result_tokens=max_result_tokens,
        )
        rendered = render(fitted)
    else:
        rendered = _fit_texts(
            chat,
            replies,
            render=render,
            max_suffix_tokens=max_suffix_tokens,
            max_result_tokens=max_result_tokens,
        )
    if generation_prompt and rendered.length > max_suffix_tokens:
        raise LedgerError(
            f"the suffix of {rendered.length} tokens exceeds the {max_suffix_tokens} left, though "
            "its empty form fitted"
        )
    cut_suffix: Suffix = []
    remaining_tokens = max_suffix_tokens
    for origin, token_ids in rendered.suffix:
        cut_suffix.append((origin, token_ids[: max(remaining_tokens, 0)]))
        remaining_tokens -= len(token_ids)
    return rendered.replies, cut_suffix


def _fit_texts(
    chat: Chat,
    replies: Sequence[Message],
    *,
    render: Callable[[list[Message]], RenderedReplies],
    max_suffix_tokens: int,
    max_result_tokens: Sequence[int],
) -> RenderedReplies:
    """Clip each text to its own limit, then all of them until they fit or are empty."""
    full_texts = [str(reply["content"]) for reply in replies]

    def clip_to(limits: Sequence[int]) -> list[str]:
        return [chat.clip(text, limit) for text, limit in zip(full_texts, limits, strict=True)]

    def render_texts(texts: Sequence[str]) -> RenderedReplies:
        return render(
            [{**reply, "content": text} for reply, text in zip(replies, texts, strict=True)]
        )

    texts = clip_to(max_result_tokens)
    rendered = render_texts(texts)
    while rendered.length > max_suffix_tokens and any(texts):
        # A template may lengthen a text (JSON escapes), so one cut may not be enough.
        lengths = [len(chat.encode_plain(text)) for text in texts]
        excess = rendered.length - max_suffix_tokens
        texts = clip_to(split_tokens(lengths, max(sum(lengths) - excess, 0)))
        rendered = render_texts(texts)
    return rendered


def append_suffix(
    trajectory: Trajectory, suffix: Suffix, replies: Sequence[Message], chat: Chat
) -> None:
    """Append the suffix of `replies` to a trajectory.

    A span that begins with a placeholder is the next image of the replies.
    """
    placeholders = chat.placeholders
    images = [] if placeholders is None else [*images_in(replies)]
    for origin, token_ids in suffix:
        placed: tuple[PlacedImage, ...] = ()
        if images and placeholders is not None and token_ids[:1] == [placeholders.token_id]:
            placed = placeholders.place(token_ids, [images.pop(0)])
        trajectory.append_context(token_ids, origin, placed)


def split_tokens(lengths: Sequence[int], total: int) -> list[int]:
    """Split `total` tokens so that short texts stay complete and long ones share the rest equally.

    Example: ``split_tokens([2, 9, 9], 12) == [2, 5, 5]``
    """
    granted = [0] * len(lengths)
    remaining = total
    shortest_first = sorted(range(len(lengths)), key=lambda i: lengths[i])
    for texts_done, index in enumerate(shortest_first):
        equal_share = remaining // (len(lengths) - texts_done)
        granted[index] = min(lengths[index], equal_share)
        remaining -= granted[index]
    return granted
