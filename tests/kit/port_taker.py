"""A stub server whose ports another process takes before it listens, for the first starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import server_stub

TIMES = "AGENTTRAIN_TEST_PORTS_TAKEN"
HOLD = """
import socket, sys, time

with socket.socket() as taken:
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    taken.bind(("127.0.0.1", int(sys.argv[1])))
    taken.listen()
    print("listens", flush=True)
    time.sleep(600)
"""

if __name__ == "__main__":
    folder, _, port = sys.argv[1:]
    starts = Path(folder) / "starts"
    before = len(starts.read_text()) if starts.exists() else 0
    starts.write_text("x" * (before + 1))
    if before < int(os.environ[TIMES]):
        # It ends with the server's group.
        other = subprocess.Popen([sys.executable, "-c", HOLD, port], stdout=subprocess.PIPE)
        assert other.stdout is not None and other.stdout.readline() == b"listens\n"
    server_stub.main()
