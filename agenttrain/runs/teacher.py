"""The teacher of a run: checked before anything loads, and built as the policy is.

Its prompt is the policy's with `algorithm.teacher.prompt`, filled from the row, at the end of its
last user message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from agenttrain.algorithms.config import TeacherConfig
from agenttrain.chat.chat import Chat
from agenttrain.data.tasks import TaskSource
from agenttrain.engines.vllm_server.roles import RoleServers
from agenttrain.rollout.row_tools import checked_rows
from agenttrain.runs.loading import sharding_of
from agenttrain.runs.sampling import architecture_folder
from agenttrain.settings.run_config import RunConfig
from agenttrain.training.checkpoint_files import MANIFEST, only_tensors, verify
from agenttrain.training.policy import Policy
from agenttrain.training.sliced_weights import (
    SlicedWeights,
    WrongWeights,
    empty_model,
    load_whole,
    why_not_sliced,
)
from agenttrain.training.teacher_scores import ModelTeacher, PromptIds, ServedTeacher, Teacher
from agenttrain.types import ConfigError, Message, Rollout, Task, Trajectory
from agenttrain.utils.model_path import (
    ADAPTER_CONFIG,
    model_folder,
    weights_folder,
)
from agenttrain.utils.text_templates import TextTemplate

KEY = "algorithm.teacher.path"
PROMPT = "algorithm.teacher.prompt"


def check_teacher(config: RunConfig, tokenizer: Any, tasks: TaskSource) -> None:
    """Raise ConfigError for a teacher that cannot score the run's rollouts; no weights are loaded.

    The teacher's vocabulary must be that of the policy's `tokenizer`, so that the same ids stand
    for the same texts. The first tasks must have the columns of the teacher's prompt.
    """
    teacher = config.algorithm.teacher
    if teacher is None:
        return
    key, path, revision = _teacher_model(config, teacher)
    folder = model_folder(path, revision=revision, key=key)
    setting = f"{key}={path}"
    if (folder / ADAPTER_CONFIG).is_file():
        raise ConfigError(
            f"{setting}: holds adapters; merge them into their model first: agenttrain export "
            "<run folder> --to <new folder> --format merged"
        )
    if (folder / MANIFEST).is_file():
        verify(folder)
    policy_vocab = tokenizer.get_vocab()
    teacher_vocab = AutoTokenizer.from_pretrained(folder).get_vocab()
    # (token, id) pairs that only one of the two vocabularies has, sorted by id. A token of both
    # vocabularies with two ids is there twice.
    differing = sorted(policy_vocab.items() ^ teacher_vocab.items(), key=lambda pair: pair[::-1])
    if differing:
        token, index = differing[0]
        raise ConfigError(
            f"{setting}: has another tokenizer than model.path={config.model.path}: "
            f"{len(dict(differing))} tokens differ, the first one {token!r} ({index}). Its "
            "probabilities would be of other texts; choose a teacher of the same family"
        )
    # Embeddings may be padded beyond the tokenizer's vocabulary, differently in each model.
    teacher_size, policy_size = (
        AutoConfig.from_pretrained(config_folder).get_text_config().vocab_size
        for config_folder in (folder, architecture_folder(config))
    )
    if teacher_size < policy_size:
        raise ConfigError(
            f"{setting}: has {teacher_size:,} token embeddings, and model.path={config.model.path} "
            f"samples from {policy_size:,}; choose a teacher with as many"
        )
    if teacher.prompt is not None:
        prompt = TextTemplate(teacher.prompt, PROMPT)
        for task in tasks.tasks(0, checked_rows(tasks)):
            try:
                prompt.fill(task.columns)
            except ValueError as error:
                raise ConfigError(f"{error} (task {task.task_id})") from error


def _teacher_model(config: RunConfig, teacher: TeacherConfig) -> tuple[str, str, str | None]:
    """Return the setting that names the teacher's model, the model and its revision."""
    if teacher.role is None:
        return KEY, teacher.path, teacher.revision
    role = getattr(config.roles, teacher.role)
    return f"roles.{teacher.role}.model", role.model, role.revision


def teacher_prompt(
    prompt: str | None, chat: Chat, schemas: Callable[[Task], list[dict[str, Any]]]
) -> PromptIds | None:
    """Return the function that renders the teacher's prompt; None if it reads the policy's prompt.

    `schemas` returns the schemas of a task's tools.
    """
    if prompt is None:
        return None
    template = TextTemplate(prompt, PROMPT)

    def render(rollout: Rollout, trajectory: Trajectory) -> Sequence[int]:
        """Return [T] the ids of a trajectory's prompt with the teacher's text added."""
        messages = trajectory.messages[: trajectory.prompt_messages]
        messages = with_text(messages, template.fill(rollout.task.columns))
        # Not `prompt_ids`, which raises if the template leaves out a text: an outside agent's
        # history may hold texts that it leaves out.
        return chat.rendered_ids(messages, schemas(rollout.task))

    return render


def with_text(messages: Sequence[Message], text: str) -> list[Message]:
    """Return the messages with a text added at the end of the last user message.

    If there is no user message, the text becomes one, after the others. Example: "3 + 4?" and
    "It is 7." become "3 + 4?\\n\\nIt is 7.".
    """
    result = [dict(message) for message in messages]
    for message in reversed(result):
        if message["role"] != "user":
            continue
        content = message["content"]
        if isinstance(content, str):
            message["content"] = f"{content}\n\n{text}"
        else:  # a list of parts
            message["content"] = [*content, {"type": "text", "text": f"\n\n{text}"}]
        return result
    return [*result, {"role": "user", "content": text}]


def make_teacher(
    config: RunConfig,
    policy: Policy,
    prompt_ids: PromptIds | None,
    roles: Mapping[str, RoleServers],
) -> Teacher:
    """Load the run's teacher beside the policy, or return a client of the role that serves it.

    `prompt_ids` renders the teacher's own prompt; None: it reads the policy's.
    """
    teacher = config.algorithm.teacher
    assert teacher is not None, "the run has a teacher"
    if teacher.role is not None:
        key, path, revision = _teacher_model(config, teacher)
        folder = model_folder(path, revision=revision, key=key)
        model_context = AutoConfig.from_pretrained(folder).get_text_config().max_position_embeddings
        return ServedTeacher(
            roles[teacher.role],
            max_context=getattr(config.roles, teacher.role).max_context or model_context,
            world=policy.world,
            prompt_ids=prompt_ids,
        )
    folder = weights_folder(teacher.path, revision=teacher.revision, key=KEY)
    dtype, world = getattr(torch, teacher.dtype), policy.world
    sharding = sharding_of(config)
    model: Any
    weights: SlicedWeights | None
    if sharding is not None and why_not_sliced(folder) is None:
        # Without weights yet: once the model is sharded, each process reads its part of them.
        # Patient: one process may wait minutes longer for its files.
        model = empty_model(folder, dtype)
        with world.together(f"the files of {KEY}", WrongWeights, patient=True):
            weights = SlicedWeights(model, folder, world.rank)
    else:
        # Each process loads all weights; pickles that could run code are refused.
        with only_tensors(folder):
            model = load_whole(folder, dtype)
        weights = None  # the model has them
    return ModelTeacher(
        model,
        temperature=config.rollout.temperature,
        training=config.training,
        accelerator=policy.accelerator,
        world=world,
        sharding=sharding,
        weights=weights,
        prompt_ids=prompt_ids,
    )
