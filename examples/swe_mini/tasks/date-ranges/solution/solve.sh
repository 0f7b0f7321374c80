#!/bin/bash
cat > /app/ranges.py <<'PY'
"""Ranges of days, with both ends."""

from datetime import timedelta


def overlap(first, second):
    """Return True if two ranges share a day."""
    return first[0] <= second[1] and second[0] <= first[1]


def merge(ranges):
    """Return the ranges in order, with those that share a day or touch made one."""
    merged = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1] + timedelta(days=1):
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
PY
