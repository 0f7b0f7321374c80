"""Every field of a chat request is followed, refused, or one that changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from agenttrain.chat.grammar import AnswerForm
from agenttrain.chat.wire import anthropic, openai
from agenttrain.chat.wire.normal import Question
from agenttrain.chat.wire.openai import RequestError

ASK = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
CHANGING: dict[str, Any] = {
    **{"parallel_tool_calls": False, "repetition_penalty": 1.3, "min_tokens": 60},
    **{"ignore_eos": True, "stop_token_ids": [5], "bad_words": ["SELECT"], "echo": True},
    **{"allowed_token_ids": [5], "guided_json": SCHEMA, "structured_outputs": {"json": SCHEMA}},
    **{"chat_template_kwargs": {"enable_thinking": False}, "add_generation_prompt": False},
    **{"continue_final_message": True, "truncate_prompt_tokens": 5, "best_of": 4},
    **{"use_beam_search": True, "typical_p": 0.1, "reasoning_effort": "high", "verbosity": "low"},
    **{"frequency_penalty": 0.5, "presence_penalty": 0.5, "logit_bias": {"5": 1}},
    **{"length_penalty": 2, "guided_regex": "a", "chat_template": "{{ 1 }}", "documents": [{}]},
    **{"include_stop_str_in_output": True, "skip_special_tokens": False, "unheard_of": 1},
    **{"mirostat": 2, "dry_multiplier": 1.0, "prefix": "So", "max_token": 5},
}
"""Fields that would change an answer, and some that nobody knows."""
NEUTRAL: dict[str, Any] = {
    **{"parallel_tool_calls": True, "repetition_penalty": 1.0, "min_tokens": 0, "n": 1},
    **{"ignore_eos": False, "stop_token_ids": [], "chat_template_kwargs": {}, "logprobs": False},
    **{"frequency_penalty": 0.0, "presence_penalty": 0, "logit_bias": {}, "best_of": 1},
    **{"response_format": {"type": "text"}, "functions": [], "tool_choice": "auto"},
    **{"skip_special_tokens": True, "echo": False, "reasoning_effort": None, "unheard_of": None},
}
"""The values that stand for leaving a field out."""
SENT: dict[str, Any] = {
    **{"store": False, "include": ["reasoning.encrypted_content"], "metadata": {"user_id": "x"}},
    **{"prompt_cache_key": "x", "prompt_cache_retention": "24h", "client_metadata": {}},
    **{"user": "x", "safety_identifier": "x", "service_tier": "auto", "cache_salt": "x"},
    **{"thinking": {"type": "adaptive"}, "priority": 1, "request_id": "x"},
}
"""Fields that clients send for the provider."""
SHAPE: dict[str, Any] = {
    **{"n": 2, "logprobs": True, "top_logprobs": 3, "functions": [{"name": "f"}]},
    **{"function_call": {"name": "f"}, "modalities": ["audio"], "audio": {"voice": "x"}},
}
"""Fields that ask for another answer than one message of text and calls."""
Ask = Callable[[Mapping[str, Any]], Any]


def serve(fields: Mapping[str, Any]) -> Any:
    """Send them to `agenttrain serve`."""
    return openai.read_served({"messages": ASK, **fields}, {})


def endpoint(fields: Mapping[str, Any]) -> Question:
    """Send them to the endpoint's route of OpenAI."""
    return openai.read_question({"messages": ASK, **fields}, {})


def messages(fields: Mapping[str, Any]) -> Question:
    """Send them to the endpoint's route of Anthropic."""
    return anthropic.read_question({"messages": ASK, "max_tokens": 9, **fields})


@pytest.mark.parametrize("name", CHANGING)
def test_a_field_that_changes_the_answer(name: str) -> None:
    """`serve` refuses it; the endpoint's rollout refuses or replaces it, as it is set."""
    fields = {name: CHANGING[name]}
    with pytest.raises(RequestError) as refused:
        serve(fields)
    assert (refused.value.param, refused.value.status) == (name, 400)
    assert endpoint(fields).sampling == fields
    if name != "parallel_tool_calls":
        assert messages(fields).sampling == fields


