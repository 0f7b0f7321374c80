"""The certificate of a run's chat template, on the run's own tools and data, without weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agenttrain.chat.certificate import Certificate, certify
from agenttrain.chat.encoding import ChatError
from agenttrain.chat.features import system_problem
from agenttrain.chat.load import load_chat
from agenttrain.chat.template import Chat
from agenttrain.config.environments import REWARD, REWARD_TARGET, reward_sections
from agenttrain.config.model_path import model_folder
from agenttrain.config.schema import RunConfig
from agenttrain.data.build import Splits, build_tasks
from agenttrain.data.source import TaskSource
from agenttrain.rewards.build import build_rubric
from agenttrain.rewards.rubric import Rubric
from agenttrain.rollout.build import build_tools
from agenttrain.rollout.environments import Environments
from agenttrain.rollout.grammar_check import check_grammars
from agenttrain.rollout.row_check import row_tool_sets, tool_sets
from agenttrain.rollout.row_tools import RowTools
from agenttrain.tools.toolbox import Toolbox
from agenttrain.types import AssistantTurn, Finish, Message, Task

TRIED = 8
"""First tasks of each split that are rendered before a run starts."""
ANSWER = AssistantTurn(content="ok", reasoning=None, calls=())

ROW_SETS = 4
"""Distinct sets of tools that the rows of a split list, with which the template is certified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certified:
    """A run's chat and tools, and what the certificate says of them together."""

    tokenizer: Any
    chat: Chat
    toolbox: Toolbox
    environments: Environments
    certificate: Certificate
    structured_calls: bool = False
    """As `rollout.structured_calls`."""

    def schemas(self, task: Task) -> list[dict[str, Any]]:
        """What the model of this task sees of the tools."""
        return RowTools(task, self.toolbox, self.environments).schemas


def certified(config: RunConfig) -> Certified:
    """Certify the template; raises with the key to change where it cannot be read at all.

    With several environments it is certified with the tools of each.
    """
    from transformers import AutoTokenizer

    toolbox, environments = build_tools(config)
    sets = tool_sets(toolbox, environments)
    tokenizer = AutoTokenizer.from_pretrained(model_folder(config.model.path))
    chat = load_chat(
        tokenizer, config.chat_template, config.response_schema, tools=any(map(bool, sets))
    )
    return Certified(
        tokenizer=tokenizer,
        chat=chat,
        toolbox=toolbox,
        environments=environments,
        certificate=_certificate(chat, sets),
        structured_calls=config.rollout.structured_calls,
    )


def splits_of(config: RunConfig) -> Splits:
    """The run's tasks; with an environment a row need not ask anything itself."""
    return build_tasks(config.data, seed=config.seed, needs_prompt=not config.environment)


def check_rows(found: Certified, sources: Mapping[str, TaskSource]) -> set[str]:
    """Check the rows of each source, and the template with the tools that they list.

    Returns the names of these tools. Raises RowError that names the row, CertificateError as
    `Certificate.raise_if_refused`, ChatError as `check_grammars`.
    """
    names: set[str] = set()
    if found.structured_calls:
        check_grammars(found.chat, tool_sets(found.toolbox, found.environments))
    for key, source in sources.items():
        sets = list(row_tool_sets(key, source, found.toolbox, found.environments))
        names.update(schema["function"]["name"] for schemas in sets for schema in schemas)
        if sets:
            _certificate(found.chat, sets[:ROW_SETS]).raise_if_refused()
        if found.structured_calls:
            check_grammars(found.chat, sets)
    return names


def _certificate(chat: Chat, sets: Sequence[list[dict[str, Any]]]) -> Certificate:
    """The certificate of the first set of tools that is refused, else of the first."""
    found = [certify(chat, schemas) for schemas in sets]
    return next((certificate for certificate in found if not certificate.passed), found[0])


def prompt_lengths(found: Certified, sources: Mapping[str, TaskSource]) -> dict[str, list[int]]:
    """Tokens of the prompts of each source's first tasks; all their user turns are rendered too.

    Raises ChatError that names the key, the task and what to change where the template refuses one.
    """
    lengths = {}
    for key, source in sources.items():
        tasks = source.tasks(0, min(TRIED, len(source)))
        # An environment's reset may give the whole prompt, which then no row has.
        lengths[key] = [_prompt_length(found, task, key) for task in tasks if task.messages]
    return lengths


def told(lengths: Mapping[str, Sequence[int]]) -> str:
    """What `agenttrain check` prints of `prompt_lengths`."""
    parts = [
        f"the first {len(found)} of {key} have {min(found)} to {max(found)} tokens"
        for key, found in lengths.items()
        if found
    ]
    return f"prompts        {'; '.join(parts) or 'given by the environment'}"


def _prompt_length(found: Certified, task: Task, key: str) -> int:
    try:
        return _render(found.chat, task, found.schemas(task))
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


def rewards_of(config: RunConfig, found: Certified, row_tools: Collection[str] = ()) -> Rubric:
    """The run's rewards, its environments' own among them.

    Raises ValueError for one on a tool that neither the run nor a row has, and where an
    environment's reward is hidden.
    """
    rubric = build_rubric(_reward_sections(config, found.environments))
    rubric.check_tools({*found.toolbox.names, *found.environments.tool_names, *row_tools})
    return rubric


def _reward_sections(config: RunConfig, environments: Environments) -> dict[str, Any]:
    sections = reward_sections(config, rewarding=bool(environments.rewards))
    targets = [section.get("_target_") for section in sections.values()]
    if environments.rewards and REWARD_TARGET not in targets:
        raise ValueError(
            f"reward.{REWARD}._target_={sections[REWARD]['_target_']}: hides the `reward` of "
            f"environment.{environments.rewards[0]}; give yours another name: reward.mine._target_"
        )
    if not environments.rewards and REWARD_TARGET in targets:
        raise ValueError(
            f"reward.{REWARD}: none of the environments has a method `reward(self, rollout)`; add "
            f"one, or leave out reward.{REWARD}"
        )
    return sections
