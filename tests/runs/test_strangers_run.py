"""The run folder of somebody else: nothing in it runs before the user lets it."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from agenttrain.cli import main
from agenttrain.commands.sweep import command as cli_sweep
from agenttrain.commands.sweep.record import read_record
from agenttrain.commands.sweep.run import Sweep, _job_arguments

pytestmark = pytest.mark.timeout(1200)  # whole runs

EVIL = """
from pathlib import Path

Path(__file__).with_name("ran").touch()


class Tool:
    def __init__(self, **settings):
        pass

    def poke(self) -> str:
        \"\"\"Poke.\"\"\"
        return ""


def reward(rollout, **columns) -> float:
    return 1.0


def row(index: int) -> dict:
    return {"prompt": "?", "answer": ""}
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    run = ("debug=tiny", "steps=1", "eval.questions=0", "tracker=none")
    assert main([*run, f"hydra.run.dir={folder}"]) == 0
    return folder


@pytest.fixture
def theirs(whole, tmp_path, monkeypatch):
    """A copy of the run whose config.yaml names a module that leaves a trace when imported."""
    (tmp_path / "evil_of_a_stranger.py").write_text(EVIL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "evil_of_a_stranger", raising=False)
    folder = Path(shutil.copytree(whole, tmp_path / "theirs", symlinks=True))

    def changed(**sections) -> Path:
        file = folder / "config.yaml"
        config = yaml.safe_load(file.read_text())
        for name, section in sections.items():
            config[name] = {**config[name], **section}
        file.write_text(yaml.safe_dump(config))
        return folder

    yield changed
    sys.modules.pop("evil_of_a_stranger", None)


def ran(tmp_path: Path) -> bool:
    return (tmp_path / "ran").exists()


TOOL = {"poke": {"_target_": "evil_of_a_stranger.Tool"}}
REWARD = {"theirs": {"_target_": "evil_of_a_stranger.reward"}}
DATA = {"train": {"_target_": "evil_of_a_stranger.row"}}
MCP = {"mcp": {"_target_": "agenttrain.tools.mcp.server.McpServer", "command": ["touch", "ran"]}}
PROGRAM = {"name": "endpoint", "command": ["touch", "ran"]}
FUNCTION = {"name": "endpoint", "_target_": "evil_of_a_stranger.reward"}
HIDDEN = {"r": {"_target_": "agenttrain.rewards.builtin.math_worker.sys.exit"}}


@pytest.mark.parametrize(
    ("verb", "sections", "told"),
    [
        (["resume={0}", "steps=2"], {"tools": TOOL}, "tools.poke._target_=evil_of_a_stranger.Tool"),
        (["eval", "run={0}"], {"reward": REWARD}, "reward.theirs._target_=evil_of_a_stranger"),
        (["eval", "run={0}"], {"tools": MCP}, "tools.mcp.command=[touch, ran]"),
        (["check", "resume={0}"], {"tools": MCP}, "tools.mcp.command=[touch, ran]"),
        (["check", "resume={0}"], {"agent": PROGRAM}, "agent.command=[touch, ran]"),
        (
            ["resume={0}", "steps=2"],
            {"agent": FUNCTION},
            "agent._target_=evil_of_a_stranger.reward",
        ),
        (["eval", "run={0}"], {"agent": PROGRAM}, "agent.command=[touch, ran]"),
        (["replay", "{0}"], {"data": DATA}, "data.train._target_=evil_of_a_stranger.row"),
        (["replay", "{0}", "tools=live"], {"tools": TOOL}, "tools.poke._target_=evil_of"),
        (["rescore", "{0}", "reward.exact_match.weight=2"], {"reward": REWARD}, "reward.theirs."),
        (["rescore", "{0}", "reward.exact_match.weight=2"], {"reward": HIDDEN}, "math_worker.sys"),
    ],
)
def test_code_that_is_not_bundled_is_named_and_not_run(
    theirs, tmp_path, capsys, verb, sections, told
):
    folder = theirs(**sections)
    assert main([text.format(folder) for text in verb]) == 2
    message = capsys.readouterr().err
    assert told in message and "add trust=true if you trust who made this folder" in message
    assert not ran(tmp_path)


