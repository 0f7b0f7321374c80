"""Every known family: recognised, fixed, certified; and the table of them."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from agenttrain.chat.certificate import CertificateError, as_parsed, certify
from agenttrain.chat.chat import Chat
from agenttrain.chat.config import ChatTemplateConfig, ResponseSchemaConfig
from agenttrain.chat.encoding import ChatError
from agenttrain.chat.features import Status
from agenttrain.chat.fixes import Edit, Family, apply_fix, families, parse_family, template_pattern
from agenttrain.chat.loading import load_chat
from agenttrain.cli import main
from agenttrain.commands.templates import (
    EXAMPLE_TOOLS,
    TableRow,
    json_rows,
    markdown,
    original,
    originals_folder,
    plain,
    read_shipped,
    rows,
    small_tokenizer,
)
from agenttrain.engines.config import Sampling
from agenttrain.types import AssistantTurn, Finish, Message, Origin, ToolCall
from agenttrain.utils.placeholders import Placeholders

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "families.md"
ORIGINALS = [(name, source) for name, f in families().items() for source in f.originals]
WITH_TOOLS = [(name, source) for name, source in ORIGINALS if families()[name].tools]
WITHOUT = [(name, source) for name, source in ORIGINALS if not families()[name].tools]
ONE_CALL = {"llama3.1", "llama3.2", "gpt-oss"}


@cache
def chat_of(family: str, source: str, name: str = "auto") -> Chat:
    """A Chat over a stock template with the family's control tokens."""
    text = original(source)
    assert text is not None, "pip install 'agenttrain[test]'"
    return load(family, text, name)


def load(family: str, template: str | None, name: str = "auto", **kwargs: Any) -> Chat:
    tokenizer = copy.copy(small_tokenizer(families()[family]))
    tokenizer.chat_template = template
    return load_chat(
        tokenizer, ChatTemplateConfig(name=name, kwargs=kwargs), ResponseSchemaConfig()
    )


SEEING = [
    (name, source) for name, source in ORIGINALS if "<|image_pad|>" in families()[name].control
]


@pytest.mark.parametrize(("family", "source"), SEEING)
def test_families_that_see_are_certified_with_images(family: str, source: str) -> None:
    tokenizer = copy.copy(small_tokenizer(families()[family]))
    tokenizer.chat_template = original(source)
    placeholders = Placeholders(
        token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        **{"patch": 16, "merge": 2, "least_pixels": 65_536, "most_pixels": 16_777_216},
    )
    chat = load_chat(
        tokenizer, ChatTemplateConfig(), ResponseSchemaConfig(), placeholders=placeholders
    )
    assert certify(chat, EXAMPLE_TOOLS)


@pytest.mark.parametrize(("family", "source"), ORIGINALS)
def test_a_stock_template_is_recognised_and_certified(family: str, source: str) -> None:
    chat = chat_of(family, source)
    assert chat.fix.family == family
    assert chat.fix.problem is None
    certificate = certify(chat, EXAMPLE_TOOLS if families()[family].tools else ())
    certificate.raise_if_refused()
    assert certificate.one_call_per_turn == (family in ONE_CALL)
    assert (certificate.status is Status.fixed) == (not certificate.preserving)
    assert certificate.changes or certificate.preserving


def fork(template: str) -> str:
    """The same template as somebody else would have it: blanks, comments, kinds of quotes."""
    template = re.sub(r"\n    ( *)\{", r"\n\n  \1{", template)
    template = re.sub(r"\['(\w+)'\]", r'["\1"]', template)
    return "{# a fork #}" + template + "\n"


@pytest.mark.parametrize(("family", "source"), WITH_TOOLS)
def test_forks_are_recognised_and_fixed(family: str, source: str) -> None:
    stock = original(source)
    assert stock is not None
    fix = load(family, fork(stock)).fix
    assert (fix.family, fix.problem) == (family, None)
    assert fix.changes == chat_of(family, source).fix.changes


@pytest.mark.parametrize(("family", "source"), WITH_TOOLS)
def test_a_fixed_template_is_recognised_again_and_left_alone(family: str, source: str) -> None:
    saved = chat_of(family, source).saved_template
    again = load(family, saved)
    assert again.template == saved
    assert again.fix.problem is None
    certify(again, EXAMPLE_TOOLS).raise_if_refused()


