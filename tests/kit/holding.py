"""A user's reward that holds a job of SLURM's at a step, in its first life, until a signal."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

STEP = 3


async def reward(rollout, **columns) -> float:
    """Some number that depends on what was sampled; it waits where the file `hold` says so."""
    kind, step, *_ = rollout.rollout_id.split("-")
    if kind == "train" and int(step) >= STEP and _held():
        Path("held").touch()
        await asyncio.sleep(3600)
    return len(rollout.trajectories[0].token_ids) % 3 / 2


def _held() -> bool:
    if "SLURM_JOB_ID" not in os.environ or "SLURM_RESTART_COUNT" in os.environ:
        return False
    mine = os.environ.get("SLURM_ARRAY_TASK_ID", "all")
    return Path("hold").exists() and Path("hold").read_text() == mine
