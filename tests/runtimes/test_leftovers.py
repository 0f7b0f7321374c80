"""Names of containers, which say whether their process has ended. No container is started."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from agenttrain.runtimes.leftovers import is_left, machine_id, own_prefix


def test_containers_of_a_dead_process_alone_are_left() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "from agenttrain.runtimes import leftovers as l; "
         "print(l.own_prefix(), flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    name = f"{child.stdout.readline().strip()}0"
    assert not is_left(name)
    assert not is_left(f"{own_prefix()}0")
    assert is_left(f"agenttrain-{machine_id()}-{os.getpid()}-1abcd-0")  # an earlier one of its id
    child.kill()
    child.wait()
    assert is_left(name)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_containers_of_a_live_process_stay_while_this_one_can_open_no_file() -> None:
    name = f"{own_prefix()}0"
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        left = is_left(name)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not left
