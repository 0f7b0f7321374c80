"""Which schema a run parses with: the tokenizer's, a family's, or the user's."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from response_cases import SCHEMAS, TEMPLATES
from tiny import tokenizer

from agenttrain.chat.config import ResponseSchemaConfig
from agenttrain.chat.encoding import ChatError
from agenttrain.chat.loading import load_spec, make_spec, resolve_spec, spec_names
from agenttrain.chat.parsers.base import ResponseSpec, parse_response
from agenttrain.settings.compose import Source, compose_run, convert, hydra_session
from agenttrain.utils.files import conf_folder

BARE = SimpleNamespace()
OURS = {"call_open": "<call>", "call_close": "</call>", "name_key": "tool", "arguments_key": "in"}


def resolve(tok: Any = BARE, family: str | None = None, **config: Any) -> ResponseSpec:
    return resolve_spec(tok, ResponseSchemaConfig(**config), family)


def names(spec: ResponseSpec, text: str) -> list[str]:
    return [call.name for call in parse_response(text, spec, turn=0).calls]


def test_auto_takes_what_the_tokenizer_carries() -> None:
    own = '<|tool_call>call:f{}<tool_call|><tool_call>{"name": "g"}</tool_call>'
    carries = SimpleNamespace(response_template=TEMPLATES["delimited"])
    assert names(resolve(carries, "hermes"), own) == ["f"]
    # What transformers drops when it reads tokenizer_config.json stays in init_kwargs.
    carries = SimpleNamespace(
        response_template=None, init_kwargs={"response_schema": SCHEMAS["list"]}
    )
    assert names(resolve(carries, "hermes"), '<|ACT|>[{"tool_name": "f"}]<|END_ACT|>') == ["f"]
    assert names(resolve(BARE, "hermes"), own) == ["g"]
    assert names(resolve(tokenizer(), "hermes"), own) == ["g"]


def test_a_saved_tokenizer_carries_its_schema(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    for key, spec in (
        ("response_schema", SCHEMAS["list"]),
        ("response_template", TEMPLATES["list"]),
    ):
        path.write_text(json.dumps({**json.loads(path.read_text()), key: spec}))
        loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
        text = '<|ACT|>[{"tool_name": "old"}]<|END_ACT|><ACT>[{"tool": "new", "input": {}}]</ACT>'
        wanted = "old" if key == "response_schema" else "new"
        assert names(resolve(loaded, "hermes"), text) == [wanted]


def test_a_named_format_counts_more_than_what_the_tokenizer_carries() -> None:
    carries = SimpleNamespace(response_template=TEMPLATES["delimited"])
    assert resolve(carries, None, name="hermes") is load_spec("hermes")


@pytest.mark.parametrize("spec", [OURS, {"name": "mine", "spec": OURS}])
def test_a_file_of_the_users(tmp_path: Path, spec: dict) -> None:
    text = '<call>{"tool": "f", "in": {}}</call>'
    for file, written in (("calls.yaml", yaml.safe_dump(spec)), ("calls.json", json.dumps(spec))):
        (tmp_path / file).write_text(written)
        assert names(resolve(name="file", path=str(tmp_path / file)), text) == ["f"]


def test_a_file_in_a_dialect(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"bos_token": "x", "response_template": TEMPLATES["list"]}))
    spec = resolve(name="file", path=str(path))
    assert names(spec, '<ACT>[{"tool": "f", "input": {}}]</ACT>') == ["f"]


def test_a_group_file_of_the_users() -> None:
    assert names(resolve(name="mine", spec=dict(OURS)), '<call>{"tool": "f"}</call>') == ["f"]


@pytest.mark.parametrize("name", ['["a"]', "{}", "3", "null"])
def test_a_name_that_is_no_text_names_no_tool(name: str) -> None:
    spec = resolve(name="mine", spec={"call_open": r"<call>", "call_open_also": r"(?=\{)"})
    find = {"type": "function", "function": {"name": "find", "parameters": {}}}
    text = f'{{"name": {name}, "arguments": {{}}}}'
    assert parse_response(text, spec, turn=0, schemas=[find]).content == text


def test_every_file_of_the_group_is_named_as_it_says_and_loads() -> None:
    for name in spec_names():
        content = yaml.safe_load((conf_folder() / "response_schema" / f"{name}.yaml").read_text())
        assert sorted(content) == ["name", "server_parser", "spec"]
        assert content["name"] == name
        assert load_spec(name).parse("", in_reasoning=False, schemas=()).content == ""


@pytest.mark.parametrize("name", spec_names())
def test_the_group_gives_the_same_format(name: str) -> None:
    source = Source()
    with hydra_session(source):
        composed = compose_run([f"response_schema={name}"], source)
    # Composed again from the run's own config.yaml, as `resume=` does.
    saved = convert(OmegaConf.create(OmegaConf.to_yaml(OmegaConf.create(composed.plain))))
    for config in (composed.config, saved.config):
        assert resolve_spec(BARE, config.response_schema, None) == load_spec(name)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, r"response_schema=auto: .* set response_schema to one of deepseek, .*file"),
        ({"name": "hermez"}, r"response_schema.name=hermez .*; did you mean hermes\?"),
        ({"name": "zzz"}, r"is one of auto, deepseek, file, .*, qwen_xml$"),
        ({"name": "file", "path": "/no/such.yaml"}, "/no/such.yaml cannot be read"),
    ],
)
def test_errors_say_key_value_and_remedy(config: dict, message: str) -> None:
    with pytest.raises(ChatError, match=message):
        resolve(**config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "must hold a mapping, not list"),
        ("{", "cannot be read"),
        ("{}", "call_open or call_open_pattern is missing"),
        (json.dumps({**OURS, "nam_key": "x"}), "nam_key is no key .*; did you mean name_key?"),
        (json.dumps({**OURS, "name_key": 3}), "name_key: must be text, not 3"),
        (json.dumps({**OURS, "ignored": "x"}), "ignored: must be a list, not 'x'"),
        (json.dumps({**OURS, "lenient": "x"}), "lenient: must be true or false"),
        (json.dumps({**OURS, "syntax": "yaml"}), "syntax: 'yaml' is not one of json, json_list"),
        (json.dumps({**OURS, "syntax": "named_json"}), r"header: .* \(\?P<name>"),
        (json.dumps({**OURS, "call_open_pattern": "("}), "missing \\), unterminated"),
        (json.dumps({**OURS, "reasoning_open": "<t>"}), "reasoning_open and reasoning_close go"),
        (json.dumps({**OURS, "call_id": "{x}"}), "call_id"),
        (json.dumps({"call_open_pattern": "x*"}), "call_open_pattern: 'x\\*' matches everywhere"),
        (json.dumps({"call_open_pattern": "(?P<_open>x)"}), "the name of the group _open is taken"),
        ("{format: other}", "format: 'other' is not known"),
        ("{format: harmony, call_open: x}", "call_open is no key"),
    ],
)
def test_a_file_that_does_not_fit(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "calls.yaml"
    path.write_text(text)
    with pytest.raises(ChatError, match=rf"(?s)response_schema.path=.*calls.yaml.*{message}"):
        resolve(name="file", path=str(path))


def parsed_by(**content: Any) -> dict[str, Any]:
    """A response_template whose calls are read so."""
    return {
        "start_anchor": "x",
        "fields": {"tool_calls": {"open": "<a>", "close": "</a>", **content}},
    }


def of_the_calls(**node: Any) -> dict[str, Any]:
    """A response_schema whose calls are read so."""
    return {"properties": {"tool_calls": node}}


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (parsed_by(content="json", content_args={"string_delims": 3}), "string_delims: must be"),
        (parsed_by(content="json", content_args={"string_delims": ["''"]}), "string_delims: must"),
        (parsed_by(content="kv-lines", content_args={"line_sep": ""}), "line_sep: must be a text"),
        (
            parsed_by(
                content="xml-inline",
                content_args={"tag_pattern": "(?P<key>a)(?P<value>b)", "value_parser": "json"},
            ),
            "value_parser: must be a mapping, as {name: json}, not 'json'",
        ),
        ({"properties": [1]}, r"response_schema.properties: must be a mapping, not \[1\]"),
        (of_the_calls(**{"x-parser-args": [3]}), "tool_calls.x-parser-args: must be a mapping"),
        (of_the_calls(**{"x-parser-args": {"transform": 3}}), "transform: must be a text, not 3"),
        (of_the_calls(**{"x-regex-substitutions": [["a"]]}), r"\['a'\] is no pair of"),
        (of_the_calls(required=3), "tool_calls.required: must be a list, not 3"),
        (of_the_calls(prefixItems=3), "tool_calls.prefixItems: must be a list, not 3"),
    ],
)
def test_a_dialect_that_is_written_wrongly(found: dict[str, Any], message: str) -> None:
    with pytest.raises(ChatError, match=f"the file: .*{message}"):
        make_spec(found, source="the file")
