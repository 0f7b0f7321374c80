"""The certificate of a run's chat template, on the run's own tools and data, without weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agenttrain.chat.certificate import Certificate, certify
from agenttrain.chat.encoding import ChatError
from agenttrain.chat.features import system_problem
from agenttrain.chat.load import load_chat
from agenttrain.chat.template import Chat
from agenttrain.config.model_path import model_folder
from agenttrain.config.schema import RunConfig
from agenttrain.data.source import TaskSource
from agenttrain.rewards.build import build_rubric
from agenttrain.rewards.rubric import Rubric
from agenttrain.tools.build import build_toolbox
from agenttrain.tools.toolbox import Toolbox
from agenttrain.types import AssistantTurn, Finish, Message, Task

TRIED = 8
"""First tasks of each split that are rendered before a run starts."""
ANSWER = AssistantTurn(content="ok", reasoning=None, calls=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Certified:
    """A run's chat and tools, and what the certificate says of them together."""

    tokenizer: Any
    chat: Chat
    toolbox: Toolbox
    certificate: Certificate


def certified(config: RunConfig) -> Certified:
    """Certify the template; raises with the key to change where it cannot be read at all."""
    from transformers import AutoTokenizer

    toolbox = build_toolbox(
        config.tools,
        config.stop_tools,
        threads=config.rollout.concurrency,
        max_stuck=config.rollout.max_stuck_calls,
    )
    tokenizer = AutoTokenizer.from_pretrained(model_folder(config.model.path))
    chat = load_chat(
        tokenizer, config.chat_template, config.response_schema, tools=bool(toolbox.schemas())
    )
    certificate = certify(chat, toolbox.schemas())
    return Certified(tokenizer=tokenizer, chat=chat, toolbox=toolbox, certificate=certificate)


def prompt_lengths(found: Certified, sources: Mapping[str, TaskSource]) -> dict[str, list[int]]:
    """Tokens of the prompts of each source's first tasks; all their user turns are rendered too.

    Raises ChatError that names the key, the task and what to change where the template refuses one.
    """
    lengths = {}
    for key, source in sources.items():
        tasks = source.tasks(0, min(TRIED, len(source)))
        lengths[key] = [_prompt_length(found, task, key) for task in tasks]
    return lengths


def told(lengths: Mapping[str, Sequence[int]]) -> str:
    """What `agenttrain check` prints of `prompt_lengths`."""
    parts = [
        f"the first {len(found)} of {key} have {min(found)} to {max(found)} tokens"
        for key, found in lengths.items()
    ]
    return f"prompts        {'; '.join(parts)}"


def _prompt_length(found: Certified, task: Task, key: str) -> int:
    try:
        return _render(found.chat, task, found.toolbox.schemas(task.tools))
    except ChatError as error:
        raise ChatError(
            f"{key}: task {task.task_id}: {error}; or remove the messages from the rows"
        ) from error


def _render(chat: Chat, task: Task, schemas: Sequence[dict]) -> int:
    """Tokens of the prompt. Raises ChatError where it, or a user turn behind it, is refused."""
    if any(message["role"] == "system" for message in task.messages):
        problem = system_problem(chat, schemas)
        if problem is not None:
            raise ChatError(
                f"{problem}, and this task has one; put its text into the first user message, or "
                "set chat_template=file with chat_template.path=<file.jinja>"
            )
    length = len(chat.prompt_ids(task.messages, schemas))
    messages: list[Message] = list(task.messages)
    for text in task.user_turns:
        question: Message = {"role": "user", "content": text}
        messages += [ANSWER.message(), question]
        chat.prompt_ids(messages, schemas)
        chat.suffix(
            ANSWER, [question], completion_ids=[0], finish=Finish.length, generation_prompt=True
        )
    return length


def rewards_of(config: RunConfig, found: Certified) -> Rubric:
    """The run's rewards; raises ValueError for one on a tool that the run does not have."""
    rubric = build_rubric(config.reward)
    rubric.check_tools(found.toolbox.names)
    return rubric
