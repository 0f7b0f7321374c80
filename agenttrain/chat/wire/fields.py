"""Fields of chat requests that the endpoints do not read: accepted if they change nothing.

Such a field is accepted if it changes neither the prompt nor the sampling, or if its value means
the same as leaving it out. Every other field is refused, also one that is not known: the client
would get an answer to another request than it sent.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from agenttrain.utils.names import did_you_mean

MAX_QUOTED = 80
"""Maximum characters of a value that a message quotes."""
Neutral = Mapping[str, tuple[object, ...]]
"""Fields, mapped to the values that change nothing. Null changes nothing in any field."""

ACCEPTED = frozenset(
    {
        *("cache_control", "cache_salt", "client_metadata", "include", "inference_geo"),
        *("metadata", "prediction", "priority", "prompt_cache_key", "prompt_cache_options"),
        *("prompt_cache_retention", "request_id", "safety_identifier", "service_tier", "speed"),
        *("store", "usage", "user"),
        "thinking",  # the chat template says whether the model reasons
    }
)
"""Fields of both APIs that clients send for the provider: accounts, caches, priorities."""
OPENAI: Neutral = {
    # OpenAI's
    "frequency_penalty": (0,),
    "function_call": (),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
    # those of vLLM and other servers
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "early_stopping": (False,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "ignore_eos": (False,),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "min_tokens": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
}
"""Fields of chat completions that would change an answer."""
ANTHROPIC: Neutral = {"container": (), "mcp_servers": ([],)}
"""Fields of messages that would change an answer."""
RESPONSES: Neutral = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "parallel_tool_calls": (True,),
    "previous_response_id": (),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Fields of responses that would change an answer."""
SHAPE = ("n", "logprobs", "top_logprobs", "functions", "function_call", "modalities", "audio")
"""Fields that ask for another kind of answer than one message."""


def unfollowed_fields(
    data: Mapping[str, Any], read: Collection[str], neutral: Neutral
) -> dict[str, Any]:
    """Return the fields of a request that would change its answer, but that nothing here follows.

    `read` are the names of the fields that the endpoint follows. `neutral` maps a field to the
    values that change nothing. Example:
    ``unfollowed_fields({"n": 1, "min_tokens": 9, "user": "x"}, (), OPENAI) == {"min_tokens": 9}``
    """
    return {
        name: value
        for name, value in data.items()
        if name not in read
        and name not in ACCEPTED
        and value is not None
        and value not in neutral.get(name, ())
    }


def quote(value: object) -> str:
    """Return a field's value as a message quotes it."""
    text = json.dumps(value)
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}…"


def field_problem(name: str, value: object, names: Collection[str]) -> str:
    """Return the message for a field that is refused; `names` are those of all known fields."""
    if name in names:
        return f"{name}={quote(value)}: is not supported here; leave it out"
    hint = did_you_mean(name, names)
    return f"{name[:MAX_QUOTED]}={quote(value)}: is no field that is known here{hint}; leave it out"