@pytest.mark.parametrize(("family", "source"), WITHOUT)
def test_tools_without_tools_in_the_template(family: str, source: str) -> None:
    certify(chat_of(family, source), ()).raise_if_refused()
    with pytest.raises(CertificateError, match="does not show the tools add, search") as raised:
        certify(chat_of(family, source), EXAMPLE_TOOLS).raise_if_refused()
    assert "`chat_template=hermes` adds a generic tool format" in str(raised.value)
    certify(chat_of(family, source, "hermes"), EXAMPLE_TOOLS).raise_if_refused()


def test_hermes_on_a_template_with_another_format() -> None:
    chat = chat_of("llama3.1", "llama3_1", "hermes")
    certify(chat, EXAMPLE_TOOLS).raise_if_refused()
    assert not chat.one_call_per_turn
    prompt = chat.decode(chat.prompt_ids([{"role": "user", "content": "3 + 4?"}], EXAMPLE_TOOLS))
    assert "<tools>" in prompt
    assert "Given the following functions" not in prompt


# What a completion may end with; the table that inference servers have in generation_config.json.
STOPS = {
    "qwen2.5": ["<|im_end|>"],
    "qwen3": ["<|im_end|>"],
    "qwen3.5": ["<|im_end|>"],
    "llama3.1": ["<|eot_id|>"],
    "gpt-oss": ["<|return|>", "<|call|>"],  # not <|end|>, which closes the analysis too
    "glm-4-moe": ["<|endoftext|>", "<|observation|>", "<|user|>"],
    "gemma4": ["<eos>", "<|tool_response>", "<turn|>"],
    "gemma": ["<eos>", "<end_of_turn>"],
    "phi3": ["<|endoftext|>", "<|end|>"],
    "deepseek-v3": ["<｜end▁of▁sentence｜>"],
}


@pytest.mark.parametrize("family", STOPS)
def test_what_ends_a_completion(family: str) -> None:
    chat = chat_of(family, families()[family].originals[0])
    assert [chat.decode([token]) for token in chat.stop_token_ids] == STOPS[family]


CALL = AssistantTurn(
    content="",
    reasoning=None,
    calls=(ToolCall(id="call_0_0", name="add", arguments={"a": 3}),),
)
REPLY: list[Message] = [
    {"role": "tool", "tool_call_id": "call_0_0", "name": "add", "content": '7"'}
]
# (stop token, suffix) after a call that ended by it: what the template writes around a reply 7".
SUFFIXES = {
    "qwen3": (
        "<|im_end|>",
        '\n<|im_start|>user\n<tool_response>\n7"\n</tool_response><|im_end|>\n'
        "<|im_start|>assistant\n",
    ),
    "llama3.2": (
        "<|eot_id|>",
        '<|start_header_id|>ipython<|end_header_id|>\n\n"7\\""<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "gpt-oss": (
        "<|call|>",
        "<|start|>functions.add to=assistant<|channel|>commentary<|message|>"
        '"7\\""<|end|><|start|>assistant',
    ),
    "glm-4-moe": ("<|observation|>", '\n<tool_response>\n7"\n</tool_response><|assistant|>'),
    "gemma4": (
        "<|tool_response>",
        'response:add{value:<|"|>7"<|"|>}<tool_response|>',
    ),
    "lfm2.5": (
        "<|im_end|>",
        '\n<|im_start|>tool\n7"<|im_end|>\n<|im_start|>assistant\n',
    ),
    "nemotron3": (
        "<|im_end|>",
        '\n<|im_start|>user\n<tool_response>\n7"\n</tool_response>\n<|im_end|>\n'
        "<|im_start|>assistant\n<think>\n",
    ),
    "deepseek-v3": (
        "<｜end▁of▁sentence｜>",
        '<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>7"<｜tool▁output▁end｜><｜tool▁outputs▁end｜>',
    ),
}


