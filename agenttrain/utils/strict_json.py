"""JSON as its standard has it: without Python's NaN and Infinity, and numbers beyond floats."""

from __future__ import annotations

import json
import math
from typing import Any


def refuse_constant(name: str) -> Any:
    """Raise ValueError for NaN or Infinity: a `parse_constant` of decoders."""
    raise ValueError(f"{name} is not a JSON number")


def finite_float(literal: str) -> float:
    """Return a number that floats can hold, else raise ValueError: a `parse_float` of decoders."""
    number = float(literal)
    return number if math.isfinite(number) else refuse_constant(literal)


STRICT = json.JSONDecoder(parse_constant=refuse_constant, parse_float=finite_float)


def read_json(text: str | bytes) -> Any:
    """Parse JSON without Python's NaN and Infinity, which no answer could repeat.

    Raises ValueError or RecursionError.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", "surrogatepass")
    return STRICT.decode(text)
