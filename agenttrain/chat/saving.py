"""The tokenizer that is saved beside trained weights."""

from __future__ import annotations

import copy
from typing import Any

from agenttrain.chat.chat import Chat


def saved_tokenizer(chat: Chat) -> Any:
    """Return the chat's tokenizer; its `eos_token` is the token that ends a turn in training.

    Tokenizers of base models have another one, ``<|endoftext|>`` say, which a trained model never
    samples. The tokenizer stays as it is if the template writes `eos_token`, or has no token that
    ends a turn.
    """
    tokenizer, ends = chat.tokenizer, chat.turn_end_ids
    if not ends or tokenizer.eos_token_id in ends or "eos_token" in chat.template:
        return tokenizer
    saved = copy.deepcopy(tokenizer)
    saved.eos_token = saved.convert_ids_to_tokens(ends[0])
    return saved
