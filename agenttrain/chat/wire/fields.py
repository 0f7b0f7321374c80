"""Fields of chat requests beside those that are read: which change nothing, and which would.

A field that nobody here follows is accepted if it changes neither the prompt nor the sampling, or
if its value is the one that stands for leaving it out. Every other field is at fault, those that
are not known included: the client would take an answer for what it did not ask for.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from agenttrain.utils.names import did_you_mean

MOST_SHOWN = 80
"""Characters of a value that a message repeats."""
Neutral = Mapping[str, tuple[object, ...]]
"""Fields, mapped to the values that change nothing; null is always one."""

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
SHAPE = ("n", "logprobs", "top_logprobs", "functions", "function_call", "modalities", "audio")
"""Fields that ask for another answer than one message, so that none can stand in its place."""


def unfollowed(data: Mapping[str, Any], read: Collection[str], neutral: Neutral) -> dict[str, Any]:
    """Return the fields of a request that would change its answer, and that nobody reads.

    Example: ``unfollowed({"n": 1, "min_tokens": 9, "user": "x"}, (), OPENAI)`` is
    ``{"min_tokens": 9}``.
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
    """Return a field's value as a message repeats it."""
    text = json.dumps(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


def field_problem(name: str, value: object, names: Collection[str]) -> str:
    """Return the message for a field that is not followed; `names` are those of all fields."""
    if name in names:
        return f"{name}={quote(value)}: is not supported here; leave it out"
    near = did_you_mean(name, names)
    return f"{name[:MOST_SHOWN]}={quote(value)}: is no field that is known here{near}; leave it out"