@pytest.mark.parametrize("family", SUFFIXES)
def test_the_suffix_after_every_kind_of_end(family: str) -> None:
    chat = chat_of(family, families()[family].originals[0])
    stop, expected = SUFFIXES[family]
    body = chat.encode_plain("…")
    stop_id = chat.encoder.control[stop]

    def suffix(sampled: list[int], finish: Finish) -> str:
        spans = chat.suffix(
            CALL, REPLY, completion_ids=sampled, finish=finish, generation_prompt=True
        )
        assert [origin for origin, _ in spans if origin is Origin.tool] == [Origin.tool]
        return chat.decode([token for _, ids in spans for token in ids])

    assert suffix([*body, stop_id], Finish.stop) == expected
    # cut by length, aborted, or stopped by a string: the end of turn is the template's
    for finish in Finish:
        assert suffix(body, finish) == stop + expected
    # another stop token does not end the turn
    others = [token for token in chat.stop_token_ids if token != stop_id]
    for other in others:
        assert suffix([*body, other], Finish.stop) == stop + expected


def test_an_answer_that_ended_has_no_second_end_before_a_later_user_turn() -> None:
    chat = chat_of("gpt-oss", "gptoss")
    control = chat.encoder.control
    answer = AssistantTurn(content="7", reasoning=None, calls=())
    user: Message = {"role": "user", "content": "And 4 + 5?"}

    def after(*end: str, finish: Finish = Finish.stop) -> str:
        sampled = [*chat.encode_plain("7"), *(control[token] for token in end)]
        spans = chat.suffix(
            answer, [user], completion_ids=sampled, finish=finish, generation_prompt=True
        )
        lengths = chat.wrapper_length(answer, [user], completion_ids=sampled, finish=finish)
        ids = [token for _, found in spans for token in found]
        assert lengths + len(chat.encode_plain("And 4 + 5?")) == len(ids)
        return chat.decode(ids)

    following = "<|start|>user<|message|>And 4 + 5?<|end|><|start|>assistant"
    # Served: <|end|>, then `following`. Trained: the sampled <|return|> in place of <|end|>.
    assert after("<|return|>") == following
    assert after("<|end|>") == following
    assert after() == after("<|call|>") == after(finish=Finish.length) == "<|end|>" + following
    served = chat.render(
        [{"role": "user", "content": "u"}, answer.message(), user], generation_prompt=True
    )
    assert served.endswith("<|channel|>final<|message|>7<|end|>" + following)


def test_the_certificate_tells_where_trained_and_served_contexts_differ() -> None:
    differing = {}
    for family, source in ORIGINALS:
        last, followed = chat_of(family, source).answer_end_ids()
        if last != followed:
            differing[family] = chat_of(family, source)
    assert list(differing) == ["gpt-oss"]
    certificate = certify(differing["gpt-oss"], EXAMPLE_TOOLS)
    (warning,) = [text for text in certificate.warnings if "<|return|>" in text]
    assert "is trained with <|return|> in view and served with <|end|>" in warning
    remark = "<|return|> stays where it was sampled, in place of <|end|>"
    probes = {probe.name for probe in certificate.probes if remark in probe.reason}
    assert {"no call", "reasoning without a call"} <= probes


@pytest.mark.parametrize(("family", "source"), WITH_TOOLS)
def test_a_completion_that_a_string_stopped_before_its_end_of_turn(
    family: str, source: str
) -> None:
    chat = chat_of(family, source)
    prompt: list[Message] = [{"role": "user", "content": "3 + 4?"}]
    ledger = chat.prompt_ids(prompt, EXAMPLE_TOOLS)
    said = as_parsed(chat, CALL, "user")
    full = chat.prompt_ids([*prompt, said.message(), *REPLY], EXAMPLE_TOOLS)
    end = chat.end_ids(said, REPLY, generation_prompt=True)
    whole = chat.suffix(said, REPLY, completion_ids=end, finish=Finish.stop, generation_prompt=True)
    length = sum(len(ids) for _, ids in whole)
    sampled = full[len(ledger) : len(full) - length - len(end)]
    spans = chat.suffix(
        said, REPLY, completion_ids=sampled, finish=Finish.stop, generation_prompt=True
    )
    assert ledger + sampled + [token for _, ids in spans for token in ids] == full
    assert spans[0][0] is Origin.template
    # What is missing is the template's, mask 0.
    assert tuple(spans[0][1][: len(end)]) == end


def test_engines_are_asked_to_stop_at_tokens_only() -> None:
    # A text to stop at may end within a token, and then the sampled ids are not what was said.
    assert [f.name for f in fields(Sampling) if "stop" in f.name] == ["stop_token_ids"]


