from __future__ import annotations

import pytest
from chat_cases import ADD, TEMPLATES, chat
from tiny import TEMPLATE, tokenizer

from agenttrain.chat.certificate import CertificateError, certify
from agenttrain.chat.specs import load_spec
from agenttrain.chat.template import Chat
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
    *(
        "generation prompt",
        "end of turn",
        "tools in the prompt",
        "no call",
        "reasoning without a call",
    ),
    *("control tokens in a user reply", "call of add", "call of sql", "parallel calls"),
    *("three turns", "content beside a call", "reasoning", "empty reply", "error reply"),
    *("unicode reply", "long reply", "control tokens in a tool reply", "later user message"),
]
LOOKING_ON = [*PROBES[9:12], *PROBES[12:]]
"""Probes of more than one turn with calls."""


def built(template: str) -> Chat:
    return Chat(tokenizer(), template, load_spec("hermes"), eos_token_ids=[2])


def refused(template: str) -> dict[str, str]:
    """Reasons by the names of the probes that the template fails."""
    certificate = certify(built(template), SCHEMAS)
    assert not certificate.passed
    return {probe.name: probe.reason for probe in certificate.probes if not probe.passed}


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_templates_that_fit(name: str) -> None:
    certificate = certify(chat(name), SCHEMAS)
    certificate.raise_if_refused()
    assert [probe.name for probe in certificate.probes] == PROBES
    reasons = {probe.name: probe.reason for probe in certificate.probes if probe.reason}
    assert reasons.pop("end of turn").startswith("a completion ends with <|im_end|>")
    left_out = "the template leaves out reasoning; the ledger keeps what was sampled"
    names = ["reasoning without a call", "reasoning", "later user message"]
    assert reasons == dict.fromkeys(names, left_out)


def test_no_tools_need_no_tools_in_the_template() -> None:
    names = [probe.name for probe in certify(chat(), []).probes]
    assert names == PROBES[:6]


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
    assert set(reasons) == set(PROBES[3:])


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


def test_a_template_that_drops_a_reply_is_refused() -> None:
    reasons = refused(
        TEMPLATE.replace("'\\n<tool_response>\\n' + m.content", "'\\n<tool_response>\\n'")
    )
    assert set(reasons) == set(PROBES[6:])
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


def test_calls_that_the_parser_cannot_read_are_refused() -> None:
    reasons = refused(TEMPLATE.replace('{"name": "', '{"tool": "'))
    assert "set response_schema to the format of the template" in reasons["call of add"]


def test_refusal_is_an_error_with_reason_and_remedy() -> None:
    certificate = certify(built("{{- messages | length }}" + TEMPLATE), SCHEMAS)
    with pytest.raises(CertificateError) as raised:
        certificate.raise_if_refused()
    assert isinstance(raised.value, AgenttrainError)
    message = str(raised.value)
    assert "- three turns: earlier messages are rendered anew" in message
    assert "chat_template=file chat_template.path=" in message
