"""A recorded conversation as a Rollout: what the model would have sampled, had it said that.

The prompt is what comes before the first assistant message. Every assistant message is a sampled
turn, in the ids that its template writes; replies are context, rendered and clipped as the loop
does it. So the ids, the mask and the messages are those of a rollout in which the model behaved so.
A sampled token has the log-probability 0: the demonstrator was sure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agenttrain.chat.chat import Chat
from agenttrain.chat.demonstrations import completion_ids
from agenttrain.chat.encoding import ChatError
from agenttrain.chat.probing import REASONING_KEYS
from agenttrain.environments.environments import Environments
from agenttrain.rollout.config import RolloutConfig
from agenttrain.rollout.ledger import verify
from agenttrain.rollout.replies import fit_replies
from agenttrain.rollout.row_tools import RowTools
from agenttrain.tools.toolbox import Toolbox
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
from agenttrain.utils.names import did_you_mean

REMEDY = "Correct the row, or leave such rows out with data.on_bad_row=skip"
UNLIMITED = 2**31
"""Tokens: a demonstration's length is not limited here."""


class BadDemonstration(AgenttrainError):
    """A conversation that no rollout could be; the message names the row, the turn and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrator:
    """Turns the conversations of a dataset into rollouts.

    Example: ``Demonstrator(chat=chat, toolbox=toolbox, limits=config.rollout)(task, "d0")`` of a
    task whose messages are a question, a call, its reply and an answer has two sampled turns.
    """

    chat: Chat
    toolbox: Toolbox
    limits: RolloutConfig
    """Limits, of which only `max_result_tokens` has a meaning for a demonstration."""
    environments: Environments = field(default_factory=Environments)

    def __call__(self, task: Task, rollout_id: str) -> Rollout:
        """The rollout of `task.messages`, its ledger verified. Raises BadDemonstration."""
        try:
            talk = _Talk(self, task, rollout_id)
            talk.run()
            verify(talk.rollout, self.chat, talk.schemas)
        except (BadDemonstration, ChatError, LedgerError, ValueError) as error:
            raise BadDemonstration(f"task {task.task_id}: {error}") from error
        return talk.rollout


class _Talk:
    """One conversation on its way into a rollout."""

    def __init__(self, owner: Demonstrator, task: Task, rollout_id: str) -> None:
        first = _first_answer(task.messages)
        self.chat, self.limits = owner.chat, owner.limits
        self.tools = RowTools(task, owner.toolbox, owner.environments)
        self.schemas = self.tools.schemas
        self.left = list(task.messages[first:])
        questions = tuple(str(m["content"]) for m in self.left if m["role"] == "user")
        prompt = replace(task, messages=task.messages[:first], user_turns=questions)
        self.rollout = Rollout(task=prompt, rollout_id=rollout_id, group_id=rollout_id)
        self.trajectory = self.rollout.trajectories[0]
        self.trajectory.messages.extend(dict(message) for message in prompt.messages)
        self.trajectory.prompt_messages = len(prompt.messages)
        prompt_ids = self.chat.prompt_ids(prompt.messages, self.schemas)
        self.trajectory.append_context(prompt_ids, Origin.prompt)

    def run(self) -> None:
        """Turn by turn to the end."""
        while self.left:
            number = self.trajectory.turns
            try:
                self._turn(number)
            except (BadDemonstration, ChatError, ValueError) as error:
                raise BadDemonstration(f"turn {number}: {error}") from error

    def _turn(self, number: int) -> None:
        message, behind = self._next()
        demonstrated = assistant_turn(message, number)
        for call in demonstrated.calls:
            if call.name not in self.tools.names:
                raise BadDemonstration(
                    f"it calls the tool {call.name!r}, which the model is not shown"
                    f"{did_you_mean(call.name, self.tools.names)}; its tools are: "
                    f"{', '.join(self.tools.names) or 'none'}; add the tool to `tools` of the run, "
                    "or of the row where it lists its own"
                )
        turn, completion = self._say(demonstrated, number)
        if demonstrated.calls:
            self._answer_calls(turn, completion, _in_order(message, behind))
        else:
            self._ask(turn, completion, behind)

    def _next(self) -> tuple[Message, list[Message]]:
        """The next assistant message, and the messages up to the one after it."""
        message, *rest = self.left
        if message["role"] != "assistant":
            raise BadDemonstration(f"a message of the role {message['role']} stands in its place")
        end = next((i for i, m in enumerate(rest) if m["role"] == "assistant"), len(rest))
        self.left = rest[end:]
        return message, rest[:end]

    def _say(self, turn: AssistantTurn, number: int) -> tuple[AssistantTurn, Completion]:
        """Append the turn as if it had been sampled; the turn as it is read from its tokens."""
        sent = self.trajectory.token_ids
        ids = completion_ids(
            self.chat, self.trajectory.messages, self.schemas, turn, prompt=sent.tolist()
        )
        after = self.trajectory.messages[-1]["role"]
        parsed = self.chat.parse(ids, self.schemas, turn=number, after=after)
        if _plain(parsed) != _plain(turn):
            raise BadDemonstration(
                f"the chat template renders it as {self.chat.decode(ids)!r}, which is read as "
                f"{parsed.message()}, and the row has {turn.message()}"
            )
        completion = Completion(
            token_ids=tuple(ids),
            logprobs=(0.0,) * len(ids),
            finish=Finish.stop,
            versions=((0, len(ids)),),
        )
        self.trajectory.append_sampled(completion, sent)
        self.trajectory.messages.append(parsed.message())
        return parsed, completion

    def _answer_calls(
        self, turn: AssistantTurn, completion: Completion, texts: Sequence[str]
    ) -> None:
        """Append the replies to the turn's calls; the last turn's may be missing."""
        stops = any(call.name in self.tools.stop_tools for call in turn.calls)
        if stops and self.left:
            raise BadDemonstration("it calls a stop tool, and the conversation goes on")
        if not self.left:
            self.rollout.stop_reason = StopReason.stop_tool if stops else StopReason.max_turns
        if not texts and not self.left:
            return
        if len(texts) != len(turn.calls):
            raise BadDemonstration(f"{len(turn.calls)} calls have {len(texts)} replies")
        pairs = list(zip(turn.calls, texts, strict=True))
        replies, suffix = fit_replies(
            self.chat,
            turn,
            [_reply(call, text) for call, text in pairs],
            completion=completion,
            room=UNLIMITED,
            max_result_tokens=[
                self.tools.limits(call.name).max_result_tokens or self.limits.max_result_tokens
                for call in turn.calls
            ],
            generation_prompt=bool(self.left),
        )
        for origin, token_ids in suffix:
            self.trajectory.append_context(token_ids, origin)
        self.trajectory.messages.extend(replies)
        self.rollout.tool_results.extend(ToolResult(call=c, content=text) for c, text in pairs)

    def _ask(self, turn: AssistantTurn, completion: Completion, behind: Sequence[Message]) -> None:
        """Append what the user says to an answer; nothing after the last."""
        roles = [message["role"] for message in behind]
        if roles != ["user"] * bool(self.left):
            told = ", ".join(roles) or "none"
            raise BadDemonstration(
                "one user message must follow an answer, unless it is the last message of the row; "
                f"the roles that follow are: {told}"
            )
        if not self.left:
            self.rollout.stop_reason = StopReason.completed
            return
        suffix = self.chat.suffix(
            turn,
            behind,
            completion_ids=completion.token_ids,
            finish=completion.finish,
            generation_prompt=True,
        )
        for origin, token_ids in suffix:
            self.trajectory.append_context(token_ids, origin)
        self.trajectory.messages.extend(dict(message) for message in behind)


def assistant_turn(message: Message, number: int) -> AssistantTurn:
    """An assistant message of a dataset as a turn, its calls numbered as the loop numbers them.

    Arguments may be an object or its JSON text. Raises BadDemonstration for what is no call.
    """
    reasoning = next((message[key] for key in REASONING_KEYS if message.get(key)), None)
    calls = [
        _call(given, f"call_{number}_{index}")
        for index, given in enumerate(message.get("tool_calls") or ())
    ]
    return AssistantTurn(
        content=message.get("content") or "", reasoning=reasoning, calls=tuple(calls)
    )


def _call(given: Any, call_id: str) -> ToolCall:
    function = given.get("function", given) if isinstance(given, Mapping) else {}
    name, arguments = function.get("name"), function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise BadDemonstration(f"the arguments of {name} are no JSON: {arguments!r}") from error
    if not isinstance(name, str) or not isinstance(arguments, Mapping | None):
        raise BadDemonstration(f"{given!r} is no call with a name and an object of arguments")
    return ToolCall(id=call_id, name=name, arguments=dict(arguments or {}))


def _reply(call: ToolCall, text: str) -> Message:
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}


def _in_order(message: Message, replies: Sequence[Message]) -> list[str]:
    """The texts of the replies in the order of the calls: by their ids, where all have one."""
    if other := {reply["role"] for reply in replies} - {"tool"}:
        raise BadDemonstration(f"a message of the role {other.pop()} follows its calls")
    given = [call.get("id") for call in message["tool_calls"]]
    found = {reply.get("tool_call_id"): reply for reply in replies}
    if len(found) == len(replies) == len(given) and set(found) == set(given):
        replies = [found[call_id] for call_id in given]
    return [str(reply.get("content") or "") for reply in replies]


def _plain(turn: AssistantTurn) -> tuple[Any, ...]:
    """Return the part of a turn that its tokens must give back: all but blanks around its texts."""
    calls = [(call.name, call.arguments, call.malformed) for call in turn.calls]
    return turn.content.strip(), (turn.reasoning or "").strip(), calls


def _first_answer(messages: Sequence[Message]) -> int:
    """The place of the first assistant message."""
    place = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), None)
    if not place:
        raise BadDemonstration(
            "has nothing to learn: its messages need a question and, after it, an assistant message"
        )
    return place