@pytest.mark.parametrize("source", [s for name, s in WITH_TOOLS if name == "gemma4"])
def test_gemma_thinks_again_after_a_tools_reply(source: str) -> None:
    chat = load("gemma4", original(source), enable_thinking=True)
    certify(chat, EXAMPLE_TOOLS).raise_if_refused()
    # The newest template opens the thought in the generation prompt, after a reply only.
    assert chat.opens_reasoning("tool") == (source == "gemma4_v5")
    assert not chat.opens_reasoning("user")
    opening = "" if chat.opens_reasoning("tool") else "<|channel>thought\n"
    thought = f"{opening}7 it is\n<channel|>It is 7.<turn|>"
    sampled = chat.encoder.encode(thought)
    turn = chat.parse(sampled, EXAMPLE_TOOLS, turn=1, after="tool")
    assert (turn.reasoning, turn.content) == ("7 it is", "It is 7.")
    messages: list[Message] = [{"role": "user", "content": "3 + 4?"}, CALL.message(), *REPLY]
    ledger = chat.prompt_ids(messages, EXAMPLE_TOOLS)
    full = chat.render([*messages, turn.message()], EXAMPLE_TOOLS)
    assert full.startswith(chat.decode(ledger) + thought)


def test_a_user_reply_after_a_tools() -> None:
    for family, source in WITH_TOOLS:
        chat = chat_of(family, source)
        both = [*REPLY, {"role": "user", "content": "hurry"}]
        try:
            chat.prompt_ids(
                [{"role": "user", "content": "u"}, CALL.message(), *both], EXAMPLE_TOOLS
            )
        except ChatError:
            continue
        spans = chat.suffix(
            CALL, both, completion_ids=[1], finish=Finish.stop, generation_prompt=True
        )
        text = chat.decode([token for _, ids in spans for token in ids])
        assert text.index("7") < text.index("hurry"), family


def test_replies_to_several_calls_where_one_is_rendered() -> None:
    chat = chat_of("llama3.2", "llama3_2")
    turn = AssistantTurn(content="", reasoning=None, calls=CALL.calls * 2)
    replies = [*REPLY, {**REPLY[0], "content": "Error: only one call per turn"}]
    spans = chat.suffix(
        turn, replies, completion_ids=[1], finish=Finish.stop, generation_prompt=False
    )
    shown = [chat.decode(ids) for origin, ids in spans if origin is Origin.tool]
    assert shown == ['7\\"\\nError: only one call per turn']


def test_replies_to_several_calls_get_the_role_of_results_where_one_is_rendered() -> None:
    tokenizer = copy.copy(small_tokenizer(families()["llama3.2"]))
    tokenizer.chat_template = original("llama3_2")
    config = ChatTemplateConfig(roles={"tool": "ipython"})
    chat = load_chat(tokenizer, config, ResponseSchemaConfig())
    turn = AssistantTurn(content="", reasoning=None, calls=CALL.calls * 2)
    shown, (reply,) = chat.as_rendered(turn, [*REPLY, {**REPLY[0], "content": "Error"}])
    assert shown.calls == CALL.calls
    assert (reply["role"], reply["content"]) == ("ipython", '7"\nError')


def test_an_edit_finds_what_forks_change() -> None:
    found = template_pattern("{%- if message.role == 'user' %}")
    assert found.search('{% if  message["role"] == "user" -%}')
    assert not found.search("{% if message.rule == 'user' %}")


def test_a_fix_that_does_not_apply_says_what_is_missing() -> None:
    family = Family(fixes=((Edit(find="{%- if a %}", put="{%- if b %}", why="w"),),))
    with pytest.raises(ChatError, match=r"does not hold '\{%- if a %\}'.*chat_template=none"):
        apply_fix("mine", family, "{{ messages }}")


def test_a_fix_as_text() -> None:
    text = chat_of("qwen3", "qwen3").fix.text()
    assert text.startswith("chat template fixed as qwen3: past reasoning is kept\n--- stock")
    assert "-        {%- if loop.index0 > ns.last_query_index %}" in text
    assert chat_of("qwen2.5", "qwen2_5").fix.text() == ""


@pytest.mark.parametrize(
    ("family", "source"), [("deepseek-v3", "deepseekv3"), ("deepseek-r1", "deepseek_r1_distill")]
)
def test_a_fork_in_double_quotes_is_fixed(family: str, source: str) -> None:
    stock = original(source)
    assert stock is not None
    fix = load(family, re.sub(r"'([^'\"]*)'", r'"\1"', stock)).fix
    assert (fix.family, fix.problem) == (family, None)
    assert fix.changes == chat_of(family, source).fix.changes


