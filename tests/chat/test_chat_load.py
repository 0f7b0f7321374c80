from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from tiny import TEMPLATE, tokenizer
from transformers import AutoTokenizer

from agenttrain.chat.chat import Chat
from agenttrain.chat.config import ChatTemplateConfig, ResponseSchemaConfig
from agenttrain.chat.encoding import ChatError
from agenttrain.chat.loading import load_chat, load_spec


def load(tok: Any = None, *, template: dict | None = None, response: dict | None = None) -> Chat:
    return load_chat(
        tok or tokenizer(),
        ChatTemplateConfig(**(template or {})),
        ResponseSchemaConfig(**(response or {})),
    )


def with_template(template: str | None) -> Any:
    tok = copy.copy(tokenizer())
    tok.chat_template = template
    return tok


@pytest.mark.parametrize("name", ["auto", "none", "hermes"])
def test_the_tokenizers_own_template(name: str) -> None:
    chat = load(template={"name": name})
    assert chat.template == TEMPLATE
    assert chat.stop_token_ids == (2,)


def test_auto_recognises_a_family_by_what_its_template_renders() -> None:
    revised = TEMPLATE.replace("Tools:", "You may call:").replace("{%- for m", "\n  {%- for m")
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    chat = load(with_template(revised))
    assert chat.parse(chat.encoder.encode(text), [], turn=0).calls[0].name == "f"


def test_auto_names_the_group_when_it_knows_no_format() -> None:
    foreign = with_template(TEMPLATE.replace("<tool_call>", "<call>"))
    with pytest.raises(ChatError, match=r"response_schema=auto: .* one of .*hermes"):
        load(foreign)
    assert load(foreign, response={"name": "hermes"}).template == foreign.chat_template


def test_a_file_of_the_users(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text(TEMPLATE + "{# é #}", encoding="utf-8")
    assert load(template={"name": "file", "path": str(path)}).template == TEMPLATE + "{# é #}"


FORMAT = {
    "reasoning_open": "<think>",
    "reasoning_close": "</think>",
    "call_open": "<call>",
    "call_close": "</call>",
    "name_key": "tool",
    "arguments_key": "input",
}


def test_a_response_schema_of_the_users(tmp_path: Path) -> None:
    path = tmp_path / "calls.yaml"
    path.write_text(json.dumps(FORMAT))
    chat = load(response={"name": "file", "path": str(path)})
    ids = chat.encode_plain('<call>{"tool": "f", "input": {"x": 1}}</call>')
    (call,) = chat.parse(ids, [], turn=0).calls
    assert (call.name, call.arguments, call.malformed) == ("f", {"x": 1}, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "must hold a mapping"),
        (json.dumps({"call_close": "<call>"}), "call_open or call_open_pattern is missing"),
        (json.dumps({**FORMAT, "name_key": 3}), "name_key: must be text"),
        ("{", "cannot be read"),
    ],
)
def test_a_response_schema_that_does_not_fit(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "calls.yaml"
    path.write_text(text)
    with pytest.raises(ChatError, match=message):
        load(response={"name": "file", "path": str(path)})


@pytest.mark.parametrize(
    ("template", "response", "message"),
    [
        ({"name": "qwem"}, {}, r"chat_template.name=qwem .* auto, .*; did you mean qwen3"),
        ({"name": "zzz"}, {}, r"is one of auto, chatml, cohere, .*, hermes, .*, none, .*qwen3"),
        ({}, {"name": "hermez"}, r"response_schema.name=hermez .*; did you mean hermes\?"),
        ({}, {"name": "file", "path": "/no/such.yaml"}, "/no/such.yaml cannot be read"),
        (
            {"name": "file", "path": "/no/such.jinja"},
            {},
            r"path=/no/such.jinja: there is no such file",
        ),
    ],
)
def test_errors_say_key_value_and_remedy(template: dict, response: dict, message: str) -> None:
    with pytest.raises(ChatError, match=message):
        load(template=template, response=response)


@pytest.mark.parametrize("carried", [None, "", {}, []])
def test_a_tokenizer_without_a_template(carried: Any) -> None:
    with pytest.raises(ChatError, match="carries no chat template; set `chat_template=file"):
        load(with_template(carried))


WITHOUT_TOOLS = TEMPLATE.replace("{%- if tools %}", "{%- if false %}")
SEVERAL = {"default": WITHOUT_TOOLS, "tool_use": TEMPLATE, "rag": "{{ 1 }}"}


@pytest.mark.parametrize("tools", [True, False])
@pytest.mark.parametrize("form", [dict, list])
def test_a_tokenizer_with_several_templates(form: type, tools: bool) -> None:
    carried: Any = SEVERAL
    if form is list:
        carried = [{"name": name, "template": text} for name, text in SEVERAL.items()]
    chat = load_chat(
        with_template(carried), ChatTemplateConfig(), ResponseSchemaConfig(), tools=tools
    )
    name = "tool_use" if tools else "default"
    # Saved and deployed is the one that was trained with.
    assert chat.saved_template == chat.template == SEVERAL[name]
    run = "a run with tools" if tools else "a run without tools"
    assert chat.fix.chosen == (
        f"of the templates that the tokenizer carries (default, rag, tool_use), {run} takes "
        f"{name}; it is the one that is saved with checkpoints"
    )


def test_several_templates_without_the_one_that_is_needed() -> None:
    with pytest.raises(ChatError, match=r"carries the chat templates rag, and none named default"):
        load(with_template({"rag": TEMPLATE}))


def test_several_templates_are_saved_as_the_one_that_was_trained_with(tmp_path: Path) -> None:
    tok = with_template(SEVERAL)
    tok.save_pretrained(tmp_path / "model")
    tok = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tok.chat_template == SEVERAL
    tok.chat_template = load(tok).saved_template
    tok.save_pretrained(tmp_path / "checkpoint")
    again = AutoTokenizer.from_pretrained(tmp_path / "checkpoint")
    assert again.get_chat_template() == again.get_chat_template(tools=[{}]) == TEMPLATE


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | length // 0 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{% for i in range(10 ** 30) %}{% endfor %}",
    ],
)
def test_a_template_that_computes_what_cannot_be_is_refused_in_words(template: str) -> None:
    with pytest.raises(ChatError, match="the chat template refuses messages"):
        load(with_template(template))


