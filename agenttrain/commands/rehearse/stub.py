"""A stub in the place of the model: turns with valid and invalid calls of the run's own tools.

Its turns are rendered by the run's chat template and come as token ids, as a model's do. Arguments
are drawn from the tools' JSON schemas, texts among them from the row, where a tool may know them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from agenttrain.chat.chat import Chat
from agenttrain.chat.demonstrations import completion_ids
from agenttrain.commands.schema_examples import arguments_for
from agenttrain.runs.setup import Components
from agenttrain.types import AssistantTurn, Message, Task, ToolCall

NO_TOOL = "no_such_tool"
NO_ARGUMENT = "no_such_argument"
WORDS = 40
"""Words of a prompt that texts are drawn from: its last."""
LONGEST = 40
"""Characters of a column's value that is drawn."""
QUESTION: Message = {"role": "user", "content": "?"}


class Kind(StrEnum):
    """Kinds of turns that the stub writes.

    `endless` is an answer cut at the limit of tokens; `stop` calls a tool that ends the rollout.
    """

    call = "valid call"
    two_calls = "two valid calls"
    wrong_arguments = "wrong arguments"
    unknown_tool = "unknown tool"
    damaged = "damaged call"
    endless = "answer without an end"
    answer = "answer"
    stop = "stop tool"


FIRST = (
    *(Kind.call, Kind.call, Kind.wrong_arguments, Kind.call, Kind.unknown_tool, Kind.call),
    *(Kind.damaged, Kind.two_calls, Kind.call, Kind.call, Kind.endless),
)
"""Kinds of the first turns, rollout by rollout, so that a short rehearsal has each of them."""
LATER = {Kind.call: 4, Kind.two_calls: 1, Kind.wrong_arguments: 1, Kind.stop: 6}
"""Kinds of later turns, with their weights."""


