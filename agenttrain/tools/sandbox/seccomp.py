"""The system calls that are refused to code in a sandbox.

Namespaces and limits do not cover them. They create namespaces (in which a process has privileges
again and may mount memory without limit), use memory that is charged to no process (memfd,
System V), open sockets of families without a network namespace (vsock reaches the host of a virtual
machine), access the memory of other processes, or belong to rarely used parts of the kernel.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from errno import EAFNOSUPPORT, ENOSYS, EPERM

ARCHITECTURE = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
"""AUDIT_ARCH_* by machine. Calls of another architecture, such as 32-bit x86, kill the process."""

# By name: (x86_64, aarch64); the numbers from 424 on are the same everywhere.
REFUSED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "open_by_handle_at": (304, 265),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "syslog": (103, 116),
    "acct": (163, 89),
    "swapon": (167, 224),
    "reboot": (169, 142),
    "quotactl": (179, 60),
    "fanotify_init": (300, 262),
    "inotify_init": (253, 26),  # counted per user of the machine; aarch64 has the second only
    "inotify_init1": (294, 26),
    "ioprio_set": (251, 30),
}
SELF_ONLY = {
    "prlimit64": (302, 261, 0),
    "sched_setaffinity": (203, 122, 0),
    "sched_setscheduler": (144, 119, 0),
    "sched_setparam": (142, 118, 0),
    "sched_setattr": (314, 274, 0),
    "setpriority": (141, 140, 1),
}
"""Calls that a process may make only about itself: (x86_64, aarch64, index of the argument that
must be 0, which means the caller). The sandbox's first process has the same user as the code, which
must not slow it down or limit it."""
CLONE, CLONE3, SOCKET, SOCKETPAIR = (56, 220), (435, 435), (41, 198), (53, 199)
SETSOCKOPT, SOL_SOCKET = (54, 208), 1
BUFFER_SIZES = (7, 8, 32, 33)
"""SO_SNDBUF, SO_RCVBUF and their FORCE variants: a socket's buffer is charged to no process."""
NAMESPACE_FLAGS = 0x7E02_0000
FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6."""
X32 = 0x4000_0000
"""The bit of calls in x86_64's x32 ABI, which has other numbers for the same calls."""

ALLOW, KILL, ERRNO = 0x7FFF_0000, 0x8000_0000, 0x0005_0000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER_AT, ARCHITECTURE_AT, ARGUMENT_AT = 0, 4, 16


def program(machine: str, permitted: Sequence[str] = ()) -> list[bytes]:
    """Return the filter as instructions of classic BPF. Raises ValueError for another machine.

    `permitted` are the names in `REFUSED` that the filter allows. A test (EQUAL, AT_LEAST, ANY_BIT)
    compares the number that was loaded last. Its last two arguments are the numbers of instructions
    to skip: if the test is true, if it is false.

    A refused call fails with EPERM, as for a process without privileges. ENOSYS and EAFNOSUPPORT
    are the errors of a kernel that lacks the call or the family: libraries then do without it.
    """
    column = tuple(ARCHITECTURE).index(machine)  # of the machine's number in the tuples above
    # Calls of another architecture, and of x32, have other numbers.
    lines = [_op(LOAD, ARCHITECTURE_AT), _op(EQUAL, ARCHITECTURE[machine], 1, 0), _op(RETURN, KILL)]
    lines += [_op(LOAD, NUMBER_AT), _op(AT_LEAST, X32, 0, 1), _errno(ENOSYS)]
    # A filter cannot read the flags of clone3. Without it, libraries use clone.
    lines += _on_call(CLONE3[column], [_errno(ENOSYS)])
    for name, numbers in REFUSED.items():
        if name not in permitted:
            lines += _on_call(numbers[column], [_errno(EPERM)])
    # Calls about a process: allowed if the argument that names it is 0, the caller.
    for *numbers_by_machine, argument in SELF_ONLY.values():  # (302, 261, 0): [302, 261], 0
        allow_self = [
            _op(LOAD, ARGUMENT_AT + 8 * argument),
            _op(EQUAL, 0, 0, 1),
            _op(RETURN, ALLOW),
        ]
        lines += _on_call(numbers_by_machine[column], [*allow_self, _errno(EPERM)])
    # clone without new namespaces, and sockets of FAMILIES.
    check_flags = [_op(LOAD, ARGUMENT_AT), _op(ANY_BIT, NAMESPACE_FLAGS, 0, 1), _errno(EPERM)]
    lines += _on_call(CLONE[column], [*check_flags, _op(RETURN, ALLOW)])
    check_family = [_op(LOAD, ARGUMENT_AT), *_skip_if_in(FAMILIES), _errno(EAFNOSUPPORT)]
    sockets = [SOCKET[column], SOCKETPAIR[column]]
    lines += _on_calls(sockets, [*check_family, _op(RETURN, ALLOW)])
    # setsockopt, except for the sizes of buffers (level SOL_SOCKET, its second argument).
    allow_other_levels = [
        _op(LOAD, ARGUMENT_AT + 8),
        _op(EQUAL, SOL_SOCKET, 1, 0),
        _op(RETURN, ALLOW),
    ]
    check_option = [_op(LOAD, ARGUMENT_AT + 16), *_skip_if_in(BUFFER_SIZES), _op(RETURN, ALLOW)]
    lines += _on_call(SETSOCKOPT[column], [*allow_other_levels, *check_option, _errno(EPERM)])
    return [*lines, _op(RETURN, ALLOW)]


def _on_call(number: int, block: list[bytes]) -> list[bytes]:
    """Return instructions that run `block`, which returns, on the system call of this number."""
    return _on_calls([number], block)


def _on_calls(numbers: Sequence[int], block: list[bytes]) -> list[bytes]:
    """Return instructions that run `block`, which returns, on any of these system calls."""
    *others, last = numbers
    # Each test that is true skips the tests after it; the last one skips the block if it is false.
    to_block = [_op(EQUAL, number, len(others) - i, 0) for i, number in enumerate(others)]
    return [*to_block, _op(EQUAL, last, 0, len(block)), *block]


def _skip_if_in(values: Sequence[int]) -> list[bytes]:
    """Return instructions that skip the next one if the number loaded last is one of `values`."""
    return [_op(EQUAL, value, len(values) - index, 0) for index, value in enumerate(values)]


def _op(code: int, value: int, skip_if_true: int = 0, skip_if_false: int = 0) -> bytes:
    """Encode one instruction; the last two are the numbers of instructions to skip."""
    return struct.pack("=HBBI", code, skip_if_true, skip_if_false, value)


def _errno(number: int) -> bytes:
    return _op(RETURN, ERRNO | number)
