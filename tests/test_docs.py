"""The code blocks of README, the skill and every page under docs/, as a reader would use them.

`docs/contribute/testing.md` says which block is treated how. Files that a page's blocks name by
`title=` lie beside each other in a folder of that page, where its commands are composed and its
programs run.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from code_blocks import DOCS, PAGES, ROOT, Block, blocks, file_on
from command_kit import parse
from stub_hub import StubHub, use

from agenttrain import cli
from agenttrain.algorithms.objectives import config as objectives
from agenttrain.commands.running import compose_all
from agenttrain.commands.sweep.expand import expand
from agenttrain.commands.verb import VERBS
from agenttrain.commands.verbs import parse as parse_words
from agenttrain.commands.verbs import split_verb
from agenttrain.settings.checks import validate
from agenttrain.settings.compose import compose_run, hydra_session
from agenttrain.utils.model_path import model_folder

PROGRAMS = {"pytest", "python", "pip", "torchrun", "trackio", ".venv-vllm/bin/python"}
"""Programs other than `agenttrain` and scripts/… that commands may begin with."""
AGENTTRAIN = {"agenttrain", ".venv-vllm/bin/agenttrain"}
ON_A_RUN = {
    "view",
    "timeline",
    "replay",
    "rescore",
    "export",
    "templates",
    "tools",
    "data",
    "init",
    "rehearse",
}
"""Verbs that are run, because they take seconds and need no more than a run or a tokenizer."""

BLOCKS = [block for page in PAGES for block in blocks(page)]
RUNNABLE = [block for block in BLOCKS if block.mark is None]
WITH_COMMANDS = [block for block in RUNNABLE if block.language in ("bash", "console")]
PROGRAM_BLOCKS = [block for block in RUNNABLE if block.language == "python"]


def test_every_fence_is_read() -> None:
    for page in PAGES:
        fences = len(re.findall(r"^```", page.read_text(encoding="utf-8"), re.MULTILINE))
        assert fences == 2 * len(blocks(page)), page


def test_the_index_of_guides_links_every_guide() -> None:
    index = (ROOT / "docs/guides/index.md").read_text(encoding="utf-8")
    guides = {file.name for file in (ROOT / "docs/guides").glob("*.md")} - {"index.md"}
    assert guides == set(re.findall(r"\]\(([a-z0-9-]+\.md)\)", index))


@pytest.fixture
def stub_hub() -> Iterator[StubHub]:
    with StubHub() as hub:
        yield hub


@pytest.fixture
def place(
    block: Block,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[Path]:
    """The folder of a block's page, with the page's files, `my_model` and `$RUN`."""
    for other in blocks(block.page):
        if other.title is not None and other.mark is None:
            file = tmp_path / other.title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(other.text, encoding="utf-8")
    (tmp_path / "my_model").symlink_to(model_folder("bundled:shop"))
    if "Qwen/" in block.text:
        hub = request.getfixturevalue("stub_hub")
        hub.publish("Qwen/Qwen3-0.6B")
        use(hub, tmp_path / "hf", monkeypatch)
    run = tmp_path / "run"
    if "RUN" in block.text:
        shutil.copytree(request.getfixturevalue("trained_run"), run)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("RUN", str(run))
    for secret in ("TOKEN", "MCP_USER", "MCP_PASSWORD"):
        monkeypatch.setenv(secret, "x")
    monkeypatch.setattr(objectives, "REGISTRY", dict(objectives.all_objectives()))
    forget_modules()
    yield tmp_path
    forget_modules()


def forget_modules() -> None:
    """Forget the modules of a page or an example: the next one has another my_agent.py."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("my_", "test_my_")) and getattr(module, "__file__", None):
            del sys.modules[name]


def words(command: str) -> list[str]:
    """The words as bash passes them on: quotes, variables and comments resolved."""
    script = f'for word in {command.partition(" #")[0]}; do printf "%s\\0" "$word"; done'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout.split("\0")[:-1]


