"""Starts a script of this folder in several real processes that meet over gloo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).parent
LIMIT_S = 600.0
"""Reached only by processes that hang."""
TOLD = "TOLD_FOLDER"


def tell(rank: int, found: dict) -> None:
    """What this process found, for `torchrun`.

    In a file: the processes share one pipe as their output, where lines of two may mingle.
    """
    Path(os.environ[TOLD], f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def torchrun(script: str, *arguments: str, processes: int = 2) -> dict[int, dict]:
    """What the processes of `tests/kit/<script>` tell, by rank; each has one thread."""
    with tempfile.TemporaryDirectory() as folder:
        _run(script, *arguments, processes=processes, folder=folder)
        return {int(one.stem): json.loads(one.read_text()) for one in Path(folder).iterdir()}


def _run(script: str, *arguments: str, processes: int, folder: str) -> None:
    paths = os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    started = subprocess.Popen(
        [*launch, f"--nproc_per_node={processes}", str(HERE / script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={
            **os.environ,
            "PYTHONPATH": paths,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            TOLD: folder,
        },
    )
    try:
        printed, _ = started.communicate(timeout=LIMIT_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
    assert started.returncode == 0, printed
