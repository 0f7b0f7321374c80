"""Word problems of two to four steps, in the columns of GSM8K: a stand-in that needs no network.

    Mia buys 3 pens for 4 euros each and 2 books for 12 euros each. How many euros are left of 50?
        3 * 4 = 12
        2 * 12 = 24
        50 - 12 - 24 = 14
        #### 14

Splits never share the numbers of a problem: the remainder of their sum decides the split.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agenttrain.utils.data_fields import Data

NAMES = ("Mia", "Leo", "Ana", "Tom", "Zoe", "Ben", "Eva", "Sam", "Ivy", "Max", "Lea", "Joe")
INSTRUCTION = "Work it out step by step, and end with the number alone on the last line."
"""What a prompt says after the question, in demonstrations as in the settings of the data."""
RESIDUES = {"train": range(0, 8), "tune": (8,), "test": (9,)}
"""Remainders, modulo 10, of the sum of a problem's numbers in each split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WordProblems:
    """Problems of one kind about random numbers ``a``, ``b``, ….

    Example: ``WordProblems(name="more", story="{name} has {a} apples and gets {b}. How many are
    there?", numbers=((2, 9), (2, 4)), steps=lambda a, b: [f"{a} + {b} = {a + b}"])``. The last step
    ends with the answer.
    """

    name: str
    """Name of the kind of problem: the column `family` of its rows."""
    story: str
    numbers: tuple[tuple[int, int], ...]
    """Least and greatest of each number."""
    steps: Callable[..., list[str]]
    """Returns the steps of the solution, ``3 * 4 = 12``."""
    fits: Callable[..., bool] = lambda *numbers: True
    """Returns True for numbers with which the story makes sense."""


FAMILIES = (
    WordProblems(
        name="shopping",
        story="{name} buys {a} pens for {b} euros each and {c} books for {d} euros each. "
        "How many euros are left of {e}?",
        numbers=((2, 9), (2, 6), (2, 5), (8, 25), (100, 220)),
        steps=lambda a, b, c, d, e: [
            f"{a} * {b} = {a * b}",
            f"{c} * {d} = {c * d}",
            f"{e} - {a * b} - {c * d} = {e - a * b - c * d}",
        ],
        fits=lambda a, b, c, d, e: e > a * b + c * d,
    ),
    WordProblems(
        name="sharing",
        story="{name} has {a} boxes with {b} sweets each, eats {c} of them, and shares the others "
        "equally among {d} friends. How many sweets does each friend get?",
        numbers=((3, 12), (6, 30), (1, 20), (3, 9)),
        steps=lambda a, b, c, d: [
            f"{a} * {b} = {a * b}",
            f"{a * b} - {c} = {a * b - c}",
            f"{a * b - c} / {d} = {(a * b - c) // d}",
        ],
        fits=lambda a, b, c, d: a * b > c and (a * b - c) % d == 0,
    ),
    WordProblems(
        name="journey",
        story="{name} rides {a} kilometres an hour for {b} hours, and then {c} kilometres an hour "
        "for {d} hours. How many kilometres are left of a way of {e}?",
        numbers=((12, 30), (2, 6), (8, 24), (2, 6), (200, 400)),
        steps=lambda a, b, c, d, e: [
            f"{a} * {b} = {a * b}",
            f"{c} * {d} = {c * d}",
            f"{e} - {a * b} - {c * d} = {e - a * b - c * d}",
        ],
        fits=lambda a, b, c, d, e: e > a * b + c * d,
    ),
    WordProblems(
        name="discount",
        story="A coat costs {a} euros. {name} waits until it is {b} percent cheaper, and buys {c} "
        "of them. How many euros does {name} pay?",
        numbers=((40, 400), (5, 60), (2, 6)),
        steps=lambda a, b, c: [
            f"{a} * {b} / 100 = {a * b // 100}",
            f"{a} - {a * b // 100} = {a - a * b // 100}",
            f"{a - a * b // 100} * {c} = {(a - a * b // 100) * c}",
        ],
        fits=lambda a, b, c: a * b % 100 == 0,
    ),
    WordProblems(
        name="ages",
        story="{name} is {a} years old. The mother is {b} times as old, and the aunt {c} years "
        "younger than the mother. How old are all three together?",
        numbers=((5, 14), (3, 5), (1, 12)),
        steps=lambda a, b, c: [
            f"{a} * {b} = {a * b}",
            f"{a * b} - {c} = {a * b - c}",
            f"{a} + {a * b} + {a * b - c} = {a + 2 * a * b - c}",
        ],
        fits=lambda a, b, c: a * b - c > a + 15,
    ),
    WordProblems(
        name="doubling",
        story="{name} saves {a} cents in the first week and twice as much in each later week as in "
        "the week before. How many cents are saved after {b} weeks, if {c} are spent?",
        numbers=((2, 30), (3, 6), (1, 40)),
        steps=lambda a, b, c: [
            " + ".join(str(a * 2**week) for week in range(b)) + f" = {a * (2**b - 1)}",
            f"{a * (2**b - 1)} - {c} = {a * (2**b - 1) - c}",
        ],
        fits=lambda a, b, c: a * (2**b - 1) > c,
    ),
)


def row(split: Data[str], index: int, seed: Data[int]) -> dict[str, Any]:
    """Return row `index` of a split, drawn from (split, seed, index) alone.

    Example: ``{"task_id": "word_problems/train/0/3", "question": "Mia buys 3 pens …", "answer":
    "3 * 4 = 12\\n…\\n#### 14", "family": "shopping"}``. Raises ValueError for an unknown split.
    """
    if split not in RESIDUES:
        raise ValueError(f"split={split!r}: must be one of {', '.join(RESIDUES)}")
    rng = random.Random(f"word_problems/{split}/{seed}/{index}")
    family = rng.choice(FAMILIES)
    while True:  # until the numbers belong to the split and the story makes sense
        numbers = [rng.randint(low, high) for low, high in family.numbers]
        if sum(numbers) % 10 in RESIDUES[split] and family.fits(*numbers):
            break
    steps = family.steps(*numbers)
    result = steps[-1].rpartition("= ")[2]
    return {
        "task_id": f"word_problems/{split}/{seed}/{index}",
        "question": family.story.format(
            name=rng.choice(NAMES), **dict(zip("abcde", numbers, strict=False))
        ),
        "answer": "\n".join([*steps, f"#### {result}"]),
        "family": family.name,
    }
