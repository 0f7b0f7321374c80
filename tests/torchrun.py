"""Starts a script of this folder in several real processes that meet over gloo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).parent
LIMIT_S = 600.0
"""Reached only by processes that hang."""


def torchrun(script: str, *arguments: str, processes: int = 2) -> str:
    """What all processes of `tests/<script>` print; each has one thread."""
    paths = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    started = subprocess.Popen(
        [*launch, f"--nproc_per_node={processes}", str(HERE / script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={
            **os.environ,
            "PYTHONPATH": paths,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        },
    )
    try:
        printed, complaints = started.communicate(timeout=LIMIT_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
    assert started.returncode == 0, complaints
    return printed
