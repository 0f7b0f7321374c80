"""Linux system calls that the standard library lacks; like `os`, they raise OSError."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

CLONE_NEWNS = 0x0002_0000
CLONE_NEWCGROUP = 0x0200_0000
CLONE_NEWUTS = 0x0400_0000
CLONE_NEWIPC = 0x0800_0000
CLONE_NEWUSER = 0x1000_0000
CLONE_NEWPID = 0x2000_0000
CLONE_NEWNET = 0x4000_0000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_NOEXEC = 1, 2, 4, 8
"""Attributes of mount_setattr."""

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER = 1, 4, 24, 36
PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4
CAPABILITY_VERSION_3 = 0x2008_0522

PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
CAPSET = {"x86_64": 126, "aarch64": 91}
SECCOMP = {"x86_64": 317, "aarch64": 277}
MOUNT_SETATTR = 442
"""The number is the same on every machine."""
AT_FDCWD, AT_RECURSIVE = -100, 0x8000

MACHINE = os.uname().machine


class MountAttributes(ctypes.Structure):
    """`struct mount_attr`, the argument of mount_setattr(2)."""

    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    """Raise the OSError of a call that failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def syscall(number: int, *arguments: object, what: str) -> None:
    """Make a system call by its number; `what` names it in errors."""
    longs = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    _check(_libc.syscall(ctypes.c_long(number), *longs), what)


def unshare(flags: int) -> None:
    """Move this process to new namespaces; into a process namespace, only its children."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def prctl(option: int, value: int = 0, *more: int) -> None:
    """prctl(2)."""
    longs = [ctypes.c_ulong(n) for n in (value, *more, 0, 0, 0)][:4]
    _check(_libc.prctl(ctypes.c_int(option), *longs), f"prctl {option}")


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """mount(2)."""
    kind_bytes = None if kind is None else kind.encode()
    arguments = (source.encode(), target.encode(), kind_bytes, ctypes.c_ulong(flags), data.encode())
    _check(_libc.mount(*arguments), f"mount {kind or source} on {target}")


def unmount(target: str) -> None:
    """Remove a mount and all mounts below it at once."""
    _check(_libc.umount2(target.encode(), ctypes.c_int(MNT_DETACH)), f"unmount {target}")


def pivot_root(new: str, old: str) -> None:
    """Make `new` the root; the old root is then at `old`, a folder in the new one."""
    syscall(PIVOT_ROOT[MACHINE], new.encode(), old.encode(), what="pivot_root")


def restrict_mount(target: str, attributes: int, *, recursive: bool = True) -> None:
    """Add attributes to a mount and all mounts below it. Needs Linux 5.12."""
    changes = MountAttributes(attr_set=attributes)
    arguments = (target.encode(), AT_RECURSIVE if recursive else 0, ctypes.byref(changes))
    size = ctypes.sizeof(changes)
    syscall(MOUNT_SETATTR, AT_FDCWD, *arguments, size, what=f"mount_setattr {target}")


def drop_capabilities() -> None:
    """Give up all capabilities of this process."""
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    syscall(CAPSET[MACHINE], ctypes.byref(header), (ctypes.c_uint32 * 6)(), what="capset")


def install_filter(program: Sequence[bytes]) -> None:
    """Install a seccomp filter for this thread; each instruction has eight bytes."""
    code = ctypes.create_string_buffer(b"".join(program), 8 * len(program))

    class Program(ctypes.Structure):  # `struct sock_fprog` of linux/filter.h
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    header = Program(len(program), ctypes.addressof(code))
    syscall(SECCOMP[MACHINE], 1, 0, ctypes.byref(header), what="seccomp")  # SECCOMP_SET_MODE_FILTER
