"""What a killed server leaves in shared memory is found while it runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agenttrain.engines.vllm_server.scratch import MEMORY, remove, shared_by

PROGRAM = """
import multiprocessing, sys
from multiprocessing import shared_memory
semaphore = multiprocessing.get_context("spawn").Semaphore(1)
memory = shared_memory.SharedMemory(create=True, size=64)
print("/dev/shm/sem." + semaphore._semlock.name.lstrip("/"), memory._name.lstrip("/"), flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not MEMORY.is_dir(), reason="shared memory has no folder; run this on Linux")
def test_semaphores_and_memory_of_a_killed_group_are_removed() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    semaphore, memory = process.stdout.readline().split()
    paths = {semaphore, str(MEMORY / memory)}
    try:
        shared = shared_by(process.pid)
        assert shared == paths
        assert shared_by(os.getpgid(0)) & paths == set()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        left = {path for path in paths if Path(path).exists()}
        remove(paths)
    assert left == paths  # killed with all that would have removed them
    assert not any(Path(path).exists() for path in paths)
