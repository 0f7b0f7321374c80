"""Compaction: a context that has grown past `rollout.compact_at` is replaced by a shorter one.

The new context is the task's prompt, the policy's summary if the compaction asks for one, and the
turns that it keeps. What was sampled keeps its recorded ids. It begins a trajectory of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

from agenttrain.chat.chat import Chat
from agenttrain.chat.encoding import ChatError
from agenttrain.rollout.config import COMPACTIONS, NO_COMPACTION, RolloutConfig
from agenttrain.rollout.replies import Suffix, suffix_after
from agenttrain.types import AssistantTurn, Completion, ConfigError, Finish, Message, ToolCall
from agenttrain.utils.locate import locate

SUMMARY = "summary"
"""Role of a trajectory in which the policy summarises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastTurn:
    """A turn of the current context, with what followed it."""

    turn: AssistantTurn
    completion: Completion
    """The ids of the turn, as they were sampled."""
    replies: tuple[Message, ...]
    """The tools' replies, or the user's message, as the policy read them."""
    suffix: Suffix | None
    """The recorded ids of the replies and of the generation prompt after them. None if the replies
    were changed: they are rendered again."""

    def with_contents(self, contents: Sequence[str]) -> PastTurn:
        """Return the turn with other texts in its replies."""
        replies = tuple(
            {**reply, "content": content}
            for reply, content in zip(self.replies, contents, strict=True)
        )
        return self if replies == self.replies else replace(self, replies=replies, suffix=None)

    def ids(self, chat: Chat) -> list[int]:
        """Return the turn's ids: the completion, the replies, the next generation prompt."""
        suffix = self.suffix
        if suffix is None:
            suffix = suffix_after(chat, self.turn, self.completion, self.replies)
        # A suffix is a list of spans, each with its origin.
        return [*self.completion.token_ids, *(token for _, ids in suffix for token in ids)]


class Compaction(Protocol):
    """Decides what a new context holds beside the task's prompt. One instance per rollout.

    The rollout loop calls `keep` whenever the context is longer than `rollout.compact_at`, after
    the policy has written the summary for which `request` asks.

    A class of yours is made with the rollout's limits: ``rollout.compaction=my_pkg.Mine``.
    """

    request: str | None
    """User's message that asks the policy for a summary; None: without one."""
    resume: str
    """User's message between the summary and the turns kept."""

    def keep(self, turns: Sequence[PastTurn], room: int, chat: Chat) -> Sequence[PastTurn]:
        """Choose the turns of the current context that the new one keeps.

        They should take at most `room` tokens: a context that is still too long ends the rollout
        (`context_full`).
        """
        ...


class Summary:
    """The policy's summary and the last `rollout.keep_turns` turns, as many as fit."""

    request: str | None = (
        "Summarise what you have done and learned, and what is left to do. Only the task, your "
        "summary and your last steps stay in view. Do not call a tool."
    )
    resume = (
        "Go on from your summary. Only the conversation was cleared: files, databases and all else "
        "are as you left them."
    )

    def __init__(self, limits: RolloutConfig) -> None:
        self.keep_turns = limits.keep_turns

    def keep(self, turns: Sequence[PastTurn], room: int, chat: Chat) -> Sequence[PastTurn]:
        """Implement `Compaction.keep`."""
        fitting_turns: list[PastTurn] = []
        for turn in [*reversed(turns)][: self.keep_turns]:  # the newest first
            room -= len(turn.ids(chat))
            if room < 0:
                break
            fitting_turns.insert(0, turn)
        return fitting_turns


