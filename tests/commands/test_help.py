"""`agenttrain <verb> --help`, its examples, and what every verb does without a reader."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command_kit import parse

from agenttrain import cli
from agenttrain.commands.running import compose_all
from agenttrain.commands.verb import VERBS, option_rows
from agenttrain.commands.verbs import DECLARED
from agenttrain.settings.compose import hydra_session
from agenttrain.utils.model_path import model_folder

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", VERBS)
def test_help_of_a_verb_has_its_options_and_examples(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    verb = DECLARED[name]
    assert cli.main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: agenttrain {name}")
    for option, meaning in {**option_rows(verb.parser()), **(verb.settings or {})}.items():
        assert option.partition(" ")[0] in text
        assert meaning in text
    assert text.count(f"\n  agenttrain {name}") == len(verb.examples) >= 2
    assert max(map(len, text.splitlines())) <= 110
    assert (ROOT / "docs" / verb.page).is_file()
    assert cli.main(["--help"]) == 0
    assert f"\n  {name:<14} {verb.help}\n" in capsys.readouterr().out


@pytest.mark.parametrize("words", ["--help", "plan --help", "trian", "view"])
def test_help_and_a_wrong_verb_import_nothing_heavy(words: str, tmp_path: Path) -> None:
    program = (
        "import sys; from agenttrain.cli import main; main(sys.argv[1:]); "
        "print({'hydra', 'omegaconf', 'pydantic', 'rich', 'httpx', 'torch'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words.split()],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.splitlines()[-1] == "set()"


def test_help_of_a_word_that_is_no_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["viwe", "--help"]) == 2
    assert "viwe: no such verb (did you mean 'view'?)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        words
        for name in VERBS
        for words in DECLARED[name].examples
        if DECLARED[name].settings is not None
        and "<run>" not in words
        and name not in ("rehearse", "submit", "engine-server")
    ],
)
def test_examples_with_settings_compose(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_model").symlink_to(model_folder("bundled:shop"))
    Path("rows.jsonl").write_text('{"prompt": "How many?", "answer": "3"}\n' * 10)
    command = parse(shlex.split(words))
    with hydra_session(command.source):
        assert compose_all(command)


LONG = ("templates", "check", "data", "tools", "plan --gpu-memory-gb 80", "view --help")


@pytest.mark.parametrize(
    "words",
    [
        *("settings --json", "--cfg job"),
        *(pytest.param(words, marks=pytest.mark.long) for words in LONG),
    ],
)
def test_a_reader_that_stops_early_ends_a_verb_quietly(words: str, tmp_path: Path) -> None:
    line = f'"{sys.executable}" -m agenttrain.cli {words} | head -c 1 >&2; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", line],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0
    # What `head` has read, behind the line of a plan that takes long, and no traceback.
    assert len(done.stderr.rpartition("\n")[2]) == 1
    assert "Traceback" not in done.stderr


WITHOUT_TEST_EXTRA = """
import importlib.util, sys
there = importlib.util.find_spec
absent = ("trl", "mistral_common")
importlib.util.find_spec = lambda name, *rest: None if name in absent else there(name, *rest)
from agenttrain.cli import main
sys.exit(main(["templates"]))
"""


def test_templates_prints_its_table_in_a_plain_install(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TEST_EXTRA],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    (qwen3,) = (line.split() for line in lines if line.startswith("qwen3 "))
    assert qwen3[:4] == ["qwen3", "yes", "no", "qwen"]
    assert "fixed" in qwen3 and "?" not in qwen3
    assert "agenttrain templates --certify" in lines[-1]
