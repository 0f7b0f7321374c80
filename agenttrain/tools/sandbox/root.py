"""The file system that the code in a sandbox sees: programs to read, a little memory to write."""

from __future__ import annotations

import os
from collections.abc import Sequence

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

HOST = "/.host"
"""Folder with the machine's own root while the new one is built."""
DISK = "/.disk"
PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SETTINGS = ("/etc/ld.so.cache", "/etc/alternatives")
DEVICES = ("null", "zero", "full", "random", "urandom")
FILES = 20_000
"""Files and folders that may be created."""


def build_root(folders: Sequence[str], *, disk_mb: int, user: int) -> None:
    """Replace this process's view of all files; it needs a mount namespace of its own.

    `folders` are visible read-only where they are; /work, /tmp and /dev/shm share `disk_mb`.
    """
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    # A place that is sure to be there; what lies in it is seen again under HOST.
    flags = MS_NOSUID | MS_NODEV
    mount("tmpfs", "/tmp", "tmpfs", flags, "size=1m,nr_inodes=1000,mode=755")
    os.mkdir("/tmp" + HOST)
    pivot_root("/tmp", "/tmp" + HOST)
    os.chdir("/")
    for path in (*PROGRAMS, *SETTINGS):
        _show(path)
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
    _disk(disk_mb)
    for path in folders:  # last: they may lie in /tmp
        _show(path)
    os.mkdir("/proc")
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    restrict_mount("/proc", ATTR_RDONLY)
    unmount(HOST)
    os.rmdir(HOST)
    restrict_mount("/", ATTR_RDONLY, recursive=False)


def _show(path: str) -> None:
    """Make a folder, file or link of the machine visible, read-only; nothing if it is not there."""
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


def _disk(disk_mb: int) -> None:
    """Mount memory as the folders that can be written to, under one budget for all."""
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
