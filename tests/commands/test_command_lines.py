"""Every line of `command_lines.txt`: its exit code, the key that its error names, and the words."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_lines import (
    CommandLine,
    command_lines,
    key_in,
    make_place,
    messages,
    write_messages,
)

from agenttrain import cli

ROOT = Path(__file__).parents[2]
UPDATE = bool(os.environ.get("UPDATE_GOLDEN"))
LINES = list(command_lines())
SAMPLE = LINES[::16]
"""The lines of the default suite."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    make_place(folder)
    return folder


@pytest.fixture
def typed(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[Path, pytest.MonkeyPatch, pytest.CaptureFixture[str]]:
    monkeypatch.chdir(place)
    monkeypatch.setenv("SHELL", "/bin/dash")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    return place, monkeypatch, capsys


def answers(
    lines: list[CommandLine], place: Path, capsys: pytest.CaptureFixture[str]
) -> dict[str, str]:
    """Type the lines; return their errors, after a check of codes and keys."""
    errors, wrong = {}, []
    capsys.readouterr()
    for line in lines:
        code = cli.main(line.words.split(" "))
        text = capsys.readouterr().err.replace(str(place), "PLACE") if code else ""
        errors[line.words] = text.rstrip("\n")
        if (code, key_in(text)) != (line.code, line.key):
            wrong.append(f"{line.words}: {code} {key_in(text)}, not {line.code} {line.key}")
    assert not wrong, "\n".join(wrong)
    return errors


def test_a_sample_of_command_lines(typed) -> None:
    place, _, capsys = typed
    errors, golden = answers(SAMPLE, place, capsys), messages()
    assert errors == {words: golden[words] for words in errors}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_command_line(typed) -> None:
    place, _, capsys = typed
    errors = answers(LINES, place, capsys)
    if UPDATE:
        write_messages(errors)
    assert errors == messages()


@pytest.mark.parametrize("words", ["steps=0", "view nope", "--version"])
def test_a_process_exits_with_the_code_of_the_table(words: str, place: Path) -> None:
    (line,) = (line for line in LINES if line.words == words)
    done = subprocess.run(
        [sys.executable, "-m", "agenttrain.cli", *words.split()],
        capture_output=True,
        text=True,
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, key_in(done.stderr)) == (line.code, line.key)
