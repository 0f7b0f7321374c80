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
HOLDS_ANSWER = (
    "the last message is the assistant's, so the prompt would hold the answer; end `messages` with "
    "the question, or learn from it with agenttrain sft"
)
ROW_TOOL_SETS = 4
"""The template is certified with so many of the distinct sets of tools that a split's rows list."""


def check_rows(
    chat: Chat,
    toolbox: Toolbox,
    environments: Environments,
    sources: Mapping[str, TaskSource],
    *,
    structured_calls: bool = False,
    executed: bool = True,
    may_end_with_answer: bool = False,
    on_bad_row: OnBadRow = OnBadRow.error,
) -> set[str]:
    """Check the rows of each source, and the template with the tools that rows list.

    Return the names of these tools. `executed`: the run calls the tools that rows list; False: it
    only shows their schemas. A row that ends with an assistant's message is a bad one unless rows
    `may_end_with_answer`: the model would be asked with the answer in its prompt.

    Raises RowError with the name of the row, CertificateError if the template does not fit the
    tools, and ChatError as `check_grammars`.
    """
    names: set[str] = set()
    if structured_calls:
        check_grammars(chat, tool_sets(toolbox, environments))
    for key, source in sources.items():
        sets = list(row_tool_sets(key, source, toolbox, environments, executed=executed))
        names |= {schema["function"]["name"] for schemas in sets for schema in schemas}
        if sets:
            certify_tool_sets(chat, sets[:ROW_TOOL_SETS]).raise_if_refused()
        _check_messages(chat, key, source, on_bad_row, may_end_with_answer=may_end_with_answer)
        if structured_calls:
            check_grammars(chat, sets)
    return names


def _check_messages(
    chat: Chat,
    key: str,
    source: TaskSource,
    on_bad_row: OnBadRow,
    *,
    may_end_with_answer: bool,
) -> None:
    """Raise ChatError for the first bad row, or leave out all bad rows, as `on_bad_row` says.

    A row is bad if the template drops one of its messages, or if its prompt would hold the answer.
    To be quick, `Chat.check_places` renders a conversation only if one of its messages stands in a
    place that no earlier row had.

    The run itself treats two kinds of bad rows when it draws them (`Collector.on_bad_row`): rows in
    whose texts the template alters something, and the rows of a source without end. Only the first
    RENDERED_TASKS of the latter are checked here, and only to raise: none can be left out.
    """
    problems: dict[int, str] = {}
    """Index of a bad row -> its place in the data, and the reason."""
    for index in range(RENDERED_TASKS if source.endless else len(source)):
        messages = source.row(index).messages
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        # A row that ends with an answer is a demonstration of the whole conversation: the model
        # learns all its answers, so the prompt is what stands before the first one.
        is_demonstration = bool(answers) and answers[-1] == len(messages) - 1
        prompt = messages[: answers[0]] if is_demonstration else messages
        try:
            if is_demonstration and not may_end_with_answer:
                raise ChatError(HOLDS_ANSWER)
            chat.check_places(prompt, schemas=())
        except ChatError as error:
            line = f"{source.where(index)}: {error}"
            if on_bad_row is OnBadRow.error:
                raise ChatError(f"{key}: {line}; or data.on_bad_row=skip") from error
            problems[index] = line
            if len(problems) == len(source):
                raise ChatError(f"{key}: not one row is left; the last, {line}") from error
    if problems and not source.endless:  # the run leaves out an endless source's bad rows itself
        count = f"{len(problems)} of {len(source)} rows"
        listed = "\n".join(f"  {line}" for line in list(problems.values())[:MAX_LISTED])
        note = f"{key}: {count} are left out (data.on_bad_row=skip)\n{listed}"
        source.leave_out(problems, note)


def prompt_length(chat: Chat, task: Task, schemas: Sequence[dict[str, Any]]) -> int:
    """Return the number of tokens of a task's prompt.

    Each later user turn is rendered too, after an answer, to check it. Raises ChatError if the
    template cannot render them.
    """
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
        # Both ways to render the question, only to see them fail: neither the ids nor the made-up
        # completion are used.
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
    """Certify the template with each set of tools; return the first failure, else the first."""
    certificates = [certify(chat, schemas) for schemas in sets]
    failed = (certificate for certificate in certificates if not certificate.passed)
    return next(failed, certificates[0])
