"""Memory that the C library keeps after tensors on a CPU were freed.

glibc returns a freed block to the system only from the end of its heap, or if the block is larger
than 32 MB. An update frees a gigabyte or more in blocks of a few megabytes, the next one has other
lengths and needs other sizes, and what does not fit into the holes makes the heap longer: of a
model of 135M parameters the process grew by a third within ten steps, with nothing held.
"""

from __future__ import annotations

import ctypes
from typing import Any

LEAST_FREE = 256 * 2**20
"""Free bytes below which nothing is returned: the system would have to clear the pages again."""


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
    """Return free memory that the C library holds to the system, if it is `least` bytes.

    Where the C library has no such call (macOS, musl, glibc before 2.33) nothing happens.
    """
    library: Any = ctypes.CDLL(None)
    if not (hasattr(library, "mallinfo2") and hasattr(library, "malloc_trim")):
        return
    library.mallinfo2.restype = _Usage
    if library.mallinfo2().fordblks >= least:
        library.malloc_trim(0)
