"""What can be said of a run without weights: its tools, environments, rows and certificate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agenttrain.chat.certificate import Certificate, certify
from agenttrain.chat.load import load_chat
from agenttrain.chat.template import Chat
from agenttrain.config.model_path import model_folder
from agenttrain.config.schema import RunConfig
from agenttrain.data.build import build_rows
from agenttrain.data.source import TaskSource
from agenttrain.environments.build import build_kinds
from agenttrain.rollout.environments import Environments
from agenttrain.rollout.row_check import check_collisions, row_tool_sets, tool_sets
from agenttrain.tools.build import build_toolbox
from agenttrain.tools.toolbox import Toolbox

ROW_SETS = 4
"""Distinct sets of tools that rows list, of each split, that the template is certified with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certified:
    """A run's chat, tools and rows, and what the certificate says of them together."""

    tokenizer: Any
    chat: Chat
    toolbox: Toolbox
    environments: Environments
    train_tasks: TaskSource
    test_tasks: TaskSource
    certificate: Certificate


def certified(config: RunConfig) -> Certified:
    """Certify the template; raises with the key to change where it cannot be read at all.

    It is certified with each set of tools that a model may see: the run's with every environment's,
    and the first that rows list. The certificate is that of the first set that is refused, else of
    the first.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder(config.model.path))
    chat = load_chat(tokenizer, config.chat_template, config.response_schema)
    kinds = build_kinds(config.environment)
    environments = Environments(kinds, stop_tools=config.stop_tools)
    stops = [name for name in config.stop_tools if name not in environments.tool_names]
    toolbox = build_toolbox(config.tools, stops, threads=config.rollout.concurrency)
    check_collisions(toolbox, environments)
    train, test = _sources(config)
    sets = tool_sets(toolbox, environments)
    for key, source in (("data.train", train), ("data.test", test)):
        # All rows are checked, though not all of their sets are certified.
        sets += list(row_tool_sets(key, source, toolbox, environments))[:ROW_SETS]
    return Certified(
        tokenizer=tokenizer,
        chat=chat,
        toolbox=toolbox,
        environments=environments,
        train_tasks=train,
        test_tasks=test,
        certificate=_certificate(chat, sets),
    )


def _certificate(chat: Chat, sets: Sequence[list[dict[str, Any]]]) -> Certificate:
    found = []
    for number, schemas in enumerate(sets):
        if schemas not in sets[:number]:
            found.append(certify(chat, schemas))
    return next((certificate for certificate in found if not certificate.passed), found[0])


def _sources(config: RunConfig) -> tuple[TaskSource, TaskSource]:
    needs_prompt = not config.environment
    train = TaskSource(
        build_rows(config.data.train, "data.train"),
        shuffle=config.data.shuffle,
        seed=config.seed,
        needs_prompt=needs_prompt,
    )
    test = TaskSource(build_rows(config.data.test, "data.test"), needs_prompt=needs_prompt)
    return train, test
