"""Whole runs whose rollouts have a process of their own: the same bytes, faults, signals."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest
import scripted_engines
import yaml
from process_runs import agenttrain, same
from rollout_process_kit import assert_nothing_left, await_steps, of_rollouts, started
from same_run import assert_same, assert_same_weights, metrics
from scripted_engines import KILLED_AT, KILLED_ONCE

from agenttrain.cli import main
from agenttrain.tracking.timeline_page import read_processes

COPY = "engine._target_=scripted_engines.COPY"
BROADCAST = "engine._target_=scripted_engines.BROADCAST"
SCRIPTED = "engine._target_=scripted_engines.SCRIPTED"
OWN = "rollout.process=own"
TINY = (
    *("debug=tiny", "tasks_per_step=3", "tracker=none", "tracker.rollouts=all", "eval.questions=2"),
    *("eval.greedy=false", "checkpoint.every=5", "optimizer.schedule=constant"),
    # at most steps some group has rewards that differ, so that there is an update to compare
    *("algorithm.group_size=4", "seed=3"),
)
pytestmark = pytest.mark.timeout(900)  # only a hang takes so long


@pytest.fixture(autouse=True)
def engines_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in processes of their own find `scripted_engines` too."""
    paths = [str(Path(scripted_engines.__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


def rollouts(folder: Path, step: int) -> list[dict]:
    """The rollouts of a step, without the seconds that they took."""
    lines = (folder / "rollouts" / f"step-{step:06d}.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for record in records:
        for call in record["tool_calls"]:
            del call["seconds"]
    return records


def state(folder: Path) -> dict:
    """The state of the newest checkpoint, the policy aside."""
    return json.loads((folder / "checkpoints" / "latest" / "state.json").read_text())


def without_probe(folder: Path) -> list[dict]:
    """The metrics of a run but those of the probe."""
    return [
        {name: value for name, value in row.items() if not name.startswith("weight_sync/")}
        for row in metrics(folder)
    ]


def log(folder: Path) -> str:
    """What the rollout process printed."""
    return (folder / "logs" / "rollouts.log").read_text()


def test_a_process_more_changes_no_byte(tmp_path: Path) -> None:
    """Ten steps that sample from weights which cross as files; metrics, rollouts and weights."""
    one, two = tmp_path / "same", tmp_path / "own"
    assert main([*TINY, COPY, "steps=10", f"hydra.run.dir={one}"]) == 0
    assert main([*TINY, COPY, "steps=10", OWN, f"hydra.run.dir={two}"]) == 0
    assert_same(two, one)
    assert [list(row) for row in metrics(two)] == [list(row) for row in metrics(one)]
    assert sum(row["grad_norm"] > 0 for row in metrics(one)) > 5
    for step in range(1, 11):
        assert rollouts(two, step) == rollouts(one, step)
    assert state(two) == state(one)
    assert (two / "evaluations.jsonl").read_text() == (one / "evaluations.jsonl").read_text()
    assert_nothing_left(two)
    (alone,), (trainer, other) = read_processes(one), read_processes(two)
    assert (trainer.name, other.name) == ("trainer-0", "rollouts")
    # One process samples and trains; of two the one waits for the other.
    steps = list(range(1, 11))
    assert [p.step for p in alone.phases if p.name == "rollout"] == steps
    assert [p.step for p in trainer.phases if p.name == "wait"] == steps
    assert [r["rollout"] for r in trainer.rollouts] == []
    assert {r["rollout"] for r in other.rollouts} == {r["rollout"] for r in alone.rollouts}


@pytest.mark.long
def test_weights_that_are_broadcast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of files, also where nobody got them at first, or the process was killed."""
    run = (*TINY, OWN, "eval.questions=0", "steps=3")
    monkeypatch.setenv(KILLED_AT, "2")
    monkeypatch.setenv(KILLED_ONCE, str(tmp_path / "kill"))
    (tmp_path / "kill").touch()
    for engine, name in ((COPY, "files"), (BROADCAST, "broadcast")):
        assert main([*run, engine, f"hydra.run.dir={tmp_path / name}"]) == 0
    assert_same(tmp_path / "files", tmp_path / "broadcast")
    (warning,) = json.loads((tmp_path / "broadcast/summary.json").read_text())["warnings"]
    assert warning.endswith("was ended by SIGKILL; it was started again")
    once, twice = ["assemble {0}", "settle {0}"], ["assemble {0}", "settle {0}"] * 2
    by_version = (once, twice, ["assemble {0}", *once], twice)
    asked = [line.format(version) for version, lines in enumerate(by_version) for line in lines]
    assert (tmp_path / "broadcast/broadcasts.txt").read_text().splitlines() == asked


@pytest.mark.slow
def test_a_killed_rollout_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is started again; the second time in a step the run ends, and goes on from there."""
    run = (*TINY, SCRIPTED, "checkpoint.every=null", "eval.questions=0", "steps=4")
    whole, once, folder = tmp_path / "whole", tmp_path / "once", tmp_path / "run"
    assert main([*run, f"hydra.run.dir={whole}"]) == 0
    monkeypatch.setenv(KILLED_AT, "2")
    monkeypatch.setenv(KILLED_ONCE, str(tmp_path / "kill"))
    (tmp_path / "kill").touch()
    assert main([*run, OWN, f"hydra.run.dir={once}"]) == 0
    (warning,) = json.loads((once / "summary.json").read_text())["warnings"]
    assert warning.endswith("was ended by SIGKILL; it was started again")
    assert not (tmp_path / "kill").exists()
    assert_same(once, whole)
    monkeypatch.delenv(KILLED_ONCE)
    assert main([*run, OWN, f"hydra.run.dir={folder}"]) == 1
    printed = capsys.readouterr().err
    assert "RolloutsDead: the rollout process" in printed
    assert "was ended by SIGKILL; it had been started again in this step" in printed
    assert "checkpoints/step-000002 stands" in printed
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"
    assert len(metrics(folder)) == 2
    assert_nothing_left(folder)
    monkeypatch.delenv(KILLED_AT)
    assert main([f"resume={folder}"]) == 0
    assert_same(folder, whole)


@pytest.mark.long
def test_weights_of_a_start_that_was_killed_go_with_the_next(tmp_path: Path) -> None:
    """Also if the next one needs none."""
    folder = tmp_path / "run"
    run = (*TINY, COPY, OWN, "checkpoint.every=1", "eval.questions=0", "steps=400")
    with started(*run, f"hydra.run.dir={folder}") as killed:
        await_steps(killed, folder, 1)
        (process,) = of_rollouts(killed.pid)
        for one in (killed, process):
            one.send_signal(signal.SIGSTOP)
        for one in (process, killed):
            one.kill()
        process.wait(90)
    assert len(list(folder.glob("agenttrain-tmp-*"))) == 1
    steps = len(metrics(folder))
    assert main([f"resume={folder}", f"steps={steps + 1}", SCRIPTED]) == 0
    assert not list(folder.glob("agenttrain-tmp-*")) and not (folder / "weights.txt").exists()


@pytest.mark.slow
def test_what_a_reward_prints_and_raises_arrives(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    reward = "reward.exact_match._target_=scripted_engines.broken_reward"
    run = (*TINY, SCRIPTED, "steps=1", "eval.questions=0", OWN, f"hydra.run.dir={folder}")
    assert main([*run, reward]) == 1
    printed = capfd.readouterr().err
    assert "RewardError: reward 'exact_match'" in printed and "12 to score" in printed
    assert log(folder) == "12 to score\n"
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved["rollout"]["process"] == "own"
    bundle = folder / "crash" / "step-000001"
    crash = json.loads((bundle / "crash.json").read_text())
    assert crash["stage"] == "reward" and "division by zero" in crash["error"]
    assert len(rollouts(bundle, 1)) == 12
    assert_nothing_left(folder)


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "engine"),
    [("ddp", COPY), ("fsdp2", COPY), ("fsdp2", BROADCAST)],
)
def test_two_training_processes_sample_as_one(way: str, engine: str, tmp_path: Path) -> None:
    run = (*TINY, engine, "steps=5", OWN)
    agenttrain(*run, f"hydra.run.dir={tmp_path / 'one'}")
    two = (f"distributed={way}", "distributed.processes=2")
    agenttrain(*run, *two, f"hydra.run.dir={tmp_path / 'two'}")
    same(tmp_path / "two", tmp_path / "one", 5)
    # Stopped and resumed: the state of the rollout process is in the checkpoint.
    agenttrain(*run, *two, "steps=2", f"hydra.run.dir={tmp_path / 'again'}")
    agenttrain(f"resume={tmp_path / 'again'}", "steps=5")
    assert_same_weights(tmp_path / "again", tmp_path / "two")
    # The text of the probe is chosen at the first sync of each process: its rounding is another.
    assert without_probe(tmp_path / "again") == without_probe(tmp_path / "two")


@pytest.mark.long
def test_two_training_processes_to_the_byte(tmp_path: Path) -> None:
    """Prompts and answers of one length: both ways give each process the same groups."""
    rows = [{"prompt": f"question {n}", "answer": str(n)} for n in range(10, 50)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = (
        *(*TINY, SCRIPTED, "steps=10", "data=file", f"data.path={file}", "~reward.exact_match"),
        *("+reward.mine._target_=scripted_engines.first_ids", "tools=[]", "stop_tools=[]"),
        *("eval.questions=0", "eval.group_by=null", "tasks_per_step=4"),
        *("distributed=ddp", "distributed.processes=2"),
    )
    agenttrain(*run, f"hydra.run.dir={tmp_path / 'same'}")
    agenttrain(*run, OWN, f"hydra.run.dir={tmp_path / 'own'}")
    assert_same(tmp_path / "own", tmp_path / "same")
    assert sum(row["grad_norm"] > 0 for row in metrics(tmp_path / "own")) > 5
    for step in range(1, 11):
        assert rollouts(tmp_path / "own", step) == rollouts(tmp_path / "same", step)


@pytest.mark.long
def test_a_resumed_run_is_one_that_never_stopped(tmp_path: Path) -> None:
    """Cursor, curriculum and costs are drawn from in the other process."""
    run = (*TINY, COPY, "data.curriculum.enabled=true", "algorithm.dynamic_sampling=1")
    agenttrain(*run, "steps=6", f"hydra.run.dir={tmp_path / 'whole'}")
    agenttrain(*run, OWN, "steps=2", f"hydra.run.dir={tmp_path / 'run'}")
    agenttrain(f"resume={tmp_path / 'run'}", "steps=6")
    assert_same(tmp_path / "run", tmp_path / "whole")
    for name in ("cursor", "curriculum", "costs"):
        assert state(tmp_path / "run")[name] == state(tmp_path / "whole")[name]


@pytest.mark.long
def test_sigterm_saves_and_a_killed_trainer_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with started(*TINY, COPY, OWN, "steps=400", f"hydra.run.dir={folder}") as run:
        await_steps(run, folder, 3)
        (process,) = of_rollouts(run.pid)
        run.send_signal(signal.SIGTERM)
        printed, _ = run.communicate()
        assert run.returncode == 75, printed
        assert not process.is_running()
        assert "stopped by SIGTERM with checkpoints/step-" in printed
    steps = len(metrics(folder))
    with started(f"resume={folder}") as run:
        await_steps(run, folder, steps + 2)
        (process,) = of_rollouts(run.pid)
        run.kill()
        process.wait(90)
    assert_nothing_left(folder)
    last = state(folder)["step"] + 6
    agenttrain(f"resume={folder}", f"steps={last}")
    agenttrain(*TINY, COPY, OWN, f"steps={last}", f"hydra.run.dir={tmp_path / 'whole'}")
    assert_same(folder, tmp_path / "whole")


@pytest.mark.long
def test_the_watchdog_names_what_hangs_in_the_other_process(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    reward = "reward.exact_match._target_=scripted_engines.hanging_reward"
    run = (*TINY, SCRIPTED, OWN, "steps=1", "eval.questions=0", f"hydra.run.dir={folder}")
    with started(*run, reward, "watchdog.rollout_s=5") as hanging:
        printed, _ = hanging.communicate()
        assert hanging.returncode == 70
    assert "stalled: phase rollout of step 1" in printed
    assert "in hanging_reward" in printed and "in hanging_reward" in log(folder)
    assert_nothing_left(folder)


@pytest.mark.long
def test_two_training_processes_survive_the_rollouts_and_not_each_other(tmp_path: Path) -> None:
    two = (COPY, OWN, "distributed=ddp", "distributed.processes=2", "checkpoint.every=null")
    folder = tmp_path / "run"
    with started(*TINY, *two, "steps=400", f"hydra.run.dir={folder}") as run:
        await_steps(run, folder, 3)
        (process,) = of_rollouts(run.pid)
        process.kill()
        process.wait(90)
        # Weights were written for the one before, or are now written for the other.
        await_steps(run, folder, len(metrics(folder)) + 3)
        (process,) = of_rollouts(run.pid)
        ranks = psutil.Process(process.ppid()).parent().children()
        (other,) = [one for one in ranks if one.pid != process.ppid()]
        other.kill()
        printed, _ = run.communicate()
        assert run.returncode == 1 and "rank 1 (process" in printed
        assert printed.count("was ended by SIGKILL; it was started again") == 1
        process.wait(90)
    assert_nothing_left(folder)
