"""Processes by their numbers."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from agenttrain.utils.process_ids import process_exists, started_at


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


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_a_process_exists_while_this_one_can_open_no_file() -> None:
    """Servers would be given up otherwise."""
    started, number = started_at(1), resource.RLIMIT_NOFILE
    limits = resource.getrlimit(number)
    resource.setrlimit(number, (0, limits[1]))
    try:
        found = (process_exists(1, started or 0), process_exists(2**22 - 1, 5))
    finally:
        resource.setrlimit(number, limits)
    assert found == (True, False)
