"""What cannot be printed changes no run's end, and a reader that goes ends a verb quietly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHORT = ("debug=tiny", "steps=1", "tracker=none", "eval.questions=2")


def through_shell(line: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of bash in which `agenttrain` is this checkout's command."""
    command = f'agenttrain() {{ "{sys.executable}" -m agenttrain.cli "$@"; }}; {line}'
    return subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        timeout=240,
    )


@pytest.mark.parametrize(
    "verb", ["--help", pytest.param("check", marks=pytest.mark.slow), "--version"]
)
def test_a_reader_that_has_gone_ends_a_verb_quietly(verb: str, tmp_path: Path) -> None:
    ended = through_shell(f"agenttrain {verb} | true; exit ${{PIPESTATUS[0]}}", tmp_path)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.slow
def test_closed_streams_and_what_an_encoding_lacks(tmp_path: Path) -> None:
    assert through_shell("agenttrain --help >&- 2>&-", tmp_path).returncode == 0
    escaped = through_shell("agenttrain --help", tmp_path, PYTHONIOENCODING="ascii")
    assert escaped.returncode == 0
    assert b"agenttrain [verb] [key=value \\u2026]" in escaped.stdout
    # A message that cannot be shown as it is keeps its exit code.
    refused = through_shell("agenttrain 'seed=…'", tmp_path, PYTHONIOENCODING="ascii")
    assert refused.returncode == 2
    assert b"\\u2026" in refused.stderr


def test_a_verb_whose_answer_cannot_be_written_says_so(tmp_path: Path) -> None:
    full = through_shell("agenttrain --help > /dev/full", tmp_path)
    assert full.returncode == 1
    assert full.stderr == (
        b"agenttrain: standard output: No space left on device; some of it was not written\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "environment"),
    [
        ("agenttrain {}", {"PYTHONIOENCODING": "ascii"}),
        ("agenttrain {} 2>&- | true; exit ${{PIPESTATUS[0]}}", {}),
    ],
    ids=["ascii", "no reader"],
)
def test_a_run_ends_as_it_would_where_everything_can_be_printed(
    line: str, environment: dict[str, str], tmp_path: Path
) -> None:
    arguments = " ".join((*SHORT, "hydra.run.dir=run"))
    ended = through_shell(line.format(arguments), tmp_path, **environment)
    assert ended.returncode == 0, ended.stderr.decode()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"
