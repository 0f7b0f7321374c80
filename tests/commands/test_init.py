"""`agenttrain init`: the new folder passes its own test and check, and trains."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from agenttrain import cli

ROOT = Path(__file__).parents[2]


def run(*command: str, cwd: Path) -> str:
    """Run a command of this Python; return its output."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_a_new_agent_passes_its_test_and_trains(tmp_path: Path) -> None:
    printed = run("agenttrain.cli", "init", "librarian", cwd=tmp_path)
    assert printed.startswith("librarian: a tool, a reward, ten rows, settings and a test.")
    folder = tmp_path / "librarian"
    files = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert files == {
        *("README.md", "librarian.py", "test_librarian.py", "train.jsonl", "test.jsonl"),
        *("conf/experiment/librarian.yaml", "AGENTS.md", ".claude/skills/agenttrain/SKILL.md"),
    }
    rows = (folder / "train.jsonl").read_text() + (folder / "test.jsonl").read_text()
    assert len([json.loads(line) for line in rows.splitlines()]) == 10
    assert not any("my_agent" in file.read_text() for file in folder.rglob("*") if file.is_file())

    assert "2 passed" in run("pytest", "-q", "-p", "no:cacheprovider", cwd=folder)
    # The commands that `init` has printed.
    commands = [line.split("  ")[1] for line in printed.splitlines() if "--config-dir" in line]
    check, rehearse, train = (command.split()[1:] for command in commands)
    assert all(f"    {command}\n" in (folder / "README.md").read_text() for command in commands)
    assert "certificate passed" in run("agenttrain.cli", *check, cwd=folder)
    report = run("agenttrain.cli", *rehearse, "rollouts=16", cwd=folder)
    assert "problem" not in report and "lookup" in report
    run("agenttrain.cli", *train, "tracker=none", "hydra.run.dir=run", cwd=folder)
    assert json.loads((folder / "run" / "summary.json").read_text())["status"] == "finished"


def test_a_new_agent_has_the_skill_for_coding_agents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "librarian"]) == 0
    skill = tmp_path / "librarian/.claude/skills/agenttrain/SKILL.md"
    text = skill.read_text(encoding="utf-8")
    # The bounds of the format: https://agentskills.io/specification
    empty, front, body = text.split("---\n", 2)
    fields = yaml.safe_load(front)
    assert empty == "" and fields.keys() == {"name", "description"}
    assert fields["name"] == skill.parent.name
    assert 0 < len(fields["description"]) <= 1024
    assert len(text.splitlines()) < 250
    assert "experiment=librarian" in body and "_target_: librarian.lookup" in body
    pointer = (tmp_path / "librarian/AGENTS.md").read_text(encoding="utf-8")
    assert f"`{skill.relative_to(tmp_path / 'librarian')}`" in pointer


def test_the_pages_that_the_skill_names_exist() -> None:
    text = (ROOT / "skills/agenttrain/SKILL.md").read_text(encoding="utf-8")
    pages = set(re.findall(r"docs/[\w/-]+\.md", text))
    assert len(pages) > 5
    assert [page for page in pages if not (ROOT / page).is_file()] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["init", "my-agent"], "init my-agent: is not a name of a Python module"),
        (["init", "2nd"], "init 2nd: is not a name of a Python module"),
        (["init", "class"], "init class: is not a name"),
        (["init", "json"], "init json: is the name of an installed module"),
        (["init", "torch"], "init torch: is the name of an installed module"),
        (["init", "shop"], "init shop: is an experiment of agenttrain's, experiment=shop"),
        (["init", "full"], "init full: holds something already; name a new folder"),
        (["init", "full/notes/new"], "name a folder that can be written"),
    ],
)
def test_names_and_folders_that_are_refused(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine\n")
    assert cli.main(words) == 2
    assert message in capsys.readouterr().err
    assert [file.name for file in tmp_path.rglob("*")] == ["full", "notes"]
