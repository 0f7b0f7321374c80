"""The certificate of a run's chat template, on the run's own tools, without weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agenttrain.chat.certificate import Certificate, certify
from agenttrain.chat.load import load_chat
from agenttrain.chat.template import Chat
from agenttrain.config.model_path import model_folder
from agenttrain.config.schema import RunConfig
from agenttrain.data.source import TaskSource
from agenttrain.environments.build import build_kinds
from agenttrain.rollout.environments import Environments
from agenttrain.rollout.row_check import check_collisions, row_tool_sets, tool_sets
from agenttrain.tools.build import build_toolbox
from agenttrain.tools.toolbox import Toolbox

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


def certified(config: RunConfig) -> Certified:
    """Certify the template; raises with the key to change where it cannot be read at all.

    With several environments it is certified with the tools of each.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder(config.model.path))
    chat = load_chat(tokenizer, config.chat_template, config.response_schema)
    environments = Environments(build_kinds(config.environment), stop_tools=config.stop_tools)
    stops = [name for name in config.stop_tools if name not in environments.tool_names]
    toolbox = build_toolbox(
        config.tools,
        stops,
        threads=config.rollout.concurrency,
        max_stuck=config.rollout.max_stuck_calls,
    )
    check_collisions(toolbox, environments)
    return Certified(
        tokenizer=tokenizer,
        chat=chat,
        toolbox=toolbox,
        environments=environments,
        certificate=_certificate(chat, tool_sets(toolbox, environments)),
    )


def check_rows(found: Certified, key: str, source: TaskSource) -> None:
    """Check the rows at `key` (data.train), and the template with the tools that rows list.

    Raises RowError that names the row, CertificateError as `Certificate.raise_if_refused`.
    """
    sets = list(row_tool_sets(key, source, found.toolbox, found.environments))
    if sets:
        _certificate(found.chat, sets[:ROW_SETS]).raise_if_refused()


def _certificate(chat: Chat, sets: Sequence[list[dict[str, Any]]]) -> Certificate:
    """The certificate of the first set of tools that is refused, else of the first."""
    found = [certify(chat, schemas) for schemas in sets]
    return next((certificate for certificate in found if not certificate.passed), found[0])
