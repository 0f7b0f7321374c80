"""The process in which `math_verify` runs: JSON lines in, JSON lines out.

The library limits its time with SIGALRM, which works only in a main thread, and sympy can need
hours and gigabytes for one line of a model. So it runs in a process that can be killed. This is a
script that imports nothing of agenttrain, started with `python -P`.
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
"""Limit of the address space in bytes; beyond it, this process gets MemoryError."""
ANSWER = [
    # A boxed expression is the answer, even if other mathematics follows it.
    LatexExtractionConfig(
        boxed_match_priority=0, normalization_config=NormalizationConfig(units=True)
    ),
    ExprExtractionConfig(),
]


def equal(expected: str, answer: str, seconds: int) -> bool | None:
    """Return True if the answer equals the expected one, None if the expected one is no formula.

    Example: ``equal("0.5", "so \\\\boxed{\\\\frac{1}{2}}", 5) is True``.
    """
    # The parser reads a bare `\\frac{1}{2}` only between dollars.
    gold = parse(expected, parsing_timeout=seconds) or parse(
        f"${expected}$", parsing_timeout=seconds
    )
    if not gold:
        return None
    parsed_answer = parse(answer, extraction_config=ANSWER, parsing_timeout=seconds)
    return bool(verify(gold, parsed_answer, timeout_seconds=seconds))


def main() -> None:
    """Answer requests until stdin closes, which it does when the parent process ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep the library's prints out of the replies
    logging.disable()
    # A formula that needs too much memory raises MemoryError, and this process goes on.
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    print(json.dumps("ready"), file=replies, flush=True)
    for line in sys.stdin:
        try:
            value = equal(**json.loads(line))
        except (MemoryError, RecursionError):  # such an answer counts as wrong
            value = False
        print(json.dumps(value), file=replies, flush=True)


if __name__ == "__main__":
    main()
