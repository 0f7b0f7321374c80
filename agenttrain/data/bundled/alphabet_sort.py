"""The alphabet-sort task: a list of names that grows turn by turn and stays sorted.

    user       Sort these names by LAST name: LeoWilt, AdaBrenn
    assistant  <alphabetical_sorted>\\nAdaBrenn\\nLeoWilt\\n</alphabetical_sorted>
    user       Add these names: MiraMoss …
    assistant  <combined_alphabetical_sorted>\\nAdaBrenn\\nMiraMoss // new name!\\nLeoWilt\\n</…>

The rules are those of `alphabet-sort` of verifiers as prime-rl's example sets them: three turns,
one to four names a turn, by first or last name, names of the turn are marked. There the names are
those of authors on arXiv; here they are put together from two lists, so that rows need no network.

Splits differ in their pairs of first and last name: the sum of their numbers decides.
"""

from __future__ import annotations

import random
from typing import Any

from agenttrain.utils.data_fields import Data

FIRST_NAMES = (
    *("Ada", "Anton", "Bea", "Carl", "Dana", "Edith", "Emil", "Fay", "Gina", "Hugo", "Ines"),
    *("Ivan", "Jonas", "Kira", "Leo", "Lucia", "Max", "Mira", "Nora", "Olga", "Otto", "Peder"),
    *("Quinn", "Rosa", "Sami", "Tara", "Tobias", "Uma", "Vera", "Wanda", "Yann", "Zoe"),
)
LAST_NAMES = (
    *("Adler", "Berg", "Brenn", "Castro", "Dahl", "Engel", "Fiske", "Gray", "Haug", "Ibsen"),
    *("Jansen", "Kolar", "Lind", "Moss", "Nagy", "Okoye", "Park", "Quist", "Rossi", "Solano"),
    *("Strand", "Tamm", "Ueda", "Varga", "Wilt", "Xu", "Yilmaz", "Zeller"),
)
RESIDUES = {"train": (0, 1, 2, 3), "test": (4,)}
"""Remainders, modulo 5, of the sum of a pair's positions in the two lists in each split."""
MARK = " // new name!"
FIRST_TAG, LATER_TAG = "alphabetical_sorted", "combined_alphabetical_sorted"
"""Tags of the list in the first turn, and in all later ones."""


def row(
    split: Data[str],
    index: int,
    seed: Data[int],
    turns: Data[int] = 3,
    fewest: Data[int] = 1,
    most: Data[int] = 4,
) -> dict[str, Any]:
    """Return row `index` of a split: `turns` turns of `fewest` to `most` names each.

    It is drawn from (split, seed, index) alone. Example: ``{"task_id": "alphabet_sort/train/0/3",
    "messages": [{"role": "user", …}], "user_turns": ["…", "…"], "answers": ["AdaBrenn\\nLeoWilt",
    "AdaBrenn\\nMiraMoss // new name!\\nLeoWilt", …], "family": "last"}``. Raises ValueError for an
    unknown split or impossible bounds.
    """
    if split not in RESIDUES:
        raise ValueError(f"split={split!r}: must be one of {', '.join(RESIDUES)}")
    if turns < 1 or not 1 <= fewest <= most or turns * most > len(LAST_NAMES):
        raise ValueError(
            f"turns={turns}, fewest={fewest}, most={most}: must be 1 or more, fewest not above "
            f"most, and turns * most at most {len(LAST_NAMES)}, the number of last names"
        )
    rng = random.Random(f"alphabet_sort/{split}/{seed}/{index}")
    sorted_by = rng.choice(("first", "last"))
    counts = [rng.randint(fewest, most) for _ in range(turns)]
    pairs = _draw_pairs(rng, sum(counts), split)
    requests: list[str] = []
    answers: list[str] = []
    names: list[tuple[str, str]] = []  # (first, last) name of everybody so far
    for count in counts:
        new_names = pairs[len(names) : len(names) + count]
        names += new_names
        requests.append(_request(len(requests), sorted_by, ["".join(name) for name in new_names]))
        ordered = sorted(names, key=lambda name: name[0 if sorted_by == "first" else 1])
        answers.append(
            "\n".join(
                "".join(name) + (MARK if name in new_names and len(requests) > 1 else "")
                for name in ordered
            )
        )
    return {
        "task_id": f"alphabet_sort/{split}/{seed}/{index}",
        "messages": [{"role": "user", "content": requests[0]}],
        "user_turns": requests[1:],
        "answers": answers,
        "family": sorted_by,
    }


def tagged(turn: int, names: str) -> str:
    """Return a list of names in the tags of a turn, counted from 0."""
    tag = LATER_TAG if turn else FIRST_TAG
    return f"<{tag}>\n{names}\n</{tag}>"


def _draw_pairs(rng: random.Random, count: int, split: str) -> list[tuple[str, str]]:
    """Draw pairs of first and last name of a split; no name of either kind occurs twice."""
    while True:
        firsts = rng.sample(range(len(FIRST_NAMES)), count)
        lasts: list[int] = []
        for first in firsts:
            choices = [
                last
                for last in range(len(LAST_NAMES))
                if last not in lasts and (first + last) % 5 in RESIDUES[split]
            ]
            if not choices:
                break  # the last names that would fit are taken: draw again
            lasts.append(rng.choice(choices))
        else:
            return [
                (FIRST_NAMES[first], LAST_NAMES[last])
                for first, last in zip(firsts, lasts, strict=True)
            ]


def _request(turn: int, sorted_by: str, names: list[str]) -> str:
    """Return what the user asks in a turn, counted from 0: to sort by `first` or `last` name."""
    listed = ", ".join(names)
    if turn == 0:
        example = tagged(0, "NameOne\nNameTwo")
        request = f"Sort these names by {sorted_by.upper()} name: {listed}"
        return f"{request}\n\nAnswer like this:\n{example}"
    request = f"Sort them again by {sorted_by.upper()} name, together with these: {listed}"
    if turn > 1:
        return f"{request}\n\nAnswer in the same way."
    example = tagged(1, f"NameOne\nNameThree{MARK}\nNameTwo")
    return (
        f"{request}\n\nMark the names of this message with `{MARK.strip()}`, like this:\n{example}"
    )
