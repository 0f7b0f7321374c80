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

from agenttrain.tracking.names import depends_on_clock


def start(*arguments: str) -> subprocess.Popen[str]:
    """A run in a process and a group of its own, with all that it prints in one pipe."""
    return subprocess.Popen(
        [sys.executable, "-m", "agenttrain.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "100"},
    )


def agenttrain(*arguments: str) -> str:
    """A run, to its end; what it printed."""
    started = start(*arguments)
    try:
        printed, _ = started.communicate(timeout=900)  # only a hang takes so long
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
    assert started.returncode == 0, printed
    return printed


def metrics(folder: Path) -> list[dict[str, float]]:
    """A row for each step."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def rollouts(folder: Path, step: int) -> list[dict]:
    """Of a step, as they are on disk."""
    lines = (folder / "rollouts" / f"step-{step:06d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def ids(rollout: dict) -> list[list[int]]:
    """The ids of each trajectory."""
    return [trajectory["token_ids"] for trajectory in rollout["trajectories"]]


def advantages(rollout: dict) -> list[float | None]:
    """The advantage of each sampled span, of one trajectory after the other."""
    spans = [span for trajectory in rollout["trajectories"] for span in trajectory["spans"]]
    return [span["advantage"] for span in spans if span["origin"] == "sampled"]


def same(folder: Path, whole: Path, steps: int) -> None:
    """The same tasks, seeds and updates as the run of one process; what differs is rounding."""
    for step in range(1, steps + 1):
        mine, theirs = rollouts(folder, step), rollouts(whole, step)
        for what in ("rollout_id", "task_id", "reward"):
            assert [one[what] for one in mine] == [one[what] for one in theirs], (step, what)
        assert [ids(one) for one in mine] == [ids(one) for one in theirs]
        for one, other in zip(mine, theirs, strict=True):
            assert advantages(one) == pytest.approx(advantages(other), abs=1e-6)
    gap = "sampling/logprob_gap"  # itself a rounding
    for mine, theirs in zip(metrics(folder), metrics(whole), strict=True):
        names = [n for n in theirs if not depends_on_clock(n) and not n.startswith(gap)]
        names.remove("tokens/computed")  # a prompt counts once in each process that has it
        unknown = [n for n in names if theirs[n] is None]
        assert [n for n in names if mine[n] is None] == unknown
        names = [n for n in names if n not in unknown]
        # weights that AdamW moved by a rounding's sign differ in the fourth digit
        expected = pytest.approx({n: theirs[n] for n in names}, rel=1e-2, abs=1e-5, nan_ok=True)
        assert {n: mine[n] for n in names} == expected
        assert mine[f"{gap}_max"] < 1e-4
