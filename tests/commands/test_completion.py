"""Completion in real shells: keys are typed into a terminal, and the line that results is read."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from agenttrain import cli

ROOT = Path(__file__).parents[2]
NO_ZSH = "needs zsh: apt-get install zsh"
TYPED = {
    "agenttrain rehea": "agenttrain rehearse",
    "agenttrain resc": "agenttrain rescore",
    "agenttrain check algorithm=dap": "agenttrain check algorithm=dapo",
    "agenttrain optimizer.warm": "agenttrain optimizer.warmup_steps=",
    "agenttrain rollout.on_break=dr": "agenttrain rollout.on_break=drop",
    "agenttrain tools=[sql,fin": "agenttrain tools=[sql,final_answer",
    "agenttrain tools.sql.timeo": "agenttrain tools.sql.timeout_s=",
    "agenttrain eval run=outp": "agenttrain eval run=outputs",
    "agenttrain view outp": "agenttrain view outputs",
    "agenttrain view outputs --st": "agenttrain view outputs --step",
    "agenttrain export --fo": "agenttrain export --format",
    # Values of an option, and neither options nor folders.
    "agenttrain export --format ": "agenttrain export --format",
    "agenttrain export --format mer": "agenttrain export --format merged",
    "agenttrain export --format o": "agenttrain export --format o",
    "agenttrain replay outputs --tools l": "agenttrain replay outputs --tools live",
    "agenttrain --cfg h": "agenttrain --cfg hydra",
    "agenttrain check ev": "agenttrain check eval",
    "agenttrain check reh": "agenttrain check rehearse",
    "agenttrain submit sf": "agenttrain submit sft",
    "agenttrain completion ins": "agenttrain completion install",
    "agenttrain data --ro": "agenttrain data --rows",
    "agenttrain --config-dir mine model=lib": "agenttrain --config-dir mine model=library",
    "agenttrain settings optim": "agenttrain settings optimizer",
}
"""Typed text, and the line after a press of the tab key, without a blank or slash at its end."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with `agenttrain` on the PATH, some runs and a folder of groups."""
    command = tmp_path / "bin" / "agenttrain"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m agenttrain.cli "$@"\n')
    command.chmod(0o755)
    (tmp_path / "outputs").mkdir()
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "library.yaml").write_text("path: my_model\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.delenv("BASH_COMPLETION_USER_DIR", raising=False)
    return tmp_path


def completed(shell: list[str], setup: str, cases: Iterable[str]) -> dict[str, str]:
    """The lines that a shell on a terminal has after the tab key, by what was typed before it."""
    main, other = pty.openpty()
    environment = {**os.environ, "TERM": "dumb", "PS1": "> ", "INPUTRC": "/dev/null"}
    child = subprocess.Popen(
        shell, stdin=other, stdout=other, stderr=other, start_new_session=True, env=environment
    )
    os.close(other)

    def answer(keys: str) -> str:
        """Press the keys; return the text that `show` prints."""
        os.write(main, keys.encode())
        screen, end = "", time.monotonic() + 20
        while not (match := re.search(r"LINE\[(.*?)[ /]*\]END", screen, re.DOTALL)):
            assert time.monotonic() < end, screen
            if select.select([main], [], [], 0.2)[0]:
                screen += os.read(main, 65536).decode(errors="replace")
        return match[1]

    try:
        # The quotes keep the echo of this command from looking like its output.
        answer(f"{setup}; show() {{ printf 'LI''NE[%s]END' \"$*\"; }}; show ready\n")
        lines = {}
        for typed in cases:
            quote = "'" * typed.count("'")
            # Tab; then control-A and control-E, to the line's beginning and end.
            lines[typed] = answer(f"{typed}\t\x01show \x05{quote}\n")
        return lines
    finally:
        child.kill()
        child.wait()
        os.close(main)


def install(shell: str, capsys: pytest.CaptureFixture[str]) -> tuple[Path, str]:
    """The file that `completion install` has written, and what it printed."""
    assert cli.main(["completion", "install", shell]) == 0
    text = capsys.readouterr().out
    return Path(text.partition(":")[0]), text


def test_bash(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, text = install("bash", capsys)
    assert file == home / ".local/share/bash-completion/completions/agenttrain"
    assert text.startswith(f"{file}: written\n")
    assert f"add this line to ~/.bashrc: . {file}\n" in text
    assert "is there already" in install("bash", capsys)[1]
    bash = ["bash", "--norc", "--noprofile", "-i"]
    assert completed(bash, f"cd {home}; . {file}", TYPED) == TYPED


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_home_that_cannot_be_written_gets_the_line_of_its_shell(
    shell: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / ".local").write_text("no folder")
    assert cli.main(["completion", "install", shell]) == 2
    assert f'eval "$(agenttrain completion {shell})"' in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("zsh") is None, reason=NO_ZSH)
def test_zsh(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, text = install("zsh", capsys)
    assert file == home / ".local/share/zsh/site-functions/_agenttrain"
    assert f"fpath=({file.parent} $fpath)" in text
    setup = f"cd {home}; fpath=({file.parent} $fpath); autoload -Uz compinit; compinit -u -D"
    # In zsh a list needs quotes.
    lists = {"agenttrain tools=[sql,fin": "agenttrain 'tools=[sql,fin"}
    typed = {lists.get(typed, typed): line for typed, line in TYPED.items()}
    assert completed(["zsh", "-f", "-i"], setup, typed) == typed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["completion", "fish"], "fish: expected one of bash, zsh, install"),
        (["completion", "install"], "SHELL=/bin/dash: no completion for this shell"),
    ],
)
def test_shells_without_completion(
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SHELL", "/bin/dash")
    assert cli.main(words) == 2
    assert message in capsys.readouterr().err
