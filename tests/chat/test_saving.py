"""The tokenizer that is saved beside trained weights: where it says that a sequence ends."""

from __future__ import annotations

import copy
from pathlib import Path

import tiny
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agenttrain.chat.chat import Chat
from agenttrain.chat.config import ChatTemplateConfig, ResponseSchemaConfig
from agenttrain.chat.loading import load_chat
from agenttrain.chat.saving import saved_tokenizer


def base_tokenizer(template: str = tiny.TEMPLATE) -> PreTrainedTokenizerFast:
    """A base model's: its end of sequence is <|endoftext|> (0), and turns end with <|im_end|>."""
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.eos_token, tokenizer.chat_template = "<|endoftext|>", template
    return tokenizer


def chat(tokenizer: PreTrainedTokenizerFast) -> Chat:
    return load_chat(tokenizer, ChatTemplateConfig(), ResponseSchemaConfig())


def test_the_saved_end_of_sequence_ends_a_turn(tmp_path: Path) -> None:
    tokenizer = base_tokenizer()
    trained = chat(tokenizer)
    assert (trained.stop_token_ids, trained.turn_end_ids) == ((0, 2), (2,))
    saved_tokenizer(trained).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert (loaded.eos_token, loaded.eos_token_id) == ("<|im_end|>", 2)
    assert (loaded.pad_token, loaded.chat_template) == ("<|endoftext|>", tiny.TEMPLATE)
    text = "<|im_start|>user\nwhat is 3 + 4?<|im_end|>\n"
    assert loaded.encode(text) == tokenizer.encode(text)
    # The run goes on with its own.
    assert tokenizer.eos_token == "<|endoftext|>" and trained.tokenizer is tokenizer


def test_a_tokenizer_that_ends_turns_already_is_saved_as_it_is() -> None:
    trained = chat(copy.deepcopy(tiny.tokenizer()))
    assert saved_tokenizer(trained) is trained.tokenizer


def test_a_template_that_writes_the_end_of_sequence_keeps_it() -> None:
    template = "{%- set _ = eos_token %}" + tiny.TEMPLATE
    trained = chat(base_tokenizer(template))
    assert saved_tokenizer(trained) is trained.tokenizer
