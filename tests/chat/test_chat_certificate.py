from __future__ import annotations

from typing import Any

import pytest
from chat_cases import ADD, TEMPLATES, chat
from tiny import TEMPLATE, tokenizer

from agenttrain.chat.certificate import CertificateError, certify
from agenttrain.chat.chat import Chat
from agenttrain.chat.loading import load_spec
from agenttrain.types import AgenttrainError

QUERY = {
    "type": "function",
    "function": {
        "name": "sql",
        "description": "Query.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": ["string", "null"]},
                "mode": {"enum": ["rows", "count"]},
                "limits": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "exact": {"type": "boolean"},
            },
        },
    },
}
SCHEMAS = [ADD, QUERY]
PROBES = [
    *("generation prompt", "same each time", "end of turn", "tools in the prompt"),
    *("system message", "control tokens in prompts", "no call", "reasoning without a call"),
    *("control tokens in a user reply", "call of add", "call of sql", "parallel calls"),
    *("three turns", "content beside a call", "reasoning", "empty reply", "error reply"),
    *("unicode reply", "long reply", "control tokens in a tool reply", "later user message"),
]
LOOKING_ON = PROBES[12:]
"""Probes of more than one turn with calls."""


def built(template: str) -> Chat:
    return Chat(tokenizer(), template, load_spec("hermes"), eos_token_ids=[2])


def refused(template: str) -> dict[str, str]:
    """Reasons by the names of the probes that the template fails."""
    certificate = certify(built(template), SCHEMAS)
    assert not certificate.passed
    return {probe.name: probe.why for probe in certificate.probes if not probe.passed}


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_templates_that_fit(name: str) -> None:
    certificate = certify(chat(name), SCHEMAS)
    certificate.raise_if_refused()
    assert [probe.name for probe in certificate.probes] == PROBES
    reasons = {probe.name: probe.reason for probe in certificate.probes if probe.reason}
    assert reasons.pop("end of turn").startswith("a completion ends with <|im_end|>")
    reason = reasons.pop("control tokens in prompts")
    assert reason == "7 special tokens and 0 other added ones"
    left_out = "the template leaves out reasoning; the ledger keeps what was sampled"
    names = ["reasoning without a call", "reasoning", "later user message"]
    assert reasons == dict.fromkeys(names, left_out)


def test_no_tools_need_no_tools_in_the_template() -> None:
    names = [probe.name for probe in certify(chat(), []).probes]
    assert names == PROBES[:9]


def test_the_hash_depends_on_template_tools_and_variables() -> None:
    first = certify(chat(), SCHEMAS).hash
    assert first == certify(built(TEMPLATE), SCHEMAS).hash
    others = {
        certify(chat(), [ADD]).hash,
        certify(chat("other"), SCHEMAS).hash,
        certify(built(TEMPLATE + "{# revised #}"), SCHEMAS).hash,
        certify(
            Chat(tokenizer(), TEMPLATE, load_spec("hermes"), eos_token_ids=[2], kwargs={"a": 1}),
            SCHEMAS,
        ).hash,
    }
    assert len({first, *others}) == 5


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    old = "('(old)' if loop.revindex > 2 else m.content) + '\\n</tool_response>'"
    reasons = refused(TEMPLATE.replace("m.content + '\\n</tool_response>'", old))
    assert set(reasons) == set(LOOKING_ON)
    assert "earlier messages are rendered anew" in reasons["three turns"]


def test_a_template_that_is_prefixed_by_the_count_of_messages_is_refused() -> None:
    reasons = refused("{{- messages | length }}" + TEMPLATE)
    assert set(reasons) == set(PROBES[6:])


def test_a_template_that_leaves_the_turns_header_to_the_model_is_refused() -> None:
    without = TEMPLATE[: TEMPLATE.index("{%- if add_generation_prompt %}")]
    reasons = refused(without)
    header = "'<|im_start|>assistant\\n'"
    assert reasons["generation prompt"].endswith(f"though a turn begins with {header}")