def renamed(source: str, name: str, other: str) -> str:
    """A stock template in which a variable has another name."""
    stock = original(source)
    assert stock is not None
    return re.sub(rf"(?<![\w.'\"]){name}\b(?!['\"])", other, stock)


def test_a_fix_that_would_break_a_fork_is_not_made() -> None:
    # The edit writes with `message`, which this fork calls otherwise; without it all is well.
    chat = load("lfm2", renamed("lfm2_v2", "message", "said"))
    assert (chat.fix.family, chat.fix.changes) == ("lfm2", ())
    assert certify(chat, EXAMPLE_TOOLS).status is Status.passed
    chat = load("qwen3", renamed("qwen3", "message", "said"))
    with pytest.raises(CertificateError, match=r"with the fix of qwen3, .* no longer renders"):
        certify(chat, EXAMPLE_TOOLS).raise_if_refused()


def test_a_fork_in_which_nothing_to_fix_is_found_says_so() -> None:
    chat = load("mistral", renamed("mistral_common:v7", "ns", "state"))
    assert chat.fix.changes == ()
    with pytest.raises(CertificateError, match=r"does not hold .*, which the fix of mistral"):
        certify(chat, EXAMPLE_TOOLS).raise_if_refused()


def test_variables_that_the_template_does_not_read_are_refused() -> None:
    for key, message in (
        ("enable_thinkin", "reads no such variable; did you mean enable_thinking?"),
        ("tokenize", "reads no such variable; remove it"),
        ("messages", "agenttrain fills it in"),
    ):
        with pytest.raises(ChatError, match=f"chat_template.kwargs.{key}: .*{re.escape(message)}"):
            load("qwen3", original("qwen3"), **{key: False})


def test_none_leaves_the_template_alone_and_says_what_would_help() -> None:
    chat = chat_of("qwen3", "qwen3", "none")
    assert chat.template == original("qwen3")
    with pytest.raises(CertificateError, match="Set chat_template to auto"):
        certify(chat, EXAMPLE_TOOLS).raise_if_refused()


def test_a_family_of_the_users() -> None:
    config = ChatTemplateConfig(
        name="mine", family={"response": "hermes", "fixes": [[{"put": "{# mine #}", "why": "w"}]]}
    )
    tokenizer = copy.copy(small_tokenizer(families()["llama3"]))
    tokenizer.chat_template = original("llama3")
    chat = load_chat(tokenizer, config, ResponseSchemaConfig())
    assert chat.template.startswith("{# mine #}")
    with pytest.raises(ChatError, match=r"family.mark is no key; they are absent, added, bos"):
        parse_family("mine", {"mark": []})


def test_variables_are_saved_as_defaults() -> None:
    stock = original("qwen3")
    chat = load("qwen3", stock, enable_thinking=False)
    message: list[Message] = [{"role": "user", "content": "u"}]
    served = load("qwen3", chat.saved_template)
    assert served.prompt_ids(message, []) == chat.prompt_ids(message, [])
    assert chat.decode(served.prompt_ids(message, [])).endswith("<think>\n\n</think>\n\n")


def test_serving_needs_the_saved_template() -> None:
    (warning,) = certify(chat_of("qwen3", "qwen3"), EXAMPLE_TOOLS).warnings
    assert "past reasoning in view, which its own template drops" in warning
    assert "chat_template.jinja" in warning


@cache
def table() -> list[TableRow]:
    return rows()


@pytest.mark.long
def test_the_reference_shows_the_table() -> None:
    assert markdown(table()) in PAGE.read_text(encoding="utf-8"), "scripts/reference"


def test_the_command_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "table.json"
    assert main(["templates", "--json", str(path)]) == 0
    shipped = list(read_shipped().values())  # nothing is certified for it
    out = capsys.readouterr().out
    assert plain(shipped) in out
    assert f"Certified on {shipped[0].certified}; " in out
    found = json.loads(path.read_text())
    assert found == json_rows(shipped)
    keys = {"family", "tools", "prefix_preserving", "fix", "parser", "reasoning", "certificate"}
    keys |= {"certified"}
    assert all(keys == set(row) for row in found)
    assert [row["family"] for row in found] == list(families())