@dataclass(slots=True)
class Stub:
    """Stand-in for a model in a rehearsal: it writes calls and answers, some of them wrong.

    The kinds of the rollouts' first turns go through FIRST; those of later turns are drawn from
    LATER by weight. A kind that the row's tools do not allow is replaced by the nearest one
    (`_possible_kind`): a call without tools is an answer.

    `ScriptedEngine` calls ``stub(token_ids, session, turn)`` for the ids of each turn. The same
    run, row, sample and turn give the same ids.
    """

    components: Components
    tasks: Sequence[Task]
    """Tasks by the place that the session names: ``rehearse-<place>-<sample>``."""
    written: Counter[Kind] = field(default_factory=Counter)
    """Number of turns of each kind."""
    _after: dict[str, str] = field(default_factory=dict)
    """Session -> role of the message that its next turn answers: "tool" after calls, "user" after
    an answer. A session that is missing begins: a user's. A template may begin a turn in another
    way after a tool's message."""

    def __call__(self, token_ids: Sequence[int], session: str, turn: int) -> list[int]:
        """Return the ids of turn `turn` of `session`; the prompt's `token_ids` are not read."""
        _, place, sample = session.rsplit("-", 2)  # rehearse-<place of the task>-<sample>
        task, chat = self.tasks[int(place)], self.components.chat
        schemas = self.components.schemas(task)
        rng = random.Random(f"{self.components.config.seed}-{session}-{turn}")
        # Offset into FIRST and the tools. The samples of one task get different kinds, and so do
        # the first samples of different tasks: task 0 has 0, 1, 2, …, task 1 has 1, 2, 3, ….
        rotation = int(place) + int(sample)
        stops = self.components.stop_tools(task)
        tools = [schema["function"] for schema in schemas]
        callable_tools = [tool for tool in tools if tool["name"] not in stops]
        stop_tools = [tool for tool in tools if tool["name"] in stops]
        kind = FIRST[rotation % len(FIRST)]
        if turn:  # a later turn: LATER has a weight for each kind
            kind = rng.choices(list(LATER), list(LATER.values()))[0]
        kind = _possible_kind(
            kind,
            has_tools=bool(callable_tools),
            has_stop_tools=bool(stop_tools),
            one_call=chat.one_call_per_turn,
        )
        self.written[kind] += 1

        after = self._after.get(session, "user")  # role of the message that the turn answers
        if kind in (Kind.answer, Kind.endless):
            self._after[session] = "user"
            return self._answer_ids(kind, task, schemas, after, rng)
        self._after[session] = "tool"
        # Each turn and each sample takes the next tool in the list, so that each is called.
        candidates = stop_tools if kind is Kind.stop else callable_tools
        called = [candidates[(rotation + turn) % len(candidates)]]
        if kind is Kind.two_calls:
            called.append(rng.choice(callable_tools))
        calls = tuple(
            _draw_call(kind, tool, f"call_{turn}_{index}", task, rng)
            for index, tool in enumerate(called)
        )
        turn_with_calls = AssistantTurn(content="", reasoning=None, calls=calls)
        ids = turn_ids(chat, turn_with_calls, schemas, after)
        if kind is Kind.damaged:
            # Cut some tokens out of the middle.
            middle = len(ids) // 2
            ids = ids[:middle] + ids[middle + max(len(ids) // 6, 1) :]
        return ids

    def _answer_ids(
        self,
        kind: Kind,
        task: Task,
        schemas: Sequence[dict],
        after: str,
        rng: random.Random,
    ) -> list[int]:
        """Return the ids of an answer with a text of the task.

        `kind` is Kind.answer, or Kind.endless for one that exceeds the limit of tokens. `after` is
        the role of the message that it answers: "user" or "tool".
        """
        # Half of the answers are a column's value, which may be the right one, and half a word of
        # the prompt: rewards then differ.
        column_texts, prompt_words = task_texts(task)
        takes_column = column_texts and rng.random() < 0.5
        text = rng.choice(column_texts if takes_column else prompt_words)
        answer = AssistantTurn(content=text, reasoning=None, calls=())
        ids = turn_ids(self.components.chat, answer, schemas, after)
        if kind is Kind.answer:
            return ids
        # Endless: repeat the answer without its last token, the end of turn, beyond the limit.
        part = ids[: max(len(ids) - 1, 1)]
        return part * (self.components.config.rollout.max_turn_tokens // len(part) + 1)


def _draw_call(kind: Kind, tool: dict, call_id: str, task: Task, rng: random.Random) -> ToolCall:
    """Return a call of a tool with arguments that fit its schema.

    Kinds of wrong calls name a tool that does not exist, or miss an argument or add one. Kind.stop
    calls a tool that ends the rollout, usually by handing in an answer: ``submit(answer=…)``.
    """
    column_texts, words = task_texts(task)
    arguments = arguments_for(tool, [*column_texts, *words], rng)
    if kind is Kind.stop and rng.random() < 0.5:
        # Half of the answers that are handed in are the row's own values, where argument and column
        # have one name. These are mostly right and the drawn ones wrong, so that rewards differ:
        # if all rollouts got the same, the rehearsal would warn that nothing can be learnt.
        columns = task.columns
        arguments |= {key: columns[key] for key in arguments if key in columns}
    name = NO_TOOL if kind is Kind.unknown_tool else tool["name"]
    if kind is Kind.wrong_arguments:
        schema = tool.get("parameters") or {}
        required = [key for key in schema.get("required", ()) if key in arguments]
        if required:
            del arguments[rng.choice(required)]
        else:
            arguments[NO_ARGUMENT] = 1
    return ToolCall(id=call_id, name=name, arguments=arguments)


def _possible_kind(kind: Kind, *, has_tools: bool, has_stop_tools: bool, one_call: bool) -> Kind:
    """Return `kind`, or the nearest one that the row's tools and the chat template allow.

    `has_tools` counts only tools that do not stop a rollout. `one_call`: the template allows a
    single call in a turn. Kind.endless, an answer without an end, is always possible.
    """
    if kind is Kind.two_calls and one_call:
        kind = Kind.call
    if kind is Kind.stop and not has_stop_tools:
        kind = Kind.answer
    # Without other tools every kind of call becomes the stop tool, the only one to call, or else an
    # answer. No table has Kind.answer: above, it means that there is no stop tool.
    if not has_tools and kind not in (Kind.stop, Kind.endless):
        kind = Kind.stop if has_stop_tools else Kind.answer
    return kind


def turn_ids(chat: Chat, turn: AssistantTurn, schemas: Sequence[dict], after: str) -> list[int]:
    """Return the ids of a turn that follows a message of the role `after`, end of turn included.

    The turn is rendered after a short made-up conversation. Of the messages before it, only the
    role of the last one changes its ids: a template may open the reasoning after a user's message.
    """
    messages = [QUESTION]
    if chat.opens_reasoning(after):
        # The prompt has opened the reasoning: a turn has to close it before its calls are read.
        turn = replace(turn, reasoning="…")
    if after == "tool" and schemas:
        call = ToolCall(id="call_0_0", name=schemas[0]["function"]["name"], arguments={})
        before = AssistantTurn(content="", reasoning=None, calls=(call,))
        reply: Message = {
            "role": "tool",
            "tool_call_id": call.id,
            "name": call.name,
            "content": "-",
        }
        messages += [before.message(), reply]
    ids = completion_ids(chat, messages, schemas, turn)
    return ids if ids[-1] in chat.stop_token_ids else [*ids, chat.stop_token_ids[0]]


def task_texts(task: Task) -> tuple[list[str], list[str]]:
    """Return the short values of a row's columns, and the last words of its messages.

    Without any words these are ["word"], so that there is always a text to draw.
    """
    columns = [str(value) for value in task.columns.values() if isinstance(value, str | int)]
    content = " ".join(str(message.get("content") or "") for message in task.messages)
    words = [word.strip(".,:;?!\"'()") for word in content.split()[-WORDS:]]
    return [text for text in columns if len(text) <= LONGEST], list(filter(None, words)) or ["word"]