def test_a_template_that_renders_one_call_only_is_certified_so() -> None:
    one = "{%- if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call!') }}"
    chat = built(
        TEMPLATE.replace("{%- if m.role == 'user'", one + "{%- endif %}{%- if m.role == 'user'")
    )
    certificate = certify(chat, SCHEMAS)
    certificate.raise_if_refused()
    assert chat.one_call_per_turn
    assert certificate.one_call_per_turn
    (probe,) = [probe for probe in certificate.probes if probe.name == "parallel calls"]
    assert probe.reason.startswith("one call per turn")
    assert "rollout.on_parallel_calls" in certificate.warnings[-1]


@pytest.mark.parametrize("expression", ["call.function.arguments", "'' + call.function.arguments"])
def test_a_template_that_reads_arguments_only_as_json_text_is_certified(expression: str) -> None:
    # Of a dict, the first would write Python's repr, and the second raises an error.
    chat = built(TEMPLATE.replace("call.function.arguments | tojson", expression))
    certificate = certify(chat, SCHEMAS)
    certificate.raise_if_refused()
    assert [probe.name for probe in certificate.probes] == PROBES
    assert chat.renders_calls
    arguments = {"arguments": {"a": 3, "b": 4}}
    call = {"id": "call_0_0", "type": "function", "function": {"name": "add", **arguments}}
    messages = [
        {"role": "user", "content": "3 + 4?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    assert chat.rendered_ids(messages, SCHEMAS) == built(TEMPLATE).rendered_ids(messages, SCHEMAS)


def test_messages_that_a_template_leaves_out_or_refuses_are_named() -> None:
    assert certify(built(TEMPLATE), SCHEMAS).left_out == ()
    refuses = "{%- for m in messages[1:] if m.role == 'system' %}"
    refuses += "{{ raise_exception('system first') }}{%- endfor %}"
    assert certify(built(refuses + TEMPLATE), SCHEMAS).left_out == (
        "a second system message",
        "a system message after an answer",
    )
    leaves_out = TEMPLATE.replace("or (m.role == 'system' and not loop.first)", "")
    assert certify(built(leaves_out), SCHEMAS).left_out == (
        "a second system message",
        "a system message after an answer",
    )


def test_a_template_that_drops_a_reply_is_refused() -> None:
    reasons = refused(
        TEMPLATE.replace("'\\n<tool_response>\\n' + m.content", "'\\n<tool_response>\\n'")
    )
    assert set(reasons) == set(PROBES[9:])
    assert "does not show each of 1 replies" in reasons["call of add"]


def test_a_template_whose_glue_changes_with_the_reply_is_refused() -> None:
    changed = "('none' if not m.content else '\\n<tool_response>\\n' + m.content)"
    reasons = refused(TEMPLATE.replace("'\\n<tool_response>\\n' + m.content", changed))
    assert "changes with the reply's text" in reasons["empty reply"]


def test_a_template_without_tools_is_refused_with_the_reason() -> None:
    bare = (
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content }}"
        "{{- '<|im_end|>\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )
    reasons = refused(bare)
    assert reasons["tools in the prompt"] == "the template does not show the tools add, sql"
    assert "does not render the assistant's tool calls" in reasons["call of add"]
    certify(built(bare), []).raise_if_refused()


MISREAD = "the response schema does not read the calls that the template renders"


def test_calls_that_no_parser_reads_ask_for_a_response_schema_of_ones_own() -> None:
    chat = built(TEMPLATE.replace('{"name": "', '{"tool": "'))
    certificate = certify(chat, SCHEMAS)
    probe = next(probe for probe in certificate.probes if probe.name == "call of add")
    assert (probe.reason, probe.misfit) == (MISREAD, "response_schema")
    assert certificate.remedy.startswith("Set `response_schema=file")
    assert "docs/guides/response-schemas.md" in certificate.remedy


def test_a_response_schema_that_is_not_the_templates_is_what_the_remedy_names() -> None:
    chat = Chat(tokenizer(), TEMPLATE, load_spec("gemma4"), eos_token_ids=[2])
    certificate = certify(chat, SCHEMAS)
    assert certificate.remedy == "Set response_schema=hermes, which reads the template's calls."
    lines = certificate.lines()
    (refused,) = [n for n, line in enumerate(lines) if line.startswith("  refused")]
    first = " ".join(lines[refused].split())
    assert first.startswith(f"refused call of add {MISREAD}: '<tool_call>")
    others = lines[refused + 1].strip().removeprefix("and for the same reason: ").split(", ")
    assert len(others) == 11
    assert others[:3] == ["call of sql", "parallel calls", "three turns"]
    with pytest.raises(CertificateError) as raised:
        certificate.raise_if_refused()
    assert str(raised.value).count(MISREAD) == 1
    assert "- call of add, call of sql, parallel calls, three turns," in str(raised.value)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "null"},
        {"type": ["null", "string"]},
        {"enum": [None, "a"]},
        {"enum": [None]},
        {"type": "object", "properties": {"x": {"type": "integer"}}},
        {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    ],
)
def test_tools_with_any_parameter_are_certified(schema: Any) -> None:
    function = {**ADD["function"], "parameters": {"type": "object", "properties": {"a": schema}}}
    certify(chat(), [{"type": "function", "function": function}]).raise_if_refused()


