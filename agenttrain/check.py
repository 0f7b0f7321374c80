"""The certificate of a run's chat template, on the run's own tools, without weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agenttrain.chat.certificate import Certificate, certify
from agenttrain.chat.load import load_chat
from agenttrain.chat.template import Chat
from agenttrain.config.model_path import model_folder
from agenttrain.config.schema import RunConfig
from agenttrain.tools.build import build_toolbox
from agenttrain.tools.toolbox import Toolbox


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

    tokenizer = AutoTokenizer.from_pretrained(model_folder(config.model.path))
    chat = load_chat(tokenizer, config.chat_template, config.response_schema)
    toolbox = build_toolbox(
        config.tools,
        config.stop_tools,
        threads=config.rollout.concurrency,
        max_stuck=config.rollout.max_stuck_calls,
    )
    certificate = certify(chat, toolbox.schemas())
    return Certified(tokenizer=tokenizer, chat=chat, toolbox=toolbox, certificate=certificate)
