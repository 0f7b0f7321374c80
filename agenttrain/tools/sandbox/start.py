"""Inside, first: from a fresh interpreter to a process that has nothing but its sandbox.

Run as ``python -I -S -c "… main()" <settings as JSON>``, by `jail.py`. Until `ready` is sent, no
code of the model's runs.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import sys
from typing import Any

from agenttrain.tools.sandbox import init
from agenttrain.tools.sandbox.confine import drop_privileges, limit_all

SIOCSIFFLAGS = 0x8914
INNER_ID = 1000
"""User and group of the code as it sees them, where the sandbox has a user namespace."""


def main() -> None:
    """Build the sandbox that the settings describe and serve it; send `failed …` if that fails."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    control = socket.socket(fileno=settings["control"])
    try:
        if settings["backend"] != "none":
            _isolate(settings, control)
        os.chdir(settings["work"])
        init.adopt(control)
    except (OSError, KeyError) as error:
        control.send(f"failed {error}".encode())
        os._exit(1)
    init.serve(control, settings)


def _isolate(settings: dict[str, Any], control: socket.socket) -> None:
    from agenttrain.tools.sandbox import seccomp, system
    from agenttrain.tools.sandbox.root import build_root

    user: int | None = settings["user"]
    # Should the machine run out of memory, what runs in here is to be killed first.
    with open("/proc/self/oom_score_adj", "wb") as file:
        file.write(b"1000")
    if settings["backend"] == "unshare":
        outside = (os.geteuid(), os.getegid())
        spaces = system.CLONE_NEWNS | system.CLONE_NEWPID | system.CLONE_NEWNET
        spaces |= system.CLONE_NEWIPC | system.CLONE_NEWUTS | system.CLONE_NEWCGROUP
        system.unshare(spaces | (system.CLONE_NEWUSER if user is None else 0))
        if user is None:
            for name, text in (
                ("setgroups", "deny"),
                ("uid_map", f"{INNER_ID} {outside[0]} 1"),
                ("gid_map", f"{INNER_ID} {outside[1]} 1"),
            ):
                with open(f"/proc/self/{name}", "wb") as file:
                    file.write(text.encode())
        # The child goes on as the first process of the new namespace; this one waits for its end.
        child = os.fork()
        if child != 0:
            control.close()
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            os._exit(status if status >= 0 else 128 - status)
    else:
        # As in a fresh namespace; the buffers of its connections would be charged to nobody.
        with socket.socket() as any_socket:
            loopback_down = struct.pack("16sh", b"lo", 0)
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, loopback_down)
    socket.sethostname("sandbox")
    build_root(
        settings["folders"], disk_mb=settings["disk_mb"], user=INNER_ID if user is None else user
    )
    os.nice(10)
    drop_privileges(user)
    # After the change of user, which would undo it.
    system.prctl(system.PR_SET_PDEATHSIG, 9)
    limit_all(settings["processes"])
    seccomp.install()
