"""Free memory that the C library holds on to after tensors on a CPU were freed.

glibc returns only the end of its heap and blocks above 32 MB to the system. The updates' blocks
have other sizes each time, and extend the heap: a model of 135M parameters grew by a third within
ten steps although nothing leaked.
"""

from __future__ import annotations

import ctypes
from typing import Any

MMAP_THRESHOLD = -3
"""glibc's M_MMAP_THRESHOLD of `mallopt`."""
LARGE = 2**17
"""Bytes from which on blocks are mapped, with `map_large_blocks`."""
MAPPED_FROM_THE_START = {"MALLOC_MMAP_THRESHOLD_": str(LARGE)}
"""Environment of a process that maps large blocks from its start. `map_large_blocks` comes too late
for the free part of the heap that imports and loading leave: glibc still hands it out, and gathered
layers spread over it. A process with a fourth of a model of 512 MB took 637 MB to start that way,
and 382 MB with this."""
LEAST_FREE = 256 * 2**20
"""Bytes below which nothing is returned, because getting pages back costs time too."""


class _Usage(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def return_free_memory(least: int = LEAST_FREE) -> None:
    """Return free memory of glibc to the system if it is at least `least` bytes."""
    library: Any = ctypes.CDLL(None)
    if not (hasattr(library, "mallinfo2") and hasattr(library, "malloc_trim")):
        return
    library.mallinfo2.restype = _Usage
    if library.mallinfo2().fordblks >= least:
        library.malloc_trim(0)


def map_large_blocks() -> None:
    """Have the C library map every large block, so that a freed one returns to the system at once.

    For sharded layers, which are gathered and dropped one after the other: with blocks of some
    megabytes in the heap, each of four processes grew to the size of the whole model.
    """
    library: Any = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(MMAP_THRESHOLD, LARGE)