@pytest.mark.slow
@pytest.mark.parametrize("block", WITH_COMMANDS, ids=str)
def test_commands(block: Block, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in block.commands():
        program, *arguments = words(command)
        if program not in AGENTTRAIN:
            known = program in PROGRAMS or program.startswith(("scripts/", ".ci/"))
            assert known, f"{command}: what is {program}?"
            assert not program.startswith("scripts/") or (ROOT / program).is_file(), command
            continue
        verb = split_verb(arguments)[0]
        assert verb in VERBS
        if arguments == ["templates"]:  # the table: certifying all families takes long
            continue
        if verb in ON_A_RUN and block.language == "bash":
            assert cli.main(arguments) == 0, f"{command}\n{capsys.readouterr().err}"
        elif not {"--help", "--version", "--cfg"} & set(arguments):
            compose(arguments, block)


def compose(arguments: list[str], block: Block) -> None:
    """Compose and check the settings of a command as `agenttrain` does before it runs."""
    verb = split_verb(arguments)[0]
    if block.language == "console" and ("Qwen3-8B" in " ".join(arguments) or verb in ON_A_RUN):
        return
    if "sise" in " ".join(arguments):  # the page shows how a mistake is answered
        assert cli.main(arguments) == 2
        return
    if not hasattr(parse_words(arguments)[1], "multirun"):  # a verb that composes no settings
        return
    command = parse(arguments)
    with hydra_session(command.source):
        if command.sweep:  # the first combination stands for all
            first = expand(command.overrides, command.source).runs[0]
            validate(compose_run(first, command.source).config)
        else:
            assert compose_all(command)


@pytest.mark.slow
@pytest.mark.parametrize("block", PROGRAM_BLOCKS, ids=str)
def test_programs(block: Block, place: Path) -> None:
    code = block.title or "program.py"
    (place / code).write_text(block.text, encoding="utf-8")
    if not code.startswith("test_"):
        runpy.run_path(code, run_name="__main__")
        return
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", code],
        capture_output=True,
        text=True,
        cwd=place,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{place}"},
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("block", [b for b in RUNNABLE if b.language in ("json", "yaml")], ids=str)
def test_data(block: Block) -> None:
    if block.language == "yaml":
        yaml.safe_load(block.text)
        return
    for line in block.text.splitlines():
        json.loads(line)


def test_the_check_names_the_objective_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = "contribute/add-an-algorithm.md"
    choice = "my_conf/algorithm/objective/band.yaml"
    (tmp_path / choice).parent.mkdir(parents=True)
    for file in ("my_objectives.py", choice):
        (tmp_path / file).write_text(file_on(page, file))
    commands = [
        command
        for block in blocks(ROOT / "docs" / page)
        if block.language == "bash"
        for command in block.commands()
    ]
    assert len(commands) == 2
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(objectives, "REGISTRY", dict(objectives.all_objectives()))
    for command in commands:
        assert cli.main(["check", *shlex.split(command)[1:]]) == 0
        assert "objective my_objectives.band(width=0.3)" in capsys.readouterr().out
    monkeypatch.delitem(sys.modules, "my_objectives")


def test_the_check_of_an_outside_agent_prints_what_its_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = ROOT / "docs/guides/outside-agents.md"
    (tmp_path / "my_solver.py").write_text(file_on("guides/outside-agents.md", "my_solver.py"))
    monkeypatch.syspath_prepend(str(tmp_path))
    texts = [
        text for block in blocks(page) if block.language == "bash" for text in block.commands()
    ]
    (command,) = (text for text in texts if text.startswith("agenttrain check "))
    assert cli.main(shlex.split(command)[1:]) == 0
    monkeypatch.delitem(sys.modules, "my_solver")
    last = capsys.readouterr().out.splitlines()[-1]
    assert f"`{last.removeprefix('agent').strip()}`" in page.read_text(encoding="utf-8")


@pytest.mark.slow
def test_generated_pages_are_those_of_the_code() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "reference"), "--check"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_link_of_the_readme_leads_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert len(links) > 40
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {str(page.relative_to(ROOT / "docs")) for page in DOCS}
    assert {page for page in pages if f" {page}\n" not in text} == set()
