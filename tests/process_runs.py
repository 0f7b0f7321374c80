"""Whole runs in processes of their own, and what two of them must share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest


def agenttrain(*arguments: str) -> None:
    """A run, to its end."""
    started = subprocess.Popen(
        [sys.executable, "-m", "agenttrain.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "100"},
    )
    try:
        printed, _ = started.communicate(timeout=900)  # only a hang takes so long
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
    assert started.returncode == 0, printed


def metrics(folder: Path) -> list[dict[str, float]]:
    """A row for each step."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def rollouts(folder: Path, step: int) -> list[dict]:
    """Of a step, as they are on disk."""
    lines = (folder / "rollouts" / f"step-{step:06d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def main(rollout: dict) -> dict:
    """The one trajectory of a rollout."""
    (trajectory,) = rollout["trajectories"]
    return trajectory


def advantage(rollout: dict) -> float | None:
    """The advantage of all sampled spans of a rollout."""
    spans = [span for span in main(rollout)["spans"] if span["origin"] == "sampled"]
    (value,) = {span["advantage"] for span in spans}
    return value


def same(folder: Path, whole: Path, steps: int) -> None:
    """The same tasks, seeds and updates as the run of one process; what differs is rounding."""
    for step in range(1, steps + 1):
        mine, theirs = rollouts(folder, step), rollouts(whole, step)
        for what in ("rollout_id", "task_id", "reward"):
            assert [one[what] for one in mine] == [one[what] for one in theirs], (step, what)
        assert [main(one)["token_ids"] for one in mine] == [main(o)["token_ids"] for o in theirs]
        assert [advantage(one) for one in mine] == pytest.approx(
            [advantage(one) for one in theirs], abs=1e-6
        )
    gap = "sampling/logprob_gap"  # itself a rounding
    for mine, theirs in zip(metrics(folder), metrics(whole), strict=True):
        names = [n for n in theirs if not n.endswith("_s") and not n.startswith(gap)]
        unknown = [n for n in names if theirs[n] is None]
        assert [n for n in names if mine[n] is None] == unknown
        names = [n for n in names if n not in unknown]
        # weights that AdamW moved by a rounding's sign differ in the fourth digit
        expected = pytest.approx({n: theirs[n] for n in names}, rel=1e-2, abs=1e-5, nan_ok=True)
        assert {n: mine[n] for n in names} == expected
        assert mine[f"{gap}_max"] < 1e-4
