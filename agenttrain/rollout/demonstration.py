"""Conversations of a dataset as rollouts: ids, mask and messages as if the model had sampled them.

Messages before the first assistant message are the prompt. Every assistant message becomes a
sampled turn, in the ids that the chat template writes for it. Tool replies and later user messages
are context, rendered and clipped exactly as the loop does. Sampled tokens have log-probability 0.

A rollout that a run recorded (`RolloutRows`) is learned in the ids that it was recorded in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agenttrain.chat.chat import Chat
from agenttrain.chat.demonstrations import completion_ids
from agenttrain.chat.encoding import ChatError
from agenttrain.environments.environments import Environments
from agenttrain.rollout.config import RolloutConfig
from agenttrain.rollout.ledger import verify
from agenttrain.rollout.recorded import ROLLOUT, RecordedRollout, difference, read_again
from agenttrain.rollout.replies import append_suffix, fit_replies, suffix_after
from agenttrain.rollout.row_tools import RowTools
from agenttrain.tools.toolbox import Toolbox
from agenttrain.tracking.rollouts import completions
from agenttrain.types import (
    AgenttrainError,
    AssistantTurn,
    Completion,
    Finish,
    LedgerError,
    Message,
    Origin,
    Rollout,
    StopReason,
    Task,
    ToolCall,
    ToolResult,
)
from agenttrain.utils.content import parts, text_of
from agenttrain.utils.messages import REASONING_KEYS, normal_message
from agenttrain.utils.names import did_you_mean

REMEDY = "Correct the row, or leave such rows out with data.on_bad_row=skip"
UNLIMITED = 2**31
"""Tokens. `Demonstrations.max_tokens` limits the length of a whole conversation later."""


class BadDemonstration(AgenttrainError):
    """A conversation that no rollout could have produced; names row, turn and reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrator:
    """Turns the conversations of a dataset, or its recorded rollouts, into rollouts.

    Example: ``Demonstrator(chat=chat, toolbox=toolbox, limits=config.rollout)(task, "d0")`` gives
    two sampled turns for a task whose messages are a question, a call, its reply and an answer.
    """

    chat: Chat
    toolbox: Toolbox
    limits: RolloutConfig
    """Only `max_result_tokens` has an effect on demonstrations."""
    environments: Environments = field(default_factory=Environments)

    def __call__(self, task: Task, rollout_id: str) -> Rollout:
        """Return the rollout of `task.messages`, its ledger verified. Raises BadDemonstration."""
        record = task.columns.get(ROLLOUT)
        try:
            if isinstance(record, RecordedRollout):
                return self._from_record(record, task, rollout_id)
            return self._render(task, rollout_id)
        except (BadDemonstration, ChatError, LedgerError, ValueError) as error:
            raise BadDemonstration(f"task {task.task_id}: {error}") from error

    def _from_record(self, record: RecordedRollout, task: Task, rollout_id: str) -> Rollout:
        """Return a recorded rollout with the ids of its record, if this run renders the same ones.

        Otherwise the prompt and the replies are rendered by this run's template and tools. Sampled
        turns keep their ids there, unless this run parses them to another message
        (`_Conversation._append_sampled`).
        """
        columns = {name: value for name, value in task.columns.items() if name != ROLLOUT}
        task = replace(task, columns=columns)
        rollout = read_again(record, task, rollout_id)
        schemas = RowTools(task, self.toolbox, self.environments, executed=False).schemas
        # Why this run would give the model other ids than those of the record.
        reason = difference(rollout, task.messages, self.chat, schemas)
        if reason is None:
            return rollout
        if len(rollout.trajectories) > 1:
            raise BadDemonstration(
                f"its {len(rollout.trajectories)} trajectories can only be learned as they were "
                f"recorded, and {reason}"
            )
        try:
            sampled = completions(record)
            return self._render(task, rollout_id, sampled=sampled)
        except (BadDemonstration, ChatError, LedgerError, ValueError) as error:
            # Also a BadDemonstration: its message lacks why the record was rendered again.
            raise BadDemonstration(
                f"{error}. It was not learned as recorded, because {reason}"
            ) from error

    def _render(self, task: Task, rollout_id: str, sampled: Sequence[Completion] = ()) -> Rollout:
        """Return the rollout of `task.messages`, rendered by the chat template.

        `sampled` are the completions of a record, whose turns keep their ids. They belong to the
        last assistant messages: earlier ones are examples in the prompt.
        """
        conversation = _Conversation(self, task, rollout_id, sampled)
        while conversation.pending:
            number = conversation.trajectory.turns
            try:
                conversation.append_turn(number)
            except (BadDemonstration, ChatError, ValueError) as error:  # the message names the turn
                raise BadDemonstration(f"turn {number}: {error}") from error
        verify(conversation.rollout, self.chat, conversation.schemas)
        return conversation.rollout


