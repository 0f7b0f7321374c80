"""Child processes: answers in time, last words, and an end for all that they started."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from agenttrain.utils.child_process import (
    AsyncChildProcess,
    ChildGone,
    ChildNotReady,
    ChildProcess,
    OnDemandChild,
)

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
keeper = len(sys.argv) < 3
child = ChildProcess([sys.executable, "-c", sys.argv[1]], replies=True, keeper=keeper)
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
STRAYING = """
import subprocess, sys, time
command = [sys.executable, "-c", "import time; time.sleep(600)"]
print(subprocess.Popen(command, start_new_session=True).pid, flush=True)
time.sleep(600)
"""
"""Its child has a session of its own, and nobody in it watches the parent."""


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
    assert child.wait_for_end(60)
    assert (child.code, child.printed()) == (0, "one\ntwo")
    child.kill()


def test_kill_ends_what_the_child_started_too():
    child = python(WITH_A_CHILD, requests=True, replies=True)
    grandchild = child.receive(limit_s=60)
    assert psutil.pid_exists(grandchild)
    child.kill()
    assert is_over(grandchild)


@pytest.mark.parametrize("arguments", [(STRAYING,), (FAITHFUL, "without a keeper")])
def test_a_child_ends_with_a_parent_that_is_killed(arguments):
    command = [sys.executable, "-c", PARENT, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        child, grandchild = map(int, parent.stdout.readline().split())
        assert psutil.pid_exists(child) and psutil.pid_exists(grandchild)
        parent.kill()
    assert is_over(child) and is_over(grandchild)


@pytest.mark.parametrize("number", [0, signal.SIGKILL, signal.SIGTERM])
def test_what_left_the_group_ends_with_a_child_however_that_ends(number):
    child = python(STRAYING, replies=True)
    grandchild = child.receive(limit_s=60)
    if number:
        os.kill(child.pid, number)  # by somebody else
        assert child.wait_for_end(60) and child.code == -number
        assert is_over(grandchild)
    child.kill()
    assert is_over(grandchild) and child.code == -(number or signal.SIGKILL)


def test_a_child_whose_keeper_is_killed_ends():
    child = python("import time; time.sleep(600)")
    (keeper,) = psutil.Process(child.pid).parents()[:1]
    assert keeper.ppid() == os.getpid()
    keeper.kill()
    assert is_over(child.pid) and child.wait_for_end(60)
    child.kill()


SAVES = """
import signal, sys, time
def save(number, frame):
    print(number, flush=True)
    sys.exit(75)
signal.signal(signal.SIGUSR1, save)
print(0, flush=True)
time.sleep(600)
"""


def test_signals_reach_the_program_and_not_its_keeper():
    child = python(SAVES, replies=True)
    assert child.receive(limit_s=60) == 0
    os.kill(psutil.Process(child.pid).ppid(), signal.SIGTERM)  # as a scheduler, to all of a job
    child.signal(signal.SIGUSR1)
    assert child.receive(limit_s=60) == signal.SIGUSR1
    assert child.wait_for_end(60) and child.code == 75
    child.kill()


def test_a_child_may_outlive_its_parent_for_a_moment(tmp_path):
    last = "import sys, time; print(0, flush=True); sys.stdin.read(); open(sys.argv[1], 'w')"
    parent = f"""
import os, sys
from agenttrain.utils.child_process import ChildProcess
command = [sys.executable, "-c", {last!r}, sys.argv[1]]
child = ChildProcess(command, requests=True, replies=True, grace_s=60.0)
child.receive(limit_s=60)
os.kill(os.getpid(), 9)
"""
    path = tmp_path / "last words"
    assert subprocess.run([sys.executable, "-c", parent, str(path)]).returncode == -9
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_command_that_is_missing_is_an_error_at_once():
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        ChildProcess(["no-such-program"])


def test_output_in_a_file_is_read_from_it(tmp_path):
    with (tmp_path / "output").open("ab+") as output:
        output.write(b"earlier\n")
        output.flush()
        command = [sys.executable, "-c", "print('x' * 30); print('last words')"]
        child = ChildProcess(command, output=output, tail_bytes=12)
    assert child.wait_for_end(60)
    child.kill()
    assert child.printed() == "last words"


def test_an_asyncio_child_ends_with_what_left_its_group():
    async def main() -> tuple[int, int]:
        command = [sys.executable, "-c", STRAYING]
        child = await AsyncChildProcess.start(command, env=os.environ)
        grandchild = int(await child.stdout.readline())
        await child.end()
        return await child.wait(), grandchild

    code, grandchild = asyncio.run(main())
    assert code == -signal.SIGKILL and is_over(grandchild)


SLEEPER = """
import json, sys, time
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    time.sleep(json.loads(line))
    print(line, end="", flush=True)
"""


def test_a_child_on_demand_is_replaced_after_a_request_without_a_reply() -> None:
    on_demand = OnDemandChild([sys.executable, "-c", SLEEPER], ready_s=60.0)
    assert on_demand.child is None
    assert on_demand.ask(0, limit_s=60.0) == 0
    first = on_demand.child
    assert first is not None
    with pytest.raises(ChildGone, match="hangs"):
        on_demand.ask(600, limit_s=0.1)
    assert not first.alive  # its reply would be taken for that to the next request
    assert on_demand.ask(0.01, limit_s=60.0) == 0.01
    assert on_demand.child is not first and on_demand.child is not None
    on_demand.child.kill()


def test_a_child_on_demand_that_never_gets_ready() -> None:
    on_demand = OnDemandChild([sys.executable, "-c", "raise SystemExit('no library')"], ready_s=60)
    with pytest.raises(ChildNotReady, match="ended with exit code 1; it printed: no library"):
        on_demand.ask(1, limit_s=60.0)
