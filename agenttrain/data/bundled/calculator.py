"""The bundled calculator task: short stories whose numbers change in one or two steps.

    Kim has 12 coins. Kim loses 5, then multiplies the pile by 3. How many coins does Kim have now?
        subtract(12, 5) -> 7,  multiply(7, 3) -> 21

Splits share names, things and words, but never the numbers of a question: a checksum of the numbers
decides the split. A phrasing is an opener, the words of its steps and a closer. A quarter of the
pairs of opener and closer is held out for `test_phrasing`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agenttrain.utils.data_fields import Data

NAMES = (
    *("Kim", "Ana", "Bob", "Tom", "Eva", "Max", "Lea", "Ben"),
    *("Zoe", "Ian", "Mia", "Leo", "Ivy", "Sam", "Joe", "Amy"),
)
THINGS = ("apples", "coins", "books", "pens", "cards", "shells", "stamps", "eggs")
CLAUSES = {
    "add": ("finds {b} more", "buys {b} more", "gets {b} from a friend", "wins {b}"),
    "subtract": ("loses {b}", "sells {b}", "gives away {b}", "drops {b}"),
    "multiply": ("ends up with {b} times as many", "multiplies the pile by {b}"),
}
OPENERS = ("", "A story: ", "Quick question: ", "Listen: ")
CLOSERS = (
    "How many {thing} does {name} have now?",
    "How many {thing} are there now?",
    "What is the number of {thing} now?",
    "Count the {thing} of {name}.",
)
OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
}
RESIDUES = {"train": range(0, 8), "tune": (8,), "test": (9,), "test_phrasing": (9,)}
"""Remainders, modulo 10, of the checksum of a question's numbers in each split."""

Curriculum = Sequence[tuple[int, Sequence[float]]]
"""Stages `(first row, shares of one- and two-step questions)`, in order of first row."""

MIX: Curriculum = ((0, (0.6, 0.4)),)
"""One stage: six questions in ten need one operation, four need two."""


def phrasings(held_out: bool) -> list[tuple[str, str]]:
    """Return the pairs of opener and closer that occur in training, or those held out.

    Example: `("", "How many {thing} does {name} have now?")` is held out: the numbers of opener
    and closer (0 and 0) add up to a multiple of 4.
    """
    return [
        (opener, closer)
        for i, opener in enumerate(OPENERS)
        for j, closer in enumerate(CLOSERS)
        if ((i + j) % 4 == 0) == held_out
    ]


def _draw_numbers(
    rng: random.Random, split: str, hops: int
) -> tuple[int, list[tuple[str, int]], int]:
    """Return a question's first number, its steps (operation, number), and its answer.

    Draws until the checksum of the numbers has a remainder of the split. Train, tune and test have
    different remainders, so that no numbers of one are in another.
    """
    while True:
        answer = start = rng.randint(2, 60)
        steps = []
        for _ in range(hops):
            operation = rng.choice(tuple(OPERATIONS))
            number = rng.randint(2, 9 if operation == "multiply" else 40)
            answer = OPERATIONS[operation](answer, number)
            steps.append((operation, number))
        # Odd factors: to change any number by 1 changes the checksum's remainder.
        checksum = 7 * start + sum((11 + 2 * i) * b for i, (_, b) in enumerate(steps))
        if 0 <= answer <= 999 and checksum % 10 in RESIDUES[split]:
            return start, steps, answer


def row(
    split: Data[str], index: int, seed: Data[int], curriculum: Data[Curriculum] = MIX
) -> dict[str, Any]:
    """Return row `index` of a split, drawn from (split, seed, index) alone.

    Example: `{"task_id": "calculator/train/0/3", "messages": [{"role": "user", "content": "Kim
    has 12 coins. Kim loses 5. Count the coins of Kim."}], "answer": "7", "family": "subtract",
    "hops": 1, "start": 12, "steps": [["subtract", 5]]}`, where `hops` is the number of steps.

    `curriculum` lists stages `(first row, (share of one-step questions, of two-step ones))`: with
    `[(0, [1, 0])]` all have one step. Raises ValueError for an unknown split or a curriculum
    without a stage for row 0.
    """
    if split not in RESIDUES:
        raise ValueError(f"split={split!r}: must be one of {', '.join(RESIDUES)}")
    if not curriculum or curriculum[0][0] != 0 or any(len(s) != 2 for _, s in curriculum):
        raise ValueError(
            f"curriculum={curriculum!r}: must be stages [first row, [two shares]], from row 0 on"
        )
    rng = random.Random(f"calculator/{split}/{seed}/{index}")
    stage = [shares for first_row, shares in curriculum if first_row <= index][-1]
    hops = rng.choices((1, 2), weights=stage)[0]
    opener, closer = rng.choice(phrasings(held_out=split == "test_phrasing"))
    start, steps, answer = _draw_numbers(rng, split, hops)
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    clauses = ", then ".join(
        rng.choice(CLAUSES[operation]).format(b=number) for operation, number in steps
    )
    closing = closer.format(thing=thing, name=name)
    story = f"{opener}{name} has {start} {thing}. {name} {clauses}. {closing}"
    return {
        "task_id": f"calculator/{split}/{seed}/{index}",
        "messages": [{"role": "user", "content": story}],
        "answer": str(answer),
        "family": "-".join(operation for operation, _ in steps),
        "hops": hops,
        "start": start,
        "steps": [[operation, number] for operation, number in steps],
    }