@pytest.mark.parametrize("fields", [NEUTRAL, SENT])
def test_what_changes_nothing_is_accepted(fields: dict[str, Any]) -> None:
    serve(fields)
    assert endpoint(fields).sampling == {}
    assert messages(SENT).sampling == {}


@pytest.mark.parametrize("name", SHAPE)
def test_another_answer_is_always_refused(name: str) -> None:
    for ask in (serve, endpoint, messages):
        with pytest.raises(RequestError) as refused:
            ask({name: SHAPE[name]})
        assert refused.value.param == name


def test_a_field_with_a_typo_gets_the_right_name() -> None:
    with pytest.raises(RequestError, match="did you mean 'max_tokens'"):
        serve({"max_token": 5})


@pytest.mark.parametrize(
    ("fields", "sampling"),
    [
        (
            {"temperature": 0.5, "top_k": 4, "top_p": 1},
            {"temperature": 0.5, "top_k": 4, "top_p": 1},
        ),
        ({"output_config": {"effort": "high"}}, {}),
        ({"tool_choice": {"type": "auto"}}, {}),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            {"tool_choice.disable_parallel_tool_use": True},
        ),
        (
            {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
            {},
        ),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        ),
        ({"mcp_servers": []}, {}),
        ({"mcp_servers": [{"name": "x"}]}, {"mcp_servers": [{"name": "x"}]}),
    ],
)
def test_anthropics_fields(fields: dict[str, Any], sampling: dict[str, Any]) -> None:
    assert messages(fields).sampling == sampling


def test_anthropics_format_demands_json_as_openais_does() -> None:
    demanded = {"type": "json_schema", "schema": SCHEMA}
    asked = messages({"output_config": {"effort": "high", "format": demanded}})
    assert asked.form == AnswerForm(schema=json.dumps(SCHEMA))
    for wrong in ("json", {"type": "json_schema"}, {"type": "text", "schema": SCHEMA}):
        with pytest.raises(RequestError) as refused:
            messages({"output_config": {"format": wrong}})
        assert refused.value.param == "output_config.format"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"function_call": {"name": "f", "arguments": "{}"}}, "messages[1].function_call"),
        ({"audio": {"id": "x"}}, "messages[1].audio"),
    ],
)
def test_parts_of_a_message_that_the_prompt_would_lack_are_refused(message, param: str) -> None:
    history = [*ASK, {"role": "assistant", "content": None, **message}, *ASK]
    with pytest.raises(RequestError) as refused:
        endpoint({"messages": history})
    assert refused.value.param == param
    refusal = {"role": "assistant", "content": None, "refusal": "No."}
    assert endpoint({"messages": [*ASK, refusal, *ASK]}).messages[1]["content"] == "No."


def test_arguments_that_are_pythons_json_alone_keep_their_text() -> None:
    function = {"name": "f", "arguments": '{"a": NaN}'}
    call = {"id": "c", "type": "function", "function": function}
    history = [
        *ASK,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "7"},
    ]
    (read,) = endpoint({"messages": history}).messages[1]["tool_calls"]
    assert read["function"]["text"] == '{"a": NaN}'


@pytest.mark.parametrize(
    ("name", "roles", "role"),
    [
        ("developer", {}, "system"),
        ("human", {}, "user"),
        ("User", {}, "user"),
        ("narrator", {"narrator": "user"}, "user"),
        ("developer", {"developer": "user"}, "user"),
        ("developer", {"developer": "developer"}, "developer"),  # the template has this role
    ],
)
def test_names_of_roles_in_requests(name: str, roles: dict[str, str], role: str) -> None:
    asked = {"messages": [{"role": name, "content": "hi"}]}
    assert [m["role"] for m in openai.read_question(asked, roles).messages] == [role]


def test_an_unknown_role_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(RequestError, match=r"narrator: expected one of system, user.*developer"):
        openai.read_question({"messages": [{"role": "narrator", "content": "hi"}]}, {})