def test_a_certificate_as_data() -> None:
    found = certify(chat(), SCHEMAS).as_json()
    assert (found["status"], found["remedy"], found["one_call_per_turn"]) == ("passed", None, False)
    assert [probe["name"] for probe in found["probes"]] == PROBES
    table = certify(chat(), SCHEMAS).markdown().splitlines()
    assert table[2] == "| generation prompt | passed |  |"
    assert table[4] == "| end of turn | passed | a completion ends with <\\|im_end\\|> |"


def passed(template: str, name: str) -> str:
    certificate = certify(built(template), SCHEMAS)
    certificate.raise_if_refused()
    return next(probe.reason for probe in certificate.probes if probe.name == name)


SYSTEM = "{%- if messages[0].role == 'system' %}{{ raise_exception('No system role') }}{%- endif %}"


def test_a_template_without_system_messages_passes_and_says_so() -> None:
    assert passed(SYSTEM + TEMPLATE, "system message") == (
        "the template refuses system messages (No system role): the data must have none"
    )
    skipping = TEMPLATE.replace("messages[0].role == 'system'", "false")
    reason = "the template leaves out system messages: the data must have none"
    assert passed(skipping, "system message") == reason
    assert passed(TEMPLATE, "system message") == ""


def test_the_time_of_day_is_refused_and_the_date_is_warned_of() -> None:
    reasons = refused("{{- strftime_now('%H:%M') }}" + TEMPLATE)
    assert reasons["same each time"].startswith("the template writes the time of day, strftime_now")
    certificate = certify(built("{{- strftime_now('%d %b %Y') }}" + TEMPLATE), SCHEMAS)
    certificate.raise_if_refused()
    assert certificate.warnings == (
        "prompts hold the day's date, so a run repeats exactly on the same day only",
    )


def test_chance_in_a_template_is_refused() -> None:
    reasons = refused("{{- range(1000) | random }}" + TEMPLATE)
    different = "the template renders the same messages differently each time"
    assert reasons["same each time"] == different


def test_refusal_is_an_error_with_reason_and_remedy() -> None:
    certificate = certify(built("{{- messages | length }}" + TEMPLATE), SCHEMAS)
    with pytest.raises(CertificateError) as raised:
        certificate.raise_if_refused()
    assert isinstance(raised.value, AgenttrainError)
    message = str(raised.value)
    assert "three turns, content beside a call, " in message
    assert "later user message: earlier messages are rendered anew: the full" in message
    assert "chat_template=file chat_template.path=" in message
