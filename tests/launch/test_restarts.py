"""`distributed.restarts`: a run whose process is killed goes on by itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from process_runs import agenttrain, start
from same_run import assert_same, metrics

from agenttrain.launch.config import DistributedConfig, DistributedName
from agenttrain.utils.exit_codes import FAILED

KILLS = '''
import os, signal
from pathlib import Path

calls = 0

def drawn(rollout):
    """Rewards that differ; kills the second process once for each file that is there."""
    global calls
    calls += 1
    orders = sorted(Path(__file__).parent.glob("kill-*"))
    if orders and os.environ["RANK"] == "1" and calls > 12:
        orders[0].unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return float(sum(rollout.trajectories[0].token_ids) % 2)
'''
RUN = (
    *("debug=tiny", "tasks_per_step=4", "algorithm.group_size=4", "steps=4", "checkpoint.every=1"),
    *("tracker=none", "eval.questions=0", "reward=[]", "+reward.drawn._target_=kills.drawn"),
    *("distributed=ddp", "distributed.processes=2"),
)


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "kills.py").write_text(KILLS)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("context", [1, 2])
def test_a_run_whose_process_is_killed_equals_one_that_was_not(orders: Path, context: int) -> None:
    whole, folder = orders / "whole", orders / "run"
    run = (*RUN, f"distributed.context_parallel={context}")
    agenttrain(*run, f"hydra.run.dir={whole}")
    (orders / "kill-1").touch()
    printed = agenttrain(*run, "distributed.restarts=2", f"hydra.run.dir={folder}")
    assert printed.count("the run is restarted from checkpoints/step-") == 1
    assert "(distributed.restarts=2, 1 left)" in printed
    assert not [*orders.glob("kill-*")]
    assert [row["step"] for row in metrics(folder)] == [1, 2, 3, 4]
    assert_same(folder, whole)


@pytest.mark.long
def test_the_last_death_ends_the_run(orders: Path) -> None:
    for name in ("kill-1", "kill-2"):
        (orders / name).touch()
    run = start(*RUN, "distributed.restarts=1", f"hydra.run.dir={orders / 'run'}")
    printed, _ = run.communicate(timeout=600)
    assert run.returncode == FAILED, printed
    assert printed.count("the run is restarted from checkpoints/step-") == 1
    assert f"To go on: agenttrain resume={orders / 'run'}" in printed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "distributed.restarts=1: distributed=single has no launcher"),
        (
            {"name": DistributedName.ddp, "nodes": 2, "rendezvous": "a:1"},
            "distributed.restarts=1: is for one node; leave it out",
        ),
    ],
)
def test_where_nothing_restarts_it(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistributedConfig(restarts=1, **settings)
