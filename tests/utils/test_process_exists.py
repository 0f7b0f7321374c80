"""Processes by their numbers."""

from __future__ import annotations

import os
import subprocess
import sys

from agenttrain.utils.processes import process_exists, started_at


def test_a_process_its_end_and_another_of_its_number() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = started_at(child.pid)
    own = started_at(os.getpid())
    assert started is not None and own is not None and started >= own
    assert process_exists(child.pid) and process_exists(child.pid, started)
    assert sys.platform != "linux" or not process_exists(child.pid, started + 1)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert sys.platform != "linux" or not process_exists(child.pid)  # it was not collected yet
    child.wait()
    assert not process_exists(child.pid)
    assert process_exists(1)  # somebody else's
