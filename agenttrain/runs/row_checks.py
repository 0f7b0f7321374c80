"""Checks of dataset rows against the chat template, before a run starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agenttrain.chat.certificate import Certificate, certify
from agenttrain.chat.chat import Chat
from agenttrain.chat.encoding import ChatError
from agenttrain.chat.features import system_problem
from agenttrain.data.config import OnBadRow
from agenttrain.data.tasks import TaskSource
from agenttrain.data.transform import MAX_LISTED
from agenttrain.environments.environments import Environments
from agenttrain.rollout.row_tools import check_grammars, row_tool_sets, tool_sets
from agenttrain.tools.toolbox import Toolbox
from agenttrain.types import AssistantTurn, Finish, Message, Task

RENDERED_TASKS = 8
"""First tasks of each split whose prompts are rendered before a run starts."""
ANSWER = AssistantTurn(content="ok", reasoning=None, calls=())
ROW_TOOL_SETS = 4
"""Distinct sets of tools that the rows of a split list, with which the template is certified."""


def check_rows(
    chat: Chat,
    toolbox: Toolbox,
    environments: Environments,
    sources: Mapping[str, TaskSource],
    *,
    structured_calls: bool = False,
    executed: bool = True,
    on_bad_row: OnBadRow = OnBadRow.error,
) -> set[str]:
    """Check the rows of each source with their tools; return these tools' names.

    Raises RowError with the name of the row, CertificateError and ChatError.
    """
    names: set[str] = set()
    if structured_calls:
        check_grammars(chat, tool_sets(toolbox, environments))
    for key, source in sources.items():
        sets = list(row_tool_sets(key, source, toolbox, environments, executed=executed))
        names |= {schema["function"]["name"] for schemas in sets for schema in schemas}
        if sets:
            certify_tool_sets(chat, sets[:ROW_TOOL_SETS]).raise_if_refused()
        _check_messages(chat, key, source, on_bad_row)
        if structured_calls:
            check_grammars(chat, sets)
    return names


def _check_messages(chat: Chat, key: str, source: TaskSource, on_bad_row: OnBadRow) -> None:
    """Leave out the rows of which the template drops a message, or raise ChatError.

    A conversation is rendered only if a message stands in a place that no row before it had. A text
    that the template changes, and later rows of a source without end, are found while the run goes
    on (`Collector.on_bad_row`).
    """
    bad = dict[int, str]()
    for index in range(RENDERED_TASKS if source.endless else len(source)):
        messages = source.row(index).messages
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        # A row that ends with an answer is a demonstration: its prompt ends before the first one.
        is_demonstration = bool(answers) and answers[-1] == len(messages) - 1
        prompt = messages[: answers[0]] if is_demonstration else messages
        try:
            chat.check_places(prompt, ())
        except ChatError as error:
            line = f"{source.where(index)}: {error}"
            if on_bad_row is OnBadRow.error:
                raise ChatError(f"{key}: {line}; or data.on_bad_row=skip") from error
            bad[index] = line
            if len(bad) == len(source):
                raise ChatError(f"{key}: not one row is left; the last, {line}") from error
    if bad and not source.endless:
        count = f"{len(bad)} of {len(source)} rows"
        listed = "\n".join(f"  {line}" for line in list(bad.values())[:MAX_LISTED])
        note = f"{key}: {count} are left out (data.on_bad_row=skip)\n{listed}"
        source.leave_out(bad, note)


def prompt_length(chat: Chat, task: Task, schemas: Sequence[dict[str, Any]]) -> int:
    """Return the tokens of a prompt and its later user turns. Raises ChatError."""
    if any(message["role"] == "system" for message in task.messages):
        problem = system_problem(chat, schemas)
        if problem is not None:
            raise ChatError(
                f"{problem}, and this task has one; put its text into the first user "
                "message, or set chat_template=file with chat_template.path=<file.jinja>"
            )
    length = len(chat.prompt_ids(task.messages, schemas))
    messages: list[Message] = list(task.messages)
    for text in task.user_turns:
        question: Message = {"role": "user", "content": text}
        messages += [ANSWER.message(), question]
        chat.prompt_ids(messages, schemas)
        chat.suffix(
            ANSWER,
            [question],
            completion_ids=[0],
            finish=Finish.length,
            generation_prompt=True,
        )
    return length


def certify_tool_sets(chat: Chat, sets: Sequence[list[dict[str, Any]]]) -> Certificate:
    """Return the certificate of the first set of tools that fails, else that of the first set."""
    certificates = [certify(chat, schemas) for schemas in sets]
    failed = (certificate for certificate in certificates if not certificate.passed)
    return next(failed, certificates[0])
