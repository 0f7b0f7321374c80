"""Inside: the file system of a sandbox, built in memory out of folders of the machine.

Programs are read-only. Folders that can be written to are memory, with one limit for all of them:
nothing that the code writes reaches the machine.
"""

from __future__ import annotations

import itertools
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

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
    MS_RDONLY,
    MS_REC,
    mount,
    pivot_root,
    restrict_mount,
    unmount,
)

HOST = "/.host"
"""Folder of the machine's own root while the new root is built."""
DISK = "/.disk"
"""Memory of the folders that can be written to, while the new root is built."""
LAYERS = "/.layers"
"""Top layers of the overlays, while the new root is built."""
PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SETTINGS = ("/etc/ld.so.cache", "/etc/alternatives")
DEVICES = ("null", "zero", "full", "random", "urandom")
FILES = 20_000


class Root(NamedTuple):
    """The files that are visible in a sandbox. Paths are absolute and contain no links."""

    disk_mb: int
    """Size of all folders that can be written to."""
    files: int = FILES
    """Limit of files and folders that the code can create."""
    home: str = "/work"
    """Home folder in /etc/passwd."""
    writable: Sequence[str] = ("/work", "/tmp", "/dev/shm")
    """Folders that the code can write to; empty at first."""
    programs: Sequence[str] = ()
    """Files and folders that can be read, at their own paths."""
    shown: Sequence[str] = ()
    """Folders that can be read, at their own paths, without the sockets and named pipes in them:
    a read-only mount would still let the code connect to these."""
    hidden: Sequence[str] = ()
    """Paths that are absent from the folders of `shown`."""
    links: Mapping[str, str] = {}
    """Link -> its target."""
    sockets: Mapping[str, str] = {}
    """Place in the sandbox -> socket of the machine, to which the code can connect."""
    settings: Sequence[str] = ()
    """Files and folders of /etc."""
    terminals: bool = False
    """True if the code can open pseudo-terminals."""


def build_root(root: Root, *, user: int) -> None:
    """Replace the file system of this process, which must have a mount namespace of its own.

    The new root is a small file system in memory. While it is built, the machine's own root is
    visible in it at HOST, and folders of it are mounted at their places; then HOST is unmounted.
    `user` is the id that the code will have.
    """
    machine_mounts = list(_mount_points())  # before this process adds its own
    mount("none", "/", None, MS_REC | MS_PRIVATE)  # later mounts do not reach the machine
    # The new root is mounted at /tmp, because that folder always exists. It hides the machine's
    # /tmp only until `pivot_root` makes it the root and moves the old root to HOST.
    flags = MS_NOSUID | MS_NODEV
    mount("tmpfs", "/tmp", "tmpfs", flags, "size=1m,nr_inodes=4000,mode=755")
    os.mkdir("/tmp" + HOST)
    pivot_root("/tmp", "/tmp" + HOST)
    os.chdir("/")
    for path in (*PROGRAMS, *SETTINGS, *root.settings):
        _bind_read_only(path)
    _write_settings(root.home, user)
    _make_devices(root.terminals)
    _make_writable_folders(root, user)
    # After the writable folders, which would cover what lies in them: a program in the home folder.
    _show_all(root, machine_mounts)
    for place, source in root.sockets.items():
        _bind(HOST + source, place, ATTR_NOSUID | ATTR_NODEV)
    for link, target in root.links.items():
        if not os.path.lexists(link):
            _make_folder(os.path.dirname(link))
            os.symlink(target, link)
    os.mkdir("/proc")
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    restrict_mount("/proc", ATTR_RDONLY)
    unmount(HOST)
    os.rmdir(HOST)
    restrict_mount("/", ATTR_RDONLY, recursive=False)


def _make_writable_folders(root: Root, user: int) -> None:
    """Make the folders of `root.writable` as parts of one file system in memory, with one limit."""
    os.mkdir(DISK)
    options = f"size={root.disk_mb}m,nr_inodes={root.files},mode=755"
    mount("tmpfs", DISK, "tmpfs", MS_NOSUID | MS_NODEV, options)
    for index, path in enumerate(sorted(root.writable)):
        folder = f"{DISK}/{index}"
        os.mkdir(folder)
        os.chmod(folder, 0o1777)
        os.chown(folder, user, user)
        _bind(folder, path, 0)
    unmount(DISK)  # the bound folders stay mounted
    os.rmdir(DISK)


