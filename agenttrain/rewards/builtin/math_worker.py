"""The process in which `math_verify` runs: JSON lines in, JSON lines out.

The library limits its time with SIGALRM, which works in a main thread only, and sympy can need
hours and gigabytes for one line that a model wrote: so it runs here, where it can be killed.
A script of its own that imports nothing of ours, started with `python -P`.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys

from latex2sympy2_extended import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

MEMORY = 4 * 2**30
"""Bytes of address space; more raises MemoryError in here."""
ANSWER = [
    # What is boxed is the answer, also where other mathematics follows.
    LatexExtractionConfig(
        boxed_match_priority=0, normalization_config=NormalizationConfig(units=True)
    ),
    ExprExtractionConfig(),
]


def equal(expected: str, answer: str, seconds: int) -> bool | None:
    """Return whether the answer equals the expected one; None when that is no mathematics.

    Example: ``equal("0.5", "so \\\\boxed{\\\\frac{1}{2}}", 5) is True``.
    """
    # A bare `\\frac{1}{2}` is LaTeX only between dollars.
    gold = parse(expected, parsing_timeout=seconds) or parse(
        f"${expected}$", parsing_timeout=seconds
    )
    if not gold:
        return None
    given = parse(answer, extraction_config=ANSWER, parsing_timeout=seconds)
    return bool(verify(gold, given, timeout_seconds=seconds))


def main() -> None:
    """Answer until the input ends, with the parent process at the latest."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints is no reply
    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    print(json.dumps("ready"), file=replies, flush=True)
    for line in sys.stdin:
        try:
            value = equal(**json.loads(line))
        except (MemoryError, RecursionError):
            value = False
        print(json.dumps(value), file=replies, flush=True)


if __name__ == "__main__":
    main()