def test_a_syntax_error_is_told_as_one(tmp_path: Path) -> None:
    broken = "{%- if messages %}\n{{ messages }\n"
    problem = r"the chat template has a syntax error in line 2: unexpected '}'"
    with pytest.raises(ChatError, match=problem + "; correct it, or set chat_template"):
        load(with_template(broken))
    path = tmp_path / "mine.jinja"
    path.write_text(broken)
    with pytest.raises(ChatError, match=rf"chat_template.path={path}: {problem}"):
        load(template={"name": "file", "path": str(path)})


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ChatError, match="is a folder; name the file in it"):
        load(template={"name": "file", "path": str(tmp_path)})


def test_blocks_for_transformers_own_masks_are_no_syntax_errors(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    text = TEMPLATE.replace(
        "{%- for call in", "{% generation %}{%- endgeneration -%}{%- for call in"
    )
    path.write_text(text)
    assert load(template={"name": "file", "path": str(path)}).template == text


def test_a_tokenizer_that_is_not_fast() -> None:
    class Slow:
        chat_template = TEMPLATE

        def get_chat_template(self) -> str:
            return TEMPLATE

    with pytest.raises(ChatError, match=r"Slow is not backed by the `tokenizers`"):
        Chat(Slow(), TEMPLATE, load_spec("hermes"))


def test_template_variables_reach_the_template() -> None:
    shouting = with_template(TEMPLATE + "{%- if shout %}{{- '!' }}{%- endif %}")
    chat = load(shouting, template={"kwargs": {"shout": True}})
    ids = chat.prompt_ids([{"role": "user", "content": "u"}], [])
    assert chat.decode(ids[-1:]) == "!"


@pytest.mark.parametrize(("ids", "stops"), [(0, (2, 0)), ([2, 1], (2, 1)), (None, (2,))])
def test_stop_tokens_of_the_generation_config(
    tmp_path: Path, ids: object, stops: tuple[int, ...]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    tok = copy.copy(tokenizer())
    tok.name_or_path = str(tmp_path)
    assert load(tok).stop_token_ids == stops


def test_a_prompt_that_opens_the_reasoning() -> None:
    template = TEMPLATE.replace(
        "'<|im_start|>assistant\\n' }}{%- endif %}\n",
        "'<|im_start|>assistant\\n<think>\\n' }}{%- endif %}\n",
    )
    chat = load(with_template(template))
    turn = chat.parse(chat.encode_plain("a</think>It is 7."), [], turn=0)
    assert (turn.reasoning, turn.content) == ("a", "It is 7.")
