"""Reward functions for runs of several processes: each stops a process at a moment that is known.

The file `done` in the current folder says that it has happened.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from agenttrain.types import Rollout

RANK = os.environ.get("RANK")


def plain(rollout: Rollout) -> float:
    """A reward that differs within a group."""
    return rollout.sampled_length % 5 / 5


def once_in_step_2(rollout: Rollout) -> bool:
    if not rollout.rollout_id.startswith("train-2-") or Path("done").exists():
        return False
    Path("done").touch()
    return True


def killed(rollout: Rollout, **columns: object) -> float:
    """Rank 1 is killed."""
    if RANK == "1" and once_in_step_2(rollout):
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(rollout)


def hung(rollout: Rollout, **columns: object) -> float:
    """Rank 1 stops, and hears no signal."""
    if RANK == "1" and once_in_step_2(rollout):
        os.kill(os.getpid(), signal.SIGSTOP)
    return plain(rollout)


def faulty(rollout: Rollout, **columns: object) -> float:
    """Rank 1 meets a bug, in code that nobody expects to raise."""
    if RANK == "1" and once_in_step_2(rollout):
        sys.modules[
            "agenttrain.training.credit_assignment"
        ].assign_advantages.__code__ = _bug.__code__
    return plain(rollout)


def _bug(*arguments: object, **options: object) -> None:
    raise LookupError("a bug of rank 1")


def interrupted(rollout: Rollout, **columns: object) -> float:
    """The launcher gets Ctrl-C."""
    if RANK == "0" and once_in_step_2(rollout):
        os.kill(os.getppid(), signal.SIGINT)
    return plain(rollout)


def terminated(rollout: Rollout, **columns: object) -> float:
    """The launcher is asked to end, and every process of the job with it, as a scheduler does."""
    if RANK == "0" and once_in_step_2(rollout):
        os.kill(os.getppid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    return plain(rollout)


def hung_up(rollout: Rollout, **columns: object) -> float:
    """The launcher's terminal is closed."""
    if RANK == "0" and once_in_step_2(rollout):
        os.kill(os.getppid(), signal.SIGHUP)
        time.sleep(3.0)  # until the launcher has passed it on: it comes while step 2 is scored
    return plain(rollout)


def abandoned(rollout: Rollout, **columns: object) -> float:
    """The launcher is killed."""
    if RANK == "0" and once_in_step_2(rollout):
        os.kill(os.getppid(), signal.SIGKILL)
    return plain(rollout)
