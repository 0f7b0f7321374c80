"""The bundled sight task: a code of colours on a wall, which is read by looking closer.

A picture shows a wall with one or two plates of two coloured cells each, in different quarters. The
prompt holds an overview: the picture in shades of grey and so coarse that a plate is a bright spot,
which says where to look and how many plates there are. The tool `crop` returns a quarter in full,
and the code is the colours of the plates in reading order::

    What is the code?  [overview: spots top right and bottom left]
        crop("top right")      -> [quarter with a red and a blue cell]
        crop("bottom left")    -> [quarter with two green cells]
        final_answer("red blue green green")

There is no other way to the answer: a picture that is blanked leaves the guess of one code among
the 36 of one plate, and the 1,296 of two.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from agenttrain.utils.data_fields import Data

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (225, 40, 35),
    "green": (30, 165, 60),
    "blue": (35, 80, 225),
    "yellow": (240, 215, 40),
    "pink": (245, 130, 200),
    "black": (15, 15, 15),
}
QUARTERS = ("top left", "top right", "bottom left", "bottom right")
"""Quarters in reading order, named as the tool `crop` names them."""
SIDE = 128
"""Pixels of a side of the picture."""
CELL, BORDER = 16, 4
"""Pixels of a side of a cell, and of the white around the two cells of a plate."""
SPOTS = 8
"""Shades of a side of the overview, each of which stands for 16 x 16 pixels of the picture."""
SHOWN = 32
"""Pixels of a side of the overview, and of a quarter that `crop` returns."""
WALLS = {
    "train": range(0, 1_000_000),
    "tune": range(2_000_000, 2_100_000),
    "test": range(3_000_000, 3_100_000),
}
"""Seeds of the walls of each split."""
QUESTIONS = ("What is the code?", "Read the code.", "Which code is on the wall?", "Code, please.")


class Blank(StrEnum):
    """Pictures without content, for measuring what the policy learns without seeing."""

    looks = "looks"
    """The quarters that `crop` returns are blank. The overview is not."""
    all = "all"
    """The overview too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plate:
    """Two coloured cells in a quarter of a picture."""

    quarter: str
    """``top left``, ``bottom right``, …"""
    colours: tuple[str, str]
    left: int
    """Pixels from the quarter's left side."""
    top: int
    """Pixels from its top."""


def plates_of(wall: int) -> tuple[Plate, ...]:
    """Return the one or two plates of the wall with this seed, in reading order.

    Half of the walls have one.
    """
    rng = random.Random(f"sight/{wall}")
    quarters = rng.sample(QUARTERS, rng.randint(1, 2))
    width, height = 2 * CELL + 2 * BORDER, CELL + 2 * BORDER
    return tuple(
        Plate(
            quarter=quarter,
            colours=(rng.choice(tuple(COLOURS)), rng.choice(tuple(COLOURS))),
            left=rng.randint(0, SIDE // 2 - width),
            top=rng.randint(0, SIDE // 2 - height),
        )
        for quarter in sorted(quarters, key=QUARTERS.index)
    )


def code_of(wall: int) -> str:
    """Return the code of a wall, e.g. "red blue green green"."""
    return " ".join(colour for plate in plates_of(wall) for colour in plate.colours)


def draw(wall: int) -> Any:
    """Return the picture of a wall, an image of Pillow's of 128 x 128 pixels."""
    from PIL import Image

    noise = np.random.default_rng(wall)
    tone = noise.integers(50, 80, 3)  # the dark colour of the wall
    pixels = np.clip(tone + noise.integers(-12, 13, (SIDE, SIDE, 1)), 0, 255).astype(np.uint8)
    for plate in plates_of(wall):
        quarter_row, quarter_column = divmod(QUARTERS.index(plate.quarter), 2)
        left = plate.left + SIDE // 2 * quarter_column
        top = plate.top + SIDE // 2 * quarter_row
        # A white plate, and its coloured cells inside a border.
        pixels[top : top + CELL + 2 * BORDER, left : left + 2 * (CELL + BORDER)] = 255
        for number, colour in enumerate(plate.colours):
            x, y = left + BORDER + number * CELL, top + BORDER
            pixels[y : y + CELL, x : x + CELL] = COLOURS[colour]
    return Image.fromarray(pixels)


def overview(picture: Any) -> Any:
    """Return a coarse overview of a picture: 8 x 8 shades of grey on 32 x 32 pixels."""
    from PIL import Image

    coarse = picture.convert("L").resize((SPOTS, SPOTS), Image.Resampling.BOX)
    return coarse.resize((SHOWN, SHOWN), Image.Resampling.NEAREST).convert("RGB")


def look(columns: Mapping[str, Any], part: str) -> Any:
    """Return a quarter of a row's picture in 32 x 32 pixels. It is blank if the row says so."""
    from PIL import Image

    picture = _blank_picture() if columns.get("blank") else draw(int(columns["wall"]))
    half = SIDE // 2
    quarter_row, quarter_column = divmod(QUARTERS.index(part), 2)
    left, top = half * quarter_column, half * quarter_row
    quarter = picture.crop((left, top, left + half, top + half))
    return quarter.resize((SHOWN, SHOWN), Image.Resampling.BOX)


def _blank_picture() -> Any:
    """Return a picture of one tone of grey."""
    from PIL import Image

    return Image.new("RGB", (SIDE, SIDE), (64, 64, 64))


def row(
    split: Data[str], index: int, seed: Data[int], blank: Data[str | None] = None
) -> dict[str, Any]:
    """Return row `index` of a split, drawn from (split, seed, index) alone.

    Example: ``{"task_id": "sight/train/0/3", "messages": [{"role": "user", "content": "What is the
    code?"}], "images": [overview], "answer": "red blue", "plates": 1, "wall": 403122}``. `blank`
    takes the content out of the pictures (`Blank`). Raises ValueError for an unknown split or
    `blank`.
    """
    if split not in WALLS:
        raise ValueError(f"split={split!r}: must be one of {', '.join(WALLS)}")
    if blank is not None and blank not in list(Blank):
        raise ValueError(f"blank={blank!r}: must be one of {', '.join(Blank)}, or null for none")
    rng = random.Random(f"sight/{split}/{seed}/{index}")
    wall = rng.choice(WALLS[split])
    # Blank.all blanks the overview here. Both kinds blank the quarters, in `look`, which reads the
    # column `blank`.
    columns = {
        "task_id": f"sight/{split}/{seed}/{index}",
        "messages": [{"role": "user", "content": rng.choice(QUESTIONS)}],
        "images": [overview(_blank_picture() if blank == Blank.all else draw(wall))],
        "answer": code_of(wall),
        "plates": len(plates_of(wall)),
        "wall": wall,
    }
    return columns if blank is None else {**columns, "blank": str(blank)}
