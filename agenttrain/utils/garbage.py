"""Python's garbage collector while a program starts and ends.

torch and transformers make a million objects that live until the end. Collections on the way visit
them again and again, and the interpreter visits all of them once more before it exits. Together
that is a third of the time of a command that only loads a model.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Pause the collector for a block that imports modules or loads a model.

    Objects made in the block then count as old: the next collection does not visit them. Does
    nothing where the collector is off already.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # unfreezing would also thaw objects that others froze
            gc.freeze()
            gc.unfreeze()  # moves all objects into the oldest generation
        gc.enable()


def exit_without_collection() -> None:
    """Leave what is still alive at the exit to the operating system.

    Finalizers registered with `atexit` or `weakref.finalize` run as ever.
    """
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
