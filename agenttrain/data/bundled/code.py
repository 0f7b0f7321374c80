"""The code task: questions with one exact answer that a few lines of Python compute.

    What is the sum of the primes below 50?            -> 328
    How often does the digit 7 occur in 3**120?        -> 7 (len of "7"s in the number's text)

Splits never share the numbers of a question: the remainder of their sum decides the split. The
expression that computes an answer here would also compute it in the sandbox.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from string import ascii_lowercase
from typing import Any

from agenttrain.utils.data_fields import Data

RESIDUES = {"train": range(0, 8), "tune": (8,), "test": (9,)}
"""Remainders, modulo 10, of the sum of a question's numbers in each split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeQuestions:
    """Questions of one kind about two random numbers, `a` and `b`.

    Example: ``CodeQuestions(name="gcd", question="What is gcd({a}, {b})?", a=(10, 99), b=(10, 99),
    answer=math.gcd)``
    """

    name: str
    """Name of the kind of question: the column `family` of its rows."""
    question: str
    a: tuple[int, int]
    """Least and greatest `a`."""
    b: tuple[int, int]
    """Least and greatest `b`."""
    answer: Callable[[int, int], int | str]


def primes(low: int, high: int) -> list[int]:
    """Return the primes from `low` to below `high`.

    Example: ``primes(2, 12) == [2, 3, 5, 7, 11]``.
    """
    return [n for n in range(max(low, 2), high) if all(n % d for d in range(2, int(n**0.5) + 1))]


def word(a: int, b: int) -> str:
    """Return a word of `a` letters, a function of `a` and `b`: ``word(6, 7) == "zfvtrp"``."""
    return "".join(random.Random(f"code/{a}/{b}").choices(ascii_lowercase, k=a))


FAMILIES = (
    CodeQuestions(
        name="primes",
        question="What is the sum of the primes from {a} to below {b}?",
        a=(2, 40),
        b=(50, 400),
        answer=lambda a, b: sum(primes(a, b)),
    ),
    CodeQuestions(
        name="digits",
        question="How often does the digit {a} occur in 3**{b}?",
        a=(0, 9),
        b=(20, 300),
        answer=lambda a, b: str(3**b).count(str(a)),
    ),
    CodeQuestions(
        name="multiples",
        question="How many of the numbers from 1 to {b} are divisible by {a} and not by 7?",
        a=(2, 30),
        b=(100, 2000),
        answer=lambda a, b: sum(n % a == 0 and n % 7 != 0 for n in range(1, b + 1)),
    ),
    CodeQuestions(
        name="gcd",
        question="What is the greatest common divisor of {a} and {b}?",
        a=(1000, 9999),
        b=(1000, 9999),
        answer=gcd,
    ),
    CodeQuestions(
        name="reverse",
        question="Write the word {word} backwards.",
        a=(6, 14),
        b=(1, 400),
        answer=lambda a, b: word(a, b)[::-1],
    ),
    CodeQuestions(
        name="sorted",
        question="Sort the letters of the word {word} by the alphabet.",
        a=(6, 14),
        b=(1, 400),
        answer=lambda a, b: "".join(sorted(word(a, b))),
    ),
)


def row(split: Data[str], index: int, seed: Data[int]) -> dict[str, Any]:
    """Return row `index` of a split, drawn from (split, seed, index) alone.

    Example: ``{"task_id": "code/train/0/3", "messages": [{"role": "user", "content": "What is the
    sum of the primes from 2 to below 50?"}], "answer": "328", "family": "primes"}``. Raises
    ValueError for an unknown split.
    """
    if split not in RESIDUES:
        raise ValueError(f"split={split!r}: must be one of {', '.join(RESIDUES)}")
    rng = random.Random(f"code/{split}/{seed}/{index}")
    family = rng.choice(FAMILIES)
    while True:  # until the numbers belong to the split
        a, b = rng.randint(*family.a), rng.randint(*family.b)
        if (a + b) % 10 in RESIDUES[split]:
            break
    question = family.question.format(a=a, b=b, word=word(a, b))
    return {
        "task_id": f"code/{split}/{seed}/{index}",
        "messages": [{"role": "user", "content": question}],
        "answer": str(family.answer(a, b)),
        "family": family.name,
    }
