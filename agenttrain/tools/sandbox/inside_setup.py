"""Inside the sandbox, first step: isolate a new interpreter from the machine.

`outside_process.py` runs it as ``python -I -S -c "… main()" <settings as JSON>``. No code of the
model runs before `ready` is sent. The code sees a file system of its own (`root.py`): programs that
it can read, and a little memory to which it can write.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import sys
from typing import Any

from agenttrain.tools.sandbox import init, system
from agenttrain.tools.sandbox.confine import INNER_ID, confine, die_first
from agenttrain.tools.sandbox.root import Root

SIOCSIFFLAGS = 0x8914
"""ioctl that sets the flags of a network interface; 0: it is down."""


def main() -> None:
    """Build and serve the sandbox that the settings describe; on failure, send `failed …`."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    control = socket.socket(fileno=settings["control"])
    try:
        if settings["backend"] != "none":
            _isolate(settings, control)
        os.chdir(settings["work"])
        # Close every file but the connection; 0 to 2 become /dev/null.
        os.set_inheritable(control.fileno(), False)
        null = os.open("/dev/null", os.O_RDWR)
        for number in range(3):
            os.dup2(null, number)
        os.closerange(3, control.fileno())
        os.closerange(control.fileno() + 1, 4096)
    except (OSError, KeyError) as error:
        control.send(f"failed {error}".encode())
        os._exit(1)
    init.InitProcess(control, settings).run()


def _isolate(settings: dict[str, Any], control: socket.socket) -> None:
    """Enter new namespaces, hide the machine's files, and drop privileges.

    `user` of the settings is the id that the code gets; None: it gets a user namespace instead.
    """
    user: int | None = settings["user"]
    die_first()  # the kernel kills the sandbox before our processes if the machine's memory is full
    if settings["backend"] == "unshare":
        _enter_namespaces(user, control)
    else:  # bubblewrap has entered them before it started this process
        _switch_loopback_off()
    os.nice(10)  # the run's own processes get the processor first
    root = Root(disk_mb=settings["disk_mb"], programs=settings["folders"])
    confine(root, user=user, processes=settings["processes"])


def _enter_namespaces(user: int | None, control: socket.socket) -> None:
    """Enter new namespaces; return in a fork, the first process of the new process namespace.

    The calling process waits for the fork and exits as it did. With `user` None, there is a user
    namespace too, in which this process has all privileges and the id INNER_ID.
    """
    outer_user, outer_group = os.geteuid(), os.getegid()
    namespaces = system.CLONE_NEWNS | system.CLONE_NEWPID | system.CLONE_NEWNET
    namespaces |= system.CLONE_NEWIPC | system.CLONE_NEWUTS | system.CLONE_NEWCGROUP
    system.unshare(namespaces | (system.CLONE_NEWUSER if user is None else 0))
    if user is None:
        for name, text in (
            ("setgroups", "deny"),  # without it Linux lets no ordinary user write gid_map
            ("uid_map", f"{INNER_ID} {outer_user} 1"),  # one id: inside, outside, count
            ("gid_map", f"{INNER_ID} {outer_group} 1"),
        ):
            with open(f"/proc/self/{name}", "wb") as file:
                file.write(text.encode())
    child = os.fork()
    if child != 0:
        control.close()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(status if status >= 0 else 128 - status)  # 128 + the signal, as in shells


def _switch_loopback_off() -> None:
    """Switch off the loopback device, whose buffers would be charged to no process.

    bubblewrap switches it on; in a network namespace of our own it is off from the start.
    """
    with socket.socket() as any_socket:
        loopback_down = struct.pack("16sh", b"lo", 0)
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, loopback_down)
