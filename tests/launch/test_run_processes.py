"""Whole runs of two processes: the steps of one, resumed with another number, and a target."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest
from process_runs import agenttrain, metrics, same
from same_run import assert_same

pytestmark = pytest.mark.long
TINY = [
    *("debug=tiny", "tasks_per_step=3", "tracker=none", "checkpoint.every=2"),
    *("eval.questions=2", "eval.greedy=false", "optimizer.schedule=constant"),
    # at each step some group has rewards that differ, so that there is an update to compare
    *("algorithm.group_size=4", "seed=3"),
]
TWO = "distributed.processes=2"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of one process."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    agenttrain(*TINY, "steps=4", f"hydra.run.dir={folder}")
    return folder


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (["distributed=fsdp2", TWO], ["distributed=single"]),
        ([], ["distributed=ddp", TWO]),
        (["distributed=ddp", TWO, "distributed.context_parallel=2"], ["distributed=single"]),
    ],
    ids=["two-one", "one-two", "together-one"],
)
def test_a_run_goes_on_with_another_number_of_processes(
    first: list[str], then: list[str], whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    agenttrain(*TINY, "steps=2", *first, f"hydra.run.dir={folder}")
    agenttrain(f"resume={folder}", "steps=4", *then)
    same(folder, whole, 4)


def test_two_processes_that_were_stopped_equal_two_that_were_not(tmp_path: Path) -> None:
    """To the bit: also which of them gets which task is as it would have been."""
    run = (*TINY, "tasks_per_step=7", "distributed=ddp", TWO)
    agenttrain(*run, "steps=6", f"hydra.run.dir={tmp_path / 'whole'}")
    agenttrain(*run, "steps=2", f"hydra.run.dir={tmp_path / 'run'}")
    agenttrain(f"resume={tmp_path / 'run'}", "steps=6")
    assert_same(tmp_path / "run", tmp_path / "whole")


def test_two_processes_teach_the_shop_agent_to_chain_queries(tmp_path: Path) -> None:
    arguments = ["steps=16", "eval.questions=80", "eval.greedy=false", "tracker=none"]
    agenttrain(*arguments, "distributed=ddp", TWO, f"hydra.run.dir={tmp_path / 'run'}")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    rows = metrics(tmp_path / "run")
    assert max(row["sampling/logprob_gap_max"] for row in rows) < 1e-4
    assert mean(row["reward"] for row in rows[:3]) < 0.45
    assert summary["eval"]["before"]["reward"] < 0.40
    assert summary["eval"]["after"]["reward"] > 0.70
