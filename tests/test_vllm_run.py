"""`agenttrain engine=vllm` as a user runs it. `scripts/test-vllm` runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip(
    "vllm", reason="vLLM is not installed: scripts/install_vllm_cpu, then scripts/test-vllm"
)

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
SETTINGS = ("engine=vllm", "engine.vllm.kv_cache_mb=128", "engine.max_context=1024", "tracker=none")


def agenttrain(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "agenttrain.cli", *arguments],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_bundled_agent_learns_with_vllm(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    agenttrain(*SETTINGS, "steps=25", "eval.questions=0", f"hydra.run.dir={folder}")
    rows = metrics(folder)
    rewards = [row["reward"] for row in rows]
    assert sum(rewards[:3]) / 3 < 0.6
    assert sum(rewards[-5:]) / 5 > sum(rewards[:3]) / 3 + 0.2
    assert max(row["sampling/logprob_gap_max"] for row in rows) < 1e-3


def test_a_sweep_whose_second_run_goes_on_until_it_is_interrupted(tmp_path: Path) -> None:
    """One engine after the other; adapters; resume; Ctrl-C."""
    tiny = ("debug=tiny", "eval.questions=0", f"hydra.sweep.dir={tmp_path}")
    agenttrain("-m", *SETTINGS, *tiny, "model.lora.rank=0,4", "optimizer.lr=0.01")
    assert [row["step"] for row in metrics(tmp_path / "0")] == [1, 2]
    folder = tmp_path / "1"
    running = subprocess.Popen(
        [sys.executable, "-m", "agenttrain.cli", f"resume={folder}", "steps=100000"],
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while len(metrics(folder)) < 4:
            assert running.poll() is None
            time.sleep(0.1)
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 130
        with pytest.raises(ProcessLookupError):  # no process of its group is left
            os.killpg(running.pid, 0)
    finally:
        running.kill()
        running.wait()
    rows = metrics(folder)
    assert [row["step"] for row in rows[:4]] == [1, 2, 3, 4]
    assert max(row["sampling/logprob_gap_max"] or 0 for row in rows) < 1e-3, "of what is trained"
    assert {row["sampling/stale_tokens"] for row in rows} <= {0.0, None}
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
