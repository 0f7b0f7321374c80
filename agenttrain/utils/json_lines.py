"""JSON as its standard has it, without NaN, infinities and numbers beyond floats; and its lines."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


def dumps(value: Any) -> str:
    """Return one line of JSON. NaN and the infinities, which JSON does not have, become null."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(finite(value), allow_nan=False, separators=(",", ":"))


def finite(value: Any) -> Any:
    """Return `value` with None in the place of NaN and the infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


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


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file, without a last line that a crash has cut.

    Raises ValueError, with file and line, for any other line that is not an object.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line.decode())
            except ValueError as error:
                raise ValueError(f"{path}:{number}: not JSON ({error})") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: a {type(row).__name__}, not an object")
            yield row


def open_to_append(path: Path) -> IO[str]:
    """Open a JSON-lines file, made with its folder if needed, to append whole lines.

    Each line goes to the operating system when it is written. A last line that was cut by a crash
    is removed first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        content = path.read_bytes()
        if content and not content.endswith(b"\n"):
            with path.open("rb+") as file:
                file.truncate(content.rfind(b"\n") + 1)
    return path.open("a", buffering=1, encoding="utf-8")