def _write_settings(home: str, user: int) -> None:
    """Write the files of /etc that programs need."""
    os.makedirs("/etc", exist_ok=True)
    for name, text in {
        "passwd": f"root:x:0:0:root:/:/bin/false\nuser:x:{user}:{user}:user:{home}:/bin/sh\n",
        "group": f"root:x:0:\nuser:x:{user}:\n",
        "hosts": "127.0.0.1 localhost\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    }.items():
        with open(f"/etc/{name}", "wb") as file:
            file.write(text.encode())


def _make_devices(terminals: bool) -> None:
    """Make /dev: a few devices of the machine, and pseudo-terminals if wanted."""
    os.mkdir("/dev")
    for name in (*DEVICES, "tty") if terminals else DEVICES:
        _bind(f"{HOST}/dev/{name}", f"/dev/{name}", ATTR_RDONLY | ATTR_NOSUID | ATTR_NOEXEC)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"/dev/{name}")
    os.symlink("/proc/self/fd", "/dev/fd")
    if terminals:
        os.mkdir("/dev/pts")
        options = "newinstance,ptmxmode=0666,mode=620"
        mount("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, options)
        os.symlink("pts/ptmx", "/dev/ptmx")


def _show_all(root: Root, machine_mounts: Sequence[str]) -> None:
    """Make the machine's files in `root.programs` and `root.shown` visible, read-only.

    Folders of `shown` are mounted as overlays, which keep out sockets, named pipes and hidden
    paths (`_mount_overlay`). All else is bound as it is (`_bind_read_only`). An overlay lacks the
    file systems that the machine has mounted inside of its folder, so each of these gets an overlay
    too. `machine_mounts` are the machine's mount points.

    Parents come first, because a mount covers those that were made below it before.
    """
    os.mkdir(LAYERS)  # holds the top layer of each overlay, whose mount keeps it
    mount("tmpfs", LAYERS, "tmpfs", MS_NOSUID, "size=1m,mode=755")
    numbers = itertools.count()
    visible: list[str] = []
    for path in sorted({*root.programs, *root.shown}):
        if path in root.shown and os.path.isdir(HOST + path):
            _mount_overlay(path, f"{LAYERS}/{next(numbers)}", root)
            for mounted in sorted(machine_mounts):
                if mounted != path and is_within(mounted, path) and os.path.isdir(path):
                    with suppress(OSError):  # a special file system stays absent
                        _mount_overlay(mounted, f"{LAYERS}/{next(numbers)}", root)
        elif not is_within(path, *visible):
            _bind_read_only(path)
        visible.append(path)
    unmount(LAYERS)
    os.rmdir(LAYERS)


def _mount_overlay(path: str, layer: str, root: Root) -> None:
    """Mount a folder of the machine read-only, without the paths of `root.hidden`.

    In an overlay, its sockets and named pipes are files of the overlay, to which no server of the
    machine is connected. The new folder `layer` lies on top of the machine's. A device 0:0 in it is
    a whiteout, which hides the path below.
    """
    os.mkdir(layer, 0o755)
    for hidden in root.hidden:
        if is_within(hidden, path) and hidden != path:
            copy = _copy_folders(os.path.dirname(hidden), path, layer)
            with suppress(FileExistsError):  # hidden already
                os.mknod(f"{copy}/{os.path.basename(hidden)}", stat.S_IFCHR, os.makedev(0, 0))
    for place in (*root.programs, *root.shown):
        if is_within(place, path) and place != path:
            # The code is another user than the folders' owner, and must be able to enter them.
            _copy_folders(os.path.dirname(place), path, layer, added=0o011)
    _make_folder(path)
    # The machine's folder is below HOST. overlayfs puts the first folder of `lowerdir` on top, and
    # wants a backslash before each colon and comma of a path.
    lower = ":".join(re.sub(r"([\\:,])", r"\\\1", folder) for folder in (layer, HOST + path))
    flags = MS_RDONLY | MS_NOSUID | MS_NODEV
    mount("overlay", path, "overlay", flags, f"lowerdir={lower},userxattr")


def _copy_folders(folder: str, top: str, layer: str, *, added: int = 0) -> str:
    """Copy the folders on the path from `top` down to `folder`, without their files, to `layer`.

    In an overlay with `layer` on top, the files of the machine's folders appear in the copies,
    whose permissions count. A copy has the owner and permissions of the machine's folder, plus the
    permission bits `added`, also if an earlier call made it. Returns the copy of `folder`:
    "/layer/a/b" for "/usr/a/b" below the top "/usr".
    """
    source, copy = HOST + top, layer
    for name in filter(None, folder[len(top) :].split("/")):
        source, copy = f"{source}/{name}", f"{copy}/{name}"
        state = os.stat(source)
        if not os.path.isdir(copy):
            os.mkdir(copy)
            os.chmod(copy, stat.S_IMODE(state.st_mode))
            with suppress(OSError):  # in a user namespace the owner may have no id: it stays ours
                os.chown(copy, state.st_uid, state.st_gid)
        os.chmod(copy, stat.S_IMODE(os.stat(copy).st_mode) | added)
    return copy


def is_within(path: str, *folders: str) -> bool:
    """Return True if a path is one of the folders or below one."""
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)


def _mount_points() -> Iterator[str]:
    """Yield the mount points that this process sees."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            path = line.split(" ")[4]  # blanks in it are written as \040
            yield re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), path)


def _bind_read_only(path: str) -> None:
    """Make a folder, file or link of the machine visible read-only, if it exists."""
    source = HOST + path
    if os.path.islink(source):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if not os.path.lexists(path):
            os.symlink(os.readlink(source), path)
    elif os.path.exists(source) and not os.path.ismount(path):  # not visible already
        _bind(source, path, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV)


def _bind(source: str, path: str, attributes: int) -> None:
    """Mount a file or folder at `path`, which is made if it is missing."""
    if os.path.isdir(source):
        _make_folder(path)
    else:
        _make_folder(os.path.dirname(path))
        if not os.path.exists(path):
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
    mount(source, path, None, MS_BIND | MS_REC)
    if attributes:
        restrict_mount(path, attributes)


def _make_folder(path: str) -> None:
    """Make a folder and the missing ones above it; each belongs to the owner of the one above."""
    if not os.path.isdir(path):
        above = os.path.dirname(path)
        _make_folder(above)
        os.mkdir(path)
        owner = os.stat(above)
        os.chown(path, owner.st_uid, owner.st_gid)
