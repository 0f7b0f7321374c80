"""What is looked at before a run starts: template, response schema, and the first prompts."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import tiny

from agenttrain.cli import main

REFUSES = "{%- for m in messages if m.role == 'system' %}{{ raise_exception('no') }}{%- endfor %}"
LEAVES_OUT = tiny.TEMPLATE.replace("messages[0].role == 'system'", "false").replace(
    "or (m.role == 'system' and not loop.first)", ""
)
SYSTEM = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]


def check(folder: Path, template: str, rows: list[dict[str, Any]]) -> int:
    """`agenttrain check` of a run without tools on these rows."""
    model = folder / "model"
    tokenizer = copy.copy(tiny.tokenizer())
    tokenizer.chat_template = template
    tokenizer.save_pretrained(model)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = [f"data.{split}.path={path}" for split in ("train", "test")]
    run = ["experiment=none", "model=folder", f"model.path={model}", "data=file", "tools=[]"]
    return main(["check", *run, *data, "stop_tools=[]", "reward.exact_match.tool=null"])


def test_prompts_that_render_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = [{"messages": SYSTEM, "answer": "4", "user_turns": ["3 + 3?"]}, {"prompt": "1 + 1?"}]
    assert check(tmp_path, tiny.TEMPLATE, rows) == 0
    # <s> user \n 1 ␣+ ␣ 1 ? </s> \n <s> assistant \n is the shorter prompt
    assert "the first 2 of data.train have 13 to " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("template", "row", "message"),
    [
        (REFUSES + tiny.TEMPLATE, {"messages": SYSTEM}, "refuses system messages (no), and this"),
        (LEAVES_OUT, {"messages": SYSTEM}, "leaves out system messages, and this task has one"),
        (
            "{%- if messages[0].role != 'user' %}{{ raise_exception('user first') }}{%- endif %}"
            + tiny.TEMPLATE,
            {"messages": [{"role": "assistant", "content": "Hi."}, SYSTEM[1]]},
            "refuses messages of the roles ['assistant', 'user']: user first",
        ),
    ],
)
def test_a_row_that_the_template_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture, template: str, row: dict, message: str
) -> None:
    rows = [{"prompt": "1 + 1?"}, {"task_id": "second", **row}]
    assert check(tmp_path, template, rows) == 2
    found = capsys.readouterr()
    assert "certificate passed" in found.out
    assert found.err.startswith("agenttrain: data.train: task second: the ")
    assert message in found.err


def test_a_later_user_turn_that_the_template_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    template = tiny.TEMPLATE.replace(
        "{%- for m in messages %}",
        "{%- if messages | length > 6 %}{{ raise_exception('too many') }}{%- endif %}"
        "{%- for m in messages %}",
    )
    rows = [{"task_id": "talk", "prompt": "1 + 1?", "user_turns": ["and?"] * 3}]
    assert check(tmp_path, template, rows) == 2
    assert "data.train: task talk: the chat template refuses" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("group", "text", "message"),
    [
        ("chat_template", "{% if a %}\n{{ b }", "has a syntax error in line 2: unexpected '}'"),
        ("response_schema", "call_open: <call>\ncall_clos: </call>", "did you mean call_close"),
        ("response_schema", "{", "cannot be read"),
    ],
)
def test_a_broken_file_is_told_before_tokenizer_and_data(
    tmp_path: Path, capsys: pytest.CaptureFixture, group: str, text: str, message: str
) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(text)
    assert main(["check", f"{group}=file", f"{group}.path={path}"]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert f"agenttrain: {group}.path={path}" in found.err
    assert message in found.err


def test_a_folder_is_no_file(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["check", "chat_template=file", f"chat_template.path={tmp_path}"]) == 2
    assert "is a folder; name the file in it" in capsys.readouterr().err
