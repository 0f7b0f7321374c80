"""The certificate of a run's chat template, on the run's own tools and data, without weights."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agenttrain.chat.certificate import Certificate, certify
from agenttrain.chat.encoding import ChatError
from agenttrain.chat.features import system_problem
from agenttrain.chat.load import load_chat
from agenttrain.chat.template import Chat
from agenttrain.config.arithmetic import tasks_of_round
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
class ChatTools:
    """A run's chat and tools."""

    tokenizer: Any
    chat: Chat
    toolbox: Toolbox
    environments: Environments


@dataclass(frozen=True, slots=True, kw_only=True)
class Certified(ChatTools):
    """A run's chat and tools, and what the certificate says of them together."""

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
    loaded = chat_and_tools(config, *build_tools(config))
    return Certified(
        tokenizer=loaded.tokenizer,
        chat=loaded.chat,
        toolbox=loaded.toolbox,
        environments=loaded.environments,
        certificate=_certificate(loaded.chat, tool_sets(loaded.toolbox, loaded.environments)),
        structured_calls=config.rollout.structured_calls,
    )


def chat_and_tools(config: RunConfig, toolbox: Toolbox, environments: Environments) -> ChatTools:
    """Load the run's tokenizer and chat template, for these tools."""
    tools = any(map(bool, tool_sets(toolbox, environments)))
    tokenizer, chat = tokenizer_and_chat(config, tools=tools)
    return ChatTools(tokenizer=tokenizer, chat=chat, toolbox=toolbox, environments=environments)


def tokenizer_and_chat(config: RunConfig, *, tools: bool) -> tuple[Any, Chat]:
    """Load the run's tokenizer and chat template, for a run with or without tools."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder(config.model.path))
    return tokenizer, load_chat(
        tokenizer, config.chat_template, config.response_schema, tools=tools
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


def context_of(config: RunConfig) -> int | None:
    """Tokens of one sequence, as the engine will have them; None when no config names a limit."""
    from transformers import AutoConfig

    if config.engine.max_context is not None:
        return config.engine.max_context
    folder = model_folder(config.model.path)
    if (adapters := folder / "adapter_config.json").is_file():  # the limit is their base model's
        base = json.loads(adapters.read_text(encoding="utf-8"))["base_model_name_or_path"]
        folder = Path(base)
    text = AutoConfig.from_pretrained(folder).get_text_config()
    return getattr(text, "max_position_embeddings", None)


def check_room(
    config: RunConfig,
    found: Certified,
    tasks: Splits,
    lengths: Mapping[str, Sequence[int]],
    *,
    training: bool = True,
) -> None:
    """Raise ChatError where the prompts of the whole first step fill the context.

    Single prompts that do are left out and counted while the run goes on. `lengths` are those of
    `prompt_lengths`; without `training` only the evaluation's rows count.
    """
    context = context_of(config)
    if context is None or any(kind.resets for kind in found.environments.kinds.values()):
        return  # a reset may replace the prompt that the row has
    step = tasks_of_round(config.tasks_per_step, config.algorithm.oversample)
    drawn = {
        "data.train": step if training else 0,
        "data.test": min(config.eval.questions, len(tasks.test)),
    }
    if config.data.curriculum.enabled:  # draws in an order of its own
        drawn["data.train"] = 0
    for key, count in drawn.items():
        known = lengths.get(key, ())[:count]
        if not known or min(known) < context:
            continue
        later = tasks.by_key[key].tasks(TRIED, max(count - TRIED, 0))
        if all(_prompt_length(found, task, key) >= context for task in later):
            setting = "" if config.engine.max_context is None else "engine.max_context="
            raise ChatError(
                f"{key}: the prompts of all {count} tasks that are drawn first leave no room: they "
                f"have {min(known)} tokens or more, and the context is {setting}{context}; raise "
                "it, or give shorter prompts"
            )


def overlong(config: RunConfig, lengths: Mapping[str, Sequence[int]]) -> list[str]:
    """Lines that say how many of the first prompts would be left out of the run."""
    context = context_of(config)
    return [
        f"note: {count} of the first {len(found)} of {key} fill the context of {context} tokens "
        "and would be left out (data/overlong)"
        for key, found in lengths.items()
        if context is not None and (count := sum(length >= context for length in found))
    ]


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
    rubric = rubric_of(config, found.environments.rewards)
    rubric.check_tools({*found.toolbox.names, *found.environments.tool_names, *row_tools})
    return rubric


def rubric_of(config: RunConfig, rewarding: Sequence[str]) -> Rubric:
    """Build the rewards of a run of which the environments `rewarding` have one of their own.

    Raises ValueError where an environment's reward is hidden, or there is none.
    """
    sections = reward_sections(config, rewarding=bool(rewarding))
    targets = [section.get("_target_") for section in sections.values()]
    if rewarding and REWARD_TARGET not in targets:
        raise ValueError(
            f"reward.{REWARD}._target_={sections[REWARD]['_target_']}: hides the `reward` of "
            f"environment.{rewarding[0]}; give yours another name: reward.mine._target_"
        )
    if not rewarding and REWARD_TARGET in targets:
        raise ValueError(
            f"reward.{REWARD}: none of the environments has a method `reward(self, rollout)`; add "
            f"one, or leave out reward.{REWARD}"
        )
    return build_rubric(sections)
