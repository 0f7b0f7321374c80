"""Python's cyclic garbage collector while rollouts are in flight: it stops the event loop.

A full collection visits every object of the process, a third of a second with torch and
transformers imported, and rollouts make so many objects that it comes every second or so.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = 20_000
"""Objects made before the youngest are looked at; Python's own 700 to 2,000 suit small heaps."""


class _Heap:
    """What is known of this process's heap."""

    ours = False
    """It is frozen by a `short_collections`."""
    theirs = False
    """It was found frozen by somebody else. Not asked again: the count walks the frozen heap, a
    tenth of a second beside vLLM, which freezes its own."""


@contextmanager
def short_collections() -> Iterator[None]:
    """Within, the collector looks at new objects only, and less often; all is as before after it.

    What existed before is set aside, at no cost and not for good. A process that has frozen its
    heap itself, and a `short_collections` inside another, are left alone.
    """
    _Heap.theirs = _Heap.theirs or (not _Heap.ours and gc.get_freeze_count() > 0)
    if _Heap.ours or _Heap.theirs:
        yield
        return
    thresholds = gc.get_threshold()
    _Heap.ours = True
    gc.freeze()
    if thresholds[0]:  # 0: collections are switched off
        gc.set_threshold(max(YOUNG, thresholds[0]), *thresholds[1:])
    try:
        yield
    finally:
        _Heap.ours = False
        gc.unfreeze()
        gc.set_threshold(*thresholds)
