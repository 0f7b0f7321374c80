"""scripts/bench/gpu.py on a CPU with a tiny shape: every part runs and writes what it names."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from agenttrain.types import Completion, Finish, Origin, Rollout, Task

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / "scripts" / "bench"


def measured(parts: list[str], file: Path, *options: str) -> dict:
    command = [sys.executable, str(BENCH / "gpu.py"), *parts, "--shape", "tiny", "--quick"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--json", str(file), *options], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text())


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("gpu_step")


def sampled(prompt: int, completion: int) -> Rollout:
    """A rollout of so many tokens."""
    rollout = Rollout(task=Task(task_id="a", messages=()), rollout_id="a", group_id="a", sample=0)
    rollout.trajectories[0].append_context([5] * prompt, Origin.prompt)
    completed = Completion(
        token_ids=(6,) * completion,
        logprobs=(0.0,) * completion,
        finish=Finish.stop,
        versions=((0, completion),),
    )
    rollout.trajectories[0].append_sampled(completed, rollout.trajectories[0].token_ids)
    return rollout


def test_batches_of_trl_count_their_padding(steps: ModuleType) -> None:
    rollouts = [sampled(2, 6), sampled(3, 1), sampled(3, 4)]
    # By length: (3, 1) with (3, 4), padded to 3 + 4; then (2, 6) alone.
    assert [steps.padded_tokens(batch) for batch in steps.trl_batches(rollouts, 2)] == [14, 8]
    assert steps.largest_trl_batch(2, rollouts) == 14


@pytest.mark.slow
def test_the_training_parts_name_kernels_machine_and_command(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    file.write_text('{"sync": {"card": "kept"}}')
    options = ("--sides", "bare", "unshared", "shared", "policy", "shared_at_trl_4")
    records = measured(["step", "cases"], file, *options)
    assert records["sync"] == {"card": "kept"}
    step = records["step"]
    assert step["command"].startswith("python scripts/bench/gpu.py step cases --shape tiny")
    assert {"torch", "transformers"} <= step["versions"].keys()
    sides = step["figures"]["sides"]
    assert list(sides) == list(options[1:])
    for side in sides.values():
        assert side["kernel"] not in ("", "none")
        assert side["seconds"] > 0 and side["rate"] > 0
    # The default computes shared prompts once, by the package's own loop as well.
    assert sides["shared"]["computed_tokens"] == sides["policy"]["computed_tokens"]
    assert sides["shared"]["computed_tokens"] < sides["unshared"]["computed_tokens"]
    cases = records["cases"]["figures"]
    assert {"reference", "sigma_0.4", "shared_prefix", "tree"} <= cases.keys()
    assert all(case["shared_over_unshared"] > 0 for case in cases.values())


@pytest.mark.slow
def test_a_side_that_is_unknown_fails_its_part_alone(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(BENCH / "gpu.py"),
        "step",
        "--shape",
        "tiny",
        "--sides",
        "hsared",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert "choose from bare, unshared" in done.stdout
