"""The rollout process: engine, event loop, tools, environments and rewards, without the trainer.

The first training process starts it: `python -m agenttrain.runs.rollout_process SOCKET SYS_PATH`.
It ends when it is asked to, and when the trainer's end of the socket is closed for any reason.
Signals are left to the trainer: a scheduler sends them to all processes of a job.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import signal
import socket
import sys

from agenttrain.utils.child_process import end_with_parent
from agenttrain.utils.output import protect

ORPHANED_S = 60.0
"""Seconds that the process has to clean up once the trainer has ended."""
STACKS = signal.SIGUSR2
"""At this signal it prints the stacks of all threads, also while C code holds the interpreter."""
LEFT_TO_THE_TRAINER = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def main() -> None:
    """Serve the trainer until it asks this process to end, or has ended itself.

    The arguments are the number of the connected socket and the trainer's `sys.path` as JSON.
    """
    for number in LEFT_TO_THE_TRAINER:
        # Ignored, but not by SIG_IGN, which the processes of tools and servers would inherit.
        signal.signal(number, lambda *_: None)
    protect()  # stdout and stderr, which may be closed
    faulthandler.enable()
    faulthandler.register(STACKS)  # the trainer asks for all stacks by this signal
    end_with_parent(after_s=ORPHANED_S)
    connection = socket.socket(fileno=int(sys.argv[1]))
    # `python -m` has put the current folder first, where it can hide a package.
    sys.path[:] = json.loads(sys.argv[2])
    from agenttrain.runs.rollout_service import serve

    asyncio.run(serve(connection))


if __name__ == "__main__":
    main()
