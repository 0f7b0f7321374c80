"""Inside the sandbox, first step: isolate a new interpreter from the machine.

`outside_process.py` runs it as ``python -I -S -c "… main()" <settings as JSON>``. No code of the
model runs before `ready` is sent. The code sees a file system of its own (`build_root`): programs
that it can read, and a little memory to which it can write.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Any

from agenttrain.tools.sandbox import init
from agenttrain.tools.sandbox.confine import drop_privileges, limit_all
from agenttrain.tools.sandbox.system import (
    ATTR_NODEV,
    ATTR_NOEXEC,
    ATTR_NOSUID,
    ATTR_RDONLY,
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_REC,
    mount,
    pivot_root,
    restrict_mount,
    unmount,
)

SIOCSIFFLAGS = 0x8914
INNER_ID = 1000
"""User and group as the code sees them, if the sandbox has a user namespace."""


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
    """Enter new namespaces, hide the machine's files, and drop privileges."""
    from agenttrain.tools.sandbox import seccomp, system

    user: int | None = settings["user"]
    # If the machine runs out of memory, the kernel kills the sandbox first.
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
        # The child is the first process of the new namespace; this process waits for its end.
        child = os.fork()
        if child != 0:
            control.close()
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            os._exit(status if status >= 0 else 128 - status)
    else:
        # Down, as in a new namespace: buffers of its connections would be charged to no process.
        with socket.socket() as any_socket:
            loopback_down = struct.pack("16sh", b"lo", 0)
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, loopback_down)
    socket.sethostname("sandbox")
    build_root(
        settings["folders"], disk_mb=settings["disk_mb"], user=INNER_ID if user is None else user
    )
    os.nice(10)
    drop_privileges(user)
    # After the change of user, which resets this setting.
    system.prctl(system.PR_SET_PDEATHSIG, 9)
    limit_all(settings["processes"])
    # For this process and all that it starts.
    system.install_filter(seccomp.program(system.MACHINE))


HOST = "/.host"
"""Folder of the machine's own root while the new root is built."""
DISK = "/.disk"
PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SETTINGS = ("/etc/ld.so.cache", "/etc/alternatives")
DEVICES = ("null", "zero", "full", "random", "urandom")
FILES = 20_000
"""Limit of files and folders that the code can create."""


def build_root(folders: Sequence[str], *, disk_mb: int, user: int) -> None:
    """Replace this process's file system; it must have a mount namespace of its own.

    `folders` are visible read-only at their own paths; /work, /tmp and /dev/shm share `disk_mb`.
    """
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    # /tmp always exists. The mount hides its files only until the old root appears at HOST.
    flags = MS_NOSUID | MS_NODEV
    mount("tmpfs", "/tmp", "tmpfs", flags, "size=1m,nr_inodes=1000,mode=755")
    os.mkdir("/tmp" + HOST)
    pivot_root("/tmp", "/tmp" + HOST)
    os.chdir("/")
    for path in (*PROGRAMS, *SETTINGS):
        _expose(path)
    os.makedirs("/etc", exist_ok=True)
    for name, text in {
        "passwd": f"root:x:0:0:root:/:/bin/false\nuser:x:{user}:{user}:user:/work:/bin/sh\n",
        "group": f"root:x:0:\nuser:x:{user}:\n",
        "hosts": "127.0.0.1 localhost\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    }.items():
        with open(f"/etc/{name}", "wb") as file:
            file.write(text.encode())
    os.mkdir("/dev")
    for name in DEVICES:
        _bind(f"{HOST}/dev/{name}", f"/dev/{name}", ATTR_RDONLY | ATTR_NOSUID | ATTR_NOEXEC)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"/dev/{name}")
    os.symlink("/proc/self/fd", "/dev/fd")
    # The folders that can be written to are memory with one limit for all of them.
    os.mkdir(DISK)
    options = f"size={disk_mb}m,nr_inodes={FILES},mode=755"
    mount("tmpfs", DISK, "tmpfs", MS_NOSUID | MS_NODEV, options)
    for path in ("/work", "/tmp", "/dev/shm"):
        inner = DISK + "/" + os.path.basename(path)
        os.mkdir(inner)
        os.chmod(inner, 0o1777)
        _bind(inner, path, 0)
    unmount(DISK)
    os.rmdir(DISK)
    for path in folders:  # last: they may be below /tmp
        _expose(path)
    os.mkdir("/proc")
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    restrict_mount("/proc", ATTR_RDONLY)
    unmount(HOST)
    os.rmdir(HOST)
    restrict_mount("/", ATTR_RDONLY, recursive=False)


def _expose(path: str) -> None:
    """Make a folder, file or link of the machine visible read-only, if it exists."""
    source = HOST + path
    if os.path.islink(source):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(os.readlink(source), path)
    elif os.path.exists(source) and not os.path.ismount(path):
        _bind(source, path, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV)


def _bind(source: str, path: str, attributes: int) -> None:
    if os.path.isdir(source):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
    mount(source, path, None, MS_BIND | MS_REC)
    if attributes:
        restrict_mount(path, attributes)
