"""The tokenizer that is saved beside trained weights."""

from __future__ import annotations

import copy
from typing import Any

from agenttrain.chat.chat import Chat


def saved_tokenizer(chat: Chat) -> Any:
    """Return the chat's tokenizer with an end of sequence that ends a turn in training.

    The tokenizers of base models name another, ``<|endoftext|>`` say, which a trained model never
    samples. Where the template writes `eos_token`, or has no token that ends a turn, the tokenizer
    stays as it is.
    """
    tokenizer, ends = chat.tokenizer, chat.turn_end_ids
    if not ends or tokenizer.eos_token_id in ends or "eos_token" in chat.template:
        return tokenizer
    saved = copy.deepcopy(tokenizer)
    saved.eos_token = saved.convert_ids_to_tokens(ends[0])
    return saved
