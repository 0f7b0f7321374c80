"""The state of servers that several processes ask, while one of these is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from agenttrain.engines.vllm_server.health import Member, MemberState
from agenttrain.engines.vllm_server.status import StatusFile, read_status

ASKING = """
import sys
from pathlib import Path
from agenttrain.engines.vllm_server.health import Member, MemberState
from agenttrain.engines.vllm_server.status import StatusFile

member = Member(0, role="judge", state=MemberState.live, requests=3, served=5)
StatusFile(Path(sys.argv[1]), per_process=True).write([member])
print("written", flush=True)
input()
"""


def test_requests_of_a_killed_process_are_in_flight_no_more(tmp_path: Path) -> None:
    """Two processes ask a judge: 3 + 2 requests in flight, 5 + 7 completions; one is killed."""
    folder = tmp_path / "roles" / "judge"
    command = [sys.executable, "-c", ASKING, str(folder)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None and other.stdout.readline() == b"written\n"
    member = Member(0, role="judge", state=MemberState.live, requests=2, served=7)
    StatusFile(folder, per_process=True).write([member])

    def counts() -> tuple[int, int]:
        status = read_status(tmp_path, 0)
        assert status is not None and status["running"]
        (row,) = status["servers"]
        return row["requests"], row["completions"]

    assert counts() == (5, 12)
    other.kill()
    other.wait()
    assert counts() == (2, 12)