class DropToolResults:
    """Keeps every turn. A marker replaces the tools' texts of all but the last ones."""

    request: str | None = None
    resume = ""
    marker = "[dropped]"

    def __init__(self, limits: RolloutConfig) -> None:
        self.keep_turns = limits.keep_turns

    def keep(self, turns: Sequence[PastTurn], room: int, chat: Chat) -> Sequence[PastTurn]:
        """Implement `Compaction.keep`."""
        older = max(len(turns) - self.keep_turns, 0)
        return [*(self._without_results(turn) for turn in turns[:older]), *turns[older:]]

    def _without_results(self, turn: PastTurn) -> PastTurn:
        contents = [reply["content"] for reply in turn.replies]
        for index, reply in enumerate(turn.replies):
            # In the place of a shorter text the marker would save nothing.
            if reply["role"] == "tool" and len(contents[index]) > len(self.marker):
                contents[index] = self.marker
        return turn.with_contents(contents)


def make_compaction(limits: RolloutConfig) -> Compaction | None:
    """Return the compaction of one rollout; None if the run has none. Raises ConfigError."""
    if limits.compaction == NO_COMPACTION:
        return None
    path = COMPACTIONS.get(limits.compaction, limits.compaction)
    compaction_class = locate(path, key="rollout.compaction")
    try:
        return cast("Compaction", compaction_class(limits))
    except Exception as error:
        raise ConfigError(
            f"rollout.compaction={limits.compaction}: making one failed: "
            f"{type(error).__name__}: {error}; it is made with the rollout's limits: "
            f"{path.rpartition('.')[2]}(limits)"
        ) from error


def check_compaction(limits: RolloutConfig, chat: Chat, max_context: int | None) -> None:
    """Raise ConfigError if a summary cannot be asked for or may not fit."""
    compaction = make_compaction(limits)
    if compaction is None:
        return
    key = f"rollout.compaction={limits.compaction}"
    try:
        reserved = summary_room(compaction, limits, chat)
    except ChatError as error:
        raise ConfigError(
            f"{key}: the chat template cannot ask for a summary after a tool's reply ({error}); "
            "set rollout.compaction=drop_tool_results"
        ) from error
    # A turn that was sampled after a tool's reply is kept behind a user's message ("Go on …"). Its
    # ids stay, but some templates begin an answer to a user otherwise: with an opened <think>.
    role_matters = chat.opens_reasoning("tool") != chat.opens_reasoning("user")
    has_summary = compaction.request is not None
    if has_summary and limits.keep_turns and role_matters:
        raise ConfigError(
            f"{key}: the chat template opens reasoning after a message of one role only, so that a "
            "turn kept behind the summary would begin otherwise than it was sampled; set "
            "rollout.keep_turns=0"
        )
    compact_at = limits.compact_at
    assert compact_at is not None, "RolloutConfig demands it of every compaction"
    needed = compact_at + limits.max_turn_tokens + reserved
    if max_context is not None and needed > max_context:
        summary = f", the request and the summary ({reserved})" if reserved else ""
        raise ConfigError(
            f"rollout.compact_at={compact_at}: with a turn of rollout.max_turn_tokens="
            f"{limits.max_turn_tokens}{summary} that is {needed} tokens, and the engine's context "
            f"has {max_context}; lower one of them, or raise engine.max_context"
        )


def summary_room(compaction: Compaction, limits: RolloutConfig, chat: Chat) -> int:
    """Return the most tokens that a summary takes with its request; 0 without a request.

    The request stands after a tool's reply, and with it come the tokens that the template writes
    between messages. An upper bound: the end of the turn and an empty reply are counted too.
    Raises ChatError if the template refuses a user's message after a tool's reply.
    """
    if compaction.request is None:
        return 0
    # What the request takes depends on the messages before it: render it after a made-up call.
    call = ToolCall(id="call_0_0", name="f", arguments={})
    reply = {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": ""}
    with_request = chat.suffix(
        AssistantTurn(content="", reasoning=None, calls=(call,)),
        [reply, request_message(compaction)],
        completion_ids=(0,),
        finish=Finish.length,  # as if cut off, so that the suffix has the whole end of the turn
        generation_prompt=True,
    )
    return sum(len(ids) for _, ids in with_request) + limits.summary_tokens


def request_message(compaction: Compaction) -> Message:
    """Return the user's message that asks for a summary."""
    return {"role": "user", "content": compaction.request}
