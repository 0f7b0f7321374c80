"""The process that outlives a run and removes its containers.

``python -I -S reaper.py <client> <prefix> <pid>``: once process `pid` has ended, containers with
our label whose name begins with `prefix` are removed, until none is left. It imports nothing of the
package.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from contextlib import suppress

LABEL = "agenttrain.run"
CALL_S = 60
"""Seconds that a call of the client may take; a daemon may hang or restart."""
QUIET = 4
"""Checks in a row without a container, after which none can follow: a start in flight has ended."""
PAUSE_S = 1.0
LONGEST_S = 900.0


def names_of(client: str, prefix: str) -> list[str] | None:
    """Return the names of containers with our label and this prefix; None if the client fails."""
    command = [client, "ps", "-a", "--filter", f"label={LABEL}", "--format", "{{.Names}}"]
    with suppress(OSError, subprocess.TimeoutExpired):
        listed = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=CALL_S
        )
        if listed.returncode == 0:
            return [name for name in listed.stdout.split() if name.startswith(prefix)]
    return None


def remove(client: str, names: list[str]) -> None:
    """Remove containers, running or not; failures are tried again by the caller."""
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            [client, "rm", "-f", *names],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=CALL_S,
        )


def main() -> None:
    """Wait for the end of the run, then remove the containers that it left.

    A `run` command in flight may add one later, so the search ends only after QUIET checks in a row
    without a container.
    """
    client, prefix, pid = sys.argv[1:]
    with suppress(OSError):  # it has ended already
        poller = select.poll()
        poller.register(os.pidfd_open(int(pid)), select.POLLIN)
        poller.poll()  # a pidfd can be read once its process has ended
    quiet, deadline = 0, time.monotonic() + LONGEST_S
    while quiet < QUIET and time.monotonic() < deadline:
        names = names_of(client, prefix)
        quiet = quiet + 1 if names == [] else 0  # None, a client that fails, is not quiet
        if names:
            remove(client, names)
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