class _Conversation:
    """One conversation, turned into a rollout turn by turn.

    `append_turn` is called until no messages are `pending`. The `rollout` is then complete. Prompt,
    replies and turns are rendered by this run's chat template. Only a turn that a run has sampled
    and recorded may keep its ids.
    """

    def __init__(
        self,
        owner: Demonstrator,
        task: Task,
        rollout_id: str,
        sampled: Sequence[Completion] = (),
    ) -> None:
        """Begin the rollout with the conversation's prompt, the messages before its first turn.

        `sampled` are the completions of its last turns: earlier assistant messages are part of the
        prompt. Without `sampled` all assistant messages are turns.
        """
        task = replace(task, messages=tuple(owner.chat.normal_messages(task.messages)))
        assistant_indices = [i for i, m in enumerate(task.messages) if m["role"] == "assistant"]
        # With more completions than assistant messages, the record is of another conversation. Then
        # none of its ids are used, as if nothing was recorded.
        self.sampled = sampled if len(sampled) <= len(assistant_indices) else ()
        turns = len(self.sampled) or len(assistant_indices)
        first = assistant_indices[-turns] if turns else None
        if first is None or first == 0:  # there is no turn, or no message before the first one
            raise BadDemonstration(
                "has nothing to learn: its messages need a question and, after it, an assistant "
                "message"
            )
        self.chat, self.limits = owner.chat, owner.limits
        self.tools = RowTools(task, owner.toolbox, owner.environments, executed=False)
        self.schemas = self.tools.schemas
        # Messages that are not yet in the rollout. `append_turn` takes off a turn and the messages
        # up to the next one.
        self.pending = list(task.messages[first:])
        # The task that a sampled rollout of this conversation would have.
        questions = tuple(text_of(parts(m["content"])) for m in self.pending if m["role"] == "user")
        prompt = replace(task, messages=task.messages[:first], user_turns=questions)
        self.rollout = Rollout(task=prompt, rollout_id=rollout_id, group_id=rollout_id)
        self.trajectory = self.rollout.trajectories[0]
        self.trajectory.messages.extend(dict(message) for message in prompt.messages)
        self.trajectory.prompt_messages = len(prompt.messages)
        prompt_ids = self.chat.prompt_ids(prompt.messages, self.schemas)
        images = self.chat.place(prompt_ids, prompt.messages)
        self.trajectory.append_context(prompt_ids, Origin.prompt, images)

    def append_turn(self, number: int) -> None:
        """Append the next assistant message, turn `number`, and the messages that reply to it."""
        message, *later = self.pending
        if message["role"] != "assistant":
            raise BadDemonstration(f"a message of the role {message['role']} stands in its place")
        # The messages up to the next turn: replies to calls, or a user's message.
        end = next((i for i, m in enumerate(later) if m["role"] == "assistant"), len(later))
        following, self.pending = later[:end], later[end:]
        demonstrated_turn = assistant_turn(message, number)
        for call in demonstrated_turn.calls:
            if call.name not in self.tools.names:
                raise BadDemonstration(
                    f"it calls the tool {call.name!r}, which the model is not shown"
                    f"{did_you_mean(call.name, self.tools.names)}; its tools are: "
                    f"{', '.join(self.tools.names) or 'none'}; add the tool to `tools` of the run, "
                    "or of the row where it lists its own"
                )
        turn, completion = self._append_sampled(demonstrated_turn, number)
        if demonstrated_turn.calls:
            self._append_replies(turn, completion, message, replies=following)
        else:
            self._append_question(turn, completion, following)

    def _append_sampled(self, turn: AssistantTurn, number: int) -> tuple[AssistantTurn, Completion]:
        """Append a turn as if it had been sampled; return it as parsed from its tokens.

        The ids are the recorded ones if they parse to the turn, else those of the chat template.
        Recorded ids may parse to another turn: a run with another template has sampled them.
        """
        ids_before = self.trajectory.token_ids
        after = self.trajectory.messages[-1]["role"]

        def comparable(turn: AssistantTurn) -> tuple[Any, ...]:
            """Return the parts of a turn that have to survive rendering and parsing."""
            # Templates may trim the blanks around texts. Call ids are not rendered.
            calls = [(call.name, call.arguments, call.malformed) for call in turn.calls]
            return turn.content.strip(), (turn.reasoning or "").strip(), calls

        def parse(ids: Sequence[int]) -> AssistantTurn:
            return self.chat.parse(ids, self.schemas, turn=number, after=after)

        ids = self._recorded_ids(number)
        if not ids or comparable(parse(ids)) != comparable(turn):
            # The ids in which the chat template renders the turn.
            ids = completion_ids(
                self.chat, self.trajectory.messages, self.schemas, turn, prompt=ids_before.tolist()
            )
        parsed = parse(ids)
        if comparable(parsed) != comparable(turn):
            raise BadDemonstration(
                f"the chat template renders it as {self.chat.decode(ids)!r}, which is read as "
                f"{parsed.message()}, and the row has {turn.message()}"
            )
        completion = Completion(
            token_ids=tuple(ids),
            # No engine has sampled the ids. REINFORCE, by which they are learned, reads no engine's
            # logprobs, and `Demonstrations` leaves out the metrics that do.
            logprobs=(0.0,) * len(ids),
            finish=Finish.stop,
            versions=((0, len(ids)),),  # all by version 0, the initial weights
        )
        self.trajectory.append_sampled(completion, ids_before)
        self.trajectory.messages.append(parsed.message())
        return parsed, completion

    def _recorded_ids(self, number: int) -> Sequence[int]:
        """Return the ids that turn `number` was sampled in.

        Empty if none are recorded, or if they do not end with a stop token of this run.
        """
        if number >= len(self.sampled) or self.sampled[number].finish is not Finish.stop:
            return ()
        ids = self.sampled[number].token_ids
        return ids if ids and ids[-1] in self.chat.stop_token_ids else ()

    def _append_replies(
        self,
        turn: AssistantTurn,
        completion: Completion,
        message: Message,
        replies: Sequence[Message],
    ) -> None:
        """Append the replies to the calls of a turn.

        `message` is the turn as the row has it. Replies to the last turn may be missing.
        """
        if other_roles := {reply["role"] for reply in replies} - {"tool"}:
            raise BadDemonstration(f"a message of the role {other_roles.pop()} follows its calls")
        replies = _in_call_order(replies, message["tool_calls"])
        texts = [reply.get("content") or "" for reply in replies]

        is_last_turn = not self.pending  # the row has no message after these replies
        stops = any(call.name in self.tools.stop_tools for call in turn.calls)
        if stops and not is_last_turn:
            raise BadDemonstration("it calls a stop tool, and the conversation goes on")
        if is_last_turn:
            # An agent that still calls other tools at its end has run out of turns.
            self.rollout.stop_reason = StopReason.stop_tool if stops else StopReason.max_turns
            if not texts:  # the row ends with the calls
                return
        if len(texts) != len(turn.calls):
            raise BadDemonstration(f"{len(turn.calls)} calls have {len(texts)} replies")
        pairs = list(zip(turn.calls, texts, strict=True))
        clipped, suffix = fit_replies(
            self.chat,
            turn,
            [
                {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
                for call, text in pairs
            ],
            completion=completion,
            max_suffix_tokens=UNLIMITED,
            max_result_tokens=[
                self.tools.limits(call.name).max_result_tokens or self.limits.max_result_tokens
                for call in turn.calls
            ],
            generation_prompt=not is_last_turn,
        )
        append_suffix(self.trajectory, suffix, clipped, self.chat)
        self.trajectory.messages.extend(clipped)
        # As in a sampled rollout, results have the complete texts, and messages the clipped ones.
        self.rollout.tool_results.extend(
            ToolResult(call=c, content=text_of(parts(text))) for c, text in pairs
        )

    def _append_question(
        self, turn: AssistantTurn, completion: Completion, following: Sequence[Message]
    ) -> None:
        """Append the user's message after an answer. The last answer of the row has none.

        `following` are the messages of the row between this answer and the next one.
        """
        is_last_turn = not self.pending  # the row has no message after `following`
        roles = [message["role"] for message in following]
        expected_roles = [] if is_last_turn else ["user"]
        if roles != expected_roles:
            raise BadDemonstration(
                "one user message must follow an answer, unless it is the last message of the row; "
                f"the roles that follow are: {', '.join(roles) or 'none'}"
            )
        if is_last_turn:
            self.rollout.stop_reason = StopReason.completed
            return
        suffix = suffix_after(self.chat, turn, completion, following)
        append_suffix(self.trajectory, suffix, following, self.chat)
        self.trajectory.messages.extend(dict(message) for message in following)


def _in_call_order(replies: Sequence[Message], calls: Sequence[Message]) -> Sequence[Message]:
    """Return the replies in the order of their calls, by id if all ids are there and differ."""
    ids = [call.get("id") for call in calls]
    by_id = {reply.get("tool_call_id"): reply for reply in replies}
    if len(by_id) == len(replies) == len(ids) and set(by_id) == set(ids):
        return [by_id[call_id] for call_id in ids]
    return replies


def assistant_turn(message: Message, number: int) -> AssistantTurn:
    """Read an assistant message of a dataset as a turn. Raises BadDemonstration."""
    try:
        message = normal_message(message)
    except ValueError as error:
        raise BadDemonstration(str(error)) from error
    calls = []
    for index, call in enumerate(message.get("tool_calls", ())):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        calls.append(ToolCall(id=f"call_{number}_{index}", name=name, arguments=arguments))
    return AssistantTurn(
        content=message.get("content") or "",
        reasoning=message.get(REASONING_KEYS[0]) or None,  # where `normal_message` puts it
        calls=tuple(calls),
    )
