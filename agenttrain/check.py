"""The certificate of a run's chat template, on the run's own tools, without weights."""

from __future__ import annotations

from agenttrain.chat.certificate import Certificate, certify
from agenttrain.chat.load import load_chat
from agenttrain.config.model_path import model_folder
from agenttrain.config.schema import RunConfig
from agenttrain.tools.build import build_toolbox


def certificate_of(config: RunConfig) -> Certificate:
    """Certify the template; raises with the key to change where it cannot be read at all."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder(config.model.path))
    chat = load_chat(tokenizer, config.chat_template, config.response_schema)
    toolbox = build_toolbox(config.tools, config.stop_tools, threads=1)
    return certify(chat, toolbox.schemas())
