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


@contextmanager
def short_collections() -> Iterator[None]:
    """Within, the collector looks at new objects only, and less often; all is as before after it.

    What existed before is set aside, at no cost and not for good. A process that has frozen its
    heap itself, and a `short_collections` inside another, are left alone.
    """
    if gc.get_freeze_count():
        yield
        return
    thresholds = gc.get_threshold()
    gc.freeze()
    if thresholds[0]:  # 0: collections are switched off
        gc.set_threshold(max(YOUNG, thresholds[0]), *thresholds[1:])
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
