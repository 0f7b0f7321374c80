"""JSON as its standard has it: without Python's NaN and Infinity, and numbers beyond floats."""

from __future__ import annotations

import json
import math
from typing import Any


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is beyond the range of floats")
    return value


STRICT = json.JSONDecoder(parse_constant=_no_number, parse_float=_finite)


def read_json(text: str | bytes) -> Any:
    """Parse JSON without Python's NaN and Infinity, which no answer could repeat.

    Raises ValueError or RecursionError.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", "surrogatepass")
    return STRICT.decode(text)
