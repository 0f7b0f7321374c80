"""Asynchronous runs: the bound, the records, and what is left of a run that was killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import scripted_engines
from process_runs import agenttrain, rollouts
from rollout_process_kit import assert_nothing_left, await_steps, of_rollouts, started
from same_run import assert_same_weights, metrics
from scripted_engines import KILLED_AT, KILLED_ONCE

from agenttrain.cli import main

pytestmark = pytest.mark.timeout(900)  # only a hang takes so long
TINY = (
    *("debug=tiny", "tasks_per_step=2", "tracker=none", "tracker.rollouts=all", "eval.questions=0"),
    *("optimizer.schedule=constant", "algorithm.group_size=4", "seed=3", "checkpoint.every=2"),
    "weight_sync.mode=abort_resume",
)
SCRIPTED = (
    *TINY[:-1],
    "guards.logprob_gap.limit=null",
    "engine._target_=scripted_engines.SLOW",
    *("~reward.exact_match", "+reward.mine._target_=scripted_engines.first_ids"),
)


@pytest.fixture(autouse=True)
def engines_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in processes of their own find `scripted_engines` too."""
    paths = [str(Path(scripted_engines.__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


def ahead(k: int) -> str:
    return f"async_training.max_staleness={k}"


def journal(folder: Path) -> list[dict]:
    lines = (folder / "rollouts" / "journal.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def assert_each_serial_once(folder: Path, steps: int, k: int, *, tasks: int = 2) -> None:
    """Steps, their rollouts and the journal have every task of the run, each of them once."""
    assert [row["step"] for row in metrics(folder)] == [*range(1, steps + 1)]
    trained = []
    for step in range(1, steps + 1):
        records = rollouts(folder, step)
        groups = [record["group_id"] for record in records]
        assert Counter(groups) == {f"train-{step}-{place}": 4 for place in range(tasks)}
        trained += [(step - 1) * tasks + int(one[-1]) for one in dict.fromkeys(groups)]
        for record in records:
            versions = [
                span["policy_version"]
                for trajectory in record["trajectories"]
                for span in trajectory["spans"]
                if span["origin"] == "sampled"
            ]
            assert record["staleness"] == step - 1 - min(versions) and record["staleness"] <= k
    assert trained == [*range(steps * tasks)]
    assert sorted(row["serial"] for row in journal(folder)) == trained
    state = json.loads((folder / "checkpoints" / "latest" / "state.json").read_text())
    assert state["cursor"] == steps * tasks


@pytest.mark.long
def test_a_copy_in_the_rollout_process_changes_no_byte(tmp_path: Path) -> None:
    """max_staleness=0: metrics, rollouts and weights of a run in one process."""
    one, two = tmp_path / "same", tmp_path / "own"
    run = (*TINY[:-1], "steps=4")
    assert main([*run, f"hydra.run.dir={one}"]) == 0
    assert main([*run, "rollout.process=own", ahead(0), f"hydra.run.dir={two}"]) == 0
    probed = [
        {name: value for name, value in row.items() if not name.startswith("weight_sync/")}
        for row in metrics(two)
    ]
    assert probed == metrics(one) != []
    assert_same_weights(one, two)
    for step in range(1, 5):
        mine, theirs = rollouts(two, step), rollouts(one, step)
        for record in (*mine, *theirs):
            for call in record["tool_calls"]:
                del call["seconds"]
        assert mine == theirs


@pytest.mark.slow
def test_no_rollout_is_older_than_the_bound(tmp_path: Path) -> None:
    folder, k = tmp_path / "run", 2
    others = ("eval.every=2", "eval.questions=2", "data.curriculum.enabled=true")
    assert main([*TINY, *others, "steps=6", ahead(k), f"hydra.run.dir={folder}"]) == 0
    evaluations = (folder / "evaluations.jsonl").read_text().splitlines()
    assert len(evaluations) == 2 * 4  # before, after steps 2 and 4, and at the end
    assert_each_serial_once(folder, 6, k)
    for row in metrics(folder):
        ages = {age: row[f"async/staleness/{age}"] for age in range(k + 1)}
        assert sum(ages.values()) == 8
        assert row["async/staleness/max"] == max(age for age, count in ages.items() if count) <= k
        assert row["async/dropped"] == 0
    assert_nothing_left(folder)


@pytest.mark.long
def test_a_rollout_process_that_dies_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on: each serial once, and no group of the journal is lost."""
    folder = tmp_path / "run"
    monkeypatch.setenv(KILLED_AT, "2")
    monkeypatch.setenv(KILLED_ONCE, str(tmp_path / "kill"))
    (tmp_path / "kill").touch()
    assert main([*SCRIPTED, ahead(2), "steps=6", f"hydra.run.dir={folder}"]) == 0
    assert not (tmp_path / "kill").exists()
    (warning,) = json.loads((folder / "summary.json").read_text())["warnings"]
    assert warning.endswith("was ended by SIGKILL; it was started again")
    assert_each_serial_once(folder, 6, 2)
    # Each process has a number of its own in the names of its groups.
    assert len({row["path"].partition("-")[2] for row in journal(folder)}) == 2
    assert [row["async/dropped"] for row in metrics(folder)] == [0] * 6
    assert_nothing_left(folder)


@pytest.mark.long
def test_a_resumed_run_trains_each_serial_once(tmp_path: Path) -> None:
    """SIGKILL to the trainer, then to the rollout process, then to the trainer."""
    folder = tmp_path / "run"
    with started(*SCRIPTED, ahead(2), "steps=400", f"hydra.run.dir={folder}") as run:
        await_steps(run, folder, 3)
        (process,) = of_rollouts(run.pid)
        run.kill()
        process.wait(90)
    assert_nothing_left(folder)
    with started(f"resume={folder}") as run:
        await_steps(run, folder, 5)
        (process,) = of_rollouts(run.pid)
        process.kill()
        process.wait(90)
        await_steps(run, folder, len(metrics(folder)) + 3)
        run.kill()
    assert_nothing_left(folder)
    done = len(metrics(folder))
    agenttrain(f"resume={folder}", f"steps={done + 3}")  # all that was sampled ahead
    assert_each_serial_once(folder, done + 3, 2)
    assert_nothing_left(folder)


@pytest.mark.long
def test_sigterm_keeps_what_was_sampled_ahead(tmp_path: Path) -> None:
    """The checkpoint is of the last step: every group of the journal is trained on."""
    folder = tmp_path / "run"
    with started(*SCRIPTED, ahead(2), "steps=400", f"hydra.run.dir={folder}") as run:
        await_steps(run, folder, 2)
        time.sleep(0.3)
        run.send_signal(signal.SIGTERM)
        printed, _ = run.communicate()
        assert run.returncode == 75, printed
    done = len(metrics(folder))
    before = {row["serial"]: row["digest"] for row in journal(folder)}
    agenttrain(f"resume={folder}", f"steps={done + 3}")
    after = {row["serial"]: row["digest"] for row in journal(folder)}
    reused = [serial for serial in before if serial >= done * 2]
    assert {serial: after[serial] for serial in before} == before
    assert [row["async/dropped"] for row in metrics(folder)] == [0] * (done + 3)
    assert len(reused) <= 6
    assert_each_serial_once(folder, done + 3, 2)


def await_phases(run: subprocess.Popen[str], folder: Path, count: int) -> None:
    """Wait until the first trainer has ended so many phases more, or the run has ended."""
    path = folder / "timeline" / "trainer-0.jsonl"

    def ended() -> int:
        return path.read_bytes().count(b"\n") if path.exists() else 0

    wanted, deadline = ended() + count, time.monotonic() + 300
    while ended() < wanted and run.poll() is None:
        assert time.monotonic() < deadline, "the run stands still"
        time.sleep(0.02)


@pytest.mark.long
@pytest.mark.timeout(2400)  # twenty starts of two processes, on busy cores
def test_kills_at_random_instants(tmp_path: Path) -> None:
    """Twenty: the trainer, the rollout process, or the launcher with all that it started."""
    rng, folder = random.Random(7), tmp_path / "run"
    two = ("distributed=ddp", "distributed.processes=2")
    first = (*SCRIPTED, *two, ahead(2), "steps=400", f"hydra.run.dir={folder}")
    killed = Counter[str]()
    while sum(killed.values()) < 20:
        arguments = (f"resume={folder}",) if (folder / "config.yaml").exists() else first
        with started(*arguments) as run:
            # It goes on without the rollout process, unless that is killed twice in a step.
            while run.poll() is None and sum(killed.values()) < 20:
                await_phases(run, folder, rng.randint(1, 12))
                time.sleep(rng.uniform(0, 1))
                if run.poll() is not None:
                    break
                processes = of_rollouts(run.pid)
                trainers = psutil.Process(run.pid).children()
                victim = rng.choice((psutil.Process(run.pid), *trainers, *processes))
                with suppress(psutil.NoSuchProcess):
                    victim.kill()
                    killed["rollouts" if victim in processes else "others"] += 1
                psutil.wait_procs([victim], 90)
                if victim not in processes:
                    run.communicate()
                    psutil.wait_procs(processes, 90)
        assert_nothing_left(folder)
    assert min(killed["rollouts"], killed["others"]) >= 3
    done = len(metrics(folder))
    agenttrain(f"resume={folder}", f"steps={done + 3}")  # all that was sampled ahead
    assert_each_serial_once(folder, done + 3, 2)
