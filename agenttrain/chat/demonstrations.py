"""Token ids of an assistant turn that was demonstrated instead of sampled."""

from __future__ import annotations

from collections.abc import Sequence

from agenttrain.chat.chat import Chat
from agenttrain.chat.encoding import ChatError
from agenttrain.types import AssistantTurn, Finish, Message


def completion_ids(
    chat: Chat,
    messages: Sequence[Message],
    schemas: Sequence[dict],
    turn: AssistantTurn,
    *,
    prompt: Sequence[int] | None = None,
) -> list[int]:
    """Return [T] the ids that a model would sample to answer `messages` with `turn`, end included.

    They stand between the generation prompt and the suffix in a rendering of the conversation.
    `prompt` are the ids of `messages`, to save a rendering if they are known already. They are
    ignored if the full rendering begins otherwise. Example::

        <|im_start|>user … <|im_start|>assistant\\n     the prompt
        <tool_call>…</tool_call><|im_end|>             returned
        \\n<|im_start|>user\\n<tool_response> …          the suffix

    Raises ChatError if the template does not continue the prompt with the turn.
    """
    replies = _empty_replies(chat, turn)
    full = chat.rendered_ids([*messages, turn.message(), *replies], schemas)
    if prompt is None or full[: len(prompt)] != list(prompt):
        prompt = chat.rendered_ids(messages, schemas)
    end = chat.end_ids(turn, replies, generation_prompt=True)
    # The suffix depends on the completion only in that it leaves out the end of the turn if the
    # completion has it. The completion is not known yet, and `end` alone has the same effect.
    suffix = chat.suffix(
        turn, replies, completion_ids=end, finish=Finish.stop, generation_prompt=True
    )
    suffix_ids = [token_id for _, ids in suffix for token_id in ids]
    stop = len(full) - len(suffix_ids)
    if full[: len(prompt)] != list(prompt) or full[stop:] != suffix_ids or stop <= len(prompt):
        raise ChatError(
            "the chat template does not continue the prompt "
            f"{chat.decode(prompt[-16:])!r} with this turn; it renders "
            f"{chat.decode(full[max(len(prompt) - 16, 0) :][:64])!r}"
        )
    ids = full[len(prompt) : stop]  # between the prompt and the suffix
    if turn.calls or ids[-1] in chat.stop_token_ids:
        return ids
    # `_empty_replies` put a user's message after the answer. In Harmony the answer then ends with
    # <|end|>, at which no sampling stops. Put the end of an answer that nothing follows there.
    own_end = chat.end_ids(turn, [], generation_prompt=False)
    return ids[: len(ids) - len(end)] + list(own_end)


def _empty_replies(chat: Chat, turn: AssistantTurn) -> list[Message]:
    """Return messages without text that follow a turn, to show in a rendering where it ends.

    An answer gets none, because many templates drop its reasoning once a user's message follows.
    But where the template ends no answer with a stop token, a user's message must follow: in GLM
    its beginning, ``<|user|>``, ends the answer.
    """
    if turn.calls:
        return [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": ""}
            for call in turn.calls
        ]
    end = chat.end_ids(turn, [], generation_prompt=True)
    is_ended = bool(end) and end[-1] in chat.stop_token_ids
    return [] if is_ended else [{"role": "user", "content": ""}]
