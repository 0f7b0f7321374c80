"""The bundled retrieval task: questions about the 40 articles of a small made-up encyclopedia.

The articles are in `agenttrain/data/documents/encyclopedia`, one text file each, written by
`articles`. They link a person to a town and a town to a river, so that a question takes one, two or
three look-ups:

    How long is the river of the town where Ada Brenn was born, in kilometres?
        people/ada-brenn.md -> Varholm,  towns/varholm.md -> the Issel,  rivers/issel.md -> 212

Splits share the articles and differ in the article from which a question starts. No model can
answer without searching, because the places do not exist.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agenttrain.utils.data_fields import Data

RIVERS = (
    *("Issel", "Torre", "Maun", "Quill", "Lavant", "Alder Brook"),
    *("Serre", "Wend", "Halla", "Brine", "Corvo", "Nadda"),
)
TOWNS = (
    *("Varholm", "Estrel", "Kirn", "Port Amsel", "Ligna", "Dovrin", "Saltmere"),
    *("Óstara", "Belcourt", "Tamsin", "Gravik", "Monteral", "Wexley", "Yrsa"),
)
PEOPLE = (
    *("Ada Brenn", "Jonas Wilt", "Mira Solano", "Peder Haug", "Lucía Varga", "Tobias Renn"),
    *("Ines Kolar", "Emil Strand", "Nora Fiske", "Casper Dahl", "Rosa Tamm", "Hugo Lind"),
    *("Vera Moss", "Anton Gray"),
)
PRODUCTS = (
    *("blue glass", "smoked cheese", "clock springs", "fishing nets", "violins", "pear cider"),
    *("paper lanterns", "wool blankets", "roof slate", "copper bells", "sea salt", "hazelnuts"),
    *("pocket maps", "candied ginger"),
)
TRADES = (
    *("painter", "botanist", "bridge builder", "poet", "astronomer", "printer", "sailor"),
    *("chess player", "physician", "composer", "geologist", "baker", "weaver", "historian"),
)
SEAS = ("North Sound", "Gulf of Ember", "Bay of Orrin")
INSTRUCTION = "Search the encyclopedia, then hand in the answer alone: a name or a number."
SPLITS = {"train": (0, 1, 2), "test": (3,)}
"""Remainders, modulo 4, of the number of the article from which a question starts."""


@dataclass(frozen=True, slots=True)
class River:
    """Example: ``River("Issel", length=212, sea="North Sound")``"""

    name: str
    length: int
    """Kilometres."""
    sea: str


@dataclass(frozen=True, slots=True)
class Town:
    """An invented town.

    Example: ``Town("Varholm", founded=1342, people=8100, product="sea salt", river=…)``
    """

    name: str
    founded: int
    """Year."""
    people: int
    """Number of inhabitants."""
    product: str
    river: River


@dataclass(frozen=True, slots=True)
class Person:
    """Example: ``Person("Ada Brenn", born=1811, trade="poet", town=…)``"""

    name: str
    born: int
    trade: str
    town: Town


_rng = random.Random("encyclopedia")
# The order of these statements is part of the data: each draws where the one before stopped.
ALL_RIVERS = tuple(River(name, _rng.randint(35, 420), _rng.choice(SEAS)) for name in RIVERS)

ALL_TOWNS = tuple(
    Town(
        name=name,
        founded=_rng.randint(870, 1790),
        people=100 * _rng.randint(9, 640),
        product=product,
        river=_rng.choice(ALL_RIVERS),
    )
    for name, product in zip(TOWNS, _rng.sample(PRODUCTS, len(TOWNS)), strict=True)
)

ALL_PEOPLE = tuple(
    Person(name, _rng.randint(1795, 1955), trade, _rng.choice(ALL_TOWNS))
    for name, trade in zip(PEOPLE, _rng.sample(TRADES, len(PEOPLE)), strict=True)
)

Ask = Callable[[Any], tuple[str, object]]
"""Makes a question and its answer for a person, town or river."""

FAMILIES: Mapping[str, tuple[int, tuple[Any, ...], Ask]] = {
    "founded": (
        *(1, ALL_TOWNS),
        lambda town: (f"In which year was {town.name} founded?", town.founded),
    ),
    "product": (1, ALL_TOWNS, lambda town: (f"What is {town.name} known for?", town.product)),
    "length": (
        *(1, ALL_RIVERS),
        lambda river: (f"How long is the {river.name}, in kilometres?", river.length),
    ),
    "birthplace": (
        *(1, ALL_PEOPLE),
        lambda person: (f"In which town was {person.name} born?", person.town.name),
    ),
    "town-sea": (
        *(2, ALL_TOWNS),
        lambda town: (f"Where does the river of {town.name} end?", town.river.sea),
    ),
    "person-product": (
        *(2, ALL_PEOPLE),
        lambda person: (
            f"What is the town known for where {person.name} was born?",
            person.town.product,
        ),
    ),
    "person-founded": (
        *(2, ALL_PEOPLE),
        lambda person: (
            f"In which year was the town founded where {person.name} was born?",
            person.town.founded,
        ),
    ),
    "person-length": (
        *(3, ALL_PEOPLE),
        lambda person: (
            f"How long is the river of the town where {person.name} was born, in kilometres?",
            person.town.river.length,
        ),
    ),
}
"""By name: the look-ups that a question takes, its possible subjects, and its wording."""


def row(split: Data[str], index: int, seed: Data[int]) -> dict[str, Any]:
    """Return row `index` of a split, drawn from (split, seed, index) alone.

    Example: ``{"task_id": "encyclopedia/train/0/0", "messages": [{"role": "system", …}, {"role":
    "user", "content": "In which year was Saltmere founded?"}], "answer": "1656", "family":
    "founded", "hops": 1}``. Raises ValueError for an unknown split.
    """
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: must be one of {', '.join(SPLITS)}")
    rng = random.Random(f"encyclopedia/{split}/{seed}/{index}")
    family = rng.choice(tuple(FAMILIES))
    hops, subjects, ask = FAMILIES[family]
    # The splits share the articles, and differ in those from which a question starts.
    eligible = [subject for i, subject in enumerate(subjects) if i % 4 in SPLITS[split]]
    question, answer = ask(rng.choice(eligible))
    return {
        "task_id": f"encyclopedia/{split}/{seed}/{index}",
        "messages": [
            {"role": "system", "content": INSTRUCTION},
            {"role": "user", "content": question},
        ],
        "answer": str(answer),
        "family": family,
        "hops": hops,
    }


def articles() -> dict[str, str]:
    """Return the texts of all articles by file name, which the bundled folder holds too.

    Example: ``articles()["rivers/issel.md"]`` begins with ``# Issel``.
    """
    texts = {}
    for river in ALL_RIVERS:
        towns = [town.name for town in ALL_TOWNS if town.river == river]
        along = f"It passes {_enumerate(towns)}." if towns else "No town stands on its banks."
        texts[f"rivers/{_slug(river.name)}.md"] = (
            f"# {river.name}\n\nThe {river.name} is a river. It is {river.length} kilometres long "
            f"and ends in the {river.sea}. {along}\n"
        )
    for town in ALL_TOWNS:
        natives = [person.name for person in ALL_PEOPLE if person.town == town]
        born = f" {_enumerate(natives)} came from here." if natives else ""
        texts[f"towns/{_slug(town.name)}.md"] = (
            f"# {town.name}\n\n{town.name} is a town on the river {town.river.name}. It was "
            f"founded in {town.founded} and has {town.people} inhabitants. It is known for its "
            f"{town.product}.{born}\n"
        )
    for person in ALL_PEOPLE:
        texts[f"people/{_slug(person.name)}.md"] = (
            f"# {person.name}\n\n{person.name} (born {person.born} in {person.town.name}) was a "
            f"{person.trade}. A street in {person.town.name} bears the name.\n"
        )
    return texts


def _slug(name: str) -> str:
    """Return a name as a file name: ``Óstara`` -> ``ostara``."""
    plain = name.casefold().replace("ó", "o").replace("í", "i")
    return plain.replace(" ", "-")


def _enumerate(names: list[str]) -> str:
    """Return the names as a list in a sentence: ``Kirn, Wexley and Yrsa``."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