@pytest.mark.parametrize(
    "verb",
    [["view", "{0}"], ["replay", "{0}"], ["rescore", "{0}", "reward=[exact_match]"]],
)
def test_verbs_on_recorded_things_run_no_tool_and_no_reward_of_the_run(theirs, tmp_path, verb):
    folder = theirs(tools={**TOOL, **MCP}, reward=REWARD)
    assert main([text.format(folder) for text in verb]) == 0
    assert not ran(tmp_path)


def test_trust_lets_it_run_and_is_remembered_by_the_run(theirs, tmp_path, capsys):
    folder = theirs(reward=REWARD)
    go_on = [f"resume={folder}", "resume_changed=[reward]"]
    assert main([*go_on, "steps=2", "trust=true"]) == 0
    assert ran(tmp_path)
    assert main([*go_on, "steps=3"]) == 0
    capsys.readouterr()
    assert main(["debug=tiny", "trust=true"]) == 2
    assert "trust=true: lets the code run that a saved run names" in capsys.readouterr().err
    assert main([f"resume={folder}", "trust=yes"]) == 2
    assert "trust=yes: expected trust=true" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("", 2), ("no", 2)])
def test_on_a_terminal_it_is_asked(theirs, tmp_path, monkeypatch, answer, code):
    folder = theirs(reward=REWARD)
    monkeypatch.setattr(sys, "stdin", Terminal(f"{answer}\n"))
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert main(["rescore", str(folder), "reward.exact_match.weight=2"]) == code
    assert "reward.theirs._target_=evil_of_a_stranger.reward" in terminal.getvalue()
    assert "Let it run? [y/N]" in terminal.getvalue()
    assert ran(tmp_path) is (code == 0)


def test_a_crash_bundle_of_a_reward_names_its_code(theirs, tmp_path, capsys):
    folder = theirs(reward=REWARD)
    crash = {"step": 1, "stage": "reward", "error": "it failed", "culprits": []}
    (folder / "crash.json").write_text(json.dumps(crash))
    assert main(["replay", str(folder)]) == 2
    assert "reward.theirs._target_=evil_of_a_stranger.reward" in capsys.readouterr().err
    (folder / "crash.json").write_text(json.dumps({**crash, "stage": "evil"}))
    assert main(["replay", str(folder)]) == 2
    assert "crash.json names the stage evil; known are: weights" in capsys.readouterr().err
    assert not ran(tmp_path)


def test_a_sweep_of_somebody_else_names_its_commands(tmp_path, capsys):
    sweep = {"verb": "train", "shared": [], "jobs": [{"folder": "0", "overrides": ["seed=0"]}]}
    (tmp_path / "sweep.json").write_text(json.dumps(sweep))
    assert main(["-m", f"resume={tmp_path}"]) == 2
    told = capsys.readouterr().err
    assert "its sweep.json names code" in told and "agenttrain train seed=0 hydra.run.dir=" in told


def test_a_plan_of_servers_of_somebody_else_names_its_module(tmp_path, capsys):
    """`engine-server` runs the module of the folder's plan."""
    plan = {"module": "evil_of_a_stranger", "engine": {"name": "vllm_server"}}
    plan["servers"] = {"count": 1, "args": {"worker-cls": "evil.Worker"}}
    (tmp_path / "servers").mkdir()
    (tmp_path / "servers" / "plan.json").write_text(json.dumps({**plan, "signature": "00"}))
    assert main(["engine-server", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "module=evil_of_a_stranger" in told and "evil.Worker" in told


def test_a_yes_on_a_terminal_goes_for_the_jobs_of_a_sweep(theirs, tmp_path, monkeypatch):
    """They run in processes of their own, without a terminal."""
    job = theirs(reward=REWARD)
    (job / "summary.json").write_text('{"status": "stopped", "steps": 1}')
    sweep = {"verb": "train", "shared": [], "jobs": [{"folder": job.name, "overrides": []}]}
    (tmp_path / "sweep.json").write_text(json.dumps(sweep))
    started: list[Sweep] = []
    monkeypatch.setattr(cli_sweep, "run", lambda sweep: started.append(sweep) or 0)
    monkeypatch.setattr(sys, "stdin", Terminal("y\ny\n"))
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert main(["-m", f"resume={tmp_path}"]) == 0
    (one,) = started
    record = read_record(tmp_path)
    arguments = _job_arguments(tmp_path, record, record.jobs[0], one.changes, one.trust)
    assert arguments == ["train", f"resume={job}", "trust=true"]