@pytest.mark.slow
def test_the_shipped_table_is_the_table() -> None:
    shipped = read_shipped()
    assert list(shipped) == list(families()), "scripts/certify_templates"
    assert [replace(row, certified=None) for row in shipped.values()] == table()
    assert all(row.certified is None for row in table())


def test_the_table_without_the_originals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("agenttrain.commands.templates.TRL", "no_such_module")
    assert originals_folder() is None
    path = tmp_path / "table.json"
    assert main(["templates", "--certify", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert plain(table()) in out
    shipped = re.search(
        r"Not certified now but on (\S+ with transformers \S+, trl \S+, .*?): ", out
    )
    assert shipped is not None
    rows = {row["family"]: row for row in json.loads(path.read_text())}
    assert rows["qwen3"]["certified"] == shipped[1]
    assert rows["chatml"]["certified"] is None
    assert "cohere, deepseek-r1" in out


def test_chatml_and_the_first_mistrals_are_known() -> None:
    assert chat_of("chatml", "own:dbrx").fix.family == "chatml"
    prompt: list[Message] = [{"role": "user", "content": "u"}]
    chat = chat_of("mistral-v1", "mistral_common:v1")
    assert chat.decode(chat.prompt_ids(prompt, [])) == "<s> [INST] u [/INST]"
    certificates = {row.family: row.certificate for row in table()}
    assert certificates["chatml"] == "passed, on templates of ours"
    assert certificates["mistral-v1"] == "passed"


@pytest.mark.slow
def test_the_command_certifies_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    tokenizer = copy.copy(small_tokenizer(families()["qwen3"]))
    tokenizer.chat_template = original("qwen3")
    tokenizer.save_pretrained(tmp_path)
    assert main(["templates", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "chat template  qwen3; certificate fixed" in out
    assert "+++ fixed" in out
    assert main(["templates", str(tmp_path), "--chat-template", "none"]) == 1
    assert "earlier messages are rendered anew" in capsys.readouterr().out
    file = tmp_path / "found.json"
    assert main(["templates", str(tmp_path), "--json", str(file), "--markdown"]) == 0
    assert "| generation prompt | passed |  |" in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert (found["folder"], found["status"], found["family"]) == (str(tmp_path), "fixed", "qwen3")
    assert {"name", "status", "reason", "misfit"} == set(found["probes"][0])
    template = tmp_path / "mine.jinja"
    template.write_text(f"{{# mine #}}{original('qwen2_5')}")
    assert main(["templates", str(tmp_path), "--path", str(template)]) == 0
    assert "chat template  qwen2.5; certificate passed" in capsys.readouterr().out
    assert main(["templates", str(tmp_path), "--response-schema", "gemma4"]) == 1
    assert "remedy   Set response_schema=hermes" in capsys.readouterr().out
    schema = tmp_path / "mine.yaml"
    schema.write_text("{call_open: <tool_call>, call_close: </tool_call>}")
    assert main(["templates", str(tmp_path), "--schema-path", str(schema)]) == 0
    assert "certificate fixed" in capsys.readouterr().out
    schema.write_text("{call_open: <call>}")
    assert main(["templates", str(tmp_path), "--schema-path", str(schema)]) == 1
    assert "remedy   Set response_schema=hermes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{}/nowhere"], "there is no such folder"),
        (["{}"], "holds no tokenizer (tokenizer.json or tokenizer_config.json)"),
        (
            ["{}/x.jinja"],
            "is a file; a template is certified with its tokenizer: agenttrain templates",
        ),
        (["{}", "--json", "{}/no/x.json"], "/no/x.json: name a file in an existing folder"),
        (["--json", "{}/no/x.json"], "/no/x.json: name a file in an existing folder"),
        (["--json={}"], "name a file in an existing folder"),
        (["--no-tools"], "--no-tools: is for a tokenizer"),
        (["--path", "x.jinja"], "--path: is for a tokenizer: agenttrain templates <folder> --path"),
    ],
)
def test_what_is_wrong_with_the_command_is_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture, arguments: list[str], message: str
) -> None:
    (tmp_path / "x.jinja").write_text("{{ messages }}")
    assert main(["templates", *(text.format(tmp_path) for text in arguments)]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert message in found.err
