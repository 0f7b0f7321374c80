"""Child processes: answers in time, last words, and an end for all that they started."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from agenttrain.utils.child_process import ChildGone, ChildProcess

ADDER = """
import json, sys
for line in sys.stdin:
    print(sum(json.loads(line)), flush=True)
"""
WITH_A_CHILD = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
input()
"""
PARENT = """
import sys
from agenttrain.utils.child_process import ChildProcess
child = ChildProcess([sys.executable, "-c", sys.argv[1]], replies=True)
print(child.pid, child.receive(limit_s=60), flush=True)
input()
"""
FAITHFUL = """
import subprocess, sys, time
from agenttrain.utils.child_process import end_with_parent
end_with_parent()
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
time.sleep(600)
"""


def python(code: str, **options: bool) -> ChildProcess:
    return ChildProcess([sys.executable, "-c", code], **options)


def is_over(pid: int) -> bool:
    """True once the process is gone, within a minute; nobody may have collected it."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_requests_and_replies_are_lines_of_json():
    child = python(ADDER, requests=True, replies=True)
    child.send("[1, 2]")
    child.send("[1, 2, 3]")
    assert [child.receive(limit_s=60), child.receive(limit_s=60)] == [3, 6]
    child.kill()
    assert (child.alive, child.code) == (False, -9)
    with pytest.raises(ChildGone, match=r"^was ended by SIGKILL$"):
        child.send("[1]")


def test_a_child_that_does_not_answer_in_time_hangs():
    child = python("print('[0]', flush=True); import time; time.sleep(600)", replies=True)
    assert child.receive(limit_s=60) == [0]
    started = time.monotonic()
    with pytest.raises(ChildGone, match=r"^hangs$"):
        child.receive(limit_s=0.2)
    assert 0.2 <= time.monotonic() - started < 30
    child.kill()


def test_the_error_holds_the_end_of_what_a_dead_child_printed():
    child = python("import sys; sys.exit('x' * 5000 + ' no room')", requests=True, replies=True)
    # 2000 bytes: 1991 + len(" no room\n")
    with pytest.raises(ChildGone, match=r"^ended with exit code 1; it printed: x{1991} no room$"):
        child.receive(limit_s=60)
    child.kill()


def test_without_replies_both_outputs_are_what_it_printed():
    child = python("import sys; print('one', flush=True); print('two', file=sys.stderr)")
    assert child.ended(60)
    assert (child.code, child.printed()) == (0, "one\ntwo")
    child.kill()


def test_kill_ends_what_the_child_started_too():
    child = python(WITH_A_CHILD, requests=True, replies=True)
    grandchild = child.receive(limit_s=60)
    assert psutil.pid_exists(grandchild)
    child.kill()
    assert is_over(grandchild)


def test_a_child_ends_with_a_parent_that_is_killed():
    command = [sys.executable, "-c", PARENT, FAITHFUL]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        child, grandchild = map(int, parent.stdout.readline().split())
        assert psutil.pid_exists(child) and psutil.pid_exists(grandchild)
        parent.kill()
    assert is_over(child) and is_over(grandchild)
