"""`agenttrain settings`: every key with a description, and a schema that our own files pass."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError
from omegaconf import OmegaConf

from agenttrain.cli import main
from agenttrain.commands.settings import all_settings, json_schema, settings_page
from agenttrain.settings.messages import setting_keys
from agenttrain.utils.files import conf_folder


def test_a_section_is_printed_with_types_bounds_defaults_and_choices(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["settings", "optimizer"]) == 0
    out = capsys.readouterr().out
    assert "optimizer.lr = 1e-06   (number, > 0)\n    Learning rate after the warm-up." in out
    assert "optimizer.name = adamw   (adamw, muon, sgd)" in out
    assert "optimizer.momentum = 0.95   (number, >= 0, < 1; with optimizer=muon)" in out
    assert "model.path" not in out


def test_every_setting_is_listed_and_described() -> None:
    listed = {setting.key: setting for setting in all_settings()}
    leaves = [key for key in setting_keys() if not any(k.startswith(f"{key}.") for k in listed)]
    assert set(leaves) <= set(listed)
    assert [key for key, setting in listed.items() if not setting.description] == []
    assert listed["tools.<name>.timeout_s"].default == "10.0"
    assert listed["reward.<name>.on_unavailable"].type == "stop, drop"


def test_json_is_the_same_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "seed", "--json"]) == 0
    (setting,) = json.loads(capsys.readouterr().out)
    assert (setting["key"], setting["default"]) == ("seed", "0")


def test_the_page_has_a_table_for_each_section() -> None:
    page = settings_page()
    assert "\n## optimizer\n\n| key | type | default | meaning |\n" in page
    assert "| `model.path` | text |  | Folder with config.json" in page


OURS = [
    file
    for group in ("experiment", "debug")
    for file in sorted((conf_folder() / group).rglob("*.yaml"))
]


@pytest.fixture(scope="module")
def schema() -> Draft202012Validator:
    Draft202012Validator.check_schema(json_schema())
    return Draft202012Validator(json_schema())


@pytest.mark.parametrize("file", OURS, ids=lambda file: file.stem)
def test_our_own_files_pass_the_schema(file: Path, schema: Draft202012Validator) -> None:
    schema.validate(OmegaConf.to_container(OmegaConf.load(file)))


@pytest.mark.parametrize(
    "content",
    [
        {"stepz": 1},
        {"optimizer": {"lr": 0}},
        {"optimizer": {"momentums": 0.5}},
        {"rollout": {"on_break": "stop"}},
        {"tools": {"sql": {"timeout_s": "long"}}},
    ],
)
def test_the_schema_refuses_what_the_settings_refuse(
    content: dict[str, Any], schema: Draft202012Validator
) -> None:
    with pytest.raises(ValidationError):
        schema.validate(content)


def test_the_schema_takes_interpolations(schema: Draft202012Validator) -> None:
    content = {
        "steps": "???",
        "optimizer": {"lr": "${oc.env:LR}"},
        "algorithm": {"objective": "${mine}"},
        "engine": "${mine}",
        "defaults": [{"override /model": "shop"}],
    }
    schema.validate(content)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optimiser"], "optimiser: no such section (did you mean 'optimizer'?)"),
        (["optimizer.zzz"], "optimizer.zzz: unknown key"),
        (["optimizer.lrr"], "optimizer.lrr: unknown key (did you mean 'optimizer.lr'?)"),
        (["model", "--schema"], "model: the schema is of all sections"),
    ],
)
def test_arguments_that_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["settings", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_it_imports_no_torch() -> None:
    code = (
        "import sys; from agenttrain.cli import main; main(['settings', '--schema']); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
